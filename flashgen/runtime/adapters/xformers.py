"""Drop-in for the memory_efficient_attention of xformers: the same arguments, order, defaults,
layouts and meaning, and the biases of xformers.ops.fmha.attn_bias.

    from flashgen.runtime import xformers as xops

    o = xops.memory_efficient_attention(q, k, v, attn_bias=LowerTriangularMask())

xformers itself is never imported: a bias is known by the name of its class, and read by these
attributes of xformers 0.0.35: q_seqinfo and k_seqinfo, with seqstart, seqstart_py, max_seqlen and,
of keys with room between them, seqlen and seqlen_py; _window_size, or window_left and window_right;
_bias; block_tables and page_size. A class of another name, a subclass too, is refused. A query that
sees no key has O = 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from flashgen.errors import InvalidArgument, one_line, shown
from flashgen.inputs.features import Window
from flashgen.runtime.adapters.seq_first import attend_dense, attend_packed
from flashgen.runtime.call import PLAIN_TYPES, Causal
from flashgen.runtime.derived import hands_on

Read = TypeVar("Read")

DENSE: dict[str, Causal] = {
    "LowerTriangularMask": "top_left",
    "LowerTriangularMaskWithTensorBias": "top_left",
    "LowerTriangularFromBottomRightMask": True,
    "LowerTriangularFromBottomRightLocalAttentionMask": True,
    "LocalAttentionFromBottomRightMask": False,
}
"""Biases of whole batches, and their causal diagonals."""

PACKED: dict[str, Causal] = {
    "BlockDiagonalMask": False,
    "BlockDiagonalCausalMask": "top_left",
    "BlockDiagonalCausalFromBottomRightMask": True,
    "BlockDiagonalCausalLocalAttentionMask": "top_left",
    "BlockDiagonalCausalLocalAttentionFromBottomRightMask": True,
    "BlockDiagonalPaddedKeysMask": False,
    "BlockDiagonalCausalWithOffsetPaddedKeysMask": True,
    "BlockDiagonalLocalAttentionPaddedKeysMask": False,
    "BlockDiagonalCausalLocalAttentionPaddedKeysMask": True,
    "BlockDiagonalGappyKeysMask": False,
    "BlockDiagonalCausalWithOffsetGappyKeysMask": True,
    "PagedBlockDiagonalPaddedKeysMask": False,
    "PagedBlockDiagonalCausalWithOffsetPaddedKeysMask": True,
}
"""Biases of sequences of several lengths in a batch of one, and the causal diagonals of each."""


def memory_efficient_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Any = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: Any = None,
    output_dtype: torch.dtype | None = None,
) -> Tensor:
    """softmax(scale * Q K^T + attn_bias) V, as of xformers.ops. Differentiable with respect to
    query, key, value and a tensor of biases, but not over pages.

    Tensors have 4 dimensions, or 5 whose third one counts groups of heads, of which key and value
    may be expanded, or 3 with one head.

    Args:
        query: (batch, seq_q, heads, d), (batch, seq_q, groups, heads, d) or (batch, seq_q, d).
        key: (batch, seq_k, ...), the rest as of query.
        value: (batch, seq_k, ..., d_v), the rest as of query.
        attn_bias: None, a bias of xformers, or floating (batch, heads, seq_q, seq_k), added.
        p: the probability with which an element of P is dropped.
        scale: what scores are multiplied by; 1/sqrt(d) unless given.
        op: which kernels xformers would run; changes nothing.
        output_dtype: None, or the dtype of query.

    Returns:
        O (batch, seq_q, ..., d_v), the rest as of query.

    Raises:
        InvalidArgument: naming the argument; it is a ValueError and a NotImplementedError.

    Examples:
        >>> import torch
        >>> from flashgen.runtime import xformers
        >>> q = torch.randn(2, 16, 8, 64)
        >>> xformers.memory_efficient_attention(q, q, q).shape
        torch.Size([2, 16, 8, 64])
    """
    try:
        return _attend(query, key, value, attn_bias, p, scale, output_dtype)
    except InvalidArgument as error:
        raise Refused(*error.args) from error


class Refused(InvalidArgument, NotImplementedError):
    """What xformers raises a ValueError for, or a NotImplementedError where no operator has it."""


def _attend(
    query: Tensor, key: Tensor, value: Tensor, attn_bias: Any, p: float, scale: float | None,
    output_dtype: torch.dtype | None,
) -> Tensor:  # fmt: skip
    _check_tensors(query, key, value)
    name = _check_options(query, attn_bias, p, output_dtype)
    q, k, v = _heads_together(query, key, value)
    options: dict[str, Any] = {
        "scale": scale, "dropout_p": p, "window_size": _read(_window_of, attn_bias),
        "deterministic": False,
    }  # fmt: skip
    if name in PACKED:
        o = _attend_packed(q, k, v, attn_bias, causal=PACKED[name], **options)
    else:
        bias = attn_bias if isinstance(attn_bias, Tensor) else getattr(attn_bias, "_bias", None)
        if bias is not None:
            bias = _bias_of_four(bias, query, key)
        causal = DENSE.get(name, False)
        o, _ = attend_dense(q, k, v, causal=causal, bias=bias, softcap=None, **options)
    return o.reshape(*query.shape[:-1], value.shape[-1])


@hands_on(memory_efficient_attention, "query")
def memory_efficient_attention_forward(query: Tensor, **rest: Any) -> Tensor:
    """memory_efficient_attention() without gradients, as of xformers.ops.

    Args:
        query: as of memory_efficient_attention.
        **rest: as of memory_efficient_attention.

    Returns:
        O, which requires no gradient.

    Raises:
        InvalidArgument: naming the argument; it is a ValueError.

    Examples:
        >>> import torch
        >>> from flashgen.runtime import xformers
        >>> q = torch.randn(2, 16, 8, 64)
        >>> xformers.memory_efficient_attention_forward(q, q, q).shape
        torch.Size([2, 16, 8, 64])
    """
    with torch.no_grad():
        return memory_efficient_attention(query, **rest)


def _check_tensors(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Raise InvalidArgument unless all are plain tensors that fit each other: nothing is broadcast,
    and 8 bits in integers, or with scales beside them, are another's to read.
    """
    for name, x in (("query", query), ("key", key), ("value", value)):
        if type(x) not in PLAIN_TYPES:
            raise InvalidArgument(f"{name} must be a plain tensor: got {type(x).__name__}")
        if x.ndim != query.ndim or not 3 <= x.ndim <= 5:
            raise InvalidArgument(
                f"{name} must have 3, 4 or 5 dimensions, as many as query: got {tuple(x.shape)}"
            )
        if x.dtype != query.dtype or x.device != query.device:
            raise InvalidArgument(
                f"{name} must be {query.dtype} on {query.device} as query is: "
                f"got {x.dtype} on {x.device}"
            )
    batch, _, *heads, dim = query.shape
    wanted = (batch, key.shape[1], *heads)
    if key.shape != (*wanted, dim):
        raise InvalidArgument(f"key must have shape {(*wanted, dim)}: got {tuple(key.shape)}")
    if value.shape[:-1] != wanted:
        raise InvalidArgument(
            f"value must have shape {wanted} before its head dim: got {tuple(value.shape)}"
        )


