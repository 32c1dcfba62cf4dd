"""What the main loops of a kernel do, counted in their SASS."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from flashgen.flow import main_bodies
from flashgen.sass import WARP, Instruction, Listing

_COMMITTED = re.compile(r"gsb0,\s*0x([0-9a-f]+)")
_HMMA_SHAPE = re.compile(r"\.16(8)(4|8|16|32)\b")
_WGMMA_SHAPE = re.compile(r"\.64x(\d+)x(\d+)")


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


def main_loops(listing: Listing) -> tuple[LoopFacts, ...]:
    """Facts of the main loops, the steady one first, then by length.

    Where masked tiles have a loop of their own, the steady one is shorter.
    """
    return tuple(sorted(map(facts, main_bodies(listing)), key=lambda loop: loop.instructions))


def facts(body: Sequence[Instruction]) -> LoopFacts:
    """The facts of one loop, given its instructions in the order they are issued."""
    exp2 = sum(i.is_exp2 for i in body)
    wgmma = any(i.is_wgmma for i in body)
    # In the second turn every wgmma carried over from the turn before is already under way.
    under = _exp2_under_wgmma([*body, *body]) - _exp2_under_wgmma(body)
    return LoopFacts(
        instructions=len(body),
        matrix_instructions=sum(i.is_matrix for i in body),
        matrix_flops=sum(map(matrix_flops, body)),
        exp2=exp2,
        fp32=sum(i.base in ("FFMA", "FADD", "FMUL") for i in body),
        other=sum(i.base in _OTHER for i in body),
        shared_bytes=sum(map(shared_bytes, body)),
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


def shape_of(i: Instruction) -> tuple[int, int, int]:
    """Rows, columns and depth that one warp multiplies: its quarter of a warpgroup's instruction.

    (0, 0, 0) for what is no matrix instruction, or of a shape not known.
    """
    shape = (_WGMMA_SHAPE if i.is_wgmma else _HMMA_SHAPE).search(i.opcode) if i.is_matrix else None
    return (16, int(shape[1]), int(shape[2])) if shape else (0, 0, 0)


def matrix_flops(i: Instruction) -> int:
    """Floating-point operations of one warp; 0 where the shape is not known."""
    rows, columns, depth = shape_of(i)
    return 2 * rows * columns * depth


def shared_bytes(i: Instruction) -> int:
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
