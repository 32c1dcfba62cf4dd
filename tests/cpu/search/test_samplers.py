"""search/samplers.py, search/samplers/auto.py, search/samplers/optuna.py: points that are legal and new, from every sampler."""

from __future__ import annotations

import importlib.util
import itertools
import random
import warnings
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from flashgen.errors import InvalidArgument, ToolchainError
from flashgen.search.samplers import Proposer, auto, proposer_for
from flashgen.search.samplers.auto import LEAST_KNOWN, START, AutoProposer
from flashgen.search.samplers.optuna import OptunaProposer
from flashgen.search.samplers.surrogate import Expectation, Surrogate
from flashgen.search.space import Method, Point, Sampler

OPTUNAS: tuple[Sampler, ...] = ("random", "tpe", "gp", "cmaes", "genetic")
SAMPLERS: tuple[Sampler, ...] = ("auto", *OPTUNAS)

Tile = tuple[int, int, str]
TILES: list[Tile] = [
    (rows, warps, way)
    for rows, warps, way in itertools.product((16, 32, 64, 128), (2, 4, 8), ("a", "b"))
    if rows * warps >= 128
]


def point_of(tile: Tile) -> Point:
    return dict(zip(("rows", "warps", "way"), tile, strict=True))


def value(tile: Tile) -> float:
    rows, warps, way = tile
    return 10.0 + abs(rows - 64) / 16 + abs(warps - 4) + (way == "a")


def proposer(sampler: Sampler, seed: int = 0, legal: Sequence[Tile] = TILES) -> Proposer[Tile]:
    return proposer_for(Method(sampler=sampler, seed=seed), legal, point_of)


def searched(sampler: Sampler, seed: int, count: int) -> list[Tile]:
    made, found = proposer(sampler, seed), []
    for _ in range(count):
        (tile,) = made.propose(1)
        made.learn(tile, value(tile))
        found.append(tile)
    return found


@pytest.mark.parametrize("sampler", SAMPLERS)
class TestEverySampler:
    def test_all_of_a_space_come_once(self, sampler: Sampler) -> None:
        made, found = proposer(sampler), []
        while batch := made.propose(4):
            assert len(batch) <= 4
            found += batch
            for tile in batch:
                made.learn(tile, None if tile[0] == 128 else value(tile))
        assert len(found) == len(set(found))
        assert set(found) == set(TILES)
        assert made.propose(1) == []

    def test_what_is_pending_does_not_come_again(self, sampler: Sampler) -> None:
        made = proposer(sampler)
        first, second = made.propose(6), made.propose(6)
        assert len({*first, *second}) == 12

    def test_what_was_learnt_unasked_does_not_come(self, sampler: Sampler) -> None:
        made = proposer(sampler)
        for tile in TILES[3:]:
            made.learn(tile, value(tile))
        made.learn((1, 1, "no tile"), 0.1)
        assert set(made.propose(9)) == set(TILES[:3])

    def test_the_seed_decides(self, sampler: Sampler) -> None:
        assert searched(sampler, 1, 8) == searched(sampler, 1, 8)
        assert searched(sampler, 1, 8) != searched(sampler, 2, 8)

    def test_one_point_and_nothing_that_varies(self, sampler: Sampler) -> None:
        if sampler == "cmaes":
            pytest.skip("needs a parameter that varies")
        made = proposer(sampler, legal=TILES[:1])
        assert made.propose(3) == TILES[:1]
        made.learn(TILES[0], 1.0)
        assert made.propose(3) == []

    def test_nothing_is_warned_of(self, sampler: Sampler, caplog: pytest.LogCaptureFixture) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            searched(sampler, 0, 12)
        assert caplog.records == []


