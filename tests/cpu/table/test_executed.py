"""Entries that were executed and not timed: in a table's text, in generated/, and when they serve."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from flashgen.errors import InvalidArgument, TableError
from flashgen.runtime.generated_tables import served_from
from flashgen.runtime.selection import Ladder, ladder
from flashgen.schedules.config import KernelConfig
from flashgen.spec.gpu import TARGETS
from flashgen.spec.problem import BUCKETS
from flashgen.table import emit
from flashgen.table.diff import diff, markdown, merge
from flashgen.table.entry import NO_EVIDENCE, Entry
from flashgen.table.table import Table
from flashgen.table.table_file import dump, load_with_evidence, parse, save
from tests.makers import make_config
from tests.tables import (
    AHEAD,
    FA2,
    H200,
    SPEC,
    made_entry,
    made_run,
    made_table,
    named,
    with_evidence,
)

HOPPER = make_config(
    128, 128, num_warps=8, schedule="hopper", loads="descriptor", order="longest_first"
)
LATER = named("b", "20260303T000000Z")
PATH = Path("nvidia_h200.yaml")


def executed(source: str = "estimated", bucket: int = 1) -> Entry:
    made = made_entry(bucket=BUCKETS[bucket], source="measured", config=HOPPER)
    result = replace(made.result, source=source, median_us=700.0)  # type: ignore[arg-type]
    return replace(made, result=result, tritons=("3.7", "3.8"))


def both() -> Table:
    return made_table(made_entry()).of([made_entry(), executed()])


def served(tmp_path: Path, triton: str, *, plain: bool = False) -> Ladder:
    entries = [made_entry(bucket=BUCKETS[0]), made_entry()]  # one row, that begins before its own
    emit.write({"nvidia_h200": both().of([*entries, executed()])}, tmp_path / "generated")
    found = replace(served_from(tmp_path / "generated"), triton=lambda: triton, plain=plain)
    return ladder(found, "nvidia_h200", H200, SPEC, BUCKETS[1].low)


def test_it_stands_in_a_list_of_its_own_and_is_read_again(tmp_path: Path) -> None:
    table = both()
    assert (table.entries, table.executed) == ((made_entry(),), (executed(),))
    text = dump(table)
    assert f"\n- executed: {SPEC.name} triton 3.7 3.8\n" in text
    path = tmp_path / PATH
    save(table, path)
    assert load_with_evidence(path) == table
    assert dump(parse(text, PATH)) == text


def test_it_serves_under_its_versions_of_triton_and_names_what_else_does(tmp_path: Path) -> None:
    first, *rest = served(tmp_path, "3.8").rungs
    assert (first.choice.config, first.choice.median_us) == (HOPPER, 700.0)
    assert rest[0].choice.config == AHEAD
    for triton, plain, why in (
        ("3.9", False, "it serves under Triton 3.7, 3.8, and this is 3.9"),
        ("", False, "and this is none"),
        ("3.7", True, "FLASHGEN_PLAIN leaves it out"),
    ):
        found = served(tmp_path, triton, plain=plain)
        assert found.rungs[0].choice.config == AHEAD
        assert why in found.skipped[0]


def test_a_measured_entry_takes_its_place() -> None:
    table = both()
    measured = made_entry(run="b", source="measured", config=AHEAD)
    run = replace(table.runs[0], id=named("b"), source="measured", triton="3.7.1")
    after = table.with_entry(measured, run)
    assert (after.entries, after.executed) == ((measured,), ())
    slower = replace(made_entry(), result=replace(made_entry().result, median_us=900.0))
    assert table.with_entry(slower, table.runs[0]).executed == table.executed
    assert table.find(*executed().key, HOPPER) == executed()
    assert table.find(*executed().key) == made_entry()


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("triton 3.7 3.8", "triton 3.7.1", "a version of Triton must be like 3.7"),
        (" triton 3.7 3.8", "", "a block `executed`, and no other, must name versions of Triton"),
        ("executed:", "estimated:", "a block `executed`, and no other, must name versions of"),
        (" triton 3.7 3.8", " 3.7", "a block `executed`, and no other, must name versions of"),
    ],
)
def test_what_is_no_executed_entry_is_refused(old: str, new: str, said: str) -> None:
    text = dump(both())
    assert old in text
    with pytest.raises(TableError, match=said):
        parse(text.replace(old, new), PATH)


def test_it_stands_in_the_place_of_an_entry_and_is_estimated() -> None:
    text = dump(made_table(made_entry()).of([made_entry(), executed(bucket=2)]))
    with pytest.raises(
        TableError, match=r"\[4096, 16384\) must stand in place of an entry; remove"
    ):
        parse(text, PATH)
    for source in ("measured", "replayed"):
        with pytest.raises(InvalidArgument, match="must be estimated or untimed: got"):
            executed(source)


def test_it_follows_the_block_in_whose_place_it_serves() -> None:
    """Behind that of the other dtype, too: twins share it."""
    plain, twin = made_entry(), replace(SPEC, dtype="float16")
    other = made_entry(twin, config=FA2)
    table = made_table(plain, other).of([plain, other, executed(), replace(executed(), spec=twin)])
    blocks = [line[2:] for line in dump(table).splitlines() if line.startswith("- ")][1:]
    names = [SPEC.name, twin.name]
    assert blocks == [
        *(f"estimated: {name}" for name in names),
        f"executed: {' '.join(names)} triton 3.7 3.8",
    ]
    assert parse(dump(table), PATH).executed == tuple(map(unread, table.executed))


def unread(entry: Entry) -> Entry:
    return replace(entry, evidence=NO_EVIDENCE)


BLACKWELL = make_config(
    256, 128, num_warps=8, num_stages=4, schedule="blackwell", loads="descriptor",
    order="longest_first", exp2_by_fma=4, rescale_log2=8,
)  # fmt: skip


def test_where_nothing_was_timed_it_is_untimed(tmp_path: Path) -> None:
    """As on a B200, in the text, in a merge, and where it serves."""
    held = made_entry(source="untimed", config=FA2)
    stands = replace(held, config=BLACKWELL, tritons=("3.7",))
    table = replace(made_table(held).of([held, stands]), gpu=TARGETS["nvidia_b200"])
    path = tmp_path / "nvidia_b200.yaml"
    save(table, path)
    assert load_with_evidence(path) == table
    assert merge([table, table]).executed == (stands,)
    emit.write({"nvidia_b200": table}, tmp_path / "generated")
    for triton, plain, serves in (
        ("3.7", False, BLACKWELL),
        ("3.7", True, FA2),
        ("3.8", False, FA2),
    ):
        found = replace(served_from(tmp_path / "generated"), triton=lambda v=triton: v, plain=plain)
        choice = ladder(found, "nvidia_b200", table.gpu, SPEC, BUCKETS[1].low).rungs[0].choice
        assert (choice.config, choice.source, choice.median_us) == (serves, "untimed", None)


@pytest.mark.parametrize(
    ("config", "triton", "stays"),
    [(HOPPER, "3.6.0", False), (AHEAD, "3.7.1", False), (AHEAD, "3.6.0", True)],
)
def test_a_measured_entry_takes_its_place_where_it_was_a_rival(
    config: KernelConfig, triton: str, stays: bool
) -> None:
    run = replace(made_run("now"), source="measured", triton=triton)
    made = made_entry(bucket=BUCKETS[1], source="measured", config=config)
    table = both().with_entry(with_evidence(made, run=run.id), run)
    assert table.find(made.spec, made.bucket) == with_evidence(made, run=run.id)
    assert (table.executed_for(made.spec, made.bucket, "3.8") is not None) is stays


NEWER = replace(HOPPER, order="grouped")


def beside() -> Table:
    """An executed entry, and one that took its place under Triton 3.7."""
    newer = replace(executed(), config=NEWER, tritons=("3.7",))
    held = [made_entry(bucket=BUCKETS[0]), made_entry(), executed()]
    return both().of(held).with_entry(newer, made_run())


def test_another_takes_its_place_under_the_versions_that_it_names(tmp_path: Path) -> None:
    table = beside()
    assert {e.config.order: e.tritons for e in table.executed} == {
        "longest_first": ("3.8",),
        "grouped": ("3.7",),
    }
    key = executed().key
    assert table.serving(*key, "3.7.1") == table.find(*key, config=NEWER)
    assert table.serving(*key, "3.8.0") == table.find(*key, config=HOPPER)
    assert table.serving(*key, "3.6.0") == table.find(*key) == made_entry()
    save(table, tmp_path / PATH)
    assert load_with_evidence(tmp_path / PATH) == table
    emit.write({"nvidia_h200": table}, tmp_path / "generated")
    for triton, config in (("3.7", NEWER), ("3.8", HOPPER), ("3.6", made_entry().config)):
        found = replace(served_from(tmp_path / "generated"), triton=lambda v=triton: v)
        assert (
            ladder(found, "nvidia_h200", H200, SPEC, BUCKETS[1].low).rungs[0].choice.config
            == config
        )
    again = replace(executed(), config=NEWER, tritons=("3.7", "3.8"))
    assert table.with_entry(again, made_run()).executed == (again,)


def test_a_difference_tells_which_versions_have_another_kernel() -> None:
    before = both().of([made_entry(bucket=BUCKETS[0]), made_entry(), executed()])
    key = executed().key
    kept, added = diff(before, beside()).changes
    assert (kept.before, kept.after) == (executed(), beside().find(*key, config=HOPPER))
    assert kept.kind == "figures"
    assert (added.before, added.after) == (None, beside().find(*key, config=NEWER))
    text = markdown(diff(before, beside()))
    assert "| 3.7, 3.8 → 3.8 |" in text
    assert "| 3.7 |" in text


def test_kernels_of_both_tables_serve_under_their_versions() -> None:
    """The later run wins under a version that both have; one kernel has one list of versions."""
    early, late = executed(), replace(with_evidence(executed(), run=LATER), config=NEWER)
    plain = made_table(made_entry())
    late_run = replace(made_run(), id=LATER)
    for versions, found in (
        (("3.6",), {("3.7", "3.8"): HOPPER, ("3.6",): NEWER}),
        (("3.6", "3.8"), {("3.7",): HOPPER, ("3.6", "3.8"): NEWER}),
        (("3.7", "3.8"), {("3.7", "3.8"): NEWER}),
    ):
        other = plain.with_entry(replace(late, tritons=versions), late_run)
        for tables in ([both(), other], [other, both()]):
            assert {e.tritons: e.config for e in merge(tables).executed} == found
    again = replace(with_evidence(early, run=LATER), tritons=("3.6",))
    (joined,) = merge([both(), plain.with_entry(again, late_run)]).executed
    assert joined.tritons == ("3.6", "3.7", "3.8")


def test_a_kernel_that_is_listed_twice_is_refused() -> None:
    lines = dump(both()).splitlines(keepends=True)
    block = lines[
        next(n for n, line in enumerate(lines) if "executed:" in line and "triton" in line) :
    ]
    twice = "".join([*lines, *block]).replace("triton 3.7 3.8", "triton 3.7", 1)
    with pytest.raises(TableError, match="overlaps the entry of line"):
        parse(twice.replace("triton 3.7 3.8", "triton 3.8"), PATH)


def test_two_of_one_version_are_refused() -> None:
    text = dump(beside())
    assert text.count(" triton 3.7\n") == 1
    with pytest.raises(TableError, match="overlaps the entry of line"):
        parse(text.replace(" triton 3.7\n", " triton 3.7 3.8\n"), PATH)


def test_the_versions_under_which_it_serves() -> None:
    found = [
        version
        for version in ("3.6", "3.7", "3.7.1", "3.8.0", "3.70")
        if executed().serves_under(version)
    ]
    assert found == ["3.7", "3.7.1", "3.8.0"]


def test_it_is_legal_and_keeps_evidence_that_was_not_read(tmp_path: Path) -> None:
    path, label = tmp_path / PATH, HOPPER.label
    with pytest.raises(TableError, match="has the illegal config br128_bc256_w8_s4_hopper"):
        parse(dump(both()).replace(label, label.replace("bc128_w8_s2", "bc256_w8_s4")), PATH)
    save(both(), path)
    save(parse(dump(both()), PATH), path)
    assert load_with_evidence(path) == both()
