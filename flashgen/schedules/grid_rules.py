"""How many programs a launch has, and in which order they take their tiles.

Order grouped has the heads of a run walk their tiles together, the longest first: in a forward as
many as have their keys and values in L2, in a gradient those of half as many heads of K as the GPU
has SMs. A persistent grid has as many programs as the GPU has SMs. The number of splits of a decode
depends only on shapes, the config and the number of SMs, never on lengths, because a CUDA graph is
replayed with other lengths but with the same grid. A forward that leaves SMs idle is split
likewise, where it is certain by estimate that this takes less time.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import replace

from flashgen.schedules.config import KernelConfig
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.gpu import Gpu
from flashgen.spec.problem import Problem
from flashgen.spec.vocabulary import padded

L2_SHARE = 0.5
"""Of the L2, for the K and V of a run; the rest holds Q and O, which pass through, and what a hash
of addresses wastes."""


def heads_together(bytes_of_a_key: int, seq_k: int, group: int, l2_bytes: int) -> int:
    """Query heads to a run: as many as have their K and V in the L2 together, and whole groups,
    which share them. One group at least.

    bytes_of_a_key: of one row of K and one of V. As FlashAttention-3's scheduler for causal masks
    has it (hopper/tile_scheduler.hpp, SingleTileLPTScheduler), but with a share of the L2 left.
    """
    of_a_head = max(1, seq_k) * bytes_of_a_key
    return max(1, int(L2_SHARE * l2_bytes) // of_a_head) * group


def gradient_heads_together(group: int, sms: int, *, by_keys: bool) -> int:
    """The heads to a run of a gradient: of K where programs own keys, else of Q, whole groups.

    As many as leave two SMs to each head of K, so that what their programs walk is read from memory
    once for both. At 600 TFLOP/s an H200 then reads 1.2 TB/s for dK/dV and 1.6 for dQ, of its 4.8:
    of head dim 128 a tile of 128 keys multiplies four times by 512 bytes of Q and dO, a tile of dQ
    three times by as many of K and V.
    """
    return max(1, sms // 2) * (1 if by_keys else group)


def packed_tiles(rows: int, sequences: int, side: int) -> int:
    """Tiles of a head that a persistent grid hands out of packed sequences of so many rows
    together: as tiles_before() of _scheduler.py.jinja counts them.
    """
    return rows // side + sequences


def launched_blocks(blocks: int, sms: int, *, persistent: bool) -> int:
    """Programs of a launch that has so many tiles."""
    return min(blocks, sms) if persistent else blocks


MOST_SPLITS = 128
"""Parts at most: each costs the combine kernel a row of O. The first key of a part is counted in
32 bits, which this many parts of the longest sequence fit.
"""

START_TILES = 2
"""Tiles in whose time a block starts and ends. Of 1, 2, 4 and 6 this was the best by estimate on an
A100 and an H200, and 1 on an L4; all are within 0.3 % there."""


WORTH_SPLITTING = 0.95
"""Of the time of a launch without splits: what saves less is not worth a second launch, which
merges. By estimate 0.9 to 1 are as good as this."""


@functools.lru_cache(maxsize=1024)
def split_count(blocks: int, tiles: int, slots: int) -> int:
    """The splits of a launch that has `blocks` programs without, each of `tiles` tiles of keys, on
    a GPU that runs `slots` blocks at a time.

    The fewest that take the least time, in tiles: so many waves of the longest part and its start.
    None, that is 1, where that saves less than WORTH_SPLITTING says. By estimate the launches of
    four tiles on an A100, an H200 and an L4, of 1 to 128 sequences of 512 to 131,072 keys, take 1 %
    longer in the mean than with the best number of splits, and the rule of FlashAttention-2's
    num_splits_heuristic, which fills waves to 85 %, 4 %.
    """
    if blocks <= 0 or tiles <= 1:
        return 1

    def time(splits: int) -> int:
        return math.ceil(blocks * splits / slots) * (math.ceil(tiles / splits) + START_TILES)

    best = min(range(1, min(MOST_SPLITS, tiles) + 1), key=time)
    return best if time(best) < WORTH_SPLITTING * time(1) else 1


def row_tiles(config: KernelConfig, problem: Problem) -> int:
    """Programs to one head of K and V in a split: the group's heads times the queries are rows, and
    each tile of them has as many programs as V has parts.
    """
    return math.ceil(problem.group * problem.seq_q / config.br) * config.v_parts


def streamed(problem: Problem, left: int) -> Problem:
    """The sizes of a decode whose window has so many keys to the left, with the most keys that its
    queries together see: what its splits divide.
    """
    return replace(problem, seq_k=min(problem.seq_k, left + problem.seq_q))


def splits_of(config: KernelConfig, problem: Problem, sms: int) -> int:
    """The splits of one launch of a decode config on a GPU of so many SMs.

    problem.seq_k is the capacity of the cache: the lengths are known to the device alone. Of a
    window problem is streamed().
    """
    if config.split_keys > 1:
        return max(1, min(MOST_SPLITS, problem.seq_k // config.split_keys))
    blocks = problem.batch * problem.kv_heads * row_tiles(config, problem)
    slots = sms * config.blocks_per_sm
    return split_count(blocks, math.ceil(problem.seq_k / config.bc), slots)


SPLIT_FLOPS: Mapping[str, Mapping[int, float]] = {
    "sm_80": {64: 920.0, 128: 630.0, 256: 510.0},
    "sm_86": {64: 450.0, 128: 300.0, 256: 255.0},
    "sm_89": {64: 450.0, 128: 300.0, 256: 255.0},
    "sm_90": {64: 1200.0, 128: 1250.0, 256: 1350.0},
    "sm_120": {64: 450.0, 128: 300.0, 256: 255.0},
}
"""Matrix operations a clock of an SM that default decodes of TILE_ROWS rows and 16 bits make at
least while they fill a GPU, by padded head dim. Estimated for causal calls over 8,192 keys on an
A100, an H200, an A10, an L4 and RTX 3090, 4070, 4090 and 5090 (Triton 3.7.1)."""
MOST_OF_PEAK = 0.85
"""Of the matrix peak, what these make at most."""
TILE_ROWS = 64
"""A tile of fewer rows takes as long: loads decide."""
LAUNCH_US = 3.0
"""Time of a launch that does nothing, as the estimator has it."""
WORTH_MERGING = 0.9
"""Of the time of a forward: a split one must be expected to take less. By estimate none that is
split takes longer then (docs/kernels.md, Few blocks)."""


def forward_blocks(config: KernelConfig, problem: Problem) -> int:
    """The tiles of O of a forward."""
    tiles = math.ceil(problem.seq_q / config.br)
    return problem.batch * problem.heads * tiles * config.v_parts


def least_forward_us(
    spec: AttentionSpec, config: KernelConfig, problem: Problem, gpu: Gpu, share: float
) -> float | None:
    """The least time of a forward whose blocks have an SM each, of which one sees all keys of the
    problem and multiplies at this share of the peak; None if the peak is not known.
    """
    if gpu.clock_mhz is None or gpu.matrix_flops_per_clock is None:
        return None
    dims = (spec.head_dim + spec.head_dim_v) / config.v_parts
    clocks = 2.0 * config.br * problem.seq_k * dims / (share * gpu.matrix_flops_per_clock)
    return LAUNCH_US + clocks / gpu.clock_mhz


def split_forward_us(
    spec: AttentionSpec, config: KernelConfig, problem: Problem, gpu: Gpu
) -> float | None:
    """The time of a forward by decode and combine kernels, spec being the decode's; None where it
    has one split, or no figure is known.

    A GPU's slots run the parts in waves, each its tiles and START_TILES more. K and V are read, and
    parts of O written and read, in float32.
    """
    dim = padded(max(spec.head_dim, spec.head_dim_v))
    rate, splits = SPLIT_FLOPS.get(gpu.arch, {}).get(dim), splits_of(config, problem, gpu.sms)
    peak, clock_mhz, bandwidth = gpu.matrix_flops_per_clock, gpu.clock_mhz, gpu.bandwidth_gbs
    if rate is None or peak is None or clock_mhz is None or bandwidth is None or splits == 1:
        return None
    blocks = problem.batch * problem.kv_heads * row_tiles(config, problem) * splits
    waves = math.ceil(blocks / (gpu.sms * config.blocks_per_sm))
    tiles = math.ceil(math.ceil(problem.seq_k / config.bc) / splits) + START_TILES
    scores = max(config.br, TILE_ROWS) * config.bc * config.blocks_per_sm
    tile_us = 4.0 * scores * dim / config.v_parts / min(rate, MOST_OF_PEAK * peak) / clock_mhz
    keys = problem.batch * problem.kv_heads * problem.seq_k
    rows = problem.batch * problem.heads * problem.seq_q * splits
    bytes_per_us = bandwidth * 1e3
    read_us = keys * (spec.head_dim + spec.head_dim_v) * spec.element_bytes / bytes_per_us
    merge_us = 2 * 4.0 * rows * spec.head_dim_v / bytes_per_us
    return 2 * LAUNCH_US + max(waves * tiles * tile_us, read_us) + merge_us
