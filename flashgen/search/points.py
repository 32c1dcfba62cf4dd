"""A finite search space of named parameters: listed points, or a product with a predicate. A point
has a number, and a value a code: its place among the values of its parameter.
"""

from __future__ import annotations

import itertools
import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.random import RandomState
from numpy.typing import NDArray

from flashgen.errors import InvalidArgument
from flashgen.search.space import Point, Value

Numbers = NDArray[np.int64]
"""Numbers of points, n."""
Codes = NDArray[np.integer[Any]]
"""Codes of points, n x parameters."""

ILLEGAL = -1
MOST_COMBINATIONS = 2**62
"""Numbers of points have 64 bits."""

TRIES, MOST_TRIES = 20, 100_000
"""Random combinations of a product that are tried for each point drawn, and for the first one."""

LISTED = 10_000
"""Combinations up to which the points of a product are listed, so that none is missed."""


@dataclass(frozen=True, kw_only=True)
class SpaceParameter:
    """A parameter that varies over a space. ordered: its values are ascending numbers, which count
    by rank: 16, 32 and 256 are equally far apart; others are names.
    """

    name: str
    values: tuple[Value, ...]
    ordered: bool


class Space(ABC):
    """Legal points, whose numbers ascend in the order of the space. They are below `size`, but not
    every number below it is a point's.
    """

    parameters: tuple[SpaceParameter, ...]
    size: int

    @abstractmethod
    def point(self, number: int) -> Point:
        """The point of this number."""

    @abstractmethod
    def codes(self, numbers: Sequence[int] | Numbers) -> Codes:
        """The codes of these points."""

    @abstractmethod
    def numbers(self, codes: Codes) -> Numbers:
        """The numbers of these points; ILLEGAL where there is none."""

    @abstractmethod
    def draw(self, random: RandomState, count: int) -> Numbers:
        """`count` random points, all different; fewer if fewer are found."""

    @abstractmethod
    def __iter__(self) -> Iterator[int]:
        """The numbers of all points, in order."""

    def find(self, values: Mapping[str, Value]) -> int:
        """The number of the point with these values of all parameters that vary, or ILLEGAL. Other
        names do not count.
        """
        try:
            codes = [each.values.index(values[each.name]) for each in self.parameters]
        except (ValueError, TypeError, KeyError):
            return ILLEGAL
        return int(self.numbers(np.array([codes], dtype=np.int64))[0])

    def number(self, point: Point) -> int:
        """The number of a point; ILLEGAL if it is none."""
        number = self.find(point) if isinstance(point, Mapping) else ILLEGAL
        same = number != ILLEGAL and dict(self.point(number)) == dict(point)
        return number if same else ILLEGAL

    def neighbours(self, number: int) -> Numbers:
        """The points that differ from this one in one parameter."""
        here = self.codes([number])[0]
        changed = np.repeat(here[None, :], sum(len(each.values) for each in self.parameters), 0)
        row = 0
        for column, each in enumerate(self.parameters):
            changed[row : row + len(each.values), column] = range(len(each.values))
            row += len(each.values)
        found = self.numbers(changed[(changed != here).any(axis=1)])
        legal: Numbers = found[found != ILLEGAL]
        return legal


class ListedSpace(Space):
    """Listed points, in their order. Raises InvalidArgument unless they are distinct and have the
    same parameters.
    """

    def __init__(self, points: Sequence[Point]) -> None:
        _check_names(points)
        self._points = points
        self.size = len(points)
        self.parameters = parameters_of(points)
        self._codes = np.empty((self.size, len(self.parameters)), dtype=np.int32)
        for column, each in enumerate(self.parameters):
            code_of = {value: code for code, value in enumerate(each.values)}
            self._codes[:, column] = [code_of[point[each.name]] for point in points]
        self._numbers: dict[tuple[int, ...], int] = {}
        for number, row in enumerate(map(tuple, self._codes.tolist())):
            first = self._numbers.setdefault(row, number)
            if first != number:
                raise InvalidArgument(
                    f"no point may stand in a space twice: "
                    f"points {first} and {number} are both {dict(points[number])}"
                )

    def point(self, number: int) -> Point:
        """The listed point itself."""
        return self._points[number]

    def codes(self, numbers: Sequence[int] | Numbers) -> Codes:
        """As Space.codes."""
        return self._codes[np.asarray(numbers, dtype=np.int64)]

    def numbers(self, codes: Codes) -> Numbers:
        """As Space.numbers."""
        found = [self._numbers.get(tuple(row), ILLEGAL) for row in codes.tolist()]
        return np.array(found, dtype=np.int64)

    def draw(self, random: RandomState, count: int) -> Numbers:
        """As Space.draw; all points in their order if there are no more than `count`."""
        if count >= self.size:
            return np.arange(self.size)
        if self.size < 4 * count:
            return random.permutation(self.size)[:count]
        return _distinct(random.randint(self.size, size=2 * count), count)

    def __iter__(self) -> Iterator[int]:
        """As Space.__iter__."""
        return iter(range(self.size))


