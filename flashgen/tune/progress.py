"""What a tuning run prints: progress, time left, the best config so far, and results."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from typing import Self

from rich.console import Console, RenderableType
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.text import Text

from flashgen.errors import printable
from flashgen.schedules.config import KernelConfig, kernel_name
from flashgen.schedules.outcome import FAILURES, STRENGTH, Outcome, Status
from flashgen.search.goal import Found, Progress
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.problem import Problem, bucket_of
from flashgen.spec.vocabulary import SHORT_DTYPE
from flashgen.table.entry import (
    Entry,
    EntryEvidence,
    Result,
    RunnerUp,
    short_digest,
    speedup,
)

PACE_S = 180.0
"""Of the past, for the time left: other programs come and go, and candidates differ."""

EVERY_S = 30.0
"""Without a terminal: a line of standard error says how far a run is."""

SETTLING_S = 20.0
"""Before anything is said of the time left: the first candidates are awaited one by one."""


class Pace:
    """The time left of `total` units, by how many were done lately; starting up does not count."""

    def __init__(self, total: float) -> None:
        self.total = total
        self._seen: deque[tuple[float, float]] = deque()

    def note(self, now: float, done: float) -> None:
        """So many units are done at this time, in seconds."""
        if self._seen and done <= self._seen[-1][1]:
            return
        if self._seen or done:
            self._seen.append((now, done))
        while len(self._seen) > 2 and self._seen[1][0] < now - PACE_S:
            self._seen.popleft()

    def left_s(self, now: float) -> float | None:
        """Seconds until all are done; None if it is too early to tell."""
        if not self._seen:
            return None
        (began, first), (_, done) = self._seen[0], self._seen[-1]
        if now - began < SETTLING_S or done == first:
            return None
        return (self.total - done) * (now - began) / (done - first)


class _Bar(Bar):
    """Two lines: the search in progress and its best, then the bar and its times. One line of 80
    columns is too short, and would be truncated.
    """

    def get_renderables(self) -> Iterable[RenderableType]:
        """The lines, computed at each refresh."""
        for task in self.tasks:
            yield Text(f"{task.description} {task.fields['stage']}".rstrip(), overflow="fold")
        yield self.make_tasks_table(self.tasks)


class Screen:
    """A progress bar over `total` searches on a terminal; elsewhere, a line after each search, and
    one each EVERY_S on standard error.

    seconds: after which no search goes on. A search is named by its title while it is under way;
    several may be. Threads may share it.
    """

    def __init__(self, console: Console, total: int, seconds: float | None = None) -> None:
        self._end = None if seconds is None else time.monotonic() + seconds
        self._console = console
        self._total = total
        self._done = 0
        self._running: dict[str, Progress | None] = {}
        self._pace = Pace(total)
        self._bar = _Bar(
            BarColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=total, stage="", left="")
        self._ended = threading.Event()

    def expect(self, count: int) -> None:
        """So many more searches will begin."""
        self._total += count
        self._pace.total += count
        self._bar.update(self._task, total=self._total)

    def begin(self, title: str) -> None:
        """A search begins."""
        self._running[title] = None
        self._update()

    def show(self, title: str, progress: Progress) -> None:
        """Show the progress of a search."""
        self._running[title] = progress
        self._update()

    def finished(self, title: str, sentence: str) -> None:
        """A search has ended with this line."""
        self._running.pop(title, None)
        self._done += 1
        self._console.print(sentence + self._still_to_come())
        self._update()

    def passed(self) -> None:
        """One more is done, of which the caller printed a line."""
        self._done += 1
        self._update()

    def _update(self) -> None:
        """Show how far all are, and what the earliest that is under way does."""
        running = tuple(self._running.items())
        shares = (progress.done / progress.total for _, progress in running if progress)
        title, progress = running[0] if running else ("", None)
        waiting = "starting" if running else ""
        where = f"{min(self._done + 1, self._total)}/{self._total} {title}"
        others = f" and {len(running) - 1} more" if len(running) > 1 else ""
        stage = ", ".join([*_tried(progress), *_best(progress)]) if progress else waiting
        done = min(self._total, self._done + sum(shares))
        self._pace.note(time.monotonic(), done)
        self._bar.update(
            self._task, completed=done, description=where + others, stage=stage, left=self._left()
        )

    def say(self, sentence: str) -> None:
        """Print a line above the bar."""
        self._console.print(sentence)

    def _left(self) -> str:
        """About how long the run still takes, if that is known."""
        now = time.monotonic()
        left = self._pace.left_s(now)
        if left and self._end is not None:
            left = min(left, max(0.0, self._end - now))
        return f"about {duration(left)} left" if left else ""

    def _still_to_come(self) -> str:
        """Without a bar: how many are done, and about how long the others will take."""
        if self._console.is_terminal or self._total == 1 or self._done == self._total:
            return ""
        return f" [{', '.join(filter(None, [f'{self._done}/{self._total}', self._left()]))}]"

    def __enter__(self) -> Self:
        self._bar.start()
        if not self._console.is_terminal:
            threading.Thread(target=self._beat, daemon=True).start()
        return self

    def _beat(self) -> None:
        """A line each EVERY_S, until the end."""
        began = time.monotonic()
        while not self._ended.wait(EVERY_S):
            (task,) = self._bar.tasks
            where = task.description.rstrip()
            words = [f"{time.monotonic() - began:.0f} s", where, task.fields["stage"]]
            line = ", ".join(filter(None, [*words, task.fields["left"]]))
            print(printable(line), file=sys.stderr, flush=True)

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self._bar.update(self._task, completed=self._total, stage="done", left="")
        self._ended.set()
        self._bar.stop()


def _tried(progress: Progress) -> list[str]:
    """What is under way, and how many configs were tried and rejected."""
    timed = not progress.on_gpu and progress.stage in ("rough", "timed", "final")
    words: list[str] = ["estimated" if timed else progress.stage]
    if progress.trials:
        words.append(f"{progress.tried} of {progress.trials} tried")
    if progress.rejected:
        words.append(f"{progress.rejected} rejected")
    return words


def _best(progress: Progress) -> list[str]:
    """The best time so far, and what it is compared with."""
    if progress.best_us is None:
        return []
    words = [f"best {progress.best_us:.1f} us"]
    if progress.default_us is not None and progress.best_us < progress.default_us:
        words.append(f"{progress.default_us / progress.best_us:.2f} x default")
    if progress.incumbent_us is not None and progress.best_us < progress.incumbent_us:
        words.append(f"{progress.incumbent_us / progress.best_us:.2f} x the table's")
    return words


def duration(seconds: float) -> str:
    """A time to read: 45 s, 12 min, 1.5 h."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def entry_of(spec: AttentionSpec, problem: Problem, found: Found, run: str) -> Entry:
    """The table entry of a search."""
    held = EntryEvidence(
        problem=problem,
        candidates=found.candidates,
        legal=found.legal,
        p_value=found.p_value,
        runners_up=tuple(map(runner_up_of, found.runners_up)),
    )
    return entry_with(spec, held, found.winner, found.default, run)


