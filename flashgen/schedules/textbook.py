"""Schedules in plain Triton: fa2 as FlashAttention-2 has it, fa1, and s_ahead.

fa2 alone has every feature, and every direction. fa1 has FlashAttention-1's loops, to be compared
with: it has no parallelism over the rows. s_ahead issues a product before the exp2 that need not
wait for it: the next QK^T in the forward, dO V^T of the same tile in the backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import get_args

from flashgen.schedules.base import (
    AHEAD,
    BY_KEYS,
    TENSOR_MEMORY,
    Bytes,
    CommonFields,
    FieldChoice,
    Schedule,
    TileShape,
)
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.gpu import Gpu
from flashgen.spec.vocabulary import Direction, padded

LEAST_OVERLAP = 0.85
"""The share of exp2 that an s_ahead kernel is made to issue under its own wgmma. Of those compiled
for sm_90a with Triton 3.6.0 and 3.7.1 (November 2026), the ones that kept the schedule had 88 % and
more in the steady loop; most of those that lost it had none."""
BACKWARD_OVERLAP = 0.75
"""The same for the backward's. Of those compiled with Triton 3.7.1, the ones that kept dO V^T under
way had 80 % and more in the steady loop, or 70 % where a tile fills the registers; those that lost
it 41 % at most."""

BR = (128, 64, 256, 32, 16)
BC = (64, 128, 32, 16, 256)
NUM_WARPS = (4, 8, 2)
NUM_STAGES = (2, 3, 1, 4)
WAYS: tuple[FieldChoice, ...] = (
    {"schedule": "fa2", "loads": "pointer"},
    {"schedule": "fa2", "loads": "descriptor"},
    {"schedule": "s_ahead", "loads": "descriptor"},
    {"schedule": "s_ahead", "loads": "pointer"},
)
"""fa1 is left out."""

KNOWN_GOOD: tuple[TileShape, ...] = (
    # br, bc, num_warps, num_stages: after what others publish for some GPU or head dim (PyTorch
    # FlexAttention's heuristics in torch 2.13, FlashAttention-2's launch templates), and the same
    # with fewer stages or rows, for GPUs with less shared memory.
    (128, 64, 8, 3),
    (128, 128, 8, 2),
    (128, 128, 8, 3),
    (128, 64, 4, 3),
    (64, 64, 4, 3),
    (128, 32, 4, 3),
    (128, 32, 8, 2),
    (64, 32, 4, 3),
    (128, 64, 8, 2),
    (64, 64, 4, 2),
    (64, 32, 4, 2),
    (32, 64, 4, 3),
)
"""Where programs own keys and walk the rows (BY_KEYS), br and bc change places here and above."""

MEASURED_TILES: Mapping[str, Mapping[int, TileShape]] = {
    "sm_90": {64: (128, 64, 4, 3), 128: (64, 64, 4, 3)},
}
"""By architecture and padded head dim, the fastest tile of schedule fa2 in the forward that a GPU
measured, by descriptor: on an H200 on 26 November 2026, at 4,096 keys
(benchmarks/results/nvidia_h200). Features have fa2 alone, so there it is tried first."""

RDNA_TILES = ((64, 16, 4, 1), (32, 16, 4, 1), (32, 16, 8, 1))
"""br, bc, num_warps, num_stages of what is tried first where a thread of AMD has 256 registers:
larger tiles spill there. Compiled with Triton 3.7.1 for gfx1100 and gfx1201; most entries of the
forward and the backward of RX 7900 XTX and RX 9070 XT have one of them. None was measured."""

IN_WHOLE_ROWS = ((128, 32, 8, 3), (128, 16, 8, 3), (128, 64, 8, 2), (64, 16, 4, 3))
"""br, bc, num_warps, num_stages of kernels with whole_rows. Compiled with Triton 3.7.1 for sm_80
and sm_89, they spill at most 1 % of a main loop's instructions; none was measured."""


