"""Ahead: binaries that `flashgen aot` made, offered to Triton before it would compile.

FLASHGEN_AOT names a folder that holds one folder for each GPU it was made for. When a kernel is
first bound, its binaries are put into Triton's cache under the key that Triton itself gave them.
Triton looks a kernel up by that key, of text, types, options, architecture and its own version: a
binary of anything else is never found, and the kernel is compiled as ever. So a wrong folder costs
time and nothing else; but what lies there is run, so let nobody else write to it.
"""

from __future__ import annotations

import functools
import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashgen import settings
from flashgen.errors import InvalidArgument

logger = logging.getLogger("flashgen.runtime")

MANIFEST = "manifest.json"
SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class Binary:
    """One kernel of one GPU's folder: Triton's key, and the files it keeps under it."""

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
        for name, kernel in manifest["kernels"].items():
            files = tuple(path.parent / kernel["key"] / file for file in kernel["files"])
            found.setdefault(name, []).append(Binary(key=kernel["key"], files=files))
    return found


def _read(path: Path) -> dict[str, Any]:
    try:
        manifest: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if manifest["schema"] == SCHEMA and isinstance(manifest["triton"], str):
            for kernel in manifest["kernels"].values():
                bytes.fromhex(kernel["key"]), tuple(kernel["files"])
            return manifest
        problem = f"schema {manifest['schema']}"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        problem = f"{type(error).__name__}: {error}"
    raise InvalidArgument(
        f"{path} must be a manifest of schema {SCHEMA} ({problem}): run flashgen aot again"
    )


def _install(binary: Binary) -> bool:
    """Put a binary where Triton's cache manager keeps that key. A file that is gone is a notice."""
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