def entry_with(
    spec: AttentionSpec, held: EntryEvidence, winner: Outcome, default: Outcome | None, run: str
) -> Entry:
    """The table entry of a winner of this run, timed beside the default. held: what else its
    evidence says. The winner was compiled and checked, so its facts are known.
    """
    assert winner.check is not None
    assert held.problem is not None
    timing = winner.timing
    us = timing.median_us if timing else None
    default_us = default.timing.median_us if default and default.timing else None
    return Entry(
        spec=spec,
        bucket=bucket_of(held.problem.seq_k),
        config=winner.config,
        result=Result(
            source=winner.source,
            median_us=us,
            speedup=speedup(default_us, us),
            max_abs_err_floors=winner.check.floors,
        ),
        evidence=replace(
            held,
            run=run,
            digest=short_digest(winner.digest),
            registers=winner.registers,
            shared_bytes=winner.shared_bytes,
            default_us=default_us,
            low_us=timing.low_us if timing else None,
            high_us=timing.high_us if timing else None,
            batches_us=timing.batches_us if timing else (),
            sdpa_us=winner.sdpa_us,
        ),
    )


def runner_up_of(outcome: Outcome) -> RunnerUp:
    """The table row of a runner-up."""
    return RunnerUp(
        config=outcome.config,
        source=outcome.source,
        median_us=outcome.timing.median_us if outcome.timing else None,
        batches_us=outcome.timing.batches_us if outcome.timing else (),
        digest=short_digest(outcome.digest),
    )


