"""Samplers by name, and Proposer, the interface they implement: points that are legal and new."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from flashgen.errors import ToolchainError
from flashgen.search.space import Method

if TYPE_CHECKING:
    from flashgen.search.points import Space


class Proposer(ABC):
    """Common state of samplers: the space, and results by the numbers of points."""

    def __init__(self, space: Space) -> None:
        self._space = space
        self._learnt: dict[int, float | None] = {}
        self._pending: dict[int, Any] = {}  # proposed and not learnt; with what a sampler keeps
        self._excluded: set[int] = set()

    @abstractmethod
    def propose(self, count: int) -> list[int]:
        """Up to `count` numbers of points that were neither proposed nor learnt; fewer if none are
        left.
        """

    def _is_new(self, number: int) -> bool:
        """Whether a point was neither proposed nor learnt."""
        return not any(number in each for each in (self._learnt, self._pending, self._excluded))

    def exclude(self, numbers: Iterable[int]) -> None:
        """Never propose these points."""
        self._excluded.update(numbers)

    def learn(self, number: int, value: float | None) -> None:
        """Record the result of a point: a value, lower is better, or None for a failure.

        If a point is repeated, a sampler may keep the first value.
        """
        first = number not in self._learnt
        self._learnt[number] = value
        self._told(number, value, first=first)

    @abstractmethod
    def _told(self, number: int, value: float | None, *, first: bool) -> None:
        """A point was learnt; first: it was not learnt before."""


def proposer_for(
    method: Method, space: Space, guesses: Callable[[int], float | None] | None = None
) -> Proposer:
    """The proposer of this method, for any but `exhaustive`.

    guesses: another model's prediction for the point of a number, lower is better, above 0; only
    auto uses it. Raises InvalidArgument if the sampler does not apply, ToolchainError if a package
    is missing.
    """
    if method.sampler == "auto":
        try:
            from flashgen.search.samplers.auto import AutoProposer
        except ModuleNotFoundError as error:
            from flashgen.paths import install_command

            command = install_command("tune")
            raise ToolchainError(f"this sampler needs {error.name}: {command}") from None
        return AutoProposer(space, method, guesses)
    from flashgen.search.samplers.optuna import OptunaProposer

    return OptunaProposer(space, method)
