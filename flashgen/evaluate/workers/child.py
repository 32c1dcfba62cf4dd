"""Both ends of one child process that runs tasks which may crash, hang or abort.

    python -P -m flashgen.evaluate.workers.child PARENT

Requests come by stdin and answers go to stdout, which are pipes that the child takes away at once:
what compilers print then goes to stderr. Each message is one line of JSON:

    {"id": 7, "task": "module:function", "payload": {...}}     call the function with the payload
    {"id": 7, "result": {...}}                                 what it returned
    {"id": 7, "error": {"kind", "message", "where"}, "last": bool}     what it raised; last: it ends

The id tells an answer from anything else that gets into the pipe. The first answer is
{"ready": pid}. The process keeps its imports between tasks. It ends when its requests do, and under
Linux when its parent dies.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import importlib
import json
import logging
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flashgen.errors import ToolchainError, ToolKilled
from flashgen.evaluate.workers import usage
from flashgen.evaluate.workers.answers import Answer, Died, Done, Raised, Task, TimedOut
from flashgen.files import no_temporary

logger = logging.getLogger(__name__)

START_LIMIT_S = 60.0
"""Of CPU time. A bare interpreter takes 0.1 s; on a network file system, with 100 others, more."""

START_HANGS_S = 600.0
"""Of wall-clock time: a busy machine starts children late."""

REAP_LIMIT_S = 10.0
"""A process that is stuck in a driver outlives SIGKILL: it is left, rather than waited for."""

LONGEST_ANSWER_BYTES = 1 << 24
"""Answers are a few KB."""

PR_SET_PDEATHSIG = 1  # linux/prctl.h

OWN_GROUP: Mapping[str, Any] = (
    {"process_group": 0}
    if hasattr(os, "killpg")
    else {"creationflags": getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0)}
)
"""A group of its own: Ctrl-C does not reach a child, and it is killed with ptxas and all."""

MACHINE_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EMFILE})
"""An OSError with one of these is the machine's fault, whatever the task was."""

OUT_OF_MEMORY = "OutOfMemoryError"
"""The kind of every error that says so, of the host or of a device, whoever raised it."""


FAULTS = frozenset(
    getattr(signal, name, None)
    for name in ("SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGSEGV", "SIGSYS", "SIGTRAP")
)
"""Signals that a process gets by what it does; any other comes from outside."""


class Unrecoverable(Exception):
    """Raised by a task that has broken its process: the answer is sent, and the process ends."""


def main(arguments: list[str]) -> int:
    """Answer tasks until there are no more; returns the exit status."""
    requests, answers = _taken(0, os.open(os.devnull, os.O_RDONLY)), _taken(1, 2)
    # The parent decides when its children end. A batch system signals them all: a child that obeyed
    # would look as if its kernel had ended it.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):  # threads of Ray block all, and ptxas needs SIGCHLD
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
    _die_with(int(arguments[0]))
    with os.fdopen(requests, "rb") as lines, os.fdopen(answers, "wb") as out:
        _send(out, {"ready": os.getpid()})
        for line in lines:
            answer = answer_to(json.loads(line))
            _send(out, answer)
            if answer.get("last"):
                break
    # Without the teardown of torch and CUDA: it is slow, and hangs after an illegal access.
    os._exit(0)


def _taken(descriptor: int, instead: int) -> int:
    """Another descriptor of what `descriptor` is, for this process alone; `instead` takes its place
    for children too.
    """
    taken = os.dup(descriptor)
    os.set_inheritable(taken, False)  # a child of ours would keep the pipe open
    os.dup2(instead, descriptor)
    return taken


def answer_to(request: dict[str, Any]) -> dict[str, Any]:
    """Run the task of one request; never raises an Exception."""
    answer = {"id": request["id"]}
    try:
        module, function = request["task"].split(":")
        result = getattr(importlib.import_module(module), function)(request["payload"])
        return answer | {"result": result}
    except Unrecoverable as error:
        return answer | {"error": _described(error.__cause__ or error), "last": True}
    except Exception as error:  # whatever a task raises is an answer
        described = _described(error)
        # Caches and tracebacks may hold what it allocated: only its end is sure to free it.
        return answer | {"error": described, "last": described["kind"] == OUT_OF_MEMORY}


