"""estimate/sm.py and estimate/sm_clock.py: loops whose cycles one can count by hand, then kernels of Triton."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flashgen import paths
from flashgen.compile.sass import Listing, disassemble
from flashgen.errors import NoEstimate, ToolchainError
from flashgen.estimate import instruction_row, loop_program, machines, sm, sm_clock
from flashgen.estimate.instruction_row import InstructionRow
from flashgen.estimate.loop_program import LoopProgram
from flashgen.estimate.machines import MACHINES
from flashgen.estimate.sm import Scoreboard
from flashgen.spec.gpu import TARGETS, Gpu
from tests import cubins, programs
from tests.listings import Line, line, listing, loop
from tests.makers import make_config, make_spec

A100, H200 = TARGETS["nvidia_a100_sxm4_40gb"], TARGETS["nvidia_h200"]
SM80, SM90 = MACHINES["sm_80"], MACHINES["sm_90"]
HMMA = "HMMA.16816.F32 R4, R4, R8, R4"
EXP2 = "MUFU.EX2 R1, R2"
BACK = 5 + sm_clock.LOOP_BACK
"""The closing branch of loop(): its stall, and the way back."""


def board(code: Listing, gpu: Gpu = A100, *, num_warps: int = 1, shared: int = 0) -> Scoreboard:
    return Scoreboard(code, gpu, num_warps=num_warps, shared_bytes=shared)


def trip(code: Listing, gpu: Gpu = A100, *, num_warps: int = 1, blocks: int = 1) -> float:
    """Cycles of a trip of the only phase."""
    (found,) = board(code, gpu, num_warps=num_warps).trip_cycles(blocks)
    return found


def test_products_that_add_to_the_same_registers_may_be_further_apart() -> None:
    assert trip(loop(*[line(HMMA, stall=15)] * 4)) == 4 * 15 + BACK


def test_a_product_that_waits_for_an_earlier_one_says_nothing_of_the_pipe() -> None:
    """As in a tile of 16 rows, whose accumulators are few: the wait of 14 is for R4, not R16."""
    other = line("HMMA.16816.F32 R16, R20, R8, R16", stall=14)
    assert trip(loop(line(HMMA), "MOV R1, R2", other, line(HMMA))) >= 14


def test_the_numbers_of_both_files_agree() -> None:
    """They are written out twice: numba's cache sees no change in another file."""
    numbers = {name for name, value in vars(sm_clock).items() if isinstance(value, int)}
    others = vars(loop_program) | vars(instruction_row)
    both = sorted(numbers & others.keys())
    assert len(both) >= 24
    differing = [name for name in both if getattr(sm_clock, name) != others[name]]
    assert differing == ["NO_BARRIER"]  # 7 in the code; from 6 on there is none
    assert sm_clock.NO_BARRIER < instruction_row.NO_BARRIER
    assert sm_clock.SUB_PARTITIONS == machines.SUB_PARTITIONS


def test_a_warp_alone_takes_the_sum_of_its_stalls() -> None:
    code = loop(
        line(EXP2, stall=9), line("FFMA R1, R1, R2, R3", stall=4), line("MOV R1, R2", stall=2)
    )
    assert trip(code) == 9 + 4 + 2 + BACK


@pytest.mark.parametrize("barrier", [0, 5])
def test_a_chain_on_a_scoreboard_barrier_takes_the_latency(barrier: int) -> None:
    code = loop(
        line(EXP2, stall=1, write=barrier),
        line("FADD R1, R1, R2", stall=4, waits=(barrier,)),
    )
    assert trip(code) == SM80.exp2 + SM80.exp2_late + 4 + BACK


def test_a_barrier_on_the_operands_falls_before_that_on_the_result() -> None:
    waiting = line("MOV R2, R3", stall=4, waits=(0,))
    assert trip(loop(line(EXP2, stall=1, read=0), waiting)) == sm_clock.READ_OTHER + 4 + BACK
    load = line("LDG.E.128 R4, [R2]", read=0)
    assert trip(loop(line(EXP2), load, waiting)) == 1 + 2 + sm_clock.READ_SHARED + 4 + BACK


