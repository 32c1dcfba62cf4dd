"""SASS of a compiled kernel: instructions, loops and what the main loops do. Needs no GPU.

cuobjdump, which comes with Triton, prints the machine code. Loops are found in the control-flow
graph by dominators, not by backward branches alone: ptxas puts the retry of a barrier wait
behind the end of the kernel, and the branch from there back into a loop is no loop.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from flashgen.errors import ToolchainError

TOOL_SECONDS = 120
"""How long cuobjdump may take; a kernel of 20,000 instructions needs about one second."""

WARP = 32
_INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:(@!?\w+)\s+)?([A-Z][\w.]*)\s*(.*?)\s*;")
_RESOURCES = re.compile(r"REG:(\d+) STACK:(\d+)")
_TARGET = re.compile(r"0x([0-9a-f]+)\s*$")
_COMMITTED = re.compile(r"gsb0,\s*0x([0-9a-f]+)")
_HMMA_SHAPE = re.compile(r"\.16(8)(4|8|16|32)\b")
_WGMMA_SHAPE = re.compile(r"\.64x(\d+)x(\d+)")


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction: byte address, predicate ("@!P0" or ""), opcode with suffixes, operands."""

    address: int
    predicate: str
    opcode: str
    operands: str

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
    def is_spill(self) -> bool:
        """Whether it moves a register from or to the thread's stack."""
        return self.base in ("LDL", "STL")

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
    """The machine code of one kernel; registers and stack_bytes are those of a thread."""

    registers: int
    stack_bytes: int
    instructions: tuple[Instruction, ...]


@dataclass(frozen=True, kw_only=True)
class LoopFacts:
    """What one warp executes in one turn of a main loop, that is, for one tile of K and V.

    matrix_flops counts the warp's share of a warpgroup's instruction. fp32 are the additions and
    multiplications, other the comparisons, selections, conversions and integer work.
    shared_bytes pass between the warp and shared memory, shuffles and the operands of wgmma
    included. exp2_under_matrix is the share of exp2 issued while a wgmma of the same warpgroup
    runs; None in a loop without wgmma.
    """

    instructions: int
    matrix_instructions: int
    matrix_flops: int
    exp2: int
    fp32: int
    other: int
    shared_bytes: int
    spills: int
    warpgroup_arrives: int
    exp2_under_matrix: float | None


def disassemble(cubin: bytes) -> Listing:
    """The listing of a cubin of one kernel.

    Raises ToolchainError if cuobjdump is missing, fails, or does not end.
    """
    with tempfile.TemporaryDirectory(prefix="flashgen-") as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [str(_cuobjdump()), "-sass", "-res-usage", str(path)]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=TOOL_SECONDS, check=False
            )
        except subprocess.TimeoutExpired:
            raise ToolchainError(f"cuobjdump did not end within {TOOL_SECONDS} s") from None
    if done.returncode != 0:
        reason = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()[-1]
        raise ToolchainError(f"cuobjdump failed with code {done.returncode}: {reason}")
    return parse(done.stdout)


def parse(text: str) -> Listing:
    """The listing in what `cuobjdump -sass -res-usage` printed; ToolchainError if there is none."""
    resources = _RESOURCES.search(text)
    instructions = tuple(
        Instruction(int(match[1], 16), match[2] or "", match[3], match[4])
        for match in map(_INSTRUCTION.match, text.splitlines())
        if match
    )
    if resources is None or not instructions:
        raise ToolchainError("cuobjdump printed no machine code that flashgen can read")
    return Listing(
        registers=int(resources[1]), stack_bytes=int(resources[2]), instructions=instructions
    )


def _cuobjdump() -> Path:
    spec = importlib.util.find_spec("triton")
    if spec is None or spec.origin is None:
        raise ToolchainError("triton must be installed: its wheel carries cuobjdump")
    path = Path(spec.origin).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not path.is_file():
        raise ToolchainError(f"cuobjdump must come with triton's wheel: there is none at {path}")
    return path


def loops(instructions: Sequence[Instruction]) -> tuple[tuple[Instruction, ...], ...]:
    """The natural loops, in order of address, each as its instructions in order of address.

    Blocks behind a loop's last back edge are left out: retries that run only when a wait fails.
    """
    blocks = _blocks(instructions)
    starts = {block[0].address: n for n, block in enumerate(blocks)}
    successors = [_successors(block, n, len(blocks), starts) for n, block in enumerate(blocks)]
    predecessors = _predecessors(successors)
    dominators = _dominators(predecessors)
    latches: dict[int, list[int]] = {}
    for source, targets in enumerate(successors):
        for header in targets:
            if header in dominators[source]:
                latches.setdefault(header, []).append(source)
    found = []
    for header, sources in sorted(latches.items()):
        body = _natural_loop(header, sources, predecessors)
        inside = (n for n in sorted(body) if header <= n <= max(sources))
        found.append(tuple(instruction for n in inside for instruction in blocks[n]))
    return tuple(found)


def main_loops(listing: Listing) -> tuple[LoopFacts, ...]:
    """Facts of the innermost loops that do the work, the steady one first, then by length.

    They are those with matrix instructions, or, in a kernel without any (float32 in ieee
    precision), those with exp2. Where masked tiles have a loop of their own, the steady one is
    shorter.
    """
    found = loops(listing.instructions)
    for marks in (lambda i: i.is_matrix, lambda i: i.is_exp2):
        working = [loop for loop in found if any(map(marks, loop))]
        inner = [loop for loop in working if not any(_within(other, loop) for other in working)]
        if inner:
            return tuple(sorted(map(facts, inner), key=lambda loop: loop.instructions))
    return ()


