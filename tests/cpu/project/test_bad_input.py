"""What the fuzzer and an attack found, by name: each was an exception, a crash or worse."""

from __future__ import annotations

import errno
import json
import operator
import os
import pickle
import stat
import subprocess
import sys
import tempfile
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import triton
from triton import knobs

import flashgen
from flashgen import cli
from flashgen.compile.compiler import FACTS, cache_file, recall
from flashgen.errors import (
    FlashgenError,
    GeneratedError,
    InvalidArgument,
    TableError,
    ToolchainError,
    printable,
)
from flashgen.estimate import jit
from flashgen.evaluate.offline import OfflineEvaluator
from flashgen.evaluate.quarantine import Quarantine
from flashgen.files import disk_errors, temporary_folder, write_whole
from flashgen.inputs.features import check_softcap
from flashgen.kernels.loader import load_kernel, toolchain_error
from flashgen.schedules.config import config_of
from flashgen.schedules.outcome import Timing
from flashgen.search.journal import opened
from flashgen.search.log import Log, outcomes_of
from flashgen.spec.problem import problem_of
from flashgen.table.evidence import evidence_text, with_lines
from flashgen.table.show import console, wrapped
from flashgen.table.table_file import dump, parse
from flashgen.tune import hf_config, workloads
from flashgen.tune.alone import alone_in
from tests import fuzz
from tests.compiled import made_compiled
from tests.makers import make_config
from tests.tables import H200, made_table

HUGE = "9" * 5000
PATH = Path("nvidia_h200.yaml")
TEXT = dump(made_table())


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (" 812.3 ", f" {'9' * 400} "),
        (" 2.00 ", f" {'9' * 400} "),
        ("1024:", f"{HUGE}:"),
        ("sms: 132", f"sms: {HUGE}"),
        ("sms: 132", "sms: \u0661\u0663\u0662"),
        ("warp_size: 32", "warp_size: 0"),
        ("bandwidth_gbs: 4800.0", "bandwidth_gbs: 0.0"),
        ("br128_", f"br{HUGE}_"),
    ],
)
def test_numbers_of_a_table(old: str, new: str) -> None:
    assert old in TEXT
    with pytest.raises(TableError, match=r"nvidia_h200.yaml, line \d+: "):
        parse(TEXT.replace(old, new, 1), PATH)


def test_a_time_beyond_what_tables_read_is_refused_where_it_is_made() -> None:
    """Else a table is written that cannot be read."""
    for us in (0.0, -1.0, float("nan"), float("inf"), 1e300):
        with pytest.raises(InvalidArgument, match="median_us must be > 0 and <"):
            Timing(median_us=us, low_us=1.0, high_us=2.0)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"low_us": 406.15', f'"low_us": 1{"0" * 400}'),
        ('"registers": 174', f'"registers": {HUGE}'),
        ('"60/98"', f'"{HUGE}/98"'),
        ('"60/98"', '"\u0661/98"'),
        ('"b8_', f'"b{HUGE}_'),
    ],
)
def test_numbers_of_evidence(old: str, new: str) -> None:
    table = made_table()
    text = evidence_text(table.entries)
    assert old in text
    with pytest.raises(TableError, match=r"nvidia_h200\.yaml, line 1: "):
        with_lines(table, text.replace(old, new, 1), PATH)


@pytest.mark.parametrize("do", [config_of, problem_of])
@pytest.mark.parametrize("label", [f"br{HUGE}_bc64_w8_s2_fa2_ptr", f"b{HUGE}_h1_s1"])
def test_numbers_of_labels(do: Any, label: str) -> None:
    with pytest.raises(InvalidArgument):
        do(label)


@pytest.mark.parametrize("length", ["9" * 400, "\u0661"])
def test_numbers_of_a_workload(length: str) -> None:
    text = (
        f"name: x\nspecs:\n- {{dtype: bfloat16, head_dim: 64, mask: none, seqs: {{{length}: 1}}}}\n"
    )
    with pytest.raises(InvalidArgument, match="line 3: a length of seqs must be a whole number"):
        workloads.parse(text, Path("w.yaml"))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"num_hidden_layers": 10**400}, "must be a whole number from 1 to 10000"),
        ({"max_position_embeddings": 2**31}, "must be a whole number from 1"),
        ({"image_size": [10**400, 1], "patch_size": 16}, "one or two whole numbers"),
    ],
)
def test_numbers_of_a_model(tmp_path: Path, change: dict[str, Any], sentence: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps({"num_attention_heads": 8, "head_dim": 64} | change).replace('"H"', HUGE)
    )
    with pytest.raises(InvalidArgument, match=sentence):
        hf_config.from_hf_config(path)


