"""KernelConfig, why_illegal, and the space: finite, ordered, legal, with its seeds."""

from __future__ import annotations

import dataclasses
from typing import Any, get_args

import pytest

from flashgen.errors import InvalidArgument
from flashgen.kernels.render import render
from flashgen.schedules.base import BY_KEYS
from flashgen.schedules.config import KernelConfig, config_of, kernel_name
from flashgen.schedules.defaults import cache_specs, default_config, default_configs, default_spec
from flashgen.schedules.legality import shared_bound_bytes, why_illegal
from flashgen.schedules.space import block_rule, legal_configs, seed_configs, tuned_default
from flashgen.schedules.whole_rows import on_gpu
from flashgen.spec.gpu import TARGETS
from flashgen.spec.problem import problem_of
from flashgen.spec.vocabulary import DECODING, Direction
from tests.makers import make_config, make_spec

H200, A100, L4 = (TARGETS[s] for s in ("nvidia_h200", "nvidia_a100_sxm4_80gb", "nvidia_l4"))
BACKWARD = [
    make_spec("bfloat16", 128, "causal", bias="additive").for_direction(direction)
    for direction in get_args(Direction)[1:]
    if direction not in DECODING
]
SPECS = [make_spec("bfloat16", d, mask) for d in (64, 96, 256) for mask in ("none", "causal")]


DELTA, DKV = BACKWARD[0], BACKWARD[1]
PLAIN = {
    direction: make_spec("bfloat16", 64, "causal").for_direction(direction)
    for direction in ("backward_delta", "backward_dkv", "backward_dq", "backward_fused")
}
PACKED = make_spec("bfloat16", 64, varlen=True).for_direction("backward_dkv")


def test_a_name_holds_every_field() -> None:
    base = make_config(128, 64)
    others = {
        "br": 64, "bc": 32, "num_warps": 8, "num_stages": 3, "schedule": "s_ahead", "loads": "descriptor",
        "order": "longest_first", "head_dims": "padded", "split_keys": 512, "persistent": True,
        "widening": "native", "v_parts": 2, "maxnreg": 128, "whole_rows": True,
        "next_s": True, "no_turns": True, "exp2_by_fma": 4, "rescale_log2": 8, "blocks_per_sm": 5,
        "pdl": True,
    }  # fmt: skip
    assert set(others) == {field.name for field in dataclasses.fields(KernelConfig)}
    spec = make_spec(mask="causal")
    assert config_of(base.label) == base
    assert config_of((every := KernelConfig(**others)).label) == every
    for field, value in others.items():
        assert (other := dataclasses.replace(base, **{field: value})) == config_of(other.label)
        assert (kernel_name(spec, other) == kernel_name(spec, base)) == (field in OF_THE_LAUNCH)


OF_THE_LAUNCH = ("blocks_per_sm",)


def test_configs_that_differ_in_the_launch_alone_are_one_kernel() -> None:
    spec, config = make_spec(direction="decode"), make_config(16, 32)
    filled = dataclasses.replace(config, blocks_per_sm=5)
    assert filled.label == f"{config.label}_x5"
    assert filled.kernel == config.kernel == config
    assert render(spec, filled) == render(spec, config)


def test_blocks_per_sm_go_with_a_decode_whose_parts_are_not_fixed() -> None:
    gpu, config = TARGETS["nvidia_h200"], make_config(16, 32, blocks_per_sm=2)
    decode = make_spec(direction="decode")
    assert why_illegal(decode, config, gpu) is None
    for spec in (make_spec(), dataclasses.replace(decode, invariant=True)):
        reason = str(why_illegal(spec, config, gpu))
        assert f"whose parts are fixed: got {spec.name}" in reason
    both = dataclasses.replace(config, split_keys=256)
    assert "exclude each other" in str(why_illegal(decode, both, gpu))


def test_the_default_of_a_decode_is_for_two_blocks_on_an_sm() -> None:
    for spec in cache_specs():
        blocks = {config.blocks_per_sm for config in default_configs(spec)}
        assert blocks == ({2} if spec.direction == "decode" else {1})


@pytest.mark.parametrize(
    "label",
    ["", "br128", "br128_bc64_w8_s2_fa2", "br128_bc64_w8_s2_fa2_ptr_", "br48_bc64_w8_s2_fa2_ptr",
     "br128_bc64_w8_s2_fa2_ptr_plain", "br0128_bc64_w8_s2_fa2_ptr",
     "br128_bc64_w8_s2_fa2_ptr_v1", "br128_bc64_w8_s2_fa2_ptr_pers_grp"],
)  # fmt: skip
def test_what_is_no_label_is_refused(label: str) -> None:
    with pytest.raises(InvalidArgument):
        config_of(label)


