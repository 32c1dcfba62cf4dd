"""The driver: searches at once, by shards and after kills end as one search after the other."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import optuna
import pytest
from rich.console import Console

from flashgen import paths
from flashgen.errors import FlashgenError
from flashgen.evaluate.pools import Pools
from flashgen.evaluate.workers.answers import Answer, Done, Task
from flashgen.evaluate.workers.crew import Crew
from flashgen.schedules.config import KernelConfig
from flashgen.schedules.outcome import Outcome, Stage
from flashgen.search.goal import Budget
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.gpu import TARGETS
from flashgen.spec.problem import Problem
from flashgen.table import emit
from flashgen.table.diff import merge
from flashgen.table.table_file import load_with_evidence
from flashgen.tune import evaluators, places, tune
from flashgen.tune.driver import Job, JobQueue, Stop, drive
from flashgen.tune.options import TuneOptions
from flashgen.tune.places import TuningTarget
from tests.cpu.tune.test_tune import Served, us
from tests.makers import make_spec
from tests.tables import with_evidence

H200, L4 = TARGETS["nvidia_h200"], TARGETS["nvidia_l4"]
SPECS = tuple(
    make_spec(dtype=t, mask=m) for t in ("float16", "bfloat16") for m in ("none", "causal")
)
SEQS = (512, 4096)


class Answering:
    """A worker that answers at once, in a thread."""

    size = 1

    def submit(self, task: Task) -> Future[Answer]:
        future: Future[Answer] = Future()
        future.set_running_or_notify_cancel()
        threading.Thread(target=lambda: future.set_result(Done({}))).start()
        return future

    def close(self) -> None: ...


class OverCrew(Served):
    """Sends a task to a crew for each config, and evaluates it when that is answered."""

    crew: Crew
    under_way: list[set[Any]]

    def evaluate(
        self, stage: Stage, spec: AttentionSpec, problem: Problem, configs: Sequence[KernelConfig]
    ) -> Iterator[Outcome]:
        task = Task(function=stage, payload={}, limit_s=1.0)
        sent = [self.crew.submit(task) for _ in configs]
        self.under_way[0].add(threading.current_thread().name)
        for future, outcome in zip(
            sent, super().evaluate(stage, spec, problem, configs), strict=True
        ):
            future.result()
            yield outcome


@pytest.fixture
def tuned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[list[Served], Path]]:
    """Tune with so many workers; the evaluator of each product, and the folder."""
    monkeypatch.setattr(paths, "shipped_configs_dir", lambda: tmp_path / "nothing shipped")
    monkeypatch.setattr(emit, "write", lambda *_: [])

    def tuned(name: str, workers: int = 1, gpus: Any = (H200,), **fields: Any) -> Any:
        crew = Crew([Answering() for _ in range(workers)])
        made = {gpu.slug: OverCrew(us=us, gpu=gpu, source="estimated") for gpu in gpus}
        for each in made.values():
            each.crew, each.under_way = crew, [set()]

        class Opened:
            def __enter__(self) -> Any:
                return tuple(TuningTarget(gpu=gpu, pools=Pools(cpu=crew)) for gpu in gpus)

            def __exit__(self, *_: object) -> None: ...

        monkeypatch.setattr(places, "opened", lambda *_: Opened())
        monkeypatch.setattr(evaluators, "make_evaluator", lambda place, *_: made[place.gpu.slug])
        options = TuneOptions(
            **({"specs": SPECS, "seqs": SEQS, "budget": Budget(trials=12)} | fields),
            out=tmp_path / name,
        )
        with open(os.devnull, "w") as nowhere:
            tune.tune(options, Console(file=nowhere))
        return list(made.values()), tmp_path / name

    return tuned


def written(folder: Path, slug: str = H200.slug) -> list[str]:
    """Table and evidence, less when and in which shard."""
    files = paths.table_file(folder, slug), folder / "configs" / "evidence" / f"{slug}.jsonl"
    when = r"20\d{6}T\d{6}Z|20\d\d-\d\d-\d\dT[\d:]+Z|-\dof\d"
    return [re.sub(when, "", path.read_text()) for path in files]


def test_many_searches_at_once_end_as_one_after_the_other(tuned: Any) -> None:
    (one,), alone = tuned("alone")
    (many,), together = tuned("together", workers=32)
    assert written(together) == written(alone)
    assert len(many.under_way[0]) >= len(SPECS) * len(SEQS)  # a thread each
    assert set(many.asked) == set(one.asked)  # two may ask for one kernel: Once answers both


def test_the_dashboard_opens_on_a_run(tuned: Any) -> None:
    """Read by Optuna itself: a study a search, a trial a config, the best of them the winner."""
    _, folder = tuned("run", specs=SPECS[:2])
    path = paths.journal_file(folder, H200.slug)
    backend = optuna.storages.journal.JournalFileBackend(str(path))
    storage = optuna.storages.JournalStorage(backend)
    studies = {
        name: optuna.load_study(study_name=name, storage=storage)
        for name in optuna.get_all_study_names(storage)
    }
    table = load_with_evidence(paths.table_file(folder, H200.slug))
    assert set(studies) == {f"{e.spec.name} seq {e.problem.seq_k}" for e in table.entries}
    assert sum(len(study.trials) for study in studies.values()) >= 12 * len(studies)
    for entry in table.entries:
        study = studies[f"{entry.spec.name} seq {entry.problem.seq_k}"]
        assert study.best_value == pytest.approx(entry.result.median_us)
        assert study.best_trial.user_attrs["config"] == entry.config.label
    from optuna_dashboard import wsgi

    asked = {"REQUEST_METHOD": "GET", "PATH_INFO": "/api/studies", "wsgi.errors": sys.stderr}
    answer = b"".join(wsgi(storage)(asked, lambda *_: None)).decode()
    assert all(name in answer for name in studies)


def test_shards_that_are_merged_are_the_table_of_one_run(tuned: Any, tmp_path: Path) -> None:
    _, whole = tuned("whole")
    shards = [tuned(f"shard {part}", shard=(part, 3)) for part in (1, 2, 3)]
    counts = [len(evaluator.asked) for (evaluator,), _ in shards]
    assert all(counts)
    tables = [
        load_with_evidence(paths.table_file(folder, H200.slug))
        for folder in (whole, *(folder for _, folder in shards))
    ]
    expected, *parts = (
        [with_evidence(entry, run="") for entry in table.entries] for table in tables
    )
    assert [with_evidence(entry, run="") for entry in merge(tables[1:]).entries] == expected
    assert sum(map(len, parts)) == len(expected)  # none is searched twice


def test_every_product_gets_its_own_table_in_one_run(tuned: Any) -> None:
    few = SPECS[:2]
    _, both = tuned("both", workers=8, gpus=(H200, L4), specs=few)
    for gpu in (H200, L4):
        _, alone = tuned(f"alone {gpu.slug}", gpus=(gpu,), specs=few)
        assert written(both, gpu.slug) == written(alone, gpu.slug)
        assert paths.log_file(both, gpu.slug).exists()


def lines(jobs: Sequence[Job], workers: int) -> list[JobQueue]:
    return [JobQueue(jobs, Pools(cpu=Crew([]), device=Crew([Answering() for _ in range(workers)])))]


def a_job(run: Callable[[], Any], done: Callable[[Any], Sequence[Job]] = lambda _: ()) -> Job:
    def failed(error: FlashgenError) -> Sequence[Job]:
        raise error

    return Job(run=run, done=done, failed=failed)


def test_as_many_run_as_there_are_idle_workers_and_what_follows_goes_first() -> None:
    barrier, ended = threading.Barrier(3, timeout=600), list[str]()

    def named(name: str) -> Sequence[Job]:
        ended.append(name)
        return [a_job(lambda: f"after {name}", lambda name: ended.append(name) or ())] * (
            name == "a"
        )

    jobs = [a_job(lambda n=n: (barrier.wait() and n) or n, named) for n in "abc"]
    drive(lines(jobs, 3), Stop(lambda: None))  # the barrier holds until all three run
    assert sorted(ended) == ["a", "after a", "b", "c"]

    running, most = [0], [0]

    def count() -> None:
        running[0] += 1
        most[0] = max(most[0], running[0])
        time.sleep(0.01)
        running[0] -= 1

    drive(lines([a_job(count) for _ in range(6)], 1), Stop(lambda: None))
    assert most == [1]


def test_an_error_is_raised_at_once_and_in_the_thread_of_the_driver() -> None:
    def fail() -> None:
        raise FlashgenError("the disk is full")

    never = threading.Event()
    with pytest.raises(FlashgenError, match="the disk is full"):
        drive(lines([a_job(never.wait), a_job(fail)], 2), Stop(lambda: None))


def test_the_first_interrupt_lets_them_end_and_the_second_does_not() -> None:
    said, begun = list[str](), threading.Event()
    stop = Stop(lambda: said.append("winding down"))

    def search() -> str:
        begun.set()
        while not stop.asked:
            time.sleep(0.001)
        return "the best so far"

    ended: list[str] = []
    jobs = [a_job(search, lambda found: ended.append(found) or ()), a_job(pytest.fail)]
    threading.Thread(target=lambda: begun.wait() and os.kill(os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        drive(lines(jobs, 1), stop)
    assert (ended, said) == (["the best so far"], ["winding down"])

    never = threading.Event()

    again = Stop(lambda: None)

    def twice() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        while not again.asked:  # two signals that wait for the main thread are one
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGINT)
        never.wait()

    with pytest.raises(KeyboardInterrupt):
        drive(lines([a_job(twice)], 1), again)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
