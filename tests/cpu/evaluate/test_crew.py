"""Crew: every task is answered once, by whoever is left; and what is shared by searches."""

from __future__ import annotations

import random
import threading
from collections import Counter
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field

import pytest

from flashgen.evaluate.gpu_state import DeviceLost
from flashgen.evaluate.pools import Device, FutureCache
from flashgen.evaluate.workers.answers import Answer, Died, Done, Pool, Task, WorkerLost
from flashgen.evaluate.workers.crew import MOST_DEATHS, Crew


@dataclass(eq=False)
class Seat:
    """A worker whose answers a test gives. given: what it has, with the futures."""

    size: int = 1
    given: list[tuple[Task, Future[Answer]]] = field(default_factory=list)
    closed: bool = False

    def submit(self, task: Task) -> Future[Answer]:
        future: Future[Answer] = Future()
        future.set_running_or_notify_cancel()
        self.given.append((task, future))
        return future

    def answer(self, with_: Answer | Exception | None = None) -> str:
        """Answer the only task that it has; returns which one that was."""
        ((task, future),) = self.given
        self.given.clear()
        if isinstance(with_, Exception):
            future.set_exception(with_)
        else:
            future.set_result(with_ or Done({"by": task.function}))
        return task.function

    def close(self) -> None:
        self.closed = True


def a_task(name: str, rank: int = 0) -> Task:
    return Task(function=name, payload={}, limit_s=1.0, rank=rank)


def test_each_has_one_at_a_time_and_the_least_rank_goes_first() -> None:
    seats = Seat(), Seat()
    crew = Crew(seats)
    assert (crew.size, crew.idle) == (2, 2)
    names = [("a", 1), ("b", 1), ("late", 2), ("early", 0), ("c", 1)]
    futures = {name: crew.submit(a_task(name, rank)) for name, rank in names}
    assert [[task.function for task, _ in seat.given] for seat in seats] == [["a"], ["b"]]
    assert crew.idle == 0
    order = [seats[0].answer() for _ in range(4)]
    assert order == ["a", "early", "c", "late"]
    seats[1].answer()
    assert crew.idle == 2
    assert {name: f.result() for name, f in futures.items()} == {
        name: Done({"by": name}) for name, _ in names
    }


def test_what_waits_can_be_cancelled_and_is_not_given() -> None:
    seat = Seat()
    crew = Crew([seat])
    first, second, third = (crew.submit(a_task(name)) for name in "abc")
    assert not first.cancel()
    assert second.cancel()
    seat.answer()
    assert [task.function for task, _ in seat.given] == ["c"]
    seat.answer()
    assert third.result() == Done({"by": "c"})


def test_the_task_of_one_that_is_lost_goes_to_another_before_those_that_wait() -> None:
    lost: list[tuple[Pool, str]] = []
    seats = Seat(), Seat()
    crew = Crew(seats, on_loss=lambda seat, error: lost.append((seat, str(error))))
    futures = [crew.submit(a_task(name, rank)) for rank, name in enumerate("abc")]
    seats[0].answer(WorkerLost("its node is gone"))
    assert lost == [(seats[0], "its node is gone")]
    assert seats[0].closed
    assert crew.size == 1
    assert [seats[1].answer() for _ in range(3)] == ["b", "a", "c"]
    assert [f.result() for f in futures] == [Done({"by": name}) for name in "abc"]


def test_what_costs_three_workers_is_given_up_and_the_rest_goes_on() -> None:
    seats = [Seat() for _ in range(MOST_DEATHS + 1)]
    crew = Crew(seats[:MOST_DEATHS])
    futures = crew.submit(a_task("killer")), crew.submit(a_task("after"))
    held = seats[1].given.pop()[1]  # `after`, until the others are lost
    for seat in (seats[0], seats[2]):
        seat.answer(WorkerLost("it ran out of memory"))
    crew.add(seats[3])
    seats[3].answer(WorkerLost("it ran out of memory"))
    held.set_result(Done({}))
    killer = futures[0].result(timeout=0)
    assert isinstance(killer, Died)
    assert str(killer) == (
        "3 workers were lost while they evaluated it; the last: it ran out of memory"
    )
    assert futures[1].result() == Done({})
    assert crew.size == 1


