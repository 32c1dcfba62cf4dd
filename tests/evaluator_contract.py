"""What every Evaluator must do. A test class per evaluator inherits EvaluatorContract and makes one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from flashgen.config import KernelConfig, why_illegal
from flashgen.evaluate import Evaluator, protocol_of, triton_version
from flashgen.outcome import Outcome, Stage, Status
from flashgen.spec import AttentionSpec, Problem, workload
from tests.makers import make_config, make_spec

STAGES: tuple[Stage, ...] = ("compile", "check", "rough", "timed", "final")


def children() -> set[int]:
    """Child processes of this one that are not ended and reaped."""
    mine = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(stat[1]) == os.getpid():
                mine.add(int(entry.name))
    return mine


class EvaluatorContract:
    """One outcome a config, in order; a bad config is an outcome; nothing is left behind."""

    spec: AttentionSpec = make_spec(head_dim=64)
    problem: Problem = workload(spec, 512)
    good: tuple[KernelConfig, ...] = (
        make_config(64, 32),
        make_config(64, 64),
        make_config(64, 128),
    )
    illegal: KernelConfig = make_config(256, 256, num_warps=1)  # 2048 registers a thread

    def make(self, tmp_path: Path) -> AbstractContextManager[Evaluator]:
        """The evaluator under test. `good` must end OK in all stages, `illegal` in none."""
        raise NotImplementedError

    @pytest.fixture
    def evaluator(self, tmp_path: Path) -> Iterator[Evaluator]:
        before = children()
        with self.make(tmp_path) as made:
            yield made
        assert children() == before, "close() left child processes"

    def ask(
        self, evaluator: Evaluator, stage: Stage, configs: tuple[KernelConfig, ...]
    ) -> list[Outcome]:
        return list(evaluator.evaluate(stage, self.spec, self.problem, configs))

    def test_the_example_of_an_illegal_config_is_one(self, evaluator: Evaluator) -> None:
        assert why_illegal(self.spec, self.illegal, evaluator.gpu) is not None
        assert all(why_illegal(self.spec, c, evaluator.gpu) is None for c in self.good)

    @pytest.mark.parametrize("stage", STAGES)
    def test_one_outcome_a_config_in_the_order_given(
        self, evaluator: Evaluator, stage: Stage
    ) -> None:
        configs = (self.good[2], self.illegal, self.good[0], self.good[0], self.good[1])
        outcomes = self.ask(evaluator, stage, configs)
        assert tuple(outcome.config for outcome in outcomes) == configs
        assert [outcome.status for outcome in outcomes if outcome.config != self.illegal] == [
            Status.OK
        ] * 4, [outcome.detail for outcome in outcomes]
        bad = outcomes[1]
        assert not bad.ok
        assert bad.detail
        assert bad.timing is None

    @pytest.mark.parametrize("stage", STAGES)
    def test_outcomes_say_what_they_are_of(self, evaluator: Evaluator, stage: Stage) -> None:
        for outcome in self.ask(evaluator, stage, self.good):
            assert (outcome.stage, outcome.spec, outcome.problem) == (
                stage,
                self.spec,
                self.problem,
            )
            assert (outcome.gpu, outcome.source) == (evaluator.gpu.slug, evaluator.source)
            protocol = protocol_of(stage, evaluator.source)
            assert (outcome.triton, outcome.protocol) == (triton_version(), protocol)
            assert outcome.digest.startswith("sha256:")
            assert (outcome.timing is not None) == (stage in ("rough", "timed", "final"))
            assert (outcome.check is not None) == (stage == "check")
            made = datetime.fromisoformat(outcome.created)
            assert made.utcoffset() == timedelta(0)
            assert made <= datetime.now(UTC)
            assert Outcome.from_json(outcome.to_json()) == outcome

    def test_the_kernel_of_a_config_is_the_same_in_all_stages(self, evaluator: Evaluator) -> None:
        digests = [
            [outcome.digest for outcome in self.ask(evaluator, stage, self.good)]
            for stage in STAGES
        ]
        assert all(each == digests[0] for each in digests)
        assert len(set(digests[0])) == len(self.good)

    @pytest.mark.parametrize("stage", STAGES)
    def test_nothing_asked_nothing_answered(self, evaluator: Evaluator, stage: Stage) -> None:
        assert self.ask(evaluator, stage, ()) == []

    @pytest.mark.parametrize("stage", STAGES)
    def test_only_illegal_ones(self, evaluator: Evaluator, stage: Stage) -> None:
        assert not any(o.ok for o in self.ask(evaluator, stage, (self.illegal, self.illegal)))

    def test_an_abandoned_iterator_does_no_harm(self, evaluator: Evaluator) -> None:
        for stage in STAGES:
            started = evaluator.evaluate(stage, self.spec, self.problem, self.good)
            next(started)
            started.close()  # type: ignore[attr-defined]  # generators have it
            assert all(outcome.ok for outcome in self.ask(evaluator, stage, self.good))

    def test_close_may_be_called_again(self, evaluator: Evaluator) -> None:
        self.ask(evaluator, "compile", self.good[:1])
        evaluator.close()
        evaluator.close()
