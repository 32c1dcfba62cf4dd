"""sass.py on listings written here, so that every count is known; real cubins are in test_compile.py."""

from __future__ import annotations

import pytest

from flashgen import sass
from flashgen.errors import ToolchainError
from flashgen.facts import facts, main_loops
from flashgen.flow import loops
from flashgen.sass import Instruction, Listing, parse


def listing(*lines: str, registers: int = 96, stack: int = 0) -> Listing:
    """A listing as cuobjdump prints it; "{label}" stands for the address of the line "label:"."""
    addresses: dict[str, str] = {}
    code: list[str] = []
    for line in lines:
        if line.endswith(":"):
            addresses[line[:-1]] = f"0x{16 * len(code):x}"
        else:
            code.append(line)
    text = f"\n Function kernel:\n  REG:{registers} STACK:{stack} SHARED:0 LOCAL:0\n\n\tcode for sm_90a\n"
    for number, line in enumerate(code):
        text += f"        /*{16 * number:04x}*/                   {line.format(**addresses)} ;"
        text += f"{'':20}/* 0x{number:016x} */\n{'':80}/* 0x000fe20000000800 */\n"
    return parse(text)


def body(*lines: str) -> tuple[Instruction, ...]:
    return listing(*lines).instructions


def test_an_instruction_is_taken_apart() -> None:
    found = listing("@!UP0 LDS.U.128 R4, [R2+0x10]", "EXIT", registers=168, stack=24)
    assert (found.registers, found.stack_bytes) == (168, 24)
    first, last = found.instructions
    assert (first.address, first.predicate, first.opcode) == (0, "@!UP0", "LDS.U.128")
    assert (first.base, first.operands) == ("LDS", "R4, [R2+0x10]")
    assert (last.address, last.opcode, last.operands) == (16, "EXIT", "")


@pytest.mark.parametrize("text", ["", "no machine code here", "REG:1 STACK:0 and nothing else"])
def test_text_without_code_is_refused(text: str) -> None:
    with pytest.raises(ToolchainError, match="no machine code"):
        parse(text)


def test_bytes_that_are_no_cubin_are_refused() -> None:
    with pytest.raises(ToolchainError, match="cuobjdump failed"):
        sass.disassemble(b"not a cubin")


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


def test_straight_code_has_no_main_loop() -> None:
    assert main_loops(listing("HMMA.16816.F32 R4, R4, R8, R4", "EXIT")) == ()


def test_every_count_of_a_loop() -> None:
    found = facts(
        body(
            "LDL R1, [R2]",
            "STL.64 [R2], R4",
            "WARPGROUP.ARRIVE",
            "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], RZ, !UPT, gsb0",
            "MUFU.EX2 R1, R1",
            "MUFU.RCP R1, R1",
            "FFMA R1, R1, R2, R3",
            "FMUL R1, R1, R2",
            "FMNMX R1, R1, R2, !PT",
            "F2FP.BF16.F32.PACK_AB R1, R2, R1",
        )
    )
    assert (found.instructions, found.spills, found.warpgroup_arrives) == (10, 2, 1)
    assert (found.matrix_instructions, found.exp2, found.fp32, found.other) == (1, 1, 2, 2)


@pytest.mark.parametrize(
    ("line", "flops", "shared"),
    [
        ("HMMA.16816.F32.BF16 R4, R4, R8, R4", 4096, 0),
        ("HMMA.1688.F32.TF32 R4, R4, R8, R4", 2048, 0),
        # B alone, 128 columns of 32 bytes, and a fourth of it for each of the four warps.
        ("HGMMA.64x128x16.F32.BF16 R24, R88, gdesc[UR8].tnspB, R24, gsb0", 65536, 1024),
        ("HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24, gsb0", 65536, 1536),
        ("HGMMA.64x64x8.F32.TF32 R24, gdesc[UR8], R24", 16384, 1024),
        ("LDSM.16.M88.4 R4, [R2]", 0, 512),
        ("LDSM.16.MT88.2 R4, [R2]", 0, 256),
        ("LDS.128 R4, [R2]", 0, 512),
        ("STS [R2], R4", 0, 128),
        ("LDGSTS.E.BYPASS.128 [R2], desc[UR4][R4.64]", 0, 512),
        ("SHFL.BFLY PT, R4, R4, 0x1, 0x1f", 0, 128),
        ("LDG.E.128 R4, [R2]", 0, 0),
    ],
)
def test_flops_and_shared_bytes_of_one_instruction(line: str, flops: int, shared: int) -> None:
    found = facts(body(line))
    assert (found.matrix_flops, found.shared_bytes) == (flops, shared)


EXP2 = "MUFU.EX2 R1, R1"
OPEN = "HGMMA.64x64x16.F32 R24, gdesc[UR4], R24"
COMMIT = "HGMMA.64x64x16.F32 R24, gdesc[UR4], R24, gsb0"
WAIT_ALL = "WARPGROUP.DEPBAR.LE gsb0, 0x0"
WAIT_BUT_ONE = "WARPGROUP.DEPBAR.LE gsb0, 0x1"


@pytest.mark.parametrize(
    ("lines", "share"),
    [
        ((COMMIT, WAIT_ALL, EXP2, EXP2), 0.0),
        ((COMMIT, EXP2, WAIT_ALL, EXP2), 0.5),
        ((COMMIT, EXP2, EXP2, WAIT_ALL), 1.0),
        ((OPEN, EXP2, COMMIT, WAIT_ALL, EXP2), 0.5),
        ((COMMIT, COMMIT, WAIT_BUT_ONE, EXP2, WAIT_ALL), 1.0),
        ((COMMIT, WAIT_BUT_ONE, EXP2, WAIT_ALL), 1.0),
        ((EXP2, WAIT_ALL, EXP2, COMMIT), 0.5),  # carried from turn to turn
    ],
)
def test_the_share_of_exp2_under_the_own_wgmma(lines: tuple[str, ...], share: float) -> None:
    assert facts(body(*lines)).exp2_under_matrix == share
