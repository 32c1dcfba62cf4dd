"""Crew: gives tasks to many pools, one at a time each, and survives the loss of some."""

from __future__ import annotations

import heapq
import itertools
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError, Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from flashgen.errors import FlashgenError
from flashgen.evaluate.workers.answers import Answer, Died, Pool, Task, WorkerLost

MOST_DEATHS = 3
"""Workers that may be lost at a task before it is given up: it may be what kills them."""

TOGETHER_S = 30.0
"""Workers of a host that are lost within this time may have been lost at once: Ray takes some
seconds to notice that a node is gone."""


@dataclass
class _Job:
    """A task, how many workers it may have cost, and when one was lost at each host."""

    task: Task
    future: Future[Answer] = field(default_factory=Future)
    deaths: int = 0
    lost: dict[str, float] = field(default_factory=dict)

    def blame(self, error: WorkerLost) -> None:
        """Count a loss. Those of one host that follow each other count once: it may be gone, and
        its other workers with it.
        """
        now, before = time.monotonic(), self.lost.get(error.where, -math.inf)
        if error.blames:
            self.deaths += not error.where or now - before > TOGETHER_S
            self.lost[error.where] = now


class Crew:
    """A pool of `seats`: each is given one task at a time; a pool of several takes several seats.

    Of the tasks that wait, those of the least rank go first, then the earliest. A task whose worker
    is lost goes to another one; after MOST_DEATHS it is answered Died. on_loss is called with each
    seat that is lost and the reason, in any thread. When the last seat is lost, all that waits
    raises that reason, unless `hopeful`: then it waits for add() or fail().
    """

    def __init__(
        self,
        seats: Iterable[Pool] = (),
        *,
        on_loss: Callable[[Pool, WorkerLost], None] = lambda *_: None,
        hopeful: bool = False,
    ) -> None:
        self._idle = deque(seats)
        self._pools = list(dict.fromkeys(self._idle))
        self._busy = 0
        self._queue: list[tuple[int, int, _Job]] = []
        self._order = itertools.count()
        self._lock = threading.Lock()
        self._on_loss = on_loss
        self._hopeful = hopeful
        self._why_closed: Exception | None = None

    @property
    def size(self) -> int:
        """The number of seats, of now."""
        return len(self._idle) + self._busy

    @property
    def idle(self) -> int:
        """Seats that have nothing to do."""
        return 0 if self._queue else len(self._idle)

    def submit(self, task: Task) -> Future[Answer]:
        """As Pool.submit. A task that waits can be cancelled."""
        job = _Job(task)
        self._wait(job)
        self._give()
        return job.future

    def add(self, seat: Pool) -> None:
        """Take in one more worker."""
        with self._lock:
            self._pools.append(seat)
            self._idle.append(seat)
            closed = self._why_closed is not None
        if closed:
            seat.close()
        self._give()

    def discard(self, seat: Pool, error: WorkerLost) -> None:
        """Take out a worker that was lost while it had nothing to do; one that is busy tells it."""
        with self._lock:
            if seat not in self._idle:
                return
            self._idle.remove(seat)
            self._pools.remove(seat)
        self._on_loss(seat, error)
        seat.close()

    def fail(self, error: FlashgenError) -> None:
        """Raise this for all that waits and all to come."""
        with self._lock:
            self._why_closed = error
            waiting, self._queue = self._queue, []
        for *_, job in waiting:
            with suppress(InvalidStateError):  # cancelled
                job.future.set_exception(error)

    def close(self) -> None:
        """As Pool.close; what waits is cancelled."""
        with self._lock:
            self._why_closed = self._why_closed or RuntimeError("the crew was closed")
            waiting, self._queue = self._queue, []
            pools = list(self._pools)
        for *_, job in waiting:
            if not job.future.cancel():
                job.future.set_exception(CancelledError())
        for pool in pools:
            pool.close()

    def _wait(self, job: _Job) -> None:
        with self._lock:
            if self._why_closed is None:
                heapq.heappush(self._queue, (job.task.rank, next(self._order), job))
                return
        if not job.future.running():
            raise self._why_closed
        job.future.set_exception(self._why_closed)

    def _give(self) -> None:
        """Give what waits to those who are idle."""
        while True:
            with self._lock:
                if not (self._idle and self._queue):
                    return
                job = heapq.heappop(self._queue)[2]
                if not job.future.running() and not job.future.set_running_or_notify_cancel():
                    continue
                seat = self._idle.popleft()
                self._busy += 1
            try:
                given = seat.submit(job.task)
            except Exception as error:  # it was closed, or cannot be reached
                given = Future()
                given.set_exception(error)
            given.add_done_callback(partial(self._ended, seat, job))

    def _ended(self, seat: Pool, job: _Job, given: Future[Answer]) -> None:
        error = CancelledError() if given.cancelled() else given.exception()
        lost = isinstance(error, WorkerLost)
        with self._lock:
            self._busy -= 1
            if not lost:
                self._idle.append(seat)
            else:
                self._pools.remove(seat)
        self._give()
        if isinstance(error, WorkerLost):
            self._resume(job, error)
            self._on_loss(seat, error)
            seat.close()
        elif error is not None:
            job.future.set_exception(error)
        else:
            job.future.set_result(given.result())

    def _resume(self, job: _Job, error: WorkerLost) -> None:
        """Give the task of a lost worker to another one."""
        job.blame(error)
        if job.deaths >= MOST_DEATHS:
            why = f"{job.deaths} workers were lost while they evaluated it; the last: {error}"
            job.future.set_result(Died(why))
        elif self.size or self._hopeful:
            self._wait(job)
            self._give()
        else:
            job.future.set_exception(error)
            self.fail(error)
