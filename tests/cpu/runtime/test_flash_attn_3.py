"""The functions of FlashAttention 3's flash_attn_interface on CPU tensors: names, order and
defaults, and what each computes, beside flashgen's own functions.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

import flashgen.runtime.flash_attn_3 as flash_attn
from flashgen import attention, attention_varlen, decode
from flashgen.errors import InvalidArgument
from flashgen.runtime import fp8

FACTORS = "q_descale=None k_descale=None v_descale=None"
LIMITS = "window_size=(-1, -1) attention_chunk=0 softcap=0.0"
END = "num_splits=1 pack_gqa=None deterministic=False sm_margin=0 return_attn_probs=False"
SIGNATURES = {
    "flash_attn_func": f"q k v softmax_scale=None causal=False qv=None {FACTORS} {LIMITS} {END}",
    "flash_attn_varlen_func": "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k "
    f"seqused_q=None seqused_k=None softmax_scale=None causal=False qv=None {FACTORS} {LIMITS} "
    + END,
    "flash_attn_qkvpacked_func": f"qkv softmax_scale=None causal=False {FACTORS} {LIMITS} "
    "deterministic=False num_heads_q=None sm_margin=0 return_attn_probs=False",
    "flash_attn_with_kvcache": "q k_cache v_cache k=None v=None qv=None rotary_cos=None "
    "rotary_sin=None cache_seqlens=None cache_batch_idx=None cache_leftpad=None page_table=None "
    "cu_seqlens_q=None cu_seqlens_k_new=None max_seqlen_q=None rotary_seqlens=None "
    f"{FACTORS} softmax_scale=None causal=False {LIMITS} rotary_interleaved=True "
    "scheduler_metadata=None num_splits=0 pack_gqa=None sm_margin=0 return_softmax_lse=False",
    "flash_attn_combine": "out_partial lse_partial out=None out_dtype=None",
}  # hopper/flash_attn_interface.py of FlashAttention, 01afd16d
OWN = {"s_aux", "invariant"}


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


Q, K, V = draw(2, 7, 4, 16), draw(2, 9, 2, 16), draw(2, 9, 2, 16, seed=1)
BOUNDS = torch.tensor([0, 3, 3, 7], dtype=torch.int32)


def ours(*tensors: Tensor) -> list[Tensor]:
    """In flashgen's layout."""
    return [x.transpose(1, 2) for x in tensors]


@pytest.mark.parametrize("name", SIGNATURES)
def test_names_order_and_defaults_are_the_packages(name: str) -> None:
    words = []
    for parameter in inspect.signature(getattr(flash_attn, name)).parameters.values():
        if parameter.name in OWN:
            assert parameter.kind is parameter.KEYWORD_ONLY
            continue
        default = "" if parameter.default is parameter.empty else f"={parameter.default}"
        words.append(parameter.name + default)
    assert " ".join(words) == SIGNATURES[name]
    assert name in flash_attn.__all__


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, {}),
        ({"causal": True, "softmax_scale": 0.3}, {"causal": True, "scale": 0.3}),
        ({"causal": True, "attention_chunk": 4}, {"causal": True, "chunk": 4}),
        ({"window_size": (2, 1), "softcap": 1.5}, {"window": (2, 1), "softcap": 1.5}),
        ({"s_aux": draw(4)}, {"sinks": draw(4)}),
        ({"num_splits": 5, "pack_gqa": True, "sm_margin": 8}, {}),
    ],
    ids=lambda x: "-".join(x),
)
def test_dense_and_packed(given: dict[str, Any], wanted: dict[str, Any]) -> None:
    o, lse = flash_attn.flash_attn_func(Q, K, V, return_attn_probs=True, **given)
    want, want_lse = attention(*ours(Q, K, V), return_lse=True, **wanted)
    torch.testing.assert_close(o.transpose(1, 2), want)
    torch.testing.assert_close(lse, want_lse)
    assert torch.equal(flash_attn.flash_attn_func(Q, K, V, **given), o)

    tensors = Q[0], K[0], V[0]
    bounds = BOUNDS, torch.tensor([0, 4, 6, 9], dtype=torch.int32), 4, 4
    o, lse = flash_attn.flash_attn_varlen_func(*tensors, *bounds, return_attn_probs=True, **given)
    want, want_lse = attention_varlen(*tensors, *bounds, return_lse=True, **wanted)
    torch.testing.assert_close(o, want)
    torch.testing.assert_close(lse, want_lse)


