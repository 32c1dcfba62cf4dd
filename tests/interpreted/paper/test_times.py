"""What python examples/papers times where there is a GPU, on the interpreter with a stopwatch that makes up times."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from examples.papers import timing
from flashgen.errors import ToolchainError
from flashgen.spec.gpu import TARGETS


class MadeUp:
    """Each launch runs once for real; then its time is that of its place in the order."""

    def __init__(self) -> None:
        self.runs: dict[int, int] = {}
        self.clock = itertools.count()

    def time(self, run: Callable[[], object], count: int) -> list[float]:
        if id(run) not in self.runs:
            run()
            self.runs[id(run)] = len(self.runs) + 1
        return [1000.0 * self.runs[id(run)]] * count

    def now(self) -> float:
        return float(next(self.clock))

    def clock_mhz(self) -> None:
        return None


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "HEADS", 1)
    monkeypatch.setattr(timing, "N", 64)


@pytest.mark.usefixtures("small")
def test_times_stand_beside_the_bytes() -> None:
    drawn, listed = timing.measured(TARGETS["nvidia_h200"], "cpu", MadeUp())
    chart, table = drawn.chart, listed.table
    assert chart is not None
    assert table is not None
    (line,) = chart.lines
    assert line.points == ((16.0, 1.0), (32.0, 2.0), (64.0, 3.0), (128.0, 4.0), (256.0, 5.0))
    assert [limit.y for limit in chart.limits] == [6.0, 7.0]
    names = [row.name for row in table.rows]
    assert names[0] == "FlashAttention-1, B_c 16"
    assert names[-2:] == ["FlashAttention-2, 128 x 64", "standard, torch"]
    assert [row.cells[1] for row in table.rows] == [f"{n}.000" for n in range(1, 8)]


@pytest.mark.usefixtures("small")
def test_a_launch_that_fails_is_one_sentence() -> None:
    class Failing(MadeUp):
        def time(self, run: Callable[[], object], count: int) -> list[float]:
            raise RuntimeError("out of memory")

    with pytest.raises(
        ToolchainError, match="FlashAttention-1, B_c 16 cannot be timed here: out of memory"
    ):
        timing.measured(TARGETS["nvidia_h200"], "cpu", Failing())
