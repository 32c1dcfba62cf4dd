"""Orders of tiles and persistent grids: every tile is done once, by kernels that are right; broken ones are found."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from flashgen.evaluate.check import check_loaded
from flashgen.kernels import launch, launch_backward, launch_forward, loader
from flashgen.kernels.render import render
from flashgen.reference.cases import CheckCase
from flashgen.schedules.config import KernelConfig
from flashgen.schedules.legality import why_illegal
from flashgen.spec.gpu import TARGETS
from flashgen.spec.problem import Problem
from flashgen.spec.vocabulary import Direction
from tests.makers import make_config, make_spec
from tests.mutants import broken
from tests.nasty_cases import nasty_cases
from tests.proving import mutant_passes, prove

CAUSAL, FULL = make_spec("bfloat16", 32, "causal"), make_spec("bfloat16", 32, "none")
ORDERS = [
    ("grouped", False), ("grouped", True), ("head_reversal", False), ("head_reversal", True),
    ("longest_first", True), ("plain", True),
]  # fmt: skip
WAYS = [
    ("fa2", "pointer"),
    ("fa2", "descriptor"),
    ("s_ahead", "pointer"),
    ("s_ahead", "descriptor"),
]
MANY = CheckCase(problem=Problem(batch=2, heads=6, kv_heads=3, seq_q=70, seq_k=75))
"""12 heads of three tiles of 32 rows: more than a run holds, and more than a few programs."""


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("order", "persistent"), ORDERS)
@pytest.mark.parametrize(
    "way",
    [
        pytest.param(
            way,
            marks=[pytest.mark.slow("make test proves a sample of it")]
            * (way[0] == "fa2" or way[1] == "pointer"),
        )
        for way in WAYS
    ],
    ids="-".join,
)
def test_nasty_shapes(way: tuple[str, str], order: str, persistent: bool, seed: int) -> None:
    config = make_config(32, 16, schedule=way[0], loads=way[1], order=order, persistent=persistent)
    prove(CAUSAL, config, seed, [*nasty_cases(32, 16)[::4], MANY])
    if order == "plain":
        prove(FULL, config, seed, [*nasty_cases(32, 16)[1::4], MANY])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    "features",
    [
        {"window": True},
        pytest.param(
            {"bias": "additive", "dropout": True},
            marks=pytest.mark.slow("make test proves a sample of it"),
        ),
        pytest.param(
            {"sink": True, "alibi": True}, marks=pytest.mark.slow("make test proves a sample of it")
        ),
    ],
)
def test_with_features(features: dict[str, Any], seed: int) -> None:
    spec = make_spec("bfloat16", 32, "causal", **features)
    config = make_config(32, 16, order="grouped", persistent=True)
    prove(spec, config, seed, [MANY])


@pytest.mark.parametrize("limits", [(1, 1), (7, 20000), (1000, 1 << 30)])
@pytest.mark.parametrize(("order", "persistent"), ORDERS[1:4:2])
def test_any_number_of_programs_and_any_run(
    limits: tuple[int, int], order: str, persistent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run of one group, of all heads, and ragged ones; one program, and more than there are tiles."""
    few = launch_forward.OrderLimits(sms=limits[0], l2_bytes=limits[1])
    monkeypatch.setattr(launch_forward, "order_limits", lambda device: few)
    config = make_config(32, 16, order=order, persistent=persistent)
    prove(CAUSAL, config, 7, [MANY])


MUTANTS = {
    "first head": ("// (heads_together * tiles) * heads_together", "// (heads_together * tiles)"),
    "tile of the run": ("(tiles - 1 - place // together)", "(tiles - 1 - place // heads_together)"),
    "place in the run": ("place = pid % (heads_together * tiles)", "place = pid % tiles"),
    "stride of programs": ("batch_heads, tl.num_programs(0)):", "batch_heads, tl.num_programs(0) + 1):"),
    "tiles of all heads": ("tl.program_id(0), tiles * batch_heads,", "tl.program_id(0), tiles * heads,"),
    "first tile": ("tl.range(tl.program_id(0), tiles", "tl.range(0, tiles"),
}  # fmt: skip


def passes(config: KernelConfig, line: str, broken: str) -> bool:
    return mutant_passes(CAUSAL, config, line, broken, [MANY])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", [name for name in MUTANTS if name != "first tile"])
def test_mutant_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Runs of 8 heads of 12: the last is ragged. (Mutants that read beyond the heads would kill the
    # interpreter: tests/cpu/compile/test_orders.py has them.)
    few = launch_forward.OrderLimits(sms=5, l2_bytes=2 * 4 * 75 * 128)
    monkeypatch.setattr(launch_forward, "order_limits", lambda device: few)
    config = make_config(32, 16, order="grouped", persistent=True)
    line, broken = MUTANTS[name]
    assert passes(config, line, line), "the kernel must pass unbroken"
    assert not passes(config, line, broken)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    ("line", "broken"),
    [
        ("tl.where(batch_head % 2 == 0, tiles - 1 - forwards, forwards)", "tl.where(batch_head % 2 == 0, forwards, tiles - forwards)"),
        ("= pid // tiles, pid % tiles", "= pid // tiles, pid % (tiles - 1)"),
    ],
)  # fmt: skip
def test_head_reversal_mutant_is_caught(line: str, broken: str) -> None:
    config = make_config(32, 16, order="head_reversal")
    assert passes(config, line, line)
    assert not passes(config, line, broken)


