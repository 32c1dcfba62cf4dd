"""A search whose space is listed from failures and slow points to fast ones, as if the first were likely."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import pytest

from benchmarks import made_landscapes, search_ablation, search_efficiency
from benchmarks.recorded import Landscape, replay
from flashgen.search.space import Method

TRIALS, DRAWS, NEAR = 80, 12, 0.20


def last(landscape: Landscape, draws: Sequence[int]) -> float:
    """The median regret of searches of TRIALS evaluations."""
    wrong = search_ablation.from_slow_to_fast(landscape)
    return statistics.median(replay(wrong, Method(seed=seed), TRIALS)[-1] for seed in draws)


def test_the_order_is_reversed() -> None:
    (landscape, *_) = search_efficiency.published()
    wrong = search_ablation.from_slow_to_fast(landscape)
    times = [time for time in wrong.times if time is not None]
    assert wrong.likely_first
    assert times == sorted(times, reverse=True)
    assert wrong.times[: -len(times)] == (None,) * (len(wrong.times) - len(times))
    assert sorted(map(str, wrong.points)) == sorted(map(str, landscape.points))


@pytest.mark.parametrize("landscape", search_efficiency.shipped(), ids=lambda each: each.name)
def test_it_is_near_the_best_all_the_same(landscape: Landscape) -> None:
    """One draw; the failures of the three spaces of flashgen's kernels come first."""
    assert last(landscape, range(1)) <= NEAR


@pytest.mark.slow("a minute: twelve draws of each landscape")
@pytest.mark.parametrize("name", ["product", "dedispersion", "polygon", "shipped"])
def test_of_all_draws(name: str) -> None:
    made = {each.name: each for each in made_landscapes.landscapes()}
    some = search_efficiency.shipped() if name == "shipped" else [made[f"made {name}"]]
    assert all(last(each, range(DRAWS)) <= NEAR for each in some)
