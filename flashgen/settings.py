"""The environment variables of flashgen, read here and nowhere else."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flashgen.errors import InvalidArgument


def configs_override() -> Path | None:
    """FLASHGEN_CONFIGS: the folder of tables the tool reads and writes in place of the shipped
    one.
    """
    value = os.environ.get("FLASHGEN_CONFIGS")
    return Path(value) if value else None


def generated_override() -> Path | None:
    """FLASHGEN_GENERATED: the folder that serves in place of the shipped generated/."""
    value = os.environ.get("FLASHGEN_GENERATED")
    return Path(value) if value else None


def served_gpu() -> str | None:
    """FLASHGEN_GPU: the slug whose table serves, whatever GPU is there."""
    return os.environ.get("FLASHGEN_GPU") or None


def aot_folder() -> Path | None:
    """FLASHGEN_AOT: the folder of binaries that `flashgen aot` made, for the runtime to use."""
    value = os.environ.get("FLASHGEN_AOT")
    return Path(value) if value else None


def direct_launch() -> bool:
    """FLASHGEN_DIRECT: 0 leaves every launch to Triton's own launcher, for comparison."""
    return os.environ.get("FLASHGEN_DIRECT") != "0"


def serving() -> tuple[object, object]:
    """What of the environment decides how a call is served, in a form that is only to be compared:
    FLASHGEN_GPU and FLASHGEN_DIRECT. It is read at every call, for a thirtieth of what os.environ
    takes to look a name up.
    """
    return _RAW.get(_GPU), _RAW.get(_DIRECT)


# os.environ is a wrapper of a dictionary of encoded names, which it changes in place.
_RAW: Mapping[Any, object] = getattr(os.environ, "_data", os.environ)
_GPU, _DIRECT = (
    name if _RAW is os.environ else os.environ.encodekey(name)
    for name in ("FLASHGEN_GPU", "FLASHGEN_DIRECT")
)


def configure_logging(logger: logging.Logger) -> None:
    """Show messages from the level that FLASHGEN_LOG names (debug, info, warning, error) on.

    Unset, nothing is changed: Python shows warnings. Raises InvalidArgument for another level.
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
    """Whether Triton's own TRITON_INTERPRET asks for its interpreter; fixed once triton is
    imported.
    """
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes")


def user_cache() -> Path:
    """The user's cache folder by the XDG base directory specification."""
    value = os.environ.get("XDG_CACHE_HOME")
    return Path(value) if value and Path(value).is_absolute() else Path.home() / ".cache"