def test_matrix_instructions_are_as_far_apart_as_the_pipe_is_long() -> None:
    code = loop(*[line(HMMA, stall=2)] * 8)
    last_issue = 7 * board(code).hmma
    assert board(code).hmma == 8
    assert trip(code) == last_issue + 2 + BACK
    # Two warps on each sub-partition, and nothing but the pipe is in their way.
    assert trip(code, num_warps=8) == 2 * 8 * 8


def test_on_hopper_hmma_reaches_two_thirds_of_the_peak() -> None:
    code = loop(*[line(HMMA, stall=2)] * 8)
    assert trip(code, H200, num_warps=8) == 2 * 8 * 6


def test_closer_products_are_no_reason_to_refuse_and_wait_for_the_pipe() -> None:
    """ptxas spaces by the fastest product of an architecture: of two with sm_86 one takes twice as long."""
    code = loop(*[line(HMMA, stall=8)] * 8)
    for slug, cycles_ in (("nvidia_a10", 16), ("nvidia_geforce_rtx_3090", 32)):
        assert trip(code, TARGETS[slug], num_warps=8) == 2 * 8 * cycles_


def test_tf32_takes_the_pipe_twice_as_long() -> None:
    code = loop(*[line("HMMA.1688.F32.TF32 R4, R4, R8, R4", stall=2)] * 8)
    assert trip(code, num_warps=8) == 2 * 8 * 8


@pytest.mark.parametrize(
    ("opcode", "slug", "rate"),
    [
        ("HMMA.16816.F32", "nvidia_a10", 1.0),
        ("HMMA.1688.F32.TF32", "nvidia_a10", 0.5),
        ("IMMA.16832.S8.S8.SAT", "nvidia_a10", 2.0),
        ("IMMA.16832.S8.S8.SAT", "nvidia_geforce_rtx_3090", 4.0),
        ("HMMA.16816.F16", "nvidia_geforce_rtx_3090", 2.0),
    ],
)
def test_products_count_by_the_peak_of_their_operands(opcode: str, slug: str, rate: float) -> None:
    code = loop(*[line(f"{opcode} R4, R4, R8, R4")] * 8)
    found = board(code, TARGETS[slug], num_warps=4)
    assert found.matrix_work(0) == found.matrix_flops(0) / rate
    least = found.matrix_work(0) / (TARGETS[slug].matrix_flops_per_clock or 0)
    assert found.least_cycles(0) == pytest.approx(least)


def test_products_of_float64_are_refused_by_name() -> None:
    """Also where they are so few that the other instructions of a loop outnumber them by far."""
    few = loop(line("DMMA.884 R4, R4, R8, R4"), line(HMMA), *["MOV R1, R2"] * 300)
    with pytest.raises(NoEstimate, match="DMMA"):
        board(few)


def test_blocks_share_the_exp2_of_a_sub_partition() -> None:
    code = loop(*[line(EXP2)] * 10)
    for blocks in (2, 3):
        assert trip(code, num_warps=4, blocks=blocks) == blocks * 10 * SM80.exp2
    # One warp a block: the second one goes to another sub-partition, and does not disturb.
    assert trip(code, blocks=2) == trip(code)


def test_blocks_start_one_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """60 cycles apart: three blocks of one warp, each on a sub-partition of its own, end so too."""
    clock, finishes = sm.clock(), []

    def replay(*arguments: Any) -> Any:
        finishes.append(clock.replay(*arguments))
        return finishes[-1]

    monkeypatch.setattr(sm, "clock", lambda: SimpleNamespace(replay=replay))
    assert trip(loop(line(EXP2, stall=9), line("MOV R1, R2", stall=2)), blocks=3) > 0
    found = next(each for each in finishes if len(each) == 3)
    assert (found[1:, 1:] - found[:-1, 1:] == 60.0).all()


def test_no_block_looks_faster_than_the_full_pipe_lets_all_of_them_be() -> None:
    """Of three warps on a full pipe two take turns and the third starves until they are done."""
    code = loop(*[line(HMMA, stall=2)] * 8, line("STS [R2], R1"), line("LDS R1, [R2]"))
    found = board(code)
    for blocks in (1, 2, 3, 4, 8):
        usage = found.usage(0, blocks)
        assert max(usage.matrix, usage.exp2, usage.issue, usage.shared, usage.memory) <= 1 + 1e-9


