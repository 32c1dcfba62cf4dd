"""search/sampler.py, search/acquisition.py, search/study.py: points that are legal and new, from every sampler."""

from __future__ import annotations

import itertools
import multiprocessing
import random
import resource
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any, ClassVar

import numpy as np
import optuna
import pytest
from optuna.distributions import CategoricalDistribution, IntDistribution
from optuna.testing.pytest_samplers import (
    BasicSamplerTestCase,
    RelativeSamplerTestCase,
    SingleOnlySamplerTestCase,
)
from optuna.trial import TrialState

from flashgen.errors import InvalidArgument, ToolchainError
from flashgen.search import KernelSampler, acquisition, surrogate
from flashgen.search.acquisition import MIDDLE, START, Acquisition
from flashgen.search.points import ListedSpace, ProductSpace, Space
from flashgen.search.sampler import FIT
from flashgen.search.space import Method, Point
from flashgen.search.study import Trials, sampler_for
from flashgen.search.surrogate import Expectation, Process

SAMPLERS = ("auto", "tpe", "cmaes", "qmc", "random", "brute-force", "optuna.samplers:NSGAIISampler")
GENETIC = SAMPLERS[-1]

Tile = tuple[int, int, str]
TILES: list[Tile] = [
    (rows, warps, way)
    for rows, warps, way in itertools.product((16, 32, 64, 128), (2, 4, 8), ("a", "b"))
    if rows * warps >= 128
]


class TestOptunasOwn(BasicSamplerTestCase, RelativeSamplerTestCase, SingleOnlySamplerTestCase):
    """The tests that every sampler of Optuna's passes."""

    @pytest.fixture
    def sampler(self) -> Callable[[], KernelSampler]:
        return KernelSampler


def point_of(tile: Tile) -> Point:
    return dict(zip(("rows", "warps", "way"), tile, strict=True))


def value(tile: Tile) -> float:
    rows, warps, way = tile
    return 10.0 + abs(rows - 64) / 16 + abs(warps - 4) + (way == "a")


class Made:
    """A study whose points are known by others, which stand for them in a list."""

    def __init__(
        self, space: Space, method: Method, legal: Sequence[Any] = (), **fields: Any
    ) -> None:
        self.trials = Trials(space, method, **fields)
        self.legal = legal or range(space.size)

    def propose(self, count: int) -> list[Any]:
        numbers = (self.trials.ask() for _ in range(count))
        return [self.legal[number] for number in numbers if number is not None]

    def learn(self, each: Any, value: float | None) -> None:
        """Of a point that was not proposed, too."""
        number = self.legal.index(each)
        self.trials.begin(number)
        self.trials.tell(number, value)


def made_for(sampler: str, seed: int = 0, legal: Sequence[Tile] = TILES) -> Made:
    space = ListedSpace([point_of(tile) for tile in legal])
    return Made(space, Method(sampler=sampler, seed=seed), legal)


def searched(sampler: str, seed: int, count: int) -> list[Tile]:
    made, found = made_for(sampler, seed), []
    for _ in range(count):
        (tile,) = made.propose(1)
        made.learn(tile, value(tile))
        found.append(tile)
    return found


