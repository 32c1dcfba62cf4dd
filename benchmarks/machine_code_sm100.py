"""Machine code for a B200 beside FlashAttention-4's. CPU only; runs no kernel.

    python benchmarks/machine_code_sm100.py                 fetch, compile, write results
    python benchmarks/machine_code_sm100.py --check         whether they name what ships now
    python benchmarks/machine_code_sm100.py --keep-peer     only ours anew: no download

pip fetches FlashAttention-4 into a folder that git ignores, and compile_fa4.py compiles it there.
Ours are the kernels that the B200's table serves, its entries ("plain") and its list `executed`,
and the fused backward of schedule blackwell, which no table has.
All figures are of the steady loops in bfloat16:

    registers, loops    of each role in the order of ROLES; a kernel without roles has one loop
    a score             instructions of all warps of a role, in warps of 32, for one element of
                        Q K^T; `all` adds the roles. A block's softmax warps and a tile are given in
                        SHAPES; correction has four warps, products and loads one each. Two blocks
                        that multiply together share one warp for products
    masked              the softmax loop of masked tiles, where it is another
    mufu                exp2 of MUFU a score; the others are computed by multiply-add
    tensor              columns of tensor memory
    spills              loads and stores of spilled registers in these loops

Correction of the forward is counted as if it rescaled O for every tile; both libraries skip that
where the maximum hardly moves. The reduction adds dQ in global memory. Roles without a loop of
their own and the kernels before and after a backward are left out.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

import triton

from benchmarks.machine_code import (
    Kernels,
    command,
    in_columns,
    labels,
    our_code,
    ours,
    page,
    spec_of,
    spills,
)
from benchmarks.peer_kernels import entry_points, installed, listing_in
from flashgen.compile.loops import Body, loops, main_bodies
from flashgen.compile.sass import WARP, Listing
from flashgen.errors import ToolchainError
from flashgen.schedules.base import TENSOR_ROWS
from flashgen.schedules.config import SCHEDULES, KernelConfig
from flashgen.schedules.space import legal_configs
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.gpu import TARGETS
from flashgen.spec.vocabulary import Mask

B200 = TARGETS["nvidia_b200"]
RESULT = ROOT / "benchmarks" / "results" / "machine_code_sm100"
PEER = "flash-attn-4==4.0.0b36"
PACKAGES = (
    PEER,
    "nvidia-cutlass-dsl==4.8.1",
    "nvidia-cutlass-dsl-libs-base==4.8.1",
    "nvidia-cutlass-dsl-libs-core==4.8.1",
    "nvidia-cutlass-dsl-libs-cu12==4.8.1",
    "quack-kernels==0.6.5",
    "apache-tvm-ffi==0.1.15.post2",
    "torch-c-dlpack-ext==0.1.5",
    "cuda-bindings==13.3.1",
    "cuda-pathfinder==1.9.1",
    "einops==0.8.2",
    "protobuf==7.36.2",
)
"""All that FlashAttention-4 imports besides torch, which is this environment's."""
COMPILE_SECONDS = 600

