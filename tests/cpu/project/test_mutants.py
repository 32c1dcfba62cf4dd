"""tests/mutants.py: its data fits the repository, and its script tells found from survived."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutants import MUTANTS, ROOT, Mutant, misplaced

PACKAGES = {path.parent.name for path in (ROOT / "flashgen").glob("*/__init__.py")}


def test_every_mutant_fits_the_repository() -> None:
    assert misplaced(MUTANTS) == []
    assert len(set(MUTANTS)) == len(MUTANTS) >= 120
    assert all(mutant.old != mutant.new for mutant in MUTANTS)


def test_every_package_and_the_templates_have_mutants() -> None:
    broken = {
        Path(mutant.file).parts[1] for mutant in MUTANTS if mutant.file.startswith("flashgen")
    }
    assert broken == PACKAGES
    assert len({m.file for m in MUTANTS if m.file.startswith("templates")}) >= 12


def test_a_text_that_moved_and_tests_that_went_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\nx = 1\n")
    twice = Mutant("a.py", "x = 1", "x = 2", "tests/cpu/absent.py -k 'a or b'")
    gone = Mutant("b.py", "x = 1", "x = 2", "tests")
    found = misplaced([twice, gone], tmp_path)
    assert found == [
        "a.py must hold this text once, it does 2 times: x = 1",
        "tests/cpu/absent.py does not exist: tests of a mutant of a.py",
        "b.py must hold this text once, it does 0 times: x = 1",
    ]


@pytest.mark.slow("a copy of the repository, and an hour of tests")
def test_95_of_100_mutants_are_found() -> None:
    ran = subprocess.run([sys.executable, "tests/mutants.py"], cwd=ROOT, check=False)
    assert ran.returncode == 0
