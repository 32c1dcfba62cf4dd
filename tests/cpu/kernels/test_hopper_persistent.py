"""Schedule hopper in other orders of tiles, and in programs of many tiles, as Triton compiles it.

As test_hopper_forward.py has it for one tile a program: here tiles are handed out by a counter, the
rings go on from tile to tile, Q is loaded again, and O is stored while the next tile begins.

The executor runs one block after another, in an order that the seed draws: the first takes all
tiles but the first ones of the others.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from flashgen.evaluate import check_attention
from flashgen.evaluate.check import cases_of, check_loaded
from flashgen.evaluate.check_attention import PackedCase, tile_cases
from flashgen.kernels import launch_forward
from flashgen.kernels.launch import launch
from flashgen.kernels.launch_forward import INTERPRETED, OrderLimits
from flashgen.ptx import FaultsFound
from flashgen.reference.cases import CheckCase
from flashgen.schedules.config import KernelConfig
from flashgen.schedules.hopper import HOPPER
from flashgen.schedules.legality import why_illegal
from flashgen.spec.gpu import TARGETS
from flashgen.spec.problem import Problem
from tests.cpu.kernels.test_hopper_forward import hopper
from tests.executed import (
    Load,
    assert_found,
    assert_right,
    case,
    compiled,
    loads,  # noqa: F401  # a fixture
)
from tests.makers import each, make_spec

ALL_ORDERS = ("plain", "longest_first", "head_reversal", "grouped")
WAYS = [
    ((96, 96), hopper(192, 64, persistent=True)),
    ((64, 64), hopper(192, 32, 3)),
    ((128, 128), hopper()),
    ((256, 256), hopper(persistent=True)),
    ((192, 128), hopper(persistent=True)),
    ((64, 64), hopper(128, 32, 3, persistent=True)),
]


@pytest.mark.parametrize(
    ("dims", "config", "order"),
    each([(*way, order) for order in reversed(ALL_ORDERS) for way in WAYS]),
)
def test_every_order_is_right(dims: tuple[int, int], config: KernelConfig, order: Any) -> None:
    spec = make_spec("bfloat16", dims[0], "causal", head_dim_v=dims[1])
    assert_right(spec, replace(config, order=order))


@pytest.mark.parametrize(
    ("dim", "config", "mask"),
    each(
        [
            (*way, mask)
            for mask in ("causal", "none")
            for way in (
                (64, hopper(128, 32, 2, persistent=True)),
                (64, hopper(192, 32, 3, persistent=True)),
                (256, hopper(128, 32, 2, persistent=True)),
            )
        ],
    ),
)
def test_fewer_and_more_tiles_than_programs(dim: int, config: KernelConfig, mask: str) -> None:
    """Five programs, of 1 to 24 tiles of O: each place of a ring begins a tile, and Q is used again.

    Lengths are such that tiles of one program see odd and even numbers of keys.
    """
    spec, br = make_spec("float16", dim, mask), config.br
    shapes = [
        (1, 1, 1, 33, 65),
        (1, 5, 5, br, 31),
        (2, 3, 1, br - 1, 97),
        (1, 6, 2, 3 * br + 5, 193),
    ]
    shapes.append((3, 2, 1, 3 * br + 1, 3 * br + 1))
    kernel = compiled(spec, config)
    for seed, (batch, heads, kv_heads, sq, sk) in enumerate(shapes):
        before = kernel.report.blocks
        problem = Problem(batch=batch, heads=heads, kv_heads=kv_heads, seq_q=sq, seq_k=sk)
        cases = [CheckCase(problem=problem, alignment="top_left")]
        result = check_loaded(kernel, spec, config, seed=seed, cases=cases)
        assert result.passed, result
        tiles = batch * heads * -(-sq // br)
        assert kernel.report.blocks - before == min(INTERPRETED.sms, tiles)


@pytest.mark.slow("72 tiles of O")
def test_a_check_has_tiles_enough_for_the_programs_of_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
    loads: dict[int, list[Load]],  # noqa: F811
) -> None:
    """With as many SMs as tiles no program walks, and a ring that begins anew is not found."""
    spec, config = make_spec("bfloat16", 64, "causal"), hopper(128, 32, 2, persistent=True)
    assert cases_of(spec, config) == tile_cases(spec, config)
    few = OrderLimits(sms=24, l2_bytes=1 << 15)
    for module in (launch_forward, check_attention):
        monkeypatch.setattr(module, "order_limits", lambda device: few)
    assert cases_of(spec, replace(config, persistent=False)) == tile_cases(spec, config)
    *usual, walked = cases_of(spec, config)
    assert tuple(usual) == tile_cases(spec, config)
    anew = compiled(spec, config, 0, "walked, q_phase = end", "walked, q_phase = 0")
    assert check_loaded(anew, spec, config, cases=usual).passed
    assert_right(spec, config, [walked])
    of_q = [sum(box[2] == 64 for _, box, _ in copied) for copied in loads.values()]
    assert len(of_q) == few.sms
    assert min(of_q) >= 3 * config.consumers
    with pytest.raises(FaultsFound):
        check_loaded(anew, spec, config, cases=[walked])


@pytest.mark.parametrize("order", each(ALL_ORDERS, 4))
def test_tiles_are_handed_out_in_their_order(
    order: Any,
    loads: dict[int, list[Load]],  # noqa: F811
) -> None:
    """Heads, rows and keys, as the producer loads them; the results say that consumers agree."""
    spec, config = make_spec("bfloat16", 64, "causal"), hopper(128, 32, 2, order, persistent=True)
    problem = Problem(batch=1, heads=6, kv_heads=3, seq_q=256, seq_k=256)
    assert_right(spec, config, [CheckCase(problem=problem)])
    rows, heads = (0, 128), range(6)
    together = 2  # K and V of one head do not fit half of INTERPRETED's L2: one group of two heads
    expected = {
        "plain": [(h, r) for h in heads for r in rows],
        "longest_first": [(h, r) for h in heads for r in rows[::-1]],
        "head_reversal": [(h, r) for h in heads for r in (rows if h % 2 else rows[::-1])],
        "grouped": [
            (h, r)
            for first in range(0, 6, together)
            for r in rows[::-1]
            for h in range(first, first + together)
        ],
    }[order]
    others = iter(expected[INTERPRETED.sms :])
    for program, copied in loads.items():  # as they ran
        q = next(base for base, box, _ in copied if box[2] == 64)
        of_q = [(at[1], at[2]) for base, _, at in copied if base == q]
        mine = [expected[program], *itertools.islice(others, len(of_q) // 2 - 1)]
        assert of_q == [(head, at + rows) for head, at in mine for rows in (0, 64)]
        keys = [(at[1], at[2]) for _, box, at in copied if box[2] == 32]
        seen = [(head // 2, at) for head, row in mine for at in range(0, row + 128, 32)]
        assert sorted(keys) == sorted(2 * seen), "K and V, once each"
    assert not list(others)


@pytest.mark.slow("twenty orders of blocks, warps and copies")
@pytest.mark.parametrize("mask", ["causal", "none"])
def test_no_order_changes_a_bit(mask: str) -> None:
    spec = make_spec("bfloat16", 64, mask)
    config = hopper(128, 32, 2, "longest_first" if spec.causal else "plain", persistent=True)
    generator = torch.Generator().manual_seed(7)
    q, k, v = (torch.randn(1, 5, 300, 64, generator=generator).bfloat16() for _ in range(3))
    kernel, found = compiled(spec, config), set()
    for _ in range(20):  # of one counter, which each leaves as it was
        o, lse = launch(kernel, spec, config, q, k, v, scale=0.125, diagonal=0)
        found.add((o.view(torch.int16).numpy().tobytes(), lse.numpy().tobytes()))
    assert len(found) == 1


GIVE_Q = "mbarrier.arrive(q_empty.index(w), count=1)"
AWAIT_Q = "        mbarrier.wait(q_full.index(w), q_phase)\n"
READ_LAST_V = "\n            acc = warpgroup_mma_wait(0, deps=(acc,))"
FREE_LAST_V = "\n            mbarrier.arrive(v_empty.index(stage), count=1)"
STORED = "            tma.store_wait(0)\n"
GIVE_PLACE = f"            {GIVE_Q}\n"
PRODUCER = "taken = receive(handed, 0, 1)\n    while taken[0] >= 0:\n"
NEXT = 'pid = gl.num_programs(0) + gl.atomic_add(counter_ptr, 1, sem="relaxed")'
STORE_NUMBERS = """            for n in gl.static_range(NUMBERS):
                taken_smem.index(n).store(gl.full([1], 0, gl.int32, ONE) + taken[n])
