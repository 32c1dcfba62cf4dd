"""Report: a table and its log as one HTML file, which loads nothing from the network.

report.html.jinja is the page. This module computes its content: for each entry the winner, what it
beats, and the history of its search; for all, estimates against measurements. If the log has
nothing about an entry, the entry is shown without a history.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

import flashgen
from flashgen.errors import InvalidArgument, ToolchainError
from flashgen.files import write_whole
from flashgen.report import charts
from flashgen.report.calibrate import MeasuredEstimate, calibrations, pairs_of
from flashgen.report.charts import Limit
from flashgen.report.history import Searches, SearchHistory
from flashgen.report.importance import fastest_share, importances
from flashgen.schedules.config import kernel_name
from flashgen.schedules.outcome import Outcome
from flashgen.table.entry import Entry, Run, figure
from flashgen.table.table import Table, sources

MOST_MARKS = 2000
"""Marks of the scatter; of more pairs so many are drawn, evenly taken. Each has its title."""

_TOLD = {
    "measured": "timed on the GPU",
    "estimated": "computed by the model, not timed",
    "replayed": "read from a recorded landscape",
    "untimed": "chosen by rule: nothing was timed",
}
_FOLDED = ("estimated", "untimed")
"""Sources of entries that the page folds: a table has hundreds of them."""


@dataclass(frozen=True, kw_only=True)
class Search:
    """One entry as the page shows it: with its run and the history of its search.

    number identifies it within the page. stayed: the search left the entry as it was, so that the
    entry's time is of another run.
    """

    number: int
    entry: Entry
    run: Run | None
    trace: SearchHistory
    stayed: bool

    @property
    def words(self) -> str:
        """The text that the filter of the page searches."""
        entry = self.entry
        kind = f"{entry.spec.direction} {entry.spec.dtype} {entry.result.source}"
        return f"{entry.spec.name} {entry.bucket} {entry.config.label} {kind}".lower()

    @property
    def kernel(self) -> str:
        """The kernel's name: what a profiler shows."""
        return kernel_name(self.entry.spec, self.entry.config)

    @property
    def folded(self) -> bool:
        """Whether its part of the page is closed at first."""
        return self.entry.result.source in _FOLDED

    @property
    def over_sdpa(self) -> float | None:
        """How many times faster than torch's SDPA in the same round; None if it was not timed."""
        sdpa, own = self.entry.evidence.sdpa_us, self.entry.result.median_us
        return sdpa / own if sdpa and own else None


def write_report(
    table: Table,
    outcomes: Iterable[Outcome],
    path: Path,
    *,
    notice: Callable[[str], None] = lambda _: None,
) -> None:
    """Write the report of a table, an .html file, atomically.

    Args:
        table: the table.
        outcomes: those of the GPU's log, in order; there may be none.
        path: the file.
        notice: is called with a sentence on what is left out.

    Returns:
        None.

    Raises:
        InvalidArgument: if the path is no .html.
        FlashgenError: if it cannot be written.

    Examples:
        >>> from flashgen.report import write_report
        >>> write_report(table, outcomes, Path("report.html"))  # doctest: +SKIP
    """
    if path.suffix.lower() not in (".html", ".htm"):
        raise InvalidArgument(f"the report must be an .html file: got {path}")
    write_whole(path, page(table, outcomes, notice=notice))


