"""Gpu: what a kernel must fit and what bounds its speed; read from a device, or a target known by
name.

Facts of known targets come from the vendors' public documents, named beside each row. Limits per SM
and per block are table "Technical Specifications per Compute Capability" of the CUDA C++
Programming Guide; the peak is dense 16-bit matrix work with float32 accumulation, as the data sheet
gives it.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, fields
from typing import NamedTuple, Protocol

from flashgen.errors import InvalidArgument

KIB = 1024

LONGEST_NAME = 100
"""Characters of a product's name: files are named after it."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU product. Bytes are bytes, clocks MHz, bandwidth GB/s (1e9 bytes a second).

    Raises InvalidArgument, naming the field.
    """

    name: str
    arch: str
    sms: int
    shared_per_block: int
    shared_per_sm: int
    registers_per_sm: int
    warps_per_sm: int
    blocks_per_sm: int
    warp_size: int
    l2_bytes: int
    clock_mhz: int | None = None
    bandwidth_gbs: float | None = None
    matrix_flops_per_clock: int | None = None

    def __post_init__(self) -> None:
        if not self.name.isprintable() or not self.slug:
            raise InvalidArgument(f"name must be printable text on one line: got {self.name!r}")
        if not re.fullmatch(r"sm_[0-9]+a?|gfx[0-9a-f]+", self.arch):
            raise InvalidArgument(f"arch must be like sm_90 or gfx942: got {self.arch!r}")
        if len(self.name) > LONGEST_NAME or len(self.arch) > LONGEST_NAME:
            raise InvalidArgument(f"name and arch must have at most {LONGEST_NAME} characters")
        for field in fields(self):
            value = getattr(self, field.name)
            least = 0 if field.name == "l2_bytes" else 1e-9  # some drivers do not report it
            if isinstance(value, int | float) and not least <= value < 2**63:
                raise InvalidArgument(f"{field.name} must be > 0 and < 2^63: got {value}")

    @property
    def slug(self) -> str:
        """The product name, lower case, every run of other characters one underscore."""
        return slug_of(self.name)

    @property
    def is_nvidia(self) -> bool:
        """Whether the architecture is one of NVIDIA's."""
        return self.arch.startswith("sm_")

    @property
    def capability(self) -> int:
        """The compute capability as Triton counts it: 90 for sm_90; 0 for AMD."""
        return int(self.arch.removeprefix("sm_").removesuffix("a")) if self.is_nvidia else 0

    @property
    def peak_tflops(self) -> float | None:
        """Dense 16-bit matrix TFLOP/s at the boost clock; None where it is not known."""
        if self.clock_mhz is None or self.matrix_flops_per_clock is None:
            return None
        return self.sms * self.matrix_flops_per_clock * self.clock_mhz * 1e-6


def slug_of(name: str) -> str:
    """The slug of a product name: "NVIDIA H200" is nvidia_h200."""
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")


class DeviceProperties(Protocol):
    """What torch.cuda.get_device_properties returns, as far as flashgen reads it."""

    name: str
    major: int
    minor: int
    multi_processor_count: int
    shared_memory_per_multiprocessor: int
    max_threads_per_multi_processor: int
    warp_size: int
    L2_cache_size: int


