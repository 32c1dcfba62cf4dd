"""Every feature alone and every pair of what may go together, against float64."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest

from flashgen.evaluate.check import cases_of, check_kernel
from flashgen.kernels.render import render
from flashgen.schedules.config import KernelConfig
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.vocabulary import DECODING
from tests.pairs import Proven, alone, in_pairs

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def narrow(case: Any) -> Any:
    """The case with two query heads for each head of keys, where it has three: a third cheaper."""
    if case.problem.heads != 3 * case.problem.kv_heads:
        return case
    return replace(case, problem=replace(case.problem, heads=2 * case.problem.kv_heads))


def prove(proven: Proven, seed: int, step: int) -> None:
    spec, config = proven
    cases = cases_of(spec, config)[::step]
    if spec.direction not in DECODING and not spec.varlen:
        cases = tuple(map(narrow, cases))
    result = check_kernel(render(spec, config), spec, config, seed=seed, cases=cases)
    assert result.passed, f"{spec.name}_{config.label}: {result}"


def name_of(value: object) -> str:
    return value.name if isinstance(value, AttentionSpec) else str(getattr(value, "loads", value))


def but_for_mask(spec: AttentionSpec) -> str:
    fields = asdict(spec)
    return str([fields[name] for name in fields if name not in ("mask", "dtype", "precision")])


MASKED = {but_for_mask(spec) for spec, _ in alone() if spec.causal}
QUICK = [spec.causal or but_for_mask(spec) not in MASKED for spec, _ in alone()]
SLOW = pytest.mark.slow("the same with a causal mask is in make test")


@pytest.mark.parametrize(
    ("spec", "config"),
    [
        pytest.param(*proven, marks=() if quick else SLOW)
        for proven, quick in zip(alone(), QUICK, strict=True)
    ],
    ids=name_of,
)
def test_alone(spec: AttentionSpec, config: KernelConfig, seed: int) -> None:
    prove((spec, config), seed, step=6)


OTHERS = pytest.mark.slow("make test has every fourth row of the covering arrays")


@pytest.mark.parametrize(
    ("spec", "config"),
    [
        pytest.param(*proven, marks=OTHERS if place % 4 else ())
        for place, proven in enumerate(in_pairs())
    ],
    ids=name_of,
)
def test_in_pairs(spec: AttentionSpec, config: KernelConfig, seed: int) -> None:
    prove((spec, config), seed, step=4)


@pytest.mark.parametrize(("seed", "feature"), [(1050054279, "leftpad"), (394914801, "boolmask")])
def test_exponents_of_a_hundred_and_more_lose_bits(seed: int, feature: str) -> None:
    """Draws in which the few rows of a decode were off by more than two of the floors of before."""
    proven = [x for x in alone() if x[0].name == f"decode_fp32_d32_causal_{feature}"]
    assert proven
    for each in proven:
        prove(each, seed, step=4)


def test_a_row_of_fp8_met_another_maximum() -> None:
    """A draw in which P rounded by a tile's maximum was off by 2.1 of the floors of before."""
    (proven,) = [x for x in alone() if x[0].name == "fwd_fp16_d32_causal_fp8"]
    prove(proven, 831123634, step=4)
