"""Pictures of a record: a file per direction and mask, a panel per head dim, a line per
contender.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from flashgen.bench.race import Line
from flashgen.bench.record import Measured
from flashgen.report.plot import COLOURS, MARKERS, panels, plain_numbers, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Group = tuple[str, str]


def draw(
    cases: Iterable[Measured], folder: Path, *, ceilings: tuple[float | None, float | None]
) -> list[Path]:
    """Write the pictures of all cases; returns the files. ceilings: cuBLAS's TFLOP/s, the copy's
    GB/s.

    Only correct contenders are drawn. Raises ToolchainError if matplotlib is missing, FlashgenError
    if a file cannot be written.
    """
    groups: dict[Group, list[Measured]] = {}
    for case in cases:
        groups.setdefault((case.direction, str(case.spec["mask"])), []).append(case)
    names = _names(groups.values())
    files = []
    for (direction, mask), members in groups.items():
        by_panel: dict[tuple[int, int], list[Measured]] = {}
        for case in members:
            batch = int(case.problem["batch"]) if direction == "decode" else 0
            by_panel.setdefault((int(case.spec["head_dim"]), batch), []).append(case)
        figure, found = panels(len(by_panel))
        for axes, (key, of_panel) in zip(found, sorted(by_panel.items()), strict=True):
            _panel(axes, of_panel, names, ceilings[direction == "decode"])
            batch_ = f", batch {key[1]}" if key[1] else ""
            axes.set_title(f"{direction}, {_words(mask)}head dim {key[0]}{batch_}")
        file = folder / (f"{direction}.png" if direction == "decode" else f"{direction}_{mask}.png")
        save(figure, file, "--out")
        files.append(file)
    return files


def _names(groups: Iterable[Sequence[Measured]]) -> list[str]:
    """All contenders in order, so that a contender looks the same in every picture."""
    lines = (line for members in groups for case in members for line in case.lines)
    return list(dict.fromkeys(line.name for line in lines))


def _words(mask: str) -> str:
    return "causal, " if mask == "causal" else ""


def _panel(
    axes: Axes, cases: Sequence[Measured], names: Sequence[str], ceiling: float | None
) -> None:
    decoding = cases[0].direction == "decode"
    drawn = False
    for number, name in enumerate(names):
        points = sorted(
            (int(case.problem["seq_k"]), rate)
            for case in cases
            for line in case.lines
            if line.name == name and (rate := _rate(line)) is not None
        )
        if not points:
            continue
        drawn = True
        axes.plot(
            [x for x, _ in points],
            [y for _, y in points],
            color=COLOURS[number % len(COLOURS)],
            marker=MARKERS[(number + number // len(COLOURS)) % len(MARKERS)],
            linestyle="--" if name.startswith("ladder") else "-",
            linewidth=2.2 if name == "flashgen" else 1.2,
            markersize=5,
            label=name,
        )
    if ceiling:
        what = "copy" if decoding else "cuBLAS"
        axes.axhline(ceiling, color="0.5", linestyle=":", label=f"{what}, {ceiling:.0f}")
    axes.set_xlabel("keys")
    axes.set_ylabel("GB/s" if decoding else "TFLOP/s")
    axes.grid(which="major", color="0.85", linewidth=0.4)
    if not drawn:
        axes.text(0.5, 0.5, "nothing was timed", transform=axes.transAxes, ha="center")
        return
    axes.set_xscale("log", base=2)
    plain_numbers((axes.xaxis,), (1,), base=2)
    axes.set_ylim(bottom=0)
    axes.legend(fontsize="x-small", edgecolor="none")


def _rate(line: Line) -> float | None:
    if line.status != "ok":
        return None
    return line.tflops if line.gbs is None else line.gbs
