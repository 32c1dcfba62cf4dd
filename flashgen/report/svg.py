"""Small charts as SVG text: a search's history, and a scatter of estimates and measurements.

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
LEFT, RIGHT, TOP, BOTTOM = 52, 10, 12, 34
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
    step = _step((high - low) / (most - 1))
    first = math.ceil(low / step)
    return [step * n for n in range(first, math.floor(high / step + 1e-9) + 1)]


def _step(least: float) -> float:
    """The smallest of 1, 2 and 5 times a power of ten that is at least `least`."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(d * power for d in (1, 2, 5, 10) if d * power >= least * (1 - 1e-9))


def history(
    marks: Sequence[Mark], best: Sequence[float], levels: Sequence[Level], label: str
) -> str:
    """Times (microseconds, logarithmic) over configs in order, 1 to n; and the best so far.

    There is at least one mark; marks[i] is at i + 1, and best[i] is the best up to it.
    """
    height = 200
    times = [*(mark.y for mark in marks), *(level.y for level in levels)]
    x = _linear(0.5, len(marks) + 0.5, LEFT, WIDTH - RIGHT)
    low, high = min(times) / 1.08, max(times) * 1.08
    y = _logarithmic(low, high, height - BOTTOM, TOP)
    parts = [_y_axis(y, low, high)]
    step = max(1, round(_step(len(marks) / 5)))
    parts += [_x_tick(x(n), height, str(n)) for n in range(step, len(marks) + 1, step)]
    parts.append(_name((LEFT + WIDTH - RIGHT) / 2, height - 4, "configs, in their order"))
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
    parts = [_y_axis(y, low, high)]
    parts += [_x_tick(x(tick), height, _tick(tick)) for tick in ticks(low, high, most=5)]
    parts.append(_name((LEFT + WIDTH - RIGHT) / 2, height - 4, names[0]))
    parts.append(f'<text class="name" x="{LEFT + 6}" y="{TOP + 10}">{escape(names[1])}</text>')
    ends = f'x1="{_n(x(low))}" y1="{_n(y(low))}" x2="{_n(x(high))}" y2="{_n(y(high))}"'
    parts.append(f'<line class="equal" {ends}/>')
    parts += [_mark(mark, x(mark.x), y(mark.y)) for mark in marks]
    return _svg(height, label, parts)


def swatch(kind: str, shape: str) -> str:
    """A single mark for a legend; the text next to it names it."""
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


def _y_axis(y: Scale, low: float, high: float) -> str:
    parts = []
    for tick in ticks(low, high):
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
    }
    kind = ' class="stroke"' if shape in ("cross", "plus") else ""
    return f'<path{kind} d="{paths[shape]}"/>'


def _n(value: float) -> str:
    """A coordinate, to a tenth."""
    return f"{value:.1f}".removesuffix(".0")


def _attribute(text: str) -> str:
    return escape(text, {'"': "&quot;"})
