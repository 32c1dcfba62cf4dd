"""Into how many parts keys are split, and what a config says of it."""

from __future__ import annotations

import math

import pytest
import torch

from flashgen.kernels.launch_cache import Decode
from flashgen.spec.cache import Cache
from flashgen.spec.features import Features
from flashgen.spec.grid_rules import BUSY_ENOUGH, MOST_SPLITS, NEAR_BEST, split_count, splits_of
from flashgen.spec.problem import Problem
from tests.makers import make_config


def efficiency(blocks: int, splits: int, sms: int) -> float:
    waves = blocks * splits / sms
    return waves / math.ceil(waves)


@pytest.mark.parametrize("sms", [1, 20, 108, 132])
def test_the_rule_by_its_own_words(sms: int) -> None:
    for blocks in (1, 2, 7, 8, 50, 66, 100, 1000):
        for tiles in (1, 2, 3, 31, 64, 1000):
            splits = split_count(blocks, tiles, sms)
            if blocks >= BUSY_ENOUGH * sms or tiles == 1:
                assert splits == 1
                continue
            every = range(1, min(MOST_SPLITS, sms, tiles) + 1)
            useful = [n for n in every if n == 1 or -(-tiles // n) != -(-tiles // (n - 1))]
            best = max(efficiency(blocks, n, sms) for n in useful)
            assert splits in useful
            assert efficiency(blocks, splits, sms) >= NEAR_BEST * best
            assert all(efficiency(blocks, n, sms) < NEAR_BEST * best for n in useful if n < splits)


def test_known_counts_of_an_h200() -> None:
    assert split_count(8, 1024, 132) == 14  # one sequence, 8 heads: 112 of 132 SMs; 128 is the best
    assert split_count(64 * 8, 1024, 132) == 1  # 64 sequences fill it
    assert split_count(0, 64, 132) == 1


def test_a_config_may_say_how_many_keys_a_split_takes() -> None:
    problem = Problem(batch=64, heads=32, kv_heads=8, seq_q=1, seq_k=8192)
    assert splits_of(make_config(16, 64), problem, 132) == 1
    assert splits_of(make_config(16, 64, split_keys=1024), problem, 132) == 8
    short = Problem(batch=64, heads=32, kv_heads=8, seq_q=1, seq_k=1000)
    assert splits_of(make_config(16, 64, split_keys=1024), short, 132) == 1
    long = Problem(batch=1, heads=8, kv_heads=8, seq_q=1, seq_k=1 << 20)
    assert splits_of(make_config(16, 64, split_keys=256), long, 132) == MOST_SPLITS


def test_rows_beyond_a_tile_are_more_programs() -> None:
    """16 queries of 8 heads are 128 rows, 8 tiles of 16: 64 programs where one tile has 8."""
    few = Problem(batch=1, heads=64, kv_heads=8, seq_q=1, seq_k=65536)
    many = Problem(batch=1, heads=64, kv_heads=8, seq_q=16, seq_k=65536)
    assert splits_of(make_config(16, 64), few, 132) == split_count(8, 1024, 132)
    assert splits_of(make_config(16, 64), many, 132) == split_count(64, 1024, 132)


@pytest.mark.parametrize(
    ("window", "keys"), [(None, 4096), ((100, 0), 104), ((100, -1), 104), ((-1, 5), 4096)]
)
def test_splits_are_counted_of_the_keys_that_a_window_leaves(
    window: tuple[int, int] | None, keys: int
) -> None:
    """They are numbers of the call alone, so that the grid is a CUDA graph's."""
    k = torch.empty(2, 1, 4096, 16)
    cache = Cache(k=k, v=k, lengths=torch.zeros(2, dtype=torch.int32))
    call = Decode(
        q=torch.empty(2, 4, 4, 16),
        cache=cache,
        scale=1.0,
        sms=132,
        features=Features(window=window),
    )
    assert call.streamed.seq_k == keys
    assert call.problem.seq_k == 4096
