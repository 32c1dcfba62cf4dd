"""The functions of flash_attn for packed sequences of several lengths: flash_attn.py has the
others, and is what a program imports.
"""

from __future__ import annotations

from torch import Tensor

from flashgen.runtime.flash_attn_arguments import (
    Results,
    check_dimensions,
    check_probabilities,
    in_steps,
    unpacked,
)
from flashgen.runtime.varlen import attention_varlen


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
) -> Results:
    """Attention of packed q (total_q, heads, d) over k and v (total_k, kv_heads, d).

    cu_seqlens_q and cu_seqlens_k, int32 or int64 (batch + 1,): where each sequence begins, and the
    last one ends. With block_table, int32 (batch, pages of a sequence), k and v are pools (pages,
    page_size, kv_heads, d), page_size any power of two, and cu_seqlens_k counts each sequence's
    keys. alibi_slopes: float32 (heads,) or (batch, heads). Returns O (total_q, heads, d), with
    return_attn_probs also LSE (heads, total_q) and None, for P is never made. The causal mask is
    aligned at the bottom right of each sequence, and a query that sees no key has O = 0.
    Differentiable with respect to q, k and v. Raises InvalidArgument, a ValueError, naming the
    argument.
    """
    check_probabilities(return_attn_probs, dropout_p)
    dim_v, scale = None, softmax_scale
    if block_table is None:  # a copy of a pool would cost more than it serves
        check_dimensions("three", 3, q=q, k=k, v=v)
        dim_v = v.shape[2]
        q, k, v, scale = in_steps(q, k, v, softmax_scale)
    o, lse = attention_varlen(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, block_table=block_table,
        causal=bool(causal), scale=scale, dropout_p=dropout_p, alibi_slopes=alibi_slopes,
        window=window_size, softcap=softcap, deterministic=deterministic, return_lse=True,
    )  # fmt: skip
    o = o if dim_v in (None, o.shape[2]) else o[..., :dim_v]
    return (o, lse, None) if return_attn_probs else o


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
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
) -> Results:
    """flash_attn_varlen_func of q (total_q, heads, d) and kv (total_k, 2, kv_heads, d)."""
    k, v = unpacked("kv", kv, "total", 2)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale,
        causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Results:
    """flash_attn_varlen_func of qkv (total, 3, heads, d)."""
    q, k, v = unpacked("qkv", qkv, "total", 3)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale, causal,
        window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip
