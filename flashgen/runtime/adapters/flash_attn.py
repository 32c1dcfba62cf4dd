"""Drop-in for the package flash_attn (FlashAttention 2): the same functions, arguments, order,
defaults, layouts and meaning.

    from flashgen.runtime import flash_attn

    o = flash_attn.flash_attn_func(q, k, v, causal=True)

Tensors are (batch, seq, heads, head_dim), or (tokens, heads, head_dim) for packed sequences. A
causal mask is aligned at the bottom right, and a query that sees no key has O = 0. Two arguments
are not of FlashAttention 2: s_aux (heads,), attention sinks, as transformers hands them to builds
of FlashAttention 3; and invariant, as of attention().
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashgen.errors import InvalidArgument, shown
from flashgen.inputs.features import NO_LIMITS, heads_given, limits_of
from flashgen.inputs.from_call import check_scale
from flashgen.runtime import folders, kv_cache, torch_modes
from flashgen.runtime.adapters.seq_first import (
    attend_dense,
    attend_packed,
    cap_of,
    check_dimensions,
    sinks_of,
    unpacked,
    window_within,
)
from flashgen.runtime.call import Call
from flashgen.runtime.decode import CacheArguments
from flashgen.runtime.derived import hands_on
from flashgen.runtime.general_path import asked_features
from flashgen.schedules.grid_rules import MOST_SPLITS

Results = Tensor | tuple[Tensor, Tensor, Tensor | None]

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    s_aux: Tensor | None = None,
    invariant: bool = False,
) -> Results:
    """Attention of (batch, seq, heads, d) tensors, as of the package flash_attn.

    Differentiable with respect to q, k and v.

    Args:
        q: (batch, seq_q, heads, d).
        k: (batch, seq_k, kv_heads, d).
        v: (batch, seq_k, kv_heads, d).
        dropout_p: the probability with which an element of P is dropped.
        softmax_scale: what scores are multiplied by; 1/sqrt(d) unless given.
        causal: whether the last query sees the last key, and each one before it a key less.
        window_size: keys that a query sees beside the bottom-right diagonal; -1 is all.
        softcap: scores become softcap * tanh(score / softcap); 0.0 is none.
        alibi_slopes: float32 (heads,) or (batch, heads), ALiBi.
        deterministic: False admits a backward that adds dQ up in any order.
        return_attn_probs: whether LSE, and None, are returned too, for P is never made.
        s_aux: (heads,), sinks: a score that each row of a head sums besides its keys'.
        invariant: bits of a row depend on its query and keys alone (docs/invariance.md).

    Returns:
        O (batch, seq_q, heads, d); with return_attn_probs also LSE (batch, heads, seq_q) and None.

    Raises:
        InvalidArgument: naming the argument; it is a ValueError.

    Examples:
        >>> import torch
        >>> from flashgen.runtime import flash_attn
        >>> q = torch.randn(2, 16, 8, 64)
        >>> flash_attn.flash_attn_func(q, q, q, causal=True).shape
        torch.Size([2, 16, 8, 64])
    """
    check_probabilities(return_attn_probs, dropout_p)
    o, lse = attend_dense(
        q, k, v, causal=bool(causal), scale=softmax_scale, window_size=window_size,
        softcap=softcap, dropout_p=dropout_p, alibi_slopes=alibi_slopes, sinks=s_aux,
        deterministic=deterministic, invariant=invariant,
    )  # fmt: skip
    return (o, lse, None) if return_attn_probs else o


def check_probabilities(requested: bool, dropout_p: float) -> None:
    """Raise InvalidArgument where the dropped P is requested."""
    if requested and dropout_p:
        raise InvalidArgument(
            "return_attn_probs must be False with dropout: flashgen never makes the dropped P"
        )


@hands_on(flash_attn_func, "q", "k", "v", "s_aux")
def flash_attn_qkvpacked_func(qkv: Tensor, **rest: Any) -> Results:
    """flash_attn_func of queries, keys and values in one tensor.

    Args:
        qkv: (batch, seq, 3, heads, d).
        **rest: as of flash_attn_func.

    Returns:
        As flash_attn_func.

    Raises:
        InvalidArgument: naming the argument; it is a ValueError.

    Examples:
        >>> import torch
        >>> from flashgen.runtime import flash_attn
        >>> flash_attn.flash_attn_qkvpacked_func(torch.randn(2, 16, 3, 8, 64)).shape
        torch.Size([2, 16, 8, 64])
    """
    q, k, v = unpacked("qkv", qkv, "batch, seq", 3)
    return flash_attn_func(q, k, v, **rest)


@hands_on(flash_attn_func, "q", "k", "v", "s_aux")
def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, **rest: Any) -> Results:
    """flash_attn_func of keys and values in one tensor.

    Args:
        q: (batch, seq_q, heads, d).
        kv: (batch, seq_k, 2, kv_heads, d).
        **rest: as of flash_attn_func.

    Returns:
        As flash_attn_func.

    Raises:
        InvalidArgument: naming the argument; it is a ValueError.

    Examples:
        >>> import torch
        >>> from flashgen.runtime import flash_attn
        >>> q = torch.randn(2, 16, 8, 64)
        >>> flash_attn.flash_attn_kvpacked_func(q, torch.randn(2, 16, 2, 8, 64)).shape
        torch.Size([2, 16, 8, 64])
    """
    k, v = unpacked("kv", kv, "batch, seq", 2)
    return flash_attn_func(q, k, v, **rest)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    *,
    s_aux: Tensor | None = None,
    invariant: bool = False,
) -> Results:
    """Attention of packed sequences, as of the package flash_attn.

    page_size is any power of two. The causal mask is aligned at the bottom right of each sequence,
    and a query that sees no key has O = 0. Differentiable with respect to q, k and v.

    Args:
        q: (total_q, heads, d).
        k: (total_k, kv_heads, d), or pages (pages, page_size, kv_heads, d).
        v: as k.
        cu_seqlens_q: int32 or int64 (batch + 1,): where sequences begin, and the last one ends.
        cu_seqlens_k: the same of keys; with block_table it counts each sequence's keys.
        max_seqlen_q: no sequence has more queries.
        max_seqlen_k: no sequence has more keys.
        dropout_p: the probability with which an element of P is dropped.
        softmax_scale: what scores are multiplied by; 1/sqrt(d) unless given.
        causal: whether the last query sees the last key, and each one before it a key less.
        window_size: keys that a query sees beside the bottom-right diagonal; -1 is all.
        softcap: scores become softcap * tanh(score / softcap); 0.0 is none.
        alibi_slopes: float32 (heads,) or (batch, heads), ALiBi.
        deterministic: False admits a backward that adds dQ up in any order.
        return_attn_probs: whether LSE, and None, are returned too, for P is never made.
        block_table: int32 (batch, pages of a sequence): where the pages of each sequence are.
        s_aux: (heads,), sinks: a score that each row of a head sums besides its keys'.
        invariant: bits of a row depend on its query and keys alone (docs/invariance.md).

    Returns:
        O (total_q, heads, d); with return_attn_probs also LSE (heads, total_q) and None.

    Raises:
        InvalidArgument: naming the argument; it is a ValueError.

    Examples:
        >>> import torch
        >>> from flashgen.runtime import flash_attn
        >>> q, bounds = torch.randn(5, 8, 64), torch.tensor([0, 2, 5], dtype=torch.int32)
        >>> flash_attn.flash_attn_varlen_func(q, q, q, bounds, bounds, 3, 3).shape
        torch.Size([5, 8, 64])
    """
    check_probabilities(return_attn_probs, dropout_p)
    o, lse = attend_packed(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, block_table=block_table,
        causal=bool(causal), scale=softmax_scale, window_size=window_size, softcap=softcap,
        dropout_p=dropout_p, alibi_slopes=alibi_slopes, sinks=s_aux, deterministic=deterministic,
        invariant=invariant,
    )  # fmt: skip
    return (o, lse, None) if return_attn_probs else o


@hands_on(flash_attn_varlen_func, "q", "k", "v", "block_table", "s_aux")
def flash_attn_varlen_kvpacked_func(q: Tensor, kv: Tensor, **rest: Any) -> Results:
    """flash_attn_varlen_func of keys and values in one tensor.

    Args:
        q: (total_q, heads, d).
        kv: (total_k, 2, kv_heads, d).
        **rest: as of flash_attn_varlen_func.

    Returns:
        As flash_attn_varlen_func.

    Raises:
        InvalidArgument: naming the argument; it is a ValueError.

    Examples:
        >>> import torch
        >>> from flashgen.runtime import flash_attn
        >>> q, bounds = torch.randn(5, 8, 64), torch.tensor([0, 2, 5], dtype=torch.int32)
        >>> kv = torch.randn(5, 2, 8, 64)
        >>> flash_attn.flash_attn_varlen_kvpacked_func(q, kv, bounds, bounds, 3, 3).shape
        torch.Size([5, 8, 64])
    """
    k, v = unpacked("kv", kv, "total", 2)
    return flash_attn_varlen_func(q, k, v, **rest)


@hands_on(
    flash_attn_varlen_func,
    "q",
    "k",
    "v",
    "cu_seqlens_q",
    "cu_seqlens_k",
    "max_seqlen_q",
    "max_seqlen_k",
    "block_table",
    "s_aux",
)
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, **rest: Any
) -> Results:
    """flash_attn_varlen_func of queries, keys and values in one tensor.

    Args:
        qkv: (total, 3, heads, d).
        cu_seqlens: int32 or int64 (batch + 1,): where sequences begin, and the last one ends.
        max_seqlen: no sequence is longer.
        **rest: as of flash_attn_varlen_func.

    Returns:
        As flash_attn_varlen_func.

    Raises:
        InvalidArgument: naming the argument; it is a ValueError.

    Examples:
        >>> import torch
        >>> from flashgen.runtime import flash_attn
        >>> qkv, bounds = torch.randn(5, 3, 8, 64), torch.tensor([0, 2, 5], dtype=torch.int32)
        >>> flash_attn.flash_attn_varlen_qkvpacked_func(qkv, bounds, 3).shape
        torch.Size([5, 8, 64])
    """
    q, k, v = unpacked("qkv", qkv, "total", 3)
    bounds = (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    return flash_attn_varlen_func(q, k, v, *bounds, **rest)


@torch_modes.without_gradients
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    s_aux: Tensor | None = None,
    invariant: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention over a cache, to which k and v may be appended first, as of the package flash_attn.

    k and v are written in place behind the keys, and attended to; cache_seqlens stays as it is.
    page_size is any power of two. With block_table a length beyond the pages is refused, for which
    the host waits for the GPU. cache_batch_idx excludes block_table; the caches may then have
    another batch. rotary_cos and rotary_sin have at least as many positions as the cache has room
    for. They rotate k by its places, and q by its own under a causal mask or a window, else by that
    of the first new key. The diagonal is that of a sequence's own length. There is no gradient.

    Args:
        q: (batch, seq_q, heads, d).
        k_cache: (batch, capacity, kv_heads, d), or pages (pages, page_size, kv_heads, d).
        v_cache: as k_cache.
        k: (batch, new, kv_heads, d), new keys.
        v: (batch, new, kv_heads, d), new values.
        rotary_cos: (positions, rotary_dim / 2).
        rotary_sin: as rotary_cos.
        cache_seqlens: int, or int32 (batch,): keys of each sequence; else all of the cache.
        cache_batch_idx: int32 (batch,), the row of the caches that is each sequence's.
        cache_leftpad: int32 (batch,), the place of each first key, counted in cache_seqlens.
        block_table: int32 (batch, pages of a sequence): where the pages of each sequence are.
        softmax_scale: what scores are multiplied by; 1/sqrt(d) unless given.
        causal: whether the last query sees the last key, and each one before it a key less.
        window_size: keys that a query sees beside the bottom-right diagonal; -1 is all.
        softcap: scores become softcap * tanh(score / softcap); 0.0 is none.
        rotary_interleaved: elements 2i and 2i + 1 rotate together, else i and i + rotary_dim / 2.
        alibi_slopes: float32 (heads,) or (batch, heads), ALiBi.
        num_splits: at most 128; 0 is as many as flashgen chooses, as always if invariant.
        return_softmax_lse: whether LSE is returned too.
        s_aux: (heads,), sinks: a score that each row of a head sums besides its keys'.
        invariant: bits of a row depend on its query and keys alone (docs/invariance.md).

    Returns:
        O (batch, seq_q, heads, d); with return_softmax_lse also LSE (batch, heads, seq_q).

    Raises:
        InvalidArgument: naming the argument; it is a ValueError.

    Examples:
        >>> import torch
        >>> from flashgen.runtime import flash_attn
        >>> q, cache = torch.randn(2, 1, 8, 64), torch.randn(2, 32, 8, 64)
        >>> flash_attn.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=5).shape
        torch.Size([2, 1, 8, 64])
    """
    check_dimensions("four", 4, q=q, k_cache=k_cache, v_cache=v_cache)
    if not isinstance(num_splits, int) or not 0 <= num_splits <= MOST_SPLITS:
        raise InvalidArgument(f"num_splits must be 0 to {MOST_SPLITS}: got {shown(num_splits)}")
    keys, values = k_cache, v_cache
    if block_table is None:
        keys, values = k_cache.transpose(1, 2), v_cache.transpose(1, 2)
    capacity = k_cache.shape[1]
    if isinstance(block_table, Tensor) and block_table.ndim == 2:  # decode() judges the table
        capacity *= block_table.shape[1]
    window = window_within(window_size, capacity)
    cap, lengths, sinks = cap_of(softcap), _lengths(cache_seqlens, q), sinks_of(s_aux, q)
    queries = q.transpose(1, 2)
    if k is None or v is None:
        _check_nothing_new(k, v, rotary_cos, rotary_sin)
    else:
        if lengths is None:
            raise InvalidArgument("cache_seqlens must be given with k and v: got None")
        check_dimensions("four", 4, k=k, v=v)
    if block_table is not None:
        _check_pages_hold(lengths, 0 if k is None else k.shape[1], capacity)
    if k is not None and v is not None:
        assert lengths is not None  # see above
        rotated = kv_cache.append(
            keys, values, k.transpose(1, 2), v.transpose(1, 2), lengths,
            block_table=block_table, cache_batch_idx=cache_batch_idx, q=queries, cos=rotary_cos,
            sin=rotary_sin, interleaved=rotary_interleaved,
            advance=bool(causal) or window is not None,
        )  # fmt: skip
        assert rotated is not None  # a q was given
        queries, lengths = rotated, lengths.clamp(0, capacity) + k.shape[1]
    decoder, scale = folders.current().decoder, check_scale(softmax_scale, q.shape[3])
    found = key = None
    plain = cache_batch_idx is None and cache_leftpad is None and num_splits == 0
    if plain and lengths is not None:
        heads = heads_given(alibi_slopes=alibi_slopes, sinks=sinks)
        given = queries, keys, values, lengths, block_table, *heads
        limits = NO_LIMITS
        if window is not None or cap is not None or invariant is not False:
            limits = limits_of(window, cap, invariant, causal=bool(causal))
        options = bool(causal), scale, "ieee"
        key, found = decoder.again(given, options, limits)
    if found is None:
        features = asked_features(
            q,
            causal=bool(causal),
            alibi_slopes=alibi_slopes,
            window=window,
            softcap=cap,
            sinks=sinks,
            invariant=invariant,
        )
        found = decoder.decode(
            Call(causal=bool(causal), scale=scale, features=features), queries, keys, values,
            CacheArguments(
                lengths=lengths, block_table=block_table, cache_batch_idx=cache_batch_idx,
                cache_leftpad=cache_leftpad,
            ),
            key=key, splits=num_splits or None, names=("q", "k_cache", "v_cache", "cache_seqlens"),
        )  # fmt: skip
    o, lse = found
    o = o.transpose(1, 2)
    return (o, lse) if return_softmax_lse else o


