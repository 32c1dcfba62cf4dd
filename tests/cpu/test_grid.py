"""Trip counts of windowed kernels, beside a matrix of who sees what; and what such a spec counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from flashgen import problem as problem_module
from flashgen.compile import compile_kernel
from flashgen.errors import NoEstimate
from flashgen.estimate import estimate
from flashgen.gpu import TARGETS
from flashgen.grid import grid
from flashgen.places import places
from flashgen.problem import TUNED_WINDOW, Problem, flops, workload
from flashgen.render import render
from flashgen.replays import cached_replay
from tests.makers import make_config, make_spec

H200 = TARGETS["nvidia_h200"]

LENGTHS = [(64, 64), (70, 130), (130, 70), (1, 90), (90, 1)]


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
    monkeypatch.setattr("flashgen.grid.TUNED_WINDOW", window)
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
    for start, (trips,) in zip(
        range(0, seq_k, 16),
        grid(spec.for_direction("backward_dkv"), config, problem, H200, loops=1),
        strict=True,
    ):
        tiles = [who[row : row + 32, start : start + 16] for row in range(0, seq_q, 32)]
        assert trips == 2 * sum(bool(tile.any()) for tile in tiles)


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
    if seq_q > seq_k and mask == "causal":
        return  # flops halves a causal mask of any shape
    pairs = int(seen(mask, seq_q, seq_k, 40)[:seq_q].sum())
    if seq_q != seq_k and mask == "causal":
        pairs -= seq_q * seq_k // 2 - seq_q * seq_q // 2  # likewise
    assert flops(spec, problem) == pytest.approx(4 * 64 * pairs, rel=0.03)


@pytest.mark.parametrize("direction", ["forward", "backward_dkv", "backward_dq"])
def test_a_windowed_kernel_is_estimated_to_be_faster(direction: Any, tmp_path: Path) -> None:
    a100 = TARGETS["nvidia_a100_sxm4_40gb"]
    times = []
    for window in (False, True):
        spec = make_spec("bfloat16", 64, "causal", window=window).for_direction(direction)
        config = make_config(64, 64)
        compiled = compile_kernel(render(spec, config), spec, config, a100.arch, cache=tmp_path)
        replayed = cached_replay(compiled, a100, tmp_path)
        times.append(
            [
                estimate(replayed, spec, config, workload(spec, seq), a100).median_us
                for seq in (TUNED_WINDOW // 4, 4 * TUNED_WINDOW)
            ]
        )
    (short, long), (short_windowed, long_windowed) = times
    assert 0.8 * short < short_windowed < 1.6 * short
    assert long_windowed < 0.65 * long
