"""table/emit.py: generated/ is a function of tables and templates, both ways."""

from __future__ import annotations

import ast
import itertools
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from flashgen import paths
from flashgen.errors import FlashgenError, GeneratedError
from flashgen.kernels.render import render
from flashgen.kernels.text import text_name
from flashgen.runtime.generated_tables import served_from
from flashgen.schedules.defaults import (
    DEFAULT_DIRECTIONS,
    default_config,
    default_configs,
    default_spec,
    featured_specs,
    specs_with_default,
)
from flashgen.schedules.legality import why_illegal
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.features import FEATURE_WORDS, masks_of
from flashgen.spec.gpu import TARGETS
from flashgen.spec.problem import BUCKETS
from flashgen.table import table_file
from flashgen.table.emit import (
    check,
    demand_agreement,
    is_stale,
    kernels_of,
    plan,
    tables_for,
    write,
)
from flashgen.table.table import Table
from flashgen.table.table_file import save
from flashgen.tune.options import TuneOptions
from flashgen.tune.tune import tune
from tests import programs
from tests.makers import make_spec
from tests.tables import AHEAD, FA2, SPEC, made_entry, made_table

D192 = AttentionSpec(dtype="float16", head_dim=192, head_dim_v=128, mask="none")
FRESH = render(D192, FA2).digest


@pytest.fixture(scope="module")
def tables() -> dict[str, Table]:
    h200 = made_table(
        made_entry(),
        made_entry(bucket=BUCKETS[3], config=FA2, source="measured", run="m"),
        made_entry(D192, BUCKETS[0], FA2, source="untimed", digest=FRESH),
    )
    empty = Table(gpu=TARGETS["nvidia_l4"])
    return {"nvidia_h200": h200, "nvidia_l4": empty}


