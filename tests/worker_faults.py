"""Tasks for the worker processes of tests: well-behaved ones, and one for each way to fail.

Named to a pool as "tests.worker_faults:<function>". The stand-ins for the evaluators' tasks choose what to
do by a field that real kernels leave alone: num_stages 5 misbehaves in the way that BEHAVIOUR names, or
BEHAVIOURS by its tile, where the environment's STAGE is the task's.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import math
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from flashgen.errors import ToolKilled
from flashgen.evaluate.workers.child import Unrecoverable
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.problem import Problem, flops

Payload = dict[str, Any]


def echo(payload: Payload) -> Payload:
    return {"pid": os.getpid(), **payload}


def chatter(payload: Payload) -> Payload:
    """What a compiler prints, on every level there is."""
    print("not an answer\n" * 3)
    os.write(1, b'{"result": {"forged": true}}\n')
    os.write(2, b"warning: from C\n")
    return echo(payload)


def environment(payload: Payload) -> Payload:
    return {name: os.environ.get(name) for name in payload["names"]}


def refuse(payload: Payload) -> Payload:
    raise ValueError("tile too odd")


def spoil(payload: Payload) -> Payload:
    raise Unrecoverable from RuntimeError("an illegal memory access was encountered")


def disk_full(payload: Payload) -> Payload:
    raise OSError(errno.ENOSPC, "No space left on device")


def missing_package(payload: Payload) -> Payload:
    import a_package_nobody_has  # type: ignore[import-not-found]

    return {"never": a_package_nobody_has}


def segfault(payload: Payload) -> Payload:
    ctypes.string_at(0)
    raise AssertionError("unreachable")


def abort(payload: Payload) -> Payload:
    os.write(2, b"LLVM ERROR: Broken invariant\n")
    os.abort()


def killed(payload: Payload) -> Payload:
    """Be ended as by the system where memory runs out."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable")


def killed_once(payload: Payload) -> Payload:
    """Be so for the first time; then say how many other tasks of the folder run."""
    folder = Path(payload["folder"])
    try:
        (folder / "killed").touch(exist_ok=False)
    except FileExistsError:
        return {"beside": len(list(folder.glob("busy*")))}
    return killed(payload)


def tool_killed(payload: Payload) -> Payload:
    """What is raised where a program that the task has started was."""
    raise ToolKilled("ptxas was ended by SIGKILL")


def leave(payload: Payload) -> Payload:
    sys.exit(3)


def hang(payload: Payload) -> Payload:
    """Sleep for longer than any test, with a grandchild that does, too; its pid goes to payload["file"]."""
    child = subprocess.Popen(["sleep", "600"])
    with open(payload["file"], "a", encoding="utf-8") as file:
        file.write(f"{os.getpid()} {child.pid}\n")
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    time.sleep(600)
    raise AssertionError("unreachable")


def spin(payload: Payload) -> Payload:
    """Compute for so many CPU seconds."""
    end = time.process_time() + payload["seconds"]
    while time.process_time() < end:
        pass
    return echo(payload)


def leave_never(payload: Payload) -> Payload:
    """Compute without an end, as a compiler that does not terminate."""
    return spin({"seconds": 600.0})


def hang_once(payload: Payload) -> Payload:
    """Hang, if it is the first time, with the pid in a file; then say how many other tasks of the
    folder run.
    """
    folder = Path(payload["folder"])
    try:
        with (folder / "hung").open("x") as file:
            file.write(f"{os.getpid()}\n")
    except FileExistsError:
        return {"beside": len(list(folder.glob("busy*")))}
    time.sleep(600)
    raise AssertionError("unreachable")


def busy(payload: Payload) -> Payload:
    """Sleep for so many seconds, with a file in the folder meanwhile."""
    file = Path(payload["folder"]) / f"busy{os.getpid()}"
    file.touch()
    time.sleep(payload["seconds"])
    file.unlink()
    return {}


def answers_pipe() -> int:
    """The descriptor of this child's answers: the pipe that it has open for writing."""
    for descriptor in range(3, 64):
        with contextlib.suppress(OSError):
            is_pipe = stat.S_ISFIFO(os.fstat(descriptor).st_mode)
            if is_pipe and fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_WRONLY:
                return descriptor
    raise AssertionError("no pipe")