@pytest.mark.parametrize("sampler", SAMPLERS)
class TestEverySampler:
    def test_all_of_a_space_come_once(self, sampler: str) -> None:
        made, found = made_for(sampler), []
        while batch := made.propose(4):
            assert len(batch) <= 4
            found += batch
            for tile in batch:
                made.learn(tile, None if tile[0] == 128 else value(tile))
        assert len(found) == len(set(found))
        assert set(found) == set(TILES)
        assert made.propose(1) == []

    def test_what_is_pending_does_not_come_again(self, sampler: str) -> None:
        made = made_for(sampler)
        first, second = made.propose(6), made.propose(6)
        assert len({*first, *second}) == 12

    def test_what_was_learnt_unasked_does_not_come(self, sampler: str) -> None:
        made = made_for(sampler)
        for tile in TILES[3:]:
            made.learn(tile, value(tile))
        assert set(made.propose(9)) == set(TILES[:3])

    def test_the_seed_decides(self, sampler: str) -> None:
        assert searched(sampler, 1, 8) == searched(sampler, 1, 8)
        assert searched(sampler, 1, 8) != searched(sampler, 2**32 - 1, 8)

    def test_one_point_and_nothing_that_varies(self, sampler: str) -> None:
        made = made_for(sampler, legal=TILES[:1])
        assert made.propose(3) == TILES[:1]
        made.learn(TILES[0], 1.0)
        assert made.propose(3) == []

    def test_nothing_is_warned_of(self, sampler: str, caplog: pytest.LogCaptureFixture) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            searched(sampler, 0, 12)
        assert caplog.records == []


class TestOfOptuna:
    @pytest.mark.parametrize(("sampler", "ranks"), [("gp", True), (GENETIC, True), ("tpe", False)])
    def test_numbers_are_ranks_where_the_sampler_heeds_order(
        self, sampler: str, ranks: bool
    ) -> None:
        made = made_for(sampler)
        made.learn((128, 2, "b"), 1.0)
        (trial,) = made.trials.study.trials
        expected = {"rows": 3, "warps": 0} if ranks else {"rows": 128, "warps": 2}
        assert trial.params == expected | {"way": "b"}

    def test_a_failure_fails_and_what_is_illegal_is_pruned(self) -> None:
        made = made_for("random")
        for number, tile in enumerate(made.propose(14)):
            made.learn(tile, float(number) if number % 2 else None)
        trials = made.trials.study.trials
        states = [t.state for t in trials if "status" not in t.user_attrs]
        assert states == [TrialState.FAIL, TrialState.COMPLETE] * 7
        pruned = {t.user_attrs["status"]: t.state for t in trials if "status" in t.user_attrs}
        assert pruned == {"illegal": TrialState.PRUNED, "repeated": TrialState.PRUNED}

    def test_a_report_stands_and_a_sampler_is_made_anew_for_each_trial(self) -> None:
        space = ListedSpace([point_of(tile) for tile in TILES])
        made = Made(space, Method(sampler="random"), TILES, fresh=True)
        (tile,) = made.propose(1)
        before = made.trials.study.sampler
        for us in (5.0, 9.0):
            made.trials.report(TILES.index(tile), us, 0)
        assert made.trials.study.trials[-1].intermediate_values == {0: 5.0}
        made.propose(1)
        assert made.trials.study.sampler is not before

    @pytest.mark.parametrize(
        ("name", "sentence"),
        [
            ("nowhere.at_all:Sampler", "sampler: there is no module nowhere.at_all"),
            ("optuna.samplers:Best", "must be a class with the argument seed: .*Best"),
            ("optuna.samplers:GridSampler", "must be a class with the argument seed"),
            ("random:Random", "must be a class with the argument seed"),
            ("numpy.random:RandomState", "must be an optuna.samplers.BaseSampler: got <class"),
        ],
    )
    def test_what_is_no_sampler(self, name: str, sentence: str) -> None:
        with pytest.raises(InvalidArgument, match=sentence):
            sampler_for(name, 0)

    def test_a_package_that_is_missing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def missing(name: str) -> None:
            raise ModuleNotFoundError("no torch", name="torch")

        monkeypatch.setattr("importlib.import_module", missing)
        with pytest.raises(ToolchainError, match="the sampler gp needs torch: "):
            sampler_for("gp", 0)