def from_properties(
    props: DeviceProperties, *, shared_per_block: int, registers_per_sm: int
) -> Gpu:
    """The Gpu that a device reports. Clock, bandwidth and peak are those of the known target of
    that name.

    shared_per_block (bytes, opted in) and registers_per_sm come from the driver, because torch does
    not report them. An unlisted product gets None there: it can be tuned, but not estimated.
    """
    known = TARGETS.get(ALIASES.get(slug_of(props.name), slug_of(props.name)))
    gcn = getattr(props, "gcnArchName", "")
    arch = gcn.split(":")[0] if gcn.startswith("gfx") else f"sm_{props.major}{props.minor}"
    same = known if known is not None and known.arch == arch else None
    family = same or next((gpu for gpu in TARGETS.values() if gpu.arch == arch), None)
    return Gpu(
        name=props.name,
        arch=arch,
        sms=props.multi_processor_count,
        shared_per_block=shared_per_block,
        shared_per_sm=props.shared_memory_per_multiprocessor,
        registers_per_sm=registers_per_sm,
        warps_per_sm=props.max_threads_per_multi_processor // props.warp_size,
        blocks_per_sm=family.blocks_per_sm if family else 16,
        warp_size=props.warp_size,
        l2_bytes=props.L2_cache_size,
        clock_mhz=same.clock_mhz if same else None,
        bandwidth_gbs=same.bandwidth_gbs if same else None,
        matrix_flops_per_clock=family.matrix_flops_per_clock if family else None,
    )


class _Sm(NamedTuple):
    """Limits of one architecture, the same for all its products."""

    shared_per_block: int
    shared_per_sm: int
    warps_per_sm: int
    blocks_per_sm: int
    registers_per_sm: int = 65536
    warp_size: int = 32


_SMS = {
    "sm_80": _Sm(163 * KIB, 164 * KIB, 64, 32),
    "sm_86": _Sm(99 * KIB, 100 * KIB, 48, 16),
    "sm_89": _Sm(99 * KIB, 100 * KIB, 48, 24),
    "sm_90": _Sm(227 * KIB, 228 * KIB, 64, 32),
    "sm_100": _Sm(227 * KIB, 228 * KIB, 64, 32),
    "sm_120": _Sm(99 * KIB, 100 * KIB, 48, 24),
    # AMD CDNA 3 and 4 white papers: LDS of 64 and 160 KiB a compute unit, 512 KiB of vector
    # registers.
    "gfx942": _Sm(64 * KIB, 64 * KIB, 32, 32, 131072, 64),
    "gfx950": _Sm(160 * KIB, 160 * KIB, 32, 32, 131072, 64),
}


def _target(
    name: str, arch: str, sms: int, clock: int, bandwidth: float, matrix: int, l2_mib: int
) -> Gpu:
    sm = _SMS[arch]
    return Gpu(
        name=name,
        arch=arch,
        sms=sms,
        shared_per_block=sm.shared_per_block,
        shared_per_sm=sm.shared_per_sm,
        registers_per_sm=sm.registers_per_sm,
        warps_per_sm=sm.warps_per_sm,
        blocks_per_sm=sm.blocks_per_sm,
        warp_size=sm.warp_size,
        l2_bytes=l2_mib * KIB * KIB,
        clock_mhz=clock,
        bandwidth_gbs=bandwidth,
        matrix_flops_per_clock=matrix,
    )


