"""Orders of tiles without a GPU: where they are legal, the blocks an estimate sees, what the compiler makes of them."""

from __future__ import annotations

import textwrap
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import triton

from flashgen.compile.verdict import judge
from flashgen.errors import InvalidArgument
from flashgen.estimate.estimate import estimate, time_of
from flashgen.estimate.replay import cached_replay
from flashgen.estimate.trip_counts import dealt_out, grid, handed_out
from flashgen.kernels.render import render
from flashgen.schedules import space
from flashgen.schedules.config import KernelConfig
from flashgen.schedules.grid_rules import (
    gradient_heads_together,
    heads_together,
    launched_blocks,
)
from flashgen.schedules.legality import shared_bound_bytes, why_illegal
from flashgen.schedules.outcome import Status
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.gpu import TARGETS
from flashgen.spec.problem import Problem, workload
from flashgen.table.table_file import dump, parse
from tests.compiled import cache, compile_one
from tests.makers import each, make_config, make_spec
from tests.tables import made_entry, made_table

H200 = TARGETS["nvidia_h200"]
CAUSAL, FULL = make_spec(mask="causal"), make_spec(mask="none")
AHEAD: dict[str, Any] = {"num_warps": 8, "schedule": "s_ahead", "loads": "descriptor"}


@pytest.mark.parametrize(
    ("spec", "config", "reason"),
    [
        (CAUSAL, make_config(order="grouped"), None),
        (CAUSAL, make_config(order="head_reversal", persistent=True, schedule="s_ahead"), None),
        (FULL, make_config(persistent=True), None),
        (make_spec(mask="causal", window=True), make_config(order="grouped", persistent=True), None),
        (FULL, make_config(order="grouped"), "order grouped needs a causal mask"),
        (FULL, make_config(order="head_reversal"), "order head_reversal needs a causal mask"),
        (CAUSAL.for_direction("backward_dq"), make_config(order="grouped"), None),
        (CAUSAL.for_direction("backward_fused"), make_config(order="grouped"), None),
        (make_spec(mask="causal", varlen=True, direction="backward_dkv"), make_config(order="grouped"), None),
        (make_spec(mask="causal", varlen=True), make_config(order="grouped"), "varlen needs order plain"),
        (FULL.for_direction("backward_dkv"), make_config(order="grouped"), "order grouped needs a causal mask"),
        (CAUSAL.for_direction("backward_dq"), make_config(order="head_reversal"), "plain, longest_first, grouped alone"),
        (CAUSAL.for_direction("backward_dq_of_ds"), make_config(order="grouped"), "plain, longest_first alone"),
        (CAUSAL.for_direction("backward_ds"), make_config(order="grouped"), "has order plain alone"),
        (CAUSAL.for_direction("backward_dq"), make_config(persistent=True), "persistent needs direction forward"),
        (CAUSAL, make_config(schedule="fa1", persistent=True), "persistent needs schedule"),
        (CAUSAL, make_config(128, 64, num_warps=8, schedule="hopper", loads="descriptor", order="grouped", persistent=True), None),
        (FULL, make_config(128, 64, num_warps=8, schedule="hopper", loads="descriptor", order="grouped"), "order grouped needs a causal mask"),
        (CAUSAL, make_config(64, 64, schedule="auto", loads="descriptor", order="grouped"), "order grouped needs"),
        (make_spec(direction="decode"), make_config(16, 32, persistent=True), "persistent needs direction forward"),
    ],
)  # fmt: skip
def test_where_they_are_legal(
    spec: AttentionSpec, config: KernelConfig, reason: str | None
) -> None:
    found = why_illegal(spec, config, H200)
    assert found is None if reason is None else found is not None and reason in found


def test_persistent_is_true_or_false() -> None:
    with pytest.raises(InvalidArgument, match="persistent must be true or false"):
        make_config(persistent=1)


def test_a_run_is_what_fits_half_the_l2_and_whole_groups() -> None:
    of_a_key = 2 * (128 + 128)
    assert heads_together(of_a_key, 16384, 1, H200.l2_bytes) == 3  # of 8 MiB each, in 25
    assert heads_together(of_a_key, 16384, 8, H200.l2_bytes) == 24
    assert heads_together(of_a_key, 1 << 20, 4, H200.l2_bytes) == 4  # one group at least
    assert heads_together(of_a_key, 0, 1, H200.l2_bytes) > 0
    assert launched_blocks(1000, 132, persistent=True) == 132
    assert launched_blocks(100, 132, persistent=True) == 100
    assert launched_blocks(1000, 132, persistent=False) == 1000


def taken(
    order: str, heads: int, tiles: int, together: int, broken: tuple[str, str] = ("", "")
) -> list[tuple[int, int]]:
    """Head and first row of each program's tile, by the kernel's own lines, run as Python."""
    source = render(CAUSAL, make_config(32, 32, order=order)).source
    _, first, after = source.partition("    if ORDER ==")
    lines, _, _ = (first + after).partition("    batch, head = ")
    assert broken[0] in lines
    text = textwrap.dedent(lines.replace(*broken))
    tl = SimpleNamespace(minimum=min, where=lambda test, a, b: a if test else b)
    found = []
    for pid in range(heads * tiles):
        names = {
            "tl": tl,
            "pid": pid,
            "ORDER": order,
            "tiles": tiles,
            "BR": 32,
            "batch_heads": heads,
            "heads_together": together,
        }
        exec(text, names)
        found.append((names["batch_head"], names["row_start"]))
    return found


