"""spec/records.py: JSON from files as values of the right types, or one sentence."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal

import pytest

from flashgen.errors import InvalidArgument
from flashgen.spec.records import parsed, record_of, value_of


class Colour(StrEnum):
    RED = "red"


@dataclass(frozen=True, kw_only=True)
class Inner:
    size: int


@dataclass(frozen=True, kw_only=True)
class Outer:
    name: str
    inner: Inner
    colour: Colour
    word: Literal["a", "b"]
    times: tuple[float, ...]
    pair: tuple[int, str]
    more: dict[str, Any]
    maybe: float | None = None
    flag: bool = False


RECORD: dict[str, Any] = {
    "name": "é", "inner": {"size": 3}, "colour": "red", "word": "a", "times": [1, 2.5], "pair": [1, "x"], "more": {"a": [1]},
}  # fmt: skip


def test_a_record_is_read_with_its_types() -> None:
    made = record_of(Outer, RECORD)
    assert made == Outer(
        name="é",
        inner=Inner(size=3),
        colour=Colour.RED,
        word="a",
        times=(1.0, 2.5),
        pair=(1, "x"),
        more={"a": [1]},
    )
    assert [type(each) for each in made.times] == [float, float]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"name": 1}, "name must be text: got 1"),
        ({"name": "\ud800"}, "name must be text of Unicode"),
        ({"name": "a" * 5000 + "b", "word": 1}, "word must be one of a, b: got 1"),
        ({"inner": []}, r"inner must be an object: got \[\]"),
        ({"inner": {"size": True}}, "size must be a whole number of 64 bits: got True"),
        ({"inner": {"size": 2**63}}, "size must be a whole number of 64 bits"),
        ({"inner": {"size": 1.0}}, "size must be a whole number"),
        ({"inner": {"size": 10**5000}}, "got a value too large to be shown"),
        ({"colour": "blue"}, "colour must be one of red: got 'blue'"),
        ({"colour": []}, "colour must be one of red"),
        ({"times": "12"}, "times must be a list: got '12'"),
        ({"times": [float("nan")]}, "times must be a finite number: got nan"),
        ({"times": [10**400]}, "times must be a finite number"),
        ({"pair": [1]}, "pair must be a list of 2"),
        ({"more": []}, "more must be an object"),
        ({"maybe": "x"}, "maybe must be a finite number"),
        ({"flag": 1}, "flag must be true or false: got 1"),
        ({"\x1b": 1}, r"the unknown key '\\x1b'"),
    ],
)
def test_another_type_is_named(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidArgument, match=sentence) as caught:
        record_of(Outer, RECORD | change)
    assert len(str(caught.value)) < 250


def test_a_missing_key_is_named() -> None:
    with pytest.raises(InvalidArgument, match="the log lacks the key 'name'"):
        record_of(Outer, {key: each for key, each in RECORD.items() if key != "name"}, "the log")


@pytest.mark.parametrize("value", [None, [], "x", 1])
def test_what_is_no_object_is_refused(value: object) -> None:
    with pytest.raises(InvalidArgument, match="the record must be an object"):
        record_of(Outer, value)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{", "Expecting"),
        ("", "Expecting value"),
        ("NaN", "numbers must be finite: got NaN"),
        ("[-Infinity]", "numbers must be finite"),
        ("1e999", "numbers must be finite: got 1e999"),
        ("9" * 5000, "4300 digits"),
        ("[" * 65 + "]" * 65, "nested over 64 deep"),
        ('{"a":' * 65 + "1" + "}" * 65, "nested over 64 deep"),
        ("[" * 100_000, "nested over 64 deep"),
        (b"\xff\xff", "decode"),
    ],
)
def test_a_text_that_is_refused(text: str | bytes, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        parsed(text)


def test_a_text_that_is_read() -> None:
    assert parsed("[" * 64 + "]" * 64)
    assert parsed(json.dumps([[]] * 100)) == [[]] * 100  # many brackets, and none deep
    assert parsed('{"a": Infinity}', finite=False) == {"a": float("inf")}


def test_an_unknown_type_is_a_mistake_of_the_program() -> None:
    with pytest.raises(TypeError, match="no JSON value is a"):
        value_of(complex, 1, "x")
