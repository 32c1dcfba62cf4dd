"""attention_varlen(): attention of sequences of several lengths, packed one behind the other.

A kernel reads where its sequence is from the device when it runs: nothing waits for the lengths,
and a CUDA graph of a call may be replayed with others.
"""

from __future__ import annotations

from typing import Literal, overload

from torch import Tensor

from flashgen.errors import InvalidArgument
from flashgen.inputs.features import NO_LIMITS, Window, heads_given, limits_of
from flashgen.inputs.from_call import diagonal_of
from flashgen.inputs.packed import from_bounds
from flashgen.kernels.stream_memory import zeros
from flashgen.runtime import folders, torch_modes
from flashgen.runtime.call import Call, Causal, check_plain, check_tensors
from flashgen.runtime.call_cache import options_of
from flashgen.runtime.conventions import heads_first, packed_again
from flashgen.runtime.general_path import asked_features
from flashgen.runtime.kept_calls import kind_of_packed
from flashgen.runtime.keywords import hinting

__all__ = ["attention_varlen"]

folders.current()  # torch.compile cannot trace its first call, which takes a lock


@overload
def attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None,
    max_seqlen_q: int, max_seqlen_k: int, *, seqused_q: Tensor | None = ...,
    seqused_k: Tensor | None = ..., block_table: Tensor | None = ..., causal: Causal = ...,
    scale: float | None = ..., alibi_slopes: Tensor | None = ..., dropout_p: float = ...,
    window: Window | None = ..., softcap: float | None = ..., sinks: Tensor | None = ...,
    chunk: int | None = ..., chunk_start: Tensor | None = ...,
    deterministic: bool = ..., precision: str = ..., invariant: bool = ...,
    return_lse: Literal[False] = ...,
) -> Tensor: ...  # fmt: skip


@overload
def attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None,
    max_seqlen_q: int, max_seqlen_k: int, *, seqused_q: Tensor | None = ...,
    seqused_k: Tensor | None = ..., block_table: Tensor | None = ..., causal: Causal = ...,
    scale: float | None = ..., alibi_slopes: Tensor | None = ..., dropout_p: float = ...,
    window: Window | None = ..., softcap: float | None = ..., sinks: Tensor | None = ...,
    chunk: int | None = ..., chunk_start: Tensor | None = ...,
    deterministic: bool = ..., precision: str = ..., invariant: bool = ...,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


