"""table/evidence.py: lines of JSON beside a table, on which nothing that is generated depends."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flashgen.errors import TableError
from flashgen.spec.problem import BUCKETS
from flashgen.table import emit
from flashgen.table.evidence import evidence_file, evidence_text, missing
from flashgen.table.table import Table
from flashgen.table.table_file import load, load_with_evidence, save
from tests.tables import FA2, SPEC, bare, made_entry, made_table, named, with_evidence

MEASURED = with_evidence(
    made_entry(bucket=BUCKETS[2], source="measured"), sdpa_us=999.5, p_value=0.0123, regret=0.015
)


@pytest.fixture
def table() -> Table:
    return made_table(made_entry(), MEASURED)


@pytest.fixture
def path(table: Table, tmp_path: Path) -> Path:
    path = tmp_path / "nvidia_h200.yaml"
    save(table, path)
    return path


def test_it_is_saved_beside_the_table_and_read_when_wanted(path: Path, table: Table) -> None:
    assert evidence_file(path) == path.parent / "evidence" / "nvidia_h200.jsonl"
    assert load(path) == bare(table)
    assert load_with_evidence(path) == table


def test_a_line_leaves_out_what_there_is_not_and_says_what_an_interval_is(path: Path) -> None:
    """Percentiles are those of samples; an estimate has none."""
    first, second = map(json.loads, evidence_file(path).read_text().splitlines())
    assert (first["spec"], first["seq_k"], first["us"]) == (SPEC.name, 1024, 812.3)
    known = ["run", "digest", "problem", "registers", "shared", "tried", "default_us"]
    assert list(first)[4:] == [*known, "low_us", "high_us", "runners_up"]
    more = ["sdpa_us", "p20_us", "p80_us", "p_value", "regret", "runners_up"]
    assert list(second)[4:] == known + more
    assert (first["problem"], first["tried"]) == ("b8_h16_s2048", "60/98")
    assert list(first["runners_up"][0]) == ["config", "source", "digest"]


def test_a_table_without_its_evidence_generates_the_same(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHGEN_CONFIGS", str(path.parent))
    before = emit.plan(emit.tables_for(tmp_path))
    evidence_file(path).write_text("this is no evidence\n")
    assert emit.plan(emit.tables_for(tmp_path)) == before
    evidence_file(path).unlink()
    assert emit.plan(emit.tables_for(tmp_path)) == before


def test_evidence_of_another_run_is_dropped(path: Path, table: Table) -> None:
    text = path.read_text()
    path.write_text(text.replace("Z-a", "Z-another"))
    assert load_with_evidence(path).entries == bare(table).entries


def test_what_was_not_read_is_kept(path: Path, table: Table) -> None:
    new = made_entry(bucket=BUCKETS[0], run="b")
    bigger = load(path).with_entry(new, replace(table.runs[0], id=named("b")))
    save(bigger, path)
    assert load_with_evidence(path).entries == (new, *table.entries)


@pytest.mark.parametrize("change", [{"config": FA2}, {"result": made_entry(median_us=9.0).result}])
def test_evidence_of_another_config_or_time_is_dropped(path: Path, change: Any) -> None:
    """An entry edited by hand is none that a search has left evidence of."""
    entries = [replace(entry, **change) for entry in load(path).entries[:1]]
    save(replace(load(path), entries=tuple(entries)), path)
    assert load_with_evidence(path).entries == tuple(entries)
    assert evidence_file(path).read_text() == ""


def test_lines_of_other_entries_are_ignored(path: Path, table: Table) -> None:
    unknown = json.loads(evidence_file(path).read_text().splitlines()[0])
    unknown |= {"seq_k": 7, "more": [1]}
    with evidence_file(path).open("a") as file:
        file.write(f"\n{json.dumps(unknown)}\n")
    assert load_with_evidence(path) == table


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("", "{", "this is not JSON"),
        ("", "[]", "a line must be an object of JSON"),
        ("", "[" * 100_000, "nested over 64 deep"),
        ('"low_us": 406.15', '"low_us": "x"', "low_us must be a finite number: got 'x'"),
        ('"low_us": 406.15', '"low_us": true', "low_us must be a finite number: got True"),
        ('"low_us": 406.15', '"low_us": -1', r"low_us must be > 0 and < 1e\+15"),
        ('"low_us": 406.15', '"low_us": NaN', "numbers must be finite"),
        ('"low_us"', '"p20_us"', r"a line has the keys run, .* low_us, high_us: got \['p20_us'\]"),
        ('"runners_up": [', '"runners_up": 1, "x": [', "runners_up must be a list"),
        ('"runners_up": [', '"runners_up": [1, ', "a line has the keys config, source"),
        ('"tried": "60/98"', '"tried": "all"', "tried must be like 16/540: got 'all'"),
        ('"problem": "b8_h16_s2048"', '"problem": "b8"', "problem must be like b8_h32_s2048"),
        ('"registers": 174', '"registers": 1.5', "registers must be a whole number"),
        ('"shared": 98304', '"shared": 300000', "300000 bytes.*has 232448 a block"),
        ('"source": "untimed"', '"source": "guessed"', "source must be one of"),
        ("br128_bc64_w4_s2", "br48_bc64_w4_s2", "br must be one of"),
        ("br128_bc64_w4_s2", "br256_bc256_w1_s2", "is illegal on nvidia_h200"),
        ("sha256:ab", "sha256:xy", "digest must be sha256"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(
    path: Path, old: str, new: str, sentence: str
) -> None:
    beside = evidence_file(path)
    text = beside.read_text()
    broken = f"{new}\n{text}"
    if old:
        first, rest = text.split("\n", 1)
        place = first.rindex(old)
        broken = f"{first[:place]}{new}{first[place + len(old) :]}\n{rest}"
    beside.write_text(broken)
    with pytest.raises(TableError, match=sentence) as caught:
        load_with_evidence(path)
    assert str(caught.value).startswith(f"{beside}, line 1: ")
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read_is_a_sentence(path: Path) -> None:
    beside = evidence_file(path)
    beside.write_bytes(b"\xff")
    with pytest.raises(TableError, match="cannot be read as UTF-8"):
        load_with_evidence(path)
    beside.unlink()
    beside.symlink_to("/dev/zero")
    with pytest.raises(TableError, match="files over 16 MB are refused"):
        load_with_evidence(path)


def test_a_missing_file_is_told_in_one_sentence(path: Path, table: Table) -> None:
    evidence_file(path).unlink()
    assert load_with_evidence(path) == bare(table)
    (sentence,) = missing(load(path).entries)
    assert sentence.startswith("2 entries have no evidence: the sizes, kernel text, compiler and ")
    assert missing(table.entries) == []


def test_an_entry_without_evidence_has_no_line(table: Table) -> None:
    assert evidence_text(bare(table).entries) == ""
    some: list[Any] = [bare(table).entries[0], table.entries[1]]
    assert evidence_text(some).count("\n") == 1
