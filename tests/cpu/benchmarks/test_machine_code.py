"""benchmarks/machine_code.py on loops written by hand; no wheel, no compiler."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import machine_code
from benchmarks.machine_code import Part, Row, row_of, shortfall, summary
from flashgen.compile.loops import main_bodies
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


def part(*lines: str, tile: tuple[int, int] = (128, 128), cycles: float = 3000.0) -> Part:
    code = loop("SYNCS.PHASECHK P0, [UR4+0x34850], R3", *(lines or LOOP))
    return Part(
        listing=code,
        body=main_bodies(code)[0],
        tile=tile,
        warps=8,
        shared_bytes=1000,
        cycles=(cycles, cycles + 200),
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
    # 2 products of 128 x 128 x 128 take 2048 cycles of the matrix pipe.
    assert found.cycles == pytest.approx(3100 / 2048)
    assert not found.is_ours


def test_two_kernels_of_a_backward_are_added() -> None:
    both = [part(), part(tile=(128, 64))]
    found = row_of(both, direction="backward", head_dim=128, mask="none", whose="flashgen, y")
    assert found.tile == "128x128 + 128x64"
    assert found.per_score == 11 / 64 + 11 / 32
    assert found.cycles == pytest.approx(3100 / (2.5 * 2048) + 3100 / (2.5 * 1024))


def test_decode_counts_all_warps_for_a_kib() -> None:
    found = row_of([part()], direction="decode", head_dim=64, mask="none", whose="flashgen, z")
    assert found.per_score == 11 * 8 / (128 * 2 * 64 * 2 / 1024)
    assert found.cycles is None


def test_registers_that_are_handed_over() -> None:
    code = listing("USETMAXREG.DEALLOC.CTAPOOL 0x18", "USETMAXREG.TRY_ALLOC.CTAPOOL UP0, 0xf0")
    assert machine_code.registers(code) == "240/24"
    assert machine_code.registers(listing("NOP", registers=96)) == "96"


def test_shared_memory_ends_after_the_last_mbarrier() -> None:
    assert machine_code.last_mbarrier(part().listing) == 0x34858
    assert machine_code.last_mbarrier(loop("NOP")) == 8


PEER = row(whose="peer==1", per_score=7.0, cycles=1.5)


@pytest.mark.parametrize(
    ("mine", "why"),
    [
        ([row(per_score=7.0, cycles=1.51)], None),
        ([row(per_score=7.01, cycles=1.0)], "7.01 a score"),
        ([row(per_score=6.0, cycles=1.53)], "1.530 over ideal, beside 7.00 and 1.500"),
        ([row(per_score=6.0, cycles=None)], "- over ideal"),
        ([row(per_score=8.0, cycles=1.0), row(per_score=6.0, cycles=1.5)], None),
        ([], "no kernel of ours without spills"),
    ],
)
def test_which_cells_hold(mine: list[Row], why: str | None) -> None:
    found = shortfall([PEER, *mine])
    assert found is None if why is None else why in str(found)


def test_a_kernel_that_spills_holds_no_cell() -> None:
    spilling = replace(row(per_score=1.0, cycles=1.0), spills=1)
    assert shortfall([PEER, spilling]) == "no kernel of ours without spills"


def test_decode_may_take_a_fifth_more() -> None:
    peer = replace(PEER, direction="decode", per_score=10.0)
    assert shortfall([peer, row(direction="decode", per_score=12.0)]) is None
    found = shortfall([peer, row(direction="decode", per_score=13.0)])
    assert found == "13.0 instructions a KiB, 1.30 times the peer's"


def test_the_last_line_counts_cells_and_names_those_that_fall_short() -> None:
    good = [PEER, row(per_score=7.0, cycles=1.5)]
    bad = [replace(PEER, head_dim=64), row(per_score=8.0, cycles=1.5)]
    ships = [PEER, row(per_score=7.0, cycles=1.5, ships=True)]
    assert summary([good, ships]) == "cells: 2 of 2 hold, 1 of them by what ships"
    start = "cells: 1 of 2 hold, 0 of them by what ships; short: forward d64 none (flashgen"
    assert summary([good, bad]).startswith(start)


def test_the_page_ends_with_that_line() -> None:
    good = [PEER, row(per_score=7.0, cycles=1.5, note="why")]
    page = machine_code.markdown([good], ["| published |"])
    assert page.splitlines()[-1] == "cells: 1 of 1 hold, 0 of them by what ships"
    assert "- flashgen, x, 128x128: why" in page
    assert "| ~1000 |" in page
    assert "| 1000 |" in page


def test_the_committed_picture_is_drawn_from_the_committed_rows(tmp_path: Path) -> None:
    for suffix in (".json", ".svg"):
        shutil.copy(machine_code.RESULT.with_suffix(suffix), tmp_path / f"copy{suffix}")
    committed = (tmp_path / "copy.svg").read_text()
    assert machine_code.main(["--draw", "--out", str(tmp_path / "copy")]) == 0
    assert (tmp_path / "copy.svg").read_text() == committed, "machine_code.py --draw"


def test_the_picture_shows_the_busiest_kernel_of_each_sort_that_does_not_spill() -> None:
    cells = [
        replace(row(cycles=cycles, per_score=1.0), direction=direction, mask="causal", whose=whose)
        for direction in ("forward", "backward")
        for whose, cycles in (
            ("peer==1", 1.25), ("flashgen, plain", 2.0), ("flashgen, hopper", 1.6),
            ("flashgen, hopper", 1.0),
        )
    ]  # fmt: skip
    spilling = replace(cells[3], spills=5, cycles=0.5)
    text = machine_code.drawing([*cells, spilling])
    assert "flashgen, plain: head dim 128" in text
    shown = re.findall(r"<title>([^:<]+): head dim 128, [^<]*estimated ([\d.]+)</title>", text)
    assert shown == [
        ("FlashAttention-3", "80"), ("flashgen, plain", "50"), ("flashgen, hopper", "100"),
    ] * 2  # fmt: skip


def test_the_committed_results_name_what_ships() -> None:
    record = json.loads(machine_code.RESULT.with_suffix(".json").read_text())
    assert machine_code.outdated(record) == [], "make duel"
    served = next(each for each in record["rows"] if each["ships"])
    served["configs"] = "another"
    (line,) = machine_code.outdated(record)
    assert line.endswith("and the results name another")


def test_a_peer_that_is_limited_by_its_products_is_as_fast_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tile = SimpleNamespace(head_dim=128, br=128, bc=128, causal=False)
    cycles = 4 * 128**3 / machine_code.FLOPS_A_CYCLE
    monkeypatch.setattr(machine_code, "listing_of", lambda *_: (tile, []))
    monkeypatch.setattr(machine_code, "main_bodies", lambda _: [[]])
    monkeypatch.setattr(machine_code, "peer_cycles", lambda *_: cycles)
    kernel = machine_code.KERNELS[0]
    found = machine_code.modelled_tflops(kernel, Path())
    monkeypatch.setattr(machine_code, "peer_cycles", lambda *_: 2 * cycles)
    assert 0.0 < machine_code.modelled_tflops(kernel, Path()) < found < 1000.0


def test_what_ships_depends_on_the_version_of_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    held = made_entry(bucket=BUCKETS[-1])
    tile = machine_code.hopper((128, 128), order="longest_first")
    table = made_table(held).of([held, replace(held, config=tile, tritons=("3.7",))])
    monkeypatch.setattr(machine_code, "load", lambda _: table)
    cell = "forward", 128, "causal"
    assert machine_code.shipped(*cell) == [(SPEC, held.config)]
    assert machine_code.shipped(*cell, "3.8.0") == [(SPEC, held.config)]
    assert machine_code.shipped(*cell, "3.7.1") == [(SPEC, tile)]
    assert machine_code.shipped("backward", 128, "causal", "3.7.1") == []
    monkeypatch.setattr(machine_code.triton, "__version__", "3.7.1")
    assert list(machine_code.ours(*cell)) == [
        ("plain", [(SPEC, held.config)]),
        ("hopper", [(SPEC, tile)]),
    ]


def test_drawn_machines_differ_in_latencies_and_bandwidth() -> None:
    known = machine_code.SM90
    machines = [machine_code.drawn(seed) for seed in range(machine_code.DRAWS)]
    assert len(set(machines)) == machine_code.DRAWS
    for name in ("tma_late", "barrier_late", "l2_burst_bytes"):
        shares = [getattr(machine, name) / getattr(known, name) for machine in machines]
        assert min(shares) < 0.95 < 1.05 < max(shares)
        assert 0.7 <= min(shares) <= max(shares) <= 1.3
    assert {machine.exp2 for machine in machines} == {known.exp2}
