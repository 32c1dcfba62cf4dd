"""Nodes of a YAML text as values; errors name file, line and what to do.

A file that people write is read strictly: no unknown, missing or doubled key, no alias, no value of
another type, no text over several lines.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Sequence
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

import yaml

from flashgen.errors import FlashgenError, InvalidArgument
from flashgen.files import content_of

DEEPEST = 64
"""Collections within collections; deeper ones are refused. A table has 4."""


def text_of(path: Path, error: type[FlashgenError]) -> str:
    """The text of a file. Raises `error` where it is too large, OSError, UnicodeDecodeError."""
    try:
        return content_of(path).decode()
    except UnicodeDecodeError:
        raise
    except ValueError as problem:
        raise error(f"{path}: {problem}; name another file") from None


class Nodes:
    """Reads the nodes of one file. `error` is the class that it raises."""

    def __init__(self, path: Path, error: type[FlashgenError]) -> None:
        self.path = path
        self.error = error

    def root(self, text: str) -> yaml.Node:
        """The root of a text. Raises `error` where it is no YAML, or empty, or nested too deep."""
        try:
            self._check(yaml.parse(text, _LOADER))
            return yaml.compose(text, _LOADER)  # type: ignore[return-value]  # there is one
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            self.fail(mark, f"this is not YAML: {error.problem}; correct it or restore it from git")
        except yaml.YAMLError as error:
            self.fail(
                None, f"this is not YAML: {' '.join(str(error).split())}; restore it from git"
            )

    def _check(self, events: Iterable[yaml.Event]) -> None:
        """Refuse what is no one document, an alias, and what is nested too deep: PyYAML's composer
        calls itself as deep as a text says.
        """
        depth = documents = 0
        for event in events:
            mark: Any = event.start_mark
            documents += isinstance(event, yaml.DocumentStartEvent)
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            if documents > 1:
                self.fail(mark, "a file holds one document; remove the second")
            if isinstance(event, yaml.AliasEvent):
                self.fail(mark, "an alias is refused; write the value out")
            if depth > DEEPEST:
                self.fail(mark, f"this is nested over {DEEPEST} deep; restore the file from git")
        if not documents:
            self.fail(None, "the file is empty; fill it, delete it, or restore it from git")

    def fail(self, mark: yaml.Mark | None, sentence: str) -> NoReturn:
        """Raise `error` with the line of a mark."""
        line = mark.line + 1 if mark else 1
        raise self.error(f"{self.path}, line {line}: {sentence}")

    def keys(
        self, node: yaml.Node, names: tuple[str, ...] | None, optional: Sequence[str] = ()
    ) -> dict[str, yaml.Node]:
        """The values of a mapping, by key: exactly `names`, but that `optional` ones may be
        missing; or any if names is None.
        """
        if not isinstance(node, yaml.MappingNode):
            self.fail(node.start_mark, "a mapping must stand here; write its keys out")
        found: dict[str, yaml.Node] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                self.fail(key.start_mark, "a key must be a word; restore the line from git")
            if key.value in found:
                self.fail(key.start_mark, f"the key {key.value!r} is here twice; remove one")
            if names is not None and key.value not in names:
                known = ", ".join(names)
                self.fail(key.start_mark, f"unknown key {key.value!r}; remove it (known: {known})")
            found[key.value] = value
        for name in names or ():
            if name not in found and name not in optional:
                self.fail(node.start_mark, f"the key {name!r} is missing; add it")
        return found

    def value(self, node: yaml.Node, kind: Any, name: str) -> Any:
        """The value of type `kind` that a node holds; `name` is what errors call it."""
        if get_origin(kind) in (Union, UnionType):
            if node.tag == _NULL:
                return None
            kind = next(option for option in get_args(kind) if option is not NoneType)
        if get_origin(kind) is tuple:
            items = self.items(node, name)
            return tuple(self.value(item, get_args(kind)[0], name) for item in items)
        if is_dataclass(kind):
            return self.record(node, kind)
        return self.scalar(node, kind, name)

    def is_list(self, node: yaml.Node) -> bool:
        """Whether a node is a list, where a key takes that or something else."""
        return isinstance(node, yaml.SequenceNode)

    def items(self, node: yaml.Node, name: str) -> list[yaml.Node]:
        """The nodes of a list."""
        if not isinstance(node, yaml.SequenceNode):
            self.fail(node.start_mark, f"{name} must be a list; write [] if it is empty")
        return list(node.value)

    def record(self, node: yaml.Node, kind: Any, beside: tuple[str, ...] = (), **given: Any) -> Any:
        """The dataclass `kind` that a mapping of its fields holds; those with a default may be left
        out, and those that are `given` must be.

        Keys `beside` them are required, too, and left for the caller to read.
        """
        types, optional = _types(kind)
        held = {name: kind_ for name, kind_ in types.items() if name not in given}
        parts = self.keys(node, (*held, *beside), optional)
        values = {n: self.value(parts[n], kind_, n) for n, kind_ in held.items() if n in parts}
        try:
            return kind(**values, **given)
        except InvalidArgument as error:
            self.fail(node.start_mark, f"{error}; correct it or remove the entry")

    def scalar(self, node: yaml.Node, kind: Any, name: str) -> Any:
        """The word, bool, number or text that a node holds."""
        if get_origin(kind) is Literal:
            words = get_args(kind)
            if not isinstance(node, yaml.ScalarNode) or node.value not in words:
                self.fail(node.start_mark, f"{name} must be one of {', '.join(words)}; correct it")
            return node.value
        if kind is bool:
            if node.tag != f"{_TAG}bool" or node.value not in ("true", "false"):
                self.fail(node.start_mark, f"{name} must be true or false: got {_shown(node)}")
            return node.value == "true"
        tags, pattern, remedy = _SCALARS[kind]
        text = str(node.value)
        if node.tag not in tags or not re.fullmatch(pattern, text) or not text.isprintable():
            self.fail(node.start_mark, f"{name} must be {remedy}: got {_shown(node)}")
        return kind(node.value)


_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_TAG = "tag:yaml.org,2002:"
_NULL = f"{_TAG}null"
# At most 18 digits before the point: a whole number has 64 bits.
_SCALARS: dict[type, tuple[tuple[str, ...], str, str]] = {
    int: ((f"{_TAG}int",), r"0|[1-9][0-9]{0,17}", "a whole number >= 0; write it in digits"),
    float: (
        (f"{_TAG}int", f"{_TAG}float"),
        r"[0-9]{1,18}(\.[0-9]+)?",
        "a number; write it like 12.5",
    ),
    str: ((f"{_TAG}str",), r".+", "printable text on one line; put it in double quotes"),
}


@functools.cache
def _types(kind: type) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The types of a dataclass's fields, and those of them that have a default."""
    hints = get_type_hints(kind)
    optional = tuple(field.name for field in fields(kind) if field.default is not MISSING)
    return {field.name: hints[field.name] for field in fields(kind)}, optional


def _shown(node: yaml.Node) -> str:
    return repr(node.value) if isinstance(node, yaml.ScalarNode) else "a list or a mapping"
