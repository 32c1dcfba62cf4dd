"""Charts of a report in a file of their own: those of docs/."""

from __future__ import annotations

import re
from collections.abc import Sequence

from flashgen import paths

STYLE = paths.PACKAGE / "report" / "_style.css.jinja"
"""The style sheet of a report, with the variables that its charts take their colours from."""


def standalone(drawn: Sequence[str]) -> str:
    """Charts of flashgen.report.charts side by side, as the text of an SVG file: light and dark."""
    style = STYLE.read_text()
    colours = style[style.index(":root") : style.index("* {")]
    rules = [line for line in style.splitlines() if line.startswith((".chart *", ".chart text"))]
    labels, placed, left, bottom = [], [], 0, 0
    for chart in map(str, drawn):  # a Markup would escape what it joins
        label, width, height = re.search(  # type: ignore[union-attr]  # charts writes all three
            r'aria-label="([^"]*)" viewBox="0 0 (\d+) (\d+)"', chart
        ).groups()
        size = f'<svg class="chart" x="{left}" width="{width}" height="{height}"'
        placed.append(chart.replace('<svg class="chart" role="img"', size, 1))
        labels.append(label)
        left, bottom = left + int(width), max(bottom, int(height))
    head = f'role="img" aria-label="{"; ".join(labels)}" viewBox="0 0 {left} {bottom}"'
    text = (
        f'<svg xmlns="http://www.w3.org/2000/svg" {head}><style>\n{colours}'
        + "\n".join([*rules, "svg { background: var(--page); }"])
        + f"\n</style>{''.join(placed)}</svg>\n"
    )
    return text.replace("><", ">\n<")