def title_of(spec: AttentionSpec, problem: Problem) -> str:
    """A short name of a search."""
    return f"{spec.name} seq {problem.seq_k}"


def sentence(entry: Entry, found: Found) -> str:
    """One line on a finished search."""
    result = entry.result
    words = [entry.config.label, result.source]
    if result.median_us is not None:
        words += [f"{result.median_us:.1f} us"]
    if result.speedup is not None:
        words += [f"{result.speedup:.2f} x default"]
    tried = f"{found.candidates} of {found.legal}"
    words += [
        f"all {found.legal} legal configs tried" if found.exhaustive else f"{tried} configs tried"
    ]
    words += ["cut short by --time-budget"] * found.late
    words += [f"{name} has no verdict" for name in found.undecided]
    return f"{title_of(entry.spec, entry.problem)}: {', '.join(words)}"


def failure_lines(outcomes: Iterable[Outcome]) -> list[str]:
    """How many kernels failed, in what way, and the first of each."""
    failed: dict[Status, dict[tuple[AttentionSpec, KernelConfig], Outcome]] = {}
    for outcome in outcomes:
        if outcome.status in FAILURES:
            kernels = failed.setdefault(outcome.status, {})
            kernels.setdefault((outcome.spec, outcome.config), outcome)
    lines = []
    for status, kernels in failed.items():
        first = next(iter(kernels.values()))
        name = kernel_name(first.spec, first.config)
        among = "the first" if len(kernels) > 1 else "it"
        lines.append(
            f"  {len(kernels)} {status}: {among} is {name}, at stage {first.stage}: {first.detail}"
        )
    return [f"{sum(map(len, failed.values()))} kernels failed:", *lines] if lines else []


def shared_sentence(old: Entry, new: Entry) -> str:
    """One line on a bucket that takes another one's kernel."""
    if STRENGTH[old.result.source] < STRENGTH[new.result.source]:
        return (
            f"{title_of(new.spec, new.problem)}: {new.config.label}, {new.result.source}, "
            f"{new.result.median_us:.1f} us, in the place of {old.config.label}, which was "
            f"{old.result.source}"
        )
    regret = new.evidence.regret
    cost = f"for {regret:.2%} more time" if regret else "no slower"
    return (
        f"{title_of(new.spec, new.problem)}: {new.config.label} in the place of "
        f"{old.config.label}, {cost}: one kernel fewer"
    )


def explain_options(entry: Entry) -> str:
    """The options of `flashgen explain` for this entry."""
    spec = entry.spec
    dtype = "tf32" if spec.precision == "tf32" else SHORT_DTYPE[spec.dtype]
    dims = str(spec.head_dim)
    if spec.head_dim_v != spec.head_dim:
        dims += f"x{spec.head_dim_v}"
    causal = " --causal" if spec.causal else ""
    kernel = "" if spec.direction == "forward" else f" --direction {spec.direction}"
    kernel += spec.cache_options
    words = "".join(f" --feature {word}" for word in spec.feature_words)
    named = f"--dtype {dtype} --head-dim {dims} --seq {entry.problem.seq_k}"
    return f"{named}{causal}{kernel}{words}"
