"""Standard attention as Triton kernels, S and P in memory: what FlashAttention is compared with.

Algorithms 0 and 3 of the FlashAttention paper, with the mask and the dropout of its authors'
benchmark as kernels of their own. One program computes one head, so that every kernel loads and
stores each of its tensors once; on a GPU it would be slow. n is a power of two.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from examples.papers.counter import Counter

BM = 64
"""Rows that a program holds at a time."""
MASKED = tl.constexpr(-10000.0)


@triton.jit
def product(
    a_ptr, b_ptr, c_ptr, scale, am, ak, bk, bn, cm, cn,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """C (M, N) = scale * A (M, K) B (K, N): B is loaded once, A and C pass once."""
    k, n = tl.arange(0, K), tl.arange(0, N)
    b = tl.load(b_ptr + k[:, None] * bk + n[None, :] * bn)
    for start in tl.range(0, M, BM):
        rows = start + tl.arange(0, BM)
        a = tl.load(a_ptr + rows[:, None] * am + k[None, :] * ak)
        c = tl.dot(a, b) * scale
        tl.store(c_ptr + rows[:, None] * cm + n[None, :] * cn, c.to(tl.float16))


@triton.jit
def causal_mask(s_ptr, N: tl.constexpr, BM: tl.constexpr):
    """S += mask, in place."""
    rows, n = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, N)
    at = s_ptr + rows[:, None] * N + n[None, :]
    s = tl.load(at).to(tl.float32) + tl.where(n[None, :] <= rows[:, None], 0.0, MASKED)
    tl.store(at, s.to(tl.float16))


@triton.jit
def softmax(s_ptr, p_ptr, N: tl.constexpr, BM: tl.constexpr):
    """The softmax of each row of S."""
    rows, n = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, N)
    at = rows[:, None] * N + n[None, :]
    s = tl.load(s_ptr + at).to(tl.float32)
    p = tl.exp(s - tl.max(s, 1)[:, None])
    tl.store(p_ptr + at, (p / tl.sum(p, 1)[:, None]).to(tl.float16))


@triton.jit
def dropout(p_ptr, out_ptr, kept_ptr, probability, seed, N: tl.constexpr, BM: tl.constexpr):
    """P with elements dropped, and which were kept, a byte each."""
    rows, n = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, N)
    at = rows[:, None] * N + n[None, :]
    kept = tl.rand(seed, at) > probability
    p = tl.load(p_ptr + at).to(tl.float32) / (1 - probability)
    tl.store(out_ptr + at, tl.where(kept, p, 0.0).to(tl.float16))
    tl.store(kept_ptr + at, kept.to(tl.int8))


@triton.jit
def dropout_backward(dp_ptr, kept_ptr, out_ptr, probability, N: tl.constexpr, BM: tl.constexpr):
    """DP of the elements that were kept."""
    rows, n = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, N)
    at = rows[:, None] * N + n[None, :]
    kept = tl.load(kept_ptr + at)
    dp = tl.load(dp_ptr + at).to(tl.float32) * kept / (1 - probability)
    tl.store(out_ptr + at, dp.to(tl.float16))


@triton.jit
def softmax_backward(p_ptr, dp_ptr, ds_ptr, scale, N: tl.constexpr, BM: tl.constexpr):
    """DS = P * (dP - rowsum(P * dP)) * scale."""
    rows, n = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, N)
    at = rows[:, None] * N + n[None, :]
    p, dp = tl.load(p_ptr + at).to(tl.float32), tl.load(dp_ptr + at).to(tl.float32)
    tl.store(ds_ptr + at, (p * (dp - tl.sum(p * dp, 1)[:, None]) * scale).to(tl.float16))


@dataclass(frozen=True, kw_only=True)
class Standard:
    """What a run gave: the counter, the output, which elements dropout kept, and dQ, dK, dV.

    extra: bytes of the forward's tensors other than Q, K, V and O.
    """

    counter: Counter
    o: Tensor
    kept: Tensor | None
    gradients: tuple[Tensor, ...]
    extra: int


def run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor | None = None,
    *,
    mask: bool = False,
    dropped: float = 0.0,
) -> Standard:
    """Forward of one head (n, d) in float16, and with dO the backward, counted by stage."""
    n, d = q.shape
    rows = min(n, BM)
    whole = {"N": n, "BM": rows}
    grid = (n // rows,)
    with Counter() as counter:

        def wide(dtype: torch.dtype = torch.float16) -> Tensor:
            return torch.empty(n, n, dtype=dtype)

        def multiply(stage: str, a: Tensor, b: Tensor, scale: float = 1.0) -> Tensor:
            counter.kernel = stage
            c = torch.empty(a.shape[0], b.shape[1], dtype=torch.float16)
            sizes = {"M": a.shape[0], "N": b.shape[1], "K": a.shape[1], "BM": rows}
            product[(1,)](a, b, c, scale, *a.stride(), *b.stride(), *c.stride(), **sizes)
            return c

        s = multiply("S = Q K^T", q, k.T, d**-0.5)
        counter.kernel = "S + mask"
        if mask:
            causal_mask[grid](s, **whole)
        counter.kernel = "P = softmax(S)"
        p, kept = wide(), None
        softmax[grid](s, p, **whole)
        seen = p
        if dropped:
            counter.kernel = "dropout of P"
            seen, kept = wide(), wide(torch.int8)
            dropout[grid](p, seen, kept, dropped, 1234, **whole)
        o = multiply("O = P V", seen, v)
        inputs = sum(x.numel() * x.element_size() for x in (q, k, v, o))
        extra = sum(counter.tensors.values()) - inputs
        if do is None:
            return Standard(counter=counter, o=o, kept=kept, gradients=(), extra=extra)
        dv = multiply("dV = P^T dO", seen.T, do)
        dp = multiply("dP = dO V^T", do, v.T)
        if kept is not None:
            counter.kernel = "dropout of dP"
            all_of_dp, dp = dp, wide()
            dropout_backward[grid](all_of_dp, kept, dp, dropped, **whole)
        counter.kernel = "dS"
        ds = wide()
        softmax_backward[grid](p, dp, ds, d**-0.5, **whole)
        dq, dk = multiply("dQ = dS K", ds, k), multiply("dK = dS^T Q", ds.T, q)
    return Standard(counter=counter, o=o, kept=kept, gradients=(dq, dk, dv), extra=extra)
