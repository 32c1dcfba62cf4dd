"""A matrix product in Triton as autotuners have it, with strides as arguments. Only ever compiled.

It stands in for the kernels of benchmarks/landscapes/h100_gemm.csv, whose text is not kept here.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

TILES_TOGETHER = tl.constexpr(8)
"""Tiles of rows that run after one another for a tile of columns, so that L2 serves both."""


@triton.jit
def multiply(
    a, b, c, m, n, k, a_row, a_column, b_row, b_column,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """C = A B, of m x k and k x n. WHOLE: DEPTH divides k."""
    tiles_down, tiles_across = tl.cdiv(m, ROWS), tl.cdiv(n, COLUMNS)
    of_group = TILES_TOGETHER * tiles_across
    group, place = tl.program_id(0) // of_group, tl.program_id(0) % of_group
    height = tl.minimum(tiles_down - group * TILES_TOGETHER, TILES_TOGETHER)
    rows = (group * TILES_TOGETHER + place % height) * ROWS + tl.arange(0, ROWS)
    columns = place // height * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    rows_read = tl.max_contiguous(tl.multiple_of(rows % m, ROWS), ROWS)
    columns_read = tl.max_contiguous(tl.multiple_of(columns % n, COLUMNS), COLUMNS)
    a += rows_read[:, None] * a_row + depth[None, :] * a_column
    b += depth[:, None] * b_row + columns_read[None, :] * b_column
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for left in range(k, 0, -DEPTH):
        if WHOLE:
            tile_a, tile_b = tl.load(a), tl.load(b)
        else:
            tile_a = tl.load(a, mask=depth[None, :] < left, other=0.0)
            tile_b = tl.load(b, mask=depth[:, None] < left, other=0.0)
        total += tl.dot(tile_a, tile_b)
        a += DEPTH * a_column
        b += DEPTH * b_row
    inside = (rows[:, None] < m) & (columns[None, :] < n)
    tl.store(c + rows[:, None] * n + columns[None, :], total.to(c.dtype.element_ty), mask=inside)