@pytest.mark.parametrize(
    "change",
    [
        {"architectures": 5},
        {
            "time_step_limit": [0.0, float("inf")]
        },  # json.dumps writes Infinity, as some models have it
    ],
)
def test_types_of_a_model_that_do_not_matter(tmp_path: Path, change: dict[str, Any]) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"num_attention_heads": 8, "head_dim": 64} | change))
    assert hf_config.from_hf_config(path).pieces


def test_a_model_that_is_nested_without_end(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"a":' + "[" * 100_000)
    with pytest.raises(InvalidArgument, match="nested over 64 deep"):
        hf_config.from_hf_config(tmp_path)


@pytest.mark.parametrize("folder", ["a\0b", "a" * 5000])
def test_a_folder_that_cannot_be_one(folder: str) -> None:
    with pytest.raises(GeneratedError, match="must be a folder that flashgen generated"):
        flashgen.use(folder)


def test_a_cap_beyond_all_floats() -> None:
    with pytest.raises(InvalidArgument, match="softcap must be finite"):
        check_softcap(10**400)


class TestCommandLine:
    def leave(self, *words: str) -> int:
        with pytest.raises(SystemExit) as ended:
            cli.main(list(words))
        return int(ended.value.code or 0)  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        "slug", ["x" * 5000, "../configs/nvidia_h200", "/dev/zero", "a\x1b[2J"]
    )
    def test_a_slug_that_is_none(self, slug: str, capsys: Any, tmp_path: Path) -> None:
        assert self.leave("show", slug, "--out", str(tmp_path)) == 2
        said = capsys.readouterr().err
        assert said.startswith("flashgen: there is no table ")
        assert "\x1b" not in said

    def test_an_unknown_feature_of_tune(self, capsys: Any) -> None:
        assert self.leave("tune", "--target", "nvidia_h200", "--feature", "é") == 2
        assert "--feature must be one of" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("error", "said"),
        [
            (
                OSError(errno.ENOSPC, "No space left on device"),
                "cannot be used (No space left on device): free some space, or name another place",
            ),
            (
                OSError(errno.EACCES, "Permission denied", "/x\x1b"),
                r"/x\x1b cannot be used (Permission denied): name another place",
            ),
            (BrokenPipeError(), ""),
        ],
    )
    def test_output_that_cannot_be_written(
        self, error: Any, said: str, capsys: Any, monkeypatch: Any
    ) -> None:
        def fail(*_: object) -> None:
            raise error

        monkeypatch.setattr("flashgen.table.show.targets_grid", fail)
        monkeypatch.setattr(cli, "_discard_output", lambda: None)
        assert self.leave("targets") == 1
        assert (said in capsys.readouterr().err) if said else (capsys.readouterr().err == "")

    @pytest.mark.parametrize(
        ("redirected", "said", "code"),
        [
            (">&-", "flashgen: standard output is closed", 1),
            (">/dev/full", "flashgen: standard output cannot be used (No space left on device)", 1),
            ("2>&- <&-", "", 0),
        ],
    )
    def test_streams(self, redirected: str, said: str, code: int) -> None:
        done = subprocess.run(
            f"{sys.executable} -m flashgen table --help {redirected}",
            shell=True, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert (done.returncode, "a bug" in done.stderr) == (code, False)
        assert done.stderr.startswith(said)
        assert done.stderr.count("\n") <= 1


def test_a_log_of_a_newer_version_says_so(tmp_path: Path) -> None:
    """In a record, and in a record within it: nothing is to be deleted."""
    path = tmp_path / "nvidia_h200.jsonl"
    record = fuzz.OUTCOME.to_json()
    for newer in (record | {"energy": 1.5}, record | {"config": record["config"] | {"stages": 2}}):
        path.write_text(json.dumps(newer) + "\n")
        for read in (
            lambda: Log(path, gpu=H200.slug, triton="3"),
            lambda: outcomes_of(path, pytest.fail),
        ):
            with pytest.raises(
                FlashgenError,
                match=r"line 1: .* the unknown key '(energy|stages)': a newer version",
            ) as caught:
                read()
            assert "update flashgen" in str(caught.value)
            assert "delete" not in str(caught.value)


@pytest.mark.parametrize("spec", ["{[a]: 1}", "{{a: 1}: 1}", "[a]", "{? [a] : 1}"])
def test_a_collection_in_place_of_a_spec(spec: str) -> None:
    text = TEXT.replace("estimated: fwd_bf16_d128_causal", f"estimated: {spec}")
    assert text != TEXT
    with pytest.raises(
        TableError, match=r"line \d+: the specs must be printable text .* got a list or"
    ):
        parse(text, PATH)
    with pytest.raises(InvalidArgument, match=r"line 3: a (key must be a word|mapping must stand)"):
        workloads.parse(f"name: x\nspecs:\n- {spec}\n", Path("w.yaml"))


def test_no_folder_for_temporary_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/nonexistent/folder")
    with pytest.raises(ToolchainError, match="set TMPDIR"), temporary_folder("test"):
        pass


@pytest.mark.parametrize(("number", "said"), [(errno.ENOSPC, True), (errno.EROFS, False)])
def test_free_space_is_for_a_full_disk_alone(
    number: int, said: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(ToolchainError, match="name another folder with --out") as caught:
        write_whole(tmp_path / "a", "text")
    assert ("free some space" in str(caught.value)) is said
    with pytest.raises(FlashgenError, match="name another folder") as other, disk_errors(tmp_path):
        fail()
    assert ("free some space" in str(other.value)) is said


class TestTerminal:
    def test_of_a_value_at_most_200_characters_are_shown(self) -> None:
        assert len(str(InvalidArgument(f"x must be short: got {'a' * 5000!r}, or less"))) < 260
        path = "/".join(["folder"] * 100)
        assert path in str(InvalidArgument(f"{path} must be a file"))

    def test_errors_are_printable(self) -> None:
        error = InvalidArgument("a\x1b[2J\u202e\udcff\x9b b\nc")
        assert str(error) == "a\\x1b[2J\\u202e\\udcff\\x9b b\nc"
        assert printable("plain é") == "plain é"

    def test_what_is_printed_is_printable(self, capsys: pytest.CaptureFixture[str]) -> None:
        console().print("a\x1b[2Jb\x9bc")
        assert capsys.readouterr().out == "a\\x1b[2Jb\\x9bc\n"
        assert wrapped("a\x1bb") == "a\\x1bb"


class Executing:
    """An object that computes when it is read."""

    def __reduce__(self) -> tuple[object, ...]:
        return operator.truediv, (1, 0)


class TestPlantedFiles:
    @pytest.mark.parametrize("name", ["lock", "nvidia_h200.jsonl"])
    def test_a_log_follows_no_link(self, tmp_path: Path, name: str) -> None:
        victim = tmp_path / "victim"
        victim.write_text("precious")
        (tmp_path / "s").mkdir()
        (tmp_path / "s" / name).symlink_to(victim)
        with pytest.raises(FlashgenError, match="cannot be written"), alone_in(tmp_path / "s"):
            Log(tmp_path / "s" / "nvidia_h200.jsonl", gpu=H200.slug, triton="3")
        assert victim.read_text() == "precious"

    def test_a_temporary_file_follows_no_link_and_a_link_in_the_place_is_replaced(
        self, tmp_path: Path
    ) -> None:
        victim, table = tmp_path / "victim", tmp_path / "t.yaml"
        victim.write_text("precious")
        writer = f"{os.getpid()}-{threading.get_native_id()}"
        (tmp_path / f".t.yaml.{writer}.tmp").symlink_to(victim)
        table.symlink_to(victim)
        write_whole(table, "new")
        assert victim.read_text() == "precious"
        assert (table.read_text(), table.is_symlink()) == ("new", False)

    def test_a_journal_follows_no_link(self, tmp_path: Path) -> None:
        victim = tmp_path / "victim"
        victim.write_text("precious")
        (tmp_path / "j").symlink_to(victim)
        journal = opened(tmp_path / "j", print, resumed=True)
        with pytest.raises(FlashgenError, match="cannot be written"), journal:
            pass
        assert victim.read_text() == "precious"

    def test_a_cached_result_is_read_through_a_link_as_data(self, tmp_path: Path) -> None:
        """It is no result, so it counts for none."""
        victim = tmp_path / "victim"
        victim.write_text("import os")
        config = make_config(64, 64)
        evaluator = OfflineEvaluator(H200, tmp_path, 1)
        try:
            file = evaluator._check_file(config, "sha256:" + "0" * 64)
            file.parent.mkdir(parents=True)
            file.symlink_to(victim)
            assert evaluator._recall(config, "sha256:" + "0" * 64) is None
        finally:
            evaluator.close()
        assert victim.read_text() == "import os"

    def test_what_ray_sends_is_pickle_which_is_why_its_nodes_are_trusted(self) -> None:
        page = (Path(__file__).parents[3] / "SECURITY.md").read_text()
        assert "execute\n  code in the driver" in page
        with pytest.raises(ZeroDivisionError):
            pickle.loads(pickle.dumps(Executing()))

    def test_a_quarantine_follows_no_link(self, tmp_path: Path) -> None:
        victim = tmp_path / "victim"
        victim.write_text("torn")
        (tmp_path / "q").symlink_to(victim)
        with pytest.raises(FlashgenError, match="cannot be written"):
            Quarantine(tmp_path / "q", triton="3")
        assert victim.read_text() == "torn"

    def test_compiled_python_beside_a_kernel_is_not_run(self, tmp_path: Path) -> None:
        """A .pyc with the time and size of its .py is what Python itself would run."""
        path = tmp_path / "k.py"
        path.write_text("k = 6 * 6\n")
        import importlib.util
        import py_compile

        cached = Path(importlib.util.cache_from_source(str(path)))
        py_compile.compile(str(path), cfile=str(cached))
        found = path.stat()
        path.write_text("k = 7 * 7\n")
        os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))
        assert load_kernel(path, "k") == 49


