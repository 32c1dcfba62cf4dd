"""The oracle of all checks: attention in float64, the floor, and the comparison.

Uses torch operations only, no flashgen kernel. Tensors are (batch, heads, seq, head_dim); K and
V may have fewer heads than Q, as long as they divide.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flashgen.inputs.features import PLAIN, Features
from flashgen.runtime.eager.attention import (
    attention,
    descaled,
    dropped,
    float32_products,
    operand,
    per_query_head,
    products,
    softmax_parts,
)

FLOORS_ACCEPTED = 2.0
RMS_ACCEPTED = 1.15
RMS_ELEMENTS = 256
"""Fewer have no limit: docs/numerics.md has how much the rms of right kernels varies."""
FEW_KEYS = 32.0
"""scale |Q| |K|^T that normal queries and keys do not reach at any head dim. Beyond it one key or
two have a row of P, and errors of several do not average."""
EXPONENTS = 8.0
"""Makes two floors max|LSE| 2^-24 max|V|, the most that two keys of one weight can be off: the
exponents of P are rounded by 2^-24 of max|LSE|, and O is off by a quarter of their difference times
that of V.
"""
SUMMED = 4 * 2.0**-24
"""What a sum in float32 may be off, as a share of the sum of the absolute values."""
LSE_TOLERANCE = 2.0**-16
FP8_LSE_TOLERANCE = 2.0**-10
"""Of an fp8 kernel: the matrix units of sm_89 and sm_90 keep some 14 bits of a sum of products."""
FP8_P = 256.0
"""What an fp8 kernel multiplies P by before it rounds it: e4m3 ends at 448."""
FP8_MAXIMA = (0.0, 0.25, 0.5, 0.75)
"""How far, in powers of two, the maximum that an fp8 kernel rounds P by may lie above the row's
last one. Each gives an ideally rounded kernel with errors of its own: of one row with 32 dims the
largest error of one such kernel is more than twice that of another in 8 of 300 draws.
"""
OUTPUT_BITS = {torch.float16: 11, torch.bfloat16: 8, torch.float32: 24}
"""Significant bits of an output type, the hidden one included."""


def rounded_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    diagonal: int | None,
    precision: str,
    features: Features = PLAIN,
    v_scales: Tensor | None = None,
    maximum: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """The result of an ideally rounded kernel.

    All is float32, but P and O are rounded as a kernel must. With precision tf32 the operands of
    both products are rounded to tf32 first. Where keys have scales of V of their own, P times them
    is rounded: the largest P of a row is 1, which alone has no rounding error. Its distance from
    the float64 attention is the floor.

    Args:
        q: (B, H, Sq, d).
        k: (B, Hkv, Sk, d).
        v: (B, Hkv, Sk, d_v).
        scale: what scores are multiplied by.
        diagonal: the offset of the causal diagonal; None without a mask.
        precision: how float32 is multiplied, "ieee" or "tf32".
        features: what the call brings besides.
        v_scales: (B, Hkv, Sk, 1), what V was multiplied by; None if all of a head alike.
        maximum: of FP8_MAXIMA, with fp8 operands.

    Returns:
        O (B, H, Sq, d_v) and LSE (B, H, Sq).

    Raises:
        RuntimeError: whatever torch raises for shapes that do not agree.

    Examples:
        >>> import torch
        >>> from flashgen.reference.attention import rounded_attention
        >>> q = torch.randn(1, 2, 8, 64, dtype=torch.bfloat16)
        >>> o, lse = rounded_attention(q, q, q, scale=0.125, diagonal=None, precision="ieee")
        >>> o.dtype
        torch.bfloat16
    """
    dtype = q.dtype if features.fp8 is None else getattr(torch, features.fp8.dtype)
    q32, k32, v32 = (operand(x, precision) for x in (q, k, v))
    q32, k32, v32 = descaled(q32, k32, v32, features)
    p, row_sum, lse = softmax_parts(q32, k32, scale, diagonal, features)
    if features.fp8 is None:
        weights = 1.0 if v_scales is None else _weights(v_scales, q.shape[1])
        rounded = operand((p * weights).to(dtype), precision) / weights
    else:
        largest = FP8_P * 2.0**-maximum
        rounded = (p * largest).to(torch.float8_e4m3fn).float() / largest
    o = dropped(rounded, features) @ per_query_head(v32, q.shape[1])
    return (o / torch.where(row_sum == 0, 1.0, row_sum)).to(dtype), lse


def _weights(v_scales: Tensor, heads: int) -> Tensor:
    """Scales of V (B, Hkv, Sk, 1) as factors of P (B, H, 1, Sk), the largest of a head 1."""
    weights = per_query_head(v_scales.float(), heads).mT
    return weights / weights.amax(-1, keepdim=True) if weights.shape[-1] else weights


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Results of a kernel beside float64.

    floors: the largest error in units of the floor. rms: the root of the mean square of all errors,
    in units of that of an ideally rounded kernel. elements: how many carry it (_carriers). lse: the
    largest error of LSE in units of its tolerance.
    """

    floors: float = 0.0
    rms: float = 0.0
    elements: int = 0
    lse: float = 0.0

    @property
    def badness(self) -> float:
        """The largest figure in units of its limit; inf for NaN. The rms of few elements varies by
        more than its limit, and is not looked at.
        """
        rms = self.rms / RMS_ACCEPTED if self.elements >= RMS_ELEMENTS else 0.0
        figures = (self.floors / FLOORS_ACCEPTED, rms, self.lse)
        return float("inf") if any(x != x for x in figures) else max(figures)

    @property
    def passed(self) -> bool:
        """Whether no figure is above its limit."""
        return self.badness <= 1.0


