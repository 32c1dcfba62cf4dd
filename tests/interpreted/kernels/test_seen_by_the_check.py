"""Wrong kernels that are right in most calls: some number of heads, batches or keys, some strides or a scale
shows them, and the check has a case for each.

A mutant is a text that stands in a kernel once, and what stands in its place.
"""

from __future__ import annotations

import dataclasses

import pytest

from flashgen.evaluate.check import check_loaded
from flashgen.kernels.loader import load_text
from flashgen.kernels.render import render
from flashgen.schedules.config import KernelConfig
from flashgen.spec.attention import AttentionSpec
from tests.makers import make_config, make_spec
from tests.mutants import broken
from tests.proving import sampled

FORWARD, CAUSAL = make_spec("bfloat16", 64, "none"), make_spec("bfloat16", 64, "causal")
INVARIANT = make_spec("bfloat16", 64, "causal", invariant=True)
SLOPES = make_spec("bfloat16", 64, "causal", alibi=True)
CHUNK = make_spec("bfloat16", 64, "causal", chunk=True)
VARLEN = make_spec("bfloat16", 64, "causal", varlen=True)
PAGED = make_spec("bfloat16", 64, "causal", varlen=True, paged=True)
DECODE = make_spec("bfloat16", 64, "none", direction="decode")
PAGES = make_spec("bfloat16", 64, "causal", direction="decode", paged=True)
APPEND = make_spec("bfloat16", 64, direction="append", paged=True)


def backward(direction: str, spec: AttentionSpec = CAUSAL) -> AttentionSpec:
    return spec.for_direction(f"backward_{direction}")  # type: ignore[arg-type]


DQ, DKV, FUSED, DELTA = map(backward, ("dq", "dkv", "fused", "delta"))
S, S_F, S_T = (
    "s = tl.dot(q, tl.trans(k), input_precision=PRECISION)",
    "s = tl.dot(q[0], tl.trans(k[0]), input_precision=PRECISION)",
    "s_t = tl.dot(k, tl.trans(q), input_precision=PRECISION)",
)
JOINS = "total_scale, segment_scale = tl.exp2(total_max - new_max), tl.exp2(row_max - new_max)"
FACTOR = "factor = 1.0 if SCALED else scale_log2e"
OWN_FACTOR = "factor = 1.0 if SCALED else 0.125 * 1.4426950408889634"
PAGE = "pages = tl.load(places, mask=in_k, other=0).to(tl.int64)"