_KNOWN = (
    # Clocks are the boost clocks, or those at which a data sheet's dense TFLOP/s are reached where
    # they are lower. All were read again in November 2026.
    # NVIDIA A100 Tensor Core GPU Architecture white paper; A100 data sheets: 312 TFLOP/s, 2039 and
    # 1555 GB/s, 40 MB of L2.
    _target("NVIDIA A100-SXM4-80GB", "sm_80", 108, 1410, 2039.0, 2048, 40),
    _target("NVIDIA A100-SXM4-40GB", "sm_80", 108, 1410, 1555.0, 2048, 40),
    # A10 data sheet: 125 TFLOP/s, 600 GB/s; GA102 white paper: 6 MB of L2; 1695 MHz: TechPowerUp.
    _target("NVIDIA A10", "sm_86", 72, 1695, 600.0, 1024, 6),
    # GA102 white paper: 71 TFLOP/s FP16 with FP32 accumulate, 936 GB/s.
    _target("NVIDIA GeForce RTX 3090", "sm_86", 82, 1695, 936.0, 512, 6),
    # L4 data sheet: 121 TFLOP/s dense, 300 GB/s, 30.3 TFLOP/s of FP32 (58 SMs at 2040 MHz). L40S
    # data sheet: 362 TFLOP/s dense and 733 sparse, half of which is 366 at 2520 MHz; 864 GB/s.
    _target("NVIDIA L4", "sm_89", 58, 2040, 300.0, 1024, 48),
    _target("NVIDIA L40S", "sm_89", 142, 2520, 864.0, 1024, 96),
    # Ada white paper: 165.2 TFLOP/s FP16 with FP32 accumulate, 1008 GB/s, 72 MiB of L2.
    _target("NVIDIA GeForce RTX 4090", "sm_89", 128, 2520, 1008.0, 512, 72),
    # H100 white paper and data sheet: 989 (SXM) and 756 (PCIe) TFLOP/s dense, 50 MiB of L2; H200
    # data sheet: 4.8 TB/s. The full die has 12 memory controllers and 60 MiB of L2 (white paper).
    # The H100 uses 10 of them, the H200 all (accel-sim-framework, issue 534), whose devices report
    # 60 MiB.
    _target("NVIDIA H100 80GB HBM3", "sm_90", 132, 1830, 3352.0, 4096, 50),
    _target("NVIDIA H100 PCIe", "sm_90", 114, 1620, 2039.0, 4096, 50),
    _target("NVIDIA H200", "sm_90", 132, 1830, 4800.0, 4096, 60),
    # DGX B200 data sheet, an eighth of its 18 PFLOP/s dense bf16 (1.86 GHz; FP32 runs at 1.98) and
    # of its 64 TB/s; 148 SMs as devices report; 126 MB of L2: Blackwell tuning guide.
    _target("NVIDIA B200", "sm_100", 148, 1850, 8000.0, 8192, 126),
    # RTX Blackwell white paper: 209.5 TFLOP/s FP16 with FP32 accumulate, 1792 GB/s.
    _target("NVIDIA GeForce RTX 5090", "sm_120", 170, 2407, 1792.0, 512, 96),
    # AMD Instinct data sheets: 1307.4 and 2516.6 TFLOP/s dense bf16; 5.3 and 8 TB/s. CDNA 3 white
    # paper: 4 MiB of L2 in each of 8 dies. Devices report that of one die (ROCm issue 4203).
    _target("AMD Instinct MI300X", "gfx942", 304, 2100, 5300.0, 2048, 32),
    _target("AMD Instinct MI355X", "gfx950", 256, 2400, 8000.0, 4096, 32),
)

TARGETS: dict[str, Gpu] = {gpu.slug: gpu for gpu in _KNOWN}
"""Known targets by slug."""

ALIASES: dict[str, str] = {
    "nvidia_a100_80gb_pcie": "nvidia_a100_sxm4_80gb",
    "nvidia_a100_pcie_40gb": "nvidia_a100_sxm4_40gb",
    "nvidia_h200_nvl": "nvidia_h200",
    "nvidia_h100_nvl": "nvidia_h100_80gb_hbm3",
    "nvidia_gh200_480gb": "nvidia_h100_80gb_hbm3",
    "nvidia_rtx_6000_ada_generation": "nvidia_l40s",
    "nvidia_geforce_rtx_4090_d": "nvidia_geforce_rtx_4090",
    "nvidia_geforce_rtx_5090_d": "nvidia_geforce_rtx_5090",
}
"""Products served by the table of a close relative: same die or same SM, near enough in clocks."""


def known_target(slug: str) -> Gpu:
    """The known target of this slug. Raises InvalidArgument that names the nearest one."""
    try:
        return TARGETS[ALIASES.get(slug, slug)]
    except KeyError:
        wanted = slug_of(slug)
        near = [known for known in TARGETS if known.startswith(wanted)] if wanted else []
        near = near or difflib.get_close_matches(wanted, TARGETS, n=1, cutoff=0.3)
        hint = f"did you mean {' or '.join(near)}?" if near else "flashgen targets lists them."
        raise InvalidArgument(f"target must be a known slug: got {slug!r}; {hint}") from None
