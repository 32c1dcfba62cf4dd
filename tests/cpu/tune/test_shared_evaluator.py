"""SharedEvaluator: an Evaluator like others; what one worker found out, no other evaluates."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from flashgen.errors import ToolchainError
from flashgen.evaluate.evaluator import Evaluator, triton_version
from flashgen.evaluate.measure import Conditions
from flashgen.search.log import Log
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.config import KernelConfig
from flashgen.spec.outcome import Outcome, Stage, Status
from flashgen.spec.problem import Problem
from flashgen.tune.shared import Ledger, Pace, Page, StorageError, Unit
from flashgen.tune.shared.evaluator import MOST_DEATHS, SharedEvaluator, rendered_digest
from tests import searches
from tests.evaluator_contract import EvaluatorContract
from tests.fakes import FakeEvaluator, digest_of
from tests.replayed import ReplayEvaluator

PACE = Pace(look_s=0.0, patience_s=0.0)
CONFIGS = searches.SPACE[:12]


class TestShared(EvaluatorContract):
    def make(self, tmp_path: Path) -> SharedEvaluator:
        landscape = FakeEvaluator(us=lambda config: 1.0, gpu=searches.GPU)
        recorded = [
            replace(
                landscape.outcome(stage, self.spec, self.problem, config),
                digest=rendered_digest(self.spec, config),
                triton=triton_version(),
                source="replayed",
                created="2026-01-01T00:00:00+00:00",
            )
            for config in self.good
            for stage in ("compile", "check", "rough", "timed", "final")
        ]
        inner = ReplayEvaluator(recorded, searches.GPU)  # type: ignore[arg-type]
        self.ledger = Ledger(f"journal://{tmp_path}/run.journal", gpu="g", request={}, pace=PACE)
        return SharedEvaluator(inner, self.ledger)

    @pytest.fixture(autouse=True)
    def _closed(self) -> Iterator[None]:
        yield
        self.ledger.close()


Worker = Callable[..., SharedEvaluator]


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    """Makes workers of one run, each with an evaluator of its own."""
    with ExitStack() as stack:

        def make(inner: Evaluator, **fields: Any) -> SharedEvaluator:
            url = f"journal://{tmp_path}/run.journal"
            ledger = Ledger(url, gpu=searches.GPU.slug, request={}, pace=PACE)
            fields = {"digest_of": digest_of, "jobs": 1} | fields
            return SharedEvaluator(inner, stack.enter_context(ledger), **fields)

        yield make


def ask(
    evaluator: Evaluator, stage: Stage = "timed", configs: Sequence[KernelConfig] = CONFIGS
) -> list[Outcome]:
    return list(evaluator.evaluate(stage, searches.SPEC, searches.PROBLEM, configs))


def page_of(evaluator: SharedEvaluator, stage: Stage = "timed") -> Page:
    return evaluator._ledger.page(stage, searches.SPEC, searches.PROBLEM)


def units_of(page: Page, evaluator: SharedEvaluator) -> list[Unit]:
    """The units that an evaluator would ask for."""
    keys = [f"{c.label} {digest_of(searches.SPEC, c)[7:23]}" for c in CONFIGS]
    return [Unit(key=key, configs=(c,)) for key, c in zip(keys, CONFIGS, strict=True)]


def test_what_one_found_out_the_other_does_not_evaluate(worker: Worker) -> None:
    first, second = searches.fake(), searches.fake(us=lambda _: 1.0)
    told = ask(worker(first))
    got = worker(second)
    assert ask(got) == told == ask(searches.fake())
    assert second.asked == []
    assert (got.own, got.others) == (0, len(CONFIGS))


@dataclass
class Slow(FakeEvaluator):
    """Waits for the other with its first three configs, so that both get something to do."""

    both: threading.Barrier = field(default_factory=lambda: threading.Barrier(2))

    def outcome(self, *asked: Any) -> Outcome:
        if len(self.asked) <= 3:
            self.both.wait(timeout=300)
        return super().outcome(*asked)


@pytest.mark.parametrize("stage", ["compile", "timed"])
def test_two_that_ask_at_the_same_time_share_the_work(worker: Worker, stage: Stage) -> None:
    both = threading.Barrier(2)
    inner = [Slow(us=searches.landscape, gpu=searches.GPU, both=both) for _ in range(2)]
    workers = [worker(each) for each in inner]
    with ThreadPoolExecutor() as threads:
        got = list(threads.map(lambda evaluator: ask(evaluator, stage), workers))
    assert got == [ask(searches.fake(), stage)] * 2
    configs = [config for each in inner for _, config in each.asked]
    assert sorted(configs, key=CONFIGS.index) == list(CONFIGS)
    assert min(len(each.asked) for each in inner) >= 3
    assert [w.own for w in workers] == [len(each.asked) for each in inner]


def test_a_share_is_claimed_a_few_at_a_time(worker: Worker) -> None:
    alone, compiling, second = searches.fake(), searches.fake(), searches.fake()
    ask(worker(alone))
    assert alone.batches == [("timed", 4)] * 3
    evaluator = worker(compiling, jobs=2)
    ask(evaluator, "compile")
    ask(worker(second, jobs=9), "compile", searches.SPACE[12:24])
    assert compiling.batches == [("compile", n) for n in (4, 4, 2, 1, 1)]  # two live, of two cores
    assert second.batches == [("compile", n) for n in (4, 3, 2, 1, 1, 1)]  # three live
    assert second.asked[0] == ("compile", searches.SPACE[20])  # and it is the third of them


def test_a_final_round_is_run_whole_by_one(worker: Worker) -> None:
    class Measured(FakeEvaluator):
        conditions = Conditions(sm_mhz=1980, power_w=640.5)

    first = Measured(us=searches.landscape, gpu=searches.GPU)
    second = searches.fake()
    mine, theirs = worker(first), worker(second)
    assert ask(mine, "final", CONFIGS[:5]) == ask(theirs, "final", CONFIGS[:5])
    assert first.batches == [("final", 5)]
    assert second.batches == []
    assert mine.conditions == theirs.conditions == Measured.conditions
    ask(theirs, "final", CONFIGS[:4])  # of others: a round of its own
    assert second.batches == [("final", 4)]
    ask(theirs, "timed")
    assert theirs.conditions == Measured.conditions


def test_a_kernel_of_another_text_is_another(worker: Worker) -> None:
    second = searches.fake()
    ask(worker(searches.fake()))
    ask(worker(second, digest_of=lambda spec, config: "sha256:" + "1" * 64))
    assert len(second.asked) == len(CONFIGS)


def test_problems_and_stages_have_pages_of_their_own(worker: Worker) -> None:
    ask(worker(searches.fake()))
    second = searches.fake()
    other = worker(second)
    ask(other, "rough")
    longer = replace(searches.PROBLEM, seq_q=8192, seq_k=8192)
    list(other.evaluate("timed", searches.SPEC, longer, CONFIGS))
    assert len(second.asked) == 2 * len(CONFIGS)


class Unsteady(FakeEvaluator):
    """The clock drops the first two times."""

    def outcome(
        self, stage: Stage, spec: AttentionSpec, problem: Problem, config: KernelConfig
    ) -> Outcome:
        made = super().outcome(stage, spec, problem, config)
        drops = self.asked.count((stage, config)) <= 2
        return replace(made, status=Status.UNSTEADY, detail="dropped") if drops else made


@pytest.mark.parametrize("stage", ["timed", "final"])
def test_what_was_unsteady_is_timed_again_when_asked_again(worker: Worker, stage: Stage) -> None:
    first = Unsteady(us=searches.landscape, gpu=searches.GPU)
    second = searches.fake()
    statuses = [
        [ask(evaluator, stage, CONFIGS[:1])[0].status for _ in range(4)]
        for evaluator in (worker(first), worker(second))
    ]
    assert statuses == [[Status.UNSTEADY, Status.UNSTEADY, Status.OK, Status.OK]] * 2
    assert len(first.asked) == 3
    assert second.asked == []


def open_log(folder: Path, evaluator: SharedEvaluator) -> Log:
    return Log(
        folder / "log.jsonl",
        gpu=searches.GPU.slug, triton="3.7.1", shared=evaluator._ledger.id,
    )  # fmt: skip


@pytest.mark.parametrize("stage", ["timed", "final"])
def test_what_an_earlier_run_measured_here_is_not_measured_again(
    worker: Worker, tmp_path: Path, stage: Stage
) -> None:
    earlier = ask(searches.fake(lambda _: 5.0), stage)
    with searches.open_log(tmp_path) as log:
        log.append(*earlier)
    mine, theirs = worker(searches.fake()), worker(searches.fake())
    with open_log(tmp_path, mine) as log:
        mine._memory = log
        assert ask(mine, stage) == earlier
        assert mine._inner.asked == []  # type: ignore[attr-defined]
    assert ask(theirs, stage) == earlier  # and the others have it, too
    assert theirs._inner.asked == []  # type: ignore[attr-defined]


def test_what_was_measured_is_kept_when_the_storage_is_lost(
    worker: Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = worker(searches.fake())

    def lost(*_: object) -> bool:
        raise StorageError("gone")

    monkeypatch.setattr(mine._ledger._storage, "put", lost)
    with open_log(tmp_path, mine) as log:
        mine._memory = log
        with pytest.raises(StorageError, match="gone"):
            ask(mine)
    with searches.open_log(tmp_path) as log:
        kernel = CONFIGS[0], digest_of(searches.SPEC, CONFIGS[0])
        assert log.recall("timed", searches.SPEC, searches.PROBLEM, *kernel, source="measured")


def test_an_error_of_the_machine_leaves_the_claims_to_others(worker: Worker) -> None:
    class Broken(FakeEvaluator):
        def evaluate(self, *_: Any) -> Iterator[Outcome]:
            raise ToolchainError("no C compiler")
            yield

    mine = worker(Broken(us=searches.landscape, gpu=searches.GPU))
    other = worker(searches.fake())
    with pytest.raises(ToolchainError):
        ask(mine)
    assert page_of(other).state().held == {}
    assert len(ask(other)) == len(CONFIGS)


def test_an_abandoned_iterator_leaves_the_claims_to_others(worker: Worker) -> None:
    mine, other = worker(searches.fake()), worker(searches.fake())
    with closing(mine.evaluate("timed", searches.SPEC, searches.PROBLEM, CONFIGS)) as begun:  # type: ignore[type-var]
        next(begun)
        assert page_of(other).state().held
    assert page_of(other).state().held == {}
    assert list(page_of(other).state().answered) == [units_of(page_of(other), other)[0].key]


def test_a_worker_taken_for_dead_says_so_and_goes_by_the_others_answer(worker: Worker) -> None:
    """Else the two would part ways."""
    notices: list[str] = []
    inner = searches.fake(lambda _: 1.0)
    slow, quick = worker(inner, notice=notices.append), worker(searches.fake(lambda _: 2.0))
    taken: list[Outcome] = []

    def sleeping(_: KernelConfig) -> float:
        if not taken:
            roster = slow._ledger._roster
            quick._ledger._storage.finish(roster._trial, roster._states.FAIL)  # type: ignore[arg-type]
            taken.extend(ask(quick, configs=CONFIGS[:1]))
        return 1.0

    inner.us = sleeping
    assert ask(slow, configs=CONFIGS[:1]) == taken
    assert taken[0].timing is not None
    assert taken[0].timing.median_us == 2.0
    assert len(notices) == 1
    assert CONFIGS[0].label in notices[0]
    assert "no life" in notices[0]


def test_what_too_many_workers_died_at_is_given_up(worker: Worker) -> None:
    """It may be what kills them: then nobody would be left."""
    last = searches.fake()
    evaluator = worker(last)
    unit = units_of(page_of(evaluator), evaluator)[0]
    for _ in range(MOST_DEATHS):
        dying = worker(searches.fake())
        assert page_of(dying).claim([unit])
        roster = dying._ledger._roster
        evaluator._ledger._storage.finish(roster._trial, roster._states.FAIL)  # type: ignore[arg-type]
    outcomes = ask(evaluator)
    assert [outcome.status for outcome in outcomes] == [Status.CRASHED] + [Status.OK] * 11
    assert f"{MOST_DEATHS} workers died" in outcomes[0].detail
    assert outcomes[0].digest == digest_of(searches.SPEC, CONFIGS[0])
    assert ("timed", CONFIGS[0]) not in last.asked
    assert len(last.asked) == 11
