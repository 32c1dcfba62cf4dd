"""estimate/instruction_row.py and loop_program.py: what one instruction occupies, and what links those of a loop."""

from __future__ import annotations

from functools import partial

import pytest

from flashgen.compile.loops import main_bodies, roles
from flashgen.compile.sass import Listing
from flashgen.estimate import instruction_row as rows
from flashgen.estimate import loop_program
from flashgen.estimate.instruction_row import PIPE_OF, InstructionRow, row, unknown_share
from flashgen.estimate.machines import MACHINES, matrix_cycles
from flashgen.spec.gpu import TARGETS
from tests.listings import Line, line, listing, loop

SM80, SM90 = MACHINES["sm_80"], MACHINES["sm_90"]
A100 = partial(matrix_cycles, SM80, TARGETS["nvidia_a100_sxm4_80gb"])
H200 = partial(matrix_cycles, SM90, TARGETS["nvidia_h200"])


def made(text: str | Line, *, spills_to_l2: bool = False) -> InstructionRow:
    (instruction,) = listing(text).instructions
    return row(instruction, SM80, H200 if instruction.is_wgmma else A100, spills_to_l2=spills_to_l2)


@pytest.mark.parametrize(
    ("text", "pipe", "occupies", "latency"),
    [
        ("FFMA R1, R1, R2, R3", rows.FMA, 2, 0),
        ("IMAD R1, R1, R2, R3", rows.FMA, 2, 0),
        ("IMAD.WIDE R2, R1, R2, R4", rows.FMA, 4, 0),
        ("FMNMX R1, R1, R2, !PT", rows.ALU, 2, 0),
        ("HFMA2 R1, R1, R2, R3", rows.HALF, 1, 0),
        ("MUFU.EX2 R1, R1", rows.EXP2, 8, 22),
        ("UIADD3 UR4, UR4, 0x1, URZ", rows.UNIFORM, 2, 12),
        ("NOP", rows.CONTROL, 0, 0),
        ("@!PT FFMA R1, R1, R2, R3", rows.CONTROL, 0, 0),  # never runs
        ("FROB R1, R2", rows.ALU, 2, 0),  # unknown
        ("HMMA.16816.F32 R4, R4, R8, R4", rows.MATRIX, 8, 0),
        ("HMMA.1688.F32 R4, R4, R8, R4", rows.MATRIX, 4, 0),
        ("HMMA.1688.F32.TF32 R4, R4, R8, R4", rows.MATRIX, 8, 0),
        ("IMMA.16832.S8.S8 R4, R4.ROW, R8.COL, R4", rows.MATRIX, 8, 0),
        ("QGMMA.64x128x32.F32.E4M3.E4M3 R24, R88, gdesc[UR8], R24", rows.MATRIX, 64, 0),
        ("HGMMA.64x128x16.F32 R24, R88, gdesc[UR8], R24", rows.MATRIX, 64, 0),
        ("HGMMA.64x128x8.F32.TF32 R24, R88, gdesc[UR8], R24", rows.MATRIX, 64, 0),
    ],
)
def test_the_pipe_and_its_cycles(text: str, pipe: int, occupies: float, latency: float) -> None:
    found = made(text)
    assert (found.pipe, found.occupies, found.latency) == (pipe, occupies, latency)


@pytest.mark.parametrize(
    ("text", "kind", "shared", "amount", "latency"),
    [
        ("LDS.128 R4, [R2]", rows.PLAIN, 4, 0, 29),
        ("LDSM.16.M88.4 R4, [R2]", rows.PLAIN, 4, 0, 33),
        ("SHFL.BFLY PT, R4, R4, 0x1, 0x1f", rows.PLAIN, 2, 0, 24),
        ("STS.64 [R2], R4", rows.PLAIN, 2, 0, 20),
        ("LDGSTS.E.BYPASS.128 [R2], desc[UR4][R4.64]", rows.COPY, 4, 512, 520),
        ("LDG.E.64 R4, [R2]", rows.LOAD, 2, 256, 480),
        ("LDL R1, [R2]", rows.PLAIN, 1, 0, 40),
        ("STL R1, [R2]", rows.PLAIN, 1, 0, 20),
    ],
)
def test_memory(text: str, kind: int, shared: float, amount: float, latency: float) -> None:
    found = made(text)
    assert found.pipe == rows.SHARED
    assert (found.kind, found.shared, found.amount, found.latency) == (
        kind, shared, amount, latency,
    )  # fmt: skip


def test_a_spill_beyond_l1_passes_through_l2() -> None:
    found = made("LDL R1, [R2]", spills_to_l2=True)
    assert (found.kind, found.amount, found.latency) == (rows.LOAD, 128, 260)


@pytest.mark.parametrize(
    ("text", "kind", "count"),
    [
        ("BAR.SYNC.DEFER_BLOCKING 0x0", rows.BARRIER, 0),
        ("BAR.ARV 0x1, 0x100", rows.BARRIER_ARRIVE, 0),
        ("LDGDEPBAR", rows.COMMIT, 0),
        ("DEPBAR.LE SB0, 0x2", rows.WAIT_COPIES, 2),
        ("DEPBAR {5,4,3,2,1,0}", rows.PLAIN, 0),
        ("WARPGROUP.ARRIVE", rows.WARPGROUP_ARRIVE, 0),
        ("WARPGROUP.DEPBAR.LE gsb0, 0x1", rows.WAIT_WGMMA, 1),
        ("UTMALDG.2D [UR8], [UR4]", rows.TMA, 0),
        ("SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4+0x10], R3", rows.AWAIT, 0),
        ("SYNCS.ARRIVE.TRANS64 RZ, [UR4], R2", rows.EXPECT, 0),
        ("SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR4+URZ+0x8], RZ", rows.ARRIVE, 0),
        ("SYNCS.ARRIVE.TRANS64 RZ, [UR4+0x8], RZ", rows.ARRIVE, 0),
    ],
)
def test_what_synchronizes(text: str, kind: int, count: int) -> None:
    if "{" in text:
        text = text.replace("{", "{{").replace("}", "}}")
    found = made(text)
    assert (found.pipe, found.kind, found.count) == (rows.CONTROL, kind, count)


