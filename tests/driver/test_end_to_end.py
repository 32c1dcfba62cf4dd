"""flashgen tune --gpu and flashgen bench from end to end, on a device whose kernels take a modelled time.

A kernel writes nothing, so O is 0 and so is what torch computes on the device: every check passes, and no error means
anything. Only memory that comes from the driver is 0, so torch must not cache where a check runs: a block that it used
before holds copied inputs.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from flashgen.spec.problem import bucket_of
from flashgen.table.entry import Entry
from flashgen.table.table import Table
from flashgen.table.table_file import load, save
from tests.driver import events
from tests.driver.events import Fault, Launch, Unmodelled
from tests.driver.programs import command, run

ONE = "--head-dim 64 --causal --dtype bf16 --seq 512".split()
TIME = {"RECORDING_CUDA_US": "400", "RECORDING_CUDA_US_PER_BLOCK": "1"}
ZEROS = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}


def flashgen(
    tmp_path: Path, *words: str, fail: str = ""
) -> tuple[subprocess.CompletedProcess[str], list[events.Event]]:
    program = [sys.executable, "-W", "ignore", "-m", "flashgen", *words]
    zeros = ZEROS if words[0] in ("tune", "verify", "compare") else {}
    return command(program, tmp_path, **TIME, **zeros, COLUMNS="200", RECORDING_CUDA_FAIL=fail)


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tuned")
    done, found = flashgen(
        folder, "tune", "--gpu", *ONE, "--trials", "2", "--jobs", "1", "--out", str(folder)
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert events.of(Fault, found) == []
    assert [each for each in events.of(Unmodelled, found) if each.function.startswith("cuda")] == []
    return folder


def tuned_here(table: Table) -> Entry:
    """The entry that ONE names; the shipped table has other measured ones."""
    (entry,) = (
        each
        for each in table.entries
        if (each.spec.name, each.bucket) == ("fwd_bf16_d64_causal", bucket_of(512))
    )
    assert entry.result.source == "measured"
    return entry


def test_tune_measures_on_the_gpu_and_writes_the_table(tuned: Path) -> None:
    entry = tuned_here(load(tuned / "configs" / "nvidia_h200.yaml"))
    # 400 us, and the blocks of 32 heads in 32 sequences, or one an SM, at 1 us each on 132 SMs.
    blocks = 132 if entry.config.persistent else 32 * 32 * -(-512 // entry.config.br)
    assert entry.result.median_us == pytest.approx(400 + blocks / 132, rel=0.05)


def test_bench_times_the_tuned_kernel_beside_its_peers(tuned: Path) -> None:
    words = "--head-dim 64 --seq 512 --causal --direction forward --contender flashgen --contender default"
    out = tuned / "bench"
    done, found = flashgen(tuned, "bench", *words.split(), "--tuned", str(tuned), "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    assert events.of(Fault, found) == []
    assert "measured" in done.stdout
    assert json.loads((out / "bench.json").read_text())
    assert os.path.exists(out / "bench.md")


def test_compare_times_everybody_and_answers(tmp_path: Path) -> None:
    done, found = flashgen(tmp_path, "compare", *ONE, "--time-budget", "100")
    assert done.returncode == 0, done.stdout + done.stderr
    assert events.of(Fault, found) == []
    row = done.stdout.splitlines()[1]
    assert row.startswith("forward bf16_d64_causal, 512 keys")
    assert re.search(r"\d us (flash|cuDNN|efficient|math)", row)
    assert re.search(r"\d us +\d+\.\d\d x +(yes|no) +fwd_bf16_d64_causal", row)
    assert "unknown" not in done.stdout


def test_verify_runs_an_entry_on_the_gpu(tuned: Path, tmp_path: Path) -> None:
    table = load(tuned / "configs" / "nvidia_h200.yaml")
    entry = tuned_here(table)
    save(replace(table, entries=(entry,), executed=()), tmp_path / "configs" / "nvidia_h200.yaml")
    words = ["--gpu", "--out", str(tmp_path), "--jobs", "1"]
    assert flashgen(tmp_path, "generate", "--out", str(tmp_path))[0].returncode == 0
    done, found = flashgen(tmp_path, "verify", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 of 1 entries hold" in done.stdout
    assert events.of(Fault, found) == []
    assert any(entry.config.label in each.kernel for each in events.of(Launch, found))


def test_warmup_compiles_what_a_call_launches(tuned: Path, tmp_path: Path) -> None:
    cache = {"TRITON_CACHE_DIR": str(tmp_path / "cache"), "FLASHGEN_GENERATED": str(tuned)}
    words = [sys.executable, "-W", "ignore", "-m", "flashgen", "warmup"]
    done, _ = command([*words, "--out", str(tuned), "--jobs", "1"], tmp_path, **cache)
    assert done.returncode == 0, done.stdout + done.stderr
    done, _ = run(CALLED, tmp_path, **cache)
    assert done.stdout == "True\n", done.stderr


CALLED = """
    import torch, flashgen
    from triton import knobs
    knobs.compilation.listener = lambda **facts: print(facts["cache_hit"])
    flashgen.attention(
        *(torch.empty(1, 2, 512, 64, device="cuda", dtype=torch.bfloat16) for _ in "qkv"), causal=True
    )
"""

SMALL_BENCH = "bench --head-dim 64 --seq 512 --causal --direction forward --contender flashgen --contender default"


@pytest.mark.parametrize(
    ("kind", "says"), [("resources", "too many resources requested"), ("memory", "out of memory")]
)
def test_bench_says_which_contender_failed_and_goes_on(
    tmp_path: Path, kind: str, says: str
) -> None:
    words = [*SMALL_BENCH.split(), "--contender", "sdpa", "--out", str(tmp_path / "bench")]
    done, _ = flashgen(tmp_path, *words, fail=f"{kind}@fwd_bf16_d64_causal")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith("  flashgen ")]
    assert ["unavailable" in row and says in row for row in rows] == [True, True]


def test_bench_leaves_out_what_broke_the_context_when_it_is_started_again(tmp_path: Path) -> None:
    words = [*SMALL_BENCH.split(), "--out", str(tmp_path / "bench")]
    done, _ = flashgen(tmp_path, *words, fail="illegal@fwd_bf16_d64_causal#1")
    assert done.returncode == 1
    assert "flashgen failed in forward_bf16_d64_causal" in done.stderr
    assert "the same command resumes without it" in done.stderr
    done, _ = flashgen(tmp_path, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith("  flashgen ")]
    assert ["unavailable" in row for row in rows] == [False, True]  # the default is faster so far
    assert "TFLOP/s" in rows[0]
