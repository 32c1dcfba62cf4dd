"""A search on a GPU whose estimates are wrong: times are drawn from a landscape that ships."""

from __future__ import annotations

import functools
import math
import random
import statistics
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.recorded import read
from flashgen.schedules.config import KernelConfig
from flashgen.schedules.outcome import Status
from flashgen.search.goal import Goal
from tests.fakes import FakeEvaluator, digest_of
from tests.searches import GPU, PROBLEM, SPEC, run

ROOT = Path(__file__).resolve().parents[3]
A100 = ROOT / "benchmarks/landscapes/nvidia_a100_sxm4_80gb_fwd_bf16_d128_seq4096.json"

DRAWS, TRIALS = 12, 60
DEVIATION = 0.1
"""Of the logarithm of a time from that of the landscape: what even good estimates do not know."""

Times = dict[KernelConfig, float]


@functools.cache
def space() -> tuple[tuple[KernelConfig, ...], tuple[float | None, ...], tuple[KernelConfig, ...]]:
    """Configs, their times or None for those that do not compile, and the seeds."""
    (found,) = read(A100)
    configs = tuple(KernelConfig(**point) for point in found.points)  # type: ignore[arg-type]
    return configs, found.times, tuple(configs[number] for number in found.seeds)


def known() -> Times:
    configs, times, _ = space()
    return {config: time for config, time in zip(configs, times, strict=True) if time}


def drawn(draw: int) -> Times:
    chance = random.Random(draw)
    return {c: time * math.exp(chance.gauss(0, DEVIATION)) for c, time in known().items()}


def shuffled(times: Times, draw: int) -> Times:
    values = list(known().values())
    random.Random(-1 - draw).shuffle(values)
    return dict(zip(known(), values, strict=True))


def one_tile(times: Times, draw: int) -> Times:
    """The winner's tile is estimated 2.5 times too slow."""
    best = min(times, key=times.__getitem__)
    return {
        config: time * (2.5 if (config.br, config.bc) == (best.br, best.bc) else 1)
        for config, time in known().items()
    }


ESTIMATES: dict[str, Callable[[Times, int], Times]] = {
    "good": lambda times, draw: known(),
    "none": lambda times, draw: {},
    "shuffled": shuffled,
    "inverted": lambda times, draw: {config: 1e6 / time for config, time in known().items()},
    "one tile too slow": one_tile,
}


def regrets(folder: Path, kind: str, draw: int) -> list[float]:
    """How much slower the best so far is than the best of all, after each timing."""
    configs, _, seeds = space()
    times = drawn(draw)
    estimates = ESTIMATES[kind](times, draw)
    evaluator = FakeEvaluator(
        us=times.__getitem__,
        gpu=GPU,
        guess=estimates.get,
        band=(0.6, 2.0),
        failing=lambda stage, config: None if config in times else Status.SPILLS,
    )
    goal = Goal(
        spec=SPEC, problem=PROBLEM, legal=configs, seeds=seeds, default=seeds[0],
        digest_of=digest_of,
    )  # fmt: skip
    run(folder, evaluator, goal=goal, trials=TRIALS, seed=draw, likely_first=True)
    timed = [times[config] for config in evaluator.configs("rough")]
    return [min(timed[: count + 1]) / min(times.values()) - 1 for count in range(len(timed))]


def check(folder: Path, kind: str, draws: range) -> None:
    found = [regrets(folder / str(draw), kind, draw) for draw in draws]
    last = [each[-1] for each in found]
    assert statistics.median(last) <= 0.02
    assert max(last) <= 0.10
    assert max(map(len, found)) <= TRIALS
    if kind == "good":
        assert statistics.median(each[2] for each in found) <= 0.05


@pytest.mark.parametrize("kind", ["good", "inverted", "one tile too slow"])
def test_one_draw(tmp_path: Path, kind: str) -> None:
    check(tmp_path, kind, range(1, 2))


@pytest.mark.slow("a minute: twelve draws of each kind")
@pytest.mark.parametrize("kind", ESTIMATES)
def test_all_draws(tmp_path: Path, kind: str) -> None:
    check(tmp_path, kind, range(DRAWS))
