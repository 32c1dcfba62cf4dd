"""Stands for an engine's module: attention of one sequence, and a host function that chooses its tile by a fixed rule."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def kernel_of_engine(
    Q, K, V, Out, tokens, stride, kv_stride, scale,
    GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, DIM)
    here = rows[:, None] * stride + head * DIM + dims[None, :]
    q = tl.load(Q + here, mask=rows[:, None] < tokens, other=0.0)
    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    o = tl.zeros([BLOCK_M, DIM], tl.float32)
    for start in range(0, tokens, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        there = keys[:, None] * kv_stride + head // GROUP * DIM + dims[None, :]
        k = tl.load(K + there, mask=keys[:, None] < tokens, other=0.0)
        s = tl.dot(q, tl.trans(k)) * scale
        s = tl.where(keys[None, :] <= rows[:, None], s, float("-inf"))
        new = tl.maximum(largest, tl.max(s, 1))
        p = tl.exp(s - new[:, None])
        shrunk = tl.exp(largest - new)
        v = tl.load(V + there, mask=keys[:, None] < tokens, other=0.0)
        o = tl.dot(p.to(v.dtype), v, o * shrunk[:, None])
        total = total * shrunk + tl.sum(p, 1)
        largest = new
    tl.store(Out + here, (o / total[:, None]).to(q.dtype), mask=rows[:, None] < tokens)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> None:
    """O of q (tokens, heads, dim) and of k and v (tokens, kv_heads, dim)."""
    tokens, heads, dim = q.shape
    BLOCK, num_warps = 16, 4
    kernel_of_engine[(triton.cdiv(tokens, BLOCK), heads)](
        q, k, v, out, tokens, q.stride(0), k.stride(0), dim**-0.5, heads // k.shape[1], dim,
        BLOCK, BLOCK, num_warps=num_warps,
    )  # fmt: skip