@hinting
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    causal: Causal = False,
    scale: float | None = None,
    alibi_slopes: Tensor | None = None,
    dropout_p: float = 0.0,
    window: Window | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    chunk: int | None = None,
    chunk_start: Tensor | None = None,
    deterministic: bool = True,
    precision: str = "ieee",
    invariant: bool = False,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention of packed sequences, each over its own keys alone.

    Sequence b has the places from cu_seqlens[b] to cu_seqlens[b + 1], none if they are equal. They
    are read by the device alone, and nothing there checks them. A causal diagonal, a window, chunks
    and ALiBi's distances are those of each sequence: bottom-right ones, but for causal="top_left".
    Differentiable, once, with respect to q, k, v and sinks.

    With block_table, page_size is a power of two, and key j of sequence b is in slot j % page_size
    of page block_table[b, j // page_size]. It has seqused_k[b] keys, or without them cu_seqlens_k[b
    + 1] - cu_seqlens_k[b]; of either no more than its row of pages holds. There is no dropout then,
    and the backward raises NotDifferentiable.

    Dropout draws by the index of an element in S of all places, (heads, places, places of keys), so
    neither the longest lengths nor the tiles change which are dropped.

    Args:
        q: (places, heads, head_dim).
        k: (places of keys, kv_heads, head_dim), or (pages, page_size, kv_heads, head_dim).
        v: as k, with head_dim_v.
        cu_seqlens_q: int32 or int64 (sequences + 1,), ascending from 0: where sequences begin.
        cu_seqlens_k: the same of keys; may be None with block_table and seqused_k.
        max_seqlen_q: no sequence has more queries: what lies beyond is not computed.
        max_seqlen_k: the same of keys.
        seqused_q: (sequences,), how many of its places a sequence uses; all unless given.
        seqused_k: the same of keys; with block_table, how many keys each sequence has.
        block_table: int32 (sequences, pages of a sequence): where the pages of each sequence are.
        causal: True or "bottom_right" (the last query sees the last key), "top_left", or False.
        scale: what scores are multiplied by; 1/sqrt(head_dim) unless given.
        alibi_slopes: float32 (heads,) or (sequences, heads), ALiBi.
        dropout_p: probability with which an element of P is dropped, with or without gradients.
        window: (left, right) keys a query sees beside its diagonal; None or -1 is no end.
        softcap: scores become softcap * tanh(score / softcap) before bias and masks; 0 is none.
        sinks: (heads,), float32 or of the dtype of q: one more score in each softmax.
        chunk: keys of a chunk; under a causal mask a query sees only its own (Llama 4).
        chunk_start: int32 (sequences,), the position at which chunk 0 begins; 0 unless given.
        deterministic: False admits a backward that adds dQ up in any order.
        precision: how float32 is multiplied, "ieee" or "tf32".
        invariant: bits of a row depend on its query and keys alone (docs/invariance.md).
        return_lse: whether LSE is returned too.

    Returns:
        O (places, heads, head_dim_v); with return_lse also LSE (heads, places), float32, natural
        logarithm. A query with no key has O = 0 and LSE = -inf, or its sink; a place that no
        sequence uses has O = 0, LSE = -inf and gradients of 0.

    Raises:
        InvalidArgument: naming the argument; it is a ValueError.

    Examples:
        >>> import torch, flashgen
        >>> q = torch.randn(5, 8, 64)
        >>> bounds = torch.tensor([0, 2, 5], dtype=torch.int32)
        >>> flashgen.attention_varlen(q, q, q, bounds, bounds, 3, 3, causal=True).shape
        torch.Size([5, 8, 64])
    """
    limits, kind = NO_LIMITS, None
    if window is not None or softcap is not None or invariant is not False:
        limits = limits_of(window, softcap, invariant, causal=causal is not False)
    calls = folders.current().calls
    heads = heads_given(sinks=sinks, alibi_slopes=alibi_slopes)
    others = cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, block_table, *heads
    longest = max_seqlen_q, max_seqlen_k
    more = dropout_p != 0.0 or chunk is not None or chunk_start is not None
    whole = type(max_seqlen_q) is int and type(max_seqlen_k) is int
    if whole and not more and not torch_modes.special(q):
        options = options_of(
            "attention_varlen", len(others), causal, scale, precision, limits, longest
        )
        kept, key = calls.find(options, q, k, v, *others)
        if key is not None:
            kind = kind_of_packed(longest, q, k, v, others, causal, scale, precision, limits)
            if kind is not None and (alike := calls.get(kind)) is not None:
                kept, kind = alike.packed(longest, (q, k, v, *others)), None
                calls.keep(key, kept)
        if kept is not None:
            found = kept.call(deterministic, q, k, v, *others)
            if found is not None:
                return found if return_lse else found[0]  # type: ignore[no-any-return]
    maybe = {
        "cu_seqlens_k": cu_seqlens_k, "seqused_q": seqused_q, "seqused_k": seqused_k,
        "block_table": block_table, "alibi_slopes": alibi_slopes, "sinks": sinks,
        "chunk_start": chunk_start,
    }  # fmt: skip
    named = {name: x for name, x in maybe.items() if x is not None}
    _check_tensors(q, k, v, named | {"cu_seqlens_q": cu_seqlens_q})
    if block_table is not None and dropout_p:
        raise InvalidArgument(f"dropout_p must be 0 with block_table: got {dropout_p}")
    diagonal_of(causal, 0, 0)
    traced = torch_modes.traced(q)
    packed = from_bounds(
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=seqused_q,
        seqused_k=seqused_k, block_table=block_table,
        page_size=1 if block_table is None else k.shape[1], bottom_right=causal != "top_left",
        zeros=None if traced else zeros,
    )  # fmt: skip
    if not traced:  # there the lengths may be symbols, and the operator looks at them
        packed = packed.within(q.shape[0], k.shape[0])
    call = Call(
        causal=causal, scale=scale, precision=precision, deterministic=deterministic,
        features=asked_features(
            q, causal=causal is not False, alibi_slopes=alibi_slopes, dropout_p=dropout_p,
            window=window, softcap=softcap, sinks=sinks, chunk=chunk, chunk_start=chunk_start,
            sequences=packed, invariant=invariant,
        ),
    )  # fmt: skip
    q, k, v = heads_first(q, k, v, paged=packed.paged)
    general = folders.current().general
    if traced:
        o, lse = general.serve(call, q, k, v)
    else:
        o, lse = general.serve_eager(call, q, k, v, key=kind)
    assert lse is not None  # return_lse
    o, lse = packed_again(o, lse)
    return (o, lse) if return_lse else o


def _check_tensors(q: Tensor, k: Tensor, v: Tensor, named: dict[str, Tensor]) -> None:
    """Raise InvalidArgument, naming the argument, unless all are plain tensors with the dimensions
    they must have.
    """
    check_tensors(q=q, k=k, v=v, **named)
    if not torch_modes.traced(q):
        check_plain(q=q, k=k, v=v, **named)
    of_keys = "(pages, page_size, kv_heads" if "block_table" in named else "(places, kv_heads"
    for name, x, shape in (("q", q, "(places, heads"), ("k", k, of_keys), ("v", v, of_keys)):
        if x.ndim != shape.count(",") + 2:
            raise InvalidArgument(
                f"{name} must have shape {shape}, head_dim): got {tuple(x.shape)}"
            )
    if torch_modes.transformed():
        raise InvalidArgument("attention_varlen must be called outside torch.func's transforms")
