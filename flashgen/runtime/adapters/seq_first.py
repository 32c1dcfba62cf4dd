"""Attention of tensors (batch, seq, heads, head_dim), or (tokens, heads, head_dim) of packed
sequences, of any head dim: what the drop-ins for flash_attn and xformers share.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from flashgen.errors import InvalidArgument
from flashgen.inputs.features import UNBOUNDED, Window, window_of
from flashgen.inputs.from_call import check_scale
from flashgen.runtime import folders
from flashgen.runtime.call import Causal, check_tensors
from flashgen.runtime.varlen import attention_varlen
from flashgen.spec.vocabulary import HEAD_DIM_STEP, MIN_HEAD_DIM

folders.current()  # torch.compile cannot trace its first call, which takes a lock


def check_dimensions(count: str, size: int, **named: Tensor) -> None:
    """Raise InvalidArgument, naming the argument, unless each is a tensor of so many dimensions;
    count: their number in words.
    """
    check_tensors(**named)
    for name, x in named.items():
        if x.ndim != size:
            raise InvalidArgument(f"{name} must have {count} dimensions: got {tuple(x.shape)}")


def unpacked(name: str, x: Tensor, places: str, parts: int) -> tuple[Tensor, ...]:
    """The parts of qkv or kv, (places, parts, heads, head_dim). Raises InvalidArgument."""
    check_tensors(**{name: x})
    at = places.count(",") + 1
    if x.ndim != at + 3 or x.shape[at] != parts:
        raise InvalidArgument(
            f"{name} must have shape ({places}, {parts}, heads, head_dim): got {tuple(x.shape)}"
        )
    return x.unbind(at)


def sides_of(window_size: Window | None) -> Window | None:
    """window_size as attention() takes a window. As FlashAttention 2 has it, a side is anything
    that is an integer, an element of numpy or a tensor too, and a negative one has no end.
    """
    if window_size is None:
        return None
    try:
        left, right = map(_side, window_size)
    except (TypeError, ValueError, RuntimeError):  # of torch: a tensor of several elements
        return window_size  # window_of() says what is wrong
    return left, right


def _side(side: int | None) -> int | None:
    if side is None or isinstance(side, bool):
        return side
    return max(UNBOUNDED, operator.index(side))


def window_within(window_size: Window | None, keys: int) -> Window | None:
    """A window over so many keys: a side that reaches as far has no end, as FlashAttention 2 has
    it, and None is a window without any. Raises InvalidArgument.
    """
    if _no_window(window_size):
        return None
    sides = window_of(sides_of(window_size))
    if sides is None:
        return None
    left, right = (UNBOUNDED if side >= keys else side for side in sides)
    return None if left == right == UNBOUNDED else (left, right)


def _no_window(window_size: Window | None) -> bool:
    """Whether it is one that calls have where nobody gave another."""
    return window_size is None or (type(window_size) is tuple and window_size == (-1, -1))


def cap_of(softcap: float | None) -> float | None:
    """None for the default, which is no cap; attention() judges all others."""
    return None if type(softcap) is float and softcap == 0.0 else softcap


def sinks_of(sinks: Tensor | None, q: Tensor) -> Tensor | None:
    """Sinks as attention() takes them: float32 where they have neither that dtype nor q's, which
    changes no value.
    """
    if not isinstance(sinks, Tensor) or sinks.dtype == getattr(q, "dtype", None):
        return sinks
    return sinks.float() if sinks.dtype in (torch.float16, torch.bfloat16) else sinks


def in_steps(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None
) -> tuple[Tensor, Tensor, Tensor, float | None]:
    """q, k and v (..., head dim) with zeros behind their elements up to a head dim that kernels
    have, as FlashAttention 2 pads them: a product with zeros adds nothing, and O's last elements
    are zeros, to be cut off. With the scale, which is of the head dim that was given.
    """
    dim, dim_v = q.shape[-1], v.shape[-1]
    if dim != k.shape[-1] or (_fits(dim) and _fits(dim_v)):
        return q, k, v, scale
    return _padded(q), _padded(k), _padded(v), check_scale(scale, dim) if scale is None else scale


def _fits(dim: int) -> bool:
    """Whether it needs no padding; of no element it is another's to say."""
    return dim % HEAD_DIM_STEP == 0 and (dim >= MIN_HEAD_DIM or dim == 0)


def _padded(x: Tensor) -> Tensor:
    dim = x.shape[-1]
    wanted = max(MIN_HEAD_DIM, -(-dim // HEAD_DIM_STEP) * HEAD_DIM_STEP)
    return x if _fits(dim) else pad(x, (0, wanted - dim))


def attend_dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: Causal,
    scale: float | None,
    window_size: Window | None,
    softcap: float | None,
    deterministic: bool,
    dropout_p: float = 0.0,
    **features: Any,
) -> tuple[Tensor, Tensor]:
    """O (batch, seq_q, heads, head_dim_v) and LSE (batch, heads, seq_q) of tensors in this
    package's layout, of any head dim; features: as of attention(), sinks of any dtype.
    """
    serving, cap = folders.current(), cap_of(softcap)
    plain = _no_window(window_size) and cap is None and dropout_p == 0.0
    plain = plain and all(x is None or x is False for x in features.values())
    if plain and type(q) is type(k) is type(v) is Tensor and q.ndim == k.ndim == v.ndim == 4:
        found = serving.again(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), causal, scale, deterministic
        )
        if found is not None:
            return found[0].transpose(1, 2), found[1]
    check_dimensions("four", 4, q=q, k=k, v=v)
    dim_v = v.shape[3]
    q, k, v, scale = in_steps(q, k, v, scale)
    features["sinks"] = sinks_of(features.get("sinks"), q)
    o, lse = serving.attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), causal=causal, scale=scale,
        window=window_within(window_size, k.shape[1]), softcap=cap, dropout_p=dropout_p,
        deterministic=deterministic, return_lse=True, **features,
    )  # fmt: skip
    o = o.transpose(1, 2)
    return (o if o.shape[3] == dim_v else o[..., :dim_v]), lse


def attend_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *bounds: Any,
    scale: float | None,
    window_size: Window | None,
    block_table: Tensor | None,
    sinks: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """O (total_q, heads, head_dim_v) and LSE (heads, total_q), of any head dim but over pages, a
    copy of which would cost more than it serves; bounds and options: as of attention_varlen().
    """
    dim_v = None
    if block_table is None:
        check_dimensions("three", 3, q=q, k=k, v=v)
        dim_v = v.shape[2]
        q, k, v, scale = in_steps(q, k, v, scale)
    o, lse = attention_varlen(
        q, k, v, *bounds, block_table=block_table, scale=scale, window=sides_of(window_size),
        sinks=sinks_of(sinks, q), return_lse=True, **options,
    )  # fmt: skip
    return (o if dim_v in (None, o.shape[2]) else o[..., :dim_v]), lse
