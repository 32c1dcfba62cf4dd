"""Plain attention forwards in Triton, as people write them who publish timings. Only ever compiled.

They stand in for the kernels of published_landscapes.yaml, whose text is not kept here: the same loops over the same tiles, with the same masks, loads and exponentials.
flashgen's own kernels are written another way.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _walk(
    query, key, value, pages, rows, begin, end, length, scale, highest, total, result,
    key_row, key_column, value_row, value_column,
    KEYS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
    DIAGONAL: tl.constexpr, BOUNDS: tl.constexpr, NATURAL: tl.constexpr, BY_ROWS: tl.constexpr,
):  # fmt: skip
    """The online softmax over keys [begin, end)."""
    columns = tl.arange(0, DIM)
    for first in range(begin, end, KEYS):
        keys = first + tl.arange(0, KEYS)
        inside = keys < length
        place = keys
        if PAGE:
            place = tl.load(pages + keys // PAGE, mask=inside, other=0) * PAGE + keys % PAGE
        key_at = place[None, :] * key_row + columns[:, None] * key_column
        if BY_ROWS:
            key_at = place[:, None] * key_row + columns[None, :] * key_column
        value_at = place[:, None] * value_row + columns[None, :] * value_column
        if BOUNDS:
            k = tl.load(
                key + key_at, mask=inside[:, None] if BY_ROWS else inside[None, :], other=0.0
            )
            v = tl.load(value + value_at, mask=inside[:, None], other=0.0)
        else:
            k = tl.load(key + key_at)
            v = tl.load(value + value_at)
        scores = tl.dot(query, tl.trans(k) if BY_ROWS else k)
        if BOUNDS:
            seen = inside[None, :]
            if DIAGONAL:
                seen = seen & (keys[None, :] <= rows[:, None])
            scores = tl.where(seen, scores * scale, -float("inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        if NATURAL:
            weights = tl.exp(scores - higher[:, None])
            shrink = tl.exp(highest - higher)
        else:
            weights = tl.exp2(scores - higher[:, None])
            shrink = tl.exp2(highest - higher)
        total = total * shrink + tl.sum(weights, 1)
        result = result * shrink[:, None] + tl.dot(weights.to(v.dtype), v)
        highest = higher
    return highest, total, result


@triton.jit
def attend(
    out, query, key, value, pages, table_row,
    out_batch, out_head, out_row, out_column,
    query_batch, query_head, query_row, query_column,
    key_batch, key_head, key_row, key_column,
    value_batch, value_head, value_row, value_column,
    length, before, heads, scale,
    ROWS: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr, GROUP: tl.constexpr,
    PAGE: tl.constexpr, CAUSAL: tl.constexpr, SPLIT: tl.constexpr, BOUNDS: tl.constexpr,
    NATURAL: tl.constexpr, BY_ROWS: tl.constexpr,
):  # fmt: skip
    """One tile of ROWS queries of one head; grid (tiles of queries, batch * heads).

    GROUP: query heads a key head has. PAGE: keys a page, 0 where K and V are contiguous; before:
    keys before the first query. SPLIT: tiles on the diagonal have a loop of their own. BOUNDS: keys
    are held against the length, and all scores scaled (Q is, without it). NATURAL: powers of e, not
    of two. BY_ROWS: K is loaded row by row, and transposed.
    """
    tile = tl.program_id(0)
    batch, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    rows = tile * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, DIM)
    inside = rows[:, None] < length

    query += batch * query_batch + head * query_head
    key += batch * key_batch + head // GROUP * key_head
    value += batch * value_batch + head // GROUP * value_head
    out += batch * out_batch + head * out_head
    pages += batch * table_row

    query_at = rows[:, None] * query_row + columns[None, :] * query_column
    q = tl.load(query + query_at, mask=inside, other=0.0)
    if not BOUNDS:
        q = (q * scale).to(q.dtype)
    highest = tl.full((ROWS,), -float("inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    result = tl.zeros((ROWS, DIM), tl.float32)
    begin, skipped = 0, 0
    if PAGE:
        skipped = before
    if SPLIT:
        highest, total, result = _walk(
            q, key, value, pages, rows + skipped, 0, tile * ROWS, length + skipped, scale,
            highest, total, result, key_row, key_column, value_row, value_column,
            KEYS, DIM, PAGE, False, BOUNDS, NATURAL, BY_ROWS,
        )  # fmt: skip
        begin = tile * ROWS
    end = length + skipped
    if CAUSAL:
        end = tl.minimum((tile + 1) * ROWS + skipped, end)
    highest, total, result = _walk(
        q, key, value, pages, rows + skipped, begin, end, length + skipped, scale,
        highest, total, result, key_row, key_column, value_row, value_column,
        KEYS, DIM, PAGE, CAUSAL, BOUNDS, NATURAL, BY_ROWS,
    )  # fmt: skip
    out_at = rows[:, None] * out_row + columns[None, :] * out_column
    tl.store(out + out_at, (result / total[:, None]).to(q.dtype), mask=inside)