def turned(tiles: Iterable[TileShape], direction: Direction) -> tuple[TileShape, ...]:
    """Tiles whose br and bc change places where programs own keys and walk the rows."""
    if direction not in BY_KEYS:
        return tuple(tiles)
    return tuple((walked, owned, warps, stages) for owned, walked, warps, stages in tiles)


_TILES: Mapping[Direction, tuple[TileShape, ...]] = dict.fromkeys(
    get_args(Direction), KNOWN_GOOD
) | {direction: turned(KNOWN_GOOD, direction) for direction in BY_KEYS}


class Fa2(Schedule[CommonFields]):
    """The textbook order."""

    name = "fa2"
    every_feature = True
    directions = in_class = get_args(Direction)
    orders = True
    tiles = _TILES


class Fa1(Schedule[CommonFields]):
    """FlashAttention-1's loops: over tiles of keys, and inside over all rows of a head."""

    name = "fa1"
    own_text = ("forward",)
    closes_sums = False
    state_in_memory = True
    unestimated = "the estimator has no model of schedule fa1, which rewrites O in memory"
    tiles = _TILES


class SAhead(Schedule[CommonFields]):
    """A product is issued before the exp2 that need not wait for it."""

    name = "s_ahead"
    directions = AHEAD
    own_text = ("forward",)  # that of the gradients has two orders
    in_class = get_args(Direction)
    orders = ahead = last_apart = True
    least_overlap = dict.fromkeys(AHEAD, BACKWARD_OVERLAP) | {"forward": LEAST_OVERLAP}
    tiles = _TILES

    def worth_trying(self, spec: AttentionSpec, config: CommonFields, gpu: Gpu) -> bool:
        """By pointer only where there are no descriptors, of packed sequences among them (their
        pointers keep the overlap at head dim 128): pointers take the registers that carry the next
        scores, and ptxas often gives up the overlap (kernels compiled for sm_90, Triton 3.7.1).
        That of the backward where it was seen to bring something: on sm_90, by descriptor.
        """
        if spec.direction != "forward":
            return gpu.arch == "sm_90" and config.loads == "descriptor"
        tma = gpu.is_nvidia and gpu.capability >= 90 and not spec.varlen
        return not tma or config.loads == "descriptor"

    def why_not_on(self, config: CommonFields, gpu: Gpu) -> str | None:
        if gpu.arch not in TENSOR_MEMORY:
            return None
        return (
            "schedule s_ahead is wrong in tensor memory: Triton lets the next product overwrite S "
            f"before all warps have read it, and {gpu.slug} is {gpu.arch}"
        )

    def bytes_ahead(self, spec: AttentionSpec, config: CommonFields, tiles: Bytes) -> int:
        # The template frees the first K before the loop.
        frees = config.bc == 128 and tiles.k == 128 * 128 * spec.kv_bytes
        has = spec.direction == "forward" and config.loads == "descriptor" and not frees
        return tiles.k if has else 0

    def switches(self, spec: AttentionSpec, config: CommonFields) -> dict[str, int | bool]:
        """What it needs for three stages of 128 keys at head dim 128, for fewer shuffles at 256,
        and to fit into maxnreg, seen in the SASS of sm_90 (Triton 3.7.1, TMA, operands of 16 bits).
        Elsewhere the same lines cost instructions, or the overlap of exp2.
        """
        by_wgmma = config.loads == "descriptor" and spec.element_bytes == 2
        few = by_wgmma and config.maxnreg > 0
        very_wide = by_wgmma and padded(spec.head_dim) == padded(spec.head_dim_v) == 256
        return {
            "FREES_FIRST_K": by_wgmma and padded(spec.head_dim) == 128 and config.bc == 128,
            "FEW_REGISTERS": few,
            # Invariant lanes add a row up in one way everywhere.
            "SUMS_A_LANE": not spec.invariant and (few or very_wide),
        }


FA1, FA2, S_AHEAD = Fa1(), Fa2(), SAhead()
