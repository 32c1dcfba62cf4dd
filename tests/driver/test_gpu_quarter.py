"""benchmarks/gpu_quarter.py from its first item to its last, on a device whose kernels take a modelled time."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.quarter import lines
from benchmarks.quarter.experiments import EXPERIMENTS
from flashgen.spec.outcome import Outcome
from tests.driver import events
from tests.driver.events import Fault
from tests.driver.programs import command
from tests.driver.test_end_to_end import TIME, ZEROS

PROGRAM = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu_quarter.py"


@pytest.mark.slow("it walks through all experiments, and compiles 40 kernels")
def test_a_tiny_run_walks_through_all_experiments(tmp_path: Path) -> None:
    words = ["run", "--tiny", "--out", str(tmp_path / "quarter"), "--seconds", "1500"]
    fail = "resources@bwd_dq_bf16_d128_causal"
    done, found = command(
        [sys.executable, str(PROGRAM), *words], tmp_path, **TIME, **ZEROS, RECORDING_CUDA_FAIL=fail
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert events.of(Fault, found) == []
    measured = [
        e for e in lines.read(tmp_path / "quarter" / "quarter.jsonl") if e["kind"] != "about"
    ]
    assert {each["experiment"] for each in measured} == {each.name for each in EXPERIMENTS}
    kinds = Counter((each["kind"], each["status"]) for each in measured)
    print(kinds, done.stdout)
    for kind in ("check", "round", "case", "rough", "host"):
        assert kinds[kind, "ok"] > 0, done.stdout
    stages = {Outcome.from_json(o).stage for each in measured for o in each["outcomes"]}
    assert stages == {"check", "rough", "final"}
