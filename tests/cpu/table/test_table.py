"""table/table_file.py: one text for one table, and a sentence with a line for everything else."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from flashgen.errors import FlashgenError, InvalidArgument, TableError
from flashgen.files import MOST_BYTES
from flashgen.spec.gpu import TARGETS
from flashgen.spec.problem import BUCKETS
from flashgen.table.entry import EntryEvidence, Result, figure, speedup
from flashgen.table.table import Table
from flashgen.table.table_file import COLUMNS, dump, load, load_folders, parse, save
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
)

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
    assert (
        bare(made_table(made_entry(), made_entry(bucket=BUCKETS[3], config=FA2, run="b"))) == table
    )


@pytest.mark.parametrize("gpu", TARGETS.values(), ids=lambda gpu: gpu.slug)
def test_every_known_gpu_survives_the_round_trip(gpu: object) -> None:
    table = Table(gpu=gpu)
    assert parse(dump(table), Path(f"{table.gpu.slug}.yaml")) == table


def test_versions_are_text(text: str) -> None:
    assert 'triton: "3.10"' in text
    assert parse(text, PATH).runs[0].triton == "3.10"


@pytest.mark.parametrize(
    "version",
    ["1e3", "yes", "null", "~", "0x1f", "2026-01-01", "a: b", 'a"b', "\\", "é #", "1/2", "{", "😀"],
)
def test_no_text_is_read_as_something_else(version: str) -> None:
    run = replace(made_run(), triton=version, clocks=version)
    table = Table(gpu=H200).with_entry(made_entry(), run)
    assert parse(dump(table), PATH).runs == (run,)


@pytest.mark.parametrize("name", ["", "a\nb", "\t", "\u2028", "\x1b[2J", "\u202e"])
def test_names_are_printable_and_on_one_line(name: str, text: str) -> None:
    with pytest.raises(InvalidArgument, match="must be printable text on one line"):
        replace(made_run(), driver=name)
    with pytest.raises(InvalidArgument, match="must be printable text on one line"):
        replace(H200, name=name)
    broken = text.replace('triton: "3.10"', f"triton: {json.dumps(name)}", 1)
    with pytest.raises(TableError, match=r"line \d+: triton must be printable text on one line"):
        parse(broken, PATH)


@pytest.mark.parametrize("arch", ["sm_90", "sm_90a", "gfx942", "gfx90a"])
def test_architectures(arch: str) -> None:
    assert replace(H200, arch=arch).arch == arch


@pytest.mark.parametrize("arch", ["sm90", "sm_", "sm_90b", "gfx", "gfxyz", "", 'sm_90"', "sm_90\n"])
def test_what_is_no_architecture_is_refused(arch: str, text: str) -> None:
    with pytest.raises(InvalidArgument, match="arch must be like sm_90 or gfx942"):
        replace(H200, arch=arch)
    with pytest.raises(TableError, match=r"line \d+: arch must be"):
        parse(text.replace('arch: "sm_90"', f"arch: {json.dumps(arch)}"), PATH)


def entry_lines(table: Table) -> list[str]:
    text = dump(table)
    return text[text.index("entries:") :].splitlines()


TWIN = replace(SPEC, dtype="float16")


def test_neighbours_with_one_config_are_one_row() -> None:
    """With a figure for each of their buckets, below those of other rows."""
    entries = [
        made_entry(bucket=b, median_us=us)
        for b, us in zip(BUCKETS, (9, 80.5, 700, 1e6), strict=True)
    ]
    other = made_entry(TWIN, BUCKETS[1], FA2, source="untimed")
    table = made_table(*entries, other)
    assert entry_lines(table) == [
        "entries:",
        "# from   config                            us                        x default            floors",
        "- estimated: fwd_bf16_d128_causal",
        "  1:     br128_bc64_w8_s3_s_ahead_tma_lpt  9.0 80.5 700.0 1000000.0  2.00 2.00 2.00 2.00  1.250",
        "- untimed: fwd_fp16_d128_causal",
        "  1024:  br128_bc64_w8_s2_fa2_ptr                 -                          -            1.250",
    ]
    assert parse(dump(table), PATH) == bare(table)


@pytest.mark.parametrize("change", ["config", "source", "gap"])
def test_what_differs_has_a_row_of_its_own(change: str) -> None:
    first, last = made_entry(bucket=BUCKETS[0]), made_entry(bucket=BUCKETS[1])
    if change == "config":
        last = replace(last, config=FA2)
    elif change == "source":
        last = replace(last, result=replace(last.result, source="measured"))
    else:
        last = replace(last, bucket=BUCKETS[2])
    table = made_table(first, last)
    begins = [line.split()[0] for line in entry_lines(table)[3:]]
    assert begins == {
        "gap": ["1:", "4096:"],
        "source": ["1024:", "-", "1:"],
    }.get(change, ["1:", "1024:"])
    assert parse(dump(table), PATH) == bare(table)


def twins(**changes: Any) -> Table:
    """Entries of bfloat16, and of float16 with other floors; the latter's first is changed."""
    held = [made_entry(bucket=bucket) for bucket in BUCKETS[:2]]
    other = [replace(entry, spec=TWIN) for entry in held]
    other = [replace(e, result=replace(e.result, max_abs_err_floors=0.5)) for e in other]
    other[0] = replace(other[0], result=replace(other[0].result, **changes))
    return made_table(*held, *other)


