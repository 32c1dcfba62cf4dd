"""The task of a child process that shows one claim."""

from __future__ import annotations

import importlib
import warnings
from dataclasses import asdict
from typing import Any


def show(payload: dict[str, Any]) -> dict[str, Any]:
    """{shows: "module:function"} -> the fields of its Finding. Raises what the function raises."""
    # The interpreter's numpy warns of the infinities of masked rows, which a GPU has too.
    warnings.filterwarnings("ignore", category=RuntimeWarning, module="triton")
    module, function = payload["shows"].split(":")
    return asdict(getattr(importlib.import_module(module), function)())
