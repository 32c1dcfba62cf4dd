"""Strategies of Kernel Tuner on recorded landscapes (pip install '.[peers]'), and the public
landscapes to compare them on.

Each run gets a search space of its own: Kernel Tuner keeps neighbours in it, so a space shared by
runs makes later seeds better. Failing configs count as evaluations, as for every contender.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.recorded import Landscape, read

STRATEGIES = {
    "kernel tuner, annealing": "simulated_annealing",
    "kernel tuner, grey wolf": "gen_adaptive_tabu_greywolf",
}
"""Names of contenders, and modules of kernel_tuner.strategies (Kernel Tuner 1.5)."""


HUB = "cachefiles of github.com/AutoTuningAssociation/benchmark_hub"
MOCK = "tests/autotuning_methodology/integration/mockfiles of autotuning_methodology 1.1.0 on PyPI"
PUBLIC = {
    **{
        f"{kernel}_milo/{gpu}_T4.json.gz": HUB
        for kernel in ("convolution", "dedispersion", "gemm", "hotspot")
        for gpu in ("A100", "A4000", "MI250X", "W6600")
    },
    "convolution_milo/W7800_T4.json.gz": HUB,
    "pnpoly/RTX_3090.json.gz": HUB,
    "mock_gpu_T4.json": MOCK,
}
"""Measured spaces that others publish, and where: none of them ships with flashgen."""

NAMES = {"mock_gpu_T4.json": "convolution RTX 2080 Ti"}


def public(folder: Path | None) -> tuple[list[Landscape], list[str]]:
    """The landscapes of PUBLIC in a folder, and a sentence for each that is not there. A file may
    be in a folder of its kernel, as in the hub, or have `__` instead of the `/`.
    """
    if folder is None:
        return [], ["public landscapes: --public FOLDER was not given"]
    found: list[Landscape] = []
    missing: dict[str, list[str]] = {}
    for name, origin in PUBLIC.items():
        paths = [folder / name, folder / name.replace("/", "__")]
        path = next(filter(Path.exists, paths), None)
        if path is None:
            missing.setdefault(origin, []).append(name)
            continue
        title = NAMES.get(name, name.removesuffix(".json.gz").removesuffix("_T4"))
        title = title.replace("_milo/", " ").replace("/", " ").replace("_", " ")
        (landscape,) = read(path)
        found.append(replace(landscape, name=title, source="measured"))
    skipped = [
        f"{', '.join(names)}: not in the folder; see {origin}" for origin, names in missing.items()
    ]
    return found, skipped


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
