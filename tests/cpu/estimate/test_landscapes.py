"""The estimator held against forty landscapes that others measured, on four GPUs, of kernels of
their own (tests/data/published_landscapes.yaml has the sources).

tests/data/published_kernels.py stands in for the kernels. Which Triton compiled the timed ones is
often not known, and its version moves ranks.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from flashgen.compile.sass import disassemble
from flashgen.estimate import machines
from flashgen.estimate.estimate import BAND, time_of
from flashgen.estimate.loop_program import LoopProgram
from flashgen.estimate.machines import MACHINES
from flashgen.estimate.replay import Replay, replay_cubin
from flashgen.estimate.sm import Scoreboard
from flashgen.search import Budget, Method, minimize
from flashgen.search.decide import spearman
from flashgen.spec.gpu import TARGETS, Gpu
from tests import cubins
from tests.cpu.estimate.test_published import DRAWS, drawn

PUBLISHED = yaml.load(
    (Path(__file__).parents[2] / "data" / "published_landscapes.yaml").read_text(), yaml.CSafeLoader
)
LAPTOP = replace(
    TARGETS["nvidia_geforce_rtx_3090"], name="RTX 3060 Laptop", sms=30, clock_mhz=1702,
    bandwidth_gbs=336.0, l2_bytes=3 * 1024 * 1024,
)  # fmt: skip
H100 = "nvidia_h100_80gb_hbm3"
QUICK = ("asst5", "qwen_frence")

LEAST_CORRELATION, FIRST_PICK, BEST_OF_THREE = 0.88, 1.03, 1.03
WORST = {"quick": 1.10, "all": 1.20}
"""A first pick may be a tenth slower than the best. Two are more: 1.16 on an RTX 3090 and on a
laptop."""
APART = {"noeris_full_d64_n512_b4h32": 1.45}
"""A landscape with a bar of its own, and left out of the mean of first picks. It has 109 us for
64x64 with 3 stages, which comes first, and 79 with 2; at length 4096 the source has 474 and 478."""

WON = 20 / 24
"""The share of the H100's landscapes whose winner comes first; 23 were seen."""


@dataclass(frozen=True)
class Landscape:
    """A shape, and the microseconds of each config that was timed there."""

    id: str
    source: str
    gpu: Gpu
    shape: dict[str, int]
    kernel: dict[str, int]
    times: dict[tuple[int, ...], float]

    def blocks(self, br: int, bc: int, loops: int) -> list[tuple[int, ...]]:
        """The trips of each block in launch order. Where a tile on the diagonal is one tile of
        keys, its loop is none, and is counted with the other.
        """
        length, before = self.shape["length"], self.shape.get("before", 0)
        heads = self.shape["batch"] * self.shape["heads"]
        found = []
        for row in range(0, length, br):
            end = before + (min(row + br, length) if self.kernel.get("causal") else length)
            begin = row if self.kernel.get("split") else 0
            trips = (math.ceil(begin / bc), math.ceil((end - begin) / bc))
            if not self.kernel.get("split") or loops == 1:
                trips = (sum(trips),)
            found.append(trips)
        if self.kernel.get("page"):  # the tiles of rows are the grid's last axis
            return [trips for trips in found for _ in range(heads)]
        return found * heads


def landscapes(which: str) -> list[Landscape]:
    return [
        Landscape(
            each["id"],
            each["source"],
            LAPTOP if each["gpu"] == "rtx_3060_laptop" else TARGETS[each["gpu"]],
            each["shape"],
            each["kernel"],
            {tuple(row[:4]): row[4] for row in each["rows"]},
        )
        for each in PUBLISHED["landscapes"]
        if which == "all" or each["source"] in QUICK
    ]


