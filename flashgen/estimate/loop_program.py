"""Loop bodies as the arrays that sm_clock.replay runs: one row per instruction, one per warp."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise
from operator import attrgetter
from typing import Any

from flashgen.compile.loops import Body, Role
from flashgen.compile.sass import WARP, Instruction, Listing
from flashgen.errors import NoEstimate
from flashgen.estimate.machines import SUB_PARTITIONS, ArchModel
from flashgen.estimate.mbarriers import PLACE_BYTES, BarrierAddress, address_of, families, place_of
from flashgen.estimate.register_ports import reads

# estimate/sm_clock.py repeats these numbers: numba's cache does not see changes in another file.
ALU, FMA, EXP2, MATRIX, SHARED, UNIFORM, CONTROL, HALF = range(8)

(
    PLAIN, BARRIER, BARRIER_ARRIVE, COMMIT, WAIT_COPIES, WARPGROUP_ARRIVE, WAIT_WGMMA, COPY, LOAD,
    WGMMA, BULK_STORE, EXPECT, TMA, AWAIT, ARRIVE,
) = range(15)  # fmt: skip

_OPCODES: dict[int, str] = {
    ALU: """
        IADD IADD3 LOP LOP3 ISETP FSETP DSETP FMNMX FMNMX3 SEL FSEL SHF LEA PRMT PLOP3 PSETP MOV
        VOTE VOTEU IABS IMNMX FLO POPC BMSK SGXT VIADD VIADDMNMX VIMNMX VIMNMX3 VABSDIFF P2R R2P
        CS2R F2FP I2FP FCHK MATCH REDUX
    """,
    FMA: "FFMA FMUL FADD IMAD FSWZADD",
    EXP2: "MUFU F2F I2F F2I FRND",
    HALF: "HFMA2 HADD2 HMUL2 HSETP2 HMNMX2",
    UNIFORM: """
        UIADD3 UIMAD USEL UISETP ULEA UMOV ULOP3 USHF UPLOP3 ULDC USGXT UPRMT UFLO UPOPC R2UR S2UR
        UP2UR UBMSK USETP UPSETP S2R
    """,
    CONTROL: """
        LDC LDCU BRA BAR DEPBAR LDGDEPBAR NOP EXIT WARPSYNC BSSY BSYNC WARPGROUP MEMBAR FENCE YIELD
        CALL RET ERRBAR CCTL BMOV BREAK SYNCS ELECT UCGABAR_ARV UCGABAR_WAIT ACQBULK PREEXIT
        NANOSLEEP JMP BRX UTMALDG UTMASTG UTMAREDG UTMACMDFLUSH UTMAPF UTMACCTL USETMAXREG
    """,
    MATRIX: "HMMA IMMA QMMA HGMMA IGMMA QGMMA",
    SHARED: "LDSM LDS STS STSM SHFL LDGSTS LDG LD LDL STL STG ST RED REDG ATOM ATOMG ATOMS",
}

PIPE_OF: dict[str, int] = {name: pipe for pipe, names in _OPCODES.items() for name in names.split()}
"""Which pipe an opcode occupies."""

MOST_UNKNOWN = 0.01
"""The share of a main loop's instructions that may be unknown; they are taken for integer ones."""

NO_BARRIER = 7

NAMED_BARRIERS = 16

MULTIPLY_WIDE_CYCLES = 4.0  # IMAD.WIDE writes two registers

NEVER_LAGS = 1 << 20

_LEFT_UNDER_WAY = re.compile(r"(?:gsb0|SB0),\s*0x([0-9a-f]+)")


@dataclass(slots=True)
class InstructionRow:
    """What sm_clock.replay needs of one instruction; the names are those of its arguments."""

    pipe: int
    occupies: float = 0.0
    latency: float = 0.0
    kind: int = PLAIN
    count: int = 0
    amount: float = 0.0
    shared: float = 0.0
    stall: int = 1
    writes: int = NO_BARRIER
    reads: int = NO_BARRIER
    waits: int = 0
    commits: int = 0
    even: int = 0
    odd: int = 0
    again_even: int = 0
    again_odd: int = 0


def unknown_share(body: Sequence[Instruction]) -> float:
    """The share of instructions whose opcode is not in PIPE_OF."""
    return sum(i.base not in PIPE_OF for i in body) / len(body)


MatrixCycles = Callable[[Instruction], float]
"""How long a warp's matrix instruction occupies its pipe, as machines.matrix_cycles has it."""


