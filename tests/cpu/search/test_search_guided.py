"""search on a GPU with estimates: who is measured, in what order, and who is not."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from flashgen.schedules.config import KernelConfig
from flashgen.schedules.outcome import Outcome, Stage, Status
from flashgen.search.acquisition import Acquisition, Seen
from flashgen.search.explore import BATCH, DOUBT, LOOK_AHEAD
from flashgen.search.goal import Found, Goal, Progress, goal_for
from flashgen.search.study import Trials
from flashgen.spec.gpu import TARGETS
from flashgen.spec.problem import workload
from tests.fakes import FakeEvaluator, digest_of
from tests.makers import each, make_config
from tests.searches import (
    BEST,
    DEFAULT,
    GPU,
    PROBLEM,
    SPACE,
    SPEC,
    fake,
    landscape,
    make_goal,
    noisy,
    run,
)

SEED = make_config(32, 32)


def half(config: KernelConfig) -> float:
    """An estimate that is right up to a factor."""
    return landscape(config) / 2


def guided(guess: Callable[[KernelConfig], float | None] = noisy, **fields: Any) -> FakeEvaluator:
    return fake(guess=guess, **fields)


def table(known: dict[KernelConfig, float], other: float | None) -> Callable[..., float | None]:
    return lambda config: known.get(config, other)


class TestEnumerated:
    """All configs fit the budget."""

    def run(self, folder: Path, evaluator: FakeEvaluator, **fields: Any) -> Found:
        return run(folder, evaluator, **{"trials": len(SPACE), "sampler": "exhaustive"} | fields)

    def test_all_are_compiled_and_then_measured_in_the_order_of_their_estimates(
        self, tmp_path: Path
    ) -> None:
        evaluator = guided(half)
        found = self.run(tmp_path, evaluator)
        for stage in ("check", "rough"):
            assert evaluator.configs(stage) == [DEFAULT, *(c for c in self.order() if c != DEFAULT)]
        after = evaluator.asked[evaluator.asked.index(("check", self.order()[0])) :]
        assert "compile" not in {stage for stage, _ in after}
        assert found.winner.config == BEST
        assert found.exhaustive

    @staticmethod
    def order() -> list[KernelConfig]:
        """The promising by estimate, and the seeds among them; then the others."""
        least = min(map(half, SPACE))
        later = {c for c in SPACE if half(c) > 1.5 * least} - {DEFAULT, SEED}
        assert 5 < len(later) < len(SPACE) - 5
        return sorted(SPACE, key=lambda c: (c in later, half(c)))

    def test_estimate_and_measurement_stand_side_by_side(self, tmp_path: Path) -> None:
        found = self.run(tmp_path, guided())
        for outcome in (found.winner, *found.runners_up, found.default):
            assert outcome.estimate is not None
            assert outcome.timing is not None
            assert outcome.estimate.median_us == noisy(outcome.config)
            assert outcome.timing.median_us == landscape(outcome.config)
        records = (tmp_path / "log.jsonl").read_text().splitlines()
        assert sum('"stage":"timed"' in r and '"estimate":{' in r for r in records) > 5

    def test_where_nothing_is_estimated_each_batch_is_measured_before_the_next(
        self, tmp_path: Path
    ) -> None:
        evaluator = guided(table({}, None))
        self.run(tmp_path, evaluator)
        stages = [
            stage for stage, _ in itertools.groupby(evaluator.asked, key=lambda each: each[0])
        ]
        assert stages.count("compile") == 1 + -(-len(SPACE) // BATCH)

    def test_time_runs_out_on_the_worst(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        clock = itertools.count()
        monkeypatch.setattr(time, "monotonic", lambda: float(next(clock)))
        evaluator = guided(half)
        found = self.run(tmp_path, evaluator, seconds=20.0)
        measured = evaluator.configs("rough")
        assert len(evaluator.configs("compile")) == len(SPACE) > len(measured) > BATCH
        others = [config for config in self.order() if config != DEFAULT]
        assert measured == [DEFAULT, *others[: len(measured) - 1]]
        assert found.candidates == len(evaluator.configs("check")) < found.legal
        assert not found.exhaustive

    def test_compiling_takes_no_more_than_half_of_the_time(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A compile takes a second here, and all else no time."""
        evaluator = guided(us=area, guess=lambda c: area(c) / 3, band=(0.1, 1.0))
        compiled = 0

        def clock() -> float:
            return float(len(evaluator.configs("compile")))

        monkeypatch.setattr(time, "monotonic", clock)
        self.run(tmp_path, evaluator, goal=real_goal(), seconds=200.0)
        for stage, config in evaluator.asked:
            compiled += stage == "compile"
            if stage == "rough" and config != DEFAULT:
                break
        assert 100 <= compiled < 100 + BATCH * LOOK_AHEAD
        assert len(evaluator.configs("compile")) > compiled  # and so it goes on, in turn
        assert len(evaluator.configs("rough")) > 100


