"""Search: finds the fastest config of a spec with few evaluations.

`minimize` imports nothing about attention; the others are imported on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from flashgen.search.minimize import Evaluation, Minimum, NoMinimum, minimize
from flashgen.search.space import Budget, Method

if TYPE_CHECKING:
    from flashgen.search.points import ProductSpace
    from flashgen.search.sampler import KernelSampler
    from flashgen.search.staged import search

_LATER = {"KernelSampler": "sampler", "ProductSpace": "points", "search": "staged"}

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
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"flashgen.search.{_LATER[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
