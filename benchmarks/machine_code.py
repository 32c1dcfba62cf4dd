"""Machine code for Hopper beside FlashAttention-3's own binaries. CPU only; runs no kernel.

    make duel                            fetch the wheels, compile, write results/machine_code.*
    python benchmarks/machine_code.py --draw                   draw the committed results again
    python benchmarks/machine_code.py --direction forward --head-dim 128      print this part
    python benchmarks/machine_code.py --json                   print the JSON, and write nothing
    python benchmarks/machine_code.py --check      whether the committed results name what ships now

FlashAttention-3's kernels come from wheels (peer_kernels.py), ours are compiled here for sm_90:
those that ship for the H100, and schedule hopper's. All figures are of the steady main loop in
bfloat16:

    ships           yes: the H100's table serves it at the greatest lengths under this Triton, from
                    its list `executed` or its entries

    a score         instructions of a thread for one score (one element of Q K^T); decode:
                    instructions of all warps for a KiB of K and V
    fp32 to moves   the same by pipe: additions and multiplications, MUFU, ALU without moves; moves
    shuffles, barriers    instructions of a tile and warp
    flop            of the matrix pipe, an instruction of a warp
    under           share of exp2 that is issued while a wgmma of the same warpgroup runs
    over ideal      cycles of the replay over those in which the matrix pipe does the necessary
                    products (2 forward, 5 backward); the mean of DRAWS machines whose latencies and
                    bandwidth are up to 30 % off

The replay takes the peers' roles from the caller (benchmarks/given_roles.py). The shared
memory of a peer is read off the addresses of its mbarriers, and so a little less than all of it.

A cell is a direction, a head dim and a mask. It holds where one of our kernels without spills takes
no more instructions a score than the peer's, and not more than NOISE above its cycles over ideal;
for decode, at most MOST_OF_DECODE times its instructions. The last line counts them, and those
that hold by what ships.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
import math
import random
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

import triton
from peer_kernels import DECODE, KERNELS, PEERS, PeerKernel, TemplateArguments, listing_of

from benchmarks.given_roles import program_of
from benchmarks.svg_file import standalone
from flashgen import paths
from flashgen.compile.compiler import cache_file, compile_kernel
from flashgen.compile.loops import Body, facts, main_bodies, roles
from flashgen.compile.sass import Listing, disassemble
from flashgen.errors import NoEstimate
from flashgen.estimate.estimate import time_of
from flashgen.estimate.loop_program import ALU, EXP2, PIPE_OF, Program, link
from flashgen.estimate.machines import MACHINES, Machine, matrix_cycles
from flashgen.estimate.sm import Replay, Scoreboard, steady_cycles
from flashgen.files import write_whole
from flashgen.kernels.render import render
from flashgen.report import charts
from flashgen.report.charts import Chart, Limit, Line, Scale
from flashgen.schedules.config import KernelConfig
from flashgen.schedules.defaults import default_configs
from flashgen.schedules.legality import why_illegal
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.gpu import TARGETS, Gpu
from flashgen.spec.problem import BUCKETS
from flashgen.spec.vocabulary import Direction, Mask
from flashgen.table.table import load

H100 = TARGETS["nvidia_h100_80gb_hbm3"]
SM90 = MACHINES["sm_90"]
RESULT = ROOT / "benchmarks" / "results" / "machine_code"
FOLDER = ROOT / ".peers"
WARPGROUP = 128
FLOPS_A_CYCLE = 4096
"""Of an SM's matrix pipe in 16 bits."""
PRODUCTS = {"forward": 2, "backward": 5}
RING = 2
"""Tiles of K or V that FlashAttention-3 keeps in shared memory."""
DRAWS, OFF = 8, 0.3
PLAIN = "flashgen, plain"
"""A row's `whose` of the kernels that the H100's table names."""
NOISE = 0.02
MOST_OF_DECODE = 1.2

HOPPER_TILES = {64: ((192, 128), (128, 128)), 128: ((128, 128),), 256: ((128, 64),)}
"""br and bc of the forward of schedule hopper, by head dim."""
HOPPER_FUSED = {
    64: (((64, 128), False), ((128, 128), True)),
    128: (((64, 128), False), ((64, 128), True)),
    256: (((64, 64), False),),
}
HOPPER_PAIRS = {
    64: ((128, 128), (128, 128)),
    128: ((64, 128), (128, 128)),
    256: ((64, 64), (128, 64)),
}
"""The same of the backward in one kernel, each with next_s, and of those of dK and dV and of dQ."""

