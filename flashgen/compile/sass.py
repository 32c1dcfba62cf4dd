"""SASS of a compiled kernel: instructions, their control bits, resources. Needs no GPU.

cuobjdump, which comes with Triton, prints the machine code. ptxas writes into every instruction
when the next one of its warp may issue: a stall count in cycles for results of known latency, and
six barriers, to set and to wait for, for the others. Where the bits lie: Jia et al., "Dissecting
the NVIDIA Volta GPU Architecture via Microbenchmarking", arXiv 1804.06826, section 2.1; the same
from Volta to Hopper. self_check() says whether a listing bears that reading out.
"""

from __future__ import annotations

import functools
import importlib.util
import re
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from flashgen.errors import ToolchainError, ToolKilled
from flashgen.files import temporary_folder

TOOL_SECONDS = 120
"""How long cuobjdump may take; a kernel of 20,000 instructions needs about one second."""

WARP = 32
_INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:(@!?\w+)\s+)?([A-Z][\w.]*)\s*(.*?)\s*;")
_RESOURCES = re.compile(r"REG:(\d+) STACK:(\d+)")
_ARCH = re.compile(r"^\s*code for (sm_\d+)", re.MULTILINE)
_TARGET = re.compile(r"0x([0-9a-f]+)\s*$")
_BARRIER = re.compile(r"0x([0-9a-f]+)(?:, 0x([0-9a-f]+))?\s*$")
_HIGH_WORD = re.compile(r"^\s*/\* 0x([0-9a-f]{16}) \*/\s*$")
_HMMA_SHAPE = re.compile(r"\.16(8)(4|8|16|32)\b")
_WGMMA_SHAPE = re.compile(r"\.64x(\d+)x(\d+)")
_COMPARE = ("FMNMX", "FMNMX3", "FSEL", "FSETP", "F2FP")
INTEGER = ("ISETP", "IADD3", "IMAD", "LOP3", "LEA", "SEL", "SHF", "PRMT", "MOV", "VIADD", "VIMNMX")
_STORES_AND_LOADS = frozenset(("LDS", "STS", "LDSM", "STSM", "LDGSTS"))
_CONTROL_SHIFT = 41
_NO_BARRIER = 7
BARRIERS = 6
"""Scoreboard barriers of a warp, numbered from 0."""


@dataclass(frozen=True, slots=True)
class Control:
    """What the scheduler reads with an instruction.

    stall: cycles until the warp's next instruction may issue. sets_on_write: the barrier that falls
    when the result is available, sets_on_read: the one that falls when the operands were read; None
    for none. waits: the barriers that must have fallen before this instruction issues. The yield
    hint is left out: nothing here uses it.
    """

    stall: int
    sets_on_write: int | None
    sets_on_read: int | None
    waits: tuple[int, ...]


