"""flashgen tune --gpu and flashgen bench from end to end, on a device whose kernels take a modelled time.

A kernel writes nothing, so O is 0 and so is what torch computes on the device: every check passes, and no error means
anything.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flashgen.table.table import load
from tests.driver import events
from tests.driver.events import Fault, Unmodelled
from tests.driver.programs import command

ONE = "--head-dim 64 --causal --dtype bf16 --seq 512".split()
TIME = {"RECORDING_CUDA_US": "400", "RECORDING_CUDA_US_PER_BLOCK": "1"}


def flashgen(
    tmp_path: Path, *words: str
) -> tuple[subprocess.CompletedProcess[str], list[events.Event]]:
    program = [sys.executable, "-W", "ignore", "-m", "flashgen", *words]
    return command(program, tmp_path, **TIME, COLUMNS="200")


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


def test_tune_measures_on_the_gpu_and_writes_the_table(tuned: Path) -> None:
    table = load(tuned / "configs" / "nvidia_h200.yaml")
    (entry,) = (each for each in table.entries if each.result.source == "measured")
    # 400 us, and the blocks of 32 heads in 32 sequences at 1 us each on 132 SMs.
    blocks = 32 * 32 * -(-512 // entry.config.br)
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
