"""benchmarks/measured.py: bars of what a GPU measured, and pages that state the same figures."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.measured import BARS, draw, rates, title

ROOT = Path(__file__).resolve().parents[3]
H200 = ROOT / "benchmarks" / "results" / "nvidia_h200"


def case(*lines: tuple[str, str, float | None]) -> dict[str, Any]:
    return {
        "direction": "forward",
        "spec": {"head_dim": 128, "mask": "causal"},
        "problem": {"seq_k": 8192},
        "lines": [{"name": n, "status": s, "tflops": t} for n, s, t in lines],
    }


def held() -> dict[str, Any]:
    return json.loads((H200 / "bench.json").read_text())  # type: ignore[no-any-return]


def test_a_bar_is_the_fastest_of_those_that_were_right() -> None:
    found = rates(
        case(
            ("flashgen", "ok", 500.0), ("ladder: hopper", "ok", 600.0),
            ("ladder: hopper, grouped", "ok", 650.0), ("ladder: hopper, persistent", "ok", 700.0),
            ("SDPA cuDNN", "wrong", 900.0), ("SDPA flash", "left out", None),
        )
    )  # fmt: skip
    assert found == {"flashgen, schedule hopper": 650.0, "flashgen, plain kernels": 500.0}


def test_a_case_in_words() -> None:
    assert title(case()) == "forward, head dim 128, causal, 8,192 keys"


def test_the_committed_picture_is_of_the_committed_record(tmp_path: Path) -> None:
    record = held()
    draw(
        [case for case in record["cases"] if case["direction"] != "decode"],
        record["runs"][0],
        tmp_path / "measured.svg",
    )
    assert (tmp_path / "measured.svg").read_text() == (H200 / "measured.svg").read_text()


@pytest.mark.parametrize("number", range(6))
def test_the_page_has_the_figures_of_the_record(number: int) -> None:
    rows = re.findall(r"^\| ((?:for|back)ward, d.*) \|$", (H200 / "README.md").read_text(), re.M)
    measured = [case for case in held()["cases"] if case["direction"] != "decode"]
    assert len(rows) == len(measured) == 6
    found = rates(measured[number])
    words = [f"{found[bar]:.0f}" for bar in BARS if bar in found]
    assert re.findall(r"\b\d{3}\b", rows[number].split("|", 1)[1]) == words


def test_readme_states_the_ratios_of_the_record() -> None:
    forward, backward, fused = [], [], []
    for each in held()["cases"]:
        found = rates(each)
        if "flashgen, schedule hopper" in found:
            ratio = found["flashgen, schedule hopper"] / found["cuDNN (torch)"]
            (forward if each["direction"] == "forward" else backward).append(ratio)
        if "the same, fused" in found:
            fused.append(found["the same, fused"] / found["cuDNN (torch)"])
    text = " ".join((ROOT / "README.md").read_text().split())
    assert f"are {min(forward):.2f} to {max(forward):.2f} times as fast as cuDNN" in text
    assert f"reach {min(backward):.2f} to {max(backward):.2f} of its speed" in text
    assert f"reaches {min(fused):.2f} to {max(fused):.2f}" in text
