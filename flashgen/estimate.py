"""Compiled -> an estimated Timing with no GPU: a first ranking, enough to reject the hopeless.

It does no more than that. The time of a tile comes from the pipes its main loop loads and from how
many warps share them; the grid is list-scheduled over the SMs with each block's own number of
tiles. Models of this kind rank attention configs poorly (Spearman 0.3 to 0.7 on published
landscapes), hence the wide band; a replay of the SASS is to take its place. Left out: latencies of
memory, L2 misses of long sequences, bank conflicts, power.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass

from flashgen.compile import Compiled, resident_blocks
from flashgen.config import KernelConfig
from flashgen.errors import NoEstimate
from flashgen.gpu import Gpu
from flashgen.outcome import Timing
from flashgen.sass import WARP, LoopFacts
from flashgen.spec import AttentionSpec, Problem, flops

PROTOCOL = 1
"""Version of the model; estimates of another one are made anew."""

BAND = (0.7, 2.0)
"""The true time is expected within these multiples of the estimate. Chosen on the one full
landscape at hand, 72 timings of a Triton kernel on an A100 (github.com/jahnavi-yelamanchi/forge,
818da6b), compiled again with Triton 3.7.1 (November 2026): true over estimated was 1.03 to 2.4,
median 1.36, and 69 of 72 lie in the band."""

LAUNCH_US = 3.0
"""Time of a launch that does nothing, as CUDA events show it: a round figure, no measurement."""

BLOCK_CYCLES = 2500.0
"""Start and end of a block: loading Q, filling the pipeline, storing O (some four trips to
memory)."""

DEPENDENT_CYCLES = 600.0
"""What a warp waits for its own results in one tile: loads from shared memory, two reductions by
shuffle, exp2, the latency of the matrix pipe twice, and the barriers (some twenty dependent
steps of about 30 cycles)."""

SCHEDULED_BLOCKS = 20_000
"""Blocks that are scheduled one by one; heads beyond them are taken to balance perfectly."""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What an SM does in a clock cycle: fp32, other and exp2 count results of single threads.

    mma is the share of the GPU's matrix rate that HMMA reaches, and sustained the share of the
    boost clock that is held under matrix work.
    """

    fp32: int
    other: int = 64
    exp2: int = 16
    shared_bytes: int = 128
    l2_bytes: int
    mma: float = 1.0
    sustained: float


RATES: dict[str, Rates] = {
    # fp32, other, exp2: CUDA C++ Programming Guide, "Throughput of Native Arithmetic Instructions"
    # (add and multiply; compare, minimum, maximum; exp2). shared_bytes: 32 banks of 4 bytes.
    # l2_bytes: assumed, about what all SMs reading at once can get, a power of two.
    # mma: a warp's HMMA takes 6 cycles on sm_90 where the peak, that of wgmma, would allow 4.
    # sustained: large bf16 products reach 770 to 798 of 989 TFLOP/s on an H200; assumed elsewhere.
    "sm_80": Rates(fp32=64, l2_bytes=32, sustained=0.9),
    "sm_86": Rates(fp32=128, l2_bytes=16, sustained=0.9),
    "sm_89": Rates(fp32=128, l2_bytes=16, sustained=0.9),
    "sm_90": Rates(fp32=128, l2_bytes=32, mma=2 / 3, sustained=0.8),
}
"""Rates by architecture. Those of sm_86 and sm_89 have been compared with no measurement."""


def estimate(
    compiled: Compiled, spec: AttentionSpec, config: KernelConfig, problem: Problem, gpu: Gpu
) -> Timing:
    """The time of one launch in microseconds, never below what the peak of `gpu` allows.

    Raises NoEstimate where gpu's clock, bandwidth or matrix rate, or its architecture, are not
    known, where no main loop was found, where the kernel does not fit, and for schedule fa1.
    """
    clock_hz, bandwidth = _needed(compiled, config, gpu)
    resident = resident_blocks(compiled, gpu)
    if resident == 0:
        raise NoEstimate(f"{compiled.name} does not fit {gpu.slug}")
    if problem.empty:
        return Timing(median_us=LAUNCH_US, low_us=LAUNCH_US * BAND[0], high_us=LAUNCH_US * BAND[1])
    blocks = _blocks(problem, config)
    together = min(resident, math.ceil(blocks / gpu.sms))
    steady, masked = (
        _tile_cycles(loop, compiled, spec, config, gpu, together)
        for loop in (compiled.loops[0], compiled.loops[-1])
    )
    lengths = [
        BLOCK_CYCLES + whole * steady + edge * masked
        for whole, edge in _tiles(spec, config, problem)
    ]
    rates = RATES[gpu.arch]
    busy_s = _schedule(lengths, problem, config, gpu.sms * together) / (clock_hz * rates.sustained)
    memory_s = _bytes_moved(spec, problem) / bandwidth
    median_us = LAUNCH_US + 1e6 * max(busy_s, memory_s)
    peak = gpu.peak_tflops
    assert peak is not None  # _needed() has seen both its factors
    least_us = flops(spec, problem) / peak * 1e-6
    return Timing(
        median_us=max(median_us, least_us),
        low_us=max(median_us * BAND[0], least_us),
        high_us=max(median_us * BAND[1], least_us),
    )