def test_the_workers_of_a_host_that_is_gone_count_as_one_death(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The task goes from one to the other before anybody knows that all are gone."""
    seats = [Seat() for _ in range(8)]
    crew = Crew(seats)
    future = crew.submit(a_task("innocent"))
    for seat in seats[:5]:
        seat.answer(WorkerLost("gone", "n1"))
    seats[5].answer(WorkerLost("gone", "n2"))
    assert not future.done()
    monkeypatch.setattr("flashgen.evaluate.workers.crew.TOGETHER_S", -1.0)  # much later
    seats[6].answer(WorkerLost("gone", "n1"))
    assert isinstance(future.result(timeout=0), Died)


def test_a_device_that_is_lost_blames_no_task() -> None:
    seats = [Seat() for _ in range(5)]
    crew = Crew(seats)
    future = crew.submit(a_task("any"))
    for seat in seats[:4]:
        seat.answer(DeviceLost("cuda:0 no longer answers"))
    seats[4].answer()
    assert future.result() == Done({"by": "any"})


@pytest.mark.parametrize("hopeful", [False, True])
def test_when_none_is_left_the_reason_is_raised_or_more_are_awaited(hopeful: bool) -> None:
    seat = Seat()
    crew = Crew([seat], hopeful=hopeful)
    futures = crew.submit(a_task("a")), crew.submit(a_task("b"))
    seat.answer(DeviceLost("cuda:0 no longer answers"))
    if not hopeful:
        for future in futures:
            with pytest.raises(DeviceLost, match="no longer answers"):
                future.result(timeout=0)
        with pytest.raises(DeviceLost):
            crew.submit(a_task("c"))
        return
    assert not any(future.done() for future in futures)
    crew.add(other := Seat())
    assert sorted((other.answer(), other.answer())) == ["a", "b"]
    crew.fail(WorkerLost("no worker came"))
    with pytest.raises(WorkerLost, match="no worker came"):
        crew.submit(a_task("c"))


def test_a_crew_that_is_closed_answers_nothing_and_closes_all() -> None:
    seats = Seat(), Seat()
    crew = Crew(seats)
    futures = [crew.submit(a_task(name)) for name in "abc"]
    crew.close()
    assert all(seat.closed for seat in seats)
    with pytest.raises(CancelledError):
        futures[2].result(timeout=0)
    with pytest.raises(RuntimeError, match="closed"):
        crew.submit(a_task("d"))
    seats[0].answer(WorkerLost("it was ended"))
    with pytest.raises(RuntimeError, match="closed"):
        futures[0].result(timeout=0)
    crew.add(late := Seat())
    assert late.closed


def test_at_random_nothing_is_lost_and_nothing_is_answered_twice() -> None:
    """Seats answer, are lost and come, in any order; a third of the time each."""
    for seed in range(30):
        chance, begun = random.Random(seed), Counter[str]()
        seats = [Seat() for _ in range(4)]
        crew = Crew(seats, hopeful=True)
        futures = {str(n): crew.submit(a_task(str(n), chance.randrange(3))) for n in range(60)}
        while not all(future.done() for future in futures.values()):
            if not crew.size or chance.random() < 0.1:
                seats.append(Seat())
                crew.add(seats[-1])
            seat = chance.choice([seat for seat in seats if seat.given])
            begun[seat.given[0][0].function] += 1
            seat.answer(WorkerLost("gone") if chance.random() < 0.3 else None)
            assert all(len(seat.given) <= 1 for seat in seats)
        for name, future in futures.items():
            answer = future.result()
            given_up = isinstance(answer, Died)
            assert given_up or answer == Done({"by": name})
            assert begun[name] <= MOST_DEATHS
            assert not given_up or begun[name] == MOST_DEATHS


def test_two_searches_that_want_the_same_get_it_once() -> None:
    seat, once = Seat(), FutureCache()
    crew = Crew([seat])

    def submit() -> Future[Answer]:
        return crew.submit(a_task("kernel"))

    assert once.start("key", submit) is once.start("key", submit)
    once.drop("key")  # it runs: to drop it changes nothing
    seat.answer()
    assert once.result("key", submit) == Done({"by": "kernel"})
    assert not seat.given


def test_what_one_search_drops_the_other_asks_for_again() -> None:
    seat, once = Seat(), FutureCache()
    crew = Crew([seat])
    first = crew.submit(a_task("before"))

    def submit() -> Future[Answer]:
        return crew.submit(a_task("kernel"))

    once.start("key", submit)
    answers: list[Answer] = []
    waiting = threading.Thread(target=lambda: answers.append(once.result("key", submit)))
    waiting.start()
    once.drop("key")
    seat.answer()
    first.result()
    while not seat.given:  # the other search has it queued again
        pass
    seat.answer()
    waiting.join()
    assert answers == [Done({"by": "kernel"})]


def test_a_device_is_asked_after_a_task_that_ended_its_child_and_runs_what_it_is_given() -> None:
    answers = "tests.worker_faults:device_answers"
    device = Device(3, answers)
    try:
        echo = Task(function="tests.worker_faults:echo", payload={"device": "cuda:0"}, limit_s=60.0)
        done = device.submit(echo).result()
        assert isinstance(done, Done)
        assert done.value["device"] == "cuda:3"
        assert isinstance(device.submit(a_task("tests.worker_faults:leave")).result(), Died)
        assert device._ended
        assert isinstance(device.submit(echo).result(), Done)
        assert not device._ended
        device._ended = "SIGSEGV"
        device._question = a_task("tests.worker_faults:refuse")
        with pytest.raises(DeviceLost, match=r"cuda:3 no longer answers.*\(SIGSEGV\)"):
            device.submit(echo).result()
    finally:
        device.close()
