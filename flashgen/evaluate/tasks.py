"""Tasks of the child processes, functions from JSON to JSON, and the needs of each kind of child.

torch and Triton are imported when a task runs: a child starts in 0.1 s, and TRITON_INTERPRET must
be set before the first import of Triton. A child that only compiles never imports torch.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashgen.errors import NoEstimate, NoGpuError, ToolchainError
from flashgen.evaluate.workers.child import Unrecoverable
from flashgen.files import write_whole
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.config import KernelConfig
from flashgen.spec.from_call import check_scale, diagonal_of
from flashgen.spec.problem import Problem, flops
from flashgen.spec.vocabulary import DECODING

if TYPE_CHECKING:
    from torch import Tensor

    from flashgen.evaluate.measure import Ceiling, Conditions, Run, Stopwatch
    from flashgen.kernels.launch_backward import Backward
    from flashgen.kernels.launch_cache import Decode
    from flashgen.spec.features import Features
    from flashgen.spec.outcome import Timing

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


def kernel_payload(spec: AttentionSpec, config: KernelConfig) -> dict[str, Any]:
    """The part of every payload that names the kernel."""
    return {"spec": asdict(spec), "config": asdict(config)}


def compile_one(payload: dict[str, Any]) -> dict[str, Any]:
    """{spec, config, gpu, cache, whole} -> {compiled, replay, no_estimate}: Compiled; Replay, or
    null and the reason.

    Raises the errors of compile_kernel.
    """
    from flashgen.compile.compiler import compile_kernel
    from flashgen.estimate.sm import cached_replay, streams
    from flashgen.kernels.render import render
    from flashgen.spec.gpu import Gpu

    spec, config = _kernel(payload)
    gpu, cache = Gpu(**payload["gpu"]), Path(payload["cache"])
    rendered, whole = render(spec, config), payload["whole"]
    compiled = compile_kernel(rendered, spec, config, gpu.arch, whole=whole, cache=cache)
    made: dict[str, Any] = {"compiled": compiled.to_json(), "replay": None, "no_estimate": ""}
    try:
        made["replay"] = cached_replay(compiled, gpu, cache, streams=streams(spec)).to_json()
    except (NoEstimate, ToolchainError) as error:
        made["no_estimate"] = str(error)
    return made


def precompile_one(payload: dict[str, Any]) -> dict[str, Any]:
    """{spec, config, arch} -> {keys}: compiles into Triton's cache what a launch of aligned tensors
    looks for there.

    Raises CompileFailed, or ToolchainError.
    """
    import triton

    from flashgen.compile.compiler import CompileFailed, source_of, target_of
    from flashgen.kernels.loader import load_text, toolchain_error
    from flashgen.kernels.render import render
    from flashgen.kernels.signature import variants

    spec, config = _kernel(payload)
    rendered = render(spec, config)
    kernel = load_text(rendered.source, rendered.name, rendered.digest)
    target, options, keys = target_of(payload["arch"]), config.launch_options, []
    for whole in variants(spec):
        source = source_of(kernel, spec, config, whole=whole)
        try:
            built = triton.compile(source, target=target, options=options)
        except Exception as error:  # Triton, LLVM and ptxas each raise classes of their own
            reason = f"{rendered.name}: {error}".splitlines()[0]
            raise toolchain_error(error) or CompileFailed(reason) from error
        keys.append(str(built.metadata.hash))
    return {"keys": keys}


def check_one(payload: dict[str, Any]) -> dict[str, Any]:
    """{spec, config, seed, device: "cpu" or "cuda:0"} -> CheckResult. Raises the errors of the
    launch.
    """
    from flashgen.evaluate.check import check_kernel
    from flashgen.kernels.render import render

    spec, config = _kernel(payload)
    device = payload["device"]
    with _guarded(device):
        return asdict(
            check_kernel(render(spec, config), spec, config, device=device, seed=payload["seed"])
        )


def measure_one(payload: dict[str, Any]) -> dict[str, Any]:
    """{spec, config, problem, device, seed, effort, l2_bytes, peak_tflops, cache} -> Timing."""
    from flashgen.evaluate.measure import measure

    spec, config = _kernel(payload)
    with _guarded(payload["device"]):
        run = _prepared(payload, spec, config)
        timing = measure(
            run,
            effort=payload["effort"],
            stopwatch=_stopwatch(payload["device"], payload["l2_bytes"]),
            ceiling=_ceiling(payload, spec),
        )
    return asdict(timing)


def measure_round(payload: dict[str, Any]) -> dict[str, Any]:
    """measure_one's payload, with `configs` for config -> {timings, passes, sdpa, conditions}.

    passes are the microseconds of each pass, by config. torch's SDPA runs in the same round for
    comparison; sdpa is null if it refuses the call.
    """
    from flashgen.evaluate.measure import interleave

    spec = AttentionSpec(**payload["spec"])
    configs = [KernelConfig(**config) for config in payload["configs"]]
    with _guarded(payload["device"]):
        runs = [_prepared(payload, spec, config) for config in configs]
        sdpa = _sdpa(payload, spec)
        every = runs if sdpa is None else [*runs, sdpa]
        raced = interleave(
            every,
            stopwatch=_stopwatch(payload["device"], payload["l2_bytes"]),
            ceilings=[_ceiling(payload, spec)] * len(every),
        )
        timings = [each.timing for each in raced]
        conditions = _conditions_under_load(every, timings, payload["device"])
    return {
        "timings": [asdict(each) for each in timings[: len(runs)]],
        "passes": [each.passes_us for each in raced[: len(runs)]],
        "sdpa": None if sdpa is None else asdict(timings[-1]),
        "conditions": asdict(conditions),
    }


def _sdpa(payload: dict[str, Any], spec: AttentionSpec) -> Run | None:
    """A launch of torch's SDPA, with any backend, on the round's inputs; None if it refuses, and
    for kernels without a counterpart in torch: one part of a backward, pages, queries at the
    end of the keys, or a feature.
    """
    alike = spec.direction == "forward" or (spec.direction == "decode" and not spec.causal)
    if not alike or spec.featured or spec.paged:
        return None
    from torch.nn.functional import scaled_dot_product_attention

    q, k, v = _inputs(spec, Problem(**payload["problem"]), payload["seed"], payload["device"])
    run = functools.partial(
        scaled_dot_product_attention,
        q,
        k,
        v,
        is_causal=spec.causal,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    try:
        run()
    except RuntimeError:  # no backend for these head dims, or too little memory for the plain one
        return None
    return run


def _kernel(payload: dict[str, Any]) -> tuple[AttentionSpec, KernelConfig]:
    return AttentionSpec(**payload["spec"]), KernelConfig(**payload["config"])


def _ceiling(payload: dict[str, Any], spec: AttentionSpec) -> Ceiling:
    from flashgen.evaluate.measure import Ceiling

    operations = flops(spec, Problem(**payload["problem"]))
    return Ceiling(operations=operations, peak_tflops=payload["peak_tflops"])


def _prepared(payload: dict[str, Any], spec: AttentionSpec, config: KernelConfig) -> Run:
    """A launch of the kernel on this task's inputs, ready to repeat."""
    from flashgen.evaluate.inputs import backward_run
    from flashgen.kernels.launch import bind
    from flashgen.kernels.launch_forward import Forward
    from flashgen.kernels.loader import load_kernel
    from flashgen.kernels.render import render

    problem = Problem(**payload["problem"])
    rendered = render(spec, config)
    path = Path(payload["cache"]) / "kernels" / f"{rendered.name}.py"
    write_whole(path, rendered.source)
    kernel = load_kernel(path, rendered.name)
    seed, device = payload["seed"], payload["device"]
    if spec.direction in DECODING:
        from flashgen.evaluate.inputs import decode_run

        made = _decode_inputs(spec, problem, seed, device)
        return decode_run(kernel, spec, config, made, path.parent)
    if spec.direction != "forward":
        o, call = _backward_inputs(spec, problem, seed, device, path.parent)
        return backward_run(kernel, spec, config, o, call)
    q, k, v = _inputs(spec, problem, seed, device)
    scale = check_scale(None, spec.head_dim)
    diagonal = diagonal_of(spec.causal, problem.seq_q, problem.seq_k)
    features = _features(spec, problem, seed, device)
    forward = Forward(q=q, k=k, v=v, scale=scale, diagonal=diagonal, features=features)
    return functools.partial(bind(kernel, spec, config), forward)


