"""Instructions as the rows that cycles.replay runs: each as its opcode and the machine say."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from flashgen.facts import shape_of, shared_bytes
from flashgen.machine import Machine
from flashgen.sass import WARP, Instruction

# cycles.py has the same numbers, written out: numba's cache sees no change in another file.
ALU, FMA, EXP2, MATRIX, SHARED, UNIFORM, CONTROL, HALF = range(8)

(
    PLAIN, BARRIER, BARRIER_ARRIVE, COMMIT, WAIT_COPIES, WARPGROUP_ARRIVE, WAIT_WGMMA, COPY, LOAD,
    WGMMA, EXPECT, TMA, AWAIT, ARRIVE,
) = range(14)  # fmt: skip

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
    MATRIX: "HMMA IMMA HGMMA IGMMA QGMMA",
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

_ADDRESS = re.compile(r"\[\w+(?:\+URZ)?(?:\+0x([0-9a-f]+))?\]")

_LEFT_UNDER_WAY = re.compile(r"(?:gsb0|SB0),\s*0x([0-9a-f]+)")


@dataclass(slots=True)
class Row:
    """What cycles.replay knows of one instruction; the names are those of its arguments."""

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


def row(i: Instruction, machine: Machine, hmma: float, *, spills_to_l2: bool) -> Row:
    """One instruction, as far as it stands by itself; link() adds what needs the others.

    hmma: cycles of an HMMA of 16x8x16 in 16 bits.
    """
    pipe = PIPE_OF.get(i.base, ALU)
    made = Row(pipe=pipe)
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
        _matrix(made, i, hmma)
    elif pipe == SHARED:
        _memory(made, i, machine, spills_to_l2=spills_to_l2)
    elif pipe == CONTROL:
        _control(made, i, machine)
    else:
        made.occupies, made.latency = _arithmetic(i, pipe, machine)
    return made


def _arithmetic(i: Instruction, pipe: int, machine: Machine) -> tuple[float, float]:
    """Cycles of the pipe, and on top of them until the result where a barrier tells of it."""
    if pipe == EXP2:
        return machine.exp2, machine.exp2_late
    if pipe == HALF:
        return machine.half, 0.0
    if pipe == UNIFORM:
        return machine.uniform, machine.uniform_late
    if i.base == "IMAD":
        return (MULTIPLY_WIDE_CYCLES if ".WIDE" in i.opcode else machine.multiply), 0.0
    return (machine.fp32 if pipe == FMA else machine.integer), 0.0


def _matrix(made: Row, i: Instruction, hmma: float) -> None:
    """Matrix instructions: HMMA in step with its warp, wgmma of a warpgroup asynchronously."""
    rows, columns, depth = shape_of(i)
    if i.is_wgmma:
        made.kind = WGMMA
        made.occupies = columns / 2  # its depth is 32 bytes, whatever the type
        made.shared = shared_bytes(i) / 128
        made.commits = int("gsb0" in i.operands)
    else:
        rate = 0.5 if ".TF32" in i.opcode else 2.0 if i.base == "IMMA" else 1.0  # [paper]
        made.occupies = hmma * rows * columns * depth / (16 * 8 * 16) / rate


def _memory(made: Row, i: Instruction, machine: Machine, *, spills_to_l2: bool) -> None:
    moved = (16 if ".128" in i.opcode else 8 if ".64" in i.opcode else 4) * WARP
    made.shared = (shared_bytes(i) or moved) / machine.shared_bytes
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


def _control(made: Row, i: Instruction, machine: Machine) -> None:
    allowed = _LEFT_UNDER_WAY.search(i.operands)
    if i.base == "BAR":
        made.kind = BARRIER_ARRIVE if ".ARV" in i.opcode else BARRIER
    elif i.base == "LDGDEPBAR":
        made.kind = COMMIT
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
        made.latency = machine.mbarrier_late
        if i.opcode.startswith("SYNCS.PHASECHK"):
            made.kind = AWAIT
        elif i.opcode == "SYNCS.ARRIVE.TRANS64":
            made.kind = EXPECT
        elif i.opcode.startswith("SYNCS.ARRIVE"):
            made.kind = ARRIVE


def address_of(i: Instruction) -> int | None:
    """The constant part of the address of an mbarrier: 0x8000 of [UR22+0x8000]."""
    match = _ADDRESS.search(i.operands)
    return int(match[1] or "0", 16) if match else None


def hmma_spacing(body: Sequence[Instruction]) -> float | None:
    """The least stall count between neighbouring HMMA of 16-bit operands that ptxas need not hold
    apart: those that add to different registers. None where there are none.
    """
    stalls = [
        one.control.stall
        for one, other in pairwise(body)
        if one.control
        and ".16816." in one.opcode
        and ".16816." in other.opcode
        and one.operands.split(",")[0] not in other.operands.split(", ")
    ]
    return min(stalls, default=None)
