"""Mutants of PTX are found, by the check whose business they are."""

from __future__ import annotations

import pytest

from tests.ptx_mutants import ROWS, STAGES, SURVIVORS, TMA, Row, found_by, mutants

CHEAP = tuple(row for row in ROWS if row.subject in (TMA, STAGES))[::2]
"""Rows of which `make test` runs one mutant each: those of small programs."""


def name(row: Row) -> str:
    return f"{row.subject}: {row.what}"


def check(row: Row, *, most: int | None = None) -> None:
    """Assert that the first `most` mutants that break something are found as the row says."""
    broken = [each for each in mutants(row) if not each.survives]
    assert broken, "the pattern matches nothing"
    for mutant in broken[:most]:
        found = found_by(mutant)
        assert found, f"{mutant.name} survives"
        assert set(found.split("+")) <= row.found, f"{mutant.name}: {found}"


@pytest.mark.parametrize("row", CHEAP, ids=name)
def test_a_mutant_is_found(row: Row) -> None:
    check(row, most=1)


@pytest.mark.slow("runs 620 mutants of PTX")
@pytest.mark.parametrize("row", ROWS, ids=name)
def test_every_mutant_is_found(row: Row) -> None:
    check(row)


@pytest.mark.slow("runs mutants of PTX")
@pytest.mark.parametrize("row", [r for r in ROWS if (r.subject, r.what) in SURVIVORS], ids=name)
def test_mutants_that_break_nothing_survive(row: Row) -> None:
    """So that a new check that finds one of them is noticed."""
    for mutant in mutants(row):
        if mutant.survives:
            assert not found_by(mutant), mutant.name
