"""A whole block as a program for sm_clock.replay: each role from the kernel's entry to its end.

What a block costs beside the trips of its loops is in this code: it waits for Q, then for its first
keys, works on tiles with nothing to overlap them, and waits until O is written.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from flashgen.compile.loops import Body, Role
from flashgen.compile.sass import WARP, Instruction, Listing
from flashgen.errors import NoEstimate
from flashgen.estimate import instruction_row, loop_program
from flashgen.estimate.instruction_row import (
    ARRIVE,
    AWAIT,
    BARRIER,
    BARRIER_ARRIVE,
    EXPECT,
    PLAIN,
    TMA,
    InstructionRow,
    MatrixCycles,
)
from flashgen.estimate.loop_program import USING, LoopProgram
from flashgen.estimate.machines import ArchModel
from flashgen.estimate.mbarriers import PLACE_BYTES


def link_block(
    listing: Listing,
    walks: Sequence[tuple[Role, Body]],
    machine: ArchModel,
    matrix: MatrixCycles,
    *,
    num_warps: int,
    spills_to_l2: bool,
) -> LoopProgram:
    """The program of a block whose roles execute these instructions, once each.

    Raises NoEstimate if the code does not show what its barriers are for.
    """
    made = LoopProgram()
    row_of = {
        number: instruction_row.row(i, machine, matrix, spills_to_l2=spills_to_l2)
        for number, i in {id(i): i for _, code in walks for i in code}.items()
    }
    for role, code in walks:
        made.start.append(len(made.rows))
        rows = [replace(row_of[id(i)]) for i in code]  # each has its place in the order
        loop_program.register_reads(rows, code)
        made.rows += rows
        made.end.append(len(made.rows))
        made.warps.append(role.warps or num_warps)
        made.counts.append(True)
    _named_barriers(made, walks)
    _mbarriers(made, listing, walks)
    return made


def _rows(made: LoopProgram, number: int) -> list[InstructionRow]:
    return made.rows[made.start[number] : made.end[number]]


def _named_barriers(made: LoopProgram, walks: Sequence[tuple[Role, Body]]) -> None:
    """How many warps meet at each barrier. Where all of the block meet, roles that do nothing come
    too: what one role passes more often than another is a meeting with those.
    """
    passes = [
        Counter(i.barrier_name for i in code if i.base == "BAR" and not i.barrier_threads)
        for _, code in walks
    ]
    for number, (_, code) in enumerate(walks):
        passed: Counter[int | None] = Counter()
        for each, i in zip(_rows(made, number), code, strict=True):
            if each.kind not in (BARRIER, BARRIER_ARRIVE):
                continue
            name, threads = i.barrier_name, i.barrier_threads
            if name is None:
                raise NoEstimate(f"instruction {i.address:#x} meets at a barrier not named in it")
            each.amount = name
            each.count = threads // WARP if threads else sum(made.warps)
            passed[name] += not threads
            if passed[name] > min(counts[name] for counts in passes):
                each.kind = PLAIN


def _mbarriers(made: LoopProgram, listing: Listing, walks: Sequence[tuple[Role, Body]]) -> None:
    """The n-th wait of a warp at a ring of mbarriers is for its n-th phase. A role that loads waits
    for free places, all of which are free at first.
    """
    rings = _Rings(listing, [role for role, _ in walks])
    order: dict[int, int] = {}
    filled: set[int] = set()
    arrivals: Counter[int] = Counter()
    for number, (_, code) in enumerate(walks):
        arrived: set[int] = set()
        begun: list[tuple[Instruction, list[InstructionRow]]] = []
        for each, i in zip(_rows(made, number), code, strict=True):
            if each.kind in USING:
                each.count = order.setdefault(rings.first(i), len(order))
            if each.kind == EXPECT:
                filled.add(each.count)
                begun.append((i, []))
            elif each.kind == ARRIVE:
                arrived.add(each.count)
            elif each.kind == TMA:
                if not begun:
                    raise NoEstimate(f"{i.address:#x} loads for no barrier that is seen")
                each.count = order[rings.first(begun[-1][0])]
                begun[-1][1].append(each)
        for i, loads in begun:
            loop_program.share_load(listing, i, loads)
        arrivals.update(dict.fromkeys(arrived, made.warps[number]))
    made.arrivals = [arrivals[number] for number in range(len(order))]
    sizes = {number: rings.size(first) for first, number in order.items()}
    for each in made.rows:
        if each.kind != AWAIT or each.count in filled:
            continue
        each.amount = sizes[each.count] if each.count in arrivals else loop_program.NEVER_LAGS


class _Rings:
    """The rings of mbarriers of a kernel: those that its loops walk, and single ones."""

    def __init__(self, listing: Listing, roles: Sequence[Role]) -> None:
        self._places = loop_program.places_of_mbarriers(listing, roles)
        bodies = [body for role in roles for body in role.loops]
        self._walked = loop_program.rings(listing, bodies, self._places)
        self._sizes = loop_program.ring_sizes(
            sorted(set(self._walked.values())),
            loop_program.initialized(listing, self._places),
        )

    def first(self, i: Instruction) -> int:
        """The first mbarrier of the ring that an instruction names."""
        offset = self._places[i.address].offset
        around = (
            base for base, size in self._sizes.items() if 0 <= offset - base < size * PLACE_BYTES
        )
        return self._walked.get(i.address, next(around, offset))

    def size(self, first: int) -> int:
        """How many mbarriers a ring has."""
        return max(self._sizes.get(first, 1), 1)
