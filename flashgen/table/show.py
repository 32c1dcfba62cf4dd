"""Tables, targets and selections as people read them in a terminal."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.segment import Segment
from rich.table import Table as Grid
from rich.text import Text

from flashgen.errors import printable
from flashgen.runtime.selection import relatives
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.gpu import ALIASES, NAMED, TARGETS, Gpu, product_of
from flashgen.spec.vocabulary import DECODING
from flashgen.table.entry import Entry, figure
from flashgen.table.evidence import facts_of
from flashgen.table.table import Table, sources

WIDTH_OF_FILES = 200
"""Columns where the output is no terminal: wide enough that no kernel's name is cut."""

NO_CODE = "none: Triton has no code for its tensor cores"

NARROW = 120
"""Columns with which the longest slug and its facts fit a line."""


class _Printable(Console):
    """A console that prints text as errors.printable has it; its own styles stay."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """As Console.render."""
        for segment in super().render(renderable, options):
            text, style, control = segment
            yield segment if control else Segment(printable(text), style)


def console() -> Console:
    """The console of standard output. That says whether it is a terminal: in a notebook an
    environment variable would claim so.
    """
    if sys.stdout.isatty():
        return _Printable(highlight=False, markup=False)
    return _Printable(highlight=False, markup=False, width=WIDTH_OF_FILES, force_terminal=False)


def wrapped(line: str) -> str:
    """A line, printable, folded to the terminal, what follows indented deeper; whole where there is
    none.
    """
    line = printable(line)
    if not sys.stdout.isatty():
        return line
    indent = line[: len(line) - len(line.lstrip())]
    # Kernel names, paths and commands are copied: they are never cut.
    folded = textwrap.wrap(
        line.strip(),
        console().width,
        initial_indent=indent,
        subsequent_indent=f"{indent}    ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(folded)


@dataclass(frozen=True, kw_only=True)
class EntriesGrid:
    """Entries as a terminal shows them: a row each where rows fit, else two lines each, and no word
    of them is lost. Times are microseconds at the length "at", 16384 tokens in all; the rate is
    TFLOP/s, of a decode GB/s.

    "estimated" and "stale" stand where they hold; p and regret, of entry.EntryEvidence, where any
    entry has one.
    """

    entries: tuple[Entry, ...]
    stale: Collection[Entry] = ()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        figures = self._figures()
        heads = ("spec", "seq_k", "at", "config", "from", *figures)
        rows = [heads, *(self._row(entry, figures) for entry in self.entries)]
        lines = _columns(rows, 5)
        if max(map(len, lines)) > options.max_width:  # names are copied: no word of them is cut
            lines = self._pairs(heads, rows[1:])
        top = 1 if len(lines) == len(rows) else 2
        yield Text("\n".join(lines[:top]), style="bold")
        if len(lines) > top:
            yield Text("\n".join(lines[top:]), overflow="fold")

    def _row(self, entry: Entry, figures: Mapping[str, Callable[[Entry], str]]) -> tuple[str, ...]:
        origin = entry.result.source + ", executed" * bool(entry.tritons)
        origin += ", stale" * (entry in self.stale)
        cells = (cell(entry) for cell in figures.values())
        seq_k, at = str(entry.bucket), str(entry.problem.seq_k)
        return entry.spec.name, seq_k, at, entry.config.label, origin, *cells

    def _pairs(self, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
        """Spec and config, to be copied; below them the rest, in columns for which 80 suffice."""
        rest = [(row[1], row[2], row[4].split(", ")[0], *row[5:]) for row in (heads, *rows)]
        found = ["spec  config"]
        for number, line in enumerate(_columns(rest, 3)):
            if number:
                row = rows[number - 1]
                notes = row[4].partition(", ")[2]
                found.append(f"{row[0]}  {row[3]}" + (f"  ({notes})" if notes else ""))
            found.append(f"  {line}")
        return found

    def _figures(self) -> dict[str, Callable[[Entry], str]]:
        """The columns of figures, and what each says of an entry."""
        figures: dict[str, Callable[[Entry], str]] = {
            "us": lambda entry: _number(entry.result.median_us, 1),
            **self._rates(),
            "x default": lambda entry: _number(entry.result.speedup, 2),
            "floors": lambda entry: _number(entry.result.max_abs_err_floors, 2),
        }
        if any(entry.evidence.p_value is not None for entry in self.entries):
            figures["p"] = lambda entry: _number(entry.evidence.p_value, 1, "g")
        if any(entry.evidence.regret for entry in self.entries):
            figures["regret"] = lambda entry: _number(entry.evidence.regret or None, 1, "%")
        return figures

    def _rates(self) -> dict[str, Callable[[Entry], str]]:
        """The column of rates: one unit in the heading, or with each figure where there are two."""
        units = {rate_of(entry)[1] for entry in self.entries}
        if len(units) == 1:
            return {units.pop(): lambda entry: _number(rate_of(entry)[0], 0)}
        return {"rate": lambda entry: _with_unit(*rate_of(entry))}


def _columns(rows: Sequence[Sequence[str]], words: int) -> list[str]:
    """Lines of cells in columns: the first `words` to the left, figures to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        " ".join(
            cell.ljust(width) if n < words else cell.rjust(width)
            for n, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def rate_of(entry: Entry) -> tuple[float | None, str]:
    """How fast an entry is, and the unit: a decode waits for memory, so GB/s says more of it."""
    if entry.spec.direction in DECODING:
        return entry.gbs, "GB/s"
    return entry.tflops, "TFLOP/s"


def entries_grid(entries: Iterable[Entry], stale: Collection[Entry] = ()) -> EntriesGrid:
    """Entries, to be printed on a rich console of any width."""
    return EntriesGrid(entries=tuple(entries), stale=stale)


BESIDE = ("tried", "registers", "shared", "problem", "run", "digest")
"""Facts of the evidence that a program finds beside the result."""


def record_of(
    table: Table, entries: Iterable[Entry], stale: Collection[Entry] = ()
) -> dict[str, Any]:
    """A table and some of its entries, for programs: what files say of each, and what follows."""
    found = []
    for entry in entries:
        rate, unit = rate_of(entry)
        more: dict[str, Any] = {"stale": entry in stale}
        if rate is not None:
            more["gbs" if unit == "GB/s" else "tflops"] = float(figure(rate))
        result, evidence = entry.result, facts_of(_sorted(entry))
        row = {
            "name": entry.spec.name,
            "spec": spec_fields(entry.spec),
            "seq_k": [entry.bucket.low, entry.bucket.high],
            "config": entry.config.label,
            "source": result.source,
            "us": result.median_us,
            "default_us": evidence.pop("default_us", None),
            "floors": result.max_abs_err_floors,
            **{name: evidence.pop(name, None) for name in BESIDE},
        }
        known = {name: value for name, value in row.items() if value is not None}
        found.append(known | more | {"evidence": evidence})
    gpu = {"slug": table.gpu.slug, "name": table.gpu.name, "arch": table.gpu.arch}
    runs = [asdict(run) | {"date": run.date} for run in table.runs]
    return {"gpu": gpu, "runs": runs, "entries": found}


def spec_fields(spec: AttentionSpec) -> dict[str, Any]:
    """The fields of a spec: four always, the others where they are not at their defaults."""
    held = {field.name: getattr(spec, field.name) for field in fields(spec)}
    usual = {field.name: field.default for field in fields(spec)} | {"head_dim_v": spec.head_dim}
    shown = ("direction", "dtype", "head_dim", "mask")
    return {n: value for n, value in held.items() if n in shown or value != usual[n]}


def _sorted(entry: Entry) -> Entry:
    """The entry with its runners-up by time."""
    evidence = replace(entry.evidence, runners_up=entry.evidence.fastest_first)
    return replace(entry, evidence=evidence)


def table_heading(table: Table) -> str:
    """One line on a table: the GPU, and how many entries were measured, how many estimated."""
    counts = ", ".join(f"{number} {source}" for source, number in sources(table.entries).items())
    more = len(table.executed)
    executed = f"; {more} executed and not timed serve in their place" if more else ""
    heading = f"{table.gpu.name} ({table.gpu.arch}): {len(table.entries)} entries"
    return f"{heading}, {counts or 'none'}{executed}"


def targets_grid(targets: Iterable[Gpu], tables: Mapping[str, Table], width: int) -> Grid:
    """Known targets and the tables there are: facts, and what the entries come from. width: the
    terminal's columns; at 80 only slugs are folded.
    """
    between = ",\n" if width < NARROW else ", "
    grid = Grid(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    grid.add_column("slug", overflow="fold")
    grid.add_column("arch", no_wrap=True)
    for name in ("SMs", "shared KiB", "GB/s", "TFLOP/s"):
        grid.add_column(name, justify="right", no_wrap=True)
    grid.add_column("table")
    for gpu in targets:
        table = tables.get(gpu.slug) or tables.get(product_of(gpu.slug))
        held = sources(table.entries) if table else {}
        grid.add_row(
            gpu.slug,
            gpu.arch,
            str(gpu.sms),
            str(gpu.shared_per_block // 1024),
            _number(gpu.bandwidth_gbs, 0),
            _number(gpu.peak_tflops, 0),
            between.join(f"{number} {source}" for source, number in held.items()) or "none",
        )
    return grid


def named_grid(tables: Mapping[str, Table]) -> Grid:
    """Products that are known by name alone, and those served as another: whose entries serve."""
    archs = {slug: table.gpu.arch for slug, table in tables.items()}
    grid = Grid(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for name in ("slug", "arch"):
        grid.add_column(name, no_wrap=True)
    grid.add_column("SMs", justify="right", no_wrap=True)
    grid.add_column("served by the entries of")
    for slug, product in NAMED.items():
        order = relatives(archs, slug, product)
        grid.add_row(slug, product.arch, str(product.sms), order[0] if order else NO_CODE)
    for slug, other in ALIASES.items():
        gpu = TARGETS[other]
        whose = other if other in tables else relatives(archs, slug, gpu)[0]
        grid.add_row(slug, gpu.arch, "", whose)
    return grid


def _number(value: float | None, digits: int, form: str = "f") -> str:
    return "-" if value is None else f"{value:.{digits}{form}}"


def _with_unit(value: float | None, unit: str) -> str:
    return "-" if value is None else f"{value:.0f} {unit}"
