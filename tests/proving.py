"""A kernel held against float64 by the checks of every candidate, in Triton's interpreter."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from flashgen.evaluate.check import cases_of, check_kernel
from flashgen.kernels.render import render
from flashgen.schedules.config import KernelConfig
from flashgen.spec.attention import AttentionSpec
from tests.makers import each
from tests.mutants import broken


def prove(
    spec: AttentionSpec, config: KernelConfig, seed: int, cases: Any = None, step: int = 1
) -> None:
    """Assert that a kernel is right at each `step`-th of its cases, or at these."""
    cases = cases_of(spec, config)[::step] if cases is None else cases
    result = check_kernel(render(spec, config), spec, config, seed=seed, cases=cases)
    assert result.passed, f"{spec.name}_{config.label}: {result}"


def sampled(names: Iterable[str]) -> list[Any]:
    """The names of mutants, of which make test has every sixth one."""
    return each(names, 6, "make test has every sixth mutant")


def alternating(first: Iterable[Any], second: Iterable[Any]) -> list[Any]:
    """The pairs of two lists, of which make test has every third one, on diagonals."""
    slow, others = pytest.mark.slow("make test has every third pair of these"), list(second)
    return [
        pytest.param(one, other, marks=slow if (n + m) % 3 else ())
        for n, one in enumerate(first)
        for m, other in enumerate(others)
    ]


def mutant_passes(
    spec: AttentionSpec,
    config: KernelConfig,
    line: str,
    new: str,
    cases: Any = None,
    seed: int = 1,
) -> bool:
    """Whether a kernel with a line broken is still taken for right."""
    rendered = render(spec, config)
    mutant = replace(rendered, source=broken(rendered.source, line, new))
    if line == new:
        return _passes(spec, config, cases and tuple(cases), seed)
    return check_kernel(mutant, spec, config, seed=seed, cases=cases).passed


@functools.cache
def _passes(spec: AttentionSpec, config: KernelConfig, cases: Any, seed: int) -> bool:
    """Of a kernel as it is: once for all its mutants."""
    return check_kernel(render(spec, config), spec, config, seed=seed, cases=cases).passed
