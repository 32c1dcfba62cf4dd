"""Schedule hopper among the configs: what is legal, who may try it, and what a table takes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flashgen import paths
from flashgen.errors import InvalidArgument, ToolchainError
from flashgen.kernels import interpreter
from flashgen.kernels.launch import bind
from flashgen.kernels.text import text_name
from flashgen.runtime.launcher import runnable
from flashgen.schedules.config import KernelConfig, kernel_name
from flashgen.schedules.legality import shared_bound_bytes, why_illegal
from flashgen.schedules.space import GPU_ORDERS, legal_configs, seed_configs
from flashgen.search.goal import Goal, goal_for
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.gpu import TARGETS
from flashgen.spec.problem import Problem
from flashgen.spec.vocabulary import Direction
from flashgen.table import emit
from flashgen.table.entry import Entry, RunnerUp
from flashgen.tune import goals
from tests.cpu.tune.test_tune import Served, run, us
from tests.makers import make_config, make_spec
from tests.package import make_choice
from tests.tables import made_entry, made_table

H200, A100, B200 = (
    TARGETS[slug] for slug in ("nvidia_h200", "nvidia_a100_sxm4_80gb", "nvidia_b200")
)
CONFIG = make_config(128, 128, num_warps=8, schedule="hopper", loads="descriptor")
THREE = replace(CONFIG, br=192, num_warps=12)
SPEC = make_spec("bfloat16", 128, "causal")
DKV = replace(SPEC, direction="backward_dkv")
OF_KEYS = replace(CONFIG, br=64)
PROBLEM = Problem(batch=1, heads=1, kv_heads=1, seq_q=512, seq_k=512)


def test_two_or_three_consumers() -> None:
    assert [config.consumers for config in (CONFIG, THREE)] == [2, 3]
    assert [config.block_warps(SPEC) for config in (CONFIG, THREE)] == [12, 16]
    assert [config.launch_options(SPEC)["num_warps"] for config in (CONFIG, THREE)] == [4, 4]
    plain = make_config(128, 64, num_warps=8)
    assert (plain.block_warps(SPEC), plain.consumers) == (8, 0)
    assert plain.launch_options(SPEC)["num_warps"] == 8
    with pytest.raises(InvalidArgument, match="num_warps must be one of 8, 12"):
        replace(CONFIG, num_warps=4)
    with pytest.raises(InvalidArgument, match="br must be one of 16, 32"):
        make_config(192, 64)


def test_its_name_and_its_twin() -> None:
    assert kernel_name(SPEC, CONFIG) == "fwd_bf16_d128_causal_br128_bc128_w8_s2_hopper_tma"
    persistent = replace(CONFIG, order="grouped", persistent=True)
    for config in (CONFIG, replace(THREE, num_stages=3), persistent):
        twin = config.pointer_twin(SPEC)
        assert (twin.schedule, twin.loads, twin.br, twin.num_warps) == ("fa2", "pointer", 128, 8)
        assert twin.bc == config.bc
        assert why_illegal(SPEC, twin, H200) is None


@pytest.mark.parametrize(
    ("spec", "config", "gpu", "word"),
    [
        (SPEC, CONFIG, A100, "descriptor"),
        (SPEC, CONFIG, B200, "wgmma"),
        (SPEC, replace(CONFIG, loads="pointer"), H200, "descriptor loads"),
        (make_spec("float32", 128), CONFIG, H200, "16-bit"),
        (make_spec("bfloat16", 32), CONFIG, H200, "padded to 64"),
        (SPEC, replace(CONFIG, num_warps=12), H200, "64 of br for every 4 warps"),
        (SPEC, replace(CONFIG, br=256), H200, "64 of br for every 4 warps"),
        (DKV, CONFIG, H200, "P and dP need 256 registers"),
        (DKV, replace(OF_KEYS, bc=64), H200, "64 of bc for every 4 warps"),
        (DKV, replace(OF_KEYS, bc=192, num_warps=12), H200, "powers of two"),
        (DKV, replace(OF_KEYS, br=32), H200, "64 at least"),
        (DKV, replace(OF_KEYS, order="longest_first"), H200, "order plain, grouped alone"),
        (replace(DKV, direction="backward_dq"), OF_KEYS, H200, "64 of br for every 4 warps"),
        (SPEC, replace(CONFIG, num_stages=1), H200, "num_stages 2"),
        (SPEC, replace(CONFIG, bc=16), H200, "32 at least"),
        (make_spec("bfloat16", 256), replace(CONFIG, bc=64, no_turns=True), H200, "no_turns needs"),
        (DKV, replace(OF_KEYS, no_turns=True), H200, "no_turns needs"),
        (SPEC, make_config(64, 64, no_turns=True), H200, "no_turns needs"),
        (make_spec("bfloat16", 128, dropout=True), CONFIG, H200, "dropout"),
        (make_spec("bfloat16", 256), CONFIG, H200, "shared memory"),
        (make_spec("bfloat16", 128), replace(CONFIG, order="longest_first"), H200, "causal"),
        (
            replace(make_spec("bfloat16", 128), direction="backward_delta"),
            CONFIG,
            H200,
            "fa2 alone",
        ),
    ],
)
def test_what_is_illegal(spec: AttentionSpec, config: KernelConfig, gpu: object, word: str) -> None:
    reason = why_illegal(spec, config, gpu)  # type: ignore[arg-type]
    assert reason is not None
    assert word in reason


@pytest.mark.parametrize("dim", [64, 256])
@pytest.mark.parametrize("direction", ["backward_dkv", "backward_dq", "backward_fused"])
def test_the_backward_has_it_and_a_twin_that_fits(direction: Direction, dim: int) -> None:
    spec = make_spec("bfloat16", dim, "causal", direction=direction)
    assert all(config.interpretable for config in legal_configs(spec, H200))
    found = [c for c in legal_configs(spec, H200, on_gpu=True) if c.schedule == "hopper"]
    assert found
    assert seed_configs(spec, H200, on_gpu=True)[0] in found
    for config in found:
        twin = config.pointer_twin(spec)
        assert (twin.schedule, twin.loads, twin.num_warps) == ("fa2", "pointer", 8)
        assert why_illegal(spec, twin, H200) is None


@pytest.mark.parametrize(
    ("dims", "tile", "apart"),
    [((64, 64), (192, 64), True), ((128, 128), (128, 128), True), ((256, 256), (128, 64), False)],
)
def test_o_of_a_persistent_program_has_a_place_where_there_is_room(
    dims: tuple[int, int], tile: tuple[int, int], apart: bool
) -> None:
    spec = make_spec("bfloat16", dims[0], head_dim_v=dims[1])
    once = replace(CONFIG, br=tile[0], bc=tile[1], num_warps=tile[0] // 16)
    walking = replace(once, persistent=True)
    more = shared_bound_bytes(spec, walking, H200) - shared_bound_bytes(spec, once, H200)
    assert more == (2 * once.br * dims[1] if apart else 0)
    assert why_illegal(spec, walking, H200) is None


@pytest.mark.parametrize(("direction", "held"), [("backward_dkv", "bc"), ("backward_dq", "br")])
def test_a_persistent_gradient_has_the_next_tile_beside_this_one(
    direction: Direction, held: str
) -> None:
    """K and V of so many keys, or as many rows of Q and dO."""
    spec = make_spec("bfloat16", 64, direction=direction)
    walking = replace(CONFIG, br=128, bc=128, persistent=True)
    once = replace(walking, persistent=False)
    more = shared_bound_bytes(spec, walking, H200) - shared_bound_bytes(spec, once, H200)
    assert more == getattr(walking, held) * 2 * (64 + 64)


def test_a_place_for_o_may_be_too_much() -> None:
    spec, three = make_spec("bfloat16", 128), replace(CONFIG, num_stages=3)
    assert why_illegal(spec, three, H200) is None
    reason = why_illegal(spec, replace(three, persistent=True), H200)
    assert reason is not None
    assert "262144 bytes of shared memory" in reason


def test_the_total_of_an_invariant_kernel_has_a_place() -> None:
    """Float32, of all rows of O: with it a third stage of 64 keys is too much at head dim 128."""
    plain, three = make_spec("bfloat16", 128), replace(THREE, bc=64, num_stages=3)
    spec = replace(plain, invariant=True)
    more = shared_bound_bytes(spec, three, H200) - shared_bound_bytes(plain, three, H200)
    assert more == 192 * 128 * 4
    assert why_illegal(plain, three, H200) is None
    assert "bytes of shared memory" in str(why_illegal(spec, three, H200))
    assert why_illegal(spec, replace(three, num_stages=2), H200) is None


def test_three_consumers_have_fewer_registers() -> None:
    spec = make_spec("bfloat16", 256)
    assert why_illegal(spec, replace(CONFIG, bc=64), H200) is None
    reason = why_illegal(spec, replace(THREE, bc=64), H200)
    assert reason is not None
    assert "leaves 160" in reason


def test_only_a_search_on_a_gpu_has_it_in_its_space() -> None:
    offline, measured = legal_configs(SPEC, H200), legal_configs(SPEC, H200, on_gpu=True)
    assert all(config.interpretable for config in (*offline, *seed_configs(SPEC, H200)))
    more = [config for config in measured if not config.interpretable]
    assert measured[: len(more)] == tuple(more)  # before all others
    assert [config for config in measured if config in offline] == list(offline)
    assert {config.br for config in more} == {128, 192}
    orders = [(config.order, config.persistent) for config in more if config.schedule == "hopper"]
    assert set(orders) == {("plain", False), ("longest_first", False), *GPU_ORDERS}
    later = [order in GPU_ORDERS for order in orders]
    assert later == sorted(later)
    one_mask = replace(SPEC, mask="none")
    full = [c for c in legal_configs(one_mask, H200, on_gpu=True) if c.schedule == "hopper"]
    assert {(c.order, c.persistent) for c in full} == {("plain", False), ("plain", True)}
    assert seed_configs(SPEC, H200, on_gpu=True)[0].schedule == "hopper"
    for other in (A100, B200):
        found = legal_configs(SPEC, other, on_gpu=True)
        assert "hopper" not in {config.schedule for config in found}
    both = [goal_for(SPEC, PROBLEM, H200, on_gpu=on_gpu) for on_gpu in (False, True)]
    assert [goal.legal for goal in both] == [offline, measured]
    assert not any(config.schedule == "hopper" for config in both[0].space)


@pytest.mark.parametrize("source", ["measured", "estimated"])
def test_a_search_asks_for_it_where_its_evaluator_measures(
    source: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Goal] = []

    class Seen(Exception):
        pass

    def noted(*arguments: Any, **options: Any) -> Goal:
        asked.append(goal_for(*arguments, **options))
        raise Seen

    monkeypatch.setattr(goals, "goal_for", noted)
    monkeypatch.setattr(emit, "write", lambda *_: None)
    monkeypatch.setattr(paths, "shipped_configs_dir", lambda: tmp_path)  # none: they are large
    with pytest.raises(Seen):
        run(monkeypatch, tmp_path, Served(us=us, gpu=H200, source=source))
    assert any(not config.interpretable for config in asked[0].legal) is (source == "measured")


def test_a_table_takes_it_only_as_measured() -> None:
    entry = made_entry(SPEC, config=CONFIG, source="measured")
    assert entry.config is CONFIG
    for source in ("estimated", "untimed"):
        with pytest.raises(InvalidArgument, match="hopper needs source measured"):
            made_entry(SPEC, config=CONFIG, source=source)
        with pytest.raises(InvalidArgument, match="hopper needs source measured"):
            RunnerUp(
                config=CONFIG,
                source=source,  # type: ignore[arg-type]
                median_us=None if source == "untimed" else 1.0,
                digest="sha256:" + "0" * 12,
            )
    assert isinstance(entry, Entry)


def test_a_measured_entry_is_generated_with_its_twin() -> None:
    table = made_table(made_entry(SPEC, config=CONFIG, source="measured"))
    files = {path.name: text for path, text in emit.plan({"nvidia_h200": table}).items()}
    kernel, twin = (text_name(SPEC, c) for c in (CONFIG, CONFIG.pointer_twin(SPEC)))
    assert f"def {kernel}(" in files[f"{kernel}.py"]
    assert f"def {twin}(" in files[f"{twin}.py"]
    assert f" {CONFIG.label} " in files["nvidia_h200.py"]


def test_check_and_launch_name_the_missing_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreter, "active", lambda: True)
    with pytest.raises(ToolchainError, match="Gluon, for which Triton has no interpreter"):
        bind(object(), SPEC, CONFIG)
    choice = make_choice(SPEC, CONFIG, None)
    assert runnable(choice) == CONFIG.pointer_twin(SPEC)
    monkeypatch.setattr(interpreter, "active", lambda: False)
    assert runnable(choice) is CONFIG
