"""The program of a kernel whose listing does not show its roles: the caller names them.

FlashAttention-3's kernels for Hopper have no jump table, hold the numbers of barriers in registers
and look at each mbarrier twice. All warpgroups that multiply run the same loop, in turns; one warp
loads, and in the backward one warp for each of them stores dQ.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from flashgen.compile.loops import Body
from flashgen.compile.sass import WARP, Instruction
from flashgen.errors import NoEstimate
from flashgen.estimate import loop_program
from flashgen.estimate.loop_program import NAMED_BARRIERS, MatrixCycles, Program, Row
from flashgen.estimate.machines import SUB_PARTITIONS, Machine

_THREADS = re.compile(r",\s*0x([0-9a-f]+)\s*$")


def program_of(
    body: Body,
    *,
    warpgroups: int,
    load_bytes: Sequence[int],
    ring: int,
    machine: Machine,
    matrix: MatrixCycles,
) -> Program:
    """A loop that `warpgroups` run and one warp feeds.

    load_bytes: those of each tile, in the order in which the loop waits for them. ring: how many of
    each are in shared memory at most. Raises NoEstimate if the loop waits for another number of
    tiles, or meets at more barriers than there are.
    """
    made = Program()
    code = tuple(_looked_at_once(body))
    full = [i for i in code if i.opcode.startswith("SYNCS.PHASECHK")]
    if len(full) != len(load_bytes):
        raise NoEstimate(f"its loop waits for {len(full)} tiles: {len(load_bytes)} are loaded")
    names = _Names(code, warpgroups)
    for number in range(warpgroups):
        rows = [loop_program.row(i, machine, matrix, spills_to_l2=False) for i in code]
        loop_program.register_reads(rows, code)
        _meet(rows, code, names, number)
        _number_tiles(rows, len(full))
        _add(made, rows, SUB_PARTITIONS, counts=True)
    _add(made, _loader(load_bytes, ring, machine), 1, counts=False)
    for number in range(names.storing):
        _add(made, _storer(names, number, machine), 1, counts=False)
    made.arrivals = [0] * len(full) + [SUB_PARTITIONS * warpgroups] * len(full)
    made.credit = names.credit
    return made


def _looked_at_once(body: Body) -> Iterator[Instruction]:
    """The loop without the second look at an mbarrier and the branch after it, which are passed
    over where the first look finds it complete.
    """
    before, skips = "", False
    for i in body:
        if i.opcode.startswith("SYNCS.PHASECHK"):
            skips, before = i.operands == before, i.operands
        if not skips:
            yield i
        elif i.base == "BRA":
            skips = False


class _Names:
    """Numbers for the barriers that the code names by registers.

    Where two warpgroups meet they take turns: each waits for its own barrier and arrives at that of
    the next. Where one meets a warp that stores, it waits for a free buffer and arrives when it
    is full.
    """

    def __init__(self, code: Sequence[Instruction], warpgroups: int) -> None:
        used = {i.barrier_name for i in code if i.base == "BAR"}
        left = iter(sorted(set(range(1, NAMED_BARRIERS)) - used))
        sizes = {threads_of(i) for i in code if i.base == "BAR" and i.barrier_name is None}
        turning, storing = 2 * SUB_PARTITIONS * WARP in sizes, (SUB_PARTITIONS + 1) * WARP in sizes
        self.storing = warpgroups if storing else 0
        try:
            self.turns = [next(left) for _ in range(warpgroups * turning)]
            self.free = [next(left) for _ in range(self.storing)]
            self.full = [next(left) for _ in range(self.storing)]
        except StopIteration:
            raise NoEstimate("its warps meet at more barriers than a block has") from None
        self.credit = dict.fromkeys(self.free, 1)
        if turning:
            self.credit[self.turns[0]] = SUB_PARTITIONS


def threads_of(i: Instruction) -> int:
    """How many threads meet at a barrier, whether a register names it or not; 0 if not said."""
    match = _THREADS.search(i.operands)
    return int(match[1], 16) if match else 0


def _meet(rows: Sequence[Row], code: Sequence[Instruction], names: _Names, number: int) -> None:
    for each, i in zip(rows, code, strict=True):
        if i.base != "BAR":
            continue
        each.count = threads_of(i) // WARP
        arrives = each.kind == loop_program.BARRIER_ARRIVE
        if i.barrier_name is not None:
            each.amount = i.barrier_name
        elif each.count == SUB_PARTITIONS + 1:
            each.amount = (names.full if arrives else names.free)[number]
        elif each.count == 2 * SUB_PARTITIONS:
            each.amount = names.turns[(number + arrives) % len(names.turns)]
        else:
            raise NoEstimate(f"{each.count} warps meet at {i.address:#x}, and who they are is open")


def _number_tiles(rows: Sequence[Row], tiles: int) -> None:
    """Its n-th wait is for the n-th tile, and its n-th arrival frees that."""
    awaited = freed = 0
    for each in rows:
        if each.kind == loop_program.AWAIT:
            each.count, awaited = awaited, awaited + 1
        elif each.kind in (loop_program.ARRIVE, loop_program.EXPECT):
            each.kind, each.count, freed = loop_program.ARRIVE, tiles + freed % tiles, freed + 1


def _loader(load_bytes: Sequence[int], ring: int, machine: Machine) -> list[Row]:
    plain = Row(pipe=loop_program.CONTROL)
    rows = []
    for number, size in enumerate(load_bytes):
        free = len(load_bytes) + number
        late = machine.mbarrier_late
        rows += [
            replace(
                plain, kind=loop_program.AWAIT, count=free, amount=ring, latency=late, writes=0
            ),
            replace(plain, kind=loop_program.EXPECT, count=number, waits=1),
            replace(
                plain,
                kind=loop_program.TMA,
                count=number,
                amount=size,
                latency=machine.tma_late,
                commits=1,
            ),
        ]
    return rows


def _storer(names: _Names, number: int, machine: Machine) -> list[Row]:
    """A warp that stores what a warpgroup has left in shared memory; the store itself is TMA's."""
    count = SUB_PARTITIONS + 1
    meet = Row(pipe=loop_program.CONTROL, kind=loop_program.BARRIER, count=count)
    return [
        replace(meet, amount=names.full[number], latency=machine.fence_late),
        replace(meet, kind=loop_program.BARRIER_ARRIVE, amount=names.free[number]),
    ]


def _add(made: Program, rows: list[Row], warps: int, *, counts: bool) -> None:
    made.start.append(len(made.rows))
    made.rows += rows
    made.end.append(len(made.rows))
    made.warps.append(warps)
    made.counts.append(counts)
