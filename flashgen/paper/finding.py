"""What showing a claim found: checks, charts and tables, as values that travel as JSON."""

from __future__ import annotations

import importlib
import warnings
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Check:
    """A statement about what was computed, and whether it holds."""

    text: str
    holds: bool


@dataclass(frozen=True, kw_only=True)
class Line:
    """Points of a chart that belong together. closed: computed by a closed form, so they are drawn
    as a dashed line without marks; scattered: marks without a line.
    """

    name: str
    points: tuple[tuple[float, float], ...]
    closed: bool = False
    scattered: bool = False


@dataclass(frozen=True, kw_only=True)
class Scale:
    """An axis: its name with the unit, and the values that have a tick, if not round numbers."""

    name: str
    log: bool = True
    low: float | None = None
    at: tuple[float, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class Limit:
    """A horizontal line with a name."""

    y: float
    name: str


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Lines over two axes. caption: what to see."""

    title: str
    caption: str
    x: Scale
    y: Scale
    lines: tuple[Line, ...]
    limits: tuple[Limit, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row of a table: its name and its cells. bar: the length of its bar, 0 to 1."""

    name: str
    cells: tuple[str, ...]
    bar: float | None = None


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows under a caption; columns names the first column too."""

    caption: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """All of a claim. notes: sentences below it."""

    checks: tuple[Check, ...]
    charts: tuple[Chart, ...] = ()
    tables: tuple[Table, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def holds(self) -> bool:
        """Whether every check does."""
        return all(check.holds for check in self.checks)


def powers(least: int, most: int) -> tuple[int, ...]:
    """The powers of two from least to most, both of which are one."""
    return tuple(1 << n for n in range(least.bit_length() - 1, most.bit_length()))


def find(payload: dict[str, Any]) -> dict[str, Any]:
    """The task of a child process that shows one claim: {shows: "module:function"} -> the fields of
    its Finding. Raises what the function raises.
    """
    # The interpreter's numpy warns of the infinities of masked rows, which a GPU has too.
    warnings.filterwarnings("ignore", category=RuntimeWarning, module="triton")
    module, function = payload["shows"].split(":")
    return asdict(getattr(importlib.import_module(module), function)())
