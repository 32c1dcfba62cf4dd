"""Small charts as SVG text: lines, a search's history, and a scatter of two times.

They contain no colours: a style sheet colours the classes, for light and dark. Each mark has a
title, which browsers show on hover. Each chart is an image with a label, and the page has a table
of its data. Widths are in units of about a pixel on a phone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

WIDTH = 340
LEFT, RIGHT, TOP, BOTTOM = 52, 10, 26, 34
SHAPES = ("circle", "square", "triangle", "diamond", "cross", "plus")
"""Marks that differ without colour."""

Scale = Callable[[float], float]


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A point. kind: the class of its colour; shape: what distinguishes it without colour."""

    x: float
    y: float
    title: str
    kind: str = "mark"
    shape: str = "circle"


@dataclass(frozen=True, kw_only=True)
class Level:
    """A horizontal line, named at its left or right end."""

    y: float
    name: str
    kind: str
    at_right: bool = False


@dataclass(frozen=True, kw_only=True)
class Axis:
    """Its name, with the unit. log: logarithmic, else linear from `low`, or from the least value
    if None. at: values that have a tick, in place of round numbers.
    """

    name: str
    log: bool = False
    low: float | None = None
    at: Sequence[float] | None = None


@dataclass(frozen=True, kw_only=True)
class Series:
    """Points (x, y) of one kind. look: a number from 0, its colour and its shape. line: connect
    the points; dashed: by a dashed line; marked: draw a mark at each.
    """

    name: str
    points: Sequence[tuple[float, float]]
    look: int
    line: bool = True
    dashed: bool = False
    marked: bool = True

    @property
    def kind(self) -> str:
        """The class of its colour."""
        return f"s{self.look % 8}"

    @property
    def shape(self) -> str:
        """The shape of its marks."""
        return SHAPES[self.look % len(SHAPES)]


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round numbers between low and high, at most `most`: 1, 2 and 5 times a power of ten if
    they span a decade, otherwise evenly spaced. 0 < low < high.
    """
    if high / low >= 10:
        decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        for digits in ((1, 2, 5), (1, 3), (1,)):
            found = [d * 10.0**n for n in decades for d in digits if low <= d * 10.0**n <= high]
            if len(found) <= most:
                return found
        return found[:: math.ceil(len(found) / most)]
    return _even(low, high, most)


def _even(low: float, high: float, most: int = 6) -> list[float]:
    """Round numbers between low and high, evenly spaced, at most `most`."""
    step = _step((high - low) / (most - 1))
    first = math.ceil(low / step - 1e-9)
    return [step * n for n in range(first, math.floor(high / step + 1e-9) + 1)]


def _step(least: float) -> float:
    """The smallest of 1, 2 and 5 times a power of ten that is at least `least`."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(d * power for d in (1, 2, 5, 10) if d * power >= least * (1 - 1e-9))


def lines(
    series: Sequence[Series], x_axis: Axis, y_axis: Axis, label: str, levels: Sequence[Level] = ()
) -> str:
    """Series over two axes. There is at least one point; on a logarithmic axis all are above 0."""
    height = 220
    points = [point for one in series for point in one.points]
    x, x_ticks = _scale(x_axis, [x for x, _ in points], LEFT, WIDTH - RIGHT)
    values = [*(y for _, y in points), *(level.y for level in levels)]
    y, y_ticks = _scale(y_axis, values, height - BOTTOM, TOP)
    parts = [_grid(y, y_ticks)]
    parts += [_x_tick(x(tick), height, _tick(tick)) for tick in x_ticks]
    parts += _axis_names(height, x_axis.name, y_axis.name)
    for one in series:
        at = [f"{_n(x(px))},{_n(y(py))}" for px, py in one.points]
        dashed = " dashed" if one.dashed else ""
        if one.line:
            parts.append(f'<polyline class="line {one.kind}{dashed}" points="{" ".join(at)}"/>')
    for one in reversed(
        series
    ):  # the first on top: a circle leaves the corners of a square visible
        for px, py in one.points if one.marked else ():
            title = f"{one.name}: {x_axis.name} {px:g}, {y_axis.name} {py:.4g}"
            mark = Mark(x=px, y=py, title=title, kind=one.kind, shape=one.shape)
            parts.append(_mark(mark, x(px), y(py)))
    parts += [_level(level, y(level.y)) for level in levels]
    return _svg(height, label, parts)


