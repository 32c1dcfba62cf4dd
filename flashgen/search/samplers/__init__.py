"""Samplers by name, and Proposer, the interface they implement: points that are legal and new."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from typing import Generic, TypeVar

from flashgen.search.space import Method, Point

P = TypeVar("P", bound=Hashable)


class Proposer(ABC, Generic[P]):
    """Common state of samplers: the points in their order, and their results."""

    def __init__(self, legal: Sequence[P]) -> None:
        self._legal = {point: number for number, point in enumerate(dict.fromkeys(legal))}
        self._learnt: dict[P, float | None] = {}

    @abstractmethod
    def propose(self, count: int) -> list[P]:
        """Up to `count` legal points that were neither proposed nor learnt; fewer if none are
        left.
        """

    def learn(self, point: P, value: float | None) -> None:
        """Record the result of a point: a value, lower is better, or None for a failure.

        Points that are not legal are ignored. If a point is repeated, a sampler may keep the first
        value.
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

    guesses: another model's prediction for each of `legal`, lower is better, above 0; only auto
    uses it. Raises InvalidArgument if the sampler does not apply, ToolchainError if a package is
    missing.
    """
    if method.sampler == "auto":
        from flashgen.search.samplers.auto import AutoProposer

        return AutoProposer(legal, point_of, method.seed, guesses)
    from flashgen.search.samplers.optuna import OptunaProposer

    return OptunaProposer(legal, point_of, method)
