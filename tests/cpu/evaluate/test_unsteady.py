"""A clock that drops in the middle of a run: marked, measured again; and the end where it stays low."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from flashgen.evaluate.gpu_state import SAME_WITHIN, WAITS_S, Clock, ClockChanged
from flashgen.evaluate.on_gpu import GpuEvaluator
from flashgen.evaluate.payloads import Tasks
from flashgen.evaluate.steadily import steadily
from flashgen.evaluate.workers.answers import Answer, Done, Raised, Task
from flashgen.schedules.config import KernelConfig
from flashgen.schedules.outcome import Outcome, Stage, Status
from flashgen.search.goal import Found, NothingRight
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.problem import Problem
from tests.fakes import FakeEvaluator
from tests.makers import make_config
from tests.searches import BEST, GPU, PROBLEM, SPACE, SPEC, fake, landscape, make_goal, run

HIGH, LOW = 1980.0, 990.0
UNSTEADY = Status.UNSTEADY


@pytest.fixture(autouse=True)
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The waits of a test, in seconds. Nobody waits for them."""
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    return waits


class TestClock:
    def test_the_first_figure_is_the_usual_one(self) -> None:
        clock = Clock()
        assert clock.why_unsteady(HIGH) == ""
        assert clock.usual_mhz == HIGH
        assert clock.why_unsteady(LOW) == "the GPU's clock went from 1980 to 990 MHz"

    @pytest.mark.parametrize("usual", [LOW, HIGH])
    def test_a_run_that_goes_on_knows_it_already(self, usual: float) -> None:
        clock = Clock(usual)
        assert clock.why_unsteady(usual) == ""
        assert clock.why_unsteady(HIGH + LOW - usual) != ""  # the other one, higher or lower

    @pytest.mark.parametrize("mhz", [HIGH / SAME_WITHIN * 1.001, HIGH * SAME_WITHIN * 0.999, None])
    def test_a_boost_that_comes_and_goes_is_no_change(self, mhz: float | None) -> None:
        clock = Clock(HIGH)
        assert clock.why_unsteady(mhz) == ""
        assert clock.usual_mhz == HIGH  # nor does it drift away in small steps

    def test_one_that_stays_ends_the_run(self) -> None:
        clock = Clock(HIGH)
        for _ in WAITS_S:
            assert clock.why_unsteady(LOW)
        with pytest.raises(ClockChanged, match=r"from 1980 to 990 MHz .* stays there") as caught:
            clock.why_unsteady(LOW)
        assert "\n" not in str(caught.value)

    def test_one_that_comes_back_does_not(self) -> None:
        clock = Clock(HIGH)
        for _ in range(3):
            for _ in WAITS_S:
                assert clock.why_unsteady(LOW)
            assert clock.why_unsteady(HIGH) == ""


@dataclass
class Answers:
    """Evaluates by a list of what each config's next measurements are; OK when that is used up."""

    coming: dict[KernelConfig, list[Status]]
    asked: list[list[KernelConfig]] = field(default_factory=list)
    begun: list[KernelConfig] = field(default_factory=list)
    marked: list[Outcome] = field(default_factory=list)
    closed: int = 0

    def evaluate(self, configs: Sequence[KernelConfig]) -> Iterator[Outcome]:
        self.asked.append(list(configs))
        try:
            for config in configs:
                self.begun.append(config)
                rest = self.coming.get(config)
                status = rest.pop(0) if rest else Status.OK
                outcome = fake().outcome("timed", SPEC, PROBLEM, config)
                yield replace(outcome, status=status, detail="made up")
        finally:
            self.closed += 1

    def mark(self, *outcomes: Outcome) -> None:
        self.marked += outcomes

    def run(self, *configs: KernelConfig, whole: bool = False) -> list[tuple[KernelConfig, Status]]:
        outcomes = steadily(self.evaluate, configs, whole=whole, mark=self.mark)
        return [(outcome.config, outcome.status) for outcome in outcomes]


A, B, C = SPACE[:3]