def _scale(
    axis: Axis, values: Sequence[float], start: float, end: float
) -> tuple[Scale, Sequence[float]]:
    """An axis over these values, and its ticks. Marks at its ends keep a distance from them."""
    low, high = min(values), max(values)
    if axis.log:
        low, high = low / 1.12, high * 1.12
        return _logarithmic(low, high, start, end), _within(low, high, axis) or ticks(low, high)
    low = low if axis.low is None else axis.low
    margin = 0.04 * ((high - low) or abs(high) or 1.0)
    high += margin
    low -= margin if axis.low is None else 0.0
    return _linear(low, high, start, end), _within(low, high, axis) or _even(low, high)


def _within(low: float, high: float, axis: Axis) -> list[float]:
    """The ticks that an axis names, without those outside of it."""
    return [tick for tick in axis.at or () if low <= tick <= high]


def history(
    marks: Sequence[Mark], best: Sequence[float], levels: Sequence[Level], label: str
) -> str:
    """Times (microseconds, logarithmic) over configs in order, 1 to n; and the best so far.

    There is at least one mark; marks[i] is at i + 1, and best[i] is the best up to it.
    """
    height = 214
    times = [*(mark.y for mark in marks), *(level.y for level in levels)]
    x = _linear(0.5, len(marks) + 0.5, LEFT, WIDTH - RIGHT)
    low, high = min(times) / 1.08, max(times) * 1.08
    y = _logarithmic(low, high, height - BOTTOM, TOP)
    parts = [_grid(y, ticks(low, high))]
    step = max(1, round(_step(len(marks) / 5)))
    parts += [_x_tick(x(n), height, str(n)) for n in range(step, len(marks) + 1, step)]
    parts += _axis_names(height, "configs, in their order", "us")
    steps = f"M{_n(x(1))},{_n(y(best[0]))}"
    for number, us in enumerate(best[1:], start=2):
        steps += f"H{_n(x(number))}V{_n(y(us))}"
    parts.append(f'<path class="best" d="{steps}H{_n(x(len(marks) + 0.5))}"/>')
    parts += [_mark(mark, x(mark.x), y(mark.y)) for mark in marks]
    parts += [_level(level, y(level.y)) for level in levels]  # last: marks may not hide the names
    return _svg(height, label, parts)


def scatter(marks: Sequence[Mark], label: str, names: tuple[str, str]) -> str:
    """Marks on two logarithmic axes of one range, with the line of equality.

    names are those of the axes. There is at least one mark.
    """
    height = WIDTH - LEFT - RIGHT + TOP + BOTTOM  # square inside
    values = [value for mark in marks for value in (mark.x, mark.y)]
    low, high = min(values) / 1.15, max(values) * 1.15
    x = _logarithmic(low, high, LEFT, WIDTH - RIGHT)
    y = _logarithmic(low, high, height - BOTTOM, TOP)
    parts = [_grid(y, ticks(low, high))]
    parts += [_x_tick(x(tick), height, _tick(tick)) for tick in ticks(low, high, most=5)]
    parts += _axis_names(height, *names)
    ends = f'x1="{_n(x(low))}" y1="{_n(y(low))}" x2="{_n(x(high))}" y2="{_n(y(high))}"'
    parts.append(f'<line class="equal" {ends}/>')
    parts += [_mark(mark, x(mark.x), y(mark.y)) for mark in marks]
    return _svg(height, label, parts)


