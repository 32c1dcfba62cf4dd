"""examples/tour.ipynb: a notebook whose cells run in their order on a CPU, and say what is committed."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest

from tests import docs_output, programs
from tests.notebook import NOTEBOOK

CELLS: list[dict[str, Any]] = json.loads(NOTEBOOK.read_text())["cells"]
CODE = ["".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "code"]


def test_it_is_a_notebook_with_the_outputs_of_its_cells() -> None:
    notebook = json.loads(NOTEBOOK.read_text())
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in CELLS}) == len(CELLS)
    code = [cell for cell in CELLS if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    assert all(cell["outputs"] for cell in code)
    told = json.dumps([cell["outputs"] for cell in code])
    assert "image/svg+xml" in told
    assert "\\u2501" not in told  # no progress bar


def test_it_calls_explains_and_renders() -> None:
    printed, names = io.StringIO(), dict[str, Any]()
    with contextlib.redirect_stdout(printed):
        for number, text in enumerate(CODE[:3]):
            without_programs = "\n".join(
                line for line in text.splitlines() if not line.startswith("flashgen(")
            )
            exec(compile(without_programs, f"cell {number}", "exec"), names)
    assert float((names["o"] - names["exact"]).abs().max()) < 1e-5
    assert names["kernel"].name in printed.getvalue()


@pytest.mark.slow(reason="a tuning run of four configs, and two claims of the papers")
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