class ProductSpace(Space):
    """All combinations of values that are legal. Nothing is enumerated, so it may be large.

    Args:
        values: the values of each parameter; numbers should ascend.
        legal: is called with a point, a mapping of each parameter to its value.

    Raises:
        InvalidArgument: for values that are none, or repeat.

    Examples:
        >>> from flashgen.search import ProductSpace
        >>> ProductSpace({"a": [1, 2], "b": [4, 8]}, lambda p: p["a"] * p["b"] < 16) is not None
        True
    """

    def __init__(
        self,
        values: Mapping[str, Sequence[Value]],
        legal: Callable[[Point], bool] = lambda point: True,
    ) -> None:
        if not values:
            raise InvalidArgument("a space must have a parameter at least: got none")
        for name, some in values.items():
            if not some:
                raise InvalidArgument(f"a parameter must have a value at least: {name} has none")
            for value in some:
                _check_value(name, value, "the product")
        self.parameters = tuple(
            _parameter(name, tuple(dict.fromkeys(some))) for name, some in values.items()
        )
        self.size = math.prod(len(each.values) for each in self.parameters)
        if self.size > MOST_COMBINATIONS:
            raise InvalidArgument(
                f"a product may have {MOST_COMBINATIONS} combinations: got {self.size}"
            )
        self._legal = legal
        counts = [len(each.values) for each in self.parameters]
        self._weights = np.array([math.prod(counts[n + 1 :]) for n in range(len(counts))])

    def point(self, number: int) -> Point:
        """As Space.point."""
        return self._point(self.codes([number])[0].tolist())

    def codes(self, numbers: Sequence[int] | Numbers) -> Codes:
        """As Space.codes."""
        counts = np.array([len(each.values) for each in self.parameters])
        codes: Codes = np.asarray(numbers, dtype=np.int64)[:, None] // self._weights % counts
        return codes

    def numbers(self, codes: Codes) -> Numbers:
        """As Space.numbers."""
        legal = [bool(self._legal(self._point(row))) for row in codes.tolist()]
        return np.where(legal, codes @ self._weights, ILLEGAL)

    def draw(self, random: RandomState, count: int) -> Numbers:
        """As Space.draw."""
        found: Numbers = np.empty(0, dtype=np.int64)
        tries = 0
        while len(found) < count and tries < (TRIES * count if len(found) else MOST_TRIES):
            columns = [random.randint(len(each.values), size=count) for each in self.parameters]
            numbers = self.numbers(np.stack(columns, axis=1))
            found = _distinct(np.concatenate([found, numbers[numbers != ILLEGAL]]), count)
            tries += count
        return found

    def __iter__(self) -> Iterator[int]:
        """As Space.__iter__."""
        combinations = itertools.product(*(each.values for each in self.parameters))
        names = [each.name for each in self.parameters]
        for number, values in enumerate(combinations):
            if self._legal(dict(zip(names, values, strict=True))):
                yield number

    def _point(self, codes: Sequence[int]) -> Point:
        return {
            each.name: each.values[code] for each, code in zip(self.parameters, codes, strict=True)
        }


def space_of(space: Sequence[Point] | Space) -> Space:
    """The space of these points; a small product is listed. Raises InvalidArgument."""
    if not isinstance(space, Space):
        return ListedSpace(space)
    if not isinstance(space, ProductSpace) or space.size > LISTED:
        return space
    points = [space.point(number) for number in space]
    if not points:
        raise InvalidArgument(f"a space must have a legal point: none of {space.size} is legal")
    return ListedSpace(points)


def _check_names(points: Sequence[Point]) -> None:
    if not points:
        raise InvalidArgument("space must have a point at least: got none")
    for number, point in enumerate(points):
        if not isinstance(point, Mapping):
            raise InvalidArgument(
                f"a point must map names to values: got {point!r} for point {number}"
            )
        if point.keys() != points[0].keys():
            raise InvalidArgument(
                f"all points of a space must have the same parameters: point 0 has "
                f"{', '.join(points[0])}, and point {number} {', '.join(point)}"
            )


def _values_of(points: Sequence[Point], name: str) -> tuple[Value, ...]:
    """The values of a parameter, in order of occurrence."""
    values = dict[Value, None]()
    for number, point in enumerate(points):
        value = point[name]
        if not isinstance(value, Value) or value not in values:
            _check_value(name, value, f"point {number}")
            values[value] = None
    return tuple(values)


def _check_value(name: str, value: object, where: str) -> None:
    if not isinstance(value, Value):
        raise InvalidArgument(
            f"the value of a parameter must be an int, a float, a string or a bool: "
            f"got {value!r} for {name} of {where}"
        )
    if not isinstance(value, str) and not abs(value) <= sys.float_info.max:  # NaN neither
        number = value if isinstance(value, float) else "an int beyond all floats"
        raise InvalidArgument(f"a number must be finite: got {number} for {name} of {where}")


def parameters_of(points: Sequence[Point]) -> tuple[SpaceParameter, ...]:
    """The parameters that vary, in the order of the first point."""
    values = {name: _values_of(points, name) for name in points[0]}
    return tuple(_parameter(name, some) for name, some in values.items() if len(some) > 1)


def _parameter(name: str, values: tuple[Value, ...]) -> SpaceParameter:
    ordered = not any(isinstance(value, bool | str) for value in values)
    values = tuple(sorted(values, key=float)) if ordered else values
    return SpaceParameter(name=name, values=values, ordered=ordered)


def _distinct(numbers: Numbers, count: int) -> Numbers:
    """The first `count` different numbers, in their order."""
    _, first = np.unique(numbers, return_index=True)
    return numbers[np.sort(first)][:count]
