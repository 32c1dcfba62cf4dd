"""Executes what the compiler made: PTX for sm_80 to sm_120 on a CPU, in numpy, with the checks for
memory, races, contents and barriers. docs/execution.md says what is modelled and what is not.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flashgen.ptx.findings import FaultsFound, Finding, Report
    from flashgen.ptx.program import InvalidPtx
    from flashgen.ptx.triton_kernel import launch, run

_HOME = {
    "launch": "triton_kernel",
    "run": "triton_kernel",
    "Report": "findings",
    "Finding": "findings",
    "FaultsFound": "findings",
    "InvalidPtx": "program",
}

__all__ = ["FaultsFound", "Finding", "InvalidPtx", "Report", "launch", "run"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
