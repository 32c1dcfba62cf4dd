"""No module is imported past the contracts of .importlinter: by a text, through sys.modules, by a loader of its own."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
KNOWN = {
    "bench/peers.py": "packages of others, by the names in its table",
    "evaluate/workers/child.py": "a program: runs the task that its parent names",
    "kernels/loader.py": "kernels, from their files or texts",
    "paper/finding.py": "runs in a child process the claim that its parent names",
    "runtime/folders.py": "a generated package, from its folder",
    "runtime/generated_tables.py": "the table of a GPU in a generated package",
    "runtime/kernel_files.py": "a kernel of a generated package",
    "runtime/transformers_models.py": "the modules of others in which models are defined",
}
"""Modules that look others up while they run, and what they find."""
OTHERS = ("flashgen", "generated")


def lookups(text: str) -> list[str]:
    """The expressions of a module that name another module while it runs, but for constant names of other packages."""
    found = []
    for node in ast.walk(ast.parse(text)):
        name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
        if name.split(".")[-1] in ("import_module", "__import__", "find_spec"):
            given = node.args[0] if isinstance(node, ast.Call) else None
            constant = given.value if isinstance(given, ast.Constant) else None
            if not isinstance(constant, str) or constant.split(".")[0] in OTHERS:
                found.append(ast.unparse(node))
        elif name.startswith("importlib.util.") or name.endswith(".exec_module"):
            found.append(ast.unparse(node))
        elif isinstance(node, ast.Attribute) and ast.unparse(node) == "sys.modules":
            found.append("sys.modules")
    return found


def test_modules_are_imported_where_the_contracts_see_it() -> None:
    found = {
        str(path.relative_to(ROOT / "flashgen")): lookups(path.read_text())
        for path in (ROOT / "flashgen").rglob("*.py")
    }
    unknown = {name: each for name, each in found.items() if each and name not in KNOWN}
    assert [name for name in unknown if not name.startswith("cli/")] == [], unknown
    assert [name for name in KNOWN if not found[name]] == []


@pytest.mark.parametrize(
    "text",
    [
        "import importlib\nimportlib.import_module('flashgen.runtime.dispatcher')",
        "from importlib import import_module\nimport_module(name)",
        "__import__('flashgen.table')",
        "import sys\nsys.modules['flashgen.tune']",
        "import importlib.util\nimportlib.util.find_spec('flashgen.cli')",
        "import importlib as lib\nlib.import_module(f'{package}.table')",
    ],
)
def test_evasions_are_found(text: str) -> None:
    assert len(lookups(text)) == 1
    assert lookups("import importlib\nimportlib.import_module('pynvml')") == []
