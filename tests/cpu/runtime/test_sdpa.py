"""The drop-in on CPU tensors is torch's own function, to the bit; it says so once."""

from __future__ import annotations

import logging

import pytest
import torch
from torch.nn import functional

from flashgen.runtime import sdpa


def test_cpu_tensors_are_left_to_torch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sdpa, "_said", set())
    caplog.set_level(logging.INFO, "flashgen.runtime")
    q, k, v = (torch.randn(2, 3, 9, 20) for _ in range(3))
    mask = torch.rand(9, 9) > 0.3
    for _ in range(2):
        torch.manual_seed(1)
        found = sdpa.scaled_dot_product_attention(q, k, v, mask, 0.25, scale=0.5)
        torch.manual_seed(1)
        want = functional.scaled_dot_product_attention(q, k, v, mask, 0.25, scale=0.5)
        assert torch.equal(found, want)
    assert [record.getMessage() for record in caplog.records] == [
        "torch's own scaled_dot_product_attention serves CPU tensors"
    ]


def test_it_may_take_the_place_of_torchs_function(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (torch.randn(2, 3, 9, 20) for _ in range(3))
    want = functional.scaled_dot_product_attention(q, k, v)
    monkeypatch.setattr(
        functional, "scaled_dot_product_attention", sdpa.scaled_dot_product_attention
    )
    assert torch.equal(functional.scaled_dot_product_attention(q, k, v), want)
