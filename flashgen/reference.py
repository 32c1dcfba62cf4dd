"""The only definition of right: attention in float64, the floor, the oracle, and the nasty shapes.

Torch alone: nothing of flashgen's kernels is used. Tensors are (batch, heads, seq, head_dim); K and
V may have fewer heads than Q, as long as they divide.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from flashgen.features import MASKED_BELOW, PLAIN, Features, Fp8
from flashgen.masking import dense, draw_mask
from flashgen.philox import keep_mask
from flashgen.places import own_positions, places
from flashgen.problem import Problem
from flashgen.sequences import Sequences
from flashgen.spec import AttentionSpec

FLOORS_ACCEPTED = 2.0
LSE_TOLERANCE = 2.0**-16
FP8_LSE_TOLERANCE = 2.0**-10
"""Of an fp8 kernel: the matrix units of sm_89 and sm_90 keep some 14 bits of a sum of products."""
FP8_P = 256.0
"""What an fp8 kernel multiplies P by before it rounds it: e4m3 ends at 448."""
OUTPUT_BITS = {torch.float16: 11, torch.bfloat16: 8, torch.float32: 24}
"""Significant bits of an output type, the hidden one included."""

SOFTCAPS = (1.5, 50.0, 0.25, 6.0)
"""Caps that cases take in turn, by seed: about the scores, far above them, and so low that nearly
all are at it.
"""
BIAS_SHAPES = ("bhqk", "hqk", "k", "bh", "qk", "bq", "bhk")
"""Dimensions in which a drawn bias is not broadcast; cases take them in turn, by seed."""


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
    """What an ideally rounded kernel gives: float32 throughout, but P and O rounded as a kernel
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
    if diagonal is not None:
        s = s.masked_fill(~at.causal(), float("-inf"))
    if features.window is not None:
        s = s.masked_fill(~at.in_window(features.window), float("-inf"))
    if at.together is not None:
        s = s.masked_fill(~at.together, float("-inf"))
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
        row_max = torch.where(torch.isinf(row_max), 0.0, row_max)
        p = torch.exp(s - row_max)
    row_sum = p.sum(-1, keepdim=True)
    seen = row_sum > 0
    lse = torch.where(seen, row_max + torch.where(seen, row_sum, 1.0).log(), float("-inf"))
    if features.sinks is not None:
        sinks = features.sinks.to(s.dtype)[:, None, None]
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
    """X in float32 as a product takes it: rounded to tf32 if the precision is that."""
    return round_to_tf32(x.float()) if precision == "tf32" else x.float()


def round_to_tf32(x: Tensor) -> Tensor:
    """float32 values rounded to tf32, 10 stored bits of mantissa, to nearest, ties away from
    zero.
    """
    bits = x.contiguous().view(torch.int32)
    return ((bits + 0x1000) & ~0x1FFF).view(torch.float32)


@dataclass(frozen=True, kw_only=True)
class Verdict:
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
) -> Verdict:
    """The oracle: compare a kernel's O and LSE with float64.

    The unit is the largest of three: the floor; half a unit in the last place of the output type at
    max|O|; 4 * 2^-24 * max|V|, what float32 accumulation may lose (times 1 / (1 - p) with dropout).
    On tiny shapes the first alone would reject correct kernels. LSE may be off by
    2^-16 * max(1, |LSE|), for tf32 by twice the error of rounded inputs, for fp8 by 2^-10.
    """
    exact_o, exact_lse = attention(
        q.double(), k.double(), v.double(), scale=scale, diagonal=diagonal, features=features
    )
    with float32_products():
        ideal_o, ideal_lse = rounded_attention(
            q, k, v, scale=scale, diagonal=diagonal, precision=precision, features=features
        )
    if o.numel() == 0:
        return Verdict(floors=0.0, lse=0.0)
    _, _, wide_v = descaled(q.double(), k.double(), v.double(), features)
    largest = max_abs(wide_v) * max(1.0, features.keep_scale)
    floors = error_in_floors(o, exact_o, ideal_o, largest)
    least = LSE_TOLERANCE if features.fp8 is None else FP8_LSE_TOLERANCE
    tolerance = least * exact_lse.abs().clamp(min=1.0)
    if precision == "tf32":
        tolerance = tolerance.clamp(min=2 * max_abs(_difference(ideal_lse.double(), exact_lse)))
    off = _difference(lse.double(), exact_lse) / tolerance.nan_to_num(posinf=1.0)
    return Verdict(floors=floors, lse=max_abs(off))


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
    """Whatever the process allows its matrix products, the floor's are full float32."""
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


