"""compile/loops.py on listings written here: natural loops, main loops, and the roles of warps."""

from __future__ import annotations

import pytest

from flashgen.compile.loops import loops, main_bodies, main_loops, roles, spilling_loops
from tests.listings import listing, loop


def test_loops_are_found_and_their_insides_are_in_order() -> None:
    found = listing("MOV R0, R1", "top:", "FADD R0, R0, R1", "@P0 BRA {top}", "EXIT")
    assert [[i.base for i in loop] for loop in loops(found.instructions)] == [["FADD", "BRA"]]


def test_a_retry_behind_the_end_is_neither_loop_nor_part_of_one() -> None:
    found = listing(
        "top:",
        "FADD R0, R0, R1",
        "@!P0 BRA {retry}",
        "back:",
        "HMMA.16816.F32 R4, R4, R8, R4",
        "@P1 BRA {top}",
        "EXIT",
        "retry:",
        "SYNCS.PHASECHK P0, [UR4]",
        "@!P0 BRA {retry}",
        "BRA {back}",
    )
    assert [len(loop) for loop in loops(found.instructions)] == [4, 2]
    (main,) = main_loops(found)
    assert main.instructions == 4


def test_a_role_that_begins_with_a_retry_is_entered_all_the_same() -> None:
    """A jump table leads to setmaxnreg, which is tried until it succeeds: a block whose only visible
    predecessor is itself.
    """
    found = listing(
        "MOV R0, R1",
        "BRX R2 -0x20",
        "role:",
        "USETMAXREG.TRY_ALLOC.CTAPOOL UP0, 0xf0",
        "@!P0 BRA {role}",
        "top:",
        "SYNCS.PHASECHK P0, [UR4]",
        "@!P0 BRA {retry}",
        "back:",
        "HMMA.16816.F32 R4, R4, R8, R4",
        "MUFU.EX2 R6, R7",
        "@P1 BRA {top}",
        "EXIT",
        "retry:",
        "SYNCS.PHASECHK P0, [UR4]",
        "@!P0 BRA {retry}",
        "BRA {back}",
    )
    assert [len(loop) for loop in loops(found.instructions)] == [2, 5, 2]
    (main,) = main_bodies(found)
    assert [i.base for i in main] == ["SYNCS", "BRA", "HMMA", "MUFU", "BRA"]


def test_a_divergent_branch_on_a_uniform_register_falls_through() -> None:
    found = listing(
        "top:",
        "BRA.DIV UR4, {out}",
        "HMMA.16816.F32 R4, R4, R8, R4",
        "@P0 BRA {top}",
        "out:",
        "EXIT",
    )
    assert len(main_loops(found)) == 1


def test_the_innermost_matrix_loops_are_main_and_the_short_one_comes_first() -> None:
    found = listing(
        "outer:",
        "MOV R0, R1",
        "masked:",
        "HMMA.16816.F32 R4, R4, R8, R4",
        "FSEL R4, R4, R5, P0",
        "@P0 BRA {masked}",
        "steady:",
        "HMMA.16816.F32 R4, R4, R8, R4",
        "@P0 BRA {steady}",
        "copy:",
        "LDG.E R4, [R2]",
        "@P0 BRA {copy}",
        "@P1 BRA {outer}",
        "EXIT",
    )
    assert [loop.instructions for loop in main_loops(found)] == [2, 3]


def test_without_matrix_instructions_the_loop_with_exp2_is_main() -> None:
    found = listing(
        "top:",
        "FFMA R4, R4, R5, R6",
        "MUFU.EX2 R4, R4",
        "@P0 BRA {top}",
        "copy:",
        "LDG.E R4, [R2]",
        "@P0 BRA {copy}",
    )
    (main,) = main_loops(found)
    assert (main.matrix_instructions, main.exp2, main.exp2_under_matrix) == (0, 1, None)


