"""Gpu: what a kernel must fit and what bounds its speed; read from a device, or a target known by
name.

spec/data_sheets.py has the facts of known targets.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from flashgen.errors import InvalidArgument
from flashgen.spec.data_sheets import DATA_SHEETS, KIB, LIMITS, SAME_AS, DataSheet, relative
from flashgen.spec.named import PRODUCTS, Named

LONGEST_NAME = 100
"""Characters of a product's name: files are named after it."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU product.

    Args:
        name: as NVML and torch give it.
        arch: as Triton names it, sm_90 or gfx942.
        sms: streaming multiprocessors, compute units (CDNA) or workgroup processors (RDNA).
        shared_per_block: bytes of shared memory that a block may have.
        shared_per_sm: bytes of shared memory of an SM.
        registers_per_sm: registers of 32 bits.
        warps_per_sm: warps that an SM holds at most.
        blocks_per_sm: blocks that an SM holds at most.
        warp_size: threads of a warp.
        l2_bytes: bytes of L2.
        clock_mhz: MHz under load; None if unknown.
        bandwidth_gbs: GB/s (1e9 bytes a second) of its memory; None if unknown.
        matrix_flops_per_clock: of an SM, dense, 16-bit operands; None if unknown.

    Raises:
        InvalidArgument: naming the field.

    Examples:
        >>> from flashgen.spec import TARGETS
        >>> TARGETS["nvidia_h200"].sms
        132
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

    def same_chip(self, other: Gpu) -> bool:
        """Whether two products hold the same chip, with as many SMs, beside other memory: an H100
        and an H200. What one computes in, the other does within a few percent.
        """
        return self._chip == other._chip

    @property
    def _chip(self) -> tuple[object, ...]:
        return self.arch, self.sms, self.shared_per_block, self.matrix_flops_per_clock

    @property
    def without_tensor_cores(self) -> bool:
        """Whether Triton has no code for the tensor cores: those of Turing and older."""
        return self.is_nvidia and self.capability < 80

    @property
    def peak_tflops(self) -> float | None:
        """Dense 16-bit matrix TFLOP/s at the boost clock; None where it is not known."""
        if self.clock_mhz is None or self.matrix_flops_per_clock is None:
            return None
        return self.sms * self.matrix_flops_per_clock * self.clock_mhz * 1e-6


def slug_of(name: str) -> str:
    """The slug of a product name: "NVIDIA H200" is nvidia_h200."""
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")


def from_properties(props: Any, limits: Mapping[str, int]) -> Gpu:
    """The Gpu that a device reports. props: of torch.cuda.get_device_properties; limits: what
    Triton's driver adds to them.

    Clock, bandwidth and matrix rate are those of the data sheet where the product is known. A MIG
    slice gets the share of the bandwidth that it has of the L2 cache: both are cut into the same
    parts. An unknown product gets the highest clocks that its driver reports, and the matrix rate
    of a known one of its architecture.
    """
    slug = slug_of(props.name)
    gcn = getattr(props, "gcnArchName", "")
    arch = gcn.split(":")[0] if gcn.startswith("gfx") else f"sm_{props.major}{props.minor}"
    known = TARGETS.get(product_of(slug))
    known = known if known is not None and known.arch == arch else None
    sheet = relative(props.name, arch)
    family = known or (TARGETS[slug_of(sheet.name)] if sheet else None)
    return Gpu(
        name=props.name,
        arch=arch,
        sms=props.multi_processor_count,
        shared_per_block=limits["max_shared_mem"],
        shared_per_sm=props.shared_memory_per_multiprocessor,
        registers_per_sm=limits["max_num_regs"],
        warps_per_sm=props.max_threads_per_multi_processor // max(props.warp_size, 1),
        blocks_per_sm=family.blocks_per_sm if family else 16,
        warp_size=props.warp_size,
        l2_bytes=props.L2_cache_size,
        clock_mhz=known.clock_mhz if known else limits.get("sm_clock_rate", 0) // 1000 or None,
        bandwidth_gbs=_bandwidth(props, known) if known else _reported_bandwidth(limits),
        matrix_flops_per_clock=family.matrix_flops_per_clock if family else None,
    )


def _bandwidth(props: Any, known: Gpu) -> float | None:
    whole = known.bandwidth_gbs
    if whole is None or not _MIG.search(slug_of(props.name)):
        return whole
    return whole * min(1.0, float(props.L2_cache_size / known.l2_bytes))


def _reported_bandwidth(limits: Mapping[str, int]) -> float | None:
    """Two transfers in a cycle of the memory's clock (kHz), over the width of its bus (bits)."""
    found = 2 * limits.get("mem_clock_rate", 0) * limits.get("mem_bus_width", 0) / 8 * 1e-6
    return found or None