def test_control_bits_are_taken_over() -> None:
    found = made(line("MUFU.EX2 R1, R1", stall=7, write=2, read=5, waits=(0, 3)))
    assert (found.stall, found.writes, found.reads, found.waits) == (7, 2, 5, 0b1001)
    never = made(line("@!PT LDS R1, [R1]", stall=7, write=2))
    assert (never.stall, never.writes) == (7, rows.NO_BARRIER)
    assert made(line("NOP", stall=0)).stall == 1  # one instruction a cycle is the most


def test_the_last_of_a_group_of_wgmma_commits() -> None:
    text = "HGMMA.64x64x16.F32 R24, gdesc[UR4], R24"
    assert (made(text).commits, made(f"{text}, gsb0").commits) == (0, 1)


def test_unknown_opcodes_are_counted() -> None:
    assert unknown_share(listing(*["NOP"] * 3, "FROB R1").instructions) == 0.25
    assert "FROB" not in PIPE_OF


def linked(code: Listing, warps: int) -> loop_program.LoopProgram:
    main = main_bodies(code)
    return loop_program.link(
        code, roles(code, main), main, SM90, H200, num_warps=warps, spills_to_l2=False
    )


def test_warps_go_to_the_sub_partitions_in_turn() -> None:
    code = loop("HMMA.16816.F32 R4, R4, R8, R4")
    lines, places, arrivals, credit = loop_program.arrays(linked(code, 6), 2)
    assert [name for name, _ in loop_program.ROW] == list(lines.dtype.names)
    assert len(lines) == 2
    assert places["block"].tolist() == [0] * 6 + [1] * 6
    assert places["sub"].tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3]
    assert places["group"].tolist() == [0, 0, 0, 0, 1, 1, 2, 2, 2, 2, 3, 3]
    assert places["leads"].tolist() == ([1] + [0] * 5) * 2
    assert set(places["counts"].tolist()) == {1}
    assert (arrivals.tolist(), credit.tolist()) == ([], [0] * loop_program.NAMED_BARRIERS)


def test_an_arrival_nobody_waits_for_is_none() -> None:
    code = loop("HMMA.16816.F32 R4, R4, R8, R4", "BAR.ARV 0x3, 0x80")
    assert [each.kind for each in linked(code, 4).rows[:2]] == [rows.PLAIN, rows.PLAIN]


def test_arrivals_before_the_loop_are_credit() -> None:
    code = loop(
        "HMMA.16816.F32 R4, R4, R8, R4", "BAR.SYNC 0x3, 0x100", before=("BAR.ARV 0x3, 0x100",)
    )
    found = linked(code, 4)
    assert found.credit == {3: 4}
    assert (found.rows[1].amount, found.rows[1].count) == (3, 8)


def test_arrivals_in_an_earlier_loop_are_no_credit() -> None:
    product, meet = "HMMA.16816.F32 R4, R4, R8, R4", "BAR.SYNC 0x3, 0x100"
    code = listing(
        "BAR.ARV 0x3, 0x100",
        "one:", product, meet, "BAR.ARV 0x3, 0x100", "@P0 BRA {one}",
        "two:", product, meet, "BAR.ARV 0x3, 0x100", "@P0 BRA {two}", "EXIT",
    )  # fmt: skip
    main = main_bodies(code)
    assert len(main) == 2
    (role,) = roles(code, main)
    for body in main:
        found = loop_program.link(code, [role], [body], SM90, H200, num_warps=4, spills_to_l2=False)
        assert found.credit == {3: 4}


def test_the_bytes_of_a_phase_are_shared_among_its_loads() -> None:
    code = loop(
        "HMMA.16816.F32 R4, R4, R8, R4",
        "SYNCS.ARRIVE.TRANS64 RZ, [UR4+0x8000], R2",
        "UTMALDG.2D [UR8], [UR6]",
        "UTMALDG.2D [UR8], [UR6]",
        "SYNCS.ARRIVE.TRANS64 RZ, [UR4+0x8010], R3",
        "UTMALDG.2D [UR8], [UR6]",
        before=("MOV R2, 0x4000", "MOV R3, 0x100"),
    )
    loads = [each for each in linked(code, 4).rows if each.kind == rows.TMA]
    assert [each.amount for each in loads] == [0x2000, 0x2000, 0x100]
    assert [each.commits for each in loads] == [0, 1, 1]
    assert [each.count for each in loads] == [0, 0, 1]


def test_the_last_ring_is_no_larger_than_the_others() -> None:
    made = frozenset(0x10 + 8 * n for n in range(5))
    assert loop_program.ring_sizes([0x10, 0x20], made) == {0x10: 2, 0x20: 2}


def test_who_awaits_a_tile_names_the_ring_of_who_loads_it() -> None:
    code = listing(
        "SYNCS.EXCH.64 URZ, [UR4+0x10], UR6", "SYNCS.EXCH.64 URZ, [UR4+0x18], UR6",
        "SYNCS.ARRIVE.TRANS64 RZ, [UR4+0x10], R2", "UTMALDG.2D [UR8], [UR6]",
        "SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR4+0x18], R3",
    )  # fmt: skip
    places = loop_program.places_of_mbarriers(code, [])
    bodies = code.instructions[2:4], code.instructions[4:]
    assert [*loop_program.rings(code, bodies, places).values()] == [0x10, 0x10]