class TestOptuna:
    @pytest.mark.parametrize("sampler", ["gp", "cmaes"])
    def test_a_failure_is_told_as_the_worst_so_far(self, sampler: Sampler) -> None:
        """These samplers do not learn from what is pruned."""
        made = OptunaProposer(TILES, point_of, Method(sampler=sampler))
        for tile, seen in zip(TILES, (None, 12.0, 11.0, None), strict=False):
            made.learn(tile, seen)
        assert self.told(made) == [None, 12.0, 11.0, 12.0]

    def test_others_are_told_that_it_is_pruned(self) -> None:
        made = OptunaProposer(TILES, point_of, Method(sampler="tpe"))
        for tile, seen in zip(TILES, (None, 12.0, None), strict=False):
            made.learn(tile, seen)
        made.learn(TILES[1], 5.0)  # the first is believed
        assert self.told(made) == [None, 12.0, None]

    @staticmethod
    def told(made: OptunaProposer[Tile]) -> list[float | None]:
        return [trial.value for trial in made._study.trials]

    @pytest.mark.parametrize(("sampler", "numbers"), [("gp", True), ("cmaes", True), ("tpe", False)])  # fmt: skip
    def test_ordered_values_are_places_where_the_sampler_heeds_order(
        self, sampler: Sampler, numbers: bool
    ) -> None:
        made = OptunaProposer(TILES, point_of, Method(sampler=sampler))
        made.learn((128, 2, "b"), 1.0)
        (trial,) = made._study.trials
        expected = {"rows": 3, "warps": 0} if numbers else {"rows": 128, "warps": 2}
        assert trial.params == expected | {"way": "b"}

    def test_cmaes_says_where_it_does_not_apply(self) -> None:
        words = [(way, flag) for way in "ab" for flag in (True, False)]
        with pytest.raises(InvalidArgument, match=r"cmaes needs .* numbers: got way, flag; choose"):
            proposer_for(
                Method(sampler="cmaes"), words, lambda word: {"way": word[0], "flag": word[1]}
            )

    @pytest.mark.parametrize(("sampler", "package"), [("gp", "scipy"), ("cmaes", "cmaes")])
    def test_a_missing_package_is_named(
        self, sampler: Sampler, package: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        find = importlib.util.find_spec
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name: None if name == package else find(name)
        )
        with pytest.raises(ToolchainError, match=rf"{sampler} needs {package}: pip install"):
            proposer(sampler)


Place = tuple[int, int]
PLACES: list[Place] = list(itertools.product(range(8), range(8)))


def own(guesses: Sequence[float | None] | None = None, seed: int = 0) -> AutoProposer[Any]:
    def names(place: Hashable) -> Point:
        x, y = place  # type: ignore[misc]
        return {"x": x, "y": y}

    return AutoProposer(PLACES, names, seed, guesses)


def bowl(place: Place) -> float:
    """Least at (5, 2)."""
    return 10.0 + (place[0] - 5) ** 2 + (place[1] - 2) ** 2