SHAPES = [(1, 1, 1), (18, 3, 4), (18, 3, 18), (7, 5, 2), (6, 4, 3), (5, 1, 3)]


@pytest.mark.parametrize("order", ["plain", "longest_first", "head_reversal", "grouped"])
@pytest.mark.parametrize(("heads", "tiles", "together"), SHAPES)
def test_every_tile_is_taken_once(order: str, heads: int, tiles: int, together: int) -> None:
    every = [(head, 32 * tile) for head in range(heads) for tile in range(tiles)]
    assert sorted(taken(order, heads, tiles, together)) == every


@pytest.mark.parametrize(("heads", "tiles", "together"), SHAPES)
def test_a_run_walks_its_longest_tiles_first(heads: int, tiles: int, together: int) -> None:
    found = taken("grouped", heads, tiles, together)
    expected = [
        (head, 32 * tile)
        for first in range(0, heads, together)
        for tile in reversed(range(tiles))
        for head in range(first, min(first + together, heads))
    ]
    assert found == expected


@pytest.mark.parametrize(
    "broken",
    [
        ("tl.minimum(batch_heads - first_head, heads_together)", "heads_together"),
        ("first_head + place % together", "first_head + place % heads_together"),
        ("// (heads_together * tiles) * heads_together", "// (heads_together * tiles)"),
        ("(tiles - 1 - place // together)", "(tiles - 1 - place // heads_together)"),
        ("(tiles - 1 - place // together)", "(place // together)"),
    ],
)
def test_a_broken_line_is_noticed(broken: tuple[str, str]) -> None:
    assert taken("grouped", 18, 3, 4, broken) != taken("grouped", 18, 3, 4)


class TestBlocksOfAnEstimate:
    PROBLEM = Problem(batch=1, heads=5, kv_heads=5, seq_q=96, seq_k=96)  # three tiles of 32, by 32
    TRIPS = ((0, 1), (1, 1), (2, 1))

    def blocks(self, order: str, l2_bytes: int = 0) -> list[tuple[int, ...]]:
        config = make_config(32, 32, order=order)
        return grid(CAUSAL, config, self.PROBLEM, replace(H200, l2_bytes=l2_bytes), loops=2)

    def test_as_the_template_has_them(self) -> None:
        short, middle, long = self.TRIPS
        assert self.blocks("plain") == [short, middle, long] * 5
        assert self.blocks("longest_first") == [long, middle, short] * 5
        assert self.blocks("head_reversal") == [
            long, middle, short, short, middle, long, long, middle, short, short, middle, long,
            long, middle, short,
        ]  # fmt: skip
        two = 2 * 2 * 96 * 2 * (64 + 64)  # half of it holds K and V of two heads
        assert self.blocks("grouped", two) == [
            *[long] * 2, *[middle] * 2, *[short] * 2, *[long] * 2, *[middle] * 2, *[short] * 2,
            long, middle, short,
        ]  # fmt: skip

    def test_of_gradients_so_many_heads_as_leave_two_sms_to_each(self) -> None:
        problem = Problem(batch=1, heads=6, kv_heads=3, seq_q=96, seq_k=96)
        config, four = make_config(32, 32, order="grouped"), replace(H200, sms=4)

        def of(direction: Any) -> list[tuple[int, ...]]:
            return grid(CAUSAL.for_direction(direction), config, problem, four, loops=2)

        long, middle, short = (2, 4), (2, 2), (2, 0)  # with a mask, and without, of two heads of Q
        two, one = [long] * 2 + [middle] * 2 + [short] * 2, [long, middle, short]
        assert of("backward_dkv") == two + one
        short, middle, long = self.TRIPS
        four_heads, two_heads = (
            [x for x in (long, middle, short) for _ in range(n)] for n in (4, 2)
        )
        assert of("backward_dq") == four_heads + two_heads
        assert gradient_heads_together(4, 1, by_keys=False) == 4  # one group at least
        assert gradient_heads_together(4, 132, by_keys=True) == 66

    def test_a_persistent_program_has_every_nth_tile(self) -> None:
        short, middle, long = self.TRIPS
        tiles = self.blocks("plain")
        assert tiles == grid(
            CAUSAL, make_config(32, 32, persistent=True), self.PROBLEM, H200, loops=2
        )
        assert dealt_out([short, middle, long], 2) == [[short, long], [middle]]
        assert dealt_out(tiles, 100) == [[tile] for tile in tiles]  # a program a tile at most

    def test_a_program_of_schedule_hopper_has_the_tile_that_is_next_when_it_is_free(self) -> None:
        short, middle, long = sorted(self.TRIPS)
        assert handed_out([long, short, middle, short], 2) == [[long, short], [short, middle]]
        assert handed_out([short] * 3, 100) == [[short]] * 3


