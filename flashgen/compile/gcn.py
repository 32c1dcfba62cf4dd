"""The assembly of a kernel for an AMD GPU: instructions and resources, as sass.py has them of
NVIDIA's. Needs no GPU and no disassembler: Triton keeps the text that LLVM wrote.

Names and meanings: AMD's instruction set guides of CDNA 3, CDNA 4, RDNA 3 and RDNA 4, and LLVM's
User Guide for the AMDGPU Backend ("Code Object V3 and Above Metadata").
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from flashgen.compile.sass import Instruction, Listing
from flashgen.errors import ToolchainError

_INSTRUCTION = re.compile(r"^\s+([a-z]+_\w+)\s*(.*)$")
_LABEL = re.compile(r"^(\.LBB\w+):")
_TARGET = re.compile(r"^(\.LBB\w+)")
_ARCH = re.compile(r'^\s*\.amdgcn_target\s+"[\w.-]*?(gfx[0-9a-f]+)', re.MULTILINE)
_RESOURCE = re.compile(
    r"^\s*\.(vgpr_count|private_segment_fixed_size|wavefront_size):\s*(\d+)", re.MULTILINE
)
_SHAPE = re.compile(r"_(\d+)x(\d+)x(\d+)")
_MATRIX = ("v_mfma", "v_smfmac", "v_wmma", "v_swmmac")
_FP32 = re.compile(r"v_(?:dual_|pk_)?(?:add|sub|subrev|mul|fma|fmac)_f32")


@dataclass(frozen=True, slots=True)
class GcnInstruction(Instruction):
    """One instruction; its address counts instructions, and goes_to is that of a branch's target.

    operands have the comment that LLVM put behind them. wave: threads of a warp (wavefront).
    """

    goes_to: int | None = None
    wave: int = 64

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
    def is_fp32(self) -> bool:
        """Whether it adds or multiplies float32."""
        return _FP32.match(self.opcode) is not None

    @property
    def is_other(self) -> bool:
        """Whether it is another vector instruction."""
        return self.takes_slot and not (self.is_matrix or self.is_exp2 or self.is_fp32)

    @property
    def matrix_flops(self) -> int:
        """Floating-point operations of one warp; 0 if it is no matrix instruction."""
        shape = _SHAPE.search(self.opcode) if self.is_matrix else None
        return 2 * int(shape[1]) * int(shape[2]) * int(shape[3]) if shape else 0

    @property
    def shared_bytes(self) -> int:
        """Bytes that one warp moves over the LDS pipe, whose banks are 4 bytes wide: 4 a thread at
        least.
        """
        if not self.opcode.startswith("ds_"):
            return 0
        width = re.search(r"_[bu](\d+)", self.opcode)
        pairs = 2 if re.search(r"_(?:read|write|load|store)_?2", self.opcode) else 1
        return self.wave * (pairs * max(4, int(width[1]) // 8) if width else 4)

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
    wave = int(resources.get("wavefront_size", 64))
    instructions = (
        GcnInstruction(n, "", opcode, operands, None, _goes_to(operands, labels), wave)
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
