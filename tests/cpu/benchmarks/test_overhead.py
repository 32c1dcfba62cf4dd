"""A resolved spec is found in under 3 microseconds: benchmarks/dispatch_overhead.py, run as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

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
    assert [row["name"] for row in record["rows"]] == [
        "lookup",
        "Triton launch",
        "direct launch",
        "call by Triton",
        "new kind",
        "second call",
        "call",
        "torch SDPA",
        "call, graph",
        "SDPA, graph",
        "decode",
        "flash_attn",
        "kvcache",
    ]
    assert all(row["name"] in done.stdout for row in record["rows"])
    return {row["name"]: row["median_us"] for row in record["rows"]}


def test_lookup_of_a_resolved_spec_is_cheap(tmp_path: Path) -> None:
    runs = []
    while len(runs) < TRIES:
        runs.append(measured(tmp_path / "overhead.json"))
        if runs[-1]["lookup"] < LOOKUP_US:
            break
    assert min(run["lookup"] for run in runs) < LOOKUP_US, runs
    # A call holds more work than a lookup, or it measured nothing; one of a kind that was met holds
    # far less than one that was not.
    assert all(run["lookup"] < run["call"] < run["new kind"] < run["second call"] for run in runs)
    assert all(1.5 * run["call"] < run["new kind"] for run in runs)
    # The drop-ins' calls are kept, too.
    assert all(run["flash_attn"] < run["new kind"] for run in runs)
    assert all(run["kvcache"] < 3 * run["decode"] for run in runs)
    # What a direct launch leaves out is most of a launch, on any machine.
    assert all(run["direct launch"] < run["Triton launch"] for run in runs)
