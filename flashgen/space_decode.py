"""The configs worth trying for the kernels that serve a cache; space.py has the other kernels'.

A decode streams K and V: the bytes in flight decide, so stages, warps and splits vary most. Its
rows are few, and 16 make a matrix instruction.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace

from flashgen.config import SPLIT_KEYS, KernelConfig
from flashgen.spec import AttentionSpec

BR = (16, 32, 64)
BC = (64, 128, 32, 16, 256)
NUM_WARPS = (4, 8, 2, 1)
NUM_STAGES = (3, 2, 4, 5, 1)

SEEDS = (
    # br, bc, num_warps, num_stages: tiles of 16 to 64 KiB on their way at a time, at head dim 128.
    # Chosen by that alone; none was timed.
    (16, 64, 4, 3),
    (16, 128, 4, 3),
    (16, 64, 4, 4),
    (16, 128, 8, 3),
    (16, 64, 2, 3),
    (16, 32, 4, 4),
    (16, 64, 4, 2),
    (16, 32, 4, 2),
)


@functools.cache
def decoding_grid(spec: AttentionSpec) -> tuple[KernelConfig, ...]:
    """All configs of a direction, legal or not, the likely ones first."""
    if spec.direction == "combine":
        return _configs((16,), (32, 16, 64, 128), (4, 2, 1, 8), (1,), (1,))
    if spec.direction == "append":
        return _configs((16, 32), (16,), (4, 2, 1), (1,), (1,))
    configs = _configs(BR, BC, NUM_WARPS, NUM_STAGES, SPLIT_KEYS)
    return configs if spec.kv_dtype != "float8_e4m3" else _both_ways(configs)


def decoding_seeds(spec: AttentionSpec) -> tuple[KernelConfig, ...]:
    """What a search tries first, legal or not; the split count by its rule."""
    if spec.direction != "decode":
        return ()
    # The loads of a block table run a stage ahead of the pages that they name.
    more = 1 if spec.paged else 0
    seeds = tuple(
        KernelConfig(br=br, bc=bc, num_warps=warps, num_stages=stages + more)
        for br, bc, warps, stages in SEEDS
    )
    return seeds if spec.kv_dtype != "float8_e4m3" else _both_ways(seeds)


def _both_ways(configs: tuple[KernelConfig, ...]) -> tuple[KernelConfig, ...]:
    """Each by the GPU's own instruction, where it has one, then each by bits."""
    return (*(replace(config, widening="native") for config in configs), *configs)


def _configs(*values: tuple[int, ...]) -> tuple[KernelConfig, ...]:
    """One for each combination of br, bc, num_warps, num_stages and split_keys."""
    return tuple(
        KernelConfig(br=br, bc=bc, num_warps=warps, num_stages=stages, split_keys=keys)
        for br, bc, warps, stages, keys in itertools.product(*values)
    )
