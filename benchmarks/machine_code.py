"""Machine code for Hopper beside FlashAttention-3's own binaries. CPU only; runs no kernel.

    python benchmarks/machine_code.py            compile ours, write results/machine_code.*
    python benchmarks/machine_code.py --check    whether these results name what ships

FlashAttention-3's kernels are of the wheels that the results name. Ours are compiled for sm_90:
those that duel.py takes from the H100's table, and of decode the defaults. All figures are of the
steady main loop:

    ships           yes: the table serves it under this Triton
    a score         instructions of a thread for one score (one element of Q K^T); decode:
                    instructions of all warps for a KiB of K and V
    fp32 to moves   the same by pipe: additions and multiplications, MUFU, ALU without moves; moves
    shuffles, barriers    instructions of a tile and warp
    flop            of the matrix pipe, an instruction of a warp
    under           share of exp2 that is issued while a wgmma of the same warpgroup runs

The shared memory of a peer is read off the addresses of its mbarriers, and so a little less than
all of it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import duel
from benchmarks.duel import Cell, Kernels, Row, row_of
from flashgen.compile.loops import Body, facts, main_bodies
from flashgen.compile.sass import WARP, Instruction, Listing
from flashgen.estimate.instruction_row import ALU, EXP2, PIPE_OF
from flashgen.schedules.defaults import default_configs
from flashgen.spec.gpu import TARGETS

H100 = TARGETS["nvidia_h100_80gb_hbm3"]
DECODE = "decode"


@dataclass(frozen=True, kw_only=True)
class Part(duel.Part):
    """A kernel and its steady loop."""

    body: Body
    warps: int


def part_of(listing: Listing, *, tile: tuple[int, int], warps: int, shared_bytes: int) -> Part:
    """A kernel, taken apart."""
    bodies, taken = main_bodies(listing), sorted(duel.handed_over(listing).values())
    return Part(
        tile=tile,
        # Of the warps that multiply, and of the others where they hand theirs over.
        registers=f"{taken[-1]}/{taken[0]}" if taken else str(listing.registers),
        shared_bytes=shared_bytes,
        spills=duel.spills(bodies),
        body=min(bodies, key=len),
        warps=warps,
    )


def figures(parts: Sequence[Part], cell: Cell) -> Row:
    """The counts of a row, as above."""
    counted = [facts(part.body) for part in parts]
    instructions = sum(each.instructions for each in counted)
    under = [each.exp2_under_matrix for each in counted if each.exp2_under_matrix is not None]

    def total(count: Callable[[Body], int]) -> float:
        return sum(count(part.body) / unit(part, cell) for part in parts)

    every = [i for part in parts for i in part.body]
    return {
        "instructions": instructions,
        "per_score": total(len),
        "fp32": total(lambda body: sum(i.is_fp32 for i in body)),
        "mufu": total(lambda body: sum(PIPE_OF.get(i.base) == EXP2 for i in body)),
        "alu": total(
            lambda body: sum(PIPE_OF.get(i.base) == ALU and i.base != "MOV" for i in body)
        ),
        "moves": total(lambda body: sum(map(is_move, body))),
        "shuffles": sum(i.base == "SHFL" for i in every),
        "barriers": sum(i.base == "BAR" for i in every),
        "flop": sum(i.matrix_flops for i in every) / instructions,
        "spills": sum(part.spills for part in parts),
        "under": min(under) if under else None,
    }


def is_move(i: Instruction) -> bool:
    """Whether it only copies a register."""
    return i.opcode == "MOV" or i.opcode.startswith("IMAD.MOV")


def unit(part: Part, cell: Cell) -> float:
    """What a loop's instructions are divided by: the scores of a thread, or, for decode, such that
    they become those of all warps for a KiB of K and V.
    """
    direction, head_dim, _ = cell
    if direction == DECODE:
        return part.tile[1] * 2 * head_dim * 2 / 1024 / part.warps
    return part.tile[0] * part.tile[1] / (WARP * part.warps)


def ours(cell: Cell, folder: Path) -> Iterator[Row]:
    """Our rows of a cell."""
    found = duel.served(cell, H100)
    if cell[0] == DECODE:
        decode = duel.spec_of(*cell)  # type: ignore[arg-type]  # decode is a spec's direction
        held = [kernels for _, kernels, _ in found]
        tried: list[Kernels] = [[(decode, config)] for config in default_configs(decode)]
        found += [(f"default, {e[0][1].br} rows", e, False) for e in tried if e not in held]
    for name, kernels, ships in found:
        parts = []
        for spec, config in kernels:
            built, listing = duel.our_code(spec, config, "sm_90", folder)
            way = {"warps": config.num_warps, "shared_bytes": built.shared_bytes}
            parts.append(part_of(listing, tile=(config.br, config.bc), **way))
        counts = figures(parts, cell)
        yield row_of(cell, f"flashgen, {name}", parts, counts, kernels=kernels, ships=ships)


def cells(row: Row, _: Sequence[Row]) -> dict[str, object]:
    """A row in columns, as above."""
    return {
        "shared": f"{'' if row['configs'] else '~'}{row['shared_bytes']}",
        "instructions": row["instructions"],
        "a KiB" if row["direction"] == DECODE else "a score": f"{row['per_score']:.2f}",
        **{name: f"{row[name]:.2f}" for name in ("fp32", "mufu", "alu", "moves")},
        "shuffles": row["shuffles"],
        "barriers": row["barriers"],
        "flop": f"{row['flop']:.0f}",
        "spills": row["spills"],
        "under": "-" if row["under"] is None else f"{row['under']:.0%}",
    }


DUEL = duel.Duel(
    title="Machine code beside FlashAttention-3's", result=duel.RESULTS / "machine_code", gpu=H100,
    ours=ours, cells=cells, figure="per_score",
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(duel.main(DUEL, __doc__, sys.argv[1:]))
