"""What the facts of a compiled kernel say: whether it may be chosen, and how it ranks."""

from __future__ import annotations

from flashgen.compile.compiler import Compiled
from flashgen.compile.known_bugs import may_be_wrong
from flashgen.compile.occupancy import resident_blocks
from flashgen.schedules.base import TENSOR_COLUMNS
from flashgen.schedules.config import SCHEDULES, KernelConfig
from flashgen.schedules.outcome import Status
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.gpu import Gpu

MOST_SPILLS = 0.01
"""The share of a loop's instructions that may load and store spilled registers where no GPU
measures what they cost. FlashAttention's kernels for the A100 ship with 5 to 53 spilling loads."""


def judge(
    compiled: Compiled,
    spec: AttentionSpec,
    config: KernelConfig,
    gpu: Gpu,
    *,
    measures: bool = False,
) -> tuple[Status, str]:
    """Whether a compiled kernel may be chosen on `gpu`, and if not, why, in one sentence.

    measures: a GPU times what is chosen, so that spills need not be judged here. Without one, what
    they cost in a main loop is known only while they are few: MOST_SPILLS. Those of other loops
    never refuse a kernel.
    """
    if compiled.tensor_columns > TENSOR_COLUMNS:
        return Status.OUT_OF_RESOURCES, (
            f"it takes {compiled.tensor_columns} columns of tensor memory: an SM has "
            f"{TENSOR_COLUMNS}"
        )
    if compiled.only_traps:
        return Status.WRONG, "its body is a trap: the compiler gave it up, and it computes nothing"
    if compiled.shared_bytes > gpu.shared_per_block:
        return Status.OUT_OF_RESOURCES, (
            f"it takes {compiled.shared_bytes} bytes of shared memory: "
            f"{gpu.slug} has {gpu.shared_per_block} a block"
        )
    if residents(compiled, gpu) == 0:
        return Status.OUT_OF_RESOURCES, (
            f"{compiled.num_warps} warps of {compiled.registers} registers per thread do not fit "
            f"an SM of {gpu.slug}"
        )
    if compiled.main_spill_share > MOST_SPILLS and not measures:
        return Status.SPILLS, _spills(compiled)
    if compiled.advisories:
        return Status.SERIALIZED, f"ptxas says: {compiled.advisories[0]}"
    arrives = max((loop.warpgroup_arrives for loop in compiled.loops), default=0)
    made = SCHEDULES[config.schedule].batches(spec, config)
    if arrives > made:
        return Status.SERIALIZED, (
            f"a tile has {made} batches of wgmma: ptxas cut them into {arrives}"
        )
    return Status.OK, ""


def _spills(compiled: Compiled) -> str:
    """What spills, in one sentence."""
    if compiled.loop is None and not compiled.spilling:
        return f"a thread spills {compiled.spill_bytes} bytes of registers"
    found = sum(loop.spills for loop in compiled.loops)
    if found:
        return f"its main loops hold {found} loads and stores of spilled registers"
    worst, length = max(compiled.spilling, key=lambda each: each[0] / each[1])
    return f"a loop of {length} instructions holds {worst} loads and stores of spilled registers"


def shortcomings(compiled: Compiled, spec: AttentionSpec, config: KernelConfig) -> int:
    """How many signs of trouble it has, which a GPU overrules: spills in a main loop, exp2 that do
    not overlap wgmma though the schedule is made for it, and warps of which a Triton is known to
    make wrong programs. It ranks kernels of which no time is known. What a kernel spills around its
    main loops it spills once a tile. What roles without products spill runs beside them: estimates
    replay a producer's, not a scheduler's.
    """
    its = SCHEDULES[config.schedule]
    least = its.least_overlap.get(spec.direction, 0.0) if compiled.arch == "sm_90" else 0.0
    slow = (compiled.main_spill_share > 0) + (overlap(compiled, config) < least)
    return slow + may_be_wrong(compiled.arch, config)


def overlap(compiled: Compiled, config: KernelConfig) -> float:
    """The share of exp2 that overlaps wgmma in the steady loop, 0 to 1.

    Every consumer has a steady loop, shorter than all masked ones: the least of their shares.
    """
    steady = compiled.loops[: max(1, config.consumers)]
    return min((loop.exp2_under_matrix or 0.0 for loop in steady), default=0.0)


def residents(compiled: Compiled, gpu: Gpu) -> int:
    """Blocks of this kernel that one SM of `gpu` holds at a time; 0 if not even one fits."""
    return resident_blocks(
        compiled.registers,
        compiled.shared_bytes,
        compiled.num_warps,
        gpu,
        compiled.tensor_columns,
    )
