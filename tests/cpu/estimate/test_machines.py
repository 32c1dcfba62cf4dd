"""estimate/machines.py and compile/occupancy.py: parameters that are complete, and what is not known."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from flashgen.compile.occupancy import resident_blocks
from flashgen.errors import NoEstimate
from flashgen.estimate.machines import MACHINES, hmma_cycles, machine_of
from flashgen.spec.gpu import TARGETS

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
