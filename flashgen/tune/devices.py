"""Fleet: one worker process for each GPU of this host; `flashgen tune --gpus all`.

Each worker is a `flashgen tune` with one GPU that shares its work through a storage: the named one,
or else a journal next to the log. All take the same path, so the output of one is shown, and one
line for each other. Workers end with this process, however it ends. If one fails, the others take
over its work; the fleet fails only if all do.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from flashgen import paths
from flashgen.errors import FlashgenError, InvalidArgument, NoGpuError, ToolchainError
from flashgen.evaluate.build import cpu_count
from flashgen.evaluate.tasks import DEVICE_ENV, FINAL_LIMIT_PER_CONFIG_S, MEASURE_LIMIT_S
from flashgen.evaluate.workers.answers import Done, Task
from flashgen.evaluate.workers.pool import Workers, child_environment
from flashgen.files import open_own
from flashgen.spec.gpu import slug_of

LIST_LIMIT_S = 60.0
"""To import torch and ask the driver takes seconds."""

LEAVE_S = MEASURE_LIMIT_S + 8 * FINAL_LIMIT_PER_CONFIG_S
"""Time for interrupted workers to save their results: they run a final
round first. A second interrupt ends them at once."""

PROGRAM = (sys.executable, "-P", "-m", "flashgen")

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_libc = ctypes.CDLL(None)


@dataclass(frozen=True, kw_only=True)
class Device:
    """A CUDA device of this host, by its index and product name."""

    index: int
    name: str


@dataclass(frozen=True, kw_only=True)
class FleetOptions:
    """Options of a fleet. arguments: the command line after `flashgen`, which each worker repeats
    with --gpus INDEX, --storage URL and --jobs N appended; the last value of an option counts.

    storage: None for a journal of the fleet's own. jobs: of all workers together; None: all cores.
    """

    arguments: tuple[str, ...]
    devices: tuple[Device, ...]
    out: Path = Path()
    storage: str | None = None
    jobs: int | None = None


def devices(query: str = "flashgen.tune.devices:list_devices") -> tuple[Device, ...]:
    """The GPUs that torch sees. Raises NoGpuError if there is none, and ToolchainError.

    A child process lists them, because the CUDA context that this creates takes GPU memory while it
    lives.
    """
    with Workers(1, env=DEVICE_ENV) as workers:
        task = Task(function=query, payload={}, limit_s=LIST_LIMIT_S)
        answer = workers.submit(task).result()
    if not isinstance(answer, Done):
        raise ToolchainError(f"torch cannot list the GPUs of this machine: {answer}")
    names: list[str] = answer.value["names"]
    if not names:
        raise NoGpuError(
            "torch sees no GPU here; without one, type: flashgen tune --target nvidia_h200"
        )
    return tuple(Device(index=index, name=name) for index, name in enumerate(names))


def list_devices(_: dict[str, Any]) -> dict[str, Any]:
    """{} -> {names}: of all CUDA devices, in their order."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return {"names": [torch.cuda.get_device_properties(i).name for i in range(count)]}


def chosen(text: str, found: Sequence[Device]) -> tuple[Device, ...]:
    """The devices that --gpus names: "all", or indices as in "0,2". Raises InvalidArgument.

    All must be of one product: the fastest config on one product may not be on another.
    """
    if text == "all":
        devices = tuple(found)
    else:
        words = [word.strip() for word in text.split(",")]
        known = {str(device.index): device for device in found}
        if len(set(words)) < len(words) or not set(words) <= known.keys():
            raise InvalidArgument(
                f"--gpus must be all, or indices of {', '.join(known)}, none twice: got {text!r}"
            )
        devices = tuple(known[word] for word in words)
    if len({slug_of(device.name) for device in devices}) > 1:
        each = ", ".join(f"{device.index} {slug_of(device.name)}" for device in devices)
        raise InvalidArgument(
            f"--gpus must name GPUs of one product, because a table is for one: got {each}; "
            f"name those of one product, and tune the others in another run"
        )
    return devices


def run(options: FleetOptions, console: Console, program: Sequence[str] = PROGRAM) -> None:
    """Run a worker on each device until all have ended. Call it in the main thread.

    Raises FlashgenError if all workers failed or another fleet uses the folder; KeyboardInterrupt
    once the workers have saved their results.
    """
    with _storage(options) as storage:
        workers: list[_Worker] = []
        try:
            for device in options.devices:
                command = [*program, *options.arguments, *_own_arguments(options, device, storage)]
                workers.append(_Worker(device, command, console.width))
            _follow(workers, console)
        except BaseException:
            _end(workers)
            raise
    failed = [worker for worker in workers if worker.code != 0]
    if len(failed) == len(workers):
        raise FlashgenError(
            f"all {len(workers)} workers failed; "
            f"the first, on GPU {failed[0].device.index}, {failed[0].end}"
        )