@pytest.mark.parametrize(
    ("label", "sizes"),
    [
        ("b8_h32_s2048", (8, 32, 32, 2048, 2048)),
        ("b64_h32_kv8_q1_k512", (64, 32, 8, 1, 512)),
        ("b1_h4_kv2_s7", (1, 4, 2, 7, 7)),
        ("b1_h4_q7_k8", (1, 4, 4, 7, 8)),
        ("b0_h0_s0", (0, 0, 0, 0, 0)),
    ],
)
def test_the_label_of_a_problem(label: str, sizes: tuple[int, ...]) -> None:
    problem = problem_of(label)
    assert dataclasses.astuple(problem) == sizes
    assert problem.label == label


@pytest.mark.parametrize(
    "label", ["", "b1_h1", "b1_h1_q1", "b1_h3_kv2_s1", "b1_h1_s1_", "b-1_h1_s1"]
)
def test_what_is_no_problem_is_refused(label: str) -> None:
    with pytest.raises(InvalidArgument):
        problem_of(label)


@pytest.mark.parametrize(
    "field", ["br", "bc", "num_warps", "num_stages", "schedule", "loads", "order"]
)
def test_a_bad_field_is_named(field: str) -> None:
    with pytest.raises(InvalidArgument, match=field):
        make_config(**{field: 7})


@pytest.mark.parametrize(
    ("spec", "config", "gpu", "reason"),
    [
        (make_spec(), make_config(loads="descriptor"), A100, "TMA"),
        (make_spec(), make_config(order="longest_first"), H200, "causal"),
        (make_spec(head_dim=64), make_config(256, 256, num_warps=4), H200, "registers"),
        (make_spec(head_dim=256), make_config(64, 128, num_stages=4), L4, "shared memory"),
        (
            make_spec(head_dim=256),
            make_config(128, 64, num_warps=8, num_stages=3),
            H200,
            "shared memory",
        ),
        (make_spec(head_dim=96), make_config(head_dims="padded"), H200, "powers of two"),
        (make_spec(mask="causal"), make_config(schedule="fa1", order="longest_first"), H200, "fa1"),
        (make_spec(), make_config(schedule="fa1", head_dims="padded"), H200, "true head dims"),
        (make_spec(head_dim=128, varlen=True), make_config(v_parts=2), H200, None),
        (
            make_spec(block_mask=True),
            make_config(persistent=True),
            H200,
            "got plain and persistent",
        ),
        (make_spec(), make_config(256, 64, num_warps=16), TARGETS["amd_instinct_mi300x"], None),
        (make_spec(dropout=True), make_config(schedule="s_ahead"), H200, "dropout"),
        (PLAIN["backward_dkv"], make_config(schedule="s_ahead"), H200, None),
        (PLAIN["backward_dq"], make_config(schedule="s_ahead", loads="descriptor"), H200, None),
        (PLAIN["backward_fused"], make_config(schedule="s_ahead"), A100, None),
        (
            PLAIN["backward_dkv"],
            make_config(schedule="fa1"),
            H200,
            "fa2, s_ahead, hopper and blackwell alone",
        ),
        (PLAIN["backward_delta"], make_config(schedule="s_ahead"), H200, "fa2 alone"),
        (DKV, make_config(schedule="s_ahead"), H200, "features (bias)"),
        (PACKED, make_config(schedule="s_ahead"), H200, "features (varlen)"),
        (DKV, make_config(order="longest_first"), H200, "plain, grouped alone"),
        (DKV, make_config(64, 128, num_warps=8), H200, None),
        (DKV, make_config(64, 128, num_warps=4), H200, "registers"),
        (DKV, make_config(64, 128, num_warps=8, num_stages=5), L4, "shared memory"),
        (DELTA, make_config(64, 32, num_stages=1), H200, "bc is 16"),
        (DELTA, make_config(64, 16, num_stages=1, loads="descriptor"), H200, "pointer loads"),
    ],
)
def test_why_illegal(spec: object, config: object, gpu: object, reason: str | None) -> None:
    said = why_illegal(spec, config, gpu)  # type: ignore[arg-type]
    assert said is None if reason is None else said is not None and reason in said


