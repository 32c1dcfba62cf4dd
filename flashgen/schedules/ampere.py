"""Schedule ampere (Gluon): fa2 for mma.sync, 16 rows a warp, its layouts written down, of one
stage.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from flashgen.schedules.base import MMA_SYNC, Bytes, CommonFields, Loads, Schedule
from flashgen.spec.attention import AttentionSpec

NUM_WARPS = (4, 8)
WIDEST = 256
"""The largest head dim: beyond, a warp's rows of O fill its registers."""

AMPERE_TILES = (
    (128, 64, 8, 1), (64, 64, 4, 1), (128, 128, 8, 1), (128, 32, 8, 1), (64, 32, 4, 1),
)  # fmt: skip
"""Compiled with Triton 3.7.1 for sm_80 and sm_89, each spills little or nothing at some head dim;
none was measured."""


class Ampere(Schedule[CommonFields]):
    """One place for each of Q, K and V, all products in parts."""

    name = "ampere"
    gluon = True
    features: ClassVar = {
        "forward": ("alibi", "window", "chunk", "softcap", "sink", "varlen", "paged"),
    }
    own_text = in_class = ("forward",)
    in_parts = masked_apart = True
    mask_first = ("forward",)  # one loop that branches over the mask of first keys
    archs, made = MMA_SYNC, "for mma.sync"
    loads: Loads = "pointer"
    tiles: ClassVar = {"forward": AMPERE_TILES}

    def why_not(self, spec: AttentionSpec, config: CommonFields) -> str | None:
        if (spec.direction, config.loads) != ("forward", "pointer"):
            return (
                "schedule ampere needs direction forward and pointer loads: "
                f"got {spec.direction} and {config.loads}"
            )
        if spec.element_bytes != 2:
            return f"schedule ampere has operands of 16 bits: got {spec.dtype}"
        if config.num_warps not in NUM_WARPS or config.br != 16 * config.num_warps:
            return (
                "schedule ampere has 16 rows for each of 4 or 8 warps: "
                f"got br={config.br} and num_warps={config.num_warps}"
            )
        if config.bc not in (32, 64, 128) or config.bc > config.br or config.num_stages != 1:
            return (
                "schedule ampere has tiles of 32 to 128 keys, no more than rows, in one place, so "
                f"that num_stages is 1: got bc={config.bc} and num_stages={config.num_stages}"
            )
        dims = spec.head_dim, spec.head_dim_v
        if any(dim % 64 or dim > WIDEST for dim in dims):
            return (
                f"schedule ampere has head dims 64, 128, 192 and 256: got {dims[0]} and {dims[1]}"
            )
        return None

    def shared_bytes(self, spec: AttentionSpec, config: CommonFields, tiles: Bytes) -> int:
        of_keys = config.bc * (spec.head_dim + spec.head_dim_v)
        return (config.br * spec.head_dim + of_keys) * spec.element_bytes

    def twin(self, spec: AttentionSpec, config: CommonFields) -> CommonFields:
        # A tile of 64 rows that fits with every head dim, or is that of an invariant spec's class.
        bc = config.bc if spec.invariant else min(config.bc, 32)
        rows = spec.invariant and spec.head_dim_v > 64
        return replace(
            config, schedule="fa2", br=64, bc=bc, num_warps=4, num_stages=2, whole_rows=rows
        )


AMPERE = Ampere()
