"""estimate/estimate.py: from a kernel's replay to the time of a launch, and what estimate_cubin refuses."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashgen.errors import InvalidArgument, NoEstimate, ToolchainError
from flashgen.estimate import estimate as module
from flashgen.estimate import replay as replays
from flashgen.estimate.estimate import BAND, LAUNCH_US, WIDE_BAND, estimate, estimate_cubin, time_of
from flashgen.estimate.machines import MACHINES
from flashgen.estimate.replay import OF_THE_CHIP, Replay, cached_replay, recall_replay, replay_cubin
from flashgen.estimate.sm import Usage
from flashgen.estimate.trip_counts import grid
from flashgen.spec.gpu import TARGETS, Gpu
from flashgen.spec.problem import Problem, flops, workload
from tests import cubins
from tests.makers import make_config, make_spec

A100, H200 = TARGETS["nvidia_a100_sxm4_40gb"], TARGETS["nvidia_h200"]
USAGE = Usage(matrix=0.5, exp2=0.4, issue=0.3, shared=0.2, memory=0.1)
SPEC = make_spec(head_dim=128)
CAUSAL = make_spec(head_dim=128, mask="causal")
FA2 = make_config(128, 128, num_warps=8)
MHZ = 1410
START = 2500.0
OF_BLOCKS = tuple(START + 100 * blocks for blocks in range(1, 20))
"""What blocks take beside their trips."""


def replayed(*cycles: tuple[float, ...], **fields: Any) -> Replay:
    """Of a kernel whose trips take so long with 1, 2, ... blocks on an SM; one loop a column."""
    loops = len(cycles[0])
    return Replay(
        **{
            "residents": len(cycles),
            "phases": tuple((loop,) for loop in range(loops)),
            "cycles": cycles,
            "far_cycles": cycles,
            "lone_cycles": cycles[0],
            "loaded_bytes": (0.0,) * loops,
            "usage": (USAGE,) * loops,
            "block_flops": (1000,) * loops,
            "block_work": fields.get("block_flops", (1000,) * loops),
            "least_cycles": (0.0,) * loops,
            "equal_parts": (0,) * loops,
            "block_cycles": OF_BLOCKS[: len(cycles)],
            "far_block_cycles": OF_BLOCKS[: len(cycles)],
            "tile_cycles": 100.0,
            "firm": True,
        }
        | fields
    )


def cycles_of(found: Replay, blocks: Any, gpu: Gpu = A100) -> float:
    """SM cycles of a launch, its own time and the launch's overhead left out: that of trips, too."""

    def whole(rows: Any) -> Any:
        return tuple(
            tuple(cycles - blocks * module.TRIP_CYCLES for cycles in row)
            for blocks, row in enumerate(rows, 1)
        )

    found = replace(
        found,
        cycles=whole(found.cycles),
        far_cycles=whole(found.far_cycles),
        lone_cycles=whole([found.lone_cycles])[0],
    )
    return (time_of(found, blocks, gpu).median_us - LAUNCH_US) * MHZ


def test_one_block_takes_its_trips_and_what_surrounds_them() -> None:
    assert cycles_of(replayed((500.0,)), [(40,)]) == pytest.approx(START + 100 + 40 * 500)


def test_blocks_that_share_an_sm_slow_one_another() -> None:
    found = replayed((500.0,), (800.0,))
    alone = cycles_of(found, [(40,)] * 108)
    assert alone == pytest.approx(START + 100 + 40 * 500)
    # One more than there are SMs: two share one, and while both run, each trip takes 800.
    two = START + 2 * 100 + 40 * 800
    assert cycles_of(found, [(40,)] * 216) == pytest.approx(two)
    assert alone < cycles_of(found, [(40,)] * 109) == pytest.approx(two)
    # A third wave runs when the first has ended, again two by two.
    assert cycles_of(found, [(40,)] * 432) == pytest.approx(2 * two)


