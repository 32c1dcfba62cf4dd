"""benchmarks/machine_code.py on loops written by hand; no wheel, no compiler."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from benchmarks import machine_code
from benchmarks.machine_code import Part, Row, row_of, shortfall, summary
from flashgen.compile.loops import main_bodies
from flashgen.schedules.config import config_of
from flashgen.spec.problem import BUCKETS
from tests.listings import listing, loop
from tests.tables import SPEC, made_entry, made_table

LOOP = (
    "WARPGROUP.ARRIVE",
    "HGMMA.64x128x16.F32 R24, gdesc[UR4], R24, gsb0",
    "MUFU.EX2 R1, R1",
    "FFMA R1, R1, R2, R3",
    "FMNMX R1, R1, R2, !PT",
    "IMAD.MOV.U32 R1, RZ, RZ, R2",
    "SHFL.BFLY PT, R4, R4, 0x1, 0x1f",
    "BAR.SYNC 0x1, 0x80",
    "LDL R1, [R2]",
)


def part(*lines: str, tile: tuple[int, int] = (128, 128)) -> Part:
    code = loop("SYNCS.PHASECHK P0, [UR4+0x34850], R3", *(lines or LOOP))
    return Part(
        listing=code,
        body=main_bodies(code)[0],
        tile=tile,
        warps=8,
        shared_bytes=1000,
    )


def row(**changes: object) -> Row:
    found = row_of([part()], direction="forward", head_dim=128, mask="none", whose="flashgen, x")
    return replace(found, spills=0, **changes)  # type: ignore[arg-type]


def test_the_counts_of_a_loop() -> None:
    found = row_of([part()], direction="forward", head_dim=128, mask="none", whose="peer==1")
    assert found.instructions == 11
    assert found.per_score == 11 / 64
    assert (found.fp32, found.mufu, found.alu, found.moves) == (1 / 64,) * 4
    assert (found.shuffles, found.barriers, found.spills) == (1, 1, 1)
    assert found.flop == pytest.approx(2 * 16 * 128 * 16 / 11)
    assert found.under == 1.0
    assert not found.is_ours


def test_two_kernels_of_a_backward_are_added() -> None:
    both = [part(), part(tile=(128, 64))]
    found = row_of(both, direction="backward", head_dim=128, mask="none", whose="flashgen, y")
    assert found.tile == "128x128 + 128x64"
    assert found.per_score == 11 / 64 + 11 / 32


def test_decode_counts_all_warps_for_a_kib() -> None:
    found = row_of([part()], direction="decode", head_dim=64, mask="none", whose="flashgen, z")
    assert found.per_score == 11 * 8 / (128 * 2 * 64 * 2 / 1024)


def test_registers_that_are_handed_over() -> None:
    code = listing("USETMAXREG.DEALLOC.CTAPOOL 0x18", "USETMAXREG.TRY_ALLOC.CTAPOOL UP0, 0xf0")
    assert machine_code.registers(code) == "240/24"
    assert machine_code.registers(listing("NOP", registers=96)) == "96"


def test_shared_memory_ends_after_the_last_mbarrier() -> None:
    assert machine_code.last_mbarrier(part().listing) == 0x34858
    assert machine_code.last_mbarrier(loop("NOP")) == 8


PEER = row(whose="peer==1", per_score=7.0)


@pytest.mark.parametrize(
    ("mine", "why"),
    [
        ([row(per_score=7.0)], None),
        ([row(per_score=7.01)], "7.01 beside 7.00"),
        ([row(per_score=8.0), row(per_score=6.0)], None),
        ([], "no kernel of ours without spills"),
    ],
)
def test_which_cells_hold(mine: list[Row], why: str | None) -> None:
    found = shortfall([PEER, *mine])
    assert found is None if why is None else why in str(found)


def test_a_kernel_that_spills_holds_no_cell() -> None:
    spilling = replace(row(per_score=1.0), spills=1)
    assert shortfall([PEER, spilling]) == "no kernel of ours without spills"


def test_decode_may_take_a_fifth_more() -> None:
    peer = replace(PEER, direction="decode", per_score=10.0)
    assert shortfall([peer, row(direction="decode", per_score=12.0)]) is None
    found = shortfall([peer, row(direction="decode", per_score=13.0)])
    assert found == "13.00 beside 10.00"


def test_the_last_line_counts_cells_and_names_those_that_fall_short() -> None:
    good = [PEER, row(per_score=7.0)]
    bad = [replace(PEER, head_dim=64), row(per_score=8.0)]
    ships = [PEER, row(per_score=7.0, ships=True)]
    assert summary([good, ships]) == "cells: 2 of 2 hold, 1 of them by what ships"
    start = "cells: 1 of 2 hold, 0 of them by what ships; short: forward d64 none (8.00"
    assert summary([good, bad]).startswith(start)


def test_the_page_ends_with_that_line() -> None:
    good = [PEER, row(per_score=7.0)]
    page = machine_code.markdown([good])
    assert page.splitlines()[-1] == "cells: 1 of 1 hold, 0 of them by what ships"
    assert "| ~1000 |" in page
    assert "| 1000 |" in page


def test_the_committed_results_name_what_ships() -> None:
    record = json.loads(machine_code.RESULT.with_suffix(".json").read_text())
    assert machine_code.outdated(record) == [], "make -f tests/sessions.mk duel"
    served = next(each for each in record["rows"] if each["ships"])
    served["configs"] = "another"
    (line,) = machine_code.outdated(record)
    assert line.endswith("and the results name another")


def test_what_ships_depends_on_the_version_of_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    held = made_entry(bucket=BUCKETS[-1])
    tile = config_of("br128_bc128_w8_s2_hopper_tma_lpt")
    table = made_table(held).of([held, replace(held, config=tile, tritons=("3.7",))])
    monkeypatch.setattr(machine_code, "load", lambda _: table)
    cell = "forward", 128, "causal"
    assert machine_code.shipped(*cell) == [(SPEC, held.config)]
    assert machine_code.shipped(*cell, "3.8.0") == [(SPEC, held.config)]
    assert machine_code.shipped(*cell, "3.7.1") == [(SPEC, tile)]
    assert machine_code.shipped("backward", 128, "causal", "3.7.1") == []
    monkeypatch.setattr(machine_code.triton, "__version__", "3.7.1")
    assert machine_code.ours(*cell) == [
        ("plain", [(SPEC, held.config)], False),
        ("hopper", [(SPEC, tile)], True),
    ]