WGMMA = "HGMMA.64x64x16.F32 R24, gdesc[UR4], R24, gsb0"
BRANCHED = (
    "top:",
    "HGMMA.64x64x16.F32 R24, gdesc[UR4], R24, gsb0",
    "@P1 BRA {seen}",
    "ISETP.GE.AND P2, PT, R8, 0x1, PT",
    "FSEL R24, R24, -INF, P2",
    "seen:",
    "MUFU.EX2 R4, R4",
    "@P0 BRA {top}",
    "EXIT",
)


@pytest.mark.parametrize("product", [WGMMA, "HMMA.16816.F32 R4, R4, R8, R4"])
def test_a_loop_that_branches_over_its_mask_counts_with_and_without_it(product: str) -> None:
    found = listing(*(line.replace(WGMMA, product) for line in BRANCHED))
    assert [loop.instructions for loop in main_loops(found)] == [4, 6]
    whole, steady = main_bodies(found)
    assert len(whole) == 6
    assert [i.base for i in steady] == [product.split(".")[0], "BRA", "MUFU", "BRA"]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("ISETP.GE.AND P2, PT, R8, 0x1, PT", "MUFU.EX2 R8, R8"),
        ("ISETP.GE.AND P2, PT, R8, 0x1, PT", "BAR.SYNC 0x1, 0x80"),
        ("ISETP.GE.AND P2, PT, R8, 0x1, PT", "LDS R8, [R9]"),
        ("FSEL R24, R24, -INF, P2", "IADD3 R24, R24, R25, RZ"),
    ],
)
def test_a_branch_over_other_work_is_no_mask(old: str, new: str) -> None:
    assert old in BRANCHED
    found = listing(*(line.replace(old, new) for line in BRANCHED))
    assert len(main_loops(found)) == 1


def test_straight_code_has_no_main_loop() -> None:
    assert main_loops(listing("HMMA.16816.F32 R4, R4, R8, R4", "EXIT")) == ()


def test_a_kernel_without_a_jump_table_has_one_role_of_all_its_warps() -> None:
    code = loop("HMMA.16816.F32 R4, R4, R8, R4")
    (role,) = roles(code, main_bodies(code))
    assert (role.warps, role.loops) == (None, main_bodies(code))
    straight = listing("HMMA.16816.F32 R4, R4, R8, R4", "EXIT")
    assert roles(straight, main_bodies(straight)) == ()


def test_loops_behind_a_jump_table_are_roles_of_their_own() -> None:
    code = listing(
        "BRX R2 -0x10",
        "loader:",
        "USETMAXREG.DEALLOC.CTAPOOL 0x18",
        "load:",
        "UTMALDG.2D [UR8], [UR4]",
        "@P0 BRA {load}",
        "EXIT",
        "worker:",
        "USETMAXREG.TRY_ALLOC.CTAPOOL UP0, 0xf0",
        "masked:",
        "HGMMA.64x64x16.F32 R24, gdesc[UR4], R24, gsb0",
        "BAR.SYNC.DEFER_BLOCKING 0x2, 0x80",
        "@P0 BRA {masked}",
        "steady:",
        "HGMMA.64x64x16.F32 R24, gdesc[UR4], R24, gsb0",
        "@P0 BRA {steady}",
        "EXIT",
    )
    found = roles(code, main_bodies(code))
    # The two loops of the worker follow one another; its own barrier tells its 128 threads.
    assert [(role.warps, len(role.loops)) for role in found] == [(1, 1), (4, 2)]
    assert [role.start for role in found] == [0x10, 0x50]


def test_spills_count_in_loops_without_a_product_too() -> None:
    code = listing(
        "STL [R1], R2",
        "one:", "LDL R2, [R1]", "FADD R2, R2, R2", "@P0 BRA {one}",
        "two:", "HMMA.16816.F32 R4, R4, R8, R4", "@P0 BRA {two}",
        "three:", "STL [R1], R2", "LDL R2, [R1]", "HMMA.16816.F32 R4, R4, R8, R4", "@P0 BRA {three}",
        "EXIT",
    )  # fmt: skip
    assert spilling_loops(code) == ((1, 3), (2, 4))
    assert [loop.spills for loop in main_loops(code)] == [0, 2]
