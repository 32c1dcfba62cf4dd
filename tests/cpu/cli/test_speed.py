"""show and explain answer from a table and its evidence, in about a second of CPU time each."""

from __future__ import annotations

import pytest

from tests import programs

PROGRAM = """
import sys, time
import triton  # by the kernels' package
import flashgen.cli, flashgen.report.explain, flashgen.table.show, flashgen.table.emit
import flashgen.runtime.selection, flashgen.tune.tune
from tests.yardstick import yardstick
before = yardstick()
start = time.process_time()
try:
    flashgen.cli.main(sys.argv[1:])
except SystemExit as ended:
    assert not ended.code, ended.code
took = time.process_time() - start
print(took / max(before, yardstick()))
"""

MOST = 30
"""Yardsticks: 1.1 s on a machine on which show takes 0.7 s."""
TRIES = 3  # what else runs can slow the command down and not the yardstick; none makes it faster


@pytest.mark.slow("measures time, which a busy machine spoils")
@pytest.mark.parametrize(
    "line",
    ["show nvidia_h200", "explain --head-dim 128 --seq 4096 --causal --target nvidia_h200"],
)
def test_it_takes_about_a_second(line: str) -> None:
    took: list[float] = []
    while min(took, default=MOST) >= MOST and len(took) < TRIES:
        done = programs.run(["-c", PROGRAM, *line.split()])
        assert done.returncode == 0, done.stderr
        output = done.stdout.splitlines()
        assert len(output) > 5
        took.append(float(output[-1]))
    assert min(took) < MOST
