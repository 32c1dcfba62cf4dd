"""Writes the outputs and pictures that README and docs/ show.

    make docs-output                      all pages
    python -m tests.docs_output PAGE.md   one page
    python -m tests.docs_output --check   fail if one that takes seconds is not what is committed

A comment in front of a block or picture says where it comes from:

    <!-- output of: COMMAND -->            the block, or the table, is the output of a command
    <!-- output of the python above -->    the block is what the last python block prints
    <!-- picture of: COMMAND -->           the picture is the first chart of report.html

All commands of a run share one folder, in which `flashgen` is this checkout's. A tuning run that two
pages need therefore runs once. tests/cpu/project/test_docs_output.py compares all of them.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from flashgen.errors import FlashgenError
from flashgen.report.charts import standalone

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MARKER = re.compile(
    r"^<!-- (?:output of: (?P<command>.+?)|(?P<python>output of the python above)"
    r"|picture of: (?P<report>.+?)) -->\n",
    re.MULTILINE,
)
BLOCK = re.compile(r"```text\n(.*?)```\n|((?:\|[^\n]*\n)+)", re.DOTALL)
PICTURE = re.compile(r"!\[[^]]*\]\((?P<path>[^)]+\.svg)\)")
PYTHON = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
VARYING = (
    (re.compile(r"\b\d+:\d\d:\d\d\b"), "H:MM:SS"),
    (re.compile(r"\b20\d{6}T\d{6}Z"), "DATE"),
    (re.compile(r"\b20\d\d-\d\d-\d\dT[\d:]+(?:Z|\+00:00)"), "DATE"),
)
TIMEOUT_S = 3000
SLOW = ("flashgen tune", "transformers_sweep")
"""Commands that take minutes: tests alone compare what they print."""


@dataclass(frozen=True, kw_only=True)
class Output:
    """A marked block or picture. start, end: its text in the page; file: a picture's own text."""

    page: Path
    line: int
    source: str
    start: int
    end: int
    file: Path | None

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"

    @property
    def text(self) -> str:
        """What is committed; "" if there is no file yet."""
        file = self.file or self.page
        return file.read_text()[self.start : self.end] if file.exists() else ""


def outputs(page: Path) -> Iterator[Output]:
    """The marked blocks and pictures of a page. Raises FlashgenError if a marker marks nothing."""
    text = page.read_text()
    for marker in MARKER.finditer(text):
        line = text.count("\n", 0, marker.start()) + 1
        found = (PICTURE if marker["report"] else BLOCK).match(text, marker.end())
        if found is None:
            raise FlashgenError(f"{page.name}:{line}: no text block, table or .svg picture follows")
        file = page.parent / found["path"] if marker["report"] else None
        start, end = found.span(found.lastindex or 0)
        if file is not None:
            start, end = 0, len(file.read_text()) if file.exists() else 0
        source = marker["command"] or marker["report"] or ""
        yield Output(page=page, line=line, source=source, start=start, end=end, file=file)


def make(output: Output, folder: Path) -> str:
    """Today's text of an output; commands run in `folder`."""
    if not output.source:
        return _printed(output)
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", output.source],
        cwd=folder,
        env=commands_environment(folder),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    if done.returncode:
        raise FlashgenError(f"{output}: {output.source} failed: {done.stderr}")
    if output.file is not None:
        return chart_of(next(folder.rglob("report.html")).read_text())
    return "".join(f"{line.rstrip()}\n" for line in done.stdout.splitlines())


def chart_of(report: str) -> str:
    """The first chart of a report, as an SVG file."""
    chart = re.search(r'<svg class="chart".*?</svg>', report, re.DOTALL)
    if chart is None:
        raise FlashgenError("the report has no chart: its log is missing")
    return standalone([chart[0]])


def normal(text: str) -> str:
    """A text without dates and durations, which differ between runs."""
    for pattern, instead in VARYING:
        text = pattern.sub(instead, text)
    return text


def _printed(output: Output) -> str:
    """What the last python block above an output prints; those before it run first."""
    above = output.page.read_text()[: output.start]
    names: dict[str, object] = {"__name__": "__main__"}
    printed = io.StringIO()
    for block in PYTHON.findall(above):
        printed = io.StringIO()
        with (
            tempfile.TemporaryDirectory() as folder,
            contextlib.chdir(folder),
            contextlib.redirect_stdout(printed),
        ):
            exec(compile(block, output.page.name, "exec"), names)
    return printed.getvalue()


def commands_environment(folder: Path) -> dict[str, str]:
    """This checkout importable, its program first on the path, and no setting of flashgen."""
    programs = folder / ".bin"
    programs.mkdir(exist_ok=True)
    program = programs / "flashgen"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m flashgen "$@"\n')
    program.chmod(0o755)
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("FLASHGEN_", "TRITON_"))}
    path = os.pathsep.join([str(programs), str(Path(sys.executable).parent), os.environ["PATH"]])
    return inherited | {"PATH": path, "PYTHONPATH": str(ROOT), "COLUMNS": "120"}


def main(arguments: Sequence[str]) -> int:
    """Rewrite, or check, the outputs of these pages, or of all; the exit code."""
    check = "--check" in arguments
    wanted = {Path(argument).name for argument in arguments if argument != "--check"}
    differ = False
    if unknown := wanted - {page.name for page in PAGES}:
        print(f"no such page: {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    pages = [page for page in PAGES if not wanted or page.name in wanted]
    with tempfile.TemporaryDirectory() as name:
        for page in pages:
            for output in reversed(
                list(outputs(page))
            ):  # from the end: earlier ones keep their place
                if check and any(word in output.source for word in SLOW):
                    continue
                text = make(output, Path(name))
                if normal(text) == normal(output.text):
                    continue
                if check:
                    differ = True
                    print(f"{output} is out of date: run make docs-output", file=sys.stderr)
                    continue
                print(f"{output} has changed")
                file = output.file or page
                content = file.read_text() if file.exists() else ""
                file.write_text(content[: output.start] + text + content[output.end :])
    return int(differ)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