def control_of(high_word: int) -> Control:
    """The control bits in the upper 64 bits of an instruction."""
    bits = high_word >> _CONTROL_SHIFT
    write, read, waits = bits >> 5 & 7, bits >> 8 & 7, bits >> 11 & 0x3F
    return Control(
        stall=bits & 15,
        sets_on_write=None if write == _NO_BARRIER else write,
        sets_on_read=None if read == _NO_BARRIER else read,
        waits=tuple(barrier for barrier in range(BARRIERS) if waits >> barrier & 1),
    )


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction: byte address, predicate ("@!P0" or ""), opcode with suffixes, operands.

    control is None where the listing has no control bits.
    """

    address: int
    predicate: str
    opcode: str
    operands: str
    control: Control | None = None

    @property
    def base(self) -> str:
        """The opcode without suffixes: HMMA of HMMA.16816.F32.BF16."""
        return self.opcode.partition(".")[0]

    @property
    def is_matrix(self) -> bool:
        """Whether it multiplies matrices: HMMA, HGMMA, tcgen05's UTCHMMA and their integer kin."""
        return self.base.endswith("MMA")

    @property
    def is_wgmma(self) -> bool:
        """Whether it is a matrix instruction of a whole warpgroup, which runs asynchronously."""
        return self.base.endswith("GMMA")

    @property
    def is_exp2(self) -> bool:
        """Whether it is an exp2 of the special function unit."""
        return self.opcode.startswith("MUFU.EX2")

    @property
    def is_fp32(self) -> bool:
        """Whether it adds or multiplies float32."""
        return self.base in ("FFMA", "FADD", "FMUL")

    @property
    def is_other(self) -> bool:
        """Whether it compares, selects, converts, or computes with integers."""
        return self.base in _COMPARE or self.base in INTEGER

    @property
    def shape(self) -> tuple[int, int, int]:
        """Rows, columns and depth that one warp multiplies: its quarter of a warpgroup's
        instruction. (0, 0, 0) for other instructions and unknown shapes.
        """
        if not self.is_matrix:
            return (0, 0, 0)
        found = (_WGMMA_SHAPE if self.is_wgmma else _HMMA_SHAPE).search(self.opcode)
        return (16, int(found[1]), int(found[2])) if found else (0, 0, 0)

    @property
    def matrix_flops(self) -> int:
        """Floating-point operations of one warp; 0 if the shape is unknown."""
        rows, columns, depth = self.shape
        return 2 * rows * columns * depth

    @property
    def shared_bytes(self) -> int:
        """Bytes that one warp moves over the shared memory pipe."""
        parts = self.opcode.split(".")
        if self.is_wgmma and (shape := _WGMMA_SHAPE.search(self.opcode)):
            # The depth is 16 for 16-bit operands and 8 for 32-bit ones: 32 bytes a row either way.
            sources = self.operands.partition(",")[2]
            row_bytes, rows_of_a = 32, 64 if sources.strip().startswith("gdesc") else 0
            return (int(shape[1]) + rows_of_a) * row_bytes // 4
        if self.base in ("LDSM", "STSM"):
            return int(parts[-1]) * 4 * WARP if parts[-1] in ("2", "4") else 4 * WARP
        if self.base in _STORES_AND_LOADS:
            return (16 if "128" in parts else 8 if "64" in parts else 4) * WARP
        return 4 * WARP if self.base == "SHFL" else 0

    @property
    def reads_tensor(self) -> bool:
        """Whether it loads from tensor memory."""
        return self.base == "LDTM"

    @property
    def is_spill(self) -> bool:
        """Whether it moves a register from or to the thread's stack."""
        return self.base in ("LDL", "STL")

    @property
    def is_bulk_load(self) -> bool:
        """Whether it makes the TMA unit load a tile."""
        return self.base == "UTMALDG"

    @property
    def takes_slot(self) -> bool:
        """Whether it takes one of the slots in which an SM issues instructions: all of NVIDIA's."""
        return True

    @property
    def barrier_name(self) -> int | None:
        """The number of a barrier of the block; None for anything else, and if a register holds
        it.
        """
        match = _BARRIER.match(self.operands) if self.base == "BAR" else None
        return int(match[1], 16) if match else None

    @property
    def barrier_threads(self) -> int | None:
        """How many threads meet at the barrier; None for all of the block's."""
        match = _BARRIER.match(self.operands) if self.base == "BAR" else None
        return int(match[2], 16) if match and match[2] else None

    @property
    def target(self) -> int | None:
        """The address a direct branch goes to; None for all else."""
        if self.base not in ("BRA", "BSSY"):
            return None
        match = _TARGET.search(self.operands)
        return int(match.group(1), 16) if match else None

    @property
    def ends_block(self) -> bool:
        """Whether control may leave the straight line here."""
        return self.base in ("BRA", "BRX", "BSSY", "EXIT", "RET", "JMP")

    @property
    def falls_through(self) -> bool:
        """Whether the next instruction may follow."""
        # A branch with more operands than its target depends on them: BRA.U !UP0, 0x..; BRA.DIV.
        conditional = bool(self.predicate) or (self.base == "BRA" and "," in self.operands)
        return conditional or self.base not in ("BRA", "BRX", "EXIT", "RET", "JMP")


