"""Gradients of schedules hopper and blackwell in order grouped, as Triton compiles them."""

from __future__ import annotations

from typing import Any

import pytest

from flashgen.kernels import launch_backward
from flashgen.kernels.launch_forward import OrderLimits
from flashgen.reference.cases import CheckCase
from flashgen.schedules.config import KernelConfig
from flashgen.schedules.legality import why_illegal
from flashgen.spec.gpu import TARGETS
from flashgen.spec.problem import Problem
from flashgen.spec.vocabulary import Direction
from tests.executed import (
    Load,
    assert_found,
    assert_right,
    loads,  # noqa: F401  # a fixture
)
from tests.makers import each, make_config, make_spec

MANY = CheckCase(problem=Problem(batch=1, heads=6, kv_heads=3, seq_q=200, seq_k=200))
"""Two tiles of 128 of each head, the last ragged."""


def grouped(schedule: str, br: int, bc: int, stages: int = 2) -> KernelConfig:
    way: dict[str, Any] = {"schedule": schedule, "loads": "descriptor", "order": "grouped"}
    return make_config(br, bc, num_warps=8, num_stages=stages, **way)


Kernel = tuple[Direction, int, KernelConfig, dict[str, Any]]
KERNELS: list[Kernel] = [
    ("backward_dkv", 64, grouped("hopper", 64, 128), {}),
    ("backward_dq", 64, grouped("hopper", 128, 64), {}),
    ("backward_dkv", 64, grouped("blackwell", 128, 128), {}),
    ("backward_dq", 64, grouped("blackwell", 128, 128), {}),
    ("backward_dkv", 256, grouped("hopper", 64, 64), {}),
    ("backward_dkv", 256, grouped("blackwell", 64, 128), {}),  # two programs a tile
    ("backward_dkv", 128, grouped("hopper", 64, 128), {"varlen": True}),
    ("backward_dq", 128, grouped("hopper", 128, 64), {"varlen": True}),
    ("backward_dkv", 128, grouped("blackwell", 128, 128, 2), {"varlen": True}),
    ("backward_fused", 64, grouped("hopper", 64, 128), {}),
    ("backward_fused", 64, grouped("blackwell", 128, 128), {}),
    ("backward_dq", 128, grouped("blackwell", 128, 128), {"window": True}),
]
TARGET = {"hopper": "nvidia_h200", "blackwell": "nvidia_b200"}


@pytest.fixture(autouse=True)
def four_sms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of two of three heads of K, or of four of six of Q: the last are ragged."""
    few_sms(4, monkeypatch)


def few_sms(sms: int, monkeypatch: pytest.MonkeyPatch) -> None:
    few = OrderLimits(sms=sms, l2_bytes=1)
    monkeypatch.setattr(launch_backward, "order_limits", lambda device: few)


@pytest.mark.parametrize(("direction", "dim", "config", "features"), each(KERNELS, 5))
def test_every_variant_is_right(
    direction: Direction,
    dim: int,
    config: KernelConfig,
    features: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = make_spec("bfloat16", dim, "causal", direction=direction, **features)
    if spec.varlen:  # four of ten heads of K, of which each has two tiles
        few_sms(8, monkeypatch)
    assert why_illegal(spec, config, TARGETS[TARGET[config.schedule]]) is None
    assert_right(spec, config, None if spec.varlen else [MANY])


@pytest.mark.parametrize(
    ("direction", "config"),
    each([(direction, config) for direction, _, config, _ in KERNELS[:4]], 2),
)
def test_heads_of_a_run_take_turns(
    direction: Direction,
    config: KernelConfig,
    loads: dict[int, list[Load]],  # noqa: F811
) -> None:
    """The longest tiles of the heads of a run, then the others; then those of the next run."""
    assert_right(make_spec("bfloat16", 64, "causal", direction=direction), config, [MANY])
    heads, together, tiles = (3, 2, (0, 128)) if direction == "backward_dkv" else (6, 4, (128, 0))
    expected = [
        (head, tile)
        for first in range(0, heads, together)
        for tile in tiles
        for head in range(first, min(first + together, heads))
    ]
    own = [copied[0][2][1:3] for _, copied in sorted(loads.items())]
    assert own == expected


MUTANTS = {
    "first head": ("// (heads_together * tiles) * heads_together", "// (heads_together * tiles)"),
    "ragged run": ("place // together", "place // heads_together"),
    "head of the place": ("first_head + place % together", "first_head + place % heads_together"),
    "place in the run": ("place = pid % (heads_together * tiles)", "place = pid % tiles"),
    "programs of a tile": ("// ((2 if ONE_SUM else 1) * tiles)", "// tiles"),
}


@pytest.mark.parametrize(
    ("name", "kernel"),
    each(
        [
            *((name, KERNELS[n]) for name in list(MUTANTS)[:4] for n in range(4)),
            ("programs of a tile", KERNELS[5]),
        ],
        6,
    ),
)
def test_mutant_is_found(name: str, kernel: Kernel) -> None:
    direction, dim, config, _ = kernel
    spec = make_spec("bfloat16", dim, "causal", direction=direction)
    assert_found(spec, config, MUTANTS[name], [MANY])
