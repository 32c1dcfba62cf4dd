"""The command line: each command, what it prints, its exit code; and one sentence for bad input."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

import flashgen
from flashgen import __main__, cli, paths
from flashgen.cli import prove
from flashgen.cli import tune as tuning
from flashgen.cli.options import table_of
from flashgen.errors import FlashgenError
from flashgen.evaluate.build import kept
from flashgen.kernels.loader import load_kernel
from flashgen.kernels.render import render
from flashgen.report.kernel_limits import Anatomy
from flashgen.runtime.selection import tune_command
from flashgen.schedules.config import kernel_name
from flashgen.schedules.outcome import CheckResult, Outcome, Status
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.gpu import TARGETS
from flashgen.spec.problem import BUCKETS
from flashgen.table import emit as generating
from flashgen.table.table import Table
from flashgen.table.table_file import load, load_with_evidence, save
from flashgen.tune import invariance, precompile, workloads
from flashgen.tune import verify as verifying
from flashgen.tune.options import TuneOptions
from flashgen.tune.places import TargetOptions
from flashgen.tune.progress import explain_options
from tests import programs
from tests.makers import make_config, make_spec
from tests.tables import AHEAD, FA2, H200, SPEC, made_entry, made_table

ROOT = Path(__file__).resolve().parents[3]
FRESH = made_entry(bucket=BUCKETS[3], config=FA2, digest=render(SPEC, FA2).digest)

TABLE = made_table(made_entry(source="measured"), FRESH)
MIXED = made_table(
    made_entry(),
    made_entry(make_spec("float16", 64, softcap=True), config=FA2),
    made_entry(make_spec("bfloat16", 128, direction="decode"), config=make_config(16, 64)),
)
"""A table of three kinds of spec."""


def test_a_path_is_no_slug(tmp_path: Path) -> None:
    save(TABLE, paths.table_file(tmp_path, H200.slug))
    assert table_of(H200.slug, tmp_path) is not None
    assert table_of(f"../configs/{H200.slug}", tmp_path) is None


@pytest.fixture(autouse=True)
def _shipped_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "shipped_configs_dir", lambda: tmp_path / "shipped")
    monkeypatch.delenv("FLASHGEN_GPU", raising=False)
    monkeypatch.delenv("FLASHGEN_CONFIGS", raising=False)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The generated/ of `out`, which nobody changes."""
    folder = tmp_path_factory.mktemp("written") / "generated"
    generating.write({"nvidia_h200": TABLE}, folder)
    return folder


@pytest.fixture
def tables_alone(tmp_path: Path) -> Path:
    """A folder with one table, of a stale entry and a fresh one."""
    save(TABLE, tmp_path / "out" / "configs" / "nvidia_h200.yaml")
    return tmp_path / "out"


