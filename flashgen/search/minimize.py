"""minimize: finds the least value of a finite space with few evaluations, of any problem.

All decisions depend only on values and seed. So a killed search that is started again, with an
evaluator that answers repeated points from a record, ends the same.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING

from flashgen.errors import FlashgenError, InvalidArgument
from flashgen.search.samplers import proposer_for
from flashgen.search.space import Budget, Method, Point

if TYPE_CHECKING:
    from flashgen.search.points import ProductSpace, Space


GUESSED_FIRST = 3
"""Points of the best guesses that are evaluated before the seeds: with good guesses the search is
soon near the best, and with bad ones it loses no more than these."""


class NoMinimum(FlashgenError, RuntimeError):
    """Every evaluated point failed."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """One evaluated point.

    Args:
        point: each parameter and its value.
        value: what it cost; None if it failed.

    Examples:
        >>> from flashgen.search import Evaluation
        >>> Evaluation(point={"a": 1}, value=2.5).value
        2.5
    """

    point: Point
    value: float | None


@dataclass(frozen=True, kw_only=True)
class Minimum:
    """What minimize() returns.

    Args:
        point: the best evaluated point, the first of equals.
        value: what it cost.
        evaluations: all, in order.
        exhaustive: whether every point of the space was evaluated, so that none is better.

    Examples:
        >>> from flashgen.search import Budget, ProductSpace, minimize
        >>> space = ProductSpace({"a": [1, 2, 3]})
        >>> minimize(space, lambda point: (point["a"] - 2) ** 2, budget=Budget(trials=9)).point
        {'a': 2}
    """

    point: Point
    value: float
    evaluations: tuple[Evaluation, ...]
    exhaustive: bool


def minimize(
    space: Sequence[Point] | ProductSpace,
    evaluator: Callable[[Point], float | None],
    budget: Budget,
    *,
    method: Method | None = None,
    seeds: Sequence[Point] = (),
    guesses: Callable[[Point], float | None] | None = None,
    notify: Callable[[Evaluation], None] = lambda _: None,
) -> Minimum:
    """Find the point of a space with the least value, with few evaluations.

    Each point maps the same names to numbers, strings or bools. A value is better if it is lower,
    None if the point failed. Exceptions of the evaluator are not caught. Only the sampler auto uses
    guesses: of a model, above 0 and correct up to a common factor, or None.

    Args:
        space: the legal points, or a ProductSpace, which may be too large to list.
        evaluator: gives the value of a point.
        budget: how many evaluations, or how long.
        method: the sampler and its seed, and whether the order of the space means something.
        seeds: points of the space that are evaluated first, or after the best guesses.
        guesses: gives a model's prediction for a point.
        notify: is called with each evaluation.

    Returns:
        The best point with its value, and all evaluations.

    Raises:
        InvalidArgument: for a space, seed, guess or value that is none, or a sampler that cannot.
        NoMinimum: if all evaluated points failed.
        ToolchainError: if a package is missing.

    Examples:
        >>> from flashgen.search import Budget, minimize
        >>> space = [{"x": x} for x in range(9)]
        >>> found = minimize(space, lambda point: (point["x"] - 5) ** 2, Budget(trials=9))
        >>> found.point, found.value
        ({'x': 5}, 0)
    """
    from flashgen.search.points import space_of  # loads numpy

    legal, method = space_of(space), method or Method()
    done: list[Evaluation] = []
    end = math.inf if budget.seconds is None else time.monotonic() + budget.seconds
    most = legal.size if method.sampler == "exhaustive" else min(budget.trials, legal.size)
    order = _Order(legal, method, seeds, guesses)
    for number in order:
        point = legal.point(number)
        value = evaluator(point)
        _check_value(value, point)
        order.learn(number, value)
        done.append(Evaluation(point=point, value=value))
        notify(done[-1])
        if len(done) == most or time.monotonic() >= end:
            break
    else:
        order.ended = True
    return _minimum(done, exhaustive=order.ended or len(done) == legal.size)


class _Order:
    """The numbers of points in the order of evaluation: the best guesses, seeds, and proposals.

    ended: there are no more.
    """

    def __init__(
        self,
        space: Space,
        method: Method,
        seeds: Sequence[Point],
        guesses: Callable[[Point], float | None] | None,
    ) -> None:
        self.ended = False
        first = dict.fromkeys(_number(seed, space) for seed in seeds)
        self._queue = deque(first)
        self._rest: Iterator[int] = iter(())
        self._known: set[int] = set()
        self._guessed = guesses is not None
        self._proposer = None
        if method.sampler == "exhaustive":
            self._rest = (number for number in space if number not in first)
        else:
            model = None if guesses is None else lambda n: _guess(guesses, space.point(n))
            self._proposer = proposer_for(method, space, model)

    def __iter__(self) -> Iterator[int]:
        if self._proposer and self._guessed and self._queue:
            yield from self._proposer.propose(GUESSED_FIRST)
        while self._queue:
            number = self._queue.popleft()
            if number not in self._known:
                yield number
        yield from self._rest
        while self._proposer and (proposed := self._proposer.propose(1)):
            yield from proposed

    def learn(self, number: int, value: float | None) -> None:
        """Record the value of the point of this number."""
        self._known.add(number)
        if self._proposer:
            self._proposer.learn(number, value)


def _number(seed: Point, space: Space) -> int:
    number = space.number(seed)
    if number < 0:
        raise InvalidArgument(f"seeds must be points of the space: got {seed!r}")
    return number


def _guess(guesses: Callable[[Point], float | None], point: Point) -> float | None:
    guess = guesses(point)
    if guess is not None and not (_is_finite(guess) and guess > 0):
        raise InvalidArgument(
            f"a guess must be a finite number above 0, or None: got {guess!r} for {dict(point)}"
        )
    return guess


def _check_value(value: float | None, point: Point) -> None:
    if value is not None and not _is_finite(value):
        raise InvalidArgument(
            f"the evaluator must return a finite number, or None for a failure: "
            f"got {value!r} for {dict(point)}"
        )


def _is_finite(value: object) -> bool:
    """Whether this is a finite number, including numpy's."""
    return isinstance(value, Real) and math.isfinite(value)


def _minimum(done: Sequence[Evaluation], *, exhaustive: bool) -> Minimum:
    known = [(each.value, each.point) for each in done if each.value is not None]
    if not known:
        raise NoMinimum(
            f"a point at least must have a value: all {len(done)} that were evaluated failed"
        )
    value, point = min(known, key=lambda pair: pair[0])
    return Minimum(point=point, value=value, evaluations=tuple(done), exhaustive=exhaustive)
