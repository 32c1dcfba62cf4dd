"""The numeric class of a spec with invariant: what of a kernel decides the bits of a row.

All kernels of a class sum in one order, so that they give the same bits: the tile of keys and the
places at which partial sums are closed are fixed, and count from key 0 of the sequence; the matrix
instruction is one; and a warp owns whole rows, so that the lanes add up a row in one way. Rows of a
tile, warps, stages, loads, order and persistence stay free. docs/invariance.md has the reasons.
"""

from __future__ import annotations

from typing import NamedTuple

from flashgen.schedules.base import (
    BY_KEYS,
    MMA_SYNC,
    TENSOR_MEMORY,
    WARPGROUP,
    WARPGROUP_ROWS,
)
from flashgen.schedules.config import SCHEDULES, KernelConfig
from flashgen.schedules.whole_rows import o_parts
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.gpu import Gpu
from flashgen.spec.vocabulary import padded

SEGMENT = 1024
"""Keys after which a partial sum is closed and added to the total: a split of a decode."""

ROWS_OF_A_WARP = 16
"""Of a matrix instruction, mma.sync's and a warp's share of wgmma's."""


class Tile(NamedTuple):
    """br, bc, num_warps and num_stages of the default kernel of a class."""

    br: int
    bc: int
    num_warps: int
    num_stages: int


_DIMS = (16, 32, 64, 128, 256, 512)
_HALF: dict[str, tuple[Tile, ...]] = {
    "forward": (*(Tile(64, 64, 4, 2),) * 4, Tile(64, 64, 4, 1), Tile(64, 32, 4, 1)),
    "backward_dkv": (*(Tile(64, 64, 4, 2),) * 3, Tile(64, 64, 8, 1), Tile(16, 64, 8, 1),
                     Tile(16, 16, 4, 1)),
    "backward_dq": (*(Tile(64, 64, 4, 2),) * 3, Tile(64, 64, 8, 1), Tile(64, 32, 8, 1),
                    Tile(16, 16, 4, 1)),
    "backward_delta": (*(Tile(64, 16, 4, 1),) * 3, Tile(32, 16, 4, 1), *(Tile(16, 16, 4, 1),) * 2),
}  # fmt: skip
"""Of operands of 16 bits, by padded head dim. Of the walked side, bc or in BY_KEYS br, each number
is the class's; that of the other side is a choice."""
_FLOAT: dict[str, dict[str, tuple[Tile, ...]]] = {
    "forward": {
        "tf32": (*(Tile(64, 64, 4, 2),) * 2, Tile(64, 32, 4, 2), Tile(32, 32, 2, 2),
                 *(Tile(16, 16, 1, 1),) * 2),
        "ieee": (*(Tile(64, 64, 4, 2),) * 2, Tile(32, 16, 4, 2), Tile(16, 16, 4, 2),
                 *(Tile(16, 16, 4, 1),) * 2),
    },
    "backward_dkv": {
        "tf32": (Tile(64, 64, 4, 2), Tile(32, 64, 4, 2), Tile(32, 32, 4, 2), Tile(16, 32, 4, 2),
                 Tile(16, 16, 4, 1)),
        "ieee": (Tile(32, 64, 4, 2), Tile(32, 32, 4, 2), Tile(16, 32, 4, 2), Tile(16, 16, 4, 2),
                 Tile(16, 16, 4, 1)),
    },
    "backward_dq": {
        "tf32": (Tile(64, 64, 4, 2), Tile(64, 32, 4, 2), Tile(32, 32, 4, 2), Tile(16, 32, 4, 1),
                 Tile(16, 16, 4, 1)),
        "ieee": (Tile(64, 32, 4, 2), Tile(32, 32, 4, 2), Tile(32, 16, 4, 2), Tile(16, 16, 8, 1),
                 Tile(16, 16, 8, 2)),
    },
    "backward_delta": {
        "ieee": (*(Tile(64, 16, 4, 1),) * 3, Tile(32, 16, 4, 1), Tile(16, 16, 4, 1)),
    },
}  # fmt: skip
"""Of float32, whose lanes divide a row as the whole tile and the warps decide: br, bc and num_warps
are the class's."""


def class_tile(spec: AttentionSpec) -> Tile:
    """The tile of the default kernel of an invariant spec that has scores, or of its delta."""
    direction = "forward" if spec.direction == "decode" else spec.direction
    place = _DIMS.index(padded(max(spec.head_dim, spec.head_dim_v)))
    tiles = _HALF[direction] if spec.element_bytes == 2 else _FLOAT[direction][spec.precision]
    return tiles[place]


