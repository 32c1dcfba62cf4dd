"""Known targets, slugs, and a Gpu read from a device nobody has listed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import triton

from flashgen.errors import InvalidArgument, ToolchainError
from flashgen.kernels import launch
from flashgen.spec.gpu import ALIASES, TARGETS, from_properties, known_target, slug_of

PUBLISHED_TFLOPS = {
    "nvidia_a100_sxm4_80gb": 312,
    "nvidia_a100_sxm4_40gb": 312,
    "nvidia_a10": 125,
    "nvidia_l4": 121,
    "nvidia_l40s": 362,
    "nvidia_geforce_rtx_3090": 71,
    "nvidia_geforce_rtx_4090": 165.2,
    "nvidia_geforce_rtx_5090": 209.5,
    "nvidia_h100_80gb_hbm3": 989,
    "nvidia_h100_pcie": 756,
    "nvidia_h200": 989,
    "nvidia_b200": 2250,
    "amd_instinct_mi300x": 1307.4,
    "amd_instinct_mi355x": 2516.6,
}


def test_peaks_are_those_of_the_data_sheets() -> None:
    assert set(TARGETS) == set(PUBLISHED_TFLOPS)
    for slug, tflops in PUBLISHED_TFLOPS.items():
        assert TARGETS[slug].peak_tflops == pytest.approx(tflops, rel=0.015), slug


def test_slugs() -> None:
    assert slug_of("NVIDIA H100 80GB HBM3") == "nvidia_h100_80gb_hbm3"
    assert all(slug == gpu.slug for slug, gpu in TARGETS.items())
    assert all(target in TARGETS and alias not in TARGETS for alias, target in ALIASES.items())


def test_an_alias_is_of_the_same_silicon() -> None:
    assert all(ALIASES[a].split("_")[0] == a.split("_")[0] for a in ALIASES)
    # The workstation card has the full matrix rate, and so the L40S; the RTX 4090 has half of it.
    assert ALIASES["nvidia_rtx_6000_ada_generation"] == "nvidia_l40s"


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
        known_target("nvidia_h20")
    with pytest.raises(InvalidArgument, match="nvidia_a100_sxm4_80gb or nvidia_a100_sxm4_40gb"):
        known_target("nvidia_a100")
    assert known_target("nvidia_h200_nvl").slug == "nvidia_h200"


LIMITS = {"shared_per_block": 101376, "registers_per_sm": 65536}


def device(name: str, major: int, minor: int) -> SimpleNamespace:
    return SimpleNamespace(
        name=name,
        major=major,
        minor=minor,
        multi_processor_count=77,
        shared_memory_per_multiprocessor=102400,
        max_threads_per_multi_processor=1536,
        warp_size=32,
        L2_cache_size=32 << 20,
    )


def test_a_device_nobody_listed_can_be_read() -> None:
    gpu = from_properties(device("NVIDIA Made-Up 9000", 8, 9), **LIMITS)
    assert (gpu.slug, gpu.arch, gpu.sms, gpu.warps_per_sm) == (
        "nvidia_made_up_9000",
        "sm_89",
        77,
        48,
    )
    assert gpu.clock_mhz is None
    assert gpu.bandwidth_gbs is None
    assert gpu.peak_tflops is None
    future = from_properties(device("NVIDIA Future", 13, 0), **LIMITS)
    assert future.arch == "sm_130"
    assert future.matrix_flops_per_clock is None


def test_a_listed_device_keeps_its_own_limits() -> None:
    gpu = from_properties(device("NVIDIA L4", 8, 9), **LIMITS)
    assert gpu.sms == 77  # what the device says, not what the list says
    assert gpu.bandwidth_gbs == 300.0
