"""Threads that call attention() at once, in Triton's interpreter."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from tests.serving import serve


def test_threads_do_not_disturb_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with its own lengths, and for half of them with gradients."""
    dispatcher = serve(monkeypatch)
    count = 8
    together = threading.Barrier(count)

    def run(number: int, wait: bool = True) -> list[Tensor]:
        generator = torch.Generator().manual_seed(number)
        x = [torch.randn(1, 2, 20 + number, 16, generator=generator) for _ in range(3)]
        x = [each.requires_grad_(number % 2 == 0) for each in x]
        if wait:
            together.wait()
        o = dispatcher.attention(*x, causal=True)
        return [o, *(torch.autograd.grad(o.sum(), x) if number % 2 == 0 else ())]

    with ThreadPoolExecutor(count) as pool:
        found = list(pool.map(run, range(count)))
    for number, results in enumerate(found):
        for x, want in zip(results, run(number, wait=False), strict=True):
            assert torch.equal(x, want)