FUSED = "blackwell, fused"
ROLES = ("softmax", "correction", "reduction", "products", "loads", "one loop")
WARPS = {"correction": 4, "reduction": 4, "products": 1, "loads": 1}
CELLS: tuple[tuple[str, int, Mask], ...] = tuple(
    (direction, head_dim, mask)
    for direction in ("forward", "backward")
    for head_dim in (64, 128, 256)
    for mask in ("none", "causal")
)  # type: ignore[assignment]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What the machine code of a kernel with roles does not tell.

    name: a part of its name. tile: rows and keys of a block. softmax: its warps. products: matrix
    instructions for one tile, 0 where loops inside loops issue them. blocks: those that compute the
    scores of a tile; where they take different branches of a loop, each counts for the whole loop.
    """

    name: str = ""
    tile: tuple[int, int]
    softmax: int
    products: int = 0
    blocks: int = 1

    @property
    def scores(self) -> int:
        """Of a thread of the softmax warps."""
        return self.tile[0] * self.tile[1] // (WARP * self.softmax)


SHAPES = {
    ("forward", 64): (Shape(name="ForwardSm100", tile=(256, 128), softmax=8, products=24),),
    ("forward", 128): (Shape(name="ForwardSm100", tile=(256, 128), softmax=8, products=32),),
    ("forward", 256): (Shape(name="ForwardSm100", tile=(128, 128), softmax=4, products=24),),
    ("backward", 64): (Shape(name="BackwardSm100", tile=(128, 128), softmax=8, products=32),),
    ("backward", 128): (Shape(name="BackwardSm100", tile=(128, 128), softmax=8, products=40),),
    ("backward", 256): (
        Shape(name="dkdvkernel", tile=(64, 128), softmax=8, products=48),
        Shape(name="dqkernel", tile=(128, 128), softmax=4),
    ),
}
"""FlashAttention-4's, from flash_fwd_sm100.py, flash_bwd_sm100.py and sm100_hd256_*.py of its
package: the ids of a kernel's warps, and its tiles."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """A kernel: of each role the instructions of its loop and those a score."""

    tile: tuple[int, int]
    registers: str
    shared_bytes: int
    tensor_columns: int
    loops: dict[str, int]
    per_score: dict[str, float]
    mufu: float
    spills: int
    masked: int = 0


@dataclass(frozen=True, kw_only=True)
class Row:
    """A kernel, or the two that make a backward; loops are as in the page, counts as above."""

    direction: str
    head_dim: int
    mask: str
    whose: str
    tile: str
    registers: str
    shared_bytes: int
    tensor_columns: int
    loops: dict[str, str]
    per_score: dict[str, float]
    all: float
    mufu: float
    spills: int
    masked: int = 0
    configs: str = ""
    ships: bool = False


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
            "products": shape.products and matrices(body) >= shape.products,
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

    A loop that has the products n times counts for 1 / n, be they of n tiles, or copies of which
    one runs (FlashAttention-4 at head dim 256).
    """
    if role != "products":
        return WARPS.get(role, shape.softmax)
    blocks = 2 if any("2CTA" in i.opcode for i in body) else 1
    tiles = matrices(body) / shape.products if shape.products else 1
    return WARPS[role] / blocks / tiles


def part_of(listing: Listing, shape: Shape, *, shared_bytes: int, tensor_columns: int) -> Part:
    """A kernel with roles, taken apart."""
    found = steady(listing, shape)
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
        mufu=sum(i.is_exp2 for i in found["softmax"]) * shape.blocks / shape.scores,
        spills=spills(ordered.values()),
        masked=masked(listing, shape),
    )


def registers_at(listing: Listing, body: Body) -> int:
    """Registers of a thread in a loop: what the handover before it left."""
    before = [
        int(i.operands.rpartition("0x")[2], 16)
        for i in listing.instructions
        if i.base == "USETMAXREG" and "0x" in i.operands and i.address < body[0].address
    ]
    return before[-1] if before else listing.registers


def plain_part(
    listing: Listing, config: KernelConfig, *, shared_bytes: int, tensor_columns: int
) -> Part:
    """A kernel whose warps all do the same, taken apart."""
    body = min(main_bodies(listing), key=len)
    scores = config.br * config.bc / (WARP * config.num_warps)
    return Part(
        tile=(config.br, config.bc),
        registers=str(listing.registers),
        shared_bytes=shared_bytes,
        tensor_columns=tensor_columns,
        loops={"one loop": len(body)},
        per_score={"one loop": len(body) / scores},
        mufu=sum(i.is_exp2 for i in body) / scores,
        spills=spills([body]),
    )


def our_part(spec: AttentionSpec, config: KernelConfig, folder: Path) -> Part:
    """A kernel of ours, compiled for sm_100."""
    built, listing = our_code(spec, config, "sm_100", folder)
    memory = {"shared_bytes": built.shared_bytes, "tensor_columns": built.tensor_columns}
    if config.schedule != "blackwell":
        return plain_part(listing, config, **memory)
    shape = Shape(
        tile=(config.br, config.bc),
        softmax=config.num_warps,
        products=products_of(spec, config),
        blocks=SCHEDULES[config.schedule].blocks_of_a_tile(spec),
    )
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


def row_of(parts: Sequence[Part], cell: tuple[str, int, Mask], whose: str, **more: Any) -> Row:
    """The line of a kernel, or of kernels that together do a direction."""
    direction, head_dim, mask = cell
    names = [role for role in ROLES if any(role in part.loops for part in parts)]
    return Row(
        direction=direction,
        head_dim=head_dim,
        mask=mask,
        whose=whose,
        tile=" + ".join(f"{part.tile[0]}x{part.tile[1]}" for part in parts),
        registers=" + ".join(part.registers for part in parts),
        shared_bytes=max(part.shared_bytes for part in parts),
        tensor_columns=max(part.tensor_columns for part in parts),
        loops={
            role: " + ".join(str(part.loops[role]) for part in parts if role in part.loops)
            for role in names
        },
        per_score={role: sum(part.per_score.get(role, 0.0) for part in parts) for role in names},
        all=sum(sum(part.per_score.values()) for part in parts),
        mufu=sum(part.mufu for part in parts),
        spills=sum(part.spills for part in parts),
        masked=max(part.masked for part in parts),
        **more,
    )


def compiled(cell: tuple[str, int, Mask], folder: Path) -> Path:
    """The folder with the cubins and PTX of FlashAttention-4's kernels of a cell."""
    home = installed(folder / PEER.replace("==", "-"), PACKAGES)
    direction, head_dim, mask = cell
    out = home / "compiled" / f"{direction}_{head_dim}_{mask}"
    if (out / "shared.json").exists():
        return out
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    places = (home, home / "nvidia_cutlass_dsl" / "dsl_packages")
    script = ROOT / "benchmarks" / "compile_fa4.py"
    done = subprocess.run(
        [sys.executable, str(script), direction, str(head_dim), mask, str(out.resolve())],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(str(each.resolve()) for each in places)},
        capture_output=True,
        text=True,
        timeout=COMPILE_SECONDS,
        check=False,
    )
    if done.returncode != 0 or not (out / "shared.json").exists():
        raise ToolchainError(f"{PEER} did not compile {cell}: {done.stderr.strip()[-300:]}")
    return out