def _target(sheet: DataSheet) -> Gpu:
    return Gpu(
        name=sheet.name,
        arch=sheet.arch,
        sms=sheet.sms,
        **LIMITS[sheet.arch]._asdict(),
        l2_bytes=sheet.l2_mib * KIB * KIB,
        clock_mhz=sheet.clock_mhz,
        bandwidth_gbs=sheet.bandwidth_gbs,
        matrix_flops_per_clock=sheet.matrix,
    )


TARGETS: dict[str, Gpu] = {slug_of(sheet.name): _target(sheet) for sheet in DATA_SHEETS}
"""Known targets by slug."""

OFFLINE_TARGET = "nvidia_h100_80gb_hbm3"
"""The target if there is no GPU and none is named."""

ALIASES: dict[str, str] = {slug_of(name): slug_of(other) for name, other in SAME_AS.items()}
"""Products served by the table of another one, by slug."""

NAMED: dict[str, Named] = {slug_of(product.name): product for product in PRODUCTS}
"""Products known by name alone, by slug."""

_MIG = re.compile(r"_mig_(\d+c_)?\d+g_\d+gb(_me)?$")
"""What NVML adds to the name of a GPU for a slice of it: MIG 3g.40gb."""


def product_of(slug: str) -> str:
    """The slug of the product that serves another one: that of an alias, or of the whole GPU of
    which it is a MIG slice; any other slug is its own.
    """
    whole = _MIG.sub("", slug)
    return ALIASES.get(whole, whole)


def unlikeness(other: Gpu, gpu: Gpu | Named) -> tuple[bool, int]:
    """Orders GPUs of one architecture, the most like first: by matrix rate, then by SMs."""
    known = gpu.matrix_flops_per_clock
    apart = known is not None and other.matrix_flops_per_clock != known
    return apart, abs(other.sms - gpu.sms)


def _why_named_alone(product: Named) -> str:
    """What is true of a GPU that is known by name alone, and what to do."""
    if product.arch not in LIMITS:
        return (
            f"{product.name} is {product.arch}: Triton has no code for the tensor cores of Turing "
            "and Volta, so no table is for it; use torch's attention there"
        )
    alike = [gpu for gpu in TARGETS.values() if gpu.arch == product.arch]
    near = min(alike, key=lambda gpu: unlikeness(gpu, product))
    return (
        f"{product.name} ({product.arch}, {product.sms} SMs) is known by name alone: the entries "
        f"of {near.slug}, which is most like it, serve it, and nothing is estimated for it. Name "
        "that GPU, or use --gpu on this one"
    )


def recognised_as(gpu: Gpu) -> str:
    """How a device was recognised, in one sentence without its name."""
    product = product_of(gpu.slug)
    if product in NAMED:
        return (
            "known by name; clocks and bandwidth are those of its driver, the matrix rate that of "
            f"another {gpu.arch}"
        )
    if product not in TARGETS:
        rate = f"and the matrix rate of another {gpu.arch}"
        if gpu.matrix_flops_per_clock is None:
            rate = f"and without a matrix rate: no known product is {gpu.arch}"
        return (
            "not a known product; its row is what the driver reports, with the clocks of its "
            f"driver {rate}"
        )
    if product == gpu.slug:
        return "a known product; clock, bandwidth and matrix rate are those of its data sheet"
    if _MIG.search(gpu.slug):
        return f"a MIG slice of {TARGETS[product].name}, with {gpu.sms} of its SMs"
    return f"served as {TARGETS[product].name}, which has the same SMs or nearly as many"


def known_target(slug: str) -> Gpu:
    """The known target of this slug. Raises InvalidArgument that names the nearest one."""
    try:
        return TARGETS[product_of(slug)]
    except KeyError:
        wanted = slug_of(slug)
        if wanted in NAMED:
            raise InvalidArgument(_why_named_alone(NAMED[wanted])) from None
        hint = did_you_mean(wanted, (*TARGETS, *ALIASES, *NAMED))
        raise InvalidArgument(f"target must be a known slug: got {slug!r}; {hint}") from None


def did_you_mean(name: str, slugs: Iterable[str]) -> str:
    """The question that names slugs like what was typed, or where they are listed: those that have
    it as words, as a40 is of nvidia_a40, else that begin so, else the nearest.
    """
    wanted, known = slug_of(name), list(slugs)
    near = [slug for slug in known if wanted and f"_{wanted}_" in f"_{slug}_"]
    near = near or [slug for slug in known if wanted and slug.startswith(wanted)]
    near = near or difflib.get_close_matches(wanted, known, n=1, cutoff=0.3)
    return f"did you mean {' or '.join(near)}?" if near else "flashgen targets lists them."
