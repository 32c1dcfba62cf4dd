"""Gradients by dS in memory, of schedule hopper and of plain kernels without TMA, as Triton compiles them: results, runs,
orders, mutants.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashgen.evaluate.check import cases_of, check_loaded
from flashgen.evaluate.check_attention import attention_trial
from flashgen.ptx import FaultsFound
from flashgen.reference.cases import CheckCase
from flashgen.schedules.config import KernelConfig
from tests.ds import (
    FEW,
    FEW_WINDOWS,
    LONG,
    PACKED,
    PACKED_WINDOWS,
    RAGGED,
    WINDOWS,
    assert_found,
    assert_gradients,
    kernels,
    of_rows,
    spec_of,
)
from tests.executed import call_far_below_zero, case, compiled
from tests.makers import each, make_config


def hopper(br: int, bc: int) -> KernelConfig:
    return make_config(br, bc, num_warps=8, num_stages=2, schedule="hopper", loads="descriptor")


NARROW, NARROW_128, SHARED_KEYS = hopper(64, 128), hopper(128, 128), hopper(64, 64)
PLAIN, PLAIN_64 = make_config(64, 128, num_warps=8, num_stages=3), make_config(32, 64)


def test_gradients_of_runs_and_of_ranges_of_keys() -> None:
    spec = spec_of(64, "causal")
    both = kernels(spec, NARROW, of_rows())
    assert_gradients(both, spec, [case(70, 200, heads=4, kv=2)], ranges=True)


VARIANTS: dict[str, tuple[int, str, KernelConfig, list[CheckCase], dict[str, Any]]] = {
    "head dim 128": (128, "causal", NARROW, RAGGED, {}),
    "no mask": (128, "none", NARROW, RAGGED, {}),
    "128 rows": (64, "causal", NARROW_128, RAGGED, {}),
    "shared keys": (256, "causal", SHARED_KEYS, RAGGED, {}),
    "shared keys, no mask": (192, "none", SHARED_KEYS, RAGGED, {"head_dim_v": 128}),
    "window": (64, "causal", NARROW, WINDOWS, {"window": True}),
    "window on both sides": (64, "none", NARROW, WINDOWS, {"window": True}),
    "chunk": (128, "causal", NARROW, WINDOWS, {"chunk": True}),
    "window, softcap, shared keys": (
        256, "causal", SHARED_KEYS, WINDOWS, {"window": True, "softcap": True}),
    "ALiBi": (96, "causal", NARROW, RAGGED, {"alibi": True}),
    "packed": (128, "causal", NARROW, PACKED, {"varlen": True}),
    "packed, no mask": (64, "none", NARROW_128, PACKED, {"varlen": True}),
    "packed, shared keys, window": (
        256, "causal", SHARED_KEYS, PACKED_WINDOWS, {"varlen": True, "window": True}),
    "plain": (128, "causal", PLAIN, FEW, {}),
    "plain, no mask": (40, "none", PLAIN_64, FEW, {"head_dim_v": 24}),
    "plain, warps without rows": (64, "causal", make_config(16, 32, num_warps=8), FEW, {}),
    "plain, packed": (64, "causal", PLAIN, PACKED[1:], {"varlen": True}),
    "plain, chunk": (64, "causal", PLAIN_64, FEW_WINDOWS, {"chunk": True}),
    "plain, window on both sides": (64, "none", PLAIN_64, FEW_WINDOWS, {"window": True}),
}  # fmt: skip


@pytest.mark.parametrize("name", each(VARIANTS))
def test_every_variant_is_right(name: str) -> None:
    dim, mask, config, cases, features = VARIANTS[name]
    spec = spec_of(dim, mask, **features)
    loads = "pointer" if spec.varlen else config.loads
    of_dq = of_rows(loads, 64 if dim > 128 else 128)
    assert_gradients(kernels(spec, config, of_dq), spec, cases, ranges=True)


@pytest.mark.slow("three kernels, all cases")
@pytest.mark.parametrize("config", [NARROW, SHARED_KEYS], ids=["64 keys each", "shared keys"])
def test_the_check_of_tuning_passes(config: KernelConfig) -> None:
    spec = spec_of(256 if config is SHARED_KEYS else 128, "causal")
    assert check_loaded(compiled(spec, config), spec, config).passed
    its, way = spec.for_direction("backward_dq_of_ds"), of_rows(br=64)
    assert len(cases_of(its, way, "cpu")) > 5
    assert check_loaded(compiled(its, way), its, way).passed


@pytest.mark.slow("a kernel twice, 20 orders")
@pytest.mark.parametrize(
    "config", [NARROW, SHARED_KEYS, PLAIN], ids=["64 keys each", "shared keys", "plain"]
)
def test_20_orders_have_one_result(config: KernelConfig) -> None:
    spec = spec_of(256 if config is SHARED_KEYS else 64, "causal")
    both = kernels(spec, config, of_rows(config.loads, br=64))
    call = attention_trial(spec, case(200, 200, heads=2, kv=1), 0, "cpu").call
    first = both.gradients(call)
    for seed in range(1, 20):
        both.dkv.seed = both.dq.seed = 100 * seed
        assert all(map(torch.equal, both.gradients(call), first)), seed


@pytest.mark.slow("a kernel")
@pytest.mark.parametrize("mask", ["none", "causal"])
def test_ds_behind_the_last_key_does_not_matter(mask: str) -> None:
    """There P is infinite, and so would be dS; but no tile of dQ reads it."""
    spec = spec_of(64, mask)
    found = kernels(spec, NARROW, of_rows()).gradients(call_far_below_zero(spec))
    assert all(bool(x.isfinite().all()) for x in found)


OF_NARROW: dict[str, tuple[str, str]] = {
    "the place is written while it is read": ("tma.store_wait(0)\n                        ds_place =", "ds_place ="),
    "the last store but one is awaited": ("tma.store_wait(0)\n                        ds_place =", "tma.store_wait(1)\n                        ds_place ="),
    "the place of the other consumer": ("ds_place = ds_smem.index(WARPGROUP)", "ds_place = ds_smem.index(0)"),
    "the keys of the other consumer": ("ds_key + 64 * WARPGROUP, at_row)", "ds_key, at_row)"),
    "transposed": ("ds_place.reshape([64, AT_ONCE])", "ds_place.reshape([AT_ONCE, 64]).permute((1, 0))"),
    "the first rows of a tile again": ("WARPGROUP, at_row)", "WARPGROUP, row_start)"),
    "the first head of the group": ("(0, ds_head + member, ds_key", "(0, ds_head, ds_key"),
    "P in place of dS": ("store(ds_t)", "store(p_t.to(DTYPE))"),
    "rows begin within a tile of dS": ("first_row = gl.maximum(least_key - last, 0) // ROWS * ROWS", "first_row = gl.maximum(least_key - last, 0) // BR * BR"),
    "the run begins at block 0": ("pid = first_block + pid", "pid = pid"),
    "a head's blocks go to another": ("pid % run_heads * tiles + pid // run_heads", "pid % run_heads * tiles + pid // tiles"),
    "heads count from the first of all": ("(pid // tiles - first_block // tiles) * group", "(pid // tiles) * group"),
    "keys count from the first of all": ("key_start - first_block % tiles * BC)", "key_start)"),
    "heads of K": ("(pid // tiles - first_block // tiles) * group", "(pid // tiles - first_block // tiles)"),
}  # fmt: skip
OF_SHARED_KEYS: dict[str, tuple[str, str]] = {
    "dS is written while it is read": ("            tma.store_wait(0)  # dS of the tile before has left\n", "            pass\n"),
    "the half of the other consumer": ("ds_block.slice(KEYS * WARPGROUP, KEYS, 2)", "ds_block.slice(0, KEYS, 2)"),
    "the keys of the other half": ("ds_key + KEYS * WARPGROUP, row_start)", "ds_key, row_start)"),
    "the first head of the group": ("                ds_head += 1\n", "                pass\n"),
    "tiles of 64 keys": ("least_key = key_start // 128 * 128", "least_key = key_start"),
    "dS of the tile before": (
        "        token = meet(token)  # dS is there\n        if ds_desc", "        if ds_desc"),
}  # fmt: skip
OF_DQ: dict[str, tuple[str, str]] = {
    "keys begin anew": ("start - first_key, row_start]", "start, row_start]"),
    "dQ of a range alone": ("if first_key > 0:", "if first_key > 1 << 20:"),
    "dQ is whole after each range": ("if keys_follow != 0:", "if keys_follow > 1:"),
    "a tile too few": ("row_start + BR + diagonal + right, key_end)", "row_start + diagonal + right, key_end)"),
    "the head of K is that of Q": ("kv_head = head // group", "kv_head = head // 1 % 2"),
    "heads of the first run": ("batch_head = first_head + ds_head", "batch_head = ds_head"),
    "dS of the first head": ("ds_desc.load([0, ds_head,", "ds_desc.load([0, 0,"),
    "scaled twice": ("dq *= scale", "dq *= scale * scale"),
    "all keys are seen": ("    if CAUSAL or HIDES_FIRST:", "    if HIDES_FIRST:"),
    "sums of the first head": ("sum_ptr + ds_head.to(tl.int64)", "sum_ptr + 0 * ds_head.to(tl.int64)"),
}  # fmt: skip
ON_BR_64 = "rows begin within a tile of dS"
BROKEN = {
    "64 keys each": (NARROW_128, 64, OF_NARROW),
    "shared keys": (SHARED_KEYS, 256, OF_SHARED_KEYS),
    "dQ": (NARROW, 64, OF_DQ),
}


@pytest.mark.parametrize(
    ("kernel", "mutant"),
    each([(name, mutant) for name, row in BROKEN.items() for mutant in row[2]]),
)
def test_a_broken_text_is_found(kernel: str, mutant: str) -> None:
    config, dim, mutants = BROKEN[kernel]
    config = NARROW if mutant == ON_BR_64 else config
    spec = spec_of(dim, "causal")
    broken = {"broken_dq" if kernel == "dQ" else "broken": mutants[mutant]}
    assert_found(kernels(spec, config, of_rows(bc=128), **broken), spec)


@pytest.mark.parametrize(
    ("config", "loads", "line"),
    [
        (NARROW, "descriptor", "gl.cdiv(row_end, ROWS) * ROWS"),
        (PLAIN_64, "pointer", "tl.cdiv(row_end, ROWS) * ROWS"),
    ],
    ids=["hopper", "plain"],
)
def test_a_tile_that_no_row_sees_would_take_the_memory_of_others(
    config: KernelConfig, loads: Any, line: str
) -> None:
    spec = spec_of(64, "causal", window=True)
    both = kernels(spec, config, of_rows(loads), (line, line.replace("row_end", "row_end + ROWS")))
    with pytest.raises((AssertionError, FaultsFound)):
        assert_gradients(both, spec, [case(1, 1), case(1, 1), LONG])