class TestCaches:
    @pytest.mark.parametrize(
        "contradiction", [{"num_warps": 0}, {"registers": -1}, {"spilling": ((9, 2),)}]
    )
    def test_compiled_figures_that_contradict_each_other_are_made_again(
        self, tmp_path: Path, contradiction: dict[str, Any]
    ) -> None:
        for fields, there in (({}, True), (contradiction, False)):
            kept = made_compiled(**fields)
            named = kept.digest, kept.arch, kept.triton, tmp_path
            facts = {"facts": FACTS} | kept.to_json()
            write_whole(cache_file(*named, "json"), json.dumps(facts))
            write_whole(cache_file(*named, "cubin"), b"ELF")
            assert (recall(*named) is not None) is there

    def test_a_replay_of_no_phase_is_none(self) -> None:
        with pytest.raises(InvalidArgument, match="as many figures as blocks, phases and loops"):
            replace(fuzz.REPLAY, phases=()).must_agree()

    def test_a_loop_may_be_in_two_phases_of_a_replay(self) -> None:
        """As of a persistent kernel of Triton 3.6, one of whose consumers has a loop less."""
        replace(fuzz.REPLAY, phases=((0, 1), (0, 2))).must_agree()
        with pytest.raises(InvalidArgument, match="as many figures as blocks, phases and loops"):
            replace(fuzz.REPLAY, phases=((0, 1), (0, 1))).must_agree()

    @pytest.mark.parametrize(
        ("mode", "private"), [(0o700, True), (0o755, True), (0o770, False), (0o777, False)]
    )
    def test_a_folder_that_others_write_is_not_private(
        self, tmp_path: Path, mode: int, private: bool
    ) -> None:
        (tmp_path / "c").mkdir()
        (tmp_path / "c").chmod(mode)
        assert jit._is_private(tmp_path / "c") is private

    def test_nor_is_that_of_somebody_else_or_a_relative_one(
        self, tmp_path: Path, monkeypatch: Any
    ) -> None:
        assert not jit._is_private(Path("cache"))
        assert not jit._is_private(tmp_path / "missing")
        monkeypatch.setattr(os, "getuid", lambda: tmp_path.stat().st_uid + 1)
        assert not jit._is_private(tmp_path)

    def test_machine_code_comes_from_a_private_folder_alone(
        self, tmp_path: Path, monkeypatch: Any
    ) -> None:
        numba = pytest.importorskip("numba")
        for mode, private in ((0o700, True), (0o777, False)):
            folder = tmp_path / oct(mode)
            monkeypatch.setattr(numba.config, "CACHE_DIR", str(folder))
            numba.njit(cache=True)(one)  # makes the folder
            for path in folder.iterdir():
                path.chmod(mode)
            cached = jit.jit(one).stats.cache_path
            assert (cached is not None) is private
            assert not private or stat.S_IMODE(Path(cached).stat().st_mode) == 0o700

    def test_a_cache_of_triton_that_cannot_be_written(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with knobs.cache.scope():
            knobs.cache.dir = str(tmp_path / "file" / "cache")
            with pytest.raises(OSError) as caught:  # noqa: PT011 - its class says it
                triton.runtime.cache.get_cache_manager("ab")
        assert "set TRITON_CACHE_DIR" in str(toolchain_error(caught.value))
        assert toolchain_error(OSError("of something else")) is None


def one() -> int:
    return 1
