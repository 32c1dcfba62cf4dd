"""estimate/register_ports.py: what each instruction reads, and the bubbles that the paper's own listings show."""

from __future__ import annotations

import pytest

from flashgen.compile.sass import Instruction
from flashgen.estimate.register_ports import Reads, RegisterOperand, operands, reads
from flashgen.estimate.sm import Scoreboard
from flashgen.spec.gpu import TARGETS
from tests.listings import Line, line, loop

H200 = TARGETS["nvidia_h200"]  # its FP32 pipe takes an instruction a cycle, and hides no bubble
FREE = "MOV RZ, 0x1"


def code(text: str) -> Instruction:
    opcode, _, rest = text.partition(" ")
    return Instruction(0, "", opcode, rest)


def cycles(*lines: str | Line, num_warps: int = 1) -> float:
    """Cycles of a trip of a loop that these make with one exp2, which marks it."""
    body = loop(
        *[each if isinstance(each, Line) else line(each) for each in lines], "MUFU.EX2 R1, R2"
    )
    board = Scoreboard(body, H200, num_warps=num_warps, shared_bytes=0)
    (found,) = board.trip_cycles(1)
    return found


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("FFMA R11, R10, R12.reuse, R14", [(0, 10, 1, False), (1, 12, 1, True), (2, 14, 1, False)]),
        ("FADD R3, -R3, |R4|", [(0, 3, 1, False), (1, 4, 1, False)]),
        ("ISETP.GE.AND P0, PT, R4, R5, PT", [(0, 4, 1, False), (1, 5, 1, False)]),
        ("FMUL R3, R4, c[0x0][0x160]", [(0, 4, 1, False)]),
        ("FSEL R3, RZ, R4, !P1", [(1, 4, 1, False)]),
        ("LOP3.LUT P0, RZ, R2, 0xff, R4, 0xc0, !PT", [(0, 2, 1, False), (2, 4, 1, False)]),
        ("LOP3.LUT R7, R2, 0xff, RZ, 0xc0, !PT", [(0, 2, 1, False)]),
        ("IMAD.WIDE R2, R4, 0x2, R6", [(0, 4, 1, False), (2, 6, 2, False)]),
        ("IADD3 R2, P0, R4, UR6, RZ", [(0, 4, 1, False)]),
        (
            "HMMA.16816.F32 R4, R8.reuse, R12, R4",
            [(0, 8, 4, True), (1, 12, 2, False), (2, 4, 4, False)],
        ),
        ("HMMA.16816.F16 R4, R8, R12, R4", [(0, 8, 4, False), (1, 12, 2, False), (2, 4, 2, False)]),
        ("HMMA.1688.F32.TF32 R4, R8, R12, RZ", [(0, 8, 4, False), (1, 12, 2, False)]),
        (
            "IMMA.16832.S8.S8 R4, R8, R12, R4",
            [(0, 8, 4, False), (1, 12, 2, False), (2, 4, 4, False)],
        ),
    ],
)
def test_operands(text: str, expected: list[tuple[int, int, int, bool]]) -> None:
    assert operands(code(text)) == tuple(
        RegisterOperand(place, range(first, first + count), reuse)
        for place, first, count, reuse in expected
    )


def test_the_cache_keeps_registers_and_not_where_an_operand_begins() -> None:
    _, tile = reads([code("FFMA R20, R8.reuse, R5, R7"), code("HMMA.16816.F32 R4, R8, R12, R4")])
    assert (tile.even - tile.again_even, tile.odd - tile.again_odd) == (1, 0)


def test_registers_lie_in_the_even_and_the_odd_bank() -> None:
    assert reads([code("FFMA R1, R2, R4, R7")]) == [Reads(2, 1, 2, 1)]
    assert reads([code("HMMA.16816.F32 R4, R8, R12, R4")]) == [Reads(5, 5, 5, 5)]


@pytest.mark.parametrize(
    ("lines", "saved"),
    [  # The paper's listing 4: whether the last instruction finds R2 in the cache.
        (("IADD3 R1, R2.reuse, R3, R4", "FFMA R5, R2, R7, R8", "IADD3 R10, R2, R12, R13"), 0),
        (("IADD3 R1, R2.reuse, R3, R4", "FFMA R5, R2.reuse, R7, R8", "IADD3 R10, R2, R12, R13"), 1),
        (("IADD3 R1, R2.reuse, R3, R4", "FFMA R5, R7, R2, R8", "IADD3 R10, R2, R12, R13"), 1),
        (("IADD3 R1, R2.reuse, R3, R4", "FFMA R5, R4, R7, R8", "IADD3 R10, R2, R12, R13"), 0),
    ],
)
def test_the_cache_keeps_what_is_marked(lines: tuple[str, ...], saved: int) -> None:
    last = reads([code(text) for text in lines])[-1]
    assert (last.even - last.again_even, last.odd - last.again_odd) == (saved, 0)


@pytest.mark.parametrize(("pair", "bubbles"), [("R19, R21", 0), ("R18, R21", 1), ("R18, R20", 2)])
def test_registers_of_one_bank_make_bubbles(pair: str, bubbles: int) -> None:
    """The paper's listing 1, and the cycles measured there."""
    first = "FFMA R11, R10, R12, R14"
    free = cycles(first, "FFMA R13, R16, R19, R21", *[FREE] * 4)
    assert cycles(first, f"FFMA R13, R16, {pair}", *[FREE] * 4) - free == bubbles


def test_a_cached_operand_makes_no_bubble() -> None:
    plain = ("FFMA R11, R10, R12, R14", "FFMA R13, R10, R18, R21")
    marked = ("FFMA R11, R10.reuse, R12, R14", plain[1])
    assert cycles(*plain) - cycles(*marked) == 1


def test_cached_operands_leave_the_ports_to_what_follows() -> None:
    marked = ("FFMA R11, R10.reuse, R12.reuse, R14.reuse",) * 8
    none = ("FFMA R11, RZ, RZ, RZ",) * 8
    assert cycles(*marked, "FADD R20, R22, R24") == cycles(*none, "FADD R20, R22, R24")


def test_another_warp_loses_the_cached_operand() -> None:
    """Of five warps two share a sub-partition, and take turns while the other one stalls."""
    reading = [line("FFMA R11, R10.reuse, R12.reuse, R14.reuse", stall=4)] * 8
    reading_none = [line("FFMA R11, RZ, RZ, RZ", stall=4)] * 8
    assert cycles(*reading) == cycles(*reading_none)
    assert cycles(*reading, num_warps=5) - cycles(*reading_none, num_warps=5) > 4


def test_hmma_leaves_the_ports_to_others_for_a_part_of_its_time() -> None:
    """It reads in 5 of the 6 cycles that its pipe takes. Who needs a port in one cycle of three may
    begin two before.
    """
    hmma = "HMMA.16816.F32 R4, R8, R12, R4"
    assert cycles(hmma, "FADD R20, R22, R23") - cycles(hmma, "FADD R20, RZ, RZ") == 5 - 2 - 1
