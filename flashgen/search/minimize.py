"""minimize: finds the least value of a finite space with few evaluations, of any problem.

All decisions depend only on values and seed. So a killed search that is started again, with an
evaluator that answers repeated points from a record, ends the same.
"""

from __future__ import annotations

import functools
import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from numbers import Real
from typing import TYPE_CHECKING

from flashgen.errors import FlashgenError, InvalidArgument, ToolchainError
from flashgen.search.space import Budget, Method, Point

if TYPE_CHECKING:
    from flashgen.search.points import ProductSpace, Space
    from flashgen.search.study import Trials


GUESSED_FIRST = 3
"""Points of the best guesses that are evaluated before the seeds: with good guesses the search is
soon near the best, and with bad ones it loses no more than these."""


class NoMinimum(FlashgenError, RuntimeError):
    """Every evaluated point failed."""


class NotAValue(InvalidArgument):
    """The evaluator returned no number. evaluations: what was evaluated before."""

    def __init__(self, value: object, point: Point, evaluations: tuple[Evaluation, ...]) -> None:
        super().__init__(
            "the evaluator must return a number, or None for a failure: "
            f"got {value!r} for {dict(point)}"
        )
        self.evaluations = evaluations


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
    None, inf or NaN if the point failed. Exceptions of the evaluator are not caught. Only the
    sampler auto uses guesses: of a model, above 0 and correct up to a common factor, or None.

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
        InvalidArgument: for a space, seed or guess that is none, or a sampler that cannot.
        NotAValue: for a value that is no number; it has what was evaluated before.
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

    try:
        from flashgen.search.study import Trials
    except ModuleNotFoundError as error:
        from flashgen.paths import install_command

        raise ToolchainError(f"a search needs {error.name}: {install_command('tune')}") from None
    legal, method = space_of(space), method or Method()
    first = [_number(seed, legal) for seed in seeds]
    everything = method.sampler == "exhaustive"
    checked = None if guesses is None else functools.partial(_guess, guesses)
    trials = Trials(legal, method, guesses=checked)
    guessed = GUESSED_FIRST if guesses and first and not everything else 0
    end = math.inf if budget.seconds is None else time.monotonic() + budget.seconds
    most = legal.size if everything else min(budget.trials, legal.size)
    done: list[Evaluation] = []
    infinite = False
    for number in _order(trials, guessed, chain(first, legal if everything else ())):
        point = legal.point(number)
        value = evaluator(point)
        if value is not None and not isinstance(value, Real):
            raise NotAValue(value, point, tuple(done))
        if value is not None and not math.isfinite(value):
            if not infinite:
                said = "a value that is not finite counts as a failure"
                warnings.warn(f"{said}: got {value!r} for {dict(point)}", stacklevel=2)
            infinite, value = True, None
        done.append(Evaluation(point=point, value=value))
        trials.tell(number, value)
        notify(done[-1])
        if len(done) == most or time.monotonic() >= end:
            exhaustive = len(done) == legal.size
            break
    else:
        exhaustive = True
    found = [(each.value, each.point) for each in done if each.value is not None]
    if not found:
        raise NoMinimum(
            f"a point at least must have a value: all {len(done)} that were evaluated failed"
        )
    value, point = min(found, key=lambda pair: pair[0])
    return Minimum(point=point, value=value, evaluations=tuple(done), exhaustive=exhaustive)


def _order(trials: Trials, guessed: int, first: Iterable[int]) -> Iterator[int]:
    """The numbers of points in the order of evaluation, each with a trial: some best guesses, the
    first, then what the sampler proposes.
    """
    yield from [number for _ in range(guessed) if (number := trials.ask()) is not None]
    for number in first:
        if number not in trials.ids:
            trials.begin(number)
            yield number
    while (number := trials.ask()) is not None:
        yield number


def _number(seed: Point, space: Space) -> int:
    number = space.number(seed)
    if number < 0:
        raise InvalidArgument(f"seeds must be points of the space: got {seed!r}")
    return number


def _guess(guesses: Callable[[Point], float | None], point: Point) -> float | None:
    guess = guesses(point)
    if guess is not None and not (isinstance(guess, Real) and math.isfinite(guess) and guess > 0):
        raise InvalidArgument(
            f"a guess must be a finite number above 0, or None: got {guess!r} for {dict(point)}"
        )
    return guess