def garbage(payload: Payload) -> Payload:
    """Scribble on the answers' pipe itself."""
    os.write(answers_pipe(), b"\x00garbage\n")
    return echo(payload)


def extra_answer(payload: Payload) -> Payload:
    """One answer too many: the next task must not be given it."""
    os.write(answers_pipe(), b'{"id": 1, "result": {"first": true}}\n{"id": 2, "result": {}}\n')
    return echo(payload)


def forge(payload: Payload) -> Payload:
    """A line that would be an answer, had it been asked for."""
    os.write(answers_pipe(), b'{"result": {"forged": true}}\n')
    return echo(payload)


def leak(payload: Payload) -> Payload:
    """Take memory, 0.8 GB/s of it, until killed; or until 4 GB, if nobody does."""
    held = []
    while len(held) < 500:
        held.append(b"x" * (8 << 20))
        time.sleep(0.01)
    return {"never": len(held)}


def leak_elsewhere(payload: Payload) -> Payload:
    """As a compiler would that this process has started."""
    program = "from tests import worker_faults; worker_faults.leak({})"
    return {"never": subprocess.run([sys.executable, "-c", program], check=True).returncode}


def grow(payload: Payload) -> Payload:
    """Keep so many MiB more than before."""
    _KEPT.append(b"x" * (payload["mib"] << 20))
    return echo(payload)


_KEPT: list[bytes] = []


def allocate(payload: Payload) -> Payload:
    """Fail for want of memory in a child that has kept some."""
    if _KEPT:
        raise _no_memory(payload["error"])
    return echo(payload)


def out_of_memory(payload: Payload) -> Payload:
    with open(payload["file"], "a", encoding="utf-8") as file:
        file.write("failed\n")
    raise _no_memory(payload.get("error", "torch"))


def _no_memory(name: str) -> Exception:
    """What the host, torch and a driver raise for want of memory."""
    torch_raises = type("OutOfMemoryError", (RuntimeError,), {})
    errors = {
        "host": MemoryError(),
        "fork": OSError(errno.ENOMEM, "Cannot allocate memory"),
        "torch": torch_raises("CUDA out of memory. Tried to allocate 2.00 GiB"),
        "driver": RuntimeError("Triton Error [CUDA]: out of memory"),
    }
    return errors[name]  # type: ignore[no-any-return]


def nap(payload: Payload) -> Payload:
    time.sleep(payload["seconds"])
    return echo(payload)


def _misbehave(stage: str, config: Payload) -> None:
    """What the test put in the environment for this stage, if this is the config that shall."""
    if os.environ.get("STAGE") != stage or config["num_stages"] != 5:
        return
    behaviours = json.loads(os.environ.get("BEHAVIOURS", "{}"))
    behaviour = behaviours.get(f"{config['br']}x{config['bc']}") or os.environ.get("BEHAVIOUR")
    if behaviour is None:
        return
    folder = Path(os.environ.get("FAULTS_FOLDER", "/dev/null"))
    file = folder / "pids" if folder.is_dir() else folder
    if folder.is_dir():
        with (folder / "faults").open("a") as faults:
            faults.write(f"{behaviour}\n")
    globals()[behaviour]({"config": config, "file": file})


def nan(payload: Payload) -> Payload:
    """The config's figure becomes none; the stand-ins ask for it by _figure."""
    _NAN.add(_place(payload["config"]))
    return {}


_NAN: set[str] = set()


def _place(config: Payload) -> str:
    return json.dumps(config, sort_keys=True)


def _figure(config: Payload, value: float) -> float:
    return float("nan") if _place(config) in _NAN else value


def device_answers(_: Payload) -> Payload:
    """The device is there."""
    return {}


