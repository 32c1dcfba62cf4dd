"""Schedule hopper's dK/dV and dQ in programs of many tiles, as Triton compiles them.

As test_hopper_persistent.py has it for the forward: tiles are handed out by a counter, the rings go
on from tile to tile, and what the next tile needs is loaded while the gradients of this one are
stored. A tile is computed alone, so its bits are those of a kernel of one tile a program.

The executor runs one block after another, in an order that the seed draws: the first takes all
tiles but the first ones of the others.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from flashgen.evaluate.check import cases_of, check_loaded
from flashgen.evaluate.check_attention import packed_case, tile_cases, walking_cases
from flashgen.kernels.launch import bind
from flashgen.kernels.launch_backward import Backward
from flashgen.kernels.launch_forward import INTERPRETED
from flashgen.reference.cases import CheckCase
from flashgen.runtime.eager import attention as eager
from flashgen.schedules.config import KernelConfig
from flashgen.schedules.hopper import HOPPER
from flashgen.schedules.legality import why_illegal
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.gpu import TARGETS
from flashgen.spec.problem import Problem
from flashgen.spec.vocabulary import Direction
from tests.cpu.kernels import test_hopper_backward
from tests.cpu.kernels.test_hopper_persistent import SCHEDULER_MUTANTS, of_many
from tests.executed import (
    Load,
    assert_found,
    assert_right,
    case,
    compiled,
    loads,  # noqa: F401  # a fixture
)
from tests.makers import each, make_spec

H200 = TARGETS["nvidia_h200"]


def persistent(direction: Direction, *tile: int, order: str = "plain") -> KernelConfig:
    """A config by what its programs walk."""
    return replace(test_hopper_backward.hopper(direction, *tile, order=order), persistent=True)


DKV, DQ = persistent("backward_dkv", order="grouped"), persistent("backward_dq", order="grouped")


def spec_of(direction: Direction, mask: str = "causal", dim: int = 64, **way: Any) -> AttentionSpec:
    return make_spec(way.pop("dtype", "bfloat16"), dim, mask, direction=direction, **way)


VARIANTS: list[tuple[AttentionSpec, KernelConfig]] = [
    (spec_of("backward_dkv", "none", dtype="float16"), persistent("backward_dkv", 64, 3)),
    (spec_of("backward_dq", "none", dtype="float16"), persistent("backward_dq", 64, 2, 12)),
    (spec_of("backward_dkv"), persistent("backward_dkv", 128, order="grouped")),
    (spec_of("backward_dq"), persistent("backward_dq", 128, order="grouped")),
    (spec_of("backward_dq"), persistent("backward_dq", 128, order="longest_first")),
    (spec_of("backward_dkv", dim=128), DKV),
    (spec_of("backward_dq", dim=128), DQ),
    (spec_of("backward_dkv", dim=40, head_dim_v=72), DKV),
    (spec_of("backward_dq", dim=40, head_dim_v=72), DQ),
    (spec_of("backward_dkv", window=True, softcap=True), DKV),
    (spec_of("backward_dq", window=True, softcap=True), DQ),
    (spec_of("backward_dkv", chunk=True, alibi=True), DKV),
    (spec_of("backward_dq", chunk=True, alibi=True), persistent("backward_dq", 32)),
    *(
        (spec_of(direction, mask, dim, varlen=True, **features), config)
        for direction, config, plain in (
            ("backward_dkv", DKV, persistent("backward_dkv", 128)),
            ("backward_dq", DQ, persistent("backward_dq", 64, 2, 12)),
        )
        for mask, dim, config, features in (
            ("causal", 64, config, {"window": True, "softcap": True}),
            ("causal", 128, config, {"dtype": "float16"}),
            ("none", 64, plain, {"window": True}),
            ("none", 96, persistent(direction), {"head_dim_v": 72}),
        )
    ),
]


@pytest.mark.parametrize(("spec", "config"), each(VARIANTS))
def test_every_variant_is_right(spec: AttentionSpec, config: KernelConfig) -> None:
    assert why_illegal(spec, config, H200) is None
    assert_right(spec, config)


@pytest.mark.parametrize(
    ("spec", "config", "sentence"),
    [
        (spec_of("backward_dq", dim=256), DQ, "persistent gradients need head dims up to 128"),
        (
            spec_of("backward_ds"),
            persistent("backward_dkv"),
            "persistent needs direction forward, or schedule hopper",
        ),
        (
            spec_of("backward_dq", dim=128),
            persistent("backward_dq", 128),
            "bytes of shared memory at least",
        ),
    ],
)
def test_what_is_illegal_is_said(spec: AttentionSpec, config: KernelConfig, sentence: str) -> None:
    """At head dim 128 dQ has two places for 128 rows of Q and dO, and none for rings of 128 keys."""
    assert sentence in (why_illegal(spec, config, H200) or "")
    assert why_illegal(spec, replace(config, persistent=False), H200) is None


def test_the_pointer_twin_deals_no_tiles_out() -> None:
    for spec, config in ((spec_of("backward_dkv"), DKV), (spec_of("backward_dq"), DQ)):
        twin = HOPPER.twin(spec, config)
        assert (twin.loads, twin.persistent) == ("pointer", False)
        assert why_illegal(spec, twin, H200) is None


@pytest.mark.parametrize(
    ("direction", "mask", "walked", "stages"),
    each(
        [
            (direction, mask, *tile)
            for mask in ("causal", "none")
            for direction in ("backward_dkv", "backward_dq")
            for tile in ((64, 2), (64, 3))
        ]
    ),
)
def test_fewer_and_more_tiles_than_programs(
    direction: Direction, mask: str, walked: int, stages: int
) -> None:
    """Five programs, of 1 to 24 tiles: each place of a ring begins a tile, and both places of the
    tile's own are used again. Some tiles walk nothing.
    """
    order = "grouped" if mask == "causal" else "plain"
    spec, config = spec_of(direction, mask), persistent(direction, walked, stages, order=order)
    own_shapes = [(1, 33, 65), (5, 128, 31), (6, 127, 97), (12, 389, 193), (6, 385, 385)]
    kernel = compiled(spec, config)
    for seed, (heads, owned, other) in enumerate(own_shapes):
        before = kernel.report.blocks
        sq, sk = (other, owned) if direction == "backward_dkv" else (owned, other)
        problem = Problem(batch=1, heads=heads, kv_heads=heads, seq_q=sq, seq_k=sk)
        cases = [CheckCase(problem=problem, alignment="top_left")]
        result = check_loaded(kernel, spec, config, seed=seed, cases=cases)
        assert result.passed, result
        assert kernel.report.blocks - before == min(INTERPRETED.sms, heads * -(-owned // 128))


def test_a_check_has_tiles_enough_for_the_programs_of_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those of dK and dV are of keys, of the heads of K."""
    for direction, config in (("backward_dkv", DKV), ("backward_dq", DQ)):
        spec = spec_of(direction)
        assert cases_of(spec, config) == tile_cases(spec, config)
        monkeypatch.setattr(
            "flashgen.evaluate.check_attention.order_limits",
            lambda device: INTERPRETED._replace(sms=132),
        )
        (walked,) = walking_cases(spec, config, "cpu")
        monkeypatch.undo()
        of = walked.problem
        own = (of.kv_heads, of.seq_k) if direction == "backward_dkv" else (of.heads, of.seq_q)
        assert own[0] * -(-own[1] // 128) == 3 * 132


@pytest.mark.parametrize(
    ("direction", "order"),
    each(
        [(d, o) for d in ("backward_dkv", "backward_dq") for o in ("grouped", "plain")],
        3,
    ),
)
def test_tiles_are_handed_out_in_their_order(
    direction: Direction,
    order: str,
    loads: dict[int, list[Load]],  # noqa: F811
) -> None:
    """Each once, the heads of a run in turn; and of a tile K and V, or Q and dO, before the rest."""
    spec, config = spec_of(direction), persistent(direction, order=order)
    problem = Problem(batch=1, heads=6, kv_heads=3, seq_q=256, seq_k=256)
    assert_right(spec, config, [CheckCase(problem=problem)])
    # Two SMs to each head of K: two heads of three are a run, or four of six of Q.
    heads, together, tiles = (3, 2, (0, 128)) if direction == "backward_dkv" else (6, 4, (128, 0))
    if order == "plain":
        expected = [(head, tile) for head in range(heads) for tile in sorted(tiles)]
    else:
        expected = [
            (head, tile)
            for first in range(0, heads, together)
            for tile in tiles
            for head in range(first, min(first + together, heads))
        ]
    others = iter(expected[INTERPRETED.sms :])
    for program, copied in loads.items():  # as they ran
        own = copied[0][0]  # of K, or of Q
        starts = [at[1:3] for base, _, at in copied if base == own]
        if direction == "backward_dq":  # two consumers have their rows each
            assert starts[1::2] == [(head, row + 64) for head, row in starts[::2]]
            starts = starts[::2]
        mine = [expected[program], *(next(others) for _ in starts[1:])]
        assert starts == mine
    assert not list(others)


def call_of(spec: AttentionSpec, heads: int, sq: int, sk: int) -> Backward:
    """With float64's LSE and delta."""
    generator = torch.Generator().manual_seed(sq)
    q, k, v, do = (
        torch.randn(1, heads, length, 64, generator=generator).bfloat16()
        for length in (sq, sk, sk, sq)
    )
    diagonal = 0 if spec.causal else None
    o, lse = eager.attention(q.double(), k.double(), v.double(), scale=0.125, diagonal=diagonal)
    delta = (o * do).sum(-1).float()
    return Backward(
        q=q, k=k, v=v, do=do, lse=lse.float(), delta=delta, scale=0.125, diagonal=diagonal
    )


@pytest.mark.parametrize(
    ("direction", "mask", "orders"),
    [
        ("backward_dkv", "causal", 2),
        ("backward_dq", "causal", 2),
        *(
            pytest.param(direction, mask, 20, marks=pytest.mark.slow("20 orders of warps, copies"))
            for direction in ("backward_dkv", "backward_dq")
            for mask in ("causal", "none")
        ),
    ],
)
def test_no_order_changes_a_bit(direction: Direction, mask: str, orders: int) -> None:
    """Nor do programs of several tiles, of one counter, which each launch leaves as it was."""
    spec = spec_of(direction, mask)
    config = persistent(direction, order="grouped" if spec.causal else "plain")
    few = orders < 20
    call = call_of(spec, 7, 65, 128) if few else call_of(spec, 5, 300, 300)
    one_tile, found = replace(config, persistent=False), set()
    runs = [(one_tile, bind(compiled(spec, one_tile), spec, one_tile))]
    runs += [(config, bind(compiled(spec, config), spec, config))] * orders
    for _, run in runs:
        found.add(b"".join(each.view(torch.int16).numpy().tobytes() for each in run(call)))
    assert len(found) == 1


BEHIND = "behind = pid >= tiles * batch_heads"
MUTANTS = {
    **SCHEDULER_MUTANTS,
    "the last tile is left out": (BEHIND, f"{BEHIND} - 1"),
}
"""Of the scheduler, which is that of dQ, too; a text finds by itself which tile is the pid-th."""


def of_the_place(ring: str, count: str, what: str, gradients: str) -> dict[str, tuple[str, str]]:
    """Of the two places of what a tile holds: the ring of their barriers, the number of tiles
    before, and as comments name what lies there.
    """
    there = f"    mbarrier.wait({ring}_full.index(place), ({count} >> 1) & 1)\n"
    comment = (
        f"    # The next {what} take the other place, of which the TMA unit has read {gradients}.\n"
    )
    read = "    tma.store_wait(0)\n"
    free = f"mbarrier.arrive({ring}_empty.index(0), count=1)"
    awaited = f"mbarrier.wait({ring}_empty.index(0), ({count} & 1) ^ 1)"
    return {
        "it is loaded while gradients leave it": (awaited, "pass"),
        "the wrong phase is loaded": (f"({count} & 1) ^ 1)", f"({count} & 1))"),
        "it is read before it is there": (there, ""),
        "the wrong phase is read": (f"({count} >> 1) & 1)", f"{count} & 1)"),
        "there is one place": (f"place = {count} & 1", f"place = {count} & 0"),
        "it is never given on": (free, "pass"),
        "it is given on twice": (free, f"{free}; {free}"),
        "it is given on before the next is there": (
            f"{there}{comment}{read}    {free}\n", f"{read}    {free}\n{there}"),
        "it is given on before the gradients are read": (f"{read}    {free}", f"    {free}"),
        "one consumer gives it on": (
            f"{ring}_empty = new_barriers(1, WARPGROUPS)", f"{ring}_empty = new_barriers(1, 1)"),
        "gradients are not stored when the program ends": (
            f"        taken = receive(handed, {count} & 1, 4)\n{read}",
            f"        taken = receive(handed, {count} & 1, 4)\n"),
        "the producer does not count tiles": (
            f"        {count} += 1\n        taken = receive(handed, {count} & 1, 1)",
            f"        taken = receive(handed, {count} & 1, 1)"),
    }  # fmt: skip


DKV_MUTANTS = {
    **MUTANTS,
    **of_the_place("kv", "walked", "keys", "the gradients before"),
    "a sequence too far": ("return found, batch, kv_head", "return found, batch + 1, kv_head"),
    "the producer begins its rings anew": (
        "        walked += 1\n        taken = receive(handed, walked & 1, 1)",
        "        walked += 1\n        nth = 0\n        taken = receive(handed, walked & 1, 1)"),
    "the consumers begin theirs anew": ("    return nth\n", "    return nth * 0\n"),
}  # fmt: skip
STATISTICS = """            lse_smem.index(place * WARPGROUPS + w).store(lse_log2e)
            delta_smem.index(place * WARPGROUPS + w).store(delta)
"""
EXPECT_ROWS = """        barrier()
        mbarrier.expect(rows_full.index(place), WARPGROUPS * ROW_BYTES)
"""
DQ_MUTANTS = {
    "the last tile is left out": MUTANTS["the last tile is left out"],
    **of_the_place("rows", "nth_rows", "rows", "dQ of those before"),
    "a sequence too far": ("return found, batch, head", "return found, batch + 1, head"),
    "the head of K of another": ("return found, batch, head, kv_head", "return found, batch, head, head"),
    "LSE comes after its barrier": (
        STATISTICS + EXPECT_ROWS,
        "            pass\n" + EXPECT_ROWS + STATISTICS.replace("            ", "        ")),
    "half of the rows are expected": ("WARPGROUPS * ROW_BYTES", "ROW_BYTES"),
    "the producer begins its rings anew": ("walked += key_tiles", "walked = 0 * key_tiles"),
    "the consumers begin theirs anew": ("return walked + key_tiles", "return 0 * (walked + key_tiles)"),
    "the consumers count a tile of keys too many": ("return walked + key_tiles", "return walked + key_tiles + 1"),
    "rows of the other consumer": ("own = place * WARPGROUPS + WARPGROUP", "own = place * WARPGROUPS + 1 - WARPGROUP"),
    "LSE of another head": ("head_rows = (batch * heads + head)", "head_rows = (batch * heads + kv_head)"),
}  # fmt: skip
DKV_CASES = [
    case(65, 257, heads=4, kv=2, batch=2),
    # One tile of rows: only then the producer comes to a place that was given on too early.
    case(64, 257, "top_left", heads=6, kv=6),
    # The third launch: of a counter that the second did not leave as it was. Two of three tiles walk
    # no rows, so that consumers come to the next before the producer does.
    case(64, 257, "top_left", heads=3, kv=3),
]
DQ_CASES = [
    case(257, 65, heads=4, kv=2, batch=2),
    case(257, 64, "top_left", heads=6),
    case(129, 64, "top_left", heads=3),
]


@pytest.mark.parametrize("mutant", each(DKV_MUTANTS))
def test_a_broken_text_of_dk_and_dv_is_found(mutant: str) -> None:
    """A place that is given on too early leaves a phase unseen, in few orders of warps: with tiles of
    128 rows in one of the three that are tried.
    """
    rows = 128 if mutant == "it is given on before the next is there" else 64
    config = persistent("backward_dkv", rows, order="grouped")
    assert_found(spec_of("backward_dkv"), config, DKV_MUTANTS[mutant], DKV_CASES)


@pytest.mark.parametrize("mutant", each(DQ_MUTANTS))
def test_a_broken_text_of_dq_is_found(mutant: str) -> None:
    assert_found(spec_of("backward_dq"), DQ, DQ_MUTANTS[mutant], DQ_CASES)


def packed_mutants(own: str, other: str, nth: int, side: str) -> dict[str, tuple[str, str]]:
    """Of what finds a tile of packed sequences. own: the letter of what a program owns; nth: the
    number of a tile that says where its own rows end.
    """
    lengths = f"{own}_end, seq_{own}, {other}_end, seq_{other} = taken"
    return {
        "the last tile is left out": MUTANTS["the last tile is left out"],
        "a sequence that begins here is not found": ("* heads <= pid)", "* heads < pid)"),
        "the search goes too short a way": ("found += steps * step", "found += steps"),
        "the search ends after a step": ("left = gl.minimum(left - steps * step, step)", "left = 1"),
        "a sequence has no tile more than its share": (
            ".to(gl.int32) + sequence\n", ".to(gl.int32) + sequence * 0\n"),
        "nobody is told of the end": (
            f"unused is None or taken[0] < taken[{nth + 1}]",
            f"unused is None or taken[0] >= 0 and taken[0] < taken[{nth + 1}]"),
        "places of no sequence are left": ("if unused is not None and taken[0] >= 0:", "if False:"),
        "they begin with all": (
            f"begin = taken[{nth}] + taken[0]", "begin = taken[0]"),
        "all tiles clear the first": (f"begin = taken[{nth}] + taken[0]", f"begin = taken[{nth}]"),
        "some of them are left": (
            f"gl.minimum(end, begin + {side})", f"gl.minimum(end, begin + {side} - 4)"),
        "a diagonal too far": (
            "bottom_right * (seq_k - seq_q)", "bottom_right * (seq_k - seq_q + 1)"),
        "the diagonal of all": ("            diagonal = bottom_right", "            _ = bottom_right"),
        "the mask of all": ("                last += diagonal", "                last += 0"),
        "lengths of one another": (
            lengths, f"{own}_end, seq_{other}, {other}_end, seq_{own} = taken"),
        "a sequence too far": ("return found, sequence, ", "return found, sequence + 1, "),
        "ends of one another": (
            lengths, f"{other}_end, seq_{own}, {own}_end, seq_{other} = taken"),
        "LSE behind the sequence": ("+ (q_end - seq_q)", "+ q_end"),
    }  # fmt: skip


PACKED_CASES = [
    of_many((129, 65), (3, 40), (128, 128)),
    # Behind each of three sequences, places of none for some tiles.
    packed_case(((65, 129), (40, 3), (163, 141)), heads=2, spare=(300, 300)),
    of_many((65, 129), (40, 3)),  # the last tile of all has rows, and keys
]
PACKED = {"varlen": True, "alibi": True, "chunk": True}


@pytest.mark.parametrize("mutant", each(packed_mutants("k", "q", 3, "BC")))
def test_a_broken_search_for_keys_is_found(mutant: str) -> None:
    broken = packed_mutants("k", "q", 3, "BC")[mutant]
    assert_found(spec_of("backward_dkv", **PACKED), DKV, broken, PACKED_CASES)


@pytest.mark.parametrize("mutant", each(packed_mutants("q", "k", 4, "BR")))
def test_a_broken_search_for_rows_is_found(mutant: str) -> None:
    broken = packed_mutants("q", "k", 4, "BR")[mutant]
    assert_found(spec_of("backward_dq", **PACKED), DQ, broken, PACKED_CASES)


@pytest.mark.parametrize(
    ("direction", "boxes"), [("backward_dkv", 1 * 3), ("backward_dq", 2 * 2 * 4)]
)
def test_packed_sequences_are_found_among_many(
    direction: Direction,
    boxes: int,
    loads: dict[int, list[Load]],  # noqa: F811
) -> None:
    """Tiles without rows are passed over. The one head of K has 1, 1 and 1 tiles of keys; the two
    of Q have 2, 1 and 1 of rows, each of which two consumers have in halves.
    """
    config = persistent(direction, order="grouped")
    assert_right(spec_of(direction, **PACKED), config, PACKED_CASES[:1])
    of_own = [
        sum(base == copied[0][0] for base, *_ in copied) for copied in loads.values() if copied
    ]
    assert sum(of_own) == boxes
