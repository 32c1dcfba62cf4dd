"""examples/tour.ipynb: a notebook whose cells run in their order on a CPU, and say what is committed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests import docs_output, notebook, programs
from tests.notebook import NOTEBOOK

CELLS: list[dict[str, Any]] = json.loads(NOTEBOOK.read_text())["cells"]


def test_it_is_a_notebook_with_the_outputs_of_its_cells() -> None:
    tour = json.loads(NOTEBOOK.read_text())
    assert (tour["nbformat"], tour["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in CELLS}) == len(CELLS)
    code = [cell for cell in CELLS if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    assert all(cell["outputs"] for cell in code)
    told = json.dumps([cell["outputs"] for cell in code])
    first, best = re.findall(r"configs, from ([\d.]+) to a best of ([\d.]+) microseconds", told)[0]
    assert float(first) > 1.2 * float(best)  # the picture shows a search
    assert "image/svg+xml" in told
    assert "\\u2501" not in told  # no progress bar


def test_it_calls_explains_and_renders_as_committed(tmp_path: Path) -> None:
    """What changes with every table and template, in seconds."""
    first = [cell for cell in CELLS if cell["cell_type"] == "code"][:3]
    made = notebook.executed({"cells": first}, tmp_path)["cells"]
    said = [docs_output.normal(json.dumps(cell["outputs"])) for cell in made]
    told = [docs_output.normal(json.dumps(cell["outputs"])) for cell in first]
    assert said == told, "run python -m tests.notebook"


@pytest.mark.slow(reason="a tuning run of four configs")
def test_all_cells_run_and_say_what_is_committed(tmp_path: Path) -> None:
    program = (
        "import json, pathlib; from tests import notebook; "
        "given = json.loads(notebook.NOTEBOOK.read_text()); "
        "print(json.dumps(notebook.executed(given, pathlib.Path())))"
    )
    done = programs.run(["-c", program], cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "tour" / "report.html").exists()
    made = json.loads(done.stdout)["cells"]
    for cell, committed in zip(made, CELLS, strict=True):
        said, told = (
            docs_output.normal(json.dumps(each.get("outputs"))) for each in (cell, committed)
        )
        assert said == told, "run python -m tests.notebook"
