"""JSON from files, as values of the right types.

Logs, quarantines, sessions and caches hold dataclasses as JSON objects of their fields.
Nothing in such a file is trusted: a missing or unknown key, a value of another type, a number that
is not finite and nesting without end are ValueErrors, whose message names the place.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Mapping
from enum import Enum
from types import NoneType, UnionType
from typing import (
    Any,
    Literal,
    NoReturn,
    Self,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from flashgen.errors import InvalidArgument

T = TypeVar("T")

DEEPEST = 64
"""Arrays and objects within each other; deeper texts are refused."""

LARGEST = 2**63 - 1
"""No whole number in a file is larger."""

SHOWN = 80
"""Characters of a wrong value that an error shows."""


class Record:
    """A dataclass that a JSON object of its fields holds."""

    def to_json(self) -> dict[str, Any]:
        """A dictionary that json can write; from_json reads it back to an equal value."""
        return dataclasses.asdict(self)  # type: ignore[call-overload, no-any-return]

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Self:
        """The value of a record that to_json made. Raises InvalidArgument.

        A key that has a default may be missing: an older flashgen wrote the record.
        """
        return record_of(cls, record)


class UnknownKey(InvalidArgument):
    """A record has all required keys and one more, as a newer version writes it."""


def parsed(text: str | bytes, *, finite: bool = True) -> Any:
    """The value of a JSON text. Raises ValueError, also for NaN and infinities if `finite`."""
    hooks: dict[str, Any] = {"parse_float": _number, "parse_constant": _constant} if finite else {}
    try:
        value = json.loads(text, **hooks)
    except RecursionError:
        raise _too_deep() from None
    marks = ("{", "[") if isinstance(text, str) else (b"{", b"[")
    if sum(map(text.count, marks)) > DEEPEST:  # type: ignore[arg-type]  # of the text's own type
        _check_depth(value)
    return value


def record_of(kind: type[T], value: object, name: str = "the record") -> T:
    """The dataclass `kind` of a JSON object that holds its fields; one with a default may be
    missing. `name` is what errors call it. Raises InvalidArgument, which is a ValueError:
    UnknownKey where no required key is missing.
    """
    if not isinstance(value, Mapping):
        _fail(name, "an object", value)
    readers, required = _fields(kind)  # type: ignore[arg-type]  # a class is hashable
    missing = [key for key in required if key not in value]
    if unknown := [key for key in value if key not in readers]:
        error = InvalidArgument if missing else UnknownKey
        raise error(f"{name} has the unknown key {shown(unknown[0])}")
    if missing:
        raise InvalidArgument(f"{name} lacks the key {missing[0]!r}")
    return kind(**{key: readers[key](each, key) for key, each in value.items()})


def value_of(kind: Any, value: object, name: str) -> Any:
    """A JSON value as one of the type `kind`. Raises InvalidArgument, which is a ValueError."""
    return _reader(kind)(value, name)


Reader = Callable[[Any, str], Any]


@functools.cache
def _fields(kind: type) -> tuple[dict[str, Reader], tuple[str, ...]]:
    """The reader of each field, and the fields that must be there."""
    hints = get_type_hints(kind)
    fields = dataclasses.fields(kind)
    missing = dataclasses.MISSING
    required = [f.name for f in fields if f.default is missing and f.default_factory is missing]
    return {field.name: _reader(hints[field.name]) for field in fields}, tuple(required)


@functools.cache
def _reader(kind: Any) -> Reader:
    """The function that checks values of a type."""
    origin, inside = get_origin(kind), get_args(kind)
    if kind in _SIMPLE:
        return _SIMPLE[kind]
    if origin in (Union, UnionType):
        (inner,) = (_reader(each) for each in inside if each is not NoneType)
        return lambda value, name: None if value is None else inner(value, name)
    if origin is Literal:
        return lambda value, name: _word(inside, value, name)
    if origin is tuple:
        return functools.partial(_items, [_reader(each) for each in inside if each is not ...])
    if origin is dict:
        of_value = _reader(inside[1])
        return lambda value, name: {k: of_value(v, k) for k, v in _object(value, name).items()}
    if isinstance(kind, type) and issubclass(kind, Enum):
        words = tuple(each.value for each in kind)
        return lambda value, name: kind(_word(words, value, name))
    if dataclasses.is_dataclass(kind):
        return lambda value, name: record_of(kind, value, name)  # type: ignore[arg-type]  # a class
    raise TypeError(f"no JSON value is a {kind}")


def _word(words: tuple[Any, ...], value: object, name: str) -> object:
    if not isinstance(value, str) or value not in words:
        _fail(name, f"one of {', '.join(map(str, words))}", value)
    return value


def _items(readers: list[Reader], value: object, name: str) -> tuple[Any, ...]:
    """A tuple: of any length if there is one reader, else of one item each."""
    if not isinstance(value, list | tuple):
        _fail(name, "a list", value)
    if len(readers) == 1:
        return tuple(readers[0](each, name) for each in value)
    if len(value) != len(readers):
        _fail(name, f"a list of {len(readers)}", value)
    return tuple(reader(each, name) for reader, each in zip(readers, value, strict=True))


def _text(value: object, name: str) -> str:
    if not isinstance(value, str):
        _fail(name, "text", value)
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            _fail(name, "text of Unicode", value)
    return value


def _flag(value: object, name: str) -> bool:
    if not isinstance(value, bool):
        _fail(name, "true or false", value)
    return value


def _whole(value: object, name: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or abs(value) > LARGEST:
        _fail(name, "a whole number of 64 bits", value)
    return value


def _figure(value: object, name: str) -> float:
    # An int beyond the range of a float is none of 64 bits either.
    whole = isinstance(value, int) and not isinstance(value, bool) and abs(value) <= LARGEST
    if not whole and not (isinstance(value, float) and math.isfinite(value)):
        _fail(name, "a finite number", value)
    return float(value)  # type: ignore[arg-type]  # one of the two


def _object(value: object, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        _fail(name, "an object", value)
    return value


_SIMPLE: dict[Any, Reader] = {
    str: _text,
    bool: _flag,
    int: _whole,
    float: _figure,
    dict[str, Any]: _object,
    Mapping[str, Any]: _object,
    Any: lambda value, name: value,
}


def _fail(name: str, what: str, value: object) -> NoReturn:
    raise InvalidArgument(f"{name} must be {what}: got {shown(value)}")


def shown(value: object) -> str:
    """A value as errors show it: cut, and without the digits of a number that has too many."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        return "a value too large to be shown"
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"numbers must be finite: got {text[:SHOWN]}")
    return value


def _constant(text: str) -> NoReturn:
    raise ValueError(f"numbers must be finite: got {text}")


def _check_depth(value: object) -> None:
    level = [value]
    for _ in range(DEEPEST):
        inner: list[object] = []
        for each in level:
            if isinstance(each, dict | list):
                inner += each.values() if isinstance(each, dict) else each
        if not inner:
            return
        level = inner
    raise _too_deep()


def _too_deep() -> ValueError:
    return ValueError(f"this is nested over {DEEPEST} deep")
