"""What child processes do: the function that answers each task. A task travels as JSON, and so does
its answer.

torch and Triton are imported when a task runs: a child starts in 0.1 s, and TRITON_INTERPRET must
be set before the first import of Triton. Only checks and measurements import torch.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashgen.errors import NoEstimate, NoGpuError, ToolchainError
from flashgen.evaluate.payloads import (
    Answers,
    Check,
    Compile,
    Final,
    ForArch,
    Launches,
    Measure,
    Payload,
)
from flashgen.evaluate.workers.child import Unrecoverable
from flashgen.schedules.config import KernelConfig
from flashgen.spec.problem import flops, timed_problems
from flashgen.spec.records import record_of

if TYPE_CHECKING:
    from flashgen.evaluate.measure import Ceiling, Conditions, LaunchOnce, Stopwatch
    from flashgen.schedules.outcome import Timing


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
