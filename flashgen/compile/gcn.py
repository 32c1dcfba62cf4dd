"""The assembly of a kernel for an AMD GPU: instructions and resources, as sass.py has them of
NVIDIA's. Needs no GPU and no disassembler: Triton keeps the text that LLVM wrote.

Names and meanings: AMD's instruction set guides of CDNA 3, CDNA 4, RDNA 3 and RDNA 4, and LLVM's
User Guide for the AMDGPU Backend ("Code Object V3 and Above Metadata").
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from flashgen.compile.loops import LoopFacts, main_bodies
from flashgen.compile.sass import Instruction, Listing
from flashgen.errors import ToolchainError

_INSTRUCTION = re.compile(r"^\s+([a-z]+_\w+)\s*(.*)$")
_LABEL = re.compile(r"^(\.LBB\w+):")
_TARGET = re.compile(r"^(\.LBB\w+)")
_ARCH = re.compile(r'^\s*\.amdgcn_target\s+"[\w.-]*?(gfx[0-9a-f]+)', re.MULTILINE)
_RESOURCE = re.compile(
    r"^\s*\.(vgpr_count|private_segment_fixed_size|wavefront_size):\s*(\d+)", re.MULTILINE
)
_SHAPE = re.compile(r"_(\d+)x(\d+)x(\d+)_")
_MATRIX = ("v_mfma", "v_smfmac", "v_wmma", "v_swmmac")
_FP32 = re.compile(r"v_(?:dual_|pk_)?(?:add|sub|subrev|mul|fma|fmac)_f32")


@dataclass(frozen=True, slots=True)
class GcnInstruction(Instruction):
    """One instruction; its address counts instructions, and goes_to is that of a branch's target.

    operands have the comment that LLVM put behind them.
    """

    goes_to: int | None = None

    @property
    def base(self) -> str:
        """The opcode without its encoding: v_exp_f32 of v_exp_f32_e32."""
        return re.sub(r"_(?:e32|e64|dpp|sdwa)$", "", self.opcode)

    @property
    def is_matrix(self) -> bool:
        """Whether it multiplies matrices: MFMA of CDNA, WMMA of RDNA."""
        return self.opcode.startswith(_MATRIX)

    @property
    def is_exp2(self) -> bool:
        """Whether it is an exp2 of the transcendental unit."""
        return self.base == "v_exp_f32"

    @property
    def is_spill(self) -> bool:
        """Whether it moves a register from or to the thread's stack."""
        return self.opcode.startswith("scratch_") or "Folded" in self.operands

    @property
    def takes_slot(self) -> bool:
        """Whether it issues to the vector unit. Scalar and memory instructions of other waves issue
        in the same cycle.
        """
        return self.opcode.startswith("v_")

    @property
    def target(self) -> int | None:
        """The address a direct branch goes to; None for all else."""
        return self.goes_to

    @property
    def ends_block(self) -> bool:
        """Whether control may leave the straight line here."""
        return self.opcode.startswith(("s_cbranch", "s_branch", "s_endpgm", "s_setpc"))

    @property
    def falls_through(self) -> bool:
        """Whether the next instruction may follow."""
        return not self.opcode.startswith(("s_branch", "s_endpgm", "s_setpc"))


def parse(text: str) -> Listing:
    """The listing of an assembly text; ToolchainError if it has no kernel.

    registers count AGPRs too, where these share a file with VGPRs (CDNA 2 and later).
    """
    found: list[tuple[str, str]] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if match := _LABEL.match(line):
            labels[match[1]] = len(found)
        elif match := _INSTRUCTION.match(line):
            found.append((match[1], match[2]))
    arch, resources = _ARCH.search(text), dict(_RESOURCE.findall(text))
    if arch is None or not found or "vgpr_count" not in resources:
        raise ToolchainError("the compiler wrote no assembly that flashgen can read")
    instructions = (
        GcnInstruction(n, "", opcode, operands, None, _goes_to(operands, labels))
        for n, (opcode, operands) in enumerate(found)
    )
    return Listing(
        arch=arch[1],
        registers=int(resources["vgpr_count"]),
        stack_bytes=int(resources["private_segment_fixed_size"]),
        instructions=tuple(instructions),
    )


def _goes_to(operands: str, labels: dict[str, int]) -> int | None:
    match = _TARGET.match(operands)
    return labels.get(match[1]) if match else None


def main_loops(listing: Listing, wave: int) -> tuple[LoopFacts, ...]:
    """As loops.main_loops; wave is the number of threads of a warp (wavefront)."""
    found = (facts(body, wave) for body in main_bodies(listing))
    return tuple(sorted(found, key=lambda loop: loop.instructions))


def facts(body: Sequence[Instruction], wave: int) -> LoopFacts:
    """The facts of one loop, of one warp; other are all vector instructions besides."""
    fp32 = sum(_FP32.match(i.opcode) is not None for i in body)
    matrix, exp2 = sum(i.is_matrix for i in body), sum(i.is_exp2 for i in body)
    return LoopFacts(
        instructions=len(body),
        matrix_instructions=matrix,
        matrix_flops=sum(map(matrix_flops, body)),
        exp2=exp2,
        fp32=fp32,
        other=sum(i.takes_slot for i in body) - matrix - exp2 - fp32,
        shared_bytes=wave * sum(map(shared_bytes, body)),
        spills=sum(i.is_spill for i in body),
        warpgroup_arrives=0,
        exp2_under_matrix=None,
    )


def matrix_flops(i: Instruction) -> int:
    """Floating-point operations of one warp; 0 if it is no matrix instruction."""
    shape = _SHAPE.search(i.opcode) if i.is_matrix else None
    return 2 * int(shape[1]) * int(shape[2]) * int(shape[3]) if shape else 0


def shared_bytes(i: Instruction) -> int:
    """Bytes that one thread moves over the LDS pipe, whose banks are 4 bytes wide: 4 at least."""
    if not i.opcode.startswith("ds_"):
        return 0
    width = re.search(r"_[bu](\d+)", i.opcode)
    pairs = 2 if re.search(r"_(?:read|write|load|store)_?2", i.opcode) else 1
    return pairs * max(4, int(width[1]) // 8) if width else 4