ONE_OF_AN_ARCH = {gpu.arch: gpu.slug for gpu in TARGETS.values()}.values()
OTHERS = pytest.mark.slow("tests/cpu/table/test_emit.py has all targets")


@pytest.mark.parametrize(
    "gpu",
    [
        pytest.param(gpu, id=slug, marks=() if slug in ONE_OF_AN_ARCH else OTHERS)
        for slug, gpu in TARGETS.items()
    ],
)
def test_every_default_is_legal_on_every_target(gpu: object) -> None:
    for dtype, precision in (
        ("float16", "ieee"),
        ("bfloat16", "ieee"),
        ("float32", "ieee"),
        ("float32", "tf32"),
    ):
        for head_dim in (16, 32, 64, 128, 256):
            for mask in ("none", "causal"):
                spec = make_spec(dtype, head_dim, mask, precision=precision)
                biased = dataclasses.replace(spec, bias="additive")
                for direction in get_args(Direction)[1:]:
                    if direction in DECODING:
                        continue
                    other = biased.for_direction(direction)
                    if other.precision == "ieee":
                        assert why_illegal(other, default_config(other), gpu) is None  # type: ignore[arg-type]
                reason = why_illegal(spec, default_config(spec), gpu)  # type: ignore[arg-type]
                without = ("gfx90a", "gfx950", "gfx1100", "gfx1201")
                if precision == "tf32" and gpu.arch in without:  # type: ignore[attr-defined]
                    assert reason is not None  # served by the ieee default
                else:
                    assert reason is None


def test_default_spec_pads_both_head_dims() -> None:
    spec = default_spec(make_spec(head_dim=192, head_dim_v=128))
    assert (spec.head_dim, spec.head_dim_v) == (256, 256)


def test_twins_are_legal_where_their_configs_are() -> None:
    for spec in SPECS:
        for config in legal_configs(spec, H200):
            assert why_illegal(spec, config.pointer_twin(spec), H200) is None


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_the_space_is_legal_deterministic_and_without_repeats(spec: object) -> None:
    configs = legal_configs(spec, H200)  # type: ignore[arg-type]
    assert configs == legal_configs(spec, H200)  # type: ignore[arg-type]
    assert len(set(configs)) == len(configs) > 100
    assert all(why_illegal(spec, config, H200) is None for config in configs)  # type: ignore[arg-type]
    assert {c.schedule for c in configs} == {"fa2", "s_ahead"}


@pytest.mark.parametrize("gpu", [H200, A100, L4], ids=lambda gpu: gpu.slug)
@pytest.mark.parametrize("spec", BACKWARD, ids=lambda spec: spec.direction)
def test_the_space_of_a_backward_kernel(spec: Any, gpu: Any) -> None:
    configs, seeds = legal_configs(spec, gpu), seed_configs(spec, gpu)
    assert len(set(configs)) == len(configs) > 1
    assert tuned_default(spec, gpu) in seeds
    assert len(set(seeds)) == len(seeds)
    for config in (*configs, *seeds, default_config(spec)):
        assert why_illegal(spec, config, gpu) is None or config.head_dims == "padded"
    # Of 16-bit tiles at head dim 128 a program owns 64 rows or keys at least with 8 warps.
    owned = {(c.bc if spec.direction in BY_KEYS else c.br) for c in configs if c.num_warps == 8}
    assert min(owned) >= 64


@pytest.mark.parametrize("slug", ["nvidia_a100_sxm4_80gb", "nvidia_h200", "nvidia_b200"])
@pytest.mark.parametrize("direction", list(PLAIN))
def test_the_backwards_s_ahead_is_tried_where_it_was_seen_to_overlap(
    direction: str, slug: str
) -> None:
    spec, gpu = PLAIN[direction], TARGETS[slug]
    tried = [
        config
        for config in (*legal_configs(spec, gpu), *seed_configs(spec, gpu))
        if config.schedule == "s_ahead"
    ]
    assert bool(tried) is (gpu.arch == "sm_90" and direction != "backward_delta")
    assert {config.loads for config in tried} <= {"descriptor"}


@pytest.mark.parametrize("gpu", [H200, A100, L4], ids=lambda gpu: gpu.slug)
def test_seeds_hold_the_default_and_the_block_rule(gpu: object) -> None:
    for spec in SPECS:
        seeds = seed_configs(spec, gpu)  # type: ignore[arg-type]
        assert tuned_default(spec, gpu) in seeds  # type: ignore[arg-type]
        assert on_gpu(spec, block_rule(spec, gpu), gpu) in seeds  # type: ignore[arg-type]
        assert len(set(seeds)) == len(seeds)


