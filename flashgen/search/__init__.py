"""Search: finds the fastest config of a spec with few evaluations.

`minimize` imports nothing about attention; the others are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashgen.lazy import attach
from flashgen.search.minimize import Evaluation, Minimum, NoMinimum, minimize
from flashgen.search.space import Budget, Method

if TYPE_CHECKING:
    from flashgen.search.points import ProductSpace
    from flashgen.search.sampler import KernelSampler
    from flashgen.search.staged import search

__all__ = [
    "Budget",
    "Evaluation",
    "KernelSampler",
    "Method",
    "Minimum",
    "NoMinimum",
    "ProductSpace",
    "minimize",
    "search",
]

__getattr__, __dir__ = attach(
    __name__,
    {
        "KernelSampler": "flashgen.search.sampler",
        "ProductSpace": "flashgen.search.points",
        "search": "flashgen.search.staged",
    },
)