def pooled(parts: Sequence[Comparison]) -> Comparison:
    """The comparison of several results, each with its own units, as if they were one."""
    elements = sum(part.elements for part in parts)
    squares = sum(part.rms**2 * part.elements for part in parts)
    return Comparison(
        floors=_largest(part.floors for part in parts),
        rms=math.sqrt(squares / max(1, elements)),
        elements=elements,
        lse=_largest(part.lse for part in parts),
    )


def worst(parts: Iterable[Comparison]) -> Comparison:
    """The comparison of several results: of each figure the worst."""
    parts = tuple(parts)
    counted = [part for part in parts if part.elements >= RMS_ELEMENTS] or parts
    return Comparison(
        floors=_largest(part.floors for part in parts),
        rms=_largest(part.rms for part in counted),
        elements=max((part.elements for part in counted), default=0),
        lse=_largest(part.lse for part in parts),
    )


def _largest(values: Iterable[float]) -> float:
    """The largest, NaN if there is one; 0 for none."""
    found = tuple(values)
    return next((x for x in found if x != x), max(found, default=0.0))


def merge(o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """O (..., d_v) and LSE (...) of all parts from those of each: o (parts, ..., d_v), lse (parts,
    ...), natural logarithm, in their own dtypes; a part of LSE -inf saw no key.
    """
    largest = lse.amax(0)
    largest = torch.where(largest == float("-inf"), 0.0, largest)
    weights = torch.exp(lse - largest)
    total = weights.sum(0)
    # 0 * NaN is NaN: the contents of an empty part must not count.
    seen = torch.where((weights > 0)[..., None], o, 0.0)
    merged = (weights[..., None] * seen).sum(0) / torch.where(total == 0, 1.0, total)[..., None]
    return merged, largest + total.log()


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
    v_scales: Tensor | None = None,
) -> Comparison:
    """Compare a kernel's O and LSE with float64.

    The unit is the largest of three: the floor; half a unit in the last place of the output type at
    max|O|; 4 * 2^-24 * max|V|, what float32 accumulation may lose (times 1 / (1 - p) with dropout,
    and times max|LSE| / EXPONENTS if that is more than 1: the exponents of P are as large as LSE,
    and rounded relative to that; or times what max(scale |Q| |K|^T) has above FEW_KEYS, times the
    square root of d over 128: so much do sums of d products vary). On tiny shapes the first by
    itself would reject correct kernels. LSE may be off by 2^-16 * max(1, |LSE|), for tf32 by twice
    the error of rounded inputs, for fp8 by 2^-10.

    Args:
        o: (B, H, Sq, d_v), the kernel's result.
        lse: (B, H, Sq), the kernel's result.
        q: (B, H, Sq, d).
        k: (B, Hkv, Sk, d).
        v: (B, Hkv, Sk, d_v).
        scale: what scores were multiplied by.
        diagonal: the offset of the causal diagonal; None without a mask.
        precision: how float32 was multiplied, "ieee" or "tf32".
        features: what the call brought besides.
        v_scales: as rounded_attention has them.

    Returns:
        The errors, and whether they pass.

    Raises:
        RuntimeError: whatever torch raises for shapes that do not agree.

    Examples:
        >>> import torch, flashgen
        >>> from flashgen.reference.attention import judge
        >>> q = torch.randn(1, 2, 8, 64)
        >>> o, lse = flashgen.attention(q, q, q, scale=0.125, return_lse=True)
        >>> judge(o, lse, q, q, q, scale=0.125, diagonal=None).passed
        True
    """
    exact_o, exact_lse = attention(
        q.double(), k.double(), v.double(), scale=scale, diagonal=diagonal, features=features
    )
    with float32_products():
        ideals = [
            rounded_attention(
                q, k, v, scale=scale, diagonal=diagonal, precision=precision, features=features,
                v_scales=v_scales, maximum=maximum,
            )
            for maximum in (FP8_MAXIMA if features.fp8 else FP8_MAXIMA[:1])
        ]  # fmt: skip
    ideal_o, ideal_lse = torch.stack([o for o, _ in ideals]), ideals[0][1]
    if o.numel() == 0:
        return Comparison()
    wide_q, wide_k, wide_v = descaled(q.double(), k.double(), v.double(), features)
    exponents = max_abs(exact_lse.nan_to_num(posinf=0.0, neginf=0.0))
    summed = products(wide_q.abs(), wide_k.abs(), abs(scale), features)
    few_keys = (max_abs(summed) - FEW_KEYS) * math.sqrt(q.shape[-1]) / 128
    lost = max(1.0, exponents / EXPONENTS, few_keys)
    largest = max_abs(wide_v) * max(1.0, features.keep_scale) * lost
    least = LSE_TOLERANCE if features.fp8 is None else FP8_LSE_TOLERANCE
    tolerance = least * exact_lse.abs().clamp(min=1.0)
    if k.shape[2]:  # large products may cancel to a small LSE
        tolerance = tolerance.maximum(SUMMED * summed.amax(-1))
    if precision == "tf32":
        tolerance = tolerance.clamp(min=2 * max_abs(_difference(ideal_lse.double(), exact_lse)))
    off = _difference(lse.double(), exact_lse) / tolerance.nan_to_num(posinf=1.0)
    return replace(compared(o, exact_o, ideal_o, largest), lse=max_abs(off))


