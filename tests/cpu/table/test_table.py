"""table/table.py: one text for one table, and a sentence with a line for everything else."""

from __future__ import annotations

import errno
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from flashgen.errors import FlashgenError, InvalidArgument, TableError
from flashgen.spec.gpu import TARGETS
from flashgen.spec.problem import BUCKETS, Problem
from flashgen.table.entry import Result
from flashgen.table.table import Table, dump, figure, load, load_folders, parse, save
from tests.tables import AHEAD, FA2, H200, SPEC, made_entry, made_run, made_table

PATH = Path("configs/nvidia_h200.yaml")


@pytest.fixture(scope="module")
def text() -> str:
    return dump(made_table(made_entry(), made_entry(bucket=BUCKETS[3], config=FA2, run="b")))


def line_of(text: str, part: str) -> int:
    return text[: text.index(part)].count("\n") + 1


def test_the_round_trip_is_exact_both_ways(text: str) -> None:
    table = parse(text, PATH)
    assert dump(table) == text
    assert parse(dump(table), PATH) == table


@pytest.mark.parametrize("gpu", TARGETS.values(), ids=lambda gpu: gpu.slug)
def test_every_known_gpu_survives_the_round_trip(gpu: object) -> None:
    table = Table(gpu=gpu)
    assert parse(dump(table), Path(f"{table.gpu.slug}.yaml")) == table


def test_a_table_of_schema_1_is_read_and_written_as_2(text: str) -> None:
    """It has neither p nor regret, and nothing else is different."""
    table = parse(text, PATH)
    new = re.compile(r"^    (p_value|regret): .*\n", re.MULTILINE)
    old = new.sub("", text).replace("schema: 2\n", "schema: 1\n")
    assert len(old) < len(text) - 2 * len("    p_value: null\n")
    assert parse(old, PATH) == table
    assert dump(parse(old, PATH)) == text
    assert {(e.result.p_value, e.result.regret) for e in table.entries} == {(None, 0.0)}


@pytest.mark.parametrize(
    ("p_value", "regret", "words"),
    [(1e-6, 0.0, ("0.000001", "0.0")), (0.0123456789, 0.0149999, ("0.012346", "0.015"))],
)
def test_p_and_regret_are_written_out(
    p_value: float, regret: float, words: tuple[str, str]
) -> None:
    entry = made_entry()
    result = replace(entry.result, p_value=p_value, regret=regret)
    text = dump(made_table(replace(entry, result=result)))
    assert f"    p_value: {words[0]}\n    regret: {words[1]}\n" in text
    read = parse(text, PATH).entries[0].result
    assert read.p_value == pytest.approx(p_value, rel=1e-4)
    assert read.regret == pytest.approx(regret, rel=1e-4)


def test_versions_are_text(text: str) -> None:
    assert 'triton: "3.10"' in text
    assert parse(text, PATH).runs[0].triton == "3.10"