class TestStop:
    """What cannot win is left out, unless all were asked for."""

    @staticmethod
    def evaluator(**fields: Any) -> FakeEvaluator:
        return guided(lambda config: landscape(config) / 2, **fields)

    @staticmethod
    def hopeless() -> set[KernelConfig]:
        """Here all times are twice the estimate, and the lower edge lies at 0.8 of that."""
        return {config for config in SPACE if 0.8 * landscape(config) > landscape(BEST)}

    def test_what_cannot_win_is_not_measured(self, tmp_path: Path) -> None:
        evaluator = self.evaluator()
        found = run(tmp_path, evaluator, trials=len(SPACE))
        first = set(sorted(SPACE, key=landscape)[:BATCH])  # before anything is known
        measured = set(evaluator.configs("rough"))
        assert measured >= set(SPACE) - self.hopeless() | {DEFAULT, SEED}
        assert {DEFAULT, SEED} < self.hopeless() - first
        assert len(measured - (set(SPACE) - self.hopeless())) <= BATCH + len(SPACE) // DOUBT
        assert found.winner.config == BEST
        assert not found.exhaustive

    def test_a_search_of_all_by_name_measures_all(self, tmp_path: Path) -> None:
        evaluator = self.evaluator()
        assert run(tmp_path, evaluator, sampler="exhaustive").exhaustive
        assert set(evaluator.configs("rough")) == set(SPACE)