def row(
    i: Instruction, machine: ArchModel, matrix: MatrixCycles, *, spills_to_l2: bool
) -> InstructionRow:
    """One instruction by itself; link() adds what depends on others. Raises what `matrix` does."""
    pipe = MATRIX if i.is_matrix else PIPE_OF.get(i.base, ALU)
    made = InstructionRow(pipe=pipe)
    if i.control is not None:
        made.stall = max(1, i.control.stall)
        made.waits = sum(1 << barrier for barrier in i.control.waits)
        if i.predicate != "@!PT":
            write, read = i.control.sets_on_write, i.control.sets_on_read
            made.writes = NO_BARRIER if write is None else write
            made.reads = NO_BARRIER if read is None else read
    if i.predicate == "@!PT":  # never runs
        made.pipe = CONTROL
    elif pipe == MATRIX:
        _matrix(made, i, matrix)
    elif pipe == SHARED:
        _memory(made, i, machine, spills_to_l2=spills_to_l2)
    elif pipe == CONTROL:
        _control(made, i, machine)
    else:
        made.occupies, made.latency = _arithmetic(i, pipe, machine)
    return made


def _arithmetic(i: Instruction, pipe: int, machine: ArchModel) -> tuple[float, float]:
    """Cycles of the pipe, and further cycles until the result if a barrier signals it."""
    if pipe == EXP2:
        return machine.exp2, machine.exp2_late
    if pipe == HALF:
        return machine.half, 0.0
    if pipe == UNIFORM:
        return machine.uniform, machine.uniform_late
    if i.base == "IMAD":
        return (MULTIPLY_WIDE_CYCLES if ".WIDE" in i.opcode else machine.multiply), 0.0
    return (machine.fp32 if pipe == FMA else machine.integer), 0.0


def _matrix(made: InstructionRow, i: Instruction, matrix: MatrixCycles) -> None:
    """Matrix instructions: HMMA synchronous with its warp, wgmma of a warpgroup asynchronous."""
    made.occupies = matrix(i)
    if i.is_wgmma:
        made.kind = WGMMA
        made.shared = i.shared_bytes / 128
        made.commits = int("gsb0" in i.operands)


def _memory(
    made: InstructionRow, i: Instruction, machine: ArchModel, *, spills_to_l2: bool
) -> None:
    moved = (16 if ".128" in i.opcode else 8 if ".64" in i.opcode else 4) * WARP
    made.shared = (i.shared_bytes or moved) / machine.shared_bytes
    if i.base == "LDSM":
        made.latency = machine.matrix_load_late
    elif i.base == "LDS":
        made.latency = machine.shared_late
    elif i.base == "SHFL":
        made.shared, made.latency = machine.shuffle_cycles, machine.shuffle_late
    elif i.base == "LDGSTS":
        made.kind, made.amount, made.latency = COPY, moved, machine.copy_late
    elif i.base in ("RED", "REDG", "ATOM", "ATOMG"):
        # Done in L2, which reads and writes; nobody waits for a RED.
        made.kind, made.amount, made.latency = LOAD, 2 * moved, machine.load_late
    elif i.base in ("LDG", "LD"):
        made.kind, made.amount, made.latency = LOAD, moved, machine.load_late
    elif i.is_spill:
        loads = i.base == "LDL"
        made.latency = machine.stack_late if loads else machine.store_late
        if spills_to_l2:
            made.kind, made.amount = LOAD, moved
            made.latency = machine.stack_l2_late if loads else machine.store_late
    else:
        made.latency = machine.store_late


def _control(made: InstructionRow, i: Instruction, machine: ArchModel) -> None:
    allowed = _LEFT_UNDER_WAY.search(i.operands)
    if i.base == "BAR":
        made.kind = BARRIER_ARRIVE if ".ARV" in i.opcode else BARRIER
    elif i.base in ("LDGDEPBAR", "UTMACMDFLUSH"):
        made.kind = COMMIT
    elif i.base in ("UTMASTG", "UTMAREDG"):
        made.kind, made.latency = BULK_STORE, machine.tma_late
    elif i.base == "DEPBAR" and allowed:
        made.kind, made.count = WAIT_COPIES, int(allowed[1], 16)
    elif i.opcode == "WARPGROUP.ARRIVE":
        made.kind = WARPGROUP_ARRIVE
    elif i.opcode.startswith("WARPGROUP.DEPBAR"):
        made.kind, made.count = WAIT_WGMMA, int(allowed[1], 16) if allowed else 0
    elif i.base in ("MEMBAR", "FENCE"):
        made.latency = machine.fence_late
    elif i.is_bulk_load:
        made.kind, made.latency = TMA, machine.tma_late
    elif i.base == "SYNCS" and address_of(i) is not None:
        made.kind, made.latency = _of_mbarrier(i), machine.mbarrier_late


