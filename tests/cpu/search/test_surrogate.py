"""search/surrogate.py: what is expected of points nobody evaluated, and what is worth trying next."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from flashgen.search import surrogate
from flashgen.search.points import ListedSpace
from flashgen.search.space import Point
from flashgen.search.surrogate import Expectation, Fit, Known, Process, heights_of, thinned

SIZES = (16, 32, 64, 128, 256)
SPACE: list[Point] = [
    {"rows": rows, "warps": warps, "way": way, "idle": idle}
    for rows, warps, way, idle in itertools.product(SIZES, (2, 4, 8), "ab", SIZES)
]


def smooth(point: Point) -> float:
    """Least at 64 rows, 4 warps, way b, in few steps; `idle` changes nothing."""
    off = abs(math.log2(float(point["rows"]) / 64)) + abs(math.log2(float(point["warps"]) / 4))
    return 100.0 * 1.2**off * (1.3 if point["way"] == "a" else 1.0)


def drawn(count: int, seed: int = 0) -> list[int]:
    return random.Random(seed).sample(range(len(SPACE)), count)


@dataclass
class Found:
    """What is expected of all points of a space."""

    expectation: Expectation
    fit: Fit
    best: float

    @property
    def mean(self) -> Any:
        return self.expectation.mean

    @property
    def spread(self) -> Any:
        return self.expectation.spread

    def scores(self) -> Any:
        return self.expectation.scores(self.best)


def expect(
    seen: Sequence[int],
    value: Callable[[Point], float | None] = smooth,
    trend: Sequence[float] | None = None,
    space: Sequence[Point] = SPACE,
    **fields: Any,
) -> Found:
    listed = ListedSpace(space)
    heights, best, _ = heights_of([value(space[number]) for number in seen])
    every = np.zeros(len(space)) if trend is None else np.array(trend)
    known = Known(codes=listed.codes(seen), heights=heights, trend=every[list(seen)])
    process = Process(listed.parameters, **fields)
    fit = process.refitted(None, known)
    expectation = process.expect(known, fit, listed.codes(range(len(space))), every, 0)
    return Found(expectation, fit, best)


class TestExpectation:
    def test_it_goes_through_what_is_known_and_is_less_sure_elsewhere(self) -> None:
        seen = drawn(40)
        found = expect(seen)
        cap = max(found.mean[seen])
        for number in seen:
            height = min(math.log(smooth(SPACE[number])), cap)
            assert found.mean[number] == pytest.approx(height, abs=0.02)
        others = np.setdiff1d(np.arange(len(SPACE)), seen)
        assert max(found.spread[seen]) < min(found.spread[others])

    def test_it_predicts_what_it_has_not_seen(self) -> None:
        found = expect(drawn(50))
        truth = np.array([math.log(smooth(point)) for point in SPACE])
        assert int(np.argmin(found.mean)) in np.flatnonzero(truth < truth.min() + 1e-9)
        assert np.corrcoef(found.mean, np.minimum(truth, found.mean.max()))[0, 1] > 0.9

    def test_a_parameter_that_changes_nothing_gets_a_long_length(self) -> None:
        fit = expect(drawn(50)).fit
        lengths = dict(zip(SPACE[0], fit.lengths, strict=True))
        assert lengths["idle"] > max(lengths["rows"], lengths["warps"])

    def test_what_no_parameter_explains_is_noise(self) -> None:
        chance = random.Random(1)
        found = expect(drawn(60), lambda point: 100.0 * math.exp(chance.gauss(0, 0.2)))
        assert found.fit.noise == max(surrogate.NOISES)
        assert expect(drawn(60)).fit.noise == min(surrogate.NOISES)

    def test_where_all_are_names_a_step_is_as_long_as_any(self) -> None:
        found = expect(drawn(50), names_only=True)
        rows = {p["rows"]: n for n, p in enumerate(SPACE) if (p["warps"], p["way"], p["idle"]) == (4, "b", 64)}  # fmt: skip
        one = expect([rows[64]], names_only=True)
        others = [one.spread[rows[size]] for size in SIZES if size != 64]
        assert others == pytest.approx([others[0]] * 4)
        assert expect([rows[64]]).spread[rows[32]] < expect([rows[64]]).spread[rows[16]]
        assert smooth(SPACE[int(np.argmin(found.mean))]) < 1.5 * min(map(smooth, SPACE))

    def test_how_slow_the_slow_ones_are_says_nothing(self) -> None:
        seen = drawn(30)
        slow = set(sorted(seen, key=lambda number: smooth(SPACE[number]))[-8:])
        found = [
            expect(seen, lambda point, by=by: smooth(point) * (by if SPACE.index(point) in slow else 1))  # type: ignore[misc]
            for by in (10.0, 1e6)
        ]  # fmt: skip
        assert (found[0].scores() == found[1].scores()).all()

    def test_values_below_zero_are_told_apart_too(self) -> None:
        seen = drawn(50)
        found = expect(seen, lambda point: smooth(point) - 150.0)
        best = min(SPACE, key=smooth)
        assert smooth(SPACE[int(np.argmin(found.mean))]) == smooth(best)

    @pytest.mark.parametrize("value", [0.0, -1.0, 1.0])
    def test_one_value_and_a_failure_are_enough(self, value: float) -> None:
        found = expect([7, 100], lambda point: value if point == SPACE[7] else None)
        assert np.isfinite(found.scores()).all()
        assert found.mean[7] < found.mean[100]

    def test_of_many_a_part_is_kept_with_the_best(self) -> None:
        heights = np.random.RandomState(0).permutation(surrogate.MOST_KNOWN * 3) / 7.0
        kept = thinned(heights)
        assert len(kept) == len(set(kept)) == surrogate.MOST_KNOWN
        assert set(np.argsort(heights)[: surrogate.MOST_KNOWN // 2]) <= set(kept)
        assert heights[kept].max() > np.quantile(heights, 0.98)
        assert list(thinned(heights[:9])) == list(range(9))

    def test_what_is_under_way_keeps_the_means_and_is_surer_of_its_surroundings(self) -> None:
        listed, seen = ListedSpace(SPACE), drawn(40)
        heights, _, _ = heights_of([smooth(SPACE[number]) for number in seen])
        known = Known(codes=listed.codes(seen), heights=heights, trend=heights * 0)
        process = Process(listed.parameters)
        fit = process.refitted(None, known)
        codes, none = listed.codes(range(len(SPACE))), np.zeros(len(SPACE))
        alone = process.expect(known, fit, codes, none, 0)
        under_way = process.expect(known, fit, codes, none, 3)
        assert under_way.mean == pytest.approx(alone.mean)
        assert (under_way.spread <= alone.spread + 1e-12).all()
        assert max(under_way.spread[:3]) < 0.5 * min(alone.spread[:3])
        # As if they had been evaluated, and come out as expected.
        more = Known(
            codes=np.concatenate([known.codes, codes[:3]]),
            heights=np.concatenate([heights, alone.mean[:3]]),
            trend=np.zeros(43),
        )
        after = process.expect(more, fit, codes, none, 0)
        ratio = under_way.spread / after.spread
        assert ratio == pytest.approx(ratio[0] * np.ones(len(SPACE)), rel=1e-6)

    def test_a_space_of_which_nothing_varies(self) -> None:
        assert np.isfinite(expect([0], lambda _: 1.0, space=[{"only": 1}]).scores()).all()


class TestFailures:
    def test_what_is_like_failures_is_tried_last(self) -> None:
        """All with 256 rows fail; five of the fifteen seen of them are known."""
        broken = [n for n, point in enumerate(SPACE) if point["rows"] == 256]
        seen = drawn(25) + broken[::5]
        found = expect(seen, lambda p: None if p["rows"] == 256 else smooth(p))
        rest = [n for n in range(len(SPACE)) if n not in seen]
        scores = found.scores()
        worst = sorted(rest, key=lambda n: scores[n])
        assert sum(SPACE[n]["rows"] == 256 for n in worst[-20:]) == 0


class TestGuesses:
    @staticmethod
    def crude(point: Point) -> float:
        """Half the truth, but for the ways, which it takes for the same."""
        return smooth(point) / (2.6 if point["way"] == "a" else 2.0)

    def test_a_good_guess_is_believed_from_the_first_value(self) -> None:
        found = expect([4], trend=[math.log(smooth(point) / 3) for point in SPACE])
        assert smooth(SPACE[int(np.argmin(found.mean))]) == min(map(smooth, SPACE))
        assert found.fit.slope == 1.0

    def test_what_it_has_wrong_is_learnt(self) -> None:
        found = expect(drawn(40), trend=[math.log(self.crude(point)) for point in SPACE])
        pairs = [
            (found.mean[n], found.mean[SPACE.index({**SPACE[n], "way": "b"})])
            for n in range(len(SPACE))
            if SPACE[n]["way"] == "a" and smooth(SPACE[n]) < 160
        ]
        assert sum(a > b for a, b in pairs) > 0.9 * len(pairs)

    def test_a_bad_one_is_not_believed(self) -> None:
        """It says the opposite."""
        found = expect(drawn(40), trend=[-math.log(smooth(point)) for point in SPACE])
        assert found.fit.slope == 0.0


class TestScores:
    @pytest.mark.parametrize("score", [-2.5000005, -2.5, 0.0, -4e9])
    def test_of_equals_the_first_is_chosen(self, score: float) -> None:
        """Wherever equals lie: a rounded score would have borders that a last bit can cross."""
        off = 1e-9 * max(1.0, abs(score))
        for scores in ([score - off, score, score + off], [score + off, score, score - off]):
            assert surrogate.choose_first([score - 1 - 0.1 * abs(score), *scores, -math.inf]) == 1
        assert surrogate.choose_first([score, score + 1 + 1e-5 * abs(score)]) == 1

    @pytest.mark.parametrize("z", [-30.0, -8.0, -2.0, -1.01, -0.99, 0.0, 1.5, 6.0])
    def test_they_are_the_logarithm_of_the_expected_improvement(self, z: float) -> None:
        """Against the integral of (z - x) phi(x) up to z, in steps."""
        steps = np.linspace(0.0, 12.0, 400_001)
        weights = np.exp(-np.square(z - steps) / 2 + min(z, 0.0) ** 2 / 2)
        integral = float(np.trapezoid(steps * weights, steps)) / math.sqrt(2 * math.pi)
        expected = math.log(integral) - min(z, 0.0) ** 2 / 2
        assert surrogate._log_improvement(np.array([z]))[0] == pytest.approx(expected, abs=1e-6)

    def test_they_fall_with_every_step_down_to_the_hopeless(self) -> None:
        z = -np.geomspace(1 / surrogate.TIE, 1e-3, 20_000)
        gains = surrogate._log_improvement(np.concatenate([[-1e12, -1e6], z, -z[::-1]]))
        assert np.isfinite(gains).all()
        assert gains[0] == gains[1] == gains[2]
        assert (np.diff(gains[2:]) > 0).all()
