"""Mutants of flashgen's modules (tests/mutants.py): none is stale, and the quick tests of each area find
nine in ten.
"""

from __future__ import annotations

import ast

import pytest

from tests.mutants import ROOT, areas, living, mutants_of


@pytest.mark.parametrize("area", areas())
def test_no_mutant_is_stale(area: str) -> None:
    """Its text stands in the module once, what it becomes is Python, and its tests are there."""
    found = list(mutants_of(area))
    for mutant in found:
        ast.parse(mutant.text())
        assert mutant.tests
        assert all((ROOT / path).is_file() for path in mutant.tests)
    assert len(found) >= 25
    assert len(set(map(str, found))) == len(found)


@pytest.mark.slow("runs the quick tests of an area on each of some 26 mutants: 5 to 20 CPU-minutes")
@pytest.mark.parametrize("area", areas())
def test_nine_mutants_in_ten_are_found(area: str) -> None:
    found = list(living(area))
    lived = [str(mutant) for mutant, lives, _ in found if lives]
    assert 10 * len(lived) <= len(found), lived