class Kernels:
    """Compiles each stand-in once, and replays it on the machine of now."""

    def __init__(self) -> None:
        self._cubins: dict[Any, cubins.Cubin] = {}
        self._replays: dict[Any, Replay] = {}
        self._estimates: dict[str, dict[tuple[int, ...], float]] = {}

    def replayed(self, of: Landscape, config: tuple[int, ...]) -> Replay:
        group = of.shape["heads"] // of.shape["kv_heads"]
        key = (of.gpu.arch, config, of.shape["head_dim"], group, *sorted(of.kernel.items()))
        if key not in self._cubins:
            self._cubins[key] = cubins.published(of.gpu.arch, config, shape=of.shape, **of.kernel)
        cubin = self._cubins[key]
        known = (key, of.gpu.slug)
        if known not in self._replays:
            self._replays[known] = replay_cubin(
                cubin.code, of.gpu, num_warps=config[2], shared_bytes=cubin.shared_bytes
            )
        return self._replays[known]

    def forget(self) -> None:
        """Replays and estimates are to be made anew."""
        self._replays.clear()
        self._estimates.clear()

    def estimates(self, of: Landscape) -> dict[tuple[int, ...], float]:
        """estimated(), once a landscape."""
        if of.id not in self._estimates:
            self._estimates[of.id] = self.estimated(of)
        return self._estimates[of.id]

    def estimated(self, of: Landscape) -> dict[tuple[int, ...], float]:
        found = {}
        for config in of.times:
            replayed = self.replayed(of, config)
            blocks = of.blocks(config[0], config[1], len(replayed.block_flops))
            found[config] = time_of(replayed, blocks, of.gpu).median_us
        return found


