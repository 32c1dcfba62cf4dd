"""How many blocks of a kernel one SM holds at a time."""

from __future__ import annotations

from flashgen.schedules.base import TENSOR_COLUMNS
from flashgen.spec.gpu import Gpu

REGISTER_UNITS = {"sm_": 256, "gfx9": 8 * 64, "gfx1": 24 * 32}
"""Registers are handed to warps in units of so many: NVIDIA (CUDA occupancy calculator, sm_80 to
sm_90); CDNA 2 to 4; RDNA 3 and 4 with 1536 registers a thread (LLVM's AMDGPU backend)."""

RESERVED_SHARED_BYTES = 1024
"""Shared memory the system keeps of every block (CUDA C++ Programming Guide, sm_80 and later). AMD
reserves nothing."""


def resident_blocks(
    registers: int, shared_bytes: int, num_warps: int, gpu: Gpu, tensor_columns: int = 0
) -> int:
    """Blocks that one SM of `gpu` holds: 0 if not even one fits.

    registers are those of a thread, shared_bytes dynamic shared memory and tensor_columns tensor
    memory of a block.
    """
    unit = next(unit for arch, unit in REGISTER_UNITS.items() if gpu.arch.startswith(arch))
    warp_registers = -(-max(1, registers) * gpu.warp_size // unit) * unit
    # Registers belong to the four sub-partitions of an SM, and a warp to one of them.
    by_registers = 4 * (gpu.registers_per_sm // 4 // warp_registers) // num_warps
    if shared_bytes > gpu.shared_per_block:
        return 0
    by_tensor = TENSOR_COLUMNS // tensor_columns if tensor_columns else gpu.blocks_per_sm
    taken = shared_bytes + RESERVED_SHARED_BYTES * gpu.is_nvidia
    by_shared = gpu.shared_per_sm // taken if taken else gpu.blocks_per_sm
    by_warps = gpu.warps_per_sm // num_warps
    return min(by_registers, by_shared, by_tensor, by_warps, gpu.blocks_per_sm)
