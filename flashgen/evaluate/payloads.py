"""What child processes are asked, and the limits and the environment of each kind of child. A task
travels as JSON to a function of evaluate/tasks.py.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from flashgen.evaluate.workers.answers import Task, WorkerKind
from flashgen.schedules.config import KernelConfig
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.gpu import Gpu
from flashgen.spec.problem import Problem

if TYPE_CHECKING:
    pass

# On a slow machine all limits grow, and a child's first task gets more: workers/pool.py.
ANSWER_LIMIT_S = 60.0
"""Importing torch and making a context take seconds."""

COMPILE_LIMIT_S = 60.0
"""A kernel compiles in 0.3 to 3 s: ten times that, on a busy machine."""

CHECK_LIMIT_S = 60.0
"""The interpreter takes 0.3 to 2 s per kernel on one core; a GPU takes less, after compiling."""

MEASURE_LIMIT_S = 30.0
"""Compiling 3 s, warming and sampling 2 s, or 8 s where a launch takes one; a hung kernel never
ends."""

FINAL_LIMIT_PER_CONFIG_S = 20.0
"""On top of MEASURE_LIMIT_S for each kernel of the round, torch's SDPA among them: warming 2 s,
sampling 1 s and compiling; where a launch takes 1 s, 12 launches."""

_ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}

# No device: a context of its own would take memory and time of the GPU that another child measures
# on.
COMPILE_ENV: dict[str, str | None] = {
    **_ONE_THREAD,
    "TRITON_INTERPRET": None,
    "CUDA_VISIBLE_DEVICES": "",
}
INTERPRET_ENV: dict[str, str | None] = {
    **_ONE_THREAD,
    "TRITON_INTERPRET": "1",
    "CUDA_VISIBLE_DEVICES": "",
}
DEVICE_ENV: dict[str, str | None] = {"TRITON_INTERPRET": None}


@dataclass(frozen=True, kw_only=True)
class Tasks:
    """The tasks that evaluators send, as "module:function"."""

    compile: str = "flashgen.evaluate.tasks:compile_one"
    check: str = "flashgen.evaluate.tasks:check_one"
    measure: str = "flashgen.evaluate.tasks:measure_one"
    final: str = "flashgen.evaluate.tasks:measure_round"
    answers: str = "flashgen.evaluate.tasks:device_answers"


@dataclass(frozen=True, kw_only=True)
class Compile:
    """Compile a kernel for a GPU; whole: as a decode of one split. cache: the folder of results.
    digest: of the kernel's text.
    """

    spec: AttentionSpec
    config: KernelConfig
    gpu: Gpu
    cache: str
    whole: bool
    digest: str


@dataclass(frozen=True, kw_only=True)
class ForArch:
    """A kernel as it is compiled for `arch`: into Triton's own cache, or to be executed with all
    checks of flashgen.ptx.
    """

    spec: AttentionSpec
    config: KernelConfig
    arch: str


@dataclass(frozen=True, kw_only=True)
class Check:
    """Compare a kernel with float64; device: "cpu" or "cuda:0". arch: for what a kernel that is
    executed on the CPU is compiled.
    """

    spec: AttentionSpec
    config: KernelConfig
    device: str
    arch: str = ""
    seed: int


@dataclass(frozen=True, kw_only=True)
class Launches:
    """What is timed, and where. cache: the folder of the kernels' files."""

    spec: AttentionSpec
    problem: Problem
    device: str
    seed: int
    l2_bytes: int
    peak_tflops: float | None
    cache: str


@dataclass(frozen=True, kw_only=True)
class Measure:
    """Time one kernel by itself."""

    launches: Launches
    config: KernelConfig
    effort: Literal["rough", "timed"]


@dataclass(frozen=True, kw_only=True)
class Final:
    """Time kernels and torch's SDPA in one round."""

    launches: Launches
    configs: tuple[KernelConfig, ...]


@dataclass(frozen=True, kw_only=True)
class Answers:
    """Find out whether a device answers."""

    device: str


Asked = Compile | ForArch | Check | Measure | Final | Answers
JUDGES: dict[type, str] = {
    Compile: "flashgen.evaluate.arrivals:judge_compile",
    Check: "flashgen.evaluate.arrivals:judge_check",
    Measure: "flashgen.evaluate.arrivals:judge_measure",
    Final: "flashgen.evaluate.arrivals:judge_final",
}
"""What finds answers that cannot be right: Task.judge."""
Payload = dict[str, Any]


def _executed(asked: Asked) -> bool:
    """Whether a check executes what it compiles."""
    return isinstance(asked, Check) and asked.device == "cpu" and asked.config.executed


def task(function: str, asked: Asked, limit_s: float, rank: int = 0) -> Task:
    """The task for a worker to call this function with what is asked; rank as Task has it."""
    kind: WorkerKind = "device"
    if isinstance(asked, Compile | ForArch) or _executed(asked):
        kind = "compile"
    elif isinstance(asked, Check) and asked.device == "cpu":
        kind = "interpret"
    judge = JUDGES.get(type(asked), "")
    payload = asdict(asked)
    return Task(
        function=function, payload=payload, limit_s=limit_s, kind=kind, rank=rank, judge=judge
    )


def placed(asked: Task, *, device: str | None = None, cache: Path | None = None) -> Task:
    """The same task for another device, or with another folder for its files."""

    def moved(payload: Payload) -> Payload:
        changes: Payload = {}
        if device is not None and "device" in payload:
            changes["device"] = device
        if cache is not None and "cache" in payload:
            changes["cache"] = str(cache)
        if "launches" in payload:
            changes["launches"] = moved(payload["launches"])
        return payload | changes

    return replace(asked, payload=moved(asked.payload))
