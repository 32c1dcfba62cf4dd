"""What a search is asked: a point of a space, Budget and Method."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from flashgen.errors import InvalidArgument

Value = bool | int | float | str
Point = Mapping[str, Value]

DROP_ABOVE = 1.5
"""A candidate slower than the best by this factor, after a few samples, is not timed further."""

SAMPLERS = ("auto", "exhaustive", "tpe", "gp", "cmaes", "qmc", "random", "brute-force")


@dataclass(frozen=True, kw_only=True)
class Budget:
    """When a search ends.

    Where a GPU measures configs that have estimates, only configs that get past the compiler count.

    Args:
        trials: the maximum of evaluations.
        seconds: the time after which no new one starts; None is no limit.

    Raises:
        InvalidArgument: if one is out of range.

    Examples:
        >>> from flashgen.search import Budget
        >>> Budget(trials=20).seconds is None
        True
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
    """How candidates are proposed.

    Samplers: auto is flashgen's own, KernelSampler; exhaustive takes all, in order, whatever the
    budget; the others are Optuna's.

    Args:
        sampler: one of SAMPLERS, or package.module:Class, a BaseSampler that takes a seed.
        seed: fixes the random choices.
        likely_first: the earlier a point of the space, the likelier it is fast; only auto uses it.

    Raises:
        InvalidArgument: if the sampler is unknown, or the seed out of range.

    Examples:
        >>> from flashgen.search import Method
        >>> Method(seed=1).sampler
        'auto'
    """

    sampler: str = "auto"
    seed: int = 0
    likely_first: bool = False

    def __post_init__(self) -> None:
        if self.sampler not in SAMPLERS and not re.fullmatch(r"[\w.]+:\w+", self.sampler):
            raise InvalidArgument(
                f"sampler must be one of {', '.join(SAMPLERS)}, or package.module:Class: "
                f"got {self.sampler!r}"
            )
        if not 0 <= self.seed < 2**32:
            raise InvalidArgument(f"seed must be 0 to {2**32 - 1}: got {self.seed}")