def test_one_instruction_a_cycle_leaves_a_sub_partition(monkeypatch: pytest.MonkeyPatch) -> None:
    code = loop(line(EXP2), *[line("NOP")] * 199)
    assert trip(code, num_warps=8) == 2 * 201
    # By the clock itself, and not only by the bound that full pipes are; the way back is hidden.
    monkeypatch.setattr(Scoreboard, "_busy", lambda *_: {0: 0.0})
    assert trip(code, num_warps=8) == pytest.approx(2 * 201, rel=0.02)


def copies(left: int) -> Listing:
    return loop(
        line("LDGSTS.E.BYPASS.128 [R2], desc[UR4][R4.64]"),
        line("LDGDEPBAR"),
        line(f"DEPBAR.LE SB0, 0x{left:x}", stall=2),
        line(HMMA, stall=4),
    )


def test_a_copy_is_waited_for_by_groups() -> None:
    copied = 2 + 512 / SM80.l2_bytes + SM80.copy_late  # 32 lanes of 16 bytes
    rest = 2 + 4 + BACK
    assert trip(copies(0)) == copied + rest
    # With one group left under way, a trip waits for what the one before has begun.
    assert trip(copies(1)) == pytest.approx((copied + rest) / 2, rel=0.02)
    assert trip(copies(9)) == 2 + rest


def test_a_group_without_copies_ends_with_the_one_before() -> None:
    again = loop(
        line("LDGSTS.E.BYPASS.128 [R2], desc[UR4][R4.64]"), *[line("LDGDEPBAR")] * 2,
        line("DEPBAR.LE SB0, 0x0", stall=2), line(HMMA, stall=4),
    )  # fmt: skip
    assert trip(again) == trip(copies(0))


def test_loads_pass_through_l2_one_after_the_other() -> None:
    load = line("LDG.E.128 R4, [R2]", write=0)
    code = loop(load, load, line(HMMA, stall=4, waits=(0,)))
    assert trip(code) == 2 + 2 * 512 / SM80.l2_bytes + SM80.load_late + 4 + BACK


def test_a_warp_goes_on_while_shared_memory_has_a_short_queue() -> None:
    """Of 12 stores of 4 cycles the last issues when SHARED_QUEUE cycles of the others are left."""
    moves = [line("MOV R1, R2", stall=4)] * 20
    code = loop(line(EXP2), *[line("STS.128 [R2], R4")] * 12, *moves)
    issued = 1 + 2 + 11 * 4 - sm_clock.SHARED_QUEUE
    assert trip(code) == issued + 1 + 20 * 4 + BACK


def test_warps_of_a_block_meet_at_its_barrier() -> None:
    code = loop(line(HMMA, stall=8), line("BAR.SYNC.DEFER_BLOCKING 0x0", stall=5))
    assert trip(code, num_warps=4) == 8 + SM80.barrier_late + BACK


def test_warps_that_wait_for_more_than_there_are_get_no_estimate() -> None:
    code = loop(line(HMMA, stall=8), line("BAR.SYNC.DEFER_BLOCKING 0x1, 0x100", stall=5))
    assert board(code, num_warps=8).residents > 0
    with pytest.raises(NoEstimate, match="its warps deadlock"):
        board(code, num_warps=4)


def test_who_has_arrived_goes_on_and_is_counted_from_before_the_loop() -> None:
    """Four warps of eight that a trip awaits have arrived in the one before, the first time before
    the loop.
    """
    meet, arrive = line("BAR.SYNC 0x3, 0x100", stall=5), line("BAR.ARV 0x3, 0x100")
    code = loop(meet, line(HMMA, stall=8), arrive, before=(arrive,))
    assert trip(code, num_warps=4) == SM80.barrier_late + 8 + 1 + BACK


Warps = tuple[int, list[InstructionRow], bool]
"""Of a role: how many there are, what they do in a trip, and whether their trips count."""


def finishes(*roles: Warps, arrivals: tuple[int, ...] = (), blocks: int = 1) -> Any:
    """When each block of an H200 ends three trips: (block, trip) in cycles."""
    made = LoopProgram(arrivals=list(arrivals))
    for warps, rows, counts in roles:
        made.start.append(len(made.rows))
        made.rows += [replace(each) for each in rows]
        made.end.append(len(made.rows))
        made.warps.append(warps)
        made.counts.append(counts)
    return sm._finish(made, blocks, SM90, 3)[:, 1:]


