"""tune/transfer.py: which entries of a table speak for a config, and that a killed run hears the same."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from flashgen.schedules.config import KernelConfig
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.problem import BUCKETS, Bucket
from flashgen.table.table import Table
from flashgen.tune.transfer import neighbours
from tests.makers import make_config, make_spec
from tests.tables import H200, made_entry, made_run

SPEC = make_spec()
HERE, THERE = BUCKETS[1], BUCKETS[2]
TILE, OTHER = make_config(128, 64), make_config(64, 64)


def table(*chosen: tuple[AttentionSpec, Bucket, KernelConfig]) -> Table:
    made = Table(gpu=H200)
    for spec, bucket, config in chosen:
        made = made.with_entry(made_entry(spec, bucket, config), made_run())
    return made


def test_the_same_spec_in_another_bucket_is_one_and_in_its_own_is_none() -> None:
    held = table((SPEC, HERE, OTHER), (SPEC, THERE, TILE))
    assert neighbours(held, SPEC, HERE) == (TILE,)
    assert neighbours(held, SPEC, THERE) == (OTHER,)


@pytest.mark.parametrize(
    ("spec", "alike"),
    [
        (make_spec(dtype="float16"), True),
        (make_spec(mask="causal"), True),
        (make_spec(dtype="float16", mask="causal"), True),
        (make_spec(dtype="float32"), False),
        (make_spec(head_dim=128), False),
        (make_spec(head_dim=64, head_dim_v=128), False),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_another_mask_or_dtype_counts_in_the_same_bucket(spec: AttentionSpec, alike: bool) -> None:
    assert neighbours(table((spec, HERE, TILE)), SPEC, HERE) == ((TILE,) if alike else ())
    assert neighbours(table((spec, THERE, TILE)), SPEC, HERE) == ()


def test_float32_and_tf32_are_no_neighbours() -> None:
    ieee, tf32 = make_spec(dtype="float32"), make_spec(dtype="float32", precision="tf32")
    held = table((ieee, HERE, OTHER), (tf32, HERE, OTHER))
    assert neighbours(held, ieee, HERE) == neighbours(held, tf32, HERE) == ()


def test_an_invariant_spec_hears_the_plain_one_and_not_the_other_way() -> None:
    own = replace(SPEC, invariant=True)
    assert neighbours(table((SPEC, HERE, OTHER)), own, HERE) == (OTHER,)
    assert neighbours(table((SPEC, THERE, OTHER)), own, HERE) == (OTHER,)
    assert neighbours(table((SPEC, HERE, make_config(64, 128))), own, HERE) == ()  # another class
    assert neighbours(table((own, HERE, OTHER)), SPEC, HERE) == ()
    assert neighbours(table((replace(SPEC, dropout=True), HERE, OTHER)), own, HERE) == ()


def test_the_order_of_tiles_is_that_of_the_own_mask() -> None:
    causal, longest = make_spec(mask="causal"), replace(TILE, order="longest_first")
    assert neighbours(table((SPEC, HERE, TILE)), causal, HERE) == (longest,)
    assert neighbours(table((causal, HERE, longest)), SPEC, HERE) == (TILE,)
    assert neighbours(table((causal, THERE, TILE)), causal, HERE) == (TILE,)  # the mask is the same


def test_one_that_two_chose_stands_there_twice() -> None:
    half, causal = make_spec(dtype="float16"), make_spec(mask="causal")
    held = table((SPEC, THERE, TILE), (half, HERE, OTHER), (causal, HERE, TILE))
    assert sorted(map(str, neighbours(held, SPEC, HERE))) == sorted(map(str, (TILE, TILE, OTHER)))


def test_what_is_illegal_here_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    l4 = replace(table((make_spec(dtype="float16"), HERE, TILE)), gpu=H200)
    monkeypatch.setattr("flashgen.tune.transfer.why_illegal", lambda *_: "it does not fit")
    assert neighbours(l4, SPEC, HERE) == ()


def test_what_is_left_out_does_not_count() -> None:
    half: Any = make_spec(dtype="float16")
    held = table((SPEC, THERE, TILE), (half, HERE, OTHER))
    assert neighbours(held, SPEC, HERE, leave_out={(SPEC, THERE)}) == (OTHER,)
    assert neighbours(held, SPEC, HERE, leave_out=[(half, HERE)]) == (TILE,)


def test_a_cache_in_pages_hears_one_without() -> None:
    flat = make_spec("bfloat16", 128, direction="decode")
    config = make_config(16, 32, blocks_per_sm=5)
    for spec in (flat, replace(flat, paged=True)):
        other = replace(spec, paged=not spec.paged)
        assert neighbours(table((other, HERE, config)), spec, HERE) == (config.kernel,)
        assert neighbours(table((other, THERE, config)), spec, HERE) == ()
    forward = make_spec(varlen=True)
    held = table((replace(forward, paged=True), HERE, OTHER))
    assert neighbours(held, forward, HERE) == ()
