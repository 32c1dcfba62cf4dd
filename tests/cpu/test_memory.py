"""benchmarks/memory.py where there is no GPU: it says so, and what it would print is well formed."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "memory.py"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stdout) == (3, "")
    assert "needs a GPU" in done.stderr


def test_its_contenders_compute_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("memory_benchmark", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    memory = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "memory_benchmark", memory)
    spec.loader.exec_module(memory)
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 16, 16) for _ in range(3))
    first, *others = (contender(q, k, v) for contender in memory.CONTENDERS.values())
    for other in others:
        torch.testing.assert_close(other, first, rtol=1e-5, atol=1e-5)
    assert "out of memory" in memory.Peak(contender="standard", seq=1024, peak_bytes=None).row()
    row = memory.Peak(contender="flashgen", seq=1024, peak_bytes=3 << 20).row()
    assert row.split() == "flashgen 1024 3.0 MiB 3072 bytes a token".split()
