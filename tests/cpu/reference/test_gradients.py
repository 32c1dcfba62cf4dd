"""The gradients by formula are those of autograd; the oracle accepts the floor, and nothing wrong."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from flashgen.inputs.features import Features
from flashgen.reference import cases as reference_cases
from flashgen.reference import gradients
from flashgen.reference.cases import CheckCase
from flashgen.reference.gradients import (
    OUTPUTS,
    GradientInputs,
    exact_gradients,
    forward,
    judge,
    judge_delta,
    rounded_gradients,
)
from flashgen.runtime.eager import attention as eager
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.problem import Problem
from tests.makers import make_spec

FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias": {"bias": "additive"},
    "boolean": {"bias": "boolean"},
    "alibi": {"alibi": True},
    "dropout": {"dropout": True},
    "all": {"bias": "additive", "alibi": True, "dropout": True},
    "window": {"window": True},
    "softcap": {"softcap": True},
    "sink": {"sink": True},
    "every one": {
        "bias": "additive", "alibi": True, "dropout": True,
        "window": True, "softcap": True, "sink": True,
    },
}  # fmt: skip


def inputs_of(
    dtype: str = "float32",
    mask: str = "causal",
    seed: int = 0,
    sq: int = 9,
    sk: int = 7,
    **features: Any,
) -> GradientInputs:
    spec = make_spec(dtype, 16, mask, head_dim_v=24, **features)
    problem = Problem(batch=2, heads=4, kv_heads=2, seq_q=sq, seq_k=sk)
    return gradients.make_inputs(spec, CheckCase(problem=problem), seed, "cpu")


@pytest.mark.parametrize("seed", range(len(reference_cases.BIAS_SHAPES)))
@pytest.mark.parametrize("feature", ["plain", "all", "window", "softcap", "sink", "every one"])
def test_the_formulas_are_autograds(feature: str, seed: int) -> None:
    """Bottom-right with Sq > Sk: rows that see nothing, whose LSE has no gradient, among them."""
    found = inputs_of(seed=seed, **FEATURES[feature])
    assert_is_autograd(found)


@pytest.mark.parametrize("mask", ["none", "causal"])
@pytest.mark.parametrize("feature", FEATURES)
def test_every_feature_is_autograds(feature: str, mask: str) -> None:
    assert_is_autograd(inputs_of(mask=mask, sq=6, sk=11, **FEATURES[feature]))


def assert_is_autograd(inputs: GradientInputs) -> None:
    x = inputs.double()
    leaves = [t.requires_grad_() for t in (x.q, x.k, x.v)]
    features = x.features
    if features.bias is not None and features.bias.dtype is not torch.bool:
        leaves.append(features.bias.double().requires_grad_())
        features = dataclasses.replace(features, bias=leaves[-1])
    if features.sinks is not None:
        leaves.append(features.sinks.double().requires_grad_())
        features = dataclasses.replace(features, sinks=leaves[-1])
    o, lse = eager.attention(*leaves[:3], scale=x.scale, diagonal=x.diagonal, features=features)
    seen = lse > float("-inf")
    loss = (o * x.do).sum() + (lse[seen] * x.dlse[seen]).sum()
    expected = torch.autograd.grad(loss, leaves)
    exact = exact_gradients(inputs)
    assert len(exact) == len(expected)
    for name, gradient in zip(exact, expected, strict=True):
        torch.testing.assert_close(exact[name], gradient.nan_to_num(), rtol=1e-9, atol=1e-9)


def small(spec: AttentionSpec, seq_q: int, seq_k: int) -> GradientInputs:
    """In float64; gradcheck's time grows with the square of the elements."""
    problem = Problem(batch=1, heads=2, kv_heads=1, seq_q=seq_q, seq_k=seq_k)
    return gradients.make_inputs(spec, CheckCase(problem=problem), 0, "cpu").double()


def test_gradcheck_with_features() -> None:
    spec = make_spec("float32", 16, "causal", bias="additive", alibi=True, dropout=True)
    inputs = small(spec, seq_q=4, seq_k=6)
    bias = inputs.features.bias
    assert bias is not None

    def attention(*x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        features = dataclasses.replace(inputs.features, bias=x[3])
        return eager.attention(*x[:3], scale=0.3, diagonal=inputs.diagonal, features=features)

    leaves = [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v, bias.double())]
    assert torch.autograd.gradcheck(attention, leaves, atol=1e-6)