class TestSteadily:
    def test_what_is_steady_is_asked_once(self, slept: list[float]) -> None:
        answers = Answers({B: [Status.RUN_ERROR]})
        found = answers.run(A, B, C)
        assert found == [(A, Status.OK), (B, Status.RUN_ERROR), (C, Status.OK)]
        assert answers.asked == [[A, B, C]]
        assert (answers.marked, slept) == ([], [])

    def test_the_others_wait_for_the_one_that_is_repeated(self, slept: list[float]) -> None:
        answers = Answers({B: [UNSTEADY, UNSTEADY]})
        assert answers.run(A, B, C) == [(each, Status.OK) for each in (A, B, C)]
        assert answers.begun == [A, B, B, B, C]
        assert [outcome.config for outcome in answers.marked] == [B, B]
        assert slept == [*WAITS_S[:2]]
        assert answers.closed == 3  # what was asked for besides is let go before the wait

    def test_patience_is_for_each(self, slept: list[float]) -> None:
        answers = Answers({A: [UNSTEADY] * len(WAITS_S), C: [UNSTEADY]})
        assert answers.run(A, B, C) == [(each, Status.OK) for each in (A, B, C)]
        assert slept == [*WAITS_S, WAITS_S[0]]

    def test_it_ends(self, slept: list[float]) -> None:
        answers = Answers({B: [UNSTEADY] * 99})
        assert answers.run(A, B, C) == [(A, Status.OK), (B, UNSTEADY), (C, Status.OK)]
        assert slept == [*WAITS_S]
        assert len(answers.marked) == len(WAITS_S)  # the last is the answer, and kept as that

    def test_a_round_is_one_measurement(self, slept: list[float]) -> None:
        answers = Answers({C: [UNSTEADY]})
        assert answers.run(A, B, C, whole=True) == [(each, Status.OK) for each in (A, B, C)]
        assert answers.begun == [A, B, C, A, B, C]
        assert [outcome.config for outcome in answers.marked] == [A, B, C]
        assert slept == [WAITS_S[0]]

    @pytest.mark.parametrize("whole", [False, True])
    def test_nothing_asked_nothing_answered(self, whole: bool) -> None:
        assert Answers({}).run(whole=whole) == []

    @pytest.mark.parametrize("whole", [False, True])
    def test_answers_that_are_too_few_are_not_waited_for(self, whole: bool) -> None:
        def one(configs: Sequence[KernelConfig]) -> Iterator[Outcome]:
            yield fake().outcome("timed", SPEC, PROBLEM, configs[0])

        outcomes = steadily(one, [A, B], whole=whole, mark=lambda *_: None)
        assert [outcome.config for outcome in outcomes] == [A]


@dataclass
class Throttled(FakeEvaluator):
    """A GPU whose clock is LOW for what is timed from `drops` on, until `rises` seconds were waited.

    judged: whether its clock is looked at, as GpuEvaluator does.
    """

    drops: int = 10_000
    rises: float = 0.0
    slept: list[float] = field(default_factory=list)
    judged: bool = True
    clock: Clock = field(default_factory=Clock)
    timed: int = 0

    def evaluate(
        self, stage: Stage, spec: AttentionSpec, problem: Problem, configs: Sequence[KernelConfig]
    ) -> Iterator[Outcome]:
        why = ""
        for number, outcome in enumerate(super().evaluate(stage, spec, problem, configs)):
            if outcome.timing is None:
                yield outcome
                continue
            self.timed += stage != "final" or number == 0
            low = self.timed >= self.drops and sum(self.slept) < self.rises
            if self.judged and (stage != "final" or number == 0):  # a round has one figure
                why = self.clock.why_unsteady(LOW if low else HIGH)
            us = outcome.timing.median_us * (2 if low else 1)
            timing = replace(outcome.timing, median_us=us, low_us=us - 0.5, high_us=us + 0.5)
            if why:
                yield replace(outcome, status=UNSTEADY, detail=why, timing=None)
            else:
                yield replace(outcome, timing=timing)


def throttled(**fields: Any) -> Throttled:
    return Throttled(us=landscape, gpu=GPU, **fields)


def records(folder: Path, status: Status) -> list[dict[str, Any]]:
    lines = map(json.loads, (folder / "log.jsonl").read_text().splitlines())
    return [record for record in lines if record["status"] == status]