def compared(found: Tensor, exact: Tensor, ideal: Tensor, summed: float) -> Comparison:
    """The errors of one result in units of rounding.

    The unit of the largest is the largest of: the floor, which is that of `ideal`; half a unit in
    the last place at max|exact|; 4 * 2^-24 * summed. The unit of the rms is that of `ideal`, but
    not less than the last of these.

    Args:
        found: the result.
        exact: the same in float64.
        ideal: what an ideally rounded kernel gives; or what several do, stacked.
        summed: a bound of the sums of absolute values that float32 accumulates.

    Returns:
        The errors, and whether they pass.

    Raises:
        RuntimeError: whatever torch raises for shapes that do not agree.

    Examples:
        >>> import torch
        >>> from flashgen.reference.attention import compared
        >>> x = torch.rand(4, dtype=torch.float64)
        >>> compared(x.float(), x, x.float(), 1.0).passed
        True
    """
    lost = SUMMED * summed
    half_ulp = 2.0 ** -OUTPUT_BITS[found.dtype] * max_abs(exact)
    error, of_ideal = found.double() - exact, ideal.double() - exact
    typical = of_ideal.square().reshape(-1, *exact.shape).mean(0).sqrt()
    return Comparison(
        floors=_in_units(max_abs(error), max(max_abs(of_ideal), half_ulp, lost)),
        rms=_in_units(_root_mean_square(error), max(_root_mean_square(typical), lost)),
        elements=_carriers(typical),
    )


def _carriers(errors: Tensor) -> int:
    """How many elements carry the sum of the squares of errors (..., dim): all where the rows have
    equal shares of it, and dim where one row has the whole. The rms varies as that of so many
    (Kish's effective sample size, of rows).
    """
    shares = errors.square().mean(-1)
    rows = float(shares.sum().square() / shares.square().sum())
    return round(rows * errors.shape[-1]) if math.isfinite(rows) else errors.numel()


def _in_units(error: float, unit: float) -> float:
    return 0.0 if error == 0.0 else error / unit if unit else float("inf")


def _root_mean_square(x: Tensor) -> float:
    return float(x.square().mean().sqrt()) if x.numel() else 0.0


def _difference(a: Tensor, b: Tensor) -> Tensor:
    """A - b, where two equal infinities differ by 0."""
    return torch.where(a == b, 0.0, a - b)


def max_abs(x: Tensor) -> float:
    """max|x|, NaN if there is one; 0 for no element."""
    return float(x.abs().max()) if x.numel() else 0.0
