"""Method and Budget of a search: how candidates are proposed, and how many are evaluated."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from flashgen.errors import InvalidArgument

Sampler = Literal["auto", "exhaustive", "random", "tpe", "gp", "cmaes", "genetic"]


@dataclass(frozen=True, kw_only=True)
class Budget:
    """trials: the most that are evaluated. seconds: no new one is begun after so long.

    Where a GPU measures configs that have estimates, those count that go past the compiler.
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

    auto is flashgen's own (auto.py); exhaustive takes all, in their order, whatever the budget;
    the others are Optuna's. seed decides what is left to chance.
    """

    sampler: Sampler = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.sampler not in get_args(Sampler):
            known = ", ".join(get_args(Sampler))
            raise InvalidArgument(f"sampler must be one of {known}: got {self.sampler!r}")
        if not 0 <= self.seed < 2**32:
            raise InvalidArgument(f"seed must be 0 to {2**32 - 1}: got {self.seed}")
