"""evaluate/quarantine.py and the evaluator in front of another: what killed once is not tried again."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from flashgen import paths
from flashgen.errors import FlashgenError
from flashgen.evaluate.build import draft
from flashgen.evaluate.evaluator import Evaluator, Request
from flashgen.evaluate.quarantine import Quarantine, QuarantiningEvaluator
from flashgen.schedules.config import KernelConfig, kernel_name
from flashgen.schedules.outcome import KILLERS, Outcome, Source, Stage, Status
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.gpu import Gpu, known_target
from flashgen.spec.problem import Problem, workload
from tests.evaluator_contract import EvaluatorContract
from tests.makers import make_config, make_spec

SPEC = make_spec()
SHORT, LONG = workload(SPEC, 512), workload(SPEC, 4096)
GPU = known_target("nvidia_h200")
CONFIGS = (make_config(64, 32), make_config(64, 64), make_config(64, 128))
ILLEGAL = make_config(256, 256, num_warps=1)
TRITON = "3.7.1"


class Scripted:
    """An evaluator that answers as `failing` says, and keeps what it was asked."""

    def __init__(
        self, failing: dict[KernelConfig, Status] | None = None, source: Source = "measured"
    ) -> None:
        self.gpu: Gpu = GPU
        self.source: Source = source
        self.conditions = "700 W"
        self.failing = failing or {}
        self.asked: list[tuple[KernelConfig, ...]] = []
        self.yielded: list[KernelConfig] = []
        self.closed = 0
        self.abandoned = 0

    def evaluate(
        self, stage: Stage, spec: AttentionSpec, problem: Problem, configs: Sequence[KernelConfig]
    ) -> Iterator[Outcome]:
        self.asked.append(tuple(configs))
        request = Request(stage=stage, spec=spec, problem=problem, gpu=GPU.slug, source=self.source)
        try:
            for config in configs:
                drafted = draft(spec, config, GPU)
                status = self.failing.get(config, drafted.status)
                self.yielded.append(config)
                made = request.outcome(config, status, f"{config.bc} it was", digest=drafted.digest)
                yield replace(made, triton=TRITON)
        except GeneratorExit:
            self.abandoned += 1
            raise

    def close(self) -> None:
        self.closed += 1

    def __enter__(self) -> Scripted:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def digest(config: KernelConfig) -> str:
    return draft(SPEC, config, GPU).digest


def opened(folder: Path, **changes: object) -> Quarantine:
    fields: dict[str, object] = {"triton": TRITON, "notice": pytest.fail} | changes
    return Quarantine(folder / "held.jsonl", **fields)  # type: ignore[arg-type]


def outcome(
    status: Status, stage: Stage = "check", problem: Problem = SHORT, source: Source = "measured"
) -> Outcome:
    (made,) = Scripted({CONFIGS[0]: status}, source).evaluate(stage, SPEC, problem, CONFIGS[:1])
    return made


def held(folder: Path, *noted: Outcome, retry: bool = False) -> bool:
    """Whether a new quarantine on the folder, told these, holds CONFIGS[0] from a GPU's evaluator."""
    quarantine = opened(folder, retry=retry)
    for each in noted:
        quarantine.note(each)
    return quarantine.reason(digest(CONFIGS[0]), "measured") is not None