PUBLISHED = {
    (64, "none"): 497, (64, "causal"): 473, (128, "none"): 648, (128, "causal"): 616,
    (256, "none"): 756, (256, "causal"): 642,
}  # fmt: skip
"""TFLOP/s of FlashAttention-3's forward on an H100 SXM, 16k keys, a model width of 2048: Shah et
al., arXiv 2407.08608, and the plots in the repository of flash-attention."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """The steady loop of one kernel, or of the two that make a backward; counts as above.

    configs: the labels of our kernels. cycles: over ideal; None with the reason in `note`.
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
    cycles: float | None
    note: str = ""
    configs: str = ""
    ships: bool = False

    @property
    def is_ours(self) -> bool:
        """Whether it is flashgen's."""
        return self.whose.startswith("flashgen")


@dataclass(frozen=True, kw_only=True)
class Part:
    """A kernel's steady loop, and its programs on drawn machines.

    scores: of a thread and tile. cycles: those of a tile on each drawn machine; () with a note.
    """

    listing: Listing
    body: Body
    tile: tuple[int, int]
    warps: int
    shared_bytes: int
    cycles: tuple[float, ...]
    note: str = ""

    @property
    def scores(self) -> float:
        """Scores of a thread in a tile."""
        return self.tile[0] * self.tile[1] / (32 * self.warps)


def drawn(seed: int) -> Machine:
    """A machine of sm_90 with every latency, and the bandwidth of L2, up to 30 % off."""
    off = random.Random(seed)
    names = [each.name for each in fields(Machine) if each.name.endswith("_late")]
    return replace(
        SM90,
        **{
            name: getattr(SM90, name) * off.uniform(1 - OFF, 1 + OFF)
            for name in (*names, "l2_burst_bytes")
        },
    )


def peer_part(kernel: PeerKernel, folder: Path) -> tuple[Part, TemplateArguments]:
    """A peer's kernel, taken apart."""
    made_of, listing = listing_of(kernel, folder)
    body = min(main_bodies(listing), key=len)
    cycles, note = (), ""
    if kernel.direction in PRODUCTS:
        try:
            cycles = tuple(peer_cycles(body, made_of, drawn(n)) for n in range(DRAWS))
        except NoEstimate as error:
            note = str(error)
    part = Part(
        listing=listing,
        body=body,
        tile=(made_of.br, made_of.bc),
        warps=made_of.threads // 32,
        shared_bytes=last_mbarrier(listing),
        cycles=cycles,
        note=note,
    )
    return part, made_of


def peer_cycles(body: Body, made_of: TemplateArguments, machine: Machine) -> float:
    """Cycles of a tile on one SM, which holds one block."""
    rows = made_of.br if made_of.backward else made_of.bc
    made = program_of(
        body,
        warpgroups=made_of.threads // WARPGROUP,
        load_bytes=(rows * made_of.head_dim * 2,) * 2,
        ring=RING,
        machine=machine,
        matrix=partial(matrix_cycles, machine, H100),
    )
    return steady_cycles(made, 1, machine)


def last_mbarrier(listing: Listing) -> int:
    """Where the last mbarrier ends, whose addresses are in the code."""
    at = [i.operands for i in listing.instructions if i.base == "SYNCS"]
    offsets = [int(text.split("+0x")[1].split("]")[0], 16) for text in at if "+0x" in text]
    return max(offsets, default=0) + 8


def our_part(spec: AttentionSpec, config: KernelConfig, folder: Path) -> Part:
    """A kernel of ours, compiled for sm_90."""
    built = compile_kernel(render(spec, config), spec, config, "sm_90", cache=folder)
    code = cache_file(built.digest, built.arch, built.triton, folder, "cubin").read_bytes()
    listing = disassemble(code)
    cycles, note = (), ""
    if spec.direction != DECODE:
        try:
            cycles = our_cycles(listing, config.block_warps(spec), built.shared_bytes)
        except NoEstimate as error:
            note = str(error)
    return Part(
        listing=listing,
        body=min(main_bodies(listing), key=len),
        tile=(config.br, config.bc),
        warps=config.num_warps,
        shared_bytes=built.shared_bytes,
        cycles=cycles,
        note=note,
    )


