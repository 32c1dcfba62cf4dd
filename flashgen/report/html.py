"""Report: a table and its log as one HTML file, which loads nothing from the network.

report.html.jinja is the page. This module computes its content: for each entry the winner, what it
beats, and the history of its search; for all, estimates against measurements. If the log has
nothing about an entry, the entry is shown without a history.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

import flashgen
from flashgen.errors import InvalidArgument, ToolchainError
from flashgen.files import write_whole
from flashgen.report import svg
from flashgen.report.calibrate import Calibration, Pair, calibrations, pairs_of
from flashgen.report.svg import Level, Mark
from flashgen.search.history import Searches, SearchHistory, TimedConfig
from flashgen.search.importance import fastest_share, importances
from flashgen.spec.config import kernel_name
from flashgen.spec.outcome import Outcome
from flashgen.table.entry import Entry, Run
from flashgen.table.table import Table, figure, sources

MOST_MARKS = 2000
"""Marks of the scatter; of more pairs so many are drawn, evenly taken. Each has its title."""

_TOLD = {
    "measured": "timed on the GPU",
    "estimated": "computed by the model, not timed",
    "replayed": "read from a recorded landscape",
    "untimed": "chosen by rule: nothing was timed",
}


@dataclass(frozen=True, kw_only=True)
class Tile:
    """A cell of the heat map: the best time of a tile; share is the best of all divided by it, 0
    to 1.
    """

    us: float
    share: float


@dataclass(frozen=True, kw_only=True)
class Search:
    """One entry as the page shows it: with its run and the history of its search.

    number identifies it within the page. tiles: rows are br, columns bc; None was not timed.
    """

    number: int
    entry: Entry
    run: Run
    trace: SearchHistory
    chart: str
    tiles: Mapping[int, Mapping[int, Tile | None]]

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
    """Write the report of a table to `path`, an .html file, atomically.

    outcomes are those of the GPU's log, in order; there may be none. Raises InvalidArgument if
    `path` is no .html, FlashgenError if it cannot be written.
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
    template = environment(Path(__file__).parent).get_template("report.html.jinja")
    return template.render(
        table=table,
        searches=list(zip(searches, shares, strict=True)),
        charted=[each for each in zip(searches, shares, strict=True) if each[0].trace.points],
        counts=sources(table.entries),
        told=_TOLD,
        version=flashgen.__version__,
        over_default=_gains(search.entry.result.speedup for search in searches),
        over_sdpa=_gains(search.over_sdpa for search in searches),
        widest=max((s.entry.result.speedup or 0.0 for s in searches), default=0.0),
        scatter=_scatter(pairs),
        families=_families(pairs),
        rows=_calibrations(pairs),
        drawn=len(_thinned(pairs)),
        pairs=len(pairs),
        alone=alone,
        fastest_share=fastest_share,
    )


def _search(number: int, entry: Entry, table: Table, traces: Searches) -> Search:
    run = table.run_of(entry)
    trace = traces.of(entry, run)
    return Search(
        number=number,
        entry=entry,
        run=run,
        trace=trace,
        chart=_history(entry, trace),
        tiles=_tiles(trace),
    )


def _history(entry: Entry, trace: SearchHistory) -> str:
    """The chart of a search; "" if nothing about it is known."""
    if not trace.points:
        return ""
    marks = [_history_mark(n, point, entry) for n, point in enumerate(trace.points, start=1)]
    result = entry.result
    levels = []
    if result.default_us:
        levels.append(Level(y=result.default_us, name="default", kind="default"))
    if entry.evidence.sdpa_us:
        levels.append(Level(y=entry.evidence.sdpa_us, name="SDPA", kind="sdpa", at_right=True))
    label = (
        f"History of {entry.spec.name} {entry.bucket}: {len(marks)} configs, "
        f"from {figure(trace.points[0].us)} to a best of {figure(trace.best_us[-1])} microseconds"
    )
    return svg.history(marks, trace.best_us, levels, label)


def _history_mark(number: int, point: TimedConfig, entry: Entry) -> Mark:
    kind, shape = ("dropped", "cross") if point.dropped else ("mark", "circle")
    if point.config == entry.config:
        kind, shape = "winner", "diamond"
    title = f"{number}: {point.config.label}, {figure(point.us)} us"
    return Mark(x=number, y=point.us, title=title, kind=kind, shape=shape)


def _tiles(trace: SearchHistory) -> dict[int, dict[int, Tile | None]]:
    """The heat map: for each br and bc that occur the best time, if the tile was timed."""
    times = trace.tiles_us
    best = min(times.values(), default=math.inf)
    columns = sorted({bc for _, bc in times})
    return {
        br: {
            bc: Tile(us=times[br, bc], share=best / times[br, bc]) if (br, bc) in times else None
            for bc in columns
        }
        for br in sorted({br for br, _ in times})
    }


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


def _thinned(pairs: Sequence[Pair]) -> Sequence[Pair]:
    """At most MOST_MARKS of these pairs, evenly spaced."""
    return pairs[:: math.ceil(len(pairs) / MOST_MARKS)] if pairs else pairs


def _looks(pairs: Sequence[Pair]) -> dict[str, tuple[str, str]]:
    """The colour class and shape of each family; no two families have the same pair."""
    names = sorted({pair.family for pair in pairs})
    shapes = svg.SHAPES  # six, and eight colours: 24 pairs
    return {name: (f"s{n % 8}", shapes[n % len(shapes)]) for n, name in enumerate(names)}


def _families(pairs: Sequence[Pair]) -> dict[str, Markup]:
    """The legend of the scatter: each family and its mark."""
    return {name: Markup(svg.swatch(*look)) for name, look in _looks(pairs).items()}


def _scatter(pairs: Sequence[Pair]) -> str:
    """Measured over estimated times; none where no config has both."""
    if not pairs:
        return ""
    looks = _looks(pairs)
    marks = [
        Mark(
            x=pair.estimate.median_us,
            y=pair.measured_us,
            title=f"{kernel_name(pair.spec, pair.config)} seq {pair.problem.seq_k}: estimated "
            f"{figure(pair.estimate.median_us)} us, measured {figure(pair.measured_us)} us",
            kind=looks[pair.family][0],
            shape=looks[pair.family][1],
        )
        for pair in _thinned(pairs)
    ]
    label = f"Measured over estimated microseconds of {len(marks)} configs"
    return svg.scatter(marks, label, ("estimated, us", "measured, us"))


def _calibrations(pairs: Sequence[Pair]) -> list[Calibration]:
    """How far estimates were off: of all pairs, and of each family."""
    return calibrations(pairs) if pairs else []


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
    environment.filters["svg"] = Markup
    return environment