class TestAuto:
    def test_what_it_is_told_leads_it_to_the_least(self) -> None:
        for seed in range(5):
            made, found = own(seed=seed), []
            while (5, 2) not in found:
                (place,) = made.propose(1)
                made.learn(place, bowl(place))
                found.append(place)
            assert len(found) < 20  # by chance it would be every third time

    def test_a_batch_is_spread_as_if_each_had_come_out_as_expected(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def gaps() -> int:
            made = own()
            for place in PLACES[1::9]:
                made.learn(place, bowl(place))
            batch = made.propose(6)
            assert len(set(batch)) == 6
            pairs = itertools.combinations(batch, 2)
            return sum(abs(a[0] - b[0]) + abs(a[1] - b[1]) for a, b in pairs)

        spread = gaps()
        monkeypatch.setattr(Expectation, "believe", lambda *_: None)
        assert spread > 2 * gaps()

    def test_told_again_it_believes_the_last(self) -> None:
        """An estimate said that all is best at (0, 7); then that was measured."""
        made, corrected = own(), own()
        for place in PLACES[::5]:
            for each in (made, corrected):
                each.learn(place, bowl(place))
        for each in (made, corrected):
            each.learn((0, 7), 1.0)
        corrected.learn((0, 7), bowl((0, 7)))
        near = [place for place in made.propose(3) if place[0] < 3 and place[1] > 4]
        assert near
        assert all(bowl(place) < 20 for place in corrected.propose(2))

    def test_until_some_have_values_it_draws(self) -> None:
        made = own(seed=3)
        drawn = made.propose(START - 1)
        assert drawn != own(seed=4).propose(START - 1)
        for place in drawn:
            made.learn(place, None)
        assert made.propose(1) == own(seed=3).propose(START)[-1:]  # failures are no values

    def test_failures_count_once_a_few_have_values(self) -> None:
        """Five are known: two values are too few to go by, three are not."""
        orders = [own(seed=seed).propose(START + 1) for seed in (3, 4)]
        for values, by_chance in ((LEAST_KNOWN - 1, True), (LEAST_KNOWN, False)):
            found = []
            for seed, order in zip((3, 4), orders, strict=True):
                made = own(seed=seed)
                for number, place in enumerate(PLACES[:: len(PLACES) // START][:START]):
                    made.learn(place, bowl(place) if number < values else None)
                (proposed,) = made.propose(1)
                found.append(proposed)
                assert (proposed in order) is by_chance
            assert (found[0] == found[1]) is not by_chance

    def test_the_best_guesses_come_first_and_those_without_one_last(self) -> None:
        guesses = [None if place[0] == 5 else bowl(place) for place in PLACES]
        known = sorted((p for p in PLACES if p[0] != 5), key=bowl)
        assert sorted(own(guesses).propose(2)) == sorted(known[:2])
        everywhere = own(guesses).propose(len(PLACES))
        assert all(place[0] != 5 for place in everywhere[:START])

    def test_of_equals_the_earlier_is_likelier_and_that_wears_off(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """All points are alike here, and the spread of those seen is even."""

        def mean_place(seen: int) -> float:
            made = own()
            for place in PLACES[:: len(PLACES) // seen]:
                made.learn(place, 10.0)
            batch = made.propose(4)
            return sum(PLACES.index(place) for place in batch) / 4

        heeded = mean_place(4)
        monkeypatch.setattr(auto, "TRUST", 0.0)
        assert heeded < mean_place(4) - 5

    @pytest.mark.parametrize("trust", [0.0, auto.TRUST])
    def test_the_last_bits_of_a_sum_decide_nothing(
        self, monkeypatch: pytest.MonkeyPatch, trust: float
    ) -> None:
        """Scores and evidences are off by more than the order in which BLAS adds can do. All names
        that no known point has are equal on paper.
        """
        monkeypatch.setattr(auto, "TRUST", trust)
        space = list(itertools.product(range(6), "abcdefgh"))

        def proposed() -> list[tuple[int, str]]:
            made = AutoProposer(space, lambda p: {"x": p[0], "name": p[1]}, seed=0)
            found = []
            for _ in range(6):
                batch = made.propose(2)
                found += batch
                for x, name in batch:
                    made.learn((x, name), 10.0 + (x - 2) ** 2)
            return found

        exact, chance = proposed(), random.Random(0)
        scores, solve = Expectation.scores, Surrogate._solve

        def rough(values: Any) -> Any:
            return values * np.array([1 + chance.uniform(-2e-7, 2e-7) for _ in values])

        def roughly_solved(*arguments: Any) -> Any:
            solved = solve(*arguments)
            return replace(solved, evidence=solved.evidence * (1 + chance.uniform(-2e-7, 2e-7)))

        monkeypatch.setattr(Expectation, "scores", lambda self: rough(scores(self)))
        monkeypatch.setattr(Surrogate, "_solve", roughly_solved)
        assert [proposed() for _ in range(5)] == [exact] * 5