def _check_nothing_new(
    k: Tensor | None, v: Tensor | None, cos: Tensor | None, sin: Tensor | None
) -> None:
    if k is not None or v is not None:
        raise InvalidArgument("k and v go together: give both or neither")
    if cos is not None or sin is not None:
        raise InvalidArgument("rotary_cos and rotary_sin need new k and v: give those too")


def _check_pages_hold(lengths: Tensor | None, new: int, capacity: int) -> None:
    """Raise InvalidArgument for a length that is beyond the pages with its new keys, as
    FlashAttention does. It waits for the device, but not in the capture of a CUDA graph. Lengths
    that are none are decode()'s to judge.
    """
    if not isinstance(lengths, Tensor) or lengths.dtype != torch.int32 or lengths.numel() == 0:
        return
    if lengths.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    if int(lengths.max()) + new > capacity:
        raise InvalidArgument(
            f"cache_seqlens must be at most {capacity - new}, for a row of block_table has pages "
            f"for {capacity} keys and {new} are new: got {int(lengths.max())}"
        )


def _lengths(cache_seqlens: int | Tensor | None, q: Tensor) -> Tensor | None:
    """The lengths as a tensor; decode() judges it."""
    if isinstance(cache_seqlens, int):
        if not -(2**31) <= cache_seqlens < 2**31:
            raise InvalidArgument(
                f"cache_seqlens must be a number of keys, within int32: got {cache_seqlens}"
            )
        return torch.full((q.shape[0],), cache_seqlens, dtype=torch.int32, device=q.device)
    return cache_seqlens