def test_twins_that_differ_in_floors_are_one_block() -> None:
    block = entry_lines(twins())[2:]
    assert block[0] == "- estimated: fwd_bf16_d128_causal fwd_fp16_d128_causal"
    assert [line.split()[-2:] for line in block[1:]] == [["1.250", "0.500"]]
    assert parse(dump(twins()), PATH) == bare(twins())


@pytest.mark.parametrize("changes", [{"median_us": 9.0}, {"speedup": 9.0}])
def test_twins_that_differ_in_more_stand_one_behind_the_other(changes: dict[str, Any]) -> None:
    """Before those of other head dims."""
    table = twins(**changes)
    wide = made_entry(replace(SPEC, head_dim=64, head_dim_v=64), BUCKETS[0], FA2)
    table = table.with_entry(wide, made_run())
    blocks = [line.split()[2] for line in entry_lines(table) if line.startswith("- ")]
    assert blocks == ["fwd_bf16_d64_causal", "fwd_bf16_d128_causal", "fwd_fp16_d128_causal"]
    assert parse(dump(table), PATH) == bare(table)


def test_all_entries_of_a_kernel_have_the_largest_error_that_was_seen_of_it() -> None:
    """Of the same spec and config, in whatever order they come."""
    held = [made_entry(bucket=bucket) for bucket in BUCKETS[:2]]
    apart = made_entry(TWIN, BUCKETS[0])
    worse = replace(held[0], result=replace(held[0].result, max_abs_err_floors=1.75))
    for entries in ([*held, apart, worse], [worse, held[1], apart]):
        errors = [e.result.max_abs_err_floors for e in made_table(*entries).entries]
        assert errors == [1.75, 1.75, 1.25]


def test_a_hand_can_put_specs_into_one_block(text: str) -> None:
    """And order blocks as it likes: they are sorted when they are read."""
    names = "fwd_bf16_d128_causal fwd_bf16_d64_causal"
    both = text.replace("fwd_bf16_d128_causal", names).replace("  1.250", "  1.250 1.500")
    read = parse(both, PATH)
    assert [entry.spec.head_dim for entry in read.entries] == [64, 64, 128, 128]
    assert [entry.result.max_abs_err_floors for entry in read.entries] == [1.5, 1.5, 1.25, 1.25]


def test_lines_are_short() -> None:
    run = replace(
        made_run(), driver="580.95.05", clocks="SM 1980 MHz, memory 3201 MHz", power="x" * 50
    )
    text = dump(Table(gpu=H200).with_entry(made_entry(), run))
    assert max(map(len, text.splitlines())) <= COLUMNS
    assert parse(text, PATH).runs == (run,)