# One set: the candidates of one search follow each other, and two would fill small devices.
@functools.lru_cache(maxsize=1)
def _inputs(
    spec: AttentionSpec, problem: Problem, seed: int, device: str
) -> tuple[Tensor, Tensor, Tensor]:
    from flashgen.evaluate.inputs import make_inputs

    return make_inputs(spec, problem, seed, device)


@functools.lru_cache(maxsize=1)
def _features(spec: AttentionSpec, problem: Problem, seed: int, device: str) -> Features:
    from flashgen.evaluate.inputs import make_features

    return make_features(spec, problem, seed, device)


@functools.lru_cache(maxsize=1)
def _decode_inputs(spec: AttentionSpec, problem: Problem, seed: int, device: str) -> Decode:
    from flashgen.evaluate.inputs import make_decode
    from flashgen.kernels.launch import device_gpu

    return make_decode(spec, problem, seed, device, device_gpu(_index(device)).sms)


@functools.lru_cache(maxsize=1)
def _backward_inputs(
    spec: AttentionSpec, problem: Problem, seed: int, device: str, folder: Path
) -> tuple[Tensor, Backward]:
    from flashgen.evaluate.inputs import make_backward

    return make_backward(spec, problem, seed, device, folder)


@functools.lru_cache(maxsize=1)
def _stopwatch(device: str, l2_bytes: int) -> Stopwatch:
    from flashgen.evaluate.measure import CudaStopwatch

    return CudaStopwatch(_index(device), l2_bytes)


def _conditions_under_load(
    runs: Sequence[Run], timings: Sequence[Timing], device: str
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


def device_answers(payload: dict[str, Any]) -> dict[str, Any]:
    """{device} -> {}. Raises NoGpuError where the device does not work for a new process."""
    if not _answers(payload["device"]):
        raise NoGpuError(f"{payload['device']} does not answer")
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
