"""Drop-in for flash_attn.cute (FlashAttention 4): the same functions, arguments, order, defaults,
layouts and return values.

    from flashgen.runtime import flash_attn_4 as cute

    o, lse = cute.flash_attn_func(q, k, v, causal=True)

Both return O and LSE, which is None unless it is asked for. A causal mask is aligned at the bottom
right, and a query that sees no key has O = 0. What only tunes their kernels changes nothing here;
what computes something else (qv, gathered keys, functions of scores and masks, sparse blocks) is
refused. One argument is not of FlashAttention 4: invariant, as of attention().

flash_attn_combine, _flash_attn_fwd and _flash_attn_bwd are those of flash_attn.cute.interface. The
last two are what torch looks up in the module that register_flash_attention_fa4() is given.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashgen.errors import InvalidArgument
from flashgen.inputs.features import features_of
from flashgen.inputs.packed import from_bounds
from flashgen.runtime import torch_modes
from flashgen.runtime.adapters import flash_attn_3, seq_first
from flashgen.runtime.adapters.torch import gradients_of
from flashgen.runtime.call import Call, Saved

__all__ = ["flash_attn_combine", "flash_attn_func", "flash_attn_varlen_func"]

Sides = tuple[int | None, int | None]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor | None = None,
    gather_kv_indices: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sides = (None, None),
    learnable_sink: Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: Any = None,
    score_mod_bwd: Any = None,
    mask_mod: Any = None,
    aux_tensors: Any = None,
    aux_scalars: Any = None,
    block_sparse_tensors: Any = None,
    block_sparse_tensors_bwd: Any = None,
    return_lse: bool = False,
    gather_bwd_recompute_p: bool = False,
    gather_bwd_token_chunk: int | None = None,
    *,
    invariant: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Attention of (batch, seq, heads, d) tensors, as of flash_attn.cute.

    Differentiable with respect to q, k, v and learnable_sink.

    Args:
        q: (batch, seq_q, heads, d).
        k: (batch, seq_k, kv_heads, d).
        v: (batch, seq_k, kv_heads, d_v).
        qv: must be None.
        gather_kv_indices: must be None.
        softmax_scale: what scores are multiplied by; 1/sqrt(d) unless given.
        causal: whether the last query sees the last key, and each one before it a key less.
        window_size: keys that a query sees beside the bottom-right diagonal; None is all.
        learnable_sink: (heads,): a score that each row of a head sums besides its keys'.
        softcap: scores become softcap * tanh(score / softcap); 0.0 is none.
        num_splits: changes nothing.
        pack_gqa: changes nothing.
        deterministic: False admits a backward that adds dQ up in any order.
        score_mod: must be None.
        score_mod_bwd: must be None.
        mask_mod: must be None.
        aux_tensors: must be None.
        aux_scalars: must be None.
        block_sparse_tensors: must be None.
        block_sparse_tensors_bwd: must be None.
        return_lse: whether LSE is returned too.
        gather_bwd_recompute_p: changes nothing.
        gather_bwd_token_chunk: changes nothing.
        invariant: bits of a row depend on its query and keys alone (docs/invariance.md).

    Returns:
        O (batch, seq_q, heads, d_v); with return_lse LSE (batch, heads, seq_q), else None.

    Raises:
        InvalidArgument: naming the argument; it is a ValueError and a RuntimeError.

    Examples:
        >>> import torch
        >>> from flashgen.runtime import flash_attn_4
        >>> q = torch.randn(2, 16, 8, 64)
        >>> flash_attn_4.flash_attn_func(q, q, q, causal=True)[0].shape
        torch.Size([2, 16, 8, 64])
    """
    _refuse(
        qv=qv, gather_kv_indices=gather_kv_indices, score_mod=score_mod,
        score_mod_bwd=score_mod_bwd, mask_mod=mask_mod, aux_tensors=aux_tensors,
        aux_scalars=aux_scalars, block_sparse_tensors=block_sparse_tensors,
        block_sparse_tensors_bwd=block_sparse_tensors_bwd,
    )  # fmt: skip
    o, lse = seq_first.attend_dense(
        q, k, v, causal=bool(causal), scale=softmax_scale, window_size=_window(window_size),
        softcap=softcap, sinks=learnable_sink, deterministic=deterministic, invariant=invariant,
    )  # fmt: skip
    return o, lse if return_lse else None


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    min_seqlen_k: int | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    gather_kv_indices: Tensor | None = None,
    page_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sides = (None, None),
    learnable_sink: Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: Any = None,
    score_mod_bwd: Any = None,
    mask_mod: Any = None,
    block_sparse_tensors: Any = None,
    aux_tensors: Any = None,
    aux_scalars: Any = None,
    return_lse: bool = False,
    scheduler_metadata: Any = None,
    seqlen_k_per_split: int | None = None,
    disable_scheduler_metadata: bool = False,
    gather_bwd_recompute_p: bool = False,
    gather_bwd_token_chunk: int | None = None,
    *,
    invariant: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Attention of sequences of several lengths, as of flash_attn.cute: packed, or rows of a batch
    of which some places are used; keys in pages, too, of which each holds a power of two.

    Differentiable with respect to q, k, v and learnable_sink, but not over pages.

    Args:
        q: (total_q, heads, d), or without cu_seqlens_q (batch, seq_q, heads, d).
        k: (total_k, kv_heads, d), (batch, seq_k, kv_heads, d), or pages (pages, size, kv_heads, d).
        v: as k, with d_v.
        qv: must be None.
        cu_seqlens_q: int32 (batch + 1,): where sequences begin, and the last one ends.
        cu_seqlens_k: the same of keys.
        max_seqlen_q: no sequence has more queries. Without it the device is waited for.
        max_seqlen_k: no sequence has more keys. Without it the device is waited for.
        min_seqlen_k: changes nothing.
        seqused_q: (batch,), how many of its places a sequence uses; all unless given.
        seqused_k: the same of keys; needed with page_table.
        gather_kv_indices: must be None.
        page_table: int32 (batch, pages of a sequence): where the pages of each sequence are.
        softmax_scale: what scores are multiplied by; 1/sqrt(d) unless given.
        causal: whether the last query sees the last key, and each one before it a key less.
        window_size: keys that a query sees beside the bottom-right diagonal; None is all.
        learnable_sink: (heads,): a score that each row of a head sums besides its keys'.
        softcap: scores become softcap * tanh(score / softcap); 0.0 is none.
        num_splits: changes nothing.
        pack_gqa: changes nothing.
        deterministic: False admits a backward that adds dQ up in any order.
        score_mod: must be None.
        score_mod_bwd: must be None.
        mask_mod: must be None.
        block_sparse_tensors: must be None.
        aux_tensors: must be None.
        aux_scalars: must be None.
        return_lse: whether LSE is returned too.
        scheduler_metadata: changes nothing.
        seqlen_k_per_split: must be None; invariant gives the same bits in any batch.
        disable_scheduler_metadata: changes nothing.
        gather_bwd_recompute_p: changes nothing.
        gather_bwd_token_chunk: changes nothing.
        invariant: bits of a row depend on its query and keys alone (docs/invariance.md).

    Returns:
        O as q, with d_v; with return_lse LSE (heads, total_q), or (batch, heads, seq_q) of a q with
        four dimensions, else None.

    Raises:
        InvalidArgument: naming the argument; it is a ValueError and a RuntimeError.

    Examples:
        >>> import torch
        >>> from flashgen.runtime import flash_attn_4
        >>> q, bounds = torch.randn(5, 8, 64), torch.tensor([0, 2, 5], dtype=torch.int32)
        >>> given = {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds, "max_seqlen_q": 3}
        >>> flash_attn_4.flash_attn_varlen_func(q, q, q, **given, max_seqlen_k=3)[0].shape
        torch.Size([5, 8, 64])
    """
    _refuse(
        qv=qv, gather_kv_indices=gather_kv_indices, score_mod=score_mod,
        score_mod_bwd=score_mod_bwd, mask_mod=mask_mod, aux_tensors=aux_tensors,
        aux_scalars=aux_scalars, block_sparse_tensors=block_sparse_tensors,
        seqlen_k_per_split=seqlen_k_per_split,
    )  # fmt: skip
    rows, q, cu_seqlens_q, max_seqlen_q = _packed("q", q, cu_seqlens_q, max_seqlen_q)
    if page_table is None:
        _, k, bounds_k, max_seqlen_k = _packed("k", k, cu_seqlens_k, max_seqlen_k)
        _, v, _, _ = _packed("v", v, cu_seqlens_k, max_seqlen_k)
    else:
        if cu_seqlens_k is not None or seqused_k is None:
            raise InvalidArgument("page_table needs seqused_k, and cu_seqlens_k must be None")
        seq_first.check_dimensions("four", 4, k=k, v=v)
        seq_first.check_dimensions("two", 2, page_table=page_table)
        bounds_k, max_seqlen_k = None, page_table.shape[-1] * k.shape[1]
    o, lse = seq_first.attend_packed(
        q, k, v, cu_seqlens_q, bounds_k, max_seqlen_q, max_seqlen_k, block_table=page_table,
        seqused_q=seqused_q, seqused_k=seqused_k, causal=bool(causal), scale=softmax_scale,
        window_size=_window(window_size), softcap=seq_first.cap_of(softcap),
        sinks=learnable_sink, deterministic=deterministic, invariant=invariant,
    )  # fmt: skip
    if rows is not None:
        o, lse = o.view(*rows, *o.shape[1:]), lse.view(-1, *rows).transpose(0, 1)
    return o, lse if return_lse else None


def flash_attn_combine(
    out_partial: Tensor,
    lse_partial: Tensor,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    cu_seqlens: Tensor | None = None,
    seqused: Tensor | None = None,
    virtual_batch_idx: Tensor | None = None,
    return_lse: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Attention over all keys, from that over the keys of each split, as of
    flash_attn.cute.interface.

    Args:
        out_partial: (splits, batch, seq, heads, d), or packed (splits, total, heads, d).
        lse_partial: float32, as out_partial without d.
        out: as out_partial without splits; O is written into it, if it is given.
        out_dtype: of O, where out is not given; that of out_partial unless given.
        cu_seqlens: changes nothing: rows are combined each by itself.
        seqused: changes nothing: rows that are not used are combined, too.
        virtual_batch_idx: changes nothing.
        return_lse: whether LSE is returned too.

    Returns:
        O, and with return_lse LSE, else None; both as the partial ones without splits.

    Raises:
        InvalidArgument: naming the argument; it is a ValueError and a RuntimeError.

    Examples:
        >>> import torch
        >>> from flashgen.runtime import flash_attn_4
        >>> o, lse = torch.randn(3, 16, 8, 64), torch.randn(3, 16, 8)
        >>> [x.shape for x in flash_attn_4.flash_attn_combine(o, lse)]
        [torch.Size([16, 8, 64]), torch.Size([16, 8])]
    """
    packed = isinstance(out_partial, Tensor) and out_partial.ndim == 4
    if packed:  # a batch of one
        seq_first.check_dimensions("three", 3, lse_partial=lse_partial)
        out_partial, lse_partial = out_partial[:, None], lse_partial[:, None]
        out = None if out is None else out[None]
    o, lse = flash_attn_3.flash_attn_combine(out_partial, lse_partial, out, out_dtype)
    o, lse = (o[0], lse[0]) if packed else (o, lse)
    return o, lse if return_lse else None


