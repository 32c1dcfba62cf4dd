"""docs/clients.md says what tests say; tests/cpu/project/test_docs_output.py compares its tables."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flashgen.errors import FlashgenError
from tests import clients

HERE = "cpu/project/test_clients.py"


def test_every_test_that_is_named_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert clients.main([]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert len(rows) == 2 + len(clients.clients())


@pytest.mark.parametrize(
    ("cell", "sentence"),
    [
        (clients.Yes(f"{HERE}::test_of_nothing"), "names a test that is not there"),
        (clients.Yes("cpu/no_file.py::test_of_nothing"), "names a test that is not there"),
        (clients.Refused(f"{HERE}::test_every_test_that_is_named_is_there"), "expects no error"),
    ],
)
def test_what_no_test_says_is_an_error(cell: clients.Cell, sentence: str) -> None:
    with pytest.raises(FlashgenError, match=sentence):
        clients.check(cell)


def test_what_has_not_run_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = clients.Yes(f"{HERE}::test_a_row_has_all_columns")
    with pytest.raises(
        FlashgenError, match=r"a test has not run: .*make -f tests/sessions\.mk clients"
    ):
        clients.check(cell)
    monkeypatch.setattr(clients, "runs", lambda: {cell.test: "torch 2.13.0, Triton 3.7.1"})
    clients.check(cell)


@pytest.mark.parametrize(
    ("cases", "passes"),
    [
        (["passed", "skipped"], True),
        (["passed", "failed"], False),
        (["skipped"], False),
        ([], False),
    ],
)
def test_a_run_notes_what_passed(
    cases: list[str], passes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    test = f"{HERE}::test_a_row_has_all_columns"
    rows = [clients.everywhere("x", "1", test)]

    def main(_: object, plugins: list[clients.Outcomes]) -> int:
        plugins[0].found = {test: set(cases)}
        return 0

    monkeypatch.setattr(clients, "RUNS", tmp_path / "runs.json")
    monkeypatch.setattr(pytest, "main", main)
    clients.RUNS.write_text(
        json.dumps({test: "torch 1, Triton 1", "gone::test": "torch 1, Triton 1"})
    )
    assert clients.run(rows, ["cpu"]) == (not passes)
    assert list(clients.runs()) == [test] * passes


def test_a_row_has_all_columns() -> None:
    with pytest.raises(FlashgenError, match="x has 1 cells of 6"):
        clients.Client(name="x", version="1", cells=(clients.NOT_TESTED,))


def test_an_unknown_option_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert clients.main(["--table"]) == 2
    assert "--table" in capsys.readouterr().err
