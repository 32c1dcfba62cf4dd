"""Wrong kernels whose largest error on a few tiles of normal numbers is as small as a right one's.

docs/numerics.md has the table of them. Each is found by what the check does beyond that: more tiles in
a row, scores that grow or fall, or the rms of the error.
"""

from __future__ import annotations

import dataclasses

import pytest

from flashgen.evaluate.check import cases_of, compared, trial_of
from flashgen.kernels.launch import bind
from flashgen.kernels.loader import load_text
from flashgen.kernels.render import Rendered, render
from flashgen.reference.attention import FLOORS_ACCEPTED, RMS_ACCEPTED, Comparison
from flashgen.schedules.config import KernelConfig
from flashgen.spec.attention import AttentionSpec
from tests.makers import make_config, make_spec
from tests.mutants import broken
from tests.proving import sampled

FORWARD, CAUSAL = make_spec("bfloat16", 64, "none"), make_spec("bfloat16", 64, "causal")
DQ, DKV = CAUSAL.for_direction("backward_dq"), CAUSAL.for_direction("backward_dkv")
FUSED, DECODE = CAUSAL.for_direction("backward_fused"), FORWARD.for_direction("decode")
COMBINE = make_spec("bfloat16", 64, direction="combine")
INVARIANT = make_spec("bfloat16", 64, "causal", invariant=True)
CONFIG, WIDE = make_config(16, 16), make_config(16, 64)
"""WIDE is that of the decode, for which 127 keys shall be two tiles, and of the numeric class."""

S = "s = tl.dot(q, tl.trans(k), input_precision=PRECISION)"
S_F = "s = tl.dot(q[0], tl.trans(k[0]), input_precision=PRECISION)"
S_T = "s_t = tl.dot(k, tl.trans(q), input_precision=PRECISION)"
CUT = "(({}).to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)"
"""The float32 of a bfloat16, cut off where it should be rounded."""

WRONG: dict[str, tuple[AttentionSpec, str, str, str]] = {
    "keys beyond the fifth tile ignored": (FORWARD, S_F, f"{S_F} + tl.where(start < 5 * BC, 0.0, float('-inf'))", "ring"),
    "keys beyond the fifth tile ignored, causal": (CAUSAL, S_F, f"{S_F} + tl.where(start < 5 * BC, 0.0, float('-inf'))", "ring"),
    "keys beyond the fifth tile ignored in dQ": (DQ, S, f"{S} + tl.where(start < 5 * BC, 0.0, float('-inf'))", "ring"),
    "keys beyond the fifth tile ignored in a decode": (DECODE, S_F, f"{S_F} + tl.where(start < 5 * BC, 0.0, float('-inf'))", "ring"),
    "rows beyond the fifth tile ignored in dK, dV": (DKV, S_T, f"{S_T} + tl.where(row_start < 5 * BR, 0.0, float('-inf'))", "ring"),
    "rows beyond the fifth tile ignored, fused": (FUSED, S_T, f"{S_T} + tl.where(row_start < 5 * BR, 0.0, float('-inf'))", "ring"),
    "no running maximum": (FORWARD, "new_max = tl.maximum(row_max, tl.max(s, 1) * factor)", "new_max = tl.zeros_like(row_max)", "growing"),
    "no running maximum in a decode": (DECODE, "new_max = tl.maximum(row_max, tl.max(s, 1) * factor)", "new_max = tl.zeros_like(row_max)", "growing"),
    "the maximum of a tile alone": (FORWARD, "tl.maximum(row_max, tl.max(s, 1) * factor)", "tl.max(s, 1) * factor", "falling"),
    "the maximum of a tile alone in a decode": (DECODE, "tl.maximum(row_max, tl.max(s, 1) * factor)", "tl.max(s, 1) * factor", "falling"),
    "O not rescaled for a jump by 8": (FORWARD, "[acc[n] * rescale[:, None]", "[acc[n] * tl.where((rescale < 0.00390625) & (row_max > -1e38), 1.0, rescale)[:, None]", "growing"),
    "O times 1.003": (FORWARD, "else acc[n] * inverse[:, None]", "else acc[n] * inverse[:, None] * 1.003", "rms"),
    "O times 1.003 in a decode": (DECODE, "o = [acc[n] * inverse[:, None]", "o = [acc[n] * inverse[:, None] * 1.003", "rms"),
    "O cut off": (FORWARD, "else acc[n] * inverse[:, None]", f"else {CUT.format('acc[n] * inverse[:, None]')}", "rms"),
    "P cut off": (FORWARD, "p = rounded(p.to(q[0].dtype), PRECISION)", f"p = {CUT.format('p')}.to(q[0].dtype)", "rms"),
    "dV times 1.003": (DKV, "dv.to(v.dtype)", "(dv * 1.003).to(v.dtype)", "rms"),
    "LSE off by 0.002 in dQ": (DQ, "s * factor - lse_log2e", "s * factor - 0.002 * 1.442695 - lse_log2e", "rms"),
    "D off by 0.3 % in dQ": (DQ, "(dp - delta[:, None])", "(dp - 1.003 * delta[:, None])", "rms"),
    "the segments before the last forgotten": (INVARIANT, "tl.fma(total[n], total_scale[:, None], ", "tl.fma(total[n], 0.0, ", "segments"),
    "a total not rescaled": (INVARIANT, "tl.fma(total[n], total_scale[:, None], ", "tl.fma(total[n], 1.0, ", "segments"),
    "the second segment of a decode ignored": (INVARIANT.for_direction("decode"), "split_start = tl.minimum(split * SEGMENT,", "split_start = tl.minimum(split * 2 * SEGMENT,", "segments"),
    "D off by 0.3 % in dK": (DKV, "(dp_t - delta[None, :])", "(dp_t - 1.003 * delta[None, :])", "rms"),
}  # fmt: skip


