"""Machine code for a B200 beside FlashAttention-4's. CPU only; runs no kernel.

    python benchmarks/machine_code_sm100.py            compile ours, write results
    python benchmarks/machine_code_sm100.py --check    whether they name what ships now

FlashAttention-4 was compiled from the packages that the results name. Ours are the kernels that
duel.py takes from the B200's table, and the fused backward of schedule blackwell, which no table
has.
All figures are of the steady loops:

    registers, loops    of each role in the order of ROLES; a kernel without roles has one loop
    a score             instructions of all warps of a role, in warps of 32, for one element of
                        Q K^T; `all` adds the roles. Correction has four warps, products and loads
                        one each. Two blocks that multiply together share one warp for products
    masked              the softmax loop of masked tiles, where it is another
    mufu                exp2 of MUFU a score; the others are computed by multiply-add
    tensor              columns of tensor memory
    spills              loads and stores of spilled registers in these loops

Correction of the forward is counted as if it rescaled O for every tile; both libraries skip that
where the maximum hardly moves. The reduction adds dQ in global memory. Roles without a loop of
their own and the kernels before and after a backward are left out.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import duel
from benchmarks.duel import Cell, Kernels, Row, row_of
from flashgen.compile.loops import Body, loops, main_bodies
from flashgen.compile.sass import WARP, Listing
from flashgen.errors import ToolchainError
from flashgen.schedules.base import TENSOR_ROWS
from flashgen.schedules.config import SCHEDULES, KernelConfig
from flashgen.schedules.space import legal_configs
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.gpu import TARGETS

B200 = TARGETS["nvidia_b200"]
FUSED = "blackwell, fused"
ROLES = ("softmax", "correction", "reduction", "products", "loads", "one loop")
WARPS = {"correction": 4, "reduction": 4, "products": 1, "loads": 1}


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What the machine code of a kernel with roles does not tell.

    tile: rows and keys of a block. softmax: its warps. products: matrix instructions for one tile.
    blocks: those that compute the scores of a tile; where they take different branches of a loop,
    each counts for the whole loop. roles: whether its warps have any; without, all are softmax
    warps with one loop.
    """

    tile: tuple[int, int]
    softmax: int
    products: int = 0
    blocks: int = 1
    roles: bool = True

    @property
    def scores(self) -> int:
        """Of a thread of the softmax warps."""
        return self.tile[0] * self.tile[1] // (WARP * self.softmax)


@dataclass(frozen=True, kw_only=True)
class Part(duel.Part):
    """A kernel: of each role the instructions of its loop and those a score."""

    tensor_columns: int
    loops: dict[str, int]
    per_score: dict[str, float]
    mufu: float
    masked: int = 0


def task(body: Body) -> str:
    """The role whose loop it is; "" for loops of none, and of several."""
    reads, writes = any(i.reads_tensor for i in body), any(i.base == "STTM" for i in body)
    does = {
        "softmax": any(i.is_exp2 for i in body),
        "products": any(i.is_matrix for i in body),
        "loads": any(i.is_bulk_load for i in body),
    }
    found = [role for role, holds in does.items() if holds]
    if not found and reads:
        return "correction" if writes else "reduction"
    return found[0] if len(found) == 1 else ""


def steady(listing: Listing, shape: Shape) -> dict[str, Body]:
    """The loop of each role: the shortest that does all of a tile. A persistent kernel has longer
    ones around it, which do the first and the last tile too.

    Raises ToolchainError if no softmax loop reads the tile of `shape`.
    """
    # A forward reads S, a backward S and dP.
    columns = shape.scores, 2 * shape.scores
    found: dict[str, Body] = {}
    for body in sorted(loops(listing.instructions), key=len):
        role = task(body)
        enough = {
            "softmax": columns_read(body) in columns,
            "products": matrices(body) >= shape.products,
        }.get(role, bool(role))
        if enough:
            found.setdefault(role, body)
    if "softmax" not in found:
        raise ToolchainError(f"no softmax loop of {shape.scores} scores a thread")
    return found


_COLUMNS = re.compile(r"\.x(\d+)")


def masked(listing: Listing, shape: Shape) -> int:
    """Instructions of the softmax loop that masks; 0 without one of its own."""
    found = {
        len(body)
        for body in loops(listing.instructions)
        if task(body) == "softmax" and columns_read(body) == shape.scores
    }
    return max(found) if len(found) > 1 else 0


def columns_read(body: Body) -> int:
    """Columns of tensor memory that a thread reads, 32 bits each."""
    widths = (_COLUMNS.search(i.opcode) for i in body if i.reads_tensor)
    return sum(int(width[1]) for width in widths if width)


def matrices(body: Body) -> int:
    """Its matrix instructions."""
    return sum(i.is_matrix for i in body)


def warps_of(role: str, body: Body, shape: Shape) -> float:
    """The warps of a block that run a loop once for each tile.

    A loop that has the products of n tiles counts for 1 / n.
    """
    if role != "products":
        return WARPS.get(role, shape.softmax)
    blocks = 2 if any("2CTA" in i.opcode for i in body) else 1
    return WARPS[role] / blocks / (matrices(body) / shape.products)