def test_blocks_that_are_left_when_all_sms_are_free_get_one_each() -> None:
    """And not three together on the first SMs, while the others idle."""
    found = replayed((500.0,), (800.0,), (1200.0,))
    wave, alone = START + 300 + 40 * 1200, START + 300 + 40 * 500
    assert cycles_of(found, [(40,)] * 324) == pytest.approx(wave)
    for left in (1, 16, 108):
        assert cycles_of(found, [(40,)] * (324 + left)) == pytest.approx(wave + alone)


def test_the_longest_block_first_ends_sooner() -> None:
    found = replayed((500.0,), (800.0,))
    lengths = [(n % 32 + 1,) for n in range(800)]
    assert cycles_of(found, sorted(lengths, reverse=True)) < cycles_of(found, sorted(lengths))


def test_loops_follow_one_another_but_for_those_of_roles() -> None:
    found = replayed((500.0, 700.0))
    assert cycles_of(found, [(40, 3)]) == pytest.approx(START + 100 + 40 * 500 + 3 * 700)
    beside = replayed((500.0,), phases=((0, 1),), block_flops=(1000, 1000), least_cycles=(0.0, 0.0))
    # The longer of two roles is what the block takes.
    assert cycles_of(beside, [(40, 30)]) == cycles_of(beside, [(30, 40)])
    assert cycles_of(beside, [(40, 30)]) == pytest.approx(START + 100 + 40 * 500)


def test_a_loop_that_the_compiler_unrolled_is_found_by_its_work() -> None:
    fourfold = replayed(
        (2000.0,), (3200.0,), block_flops=(4000,), least_cycles=(400.0,), loaded_bytes=(64.0,),
        equal_parts=(8,),
    )  # fmt: skip
    found = module.rolled_up(fourfold, (1000,))
    one = replayed((500.0,), (800.0,), least_cycles=(100.0,), loaded_bytes=(16.0,))
    assert found == replace(one, equal_parts=(8,))
    assert cycles_of(found, [(40,)]) == pytest.approx(START + 100 + 40 * 500)
    assert cycles_of(fourfold, [(40,)]) == pytest.approx(START + 100 + 40 * 2000)


@pytest.mark.parametrize(
    ("flops", "parts", "trips"),
    [
        (2000, 1, 1),  # eight warps on 64 rows: each product is made twice
        (1500, 1, 1),  # of two products, one
        (1500, 2, 1),
        (4000, 2, 2),  # unrolled, and made twice
        (1950, 2, 2),  # some of it padding
        (3000, 6, 3),
        (2500, 0, 2),  # no barrier and no load tells
    ],
)
def test_work_that_warps_repeat_is_no_trip(flops: int, parts: int, trips: int) -> None:
    found = module.rolled_up(
        replayed((600.0,), block_flops=(flops,), equal_parts=(parts,)), (1000,)
    )
    assert found.cycles == ((600.0 / trips,),)


def test_one_of_two_loops_may_be_unrolled() -> None:
    both = replayed((500.0, 700.0), block_flops=(1000, 2000))
    assert module.rolled_up(both, (1000, 1000)).cycles == ((500.0, 350.0),)
    assert module.rolled_up(both, (1000, 0)).cycles == both.cycles  # not known


@pytest.mark.parametrize("flops", [620, 1000, 1490])
def test_padding_that_a_compiler_leaves_out_is_no_unrolling(flops: int) -> None:
    found = replayed((500.0,), block_flops=(flops,))
    assert module.rolled_up(found, (1000,)) == found


def test_every_main_loop_needs_its_tile() -> None:
    with pytest.raises(InvalidArgument, match="must name 1 main loops: got 2"):
        module.rolled_up(replayed((500.0,)), (1000, 1000))


def test_with_many_waves_time_is_linear_in_the_blocks() -> None:
    found = replayed((500.0,), (800.0,), (1100.0,))
    times = [time_of(found, [(16,)] * (324 * waves), A100).median_us for waves in (20, 40, 80)]
    assert times[1] / times[0] == pytest.approx(2, rel=0.01)
    assert times[2] / times[1] == pytest.approx(2, rel=0.01)


