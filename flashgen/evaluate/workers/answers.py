"""Requests to a worker, the possible answers, and Pool, whatever gives the ones for the others."""

from __future__ import annotations

import importlib
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from flashgen.errors import FlashgenError, ToolKilled

WorkerKind = Literal["compile", "interpret", "device"]
"""What a task needs: Triton's compiler, Triton's interpreter, or a GPU."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """A call in a child process.

    Args:
        function: "module:function", which takes the payload.
        payload: its arguments, as JSON.
        limit_s: its seconds of CPU time; pool.Limits may extend it.
        kind: what the child must be able to do.
        rank: where tasks wait, those of the least rank go first.
        judge: "module:function" of payload and result; it raises ValueError where they do not fit.

    Examples:
        >>> from flashgen.evaluate.workers.answers import Task
        >>> Task(function="mine:compile_one", payload={"bc": 64}, limit_s=60.0).limit_s
        60.0
    """

    function: str
    payload: dict[str, Any]
    limit_s: float
    kind: WorkerKind = "compile"
    rank: int = 0
    judge: str = ""


@dataclass(frozen=True)
class Done:
    """The answer of a task that did not fail.

    Args:
        value: what the function returned.

    Examples:
        >>> from flashgen.evaluate.workers.answers import Done
        >>> Done({"us": 1.5}).value
        {'us': 1.5}
    """

    value: dict[str, Any]


@dataclass(frozen=True)
class Raised:
    """The function raised: class name, message, and file:line. ended: its process was no longer
    usable, as after an illegal access, and has ended.
    """

    kind: str
    message: str
    where: str
    ended: bool = False

    def __str__(self) -> str:
        place = f" ({self.where})" if self.where else ""
        return f"{self.kind}: {self.message}{place}"


@dataclass(frozen=True)
class Died:
    """The process ended, or was killed because it answered with garbage or held too much memory.

    outside: by a signal that neither a fault of its own nor this pool sends, as SIGKILL where the
    machine runs out of memory. The task may be innocent.
    """

    detail: str
    outside: bool = False

    def __str__(self) -> str:
        return self.detail


@dataclass(frozen=True)
class TimedOut:
    """The process was killed at its limit of CPU time, or, if it computed less, at the limit_s of
    wall-clock time for what hangs.
    """

    limit_s: float
    hung: bool = False

    def __str__(self) -> str:
        what = "s, though it computed for less than its limit" if self.hung else "s of CPU time"
        return f"no answer within {self.limit_s:g} {what}"


Failure = Raised | Died | TimedOut
Answer = Done | Failure


def killed(answer: Answer) -> bool:
    """Whether the process of a task, or a program that it had started, was killed from outside."""
    if isinstance(answer, Died):
        return answer.outside
    return isinstance(answer, Raised) and answer.kind == ToolKilled.__name__


class WorkerLost(FlashgenError, RuntimeError):
    """A worker is gone for good, and the task that it had may run elsewhere.

    blames: whether the task may be what ended it. where: its host, whose workers are lost at once.
    """

    blames = True

    def __init__(self, message: str, where: str = "") -> None:
        super().__init__(message)
        self.where = where


class WorkerUnfit(WorkerLost):
    """A worker cannot go on, whatever its task is."""

    blames = False


class WrongAnswer(WorkerUnfit):
    """A worker answered what cannot be. Its task is to blame only if it makes several do so."""

    blames = True


class Pool(Protocol):
    """Evaluates tasks: child processes here (Workers, Device), an actor elsewhere, or a Crew of
    these.
    """

    @property
    def size(self) -> int:
        """How many tasks it evaluates at once."""

    def submit(self, task: Task) -> Future[Answer]:
        """Evaluate a task; its future raises only ToolchainError, where the machine is at fault,
        and WorkerLost.
        """

    def close(self) -> None:
        """End the workers, and what they do. May be called again."""


def why_wrong(task: Task, answer: Answer) -> str | None:
    """Why an answer cannot be one of this task, as its judge says; None if it can."""
    if not task.judge or not isinstance(answer, Done):
        return None
    module, function = task.judge.split(":")
    try:
        getattr(importlib.import_module(module), function)(task.payload, answer.value)
    except (FlashgenError, ValueError) as error:
        return str(error)
    return None
