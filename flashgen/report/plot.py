"""Plots with panels; estimates against measurements. The only importer of matplotlib, an extra."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from flashgen.errors import FlashgenError, InvalidArgument, ToolchainError
from flashgen.paths import install_command
from flashgen.report.calibrate import Pair, family_of
from flashgen.spec.config import Loads, Schedule
from flashgen.spec.vocabulary import DECODING, Direction

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

PANEL_INCHES, PANELS_A_ROW = 5.0, 3

# Colours of Okabe and Ito, told apart by most eyes; and a marker each, for print without colour.
COLOURS = (
    "#56B4E9", "#999999", "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#000000",
)  # fmt: skip
MARKERS = "vPos^DX<>"
_ESTIMATED = [direction for direction in get_args(Direction) if direction not in DECODING]
_FAMILIES = product(_ESTIMATED, get_args(Schedule), get_args(Loads))
LOOKS = {
    # Eight colours used up, they come again, each with the next marker.
    family_of(*family): (COLOURS[n % 8], MARKERS[(n % 8 + n // 8) % 9])
    for n, family in enumerate(_FAMILIES)
}
"""Colour and marker of each family, the same in every plot."""


def check_file(path: Path) -> None:
    """Raise InvalidArgument unless `path` can be a .png file."""
    if path.suffix.lower() != ".png":
        raise InvalidArgument(f"--plot must name a .png file: got {path}")


def draw(pairs: Mapping[str, Sequence[Pair]], path: Path) -> None:
    """Draw one panel per GPU and write them to `path`, a PNG. Raises the errors of panels() and
    save().
    """
    figure, panels_ = panels(len(pairs))
    for axes, (gpu, of_gpu) in zip(panels_, pairs.items(), strict=True):
        _panel(axes, gpu, of_gpu)
    save(figure, path, "--plot")


def panels(count: int) -> tuple[Figure, list[Axes]]:
    """A figure with this number of panels. Raises ToolchainError if matplotlib is missing."""
    try:
        from matplotlib.figure import Figure  # no pyplot: no window, and nothing kept
        from matplotlib.layout_engine import ConstrainedLayoutEngine
    except ImportError:
        raise ToolchainError(f"plots need matplotlib: {install_command('plots')}") from None
    columns = min(count, PANELS_A_ROW)
    rows = -(-count // PANELS_A_ROW)
    figure = Figure(
        figsize=(PANEL_INCHES * columns, PANEL_INCHES * rows),
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


def _panel(axes: Axes, gpu: str, pairs: Sequence[Pair]) -> None:
    times = [t for pair in pairs for t in (pair.estimate.median_us, pair.measured_us)]
    ends = min(times) / 1.3, max(times) * 1.3
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends, aspect="equal")
    for (low, high), grey in zip(_bands(pairs), ("0.93", "0.86"), strict=False):
        least, most = [end * low for end in ends], [end * high for end in ends]
        label = f"band, {low:g} to {high:g} times"
        axes.fill_between(ends, least, most, color=grey, lw=0, label=label, zorder=0)
    axes.plot(ends, ends, color="black", linewidth=0.8)
    for family in sorted({pair.family for pair in pairs}):
        mine = [pair for pair in pairs if pair.family == family]
        colour, marker = LOOKS[family]
        axes.scatter(
            [pair.estimate.median_us for pair in mine],
            [pair.measured_us for pair in mine],
            s=16, c=colour, marker=marker, alpha=0.8, linewidths=0, label=f"{family} ({len(mine)})",
        )  # fmt: skip
    axes.set_title(gpu)
    axes.set_xlabel("estimated, us")
    axes.set_ylabel("measured, us")
    axes.set_axisbelow(True)
    axes.grid(which="major", color="0.75", linewidth=0.4)
    plain_numbers((axes.xaxis, axes.yaxis), (1, 2, 5) if ends[1] > 10 * ends[0] else range(1, 10))
    axes.legend(loc="upper left", fontsize="small", edgecolor="none")


def _bands(pairs: Iterable[Pair]) -> list[tuple[float, float]]:
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


def plain_numbers(axes: Iterable[Axis], digits: Iterable[int], base: int = 10) -> None:
    """Figures as 200 and 5000, at these first digits."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    for axis in axes:
        axis.set_major_locator(LogLocator(base=base, subs=tuple(digits)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())
