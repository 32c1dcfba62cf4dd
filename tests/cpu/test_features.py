"""Features: what a call may bring, and what it is told otherwise."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from flashgen.errors import InvalidArgument
from flashgen.features import PLAIN, Features
from flashgen.spec import AttentionSpec, from_tensors
from tests.makers import make_spec


def spec_of(**features: Any) -> AttentionSpec:
    q, k = torch.zeros(2, 4, 5, 32), torch.zeros(2, 2, 7, 32)
    return from_tensors(q, k, k, causal=True, features=Features(**features))[0]


RNG = torch.tensor([1, 2])


def test_the_spec_names_what_the_call_brings() -> None:
    assert spec_of() == make_spec("float32", 32, "causal")
    assert spec_of(bias=torch.zeros(1, 4, 1, 7)).bias == "additive"
    assert spec_of(bias=torch.ones(2, 1, 5, 7, dtype=torch.bool)).bias == "boolean"
    assert spec_of(slopes=torch.ones(4)).alibi
    assert spec_of(slopes=torch.ones(2, 4)).alibi
    assert spec_of(dropout_p=0.1, rng=RNG).dropout
    assert not spec_of(dropout_p=0.0, rng=RNG).dropout


@pytest.mark.parametrize(
    ("features", "named"),
    [
        ({"dropout_p": 1.5, "rng": RNG}, "dropout_p"),
        ({"dropout_p": 0.5}, "rng"),
        ({"dropout_p": 0.5, "rng": torch.tensor([1])}, "rng"),
        ({"dropout_p": 0.5, "rng": torch.tensor([1.0, 2.0])}, "rng"),
        ({"bias": torch.zeros(1, 4, 5, 6)}, "bias"),
        ({"bias": torch.zeros(5, 7)}, "bias"),
        ({"bias": torch.zeros(1, 1, 5, 7, dtype=torch.float64)}, "bias"),
        ({"slopes": torch.ones(3)}, "slopes"),
        ({"slopes": torch.ones(4, dtype=torch.float16)}, "slopes"),
        ({"slopes": torch.ones(4, device="meta")}, "slopes"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_named(features: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidArgument, match=named):
        spec_of(**features)


def test_threshold_is_the_probability() -> None:
    for p in (0.0, 0.25, 0.5, 1.0):
        threshold = Features(dropout_p=p, rng=RNG).dropout_threshold
        assert -(2**31) <= threshold < 2**31
        assert abs((threshold + 2**31) / 2**32 - p) < 2**-31


def test_plain_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        PLAIN.dropout_p = 0.5  # type: ignore[misc]
