"""Finds the kernel of a launcher: its text, and its binary if it was compiled ahead of time.

Texts: generated/ holds the kernels that tables name. All others are rendered in memory when they
are first needed.

Binaries: FLASHGEN_AOT names a folder written by `flashgen aot`, with one folder per GPU. When a
kernel is first bound, its binaries are copied into Triton's cache under Triton's own key: text,
types, options, architecture and version. If anything differs, the binary is not found, and the
kernel is compiled as usual. Each file must have the sha256 in the manifest: a damaged one is left
out. That finds damage and no malice: whoever writes the folder decides what runs.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import logging
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from flashgen import settings
from flashgen.errors import GeneratedError, InvalidArgument
from flashgen.files import content_of, write_whole
from flashgen.kernels import interpreter, launch
from flashgen.kernels.loader import is_missing, kernel_of, load_text, lock_of_loading
from flashgen.kernels.text import text_name
from flashgen.runtime.choice import Choice
from flashgen.schedules.config import KernelConfig, kernel_name
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.records import parsed, record_of, value_of

if TYPE_CHECKING:
    from flashgen.kernels.render import Rendered

logger = logging.getLogger("flashgen.runtime")

MANIFEST = "manifest.json"
SCHEMA = 2
"""Of the manifest; those of schema 1 had no sha256 and are refused."""

_FILE = re.compile(r"\w[\w.-]{0,250}\.(json|cubin|hsaco)", re.ASCII)
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, kw_only=True)
class Binary:
    """One kernel in a GPU's folder: Triton's key, and the sha256 of each file that Triton stores
    under it.
    """

    key: str
    files: dict[str, Any]

    def __post_init__(self) -> None:
        suffixes = sorted(Path(name).suffix for name in self.files)
        named = all(_FILE.fullmatch(name) for name in self.files)
        if not named or len(suffixes) != 2 or ".json" not in suffixes:
            raise InvalidArgument("files must be metadata (.json) and one binary")
        if not all(_SHA256.fullmatch(str(each)) for each in (self.key, *self.files.values())):
            raise InvalidArgument("the key and each file must have a sha256 of 64 hex digits")


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a GPU's folder holds: the binaries by the names of their kernels."""

    schema: int
    gpu: str
    arch: str
    triton: str
    kernels: dict[str, tuple[Binary, ...]]

    def __post_init__(self) -> None:
        if not self.triton.isprintable():
            raise InvalidArgument(f"triton must be printable text on one line: got {self.triton!r}")


def offer(name: str) -> int:
    """Put the binaries of the kernel `name` into Triton's cache, unless they are there; how many.

    Does nothing where FLASHGEN_AOT is not set. Raises InvalidArgument where it names no folder that
    `flashgen aot` made.
    """
    folder = settings.aot_folder()
    if folder is None:
        return 0
    return sum(_install(*binary) for binary in binaries(folder).get(name, ()))


@functools.cache
def binaries(folder: Path) -> dict[str, list[tuple[Path, Binary]]]:
    """The binaries of a folder that this Triton can run, by kernel, whatever the architecture; each
    with the folder of its files.
    """
    import triton

    found: dict[str, list[tuple[Path, Binary]]] = {}
    paths = sorted(folder.glob(f"*/{MANIFEST}"))
    if not paths:
        raise InvalidArgument(f"FLASHGEN_AOT must name a folder that `flashgen aot` made: {folder}")
    for path in paths:
        manifest = _read(path)
        if manifest.triton != triton.__version__:
            logger.warning(
                "%s is of Triton %s, and this is %s: kernels are compiled when first called",
                path.parent,
                manifest.triton,
                triton.__version__,
            )
            continue
        for name, held in manifest.kernels.items():
            found.setdefault(name, []).extend((path.parent / each.key, each) for each in held)
    return found


