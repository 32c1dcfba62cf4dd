"""benchmarks/quarter/enter.py: the lines of a run in the table, the record, the page and the picture."""

from __future__ import annotations

import functools
import json
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import gpu_quarter
from benchmarks.quarter import enter, experiments, lines
from flashgen.errors import FlashgenError
from flashgen.schedules.config import KernelConfig
from flashgen.spec.problem import bucket_of, workload
from flashgen.table.entry import Entry
from flashgen.table.table_file import load, load_with_evidence
from tests.fakes import FakeEvaluator
from tests.makers import make_spec
from tests.tables import H200

RESULTS = Path(gpu_quarter.__file__).parent / "results"
RECORD = json.loads((RESULTS / "nvidia_h200" / "bench.json").read_text())
SPEC = make_spec(head_dim=96, mask="causal")


@functools.cache
def way() -> KernelConfig:
    return experiments.ways(SPEC, H200)[0]


OK: lines.Line = {"experiment": "forward", "status": "ok", "seconds": 1.0}


def about(**more: Any) -> lines.Line:
    versions = {"flashgen": "0.1.0", "triton": "3.6.0", "torch": "2.11.0", "cuda": "13.0"}
    where = {"gpu": asdict(H200), "date": "2026-12-01T00:00:00+00:00", "dtype": "bfloat16"}
    return {"kind": "about", "tiny": False, "protocol": 3} | versions | where | more


def a_round(
    seq: int, way_us: float, rivals_us: float, *, full: bool = False, checked: bool = True
) -> lines.Line:
    """A round of way() and what it has to beat, in which it is estimated right."""
    problem = workload(SPEC, seq)
    us = dict.fromkeys(experiments.rivals(SPEC, H200, seq), rivals_us) | {way(): way_us}
    fake = FakeEvaluator(us=us.__getitem__, gpu=H200)
    finals = fake.evaluate("final", SPEC, problem, list(us))
    found = [replace(o, passes_us=(us[o.config],) * 10, estimate=o.timing) for o in finals]
    found += fake.evaluate("check", SPEC, problem, [way()] if checked else [])
    line = {
        "kind": "round",
        "key": "round full" if full else "round",
        "conditions": {"sm_mhz": 1980},
    }
    return OK | line | {"outcomes": [o.to_json() for o in found]}


def entry_after(*rounds: lines.Line, seq: int = 8192) -> Entry:
    table = load_with_evidence(Path(RESULTS.parents[1] / "configs" / f"{H200.slug}.yaml"))
    found = enter.entered(table, [about(), *rounds], about()).find(SPEC, bucket_of(seq))
    assert found is not None
    return found


def test_what_wins_its_round_is_entered_with_its_check() -> None:
    entry = entry_after(a_round(8192, 500.0, 900.0))
    assert (entry.config, entry.result.source, entry.result.median_us) == (way(), "measured", 500.0)
    assert entry.evidence.p_value is not None
    assert entry.result.max_abs_err_floors == 1.0


def test_what_was_not_compared_or_is_not_faster_is_not_entered() -> None:
    assert entry_after(a_round(8192, 500.0, 900.0, checked=False)).result.source != "measured"
    assert entry_after(a_round(8192, 900.0, 500.0)).config != way()


def test_the_usual_length_and_all_samples_have_the_last_word() -> None:
    rounds = (
        a_round(8192, 500.0, 900.0, full=True),
        a_round(4096, 300.0, 900.0),
        a_round(8192, 510.0, 900.0),
    )
    assert entry_after(*rounds).result.median_us == 500.0


def test_the_folder_has_the_lines_a_page_and_the_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = SimpleNamespace(write=lambda *_: None, tables_for=lambda _: {})
    monkeypatch.setattr(enter, "emit", written)  # it takes seconds
    case = RECORD["cases"][0]
    file = tmp_path / "quarter.jsonl"
    for line in (
        about(),
        a_round(8192, 500.0, 900.0),
        OK | {"kind": "case", "key": "c", "case": case},
    ):
        lines.append(file, line)
    assert gpu_quarter.main(["enter", str(file), "--out", str(tmp_path)]) == 0
    entry = load(tmp_path / "configs" / f"{H200.slug}.yaml").find(SPEC, bucket_of(8192))
    assert entry is not None
    assert entry.config == way()
    folder = tmp_path / "benchmarks" / "results" / H200.slug
    page = (folder / "quarter.md").read_text()
    assert "| ladder: hopper | 702 (0.81) |" in page
    assert "hopper descriptor" in page, "the estimates' errors by kind"
    assert "702" in (folder / "measured.svg").read_text()


def test_a_tiny_run_is_not_entered(tmp_path: Path) -> None:
    lines.append(tmp_path / "tiny.jsonl", about(tiny=True))
    with pytest.raises(FlashgenError, match="1 tiny"):
        enter.enter([tmp_path / "tiny.jsonl"], tmp_path)


def test_readme_states_the_ratios_of_the_record() -> None:
    forward, backward, fused = [], [], []
    for each in RECORD["cases"]:
        found = enter.rates(each)
        if "flashgen, schedule hopper" in found:
            ratio = found["flashgen, schedule hopper"] / found["cuDNN (torch)"]
            (forward if each["direction"] == "forward" else backward).append(ratio)
        if "the same, fused" in found:
            fused.append(found["the same, fused"] / found["cuDNN (torch)"])
    text = " ".join((RESULTS.parents[1] / "README.md").read_text().split())
    assert f"are {min(forward):.2f} to {max(forward):.2f} times as fast as cuDNN" in text
    assert f"reach {min(backward):.2f} to {max(backward):.2f} of its speed" in text
    assert f"reaches {min(fused):.2f} to {max(fused):.2f}" in text