def peer_parts(cell: tuple[str, int, Mask], folder: Path) -> list[Part]:
    """FlashAttention-4's kernels of a cell, taken apart."""
    home = compiled(cell, folder)
    shared = max(json.loads((home / "shared.json").read_text()))
    columns = max(tensor_columns(file.read_text()) for file in home.glob("*.ptx"))
    kernels = [
        (file, name)
        for file in sorted(home.glob("*.cubin"))
        for name in entry_points(file.read_bytes())
    ]
    parts = []
    for shape in SHAPES[cell[:2]]:
        file, name = next(each for each in kernels if shape.name in each[1])
        listing = listing_in(file, name)
        parts.append(part_of(listing, shape, shared_bytes=shared, tensor_columns=columns))
    return parts


_ALLOC = re.compile(r"tcgen05\.alloc\.\S+\s+\[[^\]]*\],\s*(%?\w+);")


def tensor_columns(ptx: str) -> int:
    """The most columns of tensor memory that a kernel of a module allocates at once."""
    found = []
    for count in _ALLOC.findall(ptx):
        moved = re.search(rf"mov\.b32\s+{re.escape(count)},\s*(\d+);", ptx)
        found.append(int(moved[1] if moved else count))
    return max(found, default=0)


def fused(direction: str, head_dim: int, mask: Mask) -> Kernels:
    """The fused backward of schedule blackwell that a search tries first; [] where it has none."""
    spec = spec_of("backward_fused", head_dim, mask)
    tried = legal_configs(spec, B200, on_gpu=True) if direction == "backward" else ()
    return [(spec, config) for config in tried if config.schedule == "blackwell"][:1]


