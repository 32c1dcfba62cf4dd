"""Workers: child processes that answer tasks within a time limit; the parent's side of worker.py.

A child that dies, hangs or answers with garbage is killed and replaced, and that task alone is
answered Died or TimedOut. Each child belongs to one thread here, which spends its time waiting for
it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from flashgen.errors import ToolchainError

logger = logging.getLogger(__name__)

START_LIMIT_S = (
    60.0  # a bare interpreter starts in 0.1 s; a network file system and 100 others, slower
)
REAP_LIMIT_S = 10.0  # a process stuck inside a driver outlives SIGKILL: rather leave it than hang
LONGEST_ANSWER_BYTES = 1 << 24  # answers are a few KB


@dataclass(frozen=True, kw_only=True)
class Task:
    """A call of `function` ("module:function") with a JSON payload, given limit_s seconds."""

    function: str
    payload: dict[str, Any]
    limit_s: float


@dataclass(frozen=True)
class Done:
    """The function returned this."""

    value: dict[str, Any]


@dataclass(frozen=True)
class Raised:
    """The function raised: class name, message, and file:line."""

    kind: str
    message: str
    where: str

    def __str__(self) -> str:
        place = f" ({self.where})" if self.where else ""
        return f"{self.kind}: {self.message}{place}"


@dataclass(frozen=True)
class Died:
    """The process ended, or answered with garbage and was killed."""

    detail: str

    def __str__(self) -> str:
        return self.detail


@dataclass(frozen=True)
class TimedOut:
    """The process was killed at its limit of so many seconds."""

    limit_s: float

    def __str__(self) -> str:
        return f"no answer within {self.limit_s:g} s"


Answer = Done | Raised | Died | TimedOut


class Workers:
    """A pool of `count` children, started when first needed, with `env` on top of this environment.

    A value of None in `env` removes the variable. close() kills the children; so does this
    process's end.
    """

    def __init__(self, count: int, *, env: Mapping[str, str | None] | None = None) -> None:
        self._env = child_environment(env or {})
        self._tasks: queue.SimpleQueue[tuple[Task, Future[Answer]] | None] = queue.SimpleQueue()
        self._children: set[_Child] = set()
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
        """One thread's life: hand tasks to its child, and replace the child when it is spoiled."""
        child: _Child | None = None
        while (item := self._tasks.get()) is not None:
            task, future = item
            if self._closed:
                future.cancel()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                if child is None or not child.is_idle():
                    self._discard(child)
                    child = None
                    child = self._started()
                future.set_result(child.ask(task))
            except Exception as error:  # the waiting thread is told; this one lives on
                future.set_exception(error)
        self._discard(child)

    def _started(self) -> _Child:
        """A fresh child that listens."""
        with self._lock:
            if self._closed:
                raise RuntimeError("the pool was closed")
            child = _Child(self._env)
            self._children.add(child)
        try:
            child.wait_until_ready()
        except BaseException:
            self._discard(child)
            raise
        return child

    def _discard(self, child: _Child | None) -> None:
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


