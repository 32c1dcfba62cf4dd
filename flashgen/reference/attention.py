"""The reference of all checks: attention in float64, the floor, and the comparison.

Uses only torch, no flashgen kernel. Tensors are (batch, heads, seq, head_dim); K and
V may have fewer heads than Q, as long as they divide.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from flashgen.reference.block_masks import dense
from flashgen.reference.visibility import keep_mask, own_positions, places
from flashgen.spec.features import MASKED_BELOW, PLAIN, Features

FLOORS_ACCEPTED = 2.0
LSE_TOLERANCE = 2.0**-16
FP8_LSE_TOLERANCE = 2.0**-10
"""Of an fp8 kernel: the matrix units of sm_89 and sm_90 keep some 14 bits of a sum of products."""
FP8_P = 256.0
"""What an fp8 kernel multiplies P by before it rounds it: e4m3 ends at 448."""
OUTPUT_BITS = {torch.float16: 11, torch.bfloat16: 8, torch.float32: 24}
"""Significant bits of an output type, the hidden one included."""


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
    p, row_sum, lse = _softmax_parts(q, k, scale, diagonal, features)
    o = dropped(p, features) @ per_query_head(v, q.shape[1])
    return o / torch.where(row_sum == 0, 1.0, row_sum), lse


def rounded_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    diagonal: int | None,
    precision: str,
    features: Features = PLAIN,
) -> tuple[Tensor, Tensor]:
    """The result of an ideally rounded kernel: float32 throughout, but P and O rounded as a kernel
    must.

    With precision tf32 the operands of both products are rounded to tf32 first. Its distance from
    the float64 attention is the floor.
    """
    dtype = q.dtype if features.fp8 is None else getattr(torch, features.fp8.dtype)
    q32, k32, v32 = (operand(x, precision) for x in (q, k, v))
    q32, k32, v32 = descaled(q32, k32, v32, features)
    p, row_sum, lse = _softmax_parts(q32, k32, scale, diagonal, features)
    if features.fp8 is None:
        rounded = operand(p.to(dtype), precision)
    else:
        rounded = (p * FP8_P).to(torch.float8_e4m3fn).float() / FP8_P
    o = dropped(rounded, features) @ per_query_head(v32, q.shape[1])
    return (o / torch.where(row_sum == 0, 1.0, row_sum)).to(dtype), lse


def descaled(q: Tensor, k: Tensor, v: Tensor, features: Features) -> tuple[Tensor, Tensor, Tensor]:
    """Q, K and V, floating, times the factors of an fp8 call."""
    if features.fp8 is None:
        return q, k, v
    of_q, of_k, of_v = (x.to(q.dtype)[..., None, None] for x in features.fp8.factors)
    return q * per_query_head(of_q, q.shape[1]), k * of_k, v * of_v


def scores(q: Tensor, k: Tensor, scale: float, diagonal: int | None, features: Features) -> Tensor:
    """Scale * Q K^T, capped, with bias and ALiBi, (B, H, Sq, Sk), -inf where a query may not
    attend.
    """
    s = scale * (q @ per_query_head(k, q.shape[1]).transpose(-1, -2))
    if features.softcap > 0.0:
        s = features.softcap * torch.tanh(s / features.softcap)
    seq_q, seq_k = s.shape[-2:]
    at = places(seq_q, seq_k, diagonal, s.device, features.sequences)
    if features.bias is not None:
        if features.bias.dtype is torch.bool:
            s = s.masked_fill(~features.bias, float("-inf"))
        else:
            bias = features.bias.to(s.dtype)
            s = s + bias.masked_fill(bias <= MASKED_BELOW, float("-inf"))
    if features.slopes is not None:
        s = s - at.slopes(features.slopes.to(s.dtype)) * (at.rows - at.keys).abs()
    for mask in at.seen(features, causal=diagonal is not None):
        s = s.masked_fill(~mask, float("-inf"))
    if features.block_mask is not None:
        s = s.masked_fill(~dense(features.block_mask), float("-inf"))
    return s


def dropped(p: Tensor, features: Features) -> Tensor:
    """P (B, H, Sq, Sk) after dropout: elements that are not kept 0, the others scaled."""
    if features.dropout_p == 0.0:
        return p
    return p * keep_mask(features, *p.shape) * features.keep_scale


def _softmax_parts(
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
    row_sum = p.sum(-1, keepdim=True)
    unseen = row_sum == 0
    lse = torch.where(unseen, float("-inf"), row_max + torch.where(unseen, 1.0, row_sum).log())
    if features.sinks is not None:
        sinks = features.sinks.to(s.dtype)[:, None, None]
        # As a softmax with the sink among the scores: inf minus inf.
        sinks = sinks.masked_fill(sinks == float("inf"), float("nan"))
        row_sum = row_sum + torch.exp(sinks - row_max)
        lse = torch.logaddexp(lse, sinks)
        if features.sequences is not None:  # a row of no sequence has no sink either
            owned = own_positions(features.sequences, "q", s.shape[-2], s.device)[1] >= 0
            lse = torch.where(owned[:, None], lse, float("-inf"))
    return p, row_sum, lse.squeeze(-1)


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


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One comparison. floors: error of O in units of the floor. lse: error of LSE in units of its
    tolerance.
    """

    floors: float
    lse: float

    @property
    def passed(self) -> bool:
        """NaN compares false, so it never passes."""
        return self.floors <= FLOORS_ACCEPTED and self.lse <= 1.0


