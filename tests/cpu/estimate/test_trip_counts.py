"""Trip counts of windowed kernels, beside a matrix of who sees what; and what such a spec counts."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flashgen.errors import NoEstimate
from flashgen.estimate.estimate import estimate
from flashgen.estimate.replay import cached_replay
from flashgen.estimate.trip_counts import empty_programs, grid
from flashgen.evaluate.inputs import make_decode, make_features, make_inputs
from flashgen.kernels.launch import bind
from flashgen.kernels.launch_backward import Backward
from flashgen.kernels.launch_forward import Forward
from flashgen.kernels.plan import Plan
from flashgen.runtime.eager.visibility import places
from flashgen.schedules.config import KernelConfig
from flashgen.schedules.grid_rules import splits_of
from flashgen.spec import problem as problem_module
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.gpu import TARGETS
from flashgen.spec.problem import (
    TUNED_WINDOW,
    Problem,
    bytes_moved,
    flops,
    sequences_of,
    workload,
)
from tests.compiled import cache, compile_one
from tests.makers import make_config, make_spec

H200 = TARGETS["nvidia_h200"]

LENGTHS = [(64, 64), (70, 130), (130, 70), (1, 90), (90, 1)]


def tune_with(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("estimate.trip_counts", "spec.problem"):
        monkeypatch.setattr(f"flashgen.{module}.TUNED_WINDOW", window)


def seen(mask: str, seq_q: int, seq_k: int, window: int) -> torch.Tensor:
    """Who sees whom, beyond the last row too: tiles of rows are whole."""
    rows, diagonal = seq_q + 64, seq_k - seq_q
    sides = (window, -1 if mask == "causal" else window)
    at = places(rows, seq_k, diagonal, torch.device("cpu"), None)
    found = at.in_window(sides)
    if mask == "causal":
        found &= at.causal()
    return found


@pytest.mark.parametrize("window", [0, 20, 33, 500])
@pytest.mark.parametrize("mask", ["none", "causal"])
@pytest.mark.parametrize(("seq_q", "seq_k"), LENGTHS)
def test_trips_are_the_tiles_that_some_row_sees(
    seq_q: int, seq_k: int, mask: str, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tune_with(window, monkeypatch)
    problem = Problem(batch=1, heads=2, kv_heads=1, seq_q=seq_q, seq_k=seq_k)
    config, who = make_config(32, 16), seen(mask, seq_q, seq_k, window)
    spec = make_spec("bfloat16", 64, mask, window=True)
    by_rows = grid(spec, config, problem, H200, loops=3)
    for start, trips in zip(range(0, seq_q, 32), by_rows[: len(by_rows) // 2], strict=True):
        tiles = [who[start : start + 32, key : key + 16] for key in range(0, seq_k, 16)]
        whole = [bool(tile.all()) and tile.shape[1] == 16 for tile in tiles]
        assert trips[1] == sum(whole)
        assert sum(trips) == sum(bool(tile.any()) for tile in tiles)
    one = grid(spec, config, problem, H200, loops=1)
    assert one == [(sum(trips),) for trips in by_rows]
    branching = make_config(32, 16, num_warps=8, schedule="hopper")
    both = grid(spec, branching, problem, H200, loops=2)
    assert both == [(trips[1], trips[0] + trips[2]) for trips in by_rows]
    for start, (trips,) in zip(
        range(0, seq_k, 16),
        grid(spec.for_direction("backward_dkv"), config, problem, H200, loops=1),
        strict=True,
    ):
        tiles = [who[row : row + 32, start : start + 16] for row in range(0, seq_q, 32)]
        assert trips == 2 * sum(bool(tile.any()) for tile in tiles)
    by_keys, branching = spec.for_direction("backward_dkv"), replace(branching, br=32, bc=16)
    apart = grid(by_keys, branching, problem, H200, loops=3)
    for start, trips in zip(range(0, seq_k, 16), apart, strict=True):
        tiles = [who[row : row + 32, start : start + 16] for row in range(0, seq_q, 32)]
        assert sum(trips) == 2 * sum(bool(tile.any()) for tile in tiles)
        if start + 16 <= seq_k:
            assert trips[1] == 2 * sum(bool(tile.all()) for tile in tiles)
    both = grid(by_keys, branching, problem, H200, loops=2)
    assert both == [(first + last, whole) for first, whole, last in apart]


@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize("mask", ["none", "causal"])
@pytest.mark.parametrize(("seq_q", "seq_k"), LENGTHS)
def test_tiles_behind_the_loop_are_no_trips(
    seq_q: int, seq_k: int, mask: str, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tune_with(window, monkeypatch)
    problem = Problem(batch=1, heads=1, kv_heads=1, seq_q=seq_q, seq_k=seq_k)
    spec = make_spec("bfloat16", 64, mask, window=window > 0)
    plain, ampere = make_config(32, 16), make_config(32, 16, schedule="ampere")
    if window:
        apart = [(whole, first) for first, whole, _ in grid(spec, plain, problem, H200, loops=3)]
        assert grid(spec, ampere, problem, H200, loops=2) == apart
        return
    whole = [trips[0] for trips in grid(spec, plain, problem, H200, loops=2)]
    behind = 1 if not spec.causal and seq_k % 16 == 0 else 0  # the last one, whole or ragged
    assert grid(spec, ampere, problem, H200, loops=1) == [(trips - behind,) for trips in whole]


@pytest.mark.parametrize("window", [0, 20, 100])
@pytest.mark.parametrize("mask", ["none", "causal"])
@pytest.mark.parametrize(("seq_q", "seq_k"), [(1, 300), (6, 290), (5, 3)])
def test_trips_of_a_windowed_decode_are_the_tiles_that_some_row_sees(
    seq_q: int, seq_k: int, mask: str, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each tile once, of one split or another; the first and the last loop mask."""
    tune_with(window, monkeypatch)
    problem = Problem(batch=2, heads=8, kv_heads=2, seq_q=seq_q, seq_k=seq_k)
    spec = make_spec("bfloat16", 64, mask, direction="decode", window=True)
    config, who = make_config(16, 16), seen(mask, seq_q, seq_k, window)[:seq_q]
    blocks = grid(spec, config, problem, H200, loops=3)
    row_tiles = -(-4 * seq_q // 16)
    splits = splits_of(config, replace(problem, seq_k=min(seq_k, window + seq_q)), H200.sms)
    assert len(blocks) == 4 * splits * row_tiles
    for number in range(row_tiles):
        mine = blocks[: splits * row_tiles][number::row_tiles]
        rows = who[4 * number : 4 * number + 4]  # 4 heads share keys: 16 rows are 4 queries
        tiles = [rows[:, key : key + 16] for key in range(0, seq_k, 16)]
        whole = [bool(tile.all()) and tile.shape[1] == 16 for tile in tiles]
        assert sum(trips[1] for trips in mine) == sum(whole)
        assert sum(map(sum, mine)) == sum(bool(tile.any()) for tile in tiles)
        assert max(map(sum, mine)) <= -(-sum(map(sum, mine)) // splits)
    one = grid(spec, config, problem, H200, loops=1)
    assert one == [(sum(trips),) for trips in blocks]


PARTS = make_config(32, 32, v_parts=2)
LAUNCHED: dict[str, tuple[AttentionSpec, KernelConfig]] = {
    "plain": (make_spec("float16", 32), make_config(32, 16)),
    "parts of V": (make_spec("float16", 128), PARTS),
    "longest first": (make_spec("float16", 128, "causal"), replace(PARTS, order="longest_first")),
    "grouped": (make_spec("float16", 32, "causal"), make_config(32, 16, order="grouped")),
    "window": (make_spec("float16", 32, window=True), make_config(32, 16)),
    "packed": (make_spec("float16", 32, varlen=True), make_config(32, 16)),
    "packed, parts of V": (make_spec("float16", 128, varlen=True), PARTS),
    "packed pages": (make_spec("float16", 32, varlen=True, paged=True), make_config(32, 16)),
    "packed dkv": (
        make_spec("float16", 32, direction="backward_dkv", varlen=True),
        make_config(32, 16),
    ),
    "block mask": (make_spec("float16", 32, block_mask=True), make_config(32, 16)),
    "block mask, parts of V": (make_spec("float16", 128, block_mask=True), PARTS),
    "decode": (make_spec("float16", 32, "causal", direction="decode"), make_config(16, 16)),
    "windowed decode": (
        make_spec("float16", 128, direction="decode", window=True),
        make_config(16, 16, split_keys=256, v_parts=2),
    ),
    "dkv": (make_spec("float16", 32, direction="backward_dkv"), make_config(32, 16)),
    "dq": (make_spec("float16", 32, direction="backward_dq"), make_config(32, 16)),
    "grouped packed dkv": (
        make_spec("float16", 32, "causal", direction="backward_dkv", varlen=True),
        make_config(32, 16, order="grouped"),
    ),
    "grouped packed dq": (
        make_spec("float16", 32, "causal", direction="backward_dq", varlen=True),
        make_config(32, 16, order="grouped"),
    ),
    "dkv, block mask": (
        make_spec("float16", 32, direction="backward_dkv", block_mask=True),
        make_config(32, 16),
    ),
}


@pytest.mark.parametrize("name", LAUNCHED)
def test_there_is_a_count_for_each_program_that_is_launched(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tune_with(150, monkeypatch)
    spec, config = LAUNCHED[name]
    seq_q = 3 if spec.direction == "decode" else 300
    problem = Problem(batch=2, heads=4, kv_heads=2, seq_q=seq_q, seq_k=300)
    loops = 3 if spec.window else 2
    counted = len(grid(spec, config, problem, H200, loops=loops))
    counted += empty_programs(spec, config, problem)
    assert counted == launched(spec, config, problem)


def launched(spec: AttentionSpec, config: KernelConfig, problem: Problem) -> int:
    """The programs of the launch that measures a kernel, which is not made."""
    found: list[int] = []
    plan = bind(SimpleNamespace(arg_names=("q_ptr", "k_ptr")), spec, config)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Plan, "start", lambda self, q, blocks, arguments: found.append(blocks))
        plan(call_of(spec, problem))
    return found[0]


def call_of(spec: AttentionSpec, problem: Problem) -> Any:
    if spec.direction == "decode":
        return make_decode(spec, problem, 0, "cpu", H200.sms)
    q, k, v = make_inputs(spec, problem, 0, "cpu")
    features = make_features(spec, problem, 0, "cpu")
    if spec.direction == "forward":
        return Forward(q=q, k=k, v=v, scale=1.0, diagonal=None, features=features)
    rows = torch.zeros(q.shape[:3])
    return Backward(
        q=q, k=k, v=v, do=torch.zeros_like(q), lse=rows, delta=rows, scale=1.0, diagonal=None,
        features=features,
    )  # fmt: skip


def test_packed_work_is_that_of_its_sequences() -> None:
    packed, plain = (make_spec("bfloat16", 64, "causal", varlen=v) for v in (True, False))
    problem = Problem(batch=5, heads=4, kv_heads=2, seq_q=100, seq_k=300)
    alone = sequences_of(packed, problem)
    assert [(each.batch, each.seq_q, each.seq_k) for each in alone[:2]] == [
        (1, 100, 300),
        (1, 43, 127),
    ]
    assert len(alone) == 5
    assert flops(packed, problem) == sum(flops(plain, each) for each in alone)
    assert bytes_moved(packed, problem) == sum(bytes_moved(plain, each) for each in alone)
    config = make_config(32, 16)
    grids = [grid(plain, config, each, H200, loops=2) for each in alone]
    assert grid(packed, config, problem, H200, loops=2) == list(itertools.chain(*grids))


def test_heads_of_several_packed_sequences_share_a_run() -> None:
    """Two heads of K, or four of Q: of the two sequences the longer one's last tile is alone."""
    spec = make_spec("bfloat16", 64, "causal", varlen=True)
    problem = Problem(batch=2, heads=2, kv_heads=1, seq_q=96, seq_k=96)
    assert [each.seq_k for each in sequences_of(spec, problem)] == [96, 41]
    config, four = make_config(32, 32, order="grouped"), replace(H200, sms=4)

    def of(direction: Any) -> list[tuple[int, ...]]:
        return grid(spec.for_direction(direction), config, problem, four, loops=2)

    assert of("backward_dkv") == [(2, 4), (2, 2), (2, 2), (2, 0), (2, 0)]
    assert of("backward_dq") == [(2, 1)] * 2 + [(1, 1)] * 4 + [(0, 1)] * 4


def test_other_numbers_of_loops_get_no_estimate() -> None:
    problem = Problem(batch=1, heads=1, kv_heads=1, seq_q=64, seq_k=64)
    spec = make_spec("bfloat16", 64, "causal", window=True)
    with pytest.raises(NoEstimate, match=r"2 main loops .* has 1 or 3"):
        grid(spec, make_config(), problem, H200, loops=2)
    with pytest.raises(NoEstimate, match=r"3 main loops .* has 1$"):
        grid(spec.for_direction("backward_dkv"), make_config(), problem, H200, loops=3)
    with pytest.raises(NoEstimate, match=r"3 main loops .* has 1 or 2"):
        grid(make_spec(), make_config(), problem, H200, loops=3)


@pytest.mark.parametrize("mask", ["none", "causal"])
@pytest.mark.parametrize(("seq_q", "seq_k"), [(300, 300), (100, 300), (300, 100)])
def test_operations_are_those_inside_the_window(
    seq_q: int, seq_k: int, mask: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for the diagonal, of which flops counts half."""
    problem = Problem(batch=1, heads=1, kv_heads=1, seq_q=seq_q, seq_k=seq_k)
    spec, plain = (make_spec("bfloat16", 64, mask, window=w) for w in (True, False))
    assert flops(spec, problem) == flops(plain, problem)
    monkeypatch.setattr(problem_module, "TUNED_WINDOW", 40)
    pairs = int(seen(mask, seq_q, seq_k, 40)[:seq_q].sum())
    assert flops(spec, problem) == pytest.approx(4 * 64 * pairs, rel=0.03)


@pytest.mark.parametrize("mask", ["none", "causal"])
def test_operations_of_a_windowed_decode_are_those_of_the_keys_it_sees(mask: str) -> None:
    """Its queries stand at the end: nothing is halved."""
    spec = make_spec("bfloat16", 64, mask, direction="decode", window=True)
    problem = Problem(batch=3, heads=8, kv_heads=2, seq_q=4, seq_k=4 * TUNED_WINDOW)
    assert flops(spec, problem) == pytest.approx(4 * 64 * 3 * 8 * 4 * TUNED_WINDOW, rel=0.01)


@pytest.mark.slow("two kernels each, and their replays")
@pytest.mark.parametrize("direction", ["forward", "backward_dkv", "backward_dq"])
def test_a_windowed_kernel_is_estimated_to_be_faster(direction: Any) -> None:
    a100 = TARGETS["nvidia_a100_sxm4_40gb"]
    times = []
    for window in (False, True):
        spec = make_spec("bfloat16", 64, "causal", window=window).for_direction(direction)
        config = make_config(64, 64)
        compiled = compile_one(spec, config, a100.arch)
        replayed = cached_replay(compiled, a100, cache())
        times.append(
            [
                estimate(replayed, spec, config, workload(spec, seq), a100).median_us
                for seq in (TUNED_WINDOW // 4, 4 * TUNED_WINDOW)
            ]
        )
    (short, long), (short_windowed, long_windowed) = times
    assert 0.8 * short < short_windowed < 1.6 * short
    assert long_windowed < 0.65 * long


@pytest.mark.parametrize(("br", "bc"), [(32, 64), (64, 32), (32, 32)])
@pytest.mark.parametrize(("seq_q", "seq_k"), [(256, 256), (200, 330), (330, 200)])
def test_rows_of_a_tile_of_keys_are_masked_or_not(br: int, bc: int, seq_q: int, seq_k: int) -> None:
    """Counted tile by tile: rows see a key or not, and all see all keys or not."""
    spec = make_spec("bfloat16", 64, "causal", direction="backward_dkv")
    problem = Problem(batch=1, heads=2, kv_heads=1, seq_q=seq_q, seq_k=seq_k)
    expected = []
    for key in range(0, seq_k, bc):
        first_keys = [row + seq_k - seq_q for row in range(0, seq_q, br)]
        seen = sum(first + br - 1 >= key for first in first_keys)
        whole = sum(first >= key + bc - 1 for first in first_keys)
        expected.append((2 * (seen - whole), 2 * whole))
    assert grid(spec, make_config(br, bc), problem, H200, loops=2) == expected


def test_invariant_kernels_close_segments() -> None:
    """A trip more for each segment of a prefill, and a split of a decode for each."""
    spec = replace(make_spec("bfloat16", 64, "causal"), invariant=True)
    problem = Problem(batch=1, heads=2, kv_heads=2, seq_q=2048, seq_k=2048)
    h200 = TARGETS["nvidia_h200"]
    config = make_config(128, 64, num_warps=8)
    plain = grid(replace(spec, invariant=False), config, problem, h200, loops=2)
    found = grid(spec, config, problem, h200, loops=2)
    more = [sum(a) - sum(b) for a, b in zip(found, plain, strict=True)]
    assert more == ([1] * 8 + [2] * 8) * 2
    ahead = grid(spec, replace(config, schedule="s_ahead"), problem, h200, loops=2)
    assert list(map(sum, ahead)) == list(map(sum, plain))
    hopper = replace(config, schedule="hopper", loads="descriptor")
    assert grid(spec, hopper, problem, h200, loops=2) == ahead
    step = replace(spec, direction="decode", mask="none")
    tall = replace(problem, seq_q=1, seq_k=2500)
    splits = grid(step, make_config(64, 64), tall, h200, loops=2)
    assert splits == [(16, 0), (16, 0), (7, 1)] * 2