def test_runs_share_their_facts_and_stand_by_their_donors() -> None:
    made = [
        made_run(),
        made_run("estimated"),
        replace(made_run(), id="20260102T030406Z-estimated-nvidia_l4", donor="nvidia_l4"),
        replace(made_run(), id="20260102T030406Z-estimated"),
        replace(made_run(), id="20260103T030406Z-x", protocol=2),
    ]
    text = dump(Table(gpu=H200, runs=tuple(made), entries=bare(made_table()).entries))
    facts = 'source: "estimated", flashgen: "0.1.0", triton: "3.10", torch: "2.13.0", protocol:'
    assert text[text.index("runs:") : text.index("\n\n# A block")].splitlines() == [
        "runs:",
        f"- facts: {{{facts} 1}}",
        "  searched: 20260102T030405Z-a 20260102T030405Z 20260102T030406Z",
        "  from nvidia_l4: 20260102T030406Z",
        f"- facts: {{{facts} 2}}",
        "  searched: 20260103T030406Z-x",
    ]
    read = parse(text, PATH).runs
    assert set(read) == set(made)
    assert [run.date for run in read[-2:]] == ["2026-01-02T03:04:06Z", "2026-01-03T03:04:06Z"]


@pytest.mark.parametrize(
    "wrong", [{"id": "a"}, {"id": "2026-a"}, {"id": "20260102T030405Z"}, {"donor": "an L4"}]
)
def test_a_run_is_named_after_its_date(wrong: dict[str, str]) -> None:
    with pytest.raises(InvalidArgument, match="must be named after its date, like 2026"):
        replace(made_run(), **wrong)


def test_a_spec_of_two_head_dims_has_both() -> None:
    spec = replace(SPEC, head_dim=192, head_dim_v=128, mask="none")
    table = made_table(made_entry(spec, config=FA2))
    assert "- estimated: fwd_bf16_d192v128\n" in dump(table)
    assert parse(dump(table), PATH) == bare(table)


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
    assert [run.id for run in read.runs] == [named("a")]


class TestOfLastRun:
    EARLIER, LATER = "20260102T030405Z", "20260302T030405Z"

    def of(self, *names: str) -> list[str | None]:
        """The runs of the entries that are left, of a table with one entry of each."""
        entries = [
            made_entry(replace(SPEC, head_dim=16 * n, head_dim_v=16 * n), run=name)
            for n, name in enumerate(names, 1)
        ]
        last = made_table(*entries).of_last_run()
        return [entry.evidence.run for entry in last.everything]

    def test_it_is_the_latest_with_all_its_donors(self) -> None:
        old = f"{self.EARLIER}-measured"
        new = [f"{self.LATER}-measured", f"{self.LATER}-estimated-nvidia_l4"]
        assert self.of(old, *new) == new

    def test_its_shards_began_at_different_times_and_are_merged(self) -> None:
        old = [f"{self.EARLIER}-measured-1of2", f"{self.EARLIER}-measured"]
        new = ["20260301T030405Z-measured-1of2", f"{self.LATER}-measured-2of2-nvidia_l4"]
        assert self.of(*old, *new) == new

    def test_one_that_had_no_shards_is_by_itself(self) -> None:
        old = [f"{self.EARLIER}-measured-1of2", f"{self.EARLIER}-measured-2of2"]
        assert self.of(*old, f"{self.LATER}-measured") == [f"{self.LATER}-measured"]


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
        assert [run.id for run in after.runs] == [named("b" if replaced else "a")]

    def test_the_run_must_be_the_entrys(self) -> None:
        with pytest.raises(InvalidArgument, match="Z-b'"):
            made_table().with_entry(made_entry(), made_run("b"))


ROW, RUNS = "  1024:  ", "  searched: "