class TestAnybodysStudy:
    """KernelSampler where the study and its objective are somebody else's."""

    @staticmethod
    def objective(trial: optuna.Trial) -> float:
        tile = (
            trial.suggest_int("rows", 16, 128),
            trial.suggest_categorical("warps", [8, 4, 2, 1]),
            trial.suggest_categorical("way", ["b", "a", "none"]),
        )
        assert tile in TILES
        return value(tile)

    @pytest.mark.parametrize("direction", ["minimize", "maximize"])
    def test_it_is_optimized(self, direction: str) -> None:
        sign = 1 if direction == "minimize" else -1
        sampler = KernelSampler([point_of(tile) for tile in TILES])
        study = optuna.create_study(sampler=sampler, direction=direction)
        study.optimize(lambda trial: sign * self.objective(trial), n_trials=14)
        assert sign * study.best_value == min(map(value, TILES))
        assert len({str(trial.params) for trial in study.trials}) == 14

    def test_two_studies_do_not_mix(self) -> None:
        sampler = KernelSampler([point_of(tile) for tile in TILES])
        paths = []
        for _ in range(2):
            study = optuna.create_study(sampler=sampler)
            study.optimize(self.objective, n_trials=10)
            paths.append([trial.params for trial in study.trials])
        assert paths[0] == paths[1]

    def test_threads_get_points_of_their_own(self) -> None:
        study = optuna.create_study(sampler=KernelSampler([point_of(tile) for tile in TILES]))
        trials = [study.ask() for _ in range(10)]
        points = [(t.suggest_int("rows", 16, 128), t.suggest_categorical("warps", [2, 4, 8]),
                   t.suggest_categorical("way", ["a", "b"])) for t in trials]  # fmt: skip
        assert len(set(points)) == 10
        assert set(points) <= set(TILES)

    def test_what_the_trials_of_a_point_say(self) -> None:
        """Its last value, which a failure takes not away; one that runs again has not failed."""
        sampler = KernelSampler([{"x": x} for x in range(6)])
        study = optuna.create_study(sampler=sampler)
        for x, state, value in (
            (0, TrialState.COMPLETE, 3.0), (0, TrialState.COMPLETE, 2.0), (0, TrialState.FAIL, None),
            (1, TrialState.FAIL, None), (2, TrialState.PRUNED, None), (2, TrialState.RUNNING, None),
            (3, TrialState.RUNNING, None), (4, TrialState.COMPLETE, float("inf")),
        ):  # fmt: skip
            trial = optuna.create_trial(
                params={"x": x},
                distributions={"x": IntDistribution(0, 5)},
                state=state,
                value=value,
            )
            study.add_trial(trial)
        study.enqueue_trial({"x": 1})
        own = study.ask().number
        for fields, under_way in (({}, [2, 3]), ({"ignored": {3}}, [2]), ({"closed": {3}}, [2])):
            sampler.assume(**fields)  # type: ignore[arg-type]
            seen = sampler._seen(study, study.get_trials()[own])
            assert seen.values == {0: 2.0, 1: None, 4: None}
            assert (seen.under_way, seen.closed) == (under_way, fields.get("closed", set()))

    def test_what_the_space_has_not_is_drawn_for_each_trial_and_name(self) -> None:
        study = optuna.create_study(sampler=KernelSampler([{"rows": 48}, {"rows": 64}]))
        many = IntDistribution(1, 10**6)
        drawn = [v for _ in range(3) for v in study.ask({"x": many, "y": many}).params.values()]
        assert len({*drawn}) == 6

    def test_a_fixed_parameter_is_kept_and_the_others_fit_it(self) -> None:
        study = optuna.create_study(sampler=KernelSampler([point_of(tile) for tile in TILES]))
        for rows in (16, 32, 128):
            study.enqueue_trial({"rows": rows})
        study.optimize(self.objective, n_trials=3)
        assert [trial.params["rows"] for trial in study.trials] == [16, 32, 128]

    def test_a_distribution_without_its_values_is_refused(self) -> None:
        study = optuna.create_study(sampler=KernelSampler([{"rows": 48}, {"rows": 64}]))
        with pytest.raises(ValueError, match="rows must contain the space's values: got "):
            study.ask({"rows": IntDistribution(1, 32)})

    def test_without_a_space_it_learns_of_the_product(self) -> None:
        choices = {"x": CategoricalDistribution(tuple(range(6))), "y": IntDistribution(0, 5)}
        study = optuna.create_study(sampler=KernelSampler())
        for _ in range(24):
            trial = study.ask(choices)
            study.tell(trial, (trial.params["x"] - 4) ** 2 + (trial.params["y"] - 5) ** 2)
        assert study.best_value == 0
        assert len({str(trial.params) for trial in study.trials[1:]}) == 23

    def test_a_new_sampler_goes_on_where_the_study_is(self) -> None:
        """By seed and trial number: nothing but the study is remembered."""
        paths = []
        for renewed in (False, True):
            study = optuna.create_study(sampler=KernelSampler([point_of(tile) for tile in TILES]))
            for _ in range(16):
                if renewed:
                    study.sampler = KernelSampler([point_of(tile) for tile in TILES])
                study.optimize(self.objective, n_trials=1)
            paths.append([trial.params for trial in study.trials])
            assert {f"{FIT}0", f"{FIT}1"} <= study.user_attrs.keys()
        assert paths[0] == paths[1]


