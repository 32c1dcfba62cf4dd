"""Strategies of Kernel Tuner on recorded landscapes: pip install 'flashgen[peers]'.

Each run gets a search space of its own: Kernel Tuner keeps neighbours in it, so a space shared by
runs makes later seeds better. Failing configs count as evaluations, as for every contender.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import random
from collections.abc import Sequence
from typing import Any

import numpy as np

from flashgen.search.landscape import Landscape

STRATEGIES = {
    "kernel tuner, annealing": "simulated_annealing",
    "kernel tuner, grey wolf": "gen_adaptive_tabu_greywolf",
}
"""Names of contenders, and modules of kernel_tuner.strategies (Kernel Tuner 1.5)."""


class _Runner:
    """What a strategy evaluates with: times come from the landscape."""

    def __init__(self, landscape: Landscape, names: Sequence[str]) -> None:
        keys = (tuple(point[name] for name in names) for point in landscape.points)
        self._times = dict(zip(keys, landscape.times, strict=True))
        self._names, self._best = names, landscape.best
        self._seen: set[tuple[Any, ...]] = set()
        self.regrets: list[float] = []

    def add_strategy_time(self, seconds: float) -> None:
        """Part of the interface; times of strategies are not kept."""

    def run(self, configs: Sequence[Sequence[Any]], options: Any) -> list[dict[str, Any] | None]:
        """A result per config; None once the budget is spent."""
        failed = importlib.import_module("kernel_tuner.util").RuntimeFailedConfig
        results: list[dict[str, Any] | None] = []
        for config in map(tuple, configs):
            if options.budget.is_done():
                results.append(None)
                continue
            time = self._times[config]
            if config not in self._seen:
                self._seen.add(config)
                options.budget.add_evaluations(1)
                now = math.inf if time is None else time / self._best - 1
                self.regrets.append(min([now, *self.regrets[-1:]]))
            result = dict(zip(self._names, config, strict=True))
            error = {"time": failed(), "__error__": failed()}
            results.append(result | ({"time": time} if time is not None else error))
        return results


def replay_peer(landscape: Landscape, name: str, seed: int, evaluations: int) -> tuple[float, ...]:
    """The regret of a contender of STRATEGIES after 1, 2, ... evaluations. Raises ImportError
    without Kernel Tuner.
    """
    strategy = importlib.import_module(f"kernel_tuner.strategies.{STRATEGIES[name]}")
    util = importlib.import_module("kernel_tuner.util")
    random.seed(seed)
    np.random.seed(seed)
    names = list(landscape.points[0])
    values = {each: sorted({point[each] for point in landscape.points}) for each in names}
    space = importlib.import_module("kernel_tuner.searchspace").Searchspace(
        None, None, None,
        from_cache={"tune_params": values, "cache": dict(enumerate(landscape.points))},
    )  # fmt: skip
    options = importlib.import_module("kernel_tuner.interface").Options(
        {
            "objective": ["time"], "objective_higher_is_better": [False],
            "strategy_options": {"max_fevals": evaluations},
            "budget": util.TuningBudget(max_fevals=evaluations),
            "verbose": False, "tune_params": values, "restrictions": None, "cache": {},
        }
    )  # fmt: skip
    runner = _Runner(landscape, names)
    with contextlib.suppress(util.StopCriterionReached):
        strategy.tune(space, runner, options)
    return tuple(runner.regrets[:evaluations])
