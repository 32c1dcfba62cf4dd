"""What changed between two tables, as Markdown; and tables merged into one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from flashgen.errors import InvalidArgument
from flashgen.spec.gpu import TARGETS
from flashgen.spec.problem import BUCKETS
from flashgen.table.diff import diff, markdown, merge
from flashgen.table.entry import Entry
from flashgen.table.table import Table
from tests.makers import make_spec
from tests.tables import (
    AHEAD,
    FA2,
    H200,
    SPEC,
    bare,
    made_entry,
    made_run,
    made_table,
    named,
    with_evidence,
)

OTHER = make_spec(dtype="float16", head_dim=64, mask="causal")
LATER = named("b", "20260303T000000Z")


def timed(median_us: float, *, spread: float = 1.0, **fields: Any) -> Entry:
    """A measured entry whose samples lie `spread` around the median."""
    entry = made_entry(source="measured", median_us=median_us, **fields)
    return with_evidence(entry, low_us=median_us - spread, high_us=median_us + spread)


def table_of(*entries: Entry, **run: Any) -> Table:
    table = Table(gpu=H200)
    for entry in entries:
        made = replace(made_run(entry.evidence.run or "", entry.result.source), **run)
        table = table.with_entry(entry, made)
    return table


def rows(text: str, heading: str) -> list[list[str]]:
    """The cells of the table under a heading, its head first."""
    part = text.split(f"#### {heading}\n")[1].split("####")[0]
    lines = [line for line in part.splitlines() if line.startswith("|") and "---" not in line]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


# ---------------------------------------------------------------- diff


def test_each_kind_of_change_is_told_apart() -> None:
    spec = [make_spec(head_dim=dim) for dim in (16, 32, 64, 96, 128, 192)]
    old = made_table(
        made_entry(spec[0]),
        made_entry(spec[1], config=FA2),
        made_entry(spec[2], source="measured", config=FA2),
        made_entry(spec[3], config=FA2),
        made_entry(spec[4], config=FA2),
    )
    new = made_table(
        made_entry(spec[1], config=replace(FA2, num_warps=4), run="b"),
        made_entry(spec[2], config=FA2, run="b"),
        made_entry(spec[3], config=FA2, median_us=700.0, run="b"),
        made_entry(spec[4], config=FA2, run="b"),
        made_entry(spec[5], run="b"),
    )
    found = diff(old, new)
    assert [(change.entry.spec.head_dim, change.kind) for change in found.changes] == [
        (16, "removed"),
        (32, "config"),
        (64, "weakened"),
        (96, "figures"),
        (192, "added"),
    ]
    assert found.unchanged == 1  # equal figures by another run are no change


def test_a_ratio_stands_only_where_times_compare() -> None:
    def ratio(before: Table, after: Table) -> float | None:
        (change,) = diff(before, after).changes
        return change.ratio

    old, fast = table_of(timed(200.0)), timed(100.0, run="b")
    assert ratio(old, table_of(fast)) == 2.0
    assert ratio(old, table_of(fast, protocol=2)) is None
    assert ratio(old, table_of(made_entry(median_us=100.0))) is None
    assert ratio(old, table_of(made_entry(source="untimed"))) is None
    problem = replace(fast.problem, kv_heads=2)
    assert ratio(old, table_of(with_evidence(fast, problem=problem))) is None
    assert ratio(old, bare(table_of(fast))) is None
    assert "1 entry has no evidence: " in markdown(diff(old, bare(table_of(fast))))


def test_tables_of_two_gpus_are_not_compared() -> None:
    other = Table(gpu=TARGETS["nvidia_l4"])
    with pytest.raises(InvalidArgument, match="compared: got nvidia_h200 and nvidia_l4"):
        diff(made_table(), other)


# ---------------------------------------------------------------- Markdown


def test_markdown_has_what_a_reviewer_needs() -> None:
    better = timed(400.0, config=FA2, run="b")
    better = with_evidence(better, p_value=0.0031, regret=0.0125)
    old = table_of(timed(500.0), timed(100.0, spec=OTHER, config=FA2))
    new = table_of(
        better,
        timed(200.0, spec=OTHER, config=FA2, run="b"),
        driver="580.1",
    )
    text = markdown(diff(old, new))
    assert text.startswith("### NVIDIA H200: 2 of 2 entries differ\n")
    assert (
        "1 another config; 1 same config, other figures or versions of Triton; 0 unchanged." in text
    )
    assert (
        "(2 entries) the new ones are 0.79 times as fast, in the geometric mean; the worst is 0.50, of `fwd_fp16_d64_causal` [1024, 4096)"
        in text
    )
    head, row = rows(text, "Another config")
    assert dict(zip(head, row, strict=True)) == {
        "spec": "`fwd_bf16_d128_causal`",
        "seq_k": "[1024, 4096)",
        "config": f"`{AHEAD.label}` → `{FA2.label}`",
        "median us": "500.0 → 400.0",
        "old / new": "1.25",
        "source": "measured",
        "p": "0.0031",
        "regret": "1.2%",
    }
    head, row = rows(text, "Same config, other figures or versions of Triton")
    assert head == ["spec", "seq_k", "config", "median us", "old / new", "source"]
    head, before, after = rows(text, "Runs")
    assert (before[0], before[1], before[-1]) == ("old", named("a"), "2")
    assert dict(zip(head, after, strict=True))["driver"] == "580.1"


def test_what_is_weaker_or_gone_comes_first() -> None:
    old = table_of(
        timed(500.0), timed(100.0, spec=OTHER), timed(100.0, bucket=BUCKETS[2], config=FA2)
    )
    new = table_of(
        made_entry(run="b"),
        timed(90.0, bucket=BUCKETS[2], run="c"),
        made_entry(bucket=BUCKETS[3], run="b"),
    )
    text = markdown(diff(old, new))
    headings = [line[5:] for line in text.splitlines() if line.startswith("#### ")]
    assert headings == ["Weaker source than before", "Removed", "Another config", "Added", "Runs"]
    assert rows(text, "Weaker source than before")[1][-1] == "measured → estimated"


def test_a_changed_kernel_text_is_told() -> None:
    again = made_entry(digest="sha256:" + "cd" * 6)
    head, row = rows(
        markdown(diff(made_table(), made_table(again))),
        "Same config, other figures or versions of Triton",
    )
    assert dict(zip(head, row, strict=True))["kernel text"] == "changed"


def test_equal_tables_are_said_to_be_equal() -> None:
    text = markdown(diff(made_table(), made_table()))
    assert "0 of 1 entries differ" in text
    assert "All entries are the same." in text


def test_facts_of_the_gpu_that_differ_are_told() -> None:
    slower = replace(made_table(), gpu=replace(H200, clock_mhz=1000))
    text = markdown(diff(made_table(), slower))
    assert f"Facts of the GPU differ: clock\\_mhz {H200.clock_mhz} → 1000." in text


def test_text_of_a_file_cannot_break_the_markdown() -> None:
    old = table_of(timed(500.0, run="a"))
    new = table_of(timed(400.0, run="b"), clocks="`1|2`", power="b|<b> # x")
    head, _, after = rows(markdown(diff(old, new)).replace("\\|", "!"), "Runs")
    assert len(after) == len(head)
    assert after[head.index("power")] == "b!\\<b\\> \\# x"
    assert after[head.index("clocks")] == "\\`1!2\\`"


# ---------------------------------------------------------------- merge


def test_entries_of_all_tables_are_there_with_their_runs() -> None:
    one, two = timed(10.0, run="a"), timed(20.0, spec=OTHER, run="b")
    merged = merge([table_of(one), table_of(two)])
    assert set(merged.entries) == {one, two}
    assert [run.id for run in merged.runs] == [named("a"), named("b")]


@pytest.mark.parametrize(
    ("first", "second", "wins"),
    [
        (made_entry(median_us=1.0), timed(900.0), 2),  # a stronger source, however slow
        (timed(900.0), made_entry(median_us=1.0), 1),
        (timed(10.0), timed(7.0), 2),  # faster beyond the spread
        (timed(7.0), timed(10.0), 1),
        (timed(10.0), timed(9.0), 2),  # within the spread: the later run
        (timed(9.0), timed(10.0), 2),
        (made_entry(median_us=10.0), made_entry(median_us=9.99), 2),  # estimates have no noise
        (made_entry(median_us=9.99), made_entry(median_us=10.0), 1),
        (made_entry(source="untimed"), made_entry(source="untimed", config=FA2), 2),
    ],
)
def test_the_rule_of_merging(first: Entry, second: Entry, wins: int) -> None:
    second = with_evidence(second, run=LATER)
    tables = [table_of(first), table_of(second)]
    expected = first if wins == 1 else second
    assert merge(tables).entries == (expected,)
    assert merge(tables[::-1]).entries == (expected,)


def test_times_of_other_protocols_do_not_compete() -> None:
    early = table_of(timed(5.0), protocol=1)
    late = table_of(timed(50.0, run=LATER), protocol=2)
    assert merge([late, early]).entries[0].evidence.run == LATER


def test_of_equal_dates_the_first_stays() -> None:
    """Whatever the order, nothing flips when a merged table is merged again."""
    one, two = timed(10.0), timed(9.5, run="b")  # within the spread
    for tables in ([table_of(one), table_of(two)], [table_of(two), table_of(one)]):
        merged = merge(tables)
        assert merged.entries == tables[0].entries
        assert merge([merged, *tables]) == merge([merged, *tables[::-1]])
        assert merge([merged, *tables]).entries == merged.entries


def test_two_runs_of_one_name_both_stay() -> None:
    here = table_of(timed(10.0), timed(11.0, bucket=BUCKETS[2]), clocks="here")
    there = table_of(
        timed(20.0, spec=OTHER), timed(21.0, spec=OTHER, bucket=BUCKETS[2]), clocks="there"
    )
    merged = merge([here, there])
    assert [run.id for run in merged.runs] == [named("a"), named("a-2")]
    for entry in merged.entries:
        run = merged.run_of(entry)
        assert run is not None
        assert run.clocks == ("here" if entry.spec == SPEC else "there")


def test_a_name_is_free_again_when_its_run_has_no_entry() -> None:
    """Also with entries whose run nobody knows: then every run may be theirs."""
    weak = table_of(made_entry(), clocks="weak")
    strong = table_of(timed(10.0, run="b"), clocks="strong")
    later = table_of(timed(20.0, spec=OTHER), clocks="later")
    assert [run.id for run in merge([weak, strong, later]).runs] == [named("a"), named("b")]
    unknown = bare(made_table(made_entry(make_spec(head_dim=32), config=FA2)))
    merged = merge([replace(unknown, runs=()), weak, strong, later])
    assert [run.id for run in merged.runs] == [named("a"), named("a-2"), named("b")]


def test_the_gpu_is_as_the_strongest_run_found_it() -> None:
    listed = table_of(made_entry(run=LATER))
    read = replace(table_of(timed(10.0, spec=OTHER, run="b")), gpu=replace(H200, clock_mhz=1000))
    assert merge([listed, read]).gpu.clock_mhz == 1000
    assert merge([read, listed]).gpu.clock_mhz == 1000


def test_an_entry_that_these_facts_rule_out_is_refused() -> None:
    small = replace(H200, shared_per_block=32768)
    read = replace(
        table_of(timed(10.0, spec=OTHER, config=replace(FA2, br=16, bc=16), run="b")), gpu=small
    )
    with pytest.raises(
        InvalidArgument, match=r"fwd_bf16_d128_causal \[1024, 4096\) must be legal on nvidia_h200"
    ):
        merge([table_of(made_entry()), read])


def test_what_cannot_be_merged_is_one_sentence() -> None:
    with pytest.raises(InvalidArgument, match="tables must be one at least"):
        merge([])
    with pytest.raises(InvalidArgument, match="merged: got nvidia_h200 and nvidia_l4"):
        merge([made_table(), Table(gpu=TARGETS["nvidia_l4"])])
