"""Compiles functions by numba, whose cache holds machine code and pickles: a folder that others may
write is not used.
"""

# numba has no types for mypy.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba


def jit(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, compiled when it is first called; from numba's cache if that is private.

    numba stores in __pycache__ beside the module, or else in the folder of NUMBA_CACHE_DIR or of
    XDG_CACHE_HOME. Where it may not be used, or there is none, each process compiles anew.
    """
    try:
        compiled = numba.njit(cache=True)(function)
        folder = Path(compiled.stats.cache_path)
    except (RuntimeError, OSError):  # no folder that can be written
        return numba.njit(function)
    beside = folder == Path(function.__code__.co_filename).parent / "__pycache__"
    return compiled if beside or _is_private(folder) else numba.njit(function)


def _is_private(folder: Path) -> bool:
    """Whether nobody but this user can write the folder, wherever the process runs."""
    if not folder.is_absolute() or not hasattr(os, "getuid"):
        return False
    try:
        found = folder.stat()
    except OSError:
        return False
    return found.st_uid == os.getuid() and not stat.S_IMODE(found.st_mode) & 0o022
