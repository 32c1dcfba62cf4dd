"""Finds the kernel of a launcher: its text, and its binary if it was compiled ahead of time.

Texts: generated/ holds the kernels that tables name. All others are rendered in memory when they
are first needed.

Binaries: FLASHGEN_AOT names a folder written by `flashgen aot`, with one folder per GPU. When a
kernel is first bound, its binaries are copied into Triton's cache under Triton's own key: text,
types, options, architecture and version. If anything differs, the binary is not found, and the
kernel is compiled as usual.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import json
import logging
import os
import stat
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashgen import settings
from flashgen.errors import GeneratedError, InvalidArgument
from flashgen.files import write_whole
from flashgen.kernels import interpreter, launch
from flashgen.kernels.loader import load_text
from flashgen.runtime import registry
from flashgen.runtime.choice import Choice
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.config import KernelConfig, kernel_name

if TYPE_CHECKING:
    from flashgen.kernels.render import Rendered

logger = logging.getLogger("flashgen.runtime")

MANIFEST = "manifest.json"
SCHEMA = 2


@dataclass(frozen=True, kw_only=True)
class Binary:
    """One kernel in a GPU's folder: Triton's key, and the files it stores under it."""

    key: str
    files: tuple[Path, ...]


def offer(name: str) -> int:
    """Put the binaries of the kernel `name` into Triton's cache, unless they are there; how many.

    Does nothing where FLASHGEN_AOT is not set. Raises InvalidArgument where it names no folder that
    `flashgen aot` made.
    """
    folder = settings.aot_folder()
    if folder is None:
        return 0
    return sum(_install(binary) for binary in binaries(folder).get(name, ()))


@functools.cache
def binaries(folder: Path) -> dict[str, list[Binary]]:
    """The binaries of a folder that this Triton can run, by kernel, whatever the architecture."""
    import triton

    found: dict[str, list[Binary]] = {}
    paths = sorted(folder.glob(f"*/{MANIFEST}"))
    if not paths:
        raise InvalidArgument(f"FLASHGEN_AOT must name a folder that `flashgen aot` made: {folder}")
    for path in paths:
        manifest = _read(path)
        if manifest["triton"] != triton.__version__:
            logger.warning(
                "%s is of Triton %s, and this is %s: kernels are compiled when first called",
                path.parent,
                manifest["triton"],
                triton.__version__,
            )
            continue
        for name, kernels in manifest["kernels"].items():
            for kernel in kernels:
                files = tuple(path.parent / kernel["key"] / file for file in kernel["files"])
                found.setdefault(name, []).append(Binary(key=kernel["key"], files=files))
    return found


def _read(path: Path) -> dict[str, Any]:
    try:
        manifest: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if manifest["schema"] == SCHEMA and isinstance(manifest["triton"], str):
            for kernel in itertools.chain.from_iterable(manifest["kernels"].values()):
                bytes.fromhex(kernel["key"]), tuple(kernel["files"])
            return manifest
        problem = f"schema {manifest['schema']}"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        problem = f"{type(error).__name__}: {error}"
    raise InvalidArgument(
        f"{path} must be a manifest of schema {SCHEMA} ({problem}): run flashgen aot again"
    )


def _install(binary: Binary) -> bool:
    """Put a binary where Triton's cache manager stores that key. A missing file is a notice."""
    from triton.runtime.cache import get_cache_manager

    manager = get_cache_manager(binary.key)
    metadata = next(path.name for path in binary.files if path.suffix == ".json")
    if metadata in (manager.get_group(metadata) or {}):
        return False
    try:
        contents = {path.name: path.read_bytes() for path in binary.files}
    except OSError as error:
        logger.warning("%s; the kernel is compiled when first called", error)
        return False
    group = {name: manager.put(content, name) for name, content in contents.items()}
    manager.put_group(metadata, group)
    return True


def kernel(package: str, choice: Choice, config: KernelConfig) -> launch.Kernel:
    """The kernel of choice.spec and `config`: the file of the package `package`, or for a choice
    that is no entry of a table and has no file, the kernel that its templates render.

    Raises GeneratedError where the file of an entry is missing.
    """
    interpreter.prepare()
    name = kernel_name(choice.spec, config)
    if not interpreter.active():
        offer(name)
    wanted = f"{package}.kernels.{name}"
    try:
        module = importlib.import_module(wanted)
    except ModuleNotFoundError as error:
        if not registry.is_missing(wanted, error):
            raise  # the file is there, and lacks a module of its own
        if not choice.is_entry:
            return rendered(choice.spec, config)
        raise GeneratedError(
            f"{package}/kernels/{name}.py is missing; run: flashgen generate"
        ) from error
    return launch.kernel_of(module, name)


_rendered: dict[str, launch.Kernel] = {}
_rendering = threading.Lock()


def rendered(spec: AttentionSpec, config: KernelConfig) -> launch.Kernel:
    """The kernel of (spec, config), rendered in memory; one of each digest a process."""
    from flashgen.kernels.render import render  # loads jinja2

    with _rendering:
        made = render(spec, config)
        if made.digest not in _rendered:
            _keep(made)
            _rendered[made.digest] = load_text(made.source, made.name, made.digest)
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
        if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
            raise InvalidArgument(
                f"FLASHGEN_KEEP_KERNELS must name a folder of yours with mode 0700: {folder} has "
                f"owner {found.st_uid} and mode {stat.S_IMODE(found.st_mode):04o}"
            )
        number = made.digest.removeprefix("sha256:")
        write_whole(folder / f"{made.name}-{number[:16]}.py", made.source)
    except OSError as error:
        raise InvalidArgument(
            f"FLASHGEN_KEEP_KERNELS must name a folder that can be written: {folder} cannot be "
            f"({error.strerror})"
        ) from error
