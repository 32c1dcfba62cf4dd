"""The cases that a kernel must pass, and their random tensors, drawn by a seed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from flashgen.inputs.block_mask import BlockMask
from flashgen.inputs.features import Features, Fp8
from flashgen.inputs.from_call import check_scale
from flashgen.inputs.packed import Sequences
from flashgen.reference.attention import Comparison
from flashgen.runtime.block_mask import PARTIAL, WHOLE, document, from_boolean, prefix_lm
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.problem import Problem
from flashgen.spec.vocabulary import BLOCK

SOFTCAPS = (1.5, 50.0, 0.25, 6.0)
"""Caps that cases take in turn, by seed: about the scores, far above them, and so low that nearly
all are at it.
"""

BIAS_SHAPES = ("bhqk", "hqk", "k", "bh", "qk", "bq", "bhk")
"""Dimensions in which a random bias is not broadcast; cases use them in turn, by seed."""

Scores = Literal["even", "growing", "falling"]
"""How the scores of a row are spread over its keys. even: standard normal. growing: normal, their
deviation from nearly 0 at the first key to LARGEST_SCORES at the last, so that the running maximum
jumps at each tile, beyond what exp2 can take. falling: the other way.
"""

VARIED = {"q": "sliced", "k": "bshd", "v": "sliced"}
CALLERS_SCALE = 1.375
"""Of a case that varies: times the scale that a caller who names none gets."""

MARGIN = 1 << 16
"""Elements before and after what a kernel may touch: 64 rows of 8 heads of 128."""

LARGEST_SCORES = 64.0
"""A row of 16 such keys reaches 100 on average; exp2 overflows float32 at 128 / log2(e) = 89."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Trial:
    """One comparison, ready to run. call: what the launcher of the direction takes; compare: judges
    what it returns.
    """

    call: Any
    compare: Callable[[Any], Comparison]


@dataclass(frozen=True, kw_only=True)
class CheckCase:
    """One comparison: sizes, alignment of the causal mask, and the memory layout of Q, K and V.

    layout bhsd is contiguous; bshd has heads inside the sequence, as projections leave them; sliced
    is cut from larger tensors, so that no stride is what the shape suggests. varied: Q, K and V
    have one each, the scale is the caller's, and what may differ by batch does, at every seed.
    """

    problem: Problem
    alignment: str = "bottom_right"
    layout: str = "bhsd"
    scores: Scores = "even"
    varied: bool = False

    def layout_of(self, name: str) -> str:
        """The layout of q, k or v."""
        return VARIED[name] if self.varied else self.layout

    def scale(self, head_dim: int) -> float:
        """The scale of its scores."""
        return check_scale(None, head_dim) * (CALLERS_SCALE if self.varied else 1.0)

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
        """The bounds of its sequences, if they are packed."""
        return None

    def __str__(self) -> str:
        p = self.problem
        return (
            f"batch {p.batch}, heads {p.heads}/{p.kv_heads}, seq {p.seq_q}x{p.seq_k}, "
            f"{self.alignment}, {self.layout}, {self.scores} scores{', varied' * self.varied}"
        )


