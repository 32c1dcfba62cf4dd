"""What vendors publish of the GPUs that flashgen knows by name: rows of numbers with their sources.

Names are those that NVML and torch.cuda.get_device_name() give. Clocks are boost clocks, or the
clock at which a data sheet's dense TFLOP/s are reached where that is lower. A rate that no document
states is derived from one that it does, and the comment says how. Read in November 2026.
"""

from __future__ import annotations

from typing import NamedTuple

KIB = 1024


class Limits(NamedTuple):
    """Limits of one architecture, the same for all its products. Bytes are bytes."""

    shared_per_block: int
    shared_per_sm: int
    warps_per_sm: int
    blocks_per_sm: int
    registers_per_sm: int = 65536
    warp_size: int = 32


LIMITS: dict[str, Limits] = {
    # CUDA C++ Programming Guide, table "Technical Specifications per Compute Capability".
    "sm_80": Limits(163 * KIB, 164 * KIB, 64, 32),
    "sm_86": Limits(99 * KIB, 100 * KIB, 48, 16),
    "sm_89": Limits(99 * KIB, 100 * KIB, 48, 24),
    "sm_90": Limits(227 * KIB, 228 * KIB, 64, 32),
    "sm_100": Limits(227 * KIB, 228 * KIB, 64, 32),
    "sm_103": Limits(227 * KIB, 228 * KIB, 64, 32),
    "sm_120": Limits(99 * KIB, 100 * KIB, 48, 24),
    "sm_121": Limits(99 * KIB, 100 * KIB, 48, 24),
    # AMD CDNA 2, 3 and 4 white papers: LDS of 64, 64 and 160 KiB a compute unit, 512 KiB of vector
    # registers.
    "gfx90a": Limits(64 * KIB, 64 * KIB, 32, 32, 131072, 64),
    "gfx942": Limits(64 * KIB, 64 * KIB, 32, 32, 131072, 64),
    "gfx950": Limits(160 * KIB, 160 * KIB, 32, 32, 131072, 64),
    # RDNA 3 and 4 instruction set guides: a workgroup processor has 128 KiB of LDS, 64 of them for
    # a block, and four vector units of 192 KiB of registers and 16 warps.
    "gfx1100": Limits(64 * KIB, 128 * KIB, 64, 32, 196608),
    "gfx1201": Limits(64 * KIB, 128 * KIB, 64, 32, 196608),
}


FAMILY = {"sm_103": "sm_100", "sm_121": "sm_120", "gfx90a": "gfx942"}
"""Architectures of the family of another one, with its limits: they take its entries.

Of NVIDIA, what is compiled for sm_100f runs on compute capability 10.3 too, for sm_120f on 12.1
(CUDA C++ Programming Guide, "Family-Specific Features"). A binary of AMD runs on its own
architecture alone, and each kernel is compiled for the GPU that calls it. CDNA 2 has the registers,
the LDS and the 16-bit matrix instructions of CDNA 3. Every kernel of the MI300X's table compiles
for it and spills in no loop, which a test holds.
"""


class DataSheet(NamedTuple):
    """One product: SMs, MHz, GB/s (1e9 bytes a second), MiB of L2, GB of memory.

    sms: compute units of CDNA, pairs of them (workgroup processors) of RDNA. matrix: floating-point
    operations of one SM in a clock cycle, dense, 16-bit operands summed in float32.
    """

    name: str
    arch: str
    sms: int
    clock_mhz: int
    bandwidth_gbs: float
    matrix: int
    l2_mib: int
    memory_gb: int


SOURCES: dict[str, str] = {
    "sm_80": "A100 white paper; data sheets of the A100 and the A30",
    "sm_86": "GA102 white paper; data sheets of the A10, A10G, A40 and RTX A6000",
    "sm_89": "Ada white paper; data sheets of the L4, L40, L40S and RTX 6000 Ada",
    "sm_90": "H100 white paper; data sheets of the H100, H200 and GH200",
    "sm_100": "data sheets of the DGX B200 and the GB200 NVL72; Blackwell tuning guide",
    "sm_103": "HGX B300 data sheet; NVIDIA's article Inside Blackwell Ultra",
    "sm_120": "RTX Blackwell and RTX PRO 6000 Blackwell white papers",
    "sm_121": "DGX Spark data sheet",
    "gfx90a": "CDNA 2 white paper; data sheets of the MI210 and the MI250X",
    "gfx942": "CDNA 3 white paper; data sheets of the MI300X and the MI325X",
    "gfx950": "CDNA 4 white paper; MI355X data sheet",
    "gfx1100": "RDNA 3 instruction set guide; AMD's specifications of the RX 7900 XTX",
    "gfx1201": "RDNA 4 instruction set guide; AMD's specifications of the RX 9070 XT",
}
"""Where the rows of an architecture stand, in short; comments at the rows have the details."""

