"""Schedule ampere with features of the scores, packed sequences and pages, as Triton compiles it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashgen.evaluate.check_attention import packed_case
from flashgen.inputs.features import Features
from tests.cpu.kernels.test_ampere import ampere
from tests.cpu.kernels.test_hopper_features import GIVEN
from tests.executed import assert_bits_of, assert_found, assert_right, case
from tests.makers import each, make_config, make_spec

PACKED, PAGED = {"varlen": True}, {"varlen": True, "paged": True}
VARIANTS: dict[str, tuple[Any, ...]] = {
    "window": (64, "causal", ampere(), {"window": True}),
    "window on both sides": (64, "none", ampere(128, 64), {"window": True}),
    "chunk": (128, "causal", ampere(128, 128), {"chunk": True}),
    "sink": (64, "none", ampere(), {"sink": True}),
    "alibi without a mask": (64, "none", ampere(), {"alibi": True}),
    "Gemma 2": (256, "causal", ampere(128, 64), {"window": True, "softcap": True}),
    "packed": (128, "causal", ampere(128, 64, "longest_first"), PACKED),
    "packed without a mask": (64, "none", ampere(), PACKED),
    "gpt-oss, packed": (64, "causal", ampere(), {"window": True, "sink": True, **PACKED}),
    "Llama 4, packed": (128, "causal", ampere(64, 64), {"chunk": True, **PACKED}),
    "in pages": (128, "causal", ampere(128, 128), PAGED),
    "in pages without a mask": (64, "none", ampere(), PAGED),
    "gpt-oss, in pages": (64, "causal", ampere(), {"window": True, "sink": True, **PAGED}),
    "Gemma 2, in pages": (256, "causal", ampere(64, 32), {"window": True, "softcap": True, **PAGED}),
}  # fmt: skip


@pytest.mark.parametrize("name", each(VARIANTS))
def test_every_variant_is_right(name: str) -> None:
    dim, mask, config, features = VARIANTS[name]
    assert_right(make_spec("bfloat16", dim, mask, **features), config)


@pytest.mark.slow("a kernel of wide heads")
def test_latent_heads_and_half_precision() -> None:
    spec = make_spec("float16", 192, "causal", head_dim_v=128, window=True, **PACKED)
    assert_right(spec, ampere(128, 32))


def test_all_features_at_once() -> None:
    """Pages among them; a sequence of one row, one without keys, and a neighbour's garbage."""
    on = dict.fromkeys(("window", "sink", "softcap", "alibi"), True)
    few = packed_case([(70, 133), (1, 64), (9, 0)], heads=2, kv_heads=1, page_size=16, varied=True)
    assert_right(make_spec("bfloat16", 64, "none", **on, **PAGED), ampere(), [few])


ALIBI = {"alibi": {"slopes": torch.tensor([0.01])}}
INVARIANT: dict[str, tuple[Any, ...]] = {
    "gpt-oss": (64, "causal", ampere(64, 64), {"window": True, "sink": True}),
    "ALiBi and a cap": (64, "causal", ampere(64, 64), {"alibi": True, "softcap": True}),
    "Llama 4": (128, "causal", ampere(128, 64), {"chunk": True}),
    "both sides": (64, "none", ampere(64, 64), {"window": True}),
}


@pytest.mark.parametrize("name", each(INVARIANT))
def test_segments_give_the_bits_of_a_plain_kernel_of_the_class(name: str) -> None:
    dim, mask, config, on = INVARIANT[name]
    spec = make_spec("bfloat16", dim, mask, invariant=True, **on)
    plain = make_config(64, 64, num_warps=4, num_stages=2, whole_rows=dim > 64)
    given = {key: value for word in on for key, value in (GIVEN | ALIBI)[word].items()}
    assert_bits_of(plain, spec, config, features=Features(**given))


