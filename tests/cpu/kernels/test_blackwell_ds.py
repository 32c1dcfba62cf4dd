"""Gradients by dS in memory of schedule blackwell, as Triton compiles them: results, runs, orders, mutants."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashgen.evaluate.check_attention import attention_trial
from flashgen.reference.cases import CheckCase
from flashgen.schedules.config import KernelConfig
from flashgen.schedules.legality import why_illegal
from tests.ds import (
    GPUS,
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
from tests.executed import call_far_below_zero, case
from tests.makers import each, make_config

SLOW = pytest.mark.slow("both kernels, several cases")


def blackwell(br: int) -> KernelConfig:
    return make_config(br, 128, num_warps=8, num_stages=2, schedule="blackwell", loads="descriptor")


NARROW, WIDE_K = blackwell(128), blackwell(64)


def test_gradients_of_runs_and_of_ranges_of_keys() -> None:
    spec = spec_of(64, "causal")
    both = kernels(spec, NARROW, of_rows())
    assert_gradients(both, spec, [case(70, 200, heads=4, kv=2)], ranges=True)


DEEPSEEK = {"head_dim_v": 128}
VARIANTS: dict[str, tuple[int, str, KernelConfig, list[CheckCase], dict[str, Any]]] = {
    "head dim 128": (128, "causal", NARROW, RAGGED, {}),
    "no mask": (128, "none", NARROW, RAGGED, {}),
    "window": (64, "causal", NARROW, WINDOWS, {"window": True}),
    "window on both sides": (64, "none", NARROW, WINDOWS, {"window": True}),
    "chunk": (128, "causal", NARROW, WINDOWS, {"chunk": True}),
    "softcap, ALiBi": (96, "causal", NARROW, RAGGED, {"softcap": True, "alibi": True}),
    "packed": (128, "causal", NARROW, PACKED, {"varlen": True}),
    "packed, no mask": (64, "none", NARROW, PACKED, {"varlen": True}),
    "64 rows": (192, "causal", WIDE_K, RAGGED, DEEPSEEK),
    "64 rows, window, softcap": (
        192, "causal", WIDE_K, WINDOWS, {"window": True, "softcap": True, **DEEPSEEK}),
    "64 rows, packed, window": (
        192, "causal", WIDE_K, PACKED_WINDOWS, {"window": True, "varlen": True, **DEEPSEEK}),
}  # fmt: skip


@SLOW
@pytest.mark.parametrize("name", each(VARIANTS))
def test_every_variant_is_right(name: str) -> None:
    dim, mask, config, cases, features = VARIANTS[name]
    spec = spec_of(dim, mask, **features)
    of_dq = of_rows("pointer" if spec.varlen else "descriptor", 128)
    assert_gradients(kernels(spec, config, of_dq), spec, cases, ranges=True)


@pytest.mark.slow("two kernels, 20 orders")
@pytest.mark.parametrize("config", [NARROW, WIDE_K], ids=["128 rows", "64 rows"])
def test_20_orders_have_one_result(config: KernelConfig) -> None:
    spec = spec_of(64, "causal") if config is NARROW else spec_of(192, "causal", **DEEPSEEK)
    both = kernels(spec, config, of_rows())
    call = attention_trial(spec, case(200, 200, heads=2, kv=1), 0, "cpu").call
    first = both.gradients(call)
    for seed in range(1, 20):
        both.dkv.seed = both.dq.seed = 100 * seed
        assert all(map(torch.equal, both.gradients(call), first)), seed


@SLOW
@pytest.mark.parametrize("mask", ["none", "causal"])
def test_ds_behind_the_last_key_does_not_matter(mask: str) -> None:
    """There P is infinite, and so would be dS; but no tile of dQ reads it."""
    spec = spec_of(64, mask)
    found = kernels(spec, NARROW, of_rows()).gradients(call_far_below_zero(spec))
    assert all(bool(x.isfinite().all()) for x in found)


def test_where_both_head_dims_are_padded_to_256_sums_leave_no_columns_for_dp() -> None:
    reason = why_illegal(spec_of(256, "causal"), WIDE_K, GPUS["blackwell"])
    assert reason is not None
    assert "640 columns of tensor memory in backward_ds" in reason


HEAD_OF_RUN = "(pid // tiles - first_block // tiles) * group"
BROKEN: dict[str, tuple[str, str]] = {
    "the place is written while it is read": ("tma.store_wait(0)\n                        ds_place", "ds_place"),
    "the place of the other warpgroup": ("ds_place = ds_smem.index(w)", "ds_place = ds_smem.index(0)"),
    "the rows of the other half": ("ds_key, row_start + HALF * w)", "ds_key, row_start)"),
    "P in place of dS": ("ds_ts += (rounded,)", "ds_ts += (gl.convert_layout(p_ts[part].to(DTYPE), ROUNDED),)"),
    "the first head of the group": ("(0, ds_head + member, ds_key", "(0, ds_head, ds_key"),
    "the run begins at block 0": ("pid = first_block + pid", "pid = pid"),
    "a head's blocks go to another": ("pid % run_heads * tiles + pid // run_heads", "pid % run_heads * tiles + pid // tiles"),
    "heads count from the first of all": (HEAD_OF_RUN, "(pid // tiles) * group"),
    "heads of K": (HEAD_OF_RUN, "(pid // tiles - first_block // tiles)"),
    "keys count from the first of all": ("key_start - first_block % tiles * BC)", "key_start)"),
}  # fmt: skip
OF_64_ROWS: dict[str, tuple[str, str]] = {
    "half of a tile of dS is written": ("BR if first_block is None else 128", "BR"),
}


@pytest.mark.slow("two kernels each")
@pytest.mark.parametrize("mutant", each([*BROKEN, *OF_64_ROWS]))
def test_a_broken_text_is_found(mutant: str) -> None:
    spec, config = spec_of(64, "causal"), NARROW
    if mutant in OF_64_ROWS:
        spec, config = spec_of(192, "causal", **DEEPSEEK), WIDE_K
    assert_found(kernels(spec, config, of_rows(), {**BROKEN, **OF_64_ROWS}[mutant]), spec)