@pytest.mark.parametrize(
    ("old", "new", "at", "sentence"),
    [
        ("schema: 5", "schema: 6", "schema:", "schema 6 is newer than this flashgen.*update"),
        ("schema: 5", "schema: 4", "schema:", "schema 4 is not that of this flashgen.*tune again"),
        ("schema: 5", 'schema: "5"', "schema:", "schema must be a whole number"),
        ("sms: 132", "sms: 132, sms: 132", "gpu:", "'sms' is here twice; remove one"),
        (" sms: 132,", "", "gpu:", "'sms' is missing; add it"),
        ("sms: 132", "sm: 132", "gpu:", "unknown key 'sm'; remove it"),
        ("sms: 132", "sms: 13_2", "gpu:", "sms must be a whole number"),
        ("sms: 132", "sms: 1:32", "gpu:", "sms must be a whole number"),
        ("sms: 132", "sms: true", "gpu:", "sms must be a whole number"),
        ("sms: 132", "sms: -1", "gpu:", "sms must be a whole number"),
        ('"NVIDIA H200"', '"NVIDIA H100"', "gpu:", "table of another product, 'NVIDIA H100'"),
        ('triton: "3.10"', "triton: 3.10", "facts:", "one line; put it in double quotes"),
        ("protocol: 1", "protocol: [1]", "facts:", "got a list or a mapping"),
        ("protocol: 1", "protocol: 1, donor: x", "facts:", "unknown key 'donor'; remove it"),
        ("facts: {", "fact: {", "fact:", "the key 'facts' is missing; add it"),
        ("Z-b", "Z-a", RUNS, "run '20260102T030405Z-a' is here twice"),
        ("Z-b", "Z-b,", RUNS, "a run must be named after its date, like 20260102T030405Z-a"),
        ("Z-b", "Z-b 2026", RUNS, "a run must be named after its date"),
        ("searched: ", "from an L4: ", "from an L4: ", "donor must be the slug of a GPU"),
        ("812.3", ".nan", ROW, "us must be a number, like 12.5: got '.nan'"),
        ("812.3", "1e3", ROW, "us must be a number"),
        ("812.3", "0", ROW, r"median_us must be > 0 and < 1e\+15"),
        ("812.3", "-", ROW, "the time must be left out where source"),
        ("2.00", "0.00", ROW, r"speedup must be > 0 and < 1e\+15"),
        ("2.00", "fast", ROW, "x default must be a number"),
        ("1.250", "-", ROW, "floors must be a number"),
        ("1.250", "[1]", ROW, r"floors must be a number, like 12.5: got '\[1\]'"),
        ("- estimated", "- untimed", ROW, "the time must be left out where source"),
        ("- estimated", "- guessed", "- guessed", "a block must have one of measured, estimated"),
        (
            "- estimated: ",
            "- untimed: x\n  estimated: ",
            "- untimed",
            "a block must have one of me",
        ),
        (f"- estimated: {SPEC.name}\n", "-\n", ROW, "a block must have one of measured, .* exec"),
        (
            "- estimated",
            "- estimated: fwd_fp16_d64\n- estimated",
            "fp16_d64",
            "a block must have a row",
        ),
        ("_causal", "_causal triton 3.7", "- estimated", "a block `executed`, and no other, must"),
        ("812.3", "812.3 812.3", ROW, "got 4 numbers for 1 spec and buckets from 1024, 4096"),
        ("812.3", "812.3 812.3 1 1", ROW, "the floors of each spec: got 6 numbers for 1 spec"),
        ("812.3", "", ROW, "got 2 numbers for 1 spec"),
        (
            "_causal",
            "_causal fwd_fp16_d128",
            ROW,
            "got 3 numbers for 2 specs and buckets from 1024",
        ),
        ("812.3", "1 2 3 4 5 6 7", ROW, "got 9 numbers for 1 spec"),
        (f"{AHEAD.label} ", "[]  #", ROW, "a row must be printable text on one line"),
        ("br128_bc64", "br48_bc64", ROW, "br must be one of 16, 32, 64"),
        ("_s_ahead_", "_fastest_", ROW, "config must be a label like br128"),
        ("_tma_lpt", "_lpt", ROW, "config must be a label like br128"),
        ("  1024:  ", "  1025:  ", "  1025:", "one of 1, 1024, 4096, 16384 before it.* got '1025'"),
        (
            "  1024:  ",
            "  window sink 1024:  ",
            "sink 1024:",
            "its features, if any.* got 'window sink 1024'",
        ),
        ("  1024:  ", "  windows 1024:  ", "windows 1024:", "spec must be a name like .*_windows'"),
        (
            "  1024:  ",
            "  sink_window 1024:  ",
            "sink_window",
            "spec must be a name like .*_sink_window'",
        ),
        ("  16384: ", "  1024:  ", ROW, "the key '1024' is here twice; remove one"),
        ("_d128_", "_d132_", "- estim", "head_dim must be a multiple of 8"),
        ("_d128_", "_d0128_", "- estim", "spec must be written as its name fwd_bf16_d128_causal"),
        ("_causal", "_causal_pieces", "- estim", "spec must be a name like fwd_bf16_d128_causal"),
        ("_causal", "_causal x", "- estim", "spec must be a name like .* got 'x'"),
        ("entries:", "entries: {}\nrest:", "rest:", "unknown key 'rest'"),
        ("_w8_s3", "_w1_s3", ROW, "illegal config br128_bc64_w1.*need 768 registers"),
        ("runs:", "\truns:", "\truns", "this is not YAML"),
        ("  1024:  ", "  [1]: 2\n  1024:  ", "[1]: 2", "a key must be a word"),
        ("entries:", "--- 1\nentries:", "--- 1", "a file holds one document"),
        ("sms: 132", "sms: &a 132, x: *a", "*a", "an alias is refused"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(text, old, new, at, sentence) -> None:
    assert old in text
    place = text.index(old)
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
    """A spec may stand there twice, and a bucket of it may not."""
    again = text[text.index("- estimated") :]
    with pytest.raises(TableError, match=f"line {line_of(text, ROW)}; remove one of them"):
        parse(text + again, PATH)


def test_a_file_that_is_too_large_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "nvidia_h200.yaml"
    path.write_text(text + "#" * MOST_BYTES)
    with pytest.raises(TableError, match=r"nvidia_h200.yaml: files over 16 MB are refused"):
        load(path)
    with pytest.raises(TableError, match="files over 16 MB are refused"):
        load(Path("/dev/zero"), any_name=True)


@pytest.mark.parametrize("opening", ["[", "{a: ", "? "])
@pytest.mark.parametrize("times", [65, 100_000])
def test_a_text_that_is_nested_too_deep_is_refused(opening: str, times: int) -> None:
    with pytest.raises(TableError, match="line 1: this is nested over 64 deep"):
        parse(opening * times, PATH)


@pytest.mark.parametrize(
    "broken", ["", "# only a comment\n", "[]", "3", "a", "a: *b", "&a [*a]", "\x01"]
)
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
    first, second = map(bare, (made_table(), made_table(made_entry(bucket=BUCKETS[0]))))
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
        assert [file.name for file in path.parent.iterdir() if file.is_file()] == [path.name]

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
        assert [file.name for file in path.parent.iterdir() if file.is_file()] == [path.name]

    def test_a_killed_write_leaves_no_temporary_file(self, path, monkeypatch) -> None:
        def interrupt(_: int) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(os, "fsync", interrupt)
        with pytest.raises(KeyboardInterrupt):
            save(made_table(made_entry(bucket=BUCKETS[0])), path)
        assert [file.name for file in path.parent.iterdir() if file.is_file()] == [path.name]

    def test_a_folder_that_cannot_be_made_is_a_sentence(self, tmp_path: Path) -> None:
        (tmp_path / "configs").write_text("a file, where a folder should be")
        with pytest.raises(FlashgenError, match="cannot be written"):
            save(made_table(), tmp_path / "configs" / "nvidia_h200.yaml")


GOOD: dict[str, Any] = {
    "source": "measured",
    "median_us": 2.0,
    "speedup": 1.5,
    "max_abs_err_floors": 1.0,
}


class TestResult:
    def test_the_speedup_is_over_the_default(self) -> None:
        assert speedup(3.0, 2.0) == 1.5
        assert speedup(None, 2.0) is speedup(3.0, None) is None

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("median_us", None),
            ("median_us", float("nan")),
            ("speedup", -1.0),
            ("max_abs_err_floors", float("nan")),
            ("source", "untimed"),
        ],
    )
    def test_impossible_figures_are_refused(self, field: str, value: object) -> None:
        with pytest.raises(InvalidArgument):
            Result(**{**GOOD, field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("digest", "md5:ab"),
        ("default_us", -1.0),
        ("low_us", -1.0),
        ("sdpa_us", float("inf")),
        ("p_value", 0.0),
        ("p_value", 1.01),
        ("p_value", float("nan")),
        ("regret", -0.01),
        ("regret", float("inf")),
        ("runners_up", (made_entry().evidence.runners_up * 3)),
    ],
)
def test_impossible_evidence_is_refused(field: str, value: Any) -> None:
    with pytest.raises(InvalidArgument):
        EntryEvidence(**{field: value})


def test_a_decode_is_rated_by_what_it_reads() -> None:
    """64 sequences of 2048 keys, 8 heads of K and V of 128 elements each, in bfloat16."""
    decode = replace(SPEC, direction="decode", mask="none")
    entry = made_entry(decode, config=FA2, median_us=1000.0)
    assert entry.gbs == pytest.approx(64 * 2048 * 8 * 2 * 128 * 2 / 1000e-6 * 1e-9, rel=0.01)
    series = replace(entry, evidence=replace(entry.evidence, batches_us=(1.0,) * 4))
    assert entry.gbs is not None  # its time is that of 64 sequences; of 1, 4, 16 and 64 the mean
    assert series.gbs == pytest.approx(entry.gbs / 8, rel=0.01)
    assert made_entry(source="untimed").gbs is None
    (unknown,) = bare(made_table(entry)).entries
    assert unknown.problem == entry.problem  # the usual one, which may not be the one that ran
    assert unknown.gbs is None


def test_features_are_written_where_they_are_on() -> None:
    plain = made_table(made_entry())
    assert "dropout" not in dump(plain)
    spec = replace(SPEC, dropout=True, bias="additive")
    config = replace(AHEAD, schedule="fa2")
    text = dump(made_table(made_entry(spec, config=config)))
    assert "- estimated: fwd_bf16_d128_causal\n  bias_dropout 1024:" in text
    assert parse(text, PATH).entries[0].spec == spec


def test_pyyaml_without_libyaml_reads_the_same(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    table = parse(text, PATH)
    monkeypatch.setattr("flashgen.table.yaml._LOADER", yaml.SafeLoader)
    again = text.replace("\n", "\n\n", 1)  # another text: one that was read is not read again
    assert parse(again, PATH) == table
    with pytest.raises(TableError, match="line 1: this is nested over 64 deep"):
        parse("[" * 3000, PATH)


def test_a_row_has_what_its_entries_share_and_ratios_that_can_be_read() -> None:
    first, last = made_entry(bucket=BUCKETS[0]), made_entry(bucket=BUCKETS[1])
    last = replace(last, result=replace(last.result, max_abs_err_floors=2.5, speedup=0.001))
    found = parse(dump(made_table(first).of([first, last])), PATH).entries
    assert [each.result.max_abs_err_floors for each in found] == [1.25, 2.5]
    assert [each.result.speedup for each in found] == [2.0, 0.01]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [(f"{AHEAD.label} ", f"{AHEAD.label} 1.25 #", "got 1 numbers"), ("2.00", "2.0.0", "x default")],
)
def test_a_row_without_figures_or_with_half_a_figure(text: str, old: str, new: str, said: str) -> None:  # fmt: skip
    with pytest.raises(TableError, match=said):
        parse(text.replace(old, new, 1), PATH)
