"""Screen: what a tuning run shows meanwhile: how far, how long still, and the best so far."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Self

from rich.console import Console, RenderableType
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.text import Text

from flashgen.search.goal import Progress

SPEED_PERIOD_S = 600.0
"""Of the estimate of the time left: searches differ, and a shorter one would jump with each."""


class _Bar(Bar):
    """Two lines: what is under way and its best, then the bar and its times. In one line of 80
    columns they do not fit, and what does not fit is lost.
    """

    def get_renderables(self) -> Iterable[RenderableType]:
        """The lines, anew at each refresh."""
        for task in self.tasks:
            yield Text(f"{task.description} {task.fields['stage']}".rstrip(), overflow="fold")
        yield self.make_tasks_table(self.tasks)


class Screen:
    """A bar over `total` searches on a terminal; elsewhere, a word after each that is finished."""

    def __init__(self, console: Console, total: int) -> None:
        self._console = console
        self._total = total
        self._number = 0
        self._begun = time.monotonic()
        self._bar = _Bar(
            BarColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            speed_estimate_period=SPEED_PERIOD_S,
        )
        self._task = self._bar.add_task("", total=total, stage="")

    def begin(self, number: int, title: str) -> None:
        """The search of this number, from 0, begins."""
        self._number = number
        where = f"{number + 1}/{self._total} {title}"
        self._bar.update(self._task, completed=number, description=where, stage="")

    def wind_up(self, title: str) -> None:
        """All searches have ended, and something is left to be done."""
        self._number = self._total
        self._bar.update(self._task, completed=self._total, description=title, stage="")

    def show(self, progress: Progress) -> None:
        """The search under way is so far."""
        self._bar.update(
            self._task,
            completed=min(self._total, self._number + progress.done / progress.total),
            stage=", ".join([progress.stage, *_best(progress)]),
        )

    def finished(self, sentence: str) -> None:
        """The search under way has ended, so."""
        self._console.print(sentence + self._still_to_come())

    def say(self, sentence: str) -> None:
        """Print a line above the bar."""
        self._console.print(sentence)

    def _still_to_come(self) -> str:
        """Where no bar is drawn: how many are done, and about how long the others will take."""
        done = self._number + 1
        if self._console.is_terminal or self._total == 1:
            return ""
        spent = time.monotonic() - self._begun
        left = spent / done * (self._total - done)
        return f" [{done}/{self._total}, about {_duration(left)} left]" if left else ""

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self._bar.update(self._task, completed=self._total, stage="done")
        self._bar.stop()


def _best(progress: Progress) -> list[str]:
    """The best time so far, and what it beats."""
    if progress.best_us is None:
        return []
    words = [f"best {progress.best_us:.1f} us"]
    if progress.default_us is not None and progress.best_us < progress.default_us:
        words.append(f"{progress.default_us / progress.best_us:.2f} x default")
    if progress.incumbent_us is not None and progress.best_us < progress.incumbent_us:
        words.append(f"{progress.incumbent_us / progress.best_us:.2f} x the table's")
    return words


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