def facts(body: Sequence[Instruction]) -> LoopFacts:
    """The facts of one loop, given its instructions in the order they are issued."""
    exp2 = sum(i.is_exp2 for i in body)
    wgmma = any(i.is_wgmma for i in body)
    # In the second turn every wgmma carried over from the turn before is already under way.
    under = _exp2_under_wgmma([*body, *body]) - _exp2_under_wgmma(body)
    return LoopFacts(
        instructions=len(body),
        matrix_instructions=sum(i.is_matrix for i in body),
        matrix_flops=sum(map(_matrix_flops, body)),
        exp2=exp2,
        fp32=sum(i.base in ("FFMA", "FADD", "FMUL") for i in body),
        other=sum(i.base in _OTHER for i in body),
        shared_bytes=sum(map(_shared_bytes, body)),
        spills=sum(i.is_spill for i in body),
        warpgroup_arrives=sum(i.opcode == "WARPGROUP.ARRIVE" for i in body),
        exp2_under_matrix=under / max(1, exp2) if wgmma else None,
    )


_COMPARE = ("FMNMX", "FMNMX3", "FSEL", "FSETP", "F2FP")
_INTEGER = ("ISETP", "IADD3", "IMAD", "LOP3", "LEA", "SEL", "SHF", "PRMT", "MOV", "VIADD", "VIMNMX")
_OTHER = frozenset((*_COMPARE, *_INTEGER))
_STORES_AND_LOADS = frozenset(("LDS", "STS", "LDSM", "STSM", "LDGSTS"))


def _exp2_under_wgmma(body: Iterable[Instruction]) -> int:
    """How many exp2 are issued while a wgmma is not committed, or its group not waited for."""
    issued, groups, under = False, 0, 0
    for i in body:
        if i.is_wgmma:
            committed = "gsb0" in i.operands
            groups, issued = groups + committed, not committed
        elif i.opcode.startswith("WARPGROUP.DEPBAR"):
            allowed = _COMMITTED.search(i.operands)
            groups = min(groups, int(allowed[1], 16)) if allowed else 0
        elif i.is_exp2 and (issued or groups):
            under += 1
    return under


def _matrix_flops(i: Instruction) -> int:
    """Floating-point operations of one warp: 2 * 16 rows * columns * depth; 0 if not known."""
    if i.is_wgmma and (shape := _WGMMA_SHAPE.search(i.opcode)):
        return 2 * 16 * int(shape[1]) * int(shape[2])
    if i.is_matrix and (shape := _HMMA_SHAPE.search(i.opcode)):
        return 2 * 16 * int(shape[1]) * int(shape[2])
    return 0


def _shared_bytes(i: Instruction) -> int:
    """Bytes one warp moves over the shared memory pipe."""
    parts = i.opcode.split(".")
    if i.is_wgmma and (shape := _WGMMA_SHAPE.search(i.opcode)):
        # The depth is 16 for 16-bit operands and 8 for 32-bit ones: 32 bytes a row either way.
        row_bytes, rows_of_a = 32, 64 if _reads_a_from_shared(i) else 0
        return (int(shape[1]) + rows_of_a) * row_bytes // 4
    if i.base in ("LDSM", "STSM"):
        return int(parts[-1]) * 4 * WARP if parts[-1] in ("2", "4") else 4 * WARP
    if i.base in _STORES_AND_LOADS:
        return (16 if "128" in parts else 8 if "64" in parts else 4) * WARP
    return 4 * WARP if i.base == "SHFL" else 0


def _reads_a_from_shared(i: Instruction) -> bool:
    _, _, sources = i.operands.partition(",")
    return sources.strip().startswith("gdesc")


def _blocks(instructions: Sequence[Instruction]) -> list[list[Instruction]]:
    """Basic blocks, in order of address."""
    targets = {i.target for i in instructions}
    blocks: list[list[Instruction]] = [[]]
    for i in instructions:
        if i.address in targets and blocks[-1]:
            blocks.append([])
        blocks[-1].append(i)
        if i.ends_block:
            blocks.append([])
    return [block for block in blocks if block]


def _successors(
    block: Sequence[Instruction], number: int, count: int, starts: dict[int, int]
) -> list[int]:
    last = block[-1]
    found = [starts[last.target]] if last.target in starts else []
    if last.falls_through and number + 1 < count:
        found.append(number + 1)
    return found


def _predecessors(successors: Sequence[Sequence[int]]) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in successors]
    for source, targets in enumerate(successors):
        for target in targets:
            found[target].append(source)
    return found


def _dominators(predecessors: Sequence[Sequence[int]]) -> list[set[int]]:
    """The blocks on every way from the entry to each block, itself included.

    Blocks nobody is seen to branch to (the targets of a jump table) count as entries.
    """
    everything = set(range(len(predecessors)))
    found = [{n} if n == 0 or not predecessors[n] else set(everything) for n in sorted(everything)]
    changed = True
    while changed:
        changed = False
        for n, before in enumerate(predecessors):
            if n == 0 or not before:
                continue
            new = set.intersection(*(found[p] for p in before)) | {n}
            if new != found[n]:
                found[n], changed = new, True
    return found


def _natural_loop(
    header: int, sources: Iterable[int], predecessors: Sequence[Sequence[int]]
) -> set[int]:
    """All blocks from which a source of a back edge is reached without passing the header."""
    body, pending = {header}, list(sources)
    while pending:
        block = pending.pop()
        if block not in body:
            body.add(block)
            pending.extend(predecessors[block])
    return body


def _within(inner: Sequence[Instruction], outer: Sequence[Instruction]) -> bool:
    """Whether `inner` is another loop inside `outer`."""
    if inner is outer:
        return False
    return outer[0].address <= inner[0].address and inner[-1].address <= outer[-1].address