@pytest.mark.parametrize("window", [(2, 1), (0, 0), (-1, 0), (1, -1)])
def test_gradcheck_with_a_window_a_cap_and_sinks(window: tuple[int, int]) -> None:
    """Of rows that see nothing too: Sq > Sk, and the window bottom-right."""
    inputs = small(make_spec("float32", 16, "none", softcap=True, sink=True), seq_q=6, seq_k=4)
    sinks = inputs.features.sinks
    assert sinks is not None

    def attention(*x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        features = Features(window=window, softcap=1.5, sinks=x[3])
        return eager.attention(*x[:3], scale=0.3, diagonal=None, features=features)

    leaves = [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v, sinks.double())]
    assert torch.autograd.gradcheck(attention, leaves, atol=1e-6)


def ideal(inputs: GradientInputs) -> dict[str, torch.Tensor]:
    _, lse, delta = forward(inputs)
    return rounded_gradients(inputs, lse, delta)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("feature", FEATURES)
def test_the_floor_itself_passes(feature: str, dtype: str) -> None:
    inputs = inputs_of(dtype, **FEATURES[feature])
    found = ideal(inputs)
    for direction, names in OUTPUTS.items():
        if all(name in found for name in names):
            verdict = judge(direction, tuple(found[name] for name in names), inputs)  # type: ignore[arg-type]
            assert verdict.floors <= 1.0


WRONG = {
    "no D": lambda x, lse, delta: (x, lse, 0 * delta),
    "no dLSE": lambda x, lse, delta: (x, lse, delta + x.dlse),
    "dO of another row": lambda x, lse, delta: (dataclasses.replace(x, do=x.do.roll(1, 2)), lse, delta),
    "LSE off by 2^-6": lambda x, lse, delta: (x, lse + 2.0**-6, delta),
    "scale": lambda x, lse, delta: (dataclasses.replace(x, scale=1.01 * x.scale), lse, delta),
    "no mask": lambda x, lse, delta: (dataclasses.replace(x, diagonal=None), lse, delta),
    "another offset": lambda x, lse, delta: (dataclasses.replace(x, features=shifted(x.features)), lse, delta),
}  # fmt: skip


def shifted(features: Features) -> Features:
    assert features.rng is not None
    return dataclasses.replace(features, rng=features.rng + 1)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_never_passes(what: str, dtype: str) -> None:
    inputs = inputs_of(dtype, sq=40, sk=50, dropout=True)
    _, lse, delta = forward(inputs)
    found = rounded_gradients(*WRONG[what](inputs, lse, delta))
    assert not judge("backward_dq", (found["dq"],), inputs).passed


def test_a_nan_never_passes() -> None:
    inputs = inputs_of("bfloat16")
    found = ideal(inputs)
    found["dv"][0, 1, 2, 3] = float("nan")
    assert not judge("backward_dkv", (found["dk"], found["dv"]), inputs).passed


def test_a_wrong_delta_never_passes() -> None:
    inputs = inputs_of("bfloat16", sq=40)
    o, _, delta = forward(inputs)
    assert judge_delta(delta, o, inputs.do, inputs.dlse).passed
    assert not judge_delta(1.01 * delta, o, inputs.do, inputs.dlse).passed


def test_tf32_is_no_licence_for_ieee() -> None:
    inputs = inputs_of(sq=40, sk=50)
    rough = ideal(dataclasses.replace(inputs, precision="tf32"))
    found = (rough["dk"], rough["dv"])
    assert judge("backward_dkv", found, dataclasses.replace(inputs, precision="tf32")).passed
    assert not judge("backward_dkv", found, inputs).passed


def test_inputs_are_replayable() -> None:
    first, again = (inputs_of(seed=5, bias="additive", dropout=True) for _ in range(2))
    for name in ("q", "k", "v", "do", "dlse"):
        assert torch.equal(getattr(first, name), getattr(again, name))
    assert first.features.bias is not None
    assert again.features.bias is not None
    assert torch.equal(first.features.bias, again.features.bias)
    assert first.do.shape == (2, 4, 9, 24)
    assert not first.do.is_contiguous()
