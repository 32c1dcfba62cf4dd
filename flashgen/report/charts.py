"""Charts, all of them by matplotlib: SVG for pages, and files of panels.

An SVG has no colours of its own: THEME replaces those of matplotlib by the variables of
_style.css.jinja, which has a light and a dark set. Each mark has a title, which browsers show on
hover. Sizes are in points, of which a phone has 340 across.
"""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from markupsafe import Markup, escape

from flashgen.errors import FlashgenError, InvalidArgument, ToolchainError
from flashgen.paths import install_command
from flashgen.report.calibrate import MeasuredEstimate, family_of
from flashgen.report.history import SearchHistory
from flashgen.schedules.base import Loads
from flashgen.schedules.config import SCHEDULES, KernelConfig, kernel_name
from flashgen.spec.vocabulary import DECODING, Direction
from flashgen.table.entry import figure as rounded

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

PANEL_INCHES, PANELS_A_ROW = 5.0, 3
LEGEND_INCHES = 1.4
"""Below a panel of draw(): a dozen families in two columns."""
WIDTH, HEIGHT = 340, 220

INK, SOFT, GRID, BEST, WINNER = "#1b1f24", "#57606a", "#d0d7de", "#0072b1", "#d55e01"
COLOURS = (
    "#0072b2", "#d55e00", "#00795a", "#b04c86", "#b07800", "#2a88c4", "#6e6e6e", "#010101",
)  # fmt: skip
"""Told apart by most eyes; by Okabe and Ito, darker where white paper needs it. matplotlib leaves
plain black out of an SVG."""
MARKERS = "osvD^X<>Ph*dpH"
"""Told apart without colour, for print."""
THEME = {
    INK: "--ink", SOFT: "--soft", GRID: "--line", BEST: "--best", WINNER: "--win",
    **{colour: f"--c{n}" for n, colour in enumerate(COLOURS)},
}  # fmt: skip
"""The variable of the style sheet for each colour."""