def _of_mbarrier(i: Instruction) -> int:
    """What an instruction that names an mbarrier does there."""
    if i.opcode.startswith("SYNCS.PHASECHK"):
        return AWAIT
    if _expects(i):
        return EXPECT
    return ARRIVE if i.opcode.startswith("SYNCS.ARRIVE") else PLAIN


def _expects(i: Instruction) -> bool:
    """Whether it announces the bytes of a load. With 0 bytes (RZ) it is a plain arrival."""
    return i.opcode == "SYNCS.ARRIVE.TRANS64" and not i.operands.endswith(", RZ")


def hmma_spacing(body: Sequence[Instruction]) -> float | None:
    """The least stall count between neighbouring HMMA of 16-bit operands that are independent:
    those that add to different registers, and of which the second waits for no earlier one. None
    if there are none.
    """
    stalls = [
        one.control.stall
        for number, (one, other) in enumerate(pairwise(body))
        if one.control
        and ".16816." in one.opcode
        and ".16816." in other.opcode
        and not _awaits_hmma(body[: number + 1], other)
    ]
    return min(stalls, default=None)


HMMA_LATE = 36
"""[assumed] Cycles after which ptxas waits for the result of no HMMA any more."""


def _awaits_hmma(before: Sequence[Instruction], other: Instruction) -> bool:
    """Whether an instruction reads what an HMMA shortly before it writes."""
    cycles = 0
    for one in reversed(before):
        cycles += one.control.stall if one.control else 0
        if ".16816." in one.opcode and one.operands.split(",")[0] in other.operands.split(", "):
            return True
        if cycles >= HMMA_LATE:
            break
    return False


@dataclass(kw_only=True)
class LoopProgram:
    """The bodies that run together on one SM, each by the warps of its role.

    arrivals: the number of warps that complete a phase, by family of mbarriers; 0 if TMA loads do.
    credit: warps that have already arrived, by named barrier.
    """

    rows: list[InstructionRow] = field(default_factory=list)
    start: list[int] = field(default_factory=list)
    end: list[int] = field(default_factory=list)
    warps: list[int] = field(default_factory=list)
    counts: list[bool] = field(default_factory=list)
    arrivals: list[int] = field(default_factory=list)
    credit: dict[int, int] = field(default_factory=dict)


def link(
    listing: Listing,
    roles: Sequence[Role],
    main: Sequence[Body],
    machine: ArchModel,
    matrix: MatrixCycles,
    *,
    num_warps: int,
    spills_to_l2: bool,
) -> LoopProgram:
    """The program of the main loops `main`, with the loops of the roles without main loops.

    Raises NoEstimate if the code does not show what its barriers are for.
    """
    made = LoopProgram()
    bodies: list[tuple[Role, Body]] = []
    for role in roles:
        body = next((body for body in role.loops if body in main), role.loops[-1])
        bodies.append((role, body))
        made.start.append(len(made.rows))
        rows = [row(i, machine, matrix, spills_to_l2=spills_to_l2) for i in body]
        register_reads(rows, body)
        made.rows += rows
        made.end.append(len(made.rows))
        made.warps.append(role.warps or num_warps)
        made.counts.append(body in main)
    _named_barriers(made, listing, bodies, num_warps)
    _mbarriers(made, listing, bodies)
    return made


def register_reads(rows: Sequence[InstructionRow], body: Body) -> None:
    """The registers read by each instruction that needs them at a fixed time.

    Memory instructions, exp2 and conversions wait in queues for free ports and are left out. So are
    uniform instructions, and wgmma, whose register reads are not documented.
    """
    pairs = [
        (each, i)
        for each, i in zip(rows, body, strict=True)
        if each.pipe in (ALU, FMA, HALF, MATRIX) and each.kind != WGMMA
    ]
    for (each, _), found in zip(pairs, reads([i for _, i in pairs]), strict=True):
        each.even, each.odd, each.again_even, each.again_odd = found


def _rows(made: LoopProgram, number: int) -> list[InstructionRow]:
    return made.rows[made.start[number] : made.end[number]]


