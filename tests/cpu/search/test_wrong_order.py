"""A search whose space is listed from failures and slow points to fast ones, as if the first were likely."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import replace

import pytest

from benchmarks import search_race
from benchmarks.recorded import Landscape, replay
from flashgen.search.space import Method

TRIALS, DRAWS, NEAR, FAR = 80, 12, 0.20, 0.45


def from_slow_to_fast(landscape: Landscape) -> Landscape:
    """The landscape from failures and slow to fast."""
    times = landscape.times
    order = sorted(range(len(times)), key=lambda n: (times[n] is not None, -(times[n] or 0.0)))
    return replace(
        landscape,
        points=tuple(landscape.points[n] for n in order),
        times=tuple(times[n] for n in order),
        likely_first=True,
    )


def regrets(landscape: Landscape, draws: Sequence[int]) -> list[float]:
    """Of searches of TRIALS evaluations, a draw each."""
    wrong = from_slow_to_fast(landscape)
    return [replay(wrong, Method(seed=seed), TRIALS)[-1] for seed in draws]


def trap() -> Landscape:
    """As a public convolution: the best have two switches on, one of which is bad without the other.
    Padding makes the valley beside theirs wider.
    """
    luck, times = random.Random(0), {}
    base = {
        (0, 0, 0): 1.5,
        (0, 1, 0): 1.5,
        (0, 1, 1): 1.5,
        (1, 0, 0): 2.6,
        (1, 1, 0): 1.0,
        (1, 1, 1): 1.6,
    }
    for x, y, tx, ty in itertools.product(range(16), range(5), range(4), range(4)):
        off = 0.04 * abs(x - 5) + 0.25 * abs(y - 2) + 0.25 * abs(tx - 1) + 0.2 * abs(ty - 2)
        for switches, least in base.items():
            steep = 2 if switches == (1, 1, 0) else 1
            times[x, y, tx, ty, *switches] = least * math.exp(steep * off + luck.gauss(0, 0.15))
    names = ("x", "y", "tx", "ty", "cache", "copy", "pad")
    return Landscape(
        name="trap",
        source="made",
        unit="ms",
        points=tuple(dict(zip(names, point, strict=True)) for point in times),
        times=tuple(times.values()),
    )


@pytest.mark.parametrize("landscape", search_race.shipped(), ids=lambda each: each.name)
def test_it_is_near_the_best_all_the_same(landscape: Landscape) -> None:
    """Five draws; the failures of the three spaces of flashgen's kernels come first."""
    found = regrets(landscape, range(5))
    assert statistics.median(found) <= NEAR
    assert max(found) <= FAR


@pytest.mark.slow("a minute: twelve draws of each landscape")
@pytest.mark.parametrize("name", ["product", "dedispersion", "polygon", "shipped"])
def test_of_all_draws(name: str) -> None:
    made = {each.name: each for each in search_race.of_folder("made")}
    some = search_race.shipped() if name == "shipped" else [made[f"made {name}"]]
    for each in some:
        assert statistics.median(regrets(each, range(DRAWS))) <= NEAR


@pytest.mark.slow("20 s: twelve draws")
def test_few_searches_are_trapped() -> None:
    """Without proposals for other valleys half of them are."""
    found = regrets(trap(), range(DRAWS))
    assert sum(regret <= NEAR for regret in found) >= 0.75 * DRAWS
