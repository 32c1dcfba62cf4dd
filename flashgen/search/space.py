"""A finite search space of named parameters, and how it is searched: Method and Budget."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from flashgen.errors import InvalidArgument

Value = bool | int | float | str
Point = Mapping[str, Value]


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """A parameter that varies over a space. ordered: its values are ascending numbers; others are
    names.

    Numbers count by their rank among the values: 16, 32 and 256 are equally far apart.
    """

    name: str
    values: tuple[Value, ...]
    ordered: bool


def check_space(points: Sequence[Point]) -> None:
    """Raise InvalidArgument unless these are distinct points of one space."""
    if not points:
        raise InvalidArgument("space must have a point at least: got none")
    for number, point in enumerate(points):
        if not isinstance(point, Mapping):
            raise InvalidArgument(
                f"a point must map names to values: got {point!r} for point {number}"
            )
    names = list(points[0])
    seen: dict[tuple[Value, ...], int] = {}
    for number, point in enumerate(points):
        if set(point) != set(names):
            raise InvalidArgument(
                f"all points of a space must have the same parameters: point 0 has "
                f"{', '.join(names)}, and point {number} {', '.join(point)}"
            )
        for name, value in point.items():
            _check_value(name, value, number)
        key = tuple(point[name] for name in names)
        if seen.setdefault(key, number) != number:
            raise InvalidArgument(
                f"no point may stand in a space twice: "
                f"points {seen[key]} and {number} are both {dict(point)}"
            )


def _check_value(name: str, value: object, number: int) -> None:
    if not isinstance(value, Value):
        raise InvalidArgument(
            f"the value of a parameter must be an int, a float, a string or a bool: "
            f"got {value!r} for {name} of point {number}"
        )
    if isinstance(value, float) and not math.isfinite(value):
        raise InvalidArgument(f"a number must be finite: got {value} for {name} of point {number}")


def parameters_of(points: Sequence[Point]) -> tuple[Parameter, ...]:
    """The parameters that vary, in the order of the first point; values in order of occurrence."""
    found = []
    for name in points[0]:
        values = tuple(dict.fromkeys(point[name] for point in points))
        if len(values) == 1:
            continue
        ordered = all(_is_number(value) for value in values)
        if ordered:
            values = tuple(sorted(values, key=float))
        found.append(Parameter(name=name, values=values, ordered=ordered))
    return tuple(found)


def _is_number(value: Value) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


Sampler = Literal["auto", "exhaustive", "random", "tpe", "gp", "cmaes", "genetic"]


@dataclass(frozen=True, kw_only=True)
class Budget:
    """trials: the maximum of evaluations. seconds: the time after which no new one starts.

    Where a GPU measures configs that have estimates, only configs that get past the compiler count.
    """

    trials: int = 60
    seconds: float | None = None

    def __post_init__(self) -> None:
        if self.trials < 1:
            raise InvalidArgument(f"trials must be at least 1: got {self.trials}")
        if self.seconds is not None and not 0 <= self.seconds < math.inf:
            raise InvalidArgument(f"time_budget must be finite and >= 0: got {self.seconds}")


@dataclass(frozen=True, kw_only=True)
class Method:
    """How candidates are proposed. Raises InvalidArgument.

    auto is flashgen's own sampler (search/samplers/auto.py); exhaustive takes all, in order,
    whatever the budget; the others are Optuna's. seed fixes the random choices.
    """

    sampler: Sampler = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.sampler not in get_args(Sampler):
            known = ", ".join(get_args(Sampler))
            raise InvalidArgument(f"sampler must be one of {known}: got {self.sampler!r}")
        if not 0 <= self.seed < 2**32:
            raise InvalidArgument(f"seed must be 0 to {2**32 - 1}: got {self.seed}")
