"""The kernels of a cache: decode, combine and append, all of schedule fa2.

A decode streams K and V, so the bytes in flight decide its speed: stages and warps vary most. Its
rows are few, and 16 of them fill a matrix instruction. For how many blocks on an SM its keys are
split is not searched: search/evidence.py sets how many of the compiled kernel an SM holds.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from flashgen.schedules.base import FLAG, CommonFields, FieldChoice, TileShape, one_of
from flashgen.schedules.textbook import FA2
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.vocabulary import DECODING

Widening = Literal["bits", "native"]

SPLIT_KEYS = (1, 256, 512, 1024, 2048, 4096)
BLOCKS_PER_SM = range(1, 33)
"""No SM holds more."""

BR = (16, 32, 64)
BC = (64, 128, 32, 16, 256)
NUM_WARPS = (4, 8, 2, 1)
NUM_STAGES = (3, 2, 4, 5, 1)

SEEDS: tuple[TileShape, ...] = (
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


RDNA_TILES = ((16, 32, 4, 3), (16, 16, 4, 1), (16, 16, 8, 1), (16, 64, 4, 3))
"""br, bc, num_warps, num_stages of what is tried first where a thread of AMD has 256 registers, as
textbook.RDNA_TILES."""


@dataclass(frozen=True, kw_only=True)
class DecodeFields(CommonFields):
    """What its configs have beside."""

    split_keys: int = field(default=1, metadata=one_of(SPLIT_KEYS, "_split{}", 0))
    widening: Widening = field(default="bits", metadata=one_of(("bits", "native"), "_native", 0))
    pdl: bool = field(default=False, metadata=one_of(FLAG, "_pdl", 0))
    blocks_per_sm: int = field(default=1, metadata=one_of(BLOCKS_PER_SM, "_x{}", 2))


def tiles(spec: AttentionSpec) -> Iterable[TileShape]:
    """All tiles of a direction, legal or not, the likely ones first."""
    if spec.direction == "combine":
        return itertools.product((16,), (32, 16, 64, 128), (4, 2, 1, 8), (1,))
    if spec.direction == "append":
        return itertools.product((16, 32), (16,), (4, 2, 1), (1,))
    # Of an invariant spec rows are padded to wgmma's, and 128 of head dim 256 do not spill.
    br = (*BR, 128) if spec.invariant else BR
    return itertools.product(br, BC, NUM_WARPS, NUM_STAGES)


def seeds(spec: AttentionSpec) -> tuple[TileShape, ...]:
    """Those that a search tries first, legal or not."""
    if spec.direction != "decode":
        return ()
    # The loads of a block table run a stage ahead of the pages that they name.
    return tuple((br, bc, warps, stages + spec.paged) for br, bc, warps, stages in SEEDS)


def ways(spec: AttentionSpec) -> tuple[FieldChoice, ...]:
    """By the GPU's own instruction, where it has one, then by bits."""
    widens = spec.direction == "decode" and spec.kv_dtype == "float8_e4m3"
    return ({"widening": "native"}, {}) if widens else ({},)


def why_not(spec: AttentionSpec, config: DecodeFields) -> str | None:
    """Why no direction has a config's fields of a decode, or one of these has no such variant."""
    if config.split_keys > 1 and spec.direction != "decode":
        return f"split_keys needs direction decode: got {spec.direction}"
    if config.blocks_per_sm > 1 and (spec.direction != "decode" or spec.invariant):
        return (
            "blocks_per_sm needs direction decode without invariant, whose parts are fixed: "
            f"got {spec.name}"
        )
    if config.blocks_per_sm > 1 and config.split_keys > 1:
        return (
            "blocks_per_sm and split_keys exclude each other, as each says how keys are split: "
            f"got {config.blocks_per_sm} and {config.split_keys}"
        )
    if config.widening == "native" and (spec.direction, spec.kv_dtype) != ("decode", "float8_e4m3"):
        return (
            "widening native needs direction decode and kv_dtype float8_e4m3: "
            f"got {spec.direction} and {spec.kv_dtype}"
        )
    if config.pdl and spec.direction not in ("decode", "combine"):
        return f"pdl is of decode and the combine kernel behind it: got {spec.direction}"
    if spec.direction not in DECODING:
        return None
    has = (config.schedule, config.loads, config.order)
    if has != (FA2.name, "pointer", "plain"):
        return f"direction {spec.direction} has fa2, pointer and plain alone: got {', '.join(has)}"
    if spec.direction == "decode":
        return None
    tile, what = (config.br, "br") if spec.direction == "combine" else (config.bc, "bc")
    if (tile, config.num_stages) != (16, 1):
        return (
            f"direction {spec.direction} makes no use of {what} and num_stages, so they are 16 and "
            f"1: got {tile} and {config.num_stages}"
        )
    return None
