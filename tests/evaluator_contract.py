"""What every Evaluator must do. A test class per evaluator inherits EvaluatorContract and makes one.

FaultsContract is for those that have child processes, with the stand-ins of worker_faults for their tasks.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from flashgen.evaluate.evaluator import Evaluator, protocol_of, triton_version
from flashgen.evaluate.quarantine import Quarantine, QuarantiningEvaluator
from flashgen.evaluate.workers.pool import TaskLimits
from flashgen.schedules.config import KernelConfig
from flashgen.schedules.legality import why_illegal
from flashgen.schedules.outcome import KILLERS, Outcome, Stage, Status
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.problem import Problem, workload
from tests.hung import end_what_hangs
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

    def test_one_outcome_a_config_in_the_order_given(self, evaluator: Evaluator) -> None:
        configs = (self.good[2], self.illegal, self.good[0], self.good[0], self.good[1])
        for stage in STAGES:
            outcomes = self.ask(evaluator, stage, configs)
            assert tuple(outcome.config for outcome in outcomes) == configs
            assert [outcome.status for outcome in outcomes if outcome.config != self.illegal] == [
                Status.OK
            ] * 4, [outcome.detail for outcome in outcomes]
            bad = outcomes[1]
            assert not bad.ok
            assert bad.detail
            assert bad.timing is None

    def test_outcomes_say_what_they_are_of(self, evaluator: Evaluator) -> None:
        for stage in STAGES:
            for outcome in self.ask(evaluator, stage, self.good):
                self.says_what_it_is_of(outcome, stage, evaluator)

    def says_what_it_is_of(self, outcome: Outcome, stage: Stage, evaluator: Evaluator) -> None:
        assert (outcome.stage, outcome.spec, outcome.problem) == (stage, self.spec, self.problem)
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


FAULTS: dict[str, tuple[KernelConfig, str]] = {
    "segfault": (make_config(16, 32, num_stages=5), "SIGSEGV"),
    "hang": (make_config(16, 64, num_stages=5), "no answer within"),
    "abort": (make_config(16, 128, num_stages=5), "SIGABRT: LLVM ERROR: Broken invariant"),
    "leak": (make_config(32, 32, num_stages=5), "GiB of memory, over its limit of 0.25"),
    "garbage": (make_config(32, 64, num_stages=5), "garbage"),
    "forge": (make_config(32, 128, num_stages=5), "garbage"),
    "nan": (make_config(64, 32, num_stages=5), "nan"),
    "killed": (make_config(64, 64, num_stages=5), "SIGKILL"),
    "tool_killed": (make_config(64, 128, num_stages=5), "SIGKILL"),
}
"""Ways of tests.worker_faults to fail, the config that each is played on, and words of the sentence.