class _Child:
    """One child process. Only the thread that owns it may call anything but kill()."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._spoiled = False
        self._killing = threading.Lock()
        self._killed = False
        self._buffer = b""
        # What the compiler prints, kept for the answer of a crash. Appending, so that it can be cut
        # to 0.
        self._output = tempfile.TemporaryFile("a+b")  # noqa: SIM115 - closed by discard()
        child_reads, requests = os.pipe()
        self._answers, child_writes = os.pipe()
        self._requests = os.fdopen(requests, "wb")
        module = "flashgen.evaluators.worker"
        ends = (child_reads, child_writes)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, *map(str, (*ends, os.getpid()))],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
                pass_fds=ends,
                # A group of its own: Ctrl-C does not reach it, and it is killed with ptxas and all.
                process_group=0,
            )
        except OSError as error:
            os.close(self._answers)
            self._requests.close()
            raise ToolchainError(f"a worker process cannot be started: {error}") from error
        finally:
            for end in ends:
                os.close(end)

    def wait_until_ready(self) -> None:
        """Block until the child listens. Raises ToolchainError if it cannot be started."""
        try:
            line = self._read_line(time.monotonic() + START_LIMIT_S)
        except TimeoutError:
            line = None
        if line is None or b"ready" not in line:
            raise ToolchainError(f"a worker process cannot be started: {self._last_words()}")

    def is_idle(self) -> bool:
        """Whether the child can take a task: it lives, and owes and says nothing."""
        return not (self._spoiled or self._buffer or self._readable(0.0))

    def ask(self, task: Task) -> Answer:
        """The answer to one task, within its time limit."""
        self._output.truncate(0)
        request = {"task": task.function, "payload": task.payload}
        deadline = time.monotonic() + task.limit_s
        with contextlib.suppress(BrokenPipeError):  # its death shows as the end of its answers
            self._requests.write(json.dumps(request).encode() + b"\n")
            self._requests.flush()
        try:
            line = self._read_line(deadline)
        except TimeoutError:
            self._spoiled = True
            self.kill()
            return TimedOut(task.limit_s)
        if line is None:
            self._spoiled = True
            return Died(self._last_words())
        return self._parsed(line)

    def _parsed(self, line: bytes) -> Answer:
        """The Answer in a line; raises ToolchainError for an error that is the machine's."""
        try:
            message = json.loads(line)
            if "result" in message:
                return Done(dict(message["result"]))
            self._spoiled = bool(message["last"])
            raised = Raised(**message["error"])
        except (ValueError, TypeError, KeyError):
            self._spoiled = True
            self.kill()
            return Died(f"the worker answered with garbage: {line[:80]!r}")
        if raised.kind == "ToolchainError":
            raise ToolchainError(raised.message)
        return raised

    def kill(self) -> None:
        """End the child and all it started, and reap it. Any thread may call it, and again."""
        with self._killing:
            if self._killed:
                return
            self._killed = True
            # Not yet reaped, so the group's number is still its own.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            try:
                self._process.wait(REAP_LIMIT_S)
            except subprocess.TimeoutExpired:
                logger.warning("worker %d does not end after SIGKILL", self._process.pid)

    def discard(self) -> None:
        """kill(), and close the pipes."""
        self.kill()
        os.close(self._answers)
        self._output.close()
        with contextlib.suppress(OSError):
            self._requests.close()

    def _readable(self, timeout_s: float) -> bool:
        poll = select.poll()
        poll.register(self._answers, select.POLLIN)
        return bool(poll.poll(max(0.0, timeout_s) * 1000))

    def _read_line(self, deadline: float) -> bytes | None:
        """The next line, or None at the end of the pipe. Raises TimeoutError at the deadline."""
        while b"\n" not in self._buffer and len(self._buffer) < LONGEST_ANSWER_BYTES:
            if not self._readable(deadline - time.monotonic()):
                raise TimeoutError
            chunk = os.read(self._answers, 1 << 16)
            if not chunk:
                return None
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _last_words(self) -> str:
        """How the child ended, and the last line it printed."""
        self._wait_for_exit()
        self.kill()
        code = self._process.returncode
        if code is None or code >= 0:
            end = f"the worker ended with exit code {code}"
        else:
            end = f"the worker was ended by {signal.Signals(-code).name}"
        self._output.seek(0)
        lines = self._output.read().decode(errors="replace").strip().splitlines()
        return f"{end}: {lines[-1][-200:]}" if lines else end

    def _wait_for_exit(self) -> None:
        """Give a child whose pipe closed a moment to end by itself, without reaping it."""
        deadline = time.monotonic() + 1.0
        flags = os.WEXITED | os.WNOWAIT | os.WNOHANG
        with contextlib.suppress(ChildProcessError):  # close() has reaped it
            while time.monotonic() < deadline:
                if os.waitid(os.P_PID, self._process.pid, flags) is not None:
                    return
                time.sleep(0.01)
