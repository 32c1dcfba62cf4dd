"""Search: finds the fastest config of a spec with few evaluations.

`minimize` imports nothing about attention; the others are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashgen import lazily
from flashgen.search.minimize import Evaluation, Minimum, NoMinimum, minimize
from flashgen.search.space import Budget, Method

if TYPE_CHECKING:
    from flashgen.search.points import ProductSpace
    from flashgen.search.staged import search

__all__ = [
    "Budget",
    "Evaluation",
    "Method",
    "Minimum",
    "NoMinimum",
    "ProductSpace",
    "minimize",
    "search",
]


__getattr__, __dir__ = lazily(
    __name__, {"ProductSpace": "points:ProductSpace", "search": "staged:search"}
)
