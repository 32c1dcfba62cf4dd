"""minimize: seeds first, budgets, failures, every sampler by name, bad input, and no attention loaded."""

from __future__ import annotations

import itertools
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

import flashgen.search
from flashgen.errors import FlashgenError, InvalidArgument, ToolchainError
from flashgen.search import Budget, Evaluation, Method, Minimum, NoMinimum, ProductSpace, minimize
from flashgen.search.minimize import NotAValue
from flashgen.search.space import SAMPLERS, Point

ROOT = Path(__file__).resolve().parents[3]
FEW = ("auto", "exhaustive", "tpe", "random")


SPACE: list[Point] = [
    {"rows": rows, "warps": warps, "way": way, "late": late}
    for rows, warps, way, late in itertools.product(
        (16, 32, 64, 128, 256), (2, 4, 8), ("a", "b", "c"), (False, True)
    )
    if rows * warps >= 64
]
BEST: Point = {"rows": 64, "warps": 4, "way": "b", "late": True}


def cost(point: Point) -> float:
    """Least at BEST, 100."""
    off = abs(math.log2(float(point["rows"]) / 64)) + abs(math.log2(float(point["warps"]) / 4))
    return 100.0 * (1 + off + 2 * (point["way"] != "b") + 0.5 * (not point["late"]))


def search(sampler: str = "auto", *, seed: int = 0, trials: int = 12, **fields: Any) -> Minimum:
    evaluator = fields.pop("evaluator", cost)
    space = fields.pop("space", SPACE)
    method = Method(sampler=sampler, seed=seed)
    return minimize(space, evaluator, Budget(trials=trials), method=method, **fields)


def points(found: Minimum) -> list[Point]:
    return [each.point for each in found.evaluations]


class TestEverySampler:
    @pytest.mark.parametrize("sampler", SAMPLERS)
    def test_it_evaluates_as_many_as_the_budget_allows_and_none_twice(self, sampler: str) -> None:
        asked: list[Point] = []

        def evaluator(point: Point) -> float | None:
            asked.append(point)
            return None if point["way"] == "c" else cost(point)

        found = search(sampler, evaluator=evaluator)
        assert points(found) == asked
        assert len(asked) == (len(SPACE) if sampler == "exhaustive" else 12)
        assert len({tuple(point.items()) for point in asked}) == len(asked)
        assert all(point in SPACE for point in asked)
        known = [each.value for each in found.evaluations if each.value is not None]
        assert found.value == min(known) == cost(found.point)
        assert found.exhaustive is (sampler == "exhaustive")

    def test_exhaustive_keeps_the_order_whatever_the_budget(self) -> None:
        assert points(search("exhaustive", trials=1)) == SPACE

    def test_auto_is_what_is_taken_where_no_method_is_given(self) -> None:
        found = minimize(SPACE, cost, Budget(trials=12))
        assert points(found) == points(search("auto", seed=0))


class TestSeeds:
    CHOSEN = (SPACE[40], SPACE[3], SPACE[40], SPACE[20])

    @pytest.mark.parametrize("sampler", ["auto", "tpe", "exhaustive"])
    def test_they_are_evaluated_first_in_their_order_and_once(self, sampler: str) -> None:
        found = search(sampler, seeds=self.CHOSEN)
        assert points(found)[:3] == [SPACE[40], SPACE[3], SPACE[20]]
        assert SPACE[40] not in points(found)[3:]

    def test_they_cost_budget(self) -> None:
        assert points(search(trials=2, seeds=self.CHOSEN)) == [SPACE[40], SPACE[3]]

    def test_they_are_learnt_from(self) -> None:
        """With fifteen values known, nothing of what auto does next is left to chance."""
        seeds = SPACE[:75:5]
        assert len(seeds) == 15
        assert (
            search(seed=1, seeds=seeds, trials=20).evaluations
            == search(seed=2, seeds=seeds, trials=20).evaluations
        )

    def test_another_order_of_names_is_the_same_point(self) -> None:
        turned = MappingProxyType(dict(reversed(SPACE[7].items())))
        assert points(search(trials=1, seeds=[turned])) == [SPACE[7]]