@pytest.mark.slow("three seconds of compilation")
def test_a_persistent_program_pays_the_start_of_a_block_once_and_the_rest_by_tile() -> None:
    spec, config = make_spec("bfloat16", 128), make_config(128, 64, num_warps=8)
    replayed = cached_replay(compile_one(spec, config, "sm_90"), H200, cache())
    programs = [(64,) * len(replayed.block_flops)] * H200.sms
    one, two = (time_of(replayed, programs, H200, tiles=[n] * H200.sms).median_us for n in (1, 2))
    assert one == time_of(replayed, programs, H200).median_us
    assert two - one == pytest.approx(
        replayed.tile_cycles / H200.clock_mhz, rel=0.3
    )  # of its clock
    persistent = replace(config, persistent=True)
    assert estimate(replayed, spec, persistent, workload(spec, 2048), H200).median_us > 0


def test_they_are_searched_where_a_gpu_measures_and_nowhere_else() -> None:
    offline, here = (space.legal_configs(CAUSAL, H200, on_gpu=on_gpu) for on_gpu in (False, True))
    assert {config.order for config in offline} == {"plain", "longest_first"}
    assert not any(config.persistent for config in offline)
    more = {(c.order, c.persistent) for c in here} - {(c.order, c.persistent) for c in offline}
    assert more == set(space.GPU_ORDERS)
    assert len(here) == len(set(here))
    full = space.legal_configs(FULL, H200, on_gpu=True)
    assert {(c.order, c.persistent) for c in full} == {("plain", False), ("plain", True)}
    for direction, orders in {
        "backward_dq": {"plain", "grouped"},
        "backward_dkv": {"plain", "grouped"},
        "backward_dq_of_ds": {"plain", "longest_first"},
    }.items():
        for on_gpu in (False, True):
            found = space.legal_configs(CAUSAL.for_direction(direction), H200, on_gpu=on_gpu)
            assert {config.order for config in found if config.schedule == "fa2"} == orders
            assert len(found) == len(set(found))
            schedules = {config.schedule for config in found if config.persistent}
            assert schedules == (
                {"hopper"} if on_gpu and direction != "backward_dq_of_ds" else set()
            )
    dq = space.legal_configs(CAUSAL.for_direction("backward_dq"), H200, on_gpu=True)
    assert "longest_first" in {config.order for config in dq if config.schedule == "hopper"}


def test_a_table_keeps_persistent_and_its_order() -> None:
    config = make_config(64, 32, order="grouped", persistent=True)
    text = dump(made_table(made_entry(CAUSAL, config=config)))
    assert "_grp_pers " in text
    assert parse(text, Path("nvidia_h200.yaml")).entries[0].config == config
    assert "_pers" not in dump(made_table(made_entry(CAUSAL, config=make_config(64, 32))))


ONE_OF_EACH_ARCH = {gpu.arch: gpu for gpu in TARGETS.values()}


@pytest.mark.parametrize(
    ("arch", "order"),
    [
        ("sm_80", "head_reversal"),
        *each(product(ONE_OF_EACH_ARCH, ("grouped", "head_reversal"))),
    ],
)
def test_they_compile_everywhere(arch: str, order: Any) -> None:
    gpu = ONE_OF_EACH_ARCH[arch]
    loads = "descriptor" if gpu.is_nvidia and gpu.capability >= 90 else "pointer"
    keys = 32 if arch.startswith("gfx1") else 64  # with 64 RDNA spills in any order
    config = make_config(64, keys, loads=loads, order=order, persistent=order == "grouped")
    assert why_illegal(CAUSAL, config, gpu) is None
    built = compile_one(CAUSAL, config, arch)
    assert built.registers > 0
    assert sum(loop.spills for loop in built.loops) == 0, config.label


@pytest.mark.skipif(triton.__version__ != "3.7.1", reason="facts of the pinned Triton, 3.7.1")
@pytest.mark.parametrize(
    ("order", "persistent", "head_dim"),
    [
        ("grouped", True, 128),
        *each(
            [
                ("head_reversal", False, 64),
                ("grouped", False, 64),
                ("grouped", False, 128),
                ("grouped", True, 64),
                ("head_reversal", False, 128),
            ]
        ),
    ],
)
def test_s_ahead_keeps_its_overlap(order: str, persistent: bool, head_dim: int) -> None:
    """The loop over tiles around the loops over keys does not undo it, and takes room for O."""
    spec = make_spec("bfloat16", head_dim, "causal")
    config = make_config(128, 64, order=order, persistent=persistent, **AHEAD)
    built = compile_one(spec, config, "sm_90")
    assert judge(built, spec, config, H200) == (Status.OK, "")
    assert len(built.loops) == 2
    assert (built.loops[0].exp2_under_matrix or 0) >= 0.9
    bound = shared_bound_bytes(spec, config, H200)
    assert bound <= built.shared_bytes <= 1.05 * bound