def does(kind: int = instruction_row.PLAIN, **fields: Any) -> InstructionRow:
    return InstructionRow(pipe=instruction_row.CONTROL, kind=kind, **fields)


def test_a_barrier_wakes_the_warps_of_its_own_block() -> None:
    """The second block starts 60 cycles later, and its first warps wait when the others meet."""
    meet = does(instruction_row.BARRIER, amount=1, count=8)
    early, late = [does(stall=10), meet, does()], [does(stall=100), meet, does()]
    first, second = finishes((4, early, True), (4, late, False), blocks=2)[:, 0]
    assert first == pytest.approx(100 + SM90.barrier_late, abs=3)
    assert second == pytest.approx(first + 60, abs=3)


def test_a_ring_of_one_tile_takes_what_is_between_its_phases() -> None:
    """One warp loads a tile in two parts once eight warps, of which four take longer, have left it."""
    full, empty = {"count": 0, "latency": 20.0}, {"count": 1, "latency": 20.0}
    part = {"count": 0, "amount": 10 * SM90.l2_burst_bytes, "latency": 100.0}
    loads = [
        does(instruction_row.AWAIT, amount=1, writes=0, **empty),
        does(instruction_row.EXPECT, count=0, waits=1),
        does(instruction_row.TMA, **part),
        does(instruction_row.TMA, commits=1, **part),
    ]

    def works(cycles: int) -> list[InstructionRow]:
        wait = does(instruction_row.AWAIT, writes=0, **full)
        return [wait, does(stall=cycles, waits=1), does(instruction_row.ARRIVE, **empty)]

    found = finishes((1, loads, False), (4, works(10), True), (4, works(50), True), arrivals=(0, 8))
    loaded = 1 + 2 * 10 + 100 + 20  # from the announcement to who waits
    period = 20 + 20 + loaded + 50  # arrival, its waiter, the tile, the work
    assert found[0].tolist() == [20 + loaded + 50 + n * period for n in range(3)]


def wgmma(left: int, *between: Line) -> Listing:
    return loop(
        line("WARPGROUP.ARRIVE"),
        line("HGMMA.64x64x16.F32.BF16 R24, R88, gdesc[UR8], R24, gsb0", stall=2),
        *between,
        line(f"WARPGROUP.DEPBAR.LE gsb0, 0x{left:x}", stall=3),
    )


def test_a_wgmma_runs_beside_its_warp_until_it_is_waited_for() -> None:
    runs = 32 + sm_clock.WGMMA_LATENCY  # 64 columns, two a cycle
    assert trip(wgmma(0), H200, num_warps=4) == sm_clock.ARRIVE_LATENCY + runs + 3 + BACK
    beside = [line("MOV R1, R2", stall=4)] * 10
    assert trip(wgmma(0, *beside), H200, num_warps=4) == trip(wgmma(0), H200, num_warps=4)
    assert trip(wgmma(1), H200, num_warps=4) < trip(wgmma(0), H200, num_warps=4)


def test_two_warpgroups_share_the_matrix_pipe() -> None:
    one = "HGMMA.64x256x16.F32.BF16 R24, R88, gdesc[UR8], R24"
    code = loop(
        line("WARPGROUP.ARRIVE"),
        *[line(one, stall=2)] * 3,
        line(f"{one}, gsb0", stall=2),
        line("WARPGROUP.DEPBAR.LE gsb0, 0x0", stall=3),
    )
    assert trip(code, H200, num_warps=8) == 2 * 4 * 128


def test_a_warp_works_beside_all_of_its_products() -> None:
    one = "HGMMA.64x256x16.F32.BF16 R24, R88, gdesc[UR8], R24"

    def with_moves(count: int) -> float:
        code = loop(
            line("WARPGROUP.ARRIVE"),
            *[line(one, stall=2)] * 3,
            line(f"{one}, gsb0", stall=2),
            *[line("MOV R1, R2", stall=4)] * count,
            line("WARPGROUP.DEPBAR.LE gsb0, 0x0", stall=3),
        )
        return trip(code, H200, num_warps=4)

    assert with_moves(100) == with_moves(0) > 4 * 128
    assert with_moves(200) == pytest.approx(200 * 4, rel=0.05)


