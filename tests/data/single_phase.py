"""A plain attention forward in Triton that flashgen did not write the way it writes its own.

It stands in for the kernel that the landscapes of published_timings.yaml were measured with: one
loop over all tiles of K and V that masks every one of them, exp instead of exp2, scale and pointers
computed anew each trip, four explicit strides a tensor. Only ever compiled.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def attend(
    out, query, key, value,
    out_batch, out_head, out_row, out_column,
    query_batch, query_head, query_row, query_column,
    key_batch, key_head, key_row, key_column,
    value_batch, value_head, value_row, value_column,
    length, heads, scale,
    ROWS: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """One tile of ROWS queries of one head, causal; grid (tiles of queries, batch * heads)."""
    tile = tl.program_id(0)
    batch, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    rows = tile * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, DIM)
    inside = rows[:, None] < length

    query += batch * query_batch + head * query_head
    key += batch * key_batch + head * key_head
    value += batch * value_batch + head * value_head
    out += batch * out_batch + head * out_head

    query_at = rows[:, None] * query_row + columns[None, :] * query_column
    q = tl.load(query + query_at, mask=inside, other=0.0)
    highest = tl.full((ROWS,), -float("inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    result = tl.zeros((ROWS, DIM), tl.float32)

    for first in range(0, (tile + 1) * ROWS, KEYS):
        keys = first + tl.arange(0, KEYS)
        key_at = keys[None, :] * key_row + columns[:, None] * key_column
        k = tl.load(key + key_at, mask=keys[None, :] < length, other=0.0)
        value_at = keys[:, None] * value_row + columns[None, :] * value_column
        v = tl.load(value + value_at, mask=keys[:, None] < length, other=0.0)
        scores = tl.dot(q, k) * scale
        seen = (keys[None, :] < length) & (keys[None, :] <= rows[:, None])
        scores = tl.where(seen, scores, -float("inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        weights = tl.exp(scores - higher[:, None])
        shrink = tl.exp(highest - higher)
        total = total * shrink + tl.sum(weights, 1)
        result = result * shrink[:, None] + tl.dot(weights.to(v.dtype), v)
        highest = higher

    out_at = rows[:, None] * out_row + columns[None, :] * out_column
    tl.store(out + out_at, (result / total[:, None]).to(q.dtype), mask=inside)