def our_cycles(listing: Listing, num_warps: int, shared_bytes: int) -> tuple[float, ...]:
    """Cycles of a tile on each drawn machine, while the SM holds as many blocks as fit.

    Raises NoEstimate.
    """
    board = Scoreboard(listing, H100, num_warps=num_warps, shared_bytes=shared_bytes)
    phase = min(board.phases, key=lambda loops: len(board.main[loops[0]]))

    def program(machine: Machine) -> Program:
        return link(
            listing,
            roles(listing, board.main),
            [board.main[number] for number in phase],
            machine,
            board.matrix,
            num_warps=board.num_warps,
            spills_to_l2=False,
        )

    machines = [drawn(number) for number in range(DRAWS)]
    return tuple(
        steady_cycles(program(machine), board.residents, machine) / board.residents
        for machine in machines
    )


def row_of(parts: Sequence[Part], *, direction: str, head_dim: int, mask: str, whose: str) -> Row:
    """The line of a kernel, or of kernels that together do a direction."""
    counted = [facts(part.body) for part in parts]

    def total(count: Any) -> float:
        return sum(count(part.body) / unit(part, direction, head_dim) for part in parts)

    under = [each.exp2_under_matrix for each in counted if each.exp2_under_matrix is not None]
    cycles = None
    if direction in PRODUCTS and all(part.cycles for part in parts):
        cycles = sum(
            statistics.mean(part.cycles) / ideal_cycles(part.tile, direction, head_dim)
            for part in parts
        )
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
        spills=sum(map(spills_in_loops, (part.listing for part in parts))),
        under=min(under) if under else None,
        cycles=cycles,
        note="; ".join(dict.fromkeys(part.note for part in parts if part.note)),
    )


def spills_in_loops(listing: Listing) -> int:
    """Loads and stores of spilled registers in the main loops."""
    found = {i for body in main_bodies(listing) for i in body if i.is_spill}
    return len({i.address for i in found})


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


def ideal_cycles(tile: tuple[int, int], direction: str, head_dim: int) -> float:
    """Cycles in which the matrix pipe does the necessary products of a tile."""
    return PRODUCTS[direction] * 2 * tile[0] * tile[1] * head_dim / FLOPS_A_CYCLE


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


def ours(direction: str, head_dim: int, mask: Mask) -> Iterator[tuple[str, Kernels]]:
    """Our kernels of a cell, named: the H100's `entries`, what its list `executed` has in their
    place, and schedule hopper's. Of decode also the defaults.
    """
    seen: list[Kernels] = []
    for name, kernels in _ours(direction, head_dim, mask):
        if kernels and kernels not in seen:
            seen.append(kernels)
            yield name, kernels


def _ours(direction: str, head_dim: int, mask: Mask) -> Iterator[tuple[str, Kernels]]:
    cell = direction, head_dim, mask
    if direction == DECODE:
        decode = spec_of(DECODE, head_dim, mask)
        yield "tuned", shipped(*cell)
        for config in default_configs(decode):
            yield f"default, {config.br} rows", [(decode, config)]
        return
    plain, here = shipped(*cell), shipped(*cell, triton.__version__)
    yield "plain", plain
    yield "hopper" if all(c.schedule == "hopper" for _, c in here) else "hopper and plain", here
    of = {each: spec_of(each, head_dim, mask) for each in (*parts_of(direction), "backward_fused")}
    wanted = parts_of(direction)
    if direction == "forward":
        for tile in HOPPER_TILES[head_dim]:
            order = "longest_first" if mask == "causal" else "plain"
            yield "hopper", [(of["forward"], hopper(tile, order=order))]
        return
    if head_dim in HOPPER_PAIRS:
        pair = zip(wanted, HOPPER_PAIRS[head_dim], strict=True)
        yield "hopper", [(of[each], hopper(tile)) for each, tile in pair]
    for tile, next_s in HOPPER_FUSED[head_dim]:
        name = "hopper, fused, next S" if next_s else "hopper, fused"
        yield name, [(of["backward_fused"], replace(hopper(tile), next_s=next_s))]


def hopper(tile: tuple[int, int], **more: Any) -> KernelConfig:
    """A config of schedule hopper with a ring of two places."""
    warps = tile[0] // 16 if more else 8
    return KernelConfig(
        br=tile[0],
        bc=tile[1],
        num_warps=warps,
        num_stages=2,
        schedule="hopper",
        loads="descriptor",
        **more,
    )


