"""Machine code for Hopper beside FlashAttention-3's own binaries. CPU only; runs no kernel.

    python benchmarks/machine_code.py             fetch, compile, write results/machine_code.*
    python benchmarks/machine_code.py --check     whether these results name what ships

FlashAttention-3's kernels come from wheels (peer_kernels.py). Ours are compiled here for sm_90:
those that the H100's table serves at the greatest lengths, its entries ("plain") and its list
`executed`, and of decode the defaults. All figures are of the steady main loop in bfloat16:

    ships           yes: the table serves it under this Triton
    a score         instructions of a thread for one score (one element of Q K^T); decode:
                    instructions of all warps for a KiB of K and V
    fp32 to moves   the same by pipe: additions and multiplications, MUFU, ALU without moves; moves
    shuffles, barriers    instructions of a tile and warp
    flop            of the matrix pipe, an instruction of a warp
    under           share of exp2 that is issued while a wgmma of the same warpgroup runs

The shared memory of a peer is read off the addresses of its mbarriers, and so a little less than
all of it. A cell is a direction, a head dim and a mask. It holds where one of our kernels without
spills takes no more instructions a score than the peer's; for decode, at most MOST_OF_DECODE times
as many. The last line counts them, and those that hold by what ships.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

import triton
from peer_kernels import DECODE, KERNELS, PEERS, PeerKernel, listing_of

from flashgen import paths
from flashgen.compile.compiler import Compiled, cache_file, compile_kernel
from flashgen.compile.loops import Body, facts, main_bodies
from flashgen.compile.sass import Listing, disassemble
from flashgen.estimate.loop_program import ALU, EXP2, PIPE_OF
from flashgen.files import write_whole
from flashgen.kernels.render import render
from flashgen.schedules.config import KernelConfig
from flashgen.schedules.defaults import default_configs
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.gpu import TARGETS, Gpu
from flashgen.spec.problem import BUCKETS
from flashgen.spec.vocabulary import Direction, Mask
from flashgen.table.table import load

H100 = TARGETS["nvidia_h100_80gb_hbm3"]
RESULT = ROOT / "benchmarks" / "results" / "machine_code"
FOLDER = ROOT / ".peers"
MOST_OF_DECODE = 1.2


@dataclass(frozen=True, kw_only=True)
class Row:
    """The steady loop of one kernel, or of the two that make a backward; counts as above.

    configs: the labels of our kernels.
    """

    direction: str
    head_dim: int
    mask: str
    whose: str
    tile: str
    registers: str
    shared_bytes: int
    instructions: int
    per_score: float
    fp32: float
    mufu: float
    alu: float
    moves: float
    shuffles: int
    barriers: int
    flop: float
    spills: int
    under: float | None
    configs: str = ""
    ships: bool = False

    @property
    def is_ours(self) -> bool:
        """Whether it is flashgen's."""
        return self.whose.startswith("flashgen")


@dataclass(frozen=True, kw_only=True)
class Part:
    """A kernel's steady loop."""

    listing: Listing
    body: Body
    tile: tuple[int, int]
    warps: int
    shared_bytes: int

    @property
    def scores(self) -> float:
        """Scores of a thread in a tile."""
        return self.tile[0] * self.tile[1] / (32 * self.warps)


def peer_part(kernel: PeerKernel, folder: Path) -> Part:
    """A peer's kernel, taken apart."""
    made_of, listing = listing_of(kernel, folder)
    return Part(
        listing=listing,
        body=min(main_bodies(listing), key=len),
        tile=(made_of.br, made_of.bc),
        warps=made_of.threads // 32,
        shared_bytes=last_mbarrier(listing),
    )


def last_mbarrier(listing: Listing) -> int:
    """Where the last mbarrier ends, whose addresses are in the code."""
    at = [i.operands for i in listing.instructions if i.base == "SYNCS"]
    offsets = [int(text.split("+0x")[1].split("]")[0], 16) for text in at if "+0x" in text]
    return max(offsets, default=0) + 8


def our_part(spec: AttentionSpec, config: KernelConfig, folder: Path) -> Part:
    """A kernel of ours, compiled for sm_90."""
    built, listing = our_code(spec, config, "sm_90", folder)
    return Part(
        listing=listing,
        body=min(main_bodies(listing), key=len),
        tile=(config.br, config.bc),
        warps=config.num_warps,
        shared_bytes=built.shared_bytes,
    )


def our_code(
    spec: AttentionSpec, config: KernelConfig, arch: str, folder: Path
) -> tuple[Compiled, Listing]:
    """A kernel of ours, compiled in `folder`."""
    built = compile_kernel(render(spec, config), spec, config, arch, cache=folder / "compiled")
    file = cache_file(built.digest, arch, built.triton, folder / "compiled", "cubin")
    return built, disassemble(file.read_bytes())


def row_of(
    parts: Sequence[Part], *, direction: str, head_dim: int, mask: str, whose: str, **more: Any
) -> Row:
    """The line of a kernel, or of kernels that together do a direction."""
    counted = [facts(part.body) for part in parts]

    def total(count: Any) -> float:
        return sum(count(part.body) / unit(part, direction, head_dim) for part in parts)

    under = [each.exp2_under_matrix for each in counted if each.exp2_under_matrix is not None]
    return Row(
        direction=direction,
        head_dim=head_dim,
        mask=mask,
        whose=whose,
        tile=" + ".join(f"{part.tile[0]}x{part.tile[1]}" for part in parts),
        registers=" + ".join(registers(part.listing) for part in parts),
        shared_bytes=max(part.shared_bytes for part in parts),
        instructions=sum(each.instructions for each in counted),
        per_score=total(len),
        fp32=total(lambda body: sum(i.base in ("FFMA", "FADD", "FMUL") for i in body)),
        mufu=total(lambda body: sum(PIPE_OF.get(i.base) == EXP2 for i in body)),
        alu=total(lambda body: sum(PIPE_OF.get(i.base) == ALU and i.base != "MOV" for i in body)),
        moves=total(lambda body: sum(is_move(i.opcode) for i in body)),
        shuffles=sum(i.base == "SHFL" for part in parts for i in part.body),
        barriers=sum(i.base == "BAR" for part in parts for i in part.body),
        flop=sum(i.matrix_flops for part in parts for i in part.body)
        / sum(each.instructions for each in counted),
        spills=sum(spills(main_bodies(part.listing)) for part in parts),
        under=min(under) if under else None,
        **more,
    )


def spills(bodies: Iterable[Body]) -> int:
    """Loads and stores of spilled registers in some loops."""
    return len({i.address for body in bodies for i in body if i.is_spill})


def is_move(opcode: str) -> bool:
    """Whether it only copies a register."""
    return opcode == "MOV" or opcode.startswith("IMAD.MOV")


def unit(part: Part, direction: str, head_dim: int) -> float:
    """What a loop's instructions are divided by: the scores of a thread, or, for decode, such that
    they become those of all warps for a KiB of K and V.
    """
    if direction == DECODE:
        return part.tile[1] * 2 * head_dim * 2 / 1024 / part.warps
    return part.scores


def registers(listing: Listing) -> str:
    """Of a thread; of the warps that multiply and of the others where they hand them over."""
    taken = sorted(
        {
            int(i.operands.rpartition("0x")[2], 16)
            for i in listing.instructions
            if i.base == "USETMAXREG" and "0x" in i.operands
        }
    )
    return f"{taken[-1]}/{taken[0]}" if taken else str(listing.registers)


Kernels = list[tuple[AttentionSpec, KernelConfig]]
"""What one line is about: a kernel, or the two that make a backward."""


def spec_of(direction: Direction, head_dim: int, mask: Mask) -> AttentionSpec:
    """What the kernels of a cell compute."""
    return AttentionSpec(
        direction=direction, dtype="bfloat16", head_dim=head_dim, head_dim_v=head_dim, mask=mask
    )


def parts_of(direction: str) -> tuple[Direction, ...]:
    """The kernels that do a direction of the comparison, all of them deterministic."""
    if direction == "backward":
        return "backward_dkv", "backward_dq"
    return (direction,)  # type: ignore[return-value]


