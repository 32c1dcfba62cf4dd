"""Executes what the compiler made: PTX for sm_80 to sm_120 on a CPU, in numpy, with the checks for
memory, races, contents and barriers. docs/numerics.md says what is modelled and what is not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashgen.lazy import attach
from flashgen.ptx.findings import FaultsFound, Finding, Report
from flashgen.ptx.program import InvalidPtx

if TYPE_CHECKING:
    from flashgen.ptx.triton_kernel import launch, run

__all__ = ["FaultsFound", "Finding", "InvalidPtx", "Report", "launch", "run"]

__getattr__, __dir__ = attach(
    __name__,
    dict.fromkeys(("launch", "run"), "flashgen.ptx.triton_kernel"),
)
