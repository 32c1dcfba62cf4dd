"""Derives the spec and the problem of a call from its arguments.

torch is not imported: tensors are read by their attributes.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, get_args

from flashgen.errors import InvalidArgument, shown
from flashgen.inputs.features import PLAIN, Features, check_features, fields_of
from flashgen.inputs.tensors import check_device
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.problem import Problem
from flashgen.spec.vocabulary import DTYPE_BYTES, LONGEST, Precision, check_head_dim

if TYPE_CHECKING:
    from torch import Tensor


def diagonal_of(causal: bool | str, seq_q: int, seq_k: int) -> int | None:
    """The offset of the causal diagonal: query i sees key j where j <= i + offset; None without a
    mask.

    causal is True or "bottom_right" (the last query sees the last key), "top_left" (the first query
    sees only the first key) or False. Raises InvalidArgument for anything else.
    """
    if causal is False:
        return None
    if causal is True or (isinstance(causal, str) and causal == "bottom_right"):
        return seq_k - seq_q
    if isinstance(causal, str) and causal == "top_left":
        return 0
    raise InvalidArgument(
        f"causal must be True, False, 'top_left' or 'bottom_right': got {shown(causal)}"
    )


def check_scale(scale: float | None, head_dim: int) -> float:
    """The softmax scale: `scale`, or 1/sqrt(head_dim). Raises InvalidArgument unless it is a
    finite number. A head_dim below 1, which no kernel supports, is refused elsewhere.
    """
    if scale is None:
        return 1.0 / math.sqrt(max(1, head_dim))
    try:
        value = math.nan if isinstance(scale, str | bytes) else float(scale)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # of torch: more than one element
        value = math.nan
    if not math.isfinite(value):
        raise InvalidArgument(f"scale must be a finite number: got {shown(scale)}")
    if value and not 2.0**-120 <= abs(value) <= 2.0**120:  # times log2(e) it is a float32 too
        raise InvalidArgument(
            f"scale must be 0 or from 2^-120 to 2^120 in size: got {shown(scale)}"
        )
    return value


def check_heads(heads: int, kv_heads: int, q: str = "q", kv: str = "k and v") -> None:
    """Raise InvalidArgument unless the heads of K and V divide those of Q; q and kv are the
    argument names for errors.
    """
    if heads != kv_heads and (heads == 0 or kv_heads == 0 or heads % kv_heads):
        raise InvalidArgument(
            f"{q} must have a multiple of the heads of {kv}: got {heads} and {kv_heads}"
        )


def check_lengths(**lengths: int) -> None:
    """Raise InvalidArgument, naming the argument, for a sequence of more than LONGEST."""
    for name, length in lengths.items():
        if length > LONGEST:
            raise InvalidArgument(
                f"{name} must have at most {LONGEST} queries or keys a sequence: got {length}"
            )


def check_precision(precision: object) -> None:
    """Raise InvalidArgument for an unknown precision."""
    if not isinstance(precision, str) or precision not in get_args(Precision):
        raise InvalidArgument(f"precision must be ieee or tf32: got {shown(precision)}")


def from_tensors(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool | str,
    precision: str = "ieee",
    features: Features = PLAIN,
) -> tuple[AttentionSpec, Problem]:
    """The forward spec and the problem of tensors of shape (batch, heads, seq, head_dim).

    Raises InvalidArgument, naming the argument, for wrong ranks, sizes that disagree, mixed dtypes
    or devices, head counts that do not divide, unsupported head dims or dtypes, sequences longer
    than LONGEST, and features that do not fit. The sizes of packed sequences are their number and
    longest lengths.
    """
    packed = features.sequences
    _check_shapes(q, k, v, paged=packed is not None and packed.paged)
    if features is not PLAIN:
        check_features(features, q, k)
    batch, heads, seq_q, head_dim = q.shape
    _, kv_heads, seq_k, head_dim_v = v.shape
    check_heads(heads, kv_heads)
    dtype = str(q.dtype).removeprefix("torch.")
    if features.fp8 is not None:
        if dtype != "float8_e4m3fn":
            raise InvalidArgument(f"q must be float8_e4m3fn: got {dtype}")
        dtype = features.fp8.dtype
    if dtype not in DTYPE_BYTES:
        raise InvalidArgument(f"q must be float16, bfloat16 or float32: got {dtype}")
    check_head_dim(head_dim, "the head_dim of q")
    check_head_dim(head_dim_v, "the head_dim of v")
    diagonal_of(causal, 0, 0)
    check_precision(precision)
    spec = AttentionSpec(
        dtype=dtype,  # type: ignore[arg-type]  # narrowed by the look-up above
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        mask="none" if causal is False else "causal",
        precision=precision if dtype == "float32" else "ieee",  # type: ignore[arg-type]
        **fields_of(features.key),
    )
    if packed is not None:
        batch, seq_q, seq_k = packed.count, packed.max_q, packed.max_k
    check_lengths(q=seq_q, k=seq_k)
    problem = Problem(batch=batch, heads=heads, kv_heads=kv_heads, seq_q=seq_q, seq_k=seq_k)
    return spec, problem


def _check_shapes(q: Tensor, k: Tensor, v: Tensor, *, paged: bool) -> None:
    """Raise InvalidArgument unless q, k and v fit together; paged: k and v are pools of pages."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.ndim != 4:
            raise InvalidArgument(
                f"{name} must have shape (batch, heads, seq, head_dim): got {tuple(tensor.shape)}"
            )
        if tensor.dtype != q.dtype:
            raise InvalidArgument(f"{name} must have the dtype of q, {q.dtype}: got {tensor.dtype}")
        check_device(name, tensor, q)
        if tensor.shape[0] != (k if paged and name != "q" else q).shape[0]:
            raise InvalidArgument(
                f"{name} must have the {'pages of k' if paged else 'batch size of q'}, "
                f"{(k if paged else q).shape[0]}: got {tensor.shape[0]}"
            )
    if k.shape[1:3] != v.shape[1:3]:
        raise InvalidArgument(
            f"v must have the heads and length of k, {tuple(k.shape[1:3])}: "
            f"got {tuple(v.shape[1:3])}"
        )
    if k.shape[3] != q.shape[3]:
        raise InvalidArgument(f"k must have the head_dim of q, {q.shape[3]}: got {k.shape[3]}")
