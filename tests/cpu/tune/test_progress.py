"""Screen: what a run shows on a terminal of 80 columns while it is under way."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from flashgen.search.goal import Progress
from flashgen.tune.progress import Screen

TITLE = "bwd_dkv_bf16_d128_causal seq 16384"


@pytest.mark.parametrize("width", [60, 80, 200])
def test_nothing_is_lost_once_a_best_is_known(width: int) -> None:
    file = io.StringIO()
    console = Console(file=file, width=width, force_terminal=True, color_system=None)
    with Screen(console, 48) as screen:
        for number in range(11):
            screen.finished(f"{number}", f"{number} is done")
        screen.begin(TITLE)
        screen.show(
            TITLE,
            Progress(
                done=3, total=4, stage="timed", best_us=1234.5, default_us=1481.4,
                incumbent_us=1296.2,
            ),
        )  # fmt: skip
        screen._bar.refresh()
        written = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", file.getvalue())
    last = written[written.rindex("12/48") :].replace("\r", "")
    words = " ".join(last.split())
    assert f"12/48 {TITLE}" in words
    assert "timed, best 1234.5 us, 1.20 x default, 1.05 x the table's" in words
    assert re.search(r"[━╸╺]{10} .*0:00:0\d left [-\d]:[-\d]{2}:[-\d]{2}$", words)
    assert "…" not in last
    assert max(map(len, last.splitlines())) <= width


def test_several_at_once_are_counted_and_the_earliest_is_shown() -> None:
    file = io.StringIO()
    console = Console(file=file, width=100, force_terminal=True, color_system=None)
    with Screen(console, 4) as screen:
        for title in ("first", "second", "third"):
            screen.begin(title)
        screen.show("second", Progress(done=1, total=2, stage="timed", best_us=7.0))
        screen.show("first", Progress(done=1, total=4, stage="check", best_us=9.0))
        (task,) = screen._bar.tasks
        assert task.description == "1/4 first and 2 more"
        assert task.fields["stage"] == "check, best 9.0 us"
        assert task.completed == 0.75
        screen.finished("first", "first is done")
        assert (task.description, task.completed) == ("2/4 second and 1 more", 1.5)


def test_what_was_tried_and_rejected_is_counted_and_an_estimate_is_called_one() -> None:
    console = Console(file=io.StringIO(), width=100, force_terminal=True, color_system=None)
    with Screen(console, 1) as screen:
        screen.begin("first")
        screen.show(
            "first",
            Progress(
                done=1, total=4, stage="timed", best_us=9.0, tried=23, trials=60, rejected=8,
                on_gpu=False,
            ),
        )  # fmt: skip
        (task,) = screen._bar.tasks
        assert task.fields["stage"] == "estimated, 23 of 60 tried, 8 rejected, best 9.0 us"