def _read(path: Path) -> Manifest:
    """The manifest of a file. Raises InvalidArgument."""
    try:
        record = value_of(dict[str, Any], parsed(content_of(path)), "the manifest")
        if record.get("schema") != SCHEMA:
            raise ValueError(f"schema {record.get('schema')!r}")
        return record_of(Manifest, record, "the manifest")
    except (OSError, ValueError) as error:
        raise InvalidArgument(
            f"{path} must be a manifest of schema {SCHEMA} ({error}): run flashgen aot again"
        ) from None


def _install(folder: Path, binary: Binary) -> bool:
    """Put a binary where Triton's cache manager stores that key. Whole or not at all: a file that
    is missing or damaged is a warning, and so is a cache that cannot be written.
    """
    from triton.runtime.cache import get_cache_manager

    metadata = next(name for name in binary.files if name.endswith(".json"))
    try:
        manager = get_cache_manager(binary.key)
        if metadata in (manager.get_group(metadata) or {}):
            return False
        contents = {name: (folder / name).read_bytes() for name in binary.files}
        for name, content in contents.items():
            if hashlib.sha256(content).hexdigest() != binary.files[name]:
                raise OSError(f"{folder / name} is damaged, its sha256 is not the manifest's")
        group = {name: manager.put(content, name) for name, content in contents.items()}
        manager.put_group(metadata, group)
    except OSError as error:
        logger.warning("%s; the kernel is compiled when first called", error)
        return False
    return True


def kernel(package: str, choice: Choice, config: KernelConfig) -> launch.Kernel:
    """The kernel of choice.spec and `config`: the file of the package `package`, or for a choice
    that is no entry of a table and has no file, the kernel that its templates render.

    Raises GeneratedError where the file of an entry is missing.
    """
    interpreter.prepare()
    name, text = kernel_name(choice.spec, config), text_name(choice.spec, config)
    if not interpreter.active():
        offer(name)
    wanted = f"{package}.kernels.{text}"
    try:
        module = importlib.import_module(wanted)
    except ModuleNotFoundError as error:
        if not is_missing(wanted, error):
            raise  # the file is there, and lacks a module of its own
        if not choice.is_entry:
            return rendered(choice.spec, config)
        raise GeneratedError(
            f"{package}/kernels/{text}.py is missing; run: flashgen generate"
        ) from error
    with _loading:
        if (module, name) not in _imported:
            _imported[module, name] = kernel_of(module, text, name)
        return _imported[module, name]


_imported: dict[tuple[ModuleType, str], launch.Kernel] = {}
_rendered: dict[str, launch.Kernel] = {}
_loading = lock_of_loading()


def rendered(spec: AttentionSpec, config: KernelConfig) -> launch.Kernel:
    """The kernel of (spec, config), rendered in memory; one of each digest a process."""
    from flashgen.kernels.render import render  # loads jinja2

    with _loading:
        made = render(spec, config)
        if made.digest not in _rendered:
            _keep(made)
            _rendered[made.digest] = load_text(made)
            logger.info("%s was rendered from %s", made.name, made.template)
        return _rendered[made.digest]


def _keep(made: Rendered) -> None:
    """Copy the text to the folder that FLASHGEN_KEEP_KERNELS names, for people to read; flashgen
    does not read it. Raises InvalidArgument unless the folder is this user's alone.
    """
    folder = settings.kept_kernels()
    if folder is None:
        return
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
        posix = hasattr(os, "getuid")  # elsewhere modes say nothing
        if posix and (found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077):
            raise InvalidArgument(
                f"FLASHGEN_KEEP_KERNELS must name a folder of yours with mode 0700: {folder} has "
                f"owner {found.st_uid} and mode {stat.S_IMODE(found.st_mode):04o}"
            )
        number = made.text_digest.removeprefix("sha256:")
        write_whole(folder / f"{made.text_name}-{number[:16]}.py", made.source)
    except OSError as error:
        raise InvalidArgument(
            f"FLASHGEN_KEEP_KERNELS must name a folder that can be written: {folder} cannot be "
            f"({error.strerror})"
        ) from error