def test_used_places_alone_are_attended_to() -> None:
    bounds = BOUNDS, BOUNDS, 4, 4
    used = {"seqused_q": torch.tensor([2, 0, 3]).int(), "seqused_k": torch.tensor([1, 0, 4]).int()}
    tensors = Q[0], Q[0], Q[0]
    o = flash_attn.flash_attn_varlen_func(*tensors, *bounds, **used)
    torch.testing.assert_close(o, attention_varlen(*tensors, *bounds, **used))


@pytest.mark.parametrize("heads", [None, 4])
def test_packed_tensors(heads: int | None) -> None:
    parts = (Q, Q + 1, Q + 2) if heads is None else (Q, K[:, :7], V[:, :7])
    qkv = torch.stack(parts, 2) if heads is None else torch.cat(parts, 2)
    o = flash_attn.flash_attn_qkvpacked_func(qkv, None, True, num_heads_q=heads)
    torch.testing.assert_close(o, flash_attn.flash_attn_func(*parts, causal=True))


def test_gradients() -> None:
    tensors = [x.clone().requires_grad_() for x in (Q, K, V, draw(4))]
    flash_attn.flash_attn_func(
        *tensors[:3], causal=True, s_aux=tensors[3]
    ).square().sum().backward()
    grads = [x.grad for x in tensors]
    for x in tensors:
        x.grad = None
    q, k, v = ours(*tensors[:3])
    attention(q, k, v, causal=True, sinks=tensors[3]).square().sum().backward()
    for got, x in zip(grads, tensors, strict=True):
        torch.testing.assert_close(got, x.grad)


def test_8_bits() -> None:
    q, k, v = (x.to(torch.float8_e4m3fn) for x in (Q, K, V))
    factors = {f"{x}_descale": torch.full((2, 2), 0.5) for x in "qkv"}
    o = flash_attn.flash_attn_func(q, k, v, causal=True, softcap=2.0, **factors)
    want, _ = fp8.attention(*ours(q, k, v), causal=True, softcap=2.0, **factors)
    torch.testing.assert_close(o.transpose(1, 2), want)
    with pytest.raises(InvalidArgument, match="attention_chunk must not be given with float8"):
        flash_attn.flash_attn_func(q, k, v, causal=True, attention_chunk=4)
    with pytest.raises(InvalidArgument, match="q_descale, k_descale and v_descale must be None"):
        flash_attn.flash_attn_func(Q, K, V, **factors)


def test_a_cache_and_new_keys() -> None:
    lengths = torch.tensor([5, 3], dtype=torch.int32)
    cache_k, cache_v, new = K.clone(), V.clone(), draw(2, 1, 2, 16)
    o, lse = flash_attn.flash_attn_with_kvcache(
        Q[:, :1], cache_k, cache_v, new, new, cache_seqlens=lengths, causal=True,
        return_softmax_lse=True,
    )  # fmt: skip
    assert torch.equal(cache_k[0, 5], new[0, 0])
    want, want_lse = decode(
        *ours(Q[:, :1], cache_k, cache_v), lengths=lengths + 1, causal=True, return_lse=True
    )
    torch.testing.assert_close(o.transpose(1, 2), want)
    torch.testing.assert_close(lse, want_lse)


