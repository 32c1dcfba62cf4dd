"""The two kernels of a backward in Triton, as people write them who publish timings. Only compiled.

They stand in for the kernels of benchmarks/landscapes/rtx3090_attention.csv: dK and dV by tiles of
keys, and dQ by tiles of rows, with the scores computed again from the log-sum-exp.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def key_gradients(
    query, key, value, upstream, lse, delta, key_out, value_out, head_stride, row_stride,
    length, scale,
    ROWS: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """dK and dV of KEYS keys of a head under a causal mask; grid (tiles of keys, heads)."""
    start, head = tl.program_id(0) * KEYS, tl.program_id(1)
    columns = tl.arange(0, DIM)
    keys = start + tl.arange(0, KEYS)
    at = head * head_stride + keys[:, None] * row_stride + columns[None, :]
    k = tl.load(key + at, mask=keys[:, None] < length, other=0.0)
    v = tl.load(value + at, mask=keys[:, None] < length, other=0.0)
    dk = tl.zeros((KEYS, DIM), tl.float32)
    dv = tl.zeros((KEYS, DIM), tl.float32)
    for first in range(start // ROWS * ROWS, length, ROWS):
        rows = first + tl.arange(0, ROWS)
        inside = rows < length
        rows_at = head * head_stride + rows[:, None] * row_stride + columns[None, :]
        q = tl.load(query + rows_at, mask=inside[:, None], other=0.0)
        do = tl.load(upstream + rows_at, mask=inside[:, None], other=0.0)
        row_lse = tl.load(lse + head * length + rows, mask=inside, other=0.0)
        row_delta = tl.load(delta + head * length + rows, mask=inside, other=0.0)
        scores = tl.dot(q, tl.trans(k)) * scale
        seen = (rows[:, None] >= keys[None, :]) & inside[:, None] & (keys[None, :] < length)
        weights = tl.exp(tl.where(seen, scores, -float("inf")) - row_lse[:, None])
        dv += tl.dot(tl.trans(weights).to(do.dtype), do)
        dp = tl.dot(do, tl.trans(v))
        ds = weights * (dp - row_delta[:, None])
        dk += tl.dot(tl.trans(ds).to(q.dtype), q)
    tl.store(key_out + at, (dk * scale).to(k.dtype), mask=keys[:, None] < length)
    tl.store(value_out + at, dv.to(k.dtype), mask=keys[:, None] < length)


@triton.jit
def query_gradients(
    query, key, value, upstream, lse, delta, out, head_stride, row_stride, length, scale,
    ROWS: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """dQ of ROWS rows of a head under a causal mask; grid (tiles of rows, heads)."""
    tile, head = tl.program_id(0), tl.program_id(1)
    columns = tl.arange(0, DIM)
    rows = tile * ROWS + tl.arange(0, ROWS)
    inside = rows < length
    at = head * head_stride + rows[:, None] * row_stride + columns[None, :]
    q = tl.load(query + at, mask=inside[:, None], other=0.0)
    do = tl.load(upstream + at, mask=inside[:, None], other=0.0)
    row_lse = tl.load(lse + head * length + rows, mask=inside, other=0.0)
    row_delta = tl.load(delta + head * length + rows, mask=inside, other=0.0)
    dq = tl.zeros((ROWS, DIM), tl.float32)
    for first in range(0, tl.minimum((tile + 1) * ROWS, length), KEYS):
        keys = first + tl.arange(0, KEYS)
        keys_at = head * head_stride + keys[:, None] * row_stride + columns[None, :]
        k = tl.load(key + keys_at, mask=keys[:, None] < length, other=0.0)
        v = tl.load(value + keys_at, mask=keys[:, None] < length, other=0.0)
        scores = tl.dot(q, tl.trans(k)) * scale
        seen = (rows[:, None] >= keys[None, :]) & inside[:, None] & (keys[None, :] < length)
        weights = tl.exp(tl.where(seen, scores, -float("inf")) - row_lse[:, None])
        dp = tl.dot(do, tl.trans(v))
        ds = weights * (dp - row_delta[:, None])
        dq += tl.dot(ds.to(tl.bfloat16), k.to(tl.bfloat16))
    tl.store(out + at, (dq * scale).to(q.dtype), mask=inside[:, None])