@torch_modes.without_gradients
def _flash_attn_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    out: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """O, which is `out` where that is given, and LSE, of flash_attn_varlen_func() where one of its
    arguments says where sequences are, else of flash_attn_func(). Raises InvalidArgument.
    """
    options = {name: x for name, x in options.items() if x is not None}
    packed = {"cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "page_table"} & set(options)
    if not packed:
        options = {name: x for name, x in options.items() if not name.startswith("max_seqlen_")}
    attend = flash_attn_varlen_func if packed else flash_attn_func
    o, lse = attend(q, k, v, window_size=(window_size_left, window_size_right), **options)
    return (o if out is None else out.copy_(o)), lse


@torch_modes.without_gradients
def _flash_attn_bwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    dout: Tensor,
    lse: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    softcap: float = 0.0,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    deterministic: bool = False,
    dq: Tensor | None = None,
    dk: Tensor | None = None,
    dv: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """dQ, dK and dV, written into those that are given, of what the forward returned for these
    tensors. Raises InvalidArgument.
    """
    sequences, keys = None, k.shape[0]
    if cu_seqlens_q is not None:
        if cu_seqlens_k is None:
            raise InvalidArgument("cu_seqlens_k must be given with cu_seqlens_q: got None")
        _, _, _, max_seqlen_q = _packed("q", q, cu_seqlens_q, max_seqlen_q)
        _, _, _, max_seqlen_k = _packed("k", k, cu_seqlens_k, max_seqlen_k)
        sequences = from_bounds(
            cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=seqused_q,
            seqused_k=seqused_k,
        ).within(q.shape[0], keys)  # fmt: skip
    elif not (cu_seqlens_k is seqused_q is seqused_k is None):
        raise InvalidArgument("cu_seqlens_q must be given with cu_seqlens_k and seqused")
    else:
        keys = k.shape[1]
    window = seq_first.window_within(_window((window_size_left, window_size_right)), keys)
    call = Call(
        causal=causal, scale=softmax_scale, deterministic=deterministic,
        features=features_of(
            causal=causal, window=window, softcap=seq_first.cap_of(softcap), sequences=sequences
        ),
    )  # fmt: skip
    found = gradients_of(call, Saved(q, k, v, out, lse), dout)
    given = zip(found, (dq, dk, dv), strict=True)
    return tuple(x if place is None else place.copy_(x) for x, place in given)


def _packed(
    name: str, x: Tensor, bounds: Tensor | None, longest: int | None
) -> tuple[tuple[int, int] | None, Tensor, Tensor, int]:
    """Batch and places of rows of a batch, None where sequences are packed; the packed tensor, its
    bounds, and the longest sequence.
    """
    if bounds is not None:
        seq_first.check_dimensions("three", 3, **{name: x})
        of = "cu_seqlens_q" if name == "q" else "cu_seqlens_k"
        seq_first.check_dimensions("one", 1, **{of: bounds})
        if longest is None:
            longest = int(bounds.diff().max()) if bounds.numel() > 1 else 0
        return None, x, bounds, longest
    seq_first.check_dimensions("four", 4, **{name: x})
    batch, places = x.shape[:2]
    ends = torch.arange(batch + 1, dtype=torch.int32, device=x.device) * places
    return (batch, places), x.flatten(0, 1), ends, places


def _window(sides: Sides) -> tuple[int, int]:
    """The sides as FlashAttention 2 has them; what is no pair is judged where it is used."""
    if not isinstance(sides, tuple | list) or len(sides) != 2:
        return sides
    left, right = sides
    return -1 if left is None else left, -1 if right is None else right


def _refuse(**given: Any) -> None:
    for name, value in given.items():
        if value is not None:
            raise InvalidArgument(f"{name} must be None: flashgen has no kernel for it")
