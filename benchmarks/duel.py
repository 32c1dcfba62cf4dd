"""Our machine code beside that of another library: what machine_code.py and machine_code_sm100.py
share.

A cell is a direction, a head dim and a mask, in bfloat16. Its rows are the peer's kernel, then
ours: those that the GPU's table serves at the greatest lengths, its entries ("plain") and its list
`executed`. A row of the JSON is a line of the page, with the same figures. The peers' rows are data
of the JSON: the programs that took those releases apart, peer_kernels.py and compile_fa4.py, are in
the history of this folder.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton

from flashgen import paths
from flashgen.compile.compiler import Compiled, cache_file, compile_kernel
from flashgen.compile.loops import Body
from flashgen.compile.sass import Listing, disassemble
from flashgen.files import temporary_folder, write_whole
from flashgen.kernels.render import render
from flashgen.schedules.config import KernelConfig
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.gpu import Gpu
from flashgen.spec.problem import BUCKETS
from flashgen.spec.vocabulary import Direction, Mask
from flashgen.table.table_file import load

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"

Cell = tuple[str, int, Mask]
Row = dict[str, Any]
Kernels = Sequence[tuple[AttentionSpec, KernelConfig]]
"""What a row is about: a kernel, or the two that make a backward."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """A kernel, taken apart. registers: of a thread, with a slash between the roles of warps."""

    tile: tuple[int, int]
    registers: str
    shared_bytes: int
    spills: int


@dataclass(frozen=True, kw_only=True)
class Duel:
    """A comparison on one GPU. title: of the page; result: the path of JSON and page, without a
    suffix; ours: makes our rows of a cell, in a folder for what is compiled; cells: what a row has
    after its registers, by column, among the rows of its direction; figure: instructions a score.
    """

    title: str
    result: Path
    gpu: Gpu
    ours: Callable[[Cell, Path], Iterable[Row]]
    cells: Callable[[Row, Sequence[Row]], Mapping[str, object]]
    figure: str


def by_cell(rows: Iterable[Row]) -> dict[Cell, list[Row]]:
    """The rows of each cell, the peer's first."""
    found: dict[Cell, list[Row]] = {}
    for row in rows:
        found.setdefault((row["direction"], row["head_dim"], row["mask"]), []).append(row)
    return found


def spec_of(direction: Direction, head_dim: int, mask: Mask) -> AttentionSpec:
    """What the kernels of a cell compute."""
    return AttentionSpec(
        direction=direction, dtype="bfloat16", head_dim=head_dim, head_dim_v=head_dim, mask=mask
    )


def shipped(cell: Cell, gpu: Gpu, triton_version: str = "") -> Kernels:
    """What a GPU's table serves at the greatest lengths under a version of Triton, or without one;
    [] where it has no entry. The kernels of a backward are the deterministic ones.
    """
    direction, *sizes = cell
    held, found = load(paths.shipped_table(gpu.slug)), []
    parts = ("backward_dkv", "backward_dq") if direction == "backward" else (direction,)
    for part in parts:
        spec = spec_of(part, *sizes)  # type: ignore[arg-type]  # a direction is one of a spec
        entry = held.serving(spec, BUCKETS[-1], triton_version)
        if entry is None:
            return []
        found.append((spec, entry.config))
    return found


def served(cell: Cell, gpu: Gpu) -> list[tuple[str, Kernels, bool]]:
    """What a GPU's table has for a cell, named, each with whether this Triton's calls are served by
    it: its entries, and what its list `executed` has in their place.
    """
    entries, here = shipped(cell, gpu), shipped(cell, gpu, triton.__version__)
    found = [("plain", entries, entries == here)]
    if here != entries:
        found.append((here[0][1].schedule, here, True))
    return [each for each in found if each[1]]


def labels(kernels: Kernels) -> str:
    """The configs of a row, as tables write them."""
    return " + ".join(config.label for _, config in kernels)


def our_code(
    spec: AttentionSpec, config: KernelConfig, arch: str, folder: Path
) -> tuple[Compiled, Listing]:
    """A kernel of ours, compiled in `folder`."""
    built = compile_kernel(render(spec, config), spec, config, arch, cache=folder)
    file = cache_file(built.digest, arch, built.triton, folder, "cubin")
    return built, disassemble(file.read_bytes())


def handed_over(listing: Listing) -> dict[int, int]:
    """The registers of a thread after each handover between warps, by its address."""
    return {
        i.address: int(i.operands.rpartition("0x")[2], 16)
        for i in listing.instructions
        if i.base == "USETMAXREG" and "0x" in i.operands
    }


