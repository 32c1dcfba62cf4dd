"""What one instruction occupies on an SM, as a row of estimate/sm_clock.py, by itself."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from flashgen.compile.sass import WARP, Instruction
from flashgen.estimate.machines import ArchModel
from flashgen.estimate.mbarriers import address_of

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

MULTIPLY_WIDE_CYCLES = 4.0  # IMAD.WIDE writes two registers

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
        made.kind, made.latency = of_mbarrier(i), machine.mbarrier_late


def of_mbarrier(i: Instruction) -> int:
    """What an instruction that names an mbarrier does there."""
    if i.opcode.startswith("SYNCS.PHASECHK"):
        return AWAIT
    if expects(i):
        return EXPECT
    return ARRIVE if i.opcode.startswith("SYNCS.ARRIVE") else PLAIN


def expects(i: Instruction) -> bool:
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
