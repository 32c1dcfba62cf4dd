"""The pools of child processes that evaluate on this host: those of its cores, and of each GPU."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from flashgen.evaluate.gpu_state import DeviceLost
from flashgen.evaluate.payloads import (
    ANSWER_LIMIT_S,
    COMPILE_ENV,
    DEVICE_ENV,
    INTERPRET_ENV,
    Answers,
    Tasks,
    placed,
    task,
)
from flashgen.evaluate.workers.answers import (
    Answer,
    Died,
    Done,
    Pool,
    Raised,
    Task,
    TimedOut,
    killed,
)
from flashgen.evaluate.workers.pool import Turns, Workers

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Pools:
    """Who evaluates: cpu compiles and interprets; device measures, on GPUs of one product. None
    without a GPU.
    """

    cpu: Pool
    device: Pool | None = None


def in_thread(run: Callable[[], T]) -> Future[T]:
    """What `run` returns or raises; it is called in a thread, which does not keep the process
    alive.
    """
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()

    def call() -> None:
        try:
            result = run()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=call, daemon=True).start()
    return future


class Children:
    """A pool of `size` children that compile and as many that interpret: Triton does either for
    all of a process.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        turns = Turns()
        self._workers = {
            "compile": Workers(size, env=COMPILE_ENV, turns=turns),
            "interpret": Workers(size, env=INTERPRET_ENV, turns=turns),
        }

    def submit(self, task: Task) -> Future[Answer]:
        """As Pool.submit."""
        return self._workers[task.kind].submit(task)

    def close(self) -> None:
        """As Pool.close."""
        for workers in self._workers.values():
            workers.close()


class Device:
    """CUDA device `index` of this process, as a pool of one: tasks run on it, whatever device they
    name. One that ran out of time or was killed from outside is tried once more.

    After a task that ended the child, the GPU must answer a new one before the next task: if it
    does not, that raises DeviceLost. answers: the task that finds out.
    """

    size = 1

    def __init__(self, index: int = 0, answers: str = Tasks().answers) -> None:
        self.name = f"cuda:{index}"
        self._workers = Workers(1, env=DEVICE_ENV)
        self._question = task(answers, Answers(device=self.name), ANSWER_LIMIT_S)
        self._ended = ""  # how the child ended, if the last task ended it

    def submit(self, task: Task) -> Future[Answer]:
        """As Pool.submit; also raises DeviceLost. One task at a time."""
        return in_thread(partial(self._answer, task))

    def _answer(self, task: Task) -> Answer:
        for last in (False, True):
            self._make_sure()
            answer = self._workers.submit(placed(task, device=self.name)).result()
            if isinstance(answer, Died | TimedOut) or (isinstance(answer, Raised) and answer.ended):
                self._ended = str(answer).splitlines()[0]
            if last or not (isinstance(answer, TimedOut) or killed(answer)):
                break
        return answer

    def _make_sure(self) -> None:
        """Raise DeviceLost if the last task ended its child, and the GPU answers no new one."""
        if self._ended and not isinstance(self._workers.submit(self._question).result(), Done):
            raise DeviceLost(
                f"{self.name} no longer answers, since a kernel ended its process "
                f"({self._ended}): nothing is lost; see what `nvidia-smi` and the kernel log say, "
                f"reset the GPU, and run the same command again"
            )
        self._ended = ""

    def close(self) -> None:
        """As Pool.close."""
        self._workers.close()


class FutureCache:
    """Futures by key: what is under way for one search is not started again for another."""

    def __init__(self) -> None:
        self._futures: dict[Hashable, Future[Answer]] = {}
        self._lock = threading.Lock()

    def start(self, key: Hashable, submit: Callable[[], Future[Answer]]) -> Future[Answer]:
        """The future of a key: the one that is there, unless it was cancelled or raised."""
        with self._lock:
            known = self._futures.get(key)
            if known is None or known.cancelled() or (known.done() and known.exception()):
                known = self._futures[key] = submit()
            return known

    def result(self, key: Hashable, submit: Callable[[], Future[Answer]]) -> Answer:
        """Wait for the answer of a key, which another search may cancel meanwhile."""
        while True:
            try:
                return self.start(key, submit).result()
            except CancelledError:
                continue

    def drop(self, key: Hashable) -> None:
        """Cancel what still waits."""
        with self._lock:
            known = self._futures.get(key)
        if known is not None:
            known.cancel()
