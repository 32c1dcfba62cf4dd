"""Kernels that only a GPU can prove: schedules hopper and auto, and what walks tiles in an order.

Each is checked in a child process that a kernel may hang or kill, which costs its outcome alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest

from flashgen.evaluate.on_gpu import GpuEvaluator
from flashgen.schedules.config import KernelConfig
from flashgen.schedules.outcome import Status
from flashgen.schedules.space import legal_configs
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.gpu import Gpu
from flashgen.spec.problem import workload
from flashgen.spec.vocabulary import Direction
from tests.makers import make_spec

REFUSED = (Status.SPILLS, Status.OUT_OF_RESOURCES, Status.SERIALIZED, Status.NO_OVERLAP)
"""What the search refuses by what it compiled to."""

DIMS = {
    "forward": (64, 96, 128, 192, 256),
    "backward_dkv": (64, 96, 128),
    "backward_dq": (64, 96, 128, 256),
    "backward_fused": (64,),
}


@pytest.fixture(scope="module")
def evaluator(gpu: Gpu, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GpuEvaluator]:
    with GpuEvaluator(gpu, 0, tmp_path_factory.mktemp("cache")) as evaluator:
        yield evaluator


def prove(evaluator: GpuEvaluator, spec: AttentionSpec, configs: list[KernelConfig]) -> None:
    """All right or refused, and at least one right. Skips where this GPU has none."""
    if not configs:
        pytest.skip(f"{evaluator.gpu.slug} has no such config of {spec.name}")
    outcomes = list(evaluator.evaluate("check", spec, workload(spec, 1024), configs))
    faults = [
        f"{o.config.label}: {o.status.value}: {o.detail}"
        for o in outcomes
        if not o.ok and o.status not in REFUSED
    ]
    assert not faults, "\n".join(faults)
    assert any(o.ok for o in outcomes)


def of(gpu: Gpu, spec: AttentionSpec, **fields: object) -> list[KernelConfig]:
    """The configs of a search on this GPU with these values of fields."""
    found = legal_configs(spec, gpu, on_gpu=True)
    return [c for c in found if all(getattr(c, name) == value for name, value in fields.items())]


@pytest.mark.parametrize("mask", ["none", "causal"])
@pytest.mark.parametrize(
    ("direction", "head_dim"), [(way, dim) for way, dims in DIMS.items() for dim in dims]
)
def test_hopper(
    evaluator: GpuEvaluator, gpu: Gpu, direction: Direction, head_dim: int, mask: str
) -> None:
    spec = make_spec("bfloat16", head_dim, mask, direction=direction)
    prove(evaluator, spec, of(gpu, spec, schedule="hopper"))


@pytest.mark.parametrize("mask", ["none", "causal"])
@pytest.mark.parametrize("direction", ["forward", "backward_dkv", "backward_dq"])
def test_hopper_of_float16(
    evaluator: GpuEvaluator, gpu: Gpu, direction: Direction, mask: str
) -> None:
    spec = make_spec("float16", 128, mask, direction=direction)
    prove(evaluator, spec, of(gpu, spec, schedule="hopper"))


@pytest.mark.parametrize("mask", ["none", "causal"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_auto(evaluator: GpuEvaluator, gpu: Gpu, head_dim: int, mask: str) -> None:
    spec = make_spec("bfloat16", head_dim, mask)
    prove(evaluator, spec, of(gpu, spec, schedule="auto"))


@pytest.mark.parametrize("mask", ["none", "causal"])
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("order", ["plain", "longest_first", "head_reversal", "grouped"])
def test_orders(evaluator: GpuEvaluator, gpu: Gpu, order: str, persistent: bool, mask: str) -> None:
    """Of each schedule and way to load the first tile that it has in this order."""
    spec = make_spec("bfloat16", 128, mask)
    prove(evaluator, spec, of_each_way(of(gpu, spec, order=order, persistent=persistent)))


@pytest.mark.parametrize("varlen", [False, True])
@pytest.mark.parametrize("direction", ["backward_dkv", "backward_dq"])
def test_gradients_of_heads_in_turn(
    evaluator: GpuEvaluator, gpu: Gpu, direction: Direction, varlen: bool
) -> None:
    spec = make_spec("bfloat16", 128, "causal", direction=direction, varlen=varlen)
    prove(evaluator, spec, of_each_way(of(gpu, spec, order="grouped")))


def of_each_way(configs: Iterable[KernelConfig]) -> list[KernelConfig]:
    first: dict[tuple[str, str], KernelConfig] = {}
    for config in configs:
        first.setdefault((config.schedule, config.loads), config)
    return list(first.values())