def _own_arguments(options: FleetOptions, device: Device, storage: str) -> list[str]:
    """The arguments of one worker only."""
    jobs = max(1, (options.jobs or cpu_count()) // len(options.devices))
    return ["--gpus", str(device.index), "--storage", storage, "--jobs", str(jobs)]


class _Worker:
    """One child process and the last line it printed."""

    def __init__(self, device: Device, command: Sequence[str], columns: int) -> None:
        self.device = device
        self.line = "starts"
        self.code: int | None = None
        self._process = subprocess.Popen(
            command,
            env=child_environment({"COLUMNS": str(columns), "PYTHONUNBUFFERED": "1"}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            process_group=0,  # Ctrl-C does not reach it: this process forwards it once
            preexec_fn=_die_with(os.getpid()),
        )

    def read(self, lines: queue.SimpleQueue[tuple[_Worker, str | None]]) -> None:
        """Forward all lines, then None when it has ended: the loop of one thread."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            lines.put((self, line.rstrip()))
        self._process.wait()
        lines.put((self, None))

    def take_end(self) -> None:
        """Record how it ended."""
        self.code = self._process.wait()

    @property
    def end(self) -> str:
        """How it ended, with its last line."""
        if self.code is not None and self.code < 0:
            return f"was ended by {signal.Signals(-self.code).name}: {self.line}"
        return f"ended with exit code {self.code}: {self.line}"

    def send(self, number: signal.Signals) -> None:
        """Send a signal, if it still runs."""
        self._process.send_signal(number)

    def wait(self, deadline: float) -> None:
        """Wait until it has ended, at most until `deadline` of time.monotonic()."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.0, deadline - time.monotonic()))


def _follow(workers: Sequence[_Worker], console: Console) -> None:
    """Show what the workers print, until all have ended."""
    lines: queue.SimpleQueue[tuple[_Worker, str | None]] = queue.SimpleQueue()
    for worker in workers:
        threading.Thread(target=worker.read, args=(lines,), daemon=True).start()
    with Live(console=console, transient=True) as live:
        while running := [worker for worker in workers if worker.code is None]:
            live.update(_grid(running))
            worker, line = lines.get()
            if line is None:
                worker.take_end()
                if worker.code:
                    console.print(f"GPU {worker.device.index}: its worker {worker.end}", **_PLAIN)
            elif line:
                worker.line = line
                if worker is _lead(workers):
                    console.print(line, **_PLAIN)


_PLAIN: dict[str, Any] = {"markup": False, "highlight": False}


def _lead(workers: Sequence[_Worker]) -> _Worker | None:
    """The worker whose lines are shown: the first that has not failed, until it has ended."""
    return next((worker for worker in workers if not worker.code), None)


def _grid(workers: Sequence[_Worker]) -> Table:
    """A line for each worker."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(no_wrap=True, overflow="ellipsis")
    for worker in workers:
        grid.add_row(f"GPU {worker.device.index}", worker.line)
    return grid


def _end(workers: Sequence[_Worker]) -> None:
    """Let the workers save their results and end; kill those that do not."""
    for worker in workers:
        worker.send(signal.SIGINT)
    deadline = time.monotonic() + LEAVE_S
    try:
        for worker in workers:
            worker.wait(deadline)
    finally:
        for worker in workers:
            worker.send(signal.SIGKILL)


@contextlib.contextmanager
def _storage(options: FleetOptions) -> Iterator[str]:
    """The storage to share through. The fleet's own journal starts empty: the log has the results.

    The journal is kept after the fleet has ended, for inspection.
    """
    if options.storage is not None:
        yield options.storage
        return
    state = paths.state_dir(options.out)
    try:
        state.mkdir(parents=True, exist_ok=True)
        lock = open_own(state / "fleet.lock")
    except OSError as error:
        raise FlashgenError(
            f"{state} cannot be written ({error.strerror}): name another folder with --out"
        ) from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for old in state.glob("fleet.journal*"):
            old.unlink()
        yield f"journal://{(state / 'fleet.journal').resolve()}"
    except BlockingIOError:
        raise FlashgenError(
            f"another fleet tunes in {state}: wait for it to end, or name another folder with --out"
        ) from None
    finally:
        os.close(lock)


def _die_with(parent: int) -> Any:
    """Runs first in a child: make the operating system kill it when this process dies."""

    def prepare() -> None:
        if sys.platform == "linux":
            _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the call above
            os._exit(1)

    return prepare
