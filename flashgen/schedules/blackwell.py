"""Schedule blackwell (Gluon): beside num_warps of softmax, 32 rows a warp, others load, multiply by
tcgen05, rescale O, and hand tiles out; in the backward none does the last two, and two warpgroups
have a tile of 128 rows, or keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from flashgen.schedules.base import (
    AHEAD,
    BY_KEYS,
    IN_ORDER,
    TENSOR_COLUMNS,
    TENSOR_MEMORY,
    TENSOR_ROWS,
    WARPGROUP,
    Bytes,
    CommonFields,
    FieldChoice,
    Schedule,
    TileShape,
    box_of_page,
    one_of,
    specialized_twin,
    wide,
)
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.vocabulary import Direction, padded

EXP2_BY_FMA = (0, 4, 6, 8, 12, 16)
"""Of 32 exp2, those that multiply-add computes in place of MUFU."""
RESCALE_LOG2 = (0, 8)
"""By how much a row's maximum may grow, in log2, before O is rescaled. P of a row is 2^8 at most
then: far below float16's 65,504, and rounded to as many bits as below 1."""
WARP_ROWS = 32
"""Lanes of tensor memory that a warp reaches: a thread has one, a row of a tile of S and O, or a
key where programs own keys."""
ROLES_BYTES = 512
"""Shared memory that Triton 3.7.1 takes for warps with roles; each barrier takes 8 bytes more."""

SOFTMAX_SPLIT = {(2, 1): (184, 48), (2, 3): (184, 56), (1, 1): (232, 48)}
"""Registers of a thread of softmax and of the warps that multiply, load and hand tiles out, by row
tiles and pieces of Q and K; the warps that rescale O take what is left. Others were seen to spill
in loops over keys (Triton 3.7.1, sm_100)."""
FEATURES_SPLIT = (192, 56)
"""The same of two row tiles with features of the scores: with 184 the softmax spills, and with 48
the warp that multiplies three pieces.
"""
HALVES_SPLIT = (224, 48)
"""The same of its backward: the first of the two warpgroups that compute takes what is left. With
184 the second spills."""
WIDE_SPLIT = (192, 96)
"""The same of dQ of head dim 256: with 48 and 64 the warp that multiplies spills."""
KEEP_DS: tuple[Direction, ...] = ("backward_fused", "backward_ds")
"""Directions whose dS lies in shared memory."""
FUSED_SPLIT = (152, 64)
"""The same of its fused backward, where the warps that add dQ to memory take what is left."""

BLACKWELL_TILES: dict[Direction, tuple[TileShape, ...]] = {
    # Compiled as those of schedule hopper; none was measured.
    "forward": (
        (256, 128, 8, 4), (256, 128, 8, 3), (256, 128, 8, 2), (128, 128, 4, 2), (128, 64, 4, 4),
        (256, 64, 8, 4), (128, 64, 4, 3), (256, 64, 8, 2),
    ),
    "backward_dkv": (
        (128, 128, 8, 4), (128, 128, 8, 3), (128, 128, 8, 2), (64, 128, 8, 3), (64, 128, 8, 2),
    ),
    "backward_fused": ((128, 128, 8, 4), (128, 128, 8, 3), (128, 128, 8, 2)),
    "backward_ds": (
        (128, 128, 8, 4), (128, 128, 8, 3), (128, 128, 8, 2), (64, 128, 8, 3), (64, 128, 8, 2),
    ),
    "backward_dq": (
        (128, 128, 8, 4), (128, 128, 8, 3), (128, 128, 8, 2), (128, 64, 8, 3), (128, 64, 8, 2),
    ),
}  # fmt: skip


def _ways(*pairs: tuple[int, int]) -> tuple[FieldChoice, ...]:
    return tuple({"exp2_by_fma": by_fma, "rescale_log2": lazy} for by_fma, lazy in pairs)


@dataclass(frozen=True, kw_only=True)
class BlackwellFields(CommonFields):
    """What its configs have beside."""

    exp2_by_fma: int = field(default=0, metadata=one_of(EXP2_BY_FMA, "_fma{}"))
    rescale_log2: int = field(default=0, metadata=one_of(RESCALE_LOG2, "_lazy{}"))


def why_no_exp2(spec: AttentionSpec, config: BlackwellFields) -> str | None:
    """Why a config of another schedule cannot have its fields."""
    if config.schedule == BLACKWELL.name or not (config.exp2_by_fma or config.rescale_log2):
        return None
    return (
        "exp2_by_fma and rescale_log2 need schedule blackwell: "
        f"got {config.schedule}, {config.exp2_by_fma} and {config.rescale_log2}"
    )


def row_tiles(config: CommonFields) -> int:
    """Tiles of 128 rows of a block."""
    return config.br // TENSOR_ROWS


def halves(config: CommonFields) -> bool:
    """Whether two warpgroups share a tile, half of its columns each: in the backward."""
    return WARP_ROWS * config.num_warps > config.br


