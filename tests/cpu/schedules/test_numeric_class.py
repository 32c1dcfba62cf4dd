"""The numeric class of invariant specs: which configs are of it, and the defaults that every GPU has."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from flashgen.errors import InvalidArgument
from flashgen.schedules.config import config_of
from flashgen.schedules.defaults import default_configs, default_spec
from flashgen.schedules.legality import why_illegal
from flashgen.schedules.numeric_class import SEGMENT, class_name, class_tile, segments
from flashgen.schedules.space import legal_configs, tuned_default
from flashgen.spec.attention import AttentionSpec, spec_of
from flashgen.spec.gpu import TARGETS
from tests.makers import make_spec

NVIDIA = [gpu for gpu in TARGETS.values() if gpu.is_nvidia]
DIRECTIONS = ("forward", "decode", "backward_dq", "backward_dkv", "backward_delta", "combine")


@pytest.mark.parametrize(
    ("spec", "config", "slug", "reason"),
    [
        ("fwd_bf16_d64", "br128_bc32_w8_s2_fa2_ptr", "nvidia_h200", "has bc 64: got 32"),
        ("decode_bf16_d64", "br64_bc128_w4_s2_fa2_ptr", "nvidia_h200", "has bc 64: got 128"),
        ("bwd_dkv_bf16_d64", "br32_bc64_w4_s2_fa2_ptr", "nvidia_h200", "has br 64: got 32"),
        ("fwd_fp32_d64", "br64_bc16_w4_s2_fa2_ptr", "nvidia_h200", "br, bc and num_warps 32, 16, 4"),
        ("bwd_delta_bf16_d64", "br32_bc16_w4_s1_fa2_ptr", "nvidia_h200", "br and num_warps 64, 4"),
        ("bwd_dq_bf16_d64", "br128_bc64_w8_s2_hopper_tma", "nvidia_h200", "fa2 and s_ahead: got"),
        ("decode_bf16_d64", "br16_bc64_w1_s2_fa2_ptr", "nvidia_h200", "64 rows and 4 warps"),
        ("fwd_bf16_d64", "br64_bc64_w8_s2_fa2_ptr", "nvidia_h200", "a warp whole rows"),
        ("decode_bf16_d128", "br64_bc64_w4_s2_fa2_ptr", "nvidia_a100_sxm4_80gb", "a warp whole rows"),
        ("fwd_bf16_d64", "br128_bc64_w4_s2_fa2_ptr", "nvidia_b200", "a warp whole rows"),
        ("fwd_bf16_d64", "br64_bc64_w4_s2_fa2_ptr", "amd_instinct_mi210", "a GPU of NVIDIA"),
    ],
)  # fmt: skip
def test_what_gives_other_bits_is_refused(spec: str, config: str, slug: str, reason: str) -> None:
    found = why_illegal(spec_of(f"{spec}_invariant"), config_of(config), TARGETS[slug])
    assert reason in str(found)


@pytest.mark.parametrize("gpu", NVIDIA, ids=lambda gpu: gpu.slug)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_every_gpu_has_a_default_and_a_choice(direction: str, gpu: object) -> None:
    dims = itertools.product(("bfloat16", "float32"), (64, 128, 256))
    for dtype, dim in (*dims, ("bfloat16", 512)):
        forward = replace(make_spec(dtype, dim, "causal"), invariant=True)
        spec = forward.for_direction(direction)  # type: ignore[arg-type]
        assert spec.invariant
        whole = default_spec(spec)
        configs = default_configs(whole)
        assert any(why_illegal(whole, each, gpu) is None for each in configs)  # type: ignore[arg-type]
        assert why_illegal(spec, tuned_default(spec, gpu), gpu) is None  # type: ignore[arg-type]


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_every_search_has_a_config(direction: str) -> None:
    dims = itertools.product(("bfloat16", "float32"), (64, 256))
    for dtype, dim in (*dims, ("bfloat16", 512)):
        spec = make_spec(dtype, dim, "causal", invariant=True).for_direction(direction)  # type: ignore[arg-type]
        assert legal_configs(spec, TARGETS["nvidia_l4"]), spec.name


def test_a_decode_of_one_warp_has_k_and_v_in_parts() -> None:
    """On an A100 one warp of 16 rows spills with all 128 columns, and 128 rows take twice as long."""
    spec = make_spec("bfloat16", 128, "causal", direction="decode", paged=True, invariant=True)
    found = {config.label for config in legal_configs(spec, TARGETS["nvidia_a100_sxm4_80gb"])}
    assert {"br16_bc64_w1_s3_fa2_ptr_rows", "br16_bc64_w1_s3_fa2_ptr_v2"} <= found
    assert "br16_bc64_w1_s3_fa2_ptr" not in found
    narrow = replace(spec, head_dim=64, head_dim_v=64)
    assert not any(config.whole_rows for config in legal_configs(narrow, TARGETS["nvidia_l4"]))
    assert not any(config.whole_rows for config in legal_configs(spec, TARGETS["nvidia_h200"]))


def test_the_search_stays_in_the_class() -> None:
    spec = replace(make_spec("bfloat16", 128, "causal"), invariant=True)
    found = legal_configs(spec, TARGETS["nvidia_h200"])
    assert {config.bc for config in found} == {64}
    assert {config.schedule for config in found} == {"fa2", "s_ahead"}
    assert {config.br for config in found} >= {64, 128}
    timed = legal_configs(spec, TARGETS["nvidia_h200"], on_gpu=True)
    assert {config.schedule for config in timed} == {"fa2", "s_ahead", "hopper"}
    on_a100 = legal_configs(spec, TARGETS["nvidia_a100_sxm4_80gb"])
    assert {config.schedule for config in on_a100} == {"fa2", "s_ahead", "ampere"}


@pytest.mark.parametrize(
    ("capacity", "streamed", "count"),
    [(1, 1, 1), (SEGMENT, SEGMENT, 1), (SEGMENT + 1, SEGMENT + 1, 2), (9 * SEGMENT, 2, 2),
     (9 * SEGMENT, 1, 1), (9 * SEGMENT, SEGMENT + 1, 2), (9 * SEGMENT, SEGMENT + 2, 3)],
)  # fmt: skip
def test_splits_are_the_segments_that_are_seen(capacity: int, streamed: int, count: int) -> None:
    assert segments(capacity, streamed) == count


def test_the_fused_backward_has_none() -> None:
    forward = replace(make_spec("bfloat16", 64, "causal"), invariant=True)
    with pytest.raises(InvalidArgument, match="invariant needs attention, decode, or a gradient"):
        forward.for_direction("backward_fused")


def test_it_is_named() -> None:
    spec = spec_of("fwd_bf16_d128_causal_invariant")
    assert class_name(spec) == "tiles of 64 keys, sums closed each 1024 keys, whole rows a warp"
    assert class_name(spec.for_direction("backward_dkv")) == "tiles of 64 queries"
    assert class_name(spec.for_direction("combine")).startswith("segments of 1024 keys")
    wide = AttentionSpec(dtype="float32", head_dim=64, head_dim_v=64, mask="none", invariant=True)
    assert class_tile(wide).num_warps == 4
    assert "4 warps" in class_name(wide)
