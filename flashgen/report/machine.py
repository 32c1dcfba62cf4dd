"""Facts of this machine for `flashgen doctor`: versions, compiler, folders, tables."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shlex
import shutil
import sys
import sysconfig
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import flashgen
from flashgen import paths, settings
from flashgen.runtime.folders import why_not_generated
from flashgen.runtime.selection import relatives
from flashgen.spec.gpu import NAMED, TARGETS, Gpu, product_of

PACKAGES = ("torch", "triton", "numpy", "numba", "optuna", "nvidia-ml-py")
"""Their versions decide what compiles, is estimated, searched and read from the driver."""

VARIABLES = ("FLASHGEN_", "TRITON_", "CUDA_VISIBLE_DEVICES", "CC", "LD_LIBRARY_PATH")
"""Beginnings of the environment variables that change what flashgen does."""


class Fact(NamedTuple):
    """One line: a name and a value. remedy: what to do where the value is a problem, else ""."""

    name: str
    value: str
    remedy: str = ""


def versions() -> Iterator[Fact]:
    """Of flashgen, Python, the system and the packages that matter."""
    known = {
        "flashgen": f"{flashgen.__version__}, {_place()}",
        "python": f"{platform.python_version()}, {sys.executable}",
        "system": platform.platform(),
    }
    for name, value in (known | {name: _version(name) for name in PACKAGES}).items():
        yield Fact(name, value)


def _place() -> str:
    return "wheel" if (paths.PACKAGE / "_templates").is_dir() else f"checkout {paths.ROOT}"


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except Exception:  # also a broken installation, which raises other errors
        return "not installed"


def environment() -> Iterator[Fact]:
    """The variables that are set."""
    for name in sorted(os.environ):
        if name.startswith(VARIABLES[:2]) or name in VARIABLES[2:]:
            yield Fact(name, os.environ[name])


KERNEL_DRIVER = Path("/proc/driver/nvidia/version")


def driver() -> str:
    """The version of NVIDIA's kernel driver; "" if none is loaded."""
    try:
        return KERNEL_DRIVER.read_text().splitlines()[0].partition(":")[2].strip()
    except (OSError, IndexError):
        return ""


def toolchain() -> Iterator[Fact]:
    """The C compiler and the headers with which Triton builds its launcher."""
    named = os.environ.get("CC")
    command = (shlex.split(named) or [""])[0] if named else "gcc"
    found = shutil.which(command) or (None if named else shutil.which("clang"))
    remedy = ""
    if found is None:
        found = f"none: CC is {named}" if named else "none"
        remedy = "install gcc or clang, or set CC: Triton needs it at a kernel's first launch"
    yield Fact("C compiler", found, remedy)
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    missing = "" if header.is_file() else "install the headers of Python (python3-dev)"
    value = f"{'' if header.is_file() else 'no '}{header}"
    yield Fact("headers", value, missing)


def folders(out: Path) -> Iterator[Fact]:
    """The folders that are written: Triton's cache, this folder's state, temporary files."""
    home = os.environ.get("TRITON_HOME") or os.path.expanduser("~")
    cache = os.environ.get("TRITON_CACHE_DIR") or os.path.join(home, ".triton", "cache")
    yield _folder("Triton's cache", Path(cache), "set TRITON_CACHE_DIR to")
    yield _folder("results", paths.state_dir(out), "name with --out")
    try:
        yield _folder("temporary", Path(tempfile.gettempdir()), "set TMPDIR to", private=False)
    except OSError as error:
        why, remedy = f"none ({error.strerror})", "set TMPDIR to a folder that can be written"
        yield Fact("temporary", why, remedy)


def _folder(name: str, path: Path, how: str, *, private: bool = True) -> Fact:
    """Whether a folder can be written, and is written by nobody else: Triton loads libraries from
    its cache.
    """
    remedy, words = "", [str(path)]
    try:
        there = next(each for each in (path, *path.parents) if each.exists())
        if there != path:
            words.append("not there yet")
        if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
            words.append("cannot be written")
            remedy = f"{how} a folder that can be written"
        elif there == path and private and (why := _shared(path)):
            words.append(why)
            remedy = f"{how} a folder that is yours alone: chmod go-w, or another one"
    except OSError as error:
        words.append(f"cannot be read ({error.strerror})")
        remedy = f"{how} a folder that can be read and written"
    return Fact(name, ", ".join(words), remedy)


def _shared(path: Path) -> str:
    """Who else may write to a folder; "" for nobody."""
    if not hasattr(os, "getuid"):  # Windows, where modes say nothing
        return ""
    found = path.stat()
    if found.st_uid not in (os.getuid(), 0):
        return "belongs to another user"
    return "others may write to it" if found.st_mode & 0o022 else ""


def tables(gpu: Gpu | None) -> Iterator[Fact]:
    """Which table serves `gpu`, from where, and the command that makes it better."""
    from flashgen.table.table_file import load_folders

    found = load_folders(paths.shipped_configs_dir())
    slug = settings.served_gpu() or (gpu.slug if gpu else None)
    yield Fact("table", _serving(found, slug, gpu))
    folder = settings.generated_override() or paths.shipped_generated_dir()
    problem = why_not_generated(folder)
    remedy = "run flashgen generate" if problem else ""
    yield Fact("serves", problem or str(folder), remedy)
    if gpu and gpu.without_tensor_cores:
        return
    here = gpu or slug in NAMED  # nothing is estimated for these
    command = "flashgen tune --gpu" if here else f"flashgen tune --target {slug or 'SLUG'}"
    if slug and _own(found, slug) is None:
        command += " --from-tables"
    yield Fact("to improve", command)


def _serving(found: Mapping[str, Any], slug: str | None, gpu: Gpu | None) -> str:
    """The table of a slug and what it holds; else whose entries serve."""
    if slug is None:
        return f"none: there is no GPU; {len(found)} GPUs have one (flashgen targets)"
    own = _own(found, slug)
    if own is not None:
        return f"{own}, {_contents(found[own])}"
    archs = {name: table.gpu.arch for name, table in found.items()}
    served = gpu or TARGETS.get(slug) or NAMED.get(slug)
    order = relatives(archs, slug, served) if served else []
    lent = "default kernels serve"
    if served and order:
        near = found[order[0]].gpu
        lent = f"the entries of {order[0]} serve, the most like it: {near.arch}, {near.sms} SMs"
    return f"none for {slug}: {lent}"


def _own(found: Mapping[str, Any], slug: str) -> str | None:
    """The slug of a GPU's own table, if it has one."""
    return next((name for name in (slug, product_of(slug)) if name in found), None)


def _contents(table: Any) -> str:
    """The entries of a table by source, and the versions that made them."""
    sources = Counter(entry.result.source for entry in table.entries)
    counts = ", ".join(f"{count} {source}" for source, count in sources.items())
    triton = ", ".join(dict.fromkeys(run.triton for run in table.runs))
    donors = dict.fromkeys(run.donor for run in table.runs if run.donor in TARGETS)
    named = ", ".join(donors) if len(donors) < 4 else f"{len(donors)} other tables"
    lent = f", lent by {named}" if donors else ""
    return f"{len(table.entries)} entries ({counts}){lent}, Triton {triton or 'unknown'}"