def make_inputs(
    spec: AttentionSpec, case: CheckCase, seed: int, device: torch.device | str
) -> tuple[Tensor, Tensor, Tensor]:
    """Random normal Q, K and V for a case, Q and K for its scores; the same for the same seed, on
    every device.
    """
    generator = torch.Generator().manual_seed(seed)
    p, dtype = case.problem, getattr(torch, spec.operand_dtype)

    def draw_heads(name: str, heads: int, seq: int, dim: int) -> Tensor:
        shape = p.batch, heads, seq, dim
        return draw(shape, case.layout_of(name), generator, 16 // dtype.itemsize)

    q = draw_heads("q", p.heads, p.seq_q, spec.head_dim)
    k = draw_heads("k", p.kv_heads, p.seq_k, spec.head_dim)
    v = draw_heads("v", p.kv_heads, p.seq_k, spec.head_dim_v)
    if case.scores != "even":
        q *= LARGEST_SCORES
        k *= weights_of(case.scores, p.seq_k)
    return moved(q, dtype, device), moved(k, dtype, device), moved(v, dtype, device)


def weights_of(scores: Scores, keys: int) -> Tensor:
    """What the keys are multiplied by where their scores grow or fall, (keys, 1)."""
    rising = torch.arange(1, keys + 1)[:, None] / max(1, keys)
    return rising if scores == "growing" else rising.flip(0)


def draw(
    shape: tuple[int, int, int, int], layout: str, generator: torch.Generator, cut: int = 8
) -> Tensor:
    """Standard normal numbers of this shape, (batch, heads, seq, dim), in a case's layout. cut: the
    elements that "sliced" leaves out of each row: 16 bytes of them, for descriptors.
    """
    batch, heads, seq, dim = shape
    if layout == "bshd":
        return torch.randn((batch, seq, heads, dim), generator=generator).transpose(1, 2)
    if layout == "sliced":
        x = torch.randn((batch, heads + 1, seq + 3, dim + cut), generator=generator)
        return x[:, 1:, 2 : 2 + seq, cut:]
    return torch.randn(shape, generator=generator)


def moved(x: Tensor, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """X as another type on a device, with its strides and the elements between its rows, amid a
    larger buffer whose margins are NaN. Margins that X has are not moved, but its alignment is.
    """
    first = int(x.storage_offset())
    lead = first % (16 // dtype.itemsize)
    count = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True)) + 1
    count = count * bool(x.numel()) + lead
    buffer = in_margins(count, dtype, device)
    inner = x.as_strided((count,), (1,), first - lead)
    buffer[MARGIN : MARGIN + count] = inner.to(device, dtype)
    return buffer.as_strided(x.shape, x.stride(), MARGIN + lead)


def in_margins(
    count: int, dtype: torch.dtype, device: torch.device | str, fill: int = 0xFF
) -> Tensor:
    """A buffer for `count` elements between two margins, all of whose bytes are `fill`: of 0xFF
    every floating-point type makes NaN.
    """
    size = (2 * MARGIN + count) * dtype.itemsize
    return torch.full((size,), fill, dtype=torch.uint8, device=device).view(dtype)


def make_features(
    spec: AttentionSpec, case: CheckCase, seed: int, device: torch.device | str
) -> Features:
    """The random features of a spec for a case: a bias of a shape that the seed chooses, slopes
    of ALiBi by batch and head or by head, dropout of a quarter, a window, chunks and a cap that the
    seed chooses, sinks as large as scores.
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
        of_batch = case.varied or seed % 2
        slopes = slopes if of_batch else slopes[:1].squeeze(0).contiguous()
    if spec.dropout:
        rng = torch.randint(-(2**62), 2**62, (2,), generator=generator).to(device)
    chunk, chunk_start = 0, None
    if spec.chunk:
        chunk = chunks(case.longest)[seed % len(chunks(p))]
        batches = p.batch if packed is None else packed.count
        if case.varied or seed % 4:  # before the first key, behind the last one, and between
            drawn = torch.randint(-2 * chunk, 2 * chunk + 1, (batches,), generator=generator)
            chunk_start = drawn.int().to(device)
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
        chunk=chunk,
        chunk_start=chunk_start,
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


def draw_mask(problem: Problem, seed: int, device: torch.device | str) -> BlockMask:
    """A random mask for a check, of a kind that the seed chooses: prefixes, documents, causal
    documents, or per batch and head whole, skipped and random blocks.
    """
    batch, rows, keys = problem.batch, problem.seq_q, problem.seq_k
    generator = torch.Generator().manual_seed(seed + 4)
    if seed % 4 == 0:
        return prefix_lm(
            torch.randint(keys + 1, (batch,), generator=generator).to(device), rows, keys
        )
    if seed % 4 in (1, 2):
        drawn = (torch.randint(-1, 4, (batch, n), generator=generator) for n in (rows, keys))
        of_q, of_k = (ids.sort(1).values.to(device) for ids in drawn)
        return document(of_q, of_k, causal=seed % 4 == 2)
    blocks = (batch, problem.heads, -(-rows // BLOCK), -(-keys // BLOCK))
    kinds = torch.randint(3, blocks, generator=generator)
    kinds = kinds.repeat_interleave(BLOCK, 2).repeat_interleave(BLOCK, 3)[:, :, :rows, :keys]
    mixed = torch.rand(kinds.shape, generator=generator) > 0.5
    return from_boolean(torch.where(kinds == PARTIAL, mixed, kinds == WHOLE).to(device))


def windows(problem: Problem) -> tuple[tuple[int, int], ...]:
    """The windows that find errors: only the diagonal, one side only, narrower than a tile,
    wider than one, beyond all lengths.
    """
    far, keys = problem.seq_q + problem.seq_k, problem.seq_k
    return (
        (3 * keys // 4, keys // 2),
        (keys // 2, -1),
        (5, 2),
        (0, 0),
        (-1, keys // 4),
        (far + 3, 5 * far),
        (17, keys // 3),
    )


def chunks(problem: Problem) -> tuple[int, ...]:
    """Chunks that find mistakes: of one key, less than a tile, a tile, more, all keys and more."""
    keys = max(1, problem.seq_k)
    return (keys // 2 + 1, 7, 16, keys // 3 + 1, 1, 2 * keys + 3, 33)