@pytest.mark.parametrize("given", [{}, {"window_size": (3, 0)}, {"attention_chunk": 4}], ids=str)
def test_packed_queries_over_pages(given: dict[str, Any]) -> None:
    """As SGLang calls it: each sequence's keys are those of its pages, its own queries' the last."""
    pool_k, pool_v = draw(6, 4, 2, 16), draw(6, 4, 2, 16, seed=2)
    table, lengths = torch.tensor([[4, 1], [0, 0], [5, 2]]).int(), torch.tensor([7, 1, 6]).int()
    o, lse = flash_attn.flash_attn_with_kvcache(
        Q[0], pool_k, pool_v, page_table=table, cache_seqlens=lengths, cu_seqlens_q=BOUNDS,
        cu_seqlens_k_new=BOUNDS, max_seqlen_q=4, causal=True, return_softmax_lse=True, **given,
    )  # fmt: skip
    wanted = {"window": given.get("window_size"), "chunk": given.get("attention_chunk")}
    for begin, end, pages, keys in zip(BOUNDS, BOUNDS[1:], table, lengths, strict=False):
        k, v = (x[pages.long()].flatten(0, 1)[None, :keys] for x in (pool_k, pool_v))
        if begin == end:
            continue
        want, want_lse = attention(
            *ours(Q[:1, begin:end], k, v), causal=True, return_lse=True, **wanted
        )
        torch.testing.assert_close(o[begin:end][None].transpose(1, 2), want)
        torch.testing.assert_close(lse[None, :, begin:end], want_lse)


@pytest.mark.parametrize("change", ["page_table", "max_seqlen_q", "cache_seqlens"])
def test_packed_queries_need_their_pages(change: str) -> None:
    pool = draw(6, 4, 2, 16)
    given: dict[str, Any] = {
        "page_table": torch.zeros(3, 2).int(), "max_seqlen_q": 4, "cu_seqlens_q": BOUNDS,
        "cache_seqlens": torch.ones(3).int(),
    }  # fmt: skip
    with pytest.raises(InvalidArgument, match="page_table, max_seqlen_q and cache_seqlens"):
        flash_attn.flash_attn_with_kvcache(Q[0], pool, pool, **given | {change: None})
    with pytest.raises(InvalidArgument, match=r"^page_table must be a tensor"):
        flash_attn.flash_attn_with_kvcache(Q[0], pool, pool, **given | {"page_table": [[0]]})
    with pytest.raises(InvalidArgument, match=r"^k must be None with cu_seqlens_q"):
        flash_attn.flash_attn_with_kvcache(Q[0], pool, pool, k=Q, **given)


def test_what_is_refused() -> None:
    for name in ("flash_attn_func", "flash_attn_with_kvcache"):
        with pytest.raises(InvalidArgument, match="qv must be None"):
            getattr(flash_attn, name)(Q, K, V, qv=Q)
    with pytest.raises(InvalidArgument, match="rotary_seqlens must be None"):
        flash_attn.flash_attn_with_kvcache(Q, K, V, rotary_seqlens=BOUNDS)
    with pytest.raises(InvalidArgument, match="attention_chunk must be 0 without cu_seqlens_q"):
        flash_attn.flash_attn_with_kvcache(Q, K, V, attention_chunk=4)
    with pytest.raises(InvalidArgument, match="num_heads_q must leave as many heads"):
        flash_attn.flash_attn_qkvpacked_func(Q, num_heads_q=3)


def test_parts_of_split_keys_are_put_together() -> None:
    parts = [
        attention(*ours(Q, *x), return_lse=True)
        for x in ((K[:, :4], V[:, :4]), (K[:, 4:], V[:, 4:]))
    ]
    outputs = torch.stack([o.transpose(1, 2) for o, _ in parts])
    sums = torch.stack([lse.transpose(1, 2) for _, lse in parts])
    o, lse = flash_attn.flash_attn_combine(outputs, sums)
    want, want_lse = attention(*ours(Q, K, V), return_lse=True)
    torch.testing.assert_close(o.transpose(1, 2), want)
    torch.testing.assert_close(lse.transpose(1, 2), want_lse)
    out = torch.empty_like(o)
    assert flash_attn.flash_attn_combine(outputs, sums, out)[0] is out
    assert torch.equal(out, o)
    assert (
        flash_attn.flash_attn_combine(outputs, sums, None, torch.bfloat16)[0].dtype
        is torch.bfloat16
    )
    with pytest.raises(InvalidArgument, match="as many splits as out_partial, 2: got 1"):
        flash_attn.flash_attn_combine(outputs, sums[:1])
    with pytest.raises(InvalidArgument, match="out must have shape"):
        flash_attn.flash_attn_combine(outputs, sums, out[:1])