def _needed(compiled: Compiled, config: KernelConfig, gpu: Gpu) -> tuple[float, float]:
    """Clock in Hz, bandwidth in bytes a second. Raises NoEstimate for what the model cannot do."""
    if gpu.arch not in RATES:
        raise NoEstimate(f"the estimator does not know {gpu.arch}: it knows {', '.join(RATES)}")
    if compiled.arch != gpu.arch:
        raise NoEstimate(f"{compiled.name} was compiled for {compiled.arch}, not for {gpu.arch}")
    if gpu.clock_mhz is None or gpu.bandwidth_gbs is None or gpu.matrix_flops_per_clock is None:
        raise NoEstimate(f"clock, bandwidth or matrix rate of {gpu.slug} is not known")
    if config.schedule == "fa1":
        raise NoEstimate("the estimator has no model of schedule fa1, which rewrites O in memory")
    if compiled.loop is None:
        raise NoEstimate(f"no main loop was found in the SASS of {compiled.name}")
    return gpu.clock_mhz * 1e6, gpu.bandwidth_gbs * 1e9


def _tile_cycles(
    loop: LoopFacts,
    compiled: Compiled,
    spec: AttentionSpec,
    config: KernelConfig,
    gpu: Gpu,
    together: int,
) -> float:
    """Cycles in which `together` blocks on one SM each finish one tile."""
    rates = RATES[gpu.arch]
    warps = compiled.num_warps * together
    matrix_rate = gpu.matrix_flops_per_clock or 0
    if loop.exp2_under_matrix is None:
        matrix_rate = int(matrix_rate * rates.mma)
    if spec.dtype == "float32":
        matrix_rate //= 2  # tf32; ieee has no matrix instructions
    matrix = warps * loop.matrix_flops / matrix_rate
    softmax = warps * max(
        loop.exp2 * WARP / rates.exp2,
        loop.fp32 * WARP / rates.fp32,
        loop.other * WARP / rates.other,
        (loop.instructions - loop.matrix_instructions) / 4,  # four schedulers, an instruction each
    )
    traffic = config.bc * (spec.head_dim + spec.head_dim_v) * spec.element_bytes * together
    longest = max(
        matrix, softmax, warps * loop.shared_bytes / rates.shared_bytes, traffic / rates.l2_bytes
    )
    # A warp's softmax waits for its own matrix product unless the schedule overlaps them. Other
    # warps of the same scheduler fill the gap: those of other blocks freely, those of its own block
    # in part, as the barriers of a tile keep them in step.
    a_scheduler = max(1.0, warps / 4)
    alone = 1.0 - (loop.exp2_under_matrix or 0.0)
    exposed = alone * min(matrix, softmax) / math.sqrt(a_scheduler * together)
    return longest + exposed + DEPENDENT_CYCLES / a_scheduler


def _blocks(problem: Problem, config: KernelConfig) -> int:
    return problem.batch * problem.heads * math.ceil(problem.seq_q / config.br)


def _tiles(
    spec: AttentionSpec, config: KernelConfig, problem: Problem
) -> Iterator[tuple[int, int]]:
    """For each tile of Q of one head, in order: tiles of K without a mask, and with one.

    The causal diagonal is the bottom-right one.
    """
    for start in range(0, problem.seq_q, config.br):
        whole = end = problem.seq_k
        if spec.causal:
            shift = problem.seq_k - problem.seq_q
            end = min(max(start + config.br + shift, 0), end)
            whole = min(max(start + shift + 1, 0), whole)
        whole //= config.bc
        yield whole, math.ceil(end / config.bc) - whole


def _schedule(lengths: list[float], problem: Problem, config: KernelConfig, slots: int) -> float:
    """Cycles until the last block ends, each taking the slot that is free first, in launch order.

    lengths are those of the blocks of one head, in cycles.
    """
    heads = problem.batch * problem.heads
    scheduled = min(heads, max(1, SCHEDULED_BLOCKS // len(lengths)))
    order = (lengths[::-1] if config.order == "longest_first" else lengths) * scheduled
    free = [0.0] * slots
    for length in order:
        heapq.heapreplace(free, free[0] + length)
    return max(free) + (heads - scheduled) * sum(lengths) / slots


def _bytes_moved(spec: AttentionSpec, problem: Problem) -> float:
    """Bytes that pass between memory and L2 at least: Q, K, V, O and LSE, each once."""
    rows = problem.batch * problem.heads * problem.seq_q
    keys = problem.batch * problem.kv_heads * problem.seq_k
    elements = (rows + keys) * (spec.head_dim + spec.head_dim_v)
    return elements * spec.element_bytes + rows * 4.0
