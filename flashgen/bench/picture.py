"""Pictures of a record: a panel per head dim, a line per contender.

The ladder has files of its own, and a panel at most MOST_LINES lines.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashgen.bench.record import Measured
from flashgen.report.charts import COLOURS, MARKERS, panels, plain_numbers, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BarGroup = tuple[str, str]

OURS = "flashgen"
MOST_LINES = 8
"""Of a panel: each has a colour and a marker of its own, and more are not told apart."""

LEGEND_INCHES, ROW_INCHES = 1.9, 0.2
"""A column and a row of the legend."""
FOOTER_INCHES = 0.15
"""A line of the footer."""
LEGEND_POINTS, FOOTER_POINTS = 7.5, 6.5


def draw(
    cases: Iterable[Measured],
    folder: Path,
    *,
    ceilings: tuple[float | None, float | None],
    footer: str = "",
) -> list[Path]:
    """Write the pictures of all cases; returns the files. ceilings: cuBLAS's TFLOP/s, the copy's
    GB/s. footer: a line below each picture.

    Only correct contenders are drawn. Raises ToolchainError if matplotlib is missing, FlashgenError
    if a file cannot be written.
    """
    groups: dict[BarGroup, list[Measured]] = {}
    for case in cases:
        groups.setdefault((case.direction, str(case.spec["mask"])), []).append(case)
    parts = _parts(_names(groups.values()))
    files = []
    for (direction, mask), members in groups.items():
        by_panel: dict[tuple[int, int], list[Measured]] = {}
        for case in members:
            batch = int(case.problem["batch"]) if direction == "decode" else 0
            by_panel.setdefault((int(case.spec["head_dim"]), batch), []).append(case)
        stem = direction if direction == "decode" else f"{direction}_{mask}"
        for part, names in parts.items():
            if not any(
                line.name in names and (not part or line.name != OURS)
                for c in members
                for line in c.lines
            ):
                continue
            figure, found = panels(len(by_panel))
            for axes, (key, of_panel) in zip(found, sorted(by_panel.items()), strict=True):
                _panel(axes, of_panel, names, ceilings[direction == "decode"])
                batch_ = f", batch {key[1]}" if key[1] else ""
                axes.set_title(f"{direction}, {_words(mask)}head dim {key[0]}{batch_}")
            _legend(figure, found, footer)
            file = folder / f"{stem}{part}.png"
            save(figure, file, "--out")
            files.append(file)
    return files


def footer_of(run: Mapping[str, Any]) -> str:
    """The line below the pictures of a run, from its provenance."""
    gpu = run["gpu"]["name"] if run["gpu"] else "CPU, nothing measured"
    versions = ", ".join(
        f"{name} {run[name]}" for name in ("flashgen", "triton", "torch", "cuda") if run[name]
    )
    return f"{gpu}, {run['dtype']}, {str(run['date'])[:10]}; {versions}"


def _names(groups: Iterable[Sequence[Measured]]) -> list[str]:
    """All contenders in order, so that a contender looks the same in every picture."""
    lines = (line for members in groups for case in members for line in case.lines)
    return list(dict.fromkeys(line.name for line in lines))


def _parts(names: Sequence[str]) -> dict[str, list[str]]:
    """The contenders of each file, by what its name ends with: flashgen, for comparison, with some
    of the rivals, or of the ladder's steps.
    """
    own = [name for name in names if name == OURS]
    parts = {}
    for word, steps in (("", False), ("_ladder", True)):
        others = [n for n in names if n != OURS and n.startswith("ladder") == steps]
        size = MOST_LINES - len(own)
        chunks = [others[at : at + size] for at in range(0, len(others), size)]
        for number, chunk in enumerate(chunks or [[]] * (not steps), start=1):
            parts[word + (f"_{number}" if number > 1 else "")] = [*own, *chunk]
    return parts


def _words(mask: str) -> str:
    return "causal, " if mask == "causal" else ""


def _panel(
    axes: Axes, cases: Sequence[Measured], names: Sequence[str], ceiling: float | None
) -> None:
    decoding = cases[0].direction == "decode"
    highest = 0.0
    for number, name in enumerate(names):
        points = sorted(
            (int(case.problem["seq_k"]), rate)
            for case in cases
            for line in case.lines
            if line.name == name and line.status == "ok" and (rate := line.rate) is not None
        )
        if not points:
            continue
        highest = max(highest, *(y for _, y in points))
        axes.plot(
            [x for x, _ in points],
            [y for _, y in points],
            color=COLOURS[number],
            marker=MARKERS[number],
            linestyle="--" if name.startswith("ladder") else "-",
            linewidth=2.6 if name == OURS else 1.0,
            markersize=6 if name == OURS else 4,
            zorder=4 if name == OURS else 2,  # above all others
            label=name,
        )
    if ceiling:
        what = "copy" if decoding else "cuBLAS"
        axes.axhline(ceiling, color="0.5", linestyle=":", label=f"{what}, {ceiling:.0f}")
    axes.set_xlabel("keys")
    axes.set_ylabel("GB/s" if decoding else "TFLOP/s")
    axes.grid(which="major", color="0.85", linewidth=0.4)
    if not highest:
        axes.text(0.5, 0.5, "nothing was timed", transform=axes.transAxes, ha="center")
        return
    axes.set_xscale("log", base=2)
    plain_numbers((axes.xaxis,), (1,), base=2)
    axes.set_ylim(0, 1.05 * max(highest, ceiling or 0.0))  # no mark is cut by the frame


def _legend(figure: Figure, panels_: Sequence[Axes], footer: str) -> None:
    """One legend below all panels, in columns, and the footer below it. The figure grows by what
    they take, so panels keep their size.
    """
    shown = {
        label: handle
        for axes in panels_
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    width, height = figure.get_size_inches()
    columns = max(1, int(width / LEGEND_INCHES))
    rows = -(-len(shown) // columns)
    text = textwrap.fill(footer, int(width * 18))
    below = FOOTER_INCHES * (text.count("\n") + 2)
    height += ROW_INCHES * (rows + 1) + below
    figure.set_size_inches(width, height)
    engine: Any = figure.get_layout_engine()  # of panels()
    engine.set(rect=(0.0, below / height, 1.0, 1.0 - below / height))
    figure.text(0.5, FOOTER_INCHES / height, text, ha="center", size=FOOTER_POINTS, color="0.35")
    if shown:
        figure.legend(
            shown.values(), shown, loc="outside lower center", ncols=columns, edgecolor="none",
            fontsize=LEGEND_POINTS, borderaxespad=72 * below / LEGEND_POINTS,
        )  # fmt: skip
