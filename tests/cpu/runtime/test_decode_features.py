"""decode() and flash_attn_with_kvcache() with features on CPU tensors, beside attention by other means."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import flashgen.runtime.flash_attn as flash_attn
from flashgen.errors import InvalidArgument
from flashgen.runtime.eager import cache as eager_cache
from flashgen.runtime.kv_cache import append
from flashgen.spec.problem import TUNED_WINDOW, bytes_moved, workload
from tests.cpu.runtime.test_decode import DISPATCHER, draw
from tests.makers import make_spec

BATCH, HEADS, KV_HEADS, CAPACITY, DIM = 4, 4, 2, 24, 16
LENGTHS = torch.tensor([0, 3, 17, 24], dtype=torch.int32)
PADS = torch.tensor([0, 3, 5, 1], dtype=torch.int32)
ROWS = torch.tensor([5, 0, 2, 1], dtype=torch.int32)


def plain(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, window: tuple[int, int], cap: float,
    slopes: Tensor | None, bias: Tensor | None, sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """One sequence, head by head and query by query: q (H, Sq, d), k and v (Hkv, S, d)."""
    heads, seq_q, dim = q.shape
    o, lse = torch.zeros(heads, seq_q, v.shape[2]), torch.full((heads, seq_q), -math.inf)
    for h in range(heads):
        of_k, of_v = k[h // (heads // k.shape[0])], v[h // (heads // k.shape[0])]
        for i in range(seq_q):
            at = i + k.shape[1] - seq_q
            scores, values = [], []
            for j in range(k.shape[1]):
                left, right = window
                if (causal and j > at) or (0 <= left < at - j) or (0 <= right < j - at):
                    continue
                s = float(q[h, i] @ of_k[j]) / math.sqrt(dim)
                s = cap * math.tanh(s / cap) if cap else s
                s -= float(slopes[h]) * abs(at - j) if slopes is not None else 0.0
                s += float(bias[h, i, j]) if bias is not None else 0.0
                scores.append(s)
                values.append(of_v[j])
            if sinks is not None:
                scores.append(float(sinks[h]))
                values.append(torch.zeros_like(of_v[0]) if len(of_v) else torch.zeros(v.shape[2]))
            if scores:
                row = torch.tensor(scores, dtype=torch.float64)
                o[h, i] = (row.softmax(0)[:, None] * torch.stack(values).double()).sum(0).float()
                lse[h, i] = row.logsumexp(0).float()
    return o, lse


CALLS: dict[str, dict[str, Any]] = {
    "window": {"window": (4, 1)},
    "window and sinks": {"window": (0, -1), "sinks": draw(HEADS)},
    "cap and slopes": {"softcap": 0.5, "alibi_slopes": torch.rand(HEADS)},
    "slopes of each": {"alibi_slopes": torch.rand(BATCH, HEADS)},
    "bias": {"bias": draw(BATCH, HEADS, 3, CAPACITY)},
    "bias of keys": {"bias": draw(CAPACITY), "sinks": draw(HEADS)},
    "pads": {"cache_leftpad": PADS, "window": (6, 2), "bias": draw(1, HEADS, 3, CAPACITY)},
    "rows": {"cache_batch_idx": ROWS, "softcap": 2.0},
}


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", CALLS)
def test_a_decode_with_features_is_what_they_say(name: str, causal: bool) -> None:
    beside = CALLS[name]
    outer = 6 if "cache_batch_idx" in beside else BATCH
    q = draw(BATCH, HEADS, 3, DIM)
    k, v = draw(outer, KV_HEADS, CAPACITY, DIM, seed=1), draw(outer, KV_HEADS, CAPACITY, 24, seed=2)
    o, lse = DISPATCHER.decode(q, k, v, lengths=LENGTHS, causal=causal, return_lse=True, **beside)
    pads = beside.get("cache_leftpad", torch.zeros(BATCH, dtype=torch.int32))
    for b, (length, pad) in enumerate(zip(LENGTHS.tolist(), pads.tolist(), strict=True)):
        row = int(ROWS[b]) if "cache_batch_idx" in beside else b
        bias, slopes = beside.get("bias"), beside.get("alibi_slopes")
        if bias is not None:
            bias = bias.expand(BATCH, HEADS, 3, CAPACITY)[b, ..., pad:]
        expected, of_all = plain(
            q[b], k[row, :, pad:length], v[row, :, pad:length], causal=causal,
            window=beside.get("window", (-1, -1)), cap=beside.get("softcap", 0.0),
            slopes=slopes if slopes is None or slopes.ndim == 1 else slopes[b],
            bias=bias, sinks=beside.get("sinks"),
        )  # fmt: skip
        torch.testing.assert_close(o[b], expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(lse[b], of_all, rtol=1e-5, atol=1e-5)


def test_a_boolean_bias_masks() -> None:
    q, k = draw(1, 2, 1, DIM), draw(1, 2, CAPACITY, DIM, seed=1)
    seen = torch.arange(CAPACITY) % 3 == 0
    o = DISPATCHER.decode(q, k, k, bias=seen)
    torch.testing.assert_close(o, DISPATCHER.attention(q, k[:, :, seen], k[:, :, seen]))


@pytest.mark.parametrize("window", [(-1, -1), (3, 0)])
@pytest.mark.parametrize("causal", [False, True])
def test_kvcache_of_rows_and_pads_appends_rotates_and_attends(
    causal: bool, window: tuple[int, int]
) -> None:
    """As a cache of each sequence alone, with its pad cut off: but keys and queries keep the angles
    of their places. Under a window, too, each query has its own.
    """
    new, outer = 2, 6
    q, k, v = (
        draw(4, new, HEADS, DIM),
        draw(4, new, KV_HEADS, DIM),
        draw(4, new, KV_HEADS, DIM, seed=5),
    )
    k_cache, v_cache = (
        draw(outer, CAPACITY + 2, KV_HEADS, DIM),
        draw(outer, CAPACITY + 2, KV_HEADS, DIM, seed=3),
    )
    before = k_cache.clone(), v_cache.clone()
    angles = torch.rand(CAPACITY + 2, 8, generator=torch.Generator().manual_seed(1))
    cos, sin = angles.cos(), angles.sin()
    o, lse = flash_attn.flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, cos, sin, cache_seqlens=LENGTHS, cache_batch_idx=ROWS,
        cache_leftpad=PADS, causal=causal, window_size=window, return_softmax_lse=True,
    )  # fmt: skip
    untouched = [row for row in range(outer) if row not in ROWS.tolist()]
    torch.testing.assert_close(k_cache[untouched], before[0][untouched], rtol=0, atol=0)
    for b in range(BATCH):
        length, pad, row = int(LENGTHS[b]), int(PADS[b]), int(ROWS[b])
        places = torch.arange(length, length + new)[None]
        step = int(causal or window != (-1, -1))
        turned = eager_cache.rotated(
            k[b : b + 1].transpose(1, 2), cos, sin, places, interleaved=True
        )
        asked = eager_cache.rotated(
            q[b : b + 1].transpose(1, 2),
            cos,
            sin,
            length + step * (places - length),
            interleaved=True,
        )
        keys = torch.cat((before[0][row, :length].transpose(0, 1), turned[0]), 1)
        values = torch.cat((before[1][row, :length], v[b])).transpose(0, 1)
        torch.testing.assert_close(k_cache[row, : length + new], keys.transpose(0, 1))
        expected, of_all = plain(
            asked[0], keys[:, pad:], values[:, pad:], causal=causal, window=window, cap=0.0,
            slopes=None, bias=None, sinks=None,
        )  # fmt: skip
        torch.testing.assert_close(o[b].transpose(0, 1), expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(lse[b], of_all, rtol=1e-5, atol=1e-5)


def test_kvcache_takes_window_cap_and_slopes_as_the_function_without_a_cache() -> None:
    q, k, v = draw(2, 3, 4, 16), draw(2, 9, 2, 16), draw(2, 9, 2, 16, seed=1)
    for causal in (False, True):
        options: dict[str, Any] = {
            "causal": causal, "window_size": (4, 1), "softcap": 1.5,
            "alibi_slopes": torch.rand(2, 4),
        }  # fmt: skip
        found = flash_attn.flash_attn_with_kvcache(q, k, v, **options)
        torch.testing.assert_close(found, flash_attn.flash_attn_func(q, k, v, **options))


def test_append_to_rows_of_a_cache() -> None:
    cache, new = torch.zeros(5, 1, 4, 16), draw(2, 1, 2, 16)
    rows, lengths = torch.tensor([3, 1]).int(), torch.tensor([0, 2]).int()
    append(cache, cache.clone(), new, new, lengths, cache_batch_idx=rows)
    torch.testing.assert_close(cache[3, :, :2], new[0])
    torch.testing.assert_close(cache[1, :, 2:], new[1])
    assert cache.abs().sum() == new.abs().sum()


Q, K = draw(2, 4, 3, DIM), draw(2, 2, CAPACITY, DIM)
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "bias of other keys": ({"bias": draw(1, 1, 3, 9)}, "bias must have four dimensions, each 1 or that of"),
    "bias of five": ({"bias": draw(1, 1, 1, 1, 1)}, "bias must have four dimensions"),
    "bias of whole numbers": ({"bias": torch.zeros(CAPACITY).long()}, "bias must be bool, float16"),
    "gradient of sinks": ({"sinks": draw(4).requires_grad_()}, "sinks must not require gradients"),
    "sinks of another head": ({"sinks": draw(3)}, "sinks must be of shape"),
    "slopes": ({"alibi_slopes": draw(4).double()}, "alibi_slopes must be float32"),
    "window": ({"window": (1, 2, 3)}, "window must be"),
    "cap": ({"softcap": math.inf}, "softcap must be finite"),
    "rows": ({"cache_batch_idx": [0, 1]}, "cache_batch_idx must be a tensor"),
    "pads": ({"cache_leftpad": torch.zeros(3, dtype=torch.int32)}, "cache_leftpad must be int32"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_misuse_is_named(name: str) -> None:
    change, sentence = REFUSED[name]
    with pytest.raises(InvalidArgument, match=sentence):
        DISPATCHER.decode(Q, K, K, **change)


def test_explain_names_the_features() -> None:
    said = str(DISPATCHER.explain_decode(Q, K, K, window=(3, 0), sinks=draw(4), softcap=2.0))
    assert "decode_fp32_d16_causal_window_softcap_sink" in said


def test_a_windowed_decode_is_counted_by_what_it_reads() -> None:
    spec = make_spec("bfloat16", 128, direction="decode", window=True)
    short, long = (workload(spec, seq) for seq in (2048, 65536))
    whole = make_spec("bfloat16", 128, direction="decode")
    assert bytes_moved(spec, short) == bytes_moved(whole, short)
    keys = 64 * 8 * (TUNED_WINDOW + 1) * 2 * 128 * 2
    assert bytes_moved(spec, long) == keys + 64 * 32 * (2 * 128 * 2 + 4)
