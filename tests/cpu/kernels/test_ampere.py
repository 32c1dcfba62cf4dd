"""Schedule ampere as Triton compiles it for sm_80: its copies, its tiles, its results."""

from __future__ import annotations

import dataclasses

import pytest

from flashgen.schedules.config import KernelConfig
from tests.executed import assert_bits_of, assert_found, assert_right, case
from tests.makers import each, make_config, make_spec


def ampere(br: int = 64, bc: int = 32, order: str = "plain") -> KernelConfig:
    return make_config(br, bc, num_warps=br // 16, num_stages=1, schedule="ampere", order=order)


CASES = (
    case(70, 139),
    case(65, 31, batch=2, heads=4, kv=2, layout="bshd"),
    case(64, 64, layout="sliced"),
    case(130, 40, alignment="top_left"),
    case(3, 97),
)


VARIANTS = [
    ("bfloat16", (64, 64), ampere()),
    ("bfloat16", (256, 256), ampere(128, 64)),
    ("float16", (128, 128), ampere(128, 128)),
    ("float16", (192, 128), ampere(64, 64)),
    ("bfloat16", (64, 192), ampere(128, 32)),
]


@pytest.mark.parametrize(
    ("dtype", "dims", "config", "mask"),
    each([(*variant, mask) for mask in ("causal", "none") for variant in VARIANTS], 10),
)
def test_results(dtype: str, dims: tuple[int, int], config: KernelConfig, mask: str) -> None:
    spec = make_spec(dtype, dims[0], mask, head_dim_v=dims[1])
    assert_right(spec, config, CASES)
    if spec.causal:
        assert_right(spec, dataclasses.replace(config, order="longest_first"), CASES[:1])


@pytest.mark.parametrize("mask", each(["causal", "none"]))
def test_all_short_lengths(mask: str) -> None:
    """Every way in which the masked tiles lie about the diagonal and the end of the keys."""
    lengths = [(q, k) for q in (1, 31, 64, 65) for k in (1, 2, 31, 32, 33, 63, 64, 65, 96, 97, 130)]
    cases = [case(q, k, alignment=a) for q, k in lengths for a in ("bottom_right", "top_left")]
    assert_right(make_spec("bfloat16", 64, mask), ampere(), cases)


INVARIANT = [
    ((64, 64), ampere(64, 64), "causal", False),
    ((64, 64), ampere(64, 64), "none", False),
    ((192, 128), ampere(128, 64, "longest_first"), "causal", True),
    ((256, 256), ampere(128, 64, "longest_first"), "causal", True),
]


@pytest.mark.parametrize(("dims", "config", "mask", "whole_rows"), each(INVARIANT))
def test_segments_give_the_bits_of_a_plain_kernel_of_the_class(
    dims: tuple[int, int], config: KernelConfig, mask: str, whole_rows: bool
) -> None:
    spec = make_spec("bfloat16", dims[0], mask, head_dim_v=dims[1], invariant=True)
    assert_right(spec, config)
    textbook = make_config(64, 64, num_warps=4, num_stages=2, whole_rows=whole_rows)
    assert_bits_of(textbook, spec, config)


WRONG_SEGMENTS = {
    "a whole segment is not closed": ("if segment + SEGMENT <= full_end:", "if seq_k < 0:"),
    "nor one with masked tiles": ("if (start + BC) % SEGMENT == 0:", "if seq_k < 0:"),
    "the scores before the maximum are rounded": ("gl.fma(s, factor, -new_max[:, None])", "s * factor - new_max[:, None]"),
    "the weight of a segment": ("segment_scale = gl.exp2(row_max - new_max)", "segment_scale = gl.exp2(row_max - row_max)"),
}  # fmt: skip


@pytest.mark.parametrize("name", each(WRONG_SEGMENTS))
def test_other_segments_give_other_bits(name: str) -> None:
    spec = make_spec("bfloat16", 64, "causal", invariant=True)
    textbook = make_config(64, 64, num_warps=4, num_stages=2)
    with pytest.raises(AssertionError):
        assert_bits_of(textbook, spec, ampere(64, 64), WRONG_SEGMENTS[name])


D256, D256_CAUSAL = make_spec("bfloat16", 256), make_spec("bfloat16", 256, "causal")
STEP = "                if table_ptr is None:\n                    v_ptrs +="
COPIES = "                for n in gl.static_range(O_PARTS):\n                    v_mask"
WRONG = {
    "scale": (D256, "p = gl.exp2(s * factor", "p = gl.exp2(s"),
    "rescale of a part": (D256, "acc[n] * rescale[:, None])", "acc[n] * (rescale[:, None] if n != 2 else 1.0))"),
    "part of K": (D256, "(k[n], k_ptrs + n * 64,", "(k[n], k_ptrs,"),
    "part of V": (D256, "(v[n], v_ptrs + n * 64,", "(v[n], v_ptrs + n % 3 * 64,"),
    "part of O": (D256, "        o_ptrs + n * 64,", "        o_ptrs + n % 2 * 64,"),
    "sum over the parts": (D256, "k[n].permute((1, 0)).load(B_LAYOUT), s)", "k[n].permute((1, 0)).load(B_LAYOUT), s if n != 3 else s_zeros)"),
    "step of V": (D256, "v_ptrs += BC * stride_vs", "v_ptrs += 0"),
    "step of K": (D256, "k_ptrs += BC * stride_ks", "k_ptrs += 0"),
    "ragged tile": (D256, "last_key = rows * 0 + (seq_k - 1)", "last_key = rows * 0 + seq_k"),
    "diagonal": (D256_CAUSAL, "gl.minimum(rows + diagonal + right, seq_k - 1)", "gl.minimum(rows + diagonal + right + 1, seq_k - 1)"),
    "keys that all rows see": (D256_CAUSAL, "row_start + diagonal + right + 1, 0", "row_start + diagonal + right + BC, 0"),
    "one masked tile fewer": (D256_CAUSAL, "BR // BC + 1", "BR // BC"),
    "rows without a key": (D256_CAUSAL, "gl.where(whole_sum == 0.0, 1.0, whole_sum)", "whole_sum"),
    "GQA": (D256, "kv_head = head // group", "kv_head = head * 0"),
    "sums of lanes": (D256, "gl.sum(row_sum, 1)", "gl.max(row_sum, 1)"),
    "V is awaited": (D256, f"                async_copy.wait_group(0)\n{STEP}", STEP),
    "K is awaited": (D256, f"                async_copy.wait_group(0)\n{COPIES}", COPIES),
    "V takes the place of K": (D256, "(v[n], v_ptrs", "(k[n], v_ptrs"),
}  # fmt: skip


@pytest.mark.parametrize("name", each(WRONG, 99))
def test_a_broken_text_is_found(name: str) -> None:
    spec, *broken = WRONG[name]
    assert_found(spec, ampere(), (broken[0], broken[1]), CASES)
