"""What a call costs in Python on a GPU, and that whole passes are captured by CUDA graphs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from generated.dispatcher import attention

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "dispatch_overhead.py"
ALLOWED = 1.2
TRIES = 3  # other processes of a busy machine slow a run down; none makes it faster than it is


def test_a_call_takes_at_most_a_fifth_longer_than_sdpa(tmp_path: Path) -> None:
    ratios = []
    file = tmp_path / "overhead.json"
    while len(ratios) < TRIES:
        done = subprocess.run(
            [sys.executable, BENCHMARK, "--json", file], capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
        record = json.loads(file.read_text())
        assert record["gpu"] is True
        least = {row["name"]: row["least_us"] for row in record["rows"]}
        assert least["direct launch"] < least["Triton launch"]
        ratios.append(least["call"] / least["torch SDPA"])
        if ratios[-1] <= ALLOWED:
            break
    assert min(ratios) <= ALLOWED, ratios


def tensors(seq: int, grad: bool) -> list[Tensor]:
    return [
        torch.randn((2, 4, seq, 64), device="cuda", dtype=torch.bfloat16).requires_grad_(grad)
        for _ in range(3)
    ]


def captured(work: Any) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A graph of work(), which has run on a stream of its own before, as torch asks."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = work()
    return graph, found


@pytest.mark.parametrize("causal", [False, True])
def test_a_forward_is_captured_and_replayed_on_other_values(causal: bool) -> None:
    q, k, v = tensors(333, grad=False)
    graph, o = captured(lambda: attention(q, k, v, causal=causal))
    for seed in (1, 2):
        torch.manual_seed(seed)
        for x in (q, k, v):
            x.copy_(torch.randn_like(x))
        graph.replay()
        torch.cuda.synchronize()
        torch.testing.assert_close(o, attention(q, k, v, causal=causal), rtol=0, atol=0)


@pytest.mark.parametrize("causal", [False, True])
def test_a_training_step_is_captured_and_replayed_on_other_values(causal: bool) -> None:
    leaves = tensors(257, grad=True)
    do = torch.randn((2, 4, 257, 64), device="cuda", dtype=torch.bfloat16)

    def step() -> tuple[Tensor, ...]:
        return torch.autograd.grad(attention(*leaves, causal=causal), leaves, do)

    graph, found = captured(step)
    for seed in (1, 2):
        torch.manual_seed(seed)
        with torch.no_grad():
            for x in (*leaves, do):
                x.copy_(torch.randn_like(x))
        graph.replay()
        torch.cuda.synchronize()
        for one, other in zip(found, step(), strict=True):
            torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)


def test_a_launch_is_the_same_on_a_second_device() -> None:
    """What is kept of a launch is a device's own."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two devices")
    q, k, v = tensors(64, grad=False)
    expected = attention(q, k, v)
    there = [x.to("cuda:1") for x in (q, k, v)]
    for _ in range(3):
        torch.testing.assert_close(attention(*there).cpu(), expected.cpu(), rtol=0, atol=0)
        torch.testing.assert_close(attention(q, k, v), expected, rtol=0, atol=0)