def config_of(spec: AttentionSpec) -> KernelConfig:
    return WIDE if spec.direction == "decode" or spec.invariant else CONFIG


def verdicts(rendered: Rendered, spec: AttentionSpec) -> dict[str, list[Comparison]]:
    """Those of all cases, by what a case adds: rings, growing or falling scores, segments, or
    nothing.
    """
    config = config_of(spec)
    run = bind(load_text(rendered), spec, config)
    found: dict[str, list[Comparison]] = {}
    cases = cases_of(spec, config)
    for number, case in enumerate(cases):
        added = "ring" if number == 5 else case.scores if case.scores != "even" else "rms"
        if spec.invariant and number == len(cases) - 1:
            added = "segments"
        found.setdefault(added, []).append(compared(run, trial_of(spec, case, number)))
    return found


def passed_before(verdict: Comparison) -> bool:
    """By the largest error alone."""
    return verdict.floors <= FLOORS_ACCEPTED and verdict.lse <= 1.0


@pytest.mark.parametrize("name", sampled(WRONG))
def test_a_wrong_kernel_is_found(name: str) -> None:
    spec, line, new, by = WRONG[name]
    rendered = render(spec, config_of(spec))
    source = broken(rendered.source, line, new)
    wrong = dataclasses.replace(
        rendered, source=source, text_digest=f"{rendered.text_digest}-{name}"
    )
    found = verdicts(wrong, spec)
    assert all(map(passed_before, found["rms"])), "a few tiles of normal numbers show it"
    assert not all(verdict.passed for verdict in found[by])
    if by == "rms":
        assert max(verdict.rms for verdict in found[by]) > 1.05 * RMS_ACCEPTED


@pytest.mark.parametrize(
    "spec",
    [CAUSAL, DQ, FUSED, DECODE, COMBINE, INVARIANT, INVARIANT.for_direction("decode")],
    ids=lambda s: s.name,
)
def test_a_right_one_is_not(spec: AttentionSpec) -> None:
    for each in verdicts(render(spec, config_of(spec)), spec).values():
        assert all(verdict.passed for verdict in each), each
