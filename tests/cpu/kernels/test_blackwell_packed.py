"""Schedule blackwell's forward over packed sequences, as Triton compiles it: results, neighbours, mutants."""

from __future__ import annotations

from typing import Any

import pytest

from flashgen.evaluate.check_attention import packed_case
from flashgen.ptx import FaultsFound
from tests.cpu.kernels.test_blackwell_forward import blackwell
from tests.cpu.kernels.test_hopper_packed import nothing_between, ran
from tests.executed import assert_found, assert_right
from tests.makers import each, make_spec

LONGEST = {"order": "longest_first"}
VARIANTS: dict[str, tuple[Any, ...]] = {
    "gpt-oss": (64, "causal", blackwell(bc=64, stages=3), {"window": True, "sink": True}),
    "causal": (64, "causal", blackwell(stages=4, **LONGEST), {}),
    "no mask": (128, "none", blackwell(stages=3), {}),
    "Mistral": (128, "causal", blackwell(stages=4, **LONGEST), {"window": True}),
    "Gemma 2": (256, "causal", blackwell(128), {"window": True, "softcap": True}),
    "Llama 4": (128, "causal", blackwell(bc=64), {"chunk": True}),
    "slopes of a sequence": (64, "causal", blackwell(bc=64, exp2_by_fma=0), {"alibi": True}),
    "a padded head dim": (96, "causal", blackwell(rescale_log2=0), {}),
}


@pytest.mark.parametrize("name", each(VARIANTS))
def test_every_variant_is_right(name: str) -> None:
    dim, mask, config, features = VARIANTS[name]
    assert_right(make_spec("bfloat16", dim, mask, varlen=True, **features), config)


@pytest.mark.slow("a kernel of wide heads")
def test_latent_heads_and_half_precision() -> None:
    spec = make_spec("float16", 192, "causal", head_dim_v=128, varlen=True, window=True)
    assert_right(spec, blackwell())


CONFIG = blackwell(bc=64)
LENGTHS = ([100, 0, 1, 257, 7, 255, 40], [129, 5, 31, 300, 0, 65, 1])
"""Ragged tiles of one row and key, and of all but one; no query, no key; queries longer than keys."""


FEW = ([257, 0], [65, 5])


@pytest.mark.parametrize(("lengths_q", "lengths_k"), each([FEW, LENGTHS], 2))
def test_no_neighbour_is_read_or_written(lengths_q: list[int], lengths_k: list[int]) -> None:
    worst, rest = ran(lengths_q, lengths_k, gap=3, config=CONFIG)
    assert bool((worst <= 1.0).all()), worst
    assert nothing_between(rest)


MUTANTS: dict[str, tuple[str, str]] = {
    "rows end with the tensor": ("(1 << 30) - size + row", "(1 << 30) - size + row - 128"),
    "keys end a row late": ("of_k = ((k_begin + seq_k)", "of_k = ((k_begin + seq_k + 1)"),
    "keys have the queries' lengths": ("(k_begin + seq_k).to(gl.int32), seq_k)", "(k_begin + seq_k).to(gl.int32), seq_q)"),
    "queries begin at the keys": ("of_q = ((q_begin + seq_q)", "of_q = ((k_begin + seq_q)"),
    "V of the queries' rows": ("at(of_k, kv_head, tile_start, 0)", "at(of_q, kv_head, tile_start, 0)"),
    "O at the keys' rows": ("if sequences is None else sequences[0]", "if sequences is None else sequences[1]"),
    "the diagonal is the tensors'": ("diagonal = bottom_right * (seq_k - seq_q)", "diagonal = bottom_right * (total_k - total_q)"),
    "LSE of another sequence": ("lse_ptr += head.to(gl.int64) * total_q + q_begin", "lse_ptr += head.to(gl.int64) * total_q"),
    "LSE of another head": ("lse_ptr += head.to(gl.int64) * total_q", "lse_ptr += head.to(gl.int64) * seq_q"),
    "LSE behind the last row": ("mask=row < seq_q", "mask=row < seq_q + 1"),
    "programs beyond a sequence store": ("    if row_start >= seq_q:", "    if row_start > 100000:"),
    "a sequence without keys has no tile": ("gl.maximum(gl.cdiv(key_end, BC), 1)", "gl.cdiv(key_end, BC)"),
    "places of no sequence stay": ("unused_end, tiles * BR)", "unused_end * 0, tiles * BR)"),
    "the last sequence's room": ("gl.where(batch == sequences - 1, total, end)", "gl.minimum(end, 0)"),
    "half of the places of no sequence": ("gl.static_range(0, ROWS, 64)", "gl.static_range(0, ROWS // 2, 64)"),
}  # fmt: skip
HARMLESS = {"programs beyond a sequence store"}
"""They store nothing, because rows end: only time is lost."""