def part_of(listing: Listing, shape: Shape, *, shared_bytes: int, tensor_columns: int) -> Part:
    """A kernel, taken apart."""
    one = {} if shape.roles else {"one loop": min(main_bodies(listing), key=len)}
    found = one or steady(listing, shape)
    ordered = {role: found[role] for role in ROLES if role in found}
    tile_scores = shape.tile[0] * shape.tile[1] / WARP
    return Part(
        tile=shape.tile,
        registers="/".join(str(registers_at(listing, body)) for body in ordered.values()),
        shared_bytes=shared_bytes,
        tensor_columns=tensor_columns,
        loops={role: len(body) for role, body in ordered.items()},
        per_score={
            role: len(body) * warps_of(role, body, shape) * shape.blocks / tile_scores
            for role, body in ordered.items()
        },
        mufu=sum(i.is_exp2 for i in found[next(iter(ordered))]) * shape.blocks / shape.scores,
        spills=duel.spills(ordered.values()),
        masked=masked(listing, shape) if shape.roles else 0,
    )


def registers_at(listing: Listing, body: Body) -> int:
    """Registers of a thread in a loop: what the handover before it left."""
    taken = duel.handed_over(listing)
    before = [address for address in taken if address < body[0].address]
    return taken[before[-1]] if before else listing.registers


def our_part(spec: AttentionSpec, config: KernelConfig, folder: Path) -> Part:
    """A kernel of ours, compiled for sm_100."""
    built, listing = duel.our_code(spec, config, "sm_100", folder)
    roles = config.schedule == "blackwell"
    shape = Shape(
        tile=(config.br, config.bc),
        softmax=config.num_warps,
        products=products_of(spec, config) if roles else 0,
        blocks=SCHEDULES[config.schedule].blocks_of_a_tile(spec) if roles else 1,
        roles=roles,
    )
    memory = {"shared_bytes": built.shared_bytes, "tensor_columns": built.tensor_columns}
    return part_of(listing, shape, **memory)


def products_of(spec: AttentionSpec, config: KernelConfig) -> int:
    """Matrix instructions of schedule blackwell for a tile: each is of 128 rows of a result, or
    keys, and adds up 16 columns of Q, V or dO, or 16 keys, or rows.
    """
    depth = {
        "forward": spec.head_dim + config.bc,  # S, O
        "backward_dkv": spec.head_dim + spec.head_dim_v + 2 * config.br,  # S, dP, dV, dK
        "backward_dq": spec.head_dim + spec.head_dim_v + config.bc,  # S, dP, dQ
        "backward_fused": spec.head_dim + spec.head_dim_v + 2 * config.br + config.bc,
    }[spec.direction]
    return max(config.br // TENSOR_ROWS, 1) * depth // 16


def figures(parts: Sequence[Part]) -> Row:
    """The counts of a row, as above; loops as in the page."""
    names = [role for role in ROLES if any(role in part.loops for part in parts)]
    return {
        "tensor_columns": max(part.tensor_columns for part in parts),
        "loops": {
            role: " + ".join(str(part.loops[role]) for part in parts if role in part.loops)
            for role in names
        },
        "per_score": {role: sum(part.per_score.get(role, 0.0) for part in parts) for role in names},
        "all": sum(sum(part.per_score.values()) for part in parts),
        "mufu": sum(part.mufu for part in parts),
        "spills": sum(part.spills for part in parts),
        "masked": max(part.masked for part in parts),
    }


def fused(cell: Cell) -> Kernels:
    """The fused backward of schedule blackwell that a search tries first; [] where it has none."""
    direction, *sizes = cell
    spec = duel.spec_of("backward_fused", *sizes)  # type: ignore[arg-type]  # head dim and mask
    tried = legal_configs(spec, B200, on_gpu=True) if direction == "backward" else ()
    return [(spec, config) for config in tried if config.schedule == "blackwell"][:1]


def ours(cell: Cell, folder: Path) -> Iterator[Row]:
    """Our rows of a cell."""
    for name, kernels, ships in [*duel.served(cell, B200), (FUSED, fused(cell), False)]:
        parts = [our_part(spec, config, folder) for spec, config in kernels]
        if parts:
            whose = f"flashgen, {name}"
            yield row_of(cell, whose, parts, figures(parts), kernels=kernels, ships=ships)


def cells(row: Row, rows: Sequence[Row]) -> dict[str, object]:
    """A row in columns: loops of each role that one of these rows has, then the same a score."""
    names = [role for role in ROLES if any(role in each["loops"] for each in rows)]
    a_score = {
        f"{role}, a score": f"{row['per_score'][role]:.2f}" if role in row["per_score"] else ""
        for role in names
        if role != "one loop"
    }
    return {
        "shared": row["shared_bytes"],
        "tensor": row["tensor_columns"],
        **{role: row["loops"].get(role, "") for role in names},
        "masked": row["masked"] or "",
        **a_score,
        "all, a score": f"{row['all']:.2f}",
        "mufu": f"{row['mufu']:.2f}",
        "spills": row["spills"],
    }


DUEL = duel.Duel(
    title="Machine code for sm_100 beside FlashAttention-4's",
    result=duel.RESULTS / "machine_code_sm100", gpu=B200, ours=ours, cells=cells, figure="all",
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(duel.main(DUEL, __doc__, sys.argv[1:]))
