"""benchmarks/given_roles.py: a loop whose warps the caller names, as FlashAttention-3's."""

from __future__ import annotations

from functools import partial

import pytest

from benchmarks.given_roles import program_of
from flashgen.compile.loops import main_bodies
from flashgen.compile.sass import Listing
from flashgen.errors import NoEstimate
from flashgen.estimate import loop_program
from flashgen.estimate.loop_program import Program
from flashgen.estimate.machines import MACHINES, matrix_cycles
from flashgen.estimate.sm import steady_cycles
from flashgen.spec.gpu import TARGETS
from tests.listings import Line, line, loop

SM90 = MACHINES["sm_90"]
PRODUCT = "HGMMA.64x128x16.F32 R24, gdesc[UR4], R24, gsb0"


def looks(address: str, *, again: bool = True) -> list[str | Line]:
    """A wait for a tile: two looks at its mbarrier, as nvcc writes them."""
    look = f"SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4+{address}], R3"
    first = [line(look, write=0), line("@P0 BRA {got" + address + "}", waits=(0,))]
    second = [line(look, write=0), line("@!P0 BRA {top}", waits=(0,))]
    return [*first, *(second if again else []), f"got{address}:"]


def turns(*, again: bool = True, stores: bool = False) -> Listing:
    """Two products of a tile, in turns; with a warp that stores."""
    storing = ["BAR.SYNC R5, 0xa0", "BAR.ARV R5, 0xa0"] if stores else []
    return loop(
        *looks("0x830", again=again),
        "BAR.SYNC.DEFER_BLOCKING R4, 0x100",
        "WARPGROUP.ARRIVE",
        PRODUCT,
        *looks("0x850", again=again),
        PRODUCT,
        "BAR.ARV R4, 0x100",
        "WARPGROUP.DEPBAR.LE gsb0, 0x1",
        "SYNCS.ARRIVE.TRANS64.RED.A1T0 RZ, [R7+URZ], RZ",
        "WARPGROUP.DEPBAR.LE gsb0, 0x0",
        "SYNCS.ARRIVE.TRANS64.RED.A1T0 RZ, [R8+URZ], RZ",
        *storing,
    )


def program(code: Listing, *, warpgroups: int = 2, tiles: int = 2) -> Program:
    return program_of(
        min(main_bodies(code), key=len),
        warpgroups=warpgroups,
        load_bytes=(16384,) * tiles,
        ring=2,
        machine=SM90,
        matrix=partial(matrix_cycles, SM90, TARGETS["nvidia_h200"]),
    )


def test_the_second_look_is_passed_over() -> None:
    once, twice = program(turns(again=False)), program(turns())
    assert [each.kind for each in once.rows] == [each.kind for each in twice.rows]
    assert sum(each.kind == loop_program.AWAIT for each in twice.rows) == 2 * 2 + 2


def test_each_warpgroup_waits_for_its_turn_and_arrives_at_the_next() -> None:
    made = program(turns(), warpgroups=3)
    met = [
        [int(r.amount) for r in made.rows[start:end] if r.kind == kind]
        for kind in (loop_program.BARRIER, loop_program.BARRIER_ARRIVE)
        for start, end in zip(made.start[:3], made.end[:3], strict=True)
    ]
    assert met == [[1], [2], [3], [2], [3], [1]]
    assert made.credit == {1: 4}
    assert made.warps == [4, 4, 4, 1]
    assert made.arrivals == [0, 0, 12, 12]


def test_a_steady_trip_takes_at_least_the_products_and_the_loads() -> None:
    products = 2 * 2 * 64.0
    free = steady_cycles(program(turns()), 1, SM90)
    assert free >= products
    few = program(turns())
    for each in few.rows:
        each.amount *= 8 if each.kind == loop_program.TMA else 1
    assert steady_cycles(few, 1, SM90) >= 2 * 8 * 16384 / SM90.l2_burst_bytes
    assert steady_cycles(few, 1, SM90) > 2 * free


@pytest.mark.parametrize("stores", [False, True])
def test_without_the_first_arrival_its_warps_deadlock(stores: bool) -> None:
    made = program(turns(stores=stores))
    assert steady_cycles(made, 1, SM90) > 0
    made.credit = {}
    with pytest.raises(NoEstimate, match="deadlock"):
        steady_cycles(made, 1, SM90)


def test_a_warp_that_stores_meets_its_warpgroup_alone() -> None:
    made = program(turns(stores=True))
    assert made.warps == [4, 4, 1, 1, 1]
    assert len(made.credit) == 3
    assert {r.count for r in made.rows[made.start[3] :]} == {5}


def test_another_number_of_tiles_is_refused() -> None:
    with pytest.raises(NoEstimate, match="waits for 2 tiles: 3 are loaded"):
        program(turns(), tiles=3)


def test_barriers_of_unknown_warps_are_refused() -> None:
    with pytest.raises(NoEstimate, match="6 warps meet"):
        program(loop(*looks("0x8"), PRODUCT, "BAR.SYNC R4, 0xc0"), tiles=1)