@pytest.mark.parametrize("mutant", each(MUTANTS))
def test_a_broken_text_is_found(mutant: str) -> None:
    try:
        worst, rest = ran(*LENGTHS, broken=MUTANTS[mutant], gap=3, config=CONFIG)
    except FaultsFound:
        assert mutant not in HARMLESS
        return
    right = bool((worst <= 1.0).all()) and nothing_between(rest)
    assert right == (mutant in HARMLESS)


IN_PAGES: dict[str, tuple[Any, ...]] = {
    "gpt-oss": (64, 64, "causal", blackwell(bc=64, stages=3), {"window": True, "sink": True}),
    "no mask": (128, 128, "none", blackwell(stages=3), {}),
    "Gemma 2": (256, 256, "causal", blackwell(128), {"window": True, "softcap": True}),
    "three pieces": (192, 128, "causal", blackwell(), {}),
}
SHORT = [(1, 64), (0, 3), (5, 0), (133, 71)]


@pytest.mark.parametrize("name", each(IN_PAGES))
def test_pages_smaller_and_larger_than_a_box(name: str) -> None:
    dim, dim_v, mask, config, features = IN_PAGES[name]
    features = {"varlen": True, "paged": True, **features}
    spec = make_spec("bfloat16", dim, mask, head_dim_v=dim_v, **features)
    few = {"heads": 4, "kv_heads": 2, "varied": True}
    assert_right(spec, config, [packed_case(SHORT, page_size=size, **few) for size in (16, 128)])


PAGE_MUTANTS: dict[str, tuple[str, str]] = {
    "V in the place of K": ("tile_start, 2 * i + 1,", "tile_start, 2 * i,"),
    "a tile's pages are the next one's": ("kv_head, tile_start, 2 * i,", "kv_head, tile_start + BC, 2 * i,"),
    "the table is read behind its last page": ("mask=key < seq_k, other=0", "mask=key >= 0, other=0"),
    "pages of another sequence": ("batch.to(gl.int64) * stride_table", "(batch * 0).to(gl.int64) * stride_table"),
    "the page of the box before": ("page_of(table, key + ROWS,", "page_of(table, key,"),
    "one page for the whole tile": ("page = next_page", "page = page"),
    "a box too few": ("for n in range(count):", "for n in range(count - 1):"),
    "another place of the ring": ("(stage * OF_A_PLACE + column)", "((stage ^ 1) * OF_A_PLACE + column)"),
    "places of pieces": ("(stage * OF_A_PLACE + column)", "(stage * CHUNKS + column)"),
    "more places than the ring has": ("smem.shape[0] // PIECES", "smem.shape[0]"),
    "half of V": ("CHUNKS if PIECES == 1 else 2", "1"),
}  # fmt: skip
OF_PIECES = {"places of pieces", "more places than the ring has", "half of V"}


@pytest.mark.parametrize("mutant", each(PAGE_MUTANTS))
def test_a_broken_text_of_pages_is_found(mutant: str) -> None:
    pieces = mutant in OF_PIECES
    spec = make_spec(
        "bfloat16", 192 if pieces else 64, "causal", head_dim_v=128 if pieces else 64,
        varlen=True, paged=True,
    )  # fmt: skip
    config = blackwell() if pieces else blackwell(bc=64)
    lengths = [(1, 64), (133, 300)] if pieces else SHORT  # the ring is used again
    case = packed_case(lengths, heads=2, kv_heads=1, page_size=16, varied=True)
    assert_found(spec, config, PAGE_MUTANTS[mutant], [case])
