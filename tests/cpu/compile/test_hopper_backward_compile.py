"""What the compiler makes of schedule hopper's backward: facts of its machine code for sm_90a.

None of these kernels has run; compile/test_hopper_compile.py does the same for the forward.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import triton

from flashgen.compile import loops
from flashgen.compile.sass import Instruction
from flashgen.compile.verdict import judge, overlap, residents
from flashgen.estimate.sm import Scoreboard
from flashgen.schedules.base import BY_KEYS, wide
from flashgen.schedules.config import SCHEDULES, KernelConfig
from flashgen.schedules.hopper import HOPPER_OVERLAP
from flashgen.schedules.legality import shared_bound_bytes
from flashgen.schedules.outcome import Status
from flashgen.schedules.space import legal_configs
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.gpu import TARGETS
from flashgen.spec.vocabulary import Direction, padded
from tests.cpu.compile.test_hopper_compile import (
    Build,
    _arrivals,
    _loads,
    _never,
    _waits,
    build,
    name_of,
)
from tests.makers import each, make_config, make_spec

__all__ = ["build"]  # the fixture

H200 = TARGETS["nvidia_h200"]
PRODUCTS = {"backward_dkv": 4, "backward_fused": 5, "backward_dq": 3}
"""Of a tile: S, dP and what sums the direction has."""


def shown(
    direction: Direction,
    dim: int,
    mask: str,
    warps: int = 8,
    next_s: bool = False,
    persistent: bool = False,
) -> tuple[AttentionSpec, KernelConfig]:
    owned = 16 * warps
    br, bc = (owned, 64) if direction == "backward_dq" else (64, owned)
    if next_s:
        br = 128
    elif dim == 256 and direction != "backward_dq":
        bc = 64
    config = make_config(
        br,
        bc,
        num_warps=warps,
        num_stages=2,
        schedule="hopper",
        loads="descriptor",
        next_s=next_s,
        persistent=persistent,
    )
    return make_spec("bfloat16", dim, mask, direction=direction), config


SHOWN = [
    shown("backward_dq", 128, "causal"),
    *each(
        [
            shown("backward_dkv", 128, "causal"),
            shown("backward_fused", 128, "causal"),
            shown("backward_fused", 256, "causal"),
            shown("backward_dkv", 128, "none"),
            shown("backward_dkv", 64, "causal"),
            shown("backward_dq", 64, "none"),
            shown("backward_dq", 128, "none", 12),
            shown("backward_fused", 64, "none"),
            shown("backward_fused", 64, "causal"),
            shown("backward_fused", 128, "none"),
            shown("backward_fused", 64, "none", next_s=True),
            shown("backward_fused", 64, "causal", next_s=True),
            shown("backward_fused", 256, "none"),
            shown("backward_dkv", 256, "causal"),
            shown("backward_dkv", 256, "none"),
            shown("backward_dkv", 64, "none", persistent=True),
            shown("backward_dkv", 64, "causal", persistent=True),
            shown("backward_dkv", 128, "causal", persistent=True),
            shown("backward_dq", 64, "none", 12, persistent=True),
            shown("backward_dq", 64, "causal", persistent=True),
            shown("backward_dq", 128, "causal", persistent=True),
        ]
    ),
]


def fused_of(pair: Any) -> bool:
    """Whether a pair, or a parameter made of one, is of the fused kernel."""
    return getattr(pair, "values", pair)[0].direction == "backward_fused"


@pytest.mark.slow("four kernels")
@pytest.mark.parametrize(
    ("dim", "mask"), [(64, "causal"), (128, "none"), (128, "causal"), (256, "causal")]
)
def test_ds_leaves_without_spills_in_a_loop(build: Build, dim: int, mask: str) -> None:
    spec, config = shown("backward_ds", dim, mask)
    compiled, _ = build(spec, config)
    assert judge(compiled, spec, config, H200) == (Status.OK, "")
    same, _ = build(*shown("backward_dkv", dim, mask))
    assert compiled.loop is not None
    assert same.loop is not None
    assert compiled.loop.instructions <= same.loop.instructions + 70


@pytest.mark.parametrize(("spec", "config"), SHOWN, ids=name_of)
def test_the_schedule_survives_ptxas(
    build: Build, spec: AttentionSpec, config: KernelConfig
) -> None:
    compiled, _ = build(spec, config)
    assert judge(compiled, spec, config, H200) == (Status.OK, "")
    # A loop of every consumer and a masked one: of dQ always, for the ragged end, and of the fused
    # kernel; else of a diagonal.
    shared = spec.direction in BY_KEYS and wide(spec)  # of a ragged end, 16 minima a tile
    masked = spec.causal or (not shared and spec.direction in ("backward_dq", "backward_fused"))
    assert len(compiled.loops) == config.consumers * (2 if masked else 1)
    products = PRODUCTS[spec.direction]
    for loop in compiled.loops:
        assert loop.spills == 0
        assert loop.warpgroup_arrives == SCHEDULES[config.schedule].batches(spec, config)
        assert (loop.exp2_under_matrix or 0) >= HOPPER_OVERLAP
    walked = config.bc if spec.direction == "backward_dq" else config.br
    # Four warps share the products of a consumer's 64 rows or keys; of dQ a consumer has a share,
    # and where both share the keys, of all.
    flops = products * 2 * 64 * walked * padded(spec.head_dim) // (2 if shared else 1)
    assert {loop.matrix_flops * 4 for loop in compiled.loops} == {flops}
    assert compiled.advisories == ()
    assert overlap(compiled, config) >= HOPPER_OVERLAP
    assert residents(compiled, H200) >= 1
    bound = shared_bound_bytes(spec, config, H200)
    assert bound <= compiled.shared_bytes <= bound + 4096  # statistics and barriers


@pytest.mark.parametrize(("spec", "config"), SHOWN[:4], ids=name_of)
def test_the_barriers_of_the_machine_code(
    build: Build, spec: AttentionSpec, config: KernelConfig
) -> None:
    """Per turn of a loop: each barrier of the text once, whatever the compiler moved."""
    _, listing = build(spec, config)
    main = loops.main_bodies(listing)
    consumers = [role for role in loops.roles(listing, main) if role.loops[0] in main]
    assert len(consumers) == config.consumers
    shared = spec.direction in BY_KEYS and wide(spec)
    # dK and dV issue dV before they await dP, and dQ takes dP in halves: neither has an anchor.
    anchored = shared or spec.direction == "backward_fused"
    anchors = 64 * 64 // 128 // 16 if anchored else 0
    meetings = 2 if shared else 1 if spec.direction == "backward_fused" else 0
    for role in consumers:
        for body in role.loops:
            assert (len(_waits(body)), len(_arrivals(body))) == (2, 1), "two full, one empty"
            assert _never(body) == anchors
            assert _meetings(body) == meetings
    # Where heads share keys, the loop over their rows lies in one over the heads.
    ring = min((x for x in loops.loops(listing.instructions) if _loads(x)), key=len)
    assert (len(_waits(ring)), len(_arrivals(ring))) == (1, 2)
    # A load is 64 elements wide: what 128 bytes of swizzle hold.
    assert len(_loads(ring)) == 2 * spec.head_dim // 64


def _meetings(body: list[Instruction]) -> int:
    """How often all consumers meet at barrier 8, which Triton has no use for."""
    return sum(i.barrier_name == 8 and i.barrier_threads == 256 for i in body)


AT_MOST = {(64, False): 10.4, (64, True): 9.3, (128, False): 11.5, (256, False): 23.3}


@pytest.mark.skipif(triton.__version__ != "3.7.1", reason="counts of other compilers differ")
@pytest.mark.parametrize(
    ("spec", "config"), [pair for pair in SHOWN if fused_of(pair)], ids=name_of
)
def test_instructions_a_score_of_five_products(
    build: Build, spec: AttentionSpec, config: KernelConfig
) -> None:
    """Of the slowest consumer's steady loop; FlashAttention-3 needs 11.08 and 10.52 at head dim 64,
    12.75 and 15.28 at 128, 25.65 and 26.40 at 256.
    """
    compiled, listing = build(spec, config)
    scores = config.bc * config.br / 256
    steady = compiled.loops[: config.consumers]
    assert (
        max(loop.instructions for loop in steady) / scores <= AT_MOST[spec.head_dim, config.next_s]
    )
    for body in loops.main_bodies(listing):
        added = [i for i in body if i.base == "REDG"]
        assert len(added) == config.br * spec.head_dim // 2 // 128 // 4, "four values each"
        assert not any(i.predicate for i in added), "no mask"


@pytest.mark.skipif(triton.__version__ != "3.7.1", reason="the code of other compilers differs")
@pytest.mark.parametrize(
    ("direction", "mask"),
    each([(d, mask) for d in ("backward_dq", "backward_dkv") for mask in ("causal", "none")], 2),
)
def test_a_further_tile_of_a_persistent_program_takes_less_than_a_block(
    build: Build, direction: Direction, mask: str
) -> None:
    """Without spills, even once a tile, and with the loops of a kernel of one tile a program."""
    spec, config = shown(direction, 64, mask)
    config = replace(config, persistent=True)
    compiled, listing = build(spec, config)
    assert compiled.spill_bytes == 0
    one_tile, _ = build(spec, replace(config, persistent=False))
    most = max(loop.instructions for loop in one_tile.loops)
    assert max(loop.instructions for loop in compiled.loops) <= 1.06 * most
    board = Scoreboard(listing, H200, num_warps=4, shared_bytes=compiled.shared_bytes)
    assert 0 < board.tile_cycles(1) < 0.5 * board.block_cycles(1)


@pytest.mark.slow("make test proves a sample of it")
@pytest.mark.parametrize("mask", ["none", "causal"])
@pytest.mark.parametrize(
    ("direction", "head_dims"),
    [
        ("backward_dkv", (64, 96, 128, 256)),
        ("backward_dq", (64, 96, 128, 192, 256)),
        ("backward_fused", (64, 96, 128, 256)),
    ],
)
def test_the_space_has_sound_kernels(
    build: Build, direction: Direction, head_dims: tuple[int, ...], mask: str
) -> None:
    for head_dim in head_dims:
        spec = make_spec("bfloat16", head_dim, mask, direction=direction)
        configs = [
            config
            for config in legal_configs(spec, H200, on_gpu=True)
            if config.schedule == "hopper" and config.order == "plain"
        ]
        assert configs
        verdicts = {c.label: judge(build(spec, c)[0], spec, c, H200)[0] for c in configs}
        assert Status.OK in verdicts.values(), verdicts
        assert set(verdicts.values()) <= {Status.OK, Status.SPILLS}, verdicts
