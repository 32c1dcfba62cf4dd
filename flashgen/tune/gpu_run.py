"""GpuRun: the jobs of a tuning run for one GPU product, in their order."""

from __future__ import annotations

import functools
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from flashgen.errors import FlashgenError
from flashgen.evaluate.evaluator import Evaluator
from flashgen.schedules.outcome import Outcome
from flashgen.schedules.space import legal_configs
from flashgen.search import search
from flashgen.search.goal import Budget, Found, Goal, NothingRight, Progress
from flashgen.search.log import Log
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.gpu import Gpu
from flashgen.spec.problem import Bucket
from flashgen.table.entry import Entry
from flashgen.table.table import Table
from flashgen.tune.donors import DEFAULT, CheckedByDonors, derived_run
from flashgen.tune.driver import Interruptible, Job, Stop
from flashgen.tune.goals import Goals
from flashgen.tune.options import Piece, TuneOptions
from flashgen.tune.progress import Screen, entry_of, sentence, shared_sentence, title_of
from flashgen.tune.run_files import with_conditions
from flashgen.tune.run_table import RunTable
from flashgen.tune.share_kernels import consolidate

if TYPE_CHECKING:
    from optuna.storages import BaseStorage


class GpuRun:
    """One run of the tuner for one GPU product: its jobs, and `results`, the table they write.

    Jobs run in threads; all that changes the run is done in the driver's.
    """

    def __init__(
        self, options: TuneOptions, screen: Screen, log: Log, evaluator: Evaluator, stop: Stop
    ) -> None:
        self.options = options
        self.log = log
        self.evaluator = evaluator
        self.slug = evaluator.gpu.slug
        self.on_gpu = evaluator.source == "measured"
        self.unbegun = 0
        self.outcomes: list[Outcome] = []
        self.several = False
        self.storage: BaseStorage | None = None
        self._screen = screen
        self._stop = stop
        self.results = RunTable(options, evaluator, screen.say)
        if self.results.resumed:
            screen.say(f"Resuming the run of {self.results.run.date}.")
        self._start = time.monotonic()
        self._left = list(options.searches)
        self._begun, self._planned = 0, len(self._left)  # of these, _left have not ended
        self._failed: set[Piece] = set()
        self._derived: dict[Piece, Found] = {}
        self._deriving = options.from_tables

    def begin_from(self, tables: Collection[Table]) -> None:
        """What the tables of all GPUs hold, from which the searches begin; called before jobs()."""
        gpu, began_with = self.evaluator.gpu, self.results.began_with
        self._goals = Goals(self.options, gpu, began_with, tables, on_gpu=self.on_gpu)

    @property
    def failures(self) -> int:
        """How many searches found nothing right."""
        return len(self._failed)

    def jobs(self) -> list[Job]:
        """The searches; each spec's last is followed by the sharing of its kernels. With
        from_tables, they follow what other tables hold.
        """
        run, done = self._search, self._searched
        if self._deriving:
            run, done = self._derive, self._took
        return [
            Job(
                run=partial(run, piece, seen),
                done=partial(done, piece, seen),
                failed=partial(self._search_failed, piece, seen),
            )
            for piece in self._left
            for seen in [list[Outcome]()]
        ]

    def _title(self, piece: Piece) -> str:
        return title_of(*piece) + f" on {self.slug}" * self.several

    def _derive(self, piece: Piece, seen: list[Outcome]) -> Found | None:
        """Evaluate what tables hold for one spec and length; None after the time."""
        budget = self._budget()
        if budget.seconds == 0:
            return None
        goal = self._goals.of_tables(piece)
        found = self._found(piece, goal, replace(budget, trials=len(goal.order)), seen)
        legal = _count_legal(piece[0], self.evaluator.gpu, self.on_gpu)
        return replace(found, legal=legal, exhaustive=False)

    def _search(self, piece: Piece, seen: list[Outcome]) -> Found | None:
        """Search one spec at one length. None after the time, if the table has what others hold."""
        budget = self._budget()
        if budget.seconds == 0 and piece in self._derived:
            return None
        return self._found(piece, self._goals.of_search(piece, self._derived), budget, seen)

    def _found(self, piece: Piece, goal: Goal, budget: Budget, seen: list[Outcome]) -> Found:
        """The result of one search."""
        title, evaluator = self._title(piece), self.evaluator
        if self.options.from_tables and not self.on_gpu:
            evaluator = CheckedByDonors(evaluator, self._goals.donors)
        self._screen.begin(title)

        def notify(progress: Progress) -> None:
            seen.extend([progress.outcome] if progress.outcome else [])
            self._screen.show(title, progress)

        return search(
            goal,
            Interruptible(evaluator, self._stop),
            self.log,
            budget=budget,
            method=self.options.method,
            notify=notify,
            on_interrupt=self._stop.ask,
            storage=self.storage,
        )

    def _took(self, piece: Piece, seen: list[Outcome], found: Found | None) -> list[Job]:
        """Put what another table lent into the table, with a run that names the donor."""
        if found is None:
            self.unbegun += 1
            return self._then(piece, seen)
        donor, config = None, found.winner.config
        if not self.on_gpu and config != self._goals.incumbent(piece, self._derived):
            donor = self._goals.donor_of(piece, config)
        self._enter(piece, found, donor)
        self._derived[piece] = found
        return self._then(piece, seen)

    def _searched(self, piece: Piece, seen: list[Outcome], found: Found | None) -> list[Job]:
        """Put the result of a search into the table."""
        if found is None:
            self._left.remove(piece)
            return []
        self._enter(piece, found, None)
        return self._then(piece, seen)

    def _enter(self, piece: Piece, found: Found, donor: str | None) -> None:
        """Put a result into the table and save it, or say why not."""
        run = self.results.run = with_conditions(self.results.run, self.evaluator)
        if donor is not None:
            run = derived_run(run, donor)
        entry = entry_of(*piece, found, run.id)
        lent = f", lent by {run.donor}" if run.donor not in (None, DEFAULT) else ""
        self._screen.finished(self._title(piece), sentence(entry, found) + lent)
        stays = self.results.enter(entry, run, found, measured=self._measured_elsewhere(entry.key))
        if stays:
            self._screen.say(f"  {stays}")
        if found.interrupted:
            self._stop.ask()

    def _search_failed(self, piece: Piece, seen: list[Outcome], error: FlashgenError) -> list[Job]:
        if not isinstance(error, NothingRight):
            raise error
        self._failed.add(piece)
        self._screen.finished(self._title(piece), str(error))
        return self._then(piece, seen)

    def _then(self, piece: Piece, seen: list[Outcome]) -> list[Job]:
        """After the last search of a spec, its buckets share kernels if that costs no more than
        allowed. Not with --improve-only. After all that other tables hold, the searches.
        """
        self._left.remove(piece)
        self.outcomes += seen
        if self._deriving:
            return [] if self._left else self._search_on()
        spec = piece[0]
        if self.options.improve_only or spec in [other for other, _ in self._left]:
            return []
        entries = [
            entry
            for entry in self.results.walked.entries
            if entry.spec == spec and not self._measured_elsewhere(entry.key)
        ]
        return [
            Job(
                run=partial(self._share_kernels, entries),
                done=partial(self._shared, entries),
                failed=_raised,
            )
        ]

    def _search_on(self) -> list[Job]:
        """The searches that trials are left for, and those for which no other table helped."""
        trials, self._deriving = self.options.budget.trials, False
        self._left = [
            piece
            for piece in self.options.searches
            if piece in self._failed
            or (piece in self._derived and self._derived[piece].candidates < trials)
        ]
        self._failed.clear()
        self._begun, self._planned = 0, len(self._left)
        if self._left:
            self._screen.expect(len(self._left))
            self._screen.say(
                f"What other tables hold is tried. {len(self._left)} searches go on from there, of "
                f"{trials} configs each; Ctrl-C ends them and keeps what was found."
            )
        return self.jobs()

    def _measured_elsewhere(self, key: tuple[AttentionSpec, Bucket]) -> bool:
        """Whether this run estimates, and a GPU with the same chip was measured with the entry of
        this key, or lends it what a like one was measured with.
        """
        held = self.results.walked.find(*key)
        return held is not None and self._goals.measured(key) == held.config

    def _share_kernels(self, entries: Sequence[Entry]) -> tuple[Entry, ...]:
        specs = {entry.spec for entry in entries}
        executed = [e.config for e in self.results.walked.executed if e.spec in specs]
        return consolidate(
            entries,
            Interruptible(self.evaluator, self._stop),
            self.log,
            max_regret=self.options.max_regret,
            run=self.results.run.id,
            rivals=executed if self.on_gpu else (),
        )

    def _shared(self, entries: Sequence[Entry], shared: Sequence[Entry]) -> list[Job]:
        """Put what changed into the table."""
        for old, new in zip(entries, shared, strict=True):
            if self.results.share(old, new) and new.config != old.config:
                self._screen.say(shared_sentence(old, new))
        return []

    def _budget(self) -> Budget:
        """The time for a search that begins now: its share of what remains, beside those that run.
        What other tables hold is little, and may take all of it.
        """
        budget, unfinished = self.options.budget, len(self._left)
        self._begun += 1
        if budget.seconds is None:
            return budget
        running = self._begun - (self._planned - unfinished)
        left = max(0.0, budget.seconds - (time.monotonic() - self._start))
        return replace(budget, seconds=left if self._deriving else left * running / unfinished)


@functools.lru_cache(maxsize=256)  # asked for each bucket of a spec, and takes 50 ms
def _count_legal(spec: AttentionSpec, gpu: Gpu, on_gpu: bool) -> int:
    return len(legal_configs(spec, gpu, on_gpu=on_gpu))


def _raised(error: FlashgenError) -> list[Job]:
    raise error
