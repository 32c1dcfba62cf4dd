"""benchmarks/forward.py walks all its paths without a GPU, and then claims to have measured nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flashgen.measure import PROTOCOL

ROOT = Path(__file__).resolve().parents[2]
FORWARD = ROOT / "benchmarks" / "forward.py"


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, FORWARD, *arguments], capture_output=True, text=True, timeout=200
    )


def test_smoke_run_judges_everybody_and_times_nobody(tmp_path: Path) -> None:
    file = tmp_path / "forward.json"
    done = run("--smoke", "--seq", "33", "--out", file)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "nothing is measured" in done.stdout.splitlines()[0]
    record = json.loads(file.read_text())
    assert (record["measured"], record["gpu"], record["protocol"]) == (False, None, PROTOCOL)
    assert [case["spec"]["mask"] for case in record["cases"]] == ["none", "causal"]
    for case in record["cases"]:
        assert [line["name"] for line in case["lines"]] == [
            "flashgen", "flashgen default", "SDPA math", "FlexAttention",
        ]  # fmt: skip
        assert all(line["status"] == "ok" and 0 < line["floors"] <= 2 for line in case["lines"])
        assert all(line["timing"] is None and line["tflops"] is None for line in case["lines"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_it_says_so_and_writes_nothing(tmp_path: Path) -> None:
    done = run("--out", tmp_path / "forward.json")
    assert (done.returncode, done.stderr.count("\n")) == (3, 1)
    assert "needs a GPU" in done.stderr
    assert list(tmp_path.iterdir()) == []
