"""The driver's jobs by themselves: how many run, in which order, and what an interrupt does; and the
children and crews of a host.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any

import pytest

from flashgen.errors import FlashgenError, InvalidArgument, ToolchainError
from flashgen.evaluate.pools import Pools
from flashgen.evaluate.workers.answers import Answer, Died, Done, Task, WorkerLost
from flashgen.evaluate.workers.crew import Crew
from flashgen.spec.gpu import TARGETS
from flashgen.spec.problem import Problem
from flashgen.tune import devices, places
from flashgen.tune.driver import Interruptible, Job, JobQueue, Stop, drive
from flashgen.tune.places import TargetOptions, by_product, jobs_of
from tests.fakes import FakeEvaluator
from tests.makers import make_config, make_spec

H200 = TARGETS["nvidia_h200"]
PROBLEM = Problem(batch=1, heads=2, kv_heads=2, seq_q=64, seq_k=64)


class Seats:
    """A pool of so many seats; the futures that it gave."""

    def __init__(self, size: int = 1) -> None:
        self.size = size
        self.given: list[Future[Answer]] = []

    def submit(self, task: Task) -> Future[Answer]:
        self.given.append(Future())
        return self.given[-1]

    def close(self) -> None: ...


class Dead(Seats):
    def submit(self, task: Task) -> Future[Answer]:
        super().submit(task).set_result(Died("by signal 9"))
        return self.given[-1]


def crew(size: int) -> Crew:
    return Crew([Seats() for _ in range(size)])


def job(
    run: Callable[[], Any],
    done: Callable[[Any], Sequence[Job]] = lambda _: (),
    failed: Callable[[FlashgenError], Sequence[Job]] = lambda _: (),
) -> Job:
    return Job(run=run, done=done, failed=failed)


def queue(*jobs: Job) -> JobQueue:
    """Jobs that run one by one."""
    return JobQueue(jobs, Pools(cpu=Seats(), device=crew(1)))


@pytest.mark.parametrize(
    ("pools", "most"),
    [
        (Pools(cpu=crew(9)), 3),
        (Pools(cpu=crew(9), device=crew(2)), 2),
        (Pools(cpu=crew(1)), 1),
        (Pools(cpu=Seats(9)), 1),
        (Pools(cpu=crew(9), device=Seats(2)), 1),
    ],
)
def test_so_many_jobs_run_as_keep_the_workers_busy(pools: Pools, most: int) -> None:
    line, room = JobQueue([], pools), []
    for _ in range(5):
        room.append(line.has_room)
        line.running[Future()] = job(lambda: None)
    assert room == [number < most for number in range(5)]


def test_no_further_job_runs_while_no_worker_is_idle() -> None:
    busy = crew(9)
    for _ in range(9):
        busy.submit(Task(function="any", payload={}, limit_s=1.0))
    line = JobQueue([], Pools(cpu=busy))
    assert line.has_room
    line.running[Future()] = job(lambda: None)
    assert not line.has_room


def test_what_follows_a_job_goes_first_and_in_its_order() -> None:
    ran: list[str] = []

    def named(name: str, *after: Job) -> Job:
        return job(lambda: ran.append(name), lambda _: after)

    def fail() -> None:
        raise FlashgenError("no kernel is right")

    failing = job(fail, failed=lambda error: [named(str(error)), named("e")])
    first = named("a", named("b"), named("c"))
    drive([queue(first, failing, named("f")), queue()], Stop(lambda: None))
    assert ran == ["a", "b", "c", "no kernel is right", "e", "f"]


def test_one_worker_has_one_job_at_a_time() -> None:
    ended: list[float] = []
    slow = job(lambda: time.sleep(0.2) or ended.append(0.2))
    drive(
        [queue(slow, job(lambda: len(ended), lambda n: ended.append(n) or ()))], Stop(lambda: None)
    )
    assert ended == [0.2, 1]


def test_every_line_is_driven_and_one_job_does_not_wait_for_another() -> None:
    go = threading.Event()
    slow = job(lambda: go.wait(600))
    fast = job(lambda: None, lambda _: go.set() or ())
    drive([queue(slow), queue(fast)], Stop(lambda: None))
    assert go.is_set()


def test_an_interrupt_within_a_job_is_one_of_the_run() -> None:
    said: list[str] = []

    def interrupted() -> None:
        raise KeyboardInterrupt

    stop = Stop(lambda: said.append("winding down"))
    with pytest.raises(KeyboardInterrupt):
        drive([queue(job(interrupted), job(pytest.fail))], stop)
    stop.ask()
    assert said == ["winding down"]


def test_after_an_interrupt_no_job_begins_and_those_under_way_end() -> None:
    stop, ended = Stop(lambda: None), list[str]()

    def search() -> str:
        while not stop.asked:
            time.sleep(0.001)
        time.sleep(0.2)  # the driver looks for idle workers meanwhile
        return "the best so far"

    jobs = job(search, lambda found: ended.append(found) or ()), job(stop.ask), job(pytest.fail)
    with pytest.raises(KeyboardInterrupt):
        drive([JobQueue(jobs, Pools(cpu=Seats(), device=crew(2)))], stop)
    assert ended == ["the best so far"]


def test_the_handler_of_a_program_around_it_stays() -> None:
    own, before = (lambda *_: None), signal.getsignal(signal.SIGINT)
    try:
        signal.signal(signal.SIGINT, own)
        with Stop(lambda: None).catching_interrupts():
            assert signal.getsignal(signal.SIGINT) is own
    finally:
        signal.signal(signal.SIGINT, before)


class Interrupted(FakeEvaluator):
    def evaluate(self, *_: Any) -> Any:
        raise KeyboardInterrupt


@pytest.mark.parametrize("when", ["before", "between", "within"])
def test_a_job_is_interrupted_once(when: str) -> None:
    """What it evaluates after that is the end of its search."""
    stop, configs = Stop(lambda: None), [make_config(32, 16), make_config(64, 16)]
    made = Interrupted if when == "within" else FakeEvaluator
    inner = made(us=lambda _: 1.0, gpu=H200)
    evaluator, spec, got = Interruptible(inner, stop), make_spec("bfloat16", 32, "none"), []
    if when == "before":
        stop.ask()

    def search() -> None:
        for outcome in evaluator.evaluate("timed", spec, PROBLEM, configs):
            got.append(outcome)
            stop.ask()

    with pytest.raises(KeyboardInterrupt):
        search()
    assert len(got) == (when == "between")
    stop.ask()
    evaluator._inner = FakeEvaluator(us=lambda _: 1.0, gpu=H200)
    assert len(list(evaluator.evaluate("timed", spec, PROBLEM, configs))) == 2


def test_the_children_of_a_host_leave_a_core_to_each_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "cpu_count", lambda: 8)
    found = dict.fromkeys(range(2), H200)
    assert jobs_of(TargetOptions(), found) == 6
    assert jobs_of(TargetOptions(), dict.fromkeys(range(8), H200)) == 1
    assert jobs_of(TargetOptions(jobs=3), found) == 3


def test_gpus_of_one_name_and_other_facts_are_two_products() -> None:
    other = replace(H200, sms=100)
    assert by_product({0: H200, 1: other, 2: H200}) == {H200: [0, 2], other: [1]}


def test_a_seat_that_is_lost_is_told_unless_it_was_the_last() -> None:
    said: list[str] = []
    seats = [Seats(), Seats()]
    made = places.crew(seats, said.append)
    waiting = [made.submit(Task(function="any", payload={}, limit_s=1.0)) for _ in range(3)]
    seats[0].given[0].set_exception(WorkerLost("GPU 0 is gone", ""))
    assert said == ["Going on without it: GPU 0 is gone"]
    for given in list(seats[1].given):
        given.set_exception(WorkerLost("GPU 1 is gone", ""))
    assert len(said) == 1
    with suppress(WorkerLost):
        assert isinstance(waiting[0].result(timeout=10), Died | Done)


def test_gpus_are_chosen_by_index_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {0: H200, 1: TARGETS["nvidia_l4"], 2: H200}
    assert list(devices.chosen("2, 1", found)) == [2, 1]
    with pytest.raises(InvalidArgument, match="none twice"):
        devices.chosen("1,1", found)
    monkeypatch.setattr(devices, "Workers", lambda *_, **__: nullcontext(Dead()))
    with pytest.raises(ToolchainError, match="torch cannot list the GPUs"):
        devices.devices()