@pytest.fixture(scope="module")
def written(tables: dict[str, Table], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of `tables`, which nobody changes."""
    folder = tmp_path_factory.mktemp("written") / "generated"
    write(tables, folder)
    return folder


@pytest.fixture
def out(written: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    shutil.copytree(written, tmp_path / "generated", copy_function=shutil.copyfile)
    return tmp_path / "generated"


def names(files: dict[Path, str]) -> set[str]:
    return {path.stem for path in files if path.parent == Path("kernels")} - {"__init__"}


def test_it_is_a_pure_function(tables: dict[str, Table]) -> None:
    assert plan(tables) == plan(dict(reversed(tables.items())))


def test_every_entry_has_its_kernel_and_pointer_twin(tables: dict[str, Table]) -> None:
    found = names(plan(tables))
    for entry in tables["nvidia_h200"].entries:
        assert text_name(entry.spec, entry.config) in found
        assert text_name(entry.spec, entry.config.pointer_twin(entry.spec)) in found
    assert text_name(SPEC, AHEAD.pointer_twin(SPEC)) in found - names(plan({}))


def test_a_pointer_config_is_its_own_twin() -> None:
    assert kernels_of(made_entry(config=FA2)) == (FA2,)
    assert kernels_of(made_entry(config=AHEAD)) == (AHEAD, AHEAD.pointer_twin(SPEC))


def all_specs() -> Iterator[AttentionSpec]:
    kinds = [("float16", "ieee"), ("bfloat16", "ieee"), ("float32", "ieee"), ("float32", "tf32")]
    dims = range(16, 257, 40), range(16, 257, 40)
    for (dtype, precision), mask, d, dv in itertools.product(kinds, ("none", "causal"), *dims):
        yield AttentionSpec(dtype=dtype, precision=precision, mask=mask, head_dim=d, head_dim_v=dv)


@pytest.mark.parametrize("word", ["varlen", "block-mask"])
def test_a_feature_has_defaults_of_the_masks_that_it_goes_with(word: str) -> None:
    specs = list(featured_specs((word,)))
    assert {spec.mask for spec in specs} == ({"none", "causal"} if word == "varlen" else {"none"})
    assert {spec.direction for spec in specs} == {"forward", "backward_dkv", "backward_dq"}
    assert all(spec.feature_words == (word,) for spec in specs)


@pytest.fixture(scope="module")
def with_defaults() -> set[str]:
    return names(plan({}, defaults=True))


def test_every_spec_without_features_has_listed_default_kernels(with_defaults: set[str]) -> None:
    for spec in all_specs():
        for direction in DEFAULT_DIRECTIONS:
            asked = spec.for_direction(direction)
            assert text_name(default_spec(asked), default_config(asked)) in with_defaults


def test_each_feature_alone_has_listed_default_kernels(with_defaults: set[str]) -> None:
    for spec in all_specs():
        for word in FEATURE_WORDS:
            if (word == "fp8" and spec.dtype == "float32") or (spec.mask not in masks_of([word])):
                continue
            asked = spec.with_features([word])
            more = ("backward_dbias",) if word == "bias" else ()
            for direction in ("forward",) if word == "fp8" else (*DEFAULT_DIRECTIONS, *more):
                of_direction = asked.for_direction(direction)
                config = default_config(of_direction)
                assert text_name(default_spec(of_direction), config) in with_defaults


def test_a_cache_has_listed_default_kernels(with_defaults: set[str]) -> None:
    for spec, paged in itertools.product(all_specs(), (False, True)):
        decode = replace(spec, direction="decode", paged=paged)
        append = decode.for_direction("append")
        rotary = (replace(append, rotary=rotary) for rotary in ("none", "halves", "interleaved"))
        for asked in (decode, decode.for_direction("combine"), *rotary):
            assert text_name(default_spec(asked), default_config(asked)) in with_defaults


def test_without_tables_and_defaults_there_are_no_kernels(tables: dict[str, Table]) -> None:
    assert names(plan({})) == set()
    assert not any("_any_dim" in name for name in names(plan(tables)))


def test_combinations_are_not_listed() -> None:
    listed = set(specs_with_default())
    assert make_spec().with_features(["window", "sink"]) not in listed
    assert make_spec(direction="backward_fused") not in listed
    assert make_spec(head_dim=96) not in listed  # that of 128 serves it


def test_the_defaults_are_legal_on_every_known_target() -> None:
    # Of an invariant spec one default is: tests/cpu/schedules/test_numeric_class.py.
    specs = (spec for spec in specs_with_default() if not spec.invariant)
    refused = []
    for spec in specs:
        configs = [c for c in default_configs(spec) if c.widening == "bits" and not c.whole_rows]
        refused += [
            (spec, gpu)
            for gpu in TARGETS.values()
            if any(why_illegal(spec, config, gpu) for config in configs)
        ]
    # Of AMD's, gfx942 alone has tf32 instructions; of fp8 some architectures have none, or others.
    assert {(spec.precision, gpu.arch) for spec, gpu in refused if not spec.fp8} == {
        ("tf32", "gfx90a"),
        ("tf32", "gfx950"),
        ("tf32", "gfx1100"),
        ("tf32", "gfx1201"),
    }
    served = {gpu.arch for gpu in TARGETS.values()} - {g.arch for spec, g in refused if spec.fp8}
    assert served == {"sm_89", "sm_90", "sm_100", "sm_103", "sm_120", "sm_121"}


class TestTheEmittedTables:
    def test_they_say_what_the_tables_say(self, tables: dict[str, Table], out: Path) -> None:
        served = served_from(out)
        assert dict(served.archs) == {"nvidia_h200": "sm_90", "nvidia_l4": "sm_89"}
        assert dict(served.choices["nvidia_l4"]) == {}
        entries = tables["nvidia_h200"].entries
        assert list(served.choices["nvidia_h200"]) == [SPEC, D192]
        choices = [each for held in served.choices["nvidia_h200"].values() for each in held]
        for entry, choice in zip(entries, choices, strict=True):
            assert (choice.spec, choice.bucket, choice.config) == (*entry.key, entry.config)
            assert choice.source == entry.result.source
            assert choice.median_us == entry.result.median_us

    def test_a_stale_entry_is_served(self, tables: dict[str, Table], out: Path) -> None:
        assert [is_stale(entry) for entry in tables["nvidia_h200"].entries] == [True, True, False]
        assert len(served_from(out).choices["nvidia_h200"][SPEC]) == 2

    def test_neighbours_with_one_config_are_one_line(self, tmp_path: Path) -> None:
        entries = [
            made_entry(bucket=b, median_us=us) for b, us in zip(BUCKETS, (1, 2), strict=False)
        ]
        last = made_entry(bucket=BUCKETS[3], source="measured")
        write({"nvidia_h200": made_table(*entries, last)}, tmp_path)
        text = (tmp_path / "tables" / "nvidia_h200.py").read_text()
        assert f'"measured": """\n{SPEC.name} 16384 {AHEAD.label} 812.3\n"""' in text
        assert f'"estimated": """\n{SPEC.name} 1 {AHEAD.label} 1.0 2.0\n"""' in text
        choices = served_from(tmp_path).choices["nvidia_h200"][SPEC]
        assert {choice.bucket: choice.median_us for choice in choices} == {
            BUCKETS[0]: 1.0, BUCKETS[1]: 2.0, BUCKETS[3]: 812.3,
        }  # fmt: skip

    def test_a_gpu_is_read_when_it_is_looked_up(self, out: Path) -> None:
        (out / "tables" / "nvidia_l4.py").write_text('ARCH = "sm_89"\nassert False\n')
        served = served_from(out)
        assert SPEC in served.choices["nvidia_h200"]
        assert served.archs["nvidia_l4"] == "sm_89"
        with pytest.raises(GeneratedError, match=r"nvidia_l4.py cannot be loaded \(AssertionError"):
            served.choices["nvidia_l4"]

    def test_another_gpu_changes_no_other_file(self, tables: dict[str, Table], out: Path) -> None:
        other = replace(made_table(made_entry(config=FA2)), gpu=TARGETS["nvidia_geforce_rtx_4090"])
        changed = write(tables | {other.gpu.slug: other}, out)
        assert changed == [Path("tables", "nvidia_geforce_rtx_4090.py")]
        assert write(tables, out) == changed

    def test_a_gpu_that_is_added_is_a_small_change(self) -> None:
        """A shipped one, taken away and added again: new files alone, its YAML counted."""
        shipped, slug = table_file.load_folders(paths.shipped_configs_dir()), "nvidia_l4"
        files = plan(shipped)
        before = plan({name: each for name, each in shipped.items() if name != slug})
        assert {path: files.get(path) for path in before} == before
        new = [text for path, text in files.items() if path not in before]
        new.append(paths.shipped_table(slug).read_text())
        assert len(new) < 12
        assert sum(text.count("\n") for text in new) < 600

    @pytest.mark.parametrize("name", ["7 7 raw", "class", "specs", "estimated", "None", "tables"])
    def test_a_gpu_may_have_any_name(self, name: str, tmp_path: Path) -> None:
        table = made_table()
        table = replace(table, gpu=replace(table.gpu, name=name))
        write({table.gpu.slug: table}, tmp_path)
        code = (
            "import sys; from pathlib import Path; import flashgen.runtime.dispatcher;"
            "from flashgen.runtime.generated_tables import served_from;"
            f"print(len(served_from(Path({str(tmp_path)!r})).choices[{table.gpu.slug!r}]))"
        )
        done = programs.run(["-c", code], cwd=tmp_path)
        assert done.stdout == "1\n", done.stderr

    def test_it_imports_nothing_of_the_tool(self, out: Path) -> None:
        modules = set()
        files = ("tables/nvidia_h200.py", "dispatcher.py", "kernels/__init__.py")
        for path in (out / file for file in files):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ImportFrom):
                    modules.add("." * node.level + (node.module or ""))
        assert modules == {"pathlib", "flashgen.runtime.folders"}


def test_the_figures_are_those_of_the_file(tmp_path: Path) -> None:
    """An entry straight from a search and the same one read back emit one text."""
    fresh = made_table(made_entry(median_us=123.456789))
    save(fresh, tmp_path / "nvidia_h200.yaml")
    read = table_file.load(tmp_path / "nvidia_h200.yaml")
    assert plan({"nvidia_h200": fresh}) == plan({"nvidia_h200": read})


def test_ruff_has_nothing_to_change(out: Path) -> None:
    rules = ["--config", str(paths.ROOT / "pyproject.toml"), "--no-cache"]
    command = [sys.executable, "-m", "ruff"]
    done = subprocess.run(
        [*command, "format", "--diff", *rules, out], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout
    # pyproject's exceptions for generated/kernels go by the path from its own folder.
    exceptions = ["--ignore", "B007,D100,D103"]
    done = subprocess.run(
        [*command, "check", *rules, *exceptions, out], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.slow("a program that imports torch; test_wheel has one")
def test_the_package_can_be_imported_and_called(out: Path) -> None:
    code = (
        "import torch; from generated.dispatcher import attention, digest, explain;"
        "q = torch.randn(1, 2, 5, 64); o, lse = attention(q, q, q, causal=True, return_lse=True);"
        "print(o.shape == q.shape, lse.shape == (1, 2, 5), digest()[:7], 'torch' in str(explain(q, q, q)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=out.parent,
        env={"PYTHONPATH": f"{out.parent}:{paths.ROOT}", "PATH": ""},
    )
    assert done.stdout.split() == ["True", "True", "sha256:", "True"], done.stderr


class TestCheckAndWrite:
    def test_what_was_written_is_clean(self, tables: dict[str, Table], out: Path) -> None:
        (out / "__pycache__").mkdir()
        (out / "__pycache__" / "dispatcher.cpython-311.pyc").write_bytes(b"")
        (out / "kernels" / "__pycache__").mkdir()
        (out / "kernels" / "__pycache__" / "x.pyc").write_bytes(b"")
        assert check(tables, out) == []
        demand_agreement(tables, out)

    def test_nothing_is_written_twice(self, tables: dict[str, Table], out: Path) -> None:
        before = {path: path.stat().st_mtime_ns for path in out.rglob("*.py")}
        assert write(tables, out) == []
        assert {path: path.stat().st_mtime_ns for path in out.rglob("*.py")} == before

    def test_a_changed_file_is_named_with_its_line_and_mended(self, tables, out: Path) -> None:
        path = out / "dispatcher.py"
        path.write_text(path.read_text().replace("attention = _dis", "attention = _Dis"))
        line = path.read_text().split("attention = _Dis")[0].count("\n") + 1
        (problem,) = check(tables, out)
        assert re.search(
            rf"dispatcher\.py is not what flashgen emits, from line {line} on", problem
        )
        assert write(tables, out) == [Path("dispatcher.py")]
        assert check(tables, out) == []

    @pytest.mark.parametrize("name", ["tables/nvidia_h200.py", "kernels/__init__.py"])
    def test_a_longer_a_shorter_and_a_binary_file_are_changed(self, tables, out, name) -> None:
        path, text = out / name, (out / name).read_text()
        for broken in (text + "\n", text[:-1], text.replace("\n", "\r\n"), "\xff"):
            path.write_bytes(broken.encode("latin-1"))
            assert len(check(tables, out)) == 1
            write(tables, out)
            assert path.read_bytes().decode() == text

    def test_a_missing_file_is_named_and_mended(self, tables, out: Path) -> None:
        gone = next(path for path in (out / "kernels").glob("fwd_*.py"))
        gone.unlink()
        (problem,) = check(tables, out)
        assert f"{gone} is missing: run flashgen generate" in problem
        assert write(tables, out) == [gone.relative_to(out)]
        assert check(tables, out) == []

    def test_an_orphan_of_ours_is_named_and_deleted(self, tables, out: Path) -> None:
        fewer = {"nvidia_h200": Table(gpu=tables["nvidia_h200"].gpu)}
        problems = check(fewer, out)
        orphan = out / "kernels" / f"{text_name(SPEC, AHEAD)}.py"
        assert any(f"{orphan} is orphaned" in p and "run flashgen generate" in p for p in problems)
        write(fewer, out)
        assert not orphan.exists()
        assert check(fewer, out) == []

    def test_a_file_of_another_hand_is_named_and_left(self, tables, out: Path) -> None:
        own = out / "kernels" / "mine.py"
        own.write_text("# flashgen had no part in this\n")
        (problem,) = check(tables, out)
        assert f"{own} is orphaned" in problem
        assert "move it elsewhere" in problem
        assert write(tables, out) == []
        assert own.exists()

    def test_a_folder_that_is_not_there_is_one_sentence(self, tables, tmp_path: Path) -> None:
        (problem,) = check(tables, tmp_path / "no")
        assert problem.startswith(f"{tmp_path / 'no'} is missing: ")
        with pytest.raises(GeneratedError, match="is missing"):
            demand_agreement(tables, tmp_path / "no")

    def test_a_full_disk_is_a_sentence_and_leaves_whole_files(
        self, tables, tmp_path, monkeypatch
    ) -> None:
        import errno

        left, replaced = iter([None] * 3), Path.replace

        def replace(self: Path, target: Path) -> Path:
            if next(left, 1) is not None:
                raise OSError(errno.ENOSPC, "No space left on device")
            return replaced(self, target)

        monkeypatch.setattr(Path, "replace", replace)
        with pytest.raises(FlashgenError, match="No space left on device"):
            write(tables, tmp_path)
        written = [path for path in tmp_path.rglob("*") if path.is_file()]
        files = plan(tables)
        assert len(written) == 3
        assert all(path.read_text() == files[path.relative_to(tmp_path)] for path in written)
        # The table, which names kernels, is not there before they are.
        assert not (tmp_path / "table.py").exists()


def test_the_tables_of_out_win_over_the_shipped(tmp_path: Path, monkeypatch) -> None:
    shipped = made_table()
    save(shipped, tmp_path / "shipped" / "nvidia_h200.yaml")
    save(Table(gpu=TARGETS["nvidia_l4"]), tmp_path / "shipped" / "nvidia_l4.yaml")
    own = replace(shipped, entries=(), runs=())
    save(own, tmp_path / "out" / "configs" / "nvidia_h200.yaml")
    monkeypatch.setattr(paths, "shipped_configs_dir", lambda: tmp_path / "shipped")
    tables = tables_for(tmp_path / "out")
    assert tables == {"nvidia_h200": own, "nvidia_l4": Table(gpu=TARGETS["nvidia_l4"])}


def test_a_package_of_another_project_is_left_alone(tmp_path: Path) -> None:
    """generate and tune refuse before they write or search anything."""
    foreign = tmp_path / "generated" / "__init__.py"
    foreign.parent.mkdir()
    foreign.write_text("VERSION = 3\n")
    with pytest.raises(GeneratedError, match="must not be a package of another project"):
        write({}, foreign.parent)
    with pytest.raises(GeneratedError, match="give another --out"):
        tune(TuneOptions(specs=(SPEC,), out=tmp_path), Console())
    assert sorted(tmp_path.rglob("*")) == [foreign.parent, foreign]
    assert foreign.read_text() == "VERSION = 3\n"
