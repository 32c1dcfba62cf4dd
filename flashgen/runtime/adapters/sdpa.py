"""torch.nn.functional.scaled_dot_product_attention by flashgen's kernels: the same arguments, in
the same order, with the same meaning.

What no kernel takes is left to torch's own function, which is said once for each reason: CPU
tensors (unless interpreted) and those of other devices than CUDA's, other dtypes, head dims that
are not multiples of 8 from 16 to 512 (float32: 256), more than four dimensions, batches or heads
that broadcast, nested and sparse tensors, subclasses of Tensor beside a plain query, and what torch
refuses: a call that mixes devices or dtypes, a mask of odd dimensions, enable_gqa without heads.
Dtypes are judged as autocast leaves them, which casts a floating mask too. Shapes that contradict
each other are refused by name, before a call is left to torch.

As torch's own flash attention, the backward repeats its bits only under
torch.use_deterministic_algorithms(True), which autograd.py looks at when the backward runs.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as of_torch

from flashgen.errors import InvalidArgument
from flashgen.inputs.features import check_invariant
from flashgen.inputs.from_call import check_heads
from flashgen.inputs.tensors import broadcasts, check_device
from flashgen.runtime import folders, torch_modes
from flashgen.runtime.call import PLAIN_TYPES, Causal
from flashgen.spec.vocabulary import (
    DTYPE_BYTES,
    HEAD_DIM_STEP,
    MAX_BACKWARD_HEAD_DIM,
    MIN_HEAD_DIM,
)

folders.current()  # torch.compile cannot trace its first call, which takes a lock

logger = logging.getLogger("flashgen.runtime")

_said: set[str] = set()


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    invariant: bool = False,
) -> Tensor:
    """Torch's function of this name: softmax(scale * Q K^T + mask) V.

    Args:
        query: (..., seq_q, head_dim).
        key: (..., seq_k, head_dim).
        value: (..., seq_k, head_dim_v).
        attn_mask: to (..., seq_q, seq_k): bool, True may attend; or floating, added.
        dropout_p: the probability with which an element of P is dropped.
        is_causal: the first query sees the first key alone.
        scale: what scores are multiplied by; 1/sqrt(head_dim) unless given.
        enable_gqa: the heads of key and value divide those of query.
        invariant: as of attention (docs/invariance.md); what torch would serve is refused.

    Returns:
        O (..., seq_q, head_dim_v).

    Raises:
        InvalidArgument: naming the argument; it is a ValueError.

    Examples:
        >>> import torch
        >>> from flashgen.runtime import sdpa
        >>> q = torch.randn(1, 2, 8, 64)
        >>> sdpa.scaled_dot_product_attention(q, q, q, is_causal=True).shape
        torch.Size([1, 2, 8, 64])
    """
    return attend(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa,
        deterministic=False, invariant=invariant,
    )  # fmt: skip


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    *,
    scale: float | None,
    enable_gqa: bool,
    deterministic: bool,
    invariant: bool = False,
) -> Tensor:
    """scaled_dot_product_attention, of which torch's own has no argument deterministic."""
    check_invariant(invariant)
    for name, x in (("query", query), ("key", key), ("value", value), ("attn_mask", attn_mask)):
        if not isinstance(x, Tensor) and (x is not None or name != "attn_mask"):
            raise InvalidArgument(f"{name} must be a tensor: got {type(x).__name__}")
    if not _nested(query, key, value, attn_mask):
        plain = attn_mask is None and dropout_p == 0.0 and invariant is False
        same = enable_gqa or query.shape[-3:-2] == key.shape[-3:-2]
        if plain and same and (is_causal is True or is_causal is False):
            causal: Causal = "top_left" if is_causal else False
            found = folders.current().again(query, key, value, causal, scale, deterministic)
            if found is not None:  # what attention() kept has passed all checks below
                return found[0]
        _check_shapes(query, key, value, attn_mask, enable_gqa)
    reason: str | None = "is_causal that is no bool"  # torch refuses it
    if torch.compiler.is_compiling() or isinstance(is_causal, bool):
        if is_causal and attn_mask is not None:
            raise InvalidArgument("attn_mask must be None where is_causal is True: got both")
        reason = _why_not(query, key, value, attn_mask, enable_gqa, invariant)
    if reason is not None:
        if invariant:
            raise InvalidArgument(f"invariant must be False for what torch serves: got {reason}")
        _say(reason)
        return of_torch(
            query,
            key,
            value,
            attn_mask,
            dropout_p,
            is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
        )
    missing = 4 - query.ndim
    q, k, v = (x[(None,) * missing] for x in (query, key, value))
    if attn_mask is not None:
        _check_mask(attn_mask, query)
        attn_mask = torch_modes.autocast(attn_mask)
    o: Tensor = folders.current().attention(
        q,
        k,
        v,
        causal="top_left" if is_causal else False,
        scale=scale,
        bias=attn_mask,
        dropout_p=dropout_p,
        deterministic=deterministic,
        invariant=invariant,
    )
    return o[(0,) * missing] if missing else o


def _nested(*tensors: Tensor | None) -> bool:
    """Whether one of them is nested: its shape says little."""
    return any(x is not None and x.is_nested for x in tensors)


