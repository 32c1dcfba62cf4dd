"""The outputs and pictures in README and docs/ are what the programs make today: make -f tests/sessions.mk docs-output."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import docs_output
from tests.cpu.spec.test_gpu import PUBLISHED_TFLOPS
from tests.docs_output import Output
from tests.tables import SHIPPED

OUTPUTS = [output for page in docs_output.PAGES for output in docs_output.outputs(page)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shared: a tuning run that several outputs need runs once."""
    return tmp_path_factory.mktemp("docs")


@pytest.mark.slow("make test proves a sample of it")
@pytest.mark.timeout(docs_output.TIMEOUT_S)
@pytest.mark.parametrize("output", OUTPUTS, ids=str)
def test_an_output_is_what_the_program_prints_today(output: Output, folder: Path) -> None:
    made = docs_output.normal(docs_output.make(output, folder))
    assert made == docs_output.normal(output.text), "run make -f tests/sessions.mk docs-output"


def test_counts_are_of_what_ships() -> None:
    """Not of what else somebody's clone has: make check counts that."""
    made = docs_output.counts()
    shipped = made | {"GPUs": len(PUBLISHED_TFLOPS), "tables": len(SHIPPED)}
    for page in docs_output.PAGES:
        assert docs_output.counted(page.read_text(), shipped) == page.read_text()
    assert {
        name
        for page in docs_output.PAGES
        for _, name, _ in docs_output.COUNT.findall(page.read_text())
    } == set(shipped)
    assert all(made[name] >= number for name, number in shipped.items())


@pytest.mark.parametrize("page", docs_output.PAGES, ids=lambda page: page.name)
def test_no_count_stands_without_its_command(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    counted = r"(?<!-->)\b(?:\d{2,}|ten|eleven|twelve) (?:known by name|products of NVIDIA|have a table|(?:example )?models)\b"
    assert re.findall(counted, text) == []


def test_outputs_are_found_and_rewritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "<!-- output of: echo one; echo 0:01:02 -->\n```text\nold\n```\n\n"
        "```python\nprint('two')\n```\n\n<!-- output of the python above -->\n```text\n```\n"
    )
    monkeypatch.setattr(docs_output, "PAGES", [page])
    assert docs_output.main([]) == 0
    text = page.read_text()
    assert "```text\none\n0:01:02\n```" in text
    assert "```text\ntwo\n```" in text
    page.write_text(text.replace("0:01:02", "0:09:59"))
    assert docs_output.main([]) == 0
    assert "0:09:59" in page.read_text()  # durations differ between runs, and are not rewritten


def test_a_check_says_what_differs_and_rewrites_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    text = "<!-- output of: echo one -->\n```text\none\n```\n<!-- output of: exit 1 # flashgen tune -->\n```text\n```\n"
    page.write_text(text)
    monkeypatch.setattr(docs_output, "PAGES", [page])
    assert docs_output.main(["--check"]) == 0
    page.write_text(text.replace("\none\n", "\ntwo\n"))
    assert docs_output.main(["--check"]) == 1
    assert (
        "page.md:1 is out of date: run make -f tests/sessions.mk docs-output"
        in capsys.readouterr().err
    )
    assert "two" in page.read_text()
