"""Into how many parts keys are split, and what a config says of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flashgen.inputs.cache import Cache
from flashgen.inputs.features import Features
from flashgen.kernels.launch_cache import Decode
from flashgen.schedules.grid_rules import (
    MOST_SPLITS,
    START_TILES,
    WORTH_SPLITTING,
    split_count,
    splits_of,
)
from flashgen.spec.problem import Problem
from tests.makers import make_config


def time(blocks: int, tiles: int, splits: int, slots: int) -> int:
    return -(-blocks * splits // slots) * (-(-tiles // splits) + START_TILES)


@pytest.mark.parametrize("slots", [1, 20, 108, 660])
def test_the_rule_by_its_own_words(slots: int) -> None:
    for blocks in (1, 2, 7, 8, 50, 66, 100, 1000):
        for tiles in (1, 2, 3, 31, 64, 1000):
            splits = split_count(blocks, tiles, slots)
            every = range(1, min(MOST_SPLITS, tiles) + 1)
            least = min(time(blocks, tiles, n, slots) for n in every)
            if least >= WORTH_SPLITTING * time(blocks, tiles, 1, slots):
                assert splits == 1
                continue
            assert time(blocks, tiles, splits, slots) == least
            assert all(time(blocks, tiles, n, slots) > least for n in every if n < splits)


def test_known_counts_of_an_h200() -> None:
    """8 heads of K and V, tiles of 32 keys; one block on an SM, and five."""
    assert split_count(8, 1024, 132) == 16  # one sequence of 32,768 keys: 128 of 132 SMs
    assert split_count(8, 1024, 660) == 79  # the fewest splits of 13 tiles: 632 of 660 slots
    assert split_count(16 * 8, 256, 132) == 1
    assert split_count(16 * 8, 256, 660) == 5
    assert split_count(64 * 8, 16, 660) == 1  # more parts start more blocks
    assert split_count(64 * 8, 128, 108) == 1  # four parts would take 646 tiles in place of 650
    assert split_count(0, 64, 132) == 1


def test_splits_are_for_as_many_blocks_as_fit() -> None:
    problem = Problem(batch=16, heads=32, kv_heads=8, seq_q=1, seq_k=8192)
    config = make_config(16, 32, num_stages=2)
    assert splits_of(config, problem, 132) == 1
    assert splits_of(replace(config, blocks_per_sm=5), problem, 132) == 5


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