_ESTIMATED = [direction for direction in get_args(Direction) if direction not in DECODING]
_FAMILIES = product(_ESTIMATED, SCHEDULES, get_args(Loads))
LOOKS = {
    # Eight colours used up, they come again, each with the next marker.
    family_of(*family): (COLOURS[n % 8], MARKERS[(n % 8 + n // 8) % len(MARKERS)])
    for n, family in enumerate(_FAMILIES)
}
"""Colour and marker of each family, the same in every plot."""


@dataclass(frozen=True, kw_only=True)
class Scale:
    """An axis: its name with the unit. low: where a linear one begins; at: the values that have a
    tick, if not round numbers.
    """

    name: str
    log: bool = True
    low: float | None = None
    at: tuple[float, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class Limit:
    """A horizontal line with a name."""

    y: float
    name: str


def history(
    trace: SearchHistory, winner: KernelConfig, limits: Sequence[Limit], label: str
) -> Markup:
    """The SVG of a search: times (microseconds, logarithmic) over configs in their order, the best
    so far, and the winner's time. There is at least one point.
    """

    def draw(axes: Axes) -> None:
        best, numbered = trace.best_us, list(enumerate(trace.points, start=1))
        end = len(best) + 0.5
        axes.plot([*range(1, len(best) + 1), end], [*best, best[-1]], color=BEST, ds="steps-post")
        wins = [(n, point) for n, point in numbered if point.config == winner]
        rest = [(n, point) for n, point in numbered if point.config != winner]
        for colour, marker, some in (
            (SOFT, "X", [each for each in rest if each[1].dropped]),
            (SOFT, "o", [each for each in rest if not each[1].dropped]),
            (WINNER, "D", wins),
        ):
            titles = [f"{n}: {each.config.label}, {rounded(each.us)} us" for n, each in some]
            points = [(n, each.us) for n, each in some]
            marks(axes, points, colour, marker, titles)
        for n, point in wins:
            axes.annotate(
                f"{rounded(point.us)} us", (n, point.us), (0, -12), textcoords="offset points",
                ha="left" if n < end / 2 else "right", color=WINNER, zorder=4,
            )  # fmt: skip
        for limit, dashes in zip(limits, ("--", ":"), strict=False):
            # At the right: early configs and the first steps of the best lie at the left. Above
            # and below: two names never meet.
            below = limit.y < max(each.y for each in limits)
            draw_limit(axes, limit, dashes, at_right=True, below=below)
        axes.set_xlim(0.5, end)
        draw_scale(axes, "x", Scale(name="configs, in their order", log=False, low=0.5))
        draw_scale(axes, "y", Scale(name="us"))

    return svg(draw, label, (WIDTH, HEIGHT))


def scatter(pairs: Sequence[MeasuredEstimate], label: str) -> Markup:
    """The SVG of measured over estimated times. There is at least one pair."""
    families = len({pair.family for pair in pairs})
    return svg(
        lambda axes: _panel(axes, pairs), label, (WIDTH, WIDTH + 14 * (families + 3)), columns=1
    )


def again(chart: str) -> Markup:
    """The same chart for another place of its page, where each id must be there once."""
    return Markup(re.sub(r'(id="|href="#|url\(#)', r"\1again-", str(chart)))


def check_file(path: Path) -> None:
    """Raise InvalidArgument unless `path` can be a .png file."""
    if path.suffix.lower() != ".png":
        raise InvalidArgument(f"--plot must name a .png file: got {path}")


def draw(pairs: Mapping[str, Sequence[MeasuredEstimate]], path: Path) -> None:
    """Draw one panel per GPU and write them to `path`, a PNG. Raises the errors of panels() and
    save().
    """
    figure, panels_ = panels(len(pairs), inches=(PANEL_INCHES, PANEL_INCHES + LEGEND_INCHES))
    for axes, (gpu, of_gpu) in zip(panels_, pairs.items(), strict=True):
        _panel(axes, of_gpu)
        axes.set_title(gpu)
        # Below the panel, where it hides no point.
        axes.legend(
            loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=2, fontsize="small",
            edgecolor="none",
        )  # fmt: skip
    save(figure, path, "--plot")


def panels(
    count: int, columns: int = PANELS_A_ROW, inches: tuple[float, float] = (PANEL_INCHES,) * 2
) -> tuple[Figure, list[Axes]]:
    """A figure with this number of panels. Raises ToolchainError if matplotlib is missing."""
    try:
        from matplotlib.figure import Figure  # no pyplot: no window, and nothing kept
        from matplotlib.layout_engine import ConstrainedLayoutEngine
    except ImportError:
        raise ToolchainError(f"charts need matplotlib: {install_command('tune')}") from None
    columns = min(count, columns)
    rows = -(-count // columns)
    figure = Figure(
        figsize=(inches[0] * columns, inches[1] * rows),
        dpi=150,
        layout=ConstrainedLayoutEngine(w_pad=0.15, h_pad=0.15),
    )
    found = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes in found[count:]:
        axes.set_visible(False)
    return figure, found[:count]


def save(figure: Figure, path: Path, option: str) -> None:
    """Write a figure to `path`, which `option` has named. Raises FlashgenError if it cannot be
    written.
    """
    try:
        figure.savefig(path)
    except OSError as error:
        raise FlashgenError(
            f"{path} cannot be written ({error.strerror}): name another file with {option}"
        ) from None


def plain_numbers(axes: Iterable[Axis], digits: Iterable[int], base: int = 10) -> None:
    """Figures as 200 and 5,000 on logarithmic axes, at these first digits."""
    from matplotlib.ticker import LogLocator

    for axis in axes:
        axis.set_major_locator(LogLocator(base=base, subs=tuple(digits)))
        _plain(axis)


def _plain(axis: Axis) -> None:
    from matplotlib.ticker import FuncFormatter, NullFormatter, NullLocator

    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axis.set_minor_locator(NullLocator())
    axis.set_minor_formatter(NullFormatter())


def draw_scale(axes: Axes, name: str, scale: Scale) -> None:
    """Name an axis whose points are drawn, and give it few round ticks."""
    from matplotlib.ticker import FixedLocator, MaxNLocator

    axis: Axis = axes.xaxis if name == "x" else axes.yaxis
    axes.set(**{f"{name}scale": "log" if scale.log else "linear"})
    if scale.low is not None:
        axes.set(**{f"{name}lim": (scale.low, None)})
    low, high = axis.get_view_interval()
    if name == "x":
        axes.set_xlabel(scale.name)
    else:
        axes.set_title(scale.name, loc="left", fontsize="medium", color=SOFT)
    inside = [tick for tick in scale.at or () if low <= tick <= high]
    if inside:
        axis.set_major_locator(FixedLocator(inside))
    elif scale.log and high >= 10 * low:
        digits = (1, 2, 5) if high <= 100 * low else (1, 3) if high <= 1000 * low else (1,)
        plain_numbers([axis], digits)
    else:
        axis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 5, 10]))
    _plain(axis)


def marks(
    axes: Axes,
    points: Sequence[tuple[float, float]],
    colour: str,
    marker: str,
    titles: Sequence[str],
    **options: Any,
) -> None:
    """Marks with their titles, which an SVG of matplotlib carries as links."""
    if points:
        xs, ys = zip(*points, strict=True)
        axes.scatter(
            xs, ys, s=16, c=colour, marker=marker, linewidths=0, zorder=3,
            urls=[*titles, None], **options,  # a single link would be left out
        )  # fmt: skip


def draw_limit(
    axes: Axes, limit: Limit, dashes: str, *, at_right: bool = False, below: bool = False
) -> None:
    """A horizontal line with its name."""
    axes.axhline(limit.y, color=SOFT, linestyle=dashes, linewidth=1.0)
    axes.annotate(
        limit.name, (1.0 if at_right else 0.0, limit.y), (0, -2 if below else 2),
        xycoords=("axes fraction", "data"), textcoords="offset points", color=SOFT, zorder=4,
        ha="right" if at_right else "left", va="top" if below else "baseline",
    )  # fmt: skip


def _panel(axes: Axes, pairs: Sequence[MeasuredEstimate]) -> None:
    """Measured over estimated times: the bands of the estimates, the line of equality, and a mark
    of each pair.
    """
    times = [t for pair in pairs for t in (pair.estimate.median_us, pair.measured_us)]
    ends = min(times) / 1.3, max(times) * 1.3
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends, aspect="equal")
    for low, high in _bands(pairs):
        least, most = [end * low for end in ends], [end * high for end in ends]
        label = f"band, {low:g} to {high:g} times"
        axes.fill_between(ends, least, most, color=GRID, alpha=0.5, lw=0, label=label, zorder=0)
    axes.plot(ends, ends, color=SOFT, linewidth=0.8, linestyle="--")
    for family in sorted({pair.family for pair in pairs}):
        mine = [pair for pair in pairs if pair.family == family]
        points = [(pair.estimate.median_us, pair.measured_us) for pair in mine]
        titles = [
            f"{kernel_name(pair.outcome.spec, pair.outcome.config)} "
            f"seq {pair.outcome.problem.seq_k}: estimated "
            f"{rounded(pair.estimate.median_us)} us, measured {rounded(pair.measured_us)} us"
            for pair in mine
        ]
        label = f"{family} ({len(mine)})"
        marks(axes, points, *LOOKS[family], titles, alpha=0.7, label=label)
    axes.set_xlabel("estimated, us")
    axes.set_ylabel("measured, us")
    axes.set_axisbelow(True)
    axes.grid(which="major", color=GRID, linewidth=0.4)
    plain_numbers((axes.xaxis, axes.yaxis), (1, 2, 5) if ends[1] > 10 * ends[0] else range(1, 10))


def _bands(pairs: Iterable[MeasuredEstimate]) -> list[tuple[float, float]]:
    """The two most common bands of the estimates, as factors of the time; the wide one first.

    There are two by design; those that the peak has cut are rare.
    """
    found = Counter(
        (
            round(pair.estimate.low_us / pair.estimate.median_us, 2),
            round(pair.estimate.high_us / pair.estimate.median_us, 2),
        )
        for pair in pairs
    )
    return sorted(band for band, _ in found.most_common(2))


_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none", "font.size": 9.5, "axes.linewidth": 0.6, "lines.linewidth": 1.6,
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "axes.grid.axis": "y",
    "axes.ymargin": 0.14,
    "grid.color": GRID, "grid.linewidth": 0.5, "axes.axisbelow": True, "axes.edgecolor": GRID,
    "text.color": INK, "axes.labelcolor": SOFT, "xtick.color": SOFT, "ytick.color": SOFT,
}  # fmt: skip