def swatch(kind: str, shape: str) -> str:
    """A single mark for a legend, or a "line"; the text next to it names it."""
    mark = _shape(shape, 6, 6)
    return f'<svg class="swatch {kind}" viewBox="0 0 12 12" aria-hidden="true">{mark}</svg>'


def _linear(low: float, high: float, start: float, end: float) -> Scale:
    return lambda value: start + (value - low) / (high - low) * (end - start)


def _logarithmic(low: float, high: float, start: float, end: float) -> Scale:
    inner = _linear(math.log(low), math.log(high), start, end)
    return lambda value: inner(math.log(value))


def _svg(height: float, label: str, parts: Sequence[str]) -> str:
    body = "".join(parts)
    size = f'viewBox="0 0 {WIDTH} {_n(height)}"'
    return f'<svg class="chart" role="img" aria-label="{_attribute(label)}" {size}>{body}</svg>'


def _grid(y: Scale, y_ticks: Sequence[float]) -> str:
    """A line at each tick of the y axis, with its figure."""
    parts = []
    for tick in y_ticks:
        at = _n(y(tick))
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at}" y2="{at}"/>')
        place = f'x="{LEFT - 6}" y="{_n(y(tick) + 3.5)}"'
        parts.append(f'<text class="tick end" {place}>{_tick(tick)}</text>')
    return "".join(parts)


def _tick(value: float) -> str:
    """A round number as an axis shows it: 2,000."""
    return f"{value:,.10g}"


def _x_tick(x: float, height: float, text: str) -> str:
    return f'<text class="tick middle" x="{_n(x)}" y="{_n(height - BOTTOM + 14)}">{text}</text>'


def _axis_names(height: float, x: str, y: str) -> list[str]:
    """The name of the x axis below it, that of the y axis above it."""
    above = f'<text class="name" x="4" y="12">{escape(y)}</text>'
    return [_name((LEFT + WIDTH - RIGHT) / 2, height - 4, x), above]


def _name(x: float, y: float, text: str) -> str:
    return f'<text class="name middle" x="{_n(x)}" y="{_n(y)}">{escape(text)}</text>'


def _level(level: Level, at: float) -> str:
    x, anchor = (WIDTH - RIGHT, "end") if level.at_right else (LEFT + 2, "start")
    ends = f'x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{_n(at)}" y2="{_n(at)}"'
    name = f'<text class="name {anchor}" x="{x}" y="{_n(at - 4)}">{escape(level.name)}</text>'
    return f'<line class="level {_attribute(level.kind)}" {ends}/>{name}'


def _mark(mark: Mark, x: float, y: float) -> str:
    title = f"<title>{escape(mark.title)}</title>"
    return f'<g class="{_attribute(mark.kind)}">{title}{_shape(mark.shape, x, y)}</g>'


def _shape(shape: str, x: float, y: float) -> str:
    """A mark of about 7 units around (x, y)."""
    r = 3.2
    if shape == "circle":
        return f'<circle cx="{_n(x)}" cy="{_n(y)}" r="{r}"/>'
    paths = {
        "square": f"M{_n(x - r)},{_n(y - r)}h{2 * r}v{2 * r}h{-2 * r}z",
        "triangle": f"M{_n(x)},{_n(y - 4)}l4,7h-8z",
        "diamond": f"M{_n(x)},{_n(y - 4.4)}l4.4,4.4l-4.4,4.4l-4.4,-4.4z",
        "cross": f"M{_n(x - r)},{_n(y - r)}l6.4,6.4m0,-6.4l-6.4,6.4",
        "plus": f"M{_n(x)},{_n(y - 4)}v8m-4,-4h8",
        "line": f"M{_n(x - 6)},{_n(y)}h12",
    }
    kind = ' class="stroke"' if shape in ("cross", "plus", "line") else ""
    return f'<path{kind} d="{paths[shape]}"/>'


def _n(value: float) -> str:
    """A coordinate, to a tenth."""
    return f"{value:.1f}".removesuffix(".0")


def _attribute(text: str) -> str:
    return escape(text, {'"': "&quot;"})
