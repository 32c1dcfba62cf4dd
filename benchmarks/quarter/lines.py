"""The file of a run of gpu_quarter.py: a line of JSON for each item, and a page about them."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from flashgen.report.calibrate import calibrations, pairs_of, table_lines
from flashgen.schedules.outcome import Outcome

Line = dict[str, Any]


def append(path: Path, line: Line) -> None:
    """Add a line; it is on disk when this returns."""
    with path.open("a", encoding="utf-8") as file:
        print(json.dumps(line), file=file, flush=True)
        os.fsync(file.fileno())


def read(path: Path) -> list[Line]:
    """The lines of a file; one that a kill cut off is left out."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return found


def outcomes_of(lines: Sequence[Line]) -> list[Outcome]:
    """All outcomes."""
    return [Outcome.from_json(each) for line in lines for each in line.get("outcomes", ())]


def page(lines: Sequence[Line]) -> Iterator[str]:
    """How far each experiment came, with its rates and its failures; then the estimates' errors."""
    done = [line for line in lines if line["kind"] != "about"]
    for name in dict.fromkeys(line["experiment"] for line in done):
        mine = [line for line in done if line["experiment"] == name]
        bad = [line for line in mine if line["status"] != "ok"]
        seconds = sum(line["seconds"] for line in mine)
        compiled = sum(line.get("compiled", 0) for line in mine)
        right = f"{len(mine) - len(bad)} of {len(mine)} ok"
        yield f"{name}: {right}, {seconds:.0f} s, {compiled} kernels compiled"
        yield from (f"  {b['status']}: {b['key']}: {b.get('detail', '')}"[:160] for b in bad[:3])
        for line in mine:
            rows = line.get("rows") or {
                each["name"].removeprefix("ladder: "): each["tflops"]
                for each in (line.get("case") or {"lines": ()})["lines"]
            }
            if rows and line["kind"] != "host":
                told = ", ".join(f"{row} {value:.0f}" for row, value in rows.items() if value)
                yield f"  {line['key']}: {told}"
    pairs, _ = pairs_of(outcomes_of(done))
    yield from table_lines(calibrations(pairs)) if pairs else ()
