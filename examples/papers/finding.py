"""What showing a claim found: checks and figures, as values that travel as JSON."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from examples.papers.charts import Chart, Line, Matrices
from flashgen.spec.gpu import Gpu
from flashgen.spec.records import record_of

EXACT = 1e-12
"""A difference below it is rounding, in float64."""

How = Literal[
    "counted", "closed form", "computed", "machine code", "estimated", "measured", "looked up"
]
"""How a figure came about; MEANINGS says it in words."""

MEANINGS: dict[How, str] = {
    "counted": "added up while the kernels run in Triton's interpreter, or a model of them in "
    "Python. No formula is involved.",
    "closed form": "a formula of the sizes. Where it stands beside a count, both must be equal.",
    "computed": "attention is computed, and compared with float64 or exact fractions.",
    "machine code": "read from the kernel that the compiler made for a GPU.",
    "estimated": "a time by this project's model of a GPU. It is no measurement.",
    "measured": "a time taken on the GPU of this machine.",
    "looked up": "from a data sheet, a paper, or the tables of this project.",
}


@dataclass(frozen=True, kw_only=True)
class Check:
    """A statement about what was found, and whether it holds. points: at how many points out of
    how many, where some may differ.
    """

    text: str
    how: How
    holds: bool
    points: tuple[int, int] | None = None

    @property
    def verdict(self) -> str:
        """holds, holds at 20 of 21, or fails."""
        if not self.holds:
            return "fails"
        if self.points is None or self.points[0] == self.points[1]:
            return "holds"
        return f"holds at {self.points[0]} of {self.points[1]}"


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row of a table: its name and its cells. bar: the length of its bar, 0 to 1."""

    name: str
    cells: tuple[str, ...]
    bar: float | None = None


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows under a title; columns names the first column too. caption: what to see."""

    title: str
    caption: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]

    @property
    def numeric(self) -> tuple[bool, ...]:
        """Which columns after the first hold numbers: these are aligned at the right."""
        columns = zip(*(row.cells for row in self.rows), strict=True)
        return tuple(any(cell[:1].isdigit() for cell in column) for column in columns)


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One of a chart, matrices and a table. how: all ways in which its figures came about."""

    how: tuple[How, ...]
    chart: Chart | None = None
    matrices: Matrices | None = None
    table: Table | None = None

    @property
    def shown(self) -> Chart | Matrices | Table:
        """The one that it has."""
        (only,) = (each for each in (self.chart, self.matrices, self.table) if each is not None)
        return only


@dataclass(frozen=True, kw_only=True)
class Finding:
    """All of a claim. notes: sentences below it."""

    checks: tuple[Check, ...]
    figures: tuple[Figure, ...]
    notes: tuple[str, ...] = ()

    @property
    def holds(self) -> bool:
        """Whether every check does."""
        return all(check.holds for check in self.checks)

    @property
    def verdict(self) -> str:
        """That of the check which holds least."""
        verdicts = sorted((check.verdict for check in self.checks), key=len, reverse=True)
        return verdicts[0] if self.holds else "fails"


def check(how: How, text: str, holds: bool, points: tuple[int, int] | None = None) -> Check:
    """A check of a finding."""
    return Check(how=how, text=text, holds=holds, points=points)


def charted(how: tuple[How, ...] = ("counted",), **fields: Any) -> Figure:
    """A figure that is a Chart with these fields."""
    return Figure(how=how, chart=Chart(**fields))


def tabled(how: tuple[How, ...], rows: Iterable[Row | Sequence[str]], **fields: Any) -> Figure:
    """A figure that is a Table with these fields; a row may be its name and its cells."""
    made = (row if isinstance(row, Row) else Row(name=row[0], cells=tuple(row[1:])) for row in rows)
    return Figure(how=how, table=Table(rows=tuple(made), **fields))


def drawn(**fields: Any) -> Figure:
    """A figure of Matrices with these fields, which are computed."""
    return Figure(how=("computed",), matrices=Matrices(**fields))


def line(
    name: str, points: Mapping[int, float] | Iterable[tuple[float, float]], **kind: bool
) -> Line:
    """A line of a chart, y by x; kind as Line has it."""
    pairs = points.items() if isinstance(points, Mapping) else points
    return Line(name=name, points=tuple((float(x), float(y)) for x, y in pairs), **kind)


def powers(least: int, most: int) -> tuple[int, ...]:
    """The powers of two from least to most, both of which are one."""
    return tuple(1 << n for n in range(least.bit_length() - 1, most.bit_length()))


@dataclass(frozen=True, kw_only=True)
class Find:
    """Show one claim: call "module:function", with the GPU if there is one."""

    shows: str
    gpu: Gpu | None


def find(payload: dict[str, Any]) -> dict[str, Any]:
    """The task of a child process: the fields of a Find -> those of a Finding. Raises what the
    function raises.
    """
    # The interpreter's numpy warns of the infinities of masked rows, which a GPU has too.
    warnings.filterwarnings("ignore", category=RuntimeWarning, module="triton")
    asked = record_of(Find, payload, "the task")
    module, name = asked.shows.split(":")
    function = getattr(importlib.import_module(module), name)
    return asdict(function() if asked.gpu is None else function(asked.gpu))
