"""No circle among the modules of flashgen, counting imports of types alone, which import-linter leaves out."""

from __future__ import annotations

import ast
import graphlib
from pathlib import Path

import pytest

from flashgen import paths


def imports(root: Path) -> dict[str, set[str]]:
    """The modules below a package, and which of them each imports anywhere in its text."""
    files = {
        ".".join(file.relative_to(root.parent).with_suffix("").parts).removesuffix(
            ".__init__"
        ): file
        for file in root.rglob("*.py")
    }
    found: dict[str, set[str]] = {}
    for module, file in files.items():
        names = set()
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{module} imports relatively"
                for alias in node.names:
                    inner = f"{node.module}.{alias.name}"
                    names.add(inner if inner in files else str(node.module))
        found[module] = (names & set(files)) - {module}
    return found


def test_no_module_imports_itself_by_way_of_others() -> None:
    graph = imports(paths.PACKAGE)
    assert len(graph) > 200
    assert "flashgen.runtime.dispatcher" in graph["flashgen.runtime.folders"]
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError


def test_a_circle_of_types_is_found(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "__init__.py").write_text("")
    (own / "one.py").write_text("import own.two\n")
    (own / "two.py").write_text("if TYPE_CHECKING:\n    from own import one\n")
    graph = imports(own)
    assert graph == {"own": set(), "own.one": {"own.two"}, "own.two": {"own.one"}}
    with pytest.raises(graphlib.CycleError):
        graphlib.TopologicalSorter(graph).prepare()
