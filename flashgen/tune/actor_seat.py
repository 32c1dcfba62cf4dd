"""The near end of an actor of Ray: what it is given, and what its answers may be."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Mapping
from concurrent.futures import Executor, Future, InvalidStateError
from pathlib import Path
from typing import Any

from flashgen.errors import FlashgenError, one_line
from flashgen.evaluate.workers.answers import (
    Answer,
    Died,
    Done,
    Raised,
    Task,
    TimedOut,
    WorkerLost,
    WorkerUnfit,
    WrongAnswer,
    why_wrong,
)
from flashgen.evaluate.workers.pool import TaskLimits
from flashgen.files import write_whole
from flashgen.spec.records import shown, value_of

GRACE_S = 30.0
"""On top of a task's own limit, until an actor counts as hung."""

LONGEST_TEXT = 1 << 20
"""Characters of a message or a file of a worker: they have a few thousand."""

DIED = "it died, or its node, or the network"


class Seat:
    """The near end of an actor, as a pool of one. where: its node, for people.

    answers: the thread that takes in answers. In Ray's own nothing of Ray may be called: it would
    wait for itself.
    """

    size = 1

    def __init__(
        self, ray: Any, actor: Any, where: str, limits: TaskLimits, answers: Executor
    ) -> None:
        self.where = where
        self._answers = answers
        self._ray = ray
        self._actor = actor
        self._limits = limits
        self._asked: tuple[Future[Answer], float, float] | None = None

    def submit(self, task: Task) -> Future[Answer]:
        """As Pool.submit."""
        future: Future[Answer] = Future()
        future.set_running_or_notify_cancel()
        # Twice: an actor tries what ran out of time once more.
        now, limit_s = time.monotonic(), 2 * self._limits.hang_s(task, first=True) + GRACE_S
        self._asked = future, now + limit_s, limit_s
        given = self._actor.run.remote(task).future()

        def answered(done: Any) -> None:
            with contextlib.suppress(RuntimeError):  # the run is over
                self._answers.submit(self._answered, task, now, future, done)

        given.add_done_callback(answered)
        return future

    def close(self) -> None:
        """As Pool.close."""
        with contextlib.suppress(Exception):  # it is gone, or Ray is
            self._ray.kill(self._actor)

    def end_if_overdue(self) -> None:
        """Give up an actor that shows no life."""
        asked = self._asked
        if asked is not None and time.monotonic() > asked[1]:
            self.close()
            self._lose(asked[0], f"no answer within {asked[2]:.0f} s")

    def _answered(self, task: Task, begun: float, future: Future[Answer], done: Any) -> None:
        self._asked = None
        try:
            said = done.result()
        except Exception as error:  # Ray's own, or what the actor raised
            cause = getattr(error, "cause", None)
            why, kind = (DIED, WorkerLost) if cause is None else (first_line(cause), WorkerUnfit)
            self._lose(future, why, kind)
            return
        try:
            answer, files = _answer_of(said, task)
        except ValueError as error:
            self._lose(future, f"it answers what cannot be: {first_line(error)}", WrongAnswer)
            return
        except Exception as error:  # a future without an answer would stop the run
            self._lose(future, f"its answer cannot be read: {one_line(error)}", WorkerUnfit)
            return
        with contextlib.suppress(InvalidStateError):  # it was overdue
            try:
                for path, text in files.items():
                    write_whole(path, text)
            except FlashgenError as error:  # of this machine
                future.set_exception(error)
                return
            if isinstance(answer, Done):
                self._limits.learn(task, time.monotonic() - begun, first=True)
            future.set_result(answer)

    def _lose(self, future: Future[Answer], why: str, kind: type[WorkerLost] = WorkerLost) -> None:
        with contextlib.suppress(InvalidStateError):
            future.set_exception(kind(f"{self.where}: {why}", self.where))


def _answer_of(said: object, task: Task) -> tuple[Answer, Mapping[Path, str]]:
    """What Worker.run returned, read by types with bounds: the answer, and files to write. Raises
    ValueError where it cannot be the answer to this task: a worker may be spoiled, or lie.
    """
    if not isinstance(said, tuple) or len(said) != 2:
        raise ValueError(f"an answer and files were due: got {shown(said)}")
    answer, files = said
    types = _FIELDS.get(type(answer))
    if types is None or vars(answer).keys() != types.keys():
        raise ValueError(f"an answer was due: got {shown(answer)}")
    for name, kind in types.items():
        value = value_of(kind, getattr(answer, name), name)
        if isinstance(value, str) and len(value) > LONGEST_TEXT:
            raise ValueError(f"{name} must have at most {LONGEST_TEXT} characters")
    if why := why_wrong(task, answer):
        raise ValueError(why)
    return answer, _files_of(files, task)


def _files_of(said: object, task: Task) -> Mapping[Path, str]:
    """The files that a task leaves in its cache: small ones, named after the kernel. A task without
    a cache or a kernel leaves none.
    """
    files: dict[str, str] = value_of(dict[str, str], said, "the files")
    folder, digest = task.payload.get("cache"), task.payload.get("digest")
    if files and not (folder and digest):
        raise ValueError(f"no files were due: got {shown(list(files))}")
    begins = re.escape(str(digest).removeprefix("sha256:")[:32])
    for name, text in files.items():
        if not re.fullmatch(rf"{begins}[\w.-]*\.json", name) or len(text) > LONGEST_TEXT:
            raise ValueError(f"a small file of the kernel was due: got {shown(name)}")
    return {Path(str(folder)) / name: text for name, text in files.items()}


_FIELDS: dict[type, dict[str, Any]] = {
    Done: {"value": dict[str, Any]},
    Raised: {"kind": str, "message": str, "where": str, "ended": bool},
    Died: {"detail": str, "outside": bool},
    TimedOut: {"limit_s": float, "hung": bool},
}
"""The types of an answer's fields."""


def first_line(error: BaseException) -> str:
    """What an error says first, shortened; else its class."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:300] if lines else type(error).__name__
