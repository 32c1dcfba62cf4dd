"""A backward kernel, or a feature, with one line broken must fail the check that tuning makes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flashgen.kernels.launch import bind
from flashgen.kernels.launch_backward import Backward
from flashgen.kernels.loader import load_kernel
from flashgen.kernels.render import render
from flashgen.reference import gradients
from flashgen.reference.cases import CheckCase
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.problem import Problem
from tests.makers import make_config, make_spec
from tests.proving import mutant_passes, sampled

DELTA = make_spec("bfloat16", 32).for_direction("backward_delta")
DKV, DKV_CAUSAL = (
    make_spec("bfloat16", 32, m).for_direction("backward_dkv") for m in ("none", "causal")
)
DQ, DQ_CAUSAL = (
    make_spec("bfloat16", 32, m).for_direction("backward_dq") for m in ("none", "causal")
)
FUSED = make_spec("bfloat16", 32).for_direction("backward_fused")
DBIAS = make_spec("bfloat16", 32, "causal", bias="additive").for_direction("backward_dbias")


def of(direction: Any, **features: Any) -> AttentionSpec:
    return make_spec("bfloat16", 32, "causal", **features).for_direction(direction)


DROPOUT = {d: of(d, dropout=True) for d in ("forward", "backward_dkv", "backward_dq")}
SEEN_BY = 's_t = tl.where(keys[:, None] <= (rows + diagonal)[None, :], s_t, float("-inf"))'
OFFSET = "generator = (seed, offset.to(tl.uint32), (offset >> 32).to(tl.uint32))"

MUTANTS: dict[str, tuple[AttentionSpec, str, str]] = {
    "D of O alone": (DELTA, "o.to(tl.float32) * do.to(tl.float32)", "o.to(tl.float32) * o.to(tl.float32)"),
    "D of half of O": (DELTA, "tl.sum(o.to(tl.float32)", "0.5 * tl.sum(o.to(tl.float32)"),
    "dLSE forgotten": (DELTA, ", 1) - dlse", ", 1)"),
    "dLSE of the wrong sign": (DELTA, ", 1) - dlse", ", 1) + dlse"),
    "dO's strides": (DELTA, "do_base + do_offsets", "do_base + o_offsets"),
    "no D in dK": (DKV, "(dp_t - delta[None, :])", "dp_t"),
    "no D in dQ": (DQ, "(dp - delta[:, None])", "dp"),
    "no D in dBias": (DBIAS, "(dp - delta[:, None])", "dp"),
    "dK unscaled": (DKV, "dk *= scale", "dk *= 1.0"),
    "dQ unscaled": (DQ, "dq *= scale", "dq *= 1.0"),
    "dS scaled twice": (DQ, "ds = p * (", "ds = scale * p * ("),
    "P without its scale": (DKV, "s_t * factor", "s_t"),
    "group not summed": (DKV, "tl.range(0, group)", "tl.range(0, 1)"),
    "one query head for all": (DKV, "head = kv_head * group + member", "head = kv_head * group"),
    "heads of another group": (DKV, "head = kv_head * group + member", "head = member * kv_heads + kv_head"),
    "batch of LSE": (DKV, "(batch * heads + head).to", "(0 * batch + head).to"),
    "mask dropped in dK, dV": (DKV_CAUSAL, SEEN_BY, "s_t = s_t"),
    "mask by one in dK, dV": (DKV_CAUSAL, "(rows + diagonal)[None, :]", "(rows + diagonal + 1)[None, :]"),
    "first row by one tile": (DKV_CAUSAL, "first_row = least_key - diagonal", "first_row = least_key + BR - diagonal"),
    "mask ends early": (DKV_CAUSAL, "key_start + BC - 1 - diagonal", "key_start - diagonal"),
    "mask dropped in dQ": (DQ_CAUSAL, "s = tl.where(seen, s, float(\"-inf\"))", "s = s"),
    "tail mask in dQ": (DQ, "s = tl.where(seen, s, float(\"-inf\"))", "s = s + 1.0"),
    "mask dropped in dBias": (DBIAS, "s = tl.where(keys[None, :] <= last_key[:, None], s, float(\"-inf\"))", "s = s"),
    "rows that see nothing": (DQ_CAUSAL, "tl.where(lse == float(\"-inf\"), float(\"inf\"), lse * LOG2_E)", "lse * LOG2_E"),
    "dO not advanced": (DKV, "do_base += BR * stride_dos", "do_base += 0 * stride_dos"),
    "V not advanced": (DQ, "v_base += BC * stride_vs", "v_base += 0 * stride_vs"),
    "dQ stored, not added": (FUSED, "tl.atomic_add(dq_ptrs, dq, mask=dq_mask, sem=\"relaxed\")", "tl.store(dq_ptrs, dq, mask=dq_mask)"),
    "dQ of another head": (FUSED, "dq_base = dq_ptr + head_rows", "dq_base = dq_ptr + 0 * head_rows"),
    "bias not added": (of("backward_dkv", bias="additive"), " + bias.to(tl.float32) * LOG2_E", ""),
    "bias of the wrong base": (of("forward", bias="additive"), "bias.to(tl.float32) * LOG2_E", "bias.to(tl.float32)"),
    "bias not advanced": (of("backward_dkv", bias="additive"), "bias_base += bias_step", "bias_base += 0 * bias_step"),
    "bias of the first head": (of("backward_dq", bias="additive"), "head.to(tl.int64) * stride_bias_h", "0 * stride_bias_h"),
    "mask turned around": (of("backward_dq", bias="boolean"), "bias != 0", "bias == 0"),
    "dBias of one batch": (DBIAS, "steps = batch_steps * head_steps", "steps = head_steps"),
    "slope of the wrong sign": (of("backward_dq", alibi=True), "s -= slope_log2e", "s += slope_log2e"),
    "slope of the first head": (of("backward_dkv", alibi=True), "head * stride_slopes_h", "0 * stride_slopes_h"),
    "no dropout of P": (DROPOUT["backward_dkv"], "kept_t = tl.where(keep, p_t, 0.0)", "kept_t = p_t"),
    "dropout of D": (DROPOUT["backward_dq"], "- p * delta", "- kept * delta"),
    "kept not scaled in dV": (DROPOUT["backward_dkv"], "dv *= keep_scale", "dv *= 1.0"),
    "kept not scaled in dP": (DROPOUT["backward_dq"], "(dp * keep_scale)", "dp"),
    "kept not scaled in O": (DROPOUT["forward"], "(1.0 if keep_scale is None else keep_scale)", "1.0"),
    "row sum of kept alone": (DROPOUT["forward"], "row_sum = row_sum * rescale + tl.sum(p, 1)", "row_sum = row_sum * rescale + 0.75 * tl.sum(p, 1)"),
} | {
    f"{what} in {direction}": (spec, line, broken)
    for direction, spec in DROPOUT.items()
    for what, line, broken in (
        ("offset by one", "tl.load(rng_ptr + 1)", "tl.load(rng_ptr + 1) + 1"),
        ("offset cut to 32 bits", OFFSET, OFFSET.replace("(offset >> 32)", "(offset * 0)")),
        ("seed forgotten", "tl.load(rng_ptr),", "tl.load(rng_ptr) * 0,"),
        ("rows of the mask", "low_rows, tl.where(low_keys, a, b)", "low_rows, tl.where(low_keys, b, a)"),
        ("mask of the first head", "batch_head.to(tl.int64) * seq_q + (rows" if direction != "backward_dkv" else "(head_rows + row_start)",
         "0 * seq_q + (rows" if direction != "backward_dkv" else "(0 * head_rows + row_start)"),
    )
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", sampled(MUTANTS))
def test_mutant_is_caught(name: str) -> None:
    spec, line, broken = MUTANTS[name]
    delta = spec.direction == "backward_delta"
    config = make_config(16, 16, num_stages=1) if delta else make_config(16, 32)
    # Of the first case, seed 1 draws a bias that has no batch, so that dBias is a sum over batches.
    assert not mutant_passes(spec, config, line, broken)


AHEAD_MUTANTS: dict[str, tuple[AttentionSpec, str, str]] = {
    "dP of the tile before": (DQ, "v_base += BC * stride_vs", "v_base += 0 * stride_vs"),
    "dP of Q": (DQ, "dp = tl.dot(do, tl.trans(v)", "dp = tl.dot(q, tl.trans(v)"),
    "LSE of the first rows": (
        DKV,
        "= load_lse_log2e(lse_base, rows,",
        "= load_lse_log2e(lse_base, rows_in_tile,",
    ),
    "dV of another tile": (DKV, "do_base += BR * stride_dos", "do_base += 0 * stride_dos"),
    "mask dropped": (DKV_CAUSAL, SEEN_BY, "s_t = s_t"),
    "dS of P alone": (DKV_CAUSAL, "ds_t = p_t * (dp_t - delta[None, :])", "ds_t = p_t * dp_t"),
}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", AHEAD_MUTANTS)
def test_s_ahead_mutant_is_caught(name: str) -> None:
    spec, line, broken = AHEAD_MUTANTS[name]
    config = make_config(16, 32, schedule="s_ahead")
    assert not mutant_passes(spec, config, line, broken)


def test_d_of_a_wrong_o_is_caught(tmp_path: Path) -> None:
    """The kernels are right, and are given what another O would have left."""
    spec, config = DQ, make_config(16, 32)
    case = CheckCase(problem=Problem(batch=1, heads=2, kv_heads=1, seq_q=40, seq_k=50))
    inputs = gradients.make_inputs(spec, case, 3, "cpu")
    rendered = render(spec, config)
    path = tmp_path / "kernel.py"
    path.write_text(rendered.source)
    run = bind(load_kernel(path, rendered.text_name, rendered.name), spec, config)
    o, lse, delta = gradients.forward(inputs)
    rows = gradients.delta_of(o.roll(1, 2).float(), inputs.do.float(), inputs.dlse)
    for given, right in ((delta, True), (rows, False)):
        call = Backward(
            q=inputs.q, k=inputs.k, v=inputs.v, do=inputs.do, lse=lse, delta=given,
            scale=inputs.scale, diagonal=inputs.diagonal,
        )  # fmt: skip
        assert gradients.judge("backward_dq", run(call), inputs).passed is right