def svg(
    draw: Callable[..., None],
    label: str,
    points: tuple[int, int],
    columns: int = 0,
    count: int = 1,
    across: int = 1,
) -> Markup:
    """What `draw` draws on `count` Axes, `across` of them in a row, as an element of a page;
    columns: of the legend above it, 0 for none.

    Raises ToolchainError if matplotlib is missing.
    """
    figure, _ = panels(1)  # raises before anything else of matplotlib is imported
    from matplotlib import rc_context

    with rc_context({**_STYLE, "svg.hashsalt": label}):
        down = -(-count // across)
        inches = points[0] / 72 / across, points[1] / 72 / down
        figure, found = panels(count, across, inches=inches)
        engine: Any = figure.get_layout_engine()  # of panels()
        engine.set(w_pad=0.04, h_pad=0.04)
        draw(*found)
        if columns:
            figure.legend(loc="outside upper left", ncols=columns, frameon=False)
        written = io.StringIO()
        figure.savefig(written, format="svg", transparent=True)
    text = written.getvalue()
    text = text[re.search(r"<svg [^>]*>", text).end() :]  # type: ignore[union-attr]
    text = re.sub(r"<metadata>.*?</metadata>|<style .*?</style>|<!--.*?-->", "", text, flags=re.S)
    text = re.sub(r'<g id="[^"]*"', "<g", text)  # a page has many charts, and each id once
    text = re.sub(r'<a xlink:href="([^"]*)"[^>]*>', r"<g><title>\1</title>", text)
    text = text.replace("</a>", "</g>")
    for colour, variable in THEME.items():
        text = text.replace(colour, f"var({variable})")
    text = re.sub(r'font-family: [^;"]*; | transform="rotate\(-0[^"]*"', "", text)
    text = re.sub(r"\s*\n\s*", " ", text.replace("xlink:href", "href"))
    head = f'viewBox="0 0 {points[0]} {points[1]}"'
    return Markup(f'<svg class="chart" role="img" aria-label="{escape(label)}" {head}>{text}')


def standalone(chart: str) -> str:
    """A chart of svg() as the text of a file of its own, which follows light and dark, too."""
    style = (Path(__file__).parent / "_style.css.jinja").read_text()
    colours = style[style.index(":root") : style.index("* {")]
    rules = [line for line in style.splitlines() if line.startswith((".chart *", ".chart text"))]
    head, _, drawn = str(chart).partition(">")
    *_, width, height = re.findall(r"\d+", head)
    # Larger than on a phone, which shrinks it to its width; without a size a page stretches it.
    size = f'width="{1.25 * int(width):g}" height="{1.25 * int(height):g}"'
    text = (
        f'{head} xmlns="http://www.w3.org/2000/svg" {size}>\n<style>\n{colours}'
        + "\n".join([*rules, "svg { background: var(--page); }"])
        + f"\n</style>{drawn}\n"
    )
    return text.replace("> <", ">\n<")
