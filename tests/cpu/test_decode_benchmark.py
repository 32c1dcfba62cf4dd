"""benchmarks/decode.py walks all its paths without a GPU, and then claims to have measured nothing."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from flashgen.gpu import TARGETS
from flashgen.outcome import Timing

ROOT = Path(__file__).resolve().parents[2]
DECODE = ROOT / "benchmarks" / "decode.py"


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, DECODE, *arguments], capture_output=True, text=True, timeout=200
    )


def test_smoke_run_judges_everybody_and_times_nobody(tmp_path: Path) -> None:
    file = tmp_path / "decode.json"
    done = run("--smoke", "--dtype", "fp16", "--out", file)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "nothing is measured" in done.stdout.splitlines()[0]
    record = json.loads(file.read_text())
    assert (record["measured"], record["gpu"], record["copy_gbs"]) == (False, None, None)
    assert [case["problem"]["batch"] for case in record["cases"]] == [1, 2]
    for case in record["cases"]:
        names = [line["name"] for line in case["lines"]]
        assert names[:4] == ["flashgen", "flashgen, pages of 16", "flashgen, pages of 256", "SDPA"]
        assert all(line["status"] == "ok" and 0 < line["floors"] <= 2 for line in case["lines"])
        assert all(line["timing"] is None and line["gbs"] is None for line in case["lines"])


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(DECODE.parent))
    yield importlib.import_module("decode")
    for name in ("decode", "forward"):
        sys.modules.pop(name, None)


def test_rates_are_of_all_bytes_and_of_the_copy(benchmark: Any) -> None:
    gpu = TARGETS["nvidia_h200"]
    options = benchmark.parsed(["--smoke", "--batch", "2"])
    (case,) = benchmark.cases(options, "cpu", 1)
    of_kv = 2 * 2 * 8 * 33 * 16 * 2
    of_q_and_o = 2 * 32 * (2 * 16 * 2 + 4)
    assert case.bytes == of_kv + of_q_and_o
    line = benchmark.Line(name="x", detail="", status="ok")
    time = Timing(median_us=case.bytes / 2000e3, low_us=1.0, high_us=1.0)  # 2000 GB/s
    found = benchmark.timed(line, time, case, gpu, 4000.0)
    assert (found.status, found.gbs, found.share) == ("ok", pytest.approx(2000), pytest.approx(0.5))
    assert gpu.bandwidth_gbs is not None
    soon = Timing(median_us=case.bytes / (2e3 * gpu.bandwidth_gbs), low_us=1.0, high_us=1.0)
    assert benchmark.timed(line, soon, case, gpu, 4000.0).status == "refused"


def test_a_wrong_contender_is_not_timed(benchmark: Any) -> None:
    (case,) = benchmark.cases(benchmark.parsed(["--smoke", "--batch", "1"]), "cpu", 1)
    right = benchmark.contenders(case)["SDPA"][1]
    assert benchmark.judged("right", "", right, case).status == "ok"
    assert benchmark.judged("wrong", "", lambda: right() * 1.1, case).status == "wrong"


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_it_says_so_and_writes_nothing(tmp_path: Path) -> None:
    done = run("--out", tmp_path / "decode.json")
    assert (done.returncode, done.stderr.count("\n")) == (3, 1)
    assert "needs a GPU" in done.stderr
    assert list(tmp_path.iterdir()) == []