def segments(capacity: int, streamed: int) -> int:
    """The splits of a decode of so many keys: the segments that `streamed` keys in a row, those
    that its queries see, may lie in.
    """
    return max(1, min(-(-capacity // SEGMENT), -(-(streamed - 1) // SEGMENT) + 1))


def class_name(spec: AttentionSpec) -> str:
    """The class in words, as explain shows it."""
    if spec.direction == "combine":
        return f"segments of {SEGMENT} keys, one after the other"
    tile = class_tile(spec)
    if spec.direction == "backward_delta" or spec.element_bytes == 4:
        words = f"tiles of {tile.br} queries and {tile.bc} keys, {tile.num_warps} warps"
    elif spec.direction in BY_KEYS:
        words = f"tiles of {tile.br} queries"
    else:
        words = f"tiles of {tile.bc} keys"
    if spec.direction not in ("forward", "decode"):
        return words
    rows = ", whole rows a warp" if spec.element_bytes == 2 else ""
    return f"{words}, sums closed each {SEGMENT} keys{rows}"


def why_other_class(spec: AttentionSpec, config: KernelConfig) -> str | None:
    """Why a config gives other bits than its class, whatever the GPU; None where it does not, or
    the spec has none.
    """
    if not spec.invariant or spec.direction == "combine":
        return None
    tile = class_tile(spec)
    fields: tuple[str, ...]
    if spec.direction == "backward_delta":
        fields, what = ("br", "num_warps"), "br and num_warps"
    elif spec.element_bytes == 4:
        fields, what = ("br", "bc", "num_warps"), "br, bc and num_warps"
    else:
        what = "br" if spec.direction in BY_KEYS else "bc"
        fields = (what,)
    fixed, wanted = ([str(getattr(each, name)) for name in fields] for each in (config, tile))
    if fixed != wanted:
        return (
            f"the numeric class of {spec.name} has {what} {', '.join(wanted)}: "
            f"got {', '.join(fixed)}"
        )
    if spec.direction not in SCHEDULES[config.schedule].in_class:
        schedules = [name for name, each in SCHEDULES.items() if spec.direction in each.in_class]
        names = " and ".join((", ".join(schedules[:-1]), schedules[-1]))
        return f"the numeric class of {spec.name} has schedules {names}: got {config.schedule}"
    return None


def why_other_products(spec: AttentionSpec, config: KernelConfig, gpu: Gpu) -> str | None:
    """Why a config multiplies, or adds up rows, in another way than its class on this GPU."""
    if not spec.invariant or spec.direction == "combine":
        return None
    if spec.element_bytes == 4 or spec.direction == "backward_delta":
        return None
    of_rows = spec.direction in ("forward", "decode")
    owned, side = (config.bc, "bc") if spec.direction in BY_KEYS else (config.br, "br")
    small = owned < WARPGROUP_ROWS or config.num_warps < WARPGROUP
    if not of_rows and max(spec.head_dim, spec.head_dim_v) > 256:  # 64 rows fill the registers
        if small:
            return None
        return f"the numeric class of {spec.name} has products of mma.sync: got {side}={owned}"
    if small and gpu.arch not in MMA_SYNC:
        return (
            f"the numeric class of {spec.name} on {gpu.arch} has products of {WARPGROUP_ROWS} rows "
            f"and {WARPGROUP} warps at least: got {side}={owned} and num_warps={config.num_warps}"
        )
    # Triton gives the warps of mma.sync columns where a product is wider than high (whole_rows.py).
    widest = max(config.bc, o_parts(spec, config)[0] if gpu.arch in MMA_SYNC else 0)
    whole = config.br >= max(widest, ROWS_OF_A_WARP * config.num_warps) or config.num_warps == 1
    if (
        gpu.arch in TENSOR_MEMORY
    ):  # of 32 rows a warp, lanes hold parts of a row (verify --invariant)
        whole = whole and config.br == ROWS_OF_A_WARP * config.num_warps
    if of_rows and not whole:
        return (
            f"the numeric class of {spec.name} gives a warp whole rows: "
            f"got br={config.br}, bc={config.bc}, num_warps={config.num_warps} and head_dim_v "
            f"{spec.head_dim_v}"
        )
    return None