def compare(kernel: PeerKernel, folder: Path) -> list[Row]:
    """The lines of a cell, the peer's first."""
    cell = {"direction": kernel.direction, "head_dim": kernel.head_dim, "mask": kernel.mask}
    part, _ = peer_part(kernel, folder)
    rows = [row_of([part], whose=kernel.peer.label, **cell)]
    for name, pairs in ours(**cell):
        if any(why_illegal(spec, config, H100) for spec, config in pairs):
            continue
        parts = [our_part(spec, config, folder / "compiled") for spec, config in pairs]
        row = row_of(parts, whose=f"flashgen, {name}", **cell)
        ships = pairs == shipped(**cell, triton_version=triton.__version__)
        rows.append(replace(row, configs=labels(pairs), ships=ships))
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
    if peer.direction == DECODE:
        least = min(row.per_score for row in mine)
        if least <= MOST_OF_DECODE * peer.per_score:
            return None
        return f"{least:.1f} instructions a KiB, {least / peer.per_score:.2f} times the peer's"
    if any(_not_behind(row, peer) for row in mine):
        return None
    best = min(mine, key=lambda row: (row.per_score > peer.per_score, row.cycles or math.inf))
    return (
        f"{best.whose} {best.tile}: {best.per_score:.2f} a score and {_number(best.cycles)} over "
        f"ideal, beside {peer.per_score:.2f} and {_number(peer.cycles)}"
    )


def _not_behind(row: Row, peer: Row) -> bool:
    faster = peer.cycles is None or (row.cycles is not None and row.cycles <= peer.cycles + NOISE)
    return row.per_score <= peer.per_score and faster


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


def modelled_tflops(kernel: PeerKernel, folder: Path) -> float:
    """TFLOP/s of a peer's forward by the replay, for the shapes of PUBLISHED."""
    made_of, listing = listing_of(kernel, folder)
    bodies = sorted(main_bodies(listing), key=len)
    cycles = tuple(peer_cycles(body, made_of, SM90) for body in bodies)
    keys, heads = 16384, 2048 // made_of.head_dim
    blocks = []
    for start in range(0, keys, made_of.br):
        end = min(start + made_of.br, keys) if made_of.causal else keys
        tiles = math.ceil(end / made_of.bc)
        whole = start // made_of.bc if len(bodies) > 1 else tiles
        blocks.append((whole, tiles - whole)[: len(bodies)])
    tile_flops = 4 * made_of.br * made_of.bc * made_of.head_dim
    replayed = Replay(
        residents=1,
        phases=tuple((number,) for number in range(len(bodies))),
        cycles=(cycles,),
        far_cycles=(cycles,),
        lone_cycles=cycles,
        loaded_bytes=(0.0,) * len(bodies),
        usage=(),
        block_flops=(tile_flops,) * len(bodies),
        block_work=(float(tile_flops),) * len(bodies),
        least_cycles=(tile_flops / FLOPS_A_CYCLE,) * len(bodies),
        equal_parts=(1,) * len(bodies),
        outside=0,
        firm=False,
    )
    timing = time_of(replayed, blocks[::-1] * heads, H100)
    flops = 4 * keys * keys * 2048 / (2 if made_of.causal else 1)
    return flops / timing.median_us / 1e6


def published_lines(folder: Path) -> list[str]:
    """FlashAttention-3's published figures beside those of the replay of its own kernels."""
    lines = [
        "| head dim | mask | published TFLOP/s | replay | published over replay |",
        "|---|---|---|---|---|",
    ]
    for kernel in KERNELS:
        if kernel.direction == "forward":
            said, found = PUBLISHED[kernel.head_dim, kernel.mask], modelled_tflops(kernel, folder)
            cells = (kernel.head_dim, kernel.mask, said, f"{found:.0f}", f"{said / found:.2f}")
            lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines


COLUMNS = (
    "head dim", "mask", "kernel", "ships", "tile", "registers", "shared", "instructions", "a score",
    "fp32", "mufu", "alu", "moves", "shuffles", "barriers", "flop", "spills", "under", "over ideal",
)  # fmt: skip