def _named_barriers(
    made: LoopProgram, listing: Listing, bodies: Sequence[tuple[Role, Body]], num_warps: int
) -> None:
    """Which warps meet at the barriers of the block, and which have arrived before the loops
    start.
    """
    waited_at = {i.barrier_name for i in listing.instructions if i.opcode.startswith("BAR.SYNC")}
    for number, (role, body) in enumerate(bodies):
        for each, i in zip(_rows(made, number), body, strict=True):
            if each.kind not in (BARRIER, BARRIER_ARRIVE):
                continue
            if i.barrier_name is None:
                raise NoEstimate(f"instruction {i.address:#x} meets at a barrier not named in it")
            if each.kind == BARRIER_ARRIVE and i.barrier_name not in waited_at:
                each.kind = PLAIN
            each.amount = i.barrier_name
            threads = i.barrier_threads
            each.count = threads // WARP if threads else made.warps[number]
        # A trip of an earlier loop waits as often as it arrives.
        looped = {i.address for loop in role.loops for i in loop}
        for i in listing.instructions:
            before = role.start <= i.address < body[0].address and i.address not in looped
            if before and "BAR.ARV" in i.opcode and i.barrier_name is not None:
                made.credit[i.barrier_name] = (
                    made.credit.get(i.barrier_name, 0) + made.warps[number]
                )


def _mbarriers(made: LoopProgram, listing: Listing, bodies: Sequence[tuple[Role, Body]]) -> None:
    """Families of mbarriers: those of one ring, by the address of the first.

    The n-th wait of a ring is for its n-th phase, less those that were started before the loop. A
    role that loads waits for a free slot; at first the whole ring is free.
    """
    places = places_of_mbarriers(listing, [role for role, _ in bodies])
    first = rings(listing, [body for _, body in bodies], places)
    order = sorted(set(first.values()))
    made.arrivals = [0] * len(order)
    expected = [False] * len(order)
    for number, (_, body) in enumerate(bodies):
        family = None
        for each, i in zip(_rows(made, number), body, strict=True):
            if each.kind == TMA:
                if family is None:
                    raise NoEstimate(f"{i.address:#x} loads for no barrier that is seen")
                each.count = family
            elif each.kind in USING:
                each.count = order.index(first[i.address])
                if each.kind == EXPECT:
                    family = each.count
                    expected[family] = True
                elif each.kind == ARRIVE:
                    made.arrivals[each.count] += made.warps[number]
    _bulk_loads(made, listing, bodies)
    _lags(made, listing, bodies, order, expected, places)


USING = (EXPECT, AWAIT, ARRIVE)


def rings(
    listing: Listing, bodies: Sequence[Body], places: Mapping[int, BarrierAddress]
) -> dict[int, int]:
    """The first mbarrier of the ring that each instruction of these loops names, by address."""
    named: dict[int, tuple[BarrierAddress, bool]] = {}
    for body in bodies:
        loads = any(i.is_bulk_load for i in body)
        for i in body:
            kind = _of_mbarrier(i) if i.address in places else PLAIN
            if kind in USING:
                full = kind == EXPECT or (kind == AWAIT and not loads)
                named[i.address] = places[i.address], full
    return families(named, initialized(listing, places))


def initialized(listing: Listing, places: Mapping[int, BarrierAddress]) -> frozenset[int]:
    """The mbarriers of a kernel."""
    return frozenset(
        places[i.address].offset
        for i in listing.instructions
        if i.address in places and i.opcode.startswith("SYNCS.EXCH")
    )