def judge(
    o: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    diagonal: int | None,
    precision: str = "ieee",
    features: Features = PLAIN,
) -> Comparison:
    """Compare a kernel's O and LSE with float64.

    The unit is the largest of three: the floor; half a unit in the last place of the output type at
    max|O|; 4 * 2^-24 * max|V|, what float32 accumulation may lose (times 1 / (1 - p) with dropout).
    On tiny shapes the first by itself would reject correct kernels. LSE may be off by 2^-16 *
    max(1, |LSE|), for tf32 by twice the error of rounded inputs, for fp8 by 2^-10.
    """
    exact_o, exact_lse = attention(
        q.double(), k.double(), v.double(), scale=scale, diagonal=diagonal, features=features
    )
    with float32_products():
        ideal_o, ideal_lse = rounded_attention(
            q, k, v, scale=scale, diagonal=diagonal, precision=precision, features=features
        )
    if o.numel() == 0:
        return Comparison(floors=0.0, lse=0.0)
    _, _, wide_v = descaled(q.double(), k.double(), v.double(), features)
    largest = max_abs(wide_v) * max(1.0, features.keep_scale)
    floors = error_in_floors(o, exact_o, ideal_o, largest)
    least = LSE_TOLERANCE if features.fp8 is None else FP8_LSE_TOLERANCE
    tolerance = least * exact_lse.abs().clamp(min=1.0)
    if precision == "tf32":
        tolerance = tolerance.clamp(min=2 * max_abs(_difference(ideal_lse.double(), exact_lse)))
    off = _difference(lse.double(), exact_lse) / tolerance.nan_to_num(posinf=1.0)
    return Comparison(floors=floors, lse=max_abs(off))


def error_in_floors(found: Tensor, exact: Tensor, ideal: Tensor, summed: float) -> float:
    """The largest error of `found` in units of the largest of: the floor, which is that of `ideal`;
    half a unit in the last place at max|exact|; 4 * 2^-24 * summed, a bound of the sums of absolute
    values that float32 accumulates.
    """
    floor = max_abs(ideal.double() - exact)
    half_ulp = 2.0 ** -OUTPUT_BITS[found.dtype] * max_abs(exact)
    unit = max(floor, half_ulp, 4 * 2.0**-24 * summed)
    error = max_abs(found.double() - exact)
    return 0.0 if error == 0.0 else error / unit if unit else float("inf")


@contextlib.contextmanager
def float32_products() -> Iterator[None]:
    """Full float32 matrix products for the floor, whatever the process allows."""
    allowed = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(allowed)


def _difference(a: Tensor, b: Tensor) -> Tensor:
    """A - b, where two equal infinities differ by 0."""
    return torch.where(a == b, 0.0, a - b)


def max_abs(x: Tensor) -> float:
    """max|x|, NaN if there is one; 0 for no element."""
    return float(x.abs().max()) if x.numel() else 0.0
