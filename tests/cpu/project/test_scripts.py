"""Every script of examples/ and benchmarks/ starts: what it imports by name is still there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import programs
from tests.makers import each

ROOT = Path(__file__).resolve().parents[3]
SCRIPTS = sorted(
    str(file.relative_to(ROOT))
    for folder in ("examples", "benchmarks")
    for file in (ROOT / folder).rglob("*.py")
    if 'if __name__ == "__main__":' in file.read_text()
)


def test_there_are_scripts_in_both_folders() -> None:
    assert {script.split("/")[0] for script in SCRIPTS} == {"examples", "benchmarks"}


@pytest.mark.parametrize("script", each(SCRIPTS, 8, "half a second a script"))
def test_it_prints_its_help_wherever_it_is_started(script: str, tmp_path: Path) -> None:
    done = programs.run([ROOT / script, "--help"], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: {Path(script).name}")
