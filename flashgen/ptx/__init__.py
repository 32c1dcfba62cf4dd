"""Executes what the compiler made: PTX for sm_80 to sm_120 on a CPU, in numpy, with the checks for
memory, races, contents and barriers. docs/numerics.md says what is modelled and what is not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flashgen.ptx.findings import FaultsFound, Finding, Report
from flashgen.ptx.program import InvalidPtx

if TYPE_CHECKING:
    from flashgen.ptx.triton_kernel import launch, run

__all__ = ["FaultsFound", "Finding", "InvalidPtx", "Report", "launch", "run"]


def __getattr__(name: str) -> Any:
    if name in ("launch", "run"):
        from flashgen.ptx import triton_kernel

        return getattr(triton_kernel, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