WRONG: dict[str, tuple[AttentionSpec, str, str]] = {
    # Heads of ratios that most models have.
    "heads in turn at ratio 4": (CAUSAL, "kv_head = head // group", "kv_head = tl.where(group == 4, head % (heads // group), head // group)"),
    "heads by three above ratio 3": (FORWARD, "kv_head = head // group", "kv_head = tl.where(group > 3, head // 3, head // group)"),
    "heads in turn at ratio 4 in dQ": (DQ, "kv_head = head // group", "kv_head = tl.where(group == 4, head % (heads // group), head // group)"),
    "a seventh head apart in dQ": (DQ, "kv_head = head // group", "kv_head = head // tl.where(group == 7, 6, group)"),
    "heads in turn at ratio 4 in dK": (DKV, "head = kv_head * group + member", "head = tl.where(group == 4, kv_head + member * kv_heads, kv_head * group + member)"),
    "three heads of a group in dK": (DKV, "tl.range(0, group)", "tl.range(0, tl.minimum(group, 3))"),
    "four heads of a group in dK": (DKV, "tl.range(0, group)", "tl.range(0, tl.minimum(group, 4))"),
    "three heads of a group, fused": (FUSED, "tl.range(0, group)", "tl.range(0, tl.minimum(group, 3))"),
    "heads in turn at ratio 4 in a decode": (DECODE, "heads_of = kv_head * group + rows % group", "heads_of = tl.where(group == 4, kv_head + rows % group * (heads // group), kv_head * group + rows % group)"),
    "six heads of a group in a decode": (DECODE, "queries = rows // group", "queries = rows // tl.where(group == 7, 6, group)"),
    "heads in turn at ratio 4, packed": (VARLEN, "kv_head = head // group", "kv_head = tl.where(group == 4, head % (heads // group), head // group)"),
    # Batches.
    "a third batch reads the second": (CAUSAL, "batch, head = batch_head // heads,", "batch, head = tl.minimum(batch_head // heads, 1),"),
    "a third batch reads the second in dQ": (DQ, "batch, head = batch_head // heads,", "batch, head = tl.minimum(batch_head // heads, 1),"),
    "a third batch reads the second in dK": (DKV, "pid // tiles // kv_heads,", "tl.minimum(pid // tiles // kv_heads, 1),"),
    "a third batch reads the second, fused": (FUSED, "pid // tiles // kv_heads,", "tl.minimum(pid // tiles // kv_heads, 1),"),
    "a third batch reads the second in delta": (DELTA, "batch = (batch_head // heads).to(tl.int64)", "batch = tl.minimum(batch_head // heads, 1).to(tl.int64)"),
    "a fifth batch reads the fourth in a decode": (DECODE, "batch = batch_kv // (heads // group)", "batch = tl.minimum(batch_kv // (heads // group), 3)"),
    "an eighth batch goes to the seventh": (APPEND, "batch = (pid // tiles // (kv_heads + heads)).to(tl.int64)", "batch = tl.minimum(pid // tiles // (kv_heads + heads), 6).to(tl.int64)"),
    # Strides of one tensor for another's.
    "rows of V by K's": (CAUSAL, "v_offsets = keys[:, None] * stride_vs", "v_offsets = keys[:, None] * stride_ks"),
    "heads of V by K's": (CAUSAL, "kv_head, stride_vb, stride_vh,", "kv_head, stride_vb, stride_kh,"),
    "batches of V by K's": (CAUSAL, "kv_head, stride_vb,", "kv_head, stride_kb,"),
    "steps of V by K's": (FORWARD, "v_base += BC * stride_vs", "v_base += BC * stride_ks"),
    "rows of K by V's": (FORWARD, "k_offsets = keys[:, None] * stride_ks", "k_offsets = keys[:, None] * stride_vs"),
    "rows of O by Q's": (CAUSAL, "rows.to(tl.int64)[:, None] * stride_os", "rows.to(tl.int64)[:, None] * stride_qs"),
    "heads of O by Q's": (CAUSAL, "head, stride_ob, stride_oh,", "head, stride_ob, stride_qh,"),
    "batches of O by Q's": (CAUSAL, "head, stride_ob,", "head, stride_qb,"),
    "rows of dV by dK's": (DKV, "[:, None] * stride_dvs", "[:, None] * stride_dks"),
    "heads of dV by dK's": (DKV, "kv_head, stride_dvb, stride_dvh,", "kv_head, stride_dvb, stride_dkh,"),
    "batches of dV by V's": (DKV, "kv_head, stride_dvb,", "kv_head, stride_vb,"),
    "rows of dV by V's": (DKV, "[:, None] * stride_dvs", "[:, None] * stride_vs"),
    "rows of dO by Q's in dK": (DKV, "rows_in_tile[:, None] * stride_dos", "rows_in_tile[:, None] * stride_qs"),
    "rows of dQ by Q's": (DQ, "rows.to(tl.int64)[:, None] * stride_dqs", "rows.to(tl.int64)[:, None] * stride_qs"),
    "heads of dQ by Q's": (DQ, "head, stride_dqb, stride_dqh,", "head, stride_dqb, stride_qh,"),
    "rows of dO by Q's in dQ": (DQ, "rows.to(tl.int64)[:, None] * stride_dos", "rows.to(tl.int64)[:, None] * stride_qs"),
    "heads of V by K's in dQ": (DQ, "kv_head, stride_vb, stride_vh,", "kv_head, stride_vb, stride_kh,"),
    "rows of dO by O's in delta": (DELTA, "do_offsets = rows[:, None] * stride_dos", "do_offsets = rows[:, None] * stride_os"),
    "slots of V by K's": (PAGES, "slots * stride_vs)", "slots * stride_ks)"),
    "heads of V by K's in a decode": (PAGES, "kv_head.to(tl.int64) * stride_vh", "kv_head.to(tl.int64) * stride_kh"),
    "pages of V by K's": (PAGES, "pages * stride_vb", "pages * stride_kb"),
    "heads of O by Q's in a decode": (DECODE, "heads_of.to(tl.int64) * stride_oh", "heads_of.to(tl.int64) * stride_qh"),
    "slots of V by K's in an append": (APPEND, "slots * stride_vs)", "slots * stride_ks)"),
    "pages of V by K's in an append": (APPEND, "pages * stride_vb", "pages * stride_kb"),
    # The scale of a caller.
    "a scale of its own": (CAUSAL, FACTOR, OWN_FACTOR),
    "a scale of its own, packed": (VARLEN, FACTOR, OWN_FACTOR),
    "a scale of its own in a decode": (DECODE, FACTOR, OWN_FACTOR),
    "a scale of its own in the scores of dQ": (DQ, FACTOR, OWN_FACTOR),
    "a scale of its own in dQ": (DQ, "dq *= scale", "dq *= 0.125"),
    "a scale of its own in dK": (DKV, "dk *= scale", "dk *= 0.125"),
    # By batch.
    "slopes of the first batch": (SLOPES, "batch * stride_slopes_b", "0 * stride_slopes_b"),
    "slopes of the first batch in dQ": (backward("dq", SLOPES), "batch * stride_slopes_b", "0 * stride_slopes_b"),
    "slopes of the first batch in dK": (backward("dkv", SLOPES), "batch * stride_slopes_b", "0 * stride_slopes_b"),
    "chunks of the first batch": (CHUNK, "chunk_start_ptr + batch", "chunk_start_ptr + 0 * batch"),
    "chunks of the first batch in dQ": (backward("dq", CHUNK), "chunk_start_ptr + batch", "chunk_start_ptr + 0 * batch"),
    "chunks of the first batch in dK": (backward("dkv", CHUNK), "chunk_start_ptr + batch", "chunk_start_ptr + 0 * batch"),
    # One query, one key.
    "one query": (CAUSAL, S_F, f"{S_F} * tl.where(seq_q == 1, 0.5, 1.0)"),
    "one key": (CAUSAL, S_F, f"{S_F} * tl.where(seq_k == 1, 0.5, 1.0)"),
    "one query in dQ": (DQ, S, f"{S} * tl.where(seq_q == 1, 0.5, 1.0)"),
    "one query in dK": (DKV, S_T, f"{S_T} * tl.where(seq_q == 1, 0.5, 1.0)"),
    # Long walks.
    "a third segment forgotten": (INVARIANT, JOINS, f"{JOINS} * tl.where(segment < 2 * SEGMENT, 1.0, 0.0)"),
    "a third segment of a decode": (INVARIANT.for_direction("decode"), "split_start = tl.minimum(split * SEGMENT,", "split_start = tl.minimum(tl.minimum(split, 1) * SEGMENT,"),
    "keys beyond the sixteenth tile": (CAUSAL, S_F, f"{S_F} + tl.where(start < 16 * BC, 0.0, float('-inf'))"),
    "keys beyond the sixteenth tile in dQ": (DQ, S, f"{S} + tl.where(start < 16 * BC, 0.0, float('-inf'))"),
    "rows beyond the sixteenth tile in dK": (DKV, S_T, f"{S_T} + tl.where(row_start < 16 * BR, 0.0, float('-inf'))"),
    "rows beyond the sixteenth tile, fused": (FUSED, S_T, f"{S_T} + tl.where(row_start < 16 * BR, 0.0, float('-inf'))"),
    "keys beyond the sixteenth tile, packed": (VARLEN, S_F, f"{S_F} + tl.where(start < 16 * BC, 0.0, float('-inf'))"),
    # Splits and pages.
    "a fifth split is the fourth": (PAGES, "split = pid // row_tiles % splits", "split = tl.minimum(pid // row_tiles % splits, 3)"),
    "a fifth part lies on the fourth": (PAGES, "o_ptr + split.to(tl.int64) * stride_part", "o_ptr + tl.minimum(split, 3).to(tl.int64) * stride_part"),
    "pages in 16 bits": (PAGES, PAGE, PAGE.replace(".to(tl.int64)", ".to(tl.int16).to(tl.int64)")),
    "fifteen bits of a page": (PAGES, PAGE, PAGE.replace("tl.load", "32767 & tl.load")),
    # Memory that is not theirs.
    "a row of O too many": (CAUSAL, "o_mask = in_q & in_dims_v[n]", "o_mask = (rows < seq_q + 1)[:, None] & in_dims_v[n]"),
    "a row of LSE too many": (CAUSAL, "in_lse = rows < seq_q", "in_lse = rows < seq_q + 1"),
    "a row of dQ too many": (DQ, "dq.to(q.dtype), mask=in_q & in_dims", "dq.to(q.dtype), mask=(rows < seq_q + 1)[:, None] & in_dims"),
    "a row of dK too many": (DKV, "dk.to(k.dtype), mask=in_k & in_dims", "dk.to(k.dtype), mask=(keys < seq_k + 1)[:, None] & in_dims"),
    "a row of dV too many": (DKV, "dv.to(v.dtype), mask=in_k & in_dims_v", "dv.to(v.dtype), mask=(keys < seq_k + 1)[:, None] & in_dims_v"),
    "a delta too many": (DELTA, "delta, mask=rows < seq_q", "delta, mask=rows < seq_q + 1"),
    "a row of LSE too many in a decode": (DECODE, "lse_mask = (rows < group * seq_q)", "lse_mask = (rows < group * seq_q + 1)"),
    "a key too many in an append": (APPEND, "(rows < new_keys) & (places", "(rows < new_keys + 1) & (places"),
    "Q is doubled in its place": (CAUSAL, "in_lse =", "tl.store(q_base + q_offsets, q[0] + q[0], mask=in_q & in_dims[0])\n    in_lse ="),
    "a row of K behind the last": (FORWARD, "in_k = True if phase == 1 else (start + keys < seq_k)[:, None]", "in_k = True"),
}  # fmt: skip
assert len(WRONG) >= 60


def config_of(spec: AttentionSpec) -> KernelConfig:
    decodes = spec.direction in ("decode", "append") or spec.invariant
    return make_config(16, 64) if decodes else make_config(16, 16)


def passes(name: str) -> bool:
    """Whether the check lets a wrong kernel through."""
    spec, line, new = WRONG[name]
    config = config_of(spec)
    rendered = render(spec, config)
    source = broken(rendered.source, line, new)
    digest = f"{rendered.text_digest}-{name}".replace(" ", "_")
    wrong = dataclasses.replace(rendered, source=source, text_digest=digest)
    return check_loaded(load_text(wrong), spec, config).passed


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_kernel_is_another(name: str) -> None:
    spec, line, new = WRONG[name]
    text = render(spec, config_of(spec)).source
    assert broken(text, line, new) != text


@pytest.mark.parametrize("name", sampled(WRONG))
def test_a_wrong_kernel_is_found(name: str) -> None:
    assert not passes(name)