class TestSampled:
    """A sampler proposes, more than is measured."""

    FAR = make_config(64, 32, num_warps=8, num_stages=3)
    """Estimated at 1.6 of the best, by far the fastest in truth."""

    def guess(self, config: KernelConfig) -> float:
        return 160.0 if config == self.FAR else 100.0 + SPACE.index(config) * 0.1

    def us(self, config: KernelConfig) -> float:
        return 20.0 if config == self.FAR else 200.0

    def run(self, folder: Path, **fields: Any) -> tuple[Found, FakeEvaluator]:
        evaluator = guided(self.guess, us=self.us, band=(0.1, 2.0))
        return run(folder, evaluator, **fields), evaluator

    def test_one_at_1_6_is_measured_in_the_end(self, tmp_path: Path) -> None:
        """One of the space never compiles, so there are trials for all others."""
        broken = SPACE[5]
        evaluator = guided(
            self.guess, us=self.us, band=(0.1, 2.0),
            failing=lambda stage, c: Status.SPILLS if (stage, c) == ("compile", broken) else None,
        )  # fmt: skip
        found = run(tmp_path, evaluator, trials=len(SPACE) - 1)
        assert found.winner.config == self.FAR

    @pytest.mark.parametrize("special", ["incumbent", "default", "seed"])
    def test_a_terrible_estimate_loses_none_that_must_run(
        self, tmp_path: Path, special: str
    ) -> None:
        changes = {"seeds": (DEFAULT, self.FAR)} if special == "seed" else {special: self.FAR}
        found, evaluator = self.run(tmp_path, trials=6, goal=make_goal(**changes))
        assert found.winner.config == self.FAR
        assert len(evaluator.configs("check")) == 6 + (special == "incumbent")

    def test_good_estimates_come_before_seeds_that_are_measured_all_the_same(
        self, tmp_path: Path
    ) -> None:
        seeds = SPACE[20:5:-1]
        _, evaluator = self.run(tmp_path, trials=40, goal=make_goal(seeds=seeds))
        measured = evaluator.configs("check")
        by_estimate = BATCH - BATCH // DOUBT
        assert measured[0] == DEFAULT
        first = measured[1:][: by_estimate - 1]
        assert first == sorted(first, key=self.guess)
        assert max(map(self.guess, first)) <= min(map(self.guess, seeds))
        assert set(seeds) <= set(measured)

    @pytest.mark.parametrize("sampler", ["auto", "random"])
    def test_of_those_compiled_the_best_are_measured(self, tmp_path: Path, sampler: str) -> None:
        real = real_goal()
        evaluator = guided(us=area, guess=lambda c: area(c) / 3, band=(0.1, 1.0))
        trials = len(real.first) + 2 * BATCH
        found = run(tmp_path, evaluator, goal=real, trials=trials, sampler=sampler)
        compiled, measured = evaluator.configs("compile"), evaluator.configs("check")
        assert len(measured) == found.candidates == trials
        begun = evaluator.asked.index(("check", measured[1]))
        first = [c for stage, c in evaluator.asked[:begun] if stage == "compile"]
        by_estimate = [c for c in measured[:BATCH] if c not in real.first]
        assert by_estimate
        missed = set(first) - set(real.first) - set(measured)
        assert all(area(c) > max(map(area, by_estimate)) for c in missed)
        assert found.candidates < len(compiled) < found.legal

    def test_the_postponed_wait_until_nothing_more_is_compiled(self, tmp_path: Path) -> None:
        """One of eight is promising: but for the doubted, a round is not filled up."""
        real = real_goal()
        near = {c for c in real.legal if random.Random(c.label).random() < 1 / 8}
        evaluator = guided(us=area, guess=lambda c: 30.0 if c in near else 90.0, band=(0.01, 1.0))
        trials = len(real.first) + 2 * BATCH
        run(tmp_path, evaluator, goal=real, trials=trials)
        compiled, measured = evaluator.configs("compile"), evaluator.configs("check")
        tiles = {(config.br, config.bc) for config in measured}
        left = near & set(compiled) - set(measured)
        assert all((config.br, config.bc) in tiles for config in left)  # known by another's error
        assert len(left) < len(near & set(measured))
        far = set(measured) - near - set(real.first)
        assert len(measured) == trials
        assert far

    @pytest.mark.parametrize(
        "fault", each(["slow", "wrong", "fails at the launch"], 3, "a second a search")
    )
    def test_a_seed_that_is_not_what_was_estimated_sets_no_standard(
        self, tmp_path: Path, fault: str
    ) -> None:
        """It would postpone all others, and then as many would be compiled as may be at most."""
        real = real_goal()
        bad = real.first[0]
        statuses = {
            "wrong": {("check", bad): Status.WRONG},
            "fails at the launch": {("rough", bad): Status.RUN_ERROR},
            "slow": {},
        }[fault]
        evaluator = guided(
            us=lambda c: area(c) * (5 if (c, fault) == (bad, "slow") else 1),
            guess=lambda c: area(c) / (30 if c == bad else 3),
            band=(0.1, 1.0),
            failing=lambda *asked: statuses.get(asked),
        )
        trials = len(real.first) + 2 * BATCH
        run(tmp_path, evaluator, goal=real, trials=trials)
        assert len(evaluator.configs("check")) == trials
        assert len(evaluator.configs("compile")) < LOOK_AHEAD * trials

    def test_where_nothing_more_can_win_only_doubts_go_on(self, tmp_path: Path) -> None:
        """The trials would allow more, but only so many are compiled, and a third are measured."""
        real = real_goal()
        guess = dict.fromkeys(real.first, 50.0)
        evaluator = guided(table(guess, 5e3), us=lambda c: 2 * guess.get(c, 5e3))
        run(tmp_path, evaluator, goal=real, trials=60)
        measured = evaluator.configs("check")
        assert set(real.first) < set(measured)
        assert len(measured) <= len(real.first) + 60 // DOUBT
        assert len(evaluator.configs("compile")) <= LOOK_AHEAD * 60

    def test_the_sampler_learns_scaled_estimates_of_those_that_wait(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assumed: list[dict[int, float]] = []
        ask = Trials.ask

        def noted(self: Trials, again: set[int], values: dict[int, float], *others: Any) -> Any:
            assumed.append(values)
            return ask(self, again, values, *others)

        monkeypatch.setattr(Trials, "ask", noted)
        broken = {c for c in SPACE if c.br == 128} - {BEST}
        evaluator = guided(
            half,
            failing=lambda stage, c: Status.SPILLS if stage == "compile" and c in broken else None,
        )
        run(tmp_path, evaluator, trials=16)
        measured = evaluator.configs("check")
        waiting = set(evaluator.configs("compile")) - set(measured) - broken
        assert len(waiting) > 3
        (last,) = [values for values in assumed if values][-1:]
        assert {SPACE[number] for number in last} <= waiting | set(measured)
        for number, value in last.items():  # here measured times are twice the estimates
            assert value == pytest.approx(landscape(SPACE[number]), rel=1e-6)

    def test_what_waits_without_an_estimate_is_no_failure(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        told: list[float | None] = []
        choose = Acquisition.choose

        def noted(self: Acquisition, seen: Seen, *others: Any) -> int | None:
            told.extend(seen.values.values())
            return choose(self, seen, *others)

        monkeypatch.setattr(Acquisition, "choose", noted)
        evaluator = guided(table({DEFAULT: 50.0}, None))
        run(tmp_path, evaluator, trials=20)
        assert told
        assert None not in told
        assert len(evaluator.configs("check")) == 20


def real_goal() -> Goal:
    """The space of an A100: all by pointer, so that no twin is compiled and checked besides."""
    a100 = TARGETS["nvidia_a100_sxm4_80gb"]
    return replace(goal_for(SPEC, PROBLEM, a100), digest_of=digest_of)


def area(config: KernelConfig) -> float:
    """Microseconds, different for all configs."""
    least = 100.0 + 1e4 / config.br / 16 + config.bc / 8
    return least + random.Random(config.label).random()


class TestKilled:
    GUESSES: ClassVar[dict[str, Callable[[KernelConfig], float | None]]] = {
        "noisy": noisy,
        "none of the seeds": lambda c: None if c in (DEFAULT, SEED) else noisy(c),
        "the winner far below": lambda c: 20.0 if c == BEST else noisy(c),
        "the winner rather late": lambda c: 140.0 if c == BEST else 100.0 + SPACE.index(c),
    }

    @pytest.mark.parametrize(
        ("guess", "trials", "sampler"),
        [
            ("the winner rather late", 16, "tpe"),
            ("the winner rather late", 30, "random"),
            *each(
                itertools.product(GUESSES, (16, 30, len(SPACE)), ("random", "tpe")),
                why="make test has two",
            ),
        ],
    )
    def test_run_again_with_its_own_winner_it_takes_the_same_path(
        self, tmp_path: Path, guess: str, trials: int, sampler: str
    ) -> None:
        """The incumbent is known from the start then, and must not change what comes before it."""
        options: dict[str, Any] = {"trials": trials, "sampler": sampler}
        evaluator, again = guided(self.GUESSES[guess]), guided(self.GUESSES[guess])
        first = run(tmp_path, evaluator, **options)
        goal = make_goal(incumbent=first.winner.config)
        second = run(tmp_path, again, goal=goal, **options)
        assert again.asked == []
        assert second.winner == first.winner
        assert second.runners_up == first.runners_up
        assert second.candidates == first.candidates

    def test_so_it_does_where_the_winner_had_waited(self, tmp_path: Path) -> None:
        """It is proposed in the first round and measured in the second; the sampler learns in between."""
        real = real_goal()
        trials = len(real.first) + 3 * BATCH

        def once(
            folder: str, order: int, best: KernelConfig | None, goal: Goal
        ) -> tuple[Found, FakeEvaluator]:
            evaluator = guided(
                us=lambda c: 60.0 if c == best else area(c),
                guess=lambda c: 100.0 + 40.0 * random.Random(f"{order}{c.label}").random(),
                band=(0.1, 1.0),
            )
            return run(tmp_path / folder, evaluator, goal=goal, trials=trials), evaluator

        def waiting(order: int) -> tuple[KernelConfig | None, FakeEvaluator]:
            _, probe = once(f"probe {order}", order, None, real)
            second = len(real.first) + BATCH
            proposed = probe.configs("compile")[len(real.first) :][: BATCH * LOOK_AHEAD]
            measured = probe.configs("check")[second : second + BATCH]
            return next((config for config in measured if config in proposed), None), probe

        # Of made-up orders, the first in which one waits.
        orders = ((order, *waiting(order)) for order in range(20))
        order, best, probe = next(each for each in orders if each[1])
        first, evaluator = once("a", order, best, real)
        assert first.winner.config == best
        assert evaluator.configs("compile")[:30] == probe.configs("compile")[:30]
        again, evaluator = once("a", order, best, replace(real, incumbent=best))
        assert evaluator.asked == []
        assert again.winner == first.winner

    def test_another_length_is_estimated_anew(self, tmp_path: Path) -> None:
        """Its compiles come back with its own estimates; what failed, and the checks, are known."""
        broken = SPACE[7]

        class Lengths(FakeEvaluator):
            def outcome(self, stage: Stage, spec: Any, problem: Any, config: Any) -> Outcome:
                self.guess = lambda c: noisy(c) * problem.seq_k / 4096
                return super().outcome(stage, spec, problem, config)

        def evaluator() -> FakeEvaluator:
            return Lengths(
                us=landscape, gpu=GPU,
                failing=lambda *asked: Status.SPILLS if asked == ("compile", broken) else None,
            )  # fmt: skip

        run(tmp_path, evaluator(), sampler="exhaustive")
        other = evaluator()
        short = make_goal(problem=workload(SPEC, 512))
        found = run(tmp_path, other, goal=short, sampler="exhaustive")
        assert {stage for stage, _ in other.asked} == {"compile", "rough", "timed", "final"}
        assert set(other.configs("compile")) == set(SPACE) - {broken}
        assert found.winner.estimate is not None
        assert found.winner.estimate.median_us == noisy(BEST) / 8
        again = evaluator()
        assert run(tmp_path, again, goal=short, sampler="exhaustive") == found
        run(tmp_path, again, sampler="exhaustive")
        assert again.asked == []


@pytest.mark.parametrize(
    ("fields", "trials", "least"),
    [
        ({"us": area, "guess": lambda c: area(c) / 3}, 20, 0.6),
        ({"us": area, "source": "measured"}, 30, 0.9),
        ({"us": area, "source": "estimated"}, 30, 0.9),
    ],
)
def test_progress_only_grows_and_ends_near_its_total(
    tmp_path: Path, fields: dict[str, Any], trials: int, least: float
) -> None:
    steps: list[Progress] = []
    run(tmp_path, fake(**fields), goal=real_goal(), trials=trials, notify=steps.append)
    done = [step.done for step in steps]
    assert done == sorted(done)
    assert all(step.done <= step.total for step in steps)
    assert done[-1] > least * steps[-1].total
    assert steps[0].best_us is None
    assert steps[-1].best_us == min(step.best_us for step in steps if step.best_us)
