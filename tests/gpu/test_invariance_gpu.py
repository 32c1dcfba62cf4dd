"""invariant=True on a GPU: a row has the same bits in a batch, packed, in chunks over pages and as decode."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from flashgen.runtime.api import attention, decode
from flashgen.runtime.varlen import attention_varlen
from tests import invariance
from tests.invariance import Case, Pairs, differing

LONGER = 20
"""Sequences of up to 3,200 keys, which are four segments."""

FEATURES: dict[str, dict[str, Any]] = {"plain": {}, "window": {"window": (700, 0)}}


@pytest.fixture(autouse=True)
def on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of the cases compute on the GPU what lies on the CPU."""

    def moved(call: Callable[..., Any]) -> Callable[..., Any]:
        def on_gpu(*args: Any, **kwargs: Any) -> Any:
            args = tuple(_on("cuda", each) for each in args)
            found = call(*args, **{name: _on("cuda", each) for name, each in kwargs.items()})
            return tuple(_on("cpu", each) for each in found)

        return on_gpu

    for call in (attention, decode, attention_varlen):
        monkeypatch.setattr(invariance, call.__name__, moved(call))


def _on(device: str, given: Any) -> Any:
    return given.to(device) if isinstance(given, torch.Tensor) else given


def case_of(dtype: torch.dtype, head_dim: int, features: str, seed: int) -> Case:
    return Case(
        seed=seed, random=random.Random(seed), generator=torch.Generator().manual_seed(seed),
        dtype=dtype, heads=8, kv_heads=2, dims=(head_dim, head_dim), longer=LONGER,
        features=dict(FEATURES[features]),
    )  # fmt: skip


@pytest.mark.parametrize("way", dict.fromkeys(invariance.WAYS), ids=lambda way: way.__name__)
@pytest.mark.parametrize(
    ("dtype", "head_dim", "features"),
    [
        (torch.bfloat16, 128, "plain"),
        (torch.bfloat16, 64, "plain"),
        (torch.bfloat16, 256, "plain"),
        (torch.float16, 128, "window"),
        (torch.float32, 64, "plain"),
    ],
    ids=str,
)
def test_the_same_bits(
    way: Callable[[Case], Pairs], dtype: torch.dtype, head_dim: int, features: str
) -> None:
    for seed in range(4):
        pairs = way(case_of(dtype, head_dim, features, seed))
        assert differing(pairs) == 0, f"seed {seed}"


def test_plain_kernels_differ() -> None:
    """So the cases above can fail."""
    case = case_of(torch.bfloat16, 128, "plain", 0)
    own = case.rows(3000)
    q, k, v = (x.cuda() for x in invariance.batched(*own))
    o, step = attention(q, k, v, causal=True), decode(q[:, :, -1:], k, v)
    assert differing([(o[:, :, -1:], step)]) > 0