def test_a_block_without_trips_and_a_grid_without_blocks() -> None:
    assert cycles_of(replayed((500.0,)), [(0,)]) == pytest.approx(START + 100)
    assert time_of(replayed((500.0,)), [], A100).median_us == LAUNCH_US


def test_what_memory_must_move_is_a_bound() -> None:
    found = replayed((500.0,))
    moved = time_of(found, [(1,)], A100, least_bytes=1555e9)
    assert moved.median_us == pytest.approx(1e6 / MACHINES["sm_80"].memory_share + LAUNCH_US)
    assert moved.low_us >= 1e6


def test_power_lowers_the_clock_of_hopper_as_its_matrix_pipes_fill() -> None:
    assert H200.clock_mhz is not None
    assert H200.matrix_flops_per_clock is not None
    clocks = []
    for full in (0.0, 0.5, 1.0):
        work = round(full * 500 * H200.matrix_flops_per_clock)
        found = replayed((500.0 - module.TRIP_CYCLES,), block_flops=(work,))
        spent = time_of(found, [(10**6,)] * H200.sms, H200).median_us - LAUNCH_US
        clocks.append(10**6 * 500 / spent / H200.clock_mhz)
    top = MACHINES["sm_90"].top_clock
    assert clocks == pytest.approx([top, 0.85 * top, 0.7 * top], rel=1e-4)
    few = replace(found, block_flops=(500 * H200.matrix_flops_per_clock,))
    spent = time_of(few, [(10**6,)] * (H200.sms // 4), H200).median_us - LAUNCH_US
    assert 10**6 * 500 / spent / H200.clock_mhz == pytest.approx(top * (1 - 0.3 / 4), rel=1e-4)


def test_idle_sms_leave_their_share_of_l2_to_the_others() -> None:
    found = replayed((800.0,), lone_cycles=(500.0,))
    for busy, trip in ((1.0, 800), (0.75, 606.25), (0.5, 500), (0.01, 500)):
        blocks = [(100,)] * math.ceil(busy * A100.sms)
        assert cycles_of(found, blocks) == pytest.approx(START + 100 + 100 * trip)


@pytest.mark.parametrize("firm", [True, False])
@pytest.mark.parametrize("known", [True, False])
def test_the_band_is_wide_unless_such_kernels_were_validated(firm: bool, known: bool) -> None:
    timing = time_of(replayed((500.0,), firm=firm), [(40,)], A100, firm=known)
    ratios = (timing.low_us / timing.median_us, timing.high_us / timing.median_us)
    assert ratios == pytest.approx(BAND if firm and known else WIDE_BAND)
    assert timing.samples == 0


@given(
    cycles=st.lists(st.floats(1e-3, 1e5), min_size=1, max_size=4),
    block_flops=st.integers(0, 10**9),
    trips=st.lists(st.integers(0, 300), max_size=400),
    firm=st.booleans(),
)
def test_nothing_is_above_the_peak(
    cycles: list[float], block_flops: int, trips: list[int], firm: bool
) -> None:
    """Even of a replay that claims what no SM can do."""
    rows = tuple((each,) for each in sorted(cycles))
    found = replayed(*rows, block_flops=(block_flops,), firm=firm)
    timing = time_of(found, [(count,) for count in trips], A100)
    assert 0 < timing.low_us <= timing.median_us <= timing.high_us
    assert A100.peak_tflops is not None
    operations = block_flops * sum(trips)
    assert operations / timing.low_us * 1e-6 <= A100.peak_tflops * (1 + 1e-9)


def test_the_peak_is_that_of_the_operands() -> None:
    """Of the same products in 8 bits, which no replay slows down, half the time."""
    found = replayed((1e-3,), block_flops=(10**9,))
    blocks = [(10**4,)] * 1000
    eight = replace(found, block_work=(10**9 / 2,))
    at_16_bits, at_8 = (time_of(each, blocks, A100).low_us for each in (found, eight))
    assert at_16_bits / at_8 == pytest.approx(2)


@given(
    spec=st.sampled_from((SPEC, CAUSAL)),
    problem=st.builds(
        lambda batch, group, kv, q, k: Problem(
            batch=batch, heads=group * kv, kv_heads=kv, seq_q=q, seq_k=k
        ),
        st.integers(0, 4), st.sampled_from((1, 4)), st.integers(1, 4),
        st.integers(0, 2000), st.integers(0, 2000),
    ),
)  # fmt: skip
def test_nor_is_any_of_our_kernels(spec: Any, problem: Problem) -> None:
    found = replayed((1.0, 1.0), block_flops=(1, 1))
    timing = estimate(found, spec, FA2, problem, H200)
    assert H200.peak_tflops is not None
    assert flops(spec, problem) / timing.low_us * 1e-6 <= H200.peak_tflops * (1 + 1e-9)


@pytest.mark.slow("a kernel of many thousand instructions")
def test_nor_is_float32_without_matrix_instructions(tmp_path: Path) -> None:
    spec, config = make_spec("float32"), make_config(64, 32)
    _, compiled = cubins.own(spec, config, "sm_80", tmp_path)
    problem = workload(spec, 2048)
    timing = estimate(cached_replay(compiled, A100, tmp_path), spec, config, problem, A100)
    peak_tflops = 2 * 64 * A100.sms * MHZ * 1e-6  # 64 multiply-adds a cycle and SM
    assert flops(spec, problem) / timing.low_us * 1e-6 <= peak_tflops


def test_a_grid_that_runs_for_hours_ends() -> None:
    hours = time_of(replayed((3000.0,), (5000.0,)), [(10**9,), (10**9 + 1,)] * 350, A100)
    assert hours.median_us > 3.6e9


def test_nothing_to_do_is_a_launch() -> None:
    empty = Problem(batch=0, heads=16, kv_heads=16, seq_q=128, seq_k=128)
    assert estimate(replayed((500.0, 500.0)), SPEC, FA2, empty, H200).median_us == LAUNCH_US


def test_a_causal_mask_halves_long_work() -> None:
    found = replayed((5000.0, 5500.0))
    long = Problem(batch=1, heads=32, kv_heads=32, seq_q=16384, seq_k=16384)
    plain = estimate(found, SPEC, FA2, long, H200).median_us
    assert 0.5 < estimate(found, CAUSAL, FA2, long, H200).median_us / plain < 0.6


@pytest.mark.parametrize(
    ("found", "config", "says"),
    [
        (replayed((1.0, 1.0)), make_config(64, 64, schedule="fa1"), "fa1"),
        (replayed((1.0, 1.0, 1.0)), FA2, "3 main loops"),
    ],
)
def test_kernels_of_ours_that_get_no_estimate(found: Replay, config: Any, says: str) -> None:
    with pytest.raises(NoEstimate, match=says):
        estimate(found, SPEC, config, workload(SPEC, 2048), H200)


@pytest.mark.parametrize("consumers", [2, 3])
@pytest.mark.parametrize(
    ("direction", "masked_first"),
    [("forward", True), ("backward_dkv", True), ("backward_dq", False)],
)
def test_each_consumer_of_hopper_does_the_trips_of_a_kernel_without_roles(
    direction: Any, masked_first: bool, consumers: int
) -> None:
    """Causal, 1024 keys in tiles of 64 x consumers: the masked tiles are those on the diagonal."""
    spec = CAUSAL.for_direction(direction)
    own = 64 * consumers
    br, bc = (64, own) if direction == "backward_dkv" else (own, 64)
    config = make_config(
        br, bc, num_warps=4 * consumers, schedule="hopper", loads="descriptor", num_stages=2
    )
    problem = Problem(batch=1, heads=1, kv_heads=1, seq_q=1152, seq_k=1152)
    found = replayed((1.0,) * 2 * consumers)
    blocks = module._trips(found, spec, config, problem, H200)
    assert len(blocks) == 1152 // own
    for trips in blocks:
        assert len(set(zip(trips[::2], trips[1::2], strict=True))) == 1  # all consumers alike
        masked, whole = trips[:2] if masked_first else trips[1::-1]
        assert masked == consumers
        assert 0 <= whole <= 18 - consumers
    assert sum(sum(trips[:2]) for trips in blocks) == sum(range(consumers, 19, consumers))


def test_hopper_has_as_many_loops_for_each_consumer() -> None:
    config = make_config(128, 128, num_warps=8, schedule="hopper", loads="descriptor")
    found = replayed((1.0, 1.0, 1.0))
    with pytest.raises(NoEstimate, match="3 main loops were found in the SASS, of 2 consumers"):
        estimate(found, SPEC, config, workload(SPEC, 2048), H200)


@pytest.mark.parametrize("direction", ["backward_dkv", "backward_dq", "backward_fused"])
@pytest.mark.parametrize("mask", ["none", "causal"])
def test_the_backwards_s_ahead_turns_as_often_as_fa2(mask: str, direction: Any) -> None:
    """No tile is carried over to the next turn, so none comes after the loops."""
    spec = make_spec(mask=mask).for_direction(direction)
    problem = Problem(batch=2, heads=4, kv_heads=2, seq_q=1000, seq_k=777)
    fa2, ahead = (make_config(64, 64, schedule=way) for way in ("fa2", "s_ahead"))
    for loops in (1, 2):
        expected = grid(spec, fa2, problem, H200, loops=loops)
        assert grid(spec, ahead, problem, H200, loops=loops) == expected


@pytest.mark.parametrize("schedule", ["fa2", "s_ahead"])
@pytest.mark.parametrize("mask", ["none", "causal"])
@pytest.mark.parametrize(("br", "bc"), [(128, 64), (64, 128), (32, 32)])
@pytest.mark.parametrize(("seq_q", "seq_k"), [(256, 256), (1000, 1000), (100, 777), (300, 50)])
def test_trips_are_those_of_the_template(
    schedule: Any, mask: str, br: int, bc: int, seq_q: int, seq_k: int
) -> None:
    """Counted here tile by tile: a tile is masked where a row does not see all of its keys."""
    spec = make_spec(mask=mask)
    config = make_config(br, bc, schedule=schedule)
    problem = Problem(batch=1, heads=1, kv_heads=1, seq_q=seq_q, seq_k=seq_k)
    expected = []
    for start in range(0, seq_q, br):
        last_row = seq_k if mask == "none" else start + br + seq_k - seq_q
        first_row = seq_k if mask == "none" else start + 1 + seq_k - seq_q
        tiles = [at for at in range(0, seq_k, bc) if at < last_row]
        whole = [at for at in tiles if at + bc <= min(seq_k, max(first_row, 0))]
        if schedule == "s_ahead":  # one tile ahead: the last comes after the loops
            tiles, whole = tiles[:-1], whole[: max(len(tiles) - 1, 0)]
        expected.append((len(whole), len(tiles) - len(whole)))
    assert grid(spec, config, problem, H200, loops=2) == expected
    assert grid(spec, config, problem, H200, loops=1) == [(sum(trips),) for trips in expected]


def test_a_replay_survives_json() -> None:
    found = replayed((500.0, 700.0), (800.0, 900.5), phases=((0, 1),))
    assert Replay.from_json(json.loads(json.dumps(found.to_json()))) == found


@pytest.fixture(scope="module")
def kernel() -> cubins.Cubin:
    """A kernel that is not ours, of one main loop."""
    return cubins.single_phase(64, 64, 4, 2)


def times(kernel: cubins.Cubin, blocks: Any = ((32,),) * 864, **changed: Any) -> Any:
    arguments = kernel.geometry() | {"target": "nvidia_a100_sxm4_40gb"} | changed
    code = arguments.pop("cubin", kernel.code)
    return estimate_cubin(code, blocks=blocks, **arguments)


def test_a_slug_and_its_gpu_and_arrays_are_the_same(kernel: cubins.Cubin) -> None:
    found = times(kernel)
    assert found.low_us < found.median_us < found.high_us
    assert times(kernel, target=A100) == found
    assert times(kernel, np.full((864, 1), 32)) == found
    assert times(kernel, np.full((864, 1), 32, np.int32)) == found
    assert times(kernel, [[32]] * 864) == found
    assert times(kernel, np.empty((0, 1), int)) == times(kernel, [])


def test_more_warps_or_shared_memory_leave_room_for_fewer_blocks(kernel: cubins.Cubin) -> None:
    base = replay_cubin(kernel.code, A100, num_warps=4, shared_bytes=kernel.shared_bytes).residents
    assert base >= 2
    crowded = replay_cubin(kernel.code, A100, num_warps=4, shared_bytes=A100.shared_per_block)
    assert crowded.residents == 1
    assert times(kernel, shared_bytes=A100.shared_per_block).median_us > times(kernel).median_us


@pytest.mark.parametrize(
    ("changed", "error", "says"),
    [
        ({"arch": "sm_90"}, InvalidArgument, "nvidia_a100_sxm4_40gb is sm_80, not sm_90"),
        ({"target": "nvidia_h200"}, InvalidArgument, "nvidia_h200 is sm_90, not sm_80"),
        ({"target": "nvidia_a100"}, InvalidArgument, "did you mean nvidia_a100"),
        ({"blocks": [(1, 2)]}, InvalidArgument, r"1 trip counts >= 0.*\[1, 2\]"),
        ({"blocks": [(32,), ()]}, InvalidArgument, r"1 trip counts >= 0.*\[\]"),
        ({"blocks": [(32,), (-1,)]}, InvalidArgument, r"got \[-1\]"),
        ({"shared_bytes": 10**6}, NoEstimate, "does not fit an SM"),
        ({"num_warps": 32}, NoEstimate, "does not fit an SM"),
        ({"arch": "sm_100", "target": "nvidia_b200"}, NoEstimate, "does not know sm_100"),
        ({"cubin": b"not a cubin"}, ToolchainError, "cuobjdump failed"),
        ({"cubin": b""}, ToolchainError, "cuobjdump failed"),
        ({"cubin": "text"}, InvalidArgument, "cubin must be bytes: got str"),
        ({"num_warps": "8"}, InvalidArgument, "num_warps must be a whole number >= 1: got '8'"),
        ({"shared_bytes": -1}, InvalidArgument, "shared_bytes must be a whole number >= 0"),
        ({"target": 90}, InvalidArgument, "target must be a known slug or a Gpu: got 90"),
        ({"blocks": 7}, InvalidArgument, "blocks must be a list of lists of trip counts: got 7"),
        ({"blocks": [(0.5,)]}, InvalidArgument, "blocks must be a list of lists"),
        ({"blocks": [(2**70,)]}, InvalidArgument, "a block must make at most 2147483648 trips"),
        ({"tile_flops": [float("nan")]}, InvalidArgument, "tile_flops and least_bytes must be fin"),
        ({"tile_flops": 3.0}, InvalidArgument, "tile_flops must be a list of numbers: got 3.0"),
        ({"least_bytes": -1.0}, InvalidArgument, "least_bytes must be finite and >= 0: got -1.0"),
    ],
)
def test_what_cannot_be_answered_is_refused_in_one_sentence(
    kernel: cubins.Cubin, changed: dict[str, Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says) as caught:
        times(kernel, **changed)
    assert "\n" not in str(caught.value)


def test_a_cubin_of_another_architecture_than_was_said(kernel: cubins.Cubin) -> None:
    """Nothing in the arguments contradicts: only the listing tells."""
    with pytest.raises(
        InvalidArgument, match="compiled for sm_90, which nvidia_h200 is: it is for sm_80"
    ):
        times(kernel, arch="sm_90", target=H200)


def test_two_processes_say_the_same_to_the_byte(kernel: cubins.Cubin, tmp_path: Path) -> None:
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(kernel.code)
    program = (
        "import sys\nfrom pathlib import Path\nfrom flashgen.estimate.estimate import estimate_cubin\n"
        "print(estimate_cubin(Path(sys.argv[1]).read_bytes(), arch='sm_80', num_warps=4,\n"
        f"    shared_bytes={kernel.shared_bytes}, target='nvidia_a100_sxm4_40gb',\n"
        "    blocks=[(n % 32,) for n in range(864)]))\n"
    )
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    other = subprocess.run(
        [sys.executable, "-c", program, str(cubin)], capture_output=True, check=True, text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": seed},
    )  # fmt: skip
    assert other.stdout == f"{times(kernel, [(n % 32,) for n in range(864)])}\n"


def test_a_replay_is_kept_and_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, config = make_spec("float16"), make_config(64, 64)
    _, compiled = cubins.own(spec, config, "sm_80", tmp_path)
    assert recall_replay(compiled, A100, tmp_path) is None
    found = cached_replay(compiled, A100, tmp_path)
    monkeypatch.setattr(replays, "replay_cubin", None)
    assert (
        cached_replay(compiled, A100, tmp_path) == found == recall_replay(compiled, A100, tmp_path)
    )
    for other in (
        replace(A100, registers_per_sm=2**15),
        replace(A100, matrix_flops_per_clock=1024),
    ):
        assert recall_replay(compiled, other, tmp_path) is None
    with monkeypatch.context() as patch:
        patch.setitem(MACHINES, "sm_80", replace(MACHINES["sm_80"], exp2=32.0))
        assert recall_replay(compiled, A100, tmp_path) is None
    monkeypatch.setattr(replays, "REPLAY", replays.REPLAY + 1)
    assert recall_replay(compiled, A100, tmp_path) is None


def test_gpus_of_one_sm_share_a_replay(tmp_path: Path) -> None:
    """Nothing of the chip changes what an SM does: the other fields of a Gpu do not count."""
    spec, config = make_spec("float16"), make_config(64, 64)
    _, compiled = cubins.own(spec, config, "sm_80", tmp_path)
    chip = {"sms": 7, "l2_bytes": 1, "clock_mhz": 5, "bandwidth_gbs": 2.0}
    other = replace(A100, name="another", **chip)
    assert set(OF_THE_CHIP) == {"name", *chip}
    found = cached_replay(compiled, A100, tmp_path)
    assert recall_replay(compiled, other, tmp_path) == found
    cubin = next(tmp_path.glob("*.cubin")).read_bytes()
    launch = {"num_warps": compiled.num_warps, "shared_bytes": compiled.shared_bytes}
    assert replays.replay_cubin(cubin, other, **launch) == found


def test_a_torn_file_counts_as_none(tmp_path: Path) -> None:
    spec, config = make_spec("float16"), make_config(64, 64)
    _, compiled = cubins.own(spec, config, "sm_80", tmp_path)
    cached_replay(compiled, A100, tmp_path)
    (kept,) = tmp_path.glob("*.replay.json")
    whole = kept.read_text()
    for torn in ("", whole[: len(whole) // 2], "[]", "{}", whole.replace("residents", "resident")):
        kept.write_text(torn)
        assert recall_replay(compiled, A100, tmp_path) is None


def test_a_kernel_whose_binary_is_gone_is_told(tmp_path: Path) -> None:
    _, compiled = cubins.own(make_spec("float16"), make_config(64, 64), "sm_80", tmp_path)
    with pytest.raises(ToolchainError, match="cannot be read"):
        cached_replay(compiled, A100, tmp_path / "elsewhere")


@pytest.mark.slow("measures time, which a busy machine spoils")
def test_an_estimate_from_a_cache_is_immediate(tmp_path: Path) -> None:
    _, compiled = cubins.own(make_spec("float16"), make_config(64, 64), "sm_80", tmp_path)
    cached_replay(compiled, A100, tmp_path)
    began = time.perf_counter()
    cached_replay(compiled, A100, tmp_path)
    assert time.perf_counter() - began < 0.1