ON = make_spec("bfloat16", 64, "causal", window=True, sink=True, varlen=True, paged=True)
WINDOW, CHUNK, CAP, SINK, SLOPES, IN_PAGES, IN_A_ROW = (
    make_spec("bfloat16", 64, "causal", **on)
    for on in (
        {"window": True}, {"chunk": True}, {"softcap": True}, {"sink": True}, {"alibi": True},
        PAGED, PACKED,
    )
)  # fmt: skip
BOTH = make_spec("bfloat16", 64, "none", window=True)
SEGMENTS = make_spec("bfloat16", 64, "causal", window=True, sink=True, invariant=True)
WINDOWS = [case(200, 330)] * 4 + [case(129, 129, "top_left")] * 3
"""Each place draws another window, or another chunk."""
PLAIN, FEW = [case(200, 330, heads=2)], [case(64, 2, heads=8)]
LENGTHS = [(0, 3), (1, 64), (9, 0), (70, 133)]
ROWS = [
    packed_case(LENGTHS, heads=2, kv_heads=1, spare=(3, 2), tail=(5, 4)),
    packed_case(LENGTHS, heads=2, kv_heads=1, page_size=16, varied=True),
]
MUTANTS: dict[str, tuple[Any, Any, str, str]] = {
    "first keys are not hidden": (WINDOW, WINDOWS, "< first_key[:, None]", "< first_key[:, None] * 0"),
    "one first key too many": (WINDOW, WINDOWS, "< first_key[:, None]", "<= first_key[:, None]"),
    "a hiding tile too few": (WINDOW, WINDOWS, "start < full_begin", "start < full_begin - BC"),
    "the last row's first key is the first row's": (
        WINDOW, WINDOWS, "first_key_of(row_start + BR - 1 + diagonal", "first_key_of(row_start + diagonal"),
    "the walk begins a tile late": (WINDOW, WINDOWS, "gl.minimum(key_begin, seq_k) // BC", "gl.minimum(key_begin + BC, seq_k) // BC"),
    "K does not begin there": (WINDOW, WINDOWS, "k_ptrs += key_begin", "k_ptrs += 0 * key_begin"),
    "V does not begin there": (WINDOW, WINDOWS, "v_ptrs += key_begin", "v_ptrs += 0 * key_begin"),
    "first K by the tile of 0": (WINDOW, [case(3, 70)] * 4, "(left > key_begin)", "(left > BC)"),
    "the right side is forgotten": (BOTH, WINDOWS, "right = 0 if window_right is None else window_right", "right = 0"),
    "the left side by one": (BOTH, WINDOWS, "- window_left", "- window_left + 1"),
    "chunks begin at 0": (CHUNK, WINDOWS, "gl.load(chunk_start_ptr + batch) % chunk", "gl.load(chunk_start_ptr + batch) * 0"),
    "the cap's inverse": (CAP, PLAIN, "scale_log2e * inverse_cap", "inverse_cap"),
    "a capped score is scaled again": (CAP, PLAIN, "factor = 1.0 if SCALED", "factor = scale_log2e if SCALED"),
    "the slope of another head": (SLOPES, PLAIN, "+ head * stride_slopes_h", "+ (head ^ 1) * stride_slopes_h"),
    "slopes count from the row": (SLOPES, PLAIN, "(rows + diagonal)[:, None] -", "rows[:, None] -"),
    "no sink in the sum": (SINK, FEW, " + gl.exp2(sink - new_max)", ""),
    "the sink of another head": (SINK, FEW, "sinks_ptr + head)", "sinks_ptr + (head ^ 1))"),
    "O is not rescaled by the sink": (SINK, FEW, "inverse = rescale /", "inverse = 1.0 /"),
    "a sequence begins at 0": (IN_A_ROW, ROWS[:1], "x_ptr += begin * stride_s", "x_ptr += begin * 0"),
    "LSE of the first sequence": (IN_A_ROW, ROWS[:1], "total_q + q_begin", "total_q"),
    "places of no sequence are left": (IN_A_ROW, ROWS[:1], "mask=(unused < unused_end)[:, None]", "mask=(unused < 0)[:, None]"),
    "their LSE as well": (IN_A_ROW, ROWS[:1], "lse, mask=unused < unused_end", "lse, mask=unused < 0"),
    "pages of another sequence": (IN_PAGES, ROWS[1:], "batch.to(gl.int64) * stride_table", "(batch * 0).to(gl.int64) * stride_table"),
    "K of this tile's pages again": (IN_PAGES, ROWS[1:], "places = table_base + (((start + BC) + keys)", "places = table_base + ((start + keys)"),
    "V of the next tile's pages": (IN_PAGES, ROWS[1:], "v_offsets = (pages * stride_vb", "v_offsets = (pages * 0 * stride_vb"),
    "the slot is 0": (IN_PAGES, ROWS[1:], "& page_mask", "& 0"),
    "the table is read behind its last page": (IN_PAGES, ROWS[1:], "mask=(start + BC) + keys < seq_k, other=0", "mask=keys >= 0, other=0"),
    "the first tile's pages": (ON, ROWS[1:], "(key_begin + keys) >> page_bits", "keys >> page_bits"),
    "segments begin at 0": (SEGMENTS, [case(70, 2119)] * 4, "gl.maximum(segment, begin) if HIDES_FIRST else segment", "segment"),
    "the sink joins no segment": (SEGMENTS, FEW, "total_sum = gl.full([BR], 1.0", "total_sum = gl.full([BR], 0.0"),
}  # fmt: skip


@pytest.mark.parametrize("mutant", each(MUTANTS, 24))
def test_a_broken_text_is_found(mutant: str) -> None:
    spec, cases, old, new = MUTANTS[mutant]
    bc = 64 if spec.invariant else 32
    assert_found(spec, ampere(64, bc), (old, new), cases)