@pytest.fixture
def out(tables_alone: Path, written: Path) -> Path:
    """The same with its generated/."""
    shutil.copytree(written, tables_alone / "generated", copy_function=shutil.copyfile)
    return tables_alone


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]):
    """Run one command line: (exit code, standard output, standard error)."""

    def run_line(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as caught:
            __main__.main([str(argument) for argument in arguments])
        code = caught.value.code
        output, errors = capsys.readouterr()
        return (code if isinstance(code, int) else 0 if code is None else 1), output, errors

    return run_line


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


def test_the_versions(run) -> None:
    """What a report of a fault begins with."""
    import triton

    expected = f"flashgen {flashgen.__version__}, Triton {triton.__version__}\n"
    assert run("--version") == (0, expected, "")


class TestBadInput:
    @pytest.mark.parametrize(
        ("line", "code", "sentence"),
        [
            ("tune --target nvidia_h2000", 2, "did you mean nvidia_h200?"),
            ("tune --dtype int8", 2, "dtype must be one of bf16, fp16, fp32"),
            ("tune --head-dim 64 --head-dim 20", 2, "--head-dim must be a multiple of 8 from 16"),
            ("tune --direction sideways", 2, "direction must be one of forward"),
            ("tune --trials -1", 2, "--trials must be at least 1: got -1"),
            ("tune --seq -5", 2, "--seq must be at least 1: got -5"),
            ("tune --seq 4096 --seq 5000", 2, "at most one length a bucket: got 4096 and 5000"),
            ("tune --time-budget -1", 2, "--time-budget must be more than 0 seconds: got -1.0"),
            (
                "tune --feature alibi --no-feature",
                2,
                "--feature and --no-feature exclude each other: name one",
            ),
            ("tune --no-feature", 2, "--no-feature selects specs of tables: leave it out, or add"),
            ("tune --workload w.yaml --no-feature", 2, "--no-feature selects specs of tables"),
            ("tune --seed -1", 2, "seed must be 0 to 4294967295: got -1"),
            ("tune --jobs 0", 2, "--jobs must be at least 1: got 0"),
            ("tune --sampler lucky", 2, "sampler must be one of auto"),
            (
                "tune --gpu --target nvidia_l4",
                2,
                "--gpus and --target exclude each other: name one",
            ),
            ("tune --max-regret -0.1", 2, "--max-regret must be 0 or more, and less than 1: got -"),
            ("tune --max-regret nan", 2, "--max-regret must be 0 or more, and less than 1: got n"),
            ("tune --workload w.yaml --hf-config c.json", 2, "exclude each other: name one"),
            ("tune --workload w.yaml --seq 512", 2, "--workload says what to tune: leave out"),
            ("tune --workload w.yaml --direction delta", 2, "--workload says what to tune"),
            ("tune --workload absent.yaml", 2, "absent.yaml"),
            ("tune --hf-config c.json --causal", 2, "--hf-config says what to tune: leave out"),
            ("tune --hf-config absent.json", 2, "absent.json"),
            ("tune --gpus all --target nvidia_l4", 2, "--gpus and --target exclude each other"),
            ("tune --shard 3", 2, "--shard must be like 2/8: got '3'"),
            ("tune --shard 0/2", 2, "shard must be i/n, i from 1 to n"),
            ("tune --shard 5/5", 2, "at most the number of specs, 4: got 5/5"),
            ("tune --gpus all --sampler lucky", 2, "sampler must be one of auto"),
            ("tune --target nvidia_l4 --seq 99999999999", 2, "seq must be from 1 to 16777216"),
            *(
                pytest.param(
                    f"tune --gpus {which}",
                    3,
                    "type: --target nvidia_h100_80gb_hbm3 in place of --gpus",
                    marks=pytest.mark.slow("a child lists the devices: 3 s"),
                )
                for which in ("all", "0")
            ),
            ("report nvidia_h2000", 2, "did you mean nvidia_h200?"),
            ("show nvidia_h2000", 2, "did you mean nvidia_h200?"),
            ("show amd_mi300", 2, "did you mean amd_instinct_mi300x?"),
            (
                "show nvidia_l4",
                1,
                "nvidia_l4 has no table yet: run flashgen tune --target nvidia_l4",
            ),
            (
                "explain --head-dim 20 --seq 1",
                2,
                "--head-dim must be a multiple of 8 from 16 to 512",
            ),
            ("explain --head-dim 520 --seq 1", 2, "--head-dim must be a multiple of 8"),
            (
                "explain --head-dim 64x --seq 1",
                2,
                "--head-dim must be like 64 or 192x128: got '64x'",
            ),
            ("explain --head-dim -64 --seq 1", 2, "--head-dim must be like 64"),
            ("explain --head-dim 64 --seq -1", 2, "--seq must be 0 or more: got -1"),
            (
                "explain --head-dim 64 --seq 1 --dtype int8",
                2,
                "dtype must be one of bf16, fp16, fp32, tf32: got 'int8'",
            ),
            (
                "explain --head-dim 64 --seq 1 --target nvidia_h2000",
                2,
                "did you mean nvidia_h200?",
            ),
            (
                "bench --contender sdpa --contender flash-attn-3",
                2,
                "--contender flash-attn-3: flash_attn_3 is not installed",
            ),
            ("bench --gigabytes -1", 2, "--gigabytes must be more than 0: got -1"),
            ("verify", 2, "either --gpu or --target"),
            (
                "sanitize fwd_bf16_d63 --target nvidia_h200",
                2,
                "is no kernel of nvidia_h200's table",
            ),
            (
                "sanitize fwd_bf16_d64_br64_bc32_w4_s2_blackwell_tma --target nvidia_h200",
                2,
                "schedule blackwell",
            ),
            ("verify --gpu --target nvidia_h200", 2, "either --gpu or --target"),
            ("verify --target nvidia_h2000", 2, "did you mean nvidia_h200?"),
            ("verify --target nvidia_h200 --jobs 0", 2, "--jobs must be at least 1: got 0"),
            ("verify --target nvidia_h200 --enter admit", 2, "--enter needs --executed"),
            ("verify --target nvidia_h200 --spec fwd_*", 2, "--spec needs --enter"),
            ("aot --target nvidia_h2000", 2, "did you mean nvidia_h200?"),
            ("aot --target nvidia_h200 --jobs 0", 2, "--jobs must be at least 1: got 0"),
            ("warmup", 3, "without one, type: flashgen aot --target nvidia_h200 --out DIR"),
            ("verify --gpu", 3, "without one, type: --target nvidia_h200 in place of --gpu"),
            ("try k --gpu", 3, "without one, type: --target nvidia_h200 in place of --gpu"),
        ],
    )
    @pytest.mark.usefixtures("without_gpu")
    def test_it_gets_one_sentence_and_its_code(
        self, run, tables_alone, line, code, sentence
    ) -> None:
        found, output, errors = run(*line.split(), "--out", tables_alone)
        assert found == code, errors
        assert errors.startswith("flashgen: ")
        assert sentence in errors
        assert errors.count("\n") == 1
        assert output == ""

    @pytest.mark.parametrize(
        "line", ["frobnicate", "show", "explain --head-dim 64", "explain --seq x", "show a --no"]
    )
    def test_a_line_that_does_not_parse_is_usage(self, run, line) -> None:
        code, _, errors = run(*line.split())
        assert code == 2
        assert "Traceback" not in errors

    def test_a_broken_table_is_named_with_its_line(self, run, tables_alone: Path) -> None:
        path = tables_alone / "configs" / "nvidia_h200.yaml"
        path.write_text(path.read_text().replace("sms: 132", "sms: 132, sms: 133"))
        line = path.read_text().split("sms: 133")[0].count("\n") + 1
        for command in ("show nvidia_h200", "generate", "generate --check", "targets"):
            code, _, errors = run(*command.split(), "--out", tables_alone)
            assert code == 1
            assert f"nvidia_h200.yaml, line {line}: the key 'sms' is here twice" in errors

    def test_a_bug_is_one_line_and_debug_shows_where(self, run, monkeypatch) -> None:
        def broken(_: object) -> None:
            raise KeyError("inside")

        monkeypatch.setattr(cli.tables, "tables_of", broken)
        code, _, errors = run("targets")
        assert code == 1
        assert errors == "flashgen: a bug, KeyError: 'inside'; see --debug\n"
        for arguments in (["--debug", "targets"], ["targets", "--debug"]):
            with pytest.raises(KeyError, match="inside"):
                __main__.main(arguments)

    def test_debug_shows_where_an_error_came_from(self, tables_alone: Path) -> None:
        with pytest.raises(FlashgenError, match="did you mean nvidia_h200"):
            __main__.main(["show", "nvidia_h2000", "--out", str(tables_alone), "--debug"])

    def test_control_c_is_130(self, run, monkeypatch) -> None:
        def interrupt(_: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(cli.tables, "tables_of", interrupt)
        assert run("targets")[::2] == (130, "flashgen: interrupted\n")
        monkeypatch.setattr("flashgen.tune.tune.tune", lambda *_: interrupt(0))
        saved = "flashgen: interrupted; what was tried is kept, and the same command goes on\n"
        assert run("tune")[::2] == (130, saved)


class TestTune:
    @pytest.fixture
    def options(self, run, monkeypatch):
        """Run `flashgen tune` with these arguments up to the tuning: the TuneOptions it gets."""
        got: list[TuneOptions] = []

        def tuned(options: TuneOptions, _: object) -> tuple[Table, ...]:
            got.append(options)
            return ()

        monkeypatch.setattr("flashgen.tune.tune.tune", tuned)

        def options_of(line: str) -> TuneOptions:
            code, _, errors = run("tune", *line.split())
            assert code == 0, errors
            return got.pop()

        return options_of

    def test_the_workload_of_a_bare_tune(self, options, monkeypatch) -> None:
        monkeypatch.setattr("torch.cuda.is_available", lambda: True)
        found = options("")
        names = [spec.name for spec in found.specs]
        assert names == [f"fwd_bf16_d{d}{m}" for d in (64, 128) for m in ("", "_causal")]
        assert found.seqs == (4096,)
        assert (found.where, found.out, found.shard) == (TargetOptions(), Path(), (1, 1))
        assert (found.budget.trials, found.budget.seconds, found.improve_only) == (60, None, False)

    def test_without_a_gpu_a_bare_tune_is_a_demonstration(
        self, run, options, without_gpu: None
    ) -> None:
        found = options("")
        assert [spec.name for spec in found.specs] == ["fwd_bf16_d128_causal"]
        assert (found.where, found.out) == (TargetOptions(), Path("demonstration"))
        assert found.budget.seconds == tuning.DEMONSTRATION_S
        code, output, _ = run("tune")
        assert code == 0
        assert output.startswith("No GPU is here, so this is a demonstration, for an H100 that is ")

    def test_a_demonstration_takes_what_is_named(self, options, without_gpu: None) -> None:
        found = options("--head-dim 96 --no-causal --trials 7 --out mine")
        assert [spec.name for spec in found.specs] == ["fwd_bf16_d96"]
        assert (found.budget.trials, found.budget.seconds) == (7, None)
        assert found.out == Path("mine")
        named = options("--target nvidia_l4")
        assert (len(named.specs), named.out, named.budget.seconds) == (4, Path(), None)

    def test_a_demonstration_leaves_a_report(
        self, run, out: Path, without_gpu: None, monkeypatch
    ) -> None:
        monkeypatch.setattr("flashgen.tune.tune.tune", lambda *_: (TABLE,))
        code, output, _ = run("tune", "--out", out)
        assert (code, output.splitlines()[-1]) == (0, f"Written: {out / 'report.html'}")
        assert SPEC.name in (out / "report.html").read_text()

    def test_a_dry_run_names_searches_and_a_time_and_runs_nothing(self, run, monkeypatch) -> None:
        monkeypatch.setattr("flashgen.tune.tune.tune", lambda *_: pytest.fail("it ran"))
        line = "tune --dry-run --target nvidia_l4 --head-dim 128 --causal --jobs 2 --trials"
        code, output, _ = run(*line.split(), 60)
        *_, search, last = output.splitlines()
        assert code == 0
        assert re.match(
            r"fwd_bf16_d128_causal seq 4096, heads 16/16, .*: 60 of \d+ configs", search
        )
        assert last.startswith("nvidia_l4: 1 search, about 2 min with 2 processes")
        few = run(*line.split(), 10, "--time-budget", "5")[1].splitlines()[-1]
        assert "5 s by --time-budget; all of them take about 20 s" in few
        assert run(*line.split(), 10, "--cluster", "auto")[0] == 2
        none = run(*line.replace("l4", "a10").split(), 10, "--feature", "fp8")[1]
        assert "no config is legal: fp8 is made of the float8_e4m3 matrix instructions" in none
        every = run(*line.split(), 10, "--sampler", "exhaustive")[1].splitlines()[-2]
        tried, legal = re.search(r": (\d+) of (\d+) configs", every).groups()
        assert tried == legal

    def test_a_dry_run_counts_what_tables_lend(self, run, tmp_path: Path) -> None:
        """Whatever the trials: all of it is tried before a search goes on from there."""
        save(MIXED, tmp_path / "configs" / "nvidia_h200.yaml")
        line = "tune --dry-run --target nvidia_l4 --from-tables --jobs 2 --no-feature --trials"
        counts = {
            trials: [
                int(count)
                for count in re.findall(
                    r": (\d+) of \d+ configs", run(*line.split(), trials, "--out", tmp_path)[1]
                )
            ]
            for trials in (0, 60)
        }
        assert len(counts[0]) == 2
        assert 1 < max(counts[0]) < 60
        assert counts[60] == [60, 60]

    def test_every_option_arrives(self, options) -> None:
        found = options(
            "--target nvidia_l4 --direction forward --dtype fp16 --dtype tf32 --head-dim 64 "
            "--head-dim 192x128 --causal --seq 512 --seq 2048 --trials 7 --time-budget 90 "
            "--sampler random --seed 3 --out here --improve-only --jobs 2"
        )
        names = [spec.name for spec in found.specs]
        assert names == [
            f"fwd_{t}_{d}_causal" for t in ("fp16", "tf32") for d in ("d64", "d192v128")
        ]
        assert (found.where, found.seqs) == (TargetOptions(target="nvidia_l4", jobs=2), (512, 2048))
        assert (found.budget.trials, found.budget.seconds) == (7, 90.0)
        assert (found.method.sampler, found.method.seed) == ("random", 3)
        assert (found.out, found.improve_only) == (Path("here"), True)

    def test_every_option_of_a_long_run_arrives(self, options) -> None:
        found = options("--max-regret 0.05 --retry-quarantined --gpus 3 --shard 2/4")
        assert (found.max_regret, found.retry_quarantined) == (0.05, True)
        assert (found.where, found.shard) == (TargetOptions(gpus="3"), (2, 4))

    def test_tables_say_what_where_options_do_not(self, options, tmp_path: Path) -> None:
        """A workload or a model still does; 0 trials are no search."""
        save(MIXED, tmp_path / "configs" / "nvidia_h200.yaml")
        found = options(f"--target nvidia_l4 --from-tables --out {tmp_path}")
        assert (found.from_tables, found.specs, found.budget.trials) == (True, (), 60)
        tables = generating.tables_for(tmp_path, evidence=True).values()
        assert found.work == workloads.of_tables(tables)
        assert len(found.work) == len(MIXED.entries) == 3
        few = options(f"--from-tables --trials 0 --direction decode --seq 1500 --out {tmp_path}")
        assert few.budget.trials == 1
        assert [(s.direction, p.seq_k) for s, p in few.work] == [("decode", 1500)]
        plain = options(f"--from-tables --no-feature --target nvidia_l4 --out {tmp_path}")
        assert {spec.feature_words for spec, _ in plain.work} == {()}
        assert len(plain.work) == 2
        path = ROOT / "examples" / "workloads" / "llama-3-8b.yaml"
        assert options(f"--from-tables --workload {path}").work == workloads.load(path).work

    @pytest.mark.parametrize(
        "line", ["--invariant", "--head-dim 80", "--kv int8", "--feature bias --direction decode"]
    )
    def test_tables_must_have_what_the_options_name(
        self, run, tables_alone: Path, line: str
    ) -> None:
        code, _, errors = run("tune", "--from-tables", *line.split(), "--out", tables_alone)
        assert code == 2
        assert "--from-tables needs a spec and a length of a table" in errors

    def test_a_models_configuration_says_what(self, options, tmp_path: Path) -> None:
        config = {
            "model_type": "llama", "hidden_size": 256, "num_attention_heads": 4,
            "num_key_value_heads": 2, "max_position_embeddings": 2048, "torch_dtype": "float16",
        }  # fmt: skip
        path = tmp_path / "config.json"
        path.write_text(json.dumps(config))
        found = options(f"--hf-config {path} --direction forward --direction backward_dq")
        specs = {spec.name for spec, _ in found.work}
        assert specs == {"fwd_fp16_d64_causal", "bwd_dq_fp16_d64_causal"}
        assert {p.heads // p.kv_heads for _, p in found.work} == {2}

    def test_features_go_together(self, options) -> None:
        line = "--feature window --feature softcap --feature bias --causal --head-dim 64"
        found = options(f"{line} --direction forward --direction backward")
        names = [spec.name for spec in found.specs]
        kinds = ("fwd", "bwd_dkv", "bwd_dq", "bwd_fused", "bwd_dbias")
        assert set(names) == {
            "bwd_delta_bf16_d64", *(f"{k}_bf16_d64_causal_bias_window_softcap" for k in kinds),
        }  # fmt: skip
        assert len(names) == len(set(names))
        (alone,) = options("--feature sink --causal --head-dim 64").specs
        assert alone.name == "fwd_bf16_d64_causal_sink"

    def test_a_block_mask_has_no_causal_one_beside_it(self, options) -> None:
        assert {spec.mask for spec in options("--feature block-mask").specs} == {"none"}
        with pytest.raises(AssertionError, match="block_mask needs mask none"):
            options("--feature block-mask --causal")  # what run() printed

    def test_no_causal_is_one_mask_too(self, options) -> None:
        assert {spec.mask for spec in options("--no-causal").specs} == {"none"}

    def test_the_command_that_the_runtime_recommends_is_understood(self, options) -> None:
        plain = AttentionSpec(
            dtype="float32", head_dim=192, head_dim_v=128, mask="causal", precision="tf32"
        )
        words = ["window", "softcap", "bias", "alibi", "dropout"]
        featured = plain.with_features(words)
        for spec in (
            plain,
            *(plain.with_features([word]) for word in (*words, "boolean-mask", "sink")),
            featured.for_direction("backward_dkv"),
            featured.for_direction("backward_dbias"),
            plain.with_features(["varlen", "window"]).for_direction("backward_dq"),
            replace(plain.with_features(["varlen"]), paged=True),
        ):
            found = options(tune_command(spec, 5000).removeprefix("flashgen tune "))
            assert (found.specs, found.seqs, found.where.gpu) == ((spec,), (5000,), True)


class TestGenerate:
    def test_it_writes_what_check_then_accepts(self, run, out: Path) -> None:
        shutil.rmtree(out / "generated")
        assert run("generate", "--check", "--out", out)[0] == 1
        code, output, _ = run("generate", "--out", out)
        assert code == 0
        assert "files changed, from 1 tables" in output
        assert (out / "generated" / "dispatcher.py").is_file()
        assert run("generate", "--check", "--out", out)[0] == 0
        assert "0 files changed" in run("generate", "--out", out)[1]

    def test_default_kernels_are_written_and_deleted(self, run, out: Path) -> None:
        kernels = out / "generated" / "kernels"
        before = {path.name for path in kernels.iterdir()}
        assert run("generate", "--defaults", "--out", out)[0] == 0
        added = {path.name for path in kernels.iterdir()} - before
        assert "append.py" in added
        assert run("generate", "--check", "--defaults", "--out", out)[0] == 0
        code, _, error = run("generate", "--check", "--out", out)
        assert (code, "append.py is orphaned" in error) == (1, True)
        assert run("generate", "--out", out)[0] == 0
        assert {path.name for path in kernels.iterdir()} == before

    def test_variants_are_kernels_that_are_read_and_loaded_alone(
        self, run, out: Path, tmp_path: Path
    ) -> None:
        before = sorted((out / "generated").rglob("*.py"))
        code, output, _ = run("generate", "--variants", tmp_path / "variants", "--out", out)
        found = {path.stem: path for path in (tmp_path / "variants").iterdir()}
        kernels = generating.kernels_by_name([TABLE], defaults=False)
        assert (code, found.keys()) == (0, kernels.keys())
        assert f"{len(found)} kernels, from 1 tables" in output
        assert sorted((out / "generated").rglob("*.py")) == before
        for name, path in found.items():
            assert load_kernel(path, name).fn.__name__ == name
            assert run("show", "--kernel", name, "--out", out)[1] == path.read_text()

    def test_variants_are_not_checked(self, run, out: Path, tmp_path: Path) -> None:
        code, _, error = run("generate", "--check", "--variants", tmp_path / "v", "--out", out)
        assert (code, "leave out --check" in error, (tmp_path / "v").exists()) == (2, True, False)

    def test_a_folder_that_cannot_be_written_is_a_sentence(self, run, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        code, _, errors = run("generate", "--out", tmp_path / "file")
        assert code == 1
        assert "cannot be written" in errors


class TestPrecompiling:
    """What is compiled, and what is said; the compiling itself is tested in tune/test_precompile.py."""

    @pytest.fixture
    def built(self, monkeypatch):
        asked: list[tuple[str, str]] = []

        def made(pairs, gpu, **_):
            for spec, config in pairs:
                asked.append((gpu.slug, kernel_name(spec, config)))
                failure = "no room" if config.loads == "pointer" else ""
                yield precompile.Precompiled(name=asked[-1][1], keys=("00",), failure=failure)

        monkeypatch.setattr(precompile, "precompile", made)
        return asked

    def test_warmup_takes_the_table_that_would_serve(self, run, out, built, monkeypatch) -> None:
        """An H200 NVL has none of its own."""
        here = replace(H200, name="NVIDIA H200 NVL")
        monkeypatch.setattr("flashgen.kernels.launch.device_gpu", lambda *_, **__: here)
        code, output, errors = run("warmup", "--out", out)
        assert code == 0, errors
        held = load(out / "configs" / "nvidia_h200.yaml")
        names = {kernel_name(entry.spec, entry.config) for entry in held.entries}
        assert names <= {name for _, name in built}
        assert {slug for slug, _ in built} == {"nvidia_h200_nvl"}
        assert "FAILED" in output
        assert "from the table of nvidia_h200" in output

    def test_warmup_of_a_gpu_without_a_table_compiles_the_defaults(
        self, run, out, built, monkeypatch
    ) -> None:
        monkeypatch.setattr(
            "flashgen.kernels.launch.device_gpu", lambda *_, **__: TARGETS["nvidia_l4"]
        )
        code, _, errors = run("warmup", "--out", out)
        assert code == 1  # here pointer kernels do not compile, and there are no others
        assert "kernels compiled: the lines above say why" in errors
        assert all("_anydim" in name for _, name in built)


class TestExport:
    @pytest.mark.parametrize("form", ["json", "json-schema", "flex"])
    def test_it_writes_a_file_or_to_standard_output(self, run, tables_alone, form: str) -> None:
        words = ["export", "--to", form, "--target", "nvidia_h200", "--out", tables_alone]
        code, shown, errors = run(*words)
        assert code == 0, errors
        assert json.loads(shown)
        assert run(*words, tables_alone / "written.json")[0] == 0
        assert (tables_alone / "written.json").read_text() == shown

    def test_a_kernel_needs_a_folder(self, run, tables_alone: Path) -> None:
        code, _, errors = run("export", "--to", "hf-kernel", "--out", tables_alone)
        assert code == 2
        assert "--to hf-kernel needs the folder to write" in errors


def test_a_folder_that_is_not_there_holds_no_table(run, tmp_path: Path) -> None:
    for line in ("show nvidia_h200", "report nvidia_h200", "verify --target nvidia_h200"):
        code, _, errors = run(*line.split(), "--out", tmp_path / "typo")
        assert code == 2
        assert "--out must name a folder" in errors


class TestReport:
    def test_it_writes_a_page_and_says_that_there_is_no_log(self, run, out: Path) -> None:
        code, output, errors = run("report", "nvidia_h200", "--out", out)
        assert code == 0, errors
        assert "without the history of its searches" in output
        assert f"Written: {out / 'report.html'}" in output.replace("\n", "")
        page = (out / "report.html").read_text()
        assert "NVIDIA H200" in page
        assert AHEAD.label in page


class TestTableDiffAndMerge:
    @pytest.fixture
    def other(self, out: Path, tmp_path: Path) -> Path:
        """The table of `out`, with a faster config in one bucket, under another name."""
        faster = replace(FRESH, config=AHEAD, result=replace(FRESH.result, median_us=99.0))
        save(made_table(made_entry(source="measured"), faster), tmp_path / "nvidia_h200.yaml")
        beside = tmp_path / "evidence"
        (beside / "nvidia_h200.jsonl").rename(beside / "other.jsonl")
        return (tmp_path / "nvidia_h200.yaml").rename(tmp_path / "other.yaml")

    def test_diff_prints_markdown_of_what_changed(self, run, out: Path, other: Path) -> None:
        held = out / "configs" / "nvidia_h200.yaml"
        code, output, errors = run("table", "diff", held, other)
        assert code == 0, errors
        assert "|" in output
        assert AHEAD.label in output
        assert "[1024, 4096)" not in output  # that one is as it was
        assert run("table", "diff", held, held)[1] != output

    def test_merge_writes_the_best_of_both(self, run, out: Path, other: Path) -> None:
        held = out / "configs" / "nvidia_h200.yaml"
        merged = out / "merged" / "nvidia_h200.yaml"
        code, output, errors = run("table", "merge", held, other, "--out", merged)
        assert code == 0, errors
        assert "2 entries of 2 tables" in output
        (chosen,) = (e for e in load(merged).entries if e.bucket == FRESH.bucket)
        assert (chosen.config, chosen.result.median_us) == (AHEAD, 99.0)

    @pytest.mark.parametrize("name", ["merged.yaml", "a.b.yaml"])
    def test_merge_writes_any_name_with_the_suffix_of_tables(
        self, run, out: Path, other: Path, tmp_path: Path, name: str
    ) -> None:
        merged = tmp_path / "merged" / name
        assert run("table", "merge", other, "--out", merged)[0] == 0
        code, output, errors = run("table", "diff", other, merged)
        assert code == 0, errors
        assert output == run("table", "diff", other, other)[1]

    def test_merge_overwrites_nothing_but_what_it_reads(
        self, run, out: Path, other: Path, tmp_path: Path
    ) -> None:
        held = out / "configs" / "nvidia_h200.yaml"
        text = held.read_text()
        code, _, errors = run("table", "merge", other, "--out", held)
        assert (code, held.read_text()) == (2, text)
        assert "exists and is not among the tables to merge" in errors
        assert run("table", "merge", other, "--out", tmp_path / "nvidia_h200")[0] == 2
        assert run("table", "merge", held, other, "--out", held)[0] == 0
        assert held.read_text() != text

    def test_a_file_that_is_not_there_is_one_sentence(self, run, out: Path) -> None:
        held = out / "configs" / "nvidia_h200.yaml"
        merged = out / "merged.yaml"
        for line in (("diff", held, "absent.yaml"), ("merge", "absent.yaml", "--out", merged)):
            code, _, errors = run("table", *line)
            assert code == 2
            assert errors.count("\n") == 1
            assert "absent.yaml" in errors


class TestShow:
    def test_it_prints_every_entry_and_which_is_stale(self, run, out: Path) -> None:
        code, output, _ = run("show", "nvidia_h200", "--out", out)
        assert code == 0
        assert "NVIDIA H200 (sm_90): 2 entries, 1 measured, 1 estimated" in output
        stale, fresh = (line for line in output.splitlines() if SPEC.name in line)
        assert AHEAD.label in stale
        assert "measured, stale" in stale
        assert "[1024, 4096)" in stale
        assert FA2.label in fresh
        assert "stale" not in fresh
        for figure in ("812.3", f"{FRESH.tflops:.0f}", "2.00", "1.25"):
            assert figure in fresh
        assert "1 stale: " in output

    def test_an_alias_is_shown_by_its_relative(self, run, out: Path) -> None:
        assert "NVIDIA H200" in run("show", "nvidia_h200_nvl", "--out", out)[1]

    @pytest.mark.parametrize(
        ("options", "names"),
        [
            ("", ["fwd_bf16_d128_causal", "fwd_fp16_d64_softcap", "decode_bf16_d128"]),
            ("--direction forward", ["fwd_bf16_d128_causal", "fwd_fp16_d64_softcap"]),
            ("--direction backward", []),
            ("--direction decode --direction backward", ["decode_bf16_d128"]),
            ("--dtype fp16", ["fwd_fp16_d64_softcap"]),
            ("--dtype tf32", []),
            ("--head-dim 128", ["fwd_bf16_d128_causal", "decode_bf16_d128"]),
            ("--causal", ["fwd_bf16_d128_causal"]),
            ("--no-causal --dtype bf16", ["decode_bf16_d128"]),
            ("--feature softcap", ["fwd_fp16_d64_softcap"]),
            ("--feature softcap --feature window", []),
            ("--no-feature", ["fwd_bf16_d128_causal", "decode_bf16_d128"]),
        ],
    )
    def test_options_name_entries(self, run, out: Path, options: str, names: list[str]) -> None:
        save(MIXED, out / "configs" / "nvidia_h200.yaml")
        code, output, _ = run("show", "nvidia_h200", *options.split(), "--out", out)
        assert code == 0
        assert output.startswith("NVIDIA H200 (sm_90): 3 entries")
        found = [line.split()[0] for line in output.splitlines() if "[1024," in line]
        assert found == names
        assert ("No entry matches the options." in output) == (not names)
        code, output, _ = run("show", "nvidia_h200", *options.split(), "--json", "--out", out)
        assert [entry["name"] for entry in json.loads(output)["entries"]] == names

    @pytest.mark.parametrize("options", ["--feature capped", "--dtype int8", "--head-dim 20"])
    def test_options_that_name_nothing_known_are_refused(self, run, out: Path, options) -> None:
        code, _, errors = run("show", "nvidia_h200", *options.split(), "--out", out)
        assert code == 2
        assert "must be" in errors

    def test_a_decode_is_shown_in_gbs_and_what_computes_in_tflops(self, run, out: Path) -> None:
        save(MIXED, out / "configs" / "nvidia_h200.yaml")
        both = run("show", "nvidia_h200", "--out", out)[1]
        decode = next(entry for entry in MIXED.entries if entry.spec.direction == "decode")
        forward = MIXED.entries[0]
        assert f" {decode.gbs:.0f} GB/s " in both
        assert f" {forward.tflops:.0f} TFLOP/s " in both
        one = run("show", "nvidia_h200", "--direction", "decode", "--out", out)[1]
        assert " GB/s x default" in one
        assert "TFLOP/s" not in one

    def test_json_says_what_the_files_say(self, run, out: Path) -> None:
        entry = json.loads(run("show", "nvidia_h200", "--json", "--out", out)[1])["entries"][0]
        assert entry["spec"]["head_dim"] == 128
        assert entry["seq_k"] == [1024, 4096]
        assert (entry["config"], entry["us"], entry["stale"]) == (AHEAD.label, 812.3, True)
        assert entry["evidence"]["p20_us"] == 406.15
        assert entry["evidence"]["runners_up"][0]["source"] == "untimed"

    def test_only_the_table_it_shows_is_read(self, run, out: Path) -> None:
        (out / "configs" / "nvidia_l4.yaml").write_text("no table")
        assert run("show", "nvidia_h200", "--out", out)[0] == 0
        line = "explain --head-dim 128 --seq 2048 --causal --target nvidia_h200 --out"
        assert run(*line.split(), out)[0] == 0
        assert run("show", "nvidia_l4", "--out", out)[0] == 1


def test_targets_lists_them_with_their_tables(run, out: Path) -> None:
    made_up = replace(H200, name="Novel GPU 1")
    save(replace(made_table(), gpu=made_up), out / "configs" / "novel_gpu_1.yaml")
    code, output, _ = run("targets", "--out", out)
    lines = {line.split()[0]: line for line in output.splitlines()}
    assert code == 0
    assert lines["nvidia_h200"].rstrip().endswith("1 measured, 1 estimated")
    assert lines["nvidia_b200"].rstrip().endswith("none")
    assert lines["novel_gpu_1"].rstrip().endswith("1 estimated")


@pytest.mark.usefixtures("without_gpu")
class TestExplain:
    @pytest.fixture(autouse=True)
    def _nothing_compiled(self, monkeypatch) -> None:
        """tests/cpu/report/test_explain.py has what is said of a kernel itself."""
        unknown = Anatomy(unknown="it was not compiled")
        monkeypatch.setattr("flashgen.report.explain.dissect", lambda *_: unknown)

    def test_an_entry_of_the_bucket_with_its_runner_up(self, run, out: Path) -> None:
        line = "explain --head-dim 128 --seq 2048 --causal --target nvidia_h200 --out"
        code, output, _ = run(*line.split(), out)
        assert code == 0
        assert f"{SPEC.name} on nvidia_h200: {SPEC.name}_{AHEAD.label}\n" in output
        assert "exact: the entry of nvidia_h200 for seq_k in [1024, 4096)" in output
        assert "measured, 812.3 us at batch " in output
        assert " on nvidia_h200, stale; from" in output
        assert "runner-up: br128_bc64_w4_s2_fa2_ptr\n    untimed: " in output
        assert "20th to 80th percentile 406.1 to 1624.6 us\n" in output
        assert "what limits it" not in output
        compiled = run(*line.split(), out, "--compile")[1]
        assert "what limits it is not known: it was not compiled\n" in compiled
        assert "  1 block an SM, 8 of 64 warps, limited by registers\n" in output
        assert "  174 registers per thread, 98304 bytes of shared memory per block\n" in output
        assert "to improve it" not in output

    def test_the_nearest_bucket_and_the_command_that_would_help(self, run, out: Path) -> None:
        line = "explain --head-dim 128 --seq 5000 --causal --target nvidia_h200 --out"
        output = run(*line.split(), out)[1]
        assert "nearest_bucket: " in output
        assert "stale" not in output
        assert "flashgen tune --target nvidia_h200 --dtype bf16 --head-dim 128 --causal" in output

    def test_a_spec_with_features_and_how_to_tune_it(self, run, out: Path) -> None:
        line = "explain --head-dim 128 --seq 5000 --feature softcap --feature window --out"
        code, output, _ = run(*line.split(), out, "--target", "nvidia_h200")
        assert code == 0
        assert "fwd_bf16_d128_window_softcap on nvidia_h200: " in output
        assert "  default: " in output
        assert "flashgen tune --target nvidia_h200" in output
        assert "--feature window --feature softcap" in output
        code, _, error = run(*line.replace("softcap", "capped").split(), out)
        assert code == 2
        assert "--feature must be one of " in error

    @pytest.mark.parametrize("word", ["window", "boolean-mask"])
    def test_what_tune_says_to_try_next_is_the_entry(self, run, out: Path, word: str) -> None:
        spec = SPEC.for_direction("backward_dq").with_features([word])
        line = explain_options(replace(made_entry(), spec=spec))
        output = run("explain", *line.split(), "--target", "nvidia_h200", "--out", out)[1]
        assert output.startswith(f"{spec.name} on nvidia_h200: ")

    def test_a_relative_then_the_default(self, run, out: Path) -> None:
        line = "explain --head-dim 128 --seq 2048 --causal --target nvidia_h100_pcie --out"
        assert "relative: " in run(*line.split(), out)[1]
        line = "explain --head-dim 192x128 --seq 2048 --dtype tf32 --target nvidia_l4 --out"
        output = run(*line.split(), out)[1]
        assert "default: no entry for fwd_tf32_d192v128" in output
        assert "fwd_tf32_d256_" in output
        assert "its text is rendered by the first call" in output

    def test_with_no_gpu_it_says_as_which_one(self, run, out: Path) -> None:
        code, output, errors = run(
            "explain", "--head-dim", 64, "--seq", 1, "--no-causal", "--out", out
        )
        assert code == 0
        assert "no GPU here; as nvidia_h100_80gb_hbm3" in errors
        assert "fwd_bf16_d64 on nvidia_h100_80gb_hbm3" in output

    def test_flashgen_gpu_is_obeyed(self, run, out: Path, monkeypatch) -> None:
        monkeypatch.setenv("FLASHGEN_GPU", "nvidia_l4")
        line = ("explain", "--head-dim", 64, "--seq", 1, "--out", out)
        assert "on nvidia_l4: " in run(*line)[1]

    def test_a_folder_that_is_no_package_is_a_sentence(self, run, out: Path) -> None:
        table = out / "generated" / "tables" / "nvidia_h200.py"
        line = "explain --head-dim 64 --seq 1 --target nvidia_h200 --out"
        arch = 'ARCH = "sm_90"\n'
        for text in ("ROWS = {", f"{arch}ROWS = {{", f"{arch}", f"{arch}ROWS = {{'a': '\\nb\\n'}}"):
            table.write_text(text)
            code, _, errors = run(*line.split(), out)
            assert code == 1
            assert f"{table} cannot be loaded (" in errors

    def test_a_package_of_another_project_is_not_read(self, run, tmp_path: Path) -> None:
        (tmp_path / "generated").mkdir()
        (tmp_path / "generated" / "__init__.py").write_text("raise SystemExit('imported')\n")
        line = "explain --head-dim 64 --seq 1 --target nvidia_h200 --out"
        code, output, _ = run(*line.split(), tmp_path)
        assert code == 0
        assert f"from {paths.shipped_generated_dir()}" in output


class Evaluator:
    """Answers as told: by default that all is well, with the figures of made_entry."""

    source = "estimated"
    gpu = H200

    def __init__(
        self, *, registers=174, compiled=Status.OK, checked=Status.OK, timed=Status.OK, only=None
    ) -> None:
        self.registers = registers
        self.status = {"compile": compiled, "check": checked, "timed": timed}
        self.only = only

    def evaluate(self, stage, spec, problem, configs):
        for config in configs:
            told = self.only is None or config == self.only
            status = self.status.get(stage, Status.OK) if told else Status.OK
            yield Outcome(
                spec=spec,
                problem=problem,
                config=config,
                stage=stage,
                status=status,
                source="estimated",
                gpu=self.gpu.slug,
                triton="3.10",
                digest=render(spec, config).digest,
                protocol=1,
                registers=self.registers,
                shared_bytes=98304,
                check=CheckResult(
                    passed=True, floors=1.5, lse_error=0.1, cases=4, seed=0, where="interpreter"
                ),
                detail="as told" if status is not Status.OK else "",
            )

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None:
        pass


class TestVerify:
    @pytest.fixture(autouse=True)
    def _same_triton(self, monkeypatch) -> None:
        monkeypatch.setattr(verifying, "triton_version", lambda: "3.10")

    @pytest.fixture
    def verify(self, run, out: Path, monkeypatch):
        def with_evaluator(evaluator: Evaluator) -> tuple[int, list[str]]:
            table = load_with_evidence(out / "configs" / "nvidia_h200.yaml")
            monkeypatch.setattr(cli.prove, "_table_and_evaluator", lambda *_: (table, evaluator))
            code, output, _ = run("verify", "--target", "nvidia_h200", "--out", out)
            return code, output.splitlines()

        return with_evaluator

    @pytest.mark.slow("three kernels; test_arithmetic compares a class without the command")
    def test_kernels_of_a_class_are_compared_and_one_that_differs_is_named(
        self, run, monkeypatch
    ) -> None:
        spec = make_spec("bfloat16", 64, "causal", invariant=True)
        step = spec.for_direction("decode")
        rows = [(spec, make_config(64, 64)), (step, make_config(64, 64, num_stages=2))]
        other = step, make_config(64, 32, num_stages=2)
        monkeypatch.setattr(invariance, "HEAD_DIMS", (64,))
        monkeypatch.setattr(prove, "named_table", lambda *_: Table(gpu=H200))
        for kernels, code, last in (
            (rows, 0, "nvidia_h200: no kernels differ from their class"),
            ([*rows, other], 1, "nvidia_h200: 1 kernels differ from their class"),
        ):
            monkeypatch.setattr(invariance, "_defaults", lambda *_, found=kernels: found)
            found, output, _ = run("verify", "--invariant", "--target", "nvidia_h200")
            lines = output.splitlines()
            assert (found, lines[-1]) == (code, last)
            assert f"{spec.name}: 2 of {len(kernels)} kernels agree: " in lines[0]
            assert [kernel_name(*other) in line for line in lines[1:-1]] == [True] * code

    @pytest.mark.slow("compiles the kernels of all classes of a table: minutes")
    def test_all_classes_of_a_gpu_compute_in_one_way(self, run) -> None:
        code, output, _ = run("verify", "--invariant", "--target", "nvidia_l4")
        assert code == 0, output
        assert output.count(" kernels agree: ") > 9

    def test_entries_that_hold_and_one_of_them_stale(self, verify) -> None:
        code, (stale, fresh, last) = verify(Evaluator())
        assert code == 0
        assert stale.startswith(f"ok  {SPEC.name}_{AHEAD.label} [1024, 4096): 1.50 floors; stale: ")
        assert fresh == f"ok  {SPEC.name}_{FA2.label} [16384, inf): 1.50 floors"
        assert last == "nvidia_h200: 2 of 2 entries hold"

    def test_it_verifies_the_last_run_or_all(self, run, out: Path, monkeypatch) -> None:
        table = load_with_evidence(out / "configs" / "nvidia_h200.yaml")
        old, new = table.entries
        newer = replace(table.runs[0], id="20270102T030405Z-estimated")
        new = replace(new, evidence=replace(new.evidence, run=newer.id))
        both = replace(table, entries=(old, new), runs=(*table.runs, newer))
        monkeypatch.setattr(cli.prove, "_table_and_evaluator", lambda *_: (both, Evaluator()))
        line = ["verify", "--target", "nvidia_h200", "--out", out]
        _, output, errors = run(*line)
        assert "1 are not of the last run: --all has them." in errors
        assert "nvidia_h200: 1 of 1 entries hold" in output
        assert "nvidia_h200: 2 of 2 entries hold" in run(*line, "--all")[1]

    def test_other_registers_fail_unless_stale(self, verify) -> None:
        code, (stale, fresh, last) = verify(Evaluator(registers=200))
        assert code == 1
        assert stale.startswith("ok")
        assert fresh.startswith("FAILED")
        assert "200 registers: the entry says 98304 and 174" in fresh
        assert last == "nvidia_h200: 1 of 2 entries hold"

    def test_other_registers_are_a_note_under_another_triton(self, verify, monkeypatch) -> None:
        monkeypatch.setattr(verifying, "triton_version", lambda: "3.11")
        code, (_, fresh, _) = verify(Evaluator(registers=200))
        assert code == 0
        assert "(Triton 3.11 here, 3.10 there)" in fresh

    @pytest.mark.parametrize(
        "told",
        [
            {"compiled": Status.COMPILE_ERROR},
            {"checked": Status.WRONG},
            {"compiled": Status.SPILLS},
            {"compiled": Status.OUT_OF_RESOURCES},  # as the 32 entries of the B200 that trapped
        ],
    )
    def test_what_does_not_compile_or_is_wrong_fails(self, verify, told) -> None:
        code, (stale, fresh, _) = verify(Evaluator(only=FA2, **told))
        assert code == 1
        assert stale.startswith("ok")
        assert fresh.startswith("FAILED")
        assert fresh.endswith("as told")

    def test_what_ran_out_of_time_has_no_verdict_and_the_last_line_says_so(self, verify) -> None:
        code, (_, late, last) = verify(Evaluator(only=FA2, compiled=Status.TIMEOUT))
        assert code == 1
        assert late.startswith("NO VERDICT")
        assert last == (
            "nvidia_h200: 1 of 2 entries hold; 1 ran out of time and have no verdict: verify again"
        )

    def test_a_twin_may_be_slow_and_not_wrong(self, verify) -> None:
        twin = AHEAD.pointer_twin(SPEC)
        code, (first, *_) = verify(Evaluator(only=twin, compiled=Status.SPILLS))
        assert code == 0
        assert f"pointer twin {twin.label}: as told" in first
        for compiled in (Status.OK, Status.SPILLS):
            told = Evaluator(only=twin, compiled=compiled, checked=Status.WRONG)
            code, (first, *_) = verify(told)
            assert code == 1
            assert f"pointer twin {twin.label}: wrong: as told" in first

    @pytest.mark.slow("7 s; test_evaluators has the evaluator")
    def test_it_proves_with_compiler_and_interpreter(self, run, out: Path, monkeypatch) -> None:
        """No fake: one entry of one small kernel, compiled for sm_90 and interpreted."""
        monkeypatch.undo()
        small = replace(FA2, br=16, bc=16, num_warps=1, num_stages=1)
        spec = replace(SPEC, head_dim=16, head_dim_v=16, mask="none")
        path = out / "configs" / "nvidia_h200.yaml"
        save(made_table(made_entry(spec, BUCKETS[0], small)), path)
        code, output, errors = run("verify", "--target", "nvidia_h200", "--jobs", 1, "--out", out)
        assert code == 0, output + errors
        assert "1 of 1 entries hold" in output
        assert "stale" in output


def test_help_is_quick_and_python_m_is_the_same_program() -> None:
    code = (
        "import sys; sys.argv = ['flashgen', '--help']\n"
        "from flashgen.__main__ import main\n"
        "try: main()\n"
        "except SystemExit as e: assert not e.code\n"
        "heavy = {'torch', 'triton', 'optuna', 'yaml', 'jinja2', 'numpy', 'flashgen.schedules'}\n"
        "sys.exit(repr(heavy & set(sys.modules)) if heavy & set(sys.modules) else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    again = subprocess.run(
        [sys.executable, "-m", "flashgen", "--help"], capture_output=True, text=True
    )
    assert again.stdout == done.stdout
    for command in ("tune", "generate", "show", "explain", "verify", "calibrate", "targets"):
        assert command in done.stdout


@pytest.mark.parametrize("command", ["tune", "show", "calibrate", "sanitize"])
def test_help_names_no_type_of_python(run, command: str) -> None:
    status, shown, _ = run(command, "--help")
    assert status == 0
    assert "..." in shown
    assert not re.search(r"list\[|<bool>|<Path>", shown)


class TestTry:
    """flashgen try: a template is changed, and what becomes of it is told; nothing is written."""

    @pytest.fixture
    def tried(self, run, out: Path, monkeypatch):
        def with_evaluator(evaluator: Evaluator, *words: object) -> tuple[int, list[str]]:
            both = (TABLE, evaluator)
            monkeypatch.setattr(cli.prove, "_table_and_evaluator", lambda *_: both)
            words = words if "--out" in words else (*words, "--out", out)
            code, output, _ = run("try", *words, "--target", H200.slug)
            return code, output.splitlines()

        return with_evaluator

    def test_a_kernel_whose_time_nobody_can_estimate_holds(self, tried) -> None:
        code, (*_, checked, timed) = tried(Evaluator(timed=Status.NO_ESTIMATE), SPEC.name)
        assert (code, checked[:10], timed) == (0, "check:  ok", timed)
        assert timed.startswith("time:   no_estimate; ")

    def test_outside_of_a_clone_the_difference_is_from_what_is_installed(
        self, tried, tmp_path: Path
    ) -> None:
        lines = tried(Evaluator(), SPEC.name, "--out", tmp_path)[1]
        assert lines[1] == "diff:   none: generated/ has this text"

    def test_an_unchanged_template_has_no_difference(self, tried) -> None:
        code, (name, same, checked, timed) = tried(Evaluator(), SPEC.name)
        assert (code, name) == (0, kernel_name(SPEC, AHEAD))
        assert same == "diff:   none: generated/ has this text"
        assert checked.startswith("check:  ok; 1.50 floors, 4 cases, interpreter")
        assert timed.startswith("time:   ok; ")

    def test_a_changed_text_is_shown(self, tried, out: Path) -> None:
        text = render(SPEC, AHEAD).text_name
        file = out / "generated" / "kernels" / f"{text}.py"
        file.write_text(file.read_text().replace("tl.exp2(", "tl.exp(", 1))
        code, lines = tried(Evaluator(), kernel_name(SPEC, AHEAD))
        assert code == 0
        assert any(line.startswith("-") and "tl.exp(" in line for line in lines)
        assert any(line.startswith("+") and "tl.exp2(" in line for line in lines)

    def test_a_wrong_kernel_has_no_time(self, tried) -> None:
        code, lines = tried(Evaluator(checked=Status.WRONG), SPEC.name)
        assert (code, lines[-1].split("; ")[0]) == (1, "check:  wrong")

    def test_the_file_of_a_failure_is_kept_and_nothing_else(
        self, run, out: Path, tmp_path: Path, monkeypatch
    ) -> None:
        class Keeping(Evaluator):
            def __init__(self, cache: Path) -> None:
                super().__init__(checked=Status.WRONG)
                (cache / "checks").mkdir()
                (cache / "one.json").touch()
                kept("it is wrong", render(SPEC, AHEAD), cache)

        here = tmp_path / "temporary"
        here.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(here))
        monkeypatch.setattr(
            cli.prove, "_table_and_evaluator", lambda *given: (TABLE, Keeping(given[-2]))
        )
        assert run("try", SPEC.name, "--target", H200.slug, "--out", out)[0] == 1
        (file,) = (path for path in here.rglob("*") if path.is_file())
        assert "def " in file.read_text()
        assert [path.name for path in file.parent.parent.iterdir()] == ["quarantine"]

    def test_a_name_there_is_not(self, run, out: Path) -> None:
        assert run("try", "fwd_bf16_d63", "--target", H200.slug, "--out", out)[0] == 2
        assert "try needs either --gpu or --target" in run("try", SPEC.name)[2]


def test_a_kernel_that_no_table_has_is_executed_by_its_name(run, out: Path) -> None:
    name = "bwd_delta_bf16_d64_br32_bc16_w2_s1_fa2_ptr"
    code, printed, _ = run("sanitize", name, "--target", H200.slug, "--out", out)
    assert (code, printed.startswith(f"ok  {name}: ")) == (0, True)


def test_the_list_of_commands_has_a_sentence_for_each() -> None:
    """The terminal wraps it, at any width: a line break of the source would stand in its midst."""
    from typer.main import get_command

    group = get_command(cli.app)
    commands = {**group.commands, **group.commands["table"].commands}  # type: ignore[attr-defined]
    for name, command in commands.items():
        text = command.short_help or command.help
        assert re.search(r"[^.?][.?]$", text), name
        assert "\n" not in text, name


def test_a_shell_completes_commands_options_and_gpus() -> None:
    def completed(line: str) -> list[str]:
        words = {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split(" ")) - 1)}
        done = programs.run(
            ["-m", "flashgen"], env=os.environ | words | {"_FLASHGEN_COMPLETE": "complete_bash"}
        )
        return done.stdout.split()

    assert completed("flashgen tu") == ["tune"]
    assert completed("flashgen tune --no-f") == ["--no-feature"]
    assert completed("flashgen tune --target nvidia_h20") == ["nvidia_h200", "nvidia_h20"]
    assert completed("flashgen show --feature al") == ["alibi"]


def test_without_a_package_of_an_extra_it_says_what_to_install(run, monkeypatch) -> None:
    """Where no module has a sentence of its own."""

    def unfound(module: str) -> None:
        def broken(_: object) -> None:
            raise ModuleNotFoundError(f"No module named {module!r}", name=module)

        monkeypatch.setattr(cli.tables, "tables_of", broken)

    unfound("scipy.stats")
    command = paths.install_command("tune")
    assert run("targets")[::2] == (1, f"flashgen: this needs scipy.stats: {command}\n")
    unfound("flashgen.gone")
    assert run("targets")[2].startswith("flashgen: a bug, ModuleNotFoundError: ")


def test_without_a_package_that_it_always_needs_it_says_what_to_install(monkeypatch) -> None:
    for module in [name for name in sys.modules if name.startswith("flashgen.cli")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.delattr("flashgen.cli")
    monkeypatch.setitem(sys.modules, "typer", None)
    with pytest.raises(SystemExit, match=re.escape(f"typer: {paths.install_command()}")):
        __main__.main(["--help"])
