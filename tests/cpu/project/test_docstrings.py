"""help() of a public name: Args, one line each and all of them, Returns, Raises and an example that runs."""

from __future__ import annotations

import doctest
import inspect
import pkgutil
import re

import pytest

from tests.cpu.project.test_api import LISTED, function_of

SECTIONS = ("Args", "Returns", "Raises", "Examples")
FUNCTIONS = {
    f"{found.__module__}.{found.__qualname__}": found
    for name in LISTED
    if (found := function_of(name)) is not None
}


CLASSES = {
    f"{found.__module__}.{found.__qualname__}": found
    for name in LISTED
    if inspect.isclass(found := pkgutil.resolve_name(name)) and not issubclass(found, BaseException)
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_public_docstring_has_its_sections(name: str) -> None:
    function = FUNCTIONS[name]
    parameters = [each for each in inspect.signature(function).parameters if each != "self"]
    sections = sections_of(inspect.getdoc(function) or "")
    assert list(sections) == [each for each in SECTIONS if parameters or each != "Args"]
    if parameters:
        lines = sections["Args"]
        assert [re.match(r"(\w+): \S", line)[1] for line in lines] == parameters  # type: ignore[index]
    assert ">>> " in sections["Examples"][-1] or len(sections["Examples"]) > 1


@pytest.mark.parametrize("name", CLASSES)
def test_a_public_class_says_what_it_is_made_of(name: str) -> None:
    """What it raises too, unless nothing."""
    made = CLASSES[name]
    sections = sections_of(inspect.getdoc(made) or "")
    assert list(sections) in (["Args", "Raises", "Examples"], ["Args", "Examples"])
    named = [re.match(r"(\w+): \S", line)[1] for line in sections["Args"]]  # type: ignore[index]
    assert named == list(inspect.signature(made).parameters)


@pytest.mark.parametrize("name", FUNCTIONS | CLASSES)
def test_the_example_of_a_public_docstring_runs(name: str) -> None:
    function = (FUNCTIONS | CLASSES)[name]
    examples = doctest.DocTestParser().get_doctest(
        inspect.getdoc(function) or "", {}, name, inspect.getsourcefile(function), 0
    )
    assert examples.examples
    said: list[str] = []
    doctest.DocTestRunner().run(examples, out=said.append)
    assert said == []


def test_sections_are_read_as_they_stand() -> None:
    found = sections_of("One.\n\nArgs:\n    a: b.\n    c: d.\n\nReturns:\n    e.\n")
    assert found == {"Args": ["a: b.", "c: d."], "Returns": ["e."]}


def sections_of(text: str) -> dict[str, list[str]]:
    """The lines of each section, without their indentation of four."""
    blocks = re.findall(r"^(\w+):\n((?:    .*\n?)+)", text, re.MULTILINE)
    return {name: [line[4:] for line in body.splitlines()] for name, body in blocks}