def _described(error: BaseException) -> dict[str, str]:
    """Class, message and location of an error; kind is ToolchainError if the machine is at
    fault, OUT_OF_MEMORY if memory ran out.
    """
    kind = type(error).__name__
    message = str(error).strip()
    number = error.errno if isinstance(error, OSError) else None
    if isinstance(error, ModuleNotFoundError):
        kind, message = "ToolchainError", f"the package {error.name} is missing: install it"
    elif number in MACHINE_ERRNOS:
        kind = "ToolchainError"
    elif (
        isinstance(error, MemoryError)
        or number == errno.ENOMEM
        or "out of memory" in message.lower()
    ):
        kind = OUT_OF_MEMORY
    frames = traceback.extract_tb(error.__traceback__)
    where = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    return {"kind": kind, "message": message or kind, "where": where}


def _send(out: Any, message: dict[str, Any]) -> None:
    out.write(json.dumps(message).encode() + b"\n")
    out.flush()


def _die_with(parent: int) -> None:
    """Make the operating system kill this process when its parent dies, even during a task."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the call above
            os._exit(0)


class _TooLarge(Exception):
    """The child exceeds its memory limit; the argument is its size in bytes."""


class Child:
    """One child process with a memory limit in bytes. Only its thread calls anything but kill().

    answered: the number of tasks that it has answered. spent_s: the CPU seconds of the last one,
    but no more than it took.
    """

    def __init__(self, env: Mapping[str, str], memory_bytes: int) -> None:
        self.answered = 0
        self.spent_s = 0.0
        self._memory_bytes = memory_bytes
        self._asked = 0
        self._spoiled = False
        self._killing = threading.Lock()
        self._killed = False
        self._buffer = b""
        self._arrived = queue.SimpleQueue[bytes]()  # b"" at the end of the pipe
        # What the compiler prints, kept for the answer of a crash. Appending, so that it can be cut
        # to 0.
        try:
            self._output = tempfile.TemporaryFile("a+b")  # noqa: SIM115 - closed by discard()
        except OSError as error:
            raise no_temporary(error) from None
        module = "flashgen.evaluate.workers.child"
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, str(os.getpid())],
                env=env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._output,
                **OWN_GROUP,
            )
        except OSError as error:
            raise ToolchainError(f"a worker process cannot be started: {error}") from error
        assert self._process.stdin is not None
        self._requests = self._process.stdin
        threading.Thread(target=self._receive, daemon=True).start()

    def wait_until_ready(self) -> None:
        """Block until the child is ready. Raises ToolchainError if it cannot be started, and
        ToolKilled if it was killed from outside meanwhile.
        """
        line: bytes | None = b""
        try:
            while line is not None and b"ready" not in line:  # what an interpreter's start prints
                line = self._read_line(START_LIMIT_S, START_HANGS_S)
            end = None if line else self._last_words()
        except TimeoutError:
            self._end()
            late = (
                f"it was not ready after {START_HANGS_S:g} s, or {START_LIMIT_S:g} s of computing"
            )
            end = Died(late)
        except _TooLarge:
            end = self._last_words()
        if end is not None:
            raise (ToolKilled if end.outside else ToolchainError)(
                f"a worker process cannot be started: {end}"
            )

    def can_serve(self) -> bool:
        """Whether the child can take a task: it is alive, idle, silent and not large.

        A child at half of its memory limit is replaced. Otherwise the leaks of many tasks would be
        blamed on the last one.
        """
        return not (
            self._spoiled
            or self._buffer
            or not self._arrived.empty()
            or self._has_ended()  # the end of its pipe may arrive later
            or usage.resident(self._process.pid) > self._memory_bytes // 2
        )

    def ask(self, task: Task, limit_s: float, hang_s: float) -> Answer:
        """The answer to one task, within limit_s of its CPU time and hang_s of wall-clock time.

        CPU time, because a busy machine makes the same task take many times as long. What computes
        in several threads has limit_s of wall-clock time too.
        """
        self._output.truncate(0)
        self._asked += 1
        request = {"id": self._asked, "task": task.function, "payload": task.payload}
        with contextlib.suppress(OSError):  # the end of the pipe shows that it died
            self._requests.write(json.dumps(request).encode() + b"\n")
            self._requests.flush()
        try:
            line = self._read_line(limit_s, hang_s)
        except TimeoutError:
            self._end()
            hung = self.spent_s < limit_s
            return TimedOut(hang_s if hung else limit_s, hung)
        except _TooLarge as error:
            self._end()
            held, limit = (bytes_ / (1 << 30) for bytes_ in (error.args[0], self._memory_bytes))
            return Died(f"the worker held {held:.2f} GiB of memory, over its limit of {limit:.2f}")
        if line is None:
            self._spoiled = True
            return self._last_words()
        self.answered += 1
        return self._parsed(line)

    def _parsed(self, line: bytes) -> Answer:
        """The Answer in a line; raises ToolchainError for an error that is the machine's fault."""
        try:
            message = json.loads(line)
            if message["id"] != self._asked:  # an answer, but not to this task
                raise ValueError
            if "result" in message:
                return Done(dict(message["result"]))
            self._spoiled = bool(message["last"])
            raised = Raised(**message["error"], ended=self._spoiled)
        except (ValueError, TypeError, KeyError):
            self._end()
            return Died(f"the worker answered with garbage: {line[:80]!r}")
        if raised.kind == "ToolchainError":
            raise ToolchainError(raised.message)
        return raised

    def _end(self) -> None:
        self._spoiled = True
        self.kill()

    def kill(self) -> None:
        """End the child and all it started, and reap it. Any thread may call it, repeatedly."""
        with self._killing:
            if self._killed:
                return
            self._killed = True
            if hasattr(os, "killpg"):
                # Not yet reaped, so the group's number is still its own.
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._process.pid, signal.SIGKILL)
            else:
                self._process.kill()
            try:
                self._process.wait(REAP_LIMIT_S)
            except subprocess.TimeoutExpired:
                logger.warning("worker %d does not end after SIGKILL", self._process.pid)

    def discard(self) -> None:
        """kill(), and close the pipes. May be called again."""
        if self._output.closed:
            return
        self._end()
        self._output.close()
        with contextlib.suppress(OSError):
            self._requests.close()

    def _receive(self) -> None:
        """The loop of a thread: Windows cannot wait for a pipe with a limit."""
        assert self._process.stdout is not None
        with self._process.stdout as answers:
            while read := os.read(answers.fileno(), 1 << 16):
                self._arrived.put(read)
        self._arrived.put(b"")

    def _read_line(self, limit_s: float, hang_s: float) -> bytes | None:
        """The next line, or None at the end of the pipe; spent_s is what it cost.

        Raises TimeoutError at either limit, as ask has them, _TooLarge if the child holds too much
        memory.
        """
        spent = self._spending()
        while b"\n" not in self._buffer and len(self._buffer) < LONGEST_ANSWER_BYTES:
            self.spent_s, elapsed_s = spent()
            wait_s = max(0.01, min(limit_s - self.spent_s, hang_s - elapsed_s, usage.TICK_S))
            try:
                read = self._arrived.get(timeout=wait_s)
            except queue.Empty:
                if self.spent_s >= limit_s or elapsed_s >= hang_s:
                    raise TimeoutError from None
                if (held := usage.resident(self._process.pid)) > self._memory_bytes:
                    raise _TooLarge(held) from None
                continue
            if not read:
                self._arrived.put(b"")  # that it has ended stays
                return None
            self._buffer += read
        self.spent_s, _ = spent()
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _spending(self) -> Callable[[], tuple[float, float]]:
        """Counts from now on: the seconds that the child spends, and those that go by."""
        pid, began = self._process.pid, time.monotonic()
        before = usage.cpu_seconds(pid) or 0.0

        def spent() -> tuple[float, float]:
            elapsed, cpu = time.monotonic() - began, usage.cpu_seconds(pid)
            return elapsed if cpu is None else min(elapsed, cpu - before), elapsed

        return spent

    def _last_words(self) -> Died:
        """How the child ended, and the last line it printed."""
        outside = self._ends() and not self._killed
        self.kill()
        code = self._process.returncode
        if code is None or code >= 0:
            end, outside = f"the worker ended with exit code {code}", False
        else:
            outside = outside and -code not in FAULTS
            end = f"the worker was ended by {signal.Signals(-code).name}"
            end += ", as where the machine runs out of memory" * end.endswith("SIGKILL")
        self._output.seek(0)
        lines = self._output.read().decode(errors="replace").strip().splitlines()
        return Died(f"{end}: {lines[-1][-200:]}" if lines else end, outside)

    def _ends(self) -> bool:
        """Give a child whose pipe closed a moment to end by itself, without reaping it; returns
        whether it did.
        """
        deadline = time.monotonic() + 1.0
        while not (ended := self._has_ended()) and time.monotonic() < deadline:
            time.sleep(0.01)
        return ended

    def _has_ended(self) -> bool:
        """Whether the process has ended. It is not reaped where kill() needs its group's number."""
        if not hasattr(os, "waitid"):
            return self._process.poll() is not None
        flags = os.WEXITED | os.WNOWAIT | os.WNOHANG
        with contextlib.suppress(ChildProcessError):  # close() has reaped it
            return os.waitid(os.P_PID, self._process.pid, flags) is not None
        return False


if __name__ == "__main__":
    # tasks import Unrecoverable from this module by name, so main must run in that copy of it
    from flashgen.evaluate.workers.child import main as main_of_copy

    sys.exit(main_of_copy(sys.argv[1:]))
