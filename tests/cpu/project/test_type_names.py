"""Names of classes and of types stand for one thing each in the whole package."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from flashgen import paths


def type_names(module: ast.Module) -> Iterator[str]:
    """The classes and the aliases of types that a module defines; variables of types aside, which
    stand for nothing outside a signature.
    """
    for node in module.body:
        if isinstance(node, ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name, value = node.targets[0].id, ast.unparse(node.value)
            of_types = name[0].isupper() and not name.isupper()
            if of_types and not value.startswith(("TypeVar(", "ParamSpec(")):
                yield name


def twice(sources: dict[str, str]) -> dict[str, list[str]]:
    """Names that several modules define, and those modules."""
    found: dict[str, list[str]] = defaultdict(list)
    for place, text in sources.items():
        for name in type_names(ast.parse(text)):
            found[name].append(place)
    return {name: places for name, places in found.items() if len(places) > 1}


def test_no_type_name_occurs_twice() -> None:
    files = [path for path in paths.PACKAGE.rglob("*.py") if path.is_file()]
    assert len(files) > 200
    sources = {str(path.relative_to(paths.PACKAGE)): Path(path).read_text() for path in files}
    assert twice(sources) == {}


def test_classes_and_aliases_are_told_from_variables_of_types() -> None:
    first = "class Row: ...\nKey = tuple[str, int]\nT = TypeVar('T')\nLIMIT = 3\n"
    second = "Row = dict[str, int]\nclass Key: ...\nT = TypeVar('T')\nLIMIT = 4\n"
    assert twice({"a.py": first, "b.py": second}) == {
        "Row": ["a.py", "b.py"],
        "Key": ["a.py", "b.py"],
    }
