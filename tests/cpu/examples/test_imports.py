"""Every import of the examples, and every attribute of what they import, is there: nothing is run."""

from __future__ import annotations

import ast
import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.notebook import NOTEBOOK

ROOT = Path(__file__).resolve().parents[3]
PROGRAMS = sorted((ROOT / "examples").rglob("*.py"))


def missing(text: str, folder: Path) -> list[str]:
    """What a program in this folder imports, or reads of a module or class, that is not there.

    Modules beside the program are programs of their own: only the names that they define count.
    """
    found, names = [], {}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            for each in node.names:
                bound = each.name if each.asname else each.name.partition(".")[0]
                try:
                    importlib.import_module(each.name)
                    names[each.asname or bound] = importlib.import_module(bound)
                except ImportError as error:
                    found.append(f"line {node.lineno}: {error}")
        elif isinstance(node, ast.ImportFrom) and (beside := folder / f"{node.module}.py").exists():
            defined = set(definitions(ast.parse(beside.read_text())))
            found += [
                f"line {node.lineno}: {beside.name} has no {each.name}"
                for each in node.names
                if each.name not in defined
            ]
        elif isinstance(node, ast.ImportFrom):
            for each in node.names:
                try:
                    module = importlib.import_module(str(node.module))
                    names[each.asname or each.name] = member(module, each.name)
                except (ImportError, AttributeError) as error:
                    found.append(f"line {node.lineno}: {error}")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute):
            try:
                value(node, names)
            except AttributeError as error:
                found.append(f"line {node.lineno}: {error}")
    return found


def definitions(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        yield from (x.id for x in ast.walk(node) if isinstance(getattr(x, "ctx", None), ast.Store)
                    and isinstance(x, ast.Name))  # fmt: skip


def value(node: ast.expr, names: dict[str, object]) -> object:
    """What a.b.c is, as far as a is imported and the rest of modules and classes; else None."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute):
        whose = value(node.value, names)
        return member(whose, node.attr) if isinstance(whose, ModuleType | type) else None
    return None


def member(whose: ModuleType | type, name: str) -> object:
    """An attribute, or a submodule that nobody has imported yet."""
    if isinstance(whose, ModuleType) and not hasattr(whose, name):
        try:
            return importlib.import_module(f"{whose.__name__}.{name}")
        except ModuleNotFoundError:
            raise AttributeError(f"{whose.__name__} has no {name}") from None
    return getattr(whose, name)


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_an_example_imports_is_there(path: Path) -> None:
    assert missing(path.read_text(), path.parent) == []


def test_what_the_notebook_imports_is_there() -> None:
    cells = [
        cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"
    ]
    assert missing("\n".join("".join(cell["source"]) for cell in cells), NOTEBOOK.parent) == []


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("from flashgen.report.charts import moved", "flashgen.report.charts has no moved"),
        ("import flashgen.moved", "No module named 'flashgen.moved'"),
        ("from flashgen import paths as p\np.moved()", "flashgen.paths has no moved"),
        ("import torch\ntorch.nn.functional.moved(1)", "torch.nn.functional has no moved"),
        ("from torch import Tensor\nTensor.moved", "type object 'Tensor' has no attribute 'moved'"),
        ("from page_pool import moved", "page_pool.py has no moved"),
        ("import torch.nn as nn\nfrom page_pool import PagePool\nnn.Module(PagePool.x)", None),
    ],
)
def test_what_is_not_there_is_named(text: str, told: str | None) -> None:
    found = missing(text, ROOT / "examples" / "decode_server")
    expected = [] if told is None else [f"line {text.count(chr(10)) + 1}: {told}"]
    assert found == expected
