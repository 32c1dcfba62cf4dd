"""Schedule hopper (Gluon): a warp loads beside num_warps that compute by wgmma, in warpgroups of 64
rows, or of 64 keys where programs own keys. They are the consumers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from flashgen.schedules.base import (
    AHEAD,
    BY_KEYS,
    FLAG,
    IN_ORDER,
    TILES,
    WARPGROUP,
    WARPGROUP_ROWS,
    Bytes,
    CommonFields,
    Schedule,
    TileShape,
    box_of_page,
    one_of,
    specialized_twin,
    wide,
)
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.gpu import Gpu
from flashgen.spec.vocabulary import Direction, padded

SIDES = (*TILES, 192)
NUM_WARPS = (8, 12)
"""Of two or three consumers."""
REGISTER_SPLIT = {2: (240, 24), 3: (160, 32)}
"""Registers of a consumer's thread and of the producer's, by the number of consumers: multiples of
8, all warpgroups' together 65,536 at most."""
HOPPER_OVERLAP = 0.90
"""The share of exp2 that every consumer issues under wgmma: it is made for nothing else."""

HOPPER_TILES: dict[Direction, tuple[TileShape, ...]] = {
    # Compiled with Triton 3.7.1 for sm_90a, each is without spills in a main loop for some head dim
    # of 64 to 256; none was measured.
    "forward": (
        (128, 128, 8, 2), (192, 128, 12, 2), (128, 64, 8, 2), (192, 64, 12, 2), (128, 128, 8, 3),
        (192, 128, 12, 3), (128, 64, 8, 3), (192, 64, 12, 3), (128, 64, 8, 4), (192, 64, 12, 4),
    ),
    "backward_dq": (
        (128, 128, 8, 2), (128, 64, 8, 2), (192, 64, 12, 2), (128, 128, 8, 3), (128, 64, 8, 3),
        (192, 64, 12, 3), (192, 32, 12, 2), (128, 32, 8, 2),
    ),
    **dict.fromkeys(BY_KEYS, (
        (64, 128, 8, 2), (128, 128, 8, 2), (64, 64, 8, 2), (64, 128, 8, 3), (64, 128, 8, 4),
    )),
}  # fmt: skip
_BY_CONSUMERS: dict[str, tuple[str, ...]] = {
    "forward": ("q", "o"),
    "backward_dq": ("q", "do", "dq"),
    **dict.fromkeys(BY_KEYS, ("dk", "dv")),
}
"""What every consumer loads or stores by itself, its own rows only."""


@dataclass(frozen=True, kw_only=True)
class HopperFields(CommonFields):
    """What its configs have beside."""

    next_s: bool = field(default=False, metadata=one_of(FLAG, "_nexts"))
    no_turns: bool = field(default=False, metadata=one_of(FLAG, "_noturns"))


def runs_ahead(spec: AttentionSpec) -> bool:
    """Whether S of a tile may come before dQ of the last one is added: head dims above 128 leave no
    place for both.
    """
    return spec.direction == "backward_fused" and not wide(spec)


def why_no_next_s(spec: AttentionSpec, config: HopperFields) -> str | None:
    """Why a config, of whatever schedule, cannot have next_s."""
    if not config.next_s or (config.schedule == HOPPER.name and runs_ahead(spec)):
        return None
    return (
        "next_s needs direction backward_fused, schedule hopper and head dims up to 128: "
        f"got {spec.direction}, {config.schedule}, {spec.head_dim} and {spec.head_dim_v}"
    )


def takes_turns(spec: AttentionSpec) -> bool:
    """Whether consumers multiply in turn, as FlashAttention-3's do: above head dim 128 of V they
    have no registers for it.
    """
    return spec.direction == "forward" and padded(spec.head_dim_v) <= 128


def why_no_turns(spec: AttentionSpec, config: HopperFields) -> str | None:
    """Why a config, of whatever schedule, cannot have no_turns."""
    if not config.no_turns or (config.schedule == HOPPER.name and takes_turns(spec)):
        return None
    return (
        "no_turns needs direction forward, schedule hopper and a head dim of V up to 128: "
        f"got {spec.direction}, {config.schedule} and {spec.head_dim_v}"
    )


