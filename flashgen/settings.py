"""The environment variables of flashgen, read here and nowhere else."""

from __future__ import annotations

import functools
import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flashgen.errors import InvalidArgument


def configs_override() -> Path | None:
    """FLASHGEN_CONFIGS: the folder of tables that the tool reads and writes instead of the
    shipped one.
    """
    value = os.environ.get("FLASHGEN_CONFIGS")
    return Path(value) if value else None


def generated_override() -> Path | None:
    """FLASHGEN_GENERATED: the folder that serves in place of the shipped generated/."""
    value = os.environ.get("FLASHGEN_GENERATED")
    return Path(value) if value else None


def served_gpu() -> str | None:
    """FLASHGEN_GPU: the slug whose table serves, whatever the GPU."""
    return os.environ.get("FLASHGEN_GPU") or None


def aot_folder() -> Path | None:
    """FLASHGEN_AOT: a folder of binaries from `flashgen aot`, for the runtime."""
    value = os.environ.get("FLASHGEN_AOT")
    return Path(value) if value else None


def kept_kernels() -> Path | None:
    """FLASHGEN_KEEP_KERNELS: the folder that takes a copy of every kernel that is rendered when it
    is first needed.
    """
    value = os.environ.get("FLASHGEN_KEEP_KERNELS")
    return Path(value) if value else None


@functools.cache
def compiling_triton() -> str:
    """The version of Triton that compiles kernels here, like 3.7; "" where none does."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        number = re.match(r"[0-9]+\.[0-9]+", version("triton"))
    except PackageNotFoundError:
        return ""
    return number[0] if number and not interpreting() else ""


def plain_kernels() -> bool:
    """FLASHGEN_PLAIN: 1 leaves out kernels in Gluon and of schedule auto, which are Triton's
    experimental parts. Read when tables are loaded.
    """
    return os.environ.get("FLASHGEN_PLAIN") == "1"


def invariant() -> bool:
    """FLASHGEN_INVARIANT: 1 makes every call invariant, as attention(..., invariant=True)."""
    return os.environ.get("FLASHGEN_INVARIANT") == "1"


def invariant_vllm() -> bool:
    """VLLM_BATCH_INVARIANT, vLLM's own: 1 asks its backends for batch invariance."""
    return os.environ.get("VLLM_BATCH_INVARIANT") == "1"


def direct_launch() -> bool:
    """FLASHGEN_DIRECT: 0 leaves every launch to Triton's own launcher, for comparison."""
    return os.environ.get("FLASHGEN_DIRECT") != "0"


def workspace_bytes() -> int:
    """FLASHGEN_WORKSPACE_MB: the most memory that gradients by dS take beside their results, on a
    device and stream, in units of 2^20 bytes; 256 unless it is set.

    Raises InvalidArgument unless it is a whole number from 0 on.
    """
    value = os.environ.get("FLASHGEN_WORKSPACE_MB") or "256"
    if not re.fullmatch(r"[0-9]{1,9}", value):
        raise InvalidArgument(f"FLASHGEN_WORKSPACE_MB must be a whole number: got {value!r}")
    return int(value) << 20


def serving() -> tuple[object, object, object]:
    """The part of the environment that decides how a call is served, FLASHGEN_GPU, FLASHGEN_DIRECT
    and FLASHGEN_INVARIANT, as a value to compare.

    It is read at every call and takes a thirtieth of the time of os.environ.get.
    """
    return _RAW.get(_GPU), _RAW.get(_DIRECT), _RAW.get(_INVARIANT)


# os.environ wraps a dictionary of encoded names and changes it in place.
_RAW: Mapping[Any, object] = getattr(os.environ, "_data", os.environ)
_GPU, _DIRECT, _INVARIANT = (
    name if _RAW is os.environ else os.environ.encodekey(name)
    for name in ("FLASHGEN_GPU", "FLASHGEN_DIRECT", "FLASHGEN_INVARIANT")
)


def configure_logging(logger: logging.Logger) -> None:
    """Show messages of at least the level in FLASHGEN_LOG (debug, info, warning, error).

    If it is unset, nothing changes: Python shows warnings. Raises InvalidArgument for another
    level.
    """
    value = os.environ.get("FLASHGEN_LOG")
    if not value:
        return
    level = logging.getLevelNamesMapping().get(value.upper())
    if level is None:
        raise InvalidArgument(f"FLASHGEN_LOG must be debug, info, warning or error: got {value!r}")
    logger.setLevel(level)
    if not logger.hasHandlers():
        logger.addHandler(logging.StreamHandler())


def interpreting() -> bool:
    """Whether TRITON_INTERPRET selects Triton's interpreter; fixed once triton is imported."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes")
