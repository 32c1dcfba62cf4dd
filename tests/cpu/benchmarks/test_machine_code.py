"""benchmarks/machine_code.py and duel.py on loops written by hand; no wheel, no compiler."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import duel, machine_code, machine_code_sm100
from benchmarks.duel import Cell, Duel, Row
from benchmarks.machine_code import Part, figures, part_of
from flashgen.schedules.config import config_of
from flashgen.spec.problem import BUCKETS
from tests.listings import listing, loop
from tests.tables import SPEC, made_entry, made_table

CELL: Cell = ("forward", 128, "none")
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
CODE = loop("SYNCS.PHASECHK P0, [UR4], R3", *LOOP)


def part(tile: tuple[int, int] = (128, 128)) -> Part:
    return part_of(CODE, tile=tile, warps=8, shared_bytes=1000)


def row(whose: str = "flashgen, x", cell: Cell = CELL, **changes: Any) -> Row:
    counts = figures([part()], cell) | {"spills": 0}
    ours = {"configs": "" if whose == "peer==1" else "a"}
    return duel.row_of(cell, whose, [part()], counts) | ours | changes


def test_the_counts_of_a_loop() -> None:
    found = figures([part()], CELL)
    assert found["instructions"] == 11
    assert found["per_score"] == 11 / 64
    assert [found[pipe] for pipe in ("fp32", "mufu", "alu", "moves")] == [1 / 64] * 4
    assert [found[name] for name in ("shuffles", "barriers", "spills")] == [1, 1, 1]
    assert found["flop"] == pytest.approx(2 * 16 * 128 * 16 / 11)
    assert found["under"] == 1.0


def test_two_kernels_of_a_backward_are_added() -> None:
    both = [part(), part(tile=(128, 64))]
    cell: Cell = ("backward", 128, "none")
    found = duel.row_of(cell, "flashgen, y", both, figures(both, cell))
    assert found["tile"] == "128x128 + 128x64"
    assert found["per_score"] == 11 / 64 + 11 / 32


def test_decode_counts_all_warps_for_a_kib() -> None:
    found = figures([part()], ("decode", 64, "none"))
    assert found["per_score"] == 11 * 8 / (128 * 2 * 64 * 2 / 1024)


def test_registers_that_are_handed_over() -> None:
    roles = ("USETMAXREG.DEALLOC.CTAPOOL 0x18", "USETMAXREG.TRY_ALLOC.CTAPOOL UP0, 0xf0")
    handing = part_of(loop(*roles, *LOOP), tile=(1, 1), warps=8, shared_bytes=0)
    assert (handing.registers, part().registers) == ("240/24", "96")
    assert duel.handed_over(listing("NOP")) == {}


PEER = row(whose="peer==1", per_score=7.0)


def test_the_last_lines_compare_what_ships() -> None:
    """In each cell that has some."""
    rows = [PEER, row(per_score=9.0), row(per_score=6.3, ships=True)]
    rows += [each | {"head_dim": 64} for each in (PEER, row(per_score=7.7, ships=True))]
    rows += [each | {"head_dim": 256} for each in (PEER, row(per_score=7.7))]
    assert list(duel.summary(rows, "per_score")) == [
        "What ships takes no more instructions a score in 1 of 2 cells.",
        "Ours over theirs:",
        "",
        "- forward d128 none: 0.90",
        "- forward d64 none: 1.10",
    ]


DUELS = [machine_code.DUEL, machine_code_sm100.DUEL]


@pytest.mark.parametrize("of", DUELS, ids=lambda of: of.gpu.slug)
def test_the_committed_results_name_what_ships(of: Duel) -> None:
    record = json.loads(of.result.with_suffix(".json").read_text())
    assert duel.outdated(record, of.gpu) == [], "make -f tests/sessions.mk duel"
    assert duel.page(of, record) == of.result.with_suffix(".md").read_text()
    served = next(each for each in record["rows"] if each["ships"])
    served["configs"] = "another"
    (line,) = duel.outdated(record, of.gpu)
    assert line.endswith("and the results name another")


def test_what_ships_depends_on_the_version_of_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    held = made_entry(bucket=BUCKETS[-1])
    tile = config_of("br128_bc128_w8_s2_hopper_tma_lpt")
    table = made_table(held).of([held, replace(held, config=tile, tritons=("3.7",))])
    monkeypatch.setattr(duel, "load", lambda _: table)
    cell: Cell = ("forward", 128, "causal")
    gpu = machine_code.H100
    assert duel.shipped(cell, gpu) == [(SPEC, held.config)]
    assert duel.shipped(cell, gpu, "3.8.0") == [(SPEC, held.config)]
    assert duel.shipped(cell, gpu, "3.7.1") == [(SPEC, tile)]
    assert duel.shipped(("backward", 128, "causal"), gpu, "3.7.1") == []
    monkeypatch.setattr(duel.triton, "__version__", "3.7.1")
    assert duel.served(cell, gpu) == [
        ("plain", [(SPEC, held.config)], False),
        ("hopper", [(SPEC, tile)], True),
    ]


def test_new_rows_of_ours_are_written_beside_the_peers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new = row(per_score=6.0, ships=True)
    made = Duel(
        title="Made", result=tmp_path / "made", gpu=machine_code.H100,
        ours=lambda cell, _: [new] * (cell == CELL), cells=lambda *_: {}, figure="per_score",
    )  # fmt: skip
    held = {"triton": "3.0", "peers": ["peer==1"], "rows": [PEER, row(per_score=9.0)]}
    (tmp_path / "made.json").write_text(json.dumps(held))
    assert duel.main(made, "Compare.", []) == 0
    record = json.loads((tmp_path / "made.json").read_text())
    assert record == {"triton": duel.triton.__version__, "peers": ["peer==1"], "rows": [PEER, new]}
    text = (tmp_path / "made.md").read_text()
    assert text == capsys.readouterr().out
    assert "\n- peer==1\n" in text
    assert text.endswith("\n- forward d128 none: 0.86\n")