@pytest.fixture(scope="module")
def kernels() -> Iterator[Kernels]:
    """No kernel is disassembled a second time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("flashgen.estimate.replay.disassemble", functools.cache(disassemble))
        yield Kernels()


@pytest.fixture
def anew(kernels: Kernels) -> Iterator[Kernels]:
    """Replays are made anew, on the machine that a test makes up, and forgotten after it."""
    kernels.forget()
    yield kernels
    kernels.forget()


@dataclass(frozen=True)
class Score:
    correlation: float
    first: float
    of_three: float


def score(of: Landscape, estimates: dict[tuple[int, ...], float]) -> Score:
    """The rank correlation, and how much slower than the best the first pick and the best of the
    first three are.
    """
    best = min(of.times.values())
    order = sorted(of.times, key=lambda config: estimates[config])
    picks = [of.times[config] / best for config in order]
    ranks = spearman([of.times[config] for config in order], [estimates[c] for c in order])
    return Score(ranks, picks[0], min(picks[:3]))


def mean(values: list[float]) -> float:
    """The geometric mean."""
    return math.exp(sum(map(math.log, values)) / len(values))


def faults(scores: dict[str, Score], which: str, fast: set[str]) -> list[str]:
    """The bars that are missed; `fast`: the landscapes of the H100."""
    found = []
    correlation = sum(each.correlation for each in scores.values()) / len(scores)
    if correlation < LEAST_CORRELATION:
        found.append(f"mean Spearman {correlation:.3f}")
    firsts = {name: each.first for name, each in scores.items() if name not in APART}
    if (first := mean(list(firsts.values()))) > FIRST_PICK:
        found.append(f"the first pick is {first:.3f} times as slow as the best")
    worst = max(firsts.values()) / WORST[which]
    if (worst := max([worst, *(scores[n].first / APART[n] for n in APART if n in scores)])) > 1:
        found.append(f"a first pick is {worst:.3f} times as slow as is allowed")
    if (of_three := mean([each.of_three for each in scores.values()])) > BEST_OF_THREE:
        found.append(f"the best of three picks is {of_three:.3f} times as slow as the best")
    if (won := sum(scores[name].first == 1 for name in fast)) < WON * len(fast):
        found.append(f"the winner comes first in {won} of {len(fast)} landscapes of the H100")
    return found


def judge(which: str, kernels: Kernels, shuffled: int | None = None) -> list[str]:
    scores, fast = {}, set()
    for of in landscapes(which):
        estimates = kernels.estimates(of)
        if shuffled is not None:
            times = list(estimates.values())
            random.Random(f"{shuffled} {of.id}").shuffle(times)
            estimates = dict(zip(estimates, times, strict=True))
        scores[of.id] = score(of, estimates)
        fast |= {of.id} if of.gpu.slug == H100 else set()
    return faults(scores, which, fast)


@pytest.mark.parametrize(
    "which",
    [
        pytest.param("quick", marks=pytest.mark.slow("make test has half a landscape of an A100")),
        pytest.param("all", marks=pytest.mark.slow("make test has half a landscape of an A100")),
    ],
)
class TestBars:
    def test_are_met(self, which: str, kernels: Kernels) -> None:
        assert judge(which, kernels) == []

    def test_are_missed_by_shuffled_estimates(self, which: str, kernels: Kernels) -> None:
        assert all(judge(which, kernels, shuffled=seed) for seed in range(20))

    def test_the_band_holds_most_of_the_times(self, which: str, kernels: Kernels) -> None:
        """Of kernels that look no pages up: of the stand-ins 31 of 36 on the H100 were seen in it."""
        ratios = [
            of.times[config] / estimate
            for of in landscapes(which)
            for config, estimate in kernels.estimates(of).items()
            if not of.kernel.get("page")
        ]
        low, high = BAND
        assert sum(low <= ratio <= high for ratio in ratios) > 0.8 * len(ratios)
        assert min(ratios) > 0.6
        assert max(ratios) < 1.8

    def test_are_missed_by_a_roofline(
        self, which: str, anew: Kernels, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fullest_pipe(board: Scoreboard, made: LoopProgram, residents: int) -> float:
            return residents * max(board._busy(made).values())

        monkeypatch.setattr(Scoreboard, "_replay", fullest_pipe)
        monkeypatch.setattr(Scoreboard, "_check_replay", lambda _: None)
        assert judge(which, anew) != []


@pytest.mark.slow("it compiles for all landscapes")
def test_a_search_with_estimates_is_soon_within_1_percent(kernels: Kernels) -> None:
    """2.4 evaluations in the mean of 40 landscapes and 5 searches each."""
    needed = []
    for of in landscapes("all"):
        estimates = kernels.estimates(of)
        space = [dict(zip(("br", "bc", "warps", "stages"), c, strict=True)) for c in of.times]
        for seed in range(5):
            found = minimize(
                space,
                lambda point, of=of: of.times[tuple(point.values())],
                Budget(trials=len(space)),
                method=Method(seed=seed),
                guesses=lambda point, known=estimates: known[tuple(point.values())],
            )
            near = [
                e.value is not None and e.value <= 1.01 * found.value for e in found.evaluations
            ]
            needed.append(near.index(True) + 1)
    assert sum(needed) / len(needed) <= 5


@pytest.mark.slow("make test proves a sample of it")
@pytest.mark.parametrize("seed", range(DRAWS))
def test_the_order_does_not_hang_on_latencies_and_bandwidths(
    seed: int, anew: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(machines.MACHINES, "sm_90", drawn(MACHINES["sm_90"], seed))
    correlations = [score(of, anew.estimated(of)).correlation for of in landscapes("quick")]
    assert sum(correlations) / len(correlations) > 0.85


def test_nothing_published_is_above_a_peak() -> None:
    for of in landscapes("all"):
        assert of.gpu.peak_tflops is not None
        length, before = of.shape["length"], of.shape.get("before", 0)
        keys = before + length / 2 if of.kernel.get("causal") else length
        heads = of.shape["batch"] * of.shape["heads"]
        flops = 4 * heads * length * keys * of.shape["head_dim"]
        assert flops / min(of.times.values()) * 1e-6 < of.gpu.peak_tflops


def test_every_landscape_names_its_source() -> None:
    assert {each["source"] for each in PUBLISHED["landscapes"]} == set(PUBLISHED["sources"])
    assert len({each["id"] for each in PUBLISHED["landscapes"]}) == 40
    assert all(len(each["rows"]) >= 6 for each in PUBLISHED["landscapes"])