class TestGuesses:
    def test_good_ones_find_the_best_at_once_up_to_a_factor_and_if_some_are_missing(self) -> None:
        def guess(point: Point) -> float | None:
            return None if point["way"] == "c" else cost(point) / 1e6

        assert points(search(guesses=guess, trials=1)) == [BEST]

    def test_wrong_ones_are_got_over(self) -> None:
        found = search(guesses=lambda point: 1e5 / cost(point), trials=40)
        assert found.value < np.quantile([cost(point) for point in SPACE], 0.05)

    def test_the_best_guesses_come_before_the_seeds(self) -> None:
        """And the seeds after three of them: guesses may be wrong."""
        found = points(search(guesses=cost, seeds=[SPACE[3], BEST], trials=5))
        assert list(map(cost, found[:3])) == sorted(map(cost, SPACE))[:3]
        assert found[3] == SPACE[3]
        assert BEST not in found[4:]  # a seed that was evaluated is not repeated
        assert points(search(seeds=[SPACE[3], BEST], trials=2)) == [SPACE[3], BEST]

    def test_other_samplers_do_not_heed_them(self) -> None:
        assert points(search("random", guesses=cost)) == points(search("random"))


class TestBudget:
    @staticmethod
    def in_seconds(seconds: float, monkeypatch: pytest.MonkeyPatch) -> int:
        """How many are evaluated where each takes a second."""
        clock = [1000.0]
        monkeypatch.setattr(time, "monotonic", lambda: clock[0])

        def evaluator(point: Point) -> float:
            clock[0] += 1.0
            return cost(point)

        method = Method(sampler="exhaustive")
        found = minimize(SPACE, evaluator, Budget(seconds=seconds), method=method)
        return len(found.evaluations)

    def test_none_is_begun_when_the_seconds_are_over(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert self.in_seconds(2.5, monkeypatch) == 3
        assert self.in_seconds(3.0, monkeypatch) == 3

    def test_one_is_evaluated_however_short_the_time(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert self.in_seconds(0.0, monkeypatch) == 1

    def test_more_trials_than_points_evaluate_each_once(self) -> None:
        found = search(space=SPACE[:4], trials=1000)
        assert (len(found.evaluations), found.exhaustive) == (4, True)
        assert search(space=SPACE[:4], trials=4).exhaustive
        assert not search(space=SPACE[:4], trials=3).exhaustive


class TestFailures:
    def test_a_failure_is_never_the_minimum(self) -> None:
        found = search("exhaustive", evaluator=lambda point: None if point == BEST else cost(point))
        assert found.value == sorted(map(cost, SPACE))[1]
        assert Evaluation(point=BEST, value=None) in found.evaluations

    @pytest.mark.parametrize("sampler", SAMPLERS)
    def test_where_all_fail_there_is_none(self, sampler: str) -> None:
        with pytest.raises(NoMinimum, match="all 6 that were evaluated failed") as caught:
            search(sampler, space=SPACE[::15], trials=6, evaluator=lambda _: None)
        assert isinstance(caught.value, FlashgenError)

    def test_of_equals_the_first_evaluated_is_taken(self) -> None:
        found = search("exhaustive", evaluator=lambda _: 7.0, seeds=[SPACE[5]])
        assert found.point == SPACE[5]

    def test_values_may_be_negative_or_nothing(self) -> None:
        found = search(trials=40, evaluator=lambda point: cost(point) - 250.0)
        assert found.value == cost(BEST) - 250.0
        assert search(trials=5, evaluator=lambda _: 0).value == 0

    def test_what_the_evaluator_raises_is_not_caught(self) -> None:
        def evaluator(point: Point) -> float:
            raise ZeroDivisionError("mine")

        with pytest.raises(ZeroDivisionError, match="mine"):
            search(evaluator=evaluator)

    def test_a_number_of_numpy_is_a_number(self) -> None:
        assert search(evaluator=lambda point: np.float32(cost(point))).value > 0  # type: ignore[misc]


class TestProduct:
    """Constraints as a predicate; nothing is enumerated."""

    def test_a_million_combinations_are_searched(self) -> None:
        asked: list[Point] = []

        def legal(point: Point) -> bool:
            asked.append(point)
            return (int(point["a"]) + int(point["b"])) % 3 != 0

        values = {name: range(10) for name in "abcdef"}
        found = minimize(
            ProductSpace(values, legal),
            lambda point: sum((int(value) - 4) ** 2 for value in point.values()) + 1.0,
            Budget(trials=60),
        )
        assert len(found.evaluations) == 60
        assert all(legal(each.point) for each in found.evaluations)
        assert found.value < 10
        assert not found.exhaustive
        assert len(asked) < 100_000

    def test_a_small_one_is_listed(self) -> None:
        space = ProductSpace(
            {"x": (1, 2, 3), "way": "ab"}, lambda p: p["x"] != 2 or p["way"] == "a"
        )
        found = minimize(space, lambda p: float(p["x"]), Budget(trials=50))
        assert (len(found.evaluations), found.exhaustive) == (5, True)
        assert found.point["x"] == 1

    def test_seeds_and_all_of_it(self) -> None:
        space = ProductSpace({"x": range(120), "y": range(100)}, lambda p: p["x"] == p["y"])
        seed = {"y": 7, "x": 7}
        found = minimize(space, lambda p: float(p["x"]), Budget(), seeds=[seed], method=Method(sampler="exhaustive"))  # fmt: skip
        assert found.evaluations[0].point == seed
        assert (len(found.evaluations), found.exhaustive) == (100, True)
        with pytest.raises(InvalidArgument, match="seeds must be points of the space"):
            minimize(space, lambda p: 1.0, Budget(), seeds=[{"x": 7, "y": 8}])

    def test_one_without_a_legal_point(self) -> None:
        with pytest.raises(InvalidArgument, match="none of 6 is legal"):
            minimize(ProductSpace({"x": (1, 2, 3), "way": "ab"}, lambda _: False), cost, Budget())
        large = ProductSpace({"x": range(101), "y": range(100)}, lambda _: False)
        with pytest.raises(NoMinimum):
            minimize(large, cost, Budget())


class TestNotify:
    def test_each_evaluation_is_told_as_it_is_done(self) -> None:
        told: list[Evaluation] = []
        counts: list[int] = []

        def evaluator(point: Point) -> float:
            counts.append(len(told))
            return cost(point)

        found = search(evaluator=evaluator, notify=told.append)
        assert tuple(told) == found.evaluations
        assert counts == list(range(12))


class Killed(BaseException):
    """Stands for a kill."""


@pytest.mark.parametrize("sampler", ["auto", "tpe", "random"])
@pytest.mark.parametrize("after", [0, 1, 7])
def test_a_killed_search_goes_on_from_a_record(sampler: str, after: int) -> None:
    """An evaluator that answers what it knows: nothing is computed twice, and the end is the same."""
    computed: list[Point] = []
    record: dict[str, float | None] = {}
    life = after

    def evaluator(point: Point) -> float | None:
        nonlocal life
        key = json.dumps(point)
        if key not in record:
            if life == 0:
                raise Killed
            life -= 1
            computed.append(point)
            record[key] = None if point["rows"] == 256 else cost(point)
        return record[key]

    with pytest.raises(Killed):
        search(sampler, evaluator=evaluator, trials=14)
    assert len(computed) == after
    life = 1000
    resumed = search(sampler, evaluator=evaluator, trials=14)
    assert len(computed) == 14
    undisturbed = search(
        sampler, trials=14, evaluator=lambda p: None if p["rows"] == 256 else cost(p)
    )
    assert resumed == undisturbed


def spaces() -> list[tuple[Sequence[Any], str]]:
    return [
        ([], "space must have a point at least: got none"),
        ([3], "a point must map names to values: got 3 for point 0"),
        ([{"x": 1}, "xy"], "a point must map names to values: got 'xy' for point 1"),
        (
            [{"x": 1, "y": 2}, {"x": 1}],
            "all points of a space must have the same parameters: point 0 has x, y, and point 1 x",
        ),
        (
            [{"x": 1}, {"x": None}],
            "the value of a parameter must be an int, a float, a string or a bool: got None for x of point 1",
        ),
        (
            [{"x": [1]}],
            "the value of a parameter must be an int, a float, a string or a bool: got [1] for x of point 0",
        ),
        ([{"x": 1.0}, {"x": math.nan}], "a number must be finite: got nan for x of point 1"),
        (
            [{"x": 1.0}, {"x": -(10**5000)}],
            "a number must be finite: got an int beyond all floats for x of point 1",
        ),
        ([{"x": math.inf}], "a number must be finite: got inf for x of point 0"),
        (
            [{"x": 1, "y": "a"}, {"x": 2, "y": "a"}, {"y": "a", "x": 1}],
            "no point may stand in a space twice: points 0 and 2 are both {'y': 'a', 'x': 1}",
        ),
    ]


class TestBadInput:
    @staticmethod
    def refused(**fields: Any) -> str:
        asked: list[Point] = []

        def evaluator(point: Point) -> float:
            asked.append(point)
            return cost(point)

        with pytest.raises(InvalidArgument) as caught:
            search(**{"evaluator": evaluator, **fields})
        assert isinstance(caught.value, ValueError)
        assert asked == []  # said before anything was computed
        return str(caught.value)

    @pytest.mark.parametrize(("space", "sentence"), spaces())
    def test_a_space_that_is_none(self, space: Sequence[Any], sentence: str) -> None:
        assert self.refused(space=space) == sentence

    @pytest.mark.parametrize(
        "seed", [{**BEST, "rows": 48}, {"rows": 64}, {}, {**BEST, "rows": [64]}, 3]
    )
    def test_a_seed_that_is_no_point(self, seed: Any) -> None:
        sentence = f"seeds must be points of the space: got {seed!r}"
        assert self.refused(seeds=[SPACE[0], seed]) == sentence

    @pytest.mark.parametrize("guess", [0, -1.0, math.nan, math.inf, "fast"])
    def test_a_guess_that_is_none(self, guess: Any) -> None:
        sentence = (
            f"a guess must be a finite number above 0, or None: got {guess!r} for {SPACE[0]!r}"
        )
        assert self.refused(guesses=lambda _: guess) == sentence

    @pytest.mark.parametrize("value", ["fast", [1.0], b"1"])
    def test_a_value_that_is_none_loses_nothing(self, value: Any) -> None:
        answers = iter([3.0, None, value])
        with pytest.raises(NotAValue) as caught:
            search("exhaustive", evaluator=lambda _: next(answers))
        assert str(caught.value) == (
            f"the evaluator must return a number, or None for a failure: got {value!r} for {SPACE[2]!r}"
        )
        assert isinstance(caught.value, InvalidArgument)
        assert [each.value for each in caught.value.evaluations] == [3.0, None]

    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
    def test_what_is_not_finite_is_a_failure_and_said_once(self, value: float) -> None:
        with pytest.warns(UserWarning, match="a value that is not finite counts as a fail") as said:
            found = search("exhaustive", evaluator=lambda p: value if p["way"] == "c" else cost(p))
        assert len(said) == 1
        failed = [each for each in found.evaluations if each.value is None]
        assert [each.point for each in failed] == [point for point in SPACE if point["way"] == "c"]

    @pytest.mark.parametrize(
        ("fields", "sentence"),
        [
            ({"trials": 0}, "trials must be at least 1: got 0"),
            ({"seconds": -1.0}, "time_budget must be finite and >= 0: got -1.0"),
            ({"seconds": math.nan}, "time_budget must be finite and >= 0: got nan"),
        ],
    )
    def test_a_budget_that_is_none(self, fields: dict[str, Any], sentence: str) -> None:
        with pytest.raises(InvalidArgument) as caught:
            Budget(**fields)
        assert str(caught.value) == sentence

    def test_a_method_that_is_none(self) -> None:
        known = (
            "auto, exhaustive, tpe, gp, cmaes, qmc, random, brute-force, or package.module:Class"
        )
        with pytest.raises(InvalidArgument) as caught:
            Method(sampler="best")
        assert str(caught.value) == f"sampler must be one of {known}: got 'best'"
        for seed in (-1, 2**32):
            with pytest.raises(InvalidArgument, match=f"seed must be 0 to 4294967295: got {seed}"):
                Method(seed=seed)


ALONE = """
import sys
from flashgen.search import Budget, Method, minimize

space = [{"x": x, "y": y} for x in range(6) for y in range(6)]
found = minimize(
    space, lambda p: (p["x"] - 4) ** 2 + p["y"], Budget(trials=20), method=Method(sampler=sys.argv[1])
)
assert found.value == 0, found.point
ours = sorted(name for name in sys.modules if name.startswith(("flashgen", "generated")))
others = [name for name in ("torch", "triton", "optuna", "yaml", "jinja2") if name in sys.modules]
print(ours, others)
"""


@pytest.mark.parametrize("sampler", ["auto", "tpe"])
def test_it_loads_nothing_of_attention(sampler: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ALONE, sampler],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    names = "acquisition journal minimize points sampler space study surrogate".split()
    ours = ["flashgen", "flashgen.errors", "flashgen.files", "flashgen.lazy", "flashgen.paths"]
    ours += ["flashgen.search", *(f"flashgen.search.{name}" for name in names), "flashgen.settings"]
    ours += ["flashgen.version"]
    assert done.stdout.strip() == f"{ours} ['optuna']"


def test_without_optuna_it_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("flashgen.search.study", "flashgen.search.journal", "flashgen.search.sampler"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ToolchainError, match=r'a search needs optuna: .*pip install "optuna'):
        search()


def test_the_package_names_what_it_has_and_no_more() -> None:
    for name in flashgen.search.__all__:
        assert getattr(flashgen.search, name)
    with pytest.raises(AttributeError, match="has no attribute 'maximize'"):
        _ = flashgen.search.maximize
