"""invariant=True on CPU tensors, which torch serves; tests/interpreted has the kernels."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from flashgen.errors import InvalidArgument
from flashgen.runtime.api import attention, decode
from tests.invariance import (
    WAYS,
    backward,
    by_drop_ins,
    case_of,
    differing,
    drawn_of,
    quick_seeds,
)


@pytest.mark.parametrize("way", [way for way in dict.fromkeys(WAYS) if way is not backward])
def test_the_same_bits(way: object) -> None:
    for seed in range(6):
        case = case_of(seed, wide=seed > 3)
        assert differing(way(case)) == 0, f"seed {seed}"  # type: ignore[operator]


def test_what_a_seed_chooses_is_independent() -> None:
    """Of 1,104 seeds every combination has its share, so no form is left out by a remainder."""
    drawn = Counter(drawn_of(seed) for seed in range(1104))
    ways = Counter(WAYS)
    assert len(drawn) == len(ways) * 2 * 2 * 2
    for each, count in drawn.items():
        share = ways[each.way] / len(WAYS) * (0.4 if each.wide else 0.6) / 4
        assert 0.4 < count / (1104 * share) < 1.9
    assert len(quick_seeds()) <= 24


def test_drop_ins_give_the_same_bits() -> None:
    assert differing(by_drop_ins()) == 0


def test_plain_attention_differs() -> None:
    q, k, v = torch.randn(3, 1, 2, 200, 64, generator=torch.Generator().manual_seed(0))
    o, step = attention(q, k, v, causal=True), decode(q[:, :, -1:], k, v)
    assert differing([(o[:, :, -1:], step)]) > 0
    o = attention(q, k, v, causal=True, invariant=True)
    assert torch.allclose(o[:, :, -1:], step, atol=1e-5)


def test_no_gradients_of_cpu_tensors() -> None:
    q = torch.zeros(1, 1, 1, 16, requires_grad=True)
    with pytest.raises(InvalidArgument, match="invariant has gradients on GPUs"):
        attention(q, q, q, invariant=True)


@pytest.mark.parametrize(
    ("feature", "given"),
    [
        ("bias", {"bias": torch.zeros(1, 1)}),
        ("bias", {"bias": torch.ones(1, 1, dtype=torch.bool)}),
        ("dropout", {"dropout_p": 0.5}),
    ],
)
def test_what_it_does_not_go_with_is_named(feature: str, given: dict[str, object]) -> None:
    q = torch.zeros(1, 1, 1, 16)
    with pytest.raises(InvalidArgument, match=f"invariant excludes {feature}"):
        attention(q, q, q, invariant=True, **given)  # type: ignore[call-overload]


def test_caches_of_eight_bits_are_refused() -> None:
    q, cache, scale = torch.zeros(1, 1, 1, 16).half(), torch.zeros(1, 1, 8, 16), torch.ones(1)
    narrow = cache.to(torch.int8)
    with pytest.raises(InvalidArgument, match="invariant excludes kv_dtype"):
        decode(q, narrow, narrow, k_scale=scale, v_scale=scale, invariant=True)
