"""Tiling as pictures: a matrix product by blocks, and softmax by tiles, wrong and right."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from examples.papers.charts import Cell, Matrix
from examples.papers.counter import Counter
from examples.papers.finding import EXACT, Finding, charted, check, drawn, line, powers
from flashgen.reference.attention import max_abs
from flashgen.report.charts import Scale

N, BLOCK = 4, 2
"""Rows and columns of the matrices that are drawn, and of their blocks."""
LARGE = 128
"""Rows and columns of those whose accesses are counted."""
A_COLOUR, B_COLOUR, C_COLOUR = 0, 1, 2


@triton.jit
def product_by_blocks(a_ptr, b_ptr, c_ptr, N: tl.constexpr, BLOCK: tl.constexpr):
    """C = A B, all (N, N): a program computes one block of C from a row of blocks and a column."""
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    c = tl.zeros([BLOCK, BLOCK], tl.float32)
    for start in tl.range(0, N, BLOCK):
        inner = start + tl.arange(0, BLOCK)
        a = tl.load(a_ptr + rows[:, None] * N + inner[None, :])
        b = tl.load(b_ptr + inner[:, None] * N + columns[None, :])
        c = tl.dot(a, b, c)
    tl.store(c_ptr + rows[:, None] * N + columns[None, :], c)


def block_matmul() -> Finding:
    """One block of a product from blocks, and what a larger block saves."""
    a = torch.tensor([[1, 0, 2, 1], [0, 3, 1, 1], [2, 1, 0, 1], [1, 1, 3, 0]])
    b = torch.tensor([[1, 2, 0, 1], [3, 0, 1, 1], [0, 1, 2, 0], [1, 1, 0, 2]])
    c = a @ b
    first, second = a[2:, :2] @ b[:2, 2:], a[2:, 2:] @ b[2:, 2:]
    blocks = powers(16, LARGE)
    counted = {block: _accesses(block) for block in blocks}
    forms = {block: 4 * (2 * LARGE**3 // block + LARGE**2) / 1e6 for block in blocks}
    return Finding(
        checks=(
            check(
                "computed",
                "the marked block of C is the sum of two products of blocks, number by number",
                torch.equal(first + second, c[2:, 2:]),
            ),
            check(
                "counted",
                f"{len(blocks)} counts equal 2 N^3 / b + N^2 elements, b the block's rows",
                all(moved == forms[block] for block, (moved, _) in counted.items()),
            ),
            check(
                "computed",
                "every block size gives the product itself",
                all(right for _, right in counted.values()),
            ),
        ),
        figures=(
            drawn(
                title="A product by blocks",
                caption="The marked block of C needs two blocks of A and two of B, and no "
                "other. S = Q K^T and O = P V are computed so, block by block.",
                matrices=(
                    _marked("A", a, A_COLOUR, rows=(2, 4)),
                    _marked("B", b, B_COLOUR, columns=(2, 4)),
                    _marked("C = A B", c, C_COLOUR, rows=(2, 4), columns=(2, 4)),
                ),
            ),
            drawn(
                title="The marked block, in two steps",
                caption="Left block of A times upper block of B; right block times lower one; "
                "their sum.",
                matrices=(
                    _marked("left x upper", first, A_COLOUR),
                    _marked("right x lower", second, B_COLOUR),
                    _marked("sum", first + second, C_COLOUR),
                ),
            ),
            charted(
                how=("counted", "closed form"),
                title="A larger block loads less",
                caption=f"Matrices of {LARGE} x {LARGE} in float32. A block is loaded once and "
                "used for all rows and columns of the other one. That is what fast memory is for.",
                x=Scale(name="b, rows and columns of a block", at=blocks),
                y=Scale(name="loaded and stored, MB"),
                lines=(
                    line("2 N^3 / b + N^2", forms, closed=True),
                    line("counted", {b: mb for b, (mb, _) in counted.items()}, scattered=True),
                ),
            ),
        ),
    )


def _accesses(block: int) -> tuple[float, bool]:
    """MB that a product by blocks loads and stores, and whether it is right."""
    draw = torch.Generator().manual_seed(block)
    a, b = (torch.randint(-4, 5, (LARGE, LARGE), generator=draw).float() for _ in range(2))
    c = torch.empty(LARGE, LARGE)
    with Counter() as counter:
        product_by_blocks[(LARGE // block, LARGE // block)](a, b, c, N=LARGE, BLOCK=block)
    return counter.bytes / 1e6, torch.equal(c, a @ b)


def _marked(
    name: str,
    of: Tensor,
    colour: int,
    rows: tuple[int, int] | None = None,
    columns: tuple[int, int] | None = None,
) -> Matrix:
    """Whole numbers, those of some rows and columns coloured; of all if there is None."""
    low, high = rows or (0, of.shape[0])
    left, right = columns or (0, of.shape[1])

    def cell(row: int, column: int) -> Cell:
        marked = low <= row < high and left <= column < right
        return Cell(text=str(int(of[row, column])), colour=colour, shade=0.6 * marked)

    return Matrix(
        name=name,
        cells=tuple(tuple(cell(i, j) for j in range(of.shape[1])) for i in range(of.shape[0])),
        tile=(BLOCK, BLOCK),
    )


SCORES = ((2, 1, 0, 0, 3, 1), (1, 1, 2, 0, 0, 1), (0, 4, 0, 1, 0, 0))
TILE = 3


def tile_softmax() -> Finding:
    """The softmax of each tile by itself, the right one, and how the first is repaired."""
    s = torch.tensor(SCORES, dtype=torch.float64)
    right = s.softmax(-1)
    tiles = s.shape[1] // TILE
    of_tiles = torch.cat([tile.softmax(-1) for tile in s.tensor_split(tiles, -1)], -1)
    shares = torch.stack([tile.logsumexp(-1) for tile in s.tensor_split(tiles, -1)], -1).softmax(-1)
    repaired = of_tiles * shares.repeat_interleave(TILE, -1)
    v = torch.arange(6, dtype=torch.float64)[:, None]
    o, wrong = (right @ v)[:, 0], (of_tiles @ v)[:, 0]
    off, off_halved = float((wrong - o).abs().min()), float((wrong / tiles - o).abs().min())
    error = max_abs(repaired - right)
    return Finding(
        checks=(
            check(
                "computed",
                f"tile by tile each row adds up to {tiles} in place of 1",
                max_abs(of_tiles.sum(-1) - tiles) < EXACT,
            ),
            check(
                "computed",
                f"O is then wrong by {off:.2f} and more, and divided by {tiles} still by "
                f"{off_halved:.2f} and more, V being 0 to 5",
                off > 0.01 and off_halved > 0.01,
            ),
            check(
                "computed",
                f"each tile times its share of the row is right again, error {error:.1e}",
                error < EXACT,
            ),
        ),
        figures=(
            drawn(
                title="Scores, two tiles of three keys",
                caption="Each row is a query, each column a key. Softmax turns a row into "
                "weights that are positive and add up to 1; larger scores get larger ones.",
                matrices=(_weights("scores S", s, whole=True),),
                across=1,
            ),
            drawn(
                title="Wrong: each tile by itself",
                caption="Each half adds up to 1, so the row does to 2. Small scores beside "
                "small ones get weights that are far too large.",
                matrices=(_weights("softmax of each tile | sum", of_tiles),),
                across=1,
            ),
            drawn(
                title="Right: over the whole row",
                caption="The same numbers, each half times the share of its tile: the sum of "
                "e^s in the tile over that of the row.",
                matrices=(_weights("softmax of the row | sum", right),),
                across=1,
            ),
        ),
        notes=(
            "The share of a tile depends on all keys, and is not known before the last one. Online "
            "softmax, the next section, keeps a running maximum and sum instead, and rescales.",
        ),
    )


def _weights(name: str, of: Tensor, *, whole: bool = False) -> Matrix:
    """Weights coloured by size, and their sum in one more column; or whole scores."""

    def row_of(values: list[float]) -> tuple[Cell, ...]:
        if whole:
            return tuple(Cell(text=f"{x:g}", shade=x / 4) for x in values)
        sum_ = Cell(text=f"{sum(values):.2f}", colour=C_COLOUR, shade=0.5)
        return (*(Cell(text=f"{x:.2f}", shade=x) for x in values), sum_)

    rows: list[Any] = of.tolist()
    return Matrix(name=name, cells=tuple(map(row_of, rows)), tile=(len(rows), TILE))
