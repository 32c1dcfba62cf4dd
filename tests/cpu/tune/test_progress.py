"""Screen: what a run shows on a terminal of 80 columns while it is under way."""

from __future__ import annotations

import io
import re
import time

import pytest
from rich.console import Console

from flashgen.search.goal import Progress
from flashgen.tune import progress
from flashgen.tune.progress import PACE_S, SETTLING_S, Pace, Screen

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
    assert re.search(r"[━╸╺]{10} .*0:00:0\d$", words)
    assert "…" not in last
    assert max(map(len, last.splitlines())) <= width


def test_without_a_terminal_a_line_says_from_time_to_time_how_far_it_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "EVERY_S", 0.01)
    console = Console(file=io.StringIO(), width=100)
    with Screen(console, 4) as screen:
        screen.begin(TITLE)
        screen.show(TITLE, Progress(done=1, total=2, stage="timed", best_us=7.0))
        screen.passed()
        time.sleep(0.2)
    beats = capsys.readouterr().err.splitlines()
    assert len(beats) > 1
    assert beats[-1] == f"0 s, 2/4 {TITLE}, timed, best 7.0 us"
    time.sleep(0.05)
    assert capsys.readouterr().err == ""  # the run has ended


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
        assert screen._bar.tasks[0].fields["stage"] == "starting"  # for a minute on a busy machine
        screen.show(
            "first",
            Progress(
                done=1, total=4, stage="timed", best_us=9.0, tried=23, trials=60, rejected=8,
                on_gpu=False,
            ),
        )  # fmt: skip
        (task,) = screen._bar.tasks
        assert task.fields["stage"] == "estimated, 23 of 60 tried, 8 rejected, best 9.0 us"


def test_after_a_minute_the_time_left_is_right_within_half() -> None:
    """Four searches of 65 candidates, compiled two at a time and estimated in batches of 12, which
    begin after six seconds of imports; then on a machine that becomes half as fast.
    """
    pace, now, times = Pace(4), 6.0, []
    for candidate in range(4 * 65):
        now += (0.4 + (candidate * 7 % 5) * 0.4) * (1 if candidate < 130 else 2)
        times.append(now)
        if candidate % 12 == 11:  # the batch is shown whole
            pace.note(now, (candidate + 1) / 65)
            if now - times[0] > 60 and not times[130:]:
                steady = times[0] + (now - times[0]) / (candidate + 1) * 4 * 65
                assert 1 / 1.5 < pace.left_s(now) / (steady - now) < 1.5  # type: ignore[operator]
    slower = Pace(10)
    for second in range(600):
        slower.note(float(second), 0.005 * min(second, 300) + 0.01 * max(0, second - 300))
    left = slower.left_s(599.0)
    assert left is not None
    assert abs(left - (10 - 4.49) / 0.01) < 2 * PACE_S * 0.01


def test_nothing_is_said_of_the_time_left_before_it_is_known() -> None:
    pace = Pace(4)
    assert pace.left_s(50.0) is None
    pace.note(50.0, 0.1)
    pace.note(51.0, 0.2)
    assert pace.left_s(51.0) is None
    pace.note(50.0 + SETTLING_S, 0.3)
    assert pace.left_s(50.0 + SETTLING_S) == pytest.approx(3.7 * SETTLING_S / 0.2)