def shipped(
    direction: str, head_dim: int, mask: Mask, triton_version: str = "", *, gpu: Gpu = H100
) -> Kernels:
    """What a GPU's table serves at the greatest lengths under a version of Triton, or without one;
    [] where it has no entry.
    """
    held, found = load(paths.shipped_table(gpu.slug)), []
    for each in parts_of(direction):
        spec = spec_of(each, head_dim, mask)
        stands = held.executed_for(spec, BUCKETS[-1])
        entry = held.find(spec, BUCKETS[-1])
        if stands is not None and stands.serves_under(triton_version):
            entry = stands
        if entry is None:
            return []
        found.append((spec, entry.config))
    return found


def ours(
    direction: str, head_dim: int, mask: Mask, *, gpu: Gpu = H100
) -> list[tuple[str, Kernels, bool]]:
    """What a GPU's table has for a cell, named, each with whether this Triton's calls are served by
    it: its entries, and what its list `executed` has in their place.
    """
    cell = direction, head_dim, mask
    entries, here = shipped(*cell, gpu=gpu), shipped(*cell, triton.__version__, gpu=gpu)
    found = [("plain", entries, entries == here)]
    if here != entries:
        found.append((here[0][1].schedule, here, True))
    return [each for each in found if each[1]]


def compare(kernel: PeerKernel, folder: Path) -> list[Row]:
    """The lines of a cell, the peer's first."""
    cell: dict[str, Any] = {"direction": kernel.direction, "head_dim": kernel.head_dim}
    cell["mask"] = kernel.mask
    rows = [row_of([peer_part(kernel, folder)], whose=kernel.peer.label, **cell)]
    found = ours(**cell)
    if kernel.direction == DECODE:
        decode = spec_of(DECODE, kernel.head_dim, kernel.mask)
        tried = [[(decode, config)] for config in default_configs(decode)]
        held = [kernels for _, kernels, _ in found]
        found += [(f"default, {e[0][1].br} rows", e, False) for e in tried if e not in held]
    for name, kernels, ships in found:
        parts = [our_part(spec, config, folder) for spec, config in kernels]
        more = {"configs": labels(kernels), "ships": ships}
        rows.append(row_of(parts, whose=f"flashgen, {name}", **cell, **more))
    return rows


def labels(kernels: Kernels) -> str:
    """The configs of a line, as tables write them."""
    return " + ".join(config.label for _, config in kernels)


def outdated(record: dict[str, Any], *, gpu: Gpu = H100) -> list[str]:
    """The cells of committed results that do not name what ships now, in one line each."""
    named: dict[tuple[str, int, Mask], str] = {}
    for row in record["rows"]:
        cell = row["direction"], row["head_dim"], row["mask"]
        named.setdefault(cell, "")
        if row["ships"]:
            named[cell] = row["configs"]
    return [
        f"{direction} d{head_dim} {mask}: {labels(now) or 'nothing'} ships, and the results name "
        f"{before or 'nothing'}"
        for (direction, head_dim, mask), before in named.items()
        for now in [shipped(direction, head_dim, mask, record["triton"], gpu=gpu)]
        if labels(now) != before
    ]


def shortfall(rows: Sequence[Row]) -> str | None:
    """Why a cell does not hold; None if it does. rows: the peer's, then ours."""
    peer, mine = rows[0], [row for row in rows[1:] if not row.spills]
    if not mine:
        return "no kernel of ours without spills"
    least = min(row.per_score for row in mine)
    if least <= peer.per_score * (MOST_OF_DECODE if peer.direction == DECODE else 1.0):
        return None
    return f"{least:.2f} beside {peer.per_score:.2f}"


def summary(cells: Sequence[Sequence[Row]]) -> str:
    """The last line."""
    short = [
        f"{rows[0].direction} d{rows[0].head_dim} {rows[0].mask} ({why})"
        for rows in cells
        if (why := shortfall(rows))
    ]
    shipped_alone = [[rows[0], *(row for row in rows[1:] if row.ships)] for rows in cells]
    ships = sum(shortfall(rows) is None for rows in shipped_alone)
    held = f"cells: {len(cells) - len(short)} of {len(cells)} hold, {ships} of them by what ships"
    return f"{held}; short: {'; '.join(short)}" if short else held


