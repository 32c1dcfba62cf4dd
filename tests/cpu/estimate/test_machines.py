"""estimate/machines.py and compile/occupancy.py: parameters that are complete, and what is not known."""

from __future__ import annotations

import re
from dataclasses import fields, replace

import pytest

from flashgen.compile.occupancy import resident_blocks
from flashgen.errors import NoEstimate
from flashgen.estimate.machines import (
    MACHINES,
    SUB_PARTITIONS,
    hmma_cycles,
    machine_of,
    matrix_cycles,
    matrix_rate,
)
from flashgen.spec.gpu import TARGETS
from tests.listings import listing

A100, H200 = TARGETS["nvidia_a100_sxm4_40gb"], TARGETS["nvidia_h200"]


@pytest.mark.parametrize("arch", MACHINES)
def test_every_rate_and_latency_is_a_positive_number(arch: str) -> None:
    may_be_none = {"known", "matrix_at_least", "matrix_slows", "tma_late"}
    for field in fields(MACHINES[arch]):
        value = getattr(MACHINES[arch], field.name)
        assert value > 0 or field.name in may_be_none, field.name
    assert (MACHINES[arch].tma_late > 0) == (arch in ("sm_90", "sm_120", "sm_121"))
    assert MACHINES[arch].l2_bytes <= MACHINES[arch].l2_burst_bytes


@pytest.mark.parametrize("slug", ["nvidia_b200", "amd_instinct_mi300x"])
def test_architectures_without_a_model_get_no_estimate(slug: str) -> None:
    gpu = TARGETS[slug]
    with pytest.raises(NoEstimate, match=f"does not know {gpu.arch}: it knows sm_80, sm_86"):
        machine_of(gpu)


@pytest.mark.parametrize("field", ["clock_mhz", "bandwidth_gbs", "matrix_flops_per_clock"])
def test_a_gpu_of_unknown_rates_gets_no_estimate(field: str) -> None:
    with pytest.raises(NoEstimate, match="nvidia_h200 is not known"):
        machine_of(replace(H200, **{field: None}))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("slug", "cycles"),
    [
        ("nvidia_a100_sxm4_40gb", 8),
        ("nvidia_h200", 6),  # not the 4 that wgmma's peak would make
        ("nvidia_a10", 16),
        ("nvidia_geforce_rtx_3090", 32),  # accumulates in float32 at half the rate
        ("nvidia_l4", 16),
        ("nvidia_geforce_rtx_4090", 32),
        ("nvidia_geforce_rtx_5090", 32),
    ],
)
def test_hmma_takes_the_time_of_its_product(slug: str, cycles: float) -> None:
    gpu = TARGETS[slug]
    assert hmma_cycles(machine_of(gpu), gpu) == cycles


PUBLISHED = [
    # White papers and data sheets: dense TFLOP/s, or TOP/s.
    ("nvidia_a100_sxm4_80gb", "HMMA.1688.F32.TF32", 156),
    ("nvidia_a100_sxm4_80gb", "HMMA.16816.F32.BF16", 312),
    ("nvidia_a100_sxm4_80gb", "HMMA.16816.F16", 312),
    ("nvidia_a100_sxm4_80gb", "IMMA.16832.S8.S8.SAT", 624),
    ("nvidia_a10", "IMMA.16832.S8.S8.SAT", 250),
    ("nvidia_a40", "HMMA.16816.F16", 149.7),
    ("nvidia_geforce_rtx_3090", "HMMA.1688.F32.TF32", 35.6),
    ("nvidia_geforce_rtx_3090", "HMMA.16816.F32", 71),
    ("nvidia_geforce_rtx_3090", "HMMA.16816.F16", 142),
    ("nvidia_geforce_rtx_3090", "IMMA.16832.S8.S8.SAT", 284),
    ("nvidia_l4", "QMMA.16832.F32.E4M3.E4M3", 242),
    ("nvidia_l4", "IMMA.16832.U8.S8", 242),
    ("nvidia_l40", "QMMA.16832.F32.E4M3.E4M3", 362),
    ("nvidia_l40", "IMMA.16832.S8.S8", 362),
    ("nvidia_geforce_rtx_4090", "HMMA.16816.F16", 330.3),
    ("nvidia_geforce_rtx_4090", "QMMA.16832.F32.E4M3.E4M3", 330.3),
    ("nvidia_geforce_rtx_4090", "QMMA.16832.F16.E4M3.E4M3", 660.6),
    ("nvidia_geforce_rtx_4090", "IMMA.16832.S8.S8.SAT", 660.6),
    ("nvidia_geforce_rtx_5090", "HMMA.1688.F32.TF32", 104.8),
    ("nvidia_geforce_rtx_5090", "QMMA.16832.F32.E4M3.E4M3", 419),
    ("nvidia_geforce_rtx_5090", "IMMA.16832.S8.S8.SAT", 838),
    ("nvidia_h200", "HGMMA.64x128x8.F32.TF32", 494.5),
    ("nvidia_h200", "HGMMA.64x128x16.F16", 989),
    ("nvidia_h200", "QGMMA.64x128x32.F32.E4M3.E4M3", 1979),
    ("nvidia_h200", "IGMMA.64x128x32.S8.S8", 1979),
    ("nvidia_h20", "HGMMA.64x128x8.F32.TF32", 74),
    ("nvidia_h20", "HGMMA.64x128x16.F32.BF16", 148),
    ("nvidia_h20", "QGMMA.64x128x32.F32.E4M3.E4M3", 296),
]


