"""What showing a claim found: checks, charts and tables, as values that travel as JSON."""

from __future__ import annotations

import importlib
import warnings
from dataclasses import asdict, dataclass
from typing import Any

from flashgen.report.charts import Chart


@dataclass(frozen=True, kw_only=True)
class Check:
    """A statement about what was computed, and whether it holds."""

    text: str
    holds: bool


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