def table(rows: Sequence[Row]) -> list[str]:
    """One direction as Markdown."""
    decode = rows[0].direction == DECODE
    head = ["a KiB" if decode and name == "a score" else name for name in COLUMNS]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for row in rows:
        shared = f"{'' if row.is_ours else '~'}{row.shared_bytes}"
        cells = [
            row.head_dim, row.mask, row.whose, "yes" if row.ships else "", row.tile, row.registers,
            shared, row.instructions,
            f"{row.per_score:.2f}", f"{row.fp32:.2f}", f"{row.mufu:.2f}", f"{row.alu:.2f}",
            f"{row.moves:.2f}", row.shuffles, row.barriers, f"{row.flop:.0f}", row.spills,
            "-" if row.under is None else f"{row.under:.0%}", _number(row.cycles),
        ]  # fmt: skip
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def markdown(cells: Sequence[Sequence[Row]], published: Sequence[str]) -> str:
    """The whole page."""
    lines = [
        "# Machine code beside FlashAttention-3's",
        "",
        "Written by `make duel`; benchmarks/machine_code.py says what the columns mean.",
        "Compiled and replayed for an H100, run on nothing.",
        "",
        f"Ours: Triton {triton.__version__}. Wheels:",
        "",
        *(f"- {peer.label}, sha256 {peer.sha256}" for peer in PEERS),
    ]
    for direction in dict.fromkeys(rows[0].direction for rows in cells):
        those = [row for rows in cells if rows[0].direction == direction for row in rows]
        lines += ["", f"## {direction.capitalize()}", "", *table(those)]
        notes = {f"- {row.whose}, {row.tile}: {row.note}" for row in those if row.note}
        lines += ["", *sorted(notes)] if notes else []
    if published:
        lines += ["", "## What the replay says of FlashAttention-3's published figures", ""]
        lines += published
    return "\n".join([*lines, "", summary(cells), ""])


def drawing(rows: Sequence[Row]) -> str:
    """The SVG file of the causal kernels: how busy each keeps the matrix units, over head dims."""
    made = [_chart(direction, rows) for direction in ("forward", "backward")]
    return standalone([charts.lines(chart) for chart in made])


def _chart(direction: str, rows: Sequence[Row]) -> Chart:
    those = [
        row
        for row in rows
        if (row.direction, row.mask, row.spills) == (direction, "causal", 0) and row.cycles
    ]
    kinds = {
        "FlashAttention-3": [row for row in those if not row.is_ours],
        "flashgen, plain": [row for row in those if row.whose == PLAIN],
        "flashgen, hopper": [row for row in those if row.is_ours and row.whose != PLAIN],
    }
    dims = sorted({row.head_dim for row in those})
    return Chart(
        title=f"{direction}, causal",
        caption="",
        x=Scale(name="head dim", at=tuple(map(float, dims))),
        y=Scale(name=f"{direction}, causal: matrix units busy, %, estimated", log=False, low=0.0),
        lines=tuple(
            Line(name=name, points=tuple((float(dim), _busiest(some, dim)) for dim in dims))
            for name, some in kinds.items()
        ),
        limits=(Limit(y=100.0, name="always busy"),),
    )


def _busiest(rows: Sequence[Row], head_dim: int) -> float:
    """Of the kernels of a head dim: the largest share of the matrix units' cycles, in percent."""
    return max(100 / row.cycles for row in rows if row.head_dim == head_dim and row.cycles)


def main(arguments: Sequence[str]) -> int:
    """Compare, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--direction", choices=("forward", "backward", DECODE))
    parser.add_argument("--head-dim", type=int)
    parser.add_argument("--draw", action="store_true", help="draw the committed results again")
    parser.add_argument("--json", action="store_true", help="print the JSON, and write nothing")
    parser.add_argument("--check", action="store_true", help="compare the committed results")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="of wheels and cubins")
    parser.add_argument("--out", type=Path, default=RESULT)
    asked = parser.parse_args(arguments)
    if asked.draw:
        rows = [
            Row(**each) for each in json.loads(asked.out.with_suffix(".json").read_text())["rows"]
        ]
        write_whole(asked.out.with_suffix(".svg"), drawing(rows))
        return 0
    if asked.check:
        old = outdated(json.loads(asked.out.with_suffix(".json").read_text()))
        print("\n".join([*old, "run make duel"]) if old else "the results name what ships")
        return int(bool(old))
    cells = [
        compare(kernel, asked.folder)
        for kernel in KERNELS
        if asked.direction in (None, kernel.direction) and asked.head_dim in (None, kernel.head_dim)
    ]
    if not cells:
        parser.error("no kernel of a peer has this direction and head dim")
    whole = len(cells) == len(KERNELS)
    record = {
        "triton": triton.__version__,
        "peers": [asdict(peer) for peer in PEERS],
        "rows": [asdict(row) for rows in cells for row in rows],
    }
    if asked.json:
        print(json.dumps(record, indent=1))
        return 0
    text = markdown(cells, published_lines(asked.folder) if whole else [])
    print(text, end="")
    if whole:
        write_whole(asked.out.with_suffix(".json"), json.dumps(record, indent=1) + "\n")
        write_whole(asked.out.with_suffix(".md"), text)
        write_whole(asked.out.with_suffix(".svg"), drawing([row for rows in cells for row in rows]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