def o_apart(spec: AttentionSpec, config: CommonFields) -> bool:
    """Whether O is stored from its own buffer in shared memory, not from Q's.

    A persistent program loads Q of its next tile while O of this one is stored. From head dim 256
    on both do not fit, and Q waits.
    """
    dim, dim_v = padded(spec.head_dim), padded(spec.head_dim_v)
    return dim != dim_v or (config.persistent and dim_v <= 128)


class Hopper(Schedule[HopperFields]):
    """wgmma, with warps that load."""

    name = "hopper"
    gluon = roles = orders = ahead = hands_out = True
    hands_out_gradients = ("backward_dkv", "backward_dq")
    directions = own_text = AHEAD
    features: ClassVar = {
        "forward": ("alibi", "window", "chunk", "softcap", "sink", "varlen", "paged"),
        **dict.fromkeys(IN_ORDER, ("alibi", "window", "chunk", "softcap", "varlen")),
    }
    in_class = ("forward",)
    mask_first = ("forward",)  # one loop that branches over its mask
    admitted = 4  # each tile of 64 and 128 keys for two and three consumers
    archs, made = ("sm_90",), "of sm_90's wgmma"
    least_overlap = dict.fromkeys(AHEAD, HOPPER_OVERLAP)
    tiles = HOPPER_TILES
    ways: ClassVar = {"backward_fused": ({"next_s": False}, {"next_s": True})}
    gpu_ways: ClassVar = {"forward": ({"no_turns": True},)}
    values: ClassVar = {"br": SIDES, "bc": SIDES, "num_warps": NUM_WARPS}
    notes: ClassVar = {
        "num_warps": " in schedule hopper, those that compute (earlier: 4, of a warpgroup)"
    }

    def shared_keys(self, spec: AttentionSpec) -> bool:
        # dK and dV of 64 keys do not fit one consumer.
        return spec.direction in BY_KEYS and wide(spec)

    def why_not(self, spec: AttentionSpec, config: HopperFields) -> str | None:
        if spec.invariant and spec.alibi:
            # Its distances are added in one instruction, not rounded as those of the class.
            return "schedule hopper has no alibi where a spec is invariant: got both"
        by_keys = spec.direction in BY_KEYS
        side, owned, walked = ("br", config.br, config.bc)
        if by_keys:
            side, owned, walked = ("bc", config.bc, config.br)
        if self.shared_keys(spec):
            if (owned, walked, config.num_warps) != (WARPGROUP_ROWS, WARPGROUP_ROWS, 2 * WARPGROUP):
                return (
                    f"schedule hopper has tiles of {WARPGROUP_ROWS}x{WARPGROUP_ROWS} and 8 warps "
                    f"in {spec.direction} above head dim 128: got {config.br}x{config.bc} and "
                    f"num_warps={config.num_warps}"
                )
            if min(padded(spec.head_dim), padded(spec.head_dim_v)) < 128:
                return (
                    "schedule hopper has head dims of at least 65 where one is above 128: "
                    f"got {spec.head_dim} and {spec.head_dim_v}"
                )
        elif owned != WARPGROUP_ROWS * self.consumers(config):
            return (
                f"schedule hopper has {WARPGROUP_ROWS} of {side} for every {WARPGROUP} warps: "
                f"got {side}={owned} and num_warps={config.num_warps}"
            )
        if by_keys and owned not in TILES:
            return f"K and V of a block lie in shared tiles, powers of two: got bc={owned}"
        least, walks = (64, "br") if by_keys else (32, "bc")
        if walked < least or walked not in TILES:
            return (
                f"schedule hopper walks tiles of {least} at least, powers of two: "
                f"got {walks}={walked}"
            )
        return None

    def shared_bytes(self, spec: AttentionSpec, config: HopperFields, tiles: Bytes) -> int:
        held = tiles.held
        if config.persistent and spec.direction != "forward":  # and that of the next tile
            held *= 2
        if spec.direction == "backward_dq" and wide(spec):  # V has one place
            return held + config.num_stages * tiles.k + tiles.v
        beside = tiles.do if spec.direction == "forward" and o_apart(spec, config) else 0
        # The total of closed segments, float32.
        beside += tiles.do // spec.operand_bytes * 4 * spec.invariant
        of_p = config.br * config.bc * spec.element_bytes
        if self.shared_keys(spec):  # P in two places, and dS
            beside = 3 * of_p
        elif spec.direction == "backward_ds":  # dS of 64 rows, of each consumer
            beside = WARPGROUP_ROWS * config.bc * spec.element_bytes
        elif spec.direction == "backward_fused":  # dS passes through shared memory, in two places
            beside = 2 * of_p
        return held + beside + config.num_stages * sum(tiles.walked)

    def register_limit(self, config: HopperFields, gpu: Gpu, limit: int) -> int | None:
        return REGISTER_SPLIT[self.consumers(config)][0]

    def accumulators(self, spec: AttentionSpec, config: HopperFields) -> tuple[str, int]:
        scores = config.br * config.bc
        if spec.direction == "forward":
            # S of a tile is written while P of the one before, rounded, is being multiplied.
            return "O, S and P", config.br * padded(spec.head_dim_v) + scores + scores // 2
        if spec.direction == "backward_fused" and wide(spec):  # S and dP are over by then
            dim, dim_v = padded(spec.head_dim), padded(spec.head_dim_v)
            return "dK, dV and dQ", config.bc * (dim + dim_v) + config.br * dim
        return super().accumulators(spec, config)

    def block_warps(self, spec: AttentionSpec, config: HopperFields) -> int:
        # One of four more loads: registers are handed over by whole warpgroups.
        return config.num_warps + WARPGROUP

    def consumers(self, config: HopperFields) -> int:
        return config.num_warps // WARPGROUP

    def twin(self, spec: AttentionSpec, config: HopperFields) -> HopperFields:
        if config.loads == "pointer":
            return config
        smaller = {"bc": 32} if spec.direction == "backward_dq" else {}
        own = {"next_s": False, "no_turns": False, "persistent": False}
        return specialized_twin(spec, config, smaller, own)

    def switches(self, spec: AttentionSpec, config: HopperFields) -> dict[str, int | bool]:
        computes, loads = REGISTER_SPLIT[self.consumers(config)]
        found = {"CONSUMER_REGISTERS": computes, "PRODUCER_REGISTERS": loads}
        turns = takes_turns(spec) and not config.no_turns
        return {**found, "NEXT_S": config.next_s, "TURNS": turns}

    def block(
        self, spec: AttentionSpec, config: HopperFields, tensor: str, page_size: int
    ) -> tuple[int, int]:
        if tensor == "ds":  # a consumer has half of the keys and all rows, or 64 of both
            return WARPGROUP_ROWS // 2 if wide(spec) else WARPGROUP_ROWS, WARPGROUP_ROWS
        rows, dim = super().block(spec, config, tensor, page_size)
        if spec.paged and tensor in ("k", "v"):
            return box_of_page(page_size, rows)
        return WARPGROUP_ROWS if tensor in _BY_CONSUMERS[spec.direction] else rows, dim

    def added(self, shape: Sequence[int], rows: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        # Of a tile: the half of the columns, 64 rows, 8 columns; of these the warp, the row, two
        # columns, whether the row is 8 further on, and which of the two. templates/_gluon.py.jinja
        # says why.
        batch, heads, seq_q, head_dim = shape
        tile = (2, rows // 64, padded(head_dim) // 16, 4, 8, 4, 2, 2)
        return (batch, heads, -(-seq_q // rows), *tile), (0, 1, 2, 4, 6, 9, 7, 3, 5, 8, 10)

    def batches(self, spec: AttentionSpec, config: HopperFields) -> int:
        # Up to head dim 128 dQ has dP and its sum in halves, and dK and dV take 64 rows of the
        # tile after another.
        more = 2 if spec.direction == "backward_dq" and not wide(spec) else 0
        by_64 = spec.direction in ("backward_dkv", "backward_ds") and not wide(spec)
        rows = config.br if by_64 else WARPGROUP_ROWS
        return spec.products * (rows // WARPGROUP_ROWS) + more


HOPPER = Hopper()
