"""Tasks of the child processes: what each is asked, the function that answers it, and the needs of
each kind of child. A task travels as JSON, and so does its answer.

torch and Triton are imported when a task runs: a child starts in 0.1 s, and TRITON_INTERPRET must
be set before the first import of Triton. Only checks and measurements import torch.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from flashgen.errors import NoEstimate, NoGpuError, ToolchainError
from flashgen.evaluate.workers.answers import Task, WorkerKind
from flashgen.evaluate.workers.child import Unrecoverable
from flashgen.schedules.config import KernelConfig
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.gpu import Gpu
from flashgen.spec.problem import Problem, flops, timed_problems
from flashgen.spec.records import record_of

if TYPE_CHECKING:
    from flashgen.evaluate.measure import Ceiling, Conditions, LaunchOnce, Stopwatch
    from flashgen.schedules.outcome import Timing

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


def compile_one(payload: Payload) -> Payload:
    """{compiled, replay, no_estimate}: Compiled; Replay, or null and the reason.

    Raises the errors of compile_kernel.
    """
    from flashgen.compile.compiler import compile_kernel
    from flashgen.estimate.replay import cached_replay
    from flashgen.kernels.render import render

    asked = record_of(Compile, payload, "the task")
    spec, config, gpu, cache = asked.spec, asked.config, asked.gpu, Path(asked.cache)
    rendered = render(spec, config)
    if rendered.digest != asked.digest:
        raise ToolchainError("the templates are others than when the run began: run it again")
    compiled = compile_kernel(rendered, spec, config, gpu.arch, whole=asked.whole, cache=cache)
    made: Payload = {"compiled": compiled.to_json(), "replay": None, "no_estimate": ""}
    try:
        made["replay"] = cached_replay(compiled, gpu, cache).to_json()
    except (NoEstimate, ToolchainError) as error:
        made["no_estimate"] = str(error)
    return made


def precompile_one(payload: Payload) -> Payload:
    """{keys}, of what a launch of aligned tensors looks for in Triton's cache.

    Raises CompileFailed, or ToolchainError.
    """
    import triton

    from flashgen.compile.compiler import CompileFailed, source_of, target_of
    from flashgen.kernels.loader import load_text, toolchain_error
    from flashgen.kernels.render import render
    from flashgen.kernels.signature import variants

    asked = record_of(ForArch, payload, "the task")
    spec, config = asked.spec, asked.config
    rendered = render(spec, config)
    kernel = load_text(rendered)
    target, options, keys = target_of(asked.arch), config.launch_options(spec), []
    for whole in variants(spec):
        source = source_of(kernel, spec, config, whole=whole)
        try:
            built = triton.compile(source, target=target, options=options)
        except Exception as error:  # Triton, LLVM and ptxas each raise classes of their own
            reason = f"{rendered.name}: {error}".splitlines()[0]
            raise toolchain_error(error) or CompileFailed(reason) from error
        keys.append(str(built.metadata.hash))
    return {"keys": keys}


def check_one(payload: Payload) -> Payload:
    """The fields of a CheckResult. Raises the errors of the launch."""
    from flashgen.evaluate.check import check_kernel
    from flashgen.kernels.render import render

    asked = record_of(Check, payload, "the task")
    spec, config, device = asked.spec, asked.config, asked.device
    with _guarded(device):
        rendered = render(spec, config)
        return asdict(
            check_kernel(rendered, spec, config, device=device, arch=asked.arch, seed=asked.seed)
        )


def execute_one(payload: Payload) -> Payload:
    """The fields of a Sanitized."""
    from flashgen.evaluate.sanitize import sanitize

    asked = record_of(ForArch, payload, "the task")
    return asdict(sanitize(asked.spec, asked.config, asked.arch))


def measure_one(payload: Payload) -> Payload:
    """The fields of a Timing."""
    from flashgen.evaluate.measure import measure
    from flashgen.schedules.outcome import Timing

    asked = record_of(Measure, payload, "the task")
    launches = asked.launches
    with _guarded(launches.device):
        timings = [
            measure(
                run,
                effort=asked.effort,
                stopwatch=_stopwatch(launches.device, launches.l2_bytes),
                ceiling=ceiling,
            )
            for run, ceiling in zip(
                _prepared(launches, asked.config), ceilings(launches), strict=True
            )
        ]
    return asdict(Timing.of_batches(timings))


def measure_round(payload: Payload) -> Payload:
    """{timings, passes, sdpa, conditions}.

    passes are the microseconds of each pass, by config. torch's SDPA runs in the same round for
    comparison; sdpa is null if it refuses the call.
    """
    from flashgen.evaluate.measure import Raced, interleave

    asked = record_of(Final, payload, "the task")
    launches = asked.launches
    with _guarded(launches.device):
        sdpa = _sdpa(launches)
        racing = [_prepared(launches, config) for config in asked.configs] + [sdpa] * bool(sdpa)
        every = [run for runs in racing for run in runs]
        limits = ceilings(launches)
        raced = interleave(
            every,
            stopwatch=_stopwatch(launches.device, launches.l2_bytes),
            ceilings=limits * len(racing),
        )
        timings = [each.timing for each in raced]
        conditions = _conditions_under_load(every, timings, launches.device)
    size = len(limits)
    found = [Raced.of_batches(raced[at : at + size]) for at in range(0, len(raced), size)]
    kernels = found[: len(asked.configs)]
    return {
        "timings": [asdict(each.timing) for each in kernels],
        "passes": [each.passes_us for each in kernels],
        "sdpa": asdict(found[-1].timing) if sdpa else None,
        "conditions": asdict(conditions),
    }


def _sdpa(launches: Launches) -> list[LaunchOnce]:
    """Launches of torch's SDPA, with any backend, on the round's inputs, as _prepared; none if it
    refuses, and for kernels without a counterpart in torch: one part of a backward, pages, queries
    at the end of the keys, or a feature.
    """
    spec = launches.spec
    alike = spec.direction == "forward" or (spec.direction == "decode" and not spec.causal)
    if not alike or spec.featured or spec.paged:
        return []
    from torch.nn.functional import scaled_dot_product_attention

    from flashgen.evaluate.inputs import make_inputs

    if spec.direction == "forward":
        q, k, v = (getattr(_call(launches), name) for name in "qkv")
    else:
        q, k, v = make_inputs(spec, launches.problem, launches.seed, launches.device)
    runs: list[LaunchOnce] = []
    for problem in timed_problems(spec, launches.problem):
        first = slice(problem.batch)
        runs.append(
            functools.partial(
                scaled_dot_product_attention,
                q[first],
                k[first],
                v[first],
                is_causal=spec.causal,
                enable_gqa=q.shape[1] != k.shape[1],
            )
        )
    try:
        for run in runs:
            run()
    except RuntimeError:  # no backend for these head dims, or too little memory for the plain one
        return []
    return runs


def ceilings(launches: Launches) -> list[Ceiling]:
    """The work of each launch of _prepared."""
    from flashgen.evaluate.measure import Ceiling

    spec = launches.spec
    peak = launches.peak_tflops and launches.peak_tflops * spec.matrix_rate
    return [
        Ceiling(operations=flops(spec, problem), peak_tflops=peak)
        for problem in timed_problems(spec, launches.problem)
    ]


def _prepared(launches: Launches, config: KernelConfig) -> list[LaunchOnce]:
    """Launches of the kernel on this task's inputs, ready to repeat: one for each of the
    timed_problems.
    """
    from flashgen.evaluate.inputs import first_sequences, kernel_in, run_of

    folder, spec = _kernels(launches), launches.spec
    kernel = kernel_in(folder, spec, config)
    return [
        run_of(kernel, spec, config, first_sequences(_call(launches), problem.batch), folder)
        for problem in timed_problems(spec, launches.problem)
    ]


# One set: the candidates of one search follow each other, and two would fill small devices.
@functools.lru_cache(maxsize=1)
def _call(launches: Launches) -> Any:
    from flashgen.evaluate.inputs import make_call

    spec, problem, seed, device = launches.spec, launches.problem, launches.seed, launches.device
    return make_call(spec, problem, seed, device, _kernels(launches))


def _kernels(launches: Launches) -> Path:
    return Path(launches.cache) / "kernels"


@functools.lru_cache(maxsize=1)
def _stopwatch(device: str, l2_bytes: int) -> Stopwatch:
    from flashgen.evaluate.measure import CudaStopwatch

    return CudaStopwatch(_index(device), l2_bytes)


def _conditions_under_load(
    runs: Sequence[LaunchOnce], timings: Sequence[Timing], device: str
) -> Conditions:
    """Clocks and power read while the kernels of a round are running."""
    import torch

    from flashgen.evaluate.measure import clocks_and_power, keep_busy

    keep_busy(runs, timings)
    conditions = clocks_and_power(_index(device))
    torch.cuda.synchronize(device)
    return conditions


def _index(device: str) -> int:
    return int(device.removeprefix("cuda:"))


@contextlib.contextmanager
def _guarded(device: str) -> Iterator[None]:
    """Raise the late errors of a launch here; Unrecoverable if they have broken the device
    context.
    """
    import torch

    on_device = device.startswith("cuda")
    try:
        yield
        if on_device:
            torch.cuda.synchronize(device)
    except Exception as error:
        if on_device and not _answers(device):
            raise Unrecoverable from error
        raise


def device_answers(payload: Payload) -> Payload:
    """{}. Raises NoGpuError where the device does not work for a new process."""
    asked = record_of(Answers, payload, "the task")
    if not _answers(asked.device):
        raise NoGpuError(f"{asked.device} does not answer")
    return {}


def _answers(device: str) -> bool:
    """Whether the device still works for this process: not after an illegal access, which makes
    every call of CUDA fail.
    """
    import torch

    try:
        torch.cuda.synchronize(device)
        torch.zeros(1, device=device)  # launches a kernel
        return float(torch.ones(1).to(device)) == 1.0
    except Exception:  # torch raises RuntimeError or a subclass, by version
        return False
