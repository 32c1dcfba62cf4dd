"""Drop-in for flash_attn_interface (FlashAttention 3): the same functions, arguments, order,
defaults, layouts and return values.

    from flashgen.runtime import flash_attn_3 as flash_attn_interface

    o = flash_attn_interface.flash_attn_func(q, k, v, causal=True)

Tensors are (batch, seq, heads, head_dim), or (tokens, heads, head_dim) for packed sequences; a
causal mask is aligned at the bottom right, and a query that sees no key has O = 0. What only tunes
their kernels (num_splits of a prompt, pack_gqa, sm_margin, scheduler_metadata) changes nothing
here. qv is refused. Two arguments are not of FlashAttention 3: s_aux (heads,), attention sinks, as
builds of vLLM and transformers have them; and invariant, as of attention().
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashgen.errors import InvalidArgument
from flashgen.runtime import fp8, torch_modes
from flashgen.runtime.adapters import flash_attn, seq_first
from flashgen.runtime.merge import merge

__all__ = [
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
]

MaybeWithLse = Tensor | tuple[Tensor, Tensor]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    s_aux: Tensor | None = None,
    invariant: bool = False,
) -> MaybeWithLse:
    """Attention of (batch, seq, heads, d) tensors, as of flash_attn_interface.

    Differentiable with respect to q, k, v and s_aux; not with q in 8 bits.

    Args:
        q: (batch, seq_q, heads, d); float8_e4m3fn too, O is bfloat16 then.
        k: (batch, seq_k, kv_heads, d).
        v: (batch, seq_k, kv_heads, d_v).
        softmax_scale: what scores are multiplied by; 1/sqrt(d) unless given.
        causal: whether the last query sees the last key, and each one before it a key less.
        qv: must be None.
        q_descale: float32 (batch, kv_heads): what q in 8 bits is multiplied by.
        k_descale: the same of k.
        v_descale: the same of v.
        window_size: keys that a query sees beside the bottom-right diagonal; -1 is all.
        attention_chunk: keys of a chunk; under a causal mask a query sees only its own; 0 is none.
        softcap: scores become softcap * tanh(score / softcap); 0.0 is none.
        num_splits: changes nothing.
        pack_gqa: changes nothing.
        deterministic: False admits a backward that adds dQ up in any order.
        sm_margin: changes nothing.
        return_attn_probs: whether LSE is returned too.
        s_aux: (heads,), sinks: a score that each row of a head sums besides its keys'.
        invariant: bits of a row depend on its query and keys alone (docs/invariance.md).

    Returns:
        O (batch, seq_q, heads, d_v); with return_attn_probs also LSE (batch, heads, seq_q).

    Raises:
        InvalidArgument: naming the argument; it is a ValueError.

    Examples:
        >>> import torch
        >>> from flashgen.runtime import flash_attn_3
        >>> q = torch.randn(2, 16, 8, 64)
        >>> flash_attn_3.flash_attn_func(q, q, q, causal=True).shape
        torch.Size([2, 16, 8, 64])
    """
    _refuse_qv(qv)
    options: dict[str, Any] = {"causal": bool(causal), "scale": softmax_scale, "sinks": s_aux}
    if isinstance(q, Tensor) and q.dtype is torch.float8_e4m3fn:
        if attention_chunk or invariant:
            named = "attention_chunk" if attention_chunk else "invariant"
            raise InvalidArgument(f"{named} must not be given with float8_e4m3fn tensors")
        seq_first.check_dimensions("four", 4, q=q, k=k, v=v)
        o, lse = fp8.attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), q_descale=q_descale,
            k_descale=k_descale, v_descale=v_descale, softcap=seq_first.cap_of(softcap),
            window=seq_first.window_within(window_size, k.shape[1]), **options,
        )  # fmt: skip
        o = o.transpose(1, 2)
    else:
        _refuse_factors(q_descale, k_descale, v_descale)
        o, lse = seq_first.attend_dense(
            q, k, v, window_size=window_size, softcap=softcap, chunk=attention_chunk or None,
            deterministic=deterministic, invariant=invariant, **options,
        )  # fmt: skip
    return (o, lse) if return_attn_probs else o


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    s_aux: Tensor | None = None,
    invariant: bool = False,
) -> MaybeWithLse:
    """Attention of packed sequences, as of flash_attn_interface.

    Differentiable with respect to q, k and v.

    Args:
        q: (total_q, heads, d).
        k: (total_k, kv_heads, d).
        v: (total_k, kv_heads, d_v).
        cu_seqlens_q: int32 or int64 (batch + 1,): where sequences begin, and the last one ends.
        cu_seqlens_k: the same of keys.
        max_seqlen_q: no sequence has more queries.
        max_seqlen_k: no sequence has more keys.
        seqused_q: (batch,), how many of its places a sequence uses; all unless given.
        seqused_k: the same of keys.
        softmax_scale: what scores are multiplied by; 1/sqrt(d) unless given.
        causal: whether the last query sees the last key, and each one before it a key less.
        qv: must be None.
        q_descale: must be None.
        k_descale: must be None.
        v_descale: must be None.
        window_size: keys that a query sees beside the bottom-right diagonal; -1 is all.
        attention_chunk: keys of a chunk; under a causal mask a query sees only its own; 0 is none.
        softcap: scores become softcap * tanh(score / softcap); 0.0 is none.
        num_splits: changes nothing.
        pack_gqa: changes nothing.
        deterministic: False admits a backward that adds dQ up in any order.
        sm_margin: changes nothing.
        return_attn_probs: whether LSE is returned too.
        s_aux: (heads,), sinks: a score that each row of a head sums besides its keys'.
        invariant: bits of a row depend on its query and keys alone (docs/invariance.md).

    Returns:
        O (total_q, heads, d_v); with return_attn_probs also LSE (heads, total_q).

    Raises:
        InvalidArgument: naming the argument; it is a ValueError.

    Examples:
        >>> import torch
        >>> from flashgen.runtime import flash_attn_3
        >>> q, bounds = torch.randn(5, 8, 64), torch.tensor([0, 2, 5], dtype=torch.int32)
        >>> flash_attn_3.flash_attn_varlen_func(q, q, q, bounds, bounds, 3, 3).shape
        torch.Size([5, 8, 64])
    """
    _refuse_qv(qv)
    _refuse_factors(q_descale, k_descale, v_descale)
    o, lse = seq_first.attend_packed(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, block_table=None,
        seqused_q=seqused_q, seqused_k=seqused_k, causal=bool(causal), scale=softmax_scale,
        window_size=window_size, softcap=softcap, chunk=attention_chunk or None, sinks=s_aux,
        deterministic=deterministic, invariant=invariant,
    )  # fmt: skip
    return (o, lse) if return_attn_probs else o


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> MaybeWithLse:
    """flash_attn_func of queries, keys and values in one tensor.

    Args:
        qkv: (batch, seq, 3, heads, d), or with num_heads_q (batch, seq, heads + 2 kv_heads, d).
        softmax_scale: what scores are multiplied by; 1/sqrt(d) unless given.
        causal: whether the last query sees the last key, and each one before it a key less.
        q_descale: as of flash_attn_func.
        k_descale: the same.
        v_descale: the same.
        window_size: keys that a query sees beside the bottom-right diagonal; -1 is all.
        attention_chunk: keys of a chunk; under a causal mask a query sees only its own; 0 is none.
        softcap: scores become softcap * tanh(score / softcap); 0.0 is none.
        deterministic: False admits a backward that adds dQ up in any order.
        num_heads_q: heads of queries, which come first; None for three parts of equal heads.
        sm_margin: changes nothing.
        return_attn_probs: whether LSE is returned too.

    Returns:
        As flash_attn_func.

    Raises:
        InvalidArgument: naming the argument; it is a ValueError.

    Examples:
        >>> import torch
        >>> from flashgen.runtime import flash_attn_3
        >>> flash_attn_3.flash_attn_qkvpacked_func(torch.randn(2, 16, 3, 8, 64)).shape
        torch.Size([2, 16, 8, 64])
    """
    if num_heads_q is None:
        q, k, v = seq_first.unpacked("qkv", qkv, "batch, seq", 3)
    else:
        seq_first.check_dimensions("four", 4, qkv=qkv)
        others = qkv.shape[2] - num_heads_q
        if num_heads_q < 1 or others < 2 or others % 2:
            raise InvalidArgument(
                f"num_heads_q must leave as many heads of K as of V in qkv: got {num_heads_q} of "
                f"{qkv.shape[2]}"
            )
        q, k, v = qkv.split_with_sizes([num_heads_q, others // 2, others // 2], 2)
    return flash_attn_func(
        q, k, v, softmax_scale, causal, None, q_descale, k_descale, v_descale, window_size,
        attention_chunk, softcap, deterministic=deterministic, return_attn_probs=return_attn_probs,
    )  # fmt: skip


@torch_modes.without_gradients
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Any = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
    *,
    s_aux: Tensor | None = None,
    invariant: bool = False,
) -> MaybeWithLse:
    """Attention over a cache, as of flash_attn_interface. There is no gradient.

    With cu_seqlens_q queries are packed, of several lengths, over pages; their keys are in the
    cache already. Otherwise k and v may be appended first, as flash_attn.flash_attn_with_kvcache
    says. page_size is a power of two.

    Args:
        q: (batch, seq_q, heads, d), or with cu_seqlens_q (total_q, heads, d).
        k_cache: (batch, capacity, kv_heads, d), or pages (pages, page_size, kv_heads, d).
        v_cache: as k_cache, with d_v.
        k: (batch, new, kv_heads, d), new keys.
        v: (batch, new, kv_heads, d_v), new values.
        qv: must be None.
        rotary_cos: (positions, rotary_dim / 2).
        rotary_sin: as rotary_cos.
        cache_seqlens: int, or int32 (batch,): keys of each sequence; else all of the cache.
        cache_batch_idx: int32 (batch,), the row of the caches that is each sequence's.
        cache_leftpad: int32 (batch,), the place of each first key, counted in cache_seqlens.
        page_table: int32 (batch, pages of a sequence): where the pages of each sequence are.
        cu_seqlens_q: int32 (batch + 1,): where the queries of sequences begin; needs page_table.
        cu_seqlens_k_new: must be None where k is given; else it changes nothing.
        max_seqlen_q: no sequence has more queries; needed with cu_seqlens_q.
        rotary_seqlens: must be None.
        q_descale: must be None.
        k_descale: must be None.
        v_descale: must be None.
        softmax_scale: what scores are multiplied by; 1/sqrt(d) unless given.
        causal: whether the last query sees the last key, and each one before it a key less.
        window_size: keys that a query sees beside the bottom-right diagonal; -1 is all.
        attention_chunk: keys of a chunk, with cu_seqlens_q; 0 is none.
        softcap: scores become softcap * tanh(score / softcap); 0.0 is none.
        rotary_interleaved: elements 2i and 2i + 1 rotate together, else i and i + rotary_dim / 2.
        scheduler_metadata: changes nothing.
        num_splits: at most 128; 0 is as many as flashgen chooses.
        pack_gqa: changes nothing.
        sm_margin: changes nothing.
        return_softmax_lse: whether LSE is returned too.
        s_aux: (heads,), sinks: a score that each row of a head sums besides its keys'.
        invariant: bits of a row depend on its query and keys alone (docs/invariance.md).

    Returns:
        O as q, with d_v; with return_softmax_lse also LSE (batch, heads, seq_q), of packed queries
        (heads, total_q).

    Raises:
        InvalidArgument: naming the argument; it is a ValueError.

    Examples:
        >>> import torch
        >>> from flashgen.runtime import flash_attn_3
        >>> q, cache = torch.randn(2, 1, 8, 64), torch.randn(2, 32, 8, 64)
        >>> flash_attn_3.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=5).shape
        torch.Size([2, 1, 8, 64])
    """
    _refuse_qv(qv)
    _refuse_factors(q_descale, k_descale, v_descale)
    if rotary_seqlens is not None:
        raise InvalidArgument("rotary_seqlens must be None: keys rotate by their places")
    if cu_seqlens_q is None:
        if attention_chunk:
            raise InvalidArgument("attention_chunk must be 0 without cu_seqlens_q: use window_size")
        return flash_attn.flash_attn_with_kvcache(
            q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx,
            cache_leftpad, page_table, softmax_scale, causal, window_size, softcap,
            rotary_interleaved, None, num_splits, return_softmax_lse, s_aux=s_aux,
            invariant=invariant,
        )  # fmt: skip
    others = {
        "k": k, "v": v, "rotary_cos": rotary_cos, "rotary_sin": rotary_sin,
        "cache_batch_idx": cache_batch_idx, "cache_leftpad": cache_leftpad,
    }  # fmt: skip
    for name, given in others.items():
        if given is not None:
            raise InvalidArgument(f"{name} must be None with cu_seqlens_q")
    if page_table is None or max_seqlen_q is None or not isinstance(cache_seqlens, Tensor):
        raise InvalidArgument(
            "page_table, max_seqlen_q and cache_seqlens, a tensor, must be given with cu_seqlens_q"
        )
    seq_first.check_dimensions("four", 4, k_cache=k_cache, v_cache=v_cache)
    seq_first.check_dimensions("two", 2, page_table=page_table)
    o, lse = seq_first.attend_packed(
        q, k_cache, v_cache, cu_seqlens_q, None, max_seqlen_q,
        page_table.shape[-1] * k_cache.shape[1], block_table=page_table, seqused_k=cache_seqlens,
        causal=bool(causal), scale=softmax_scale, window_size=window_size, softcap=softcap,
        chunk=attention_chunk or None, sinks=s_aux, invariant=invariant,
    )  # fmt: skip
    return (o, lse) if return_softmax_lse else o


def flash_attn_combine(
    out_partial: Tensor,
    lse_partial: Tensor,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention over all keys, from that over the keys of each split, as of flash_attn_interface.

    Args:
        out_partial: (splits, batch, seq, heads, d).
        lse_partial: float32 (splits, batch, seq, heads).
        out: (batch, seq, heads, d), which O is written into, if it is given.
        out_dtype: of O, where out is not given; that of out_partial unless given.

    Returns:
        O (batch, seq, heads, d) and LSE (batch, seq, heads).

    Raises:
        InvalidArgument: naming the argument; it is a ValueError.

    Examples:
        >>> import torch
        >>> from flashgen.runtime import flash_attn_3
        >>> o, lse = torch.randn(3, 2, 16, 8, 64), torch.randn(3, 2, 16, 8)
        >>> [x.shape for x in flash_attn_3.flash_attn_combine(o, lse)]
        [torch.Size([2, 16, 8, 64]), torch.Size([2, 16, 8])]
    """
    seq_first.check_dimensions("five", 5, out_partial=out_partial)
    seq_first.check_dimensions("four", 4, lse_partial=lse_partial)
    if len(out_partial) != len(lse_partial):
        raise InvalidArgument(
            f"lse_partial must have as many splits as out_partial, {len(out_partial)}: got "
            f"{len(lse_partial)}"
        )
    o, lse = merge(list(zip(out_partial.unbind(), lse_partial.unbind(), strict=True)))
    if out is None:
        return o.to(out_dtype or out_partial.dtype), lse
    if out.shape != o.shape:
        raise InvalidArgument(f"out must have shape {tuple(o.shape)}: got {tuple(out.shape)}")
    return out.copy_(o), lse


def _refuse_qv(qv: Tensor | None) -> None:
    if qv is not None:
        raise InvalidArgument("qv must be None: flashgen has no second product of queries")


def _refuse_factors(*factors: Tensor | None) -> None:
    if any(each is not None for each in factors):
        raise InvalidArgument(
            "q_descale, k_descale and v_descale must be None but in flash_attn_func of "
            "float8_e4m3fn tensors; decode() takes a cache of 8 bits with k_scale and v_scale"
        )
