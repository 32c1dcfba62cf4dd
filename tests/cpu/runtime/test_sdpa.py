"""The drop-in on CPU tensors is torch's own function, to the bit; it says so once."""

from __future__ import annotations

import logging

import pytest
import torch
from torch.nn import functional

from flashgen.errors import InvalidArgument
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


def test_an_invariant_call_is_not_left_to_torch() -> None:
    q, k, v = (torch.randn(2, 3, 9, 16) for _ in range(3))
    want = functional.scaled_dot_product_attention(q, k, v)
    found = sdpa.scaled_dot_product_attention(q, k, v, invariant=True)
    torch.testing.assert_close(found, want)
    assert torch.equal(
        found[:, :, 4:5], sdpa.scaled_dot_product_attention(q[:, :, 4:5], k, v, invariant=True)
    )
    x = torch.randn(2, 3, 9, 20)
    with pytest.raises(
        InvalidArgument, match="invariant must be False for what torch serves: got head dim 20"
    ):
        sdpa.scaled_dot_product_attention(x, x, x, invariant=True)
    with pytest.raises(InvalidArgument, match="invariant must be True or False: got 1"):
        sdpa.scaled_dot_product_attention(q, k, v, invariant=1)  # type: ignore[arg-type]
