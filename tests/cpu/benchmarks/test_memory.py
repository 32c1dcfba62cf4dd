"""Memory without a GPU: what autograd keeps is linear in the length, and benchmarks/memory.py, which measures the peak
on a GPU, says that there is none. (tests/interpreted has the peak of the kernels' own calls.)"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from flashgen import attention
from tests import programs

SCRIPT = Path(__file__).resolve().parents[3] / "benchmarks" / "memory.py"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    done = programs.run([SCRIPT])
    assert (done.returncode, done.stdout) == (3, "")
    assert "needs a GPU" in done.stderr


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """benchmarks/memory.py as a module."""
    spec = importlib.util.spec_from_file_location("memory_benchmark", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "memory_benchmark", module)
    spec.loader.exec_module(module)
    return module


def kept(call: Callable[[Tensor, Tensor, Tensor], object], seq: int, dim: int) -> int:
    """The bytes that autograd keeps for the backward of 16 heads in bfloat16; nothing is computed."""
    storages: dict[int, int] = {}
    alive: list[Tensor] = []

    def pack(x: Tensor) -> Tensor:
        alive.append(x)
        storages[id(x.untyped_storage())] = x.untyped_storage().nbytes()
        return x

    with FakeTensorMode(), torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        call(*(torch.empty(1, 16, seq, dim, dtype=torch.bfloat16).requires_grad_() for _ in "qkv"))
    return sum(storages.values())


@pytest.mark.parametrize("dim", [64, 128])
def test_what_is_kept_for_the_backward_is_linear_in_the_length(
    memory: ModuleType, dim: int
) -> None:
    """Q, K, V and O, and four bytes of LSE a row, at every length that the benchmark measures."""
    for options in ({}, {"causal": True}, {"dropout_p": 0.1}, {"return_lse": True}):
        for seq in memory.LENGTHS:
            found = kept(lambda q, k, v: attention(q, k, v, **options), seq, dim)  # noqa: B023
            rng = 16 if "dropout_p" in options else 0
            assert found == 16 * seq * (4 * 2 * dim + 4) + rng
    short, long = (kept(memory.standard, seq, dim) for seq in memory.LENGTHS[:2])
    assert long > 3 * short  # standard attention keeps P: the count sees what grows faster


def test_it_writes_the_peaks_and_goes_on_where_a_length_does_not_fit(
    memory: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On the CPU, with a made-up allocator: what is counted is the peak above what was there."""

    def too_long(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if q.shape[2] > 16:
            raise torch.OutOfMemoryError("of 1 GiB")
        return memory.standard(q, k, v)

    def on_cpu(*shape: Any, device: str, **options: Any) -> Tensor:
        assert device == "cuda"
        return randn(*shape, **options)

    randn = torch.randn
    monkeypatch.setattr(torch, "randn", on_cpu)
    for name in ("synchronize", "reset_peak_memory_stats", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 1000)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 5096)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "made up")
    monkeypatch.setattr(memory, "CONTENDERS", {"standard": too_long, "flashgen": memory.standard})
    file = tmp_path / "new" / "memory.json"
    options = "--dtype fp32 --head-dim 16 --heads 2 --seq 16 32 --out"
    monkeypatch.setattr(sys, "argv", ["memory.py", *options.split(), str(file)])
    assert memory.main() == 0
    record = json.loads(file.read_text())
    assert [peak["peak_bytes"] for peak in record["peaks"]] == [4096, None, 4096, 4096]
    assert (record["gpu"], record["head_dim"]) == ("made up", 16)


def test_a_smoke_run_walks_all_passes_and_has_no_figure(
    memory: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    ran: list[str] = []

    def noted(name: str, call: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def noting(*tensors: Tensor) -> Tensor:
            ran.append(name)
            return call(*tensors)

        return noting

    calls = {name: noted(name, call) for name, call in memory.CONTENDERS.items()}
    monkeypatch.setattr(memory, "CONTENDERS", calls)
    file = tmp_path / "memory.json"
    monkeypatch.setattr(sys, "argv", ["memory.py", "--smoke", "--out", str(file)])
    assert memory.main() == 0
    assert ran == [name for name in calls for _ in memory.SMOKE_LENGTHS]
    record = json.loads(file.read_text())
    assert record["gpu"] is None
    assert {peak["peak_bytes"] for peak in record["peaks"]} == {None}
    printed = capsys.readouterr().out
    assert printed.count("not counted") == len(ran)
    assert "out of memory" not in printed


def test_its_contenders_compute_the_same(memory: ModuleType) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 16, 16) for _ in range(3))
    first, *others = (contender(q, k, v) for contender in memory.CONTENDERS.values())
    for other in others:
        torch.testing.assert_close(other, first, rtol=1e-5, atol=1e-5)
    assert "out of memory" in memory.Peak(contender="standard", seq=1024, peak_bytes=None).row()
    row = memory.Peak(contender="flashgen", seq=1024, peak_bytes=3 << 20).row()
    assert row.split() == "flashgen 1024 3.0 MiB 3072 bytes a token".split()