def page(
    table: Table,
    outcomes: Iterable[Outcome],
    *,
    notice: Callable[[str], None] = lambda _: None,
) -> str:
    """The HTML of a report. Outcomes of other GPUs are left out. notice: called with what is
    missing.
    """
    own = [outcome for outcome in outcomes if outcome.gpu == table.gpu.slug]
    traces = Searches(own)
    searches = [_search(n, entry, table, traces) for n, entry in enumerate(table.entries, start=1)]
    try:
        shares = [importances(search.trace.times_us) for search in searches]
    except ToolchainError as error:
        notice(f"the report has no importances: {error}")
        shares = [{} for _ in searches]
    pairs, alone = pairs_of(own)
    drawn = _thinned(pairs)
    drawings = dict.fromkeys((search.number for search in searches), "")
    scatter = ""
    try:
        for search in searches:
            drawings[search.number] = _chart(search)
        if drawn:
            label = f"Measured over estimated microseconds of {len(drawn)} configs"
            scatter = charts.scatter(drawn, label)
    except ToolchainError as error:
        notice(f"the report has no charts: {error}")
    template = environment(Path(__file__).parent).get_template("report.html.jinja")
    return template.render(
        table=table,
        winners=[each for each in searches if not each.folded],
        folds=_folds(searches),
        charted=[each for each in zip(searches, shares, strict=True) if each[0].trace.points],
        counts=sources(table.entries),
        told=_TOLD,
        version=flashgen.__version__,
        over_default=_gains(search.entry.result.speedup for search in searches),
        over_sdpa=_gains(search.over_sdpa for search in searches),
        widest=max((s.entry.result.speedup or 0.0 for s in searches), default=0.0),
        drawings=drawings,
        again=charts.again,
        scatter=scatter,
        rows=calibrations(pairs) if pairs else [],
        drawn=len(drawn),
        pairs=len(pairs),
        alone=alone,
        fastest_share=fastest_share,
    )


def _search(number: int, entry: Entry, table: Table, traces: Searches) -> Search:
    run = table.run_of(entry)
    trace = traces.of(entry, run)
    if stayed := not trace.points:
        trace = traces.latest(entry)
    return Search(number=number, entry=entry, run=run, trace=trace, stayed=stayed)


def _folds(searches: Iterable[Search]) -> dict[tuple[str, str], list[Search]]:
    """The folded searches by their source and their spec without features."""
    folds: dict[tuple[str, str], list[Search]] = {}
    for search in searches:
        if search.folded:
            entry = search.entry
            folds.setdefault((entry.spec.plain_name, entry.result.source), []).append(search)
    return folds


def _chart(search: Search) -> str:
    """The chart of a search; "" if nothing about it is known. Raises ToolchainError."""
    entry, trace = search.entry, search.trace
    if not trace.points:
        return ""
    times = (("default", entry.evidence.default_us), ("SDPA", entry.evidence.sdpa_us))
    limits = [Limit(name=name, y=us) for name, us in times if us and not search.stayed]
    label = (
        f"History of {entry.spec.name} {entry.bucket}: {len(trace.points)} configs, "
        f"from {figure(trace.points[0].us)} to a best of {figure(trace.best_us[-1])} microseconds"
    )
    return charts.history(trace, entry.config, limits, label)


@dataclass(frozen=True, kw_only=True)
class Gains:
    """The number of entries with a known speed-up; its geometric mean, least and greatest."""

    entries: int
    mean: float
    least: float
    greatest: float


def _gains(speedups: Iterable[float | None]) -> Gains | None:
    known = [speedup for speedup in speedups if speedup is not None]
    if not known:
        return None
    return Gains(
        entries=len(known),
        mean=math.exp(statistics.fmean(map(math.log, known))),
        least=min(known),
        greatest=max(known),
    )


def _thinned(pairs: Sequence[MeasuredEstimate]) -> Sequence[MeasuredEstimate]:
    """At most MOST_MARKS of these pairs, evenly spaced."""
    return pairs[:: math.ceil(len(pairs) / MOST_MARKS)] if pairs else pairs


@functools.cache
def environment(folder: Path) -> Environment:
    """The templates of a folder, and those of this one that they include. Strict, and it escapes:
    texts of a table are anybody's.
    """
    environment = Environment(
        loader=FileSystemLoader([folder, Path(__file__).parent]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["figure"] = figure
    environment.filters["wrapped"] = wrapped
    return environment


def wrapped(name: str) -> Markup:
    """A name that may be broken after each underscore; a copy of it has no more characters."""
    return Markup("_<wbr>").join(name.split("_"))
