"""A model of one SM: the time of a launch estimated from SASS, grid and target."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashgen.lazy import attach

if TYPE_CHECKING:
    from flashgen.estimate.estimate import estimate_cubin

__all__ = ["estimate_cubin"]

__getattr__, __dir__ = attach(
    __name__,
    {"estimate_cubin": "flashgen.estimate.estimate"},
)
