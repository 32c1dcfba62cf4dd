"""The plain Triton kernels of Hopper: tiles that fit by what the template does, and what they are estimated at."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import triton

from flashgen.compile.verdict import judge
from flashgen.estimate.estimate import estimate
from flashgen.estimate.machines import MACHINES
from flashgen.estimate.replay import cached_replay
from flashgen.schedules.legality import shared_bound_bytes, why_illegal
from flashgen.schedules.outcome import Status
from flashgen.spec.gpu import TARGETS
from flashgen.spec.problem import Problem, flops
from tests.compiled import cache, compile_one
from tests.makers import each, make_config, make_spec

H100 = TARGETS["nvidia_h100_80gb_hbm3"]


@pytest.mark.skipif(triton.__version__ != "3.7.1", reason="facts of the pinned Triton, 3.7.1")
@pytest.mark.parametrize(
    ("head_dim", "bc", "stages", "maxnreg", "least_tflops"),
    each([(128, 128, 3, 0, 740), (256, 64, 2, 0, 695), (64, 64, 3, 128, 505)], 3),
)
@pytest.mark.parametrize("mask", each(["causal", "none"], 2))
def test_the_best_plain_kernels(
    head_dim: int,
    bc: int,
    stages: int,
    maxnreg: int,
    least_tflops: int,
    mask: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = make_spec("bfloat16", head_dim, mask)
    config = make_config(
        128,
        bc,
        num_warps=8,
        num_stages=stages,
        schedule="s_ahead",
        loads="descriptor",
        order="longest_first" if spec.causal else "plain",
        maxnreg=maxnreg,
    )
    assert why_illegal(spec, config, H100) is None
    compiled = compile_one(spec, config, H100.arch)
    assert judge(compiled, spec, config, H100) == (Status.OK, "")
    assert compiled.spill_bytes == 0
    assert compiled.shared_bytes >= shared_bound_bytes(spec, config, H100)
    heads = 2048 // head_dim
    problem = Problem(batch=1, heads=heads, kv_heads=heads, seq_q=16384, seq_k=16384)
    replayed = cached_replay(compiled, H100, cache())
    # The bars are of a model that held this clock, whatever the matrix pipes did, and that added
    # nothing to a trip.
    monkeypatch.setattr("flashgen.estimate.estimate.TRIP_CYCLES", 0.0)
    held = replace(MACHINES["sm_90"], top_clock=1.0, matrix_slows=0.0)
    monkeypatch.setitem(MACHINES, "sm_90", held)
    timing = estimate(replayed, spec, config, problem, H100)
    assert 0.93 * flops(spec, problem) / timing.median_us * 1e-6 >= least_tflops
