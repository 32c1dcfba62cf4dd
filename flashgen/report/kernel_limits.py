"""Anatomy: the resources of a kernel on an SM and what limits it, compiled and replayed without a
GPU.

The sentences of `flashgen explain` on one kernel; report/explain.py compares kernels with them.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

from flashgen.compile.compiler import Compiled, CompileFailed, compile_kernel
from flashgen.compile.occupancy import resident_blocks
from flashgen.errors import NoEstimate, ToolchainError
from flashgen.estimate.estimate import LAUNCH_US, estimate, estimate_streaming
from flashgen.estimate.machines import machine_of
from flashgen.estimate.replay import Replay, cached_replay
from flashgen.estimate.sm import Usage
from flashgen.kernels.render import render
from flashgen.schedules.base import BY_KEYS
from flashgen.schedules.config import KernelConfig
from flashgen.schedules.outcome import Timing
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.gpu import Gpu
from flashgen.spec.problem import Problem, bytes_moved, timed_problems

TAIL = 0.1
"""Of a kernel that streams: the part of its time in which some SMs idle, or parts are merged, and
memory still is what limits it."""

EVEN = 0.005
"""Shares nearer to the largest than this limit a kernel as much: they print as the same."""


@dataclass(frozen=True, kw_only=True)
class Anatomy:
    """What could be determined about a kernel; `unknown` says why the rest is None, or is "".

    usage has the busy shares of an iteration of the steady (unmasked) loop at full occupancy. A
    kernel without a main loop, backward_delta, has no replay and no usage, but an estimate.
    bytes_us is the time of its memory traffic at what copies reach of the GPU's bandwidth; of a
    decode that of the most sequences, by which it is judged whether memory limits it.
    """

    compiled: Compiled | None = None
    replay: Replay | None = None
    usage: Usage | None = None
    estimate: Timing | None = None
    bytes_us: float | None = None
    streams: bool = False
    unknown: str = ""

    @property
    def by_bytes(self) -> bool:
        """Whether the estimate is that of the memory traffic, and no pipe of an SM matters."""
        if self.estimate is None or self.bytes_us is None:
            return False
        slack = TAIL if self.streams else EVEN
        us = (self.estimate.median_us, *self.estimate.batches_us)[-1]
        return self.bytes_us + LAUNCH_US > (1 - slack) * us

    @property
    def exp2_under_matrix(self) -> float | None:
        """The share of exp2 that overlaps the warpgroup's wgmma; None without wgmma."""
        loop = self.compiled.loop if self.compiled else None
        return loop.exp2_under_matrix if loop else None


def dissect(
    spec: AttentionSpec, config: KernelConfig, problem: Problem, gpu: Gpu, cache: Path
) -> Anatomy:
    """Compile a kernel, replay it and estimate its time, using the results in folder `cache`.

    If this machine or the model lacks something, nothing is raised: the Anatomy says what.
    """
    try:
        compiled = compile_kernel(render(spec, config), spec, config, gpu.arch, cache=cache)
    except (CompileFailed, ToolchainError) as error:
        return Anatomy(unknown=str(error))
    except ImportError as error:
        return Anatomy(unknown=f"{error.name} is not installed, so no kernel can be compiled")
    try:
        if spec.direction == "backward_delta":
            return Anatomy(compiled=compiled, estimate=estimate_streaming(spec, problem, gpu))
        replayed = cached_replay(compiled, gpu, cache)
        timing = Timing.of_batches(
            [estimate(replayed, spec, config, each, gpu) for each in timed_problems(spec, problem)]
        )
    except (NoEstimate, ToolchainError) as error:
        return Anatomy(compiled=compiled, unknown=str(error))
    assert gpu.bandwidth_gbs is not None  # or there would be no estimate
    reached = machine_of(gpu).memory_share
    steady = -1 if spec.direction in BY_KEYS else 0  # the unmasked loop; owners of keys end with it
    return Anatomy(
        compiled=compiled,
        replay=replayed,
        usage=replayed.usage[steady],
        estimate=timing,
        streams=spec.direction == "decode",
        bytes_us=bytes_moved(spec, problem) / (gpu.bandwidth_gbs * 1e3 * reached),
    )


def shares(usage: Usage) -> list[tuple[str, float]]:
    """All possible limits of a kernel with their shares of an iteration, the largest first."""
    found = {field.name: getattr(usage, field.name) for field in fields(usage)}
    return sorted((found | {"latency": usage.latency}).items(), key=lambda item: -item[1])


def limits(usage: Usage) -> tuple[str, float]:
    """What limits a kernel, and its share; if several are as large, all of them ("matrix and
    exp2").
    """
    ordered = shares(usage)
    largest = ordered[0][1]
    return " and ".join(name for name, share in ordered if share > largest - EVEN), largest


def describe(anatomy: Anatomy) -> list[str]:
    """Sentences on what limits the kernel and how long it should take."""
    lines = []
    if anatomy.usage is None and anatomy.estimate is None:
        lines.append(f"what limits it is not known: {anatomy.unknown}")
    elif anatomy.usage is None:
        lines.append("limited by memory: it has no main loop, and is estimated by its bytes alone")
    else:
        if anatomy.by_bytes:
            most = " for the most sequences" * anatomy.streams
            lines.append(
                f"limited by memory bandwidth: its bytes alone take {anatomy.bytes_us:.1f} us"
                f"{most}, and its loop would be faster"
            )
        names, share = limits(anatomy.usage)
        busy = "even the busiest pipe waits" if names == "latency" else "busy"
        word = "its loop is limited by" if anatomy.by_bytes else "limited by"
        lines.append(f"{word} {names}: {busy} {share:.0%} of an iteration of its steady loop")
        lines.append("  " + "  ".join(f"{name} {s:.0%}" for name, s in shares(anatomy.usage)))
    if anatomy.exp2_under_matrix is not None:
        lines.append(f"{anatomy.exp2_under_matrix:.0%} of exp2 overlap wgmma")
    if anatomy.estimate is not None:
        timing = anatomy.estimate
        band = f"{timing.low_us:.1f} to {timing.high_us:.1f}"
        lines.append(f"the estimator gives it {timing.median_us:.1f} us (band {band})")
    return lines


def occupancy(
    registers: int, shared_bytes: int, num_warps: int, gpu: Gpu, *, spill_bytes: int = 0
) -> list[str]:
    """Sentences on blocks per SM, registers per thread and shared memory per block."""
    blocks = resident_blocks(registers, shared_bytes, num_warps, gpu)
    spilled = f" ({spill_bytes} bytes spilled)" if spill_bytes else ""
    return [
        f"{count(blocks)} an SM, "
        f"{blocks * num_warps} of {gpu.warps_per_sm} warps, "
        f"{_why_no_more(blocks, registers, shared_bytes, num_warps, gpu)}",
        f"{registers} registers per thread{spilled}, "
        f"{shared_bytes} bytes of shared memory per block",
    ]


def count(blocks: int) -> str:
    """A number of blocks in words."""
    return f"{blocks} {'block' if blocks == 1 else 'blocks'}"


def _why_no_more(blocks: int, registers: int, shared_bytes: int, num_warps: int, gpu: Gpu) -> str:
    """Why an SM holds no more than this number of blocks."""
    for limit, needs in (
        ("registers", (1, shared_bytes)),
        ("shared memory", (registers, 0)),
        ("registers and shared memory", (1, 0)),
    ):
        if resident_blocks(*needs, num_warps, gpu) > blocks:
            return f"limited by {limit}"
    return "the most it takes"
