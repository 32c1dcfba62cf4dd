"""Known targets, slugs, and a Gpu read from a device nobody has listed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import triton

from flashgen.errors import InvalidArgument, ToolchainError
from flashgen.kernels import launch
from flashgen.spec.gpu import (
    ALIASES,
    NAMED,
    TARGETS,
    from_properties,
    known_target,
    product_of,
    recognised_as,
    slug_of,
)

PUBLISHED_TFLOPS = {
    "nvidia_a100_sxm4_80gb": 312,
    "nvidia_a100_sxm4_40gb": 312,
    "nvidia_a100_80gb_pcie": 312,
    "nvidia_a30": 165,
    "nvidia_a10": 125,
    "nvidia_a10g": 70,
    "nvidia_a40": 149.7,
    "nvidia_rtx_a6000": 309.7 / 2,
    "nvidia_geforce_rtx_3090": 71,
    "nvidia_geforce_rtx_3080": 59.5,
    "nvidia_l4": 121,
    "nvidia_l40": 181.05,
    "nvidia_l40s": 362,
    "nvidia_rtx_6000_ada_generation": 1457 / 4,
    "nvidia_geforce_rtx_4090": 165.2,
    "nvidia_geforce_rtx_4080": 97.5,
    "nvidia_geforce_rtx_4070": 58.3,
    "nvidia_h100_80gb_hbm3": 989,
    "nvidia_h100_pcie": 756,
    "nvidia_h100_nvl": 835,
    "nvidia_h200": 989,
    "nvidia_gh200_480gb": 990,
    "nvidia_h20": 148,
    "nvidia_b200": 2250,
    "nvidia_gb200": 2500,
    "nvidia_b300_sxm6_ac": 2250,
    "nvidia_geforce_rtx_5090": 209.5,
    "nvidia_geforce_rtx_5080": 112.6,
    "nvidia_geforce_rtx_5070": 61.7,
    "nvidia_rtx_pro_6000_blackwell_workstation_edition": 503.8,
    "nvidia_gb10": 31 * 2,
    "amd_instinct_mi210": 181.0,
    "amd_instinct_mi250x_mi250": 383 / 2,
    "amd_instinct_mi300x": 1307.4,
    "amd_instinct_mi325x": 1307.4,
    "amd_instinct_mi355x": 2516.6,
    "amd_radeon_rx_7900_xtx": 122.8,
    "amd_radeon_rx_9070_xt": 195.0,
}


def test_peaks_are_those_of_the_data_sheets() -> None:
    for slug, tflops in PUBLISHED_TFLOPS.items():
        assert TARGETS[slug].peak_tflops == pytest.approx(tflops, rel=0.015), slug


def test_slugs() -> None:
    assert slug_of("NVIDIA H100 80GB HBM3") == "nvidia_h100_80gb_hbm3"
    assert all(slug == gpu.slug for slug, gpu in TARGETS.items())


@pytest.mark.parametrize("alias", sorted(ALIASES))
def test_an_alias_is_served_by_a_known_product_of_its_vendor(alias: str) -> None:
    product = product_of(alias)
    assert product in TARGETS
    assert alias not in TARGETS
    assert alias.startswith("nvidia_") == TARGETS[product].is_nvidia


def test_without_a_c_compiler_the_device_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoCompiler:
        def __getattr__(self, name: str) -> object:
            raise RuntimeError(
                "Failed to find C compiler. Please specify via CC environment variable"
            )

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(triton.runtime.driver, "_active", NoCompiler())
    with pytest.raises(ToolchainError, match="install gcc or clang"):
        launch.device_gpu(0)


def test_an_unknown_slug_names_the_nearest() -> None:
    with pytest.raises(InvalidArgument, match="nvidia_h200"):
        known_target("nvidia_h2000")
    with pytest.raises(InvalidArgument, match="nvidia_a100_sxm4_80gb or nvidia_a100_sxm4_40gb"):
        known_target("nvidia_a100")
    with pytest.raises(InvalidArgument, match=r"did you mean nvidia_a40\?"):
        known_target("A40")
    with pytest.raises(InvalidArgument, match="nvidia_a100_sxm4_80gb or nvidia_a100_sxm4_40gb"):
        known_target("a100")
    with pytest.raises(InvalidArgument, match="did you mean nvidia_geforce_rtx_3060 or "):
        known_target("RTX 3060")
    with pytest.raises(InvalidArgument, match=r"did you mean nvidia_geforce_rtx_3090_ti\?"):
        known_target("rtx 3090 ti")
    assert known_target("nvidia_h200_nvl").slug == "nvidia_h200"


def test_a_gpu_known_by_name_alone_says_what_is_true_of_it() -> None:
    with pytest.raises(InvalidArgument, match=r"28 SMs\) is known by name alone.*geforce_rtx_3080"):
        known_target("nvidia_geforce_rtx_3060")
    with pytest.raises(InvalidArgument, match="Tesla V100-PCIE-16GB is sm_70: Triton has no code"):
        known_target("tesla_v100_pcie_16gb")
    assert not NAMED.keys() & (TARGETS.keys() | ALIASES.keys())
    for product in NAMED.values():  # whole SMs
        assert product.cores == product.sms * (64 if product.arch in ("sm_70", "sm_75") else 128)
    found = from_properties(device("NVIDIA RTX A4000", 8, 6, sms=48), dict(LIMITS) | CLOCKS)
    assert recognised_as(found).startswith("known by name; ")
    assert found.matrix_flops_per_clock == NAMED[found.slug].matrix_flops_per_clock


LIMITS = {"max_shared_mem": 101376, "max_num_regs": 65536}
CLOCKS = {"sm_clock_rate": 2_550_000, "mem_clock_rate": 10_501_000, "mem_bus_width": 384}


def device(
    name: str, major: int, minor: int, *, sms: int = 77, l2_mib: int = 32
) -> SimpleNamespace:
    return SimpleNamespace(
        name=name,
        major=major,
        minor=minor,
        multi_processor_count=sms,
        shared_memory_per_multiprocessor=102400,
        max_threads_per_multi_processor=1536,
        warp_size=32,
        L2_cache_size=l2_mib << 20,
    )


def test_a_device_nobody_listed_has_what_its_driver_reports() -> None:
    gpu = from_properties(device("NVIDIA Made-Up 9000", 8, 9), LIMITS | CLOCKS)
    assert (gpu.slug, gpu.arch, gpu.sms) == ("nvidia_made_up_9000", "sm_89", 77)
    assert (gpu.warps_per_sm, gpu.clock_mhz) == (48, 2550)
    assert gpu.bandwidth_gbs == pytest.approx(1008.1, abs=0.1)  # 384 bits at 21 Gbit/s
    assert gpu.matrix_flops_per_clock == 1024
    assert "not a known product" in recognised_as(gpu)


def test_an_unknown_geforce_multiplies_at_a_geforces_rate() -> None:
    gpu = from_properties(device("NVIDIA GeForce RTX 4050", 8, 9), LIMITS | CLOCKS)
    assert gpu.matrix_flops_per_clock == 512


@pytest.mark.parametrize("field", ["multi_processor_count", "warp_size", "name"])
def test_a_device_that_reports_nonsense_gets_a_sentence(field: str) -> None:
    props = device("NVIDIA L4", 8, 9)
    setattr(props, field, "" if field == "name" else 0)
    with pytest.raises(InvalidArgument, match=r"must be (> 0|printable text)"):
        from_properties(props, LIMITS)


def test_what_no_driver_reports_is_none() -> None:
    gpu = from_properties(device("NVIDIA Future", 13, 0), LIMITS)
    assert gpu.arch == "sm_130"
    assert (gpu.clock_mhz, gpu.bandwidth_gbs) == (None, None)
    assert gpu.matrix_flops_per_clock is None
    assert gpu.peak_tflops is None
    assert recognised_as(gpu).endswith("without a matrix rate: no known product is sm_130")


def test_a_listed_device_keeps_its_own_limits() -> None:
    gpu = from_properties(device("NVIDIA L4", 8, 9), LIMITS | CLOCKS)
    assert gpu.sms == 77  # what the device says, not what the list says
    assert (gpu.bandwidth_gbs, gpu.clock_mhz) == (300.0, 2040)  # of the data sheet
    assert "known product" in recognised_as(gpu)


def test_a_mig_slice_is_served_as_its_gpu_with_its_share_of_the_memory() -> None:
    slice_of = device("NVIDIA H100 80GB HBM3 MIG 3g.40gb", 9, 0, sms=60, l2_mib=25)
    gpu = from_properties(slice_of, LIMITS | CLOCKS)
    assert product_of(gpu.slug) == "nvidia_h100_80gb_hbm3"
    assert (gpu.sms, gpu.clock_mhz) == (60, 1830)
    assert gpu.bandwidth_gbs == 3352.0 / 2
    assert recognised_as(gpu) == "a MIG slice of NVIDIA H100 80GB HBM3, with 60 of its SMs"


@pytest.mark.parametrize("profile", ["1g.5gb", "1g.10gb+me", "1c.3g.40gb", "7g.80gb"])
def test_names_of_mig_slices(profile: str) -> None:
    slug = slug_of(f"NVIDIA A100-SXM4-80GB MIG {profile}")
    assert product_of(slug) == "nvidia_a100_sxm4_80gb"


def test_an_alias_says_whose_table_serves_it() -> None:
    gpu = from_properties(device("NVIDIA H800", 9, 0, sms=132), LIMITS | CLOCKS)
    assert recognised_as(gpu).startswith("served as NVIDIA H100 80GB HBM3")
    assert gpu.bandwidth_gbs == 3352.0


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("nvidia_h100_80gb_hbm3", "nvidia_h200", True),
        ("nvidia_a100_sxm4_40gb", "nvidia_a100_sxm4_80gb", True),
        ("nvidia_h100_pcie", "nvidia_h200", False),
        ("nvidia_l4", "nvidia_l40s", False),
    ],
)
def test_the_same_chip_beside_other_memory(one: str, other: str, same: bool) -> None:
    assert TARGETS[one].same_chip(TARGETS[other]) is same