@dataclass(frozen=True, kw_only=True)
class Case:
    """One comparison to make: sizes, alignment of the causal mask, and how Q, K and V lie in
    memory.

    layout bhsd is contiguous; bshd has heads inside the sequence, as projections leave them; sliced
    is cut out of larger tensors, so that no stride is what the shape suggests.
    """

    problem: Problem
    alignment: str = "bottom_right"
    layout: str = "bhsd"

    def diagonal(self, spec: AttentionSpec) -> int | None:
        """The diagonal offset of this case under the spec's mask."""
        if not spec.causal:
            return None
        return 0 if self.alignment == "top_left" else self.problem.seq_k - self.problem.seq_q

    @property
    def longest(self) -> Problem:
        """The sizes of its longest sequence."""
        return self.problem

    def sequences(self, device: torch.device | str) -> Sequences | None:
        """Where its sequences are, if they are packed."""
        return None

    def __str__(self) -> str:
        p = self.problem
        return (
            f"batch {p.batch}, heads {p.heads}/{p.kv_heads}, seq {p.seq_q}x{p.seq_k}, "
            f"{self.alignment}, {self.layout}"
        )


def make_inputs(
    spec: AttentionSpec, case: Case, seed: int, device: torch.device | str
) -> tuple[Tensor, Tensor, Tensor]:
    """Random normal Q, K and V for a case; the same for the same seed, on every device."""
    generator = torch.Generator().manual_seed(seed)
    p, dtype = case.problem, getattr(torch, spec.operand_dtype)

    def draw_heads(heads: int, seq: int, dim: int) -> Tensor:
        x = draw((p.batch, heads, seq, dim), case.layout, generator)
        return moved(x, dtype, device)

    q = draw_heads(p.heads, p.seq_q, spec.head_dim)
    k = draw_heads(p.kv_heads, p.seq_k, spec.head_dim)
    return q, k, draw_heads(p.kv_heads, p.seq_k, spec.head_dim_v)


def draw(shape: tuple[int, int, int, int], layout: str, generator: torch.Generator) -> Tensor:
    """Standard normal numbers of this shape, (batch, heads, seq, dim), in a case's layout."""
    batch, heads, seq, dim = shape
    if layout == "bshd":
        return torch.randn((batch, seq, heads, dim), generator=generator).transpose(1, 2)
    if layout == "sliced":
        x = torch.randn((batch, heads + 1, seq + 3, dim + 8), generator=generator)
        return x[:, 1:, 2 : 2 + seq, 8:]
    return torch.randn(shape, generator=generator)