def test_what_one_warpgroup_waits_for_another_uses() -> None:
    one = "HGMMA.64x256x16.F32.BF16 R24, R88, gdesc[UR8], R24"
    code = loop(
        line("WARPGROUP.ARRIVE"),
        line(f"{one}, gsb0", stall=2),
        line("WARPGROUP.DEPBAR.LE gsb0, 0x0", stall=3),
        line("WARPGROUP.ARRIVE"),
        line(f"{one}, gsb0", stall=2),
        *[line("MOV R1, R2", stall=4)] * 20,
        line("WARPGROUP.DEPBAR.LE gsb0, 0x0", stall=3),
    )
    assert trip(code, H200, num_warps=8) == pytest.approx(4 * 128, rel=0.02)


def test_products_read_their_tiles_from_shared_memory() -> None:
    """64x32x16, both operands there: 3 KiB a warpgroup, 24 cycles, and 16 of the matrix pipe."""
    product = line("HGMMA.64x32x16.F32.BF16 R24, gdesc[UR8], R24, gsb0", stall=2)
    wait = line("WARPGROUP.DEPBAR.LE gsb0, 0x0", stall=3)
    alone = loop(line("WARPGROUP.ARRIVE"), *[product] * 8, wait)
    rest = sm_clock.ARRIVE_LATENCY + sm_clock.WGMMA_LATENCY + 3 + BACK
    assert trip(alone, H200, num_warps=4) == pytest.approx(8 * 24 + rest, abs=2)
    beside = loop(line("WARPGROUP.ARRIVE"), *[product] * 8, line("LDS.128 R40, [R1]"), wait)
    assert trip(beside, H200, num_warps=4) > trip(alone, H200, num_warps=4)


def test_a_warp_waits_for_a_place_in_a_full_queue() -> None:
    """130 products of 128 cycles: the last is issued when all but a ring of them were taken."""
    product = line("HGMMA.64x256x16.F32.BF16 R24, R88, gdesc[UR8], R24", stall=2)
    code = loop(
        line("WARPGROUP.ARRIVE"),
        *[product] * 129,
        line("HGMMA.64x256x16.F32.BF16 R24, R88, gdesc[UR8], R24, gsb0", stall=2),
        *[line("MOV R1, R2", stall=4)] * 3000,
        line("WARPGROUP.DEPBAR.LE gsb0, 0x0", stall=3),
    )
    issued = (130 - sm_clock.RING - 1) * 128
    assert trip(code, H200, num_warps=4) == pytest.approx(issued + 3000 * 4, rel=0.02)


def ring(ahead: int, *, loads: int = 1, awaited: bool = False) -> Listing:
    """A loop that loads a tile of 8 KiB by TMA, `ahead` tiles before it is waited for. awaited: each
    of those before the loop is waited for there.
    """
    begin = line("SYNCS.ARRIVE.TRANS64 RZ, [UR4+0x8000], R2")
    wait = [line("SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR4+0x8000], R3", write=0)] * awaited
    load = line("UTMALDG.2D [UR8], [UR6]", read=1)
    return loop(
        begin,
        *[load, line("UIADD3 UR8, UR8, 0x1, URZ", waits=(1,))] * loads,
        line("SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR4+0x8000], R3", write=0),
        line(HMMA, stall=4, waits=(0,)),
        before=("MOV R2, 0x2000", *[begin, load, *wait] * ahead),
    )


def test_a_tile_loaded_by_tma_comes_a_latency_after_its_transfer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loaded = 8192 / SM90.l2_burst_bytes + SM90.tma_late
    begun = 1  # EXPECT goes first
    after = SM90.mbarrier_late + 4 + BACK
    assert trip(ring(0), H200) == begun + loaded + after
    assert trip(ring(1), H200) == pytest.approx((begun + loaded + after) / 2, rel=0.02)
    # From some depth on the transfers bound it: those of all SMs, which get less than one.
    monkeypatch.setitem(machines.MACHINES, "sm_90", replace(SM90, l2_bytes=32.0))
    assert (begun + loaded + after) / 4 < 8192 / 32 == trip(ring(3), H200)


