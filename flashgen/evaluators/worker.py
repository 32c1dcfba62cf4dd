"""The child process that runs tasks which may crash, hang or abort, so that the parent need not.

    python -P -m flashgen.evaluators.worker REQUESTS ANSWERS PARENT

REQUESTS and ANSWERS are inherited file descriptors of two pipes that nothing else writes to:
compilers print to stdout and stderr, which therefore cannot carry answers. One line of JSON each
way:

    {"id": 7, "task": "module:function", "payload": {...}}     call the function with the payload
    {"id": 7, "result": {...}}                                 what it returned
    {"id": 7, "error": {"kind", "message", "where"}, "last": bool}     what it raised; last: it ends

The id is what tells an answer from anything else that gets into the pipe. The first line on ANSWERS
is {"ready": pid}. The process stays warm: what a task imported, the next one finds imported. It
ends when REQUESTS does, or when its parent dies.
"""

from __future__ import annotations

import ctypes
import errno
import importlib
import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1  # linux/prctl.h

MACHINE_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EMFILE})
"""An OSError with one of these is the machine's fault, whatever the task was."""


OUT_OF_MEMORY = "OutOfMemoryError"
"""The kind of every error that says so, of the host or of a device, whoever raised it."""


class Unrecoverable(Exception):
    """Raised by a task that has spoiled its process: the answer is sent, and the process ends."""


def main(arguments: list[str]) -> int:
    """Answer tasks until there are no more; returns the exit status."""
    requests, answers, parent = (int(argument) for argument in arguments)
    # The parent decides when its children end. A batch system signals them all: a child that obeyed
    # would look as if its kernel had ended it.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    _die_with(parent)
    for descriptor in (requests, answers):
        os.set_inheritable(descriptor, False)  # a child of ours would keep the pipes open
    with os.fdopen(requests, "rb") as lines, os.fdopen(answers, "wb") as out:
        _send(out, {"ready": os.getpid()})
        for line in lines:
            answer = answer_to(json.loads(line))
            _send(out, answer)
            if answer.get("last"):
                break
    # Without the teardown of torch and CUDA: it is slow, and hangs after an illegal access.
    os._exit(0)


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
        # What it allocated may be held by caches and tracebacks: its end alone is sure to free it.
        return answer | {"error": described, "last": described["kind"] == OUT_OF_MEMORY}


def _described(error: BaseException) -> dict[str, str]:
    """Class, message and place of an error; kind is ToolchainError where the machine is at fault,
    and OUT_OF_MEMORY where memory was.
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
    """Have the kernel kill this process when its parent dies, even in the middle of a task."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the call above
        os._exit(0)


if __name__ == "__main__":
    # tasks import Unrecoverable from this module by name, so main must run in that copy of it
    sys.exit(importlib.import_module("flashgen.evaluators.worker").main(sys.argv[1:]))
