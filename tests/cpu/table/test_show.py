"""Entries as a terminal shows them: a column for what any of them has, and none for what none has."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from flashgen.spec.problem import BUCKETS
from flashgen.table.entry import Entry
from flashgen.table.show import entries_grid
from tests.makers import make_config, make_spec
from tests.tables import made_entry, with_evidence


def shown(*entries: Entry) -> list[list[str]]:
    """The words of each line; the kernel's name and its origin are one each."""
    file = io.StringIO()
    Console(file=file, width=200).print(entries_grid(entries))
    return [line.split() for line in file.getvalue().splitlines()]


def test_p_and_regret_have_columns_where_there_are_any() -> None:
    plain = made_entry()
    assert shown(plain)[0][-1] == "floors"
    measured = with_evidence(made_entry(bucket=BUCKETS[2], source="measured"), p_value=0.00047)
    heads, first, second = shown(plain, measured)
    assert heads[-2:] == ["floors", "p"]
    assert (first[-1], second[-1]) == ("-", "0.0005")
    heads, first, second = shown(with_evidence(plain, regret=0.0153), measured)
    assert heads[-2:] == ["p", "regret"]
    assert (first[-2:], second[-2:]) == (["-", "1.5%"], ["0.0005", "-"])


LONG_SPEC = make_spec("bfloat16", 128, mask="causal")
LONG = make_config(
    128, 128, num_warps=8, schedule="hopper", loads="descriptor", order="longest_first"
)


def printed(width: int, *entries: Entry, stale: tuple[Entry, ...] = ()) -> str:
    file = io.StringIO()
    Console(file=file, width=width, highlight=False).print(entries_grid(entries, stale))
    return file.getvalue()


@pytest.mark.parametrize("width", [80, 90, 129])
def test_where_a_row_does_not_fit_an_entry_has_two_lines_and_keeps_every_word(width: int) -> None:
    spec = LONG_SPEC
    entries = [
        with_evidence(
            made_entry(spec, bucket=bucket, config=LONG, source="measured"),
            p_value=0.00047, regret=0.0153,
        )
        for bucket in BUCKETS
    ]  # fmt: skip
    lines = printed(width, *entries, stale=(entries[1],)).splitlines()
    assert max(map(len, lines)) <= width
    assert lines[0].split() == ["spec", "config"]
    named = f"{spec.name}  {LONG.label}"
    assert lines[2::2] == [named, f"{named}  (stale)", named, named]
    heads = ["seq_k", "at", "from", "us", "TFLOP/s", "x", "default", "floors", "p", "regret"]
    assert lines[1].split() == heads
    for entry, line in zip(entries, lines[3::2], strict=True):
        begin = f"  {entry.bucket}".ljust(16) + str(entry.problem.seq_k).ljust(6) + "measured"
        assert line.startswith(begin)
        assert line.split()[-2:] == ["0.0005", "1.5%"]
    ends = {len(line) for line in lines[1::2]}
    assert len(ends) == 1  # columns