def compile_one(payload: Payload) -> Payload:
    """Facts of no kernel, in the place of the compiler's; without torch and jinja2, whose import takes long.

    bc=16 spills, and its products are serialized; bc=256 does not fit.
    """
    config = payload["config"]
    _misbehave("compile", config)
    compiled = {
        "name": "made_up",
        "digest": payload.get("digest", "sha256:" + "0" * 64),
        "arch": payload["gpu"]["arch"],
        "whole": payload["whole"],
        "triton": "3.7.1",
        "num_warps": config["num_warps"],
        "registers": _figure(config, 100 + config["br"] // 16),
        "spill_bytes": 64 if config["bc"] == 16 else 0,
        "shared_bytes": 1 << 20 if config["bc"] == 256 else 4096,
        "loop": None,
        "advisories": ["(C7510) serialized"] if config["bc"] == 16 else [],
        "other_loops": [],
    }
    return {"compiled": compiled, "replay": None, "no_estimate": "nothing was replayed here"}


def check_one(payload: Payload) -> Payload:
    """A check that fails kernels of one warp."""
    _misbehave("check", payload["config"])
    if log := os.environ.get("CHECK_LOG"):
        with open(log, "a", encoding="utf-8") as file:
            file.write("checked\n")
    passed = payload["config"]["num_warps"] != 1
    return {
        "passed": passed,
        "floors": _figure(payload["config"], 0.5 if passed else 1e4),
        "lse_error": 0.1,
        "cases": 4,
        "seed": payload["seed"],
        "where": "interpreter" if payload["device"] == "cpu" else "gpu",
        "detail": "made up",
    }


def least_us(launches: Payload) -> float:
    """100 us, or what it takes at nine tenths of the GPU's peak."""
    spec, problem = AttentionSpec(**launches["spec"]), Problem(**launches["problem"])
    return max(100.0, flops(spec, problem) / (0.9 * (launches["peak_tflops"] or math.inf)) * 1e-6)


def _median_us(launches: Payload, config: Payload) -> float:
    least = least_us(launches)
    return _figure(config, least if config["br"] == 64 else 1.51 * least)


def measure_one(payload: Payload) -> Payload:
    """br=64 takes 100 us, anything else 151; long sequences take more."""
    _misbehave("measure", payload["config"])
    median = _median_us(payload["launches"], payload["config"])
    samples = {"rough": 5, "timed": 50}[payload["effort"]]
    return {"median_us": median, "low_us": median - 1, "high_us": median + 1, "samples": samples}


def measure_round(payload: Payload) -> Payload:
    for config in payload["configs"]:
        _misbehave("measure", config)
    medians = [_median_us(payload["launches"], config) for config in payload["configs"]]
    sdpa = 1.23 * least_us(payload["launches"])
    return {
        "timings": [{"median_us": m, "low_us": m, "high_us": m, "samples": 100} for m in medians],
        "passes": [[m] * 25 for m in medians],
        "sdpa": {"median_us": sdpa, "low_us": sdpa, "high_us": sdpa, "samples": 100},
        "conditions": {"sm_mhz": 1980, "power_w": 650.5},
    }


def out_of_resources(payload: Payload) -> Payload:
    """What Triton raises at a launch that does not fit."""

    class OutOfResources(Exception):
        pass

    raise OutOfResources("out of resource: shared memory, Required: 262144, Hardware limit: 232448")


# The tasks of a GPU, run for real on CPU tensors in Triton's interpreter, timed by the host's clock.


def check_interpreted(payload: Payload) -> Payload:
    """On the CPU, as if the GPU had been asked."""
    from flashgen.evaluate import tasks

    return tasks.check_one(payload | {"device": "cpu"}) | {"where": "gpu"}


def measure_interpreted(payload: Payload) -> Payload:
    return _on_the_host("measure_one", payload)


def final_interpreted(payload: Payload) -> Payload:
    return _on_the_host("measure_round", payload)


def _on_the_host(task: str, payload: Payload) -> Payload:
    from flashgen.evaluate import measure, tasks

    class HostStopwatch:
        def time(self, run: Any, count: int) -> list[float]:
            return [self._once(run) for _ in range(count)]

        def _once(self, run: Any) -> float:
            began = time.perf_counter()
            written = run()  # ours: O and LSE; torch's SDPA: O
            assert all(
                x.isfinite().all() for x in (written if isinstance(written, tuple) else [written])
            )
            return (time.perf_counter() - began) * 1e6

        def now(self) -> float:
            return time.perf_counter()

        def clock_mhz(self) -> float | None:
            return None

    few = measure.MeasureBudget(warm_s=0.0, sample_s=0.0, least=2, most=3)
    measure.BUDGETS.update(rough=few, timed=few, final=few)
    tasks._stopwatch = lambda *_: HostStopwatch()  # type: ignore[assignment]
    tasks._conditions_under_load = lambda *_: measure.Conditions()  # type: ignore[assignment]
    on_cpu = {"launches": payload["launches"] | {"device": "cpu"}}
    return dict(getattr(tasks, task)(payload | on_cpu))
