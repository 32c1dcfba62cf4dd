"""flashgen paper: its page is whole and self-contained, and says what fails."""

from __future__ import annotations

import importlib
import importlib.util
import re
import resource
import subprocess
import sys
from html import escape
from pathlib import Path

import pytest

from flashgen.errors import InvalidArgument
from flashgen.paper.claims import CLAIMS, named
from flashgen.paper.finding import Check, Finding, Row, Table
from flashgen.paper.page import Shown, page, write_page
from flashgen.report.charts import Chart, Line, Scale
from tests.programs import ROOT

POINTS = ((1.0, 2.0), (2.0, 8.0), (4.0, 9.0))


def finding(*, holds: bool = True) -> Finding:
    scale = Scale(name="N, <keys>")
    lines = (Line(name="counted", points=POINTS), Line(name="form", points=POINTS, closed=True))
    return Finding(
        checks=(Check(text="a check", holds=holds),),
        charts=(
            Chart(
                title="A chart", caption="What to see.", x=scale, y=Scale(name="MB"), lines=lines
            ),
        ),
        tables=(
            Table(
                caption="A table",
                columns=("kernel", "GB"),
                rows=(Row(name="k", cells=("1",), bar=0.5),),
            ),
        ),
        notes=("A note.",),
    )


def test_the_page_has_every_claim_with_its_sentence_command_and_picture() -> None:
    text = page([Shown(claim=claim, finding=finding()) for claim in CLAIMS])
    for claim in CLAIMS:
        assert claim.command in text
        assert escape(claim.sentence, quote=True).replace("&#x27;", "&#39;") in text
    assert text.count('<svg class="chart"') == len(CLAIMS)
    assert f"{len(CLAIMS)} of {len(CLAIMS)} claims hold" in text
    assert "N, &lt;keys&gt;" in text
    assert not re.search(r"(src|href)=\"(?!#)", text)


def test_the_page_says_what_fails_and_what_was_not_shown() -> None:
    first, second = CLAIMS[:2]
    text = page(
        [
            Shown(claim=first, finding=finding(holds=False)),
            Shown(claim=second, finding=None, why="numba is missing"),
        ]
    )
    assert "0 of 2 claims hold" in text
    assert "FAILS: a check" in text
    assert "Not shown: numba is missing" in text


def test_every_claim_names_a_function_and_has_a_name_of_its_own() -> None:
    assert len({claim.name for claim in CLAIMS}) == len(CLAIMS)
    for claim in CLAIMS:
        module, function = claim.shows.split(":")
        source = Path(importlib.util.find_spec(module).origin).read_text()  # type: ignore[union-attr, arg-type]
        assert f"\ndef {function}() -> Finding:" in source


def test_wrong_names_are_refused(tmp_path: Path) -> None:
    assert [claim.name for claim in named(["memory", "sram", "memory"])] == ["memory", "sram"]
    with pytest.raises(InvalidArgument, match=r"CLAIM must be one of figure-2, .*: got 'figure'"):
        named(["figure"])
    with pytest.raises(InvalidArgument, match=r"--out must name an .html file"):
        write_page([], tmp_path / "paper.png")


@pytest.mark.slow(reason="shows all claims: a hundred interpreted runs and six compilations")
def test_all_claims_hold_within_two_minutes_of_a_core(tmp_path: Path) -> None:
    """CPU time: the wall clock of a busy machine says little."""
    before = cpu_seconds()
    command = [sys.executable, "-m", "flashgen", "paper", "--out", str(tmp_path / "paper.html")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    for claim in CLAIMS:
        assert re.search(rf"^{claim.name} +holds", done.stdout, re.MULTILINE)
    text = (tmp_path / "paper.html").read_text()
    assert "40.265 GB" in text
    assert "FAILS" not in text
    assert 5 < cpu_seconds() - before < 120


def cpu_seconds() -> float:
    """Of all children that have ended, and of theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
