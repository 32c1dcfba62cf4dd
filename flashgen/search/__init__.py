"""Search: finds the fastest config of a spec with few evaluations.

`minimize` imports nothing about attention; the others are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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


def __getattr__(name: str) -> Any:
    if name == "KernelSampler":
        from flashgen.search.sampler import KernelSampler

        return KernelSampler
    if name == "ProductSpace":
        from flashgen.search.points import ProductSpace

        return ProductSpace
    if name == "search":
        from flashgen.search.staged import search

        return search
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
