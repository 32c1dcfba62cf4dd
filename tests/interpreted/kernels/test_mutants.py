"""A kernel with one line broken must fail the check that tuning makes. Each mutant is a test."""

from __future__ import annotations

import pytest

from flashgen.reference.cases import CheckCase
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.problem import Problem
from tests.makers import make_config, make_spec
from tests.proving import mutant_passes, sampled

CAUSAL, FULL = make_spec("bfloat16", 32, "causal"), make_spec("bfloat16", 32, "none")
TAIL = 's = tl.where(seen, s, float("-inf"))'
LAST = 's = tl.where((last + keys)[None, :] < seq_k, s, float("-inf"))'

MUTANTS = {
    "causal mask": (CAUSAL, "tl.minimum(rows + diagonal, seq_k - 1)", "seq_k - 1 + 0 * rows"),
    "causal mask by one": (CAUSAL, "tl.minimum(rows + diagonal, seq_k - 1)", "tl.minimum(rows + diagonal + 1, seq_k - 1)"),
    "causal key range": (CAUSAL, "row_start + BR + diagonal", "row_start + BR + diagonal - 1"),
    "causal full tiles": (CAUSAL, "row_start + diagonal + right + 1, 0", "row_start + diagonal + right + BC, 0"),
    "tail mask": (FULL, TAIL, "s = s"),
    "tail mask by one": (FULL, "else key < seq_k", "else key <= seq_k"),
    "rescale of O": (FULL, "[acc[n] * rescale[:, None]", "[acc[n] * 1.0"),
    "rescale of the sum": (FULL, "row_sum * rescale + tl.sum", "row_sum + tl.sum"),
    "final division": (FULL, "else acc[n] * inverse[:, None]", "else acc[n]"),
    "zero of empty rows": (CAUSAL, "tl.where(row_sum == 0.0, 1.0, row_sum)", "row_sum"),
    "GQA head": (FULL, "kv_head = head // group", "kv_head = head % (heads // group)"),
    "GQA group of two": (FULL, "kv_head = head // group", "kv_head = head // 2"),
    "batch": (FULL, "batch_head // heads,", "batch_head // heads * 0,"),
    "batch stride of Q": (FULL, "base_of(q_ptr, batch,", "base_of(q_ptr, 0 * batch,"),
    "head without its batch": (FULL, "batch_head % heads", "batch_head % heads * 0"),
    "GQA head dropped": (FULL, "kv_head = head // group", "kv_head = head * 0"),
    "scale": (FULL, "factor = 1.0 if SCALED else scale_log2e", "factor = 1.0"),
    "LSE base": (FULL, "* LN_2", ""),
    "unwritten rows": (FULL, "in_lse = rows < seq_q", "in_lse = (rows < seq_q - 1)"),
    "V not advanced": (FULL, "v_base += BC * stride_vs", "v_base += 0 * stride_vs"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", sampled(MUTANTS))
def test_fa2_mutant_is_caught(name: str) -> None:
    spec, line, broken = MUTANTS[name]
    config = make_config(32, 16)
    assert mutant_passes(spec, config, line, line), "the kernel must pass unbroken"
    assert not mutant_passes(spec, config, line, broken)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("loads", ["pointer", "descriptor"])
@pytest.mark.parametrize(
    ("spec", "line", "broken"),
    [
        (FULL, LAST, "s = s"),
        (CAUSAL, "whole_end = tl.minimum(full_end, last)", "whole_end = last"),
        (FULL, "s = s_next", "s = s"),
        (CAUSAL, "s = s_next", "s = s"),
        (FULL, "last = last // BC * BC", "last = tl.maximum(last - 1, 0) // BC * BC"),
    ],
    ids=["tail", "mask", "carry", "causal carry", "last tile"],
)
def test_s_ahead_mutant_is_caught(spec: AttentionSpec, line: str, broken: str, loads: str) -> None:
    config = make_config(32, 16, schedule="s_ahead", loads=loads)
    assert not mutant_passes(spec, config, line, broken)


# Of 128 keys a tile: a row that sees none, one tile, and three of which the last is short.
FORMS_FOR_HOPPER = [
    CheckCase(problem=Problem(batch=1, heads=1, kv_heads=1, seq_q=seq_q, seq_k=seq_k))
    for seq_q, seq_k in ((70, 3), (64, 270))
]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    ("head_dim", "bc", "maxnreg", "line", "broken"),
    [
        (128, 128, 0, "if key_end > 0:", "if key_end > BC * 4:"),
        (128, 128, 0, "s = s_next", "s = s"),
        (64, 16, 128, "row_sum = tl.sum(row_sum, 1)", "row_sum = tl.max(row_sum, 1)"),
        (64, 16, 128, "row_sum = row_sum * rescale[:, None]", "row_sum = row_sum * 1.0"),
        (64, 16, 128, "s = s_next", "s = s"),
    ],
    ids=["first product", "carry of 128 keys", "sum of lanes", "rescale of lanes", "carry"],
)
def test_mutant_of_the_forms_for_hopper_is_caught(
    head_dim: int, bc: int, maxnreg: int, line: str, broken: str
) -> None:
    """128 keys of head dim 128, whose first product stands in a branch, and maxnreg, with sums a lane."""
    spec = make_spec("bfloat16", head_dim, "causal")
    config = make_config(
        64, bc, num_warps=8, schedule="s_ahead", loads="descriptor", maxnreg=maxnreg
    )
    assert mutant_passes(spec, config, line, line, FORMS_FOR_HOPPER)
    assert not mutant_passes(spec, config, line, broken, FORMS_FOR_HOPPER)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    ("line", "broken"),
    [
        ("kept = old_sum * tl.exp2(old_max - new_max)", "kept = old_sum"),
        ("* inverse[:, None]", ""),
        ("kept[:, None] * old_o", "old_o"),
    ],
)
def test_fa1_mutant_is_caught(line: str, broken: str) -> None:
    assert not mutant_passes(CAUSAL, make_config(32, 16, schedule="fa1"), line, broken)