class TestFile:
    def test_it_is_made_when_the_first_is_taken_in(self, tmp_path: Path) -> None:
        quarantine = opened(tmp_path / "new")
        assert not quarantine.path.parent.exists()
        assert quarantine.reason(digest(CONFIGS[0]), "measured") is None
        quarantine.note(outcome(Status.CRASHED))
        assert len(quarantine.path.read_text().splitlines()) == 1
        assert paths.quarantine_file(Path("out"), "nvidia_l4") == Path(
            "out/.flashgen/nvidia_l4.quarantine.jsonl"
        )

    @pytest.mark.parametrize("status", list(Status))
    def test_what_cost_a_process_is_held_by_this_and_the_next_and_nothing_else(
        self, tmp_path: Path, status: Status
    ) -> None:
        assert held(tmp_path, outcome(status)) == (status in KILLERS)
        assert held(tmp_path) == (status in KILLERS)

    def test_a_record_says_all_that_one_needs_to_know(self, tmp_path: Path) -> None:
        made = outcome(Status.TIMEOUT, "timed", LONG)
        quarantine = opened(tmp_path)
        quarantine.note(made)
        record = json.loads(quarantine.path.read_text())
        assert record == {
            "digest": made.digest,
            "kernel": kernel_name(SPEC, CONFIGS[0]),
            "stage": "timed",
            "status": "timeout",
            "detail": "32 it was",
            "source": "measured",
            "gpu": "nvidia_h200",
            "triton": TRITON,
            "created": made.created,
        } | {name: made.to_json()[name] for name in ("spec", "problem", "config")}
        reason = quarantine.reason(made.digest, "measured")
        assert reason == f"timeout at stage timed on {made.created}: 32 it was"

    def test_another_triton_gives_a_new_chance(self, tmp_path: Path) -> None:
        assert held(tmp_path, outcome(Status.CRASHED))
        other = opened(tmp_path, triton="3.8.0")
        assert len(other) == 0
        assert other.reason(digest(CONFIGS[0]), "measured") is None

    @pytest.mark.parametrize(
        ("status", "stage", "shared"),
        [
            (Status.COMPILE_CRASH, "check", True),
            (Status.TIMEOUT, "compile", True),
            (Status.TIMEOUT, "check", False),
            (Status.CRASHED, "check", False),
        ],
    )
    def test_the_interpreter_and_a_gpu_say_nothing_of_each_other_a_compiler_of_both(
        self, tmp_path: Path, status: Status, stage: Stage, shared: bool
    ) -> None:
        made = outcome(status, stage, source="estimated")
        assert held(tmp_path, made) == shared
        assert opened(tmp_path).reason(made.digest, "estimated") is not None

    def test_retried_it_is_free_until_it_kills_again(self, tmp_path: Path) -> None:
        assert held(tmp_path, outcome(Status.CRASHED))
        assert len(opened(tmp_path, retry=True)) == 0
        assert not held(tmp_path, retry=True)
        assert held(tmp_path)  # nothing became of the retry
        assert held(tmp_path, outcome(Status.CRASHED), retry=True)
        assert held(tmp_path)

    @pytest.mark.parametrize(
        ("killed", "lived", "free"),
        [
            (("check", SHORT), ("check", LONG), True),
            (("check", SHORT), ("compile", SHORT), False),  # it has not come that far
            (("timed", LONG), ("timed", LONG), True),
            (("timed", LONG), ("timed", SHORT), False),  # a shorter one says nothing of it
            (("compile", SHORT), ("compile", LONG), True),
        ],
    )
    @pytest.mark.parametrize("status", [Status.OK, Status.WRONG])
    def test_one_that_lived_where_it_was_stopped_is_let_go(
        self,
        killed: tuple[Stage, Problem],
        lived: tuple[Stage, Problem],
        free: bool,
        status: Status,
        tmp_path: Path,
    ) -> None:
        assert held(tmp_path, outcome(Status.TIMEOUT, *killed))
        assert not held(tmp_path, outcome(status, *lived), retry=True)
        assert held(tmp_path) == (not free)

    def test_what_was_not_tried_is_not_let_go(self, tmp_path: Path) -> None:
        assert held(tmp_path, outcome(Status.CRASHED))
        assert held(tmp_path, outcome(Status.QUARANTINED), outcome(Status.UNSTEADY))

    @pytest.mark.parametrize("spoiled", ["", "garbage", "[]", "{}", '{"digest": 1}', "null"])
    def test_any_other_unreadable_line_is_named(self, tmp_path: Path, spoiled: str) -> None:
        assert held(tmp_path, outcome(Status.CRASHED))
        file = tmp_path / "held.jsonl"
        content = file.read_text()
        file.write_text(content + spoiled + "\n" + content)
        with pytest.raises(FlashgenError, match=r"held\.jsonl, line 2: .*delete the line"):
            opened(tmp_path)
        assert file.read_text() == content + spoiled + "\n" + content

    def test_workers_of_one_host_may_share_it(self, tmp_path: Path) -> None:
        made = outcome(Status.CRASHED)

        def take_in(number: int) -> None:
            quarantine = opened(tmp_path)
            for each in range(20):
                quarantine.note(replace(made, digest=f"sha256:{number}-{each}"))

        threads = [threading.Thread(target=take_in, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(opened(tmp_path)) == 80


class TestContract(EvaluatorContract):
    """With nothing held, and then with one config held that nobody asks for: as the inner one."""

    def make(self, tmp_path: Path) -> QuarantiningEvaluator:
        from tests.cpu.evaluate.test_evaluators import gpu_evaluator

        quarantine = opened(tmp_path, triton=outcome(Status.OK).triton)
        quarantine.note(replace(outcome(Status.CRASHED), digest="sha256:another"))
        assert len(quarantine) == 1
        return QuarantiningEvaluator(gpu_evaluator(tmp_path), quarantine)


class TestEvaluator:
    def make(
        self, folder: Path, failing: dict[KernelConfig, Status], **changes: object
    ) -> tuple[QuarantiningEvaluator, Scripted]:
        inner = Scripted(failing)
        return QuarantiningEvaluator(inner, opened(folder, **changes)), inner

    def ask(
        self, evaluator: Evaluator, *configs: KernelConfig, stage: Stage = "check"
    ) -> list[Outcome]:
        return list(evaluator.evaluate(stage, SPEC, SHORT, configs))

    def test_it_passes_for_an_evaluator_and_shows_what_else_the_inner_one_has(
        self, tmp_path: Path
    ) -> None:
        made, inner = self.make(tmp_path, {})
        evaluator: Evaluator = made
        assert (evaluator.gpu, evaluator.source) == (inner.gpu, inner.source)
        assert getattr(evaluator, "conditions", None) == "700 W"
        inner.conditions = "650 W"
        assert getattr(evaluator, "conditions", None) == "650 W"
        assert getattr(evaluator, "nothing", None) is None
        with evaluator:
            pass
        assert inner.closed == 1

    @pytest.mark.parametrize("at", [0, 1, 2])
    def test_held_ones_are_answered_here_and_the_others_in_one_call_in_order(
        self, tmp_path: Path, at: int
    ) -> None:
        first, _ = self.make(tmp_path, {CONFIGS[at]: Status.CRASHED})
        (killed,) = self.ask(first, CONFIGS[at])
        again, inner = self.make(tmp_path, {})
        outcomes = self.ask(again, *CONFIGS)
        free = tuple(config for config in CONFIGS if config != CONFIGS[at])
        assert inner.asked == [free]
        assert [o.config for o in outcomes] == list(CONFIGS)
        assert [o.ok for o in outcomes] == [config in free for config in CONFIGS]
        answered = outcomes[at]
        assert answered.status is Status.QUARANTINED
        assert (answered.digest, answered.stage) == (killed.digest, "check")
        assert killed.detail in answered.detail
        assert "crashed at stage check" in answered.detail
        assert answered.timing is None

    def test_a_killer_is_on_the_disk_before_its_outcome_is_handed_on(self, tmp_path: Path) -> None:
        made, _ = self.make(tmp_path, {CONFIGS[1]: Status.TIMEOUT})
        outcomes = made.evaluate("timed", SPEC, SHORT, CONFIGS)
        next(outcomes)
        assert not (tmp_path / "held.jsonl").exists()
        assert next(outcomes).status is Status.TIMEOUT
        assert len(opened(tmp_path)) == 1

    def test_outcomes_come_as_early_as_the_order_allows(self, tmp_path: Path) -> None:
        first, _ = self.make(tmp_path, {CONFIGS[1]: Status.CRASHED})
        self.ask(first, CONFIGS[1])
        made, inner = self.make(tmp_path, {})
        outcomes = made.evaluate("check", SPEC, SHORT, CONFIGS)
        for number, evaluated in enumerate((1, 1, 2)):
            assert next(outcomes).config == CONFIGS[number]
            assert len(inner.yielded) == evaluated

    def test_an_abandoned_call_is_abandoned_by_the_inner_one_too(self, tmp_path: Path) -> None:
        made, inner = self.make(tmp_path, {})
        outcomes = made.evaluate("check", SPEC, SHORT, CONFIGS)
        next(outcomes)
        assert inner.abandoned == 0
        outcomes.close()  # type: ignore[attr-defined]
        assert inner.abandoned == 1

    def test_what_is_illegal_is_no_business_of_it(self, tmp_path: Path) -> None:
        first, _ = self.make(tmp_path, {CONFIGS[0]: Status.CRASHED})
        self.ask(first, CONFIGS[0])
        made, inner = self.make(tmp_path, {})
        outcomes = self.ask(made, ILLEGAL, CONFIGS[0], CONFIGS[1])
        assert [o.status for o in outcomes] == [Status.ILLEGAL, Status.QUARANTINED, Status.OK]
        assert inner.asked == [(ILLEGAL, CONFIGS[1])]

    def test_where_nothing_is_held_nothing_is_rendered(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        made, _ = self.make(tmp_path, {})
        monkeypatch.setattr("flashgen.evaluate.quarantine.draft", pytest.fail)
        assert all(o.ok for o in self.ask(made, *CONFIGS))

    def test_another_stage_or_problem_is_held_too(self, tmp_path: Path) -> None:
        """Of the same kernel: it is the digest that is held."""
        first, _ = self.make(tmp_path, {CONFIGS[0]: Status.CRASHED})
        self.ask(first, CONFIGS[0], stage="timed")
        (at_once,) = self.ask(first, CONFIGS[0], stage="final")
        assert at_once.status is Status.QUARANTINED
        made, inner = self.make(tmp_path, {})
        (outcome_,) = made.evaluate("compile", SPEC, LONG, CONFIGS[:1])
        assert outcome_.status is Status.QUARANTINED
        assert inner.yielded == []

    def test_told_to_retry_it_does_once(self, tmp_path: Path) -> None:
        failing = {CONFIGS[0]: Status.CRASHED}
        self.ask(self.make(tmp_path, failing)[0], CONFIGS[0])
        made, inner = self.make(tmp_path, failing, retry=True)
        for expected in (Status.CRASHED, Status.QUARANTINED):
            (outcome_,) = self.ask(made, CONFIGS[0])
            assert outcome_.status is expected
        assert inner.yielded == [CONFIGS[0]]
        lived, _ = self.make(tmp_path, {}, retry=True)
        assert self.ask(lived, CONFIGS[0])[0].ok
        assert self.ask(self.make(tmp_path, {})[0], CONFIGS[0])[0].ok
