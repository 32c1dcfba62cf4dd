"""attention_varlen(): attention of sequences of several lengths, packed one behind the other.

A kernel reads where its sequence is from the device when it runs: nothing waits for the lengths,
and a CUDA graph of a call may be replayed with others.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, overload

import torch
from torch import Tensor

from flashgen import reference
from flashgen.asked import check_scale, diagonal_of
from flashgen.errors import InvalidArgument
from flashgen.features import Features, check_softcap, window_of
from flashgen.runtime import autograd, cpu, modes, registry
from flashgen.runtime.call import Call, Causal, check_plain, check_tensors
from flashgen.runtime.dispatch import Dispatcher, Window
from flashgen.sequences import from_bounds

__all__ = ["attention_varlen"]


@overload
def attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
    max_seqlen_k: int, *, seqused_q: Tensor | None = ..., seqused_k: Tensor | None = ...,
    causal: Causal = ..., scale: float | None = ..., alibi_slopes: Tensor | None = ...,
    dropout_p: float = ..., window: Window | None = ..., softcap: float | None = ...,
    sinks: Tensor | None = ..., deterministic: bool = ..., precision: str = ...,
    return_lse: Literal[False] = ...,
) -> Tensor: ...  # fmt: skip


@overload
def attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
    max_seqlen_k: int, *, seqused_q: Tensor | None = ..., seqused_k: Tensor | None = ...,
    causal: Causal = ..., scale: float | None = ..., alibi_slopes: Tensor | None = ...,
    dropout_p: float = ..., window: Window | None = ..., softcap: float | None = ...,
    sinks: Tensor | None = ..., deterministic: bool = ..., precision: str = ...,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


@torch.compiler.disable  # type: ignore[untyped-decorator]
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    causal: Causal = False,
    scale: float | None = None,
    alibi_slopes: Tensor | None = None,
    dropout_p: float = 0.0,
    window: Window | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    deterministic: bool = True,
    precision: str = "ieee",
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention of packed sequences, each over its own keys alone.

    q (places, heads, head_dim), k (places of keys, kv_heads, head_dim), v (places of keys,
    kv_heads, head_dim_v). cu_seqlens_q and cu_seqlens_k, int32 or int64 (sequences + 1,), ascending
    from 0: sequence b has the places from cu_seqlens[b] to cu_seqlens[b + 1], none if they are
    equal; of these the first seqused_q[b] and seqused_k[b], or all. They are read by the device
    alone, and nothing there checks them. max_seqlen_q and max_seqlen_k: no sequence is longer; what
    lies beyond is not computed. A causal diagonal, a window and ALiBi's distances are those of each
    sequence: bottom-right ones, but for causal="top_left". alibi_slopes: float32 (heads,) or
    (sequences, heads). Everything else as for attention().

    Dropout draws by the index of an element in S of all places, (heads, places, places of keys), so
    neither the longest lengths nor the tiles change which are dropped.

    Returns O (places, heads, head_dim_v), with return_lse also LSE (heads, places), float32,
    natural logarithm. A query with no key has O = 0 and LSE = -inf, or its sink; a place that no
    sequence uses has O = 0, LSE = -inf and gradients of 0. Differentiable, once, with respect to q,
    k, v and sinks. torch.compile breaks its graph here. Raises InvalidArgument, a ValueError,
    naming the argument.
    """
    beside: dict[str, Tensor] = {
        "k": k, "v": v, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k,
    }  # fmt: skip
    maybe = {
        "seqused_q": seqused_q, "seqused_k": seqused_k, "alibi_slopes": alibi_slopes,
        "sinks": sinks,
    }  # fmt: skip
    beside |= {name: x for name, x in maybe.items() if x is not None}
    check_tensors(q=q, **beside)
    check_plain(q=q, **beside)
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 3:
            raise InvalidArgument(
                f"{name} must have shape (places, heads, head_dim): got {tuple(x.shape)}"
            )
    if alibi_slopes is not None and alibi_slopes.requires_grad and torch.is_grad_enabled():
        raise InvalidArgument("alibi_slopes have no gradient: detach them")
    if modes.transformed():
        raise InvalidArgument("attention_varlen must be called outside torch.func's transforms")
    modes.refuse_tangents(q, k, v, sinks)
    diagonal_of(causal, 0, 0)
    packed = from_bounds(
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        bottom_right=causal != "top_left",
    )
    if modes.autocasts():
        q, k, v = modes.autocast(q), modes.autocast(k), modes.autocast(v)
    features = Features(
        slopes=alibi_slopes,
        dropout_p=dropout_p,
        rng=modes.draw_rng(dropout_p, q.device),
        window=window_of(window, causal=causal is not False),
        softcap=check_softcap(softcap),
        sinks=sinks,
        sequences=packed,
    )
    call = Call(
        causal=causal,
        scale=check_scale(scale, q.shape[2]),
        precision=precision,
        deterministic=deterministic,
    )
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    o, lse = _attention(registry.dispatcher_of(), q, k, v, call, features)
    o, lse = o[0].transpose(0, 1), lse[0]
    return (o, lse) if return_lse else o


def _attention(
    dispatcher: Dispatcher, q: Tensor, k: Tensor, v: Tensor, call: Call, features: Features
) -> tuple[Tensor, Tensor]:
    """O (1, H, Tq, d_v) and LSE (1, H, Tq) of packed q (1, H, Tq, d), k and v."""
    dispatcher.check(q, k, v, call, features)
    if dispatcher.serves_by_torch(q.device):
        return _by_torch(q, k, v, call, features)
    differentiated = torch.is_grad_enabled() and any(
        x is not None and x.requires_grad for x in (q, k, v, features.sinks)
    )
    if differentiated:
        return autograd.attention(dispatcher.passes, call, q, k, v, features)
    return dispatcher.passes.forward(q, k, v, call, features)


def _by_torch(
    q: Tensor, k: Tensor, v: Tensor, call: Call, features: Features
) -> tuple[Tensor, Tensor]:
    """The same for CPU tensors: sequence by sequence, but with dropout, which counts all places."""
    packed = features.sequences
    assert packed is not None
    if features.dropout_p > 0.0:
        with torch.autocast("cpu", enabled=False):
            diagonal = None if call.causal is False else 0
            o, lse = reference.attention(
                q, k, v, scale=call.scale, diagonal=diagonal, features=features
            )
        return o.to(q.dtype), lse.float()
    o = q.new_zeros((*q.shape[:3], v.shape[3]))
    lse = q.new_full(q.shape[:3], float("-inf"), dtype=torch.float32)
    for number, (q_begin, seq_q, k_begin, seq_k) in enumerate(packed.lengths()):
        rows, keys = slice(q_begin, q_begin + seq_q), slice(k_begin, k_begin + seq_k)
        own = replace(features, slopes=_slopes_of(number, features), sequences=None)
        found = cpu.attention(
            q[:, :, rows], k[:, :, keys], v[:, :, keys], call, features=own, return_lse=True
        )
        o[:, :, rows] = found[0]
        if found[1] is not None:  # return_lse
            lse[:, :, rows] = found[1]
    return o, lse


def _slopes_of(number: int, features: Features) -> Tensor | None:
    slopes = features.slopes
    return slopes[number] if slopes is not None and slopes.ndim == 2 else slopes
