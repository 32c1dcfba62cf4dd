"""benchmarks/backward.py walks all its paths without a GPU, and then claims to have measured nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

BACKWARD = Path(__file__).resolve().parents[2] / "benchmarks" / "backward.py"


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, BACKWARD, *arguments], capture_output=True, text=True, timeout=200
    )


def test_smoke_run_judges_everybody_and_times_nobody(tmp_path: Path) -> None:
    file = tmp_path / "new" / "backward.json"
    done = run("--smoke", "--seq", "33", "--out", file)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "nothing is measured" in done.stdout.splitlines()[0]
    record = json.loads(file.read_text())
    assert (record["benchmark"], record["measured"], record["gpu"]) == ("backward", False, None)
    assert record["command"].startswith("benchmarks/backward.py --smoke")
    assert [case["spec"]["mask"] for case in record["cases"]] == ["none", "causal"]
    for case in record["cases"]:
        assert [line["name"] for line in case["lines"]] == [
            "flashgen", "flashgen default", "SDPA math",
        ]  # fmt: skip
        assert all(line["status"] == "ok" and 0 < line["floors"] <= 2 for line in case["lines"])
        assert all(line["timing"] is None and line["tflops"] is None for line in case["lines"])


def test_a_wrong_gradient_is_no_contender(monkeypatch: pytest.MonkeyPatch) -> None:
    """One gradient of three off: it is judged wrong, and never timed."""
    monkeypatch.syspath_prepend(str(BACKWARD.parent))
    import backward
    import forward

    class Halved(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
            return grad / 2

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        halved: torch.Tensor = Halved.apply(v)  # type: ignore[no-untyped-call]
        return torch.nn.functional.scaled_dot_product_attention(q, k, halved)

    wrong = forward.Contender(name="wrong", attention=attention)
    monkeypatch.setattr(forward, "contenders", lambda case, smoke: [wrong])
    options = forward.parsed(["--smoke", "--seq", "33"], "backward", "")
    case = next(forward.cases(options, "cpu"))
    (line,) = backward.run_case(case, None, forward.SmokeStopwatch(), smoke=True)
    assert (line.status, line.timing) == ("wrong", None)
    assert line.floors is not None
    assert line.floors > 10


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_it_says_so_and_writes_nothing(tmp_path: Path) -> None:
    done = run("--out", tmp_path / "backward.json")
    assert (done.returncode, done.stderr.count("\n")) == (3, 1)
    assert "backward.py needs a GPU" in done.stderr
    assert list(tmp_path.iterdir()) == []
