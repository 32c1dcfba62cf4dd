"""Driver: runs the jobs of a run at once, in threads, and takes in their results one by one.

A job is a search, or the sharing of kernels among the buckets of a spec. Jobs are independent, so
any number may run, in any order, and the results are the same: by as many searches as keep the
workers busy. Tasks of earlier jobs go first (crew.py), so jobs end one after the other.
"""

from __future__ import annotations

import contextlib
import signal
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import Any

from flashgen.errors import FlashgenError
from flashgen.evaluate.evaluator import Evaluator, Request, WrappingEvaluator
from flashgen.evaluate.pools import Pools, in_thread
from flashgen.evaluate.workers.crew import Crew
from flashgen.schedules.config import KernelConfig
from flashgen.schedules.outcome import Outcome

LOOK_S = 0.05
"""Between two looks for idle workers."""

SEATS_OF_SEARCH = 4
"""Cores that a search keeps busy without a GPU: the slowest kernel of its batch is awaited, and
then it proposes the next one."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """run is called in a thread of its own; done in the driver's, with its result, and returns the
    jobs that follow. failed likewise, with a FlashgenError that `run` raised: it may raise it.
    """

    run: Callable[[], Any]
    done: Callable[[Any], Sequence[Job]]
    failed: Callable[[FlashgenError], Sequence[Job]]


class Stop:
    """Whether the user has interrupted the run. say is called when that happens."""

    def __init__(self, say: Callable[[], None]) -> None:
        self._say = say
        self.asked = False

    def ask(self) -> None:
        """Interrupt the run: searches choose the best of what they have."""
        first, self.asked = not self.asked, True
        if first:
            self._say()

    @contextlib.contextmanager
    def catching_interrupts(self) -> Iterator[None]:
        """Context in which the first Ctrl-C interrupts the run, and a second one is raised."""

        def interrupt(*_: object) -> None:
            if self.asked:
                raise KeyboardInterrupt
            self.ask()

        before = signal.getsignal(signal.SIGINT)
        if before is not signal.default_int_handler:  # an embedding program's own, or ignored
            yield
            return
        signal.signal(signal.SIGINT, interrupt)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)


class Interruptible(WrappingEvaluator):
    """`inner` for one job. Once the run is interrupted, evaluate raises KeyboardInterrupt, a single
    time: what follows is the end of the search.
    """

    def __init__(self, inner: Evaluator, stop: Stop) -> None:
        super().__init__(inner)
        self._stop = stop
        self._told = False

    def answers(
        self, request: Request, configs: Sequence[KernelConfig]
    ) -> Generator[Outcome, None, None]:
        """As BaseEvaluator.answers."""
        self._tell()
        try:
            with contextlib.closing(self._beside({}, request, configs)) as outcomes:
                for outcome in outcomes:
                    yield outcome
                    self._tell()
        except KeyboardInterrupt:
            self._told = True
            raise

    def _tell(self) -> None:
        if self._stop.asked and not self._told:
            self._told = True
            raise KeyboardInterrupt

    def close(self) -> None:
        """As Evaluator.close: `inner` is of all jobs, and stays open."""


class JobQueue:
    """Jobs that share `pools`: some run, the others wait."""

    def __init__(self, jobs: Sequence[Job], pools: Pools) -> None:
        self.waiting = deque(jobs)
        self.running: dict[Future[Any], Job] = {}
        self._pools = pools

    @property
    def has_room(self) -> bool:
        """Whether one more job would find idle workers."""
        if not self.running:
            return True
        pool = self._pools.device or self._pools.cpu
        most = pool.size if self._pools.device else -(-pool.size // SEATS_OF_SEARCH)
        idle = pool.idle if isinstance(pool, Crew) else 0
        return len(self.running) < most and idle > 0


def drive(lines: Sequence[JobQueue], stop: Stop) -> None:
    """Run all jobs of all lines. Call it in the main thread.

    After the first Ctrl-C no job begins, and those under way end with what they have; then, and at
    a second one, KeyboardInterrupt is raised. Also raises whatever a job raises, at once: others
    that are under way are lost.
    """
    with stop.catching_interrupts():
        while any(line.running or (line.waiting and not stop.asked) for line in lines):
            for line in lines:
                if line.waiting and line.has_room and not stop.asked:
                    job = line.waiting.popleft()
                    line.running[in_thread(job.run)] = job
            wait([each for line in lines for each in line.running], LOOK_S, FIRST_COMPLETED)
            for line in lines:
                for ended in [each for each in line.running if each.done()]:
                    _take(line, ended, stop)
    if stop.asked:
        raise KeyboardInterrupt


def _take(line: JobQueue, ended: Future[Any], stop: Stop) -> None:
    """Take in the end of a job."""
    job, error = line.running.pop(ended), ended.exception()
    if isinstance(error, FlashgenError):
        line.waiting.extendleft(reversed(job.failed(error)))
    elif isinstance(error, KeyboardInterrupt):
        stop.ask()
    else:
        line.waiting.extendleft(reversed(job.done(ended.result())))
