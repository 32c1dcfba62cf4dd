"""The picture of benchmarks/search_efficiency.py: median regret over evaluations."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from search_scores import Curve

from flashgen.report import charts

COLOURS = (*charts.COLOURS, "#7f3c8d", "#11a579", "#e68310")
DASHES = ("-", "--", "-", "--", "-.", "-.", ":", "-", ":", "-.", ":")
TABLE_ONLY = ("genetic",)
"""Level with random: a ninth line of a panel would not be told apart."""
TITLE = 70
"""Characters of a title that fit a panel."""
FLOOR = 1e-3
"""The regret that a logarithmic axis ends at; 0 is drawn there."""


def draw(
    done: Sequence[tuple[str, list[Curve]]], names: Sequence[str], at: Sequence[int], path: Path
) -> None:
    """A panel a landscape, with its title. names: all contenders, each of its own colour."""
    figure, panels = charts.panels(len(done), columns=2, inches=(6.5, 4.6))
    for axes, (title, found) in zip(panels, done, strict=True):
        _draw_panel(axes, found, names, at)
        axes.set_title(textwrap.fill(title, TITLE), fontsize=9)
    of_label: dict[str, Any] = {}
    for axes in panels:
        of_label |= dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    order = [name for name in names if name in of_label]
    figure.legend(
        [of_label[name] for name in order], order,
        loc="outside lower center", ncols=min(5, len(order)), fontsize=9, frameon=False,
    )  # fmt: skip
    charts.save(figure, path, "--out")


def _draw_panel(axes: Any, found: Sequence[Curve], names: Sequence[str], at: Sequence[int]) -> None:
    """Regrets of one landscape. auto lies below the others, and broad, so that it is seen there."""
    for curve in (each for each in found if each.contender not in TABLE_ONLY):
        look, is_auto = names.index(curve.contender), curve.contender == "auto"
        after = range(1, len(curve.median) + 1)
        low, median, high = (
            [100 * max(FLOOR, regret) for regret in regrets]
            for regrets in (curve.low, curve.median, curve.high)
        )
        axes.fill_between(
            after, low, high, step="post", color=COLOURS[look], alpha=0.1, linewidth=0
        )
        axes.plot(
            after, median, color=COLOURS[look], linestyle=DASHES[look], drawstyle="steps-post",
            linewidth=6 if is_auto else 1.3, alpha=0.55 if is_auto else 1.0,
            zorder=1.5 if is_auto else 2, label=curve.contender,
        )  # fmt: skip
    axes.set(xscale="log", yscale="log", xlim=(1, at[-1]), ylim=(75 * FLOOR, 1000))
    axes.set_xticks([1, 2, *at], labels=[str(after) for after in (1, 2, *at)])
    axes.minorticks_off()
    axes.set_xlabel("evaluations")
    axes.set_ylabel("median regret, %")
    axes.grid(color="0.85", linewidth=0.5)
    axes.yaxis.set_major_formatter(lambda value, _: "0" if value <= 100 * FLOOR else f"{value:g}")
