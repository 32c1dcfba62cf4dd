"""The drop-in on CPU tensors is torch's own function, to the bit; it says so once."""

from __future__ import annotations

import logging
import random

import pytest
import torch
from torch import Tensor
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


def drawn(case: random.Random) -> tuple[list[Tensor], Tensor | None, bool]:
    """Query, key, value, mask and enable_gqa, in whose shapes any size may be another than it should."""

    def near(*sizes: int) -> list[int]:
        return [n if case.random() < 0.85 else case.choice((1, 2, 3, 4, 24)) for n in sizes]

    lead = [case.choice((1, 2, 2, 4)) for _ in range(case.choice((0, 1, 2, 2, 2, 3)))]
    sq, sk, dim = case.choice((3, 7)), case.choice((5, 9)), case.choice((16, 20))
    shapes = near(*lead, sq, dim), near(*lead, sk, dim), near(*lead, sk, dim)
    mask = None
    if case.random() < 0.4:
        mask = torch.zeros(near(*lead, sq, sk)[case.randrange(len(lead) + 1) :])
    return [torch.randn(shape) for shape in shapes], mask, case.random() < 0.3


def contradict(tensors: list[Tensor], mask: Tensor | None, enable_gqa: bool) -> bool:
    """Whether products and sums of tensors of these shapes fail."""
    q, k, v = tensors
    try:
        if enable_gqa:
            if q.shape[-3] % k.shape[-3] or q.shape[-3] % v.shape[-3]:
                return True
            k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
        scores = q @ k.transpose(-1, -2)
        _ = (scores if mask is None else scores.add_(mask)) @ v
    except (RuntimeError, IndexError):
        return True
    return False


def test_contradicting_shapes_never_reach_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch reads past keys or values of other lengths, and refuses most of the rest."""
    served: list[bool] = []
    monkeypatch.setattr(sdpa, "of_torch", lambda *_, **__: served.append(True))
    refused = 0
    for seed in range(3000):
        tensors, mask, gqa = drawn(random.Random(seed))
        wrong = contradict(tensors, mask, gqa)
        served.clear()
        try:
            sdpa.scaled_dot_product_attention(*tensors, mask, enable_gqa=gqa)
        except InvalidArgument:
            assert wrong, (seed, [x.shape for x in tensors], mask is not None, gqa)
            refused += 1
            continue
        assert served == [True]
        if wrong:  # what is left to torch, it refuses
            with pytest.raises((RuntimeError, IndexError)):
                functional.scaled_dot_product_attention(*tensors, mask, enable_gqa=gqa)
    assert refused > 1000


@pytest.mark.parametrize("length", [0, 4, 6, 4000])
@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (2, 2, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_values_of_another_length_are_refused(
    length: int, lead: tuple[int, ...], dtype: torch.dtype
) -> None:
    q = torch.zeros(*lead, 5, 16, dtype=dtype)
    with pytest.raises(
        InvalidArgument, match=f"value must have the length of key, 5: got {length}"
    ):
        sdpa.scaled_dot_product_attention(q, q, torch.zeros(*lead, length, 16, dtype=dtype))
