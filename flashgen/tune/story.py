"""Story: the searches of a tuning run for one GPU product, and the table they are written into."""

from __future__ import annotations

import functools
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from flashgen import paths
from flashgen.errors import FlashgenError
from flashgen.evaluate.evaluator import Evaluator, triton_version
from flashgen.schedules.config import KernelConfig
from flashgen.schedules.legality import why_illegal
from flashgen.schedules.outcome import STRENGTH, Outcome
from flashgen.schedules.space import legal_configs, measured_seeds, tuned_default
from flashgen.search import search
from flashgen.search.goal import Budget, Found, Goal, NothingRight, Progress, goal_for
from flashgen.search.log import Log
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.gpu import Gpu
from flashgen.spec.problem import Problem, bucket_of
from flashgen.table.entry import Entry, Run, must_have_run
from flashgen.table.table import Table, save
from flashgen.tune.donors import DEFAULT, CheckedByDonors, Donors, derived_run
from flashgen.tune.driver import Interruptible, Job, Stop
from flashgen.tune.options import Piece, TuneOptions
from flashgen.tune.progress import (
    Screen,
    entry_of,
    sentence,
    shared_sentence,
    title_of,
)
from flashgen.tune.run_files import (
    Session,
    held_table,
    request_of,
    run_now,
    text_of_entry,
    with_conditions,
)
from flashgen.tune.share_kernels import consolidate
from flashgen.tune.transfer import Key, measured_for, measured_on_chip, neighbours

if TYPE_CHECKING:
    from optuna.storages import BaseStorage


