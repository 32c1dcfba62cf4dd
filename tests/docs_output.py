"""Writes the outputs and pictures that README and docs/ show.

    make -f tests/sessions.mk docs-output                      all pages
    python -m tests.docs_output PAGE.md   one page
    python -m tests.docs_output --check   fail if one that takes seconds is not what is committed

A comment in front of a block or picture says where it comes from:

    <!-- output of: COMMAND -->            the block, or the table, is the output of a command
    <!-- output of the python above -->    the block is what the last python block prints
    <!-- count of: GPUs -->                the number that follows it in the same line: counts() has all
    <!-- picture of: COMMAND -->           the .svg is the first chart of report.html

All commands of a run share one folder, in which `flashgen` is this checkout's, and $CLONE names it. A
command that stands twice runs once.
tests/cpu/project/test_docs_output.py compares all of them.
"""

from __future__ import annotations

import contextlib
import functools
import io
import linecache
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from flashgen.errors import FlashgenError
from flashgen.report.charts import standalone
from flashgen.spec.gpu import TARGETS

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MARKER = re.compile(
    r"^<!-- (?:output of: (?P<command>.+?)|(?P<python>output of the python above)"
    r"|picture of: (?P<picture>.+?)) -->\n",
    re.MULTILINE,
)
BLOCK = re.compile(r"```text\n(.*?)```\n|((?:\|[^\n]*\n)+)", re.DOTALL)
COUNT = re.compile(r"(<!-- count of: (\w+) -->)(\d+)")
PICTURE = re.compile(r"!\[[^]]*\]\((?P<path>[^)]+\.svg)\)")
PYTHON = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
VARYING = (
    (re.compile(r"\b\d+:\d\d:\d\d\b"), "H:MM:SS"),
    (re.compile(r"\b20\d{6}T\d{6}Z"), "DATE"),
    (re.compile(r"\b20\d\d-\d\d-\d\dT[\d:]+(?:Z|\+00:00)"), "DATE"),
)
TIMEOUT_S = 3000
SLOW = ("flashgen tune", "examples.papers", "transformers_sweep", "language_sweep")
"""Commands that take minutes: tests alone compare what they print."""


@dataclass(frozen=True, kw_only=True)
class Output:
    """A marked block or picture. start, end: its text in the page; file: the picture."""

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
        if self.file is None:
            return self.page.read_text()[self.start : self.end]
        return self.file.read_text() if self.file.exists() else ""


def outputs(page: Path) -> Iterator[Output]:
    """The marked blocks and pictures of a page. Raises FlashgenError if a marker marks nothing."""
    text = page.read_text()
    for marker in MARKER.finditer(text):
        line = text.count("\n", 0, marker.start()) + 1
        found = (PICTURE if marker["picture"] else BLOCK).match(text, marker.end())
        if found is None:
            raise FlashgenError(f"{page.name}:{line}: no text block, table or picture follows")
        file = page.parent / found["path"] if marker["picture"] else None
        start, end = found.span(found.lastindex or 0)
        source = marker["command"] or marker["picture"] or ""
        yield Output(page=page, line=line, source=source, start=start, end=end, file=file)


def counts() -> dict[str, int]:
    """What README and docs/ count: GPUs known by name, those of them with a table, example models."""
    tables, models = ROOT / "configs", ROOT / "examples" / "workloads"
    return {
        "GPUs": len(TARGETS),
        "tables": len(list(tables.glob("*.yaml"))),
        "models": len(list(models.glob("*.yaml"))),
    }


def counted(text: str, numbers: Mapping[str, int]) -> str:
    """A text with these numbers in the places of its own."""
    return COUNT.sub(lambda found: f"{found[1]}{numbers[found[2]]}", text)


def make(output: Output, folder: Path) -> str:
    """Today's text of an output; commands run in `folder`."""
    if not output.source:
        return _printed(output)
    try:
        printed = _run(output.source, folder)
    except FlashgenError as error:
        raise FlashgenError(f"{output}: {error}") from None
    if output.file is not None:
        return chart_of(next(folder.rglob("report.html")).read_text())
    return "".join(f"{line.rstrip()}\n" for line in printed.splitlines())


@functools.cache
def _run(command: str, folder: Path) -> str:
    """What a command prints in a folder. Raises FlashgenError."""
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command],
        cwd=folder,
        env=commands_environment(folder),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    if done.returncode:
        raise FlashgenError(f"{command} failed: {done.stderr}")
    return done.stdout


def write(output: Output, text: str) -> None:
    """Put today's text of an output in its place."""
    if output.file is None:
        page = output.page.read_text()
        output.page.write_text(page[: output.start] + text + page[output.end :])
    else:
        output.file.write_text(text)


def chart_of(report: str) -> str:
    """The first chart of a report, as an SVG file."""
    chart = re.search(r'<svg class="chart".*?</svg>', report, re.DOTALL)
    if chart is None:
        raise FlashgenError("the report has no chart: its log is missing")
    return standalone(chart[0])


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
            # Triton reads the source of its kernels from the cache of lines.
            lines = block.splitlines(keepends=True)
            linecache.cache[output.page.name] = (len(block), None, lines, output.page.name)
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
    return inherited | {"PATH": path, "PYTHONPATH": str(ROOT), "CLONE": str(ROOT), "COLUMNS": "120"}


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
            if (text := counted(page.read_text(), counts())) != page.read_text():
                differ = differ or check
                print(f"{page.name}: a count {'is out of date: run make -f tests/sessions.mk docs-output' if check else 'has changed'}",
                      file=sys.stderr if check else sys.stdout)  # fmt: skip
                if not check:
                    page.write_text(text)
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
                    print(
                        f"{output} is out of date: run make -f tests/sessions.mk docs-output",
                        file=sys.stderr,
                    )
                    continue
                print(f"{output} has changed")
                write(output, text)
    return int(differ)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
