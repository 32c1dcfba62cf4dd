"""python examples/papers: its page is whole and self-contained, and says what fails."""

from __future__ import annotations

import importlib
import importlib.util
import re
import resource
import subprocess
import sys
from dataclasses import asdict
from html import escape
from pathlib import Path

import pytest

from examples.papers.charts import Cell, Chart, Line, Matrices, Matrix
from examples.papers.claims import CLAIMS, named
from examples.papers.finding import MEANINGS, Check, Figure, Find, Finding, Row, Table, find
from examples.papers.page import Shown, page, write_page
from flashgen.errors import InvalidArgument
from flashgen.report.charts import Scale
from flashgen.spec.records import record_of
from tests.programs import ROOT

POINTS = ((1.0, 2.0), (2.0, 8.0), (4.0, 9.0))


def finding(
    *, holds: bool = True, points: tuple[int, int] | None = None, drawn: bool = False
) -> Finding:
    scale = Scale(name="N, <keys>")
    lines = (Line(name="counted", points=POINTS), Line(name="form", points=POINTS, closed=True))
    chart = Chart(title="A chart", caption="What to see.", x=scale, y=Scale(name="MB"), lines=lines)
    cells = ((Cell(text="7", shade=0.5), Cell(text="8<")),)
    picture = Matrices(
        title="A picture", caption="Of a matrix.", matrices=(Matrix(name="A", cells=cells),) * 2
    )
    table = Table(
        title="A table",
        caption="Its caption.",
        columns=("kernel", "GB", "how"),
        rows=(Row(name="k", cells=("1", "counted"), bar=0.5),),
    )
    return Finding(
        checks=(Check(text="a check", how="counted", holds=holds, points=points),),
        figures=(
            *((Figure(how=("counted", "closed form"), chart=chart),) if drawn else ()),
            *((Figure(how=("computed",), matrices=picture),) if drawn else ()),
            Figure(how=("looked up",), table=table),
        ),
        notes=("A note.",),
    )


def test_the_page_has_every_claim_with_its_sentence_and_command() -> None:
    text = page([Shown(claim=claim, finding=finding()) for claim in CLAIMS])
    for claim in CLAIMS:
        assert claim.command in text
        assert escape(claim.plain, quote=True).replace("&#x27;", "&#39;") in text
        assert escape(claim.sentence, quote=True).replace("&#x27;", "&#39;") in text
    assert all(meaning.replace("'", "&#39;") in text for meaning in MEANINGS.values())
    assert f"{len(CLAIMS)} of {len(CLAIMS)} claims hold" in text
    assert '<td class="num">1</td>' in text
    assert "<td>counted</td>" in text
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
    assert '<li class="fails"><b>fails</b>' in text
    assert "Not shown: numba is missing" in text


def test_the_page_says_what_holds_at_some_points_only() -> None:
    shown = [
        Shown(claim=CLAIMS[0], finding=finding()),
        Shown(claim=CLAIMS[1], finding=finding(points=(20, 21))),
    ]
    text = page(shown)
    assert "1 of 2 claims hold at every point" in text
    assert text.count("holds at 20 of 21") == 3  # on top, in the list, and at the check


def test_a_task_is_typed_and_refuses_what_is_none() -> None:
    with pytest.raises(InvalidArgument, match="the task lacks the key 'gpu'"):
        find({"shows": "examples.papers.tiles:tile_softmax"})
    found = find(asdict(Find(shows="examples.papers.tiles:tile_softmax", gpu=None)))
    assert record_of(Finding, found).holds


def test_every_claim_names_a_function_and_has_a_name_of_its_own() -> None:
    assert len({claim.name for claim in CLAIMS}) == len(CLAIMS)
    for claim in CLAIMS:
        module, function = claim.shows.split(":")
        source = Path(importlib.util.find_spec(module).origin).read_text()  # type: ignore[union-attr, arg-type]
        takes = "gpu: Gpu" if claim.of_gpu else ""
        assert f"\ndef {function}({takes}) -> Finding:" in source


def test_wrong_names_are_refused(tmp_path: Path) -> None:
    assert [claim.name for claim in named(["memory", "sram", "memory"])] == ["memory", "sram"]
    with pytest.raises(
        InvalidArgument, match=r"CLAIM must be one of block-matmul, .*: got 'figure'"
    ):
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
        assert re.search(rf"^{claim.name} +holds ", done.stdout, re.MULTILINE)
    text = (tmp_path / "paper.html").read_text()
    assert "40.265 GB" in text
    assert "<b>fails</b>" not in text
    assert 5 < cpu_seconds() - before < 120


def cpu_seconds() -> float:
    """Of all children that have ended, and of theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