def test_a_tile_that_was_awaited_before_the_loop_is_not_under_way_in_it() -> None:
    assert trip(ring(1, awaited=True), H200) == trip(ring(0), H200)


def whole(*before: Line | str, after: tuple[Line | str, ...] = ()) -> Listing:
    """A kernel of a loop of one product, with this code around it."""
    return listing(
        *before, "top:", line(HMMA, stall=4), line("@P0 BRA {top}", stall=5), *after, "EXIT"
    )


def test_a_block_takes_the_waits_of_its_start_and_its_end() -> None:
    load = (
        "MOV R2, 0x2000",
        "SYNCS.ARRIVE.TRANS64 RZ, [UR4+0x8000], R2",
        "UTMALDG.2D [UR8], [UR6]",
        line("SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR4+0x8000], R3", write=0),
        line("MOV R4, R5", stall=4, waits=(0,)),
    )
    store = ("UTMASTG.2D [UR8], [UR6]", "UTMACMDFLUSH", line("DEPBAR.LE SB0, 0x0", stall=4))
    bare, loads = board(whole(), H200), board(whole(*load), H200)
    both, stores = board(whole(*load * 2), H200), board(whole(after=store), H200)
    one = 8192 / SM90.l2_burst_bytes + SM90.tma_late + SM90.mbarrier_late
    assert loads.block_cycles(1) - bare.block_cycles(1) == pytest.approx(one, rel=0.02)
    assert both.block_cycles(1) - bare.block_cycles(1) == pytest.approx(2 * one, rel=0.02)
    assert stores.block_cycles(1) - bare.block_cycles(1) == pytest.approx(SM90.tma_late, rel=0.03)
    later = both.block_cycles(1, far=True) - both.block_cycles(1)
    assert later == pytest.approx(2 * SM90.memory_late)


def test_a_block_of_which_no_way_is_seen_gets_its_instructions() -> None:
    """It waits for what nobody loads."""
    code = whole("BAR.SYNC R3, 0x40")
    assert board(code, H200).block_cycles(1) == sm.BLOCK_CYCLES + board(code, H200).outside


def test_a_further_tile_takes_what_is_in_the_loop_around_the_main_loop() -> None:
    start, each = [line("MOV R1, R2", stall=4)] * 50, [line("MOV R1, R2", stall=4)] * 20
    code = listing(
        *start, "tile:", *each, "top:", line(HMMA, stall=4), line("@P0 BRA {top}", stall=5),
        line("@P1 BRA {tile}", stall=5), "EXIT",
    )  # fmt: skip
    found = board(code, H200)
    assert found.tile_cycles(1) == pytest.approx(20 * 4, abs=12)
    assert found.block_cycles(1) - found.tile_cycles(1) == pytest.approx(50 * 4, abs=12)


def test_the_second_load_of_a_tile_need_not_wait_for_the_first() -> None:
    """TMA takes its operands at once: the barrier that guards their registers falls long before
    the tile is there."""
    assert trip(ring(0, loads=2), H200) < trip(ring(0), H200) + 2 * sm_clock.READ_OTHER
    assert trip(ring(0, loads=4), H200) < trip(ring(0), H200) + 4 * sm_clock.READ_OTHER


def test_spills_beyond_l1_take_the_time_of_l2() -> None:
    lines = (line("LDL R1, [R1]", write=0), line(HMMA, stall=4, waits=(0,)))

    def with_stack(stack: int) -> float:
        code = replace(loop(*lines), stack_bytes=stack)
        return trip(code, num_warps=4)

    assert with_stack(2048) - with_stack(64) > 0.8 * (SM80.stack_l2_late - SM80.stack_late)


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (listing(HMMA, "EXIT"), "no main loop"),
        (loop(line(HMMA, waits=(2,))), "waits for barrier 2, which nothing sets"),
        (loop(*[line(HMMA)] * 50, "FROB R1, R2"), "unknown: FROB"),
        (
            loop(line(HMMA, stall=9), line("HMMA.16816.F32 R16, R20, R8, R16", stall=9)),
            "ptxas spaces HMMA 9 cycles apart",
        ),
        (
            loop(line(HMMA), before=("USETMAXREG.TRY_ALLOC.CTAPOOL UP0, 0xe8",)),
            "its warps have roles, since they hand over registers",
        ),
        (loop(line(HMMA), "BAR.SYNC R1"), "meets at a barrier not named in it"),
        (loop(line(HMMA), "UTMALDG.2D [UR8], [UR6]"), "loads for no barrier that is seen"),
        (
            loop(line(HMMA), "SYNCS.ARRIVE.TRANS64 RZ, [UR4], R2", "UTMALDG.2D [UR8], [UR6]"),
            "how many bytes",
        ),
    ],
)  # fmt: skip
def test_what_does_not_bear_the_model_out_gets_no_estimate(code: Listing, says: str) -> None:
    with pytest.raises(NoEstimate, match=says) as caught:
        board(code, num_warps=4)
    assert "\n" not in str(caught.value)