@dataclass(frozen=True, kw_only=True)
class Listing:
    """The machine code of one kernel; registers and stack_bytes are per thread.

    arch is the architecture it was compiled for, sm_90 also for sm_90a; "" if the text does not
    say.
    """

    arch: str
    registers: int
    stack_bytes: int
    instructions: tuple[Instruction, ...]

    @property
    def only_traps(self) -> bool:
        """Whether the kernel stops at a trap and stores nothing: ptxas writes such a body where a
        kernel takes more tensor memory than there is.
        """
        bases = {i.base for i in self.instructions}
        return "BPT" in bases and not bases & _STORES


_STORES = frozenset(
    ("ST", "STG", "STS", "STL", "RED", "REDG", "ATOM", "ATOMG", "UTMASTG", "UTMAREDG", "UBLKRED")
)
"""Opcodes that write memory."""


@functools.lru_cache(maxsize=8)  # a kernel's facts and its estimate both start here
def disassemble(cubin: bytes) -> Listing:
    """The listing of a cubin of one kernel.

    Raises ToolchainError if cuobjdump is missing, fails, or does not end.
    """
    with temporary_folder("sass") as folder:
        path = folder / "kernel.cubin"
        path.write_bytes(cubin)
        command = [str(cuobjdump()), "-sass", "-res-usage", str(path)]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=TOOL_SECONDS, check=False
            )
        except subprocess.TimeoutExpired:
            raise ToolchainError(f"cuobjdump did not end within {TOOL_SECONDS} s") from None
    if done.returncode == -9:
        raise ToolKilled("cuobjdump was ended by SIGKILL, as where the machine runs out of memory")
    if done.returncode != 0:
        reason = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()[-1]
        raise ToolchainError(f"cuobjdump failed with code {done.returncode}: {reason}")
    return parse(done.stdout)


def parse(text: str) -> Listing:
    """The listing in what `cuobjdump -sass -res-usage` printed; ToolchainError if there is none."""
    resources = _RESOURCES.search(text)
    instructions = tuple(_instructions(text.splitlines()))
    if resources is None or not instructions:
        raise ToolchainError("cuobjdump printed no machine code that flashgen can read")
    arch = _ARCH.search(text)
    return Listing(
        arch=arch[1] if arch else "",
        registers=int(resources[1]),
        stack_bytes=int(resources[2]),
        instructions=instructions,
    )


def _instructions(lines: Sequence[str]) -> Iterator[Instruction]:
    """Each instruction line, with the control bits of the line below it."""
    for line, below in zip_longest(lines, lines[1:], fillvalue=""):
        if match := _INSTRUCTION.match(line):
            high = _HIGH_WORD.match(below)
            control = control_of(int(high[1], 16)) if high else None
            yield Instruction(int(match[1], 16), match[2] or "", match[3], match[4], control)


def self_check(listing: Listing) -> str | None:
    """Why the control bits of a listing cannot be what we take them for; None if they can.

    A wait must refer to a barrier that some earlier instruction sets. The order of addresses is not
    the order of time if code loops or comes after the end. So a barrier that is set anywhere in the
    kernel counts if a backward branch lies between.
    """
    if any(i.control is None for i in listing.instructions):
        return "its listing has instructions without control bits"
    back = (
        i.address for i in listing.instructions if i.target is not None and i.target <= i.address
    )
    looped = max(back, default=-1)
    late = {b for i in listing.instructions if i.address <= looped for b in _sets(i)}
    so_far: set[int] = set()
    for i in listing.instructions:
        assert i.control is not None
        unset = set(i.control.waits) - so_far - late
        if unset:
            return f"instruction {i.address:#x} waits for barrier {min(unset)}, which nothing sets"
        so_far.update(_sets(i))
    return None


def _sets(i: Instruction) -> tuple[int, ...]:
    """The barriers an instruction sets."""
    if i.control is None:
        return ()
    both = (i.control.sets_on_write, i.control.sets_on_read)
    return tuple(barrier for barrier in both if barrier is not None)


def cuobjdump() -> Path:
    """The disassembler in triton's wheel. Raises ToolchainError if there is none."""
    spec = importlib.util.find_spec("triton")
    if spec is None or spec.origin is None:
        raise ToolchainError("triton must be installed: its wheel carries cuobjdump")
    path = Path(spec.origin).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not path.is_file():
        raise ToolchainError(f"cuobjdump must come with triton's wheel: there is none at {path}")
    return path
