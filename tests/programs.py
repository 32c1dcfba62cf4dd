"""Python programs in forks of one process that has imported torch: the import is paid for once a worker.

run() takes what subprocess.run([sys.executable, ...]) takes, and a fork does what the new interpreter would have done.
link() writes a program of the name python or flashgen that does the same from a shell. A test of what is imported, or
of how a program starts, uses subprocess.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import runpy
import select
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
INTERPRET = "TRITON_INTERPRET"
"""Triton reads it when it is imported: a program with another value has a process of its own."""
ONE_SERVER = threading.Lock()
RUNNING = contextlib.ExitStack()
"""Closed at the end of a session: the server ends, and its CPU time becomes that of this process."""
CLIENT = """#!{python} -SE
import json, os, socket, sys
arguments = {before!r} + sys.argv[1:]
if os.environ.get({variable!r}) != {value!r}:
    os.execv({python!r}, [{python!r}] + arguments)
with socket.socket(socket.AF_UNIX) as line:
    line.connect({address!r})
    call = {{"arguments": arguments, "cwd": os.getcwd(), "env": dict(os.environ)}}
    socket.send_fds(line, [json.dumps(call).encode() + b"\\n"], [0, 1, 2])
    code = line.makefile().readline()
sys.exit(int(code or 1) % 256)
"""


def run(
    arguments: Sequence[str | Path],
    *,
    cwd: Path = ROOT,
    env: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run python with these arguments: -c program, -m module, or a file, and what it takes."""
    env = dict(os.environ if env is None else env)
    if env.get(INTERPRET) != os.environ.get(INTERPRET):
        done = [sys.executable, *arguments]
        return subprocess.run(done, cwd=cwd, env=env, capture_output=True, text=True)
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        call = {"arguments": list(map(str, arguments)), "cwd": str(cwd), "env": env}
        with socket.socket(socket.AF_UNIX) as line, open(os.devnull) as nothing:
            line.connect(_address())
            files = [nothing.fileno(), output.fileno(), errors.fileno()]
            socket.send_fds(line, [json.dumps(call).encode() + b"\n"], files)
            code = int(line.makefile().readline())
        return subprocess.CompletedProcess(call["arguments"], code, *map(_text, (output, errors)))


def link(program: Path, *before: str) -> None:
    """Write a program that runs python with the arguments `before` and those it is given."""
    text = CLIENT.format(
        python=sys.executable, address=_address(), before=list(before),
        variable=INTERPRET, value=os.environ.get(INTERPRET),
    )  # fmt: skip
    program.write_text(text)
    program.chmod(0o755)


def _text(file: Any) -> str:
    file.seek(0)
    return str(file.read().decode(errors="replace"))


def _address() -> str:
    """Of the server of this process, started when first needed, which ends with this process."""
    with ONE_SERVER:
        return _started()


@functools.cache
def _started() -> str:
    folder = tempfile.TemporaryDirectory(prefix="flashgen-programs-")
    address = str(Path(folder.name) / "socket")
    left_out = ("FLASHGEN_", "PYTHONPATH")
    env = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
    env["OMP_NUM_THREADS"] = "1"
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.programs", address],
        env=env, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert server.stdin is not None
    assert server.stdout is not None
    assert server.stdout.readline() == b"ready\n"

    RUNNING.callback(folder.cleanup)
    RUNNING.callback(server.communicate)
    return address


def _serve(address: str) -> None:
    """Fork for each call until standard input ends."""
    import jinja2  # noqa: F401

    import generated.dispatcher  # noqa: F401

    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(address)
        listening.listen()
        print("ready", flush=True)
        while sys.stdin not in (ready := select.select([listening, sys.stdin], [], [])[0]):
            line, _ = ready[0].accept()
            if os.fork() == 0:
                listening.close()
                _attend(line)
            line.close()
            _reap(os.WNOHANG)
    _reap()


def _reap(options: int = 0) -> None:
    """Wait for children that have ended, or for all: their CPU time becomes that of this process."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, options)[0]:
            pass


def _attend(line: socket.socket) -> None:
    """Run one call in a child, and say how it ended."""
    text, files, _, _ = socket.recv_fds(line, 1 << 20, 3)
    while not text.endswith(b"\n"):
        text += line.recv(1 << 20)
    child = os.fork()
    if child == 0:
        line.close()
        for number, file in enumerate(files):
            os.dup2(file, number)
            os.close(file)
        os._exit(_run(**json.loads(text)))
    for file in files:
        os.close(file)
    _, status = os.waitpid(child, 0)
    line.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
    os._exit(0)


def _run(arguments: list[str], cwd: str, env: dict[str, str]) -> int:
    """What `python ARGUMENTS` does; the exit code."""
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    path = [part for part in env.get("PYTHONPATH", "").split(os.pathsep) if part]
    sys.path[:1] = path  # in place of the server's own folder
    kind, *rest = arguments
    code: Any = 0
    try:
        if kind == "-c":
            sys.argv = ["-c", *rest[1:]]
            sys.path.insert(0, "")
            module = type(sys)("__main__")
            sys.modules["__main__"] = module
            exec(compile(rest[0], "<string>", "exec"), module.__dict__)
        elif kind == "-m":
            sys.argv = rest
            sys.path.insert(0, cwd)
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        else:
            sys.argv = arguments
            sys.path.insert(0, str(Path(kind).resolve().parent))
            runpy.run_path(kind, run_name="__main__")
    except SystemExit as end:
        code = end.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
        code = 0 if code is None else code if isinstance(code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    return int(code) % 256


if __name__ == "__main__":
    _serve(sys.argv[1])
