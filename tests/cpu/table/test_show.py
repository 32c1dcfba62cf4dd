"""Entries as a terminal shows them: a column for what any of them has, and none for what none has."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from flashgen import paths
from flashgen.spec.gpu import TARGETS
from flashgen.spec.problem import BUCKETS
from flashgen.table.entry import Entry
from flashgen.table.show import entries_grid, targets_grid
from flashgen.table.table_file import load
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


def test_a_row_that_fits_is_one() -> None:
    """The tables that ship, in a wide terminal and in files."""
    entry = made_entry(LONG_SPEC, config=LONG, source="measured")
    heads, row = printed(140, entry).splitlines()
    assert heads.split()[:5] == ["spec", "seq_k", "at", "config", "from"]
    assert LONG.label in row


def test_two_lines_fit_in_80_columns_where_executed_entries_stand_by_measured_ones() -> None:
    measured = with_evidence(made_entry(LONG_SPEC, config=LONG, source="measured"), p_value=1e-6)
    executed = made_entry(
        LONG_SPEC, bucket=BUCKETS[3], config=replace(LONG, schedule="s_ahead"), median_us=98765.4
    )
    executed = replace(executed, tritons=("3.7",), config=LONG)
    decode = make_spec("bfloat16", 128, direction="decode")
    lines = printed(80, measured, executed, made_entry(decode, bucket=BUCKETS[0])).splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) == 8
    assert lines[4] == f"{LONG_SPEC.name}  {LONG.label}  (executed)"


def test_targets_lose_nothing_in_80_columns() -> None:
    file = io.StringIO()
    console = Console(file=file, width=80, highlight=False)
    tables = {slug: load(paths.shipped_table(slug)) for slug in ("nvidia_h200", "nvidia_l4")}
    console.print(targets_grid(TARGETS.values(), tables, 80))
    lines = file.getvalue().splitlines()
    assert "\u2026" not in file.getvalue()
    slugs = [line.split()[0] for line in lines[1:] if not line.startswith(" ")]
    assert "nvidia_a100_sxm4_80gb" in slugs
    assert "".join(slugs) == "".join(TARGETS)
    whole = [line.split() for line in lines if line.startswith("nvidia_l4 ")]
    held = len(tables["nvidia_l4"].entries)
    assert whole == [["nvidia_l4", "sm_89", "58", "99", "300", "121", str(held), "estimated"]]
    h200 = next(number for number, line in enumerate(lines) if line.startswith("nvidia_h200 "))
    assert lines[h200].rstrip().endswith(" measured,")
    assert lines[h200 + 1].endswith(" estimated")
