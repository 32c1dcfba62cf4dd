"""Runs the cells of examples/tour.ipynb and writes their outputs into it.

    python -m tests.notebook

As Jupyter does, without it: what a cell prints, and the picture that its last line is. Cells share a
process and an empty folder. tests/cpu/examples/test_tour.py compares all of them.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOK = ROOT / "examples" / "tour.ipynb"


def executed(notebook: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The notebook with the outputs of its cells, which run in `folder`. What they start is of this
    checkout.
    """
    names: dict[str, Any] = {"__name__": "__main__"}
    cells, number = [], 0
    with mock.patch.dict(os.environ, PYTHONPATH=str(ROOT)):
        for cell in notebook["cells"]:
            if cell["cell_type"] == "code":
                number += 1
                outputs = list(_outputs("".join(cell["source"]), names, folder, number))
                cell = cell | {"execution_count": number, "outputs": outputs}
            cells.append(cell)
    return notebook | {"cells": cells}


def _outputs(text: str, names: dict[str, Any], folder: Path, number: int) -> list[dict[str, Any]]:
    program, shown, printed = ast.parse(text), None, io.StringIO()
    last = program.body[-1]
    with contextlib.chdir(folder), contextlib.redirect_stdout(printed):
        if isinstance(last, ast.Expr):
            exec(compile(ast.Module(program.body[:-1], []), f"cell {number}", "exec"), names)
            shown = eval(compile(ast.Expression(last.value), f"cell {number}", "eval"), names)
        else:
            exec(compile(program, f"cell {number}", "exec"), names)
    found: list[dict[str, Any]] = []
    if said := printed.getvalue().replace(f"{ROOT}/", ""):  # no path of this machine
        lines = said.splitlines(keepends=True)
        found.append({"name": "stdout", "output_type": "stream", "text": lines})
    if shown is not None:
        data = {"image/svg+xml": shown._repr_svg_().splitlines(keepends=True)}
        found.append(
            {
                "data": data,
                "execution_count": number,
                "metadata": {},
                "output_type": "execute_result",
            }
        )
    return found


def main() -> None:
    """Rewrite the notebook."""
    notebook = json.loads(NOTEBOOK.read_text())
    with tempfile.TemporaryDirectory() as folder:
        made = executed(notebook, Path(folder))
    NOTEBOOK.write_text(json.dumps(made, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
