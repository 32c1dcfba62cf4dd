"""What is known of a schedule is in flashgen/schedules: elsewhere nobody tests its name."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from flashgen.schedules.config import SCHEDULES

ROOT = Path(__file__).resolve().parents[3]
APART = ("bench", "schedules")
"""The ladder's steps are titles and schedules by name."""


def named(text: str) -> Iterator[tuple[int, str]]:
    """Lines of a program that hold a schedule's name: alone, or, of those that others have too, beside `schedule`."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and node.value in SCHEDULES and node.value != "auto":
            yield node.lineno, node.value
        if isinstance(node, ast.Compare) and "schedule" in ast.unparse(node):
            words = (each.value for each in ast.walk(node) if isinstance(each, ast.Constant))
            yield from ((node.lineno, word) for word in words if word == "auto")


def test_no_module_outside_tests_the_name_of_a_schedule() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line} has {word!r}: ask SCHEDULES[config.schedule]"
        for path in sorted((ROOT / "flashgen").rglob("*.py"))
        if path.relative_to(ROOT).parts[1] not in APART
        for line, word in named(path.read_text())
    ]
    assert found == []


def test_names_are_found_where_they_are_tested() -> None:
    text = 'a = c.schedule == "hopper"\nb = c.schedule in ("auto",)\nd = sampler == "auto"\ne = {"fa1": 1}\n'
    assert sorted(named(text)) == [(1, "hopper"), (2, "auto"), (4, "fa1")]


def test_a_schedule_is_listed_by_its_name_and_has_its_templates() -> None:
    for name, schedule in SCHEDULES.items():
        assert schedule.name == name
        for direction in schedule.directions:
            assert (ROOT / "templates" / schedule.template(direction)).is_file()