@pytest.mark.parametrize(
    "version",
    [
        "1e3",
        "yes",
        "null",
        "~",
        "0x1f",
        "2026-01-01",
        "a: b",
        'a"b',
        "é\n#",
        "\\",
        "\t",
        "\u2028",
        "😀",
    ],
)
def test_no_text_is_read_as_something_else(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And libyaml writes the same as PyYAML without it."""
    run = replace(made_run(), triton=version, clocks=version)
    table = Table(gpu=H200).with_entry(made_entry(), run)
    texts = [dump(table)]
    monkeypatch.setattr("flashgen.table.table._DUMPER", yaml.SafeDumper)
    texts.append(dump(table))
    assert texts[0] == texts[1]
    assert parse(texts[0], PATH).runs == (run,)


def test_every_key_is_written(text: str) -> None:
    entry = text[text.index("entries:") :]
    for key in ("sdpa_us: null", "order: longest_first", "precision: ieee", "kv_heads: 16"):
        assert key in entry


def test_specs_configs_and_problems_stand_on_one_line(text: str) -> None:
    assert "\n- spec: {direction: forward, dtype: bfloat16, head_dim: 128," in text
    assert "\n  config: {br: 128, bc: 64, num_warps: 8, num_stages: 3," in text
    assert "\n    problem: {batch: 8, heads: 16," in text


@given(st.floats(min_value=1e-3, max_value=1e9))
def test_a_figure_is_close_and_final(value: float) -> None:
    once = figure(value)
    assert float(once) == pytest.approx(value, rel=6e-5)
    assert figure(float(once)) == once
    assert "e" not in once


def test_entries_and_runs_are_sorted_and_idle_runs_dropped() -> None:
    small = replace(SPEC, head_dim=64, head_dim_v=64)
    last, first = made_entry(bucket=BUCKETS[2]), made_entry(small, BUCKETS[3], FA2)
    table = Table(gpu=H200, runs=(made_run("z"), made_run("a")), entries=(last, first))
    read = parse(dump(table), PATH)
    assert [entry.key for entry in read.entries] == [first.key, last.key]
    assert [run.id for run in read.runs] == ["a"]


class TestWithEntry:
    def test_it_replaces_the_entry_of_its_spec_and_bucket(self) -> None:
        other = made_entry(bucket=BUCKETS[0])
        table = made_table(made_entry(), other)
        new = made_entry(config=FA2, run="b")
        table = table.with_entry(new, made_run("b"))
        assert table.find(*new.key) == new
        assert table.find(*other.key) == other
        assert len(table.entries) == 2

    @pytest.mark.parametrize(
        ("held", "new", "replaced"),
        [
            ("measured", "estimated", False),
            ("measured", "measured", True),
            ("estimated", "untimed", False),
            ("estimated", "measured", True),
            ("untimed", "estimated", True),
            ("measured", "replayed", False),
        ],
    )
    def test_a_weaker_source_changes_nothing(self, held, new, replaced) -> None:
        table = made_table(made_entry(source=held))
        after = table.with_entry(made_entry(run="b", source=new), made_run("b", new))
        assert (after != table) == replaced
        assert [run.id for run in after.runs] == (["b"] if replaced else ["a"])

    def test_the_run_must_be_the_entrys(self) -> None:
        with pytest.raises(InvalidArgument, match="'b'"):
            made_table().with_entry(made_entry(), made_run("b"))


FIRST_SPEC = "- spec: {direction: forward"


@pytest.mark.parametrize(
    ("old", "new", "at", "sentence"),
    [
        ("schema: 2", "schema: 3", "schema:", "schema 3 is newer than this flashgen.*update"),
        ("schema: 2", "schema: 0", "schema:", "schema must be 1 to 2"),
        ("schema: 2", 'schema: "2"', "schema:", "schema must be a whole number"),
        ("    p_value: null\n", "", "source: est", "'p_value' is missing; add it"),
        ("    regret: 0.0\n", "", "source: est", "'regret' is missing; add it"),
        ("p_value: null", "p_value: 1.5", "source: est", "p_value must be > 0 and <= 1"),
        ("p_value: null", "p_value: 0.0", "source: est", "p_value must be > 0 and <= 1"),
        ("regret: 0.0", "regret: null", "regret:", "regret must be a number"),
        ("sms: 132", "sms: 132\n  sms: 132", "sms: 132\n\n", "'sms' is here twice; remove one"),
        ("  sms: 132\n", "", "slug:", "'sms' is missing; add it"),
        ("sms: 132", "sm: 132", "sm: 132", "unknown key 'sm'; remove it"),
        ("sms: 132", "sms: 13_2", "sms:", "sms must be a whole number"),
        ("sms: 132", "sms: 1:32", "sms:", "sms must be a whole number"),
        ("sms: 132", "sms: true", "sms:", "sms must be a whole number"),
        ("sms: 132", "sms: -1", "sms:", "sms must be a whole number"),
        ("slug: nvidia_h200", "slug: nvidia_h100", "slug:", "slug must be that of 'NVIDIA H200'"),
        (
            'triton: "3.10"',
            "triton: 3.10",
            "triton:",
            "triton must be text; put it in double quotes",
        ),
        ("protocol: 1", "protocol: [1]", "protocol:", "got a list or a mapping"),
        ("- id: b", "- id: a", "- id: a\n  d", "run 'a' is here twice"),
        ("  run: b", "  run: c", "- spec", "comes from run 'c', which runs lacks"),
        ("median_us: 812.3", "median_us: .nan", "median_us", "median_us must be a number"),
        ("median_us: 812.3", "median_us: .inf", "median_us", "median_us must be a number"),
        ("median_us: 812.3", "median_us: null", "source: est", "median_us must be null where"),
        ("median_us: 812.3", "median_us: 0", "source: est", "median_us must be finite and > 0"),
        (
            "source: estimated\n    p",
            "source: guessed\n    p",
            "source: g",
            "source must be one of",
        ),
        ("br: 128", "br: 48", "{br: 48", "br must be one of 16, 32, 64"),
        ("br: 128", "br: 128, br: 64", "br: 64", "'br' is here twice"),
        ("schedule: s_ahead", "schedule: fastest", "fastest", "schedule must be one of fa1, fa2"),
        ("loads: descriptor, ", "", "{br: 128", "'loads' is missing"),
        ("bucket: [1024, 4096]", "bucket: [1024, 8192]", "[1024, 8", "is no bucket; write one of"),
        ("bucket: [1024, 4096]", "bucket: [1024]", "[1024]", "bucket must be two edges"),
        ("bucket: [16384, null]", "bucket: [1024, 4096]", "- spec", "overlaps the entry of line"),
        ("digest: sha256:ab", "digest: md5:ab", "- spec", "digest must be sha256"),
        (
            "shared_bytes: 98304",
            "shared_bytes: 300000",
            "- spec",
            "300000 bytes.*has 232448 a block",
        ),
        ("entries:", "entries: {}\nrest:", "rest:", "unknown key 'rest'"),
        (
            "num_warps: 4",
            "num_warps: 1",
            "- spec",
            "illegal config br128_bc64_w1.*need 768 registers",
        ),
        ("  sms: 132", "\tsms: 132", "\tsms", "this is not YAML"),
        ("{br: 128", "{[1]: 2, br: 128", "[1]: 2", "a key must be a word"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(text, old, new, at, sentence) -> None:
    assert old in text
    place = text.rindex(old) if old in ("bucket: [16384, null]", "  run: b") else text.index(old)
    broken = text[:place] + new + text[place + len(old) :]
    with pytest.raises(TableError, match=sentence) as caught:
        parse(broken, PATH)
    line = int(str(caught.value).split("line ")[1].split(":")[0])
    lines = [n for n, content in enumerate(broken.splitlines(), 1) if at.split("\n")[0] in content]
    assert line in lines
    assert str(caught.value).startswith(f"{PATH}, line {line}: ")
    assert "\n" not in str(caught.value)


def test_a_word_in_place_of_a_list_is_refused() -> None:
    broken = dump(Table(gpu=H200)).replace("entries: []", "entries: none")
    with pytest.raises(TableError, match=r"entries must be a list; write \[\] if it is empty"):
        parse(broken, PATH)


def test_the_overlap_names_both_lines(text: str) -> None:
    broken = text.replace("[16384, null]", "[1024, 4096]")
    with pytest.raises(TableError, match=f"line {line_of(text, FIRST_SPEC)}; remove one"):
        parse(broken, PATH)


@pytest.mark.parametrize("broken", ["", "# only a comment\n", "[]", "3", "a", "a: *b", "&a [*a]"])
def test_what_is_no_table_is_refused(broken: str) -> None:
    with pytest.raises(TableError, match="line 1: "):
        parse(broken, PATH)


def test_a_table_of_another_product_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(TableError, match="another product, 'NVIDIA H200'; its file is nvidia_h200"):
        parse(text, Path("configs/nvidia_l4.yaml"))
    with pytest.raises(TableError, match=r"nvidia_h200\.yaml; rename it"):
        save(made_table(), tmp_path / "nvidia_l4.yaml")


def test_a_config_that_the_gpu_cannot_run_is_refused() -> None:
    ada = Table(gpu=TARGETS["nvidia_l4"]).with_entry(made_entry(config=AHEAD), made_run())
    with pytest.raises(TableError, match=r"illegal config .*TMA unit"):
        parse(dump(ada), Path("nvidia_l4.yaml"))


def test_a_missing_or_unreadable_file_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(TableError, match="tune --target nvidia_l4"):
        load(tmp_path / "nvidia_l4.yaml")
    (tmp_path / "nvidia_l4.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TableError, match="cannot be read as UTF-8"):
        load(tmp_path / "nvidia_l4.yaml")


def test_a_later_folder_wins(tmp_path: Path) -> None:
    first, second = made_table(), made_table(made_entry(bucket=BUCKETS[0]))
    save(first, tmp_path / "shipped" / "nvidia_h200.yaml")
    save(second, tmp_path / "own" / "nvidia_h200.yaml")
    folders = [tmp_path / name for name in ("shipped", "own", "missing")]
    assert load_folders(*folders) == {"nvidia_h200": second}


class TestSave:
    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        path = tmp_path / "configs" / "nvidia_h200.yaml"
        save(made_table(), path)
        return path

    def test_it_can_be_loaded(self, path: Path) -> None:
        assert load(path) == parse(dump(made_table()), PATH)
        assert [file.name for file in path.parent.iterdir()] == [path.name]

    @pytest.mark.parametrize("call", ["fsync", "replace", "write"])
    def test_a_full_disk_leaves_the_old_table_and_nothing_else(self, path, call, monkeypatch):
        def full(*_: object, **__: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        before = path.read_bytes()
        if call == "replace":
            monkeypatch.setattr(Path, "replace", full)
        elif call == "fsync":
            monkeypatch.setattr(os, "fsync", full)
        else:
            monkeypatch.setattr("builtins.open", full)
            monkeypatch.setattr("io.open", full)
        with pytest.raises(FlashgenError, match=r"No space left on device.*--out"):
            save(made_table(made_entry(bucket=BUCKETS[0])), path)
        monkeypatch.undo()
        assert path.read_bytes() == before
        assert [file.name for file in path.parent.iterdir()] == [path.name]

    def test_a_killed_write_leaves_no_temporary_file(self, path, monkeypatch) -> None:
        def interrupt(_: int) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(os, "fsync", interrupt)
        with pytest.raises(KeyboardInterrupt):
            save(made_table(made_entry(bucket=BUCKETS[0])), path)
        assert [file.name for file in path.parent.iterdir()] == [path.name]

    def test_a_folder_that_cannot_be_made_is_a_sentence(self, tmp_path: Path) -> None:
        (tmp_path / "configs").write_text("a file, where a folder should be")
        with pytest.raises(FlashgenError, match="cannot be written"):
            save(made_table(), tmp_path / "configs" / "nvidia_h200.yaml")


GOOD: dict[str, Any] = {
    "source": "measured",
    "problem": Problem(batch=1, heads=1, kv_heads=1, seq_q=1, seq_k=1),
    "median_us": 2.0,
    "p20_us": 1.0,
    "p80_us": 3.0,
    "tflops": 1.0,
    "default_us": 3.0,
    "sdpa_us": None,
    "max_abs_err_floors": 1.0,
    "candidates": 1,
    "legal": 1,
}


class TestResult:
    def test_the_speedup_is_over_the_default(self) -> None:
        assert Result(**GOOD).speedup == 1.5
        assert Result(**{**GOOD, "default_us": None}).speedup is None

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("median_us", None),
            ("median_us", float("nan")),
            ("p20_us", -1.0),
            ("tflops", float("inf")),
            ("max_abs_err_floors", float("nan")),
            ("source", "untimed"),
            ("p_value", 0.0),
            ("p_value", 1.01),
            ("p_value", float("nan")),
            ("regret", -0.01),
            ("regret", float("inf")),
        ],
    )
    def test_impossible_figures_are_refused(self, field: str, value: object) -> None:
        with pytest.raises(InvalidArgument):
            Result(**{**GOOD, field: value})


def test_features_are_written_where_they_are_on() -> None:
    plain = made_table(made_entry())
    assert "dropout" not in dump(plain)
    spec = replace(SPEC, dropout=True, bias="additive")
    config = replace(AHEAD, schedule="fa2")
    text = dump(made_table(made_entry(spec, config=config)))
    assert "precision: ieee, dropout: true, bias: additive}" in text
    assert parse(text, PATH).entries[0].spec == spec
    with pytest.raises(TableError, match="dropout must be true or false"):
        parse(text.replace("dropout: true", "dropout: 1"), PATH)
