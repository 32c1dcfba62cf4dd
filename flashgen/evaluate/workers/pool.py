"""Pool: child processes that answer tasks within limits of time and memory.

A child that dies, hangs, answers with garbage or holds too much memory is killed and replaced, and
only that task is answered Died or TimedOut. A task that ran out of time, or whose child was killed
from outside, is first tried once more, while no other runs. A busy machine may have been at fault,
or one without enough memory. Each child belongs to one thread here, which waits for it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import sys
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future

from flashgen.errors import ToolKilled
from flashgen.evaluate.workers import usage
from flashgen.evaluate.workers.answers import (
    Answer,
    Done,
    Raised,
    Task,
    TimedOut,
    killed,
    why_wrong,
)
from flashgen.evaluate.workers.child import OUT_OF_MEMORY, REAP_LIMIT_S, Child

logger = logging.getLogger(__name__)

FIRST_TASK_S = 30.0
"""What the first task of a child gets besides: it imports torch and Triton, from a cold disk or a
network, and makes a device ready. No kernel is to blame for that."""

PATIENCE = 3.0
"""How many times as long as the slowest that succeeded a task may take, if that is more."""

HANGS = 10.0
"""Times the limit of CPU time: what has no answer after that much wall-clock time hangs. A machine
with ten times as many processes as cores is slower by that."""


class TaskLimits:
    """The limits of a pool's tasks, learnt per task function. Threads may share it. They are of CPU
    time, and for hang_s of wall-clock time.

    The base limit of a task holds while its function takes up to a third of it. On a slower machine
    it grows to PATIENCE times the slowest success. It never shrinks: a long limit costs time only
    if something hangs, while a short one, learnt from small kernels, would kill the first large
    one, which is then not tried again. Successes count as shares of what was allowed, so rounds of
    many kernels, which are allowed more, compare with rounds of few.
    """

    def __init__(self) -> None:
        self._slowest: dict[str, float] = {}
        self._lock = threading.Lock()

    def seconds(self, task: Task, *, first: bool) -> float:
        """The limit of a task; first: it is the first of its child."""
        return _base(task, first) * max(1.0, PATIENCE * self._slowest.get(task.function, 0.0))

    def hang_s(self, task: Task, *, first: bool) -> float:
        """When a task counts as hung, whatever it computed."""
        return HANGS * self.seconds(task, first=first)

    def learn(self, task: Task, seconds: float, *, first: bool) -> None:
        """Record that a task was done in this number of seconds."""
        share = seconds / _base(task, first)
        with self._lock:
            known = self._slowest.get(task.function, 0.0)
            self._slowest[task.function] = max(share, known)
        if share > max(known, 1 / PATIENCE):
            logger.info("%s took %.0f s: its limit grows", task.function, seconds)


def _base(task: Task, first: bool) -> float:
    return task.limit_s + (FIRST_TASK_S if first else 0.0)


class Turns:
    """Tasks run side by side, and each that ran out of time or was killed once more alone. Pools
    may share it.
    """

    def __init__(self) -> None:
        self._running = self._waiting = 0
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def taken(self, *, alone: bool = False) -> Iterator[None]:
        """Context of a task. It begins while none runs alone or waits for that; one that runs
        alone, once the others have ended.
        """
        with self._changed:
            self._waiting += alone
            self._changed.wait_for(lambda: not (self._running if alone else self._waiting))
            self._running += 1
        try:
            yield
        finally:
            with self._changed:
                self._running -= 1
                self._waiting -= alone
                self._changed.notify_all()


class Workers:
    """A pool of child processes that may crash or hang; they start when first needed.

    close() kills the children, and so does the end of this process. A child may take as long as
    Limits allow.

    Args:
        count: how many children.
        env: is added to their environment; None removes a variable.
        memory_bytes: what each may hold; by default usage.share of this machine.
        turns: of pools whose tasks run meanwhile; without, what was late or killed is not retried.

    Raises:
        ToolchainError: from a result, if a child cannot be started.

    Examples:
        >>> from flashgen.evaluate.workers.answers import Task
        >>> with Workers(1) as workers:  # doctest: +SKIP
        ...     workers.submit(Task(function="mine:compile_one", payload={}, limit_s=60)).result()
    """

    def __init__(
        self,
        count: int,
        *,
        env: Mapping[str, str | None] | None = None,
        memory_bytes: int | None = None,
        turns: Turns | None = None,
    ) -> None:
        self.size = count
        self._env = child_environment(env or {})
        self._memory_bytes = memory_bytes or usage.share(count)
        self._turns = turns
        self._limits = TaskLimits()
        self._tasks: queue.SimpleQueue[tuple[Task, Future[Answer]] | None] = queue.SimpleQueue()
        self._children: set[Child] = set()
        self._lock = threading.Lock()
        self._closed = False
        # Daemons: an interpreter that exits without close() must not wait for queued tasks.
        self._threads = [threading.Thread(target=self._serve, daemon=True) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def submit(self, task: Task) -> Future[Answer]:
        """Queue a task. Its result() raises only ToolchainError: the machine is at fault."""
        future: Future[Answer] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError("submit() after close()")
            self._tasks.put((task, future))
        return future

    def close(self) -> None:
        """Kill all children and drop the queued tasks. May be called again."""
        with self._lock:
            self._closed = True
            children = list(self._children)
        for child in children:
            child.kill()
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            thread.join(REAP_LIMIT_S)

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _serve(self) -> None:
        """The loop of one thread: pass tasks to its child, and replace the child when it is
        unusable.
        """
        child: Child | None = None
        while (item := self._tasks.get()) is not None:
            task, future = item
            if self._closed:
                future.cancel()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                with self._turns.taken() if self._turns else contextlib.nullcontext():
                    child = self._usable(child)
                    answer = self._answer(child, task)
                    if child.answered > 1 and _out_of_memory(answer):
                        # Earlier tasks may have used up the memory: retry in a fresh child.
                        child = self._usable(child)
                        answer = self._answer(child, task)
                if self._turns and (isinstance(answer, TimedOut) or killed(answer)):
                    with self._turns.taken(alone=True):
                        if not self._closed:
                            logger.warning("%s: %s; once more, alone", task.function, answer)
                            child = self._usable(child)
                            answer = self._answer(child, task)
                future.set_result(answer)
            except Exception as error:  # the waiting thread gets the error; this one continues
                future.set_exception(error)
        self._discard(child)

    def _answer(self, child: Child, task: Task) -> Answer:
        """Run the task within the current limit of its function."""
        first = child.answered == 0
        limit_s = self._limits.seconds(task, first=first)
        answer = child.ask(task, limit_s, self._limits.hang_s(task, first=first))
        if why := why_wrong(task, answer):
            return Raised("ValueError", why, "")
        if isinstance(answer, Done):
            self._limits.learn(task, child.spent_s, first=first)
        return answer

    def _usable(self, child: Child | None) -> Child:
        """The child itself if it can serve, otherwise a fresh one."""
        if child is not None and child.can_serve():
            return child
        self._discard(child)
        return self._started()

    def _started(self) -> Child:
        """A fresh child that is ready; one that is killed as it starts is replaced once."""
        try:
            return self._start()
        except ToolKilled:
            return self._start()

    def _start(self) -> Child:
        with self._lock:
            if self._closed:
                raise RuntimeError("the pool was closed")
            child = Child(self._env, self._memory_bytes)
            self._children.add(child)
        try:
            child.wait_until_ready()
        except BaseException:
            self._discard(child)
            raise
        return child

    def _discard(self, child: Child | None) -> None:
        if child is not None:
            child.discard()
            with self._lock:
                self._children.discard(child)


def child_environment(changes: Mapping[str, str | None]) -> dict[str, str]:
    """The environment of this process with `changes`; children find the modules it finds."""
    env = dict(os.environ)
    env["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
    for name, value in changes.items():
        if value is None:
            env.pop(name, None)
        else:
            env[name] = value
    return env


def _out_of_memory(answer: Answer) -> bool:
    return isinstance(answer, Raised) and answer.kind == OUT_OF_MEMORY
