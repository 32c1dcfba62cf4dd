"""docs/clients.md says what tests say; tests/cpu/project/test_docs_output.py compares its tables."""

from __future__ import annotations

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


def test_a_row_has_all_columns() -> None:
    with pytest.raises(FlashgenError, match="x has 1 cells of 6"):
        clients.Client(name="x", version="1", cells=(clients.NOT_TESTED,))


def test_an_unknown_option_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert clients.main(["--table"]) == 2
    assert "--table" in capsys.readouterr().err
