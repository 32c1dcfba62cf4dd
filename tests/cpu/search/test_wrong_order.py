"""A search whose space is listed from failures and slow points to fast ones, as if the first were likely."""

from __future__ import annotations

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


@pytest.mark.slow("4 s; test_sampler has a wrong order of one space")
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
