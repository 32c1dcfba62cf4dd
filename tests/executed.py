"""Kernels in Gluon as Triton compiles them, executed on the CPU: whole, or with a text broken."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from flashgen.evaluate.check import check_loaded
from flashgen.evaluate.executed import ExecutedKernel
from flashgen.inputs.features import PLAIN, Features
from flashgen.kernels.launch import bind, launch
from flashgen.kernels.launch_backward import Backward
from flashgen.kernels.render import render
from flashgen.ptx import FaultsFound
from flashgen.ptx.findings import CHECKS, Sanitizer
from flashgen.ptx.schedule import RunningBlock
from flashgen.ptx.tensor_map import TensorMap
from flashgen.reference.cases import CheckCase
from flashgen.runtime.eager import attention as eager
from flashgen.schedules.config import KernelConfig
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.problem import Problem
from tests.mutants import broken

Load = tuple[int, tuple[int, ...], tuple[int, ...]]
"""A copy by the TMA unit: the address of its tensor, its box, its coordinates."""

ARCHES = {"ampere": "sm_80", "blackwell": "sm_100"}
"""What the kernels of a schedule are compiled for; those of others for sm_90."""


def compiled(
    spec: AttentionSpec,
    config: KernelConfig,
    seed: int = 0,
    old: str = "",
    new: str = "",
    checks: Collection[Sanitizer] = CHECKS,
    arch: str = "",
) -> ExecutedKernel:
    """The kernel of `arch`, or of its schedule's own, with `new` for each `old` of its text."""
    rendered = render(spec, config)
    if old:
        rendered = replace(rendered, source=broken(rendered.source, old, new))
    arch = arch or ARCHES.get(config.schedule, "sm_90")
    return ExecutedKernel(rendered, spec, config, arch, seed=seed, checks=checks)


def case(
    sq: int, sk: int, alignment: str = "bottom_right", heads: int = 1, kv: int = 1, **options: Any
) -> CheckCase:
    problem = Problem(batch=options.pop("batch", 1), heads=heads, kv_heads=kv, seq_q=sq, seq_k=sk)
    return CheckCase(problem=problem, alignment=alignment, **options)


def assert_right(
    spec: AttentionSpec, config: KernelConfig, cases: Sequence[CheckCase] | None = None
) -> None:
    result = check_loaded(compiled(spec, config), spec, config, cases=cases)
    assert result.passed, result


def assert_bits_of(
    textbook: KernelConfig,
    spec: AttentionSpec,
    config: KernelConfig,
    broken: tuple[str, str] = ("", ""),
    features: Features = PLAIN,
) -> None:
    """Of an invariant forward with three segments, the last of one ragged tile: O and LSE of config,
    its text `broken`, are those of `textbook` to the last bit.
    """
    arch = ARCHES.get(config.schedule, "sm_90")
    generator = torch.Generator().manual_seed(spec.head_dim)
    dims = ((70, spec.head_dim), (2100, spec.head_dim), (2100, spec.head_dim_v))
    q, k, v = (torch.randn(1, 1, *each, generator=generator).bfloat16() for each in dims)
    (o, lse), (expected, its_lse) = (
        launch(
            compiled(spec, way, 0, *text, arch=arch),
            spec,
            way,
            q,
            k,
            v,
            scale=0.125,
            diagonal=2030,
            features=features,
        )
        for way, text in ((config, broken), (textbook, ("", "")))
    )
    assert torch.equal(o, expected)
    assert torch.equal(lse, its_lse)


def assert_found(
    spec: AttentionSpec,
    config: KernelConfig,
    broken: tuple[str, str],
    cases: Sequence[CheckCase] | None = None,
) -> None:
    """That a broken text is found, by a check of the executor or by its results."""
    kernel = compiled(spec, config, 0, *broken)
    for seed in range(3):  # what no check finds, not every order shows
        try:
            if not check_loaded(kernel, spec, config, cases=cases, seed=seed).passed:
                return
        except FaultsFound:
            return
    pytest.fail("nobody noticed")


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[Load]]:
    """What the TMA unit copies, by block, in the order of issue; filled by launches."""
    seen: dict[int, list[Load]] = {}
    current: list[int] = []
    go, places = RunningBlock.go, TensorMap.places

    def run(self: RunningBlock) -> bool:
        current[:] = self.block.index[:1]
        seen[current[0]] = []
        return go(self)

    def record(self: TensorMap, coordinates: tuple[int, ...]) -> Any:
        seen[current[0]].append((self.address, self.box, coordinates))
        return places(self, coordinates)

    monkeypatch.setattr(RunningBlock, "go", run)
    monkeypatch.setattr(TensorMap, "places", record)
    return seen


def far_below_zero(
    kernel: ExecutedKernel, spec: AttentionSpec, config: KernelConfig
) -> tuple[torch.Tensor, ...]:
    """The result of call_far_below_zero()."""
    return bind(kernel, spec, config)(call_far_below_zero(spec))


def call_far_below_zero(spec: AttentionSpec) -> Backward:
    """Keys past the end have score 0, far above those that a row sees: P of them is infinite."""
    x = torch.full((1, 1, 70, spec.head_dim), 8.0, dtype=torch.bfloat16)
    q, k, v, do = x, -x, torch.randn_like(x), torch.randn_like(x)
    o, lse = eager.attention(q.double(), k.double(), v.double(), scale=0.125, diagonal=0)
    assert bool((lse < -500).all())
    return Backward(
        q=q, k=k, v=v, do=do, lse=lse.float(), delta=(o * do).sum(-1).float(), scale=0.125,
        diagonal=0 if spec.causal else None,
    )  # fmt: skip
