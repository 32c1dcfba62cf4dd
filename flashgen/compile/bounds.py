"""The least cycles in which an SM can compute a kernel: where no time is known, these rank it."""

from __future__ import annotations

from typing import NamedTuple

from flashgen.compile.compiler import Compiled
from flashgen.schedules.config import SCHEDULES, KernelConfig
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.gpu import Gpu


class Rates(NamedTuple):
    """Of an SM in a cycle: instructions of warps, exp2, bytes of shared memory (None: no bound)."""

    issued: int
    exp2: int
    shared_bytes: int | None = None


NVIDIA = Rates(4, 16)
"""CUDA C++ Programming Guide, throughput of arithmetic instructions. Shared memory is not counted:
wgmma and tcgen05 read it by themselves."""

AMD = {
    # CDNA 2 and 3: one of four vector units starts a warp of 64 in each cycle, exp2 has a quarter
    # of that rate, and the LDS has 32 banks of 4 bytes. CDNA 4 white paper: twice the exp2, twice
    # the bytes.
    "gfx90a": Rates(1, 16, 128),
    "gfx942": Rates(1, 16, 128),
    "gfx950": Rates(1, 32, 256),
    # RDNA 3 and 4, a workgroup processor: four vector units of 32 threads, a quarter of that for
    # exp2, and two halves of LDS.
    "gfx1100": Rates(4, 32, 256),
    "gfx1201": Rates(4, 32, 256),
}


def cycles_a_score(
    compiled: Compiled, spec: AttentionSpec, config: KernelConfig, gpu: Gpu
) -> tuple[float, float] | None:
    """The least cycles of an SM for a score, by the pipe that bounds the kernel, and those in which
    its instructions issue. None where the instructions of a tile, or the rates, are not known.

    Of the issue slots, exp2, the matrix units and AMD's shared memory the one that is busy the
    longest. Of AMD the products are those counted in the loop: where a warp has fewer rows than an
    instruction multiplies, several warps compute the same.
    """
    rates = NVIDIA if gpu.is_nvidia else AMD.get(gpu.arch)
    if compiled.issued is None or rates is None:
        return None
    instructions, exp2 = compiled.issued
    scores = config.br * config.bc / SCHEDULES[config.schedule].blocks_of_a_tile(spec)
    issue = instructions / (rates.issued * scores)
    special = exp2 * gpu.warp_size / (rates.exp2 * scores)
    flops, shared = float(spec.products * (spec.head_dim + spec.head_dim_v)), 0.0
    if rates.shared_bytes and compiled.loop is not None:
        flops = compiled.loop.matrix_flops * compiled.num_warps / scores
        shared = compiled.loop.shared_bytes * compiled.num_warps / (rates.shared_bytes * scores)
    rate = (gpu.matrix_flops_per_clock or 0) * spec.matrix_rate
    matrix = flops / rate if rate else 0.0
    return max(issue, special, matrix, shared), issue