def test_one_unknown_opcode_in_more_than_a_hundred_is_let_pass() -> None:
    assert trip(loop(*[line(HMMA)] * 120, "FROB R1, R2")) > 0


def test_a_listing_without_control_bits_gets_no_estimate() -> None:
    code = loop(line(HMMA))
    bare = replace(code, instructions=tuple(replace(i, control=None) for i in code.instructions))
    with pytest.raises(NoEstimate, match="without control bits"):
        board(bare)


@pytest.mark.parametrize("cycles_said", [10.0, 39.0])
def test_a_replay_shorter_than_its_stalls_gets_no_estimate(
    cycles_said: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = loop(line(EXP2, stall=15), line("MOV R1, R2", stall=15), line("MOV R1, R2", stall=5))
    assert trip(code) == 40 + sm_clock.LOOP_BACK
    monkeypatch.setattr(Scoreboard, "_replay", lambda *_: cycles_said)
    with pytest.raises(NoEstimate, match="its stalls alone 40"):
        board(code)


def test_a_kernel_that_fits_no_sm_gets_no_estimate() -> None:
    with pytest.raises(NoEstimate, match="does not fit an SM of nvidia_a100_sxm4_40gb"):
        board(loop(line(HMMA)), shared=A100.shared_per_block + 1)
    with pytest.raises(NoEstimate, match="does not fit"):
        board(replace(loop(line(HMMA)), registers=255), num_warps=16)


def test_without_numba_the_sentence_says_what_to_install() -> None:
    program_text = (
        "import sys; sys.modules['numba'] = None\n"
        "from flashgen.estimate.sm import clock\n"
        "try:\n    clock()\nexcept Exception as error:\n    print(type(error).__name__, error)\n"
    )
    done = programs.run(["-c", program_text])
    assert "ToolchainError" in done.stdout
    assert paths.install_command("offline") in done.stdout
    assert issubclass(ToolchainError, RuntimeError)


def of(cubin: cubins.Cubin, gpu: Gpu) -> Scoreboard:
    return board(disassemble(cubin.code), gpu, num_warps=cubin.num_warps, shared=cubin.shared_bytes)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


KERNELS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "fa2 by cp.async": ({}, {}, "nvidia_a100_sxm4_40gb"),
    "fa2 by TMA, one stage": ({}, {"loads": "descriptor", "num_stages": 1}, "nvidia_h200"),
    "fa2 by TMA, four stages": ({}, {"loads": "descriptor", "num_stages": 4}, "nvidia_h200"),
    "s_ahead by TMA": ({}, {"loads": "descriptor", "schedule": "s_ahead"}, "nvidia_h200"),
    "s_ahead by TMA, causal": (
        {"mask": "causal"},
        {"loads": "descriptor", "schedule": "s_ahead", "num_stages": 3},
        "nvidia_h200",
    ),
    "GA10x": ({"mask": "causal"}, {}, "nvidia_geforce_rtx_3090"),
    "Ada": ({"mask": "causal"}, {}, "nvidia_l4"),
    "tf32": ({"dtype": "float32", "precision": "tf32"}, {}, "nvidia_a100_sxm4_40gb"),
    "tf32 by wgmma": ({"dtype": "float32", "precision": "tf32"}, {}, "nvidia_h200"),
    "ieee": ({"dtype": "float32"}, {"br": 32, "bc": 16}, "nvidia_a100_sxm4_40gb"),
    "any dim": ({"mask": "causal"}, {"head_dims": "padded"}, "nvidia_h200"),
}


