"""The charts of the page: lines over two axes, and matrices with a number in each cell."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from markupsafe import Markup

from flashgen.errors import InvalidArgument
from flashgen.report.charts import (
    COLOURS,
    HEIGHT,
    MARKERS,
    SOFT,
    WIDTH,
    Limit,
    Scale,
    draw_limit,
    draw_scale,
    marks,
    svg,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LONGEST_OF_TWO = 24
"""Characters of a line's name that fit half the width."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """Points (x, y) that belong together. closed: computed by a closed form, so they are drawn as
    a dashed line without marks; scattered: marks without a line.
    """

    name: str
    points: tuple[tuple[float, float], ...]
    closed: bool = False
    scattered: bool = False


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Lines over two axes. caption: what to see."""

    title: str
    caption: str
    x: Scale
    y: Scale
    lines: tuple[Line, ...]
    limits: tuple[Limit, ...] = ()

    def __post_init__(self) -> None:
        if len(self.lines) > len(COLOURS):
            raise InvalidArgument(
                f"a chart has at most {len(COLOURS)} lines, each with a colour and a marker of its "
                f"own: {self.title!r} has {len(self.lines)}"
            )


@dataclass(frozen=True, kw_only=True)
class Cell:
    """An element of a matrix: its text, a colour of COLOURS by number, and how strong, 0 to 1."""

    text: str
    colour: int = 0
    shade: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """Cells by row under a name. tile: rows and columns between the thick lines, if any."""

    name: str
    cells: tuple[tuple[Cell, ...], ...]
    tile: tuple[int, int] | None = None


@dataclass(frozen=True, kw_only=True)
class Matrices:
    """Matrices of one size, side by side in `across` columns. caption: what to see."""

    title: str
    caption: str
    matrices: tuple[Matrix, ...]
    across: int = 3


def matrices(picture: Matrices) -> Markup:
    """The SVG of matrices, with the number in each cell."""
    rows, columns = len(picture.matrices[0].cells), len(picture.matrices[0].cells[0])
    width = WIDTH / picture.across
    height = (width - 12) * rows / columns + 22

    def draw(*panels: Axes) -> None:
        for axes, matrix in zip(panels, picture.matrices, strict=True):
            _matrix(axes, matrix)

    label = f"{picture.title}: {', '.join(matrix.name for matrix in picture.matrices)}"
    size = WIDTH, round(height * -(-len(picture.matrices) // picture.across))
    return svg(draw, label, size, count=len(picture.matrices), across=picture.across)


def _matrix(axes: Axes, matrix: Matrix) -> None:
    from matplotlib.patches import Rectangle

    rows, columns = len(matrix.cells), len(matrix.cells[0])
    for row, cells in enumerate(matrix.cells):
        for column, cell in enumerate(cells):
            if cell.shade:
                fill, strength = COLOURS[cell.colour], 0.1 + 0.4 * cell.shade
                axes.add_patch(Rectangle((column, row), 1, 1, lw=0, fc=fill, alpha=strength))
            axes.text(column + 0.5, row + 0.5, cell.text, ha="center", va="center", fontsize=10)
    tile = matrix.tile or (rows, columns)
    for row in range(rows + 1):
        width = 1.2 if row % tile[0] == 0 else 0.3
        axes.plot((0, columns), (row, row), color=SOFT, linewidth=width)
    for column in range(columns + 1):
        width = 1.2 if column % tile[1] == 0 else 0.3
        axes.plot((column, column), (0, rows), color=SOFT, linewidth=width)
    axes.set(xlim=(-0.1, columns + 0.1), ylim=(rows + 0.1, -0.1), aspect="equal")
    axes.set_axis_off()
    axes.set_title(matrix.name, fontsize="medium", color=SOFT)


def lines(chart: Chart) -> Markup:
    """The SVG of a chart, with its legend. On a logarithmic axis all points are above 0."""
    names = ", ".join(line.name for line in chart.lines)
    label = f"{chart.title}: {chart.y.name} over {chart.x.name}; {names}"

    def draw(axes: Axes) -> None:
        for number, line in enumerate(chart.lines):
            colour, marker = COLOURS[number % 8], MARKERS[number % 9]
            if not line.scattered:
                dashes, label_ = ("--", line.name) if line.closed else ("-", None)
                axes.plot(*zip(*line.points, strict=True), dashes, color=colour, label=label_)
            if not line.closed:
                titles = [
                    f"{line.name}: {chart.x.name} {x:g}, {chart.y.name} {y:.4g}"
                    for x, y in line.points
                ]
                marks(axes, line.points, colour, marker, titles, label=line.name)
        for limit in chart.limits:
            draw_limit(axes, limit, "--")
        draw_scale(axes, "x", chart.x)
        draw_scale(axes, "y", chart.y)

    columns = 1 if max(len(line.name) for line in chart.lines) > LONGEST_OF_TWO else 2
    rows = -(-len(chart.lines) // columns)
    return svg(draw, label, (WIDTH, HEIGHT + 14 * rows), columns=columns)
