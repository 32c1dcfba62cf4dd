"""compile/walk.py: what a warp executes from a kernel's entry to its end."""

from __future__ import annotations

import pytest

from flashgen.compile.loops import main_bodies, roles
from flashgen.compile.sass import Listing
from flashgen.compile.walk import Walker
from flashgen.errors import NoEstimate
from tests.listings import listing

HMMA = "HMMA.16816.F32 R4, R4, R8, R4"


def walked(code: Listing, *, tiles: int = 1) -> str:
    """The opcodes of the only role's walk, two trips of each loop; branches left out."""
    (role,) = roles(code, main_bodies(code))
    walk = Walker(code).walk(role, phases=len(role.loops), trips=2, tiles=tiles)
    return " ".join(i.base for i in walk if i.base != "BRA")


def test_a_branch_that_skips_work_is_not_taken_and_loops_are_run() -> None:
    code = listing(
        "@P1 BRA {loop}", "FADD R1, R1, R2", "loop:", HMMA, "@P0 BRA {loop}",
        "@P1 BRA {last}", "FMUL R1, R1, R2", "last:", HMMA, "MOV R3, R4", "@P0 BRA {last}",
        "STG.E [R2], R4", "EXIT",
    )  # fmt: skip
    assert walked(code) == "FADD HMMA HMMA FMUL HMMA MOV HMMA MOV STG EXIT"


def test_what_only_a_taken_branch_reaches_is_walked() -> None:
    code = listing(
        "@P1 BRA {loop}", "FADD R1, R1, R2", "EXIT", "loop:", HMMA, "@P0 BRA {loop}", "EXIT"
    )
    assert walked(code) == "HMMA HMMA EXIT"


def test_the_retry_of_a_wait_behind_the_end_is_left_out() -> None:
    code = listing(
        "SYNCS.PHASECHK P0, [UR4], RZ", "@!P0 BRA {again}", "here:", "loop:", HMMA,
        "@P0 BRA {loop}", "EXIT", "again:", "NOP", "BRA {here}",
    )  # fmt: skip
    assert walked(code) == "SYNCS HMMA HMMA EXIT"


def test_barriers_of_the_way_not_taken_are_not_met() -> None:
    code = listing(
        "top:", "@P2 BAR.SYNC 0x1", "BAR.SYNC 0x2", "@P2 BRA {top}",
        "loop:", HMMA, "@P0 BRA {loop}", "EXIT",
    )  # fmt: skip
    assert walked(code) == "BAR HMMA HMMA EXIT"


def test_a_persistent_program_walks_its_tiles() -> None:
    code = listing(
        "MOV R1, R2", "tile:", "FADD R1, R1, R2", "loop:", HMMA, "@P0 BRA {loop}",
        "STG.E [R2], R4", "@P1 BRA {tile}", "EXIT",
    )  # fmt: skip
    one = "FADD HMMA HMMA STG"
    assert walked(code) == f"MOV {one} EXIT"
    assert walked(code, tiles=3) == f"MOV {one} {one} {one} EXIT"


def test_a_tile_has_a_loop_over_heads_within_the_loop_over_tiles() -> None:
    code = listing(
        "MOV R1, R2", "tile:", "FADD R1, R1, R2", "head:", "LDS R3, [R1]", "loop:", HMMA,
        "@P0 BRA {loop}", "@P2 BRA {head}", "STG.E [R2], R4", "@P1 BRA {tile}", "EXIT",
    )  # fmt: skip
    one = "FADD LDS HMMA HMMA STG"
    assert walked(code, tiles=2) == f"MOV {one} {one} EXIT"


def test_tiles_without_a_loop_around_them_are_refused() -> None:
    with pytest.raises(NoEstimate, match="no loop is seen around"):
        walked(listing("loop:", HMMA, "@P0 BRA {loop}", "EXIT"), tiles=2)