def moved(x: Tensor, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """X as another type on a device, its strides and what lies between its rows kept."""
    base = x if x._base is None else x._base
    base = base.to(device=device, dtype=dtype)
    return base.as_strided(x.shape, x.stride(), x.storage_offset())


def make_features(
    spec: AttentionSpec, case: Case, seed: int, device: torch.device | str
) -> Features:
    """The features of a spec, drawn for a case: a bias of a shape that the seed chooses, slopes of
    ALiBi by batch and head or by head, dropout of a quarter, a window and a cap that the seed
    chooses, sinks as large as scores.
    """
    generator = torch.Generator().manual_seed(seed + 1)
    p, wide = case.problem, BIAS_SHAPES[seed % len(BIAS_SHAPES)]
    sizes = zip("bhqk", (p.batch, p.heads, p.seq_q, p.seq_k), strict=True)
    batch, heads, rows, keys = (size if letter in wide else 1 for letter, size in sizes)
    bias = slopes = rng = None
    packed = case.sequences(device)
    if spec.bias != "none":
        dtype = torch.float32 if spec.bias == "boolean" else getattr(torch, spec.dtype)
        bias = moved(draw((batch, heads, rows, keys), case.layout, generator), dtype, device)
    if spec.bias == "boolean" and bias is not None:
        bias = bias > -0.5
    if spec.alibi:
        batches = p.batch if packed is None else packed.count
        slopes = torch.rand((batches, p.heads), generator=generator).to(device)
        slopes = slopes if seed % 2 else slopes[:1].squeeze(0).contiguous()
    if spec.dropout:
        rng = torch.randint(-(2**62), 2**62, (2,), generator=generator).to(device)
    sinks = None
    if spec.sink:
        sinks = 2.0 * torch.randn(p.heads, generator=generator)
        sinks = sinks.to(device, getattr(torch, spec.dtype) if seed % 2 else torch.float32)
    return Features(
        bias=bias,
        slopes=slopes,
        dropout_p=0.25 if spec.dropout else 0.0,
        rng=rng,
        window=windows(case.longest)[seed % len(windows(p))] if spec.window else None,
        softcap=SOFTCAPS[seed % len(SOFTCAPS)] if spec.softcap else 0.0,
        sinks=sinks,
        sequences=packed,
        fp8=make_fp8(spec, p, generator, device) if spec.fp8 else None,
        block_mask=draw_mask(p, seed, device) if spec.block_mask else None,
    )


def make_fp8(
    spec: AttentionSpec, problem: Problem, generator: torch.Generator, device: torch.device | str
) -> Fp8:
    """Factors of an fp8 call from 1/2 to 2, of each head of each batch."""
    shape = (3, problem.batch, problem.kv_heads)
    drawn = torch.exp2(2.0 * torch.rand(shape, generator=generator) - 1.0).to(device)
    q_descale, k_descale, v_descale = drawn.unbind()
    return Fp8(q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, dtype=spec.dtype)


def windows(problem: Problem) -> tuple[tuple[int, int], ...]:
    """The windows that find mistakes: nothing but the diagonal, one side alone, narrower than a
    tile, wider than one, beyond all lengths.
    """
    far, keys = problem.seq_q + problem.seq_k, problem.seq_k
    return (
        (3 * keys // 4, keys // 2),
        (keys // 2, -1),
        (5, 2),
        (0, 0),
        (-1, keys // 4),
        (17, keys // 3),
        (far + 3, 5 * far),
    )


def nasty_cases(br: int, bc: int) -> tuple[Case, ...]:
    """The shapes that find mistakes for tiles of br by bc: 1, a tile less one, a tile, one more,
    primes; Sq below and above Sk, both alignments, grouped heads, permuted and sliced memory.
    """

    def case(sq: int, sk: int, heads: int = 1, kv: int = 1, **options: str) -> Case:
        problem = Problem(batch=1, heads=heads, kv_heads=kv, seq_q=sq, seq_k=sk)
        return Case(problem=problem, **options)

    return (
        case(1, 1),
        case(br - 1, bc - 1),
        case(br, bc),
        case(br + 1, bc + 1, alignment="top_left"),
        case(1, 2 * bc + 1),
        case(br + 1, 1, alignment="top_left"),
        case(2 * br + 1, bc, layout="bshd"),  # bottom-right, Sq > Sk: rows that see nothing
        case(37, 3 * bc + 5, heads=4, kv=2, layout="bshd"),
        case(2 * br + 3, 2 * bc + 7, heads=3, kv=1, layout="sliced", alignment="top_left"),
        case(127, 131, heads=2, kv=2),
    )
