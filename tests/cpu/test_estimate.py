"""estimate.py: plausible orders and bounds; it is a ranking, so no absolute time is asserted closely."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashgen.compile import Compiled
from flashgen.config import KernelConfig
from flashgen.errors import NoEstimate
from flashgen.estimate import LAUNCH_US, estimate
from flashgen.facts import LoopFacts
from flashgen.gpu import TARGETS, Gpu
from flashgen.spec import AttentionSpec, Problem, flops, workload
from tests.makers import make_config, make_spec

A100, H200 = TARGETS["nvidia_a100_sxm4_40gb"], TARGETS["nvidia_h200"]
SPEC = make_spec(head_dim=128)
CAUSAL = make_spec(head_dim=128, mask="causal")
FA2 = make_config(128, 128, num_warps=8)

# Facts of 128x128 kernels of head_dim 128 compiled for sm_90a with Triton 3.7.1, November 2026.
LOOP = LoopFacts(
    instructions=562,
    matrix_instructions=16,
    matrix_flops=1048576,
    exp2=66,
    fp32=200,
    other=188,
    shared_bytes=21504,
    spills=0,
    warpgroup_arrives=2,
    exp2_under_matrix=0.0,
)


def made(loop: LoopFacts | None = LOOP, **fields: Any) -> Compiled:
    facts: dict[str, Any] = {
        "name": "kernel",
        "digest": "sha256:0",
        "arch": "sm_90",
        "triton": "3.7.1",
        "num_warps": 8,
        "registers": 250,
        "spill_bytes": 0,
        "shared_bytes": 197632,
        "loop": loop,
        "advisories": (),
    }
    return Compiled(**(facts | fields))


def median(
    compiled: Compiled,
    spec: AttentionSpec = SPEC,
    config: KernelConfig = FA2,
    problem: Problem | None = None,
    gpu: Gpu = H200,
) -> float:
    return estimate(compiled, spec, config, problem or workload(spec, 8192), gpu).median_us


def test_a_known_kernel_lands_in_the_published_region() -> None:
    # Published for Triton and FlexAttention on an H100 at this length: 395 to 487 TFLOP/s.
    problem = workload(SPEC, 8192)
    timing = estimate(made(), SPEC, FA2, problem, H200)
    assert 300 < timing.tflops(flops(SPEC, problem)) < 700
    assert timing.low_us < timing.median_us < timing.high_us
    assert timing.samples == 0


def test_the_order_of_a_published_landscape() -> None:
    # forge (818da6b), A100, fp16, causal, d64, 4096: 64x64 w4 0.985 ms, 128x32 w4 1.439, 64x64 w8 2.057.
    # The facts are of that kernel, compiled with Triton 3.7.1 for sm_80.
    spec = make_spec("float16", mask="causal")
    problem = Problem(batch=4, heads=12, kv_heads=12, seq_q=4096, seq_k=4096)
    rows = (
        (64, 64, 4, 168, 40960, 712, 34, 236, 314, 23936, 262144),
        (128, 32, 4, 255, 32768, 740, 36, 280, 303, 16768, 262144),
        (64, 64, 8, 147, 40960, 695, 34, 236, 291, 21888, 262144),
    )
    times = []
    for br, bc, warps, registers, shared, instructions, exp2, fp32, other, moved, matrix in rows:
        loop = LoopFacts(
            instructions=instructions,
            matrix_instructions=64,
            matrix_flops=matrix,
            exp2=exp2,
            fp32=fp32,
            other=other,
            shared_bytes=moved,
            spills=0,
            warpgroup_arrives=0,
            exp2_under_matrix=None,
        )
        kernel = made(loop, arch="sm_80", num_warps=warps, registers=registers, shared_bytes=shared)
        times.append(median(kernel, spec, make_config(br, bc, num_warps=warps), problem, A100))
    assert times == sorted(times)
    assert times[2] > 1.5 * times[0]


counts = st.integers(0, 2000)


@given(
    loop=st.builds(
        LoopFacts,
        instructions=st.integers(0, 4000),
        matrix_instructions=counts,
        matrix_flops=st.integers(0, 1 << 22),
        exp2=counts,
        fp32=counts,
        other=counts,
        shared_bytes=counts,
        spills=st.just(0),
        warpgroup_arrives=st.just(2),
        exp2_under_matrix=st.none() | st.floats(0, 1),
    ),
    registers=st.integers(16, 255),
    problem=st.builds(
        lambda batch, group, kv, q, k: Problem(
            batch=batch, heads=group * kv, kv_heads=kv, seq_q=q, seq_k=k
        ),
        st.integers(0, 8),
        st.sampled_from((1, 4)),
        st.integers(1, 4),
        st.integers(0, 3000),
        st.integers(0, 3000),
    ),
    spec=st.sampled_from((SPEC, CAUSAL)),
)
def test_nothing_is_above_the_peak(
    loop: LoopFacts, registers: int, problem: Problem, spec: AttentionSpec
) -> None:
    timing = estimate(made(loop, registers=registers), spec, FA2, problem, H200)
    assert 0 < timing.low_us <= timing.median_us <= timing.high_us
    assert H200.peak_tflops is not None
    assert timing.tflops(flops(spec, problem)) <= H200.peak_tflops
    assert flops(spec, problem) / timing.low_us * 1e-6 <= H200.peak_tflops * (1 + 1e-9)


def test_a_kernel_that_seems_to_do_nothing_still_takes_the_time_of_the_peak() -> None:
    nothing = replace(
        LOOP, instructions=0, matrix_instructions=0, matrix_flops=0, exp2=0, fp32=0, other=0
    )
    problem, gpu = workload(SPEC, 16384), replace(H200, matrix_flops_per_clock=64)
    timing = estimate(made(nothing), SPEC, FA2, problem, gpu)
    assert gpu.peak_tflops is not None
    for time_us in (timing.low_us, timing.median_us, timing.high_us):
        assert flops(SPEC, problem) / time_us * 1e-6 == pytest.approx(gpu.peak_tflops)


def test_overlap_residency_and_fewer_instructions_help() -> None:
    base = median(made())
    assert median(made(replace(LOOP, exp2_under_matrix=1.0))) < 0.95 * base
    assert median(made(registers=128, shared_bytes=98304)) < base
    assert median(made(replace(LOOP, exp2=660))) > 1.5 * base
    # The same products by HMMA, a warp at a time, reach two thirds of the rate of wgmma.
    assert median(made(replace(LOOP, exp2_under_matrix=None))) > 1.2 * base


def test_a_causal_mask_halves_long_work_and_longest_first_balances() -> None:
    long = Problem(batch=1, heads=32, kv_heads=32, seq_q=16384, seq_k=16384)
    ratio = median(made(), CAUSAL, FA2, long) / median(made(), SPEC, FA2, long)
    assert 0.5 < ratio < 0.62
    # 160 blocks on 132 SMs: whatever comes last runs nearly alone.
    few = Problem(batch=1, heads=10, kv_heads=10, seq_q=2048, seq_k=2048)
    first = replace(FA2, order="longest_first")
    assert median(made(), CAUSAL, first, few) < 0.95 * median(made(), CAUSAL, FA2, few)


def test_masked_tiles_take_the_time_of_the_masked_loop() -> None:
    slow = replace(LOOP, other=4000)
    short = Problem(batch=4, heads=32, kv_heads=32, seq_q=512, seq_k=512)
    plain, masked = (
        median(made(), CAUSAL, FA2, short),
        median(made(other_loops=(slow,)), CAUSAL, FA2, short),
    )
    assert masked > 1.5 * plain
    # Without a mask, and with whole tiles, that loop is not entered.
    assert median(made(other_loops=(slow,)), SPEC, FA2, short) == median(made(), SPEC, FA2, short)
    ragged = replace(short, seq_k=513)
    assert median(made(other_loops=(slow,)), SPEC, FA2, ragged) > median(made(), SPEC, FA2, ragged)


def test_time_grows_with_the_work() -> None:
    problems = [
        Problem(batch=b, heads=16, kv_heads=16, seq_q=2048, seq_k=2048) for b in (1, 8, 64, 512)
    ]
    times = [median(made(), SPEC, FA2, problem) for problem in problems]
    assert times == sorted(times)
    # The last has more blocks than are scheduled one by one, and still eight times the work.
    assert times[3] / times[2] == pytest.approx(8, rel=0.03)


def test_memory_bounds_what_arithmetic_does_not() -> None:
    one_query = Problem(batch=2048, heads=16, kv_heads=16, seq_q=1, seq_k=512)
    moved = 2 * 2048 * 16 * 512 * 128 * 2
    slow_memory = replace(H200, bandwidth_gbs=480.0)
    config = make_config(16, 128)
    assert median(made(), SPEC, config, one_query, slow_memory) >= moved / 480e9 * 1e6
    assert median(made(), SPEC, config, one_query, slow_memory) > median(
        made(), SPEC, config, one_query
    )


def test_nothing_to_do_is_a_launch() -> None:
    empty = Problem(batch=0, heads=16, kv_heads=16, seq_q=128, seq_k=128)
    assert median(made(), SPEC, FA2, empty) == LAUNCH_US
    no_keys = Problem(batch=1, heads=1, kv_heads=1, seq_q=128, seq_k=0)
    assert LAUNCH_US <= median(made(), SPEC, FA2, no_keys) < 10


@pytest.mark.parametrize(
    ("compiled", "config", "gpu", "says"),
    [
        (made(), FA2, TARGETS["nvidia_b200"], "sm_100"),
        (made(arch="sm_120"), FA2, TARGETS["nvidia_geforce_rtx_5090"], "sm_120"),
        (made(None, arch="gfx942"), FA2, TARGETS["amd_instinct_mi300x"], "gfx942"),
        (made(arch="sm_80"), FA2, H200, "compiled for sm_80"),
        (made(), FA2, replace(H200, clock_mhz=None), "not known"),
        (made(), FA2, replace(H200, bandwidth_gbs=None), "not known"),
        (made(), FA2, replace(H200, matrix_flops_per_clock=None), "not known"),
        (made(None), FA2, H200, "no main loop"),
        (made(shared_bytes=232449), FA2, H200, "does not fit"),
        (made(), make_config(64, 64, schedule="fa1"), H200, "fa1"),
    ],
)
def test_where_nothing_honest_can_be_said(
    compiled: Compiled, config: KernelConfig, gpu: Gpu, says: str
) -> None:
    with pytest.raises(NoEstimate, match=says):
        estimate(compiled, SPEC, config, workload(SPEC, 2048), gpu)
