"""A resolved spec is found in under 3 microseconds: benchmarks/dispatch_overhead.py, run as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).resolve().parents[3] / "benchmarks" / "dispatch_overhead.py"
LOOKUP_US = 3.0
TRIES = 3  # other processes of a busy machine slow a run down; none makes it faster than it is


def measured(file: Path) -> dict[str, float]:
    """Median microseconds by row."""
    done = subprocess.run(
        [sys.executable, BENCHMARK, "--json", file], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    record = json.loads(file.read_text())
    assert all(row["name"] in done.stdout for row in record["rows"])
    return {row["name"]: row["median_us"] for row in record["rows"]}


def faults(run: dict[str, float]) -> list[str]:
    """What a run shows that must not be."""
    right = {
        f"a lookup takes less than {LOOKUP_US} us": run["lookup"] < LOOKUP_US,
        "a call holds more work than a lookup, or it measured nothing": run["lookup"] < run["call"],
        "a kept call is far cheaper than one of another kind": 1.5 * run["call"] < run["new kind"],
        "the second call costs as one of a kind that was met": run["second call"]
        < 1.5 * run["new kind"],
        "calls with a window are kept": run["window"] < 1.5 * run["call"],
        "calls with sinks are kept": run["decode, sinks"] < 1.5 * run["decode"],
        "calls of flash_attn are kept": run["flash_attn"] < run["new kind"],
        "calls with a cache are kept": run["kvcache"] < 3 * run["decode"],
        "what a direct launch leaves out is most of a launch": run["direct launch"]
        < run["Triton launch"],
    }
    return [what for what, holds in right.items() if not holds]


@pytest.mark.slow("measures time, which a busy machine spoils")
def test_lookup_of_a_resolved_spec_is_cheap(tmp_path: Path) -> None:
    runs, found = [], ["no run"]
    while found and len(runs) < TRIES:
        runs.append(measured(tmp_path / "overhead.json"))
        found = faults(runs[-1])
    assert not found, runs
