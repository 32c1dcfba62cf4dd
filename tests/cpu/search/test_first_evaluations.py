"""After five evaluations a search that was told nothing is as good as random points, in small spaces too."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace

import numpy as np
import pytest

from benchmarks import search_race
from benchmarks.recorded import Landscape, replay
from flashgen.search.space import Method

FIRST, DRAWS = 5, 20


def of_24(landscape: Landscape) -> Landscape:
    """Random points of the landscape, of which at least one has a time."""
    timed = np.array([time is not None for time in landscape.times])
    random = np.random.RandomState(7)
    some = random.choice(np.flatnonzero(timed), 1), random.choice(len(timed), 23)
    numbers = sorted(set(np.concatenate(some).tolist()))
    return replace(
        landscape,
        points=tuple(landscape.points[n] for n in numbers),
        times=tuple(landscape.times[n] for n in numbers),
    )


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
    return math.log(min(max(regret, search_race.LEAST), search_race.MOST))


def found(landscape: Landscape) -> float:
    """The same of searches by auto."""
    last = [replay(landscape, Method(seed=seed), FIRST)[-1] for seed in range(DRAWS)]
    return statistics.mean(map(clipped, last))


@pytest.mark.parametrize("small", [False, True])
def test_in_what_ships(small: bool) -> None:
    plain = {"seeds": (), "guesses": None, "likely_first": False}
    some = [replace(each, **plain) for each in search_race.shipped()]
    some = list(map(of_24, some)) if small else some
    assert statistics.mean(map(found, some)) <= statistics.mean(map(expected, some))


@pytest.mark.slow("half a minute: it searches four large spaces")
@pytest.mark.parametrize("small", [False, True])
def test_in_what_is_made(small: bool) -> None:
    some = search_race.of_folder("made")
    some = list(map(of_24, some)) if small else some
    assert statistics.mean(map(found, some)) <= statistics.mean(map(expected, some))