"""
TELL = "            mbarrier.arrive(taken_full.index(0), count=1)\n"
READ_NUMBERS = """    for n in gl.static_range(NUMBERS):
        taken += (gl.max(taken_smem.index(n).load(ONE), 0),)
"""
GIVE_BACK = "    mbarrier.arrive(taken_empty.index(0), count=1)\n"

SCHEDULER_MUTANTS = {
    "the last tile is left out": ("gl.where(pid < count, pid, -1)", "gl.where(pid < count - 1, pid, -1)"),
    "a tile is taken twice": (NEXT, NEXT.replace("(0) +", "(0) - 1 +")),
    "a tile is never taken": (NEXT, NEXT.replace("counter_ptr, 1", "counter_ptr, 2")),
    "the counter is not left as it was": ("gl.atomic_xchg(counter_ptr, 0)", "pass"),
    "nor the count of programs": ("gl.atomic_xchg(counter_ptr + 1, 0)", "pass"),
    "the first that ends sets the counter to 0": ("== gl.num_programs(0) - 1:", "== 0:"),
    "a number is given before it is there": (STORE_NUMBERS + TELL, TELL + STORE_NUMBERS),
    "a number is overwritten before it is read": ("mbarrier.wait(taken_empty.index(0), phase ^ 1)", "pass"),
    "a number is given back before it is read": (READ_NUMBERS + GIVE_BACK, GIVE_BACK + READ_NUMBERS),
    "a number is read before it is there": ("mbarrier.wait(taken_full.index(0), phase)", "pass"),
}  # fmt: skip
"""Of any schedule that hands tiles out."""
PERSISTENT_MUTANTS = {
    **SCHEDULER_MUTANTS,
    "Q is loaded before it is read": ("mbarrier.wait(q_empty.index(w), q_phase ^ 1)", "pass"),
    "Q of the wrong phase is loaded": ("q_phase ^ 1)", "q_phase)"),
    "Q of the wrong phase is read": ("q_full.index(w), q_phase", "q_full.index(w), 0"),
    "Q is never given back": (GIVE_Q, "pass"),
    "Q is given back twice": (GIVE_Q, f"{GIVE_Q}; {GIVE_Q}"),
    "Q is given back before it is read": (AWAIT_Q, f"{AWAIT_Q}        {GIVE_Q}\n"),
    "an arrival too many empties Q": (
        "q_empty = new_barriers(WARPGROUPS, 1)", "q_empty = new_barriers(WARPGROUPS, 2)"),
    "an arrival too many fills Q": (
        "q_full = new_barriers(WARPGROUPS, 1)", "q_full = new_barriers(WARPGROUPS, 2)"),
    "an arrival too few empties K": (
        "k_empty = new_barriers(STAGES, WARPGROUPS)", "k_empty = new_barriers(STAGES, WARPGROUPS - 1)"),
    "an arrival too many empties K": (
        "k_empty = new_barriers(STAGES, WARPGROUPS)", "k_empty = new_barriers(STAGES, WARPGROUPS + 1)"),
    "an arrival too few empties V": (
        "v_empty = new_barriers(STAGES, WARPGROUPS)", "v_empty = new_barriers(STAGES, WARPGROUPS - 1)"),
    "the last V is never given back": (FREE_LAST_V, ""),
    "the last V is given back before it is read": (READ_LAST_V + FREE_LAST_V, FREE_LAST_V + READ_LAST_V),
    "O is overwritten before it is stored": (
        "            # Until the TMA unit has read O of the tile before.\n            tma.store_wait(0)\n",
        "            pass\n"),
    "O is not stored when the program ends": (
        "    if O_APART:\n        tma.store_wait(0)\n", ""),
    "all begin their rings anew": ("walked, q_phase = end", "walked, q_phase = 0"),
    "the consumers count a tile of keys too many": (
        "        end = walked + key_tiles\n        first_row", "        end = walked + key_tiles + 1\n        first_row"),
    "the producer forgets a tile of keys": (
        "walked, q_phase = end, q_phase ^ 1\n        taken = receive(handed, q_phase, 1)",
        "walked, q_phase = end - 1, q_phase ^ 1\n        taken = receive(handed, q_phase, 1)"),
    "nobody counts uses of Q": ("= end, q_phase ^ 1", "= end, q_phase"),
    "the wrong keys are masked": ("else end - 1 - i)", "else key_tiles - 1 - i)"),
    "the producer walks other tiles": (PRODUCER, PRODUCER + "        taken = (taken[0] ^ 1,)\n"),
    "the producer does not give a number back": ("new_barriers(1, WARPGROUPS + 1)", "new_barriers(1, WARPGROUPS)"),
    "no first turn": ('turn(gl.zeros([64], gl.float32, S_ROWS), "arrive", 0)', "pass"),
    "no last turn": ('turn(gl.zeros([64], gl.float32, S_ROWS), "sync", 0)', "pass"),
    "LSE of another batch": ("lse_rows = (batch, None), batch_head.to", "lse_rows = (batch, None), head.to"),
}  # fmt: skip
SHARED_MUTANTS = {
    "O is stored from where Q is loaded": (STORED + GIVE_PLACE, GIVE_PLACE + STORED),
    "Q is never given back": (GIVE_Q, "pass"),
}


CASES = [
    case(257, 289, heads=4, kv=2, batch=2),
    # Few tiles of keys: only then the producer comes to a place that was given back too early.
    case(257, 64, "top_left", heads=6),
    # The third launch: of a counter that the second did not leave as it was.
    case(129, 64, "top_left", heads=3),
]


@pytest.mark.parametrize("mutant", each(PERSISTENT_MUTANTS))
def test_a_broken_persistent_text_is_found(mutant: str) -> None:
    config = hopper(128, 32, 2, "longest_first", persistent=True)
    spec = make_spec("bfloat16", 64, "causal")
    assert_found(spec, config, PERSISTENT_MUTANTS[mutant], CASES)


@pytest.mark.parametrize("mutant", each(SHARED_MUTANTS))
def test_a_text_that_breaks_q_by_o_is_found(mutant: str) -> None:
    """At head dim 256 O takes the place of Q, which the producer would load again."""
    config = hopper(128, 32, 2, "longest_first", persistent=True)
    assert_found(make_spec("bfloat16", 256, "causal"), config, SHARED_MUTANTS[mutant], CASES)


HAS_ROWS = "has_rows = (taken[0] < 0) | (tile[3] < taken[4])"
PACKED_MUTANTS = {
    "a sequence that begins here is not found": ("* heads <= pid)", "* heads < pid)"),
    "the search goes too short a way": ("found += steps * step", "found += steps"),
    "the search ends after a step": ("left = gl.minimum(left - steps * step, step)", "left = 1"),
    "a sequence has no tile more than its share": (
        ".to(gl.int32) + sequence\n", ".to(gl.int32) + sequence * 0\n"),
    "nobody is told of the end": (HAS_ROWS, "has_rows = tile[3] < taken[4]"),
    "places of no sequence are left": ("if where[2] is not None and taken[0] >= 0:", "if False:"),
    "they begin with the sequence": ("taken[3] + tile[3], end", "taken[3] - taken[4] + tile[3], end"),
    "they are written by all tiles": ("taken[3] + tile[3], end", "taken[3], end"),
    "chunks of the first sequence": ("chunk_start_ptr += taken[1]", "pass"),
    "slopes of the first sequence": ("+ sequence * stride_slopes_b", "+ batch * stride_slopes_b"),
    "a diagonal too far": ("(taken[6] - taken[4])\n", "(taken[6] - taken[4] + 1)\n"),
    "LSE behind the sequence": ("+ (taken[3] - seq_q)", "+ taken[3]"),
    "as many keys as rows": ("of_k = (taken[5], taken[6])", "of_k = (taken[5], taken[4])"),
}  # fmt: skip
PACKED = make_spec("bfloat16", 64, "causal", varlen=True, alibi=True, chunk=True)
FEW_TILES = hopper(128, 32, 2, "longest_first", persistent=True)


def of_many(*lengths: tuple[int, int], heads: int = 2) -> PackedCase:
    """Sequences of these lengths among 70, of which the others are empty."""
    apart = [(0, 0)] * (70 // len(lengths))
    found = [each for some in lengths for each in (*apart, some)]
    rows, keys = (sum(each) for each in zip(*found, strict=True))
    problem = Problem(batch=1, heads=heads, kv_heads=1, seq_q=rows, seq_k=keys)
    return PackedCase(problem=problem, lengths=tuple(found), varied=True)


MANY = [of_many((129, 65), (3, 40), (128, 128)), *cases_of(PACKED, FEW_TILES)[2:3]]


def test_the_pointer_twin_deals_no_tiles_out() -> None:
    """Those of packed sequences may be empty."""
    twin = HOPPER.twin(PACKED, FEW_TILES)
    assert (twin.loads, twin.persistent) == ("pointer", False)
    assert why_illegal(PACKED, twin, TARGETS["nvidia_h200"]) is None


def test_packed_sequences_are_found_among_many(
    loads: dict[int, list[Load]],  # noqa: F811
) -> None:
    """Tiles without rows are passed over: of each head 2, 1 and 1 are loaded, by two consumers, and
    the check launches them twice.
    """
    assert_right(PACKED, FEW_TILES, MANY[:1])
    assert sum(box[3] == 64 for copied in loads.values() for _, box, _ in copied) == 2 * 2 * 4 * 2


@pytest.mark.parametrize(
    ("dims", "config", "features"),
    each([
        ((64, 64), hopper(192, 64, 3, persistent=True), {"window": True, "sink": True}),
        ((128, 128), hopper(128, 64, persistent=True), {"paged": True, "softcap": True}),
        ((64, 64), hopper(order="longest_first", persistent=True), {"invariant": True}),
        ((256, 256), hopper(128, 32, persistent=True), {"chunk": True}),
        ((192, 128), hopper(128, 64, persistent=True), {}),
    ]),
)  # fmt: skip
def test_every_packed_variant_is_right(
    dims: tuple[int, int], config: KernelConfig, features: dict[str, bool]
) -> None:
    mask = "causal"
    spec = make_spec("bfloat16", dims[0], mask, head_dim_v=dims[1], varlen=True, **features)
    assert_right(spec, config)


@pytest.mark.parametrize("mutant", each(PACKED_MUTANTS))
def test_a_broken_scheduler_is_found(mutant: str) -> None:
    assert_found(PACKED, FEW_TILES, PACKED_MUTANTS[mutant], MANY)
