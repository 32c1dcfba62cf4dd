"""What one SM of each architecture does in a clock cycle: the parameters of the replay, as data.

Sources, by the letters at the figures:
[guide]  CUDA C++ Programming Guide, table "Throughput of Native Arithmetic Instructions": results
         a cycle and SM; an instruction of rate r occupies a sub-partition's pipe 128 / r cycles.
[paper]  the architecture's white paper; from there spec/gpu.py has the matrix rates of the targets.
[ptxas]  what ptxas itself writes into the stall counts of that architecture (estimate/test_sm.py).
[order]  of the order that microbenchmarks report, such as Abdelkhalik et al. arXiv 2208.11174
         (A100) and Luo et al. arXiv 2402.13499 (Ampere, Ada, Hopper); chosen before any landscape
         was looked at, and not traced to one line of a table.
[cores]  Huerta et al., "Dissecting and Modeling the Architecture of Modern GPU Cores", MICRO 2025,
         arXiv 2503.20481: the read ports of the registers (estimate/register_ports.py,
         cycles.READ_CYCLES), measured on an RTX A6000 and said to hold from Turing to Blackwell.
[held]   chosen among four latencies and four bandwidths, knowing the landscapes of an H100.
[gemm]   chosen among five bandwidths on 20 of the 40 landscapes of products on an H100
         (benchmarks/landscapes/h100_gemm.csv); 56 and 64 are as good, and 54 is the most that
         a full GPU was seen to move there.
[fa3]    by hand, between those 20 landscapes and FlashAttention-3's six published times.
[h200]   read while an H200 ran our kernels (26 November 2026): 1,940 to 1,980 MHz of 1,830.
[assumed] nobody's figure.

Ranks must not depend on [order] and [assumed]: a test perturbs all latencies and bandwidths by
30 %.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from flashgen.compile.sass import Instruction
from flashgen.errors import NoEstimate
from flashgen.spec.gpu import Gpu


@dataclass(frozen=True, kw_only=True)
class ArchModel:
    """Parameters of one architecture, in cycles unless stated.

    fp32 to uniform: how long a warp's instruction occupies its pipe; matrix_at_least: an HMMA of
    16x8x16 in 16 bits (wgmma takes half its columns). shared_bytes and l2_bytes: bytes per cycle
    and SM; l2_burst_bytes: the same for one tile while other SMs load nothing, and the most that an
    SM gets while others are idle; memory_share: the share of the target's bandwidth that streams
    reach. *_late: from issue, or from the end of the transfer, to the result. top_clock: the clock
    with idle matrix pipes, in multiples of the data sheet's; matrix_slows: the share of it that is
    lost with all of them full. known: whether estimates of this architecture were validated.
    """

    fp32: float
    integer: float = 2.0  # [guide] 64 a cycle
    multiply: float = 2.0  # [guide] 64 a cycle, 32-bit integers
    exp2: float = 8.0  # [guide] 16 a cycle
    half: float = 1.0  # [guide] 256 halves a cycle, two a thread
    uniform: float = 2.0  # [assumed]
    matrix_at_least: float = 0.0
    shared_bytes: float = 128.0  # [guide] 32 banks of 4 bytes
    l2_bytes: float
    l2_burst_bytes: float
    shared_late: float = 29.0  # [order]
    matrix_load_late: float = 33.0  # [order] LDSM
    shuffle_late: float = 24.0  # [order]
    shuffle_cycles: float = 2.0  # [guide] 32 lanes a cycle and SM, at half the rate of a load
    store_late: float = 20.0  # [assumed]
    exp2_late: float = 22.0  # [order]
    uniform_late: float = 12.0  # [order]
    fence_late: float = 20.0  # [assumed]
    mbarrier_late: float = 20.0  # [assumed]
    load_late: float
    copy_late: float
    tma_late: float = 0.0
    barrier_late: float = 18.0  # [order]
    memory_late: float = 300.0  # [assumed] what memory adds to l2's latency while it is busy
    memory_share: float = 0.9  # [order] of its bandwidth, what a copy reaches
    stack_late: float = 40.0  # [assumed] a spill that stays in L1
    stack_l2_late: float = 260.0  # [order] one that does not
    l1_bytes: int
    top_clock: float = 1.0
    matrix_slows: float = 0.0
    known: bool


KIB = 1024

MACHINES: dict[str, ArchModel] = {
    "sm_80": ArchModel(
        fp32=2.0,  # [guide] 64 a cycle
        l2_bytes=32.0,  # [assumed] two thirds of the 5120 a cycle that [paper] gives 108 SMs
        l2_burst_bytes=32.0,  # [assumed] no more
        load_late=480.0,  # [order] under load
        copy_late=520.0,  # [order] under load
        l1_bytes=192 * KIB,  # [paper]
        known=True,
    ),
    "sm_86": ArchModel(
        fp32=1.0,  # [guide] 128 a cycle
        half=2.0,  # [guide] 128 halves a cycle
        l2_bytes=16.0,  # [assumed]
        l2_burst_bytes=16.0,  # [assumed] no more
        load_late=480.0,  # [assumed] as sm_80
        copy_late=520.0,
        l1_bytes=128 * KIB,  # [paper]
        known=True,
    ),
    "sm_89": ArchModel(
        fp32=1.0,  # [guide] 128 a cycle
        half=2.0,  # [guide] 128 halves a cycle
        l2_bytes=16.0,  # [assumed]
        l2_burst_bytes=16.0,  # [assumed] no more
        load_late=520.0,  # [assumed] between sm_80 and sm_90
        copy_late=560.0,
        l1_bytes=128 * KIB,  # [paper]
        known=False,
    ),
    "sm_90": ArchModel(
        fp32=1.0,  # [guide] 128 a cycle
        matrix_at_least=6.0,  # [ptxas] wgmma alone reaches the peak, which would be 4
        l2_bytes=56.0,  # [gemm]
        l2_burst_bytes=64.0,  # [held]
        load_late=420.0,  # [held]
        copy_late=450.0,  # [held]
        tma_late=530.0,  # [assumed] a copy, and the unit that makes its addresses
        l1_bytes=256 * KIB,  # [paper]
        top_clock=1.07,  # [h200]
        matrix_slows=0.3,  # [fa3]
        known=True,
    ),
    "sm_120": ArchModel(
        fp32=1.0,  # [paper] 128 a cycle
        integer=1.0,  # arXiv 2507.10789, on an RTX 5080: the same units as float32
        half=2.0,  # [assumed] as sm_89, and so are all to copy_late
        l2_bytes=16.0,
        l2_burst_bytes=16.0,
        load_late=520.0,
        copy_late=560.0,
        tma_late=640.0,  # [assumed] as much above a copy as on sm_90
        l1_bytes=128 * KIB,  # [paper]
        known=False,
    ),
}
"""Machines by architecture. Another one gets no estimate: sm_100 computes on tensor memory, and AMD
has no control bits, which the replay reads."""
MACHINES["sm_121"] = MACHINES["sm_120"]  # the same SM

HMMA_FLOPS = 2 * 16 * 8 * 16
SUB_PARTITIONS = 4


def machine_of(gpu: Gpu) -> ArchModel:
    """The machine of a target. Raises NoEstimate where its architecture or rates are not known."""
    if gpu.arch not in MACHINES:
        known = ", ".join(sorted(MACHINES, key=lambda arch: (len(arch), arch)))
        raise NoEstimate(f"the estimator does not know {gpu.arch}: it knows {known}")
    if gpu.clock_mhz is None or gpu.bandwidth_gbs is None or gpu.matrix_flops_per_clock is None:
        raise NoEstimate(f"clock, bandwidth or matrix rate of {gpu.slug} is not known")
    return MACHINES[gpu.arch]


def from_memory(machine: ArchModel) -> ArchModel:
    """The machine as a kernel finds it that reads each byte once, from memory and not from L2: a
    load comes later. Memory's bandwidth is all SMs' together: time_of() has it.
    """
    return replace(
        machine,
        load_late=machine.load_late + machine.memory_late,
        copy_late=machine.copy_late + machine.memory_late,
        tma_late=machine.tma_late + machine.memory_late,
    )


def held_clock_mhz(machine: ArchModel, gpu: Gpu, flops_per_cycle: float) -> float:
    """The clock of a GPU whose SMs together do this many 16-bit matrix operations a cycle: power
    holds it down in proportion.
    """
    assert gpu.clock_mhz is not None  # machine_of() has seen
    assert gpu.matrix_flops_per_clock is not None  # both
    full = min(flops_per_cycle / (gpu.sms * gpu.matrix_flops_per_clock), 1.0)
    return gpu.clock_mhz * machine.top_clock * (1.0 - machine.matrix_slows * full)


GEFORCE_LIKE = ("nvidia_gb10",)
"""[assumed] Products with the rates of a GeForce: 1 PFLOP/s of sparse FP4, which the GB10's data
sheet has, is dense 8 times its rate in 16 bits, as on an RTX 5090."""

FULL_RATE = {"sm_86": 1024, "sm_89": 1024, "sm_120": 1024, "sm_121": 1024}
"""16-bit operations of an SM in a cycle where sums in float32 are as fast as those in float16."""

PUBLISHED = {("nvidia_l40", "IMMA"): 2.0}
"""Rates that a data sheet names, of products that sum at half the rate: 362 TOP/s of an L40."""

EIGHT_BITS = (["S8"], ["U8"])


def matrix_rate(gpu: Gpu, opcode: str) -> float:
    """How fast this matrix instruction multiplies, relative to 16-bit operands summed in float32.

    [paper], and data sheets: tf32 at half the rate, 8-bit operands at twice. A100: 156, 312 and 624
    (int8); H100: 495, 989 and 1979; H20: 74, 148 and 296; L4: 60, 121 and 242; L40S: 183, 362 and
    733. There it does not matter what 16-bit products are summed in. A GeForce sums in float16 and
    in int32 at twice the rate of float32. RTX 3090: 35.6 in tf32, 71, 142 summed in float16, 284 of
    int8. RTX 4090: 82.6, 165.2, 330.3, 660.6; of fp8 330.3, and 660.6 summed in float16. RTX 5090:
    104.8, 209.5, 419, 838; of fp8 419, and 838 summed in float16.

    Raises NoEstimate where no source has the rate: of float64, 4 bits, sparse and scaled blocks,
    and what an A10G and an L40 sum in float16.
    """
    base, *words = opcode.split(".")
    unknown = NoEstimate(f"the rate of {opcode} on {gpu.slug} is not published")
    fp8 = base == "QGMMA" or (base == "QMMA" and gpu.arch in FULL_RATE)
    int8 = base in ("IMMA", "IGMMA") and words[1:2] in EIGHT_BITS
    if not {"SP", "SF"}.isdisjoint(words) or not (fp8 or int8 or base in ("HMMA", "HGMMA")):
        raise unknown
    rate = 2.0 if fp8 or int8 else 0.5 if "TF32" in words else 1.0
    assert gpu.matrix_flops_per_clock is not None  # machine_of() has seen it
    narrow_sums = "F16" in words or base == "IMMA"
    if not narrow_sums or gpu.matrix_flops_per_clock >= FULL_RATE.get(gpu.arch, 0):
        return rate
    if "geforce" in gpu.slug or gpu.slug in GEFORCE_LIKE:
        return 2 * rate
    if (gpu.slug, base) in PUBLISHED:
        return PUBLISHED[gpu.slug, base]
    raise unknown


NARROW = ("HMMA.16816.F16", "IMMA.16832.S8.S8", "QMMA.16832.F16.E4M3.E4M3")
"""One instruction of each kind whose rate depends on more than arch and matrix_flops_per_clock."""


def narrow_rates(gpu: Gpu) -> list[float | None]:
    """matrix_rate of each of NARROW; None where no source has it."""
    rates: list[float | None] = []
    for opcode in NARROW:
        try:
            rates.append(matrix_rate(gpu, opcode))
        except NoEstimate:
            rates.append(None)
    return rates


def matrix_work(gpu: Gpu, i: Instruction) -> float:
    """The 16-bit operations of a warp that take as long as this matrix instruction.

    Raises NoEstimate where its shape or its rate is not known.
    """
    rate = matrix_rate(gpu, i.opcode)
    if i.matrix_flops == 0:
        raise NoEstimate(f"the shape of {i.opcode} is not known")
    return i.matrix_flops / rate


def matrix_cycles(machine: ArchModel, gpu: Gpu, i: Instruction) -> float:
    """How long a matrix instruction of one warp, or its quarter of a warpgroup's, occupies a
    sub-partition's matrix pipe. Raises NoEstimate as matrix_work().
    """
    assert gpu.matrix_flops_per_clock is not None  # machine_of() has seen it
    work = matrix_work(gpu, i)
    if i.is_wgmma:
        return work * SUB_PARTITIONS / gpu.matrix_flops_per_clock
    return work / HMMA_FLOPS * hmma_cycles(machine, gpu)


def hmma_cycles(machine: ArchModel, gpu: Gpu) -> float:
    """How long one HMMA of 16x8x16 occupies a sub-partition's matrix pipe on this product.

    Products of one architecture differ: GeForce accumulates in float32 at half the rate.
    """
    assert gpu.matrix_flops_per_clock is not None  # machine_of() has seen it
    return max(HMMA_FLOPS * SUB_PARTITIONS / gpu.matrix_flops_per_clock, machine.matrix_at_least)