After a death comes a good config, so that the fresh child is not on its first task when the next one hangs.
"""

OUTSIDE = dict.fromkeys(("killed", "tool_killed"), Status.KILLED)
"""What no kernel is to blame for, so it is not quarantined either."""

RUNNING = dict.fromkeys(FAULTS, Status.CRASHED) | {"hang": Status.TIMEOUT} | OUTSIDE
EXPECTED: dict[Stage, dict[str, Status]] = {
    "compile": dict.fromkeys(FAULTS, Status.COMPILE_CRASH)
    | {"hang": Status.TIMEOUT, "nan": Status.COMPILE_ERROR}
    | OUTSIDE,
    "check": RUNNING | {"nan": Status.WRONG},
    "timed": RUNNING | {"nan": Status.RUN_ERROR},
    "final": RUNNING | {"nan": Status.RUN_ERROR},
}


class FaultsContract:
    """Each fault of a child costs one outcome and nothing else, and is not tried again."""

    spec, problem, good = EvaluatorContract.spec, EvaluatorContract.problem, EvaluatorContract.good

    fault_stages: tuple[Stage, ...]
    """The stages that have a task of their own."""
    slow_stages: tuple[Stage, ...] = ()

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        slow = pytest.mark.slow("make test has it of another evaluator, or in the final round")
        stages = (
            pytest.param(s, marks=slow if s in self.slow_stages else ()) for s in self.fault_stages
        )
        metafunc.parametrize("stage", list(stages))

    def make(self, tmp_path: Path) -> AbstractContextManager[Evaluator]:
        """The evaluator under test, on stand-ins."""
        raise NotImplementedError

    def ask(
        self, folder: Path, stage: Stage, *configs: KernelConfig, retry: bool = False
    ) -> list[Outcome]:
        """What a new evaluator, that shares nothing with one before but the folder, answers; and then,
        as if nothing had happened, of the good ones.
        """
        held = Quarantine(folder / "held.jsonl", triton=triton_version(), retry=retry)
        with QuarantiningEvaluator(self.make(folder), held) as evaluator:  # type: ignore[arg-type]
            outcomes = list(evaluator.evaluate(stage, self.spec, self.problem, configs))
            after = list(evaluator.evaluate(stage, self.spec, self.problem, self.good))
        assert [outcome.status for outcome in after] == [Status.OK] * len(self.good), after
        return outcomes

    @pytest.fixture
    def faults(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """The folder where the stand-ins tell of their faults; with a limit of 256 MiB. What says that it
        hangs is out of time at once, and nothing else is, however busy the machine is.
        """
        monkeypatch.setenv("FAULTS_FOLDER", str(tmp_path))
        behaviours = {f"{config.br}x{config.bc}": fault for fault, (config, _) in FAULTS.items()}
        monkeypatch.setenv("BEHAVIOURS", json.dumps(behaviours))
        end_what_hangs(monkeypatch, tmp_path / "pids")
        monkeypatch.setattr(TaskLimits, "seconds", lambda *_, first: 300.0)
        monkeypatch.setattr("flashgen.evaluate.workers.usage.share", lambda children: 256 << 20)
        return tmp_path

    def test_a_fault_costs_one_outcome_and_nothing_else(
        self, stage: Stage, faults: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("STAGE", stage if stage in ("compile", "check") else "measure")
        before = children()
        configs = [self.good[0]]
        for number, (config, _) in enumerate(FAULTS.values(), start=1):
            configs += [config, self.good[number % len(self.good)]]
        outcomes = self.ask(faults, stage, *configs)
        assert [outcome.config for outcome in outcomes] == configs
        assert [outcome.status for outcome in outcomes[::2]] == [Status.OK] * (1 + len(FAULTS))
        found = dict(zip(FAULTS, outcomes[1::2], strict=True))
        statuses = {fault: outcome.status for fault, outcome in found.items()}
        assert statuses == EXPECTED[stage]
        for fault, (_, words) in FAULTS.items():
            assert words in found[fault].detail, found[fault]
            json.dumps(found[fault].to_json(), allow_nan=False)
        # What hangs or is killed is tried twice. A final round ends at the first fault; then each is
        # timed alone.
        more = ["hang", *OUTSIDE] + ["segfault"] * (stage == "final")
        assert played(faults) == Counter([*FAULTS, *more])
        assert children() == before
        assert not any(map(lives, pids(faults)))
        self.not_tried_again(stage, faults, statuses)

    def not_tried_again(self, stage: Stage, faults: Path, was: dict[str, Status]) -> None:
        """Nor by a new evaluator; until told to."""
        killers = [fault for fault in FAULTS if was[fault] in KILLERS]
        configs = [FAULTS[fault][0] for fault in killers]
        assert len(configs) == len(FAULTS) - 1 - len(OUTSIDE)  # nan kills nobody
        already = played(faults)
        outcomes = self.ask(faults, stage, configs[0], self.good[0], *configs[1:])
        assert played(faults) == already
        assert [o.status for o in outcomes] == [Status.QUARANTINED, Status.OK] + [
            Status.QUARANTINED
        ] * len(configs[1:])
        for fault, outcome in zip(killers, [outcomes[0], *outcomes[2:]], strict=True):
            assert FAULTS[fault][1] in outcome.detail
            assert str(was[fault]) in outcome.detail
        (again, fine) = self.ask(faults, stage, FAULTS["abort"][0], self.good[0], retry=True)
        assert (again.status, fine.status) == (was["abort"], Status.OK)
        assert (played(faults) - already).keys() == {"abort"}


def played(folder: Path) -> Counter[str]:
    """The faults that the stand-ins have played, and how often."""
    return Counter((folder / "faults").read_text().split())


def pids(folder: Path) -> list[int]:
    """The processes of those that hung: the child, and the one it had started."""
    return [int(word) for word in (folder / "pids").read_text().split()]


def lives(pid: int, limit_s: float = 60.0) -> bool:
    """Whether a process is there, and no zombie, for all that time."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return False
        if state in ("Z", "X"):
            return False
        time.sleep(0.02)
    return True