Place = tuple[int, int]
PLACES: list[Place] = list(itertools.product(range(8), range(8)))


def own(
    guesses: Sequence[float | None] | None = None, seed: int = 0, *, likely_first: bool = False
) -> Made:
    space = ListedSpace([{"x": x, "y": y} for x, y in PLACES])
    method = Method(seed=seed, likely_first=likely_first)
    guess = (lambda p: guesses[PLACES.index((p["x"], p["y"]))]) if guesses else None
    return Made(space, method, PLACES, guesses=guess)


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
        monkeypatch.setattr(acquisition, "TURNS", (("pool", False),))

        def gaps() -> int:
            made = own()
            for place in PLACES[1::4]:
                made.learn(place, bowl(place))
            batch = made.propose(6)
            assert len(set(batch)) == 6
            pairs = itertools.combinations(batch, 2)
            return sum(abs(a[0] - b[0]) + abs(a[1] - b[1]) for a, b in pairs)

        spread, expect = gaps(), Process.expect

        def of_the_evaluated(self: Process, *given: Any) -> Expectation:
            return expect(self, *given[:-1], 0)

        monkeypatch.setattr(Process, "expect", of_the_evaluated)
        assert spread > 1.4 * gaps()

    def test_a_running_trial_is_worth_what_is_assumed_until_it_ends(self) -> None:
        """An estimate says that all is best at (0, 7); then that is measured."""
        misled, corrected, straight = own(), own(), own()
        for each in (misled, corrected, straight):
            for place in PLACES[::5]:
                each.learn(place, bowl(place))
            each.trials.begin(PLACES.index((0, 7)))
        for each in (corrected, straight):
            each.learn((0, 7), bowl((0, 7)))
        values = {PLACES.index((0, 7)): 1.0}
        led, right = (each.trials.ask(values=values) for each in (misled, corrected))
        assert right == straight.trials.ask() != led

    def test_a_running_trial_that_is_ignored_may_come_again(self) -> None:
        made = own()
        for place in PLACES:
            if place != (5, 2):
                made.learn(place, bowl(place))
        number = PLACES.index((5, 2))
        made.trials.begin(number)
        assert made.trials.ask({number}) == number
        assert made.trials.ask({number}, closed={number}) is None

    def test_until_some_have_values_it_draws(self) -> None:
        made = own(seed=3)
        drawn = made.propose(MIDDLE - 1)
        assert drawn != own(seed=4).propose(MIDDLE - 1)
        for place in drawn:
            made.learn(place, None)
        assert made.propose(1) == own(seed=3).propose(MIDDLE)[-1:]  # failures are no values

    def test_failures_count_once_one_has_a_value(self, monkeypatch: pytest.MonkeyPatch) -> None:
        rated: list[int] = []
        monkeypatch.setattr(Acquisition, "_expected_best", lambda *_: rated.append(values))
        for values in (0, 1):
            made = own()
            for number, place in enumerate(PLACES[:MIDDLE]):
                made.learn(place, bowl(place) if number < values else None)
            assert len(made.propose(1)) == 1
        assert rated == [1]

    def test_the_best_guesses_come_first_and_those_without_one_last(self) -> None:
        guesses = [None if place[0] == 5 else bowl(place) for place in PLACES]
        known = sorted((p for p in PLACES if p[0] != 5), key=bowl)
        assert sorted(own(guesses).propose(2)) == sorted(known[:2])
        everywhere = own(guesses).propose(len(PLACES))
        assert all(place[0] != 5 for place in everywhere[:START])

    def test_where_the_order_says_something_the_earlier_is_likelier_and_that_wears_off(
        self,
    ) -> None:
        """All points are alike here, and the spread of those seen is even."""

        def mean_place(seen: int, likely_first: bool) -> float:
            made = own(likely_first=likely_first)
            for place in PLACES[:: len(PLACES) // seen]:
                made.learn(place, 10.0)
            batch = made.propose(4)
            return sum(PLACES.index(place) for place in batch) / 4

        gain = {seen: mean_place(seen, False) - mean_place(seen, True) for seen in (8, 32)}
        assert gain[8] > 5
        assert gain[8] > 2 * gain[32]

    def test_it_starts_in_the_middle_or_with_likely_points(self) -> None:
        for seed in range(5):
            likely = own(seed=seed, likely_first=True).propose(4)
            assert max(map(PLACES.index, likely)) < len(PLACES) * acquisition.LIKELY
            drawn = own(seed=seed).propose(MIDDLE)
            assert all(2 <= x <= 5 and 2 <= y <= 5 for x, y in drawn)

    def test_where_the_order_is_wrong_it_starts_in_the_middle_too(self) -> None:
        for value in (None, 20.0):
            made = own(likely_first=True)
            for number in range(START + MIDDLE):
                (place,) = made.propose(1)
                likely = PLACES.index(place) < len(PLACES) * acquisition.LIKELY
                assert likely == (number < START)
                made.learn(place, value and value - PLACES.index(place))

    @pytest.mark.parametrize(("size", "count"), [(9, START), (28, 7), (64, MIDDLE)])
    def test_a_small_space_has_a_short_start(
        self, size: int, count: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Else most of it would be evaluated before anything is learnt."""
        rated: list[int] = []
        monkeypatch.setattr(Acquisition, "_expected_best", lambda *given: rated.append(1))
        made = Made(ListedSpace([{"x": x, "y": x % 3} for x in range(size)]), Method())
        for done in range(count + 1):
            (number,) = made.propose(1)
            assert bool(rated) == (done == count)
            made.learn(number, 1.0 + number)

    @pytest.mark.parametrize("likely_first", [False, True])
    def test_the_last_bits_of_a_sum_decide_nothing(
        self, monkeypatch: pytest.MonkeyPatch, likely_first: bool
    ) -> None:
        """Scores and evidences are off by more than the order in which BLAS adds can do. All names
        that no known point has are equal on paper.
        """
        points = list(itertools.product(range(6), "abcdefgh"))
        space = ListedSpace([{"x": x, "name": name} for x, name in points])
        method = Method(likely_first=likely_first)

        def proposed() -> list[int]:
            made, found = Made(space, method), []
            for _ in range(6):
                batch = made.propose(2)
                found += batch
                for number in batch:
                    made.learn(number, 10.0 + (points[number][0] - 2) ** 2)
            return found

        exact, chance = proposed(), random.Random(0)
        scores, solve = Expectation.scores, surrogate._solve

        def rough(values: Any) -> Any:
            return values * np.array([1 + chance.uniform(-2e-7, 2e-7) for _ in values])

        def roughly_solved(*arguments: Any) -> Any:
            solved = solve(*arguments)
            return solved._replace(evidence=solved.evidence * (1 + chance.uniform(-2e-7, 2e-7)))

        monkeypatch.setattr(Expectation, "scores", lambda *given: rough(scores(*given)))
        monkeypatch.setattr(surrogate, "_solve", roughly_solved)
        assert [proposed() for _ in range(5)] == [exact] * 5

    def test_a_second_valley_is_searched_too(self) -> None:
        """The best of the wide valley is 20; the narrow one, at the other end, goes down to 10."""
        values = range(5)
        space = ListedSpace(
            [
                {"a": a, "b": b, "c": c, "d": d, "e": e}
                for a, b, c, d, e in itertools.product(values, values, values, values, (0, 1))
            ]
        )

        def valleys(point: Point) -> float:
            steps = [int(point[name]) for name in "abcd"]
            if point["e"]:
                return 10.0 + 5.0 * sum(4 - step for step in steps)
            return 20.0 + sum(steps)

        for seed in range(3):
            made, found = Made(space, Method(seed=seed)), []
            for _ in range(80):
                (number,) = made.propose(1)
                found.append(valleys(space.point(number)))
                made.learn(number, found[-1])
            assert min(found) == 10.0


def longest_proposal(parameters: int, trials: int) -> tuple[float, int]:
    """Seconds of this process that the longest of so many proposals took, and its most KiB."""
    space = ProductSpace({f"p{number}": range(10) for number in range(parameters)})
    made, spent = Made(space, Method()), []
    for _ in range(trials):
        began = time.process_time()
        (number,) = made.propose(1)
        made.learn(number, 1.0 + sum(abs(int(v) - 3) for v in space.point(number).values()))
        spent.append(time.process_time() - began)
    return max(spent), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


class TestProduct:
    """A space whose points are not listed."""

    VALUES: ClassVar[dict[str, Any]] = {
        "rows": range(40),
        "columns": range(40),
        "way": ("a", "b", "c"),
        "depth": range(30),
    }

    @staticmethod
    def legal(point: Point) -> bool:
        return (int(point["rows"]) + int(point["columns"])) % 4 == 0

    @pytest.mark.parametrize("sampler", SAMPLERS[:5])
    def test_every_sampler_proposes_legal_points_of_it(self, sampler: str) -> None:
        space = ProductSpace(self.VALUES, self.legal)
        made = Made(space, Method(sampler=sampler))
        found: list[int] = []
        for _ in range(12):
            batch = made.propose(1)
            found += batch
            for number in batch:
                made.learn(number, 1.0 + number % 7)
        assert len(set(found)) == 12
        assert all(self.legal(space.point(number)) for number in found)

    def test_auto_looks_at_few_of_its_points(self) -> None:
        asked: list[Point] = []

        def legal(point: Point) -> bool:
            asked.append(point)
            return self.legal(point)

        made = Made(ProductSpace(self.VALUES, legal), Method())
        asked.clear()
        for _ in range(20):
            (number,) = made.propose(1)
            made.learn(number, 1.0 + number % 7)
        assert len(asked) < 20 * 4000  # of 144,000 for one look at all

    @pytest.mark.slow("20 s: a thousand proposals")
    @pytest.mark.parametrize(("parameters", "trials", "limit"), [(6, 100, 0.2), (5, 1000, 0.3)])
    def test_proposals_in_large_spaces_are_cheap(
        self, parameters: int, trials: int, limit: float
    ) -> None:
        """100 proposals of 1,000,000 points, and 1,000 of 100,000, in a process of their own."""
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, mp_context=spawn) as process:
            longest, kib = process.submit(longest_proposal, parameters, trials).result()
        assert longest < limit
        assert kib < 1e6
