"""compile/loops.py: counts of single instructions and of loops written here."""

from __future__ import annotations

import pytest

from flashgen.compile.loops import facts
from flashgen.compile.sass import Instruction
from tests.listings import listing


def body(*lines: str) -> tuple[Instruction, ...]:
    return listing(*lines).instructions


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


@pytest.mark.parametrize(
    ("line", "shape"),
    [
        ("HMMA.16816.F32.BF16 R4, R4, R8, R4", (16, 8, 16)),
        ("HGMMA.64x256x16.F32.BF16 R24, gdesc[UR8], R24", (16, 256, 16)),
        ("HMMA.31415.F32 R4, R4, R8, R4", (0, 0, 0)),
        ("FFMA.16816 R4, R4, R8, R4", (0, 0, 0)),
    ],
)
def test_the_shape_that_one_warp_multiplies(line: str, shape: tuple[int, int, int]) -> None:
    assert body(line)[0].shape == shape
