"""Entries as a terminal shows them: a column for what any of them has, and none for what none has."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

from rich.console import Console

from flashgen.entry import Entry
from flashgen.problem import BUCKETS
from flashgen.show import entries_grid
from tests.tables import made_entry


def shown(*entries: Entry) -> list[list[str]]:
    """The words of each line; the kernel's name and its origin are one each."""
    file = io.StringIO()
    Console(file=file, width=200).print(entries_grid(entries))
    return [line.split() for line in file.getvalue().splitlines()]


def result_of(entry: Entry, **changes: Any) -> Entry:
    return replace(entry, result=replace(entry.result, **changes))


def test_p_and_regret_have_columns_where_there_are_any() -> None:
    plain = made_entry()
    assert shown(plain)[0][-1] == "floors"
    measured = result_of(made_entry(bucket=BUCKETS[2], source="measured"), p_value=0.00047)
    heads, first, second = shown(plain, measured)
    assert heads[-2:] == ["floors", "p"]
    assert (first[-1], second[-1]) == ("-", "0.0005")
    heads, first, second = shown(result_of(plain, regret=0.0153), measured)
    assert heads[-2:] == ["p", "regret"]
    assert (first[-2:], second[-2:]) == (["-", "1.5%"], ["0.0005", "-"])
