"""Decode kernels with features against float64: each alone, pairs, what is read, and mutants."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import flashgen.runtime.flash_attn as flash_attn
from flashgen.evaluate.check import cases_of
from flashgen.evaluate.check_cache import (
    DecodeCase,
    judge,
    make_call,
    make_features,
)
from flashgen.evaluate.sanitize import executed_cases
from flashgen.inputs.features import Features
from flashgen.kernels.launch import bind
from flashgen.kernels.launch_cache import Decode
from flashgen.kernels.loader import load_kernel
from flashgen.kernels.render import render
from flashgen.reference import attention as reference
from flashgen.runtime.eager import cache as eager_cache
from flashgen.runtime.kv_cache import append
from flashgen.schedules.config import KernelConfig
from flashgen.schedules.defaults import default_config, default_spec
from flashgen.spec.attention import AttentionSpec
from tests.makers import make_config, make_spec
from tests.proving import mutant_passes, prove, sampled
from tests.serving import record_directions, serve

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

ALONE: dict[str, dict[str, Any]] = {
    "window": {"window": True},
    "cap": {"softcap": True},
    "slopes": {"alibi": True},
    "sink": {"sink": True},
    "bias": {"bias": "additive"},
    "mask": {"bias": "boolean"},
    "rows": {"indexed": True},
    "pads": {"leftpad": True},
    "pages": {"paged": True},
}


def decode_spec(
    dtype: str = "float16", dim: int = 16, mask: str = "causal", **fields: Any
) -> AttentionSpec:
    return make_spec(dtype, dim, mask, direction="decode", **fields)


@pytest.mark.slow("kernels/test_pairs.py has each on fewer shapes")
@pytest.mark.parametrize("mask", ["none", "causal"])
@pytest.mark.parametrize("name", [name for name in ALONE if name != "pages"])
def test_each_alone(name: str, mask: str, seed: int) -> None:
    prove(decode_spec(mask=mask, **ALONE[name]), make_config(16, 16), seed)


EVERY_ONE: dict[str, Any] = {
    "window": True, "softcap": True, "alibi": True, "sink": True, "bias": "additive", "leftpad": True,
}  # fmt: skip


@pytest.mark.parametrize("where", ["paged", "indexed"])
def test_every_one_at_once_by_default_kernels(where: str, seed: int) -> None:
    """They take the true head dims as arguments."""
    asked = decode_spec("float32", 24, head_dim_v=40, precision="tf32", **EVERY_ONE | {where: True})
    prove(default_spec(asked), default_config(asked), seed)


lengths = st.lists(st.integers(0, 70), min_size=1, max_size=3)


@settings(max_examples=8)
@given(
    lengths=lengths, seq_q=st.integers(1, 6), group=st.integers(1, 8), splits=st.integers(1, 5),
    mask=st.sampled_from(["none", "causal"]), on=st.sets(st.sampled_from(list(ALONE)), max_size=5),
    drawn=st.integers(0, 1 << 30),
)  # fmt: skip
def test_drawn_calls(
    lengths: list[int], seq_q: int, group: int, splits: int, mask: str, on: set[str], drawn: int
) -> None:
    case = DecodeCase(
        lengths=tuple(lengths), capacity=70, seq_q=seq_q, group=group, splits=splits, page_size=8
    )
    fields: dict[str, Any] = {}
    for name in sorted(on - ({"rows"} if "pages" in on else set())):
        fields |= ALONE[name]
    prove(decode_spec("float16", 16, mask, **fields), make_config(16, 16), drawn, [case])


@pytest.mark.parametrize("rotary", ["none", "halves"])
def test_append_to_rows(rotary: Any, seed: int) -> None:
    spec = make_spec("bfloat16", 40, direction="append", rotary=rotary, indexed=True)
    prove(spec, make_config(16, 16, num_stages=1), seed)


def run(
    spec: AttentionSpec, config: KernelConfig, call: Decode, folder: Path
) -> tuple[torch.Tensor, torch.Tensor]:
    """O and LSE of all parts of a call, merged."""
    rendered = render(spec, config)
    path = folder / f"{rendered.name}.py"
    path.write_text(rendered.source)
    parts = bind(load_kernel(path, rendered.text_name, rendered.name), spec, config)(call)
    return (parts.o, parts.lse) if parts.whole else reference.merge(parts.o, parts.lse)


@pytest.mark.parametrize("causal", [False, True])
def test_what_lies_outside_the_window_is_not_read(causal: bool, tmp_path: Path) -> None:
    """NaN wherever no tile that a window reaches has a key, in K, V and the bias; and each split
    has a part of the window, not of the cache.
    """
    torch.manual_seed(0)
    length, seq_q, left, tile = 300, 4, 40, 16
    k, v = torch.randn(2, 1, 1, 320, 16).unbind()
    bias = torch.randn(1, 1, 1, 320)
    first = (length - seq_q - left) // tile * tile
    for x in (k, v, bias.mT):
        x[:, :, :first] = float("nan")
        x[:, :, length:] = float("nan")
    cache = eager_cache.Cache(k=k, v=v, lengths=torch.tensor([length], dtype=torch.int32))
    features = Features(window=(left, -1), bias=bias)
    q = torch.randn(1, 2, seq_q, 16)
    call = Decode(q=q, cache=cache, scale=0.25, sms=132, splits=3, features=features)
    spec = decode_spec("float32", 16, "causal" if causal else "none", window=True, bias="additive")
    config = make_config(16, tile)
    o, lse = run(spec, config, call, tmp_path)
    near = dataclasses.replace(
        cache, k=k[:, :, first:], v=v[:, :, first:], lengths=cache.lengths - first
    )
    own = dataclasses.replace(features, bias=bias[..., first:])
    want, want_lse = eager_cache.cached_attention(q, near, scale=0.25, causal=causal, features=own)
    torch.testing.assert_close(o, want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse, want_lse, rtol=1e-4, atol=1e-5)
    kernel = load_kernel(next(tmp_path.glob("*.py")), render(spec, config).text_name)
    parts = bind(kernel, spec, config)(call)
    assert (
        parts.lse.isfinite().all()
    )  # 61 keys begin 4 tiles: of the whole cache two splits saw none


@pytest.mark.parametrize("splits", [1, 2, 5])
@pytest.mark.parametrize("length", [0, 5, 70])
def test_a_sink_is_counted_once_whatever_the_splits(
    length: int, splits: int, tmp_path: Path
) -> None:
    """Of no key the LSE is the sink."""
    torch.manual_seed(1)
    k, v = torch.randn(2, 1, 1, 80, 16).unbind()
    cache = eager_cache.Cache(k=k, v=v, lengths=torch.tensor([length], dtype=torch.int32))
    sinks = torch.tensor([0.5, 30.0, float("-inf")])
    q = torch.randn(1, 3, 1, 16)
    call = Decode(
        q=q, cache=cache, scale=0.25, sms=132, splits=splits, features=Features(sinks=sinks)
    )
    o, lse = run(decode_spec("float32", 16, "none", sink=True), make_config(16, 16), call, tmp_path)
    want, want_lse = eager_cache.cached_attention(
        q, cache, scale=0.25, causal=False, features=Features(sinks=sinks)
    )
    torch.testing.assert_close(o, want, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(lse, want_lse, rtol=1e-5, atol=1e-5)
    if length == 0:
        torch.testing.assert_close(lse[0, :, 0], sinks, rtol=1e-6, atol=0)
        assert o.eq(0).all()


def of(mask: str, **fields: Any) -> AttentionSpec:
    return decode_spec("bfloat16", 16, mask, **fields)


MUTANTS = {
    "window short by one": (of("causal", window=True), "first_key = queries + diagonal - window_left", "first_key = queries + diagonal - window_left + 1"),
    "window long by one": (of("causal", window=True), "first_key = queries + diagonal - window_left", "first_key = queries + diagonal - window_left - 1"),
    "right side by one": (of("none", window=True), "last_key = tl.minimum(queries + diagonal + right,", "last_key = tl.minimum(queries + diagonal + right + 1,"),
    "window from the first query": (of("causal", window=True), "diagonal = length - seq_q", "diagonal = length - 1"),
    "first tile of the window left out": (of("causal", window=True), "key_begin = tl.maximum(first_begin, 0) // BC * BC", "key_begin = tl.cdiv(tl.maximum(first_begin, 0), BC) * BC"),
    "unmasked at the left side": (of("causal", window=True), "tl.minimum(tl.maximum(full_begin, split_start), split_end)", "tl.minimum(split_start, split_end)"),
    "unmasked at the right side": (of("causal", window=True), "seen_by_all = tl.maximum(first_query + diagonal + right + 1, 0)", "seen_by_all = tl.maximum(first_query + diagonal + BC, 0)"),
    "splits of the whole cache": (of("causal", window=True), "split_start = key_begin + split", "split_start = split"),
    "cap after the mask": (of("causal", softcap=True), '<= last_key[:, None], s, float("-inf"))', "<= last_key[:, None], s, -cap_log2e)"),
    "no cap": (of("none", softcap=True), "return tl.where(tl.abs(x) < 0.55, small, large)", "return x"),
    "slope of another head": (of("none", alibi=True), "heads_of * stride_slopes_h", "kv_head * stride_slopes_h"),
    "slope of another batch": (of("none", alibi=True), "batch * stride_slopes_b", "0 * stride_slopes_b"),
    "distance of packed rows": (of("causal", alibi=True), "distance = (queries + diagonal)", "distance = (rows + diagonal)"),
    "bias of the first keys": (of("none", bias="additive"), "bias_base += bias_place.to(tl.int64) * stride_bias_k", "bias_base += 0"),
    "bias of one tile": (of("none", bias="additive"), "bias_base += BC * stride_bias_k", "bias_base += 0"),
    "bias of another head": (of("none", bias="additive"), "heads_of.to(tl.int64) * stride_bias_h", "kv_head.to(tl.int64) * stride_bias_h"),
    "bias of another query": (of("causal", bias="boolean"), "queries.to(tl.int64) * stride_bias_q", "0 * stride_bias_q"),
    "bias of another sequence": (of("none", bias="boolean"), "batch.to(tl.int64) * stride_bias_b", "0 * stride_bias_b"),
    "sink left out of the sum": (of("none", sink=True), "row_sum * rescale + tl.exp2(sink_log2e - new_max)", "row_sum * rescale"),
    "sink counted by each split": (of("none", sink=True), "tl.where(split == 0, sink_log2e", "tl.where(split >= 0, sink_log2e"),
    "sink of one split alone": (of("none", sink=True), "tl.where(split == 0, sink_log2e", "tl.where(splits == 1, sink_log2e"),
    "sink of another head": (of("none", sink=True), "sinks_ptr + heads_of", "sinks_ptr + 0 * heads_of"),
    "row of another sequence": (of("none", indexed=True), "cache_row = tl.load(rows_ptr + batch)", "cache_row = batch"),
    "pad read": (of("none", leftpad=True), "k_base += start_place", "k_base += split_start"),
    "pad of V read": (of("none", leftpad=True), "v_base += start_place", "v_base += split_start"),
    "length with the pad": (of("none", leftpad=True), "length -= first", "length -= 0"),
    "pad of pages": (of("none", leftpad=True, paged=True), "place = first + start + keys", "place = start + keys"),
    "bias in front of the pad": (of("none", leftpad=True, bias="additive"), "bias_base += bias_place", "bias_base += split_start"),
    "appended to another row": (make_spec("bfloat16", 16, direction="append", indexed=True), "cache_row = tl.load(rows_ptr + batch)", "cache_row = batch"),
}  # fmt: skip


@pytest.mark.parametrize("name", sampled(MUTANTS))
def test_mutant_is_caught(name: str) -> None:
    """By what tuning checks, within the seven draws that have every shape of a bias and window."""
    spec, line, broken = MUTANTS[name]
    config = make_config(16, 16, num_stages=2 if spec.direction == "decode" else 1)
    for cases in (cases_of(spec, config), executed_cases(spec, config)):
        assert not all(mutant_passes(spec, config, line, broken, cases, s) for s in (1, 5))


# The dispatcher: both kernels together, chosen and launched as on a GPU


@pytest.mark.parametrize("paged", [False, True])
def test_decode_of_the_dispatcher(monkeypatch: pytest.MonkeyPatch, paged: bool) -> None:
    """All features at once, in several splits, after a first call without: kernels do not mix."""
    case = DecodeCase(lengths=(0, 300, 511), capacity=512, seq_q=2, kv_heads=2, group=2)
    on = EVERY_ONE | {"paged": paged, "indexed": not paged}
    spec = decode_spec("float16", 16, **on)
    q, cache = make_call(spec, case, 3, "cpu")
    features = make_features(spec, case, cache, 4, "cpu")
    k, v = (x.transpose(1, 2) if paged else x for x in (cache.k, cache.v))
    dispatcher = serve(monkeypatch)
    where: dict[str, Any] = {
        "lengths": cache.lengths, "block_table": cache.block_table, "cache_batch_idx": cache.rows,
    }  # fmt: skip
    dispatcher.decode(q, k, v, **where)
    o, lse = dispatcher.decode(
        q, k, v, **where, cache_leftpad=cache.leftpad, bias=features.bias,
        alibi_slopes=features.slopes, window=features.window, softcap=features.softcap,
        sinks=features.sinks, return_lse=True,
    )  # fmt: skip
    call = Decode(q=q, cache=cache, scale=0.25, sms=132, features=features)
    verdict = judge(o, lse, call, spec)
    assert verdict.passed, verdict


def test_a_window_is_split_as_short_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """One tile of a long cache needs no combine kernel."""
    q, k = torch.randn(1, 2, 1, 16), torch.randn(1, 1, 900, 16)
    launched = record_directions(monkeypatch)
    dispatcher = serve(monkeypatch)
    o = dispatcher.decode(q, k, k, window=(30, 0), sinks=torch.zeros(2))
    assert launched == ["decode"]
    want = dispatcher.attention(q, k, k, window=(30, 0), sinks=torch.zeros(2))
    torch.testing.assert_close(o, want, rtol=1e-4, atol=1e-4)


def test_flash_attn_with_kvcache_by_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows, pads, window, cap and slopes with an append, as torch does it without the kernels."""
    generator = torch.Generator().manual_seed(1)
    new = torch.randn(2, 3, 2, 2, 16, generator=generator)
    caches = torch.randn(2, 5, 64, 2, 16, generator=generator)
    q, slopes = torch.randn(3, 2, 4, 16, generator=generator), torch.rand(4, generator=generator)
    angles = torch.rand(64, 4, generator=generator)
    calls = []
    for interpreted in (True, False):
        if interpreted:
            serve(monkeypatch)
        else:
            monkeypatch.delenv("FLASHGEN_GPU")
        k, v = caches.clone()
        o = flash_attn.flash_attn_with_kvcache(
            q, k, v, *new, angles.cos(), angles.sin(),
            cache_seqlens=torch.tensor([0, 30, 62]).int(), cache_batch_idx=torch.tensor([4, 0, 2]).int(),
            cache_leftpad=torch.tensor([0, 7, 60]).int(), causal=True, window_size=(11, 0),
            softcap=3.0, alibi_slopes=slopes, num_splits=2,
        )  # fmt: skip
        calls.append((o, k, v))
    for by_kernels, by_torch in zip(*calls, strict=True):
        torch.testing.assert_close(by_kernels, by_torch, rtol=1e-4, atol=1e-4)


def test_append_by_kernels_writes_to_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    serve(monkeypatch)
    cache, new = torch.zeros(4, 1, 8, 16), torch.randn(2, 1, 2, 16)
    rows, lengths = torch.tensor([3, 1]).int(), torch.tensor([0, 6]).int()
    append(cache, cache.clone(), new, new, lengths, cache_batch_idx=rows)
    torch.testing.assert_close(cache[3, :, :2], new[0])
    torch.testing.assert_close(cache[1, :, 6:], new[1])
    assert cache[[0, 2]].eq(0).all()
