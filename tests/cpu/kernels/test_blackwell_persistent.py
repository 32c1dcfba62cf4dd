"""Schedule blackwell in other orders of tiles, and in programs of many tiles, as Triton compiles it.

As test_hopper_persistent.py has it for schedule hopper: tiles are handed out by a counter, all
rings go on from tile to tile, Q is loaded again once its last product ended, and O is stored while
the next tile begins.

The executor runs one block after another, in an order that the seed draws: the first takes all
tiles but the first ones of the others.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from flashgen.evaluate.check import cases_of, check_loaded
from flashgen.kernels.launch import launch
from flashgen.kernels.launch_forward import INTERPRETED
from flashgen.kernels.stream_memory import counter
from flashgen.reference.cases import CheckCase
from flashgen.schedules.blackwell import BLACKWELL
from flashgen.schedules.config import KernelConfig
from flashgen.schedules.legality import why_illegal
from flashgen.spec.gpu import TARGETS
from flashgen.spec.problem import Problem
from tests.cpu.kernels.test_blackwell_forward import blackwell
from tests.cpu.kernels.test_hopper_persistent import (
    ALL_ORDERS,
    PACKED_MUTANTS,
    SCHEDULER_MUTANTS,
    of_many,
)
from tests.executed import (
    Load,
    assert_found,
    assert_right,
    case,
    compiled,
    loads,  # noqa: F401  # a fixture
)
from tests.makers import each, make_spec

PERSISTENT = {"persistent": True}
TWO, ONE = (
    blackwell(br, 64, order="longest_first", rescale_log2=0, **PERSISTENT) for br in (256, 128)
)
PIECES = replace(TWO, rescale_log2=8)
WAYS = [
    ((64, 64), replace(TWO, num_stages=3)),
    ((128, 128), blackwell(stages=3, **PERSISTENT)),
    ((256, 256), ONE),
    ((192, 128), PIECES),
]


@pytest.mark.parametrize(
    ("dims", "config", "order"),
    each([(*way, order) for order in reversed(ALL_ORDERS) for way in WAYS]),
)
def test_every_order_is_right(dims: tuple[int, int], config: KernelConfig, order: Any) -> None:
    spec = make_spec("bfloat16", dims[0], "causal", head_dim_v=dims[1])
    assert_right(spec, replace(config, order=order))


@pytest.mark.parametrize(
    ("dims", "config", "mask"),
    each([
        (*way, mask)
        for mask in ("causal", "none")
        for way in (((64, 64), TWO), ((256, 256), ONE), ((192, 128), TWO))
    ]),
)  # fmt: skip
def test_fewer_and_more_tiles_than_programs(
    dims: tuple[int, int], config: KernelConfig, mask: str
) -> None:
    """Five programs, of 1 to 14 tiles of O: each place of a ring begins a tile, and Q is used again.

    Lengths are such that tiles of one program see odd and even numbers of keys.
    """
    spec = make_spec("float16", dims[0], mask, head_dim_v=dims[1])
    config, br = replace(config, order="plain"), config.br
    kernel = compiled(spec, config)
    for seed, (batch, heads, kv_heads, sq, sk) in enumerate((
        (1, 1, 1, 33, 65),
        (1, 5, 5, br, 31),
        (2, 3, 1, br - 1, 97),
        (1, 6, 2, 2 * br + 5, 193),
    )):  # fmt: skip
        before = kernel.report.blocks
        problem = Problem(batch=batch, heads=heads, kv_heads=kv_heads, seq_q=sq, seq_k=sk)
        cases = [CheckCase(problem=problem, alignment="top_left")]
        result = check_loaded(kernel, spec, config, seed=seed, cases=cases)
        assert result.passed, result
        tiles = batch * heads * -(-sq // br)
        assert kernel.report.blocks - before == min(INTERPRETED.sms, tiles)
        assert not counter(torch.empty(0)).any(), "as the launch found it"


@pytest.mark.parametrize("order", each(ALL_ORDERS, 4))
def test_tiles_are_handed_out_in_their_order(
    order: Any,
    loads: dict[int, list[Load]],  # noqa: F811
) -> None:
    """Heads, rows and keys, as the TMA unit loads them; the results say that all roles agree."""
    spec, config = make_spec("bfloat16", 64, "causal"), replace(TWO, order=order)
    problem = Problem(batch=1, heads=6, kv_heads=3, seq_q=512, seq_k=320)
    assert_right(spec, config, [CheckCase(problem=problem)])
    rows, heads = (0, 256), range(6)
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
        q = next(base for base, box, _ in copied if box[2] == 128)
        of_q = [(at[1], at[2]) for base, _, at in copied if base == q]
        mine = [expected[program], *itertools.islice(others, len(of_q) // 2 - 1)]
        assert of_q == [(head, at + rows) for head, at in mine for rows in (0, 128)]
        keys = [(at[1], at[2]) for _, box, at in copied if box[2] == 64]
        seen = [
            (head // 2, at)
            for head, row in mine
            for at in range(0, row + 256 - (512 - 320), 64)[::-1]
        ]
        assert keys == [each for each in seen for _ in "KV"]
    assert not list(others)


@pytest.mark.slow("twenty orders of blocks, warps and copies")
@pytest.mark.parametrize(("dims", "config"), [((64, 64), TWO), ((256, 256), ONE)])
@pytest.mark.parametrize("mask", ["causal", "none"])
def test_no_order_changes_a_bit(dims: tuple[int, int], config: KernelConfig, mask: str) -> None:
    spec = make_spec("bfloat16", dims[0], mask)
    config = config if spec.causal else replace(config, order="plain")
    generator = torch.Generator().manual_seed(7)
    shape = (1, 4, 2 * config.br - 100, dims[0])
    q, k, v = (torch.randn(shape, generator=generator).bfloat16() for _ in range(3))
    kernel, found = compiled(spec, config), set()
    for _ in range(20):  # of one counter, which each leaves as it was
        o, lse = launch(
            kernel, spec, config, q, k[:, :, :130], v[:, :, :130], scale=0.125,
            diagonal=0 if spec.causal else None,
        )  # fmt: skip
        found.add((o.view(torch.int16).numpy().tobytes(), lse.numpy().tobytes()))
    assert len(found) == 1


GIVE_Q = "tcgen05_commit(q_empty.index(0))"
NO_Q = "mbarrier.wait(q_empty.index(0), turn ^ 1)"
LAST_S = "if i + 1 == end:  # every S"
NO_SUM = "mbarrier.wait(sum_empty.index(w), turn ^ 1)"
READ_SUM = "            row_sum = sum_smem.index(w).load(ROWS)\n"
GIVE_SUM = "            mbarrier.arrive(sum_empty.index(w), count=1)\n"
O_DONE = "            mbarrier.wait(o_full.index(w), turn)\n"
O_READY = "            mbarrier.arrive(o_ready.index(w), count=1)\n"
NEXT_TILE = "begin, turn = end, turn ^ 1"
WAIT_O = "tma.store_wait(BR // 128 - 1)"
ROLE_ENDS = {
    "load": "kv_full.index(stage), v)\n        ",
    "multiply": "tcgen05_commit(o_full.index(w))\n        ",
    "softmax": "mask=row < seq_q)\n        ",
    "correct": "0), o_tile)\n        ",
}
"""What stands before NEXT_TILE in each."""

Q_MUTANTS = {
    "Q is loaded before it is read": (NO_Q, "pass"),
    "Q of the wrong phase is loaded": (NO_Q, NO_Q.replace("turn ^ 1", "turn")),
    "Q of the wrong phase is read": ("mbarrier.wait(q_full.index(w), turn)", "mbarrier.wait(q_full.index(w), 0)"),
    "Q is never given back": (GIVE_Q, "pass"),
    "Q is given back twice": (GIVE_Q, f"{GIVE_Q}; {GIVE_Q}"),
    "Q is given back before it is read": (GIVE_Q, "mbarrier.arrive(q_empty.index(0), count=1)"),
    "Q is given back with the first S": (LAST_S, "if i == begin:  # every S"),
    "an arrival too many empties Q": ("q_empty = new_barriers(1, 1)", "q_empty = new_barriers(1, 2)"),
}  # fmt: skip
MUTANTS = {
    **SCHEDULER_MUTANTS,
    "a role does not give a number back": ("new_barriers(1, ROW_TILES + 3)", "new_barriers(1, ROW_TILES + 2)"),
    "the warps that load and multiply walk other tiles": (
        "taken = receive(handed, 0, 1)\n    while taken[0] >= 0:\n",
        "taken = receive(handed, 0, 1)\n    while taken[0] >= 0:\n        taken = (taken[0] ^ 1,)\n"),
    "numbers of the wrong phase": ("receive(handed, turn, 4)", "receive(handed, 0, 4)"),
    "a sum is overwritten before it is read": (NO_SUM, "pass"),
    "a sum waits for the wrong phase": (NO_SUM, NO_SUM.replace("turn ^ 1", "turn")),
    "a sum is never given back": (GIVE_SUM, ""),
    "a sum is given back before it is read": (READ_SUM + GIVE_SUM, GIVE_SUM + READ_SUM),
    "the sum of the wrong phase is read": ("mbarrier.wait(sum_full.index(w), turn)", "mbarrier.wait(sum_full.index(w), 0)"),
    "O of the wrong phase is read": (O_DONE, O_DONE.replace("turn", "0")),
    "O is the next tile's before it is read": (O_DONE, O_DONE + O_READY),
    "O of the first keys is added to the tile before": ("use_acc=i > begin", "use_acc=i > 0"),
    "O is overwritten before it is stored": (WAIT_O, "pass"),
    "one O too many is on its way": (WAIT_O, WAIT_O.replace(" - 1", "")),
    "O is not stored when the program ends": ("(handed, turn, 4)\n    tma.store_wait(0)\n", "(handed, turn, 4)\n"),
    "O is stored from where Q is loaded": ("o_smem = places(ROW_TILES, o_desc)", "o_smem = q_smem"),
    "all begin their rings anew": (NEXT_TILE, "begin, turn = 0, turn ^ 1"),
    "nobody counts tiles of O": (NEXT_TILE, "begin, turn = end, turn"),
    "LSE of another batch": ("batch_head.to(gl.int64)", "head.to(gl.int64)"),
    "the wrong keys are masked": ("start = (end - 1 - i) * BC", "start = (key_tiles - 1 - i) * BC"),
    **{
        f"{role} forgets a tile of keys": (before + NEXT_TILE, before + NEXT_TILE.replace("= end", "= end - 1"))
        for role, before in ROLE_ENDS.items()
    },
    **{
        f"{role} forgets a tile of O": (before + NEXT_TILE, before + NEXT_TILE.replace("turn ^ 1", "turn"))
        for role, before in ROLE_ENDS.items()
    },
}  # fmt: skip
ONE_MUTANTS = {
    "S always begins in the first place": ("w if TWO else begin & 1", "w if TWO else 0"),
    "factors always begin in the first place": ("w if TWO else begin & 1\n", "w if TWO else 0\n"),
    "factors begin with the first phase": ("else (begin >> 1) & 1", "else 0"),
    "Q is never given back": (GIVE_Q, "pass"),
    "O is overwritten before it is stored": (WAIT_O, "pass"),
    "O is the next tile's before it is read": (O_DONE, O_DONE + O_READY),
}
"""Of blocks of 128 rows, where tiles of keys alternate between two places of S."""

CASES = [
    case(257, 193, heads=4, kv=2, batch=2),
    # Few tiles of keys: only then the next tile's roles come early to what was given back too soon.
    case(257, 64, "top_left", heads=5),
    # The third launch: of a counter that the second did not leave as it was.
    case(257, 64, "top_left", heads=3),
]
SPEC, WIDE = make_spec("bfloat16", 64, "causal"), make_spec("bfloat16", 256, "causal")


@pytest.mark.parametrize("mutant", each(MUTANTS))
def test_a_broken_text_is_found(mutant: str) -> None:
    assert_found(SPEC, TWO, MUTANTS[mutant], CASES)


@pytest.mark.parametrize("mutant", each(Q_MUTANTS))
def test_a_broken_hand_over_of_q_is_found(mutant: str) -> None:
    """In a ring of four places: in one of two, where the first K is loaded Q has been read, too."""
    assert_found(SPEC, replace(TWO, num_stages=4), Q_MUTANTS[mutant], CASES)


@pytest.mark.parametrize("mutant", each(ONE_MUTANTS))
def test_a_broken_text_of_wide_heads_is_found(mutant: str) -> None:
    assert_found(WIDE, ONE, ONE_MUTANTS[mutant], CASES)


PACKED = make_spec("bfloat16", 64, "causal", varlen=True, alibi=True, chunk=True)
FEW_TILES = replace(TWO, exp2_by_fma=0)
MANY = [of_many((257, 65), (3, 40), (256, 128)), *cases_of(PACKED, FEW_TILES)[2:3]]


def test_the_pointer_twin_deals_no_tiles_out() -> None:
    """Those of packed sequences may be empty."""
    twin = BLACKWELL.twin(PACKED, FEW_TILES)
    assert (twin.loads, twin.persistent) == ("pointer", False)
    assert why_illegal(PACKED, twin, TARGETS["nvidia_b200"]) is None


def test_packed_sequences_are_found_among_many(
    loads: dict[int, list[Load]],  # noqa: F811
) -> None:
    """Tiles without rows are passed over: of each head 2, 1 and 1 are loaded, in two boxes, and the
    check launches them twice.
    """
    assert_right(PACKED, FEW_TILES, MANY[:1])
    assert sum(box[3] == 128 for copied in loads.values() for _, box, _ in copied) == 2 * 2 * 4 * 2


@pytest.mark.parametrize(
    ("dims", "config", "mask", "features"),
    each([
        ((64, 64), TWO, "causal", {"window": True, "sink": True}),
        ((64, 64), replace(FEW_TILES, order="plain"), "none", {"alibi": True}),
        ((128, 128), replace(TWO, num_stages=4), "causal", {"chunk": True}),
        ((128, 128), blackwell(stages=3, **PERSISTENT), "none", {"window": True}),
        ((256, 256), ONE, "causal", {"window": True, "softcap": True}),
        ((192, 128), PIECES, "causal", {}),
        ((64, 64), TWO, "causal", {"paged": True, "softcap": True}),
        ((192, 128), PIECES, "causal", {"paged": True}),
    ]),
)  # fmt: skip
def test_every_packed_variant_is_right(
    dims: tuple[int, int], config: KernelConfig, mask: str, features: dict[str, bool]
) -> None:
    spec = make_spec("bfloat16", dims[0], mask, head_dim_v=dims[1], varlen=True, **features)
    assert_right(spec, config)


@pytest.mark.parametrize("mutant", each(PACKED_MUTANTS))
def test_a_broken_scheduler_is_found(mutant: str) -> None:
    assert_found(PACKED, FEW_TILES, PACKED_MUTANTS[mutant], MANY)
