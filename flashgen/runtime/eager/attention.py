"""Attention in torch operations, all of S at once. Serves CPU tensors; in float64, the oracle.

Tensors are (batch, heads, seq, head_dim); K and V may have fewer heads than Q, as long as they
divide.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from flashgen.inputs.features import PLAIN, Features, as_kernels_add
from flashgen.runtime.block_mask import dense
from flashgen.runtime.eager.visibility import keep_mask, own_positions, places


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    diagonal: int | None,
    features: Features = PLAIN,
) -> tuple[Tensor, Tensor]:
    """Standard attention, softmax(scale * Q K^T + bias) V, computed in the dtype of its inputs (at
    least float32).

    Query i sees key j where j <= i + diagonal; None sees all. Returns O (B, H, Sq, d_v) and LSE (B,
    H, Sq), natural logarithm. A row with nothing to attend has O = 0 and LSE = -inf, or its sink.
    """
    q, k, v = (x if x.dtype == torch.float64 else x.float() for x in (q, k, v))
    q, k, v = descaled(q, k, v, features)
    p, row_sum, lse = softmax_parts(q, k, scale, diagonal, features)
    values = per_query_head(v, q.shape[1])
    o = in_order(p, values) if features.invariant else dropped(p, features) @ values
    return o / torch.where(row_sum == 0, 1.0, row_sum), lse


def in_order(a: Tensor, b: Tensor) -> Tensor:
    """A B of (..., m, k) and (..., k, n), summed over k from the first on, element by element: BLAS
    divides the sums as the shapes decide. A key that a row does not see adds 0.
    """
    found = a.new_zeros((*a.shape[:-1], b.shape[-1]))
    for i in range(a.shape[-1]):
        found += a[..., i : i + 1] * b[..., i : i + 1, :]
    return found


def products(q: Tensor, k: Tensor, scale: float, features: Features) -> Tensor:
    """Scale * Q K^T, (B, H, Sq, Sk): scores before all that features do to them."""
    keys = per_query_head(k, q.shape[1]).transpose(-1, -2)
    return scale * (in_order(q, keys) if features.invariant else q @ keys)


def scores(q: Tensor, k: Tensor, scale: float, diagonal: int | None, features: Features) -> Tensor:
    """Scale * Q K^T, capped, with bias and ALiBi, (B, H, Sq, Sk), -inf where a query may not
    attend.
    """
    s = products(q, k, scale, features)
    if features.softcap > 0.0:
        s = features.softcap * torch.tanh(s / features.softcap)
    seq_q, seq_k = s.shape[-2:]
    at = places(seq_q, seq_k, diagonal, s.device, features.sequences)
    if features.bias is not None:
        if features.bias.dtype is torch.bool:
            s = s.masked_fill(~features.bias, float("-inf"))
        else:
            s = s + as_kernels_add(features.bias.to(s.dtype))
    if features.slopes is not None:
        s = s - at.slopes(features.slopes.to(s.dtype)) * (at.rows - at.keys).abs()
    for mask in at.seen(features, causal=diagonal is not None):
        s = s.masked_fill(~mask, float("-inf"))
    if features.block_mask is not None:
        s = s.masked_fill(~dense(features.block_mask), float("-inf"))
    return s


def slope(q: Tensor, k: Tensor, scale: float, features: Features) -> Tensor | float:
    """The derivative of scores() by scale * Q K^T, (B, H, Sq, Sk); 1 without a cap."""
    if features.softcap == 0.0:
        return 1.0
    tanh: Tensor = torch.tanh(products(q, k, scale, features) / features.softcap)
    return 1.0 - tanh.square()


def descaled(q: Tensor, k: Tensor, v: Tensor, features: Features) -> tuple[Tensor, Tensor, Tensor]:
    """Q, K and V, floating, times the factors of an fp8 call."""
    if features.fp8 is None:
        return q, k, v
    of_q, of_k, of_v = (x.to(q.dtype)[..., None, None] for x in features.fp8.factors)
    return q * per_query_head(of_q, q.shape[1]), k * of_k, v * of_v


def dropped(p: Tensor, features: Features) -> Tensor:
    """P (B, H, Sq, Sk) after dropout: elements that are not kept 0, the others scaled."""
    if features.dropout_p == 0.0:
        return p
    return p * keep_mask(features, *p.shape) * features.keep_scale


def softmax_parts(
    q: Tensor, k: Tensor, scale: float, diagonal: int | None, features: Features
) -> tuple[Tensor, Tensor, Tensor]:
    """exp(S - max) (B, H, Sq, Sk), its row sums (B, H, Sq, 1), and LSE (B, H, Sq).

    The maximum is that of the keys' scores, so that P is as large, and as precise, beside a sink as
    without one; the row sums are then inf where the sink leaves nothing to the keys.
    """
    s = scores(q, k, scale, diagonal, features)
    if s.shape[-1] == 0:
        p, row_max = s, s.new_zeros((*s.shape[:-1], 1))
    else:
        row_max = s.amax(-1, keepdim=True)
        row_max = torch.where(row_max == float("-inf"), 0.0, row_max)
        p = torch.exp(s - row_max)
    # Of an invariant call one after the other; sum() divides a row by its length.
    in_turn = features.invariant and p.shape[-1] > 0
    row_sum = p.cumsum(-1)[..., -1:] if in_turn else p.sum(-1, keepdim=True)
    unseen = row_sum == 0
    lse = torch.where(unseen, float("-inf"), row_max + torch.where(unseen, 1.0, row_sum).log())
    if features.sinks is not None:
        sinks = as_kernels_add(features.sinks.to(s.dtype))[:, None, None]
        # As a softmax with the sink among the scores: inf minus inf.
        sinks = sinks.masked_fill(sinks == float("inf"), float("nan"))
        row_sum = row_sum + torch.exp(sinks - row_max)
        lse = _log_of_sum(lse, sinks) if features.invariant else torch.logaddexp(lse, sinks)
        if features.sequences is not None:  # a row of no sequence has no sink either
            owned = own_positions(features.sequences, "q", s.shape[-2], s.device)[1] >= 0
            lse = torch.where(owned[:, None], lse, float("-inf"))
    return p, row_sum, lse.squeeze(-1)


def _log_of_sum(a: Tensor, b: Tensor) -> Tensor:
    """torch.logaddexp(a, b), which rounds the last elements of a tensor in another way."""
    most = torch.maximum(a, b)
    most = torch.where(most == float("-inf"), 0.0, most)
    return most + torch.log(torch.exp(a - most) + torch.exp(b - most))


def per_query_head(x: Tensor, heads: int) -> Tensor:
    """K or V with each head repeated for the query heads that share it."""
    if x.shape[1] == heads or heads == 0:
        return x
    return x.repeat_interleave(heads // x.shape[1], dim=1)


def operand(x: Tensor, precision: str) -> Tensor:
    """X in float32 as an operand of a product: rounded to tf32 if that is the precision."""
    return round_to_tf32(x.float()) if precision == "tf32" else x.float()


def round_to_tf32(x: Tensor) -> Tensor:
    """float32 values rounded to tf32, 10 stored bits of mantissa, to nearest, ties away from
    zero.
    """
    bits = x.contiguous().view(torch.int32)
    return ((bits + 0x1000) & ~0x1FFF).view(torch.float32)


@contextlib.contextmanager
def float32_products() -> Iterator[None]:
    """Full float32 matrix products for the floor, whatever the process allows."""
    allowed = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(allowed)
