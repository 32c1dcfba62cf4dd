"""A made-up search: a space, its landscape, and run(), which searches it with a FakeEvaluator."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from flashgen.schedules.config import KernelConfig
from flashgen.search import search
from flashgen.search.goal import Budget, Found, Goal, Method, Progress
from flashgen.search.log import Log
from flashgen.spec.gpu import TARGETS
from flashgen.spec.problem import workload
from tests.fakes import FakeEvaluator, digest_of
from tests.makers import make_config, make_spec

SPEC = make_spec()
PROBLEM = workload(SPEC, 4096)
GPU = TARGETS["nvidia_h200"]
SPACE = tuple(
    make_config(br, bc, num_warps=warps, num_stages=stages, schedule=schedule)
    for br, bc, warps, stages, schedule in itertools.product(
        (128, 64, 32), (128, 64, 32), (4, 8), (2, 3), ("fa2", "s_ahead")
    )
    if warps <= br // 8
)
DEFAULT = make_config(64, 64)
BEST = make_config(128, 64, num_warps=8, num_stages=3, schedule="s_ahead")


def landscape(config: KernelConfig) -> float:
    """Microseconds, least at BEST."""
    differing = sum(getattr(config, name) != getattr(BEST, name) for name in vars(BEST))
    return 100.0 + 20.0 * differing + SPACE.index(config) * 1e-3


def noisy(config: KernelConfig) -> float:
    """An estimate within 20 % of half the time, by a draw that is the config's own."""
    return landscape(config) / 2 * random.Random(config.label).uniform(0.8, 1.2)


def fake(us: Callable[[KernelConfig], float] = landscape, **fields: Any) -> FakeEvaluator:
    return FakeEvaluator(us=us, gpu=GPU, **fields)


def open_log(folder: Path) -> Log:
    return Log(folder / "log.jsonl", gpu=GPU.slug, triton="3.7.1")


def make_goal(**changes: Any) -> Goal:
    goal = Goal(
        spec=SPEC,
        problem=PROBLEM,
        legal=SPACE,
        seeds=(DEFAULT, make_config(32, 32)),
        default=DEFAULT,
        digest_of=digest_of,
    )
    return replace(goal, **changes)


def run(
    folder: Path,
    evaluator: FakeEvaluator,
    *,
    goal: Goal | None = None,
    trials: int = 20,
    seconds: float | None = None,
    sampler: str = "auto",
    seed: int = 0,
    likely_first: bool = False,
    notify: Callable[[Progress], None] = lambda _: None,
) -> Found:
    with open_log(folder) as log:
        return search(
            goal or make_goal(),
            evaluator,
            log,
            budget=Budget(trials=trials, seconds=seconds),
            method=Method(sampler=sampler, seed=seed, likely_first=likely_first),
            notify=notify,
        )
