"""Proposer: points that a sampler proposes, each legal and new; samplers.py names the samplers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

P = TypeVar("P", bound=Hashable)


class Proposer(ABC, Generic[P]):
    """What every sampler keeps: the points there are, in their order, and what became of them."""

    def __init__(self, legal: Sequence[P]) -> None:
        self._legal = {point: number for number, point in enumerate(dict.fromkeys(legal))}
        self._learnt: dict[P, float | None] = {}

    @abstractmethod
    def propose(self, count: int) -> list[P]:
        """Up to `count` legal points, never proposed nor learnt; fewer where none are left."""

    def learn(self, point: P, value: float | None) -> None:
        """Tell what became of a point: a value, lower is better, or None for a failure.

        One that is not legal says nothing. Told again of a point, a sampler may believe the first.
        """
        if point in self._legal:
            first = point not in self._learnt
            self._learnt[point] = value
            self._told(point, value, first=first)

    @abstractmethod
    def _told(self, point: P, value: float | None, *, first: bool) -> None:
        """A legal point was learnt; first: it was not learnt before."""