def spills(bodies: Iterable[Body]) -> int:
    """Loads and stores of spilled registers in some loops."""
    return len({i.address for body in bodies for i in body if i.is_spill})


def row_of(
    cell: Cell,
    whose: str,
    parts: Sequence[Part],
    figures: Row,
    *,
    kernels: Kernels = (),
    ships: bool = False,
) -> Row:
    """The row of a kernel, or of kernels that together do a direction. figures: what a page has of
    its own; kernels: ours, none for a peer.
    """
    direction, head_dim, mask = cell
    return {
        "direction": direction, "head_dim": head_dim, "mask": mask, "whose": whose,
        "tile": " + ".join(f"{part.tile[0]}x{part.tile[1]}" for part in parts),
        "registers": " + ".join(part.registers for part in parts),
        "shared_bytes": max(part.shared_bytes for part in parts),
        **figures, "configs": labels(kernels), "ships": ships,
    }  # fmt: skip


def outdated(record: Row, gpu: Gpu) -> list[str]:
    """The cells of committed results that do not name what ships now, in one line each."""
    found = []
    for cell, rows in by_cell(record["rows"]).items():
        now = labels(shipped(cell, gpu, record["triton"]))
        before = next((row["configs"] for row in rows if row["ships"]), "")
        if now != before:
            direction, head_dim, mask = cell
            found.append(
                f"{direction} d{head_dim} {mask}: {now or 'nothing'} ships, and the results name "
                f"{before or 'nothing'}"
            )
    return found


def page(duel: Duel, record: Row) -> str:
    """A page with a table for each direction."""
    rows = record["rows"]
    lines = [
        f"# {duel.title}",
        "",
        f"Written by `benchmarks/{duel.result.name}.py`, which says what the columns mean.",
        "Compiled, run on nothing.",
        "",
        f"Ours: Triton {record['triton']}, {duel.gpu.arch}. Theirs:",
        "",
        *(f"- {peer}" for peer in record["peers"]),
    ]
    for direction in dict.fromkeys(row["direction"] for row in rows):
        those = [row for row in rows if row["direction"] == direction]
        shown = [
            {
                "head dim": row["head_dim"], "mask": row["mask"], "kernel": row["whose"],
                "ships": "yes" if row["ships"] else "", "tile": row["tile"],
                "registers": row["registers"], **duel.cells(row, those),
            }
            for row in those
        ]  # fmt: skip
        lines += ["", f"## {direction.capitalize()}", ""]
        lines += [f"| {' | '.join(shown[0])} |", "|---" * len(shown[0]) + "|"]
        lines += [f"| {' | '.join(map(str, each.values()))} |" for each in shown]
    return "\n".join([*lines, "", *summary(rows, duel.figure), ""])


def summary(rows: Sequence[Row], figure: str) -> Iterator[str]:
    """The last lines: in how many cells what ships takes no more instructions a score, and each
    cell's share of theirs.
    """
    shares = {
        cell: row[figure] / theirs[figure]
        for cell, (theirs, *mine) in by_cell(rows).items()
        for row in mine
        if row["ships"]
    }
    held = sum(share <= 1 for share in shares.values())
    yield f"What ships takes no more instructions a score in {held} of {len(shares)} cells."
    yield "Ours over theirs:"
    yield ""
    for (direction, head_dim, mask), share in shares.items():
        yield f"- {direction} d{head_dim} {mask}: {share:.2f}"


def main(duel: Duel, doc: str, arguments: Sequence[str]) -> int:
    """Compile ours, print and write, or check what is committed."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare the committed results")
    asked = parser.parse_args(arguments)
    json_file = duel.result.with_suffix(".json")
    held = json.loads(json_file.read_text())
    if asked.check:
        old = outdated(held, duel.gpu)
        print("\n".join([*old, "run this again"]) if old else "the results name what ships")
        return int(bool(old))
    rows = []
    with temporary_folder("duel") as folder:
        for cell, (theirs, *_) in by_cell(held["rows"]).items():
            rows += [theirs, *duel.ours(cell, folder)]
    record = held | {"triton": triton.__version__, "rows": rows}
    text = page(duel, record)
    print(text, end="")
    write_whole(json_file, json.dumps(record, indent=1) + "\n")
    write_whole(duel.result.with_suffix(".md"), text)
    return 0
