"""Schedule blackwell among the configs: what is legal, who may try it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flashgen.compile.known_bugs import may_be_wrong
from flashgen.schedules.base import BY_KEYS
from flashgen.schedules.blackwell import BLACKWELL, halves, s_places, sums_one, walked_side
from flashgen.schedules.config import KernelConfig, config_of
from flashgen.schedules.legality import shared_bound_bytes, why_illegal
from flashgen.schedules.space import legal_configs, seed_configs
from flashgen.schedules.textbook import FA2
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.gpu import TARGETS, Gpu
from tests.makers import make_config, make_spec

B200, B300, H200 = (TARGETS[f"nvidia_{x}"] for x in ("b200", "b300_sxm6_ac", "h200"))
SPEC = make_spec("bfloat16", 128, "causal")
CONFIG = make_config(
    256, 128, num_warps=8, num_stages=4, schedule="blackwell", loads="descriptor",
    exp2_by_fma=4, rescale_log2=8,
)  # fmt: skip
ONE = replace(CONFIG, br=128, num_warps=4, num_stages=2)
HALVES = replace(CONFIG, br=128, num_stages=2, exp2_by_fma=0, rescale_log2=0)
DKV, FUSED = (SPEC.for_direction(x) for x in ("backward_dkv", "backward_fused"))
WIDE, D512 = (make_spec("bfloat16", dim, "causal") for dim in (256, 512))
PIECES = make_spec("bfloat16", 192, head_dim_v=128)
GEMMA = make_spec("bfloat16", 256, "causal", window=True, softcap=True, varlen=True)


def test_the_label_says_its_knobs() -> None:
    assert CONFIG.label == "br256_bc128_w8_s4_blackwell_tma_fma4_lazy8"
    assert config_of(CONFIG.label) == CONFIG
    assert [c.block_warps(SPEC) for c in (CONFIG, ONE)] == [16, 12]
    assert [HALVES.block_warps(x) for x in (DKV, FUSED)] == [12, 16]
    assert tuple(map(halves, (CONFIG, ONE, HALVES))) == (False, False, True)
    assert HALVES.label == "br128_bc128_w8_s2_blackwell_tma"


@pytest.mark.parametrize("gpu", [B200, B300])
@pytest.mark.parametrize(
    ("spec", "config"),
    [
        (SPEC, CONFIG),
        (make_spec("bfloat16", 128, softcap=True, varlen=True), CONFIG),
        (WIDE, ONE),
        (make_spec("bfloat16", 192), ONE),
        (make_spec("float16", 136, head_dim_v=200), ONE),
        (PIECES, replace(CONFIG, num_stages=2)),
        (make_spec("float16", 40), CONFIG),
        (SPEC, replace(CONFIG, persistent=True, num_stages=3, order="grouped")),
        (make_spec("bfloat16", 128, varlen=True), replace(CONFIG, num_stages=3, persistent=True)),
        (DKV, HALVES),
        (SPEC.for_direction("backward_dq"), replace(HALVES, order="longest_first", exp2_by_fma=4)),
        (make_spec("float16", 40, head_dim_v=72, direction="backward_dkv"), HALVES),
        (make_spec("bfloat16", 64, direction="backward_dq"), replace(HALVES, num_stages=5)),
        (WIDE.for_direction("backward_dq"), replace(HALVES, bc=64)),
        (PIECES.for_direction("backward_dq"), replace(HALVES, bc=64, num_stages=3)),
        (WIDE.for_direction("backward_dkv"), replace(HALVES, br=64)),
        (PIECES.for_direction("backward_dkv"), replace(HALVES, br=64)),
        (FUSED, HALVES),
        (make_spec("bfloat16", 64, direction="backward_fused"), replace(HALVES, num_stages=4)),
        (make_spec("float16", 40, head_dim_v=72, direction="backward_fused"), HALVES),
        (GEMMA.for_direction("backward_dkv"), replace(HALVES, br=64)),
        (GEMMA.for_direction("backward_dq"), replace(HALVES, bc=64)),
    ],
)
def test_what_is_legal(spec: AttentionSpec, config: KernelConfig, gpu: Gpu) -> None:
    assert why_illegal(spec, config, gpu) is None
    assert why_illegal(spec, config.pointer_twin(spec), gpu) is None
    assert config.pointer_twin(spec).schedule == "fa2"


@pytest.mark.parametrize(
    ("spec", "config", "gpu", "word"),
    [
        (SPEC, CONFIG, H200, "tcgen05"),
        (SPEC, replace(CONFIG, loads="pointer"), B200, "descriptor loads"),
        (make_spec("float32", 128), CONFIG, B200, "16-bit"),
        (make_spec("bfloat16", 32), CONFIG, B200, "padded to 64"),
        (SPEC, ONE, B200, "br 256 and 8 warps"),
        (WIDE, CONFIG, B200, "br 128 and 4 warps"),
        (make_spec("bfloat16", 192), CONFIG, B200, "br 128 and 4 warps"),
        (make_spec("bfloat16", 128, head_dim_v=192), ONE, B200, "padded alike"),
        (D512, replace(ONE, bc=64), B200, "640 columns"),
        (D512.for_direction("backward_dq"), replace(HALVES, bc=64), B200, "704 columns"),
        (D512.for_direction("backward_dkv"), replace(HALVES, br=64), B200, "640 columns"),
        (make_spec("bfloat16", 128, head_dim_v=64), CONFIG, B200, "padded alike"),
        (SPEC, replace(CONFIG, bc=32), B200, "64 or 128 keys"),
        (SPEC, replace(CONFIG, num_stages=1), B200, "num_stages 2"),
        (SPEC, replace(CONFIG, persistent=True), B200, "bytes of shared memory"),
        (SPEC, replace(ONE, schedule="fa2", rescale_log2=0), B200, "need schedule blackwell"),
        (make_spec("bfloat16", 128, dropout=True), CONFIG, B200, "dropout"),
        (
            make_spec("bfloat16", 128, softcap=True, direction="backward_fused"),
            HALVES,
            B200,
            "softcap",
        ),
        (
            make_spec("bfloat16", 128, varlen=True, direction="backward_fused"),
            HALVES,
            B200,
            "varlen",
        ),
        (
            make_spec("bfloat16", 128, "causal", varlen=True),
            replace(CONFIG, num_stages=3, order="grouped", persistent=True),
            B200,
            "varlen needs order plain",
        ),
        (FUSED, replace(HALVES, num_stages=3), B200, "need 298496 bytes of shared memory"),
        (FUSED, replace(HALVES, order="longest_first"), B200, "order plain, grouped alone"),
        (FUSED, replace(HALVES, next_s=True), B200, "next_s needs"),
        (FUSED, replace(HALVES, rescale_log2=8), B200, "rescale_log2 needs direction forward"),
        (DKV, replace(HALVES, br=256), B200, "128x128 and 8 warps"),
        (DKV, replace(HALVES, num_warps=4), B200, "128x128 and 8 warps"),
        (DKV, replace(HALVES, br=64), B200, "128x128 and 8 warps"),
        (DKV, replace(HALVES, num_stages=1), B200, "num_stages 2"),
        (DKV, replace(HALVES, num_stages=3), B200, "bytes of shared memory"),
        (DKV, replace(HALVES, rescale_log2=8), B200, "rescale_log2 needs direction forward"),
        (DKV, replace(HALVES, order="longest_first"), B200, "order plain, grouped alone"),
        (DKV, replace(HALVES, persistent=True), B200, "persistent needs direction forward"),
        (PIECES.for_direction("backward_dkv"), HALVES, B200, "tiles of 64x128"),
        (PIECES.for_direction("backward_fused"), HALVES, B200, "take 640 columns"),
        (WIDE.for_direction("backward_dq"), HALVES, B200, "tiles of 128x64"),
        (SPEC.for_direction("backward_dq"), replace(HALVES, bc=64), B200, "tiles of 128x128"),
        (
            WIDE.for_direction("backward_dq"),
            replace(HALVES, bc=64, num_stages=3),
            B200,
            "need 262656 bytes of shared memory",
        ),
        (WIDE.for_direction("backward_dkv"), HALVES, B200, "tiles of 64x128"),
        (
            WIDE.for_direction("backward_dkv"),
            replace(HALVES, br=64, num_stages=3),
            B200,
            "need 264192 bytes of shared memory",
        ),
        (  # LSE, delta and what warps with roles take are too much
            make_spec(head_dim=40, head_dim_v=72, direction="backward_fused"),
            replace(HALVES, num_stages=3),
            B200,
            "need 232960 bytes of shared memory",
        ),
        (WIDE.for_direction("backward_fused"), HALVES, B200, "take 768 columns"),
        (SPEC.for_direction("backward_dq"), HALVES, H200, "tcgen05"),
    ],
)
def test_what_is_illegal(spec: AttentionSpec, config: KernelConfig, gpu: Gpu, word: str) -> None:
    assert word in (why_illegal(spec, config, gpu) or "")


def test_pieces_of_64_columns_take_the_room_of_192() -> None:
    config = replace(CONFIG, num_stages=2)
    assert shared_bound_bytes(PIECES, config, B200) == 2 * 192 * (256 + 2 * 128)


@pytest.mark.parametrize(("spec", "config"), [(SPEC, CONFIG), (DKV, HALVES), (FUSED, HALVES)])
def test_only_a_search_on_a_gpu_tries_it(spec: AttentionSpec, config: KernelConfig) -> None:
    found = [c for c in legal_configs(spec, B200, on_gpu=True) if c.schedule == "blackwell"]
    assert config in found
    assert seed_configs(spec, B200, on_gpu=True)[0].schedule == "blackwell"
    assert not any(c.schedule == "blackwell" for c in legal_configs(spec, B200))


def test_a_second_place_of_s_where_tensor_memory_has_columns() -> None:
    narrow = make_spec("bfloat16", 64)
    for direction in BY_KEYS:
        assert [s_places(x.for_direction(direction)) for x in (narrow, SPEC)] == [2, 1]
    of_rows = [x.for_direction("backward_dq") for x in (narrow, SPEC, WIDE)]
    assert [s_places(x) for x in of_rows] == [2, 2, 2]
    assert [walked_side(x) for x in of_rows] == [128, 128, 64]
    of_keys = [x.for_direction("backward_dkv") for x in (PIECES, WIDE)]
    assert [(s_places(x), walked_side(x)) for x in of_keys] == [(1, 64), (2, 64)]


def test_two_blocks_share_a_tile_of_keys_where_dk_and_dv_do_not_fit_together() -> None:
    found = [x.for_direction("backward_dkv") for x in (SPEC, PIECES, WIDE)]
    assert [sums_one(x) for x in found] == [False, False, True]
    assert [BLACKWELL.blocks_of_a_tile(x) for x in found] == [1, 1, 2]
    assert FA2.blocks_of_a_tile(found[2]) == 1


def test_four_warps_of_tl_dot_are_a_sign_of_trouble_on_sm_100() -> None:
    four, eight = make_config(128, 64, num_warps=4), make_config(128, 64, num_warps=8)
    assert may_be_wrong("sm_100", four)
    assert not may_be_wrong("sm_100", eight)
    assert not may_be_wrong("sm_90", four)
    assert not may_be_wrong("sm_100", ONE)