def k_pieces(spec: AttentionSpec) -> int:
    """In how many tiles of 64 columns the forward has Q and K: 3 where they would be padded from
    192 to 256 beside a V of 128, else 1 of all columns. A wider V is padded to 256 in the same
    ring.
    """
    narrow_v = padded(spec.head_dim_v) <= TENSOR_ROWS
    return 3 if spec.direction == "forward" and narrow_v and 128 < spec.head_dim <= 192 else 1


def walked_side(spec: AttentionSpec) -> int:
    """What the backward walks at a time, keys for dQ, rows for dK and dV: 64 where a head dim is
    padded to 256, by shared memory and, beside sums of 256 columns, by tensor memory; else 128. The
    fused kernel has tiles of dQ, which take 128 lanes.
    """
    return 64 if spec.direction != "backward_fused" and wide(spec) else TENSOR_ROWS


def s_places(spec: AttentionSpec) -> int:
    """How many tiles of S the backward has in tensor memory: two where they fit beside dP and what
    it sums, so that a product runs ahead; else one.
    """
    return 2 if sum_columns(spec) + 3 * walked_side(spec) <= TENSOR_COLUMNS else 1


def sum_columns(spec: AttentionSpec) -> int:
    """Columns of tensor memory of what the backward sums: dK, dV, or both, or dQ."""
    of_v = padded(spec.head_dim_v) if spec.direction in BY_KEYS and not sums_one(spec) else 0
    return padded(spec.head_dim) + of_v


def sums_one(spec: AttentionSpec) -> bool:
    """Whether a block sums either dK or dV, and two blocks share a tile of keys: where both are
    padded to 256, and do not fit beside S and dP of 64 rows.
    """
    dims = padded(spec.head_dim), padded(spec.head_dim_v)
    return spec.direction == "backward_dkv" and min(dims) > 128