@pytest.mark.parametrize(("slug", "opcode", "tera"), PUBLISHED)
def test_a_matrix_instruction_is_as_fast_as_its_operands(
    slug: str, opcode: str, tera: float
) -> None:
    """Of the peak, and of the pipe that is replayed."""
    gpu, (instruction,) = TARGETS[slug], listing(f"{opcode} R4, R4, R8, R4").instructions
    assert gpu.peak_tflops is not None
    assert gpu.clock_mhz is not None
    assert gpu.peak_tflops * matrix_rate(gpu, opcode) == pytest.approx(tera, rel=0.015)
    warps = gpu.sms * SUB_PARTITIONS
    cycles = matrix_cycles(machine_of(gpu), gpu, instruction)
    rate = warps * instruction.matrix_flops / cycles * gpu.clock_mhz * 1e-6
    assert rate == pytest.approx(tera, rel=0.015)


@pytest.mark.parametrize(
    ("slug", "opcode"),
    [
        ("nvidia_a100_sxm4_80gb", "DMMA.884"),
        ("nvidia_a100_sxm4_80gb", "IMMA.16864.S4.S4"),
        ("nvidia_a100_sxm4_80gb", "HMMA.SP.16832.F32"),
        ("nvidia_a10g", "HMMA.16816.F16"),
        ("nvidia_a10g", "IMMA.16832.S8.S8.SAT"),
        ("nvidia_l40", "HMMA.16816.F16"),
        ("nvidia_h200", "QMMA.16832.F32.E4M3.E4M3"),
        ("nvidia_geforce_rtx_5090", "QMMA.SF.16832.F32.E4M3.E4M3.E8"),
        ("nvidia_geforce_rtx_5090", "OMMA.SF.16864.F32.E2M1.E2M1.E8"),
    ],
)
def test_a_rate_that_nobody_publishes_is_refused_by_name(slug: str, opcode: str) -> None:
    with pytest.raises(
        NoEstimate, match=re.escape(f"the rate of {opcode} on {slug} is not published")
    ):
        matrix_rate(TARGETS[slug], opcode)


def test_a_matrix_instruction_of_unknown_shape_is_refused_by_name() -> None:
    (instruction,) = listing("HMMA.884.F32 R4, R4, R8, R4").instructions
    with pytest.raises(NoEstimate, match=r"the shape of HMMA\.884\.F32 is not known"):
        matrix_cycles(machine_of(A100), A100, instruction)


@pytest.mark.parametrize(
    ("registers", "shared", "warps", "blocks"),
    [
        (255, 0, 4, 2),
        (168, 0, 4, 3),
        (128, 0, 4, 4),
        (128, 0, 8, 2),
        (32, 0, 4, 16),  # 64 warps
        (32, 0, 1, 32),  # 32 blocks
        (32, 40 * 1024, 4, 4),  # 41 KiB a block of 164 KiB
        (32, 41 * 1024, 4, 3),
        (32, A100.shared_per_block, 4, 1),
        (32, A100.shared_per_block + 1, 4, 0),
        (255, 0, 16, 0),
    ],
)
def test_how_many_blocks_an_a100_holds(
    registers: int, shared: int, warps: int, blocks: int
) -> None:
    assert resident_blocks(registers, shared, warps, A100) == blocks