# Memory is that of the same data sheets: an eighth of a DGX B200's 1440 GB, a 72nd of the NVL72's
# 13.4 TB.
DATA_SHEETS = (
    # NVIDIA A100 Tensor Core GPU Architecture white paper; A100 data sheets: 312 TFLOP/s, 2039 and
    # 1555 GB/s, 40 MB of L2; PCIe 80 GB: 1935 GB/s.
    DataSheet("NVIDIA A100-SXM4-80GB", "sm_80", 108, 1410, 2039.0, 2048, 40, 80),
    DataSheet("NVIDIA A100-SXM4-40GB", "sm_80", 108, 1410, 1555.0, 2048, 40, 40),
    DataSheet("NVIDIA A100 80GB PCIe", "sm_80", 108, 1410, 1935.0, 2048, 40, 80),
    # A30 data sheet: 165 TFLOP/s, 933 GB/s; 56 SMs, 1440 MHz and 24 MB of L2: TechPowerUp.
    DataSheet("NVIDIA A30", "sm_80", 56, 1440, 933.0, 2048, 24, 24),
    # A10 data sheet: 125 TFLOP/s, 600 GB/s; GA102 white paper: 6 MB of L2; 1695 MHz: TechPowerUp.
    DataSheet("NVIDIA A10", "sm_86", 72, 1695, 600.0, 1024, 6, 24),
    # A10G data sheet: 70 TFLOP/s, 600 GB/s; 80 SMs and 1710 MHz: TechPowerUp. 70 TFLOP/s are half
    # of the A10's rate.
    DataSheet("NVIDIA A10G", "sm_86", 80, 1710, 600.0, 512, 6, 24),
    # A40 data sheet: 149.7 TFLOP/s, 696 GB/s. RTX A6000 data sheet: 309.7 TFLOP/s sparse, 768 GB/s.
    DataSheet("NVIDIA A40", "sm_86", 84, 1740, 696.0, 1024, 6, 48),
    DataSheet("NVIDIA RTX A6000", "sm_86", 84, 1800, 768.0, 1024, 6, 48),
    # GA102 white paper: 71 and 59.5 TFLOP/s FP16 with FP32 accumulate, 936 and 760 GB/s.
    DataSheet("NVIDIA GeForce RTX 3090", "sm_86", 82, 1695, 936.0, 512, 6, 24),
    DataSheet("NVIDIA GeForce RTX 3080", "sm_86", 68, 1710, 760.0, 512, 5, 10),
    # L4 data sheet: 121 TFLOP/s dense, 300 GB/s, 30.3 TFLOP/s of FP32 (58 SMs at 2040 MHz). L40S
    # data sheet: 362 TFLOP/s dense and 733 sparse, half of which is 366 at 2520 MHz; 864 GB/s. L40
    # data sheet: 181 TFLOP/s dense, half of the L40S's rate.
    DataSheet("NVIDIA L4", "sm_89", 58, 2040, 300.0, 1024, 48, 24),
    DataSheet("NVIDIA L40", "sm_89", 142, 2490, 864.0, 512, 96, 48),
    DataSheet("NVIDIA L40S", "sm_89", 142, 2520, 864.0, 1024, 96, 48),
    # RTX 6000 Ada data sheet: 1457 TFLOP/s of sparse FP8, of which a quarter is dense FP16;
    # 960 GB/s.
    DataSheet("NVIDIA RTX 6000 Ada Generation", "sm_89", 142, 2505, 960.0, 1024, 96, 48),
    # Ada white paper: 165.2, 97.5 and 58.3 TFLOP/s FP16 with FP32 accumulate; 72, 64 and 36 MiB of
    # L2.
    DataSheet("NVIDIA GeForce RTX 4090", "sm_89", 128, 2520, 1008.0, 512, 72, 24),
    DataSheet("NVIDIA GeForce RTX 4080", "sm_89", 76, 2505, 716.8, 512, 64, 16),
    DataSheet("NVIDIA GeForce RTX 4070", "sm_89", 46, 2475, 504.2, 512, 36, 12),
    # H100 white paper and data sheet: 989 (SXM), 756 (PCIe) and 835 (NVL) TFLOP/s dense, 50 MiB of
    # L2; NVL: 3.9 TB/s. H200 data sheet: 4.8 TB/s. The full die has 12 memory controllers and
    # 60 MiB of L2 (white paper). The H100 uses 10 of them, the H200 all (accel-sim-framework, issue
    # 534), whose devices report 60 MiB. So do the NVL's six stacks, the GH200 and the H20.
    DataSheet("NVIDIA H100 80GB HBM3", "sm_90", 132, 1830, 3352.0, 4096, 50, 80),
    DataSheet("NVIDIA H100 PCIe", "sm_90", 114, 1620, 2039.0, 4096, 50, 80),
    DataSheet("NVIDIA H100 NVL", "sm_90", 132, 1545, 3938.0, 4096, 60, 94),
    DataSheet("NVIDIA H200", "sm_90", 132, 1830, 4800.0, 4096, 60, 141),
    # GH200 data sheet: 990 TFLOP/s dense, 4 TB/s of 96 GB HBM3.
    DataSheet("NVIDIA GH200 480GB", "sm_90", 132, 1830, 4000.0, 4096, 60, 96),
    # H20: 148 TFLOP/s dense bf16, 4 TB/s, 78 SMs, as its sellers publish; 142 were measured
    # (zzc0721/torch-performance-test-data, issue 77). A quarter of the H100's rate gives 148 at
    # 1.85 GHz.
    DataSheet("NVIDIA H20", "sm_90", 78, 1850, 4000.0, 1024, 60, 96),
    # DGX B200 data sheet, an eighth of its 18 PFLOP/s dense bf16 (1.86 GHz; FP32 runs at 1.98) and
    # of its 64 TB/s; 148 SMs as devices report; 126 MB of L2: Blackwell tuning guide.
    DataSheet("NVIDIA B200", "sm_100", 148, 1850, 8000.0, 8192, 126, 180),
    # GB200 NVL72 data sheet: 180 PFLOP/s dense bf16 of 72; 152 SMs as devices report.
    DataSheet("NVIDIA GB200", "sm_100", 152, 2008, 8000.0, 8192, 126, 186),
    # HGX B300 data sheet, an eighth of 18 PFLOP/s dense bf16; the SMs are those of the B200.
    DataSheet("NVIDIA B300 SXM6 AC", "sm_103", 148, 1850, 8000.0, 8192, 126, 288),
    # RTX Blackwell white paper: 209.5, 112.6 and 61.7 TFLOP/s FP16 with FP32 accumulate.
    DataSheet("NVIDIA GeForce RTX 5090", "sm_120", 170, 2407, 1792.0, 512, 96, 32),
    DataSheet("NVIDIA GeForce RTX 5080", "sm_120", 84, 2617, 960.0, 512, 64, 16),
    DataSheet("NVIDIA GeForce RTX 5070", "sm_120", 48, 2512, 672.0, 512, 48, 12),
    # RTX PRO 6000 Blackwell white paper: 503.8 TFLOP/s FP16 with FP32 accumulate, 1792 GB/s, 188
    # SMs, 128 MiB of L2, as devices report.
    DataSheet(
        "NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
        "sm_120",
        188,
        2617,
        1792.0,
        1024,
        128,
        96,
    ),
    # DGX Spark data sheet: 1 PFLOP/s of sparse FP4, 273 GB/s, 6144 cores; 31 TFLOP/s of FP32 (Hot
    # Chips 2025) are 2.52 GHz. Its rate with FP32 accumulate is not published: that of a GeForce.
    DataSheet("NVIDIA GB10", "sm_121", 48, 2520, 273.0, 512, 24, 128),
    # AMD Instinct data sheets, dense bf16: 181.0 and 191.5 TFLOP/s (MI210 and one of the MI250X's
    # two dies, each a device), 1307.4 (MI300X, MI325X) and 2516.6. CDNA 3 white paper: 4 MiB of L2
    # in each of 8 dies. Devices report that of one die (ROCm issue 4203).
    DataSheet("AMD Instinct MI210", "gfx90a", 104, 1700, 1638.4, 1024, 8, 64),
    DataSheet("AMD Instinct MI250X/MI250", "gfx90a", 110, 1700, 1638.4, 1024, 8, 64),
    DataSheet("AMD Instinct MI300X", "gfx942", 304, 2100, 5300.0, 2048, 32, 192),
    DataSheet("AMD Instinct MI325X", "gfx942", 304, 2100, 6000.0, 2048, 32, 256),
    DataSheet("AMD Instinct MI355X", "gfx950", 256, 2400, 8000.0, 4096, 32, 288),
    # AMD's specifications: 122.8 (RX 7900 XTX) and 195 (RX 9070 XT) TFLOP/s of dense FP16; 96 and
    # 64 compute units. Devices report half as many processors: two are a workgroup processor.
    DataSheet("AMD Radeon RX 7900 XTX", "gfx1100", 48, 2500, 960.0, 1024, 6, 24),
    DataSheet("AMD Radeon RX 9070 XT", "gfx1201", 32, 2970, 640.0, 2048, 8, 16),
)