COLUMNS = (
    "head dim", "mask", "kernel", "ships", "tile", "registers", "shared", "instructions", "a score",
    "fp32", "mufu", "alu", "moves", "shuffles", "barriers", "flop", "spills", "under",
)  # fmt: skip


def table(rows: Sequence[Row]) -> list[str]:
    """One direction as Markdown."""
    decode = rows[0].direction == DECODE
    head = ["a KiB" if decode and name == "a score" else name for name in COLUMNS]
    cells = [
        (
            row.head_dim, row.mask, row.whose, "yes" if row.ships else "", row.tile, row.registers,
            f"{'' if row.is_ours else '~'}{row.shared_bytes}", row.instructions,
            f"{row.per_score:.2f}", f"{row.fp32:.2f}", f"{row.mufu:.2f}", f"{row.alu:.2f}",
            f"{row.moves:.2f}", row.shuffles, row.barriers, f"{row.flop:.0f}", row.spills,
            "-" if row.under is None else f"{row.under:.0%}",
        )
        for row in rows
    ]  # fmt: skip
    return in_columns(head, cells)


def in_columns(head: Sequence[str], cells: Iterable[Sequence[object]]) -> list[str]:
    """A table as Markdown."""
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    return lines + [f"| {' | '.join(map(str, row))} |" for row in cells]


def markdown(cells: Sequence[Sequence[Row]]) -> str:
    """The whole page."""
    head = [
        "# Machine code beside FlashAttention-3's",
        "",
        "Written by `benchmarks/machine_code.py`, which says what the columns mean.",
        "Compiled for an H100, run on nothing.",
        "",
        f"Ours: Triton {triton.__version__}. Wheels:",
        "",
        *(f"- {peer.label}, sha256 {peer.sha256}" for peer in PEERS),
    ]
    return page(head, [row for rows in cells for row in rows], table, summary(cells))


def page(head: Sequence[str], rows: Sequence[Any], table: Any, last: str) -> str:
    """A page with a table for each direction of the rows."""
    lines = [*head]
    for direction in dict.fromkeys(row.direction for row in rows):
        those = [row for row in rows if row.direction == direction]
        lines += ["", f"## {direction.capitalize()}", "", *table(those)]
    return "\n".join([*lines, "", last, ""])


def compared(asked: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """The record and the page of all cells."""
    cells = [compare(kernel, asked.folder) for kernel in KERNELS]
    rows = [asdict(row) for rows in cells for row in rows]
    return {"peers": [asdict(peer) for peer in PEERS], "rows": rows}, markdown(cells)


def command(
    doc: str, arguments: Sequence[str], compared: Any, result: Path, gpu: Gpu, **more: str
) -> int:
    """Compare, print and write, or check what is committed. more: options that `compared` reads,
    and what they do.
    """
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    for name, about in {"check": "compare the committed results", **more}.items():
        parser.add_argument(f"--{name.replace('_', '-')}", action="store_true", help=about)
    parser.add_argument("--folder", type=Path, default=FOLDER, help="of wheels and cubins")
    parser.add_argument("--out", type=Path, default=result)
    asked = parser.parse_args(arguments)
    if asked.check:
        old = outdated(json.loads(asked.out.with_suffix(".json").read_text()), gpu=gpu)
        print("\n".join([*old, "run this again"]) if old else "the results name what ships")
        return int(bool(old))
    record, text = compared(asked)
    print(text, end="")
    record = {"triton": triton.__version__, **record}
    write_whole(asked.out.with_suffix(".json"), json.dumps(record, indent=1) + "\n")
    write_whole(asked.out.with_suffix(".md"), text)
    return 0


if __name__ == "__main__":
    sys.exit(command(__doc__, sys.argv[1:], compared, RESULT, H100))