def _check_options(query: Tensor, bias: Any, p: float, output_dtype: torch.dtype | None) -> str:
    """The name of a bias's class. Raises InvalidArgument for what is not served."""
    if not 0.0 <= p < 1.0:
        raise InvalidArgument(f"p must be from 0 to below 1: got {p}")
    if output_dtype not in (None, query.dtype):
        raise InvalidArgument(
            f"output_dtype must be None or that of query, {query.dtype}: got {shown(output_dtype)}"
        )
    name = type(bias).__name__
    if bias is None or isinstance(bias, Tensor):
        return name
    if name not in DENSE and name not in PACKED:
        raise InvalidArgument(
            f"attn_bias must be None, a floating tensor, or one of {', '.join((*DENSE, *PACKED))}: "
            f"got {name}, which flashgen does not serve"
        )
    if query.ndim == 3 and name != "LowerTriangularMask":
        raise InvalidArgument(f"query must have 4 or 5 dimensions with {name}: got 3")
    return name


def _heads_together(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """All as (batch, seq, heads, head_dim). Groups whose heads are one head of K and V, expanded,
    become grouped heads, but where K or V needs a gradient, of which each head has its own.
    """
    if query.ndim == 3:
        return query[:, :, None], key[:, :, None], value[:, :, None]
    if query.ndim == 4:
        return query, key, value
    trains = torch.is_grad_enabled() and (key.requires_grad or value.requires_grad)
    expanded = key.shape[3] > 1 and key.stride(3) == value.stride(3) == 0
    if expanded and not trains:
        return query.flatten(2, 3), key[:, :, :, 0], value[:, :, :, 0]
    return query.flatten(2, 3), key.flatten(2, 3), value.flatten(2, 3)


def _window_of(bias: Any) -> Window | None:
    """(left, right) keys beside the diagonal that a bias shows; None for all."""
    if isinstance(bias, Tensor):
        return None
    if (size := getattr(bias, "_window_size", None)) is not None:
        return size - 1, 0
    left = getattr(bias, "window_left", None)
    return None if left is None else (left, bias.window_right)


def _bias_of_four(bias: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """What is added to the scores (batch, heads, seq_q, seq_k). Raises InvalidArgument."""
    batch, rows, *heads, _ = query.shape
    if bias.dtype not in (query.dtype, torch.float32):
        raise InvalidArgument(
            f"attn_bias must be {query.dtype} or torch.float32, for it is added: got {bias.dtype}"
        )
    wanted = (batch, *heads, rows, key.shape[1])
    if bias.shape != wanted:
        raise InvalidArgument(f"attn_bias must have shape {wanted}: got {tuple(bias.shape)}")
    return bias[:, None] if not heads else bias.flatten(1, -3)


def _read(reader: Callable[..., Read], bias: Any, *tensors: Tensor) -> Read:
    """What a reader finds in a bias. Raises InvalidArgument where a field holds something else than
    its class has there.
    """
    try:
        return reader(bias, *tensors)
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
        if isinstance(error, InvalidArgument):
            raise
        raise InvalidArgument(
            f"attn_bias must have the fields of {type(bias).__name__} as xformers makes them: got "
            f"others ({one_line(error)})"
        ) from error


def _attend_packed(
    q: Tensor, k: Tensor, v: Tensor, bias: Any, *, causal: Causal, **options: Any
) -> Tensor:
    """O (1, places, heads, head_dim_v) of the sequences of a bias. Raises InvalidArgument."""
    k, v, where = _read(_where, bias, q, k, v)
    o, _ = attend_packed(q[0], k, v, **where, causal=causal, **options)
    return o[None]


def _where(bias: Any, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """K and V as packed sequences or as pages, and where they are, as arguments of attend_packed().
    Raises InvalidArgument.
    """
    name = type(bias).__name__
    if not q.shape[0] == k.shape[0] == 1:
        raise InvalidArgument(f"query must have a batch of 1 with {name}: got {q.shape[0]}")
    queries, keys = bias.q_seqinfo, bias.k_seqinfo
    for where in (queries.seqstart, keys.seqstart):
        if where.device != q.device:
            raise InvalidArgument(
                f"attn_bias must be on {q.device} as query is: got {where.device}; use its to()"
            )
    _check_places("query", queries, q.shape[1])
    k, v = k[0], v[0]
    bounds, table, used = keys.seqstart, None, getattr(keys, "seqlen", None)
    if name.startswith("Paged"):
        bounds, table = None, bias.block_tables.int()
        _check_pages(bias, len(k))
        k, v = (x.view(-1, bias.page_size, *x.shape[1:]) for x in (k, v))
    else:
        _check_places("key", keys, len(k))
        if first := keys.seqstart_py[0]:  # a gap before all keys
            k, v, bounds = k[first:], v[first:], bounds - first
    return k, v, {
        "cu_seqlens_q": queries.seqstart, "cu_seqlens_k": bounds,
        "max_seqlen_q": queries.max_seqlen, "max_seqlen_k": keys.max_seqlen, "seqused_k": used,
        "block_table": table,
    }  # fmt: skip


def _check_places(name: str, sequences: Any, places: int) -> None:
    """Raise InvalidArgument unless sequences lie one behind the other among so many places. The
    numbers are those of the host, so that nothing waits for the device.
    """
    starts = sequences.seqstart_py
    lengths = getattr(sequences, "seqlen_py", None)
    ends = starts[1:] if lengths is None else [a + n for a, n in zip(starts, lengths, strict=False)]
    within = starts[0] >= 0 and starts[-1] <= places
    if not within or any(end > after for end, after in zip(ends, starts[1:], strict=True)):
        raise InvalidArgument(
            f"attn_bias must have its sequences one behind the other in the {places} places of "
            f"{name}: got starts {shown(starts)} and ends {shown(ends)}"
        )


def _check_pages(bias: Any, places: int) -> None:
    """Raise InvalidArgument unless places of keys are whole pages, and a row of the table has pages
    for all keys of a sequence. Which pages there are is the device's to know.
    """
    size, longest = bias.page_size, max(bias.k_seqinfo.seqlen_py, default=0)
    if size < 1 or places % size:
        raise InvalidArgument(f"key must have whole pages of {size} places: got {places} places")
    if longest > bias.block_tables.shape[1] * size:
        raise InvalidArgument(
            f"attn_bias must have pages for all keys of a sequence: got {longest} keys and "
            f"{bias.block_tables.shape[1]} pages of {size}"
        )
