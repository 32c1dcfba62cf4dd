"""Shows claims in child processes, and makes the page of what they found."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import groupby
from pathlib import Path

from markupsafe import Markup

import flashgen
from examples.papers import charts
from examples.papers.claims import Claim
from examples.papers.finding import MEANINGS, Figure, Find, Finding
from flashgen.errors import InvalidArgument
from flashgen.evaluate.build import cpu_count
from flashgen.evaluate.payloads import DEVICE_ENV, INTERPRET_ENV
from flashgen.evaluate.workers.answers import Done, Task
from flashgen.evaluate.workers.pool import Workers
from flashgen.files import write_whole
from flashgen.report.html import environment
from flashgen.spec.gpu import Gpu
from flashgen.spec.records import record_of

LIMIT_S = 300.0
"""Of one claim: the longest takes 4 s of a core, the plateau 20 without a cache."""


@dataclass(frozen=True, kw_only=True)
class Shown:
    """A claim with what was found; why: why nothing was."""

    claim: Claim
    finding: Finding | None
    why: str = ""

    @property
    def holds(self) -> bool:
        """Whether it was shown, and every check holds."""
        return self.finding is not None and self.finding.holds

    @property
    def verdict(self) -> str:
        """holds, holds at 20 of 21, fails, or not shown."""
        return "not shown" if self.finding is None else self.finding.verdict


def show(claims: Sequence[Claim], gpu: Gpu) -> Iterator[Shown]:
    """Show claims, each in a child process, in their order; `gpu` for those of a GPU."""
    one_thread = {name: value for name, value in INTERPRET_ENV.items() if name.endswith("THREADS")}
    with (
        Workers(min(2, cpu_count()), env=INTERPRET_ENV) as interpreting,
        Workers(1, env={**one_thread, **DEVICE_ENV}) as compiling,
    ):
        pools = {"interpreted": interpreting, "compiled": compiling}
        answers = [
            pools[claim.process].submit(
                Task(
                    function="examples.papers.finding:find",
                    payload=asdict(Find(shows=claim.shows, gpu=gpu if claim.of_gpu else None)),
                    limit_s=LIMIT_S,
                )
            )
            for claim in claims
        ]
        for claim, answer in zip(claims, answers, strict=True):
            found = answer.result()
            if isinstance(found, Done):
                yield Shown(claim=claim, finding=record_of(Finding, found.value, claim.name))
            else:
                yield Shown(claim=claim, finding=None, why=str(found))


def check_file(path: Path) -> None:
    """Raise InvalidArgument unless `path` can be the page."""
    if path.suffix.lower() not in (".html", ".htm"):
        raise InvalidArgument(f"--out must name an .html file: got {path}")


def write_page(shown: Sequence[Shown], path: Path) -> None:
    """Write the page, atomically. Raises InvalidArgument if `path` is no .html, ToolchainError if
    it cannot be written.
    """
    check_file(path)
    write_whole(path, page(shown))


def page(shown: Sequence[Shown]) -> str:
    """The HTML of these claims; it loads nothing from the network. Raises ToolchainError if
    matplotlib is missing.
    """
    template = environment(Path(__file__).parent).get_template("paper.html.jinja")
    return template.render(
        shown=shown,
        chapters=[(name, list(some)) for name, some in groupby(shown, lambda s: s.claim.chapter)],
        meanings=MEANINGS,
        draw=_drawn,
        version=flashgen.__version__,
        triton=version("triton"),
        python=platform.python_version(),
    )


def _drawn(figure: Figure) -> Markup:
    """The SVG of a figure that is no table."""
    if figure.matrices is not None:
        return charts.matrices(figure.matrices)
    assert figure.chart is not None
    return charts.lines(figure.chart)