class Blackwell(Schedule[BlackwellFields]):
    """tcgen05, whose accumulators are in tensor memory."""

    name = "blackwell"
    gluon = roles = orders = hands_out = accumulates_in_tensor_memory = True
    directions = own_text = AHEAD
    features: ClassVar = {
        "forward": ("alibi", "window", "chunk", "softcap", "sink", "varlen", "paged"),
        **dict.fromkeys(IN_ORDER, ("alibi", "window", "chunk", "softcap", "varlen")),
    }
    closes_sums = False
    admitted = 1  # the first has the most keys and stages that fit
    archs, made = TENSOR_MEMORY, "of tcgen05 of sm_100"
    tiles = BLACKWELL_TILES
    ways = dict.fromkeys(AHEAD, _ways((0, 0), (4, 0), (8, 0))) | {
        "forward": _ways((4, 8), (8, 8), (0, 8), (6, 8), (4, 0))
    }

    def why_not(self, spec: AttentionSpec, config: BlackwellFields) -> str | None:
        if spec.direction != "forward":
            return _why_no_gradient(spec, config)
        dims = f"{spec.head_dim} and {spec.head_dim_v}"
        wide_v, pieces = padded(spec.head_dim_v) > TENSOR_ROWS, k_pieces(spec) > 1
        if not pieces and padded(spec.head_dim) != padded(spec.head_dim_v):
            return f"schedule blackwell has K and V in one ring, padded alike: got head dims {dims}"
        tiles = 1 if wide_v else 2
        if row_tiles(config) != tiles or config.num_warps != WARPGROUP * tiles:
            return (
                f"schedule blackwell has br {TENSOR_ROWS * tiles} and {WARPGROUP * tiles} "
                f"warps of softmax for head dims {dims}, by its tensor memory: "
                f"got br={config.br} and num_warps={config.num_warps}"
            )
        if config.bc not in (64, 128):
            return f"schedule blackwell has tiles of 64 or 128 keys: got bc={config.bc}"
        columns = tiles * padded(spec.head_dim_v) + 2 * config.bc  # of O, and two places of S
        if (reason := _too_many_columns(spec, columns)) is not None:
            return reason
        if spec.alibi and config.exp2_by_fma:  # a steep slope leaves a row two or three keys
            return (
                "exp2_by_fma is 0 with ALiBi, where LSE may show the error of a single key: "
                f"got {config.exp2_by_fma}"
            )
        return None

    def shared_bytes(self, spec: AttentionSpec, config: BlackwellFields, tiles: Bytes) -> int:
        stages = config.num_stages
        if spec.direction == "forward":  # one ring, in which K and V take turns
            of_q, of_k = tiles.q, tiles.k
            if (pieces := k_pieces(spec)) > 1:
                of_q = config.br * 64 * pieces * spec.operand_bytes
                of_k = config.bc * 64 * pieces * spec.kv_bytes
            return of_q + stages * of_k + tiles.do * config.persistent  # O, beside the next Q
        of_ds = config.br * config.bc * spec.element_bytes
        beside = ROLES_BYTES + (of_ds if spec.direction in KEEP_DS else 0)
        if spec.direction in BY_KEYS:  # LSE and delta of a tile of rows, in float32
            beside += stages * 2 * config.br * 4
        if walked_side(spec) == 64 and spec.direction == "backward_dq":  # V has one place
            return tiles.held + beside + stages * tiles.k + tiles.v
        if sums_one(spec):  # dO has one place
            return tiles.held + beside + stages * tiles.q + tiles.do
        return tiles.held + beside + stages * sum(tiles.walked)

    def block_warps(self, spec: AttentionSpec, config: BlackwellFields) -> int:
        # Of four more one multiplies, one loads, and one hands tiles out, if they are; four rescale
        # O, or add dQ to memory.
        alone = halves(config) and spec.direction != "backward_fused"
        return config.num_warps + WARPGROUP * (1 if alone else 2)

    def blocks_of_a_tile(self, spec: AttentionSpec) -> int:
        return 2 if sums_one(spec) else 1

    def twin(self, spec: AttentionSpec, config: BlackwellFields) -> BlackwellFields:
        if config.loads == "pointer":
            return config
        smaller = {"br": 32, "bc": 32} if spec.direction in BY_KEYS else {"bc": 64}
        own = {"exp2_by_fma": 0, "rescale_log2": 0, "persistent": False}
        own |= {"br": 64} if halves(config) else {}  # S and dP are in registers there
        return specialized_twin(spec, config, smaller, own)

    def switches(self, spec: AttentionSpec, config: BlackwellFields) -> dict[str, int | bool]:
        found: dict[str, int | bool] = {"EXP2_BY_FMA": config.exp2_by_fma}
        if spec.direction != "forward":
            computes, others = HALVES_SPLIT
            if spec.direction == "backward_fused":
                computes, others = FUSED_SPLIT
            elif walked_side(spec) < TENSOR_ROWS:
                computes, others = WIDE_SPLIT
            found |= {"COMPUTE_REGISTERS": computes, "OTHER_REGISTERS": others}
            return found | {"S_PLACES": s_places(spec)}
        two = row_tiles(config) == 2
        softmax, others = SOFTMAX_SPLIT[row_tiles(config), k_pieces(spec)]
        if two and spec.scores_featured:
            softmax, others = FEATURES_SPLIT
        found |= {"SOFTMAX_REGISTERS": softmax, "OTHER_REGISTERS": others}
        # Columns of O that are rescaled at a time: with 64 of two tiles of 128, the warp's number
        # is loaded from the stack for every tile of keys, 1 % of the loop. FEATURES_SPLIT leaves
        # registers for 32.
        narrow = spec.scores_featured or padded(spec.head_dim_v) > 64
        found["O_PART"] = 32 if two and narrow else 64
        return found | {"RESCALE_LOG2": config.rescale_log2, "PIECES": k_pieces(spec)}

    def block(
        self, spec: AttentionSpec, config: BlackwellFields, tensor: str, page_size: int
    ) -> tuple[int, int]:
        rows, dim = super().block(spec, config, tensor, page_size)
        if spec.paged and tensor in ("k", "v"):
            return box_of_page(page_size, rows)
        if tensor == "ds":  # a warpgroup has all keys and half of the rows
            return config.bc, config.br // 2
        if tensor not in ("k", "v", "dk", "dv"):
            rows = min(rows, TENSOR_ROWS)
        return rows, 64 if tensor in ("q", "k") and k_pieces(spec) > 1 else dim

    def added(self, shape: Sequence[int], rows: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        # Four columns of all rows of a tile.
        batch, heads, seq_q, head_dim = shape
        tiles, columns = -(-seq_q // rows), padded(head_dim) // 4
        return (batch, heads, tiles, columns, rows, 4), (0, 1, 2, 4, 3, 5)


def _why_no_gradient(spec: AttentionSpec, config: BlackwellFields) -> str | None:
    """What the backward does not have."""
    if config.rescale_log2:
        return f"rescale_log2 needs direction forward: got {spec.direction}"
    side = walked_side(spec)
    br, bc = (side, TENSOR_ROWS) if spec.direction in BY_KEYS else (TENSOR_ROWS, side)
    if (config.br, config.bc) != (br, bc) or config.num_warps != 2 * WARPGROUP:
        return (
            f"schedule blackwell has tiles of {br}x{bc} and {2 * WARPGROUP} warps that "
            f"compute in {spec.direction} at head dims {spec.head_dim} and {spec.head_dim_v}: "
            f"got {config.br}x{config.bc} and num_warps={config.num_warps}"
        )
    # Beside the sums, dP and S; of dQ two of S. That of a fused kernel takes the place of dP.
    columns = sum_columns(spec) + (2 if spec.direction in BY_KEYS else 3) * side
    return _too_many_columns(spec, columns)


def _too_many_columns(spec: AttentionSpec, columns: int) -> str | None:
    """Why what a block has in tensor memory does not fit there; None where it does."""
    if columns <= TENSOR_COLUMNS:
        return None
    return (
        f"head dims {spec.head_dim} and {spec.head_dim_v} take {columns} columns of tensor "
        f"memory in {spec.direction}, which has {TENSOR_COLUMNS}"
    )


BLACKWELL = Blackwell()