def test_block_rule_is_the_papers() -> None:
    # A100: M = 163 KiB / 2 bytes = 83456 elements, d = 64: B_c = 326 -> 256, B_r = min(326, 64) = 64.
    rule = block_rule(make_spec(head_dim=64), A100)
    assert (rule.br, rule.bc) == (64, 256)


def test_only_the_forwards_s_ahead_holds_a_tile_more() -> None:
    def bound(spec: Any, schedule: Any) -> int:
        config = make_config(64, 128, num_warps=8, schedule=schedule, loads="descriptor")
        return shared_bound_bytes(spec, config, H200)

    for spec in (PLAIN["backward_dkv"], PLAIN["backward_dq"], PLAIN["backward_fused"]):
        assert bound(spec, "s_ahead") == bound(spec, "fa2")
    forward = make_spec("bfloat16", 64, "causal")
    assert bound(forward, "s_ahead") == bound(forward, "fa2") + 128 * 64 * 2
    freed = make_spec("bfloat16", 128, "causal")  # the template frees the first K before the loop
    assert bound(freed, "s_ahead") == bound(freed, "fa2")


def test_shared_bound_counts_stages() -> None:
    spec = make_spec(head_dim=128)
    two, three = (make_config(128, 64, num_warps=8, num_stages=n) for n in (2, 3))
    tile = 64 * 128 * 2
    assert shared_bound_bytes(spec, three, A100) - shared_bound_bytes(spec, two, A100) == 2 * tile


@pytest.mark.parametrize(
    ("gpu", "fields", "has"),
    [
        ("nvidia_h200", {}, False),  # TMA: by descriptor alone
        ("nvidia_h200", {"varlen": True}, True),
        ("nvidia_a100_sxm4_40gb", {}, True),
        ("nvidia_a100_sxm4_40gb", {"direction": "backward_dq"}, False),
        ("nvidia_h200", {"direction": "backward_dq"}, False),
    ],
)
def test_s_ahead_by_pointer_is_tried_where_there_are_no_descriptors(
    gpu: str, fields: dict[str, Any], has: bool
) -> None:
    spec = make_spec("bfloat16", 128, "causal", **fields)
    ways = {(config.schedule, config.loads) for config in legal_configs(spec, TARGETS[gpu])}
    assert (("s_ahead", "pointer") in ways) == has
    if gpu == "nvidia_h200" and "varlen" not in fields:
        assert ("s_ahead", "descriptor") in ways


@pytest.mark.parametrize(
    ("fields", "config", "here", "elsewhere", "reason"),
    [
        ({}, {"schedule": "s_ahead", "loads": "descriptor", "num_warps": 8, "maxnreg": 128}, "nvidia_h200", "nvidia_b200", "maxnreg was found to pay on sm_90 alone"),
        ({}, {"schedule": "s_ahead", "loads": "descriptor", "num_warps": 8}, "nvidia_h200", "nvidia_b200", "s_ahead is wrong in tensor memory"),
        ({"head_dim_v": 128}, {"br": 64, "bc": 32, "num_warps": 4, "whole_rows": True}, "nvidia_a100_sxm4_40gb", "nvidia_h200", "whole_rows is made for mma.sync"),
    ],
)  # fmt: skip
def test_what_one_architecture_has(
    fields: dict[str, Any], config: dict[str, Any], here: str, elsewhere: str, reason: str
) -> None:
    spec, made = make_spec("bfloat16", 64, "causal", **fields), make_config(**config)
    assert why_illegal(spec, made, TARGETS[here]) is None
    assert reason in str(why_illegal(spec, made, TARGETS[elsewhere]))


def test_pages_go_with_the_textbook_schedule() -> None:
    spec = make_spec("bfloat16", 64, "causal", varlen=True, paged=True)
    for schedule, legal in (("fa2", True), ("s_ahead", False)):
        reason = why_illegal(spec, make_config(64, 64, schedule=schedule), TARGETS["nvidia_h200"])
        assert (reason is None) == legal
        assert legal or "paged needs schedule fa2: got s_ahead" in str(reason)


def test_split_keys_go_with_a_decode() -> None:
    reason = why_illegal(make_spec(), make_config(split_keys=256), TARGETS["nvidia_h200"])
    assert "split_keys needs direction decode: got forward" in str(reason)
