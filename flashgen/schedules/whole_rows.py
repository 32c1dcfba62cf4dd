"""Products in parts, so that a warp computes whole rows of S by mma.sync.

Triton 3.7.1 gives the warps of a product that feeds another whole rows only where its result is no
wider than it is high. Else it gives them columns: every warp has all rows of some keys, and P and
the maxima and sums of the rows pass through shared memory. The widest result is O: so it is summed
in parts of at most as many columns as the tile has rows. Q and K are loaded in parts as well.

An invariant decode has one warp for its 16 rows, and reads the columns of K and V in parts, too:
of head dim 256 a whole tile does not fit the warp's registers on its way to the product.
"""

from __future__ import annotations

import functools
from dataclasses import replace

from flashgen.schedules.ampere import WIDEST
from flashgen.schedules.base import MMA_SYNC
from flashgen.schedules.config import SCHEDULES, KernelConfig
from flashgen.schedules.textbook import FA2
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.gpu import Gpu
from flashgen.spec.vocabulary import padded

WIDTHS = (128, 64)
"""Columns of a part at most, the widest first."""

DECODE_DIMS, DECODE_K_PARTS, DECODE_V_PARTS = (128, 256), 4, 8
"""Head dims of an invariant decode in parts, and how many parts K and V have: of those tried, the
only ones that spill under 1 % of the loop at head dim 256 on sm_80, sm_86 and sm_89 with two and
three stages (Triton 3.7.1). On sm_120 all spill more."""


def on_gpu(spec: AttentionSpec, config: KernelConfig, gpu: Gpu) -> KernelConfig:
    """The config as `gpu` multiplies: in whole rows where it has mma.sync and the kernel can."""
    if gpu.arch in MMA_SYNC and why_no_rows(spec, rows := _with(config, True)) is None:
        return rows
    return _with(config, False) if config.whole_rows else config


@functools.lru_cache(maxsize=1 << 14)  # the grids are the same for every spec and GPU
def _with(config: KernelConfig, whole_rows: bool) -> KernelConfig:
    same = config.whole_rows == whole_rows
    return config if same else replace(config, whole_rows=whole_rows)


def why_no_rows(spec: AttentionSpec, config: KernelConfig) -> str | None:
    """Why a config that has whole_rows cannot have it, or does not need it; None if it may."""
    if not config.whole_rows:
        return None
    if spec.direction == "decode":
        return _why_no_decode(spec, config)
    ways = (spec.direction, config.schedule, config.loads)
    if ways != ("forward", FA2.name, "pointer") or config.v_parts > 1:
        return (
            "whole_rows needs direction forward, schedule fa2, pointer loads and v_parts 1: "
            f"got {', '.join(ways)} and {config.v_parts}"
        )
    if spec.operand_bytes != 2:
        return f"whole_rows needs operands of 16 bits: got {spec.feature_words or spec.dtype}"
    if max(spec.head_dim, spec.head_dim_v) > WIDEST:
        dims = f"{spec.head_dim} and {spec.head_dim_v}"
        return f"whole_rows needs head dims to {WIDEST}: got {dims}"
    if config.br < WIDTHS[-1] or config.bc > config.br or len(o_parts(spec, config)) == 1:
        return (
            f"whole_rows is for {WIDTHS[-1]} rows and more, no more keys, and an O that is wider: "
            f"got {config.br}x{config.bc} and head_dim_v {spec.head_dim_v}"
        )
    return None


def _why_no_decode(spec: AttentionSpec, config: KernelConfig) -> str | None:
    """why_no_rows of a decode."""
    tile = (config.br, config.num_warps, config.v_parts)
    if not spec.invariant or spec.operand_bytes != 2 or tile != (16, 1, 1):
        return (
            "whole_rows of a decode needs invariant, operands of 16 bits, 16 rows, one warp and "
            f"v_parts 1: got {spec.feature_words or spec.dtype} and {config.label}"
        )
    if spec.head_dim != spec.head_dim_v or spec.head_dim not in DECODE_DIMS:
        dims = f"{spec.head_dim} and {spec.head_dim_v}"
        return f"whole_rows of a decode is for head dims {DECODE_DIMS}: got {dims}"
    return None


def k_parts(spec: AttentionSpec, config: KernelConfig) -> tuple[int, ...]:
    """Where each part of the columns of Q and K ends: the summands of a score."""
    if not config.whole_rows:
        return _parts(spec.head_dim, padded(spec.head_dim), config)
    if spec.direction == "decode":
        return _parts(spec.head_dim, spec.head_dim // DECODE_K_PARTS, config)
    return _parts(spec.head_dim, WIDTHS[0], config)


def o_parts(spec: AttentionSpec, config: KernelConfig) -> tuple[int, ...]:
    """Where each part of the columns of V and O ends, at most as wide as the tile is high."""
    if not config.whole_rows:
        return _parts(spec.head_dim_v, padded(spec.head_dim_v) // config.v_parts, config)
    if spec.direction == "decode":
        return _parts(spec.head_dim_v, spec.head_dim_v // DECODE_V_PARTS, config)
    return _parts(spec.head_dim_v, min(config.br, WIDTHS[0]), config)


def _parts(dim: int, widest: int, config: KernelConfig) -> tuple[int, ...]:
    if SCHEDULES[config.schedule].in_parts:
        return tuple(range(64, dim + 64, 64))
    if not config.whole_rows:
        return (widest,)
    if config.head_dims == "padded":
        dim = padded(dim)
    widest = min(widest, padded(dim))
    of = [width for width in WIDTHS if width <= widest] or [widest]
    width = min(of, key=lambda width: -(-dim // width) * width)  # the least padding
    return tuple(range(width, dim + width, width))