SAME_AS: dict[str, str] = {
    # Other memory, another power limit, another link or another market: the same SMs.
    "NVIDIA A100-PCIE-40GB": "NVIDIA A100-SXM4-40GB",
    "NVIDIA A800-SXM4-80GB": "NVIDIA A100-SXM4-80GB",
    "NVIDIA A800-SXM4-40GB": "NVIDIA A100-SXM4-40GB",
    "NVIDIA A800 80GB PCIe": "NVIDIA A100 80GB PCIe",
    "NVIDIA H100": "NVIDIA H100 80GB HBM3",
    "NVIDIA H800": "NVIDIA H100 80GB HBM3",
    "NVIDIA H800 PCIe": "NVIDIA H100 PCIe",
    "NVIDIA H200 NVL": "NVIDIA H200",
    "NVIDIA GH200 144G HBM3e": "NVIDIA H200",
    "NVIDIA H20-3e": "NVIDIA H20",
    "NVIDIA GB300": "NVIDIA B300 SXM6 AC",
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": (
        "NVIDIA RTX PRO 6000 Blackwell Workstation Edition"
    ),
    "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition": (
        "NVIDIA RTX PRO 6000 Blackwell Workstation Edition"
    ),
    "NVIDIA GeForce RTX 3080 Ti": "NVIDIA GeForce RTX 3090",
    "NVIDIA GeForce RTX 3090 Ti": "NVIDIA GeForce RTX 3090",
    "NVIDIA GeForce RTX 4090 D": "NVIDIA GeForce RTX 4090",
    "NVIDIA GeForce RTX 4080 SUPER": "NVIDIA GeForce RTX 4080",
    "NVIDIA GeForce RTX 4090 Laptop GPU": "NVIDIA GeForce RTX 4080",
    "NVIDIA GeForce RTX 5090 D": "NVIDIA GeForce RTX 5090",
    "NVIDIA GeForce RTX 5090 D v2": "NVIDIA GeForce RTX 5090",
    "NVIDIA GeForce RTX 5090 Laptop GPU": "NVIDIA GeForce RTX 5080",
    "AMD Instinct MI350X": "AMD Instinct MI355X",
    "Radeon RX 7900 XTX": "AMD Radeon RX 7900 XTX",  # of older drivers
}
"""Products served by the table of another one: the same die, or near enough in SMs and clocks."""


def relative(name: str, arch: str) -> DataSheet | None:
    """A product of an architecture, a GeForce for a GeForce: these multiply at half rate."""
    same = [sheet for sheet in DATA_SHEETS if sheet.arch == arch]
    return min(same, key=lambda each: ("GeForce" in each.name) != ("GeForce" in name), default=None)