def test_each_tile_is_done_once_and_by_few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a wrong stride hides by doing a tile twice: no two programs write the same rows."""
    few = launch_forward.OrderLimits(sms=5, l2_bytes=2 * 4 * 75 * 128)
    monkeypatch.setattr(launch_forward, "order_limits", lambda device: few)
    config = make_config(32, 16, order="grouped", persistent=True)
    rendered = render(CAUSAL, config)
    line = "tl.store(lse_ptr + head_rows + rows, lse, mask=in_lse)"
    counted = "tl.atomic_add(lse_ptr + head_rows + rows, lse * 0 + 1.0, mask=in_lse)"

    def counts(source: str, folder: Any) -> torch.Tensor:
        path = folder / f"{rendered.name}.py"
        path.write_text(source)
        monkeypatch.setattr(torch.Tensor, "new_empty", torch.Tensor.new_zeros)
        q = torch.zeros((2, 6, 70, 32), dtype=torch.bfloat16)
        k = torch.zeros((2, 3, 75, 32), dtype=torch.bfloat16)
        kernel = loader.load_kernel(path, rendered.text_name, rendered.name)
        return launch.launch(kernel, CAUSAL, config, q, k, k, scale=1.0, diagonal=5)[1]

    with tempfile.TemporaryDirectory() as folder:
        source = broken(rendered.source, line, counted)
        assert torch.equal(counts(source, Path(folder)), torch.ones(2, 6, 70))
        twice = broken(source, *MUTANTS["first tile"])
        assert counts(twice, Path(folder)).max() == 5  # every program does all


GRADIENTS: list[tuple[Direction, dict[str, Any]]] = [
    ("backward_dkv", {}),
    ("backward_dq", {}),
    ("backward_dkv", {"loads": "descriptor", "schedule": "s_ahead"}),
    ("backward_dq", {"loads": "descriptor", "schedule": "s_ahead"}),
    ("backward_fused", {}),
]


@pytest.fixture
def nine_sms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of four of six heads of K, or of eight of twelve of Q: the last are ragged."""
    few = launch_forward.OrderLimits(sms=9, l2_bytes=1)
    monkeypatch.setattr(launch_backward, "order_limits", lambda device: few)


@pytest.mark.usefixtures("nine_sms")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    ("direction", "way", "features"),
    [
        *((direction, way, {}) for direction, way in GRADIENTS),
        *(
            (direction, way, features)
            for features in ({"varlen": True}, {"window": True, "softcap": True})
            for direction, way in GRADIENTS
            if not way  # by pointers, schedule fa2
        ),
    ],
)
def test_gradients_of_heads_in_turn(
    features: dict[str, Any], direction: Direction, way: dict[str, Any], seed: int
) -> None:
    spec = make_spec("bfloat16", 32, "causal", direction=direction, **features)
    config = make_config(16, 32, order="grouped", **way)
    assert why_illegal(spec, config, TARGETS["nvidia_h200"]) is None
    prove(spec, config, seed, [MANY] if not spec.varlen else None, step=3)


GRADIENT_MUTANTS = {
    "first head": ("// (heads_together * tiles) * heads_together", "// (heads_together * tiles)"),
    "place in the run": ("place = pid % (heads_together * tiles)", "place = pid % tiles"),
    "ragged run": ("place // together", "place // heads_together"),
    "head of the place": ("first_head + place % together", "first_head + place % heads_together"),
}


@pytest.mark.usefixtures("nine_sms")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("direction", ["backward_dkv", "backward_dq"])
@pytest.mark.parametrize("name", GRADIENT_MUTANTS)
def test_mutant_of_heads_in_turn_is_caught(name: str, direction: Direction) -> None:
    spec, config = CAUSAL.for_direction(direction), make_config(16, 32, order="grouped")
    line, broken = GRADIENT_MUTANTS[name]
    assert mutant_passes(spec, config, line, line, [MANY]), "the kernel must pass unbroken"
    assert not mutant_passes(spec, config, line, broken, [MANY])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("mask", ["none", "causal"])
def test_the_one_loop_of_schedule_auto(mask: str, seed: int) -> None:
    """As it is written; of what the compiler makes of it, the check executes the PTX."""
    config = make_config(64, 64, schedule="auto", loads="descriptor")
    spec = make_spec("bfloat16", 64, mask)
    kernel = loader.load_text(render(spec, config))
    cases = [*nasty_cases(64, 64)[::3], MANY]
    result = check_loaded(kernel, spec, config, seed=seed, cases=cases)
    assert result.passed, result