def _check_shapes(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, enable_gqa: bool) -> None:
    """Raise InvalidArgument, in torch's names, unless shapes agree, of calls that are left to torch
    too: on a CPU torch 2.13 reads past the end of key or value where their lengths differ.
    """
    if min(q.ndim, k.ndim, v.ndim) < 2:  # torch refuses these
        return
    if k.shape[-1] != q.shape[-1]:
        raise InvalidArgument(
            f"key must have the head dim of query, {q.shape[-1]}: got {k.shape[-1]}"
        )
    if v.shape[-2] != k.shape[-2]:
        raise InvalidArgument(
            f"value must have the length of key, {k.shape[-2]}: got {v.shape[-2]}"
        )
    lead = q.shape[:-2]
    if not lead == k.shape[:-2] == v.shape[:-2]:
        grouped = enable_gqa and q.ndim > 2
        _check_leading(q, k, v, grouped)
        if not grouped:
            lead = torch.broadcast_shapes(lead, k.shape[:-2], v.shape[:-2])  # type: ignore[no-untyped-call]
    if mask is not None and mask.ndim >= 2:
        scores = *lead, q.shape[-2], k.shape[-2]
        if not broadcasts(mask.shape, scores):
            raise InvalidArgument(
                f"attn_mask must be broadcastable to {scores}: got {tuple(mask.shape)}"
            )


def _check_leading(q: Tensor, k: Tensor, v: Tensor, enable_gqa: bool) -> None:
    """Raise InvalidArgument unless batches and heads agree, or broadcast."""
    end = -3 if enable_gqa else -2
    for name, x, other, y in (
        ("key", k, "query", q), ("value", v, "query", q), ("value", v, "key", k)
    ):  # fmt: skip
        heads, kv_heads = q.shape[-3:-2], x.shape[-3:-2]  # none of two dimensions
        both = heads and kv_heads
        if both and enable_gqa:
            check_heads(heads[0], kv_heads[0], "query", "key and value")
        elif both and heads != kv_heads and name == "key" and 1 not in (*heads, *kv_heads):
            raise InvalidArgument(
                "enable_gqa must be True where key has other heads than query: "
                f"got {kv_heads[0]} and {heads[0]}"
            )
        pairs = zip(reversed(x.shape[:end]), reversed(y.shape[:end]), strict=False)
        if any(a != b and 1 not in (a, b) for a, b in pairs):
            raise InvalidArgument(
                f"{name} must have the batch and heads of {other}, {tuple(y.shape[:-2])}, or some "
                f"that broadcast with them: got {tuple(x.shape[:-2])}"
            )


def _check_mask(mask: Tensor, q: Tensor) -> None:
    """Raise InvalidArgument unless dtype and device of the mask are those of one for q."""
    if mask.dtype is not torch.bool and not mask.is_floating_point():
        raise InvalidArgument(f"attn_mask must be bool or floating: got {mask.dtype}")
    check_device("attn_mask", mask, q, "query")


def _why_not(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, enable_gqa: bool, invariant: bool
) -> str | None:
    """Why torch serves this call; None where a kernel does, or attention() on CPU tensors, which is
    invariant there.
    """
    judged = not (torch.compiler.is_compiling() or invariant)
    if judged and folders.current().resolver.left_to_torch(q.device):
        return "CPU tensors"
    return why_torch_serves(q, k, v, mask, enable_gqa=enable_gqa)


def why_torch_serves(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *, enable_gqa: bool = True
) -> str | None:
    """Why no kernel of flashgen takes such tensors; None where one does."""
    return (
        _why_not_of_kind(q, k, v, mask)
        or _why_not_of_shape(q, k, v, mask, enable_gqa)
        or _why_not_of_dtype(q, k, v, mask)
    )


def _why_not_of_kind(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> str | None:
    every = (q, k, v) if mask is None else (q, k, v, mask)
    if any(x.is_nested for x in every):
        return "nested tensors"
    if any(x.layout is not torch.strided for x in every):
        return "sparse tensors"
    if q.device.type not in ("cpu", "cuda"):
        return f"tensors on device {q.device}"
    if not q.device == k.device == v.device:
        return "tensors of several devices"
    if type(q) in PLAIN_TYPES:
        for x in (k, v, mask):
            if x is not None and type(x) not in PLAIN_TYPES:
                return f"a plain query beside {type(x).__name__}"
    return None


def _why_not_of_shape(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, enable_gqa: bool
) -> str | None:
    if not q.ndim == k.ndim == v.ndim or not 2 <= q.ndim <= 4:
        return "tensors of other than two to four dimensions"
    if enable_gqa and q.ndim < 3:  # torch refuses these
        return "enable_gqa without heads"
    if mask is not None and mask.ndim < 2:
        return "a mask of fewer than two dimensions"
    heads, kv_heads = q.shape[-3:-2], k.shape[-3:-2]  # none of two dimensions
    lone = heads != kv_heads and 1 in (*heads, *kv_heads) and not enable_gqa
    if lone or q.shape[:-3] != k.shape[:-3] or k.shape[:-2] != v.shape[:-2]:
        return "batches or heads that broadcast"
    return None


def _why_not_of_dtype(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> str | None:
    dtypes = [torch_modes.autocast_dtype(x) for x in (q, k, v)]
    if _name(dtypes[0]) not in DTYPE_BYTES:
        return f"dtype {_name(dtypes[0])}"
    if not dtypes[0] == dtypes[1] == dtypes[2]:
        return "tensors of several dtypes"
    most = MAX_BACKWARD_HEAD_DIM[DTYPE_BYTES[_name(dtypes[0])]]
    for dim in (q.shape[-1], v.shape[-1]):
        if dim % HEAD_DIM_STEP or not MIN_HEAD_DIM <= dim <= most:
            return f"head dim {dim}"
    if mask is not None and mask.device == q.device and mask.is_floating_point():
        dtype = torch_modes.autocast_dtype(mask)
        if dtype not in (dtypes[0], torch.float32):  # torch refuses it
            return f"a mask of dtype {_name(dtype)}"
    return None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _say(reason: str) -> None:
    if not torch.compiler.is_compiling() and reason not in _said:
        _said.add(reason)
        logger.info("torch's own scaled_dot_product_attention serves %s", reason)
