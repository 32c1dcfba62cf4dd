"""examples/tour.ipynb: a notebook without outputs, whose cells run in their order on a CPU."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest

from tests import programs

NOTEBOOK = programs.ROOT / "examples" / "tour.ipynb"
CELLS: list[dict[str, Any]] = json.loads(NOTEBOOK.read_text())["cells"]
CODE = ["".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "code"]


def test_it_is_a_notebook_without_outputs() -> None:
    notebook = json.loads(NOTEBOOK.read_text())
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in CELLS}) == len(CELLS)
    for cell in CELLS:
        assert cell["cell_type"] in ("code", "markdown")
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            assert cell["execution_count"] is None


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
def test_all_cells_run(tmp_path: Path) -> None:
    done = programs.run(["-c", "\n".join(CODE)], cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "tour" / "report.html").exists()
    assert "dropout         holds" in done.stdout
    assert "fwd_fp16_d64" in done.stdout