class Story:
    """One run of the tuner for one GPU product: the table it writes, and its jobs.

    Searches are independent: they see the table that the run found, less what the run searches.
    Jobs run in threads; all that changes the story is done in the driver's.
    """

    def __init__(
        self, options: TuneOptions, screen: Screen, log: Log, evaluator: Evaluator, stop: Stop
    ) -> None:
        self.options = options
        self.log = log
        self.evaluator = evaluator
        self.slug = evaluator.gpu.slug
        self.unbegun = 0
        self.outcomes: list[Outcome] = []
        self._screen = screen
        self._stop = stop
        self.table = held_table(options.out, evaluator.gpu)
        self._donors = Donors((), evaluator.gpu)
        self._measured: dict[Key, KernelConfig] = {}
        self.several = False
        self.found: dict[Key, Entry] = {}
        self.on_gpu = evaluator.source == "measured"
        self._session = Session.begin(
            paths.session_file(options.out, self.slug),
            request=request_of(options, evaluator.source),
            run=run_now(evaluator, options.shard),
            table=self.table,
            notice=screen.say,
            new=not paths.table_file(options.out, self.slug).exists(),
        )
        self._new = self._session.new
        self._walked = self.began_with = self._session.found(evaluator.gpu)
        self.storage: BaseStorage | None = None
        # What a round before the kill told of clocks and power stands in the table it wrote.
        written = {run.id: run for run in self.table.runs}
        self._run = written.get(self._session.run.id, self._session.run)
        self.resumed = self._session.resumed
        if self.resumed:
            screen.say(f"Resuming the run of {self._run.date}.")
        self._start = time.monotonic()
        self._left = list(options.searches)
        self._begun, self._planned = 0, len(self._left)  # of these, _left have not ended
        self._failed: set[Piece] = set()
        self._derived: dict[Piece, Found] = {}
        self._written: set[Key] = set()
        self._undecided: dict[Key, bool] = {}
        self._deriving = options.from_tables

    def tell(self, tables: Collection[Table]) -> None:
        """What tables hold. With from_tables also what this GPU's holds and this run does not
        search, as the run found it: a killed one may have written more.
        """
        gpu, own = self.evaluator.gpu, self.began_with
        others = [table for table in tables if table.gpu.slug != gpu.slug]
        if self._deriving:
            searched = {(spec, bucket_of(problem.seq_k)) for spec, problem in self.options.work}
            others.append(own.of(e for e in own.entries if e.key not in searched))
        self._donors = Donors(others, gpu)
        if not self.on_gpu:
            self._measured = measured_on_chip(self.evaluator.gpu, tables)

    @property
    def failures(self) -> int:
        """How many searches found nothing right."""
        return len(self._failed)

    @property
    def undecided(self) -> int:
        """How many results lack the verdict on a rival."""
        return sum(self._undecided.values())

    @property
    def changed(self) -> bool:
        """Whether the table is another than the run found when it first began: a killed run may
        have changed it, and not have generated its kernels.
        """
        return self.table != self.began_with

    @property
    def writes(self) -> bool:
        """Whether a run that ends writes the table: where it changed, and into a folder that had
        none, which gets the shipped one where nothing beat it.
        """
        return self.changed or (self._new and bool(self.table.everything))

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

    def _title(self, spec: AttentionSpec, problem: Problem) -> str:
        return title_of(spec, problem) + f" on {self.slug}" * self.several

    def _derive(self, piece: Piece, seen: list[Outcome]) -> Found | None:
        """Evaluate what other GPUs' tables hold for one spec and length; None after the time."""
        spec, problem = piece
        gpu, on_gpu, bucket = self.evaluator.gpu, self.on_gpu, bucket_of(problem.seq_k)
        budget = self._budget()
        if budget.seconds == 0:
            return None
        default = tuned_default(spec, gpu)
        lent = self._donors.chosen(spec, bucket, on_gpu=on_gpu)
        trusted = self._trusted(piece)
        known = (*self._likely(piece), *((trusted,) if trusted else ()), *lent)
        goal = Goal(
            spec=spec,
            problem=problem,
            legal=(*known, *measured_seeds(spec, gpu), default),
            seeds=(),
            default=default,
            incumbent=self._incumbent(piece),
            derived=True,
            trusted=trusted,
        )
        found = self._found(piece, goal, replace(budget, trials=len(goal.order)), seen)
        return replace(found, legal=_count_legal(spec, gpu, on_gpu), exhaustive=False)

    def _search(self, piece: Piece, seen: list[Outcome]) -> Found | None:
        """Search one spec at one length. None after the time, if the table has what others hold."""
        spec, problem = piece
        gpu, bucket = self.evaluator.gpu, bucket_of(problem.seq_k)
        budget = self._budget()
        if budget.seconds == 0 and piece in self._derived:
            return None
        searched = {(s, bucket_of(p.seq_k)) for s, p in self.options.work}
        others = (*self._likely(piece), *self._donors.chosen(spec, bucket, on_gpu=self.on_gpu))
        if self.options.from_tables:
            others += self._donors.runners_up(spec, bucket, on_gpu=self.on_gpu)
        goal = goal_for(
            spec,
            problem,
            gpu,
            self._incumbent(piece),
            neighbours=neighbours(self.began_with, spec, bucket, leave_out=searched),
            elsewhere=others,
            on_gpu=self.on_gpu,
        )
        if self.options.from_tables:  # a space does not list all that is legal
            goal = replace(goal, legal=tuple(dict.fromkeys((*goal.legal, *others))))
        return self._found(piece, goal, budget, seen)

    def _found(self, piece: Piece, goal: Goal, budget: Budget, seen: list[Outcome]) -> Found:
        """The result of one search."""
        title, evaluator = self._title(*piece), self.evaluator
        if self.options.from_tables and not self.on_gpu:
            evaluator = CheckedByDonors(evaluator, self._donors)
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

    def _incumbent(self, piece: Piece) -> KernelConfig | None:
        """What a search must beat: what the table holds, or what was better of other tables."""
        spec, bucket = piece[0], bucket_of(piece[1].seq_k)
        if piece in self._derived:
            return self._derived[piece].winner.config
        held = self.began_with.find(spec, bucket)
        executed = self.began_with.executed_for(spec, bucket) if self.on_gpu else None
        if executed and executed.serves_under(triton_version()):
            held = executed
        if held is None or why_illegal(spec, held.config, self.evaluator.gpu) is not None:
            return None
        if held.config.executed and not self.on_gpu:
            return None  # no estimate may stand for it, and none replaces its time
        return held.config

    def _likely(self, piece: Piece) -> tuple[KernelConfig, ...]:
        """What was executed on a CPU for this GPU, which only measures now."""
        spec, bucket = piece[0], bucket_of(piece[1].seq_k)
        executed = self.began_with.executed_for(spec, bucket) if self.on_gpu else None
        return (executed.config,) if executed else ()

    def _trusted(self, piece: Piece) -> KernelConfig | None:
        """What the same chip was measured with for a like piece, if it may be chosen here."""
        spec, gpu = piece[0], self.evaluator.gpu
        config = measured_for(self._measured, spec, bucket_of(piece[1].seq_k))
        if config is None or must_have_run(config) or why_illegal(spec, config, gpu) is not None:
            return None
        return config

    def _took(self, piece: Piece, seen: list[Outcome], found: Found | None) -> list[Job]:
        """Put what another table lent into the table, with a run that names the donor."""
        if found is None:
            self.unbegun += 1
            return self._then(piece, seen)
        self._run = run = with_conditions(self._run, self.evaluator)
        config = found.winner.config
        if not self.on_gpu and config != self._incumbent(piece):
            donors = self._donors.chosen(piece[0], bucket_of(piece[1].seq_k), on_gpu=False)
            run = derived_run(run, donors.get(config.kernel, DEFAULT))
        self._derived[piece] = found
        self._enter(piece, found, run)
        return self._then(piece, seen)

    def _searched(self, piece: Piece, seen: list[Outcome], found: Found | None) -> list[Job]:
        """Put the result of a search into the table."""
        if found is None:
            self._left.remove(piece)
            return []
        self._run = with_conditions(self._run, self.evaluator)
        self._enter(piece, found, self._run)
        return self._then(piece, seen)

    def _enter(self, piece: Piece, found: Found, run: Run) -> None:
        """Put a result into the table and save it, or say why not."""
        spec, problem = piece
        entry = entry_of(spec, problem, found, run.id)
        held = self._walked.find(*entry.key)
        self.found[entry.key] = entry
        self._undecided[entry.key] = bool(found.undecided)
        lent = f", lent by {run.donor}" if run.donor not in (None, DEFAULT) else ""
        self._screen.finished(self._title(*piece), sentence(entry, found) + lent)
        stays = self._why_held_stays(held, entry, found)
        if stays:
            self._screen.say(f"  the table's entry stays: {stays}")
        else:
            self._put(entry, run)
            if self.table.find(*entry.key) is None:
                self._screen.say("  not written: dK/dV and dQ of the table take no longer together")
        if found.interrupted:
            self._stop.ask()

    def _search_failed(self, piece: Piece, seen: list[Outcome], error: FlashgenError) -> list[Job]:
        if not isinstance(error, NothingRight):
            raise error
        self._failed.add(piece)
        self._screen.finished(self._title(*piece), str(error))
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
            for entry in self._walked.entries
            if entry.spec == spec and not self._measured_elsewhere(entry)
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

    def _measured_elsewhere(self, entry: Entry) -> bool:
        """Whether this run estimates, and a GPU with the same chip was measured with the entry, or
        lends it what a like one was measured with.
        """
        return measured_for(self._measured, *entry.key) == entry.config

    def _share_kernels(self, entries: Sequence[Entry]) -> tuple[Entry, ...]:
        specs = {entry.spec for entry in entries}
        executed = [e.config for e in self._walked.executed if e.spec in specs]
        return consolidate(
            entries,
            Interruptible(self.evaluator, self._stop),
            self.log,
            max_regret=self.options.max_regret,
            run=self._run.id,
            rivals=executed if self.on_gpu else (),
        )

    def _shared(self, entries: Sequence[Entry], shared: Sequence[Entry]) -> list[Job]:
        """Put what changed into the table."""
        for old, new in zip(entries, shared, strict=True):
            if new == old or self._restates(old, new):
                continue
            if new.config != old.config:
                self._screen.say(shared_sentence(old, new))
            mine = new.evidence.run == self._run.id
            self._put(new, self._run if mine else self._walked.run_of(new))
            if new.key in self.found or new.config != old.config:
                self.found[new.key] = new
        return []

    def _put(self, entry: Entry, run: Run | None) -> None:
        """Put an entry of a run into the table and save it."""
        self._written.add(entry.key)
        self._walked = self._walked.with_entry(entry, run)
        self.table = self.table.with_entry(entry, run).without_idle()
        self.save()

    def save(self) -> None:
        """Write the table."""
        save(self.table, paths.table_file(self.options.out, self.slug))

    def end(self) -> None:
        """All is generated: delete the session."""
        paths.session_file(self.options.out, self.slug).unlink(missing_ok=True)

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

    def _why_held_stays(self, held: Entry | None, entry: Entry, found: Found) -> str | None:
        """Why the new entry is not written, if it is not."""
        if held is None:
            return None
        old, new = held.result.source, entry.result.source
        if STRENGTH[new] < STRENGTH[old]:
            return f"it is {old}, and {new} never replaces that"
        if self._measured_elsewhere(held):
            return f"the same chip was measured with it, and {new} never replaces that"
        if found.incumbent is not None and found.incumbent.undecided:
            return f"it has no verdict ({found.incumbent.status})"
        if self.options.improve_only and not found.replaced and STRENGTH[new] == STRENGTH[old]:
            return "nothing beat it"
        if held.key not in self._written and self._restates(held, entry):
            return "the same config is chosen, and --restate would write its new estimates"
        run = self._walked.run_of(held)
        named = replace(entry, evidence=replace(entry.evidence, run=held.evidence.run))
        same = text_of_entry(self.table.gpu, named) == text_of_entry(self.table.gpu, held)
        if same and run and run.protocol == self._run.protocol:
            return "it says the same"
        return None

    def _restates(self, old: Entry, new: Entry) -> bool:
        """Whether the new entry is of the same kernel, has estimates again, and nobody wants them
        anew. A folder without a table takes what was found.
        """
        same = new.config == old.config and new.evidence.digest == old.evidence.digest
        estimated = new.result.source == old.result.source != "measured"
        return same and estimated and not self.options.restate and not self._new


@functools.lru_cache(maxsize=256)  # asked for each bucket of a spec, and takes 50 ms
def _count_legal(spec: AttentionSpec, gpu: Gpu, on_gpu: bool) -> int:
    return len(legal_configs(spec, gpu, on_gpu=on_gpu))


def _raised(error: FlashgenError) -> list[Job]:
    raise error
