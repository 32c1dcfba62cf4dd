"""Samplers by name, and Proposer, the interface they implement: points that are legal and new."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from typing import Generic, TypeVar

from flashgen.search.space import Method, Point

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


def proposer_for(
    method: Method,
    legal: Sequence[P],
    point_of: Callable[[P], Point],
    guesses: Sequence[float | None] | None = None,
) -> Proposer[P]:
    """The proposer of this method, for any but `exhaustive`.

    guesses: another model's opinion of each of `legal`, lower is better, above 0; auto alone heeds
    it. Raises InvalidArgument where the sampler does not apply, ToolchainError where a package is
    missing.
    """
    if method.sampler == "auto":
        from flashgen.search.samplers.auto import AutoProposer

        return AutoProposer(legal, point_of, method.seed, guesses)
    from flashgen.search.samplers.optuna import OptunaProposer

    return OptunaProposer(legal, point_of, method)