def ring_sizes(bases: Sequence[int], initialized: frozenset[int]) -> dict[int, int]:
    """How many mbarriers each ring has, by its first. Other mbarriers may follow the last ring: it
    is taken to be no larger than the others.
    """
    ends = [*bases[1:], None] if bases else []
    gaps = [(end - base) // PLACE_BYTES for base, end in pairwise(bases)]
    most = min(gaps, default=RING_BYTES // PLACE_BYTES)
    found = {}
    for base, end in zip(bases, ends, strict=True):
        size = 0
        while base + size * PLACE_BYTES in initialized and base + size * PLACE_BYTES != end:
            size += 1
        found[base] = size if end is not None else min(size, most)
    return found


def places_of_mbarriers(listing: Listing, roles: Sequence[Role]) -> dict[int, BarrierAddress]:
    """The place that each instruction names which names an mbarrier, by its address."""
    found = {}
    for number, i in enumerate(listing.instructions):
        if i.base == "SYNCS" and address_of(i) is not None:
            start = max((role.start for role in roles if role.start <= i.address), default=0)
            found[i.address] = place_of(listing.instructions, number, start)
    return found


def _bulk_loads(made: LoopProgram, listing: Listing, bodies: Sequence[tuple[Role, Body]]) -> None:
    """Distributes the bytes that each phase expects among the loads that follow."""
    for number, (_, body) in enumerate(bodies):
        rows = _rows(made, number)
        begins = [n for n, each in enumerate(rows) if each.kind == EXPECT]
        for begin, end in pairwise([*begins, len(rows)]):
            loads = [each for each in rows[begin:end] if each.kind == TMA]
            share_load(listing, body[begin], loads)


def share_load(listing: Listing, expects: Instruction, loads: Sequence[InstructionRow]) -> None:
    """Distribute the bytes that an instruction expects among the loads of its phase."""
    place = bisect_left(listing.instructions, expects.address, key=lambda i: i.address)
    size = _immediate(listing.instructions, place, expects)
    for each in loads:
        each.amount = size / len(loads)
    if loads:
        loads[-1].commits = 1


def _immediate(code: Sequence[Instruction], place: int, i: Instruction) -> int:
    """The number in the register that instruction `i` names last, set by the nearest move above.

    Raises NoEstimate if there is no such move.
    """
    register = i.operands.rpartition(",")[2].strip()
    for n in range(place - 1, -1, -1):
        target, _, source = code[n].operands.partition(",")
        if target.strip() == register:
            match = re.search(r"0x([0-9a-f]+)\s*$", source)
            if match and "MOV" in code[n].opcode:
                return int(match[1], 16)
            break
    raise NoEstimate(f"it is not seen how many bytes the barrier at {i.address:#x} expects")


def _lags(
    made: LoopProgram,
    listing: Listing,
    bodies: Sequence[tuple[Role, Body]],
    order: Sequence[int],
    expected: Sequence[bool],
    places: Mapping[int, BarrierAddress],
) -> None:
    """The number of phases by which each wait lags behind."""
    sizes = ring_sizes(order, initialized(listing, places))
    in_loops = {i.address for _, body in bodies for i in body}
    for number, (role, body) in enumerate(bodies):
        rows = _rows(made, number)
        loads = any(each.kind == TMA for each in rows)
        for each in rows:
            if each.kind != AWAIT:
                continue
            base = order[each.count]
            above = [other for other in order if other > base]
            ring = range(base, above[0] if above else base + RING_BYTES)
            here = [
                i
                for i in listing.instructions
                if i.address in places
                and i.address not in in_loops
                and places[i.address].offset in ring
            ]
            if not expected[each.count] and not made.arrivals[each.count]:
                each.amount = NEVER_LAGS
            elif expected[each.count] and loads:
                # What was awaited before the loop is not under way any more.
                before = [_of_mbarrier(i) for i in here if _runs_before(i, body, role)]
                each.amount = before.count(EXPECT) - before.count(AWAIT)
            elif expected[each.count]:
                each.amount = 0
            elif loads:
                each.amount = sizes[base]
            else:
                arrives = [i for i in here if ".ARRIVE" in i.opcode and not _expects(i)]
                each.amount = sum(i.address < body[0].address for i in arrives)


RING_BYTES = 64


def _runs_before(i: Instruction, body: Body, role: Role) -> bool:
    """Whether an instruction stands between the role's loop before `body` and `body`."""
    ends = [loop[-1].address for loop in role.loops if loop[-1].address < body[0].address]
    return max(ends, default=-1) < i.address < body[0].address


ROW = [(each.name, {"int": "i8", "float": "f8"}[str(each.type)]) for each in fields(InstructionRow)]
"""The type of an instruction in cycles.replay, as numpy takes it."""

PLACE = [(name, "i8") for name in ("block", "sub", "group", "start", "end", "leads", "counts")]
"""That of a warp: its block, sub-partition and warpgroup (numbered over all blocks), the bounds of
its body, whether it leads its role (1 or 0), and whether its trips count."""


def arrays(made: LoopProgram, residents: int) -> tuple[Any, Any, Any, Any]:
    """The arguments of sm_clock.replay: code, places, arrivals and credit, for this number of
    blocks.
    """
    import numpy as np

    values = attrgetter(*(name for name, _ in ROW))
    code = np.array([values(each) for each in made.rows], ROW)
    credit = np.zeros(NAMED_BARRIERS, np.int64)
    for name, warps in made.credit.items():
        credit[name] = warps
    places = np.array(_places(made, residents), PLACE)
    return code, places, np.array(made.arrivals, np.int64), credit


def _places(made: LoopProgram, residents: int) -> list[tuple[int, ...]]:
    """A tuple of PLACE for each warp; the warps of a block go to the sub-partitions in turn."""
    found: list[tuple[int, ...]] = []
    slot = group = 0
    for block in range(residents):
        for start, end, warps, counts in zip(
            made.start, made.end, made.warps, made.counts, strict=True
        ):
            for n in range(warps):
                place = (block, (slot + n) % SUB_PARTITIONS, group + n // SUB_PARTITIONS)
                found.append((*place, start, end, int(n == 0), int(counts)))
            slot += warps
            group += -(-warps // SUB_PARTITIONS)
    return found