QUICK = ("fa2 by cp.async", "s_ahead by TMA, causal")
"""Both schedules and ways to load, and two architectures."""


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=() if kind in QUICK else pytest.mark.slow("two seconds a kernel"))
        for kind in KERNELS
    ],
)
def test_every_kind_of_our_kernels_is_replayed(kind: str, cache: Path) -> None:
    spec_fields, config_fields, slug = KERNELS[kind]
    gpu = TARGETS[slug]
    cubin, _ = cubins.own(
        make_spec(**spec_fields), make_config(**{"bc": 64, **config_fields}), gpu.arch, cache
    )
    found = of(cubin, gpu)
    ahead = config_fields.get("schedule") == "s_ahead"
    # Without a mask s_ahead has one loop: its last tile comes after it.
    loops = 1 if ahead and "mask" not in spec_fields else 2
    assert found.phases == tuple((number,) for number in range(loops))
    for blocks in range(1, found.residents + 1):
        for number, spent in enumerate(found.trip_cycles(blocks)):
            made = found._program(found.phases[number], blocks)
            assert spent >= sum(each.stall for each in made.rows)
    for phase in range(loops):
        usage = found.usage(phase, found.residents)
        shares = (usage.matrix, usage.exp2, usage.issue, usage.shared, usage.memory)
        assert all(0 <= share <= 1.001 for share in shares), usage
        assert 0 <= usage.latency < 1
        assert (usage.matrix > 0) == (kind != "ieee")


def test_ptxas_spaces_hmma_as_the_pipe_of_its_architecture_is_long(cache: Path) -> None:
    """What tells 8 cycles on sm_80 from 6 on sm_90, where HMMA reaches two thirds of wgmma."""
    for gpu, spacing in ((A100, 8), (H200, 6)):
        cubin, _ = cubins.own(make_spec(), make_config(32, 64), gpu.arch, cache)
        found = of(cubin, gpu)
        assert {instruction_row.hmma_spacing(body) for body in found.main} == {spacing}
        assert found.hmma == spacing


@pytest.fixture(scope="module")
def equal() -> Scoreboard:
    return of(cubins.roles(), H200)


def test_warps_with_roles_are_told_apart_and_run_together(equal: Scoreboard) -> None:
    """Two warpgroups that multiply and one warp that loads; Triton rounds up to a warpgroup."""
    assert sorted(role.warps or 0 for role in equal._roles) == [1, 4, 4]
    assert equal.num_warps == 12
    assert equal.phases == ((0, 1),)
    assert len(equal.main) == 2
    made = equal._program(equal.phases[0], 1)
    assert made.counts.count(False) == 1  # the loading warp's trips are not waited for
    # One family is completed by TMA, the other by the eight warps that multiply.
    assert sorted(made.arrivals) == [0, 8]
    assert (
        sum(each.amount for each in made.rows if each.kind == instruction_row.TMA)
        == 2 * 128 * 64 * 2
    )


def test_a_role_with_more_to_do_is_what_the_others_wait_for(equal: Scoreboard) -> None:
    unequal = of(cubins.roles(unequal=True), H200)
    assert len({len(body) for body in unequal.main}) == 2
    (one,), (other,) = equal.trip_cycles(1), unequal.trip_cycles(1)
    twice_exp2 = 128 * 64 / 4 / 32 * SM90.exp2  # a warp's scores, by its sub-partition's pipe
    assert one < other <= one + 1.2 * twice_exp2


def test_a_deeper_ring_does_no_harm(equal: Scoreboard) -> None:
    deeper = of(cubins.roles(stages=3), H200)
    assert deeper.trip_cycles(1)[0] <= equal.trip_cycles(1)[0]


def test_a_loop_bound_by_its_loads_takes_the_time_of_the_transfer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slow = replace(SM90, l2_bytes=32.0)
    monkeypatch.setitem(machines.MACHINES, "sm_90", slow)
    bound = of(cubins.roles(keys=64, dim=128, stages=4), H200)
    transfer = 2 * 64 * 128 * 2 / slow.l2_bytes
    assert 1 <= bound.trip_cycles(1)[0] / transfer < 1.2