def kept_peers(record: dict[str, Any]) -> dict[tuple[str, int, Mask], Row]:
    """The peer's line of each cell of committed results."""
    rows = (Row(**each) for each in record["rows"] if not each["configs"])
    return {(row.direction, row.head_dim, row.mask): row for row in rows}  # type: ignore[misc]


def compare(cell: tuple[str, int, Mask], folder: Path, kept: Row | None = None) -> list[Row]:
    """The lines of a cell, the peer's first, which is `kept` or compiled."""
    rows = [kept or row_of(peer_parts(cell, folder), cell, "FlashAttention-4")]
    every = [*ours(*cell, gpu=B200), (FUSED, fused(*cell), False)]
    for name, kernels, ships in filter(lambda each: each[1], every):
        parts = [our_part(spec, config, folder) for spec, config in kernels]
        more = {"configs": labels(kernels), "ships": ships}
        rows.append(row_of(parts, cell, f"flashgen, {name}", **more))
    return rows


def table(rows: Sequence[Row]) -> list[str]:
    """One direction as Markdown: loops of each role, then the same a score."""
    names = [role for role in ROLES if any(role in row.loops for row in rows)]
    counted = [role for role in names if role != "one loop"]
    head = ["head dim", "mask", "kernel", "ships", "tile", "registers", "shared", "tensor"]
    head += [*names, "masked", *(f"{role}, a score" for role in counted)]
    head += ["all, a score", "mufu", "spills"]
    cells = [
        (
            row.head_dim, row.mask, row.whose, "yes" if row.ships else "", row.tile, row.registers,
            row.shared_bytes, row.tensor_columns, *(row.loops.get(role, "") for role in names),
            row.masked or "", *(_number(row.per_score.get(role)) for role in counted),
            f"{row.all:.2f}", f"{row.mufu:.2f}", row.spills,
        )
        for row in rows
    ]  # fmt: skip
    return in_columns(head, cells)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def markdown(rows: Sequence[Row], versions: str) -> str:
    """The whole page."""
    head = [
        "# Machine code for sm_100 beside FlashAttention-4's",
        "",
        "Written by `benchmarks/machine_code_sm100.py`, which says what the columns mean.",
        "Compiled, run on nothing.",
        "",
        f"Ours: Triton {versions}, sm_100. Theirs, sm_100a: {', '.join(PACKAGES[:2])}.",
    ]
    return page(head, rows, table, summary(rows))


def summary(rows: Sequence[Row]) -> str:
    """The last lines: in how many cells what ships takes no more instructions a score, and each
    cell's share of theirs.
    """
    peers = {(row.direction, row.head_dim, row.mask): row for row in rows if not row.configs}
    shares = {
        (row.direction, row.head_dim, row.mask): row.all
        / peers[row.direction, row.head_dim, row.mask].all
        for row in rows
        if row.ships
    }
    text = "\n".join(
        f"- {direction} d{head_dim} {mask}: {share:.2f}"
        for (direction, head_dim, mask), share in shares.items()
    )
    held = sum(share <= 1 for share in shares.values())
    return (
        f"What ships takes no more instructions a score in {held} of {len(peers)} cells. Ours over "
        f"theirs:\n\n{text}"
    )


def compared(asked: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """The record and the page of all cells."""
    peers: dict[tuple[str, int, Mask], Row] = {}
    if asked.keep_peer:
        peers = kept_peers(json.loads(asked.out.with_suffix(".json").read_text()))
    rows = [row for cell in CELLS for row in compare(cell, asked.folder, peers.get(cell))]
    record = {"packages": PACKAGES, "rows": [asdict(row) for row in rows]}
    return record, markdown(rows, triton.__version__)


if __name__ == "__main__":
    more = {"keep_peer": "take theirs of the results"}
    sys.exit(command(__doc__, sys.argv[1:], compared, RESULT, B200, **more))
