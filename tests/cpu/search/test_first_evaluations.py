"""After five evaluations a search that was told nothing is as good as random points, in small spaces too."""

from __future__ import annotations

import math
import statistics

import pytest

from benchmarks import made_landscapes, search_ablation, search_efficiency
from benchmarks.recorded import Landscape, replay
from flashgen.search.space import Method

FIRST, DRAWS = 5, 20


def expected(landscape: Landscape) -> float:
    """The mean logarithm of the clipped regret of the best of FIRST random points."""
    count, best = len(landscape.points), landscape.best
    times = sorted(math.inf if time is None else time for time in landscape.times)
    total, left = 0.0, 1.0  # the probability that none of the faster ones was drawn
    for place, time in enumerate(times):
        more = left * max(0, count - place - FIRST) / (count - place)
        total += (left - more) * clipped(time / best - 1)
        left = more
    return total


def clipped(regret: float) -> float:
    return math.log(min(max(regret, search_ablation.LEAST), search_ablation.MOST))


def found(landscape: Landscape) -> float:
    """The same of searches by auto."""
    last = [replay(landscape, Method(seed=seed), FIRST)[-1] for seed in range(DRAWS)]
    return statistics.mean(map(clipped, last))


@pytest.mark.parametrize("small", [False, True])
def test_in_what_ships(small: bool) -> None:
    some = list(map(search_efficiency.cold, search_efficiency.shipped()))
    if small:
        some = search_ablation.landscapes_of("small", some, [])
    assert statistics.mean(map(found, some)) <= statistics.mean(map(expected, some))


@pytest.mark.slow("half a minute: it makes four large spaces")
@pytest.mark.parametrize("way", ["cold", "small"])
def test_in_what_is_made(way: str) -> None:
    some = search_ablation.landscapes_of(way, list(made_landscapes.landscapes()), [])
    assert statistics.mean(map(found, some)) <= statistics.mean(map(expected, some))


def test_random_points_are_drawn_without_replacement() -> None:
    """Of six points one is left out; each is, equally often."""
    points = tuple({"x": x} for x in range(6))
    times = (1.0, 2.0, None, 5.0, 9.0, 3.0)
    made = Landscape(name="made", source="made", unit="s", points=points, times=times)
    best, second = clipped(0.0), clipped(1.0)
    assert expected(made) == pytest.approx((5 * best + second) / 6)
