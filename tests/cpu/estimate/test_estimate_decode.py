"""Estimates of a decode: what bounds it is memory, and the bytes that are on their way."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path

import pytest

from flashgen.errors import NoEstimate
from flashgen.estimate.estimate import LAUNCH_US, TRIP_CYCLES, estimate, time_of
from flashgen.estimate.machines import MACHINES, from_memory
from flashgen.estimate.replay import Replay, cached_replay, recall_replay
from flashgen.estimate.sm import Usage
from flashgen.estimate.trip_counts import grid, tuned_splits
from flashgen.evaluate.build import BuildResult, Built, estimated
from flashgen.evaluate.evaluator import Request
from flashgen.schedules.config import KernelConfig
from flashgen.schedules.outcome import Status
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.gpu import TARGETS
from flashgen.spec.problem import Problem, bytes_moved, workload
from tests import cubins
from tests.makers import each, make_config, make_spec

A100 = TARGETS["nvidia_a100_sxm4_80gb"]
SPEC = make_spec("bfloat16", 128, direction="decode")
CAUSAL = make_spec("bfloat16", 128, "causal", direction="decode")


def problem_of(batch: int, seq_k: int, seq_q: int = 1) -> Problem:
    return Problem(batch=batch, heads=32, kv_heads=8, seq_q=seq_q, seq_k=seq_k)


def replayed(cycles: float, residents: int = 1) -> Replay:
    usage = Usage(matrix=0.1, exp2=0.1, issue=0.2, shared=0.1, memory=0.9)
    return Replay(
        residents=residents,
        phases=((0,), (1,)),
        cycles=((cycles, cycles),) * residents,
        far_cycles=((cycles, cycles),) * residents,
        lone_cycles=(cycles, cycles),
        loaded_bytes=(16384.0, 16384.0),
        usage=(usage, usage),
        block_flops=(1000, 1000),
        block_work=(1000, 1000),
        least_cycles=(1.0, 1.0),
        equal_parts=(1, 1),
        block_cycles=(2500.0,) * residents,
        far_block_cycles=(2500.0,) * residents,
        tile_cycles=0.0,
        firm=False,
    )


@pytest.mark.parametrize(
    ("spec", "config", "problem"),
    [
        (SPEC, make_config(16, 64), problem_of(1, 1000)),
        (SPEC, make_config(16, 64, split_keys=256), problem_of(2, 4096)),
        (SPEC, make_config(16, 32, split_keys=512), problem_of(1, 100)),
        (CAUSAL, make_config(16, 32), problem_of(4, 777, 16)),
        (CAUSAL, make_config(64, 64), problem_of(64, 2048, 4)),
    ],
)
def test_trips_are_those_of_the_template(
    spec: AttentionSpec, config: KernelConfig, problem: Problem
) -> None:
    """Every tile of keys once for each tile of rows; masked where the first row does not see all of
    it, or where the keys end.
    """
    blocks = grid(spec, config, problem, A100, loops=2)
    tiles = -(-problem.seq_k // config.bc)
    of_a_head = len(blocks) // (problem.batch * problem.kv_heads)
    rows = -(-problem.group * problem.seq_q // config.br)
    assert of_a_head % rows == 0
    for row in range(rows):
        first_query = row * config.br // problem.group
        sees = problem.seq_k - problem.seq_q + 1 + first_query if spec.causal else problem.seq_k
        mine = blocks[:of_a_head][row::rows]
        assert sum(map(sum, mine)) == tiles
        assert (
            sum(unmasked for unmasked, _ in mine) == max(min(sees, problem.seq_k), 0) // config.bc
        )
        longest = max(-(-tiles // len(mine)), config.split_keys // config.bc)
        assert max(map(sum, mine)) == min(longest, tiles)
    assert blocks == blocks[:of_a_head] * (len(blocks) // of_a_head)
    assert grid(spec, config, problem, A100, loops=1) == [(sum(trips),) for trips in blocks]


def test_a_split_of_a_window_has_the_keys_that_the_config_says() -> None:
    """512 queries may see 4,608 keys, nine splits; a tile of four sees 4,100, 257 tiles of 16."""
    spec = make_spec("bfloat16", 128, "causal", direction="decode", window=True)
    problem, rows = problem_of(1, 8192, 512), 128
    blocks = grid(spec, make_config(16, 16, split_keys=512), problem, A100, loops=1)
    assert blocks[: 9 * rows : rows] == [(32,)] * 8 + [(1,)]


def test_combine_and_append_have_no_loops_to_count() -> None:
    for direction in ("combine", "append"):
        spec = SPEC.for_direction(direction)
        with pytest.raises(NoEstimate, match=f"direction {direction} has no main loop"):
            grid(spec, make_config(16, 16), workload(spec, 8), A100, loops=1)


def test_memory_is_the_bound_where_enough_is_on_its_way() -> None:
    problem = problem_of(108, 8192)  # 8 blocks an SM, none idle
    assert A100.bandwidth_gbs is not None
    moved_us = bytes_moved(SPEC, problem) / (A100.bandwidth_gbs * 1e3)
    fast = estimate(replayed(100.0, residents=8), SPEC, make_config(16, 64), problem, A100)
    assert fast.median_us == pytest.approx(LAUNCH_US + moved_us / 0.9, rel=0.01)
    assert fast.low_us >= moved_us  # nothing is above the bandwidth
    slow = estimate(replayed(60000.0, residents=8), SPEC, make_config(16, 64), problem, A100)
    assert slow.median_us > 1.5 * fast.median_us


def test_what_idles_at_the_end_of_the_grid_comes_on_top() -> None:
    bytes_all = 1e9
    assert A100.clock_mhz is not None
    assert A100.bandwidth_gbs is not None
    found = replayed(1000.0)
    full = time_of(found, [(10, 0)] * 216, A100, least_bytes=bytes_all)
    thin = time_of(found, [(10, 0)] * 217, A100, least_bytes=bytes_all)
    block_us = (10 * (1000.0 + TRIP_CYCLES) + 2500.0) / A100.clock_mhz
    assert thin.median_us - full.median_us == pytest.approx(block_us * 107 / 108)
    assert full.median_us == pytest.approx(LAUNCH_US + 1e9 / (A100.bandwidth_gbs * 1e3) / 0.9)


def test_what_a_window_hides_costs_nothing() -> None:
    """Nor does it count for the splits, of which the merging kernel reads every one."""
    usage = replayed(1.0).usage[0]
    found = replace(
        replayed(3000.0), phases=((0,), (1,), (2,)), cycles=((3000.0,) * 3,),
        far_cycles=((3000.0,) * 3,), lone_cycles=(3000.0,) * 3, loaded_bytes=(16384.0,) * 3, usage=(usage,) * 3,
        block_flops=(1000,) * 3, block_work=(1000,) * 3, least_cycles=(1.0,) * 3, equal_parts=(1,) * 3,
    )  # fmt: skip
    spec, config = replace(SPEC, window=True), make_config(16, 64, split_keys=256)
    long, short = (estimate(found, spec, config, problem_of(1, n), A100) for n in (1 << 16, 8192))
    assert long == short


def test_the_kernel_that_merges_is_waited_for() -> None:
    """One sequence is split over the SMs; of 64 there are blocks enough without."""
    config, found = make_config(16, 64), replayed(3000.0)
    for batch, merged in ((1, True), (64, False)):
        problem = problem_of(batch, 8192)
        blocks = grid(SPEC, config, problem, A100, loops=2)
        alone = time_of(found, blocks, A100, least_bytes=bytes_moved(SPEC, problem))
        whole = estimate(found, SPEC, config, problem, A100)
        assert (whole.median_us >= alone.median_us + LAUNCH_US) == merged


def test_an_estimate_is_of_several_batches_each_of_its_own_variant() -> None:
    """64 sequences fill the GPU without splits, and run the variant for one; fewer are split."""
    parts, whole = (
        Built(compiled=None, replay=replayed(cycles))
        for cycles in (3000.0, 6000.0)  # type: ignore[arg-type]
    )
    config, problem = make_config(16, 64), problem_of(64, 512)
    request = Request(stage="timed", spec=SPEC, problem=problem, gpu=A100.slug, source="estimated")
    result = BuildResult(status=Status.OK, built=parts, whole=whole)
    found = estimated(result, request, config, A100)
    alone = [
        estimate(replayed(cycles), SPEC, config, replace(problem, batch=batch), A100).median_us
        for batch, cycles in ((1, 3000.0), (4, 3000.0), (16, 3000.0), (64, 6000.0))
    ]
    assert found.batches_us == tuple(alone)
    assert found.median_us == pytest.approx(math.prod(alone) ** 0.25)
    both = replace(result, whole=None)
    assert estimated(both, request, config, A100).batches_us[-1] < alone[-1]


@pytest.mark.parametrize("paged", each([False, True], 2))
def test_splits_for_residents_come_near_the_floor_of_memory(tmp_path: Path, paged: bool) -> None:
    """By estimate, of what a launch takes besides those of the kernels themselves: at 8,192 keys and
    more at most 1.3 times the time of its bytes at 4.5 TB/s, but for one sequence of 8,192.
    """
    gpu = TARGETS["nvidia_h200"]
    spec = replace(SPEC, paged=paged)
    config = make_config(16, 32, num_stages=3)
    _, compiled = cubins.own(spec, config, gpu.arch, tmp_path)
    found = cached_replay(compiled, gpu, tmp_path)
    filled = replace(config, blocks_per_sm=found.residents)
    worst = 0.0
    for batch, seq_k in itertools.product((1, 4, 16, 64), (8192, 32768)):
        if (batch, seq_k) == (1, 8192):
            continue
        problem = problem_of(batch, seq_k)
        floor_us = bytes_moved(spec, problem) / 4.5e6
        us = estimate(found, spec, filled, problem, gpu).median_us
        launches = 1 + (tuned_splits(spec, filled, problem, gpu.sms) > 1)
        worst = max(worst, (us - launches * LAUNCH_US) / floor_us)
    assert worst <= 1.3


def test_loads_from_memory_come_later(tmp_path: Path) -> None:
    machine = MACHINES["sm_80"]
    later = from_memory(machine)
    assert later.copy_late - machine.copy_late == machine.memory_late == 300.0
    assert replace(later, load_late=480.0, copy_late=520.0, tma_late=0.0) == machine
    config = make_config(16, 32, num_stages=2)
    _, compiled = cubins.own(SPEC, config, "sm_80", tmp_path)
    found = cached_replay(compiled, A100, tmp_path)
    # One block with two stages waits for memory in every trip.
    assert found.far_cycles[0][0] > found.cycles[0][0] + 100
    assert recall_replay(compiled, A100, tmp_path) == found


def test_what_is_read_once_comes_from_memory_and_the_rest_from_l2() -> None:
    """Of a grid of many waves. The blocks of the first run side by side and wait for memory."""
    found = replace(replayed(3000.0), far_cycles=((4000.0, 4000.0),))
    of_a_block = 10 * 16384.0

    def cycles(blocks: int, share: float) -> float:
        timing = time_of(found, [(10, 0)] * blocks, A100, least_bytes=share * blocks * of_a_block)
        return (timing.median_us - LAUNCH_US) * (A100.clock_mhz or 0)

    for waves in (1, 4, 100):
        for share in (0.0, 0.1, 0.5):
            far = max(1 / waves, share)
            trip = 3000 + far * 1000 + TRIP_CYCLES
            expected = waves * (10 * trip + 2500)
            assert cycles(waves * A100.sms, share) == pytest.approx(expected)


@pytest.mark.slow("4 s: two kernels")
def test_more_stages_are_faster_where_few_blocks_fit(tmp_path: Path) -> None:
    """So an offline search has something to go by: bytes in flight."""
    times = []
    for stages in (2, 4):
        config = make_config(16, 64, num_stages=stages)
        _, compiled = cubins.own(SPEC, config, "sm_80", tmp_path)
        found = cached_replay(compiled, A100, tmp_path)
        one = replace(found, residents=1, cycles=found.cycles[:1], far_cycles=found.far_cycles[:1])
        times.append(estimate(one, SPEC, config, problem_of(64, 8192), A100).median_us)
    assert times[1] < 0.9 * times[0]