def searched(folder: Path, evaluator: FakeEvaluator) -> Found:
    return run(folder, evaluator, trials=20, sampler="random")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Found, int]:
    """What is found at a steady clock, and by how many measurements; the last is the final round."""
    evaluator = throttled()
    return searched(tmp_path_factory.mktemp("undisturbed"), evaluator), evaluator.timed


class TestARun:
    @pytest.mark.parametrize("drops", [1, 5, 17, 0])
    def test_a_drop_changes_nothing(
        self, tmp_path: Path, drops: int, undisturbed: tuple[Found, int], slept: list[float]
    ) -> None:
        expected, last = undisturbed
        usual = Clock(HIGH)  # the first may be the one that is off: a run of before has told it
        evaluator = throttled(drops=drops or last, rises=20.0, slept=slept, clock=usual)
        assert searched(tmp_path, evaluator) == expected
        assert slept == [5.0, 15.0]
        marked = records(tmp_path, UNSTEADY)
        assert {record["stage"] == "final" for record in marked} == {not drops}
        assert len(marked) == 2 * (1 if drops else len(evaluator.configs("final")) // 3)
        assert {record["detail"] for record in marked} == {
            "the GPU's clock went from 1980 to 990 MHz"
        }
        assert all(record["timing"] is None for record in marked)

    def test_unseen_it_costs_the_search_what_comes_after(
        self, tmp_path: Path, undisturbed: tuple[Found, int]
    ) -> None:
        """What the tests above would show if the clock were not looked at: candidates lost."""
        evaluator = throttled(drops=5, rises=1.0, judged=False)
        assert searched(tmp_path, evaluator) != undisturbed[0]
        assert len(records(tmp_path, Status.DROPPED)) > 10

    def test_one_that_stays_ends_the_run_and_loses_nothing(
        self, tmp_path: Path, undisturbed: tuple[Found, int], slept: list[float]
    ) -> None:
        evaluator = throttled(drops=9, rises=1e9, slept=slept)
        with pytest.raises(ClockChanged, match="stays there"):
            searched(tmp_path, evaluator)
        assert slept == [*WAITS_S]
        assert len(records(tmp_path, UNSTEADY)) == len(WAITS_S)
        known = {(r["stage"], json.dumps(r["config"])) for r in records(tmp_path, Status.OK)}
        again = throttled(clock=Clock(HIGH))
        assert searched(tmp_path, again) == undisturbed[0]
        asked = {(stage, json.dumps(vars(config))) for stage, config in again.asked}
        assert len(known) > 20
        assert known.isdisjoint(asked)

    def test_a_config_that_is_never_steady_costs_itself_alone(
        self, tmp_path: Path, slept: list[float]
    ) -> None:
        def failing(stage: Stage, config: KernelConfig) -> Status | None:
            return UNSTEADY if (stage, config) == ("timed", BEST) else None

        found = run(tmp_path, fake(failing=failing), trials=len(SPACE))
        assert found.winner.config != BEST
        assert found.candidates == len(SPACE)
        assert slept == [*WAITS_S]

    def test_an_incumbent_that_was_not_steady_races_all_the_same(
        self, tmp_path: Path, slept: list[float]
    ) -> None:
        def failing(stage: Stage, config: KernelConfig) -> Status | None:
            return UNSTEADY if (stage, config) == ("timed", BEST) else None

        goal = make_goal(incumbent=BEST)
        found = run(tmp_path, fake(failing=failing), goal=goal, trials=len(SPACE))
        assert (found.winner.config, found.winner.stage) == (BEST, "final")
        assert found.winner.ok
        assert found.incumbent == found.winner
        assert slept == [*WAITS_S]

    def test_a_round_that_is_never_steady_chooses_nobody(self, tmp_path: Path) -> None:
        """Nor somebody who was not in it."""
        evaluator = fake(failing=lambda stage, _: UNSTEADY if stage == "final" else None)
        with pytest.raises(NothingRight, match=r"clock of .* did not hold .*made to fail"):
            run(tmp_path, evaluator, trials=len(SPACE))


FAKE_TASKS = Tasks(
    compile="tests.worker_faults:compile_one", answers="tests.worker_faults:device_answers"
)
GOOD = (make_config(64, 32), make_config(64, 64))


@dataclass
class Asked:
    """Stands in for a GpuEvaluator's GPU: the clock after each task, or what it raised."""

    clocks: Iterator[float | Answer]
    functions: list[str] = field(default_factory=list)
    size: int = 1

    def submit(self, task: Task) -> Future[Answer]:
        future: Future[Answer] = Future()
        future.set_result(self._answer(task))
        return future

    def _answer(self, task: Task) -> Answer:
        self.functions.append(task.function.partition(":")[2])
        clock = next(self.clocks)
        if isinstance(clock, Raised):
            return clock
        timing = {
            "median_us": 9.0, "low_us": 8.0, "high_us": 10.0, "samples": 5, "clock_mhz": clock
        }  # fmt: skip
        if "configs" not in task.payload:
            return Done(timing)
        count = len(task.payload["configs"])
        passes = [[9.0, 9.0 + number] for number in range(count)]
        return Done({"timings": [timing] * count, "passes": passes, "sdpa": None, "conditions": {}})


JUMPED = Raised("Unsteady", "times changed 2.00-fold for good", "evaluate/measure.py:1")


class TestGpuEvaluator:
    @pytest.fixture
    def evaluate(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> Iterator[Callable[..., tuple[list[Outcome], list[str]]]]:
        with GpuEvaluator(GPU, 0, tmp_path, 1, tasks=FAKE_TASKS) as evaluator:

            def evaluate(stage: Stage, *clocks: float | Answer) -> tuple[list[Outcome], list[str]]:
                asked = Asked(iter(clocks))
                monkeypatch.setattr(evaluator, "_gpus", asked)
                return list(evaluator.evaluate(stage, SPEC, PROBLEM, GOOD)), asked.functions

            yield evaluate
        assert not (tmp_path / "failed").exists()

    @pytest.mark.parametrize("stage", ["rough", "timed"])
    def test_what_is_timed_at_another_clock_is_marked(self, evaluate, stage: Stage) -> None:
        first, second = evaluate(stage, HIGH, LOW)[0]
        assert first.ok
        assert first.timing is not None
        assert first.timing.clock_mhz == HIGH
        assert (second.status, second.timing) == (UNSTEADY, None)
        assert second.detail == "the GPU's clock went from 1980 to 990 MHz"
        assert [outcome.status for outcome in evaluate(stage, HIGH, HIGH)[0]] == [Status.OK] * 2

    def test_over_all_stages_there_is_one_clock(self, evaluate) -> None:
        evaluate("rough", HIGH, HIGH)
        outcomes, asked = evaluate("final", LOW)
        assert [o.status for o in outcomes] == [UNSTEADY] * 2
        assert [o.passes_us for o in outcomes] == [()] * 2
        assert asked == ["measure_round"]

    def test_one_that_stays_is_raised(self, evaluate) -> None:
        evaluate("timed", HIGH, LOW)
        evaluate("timed", *[LOW] * 2)
        with pytest.raises(ClockChanged):
            evaluate("timed", *[LOW] * 2)

    def test_a_jump_within_is_marked_and_no_kernel_is_kept_for_it(
        self, evaluate, tmp_path: Path
    ) -> None:
        first, second = evaluate("timed", JUMPED, HIGH)[0]
        assert (first.status, first.timing) == (UNSTEADY, None)
        assert first.detail == "Unsteady: times changed 2.00-fold for good (evaluate/measure.py:1)"
        assert second.ok
        assert "kernel kept" not in first.detail

    def test_a_round_that_jumped_is_no_kernel_s_fault(self, evaluate) -> None:
        outcomes, asked = evaluate("final", JUMPED)
        assert [o.status for o in outcomes] == [UNSTEADY] * 2
        assert asked == ["measure_round"]  # none is suspected, and timed alone

    def test_passes_are_in_the_outcome_of_their_config(self, evaluate) -> None:
        outcomes, _ = evaluate("final", HIGH)
        assert [o.passes_us for o in outcomes] == [(9.0, 9.0), (9.0, 10.0)]
        assert [
            Outcome.from_json(json.loads(json.dumps(o.to_json()))) for o in outcomes
        ] == outcomes
