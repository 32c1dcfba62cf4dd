"""Kernels of the kind that Triton's tutorials teach, written from their algorithms: each with its
inputs, its launch and what torch says.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from flashgen import ptx


@triton.jit
def vector_sum(x, y, out, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    tl.store(out + at, tl.load(x + at, mask=inside) + tl.load(y + at, mask=inside), mask=inside)


@triton.jit
def softmax_rows(out, x, stride, rows, columns, BLOCK: tl.constexpr):
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        at = tl.arange(0, BLOCK)
        inside = at < columns
        values = tl.load(x + row * stride + at, mask=inside, other=-float("inf"))
        powers = tl.exp(values - tl.max(values, 0))
        tl.store(out + row * stride + at, powers / tl.sum(powers, 0), mask=inside)


@triton.jit
def matmul(
    a, b, c, m, n, k, stride_a, stride_b, stride_c,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    total = tl.zeros((BM, BN), tl.float32)
    for begin in range(0, k, BK):
        inner = begin + tl.arange(0, BK)
        left = tl.load(
            a + rows[:, None] * stride_a + inner[None, :],
            mask=(rows < m)[:, None] & (inner < k)[None, :], other=0.0,
        )  # fmt: skip
        right = tl.load(
            b + inner[:, None] * stride_b + columns[None, :],
            mask=(inner < k)[:, None] & (columns < n)[None, :], other=0.0,
        )  # fmt: skip
        total = tl.dot(left, right, total)
    tl.store(
        c + rows[:, None] * stride_c + columns[None, :],
        total.to(c.dtype.element_ty),
        mask=(rows < m)[:, None] & (columns < n)[None, :],
    )


@triton.jit
def persistent_matmul(
    a, b, c, m, n, k, PROGRAMS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):
    """C = A B^T by tensor descriptors; each program takes tile after tile."""
    across = tl.cdiv(n, BN)
    for tile in tl.range(tl.program_id(0), tl.cdiv(m, BM) * across, PROGRAMS, flatten=False):
        row, column = tile // across * BM, tile % across * BN
        total = tl.zeros((BM, BN), tl.float32)
        for begin in range(0, k, BK):
            total = tl.dot(a.load([row, begin]), b.load([column, begin]).T, total)
        c.store([row, column], total.to(tl.float16))


@triton.jit
def layer_norm(x, out, weight, bias, mean, rstd, stride, columns, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < columns
    values = tl.load(x + row * stride + at, mask=inside, other=0.0).to(tl.float32)
    average = tl.sum(values, 0) / columns
    centred = tl.where(inside, values - average, 0.0)
    scale = 1 / tl.sqrt(tl.sum(centred * centred, 0) / columns + eps)
    tl.store(mean + row, average)
    tl.store(rstd + row, scale)
    w = tl.load(weight + at, mask=inside)
    result = centred * scale * w + tl.load(bias + at, mask=inside)
    tl.store(out + row * stride + at, result, mask=inside)


@triton.jit
def fused_attention(
    q, k, v, out, scale, length, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):
    rows, dims = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, D)
    queries = tl.load(q + rows[:, None] * D + dims[None, :])
    maximum, denominator = tl.full((BM,), -float("inf"), tl.float32), tl.zeros((BM,), tl.float32)
    total = tl.zeros((BM, D), tl.float32)
    for begin in range(0, length, BN):
        keys = begin + tl.arange(0, BN)
        scores = tl.dot(queries, tl.load(k + keys[None, :] * D + dims[:, None])) * scale
        scores = tl.where(keys[None, :] <= rows[:, None], scores, -1.0e6)
        larger = tl.maximum(maximum, tl.max(scores, 1))
        powers = tl.exp(scores - larger[:, None])
        shrunk = tl.exp(maximum - larger)
        denominator = denominator * shrunk + tl.sum(powers, 1)
        values = tl.load(v + keys[:, None] * D + dims[None, :])
        total = tl.dot(powers.to(tl.float16), values, total * shrunk[:, None])
        maximum = larger
    tl.store(out + rows[:, None] * D + dims[None, :], (total / denominator[:, None]).to(tl.float16))


def _drawn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


def _vector_sum(**how: Any) -> tuple[Tensor, Tensor]:
    x, y, out = _drawn(1000), _drawn(1000), torch.zeros(1000)
    ptx.launch(vector_sum, (8,), x, y, out, 1000, BLOCK=128, **how)
    return out, x + y


def _softmax(**how: Any) -> tuple[Tensor, Tensor]:
    x = _drawn(7, 300)
    out = torch.zeros_like(x)
    ptx.launch(softmax_rows, (3,), out, x, 300, 7, 300, BLOCK=512, **how)
    return out, x.softmax(1)


def _matmul(**how: Any) -> tuple[Tensor, Tensor]:
    a, b = _drawn(100, 72, dtype=torch.float16), _drawn(72, 88, dtype=torch.float16)
    c = torch.zeros(100, 88, dtype=torch.float16)
    ptx.launch(
        matmul, (2, 2), a, b, c, 100, 88, 72, 72, 88, 88, BM=64, BN=64, BK=32, num_stages=3, **how
    )
    return c.float(), a.float() @ b.float()


def _aligned_matmul(**how: Any) -> tuple[Tensor, Tensor]:
    """One tile by cp.async, three stages deep."""
    a, b = _drawn(64, 128, dtype=torch.float16), _drawn(128, 64, dtype=torch.float16)
    c = torch.zeros(64, 64, dtype=torch.float16)
    ptx.launch(
        matmul, (1, 1), a, b, c, 64, 64, 128, 128, 64, 64, BM=64, BN=64, BK=32, num_stages=3, **how
    )
    return c.float(), a.float() @ b.float()


def _persistent(**how: Any) -> tuple[Tensor, Tensor]:
    a, b = _drawn(136, 320, dtype=torch.float16), _drawn(72, 320, dtype=torch.float16)
    c = torch.zeros(136, 72, dtype=torch.float16)
    described = [
        TensorDescriptor(x, list(x.shape), list(x.stride()), block)
        for x, block in ((a, [128, 64]), (b, [64, 64]), (c, [128, 64]))
    ]
    ptx.launch(
        persistent_matmul, (2,), *described, 136, 72, 320, PROGRAMS=2, BM=128, BN=64, BK=64,
        num_warps=8, num_stages=3, **how,
    )  # fmt: skip
    return c.float(), a.float() @ b.float().T


def _layer_norm(**how: Any) -> tuple[Tensor, Tensor]:
    x, weight, bias = _drawn(5, 200), _drawn(200), _drawn(200) + 1
    out, mean, rstd = torch.zeros_like(x), torch.zeros(5), torch.zeros(5)
    ptx.launch(layer_norm, (5,), x, out, weight, bias, mean, rstd, 200, 200, 1e-5, BLOCK=256, **how)
    return out, torch.nn.functional.layer_norm(x, (200,), weight, bias)


def _attention(**how: Any) -> tuple[Tensor, Tensor]:
    q, k, v = (torch.roll(_drawn(128, 64, dtype=torch.float16), n) for n in range(3))
    out = torch.zeros_like(q)
    ptx.launch(fused_attention, (2,), q, k, v, out, 0.125, 128, D=64, BM=64, BN=32, **how)
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(x.double()[None, None] for x in (q, k, v)), is_causal=True
    )[0, 0]
    return out.float(), expected.float()


TUTORIALS: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "vector sum": _vector_sum,
    "softmax": _softmax,
    "matmul": _matmul,
    "matmul in stages": _aligned_matmul,
    "persistent matmul with TMA": _persistent,
    "layer norm": _layer_norm,
    "fused attention": _attention,
}
"""Runs a kernel by flashgen.ptx.launch; returns its result and torch's."""

USES_TMA = frozenset({"persistent matmul with TMA"})
