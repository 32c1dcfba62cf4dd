"""benchmarks/gpu_quarter.py from its first item to its last, on a device whose kernels take a modelled time."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.gpu_quarter import tiny
from benchmarks.quarter import lines
from benchmarks.quarter.experiments import EXPERIMENTS, items_of
from flashgen.schedules.config import kernel_name
from flashgen.spec.gpu import TARGETS
from tests.driver.programs import command
from tests.driver.test_end_to_end import TIME, ZEROS

PROGRAM = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu_quarter.py"


@pytest.mark.slow("it walks through all experiments, and compiles 40 kernels")
def test_a_tiny_run_walks_through_all_experiments_behind_a_broken_context(tmp_path: Path) -> None:
    out = tmp_path / "quarter"
    words = [sys.executable, str(PROGRAM), "run", "--tiny", "--out", str(out), "--seconds", "3000"]
    checked = tiny(list(items_of(["right"], TARGETS["nvidia_h200"])))[0]
    fail = f"illegal@{kernel_name(checked.spec, checked.configs[0])}"
    done, _ = command(words, tmp_path, **TIME, **ZEROS, RECORDING_CUDA_FAIL=fail)
    assert done.returncode == 0, done.stdout + done.stderr
    found = [line for line in lines.read(out / "quarter.jsonl") if line["kind"] != "about"]
    assert {each["experiment"] for each in found} == {each.name for each in EXPERIMENTS}
    status = {(each["experiment"], each["kind"]): each["status"] for each in found}
    assert status.pop(("floors", "floors")) == "failed"  # cuBLAS takes 0.5 us, which is refused
    assert status.pop(("right", "check")) in ("broken", "given up")  # torch may abort first
    assert status.pop(("last", "check")) in ("ok", "wrong")  # no kernel writes anything here
    assert set(status.values()) == {"ok"}, done.stdout
    assert {o.stage for o in lines.outcomes_of(found)} == {"check", "rough", "final"}
    assert all(o.timing for o in lines.outcomes_of(found) if o.stage != "check")
    assert {line["name"] for each in found if "case" in each for line in each["case"]["lines"]} > {
        "flashgen", "SDPA math", "ladder: hopper", "ladder: pair: hopper", "ladder: fused: hopper",
    }  # fmt: skip
