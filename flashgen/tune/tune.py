"""Tune: search each spec and length, write the winner into the table, then generate the kernels."""

from __future__ import annotations

import contextlib
import shlex
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from flashgen import paths
from flashgen.errors import FlashgenError, InvalidArgument
from flashgen.evaluate.evaluator import protocol_of, triton_version
from flashgen.search import search
from flashgen.search.goal import Budget, Found, Method, NothingRight, goal_for
from flashgen.search.log import alone_in
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.gpu import Gpu
from flashgen.spec.legality import why_illegal
from flashgen.spec.outcome import STRENGTH, Outcome, Source, Stage
from flashgen.spec.problem import Problem, bucket_of, workload
from flashgen.table import emit as generate
from flashgen.table.entry import Entry
from flashgen.table.evidence import evidence_text
from flashgen.table.show import entries_grid
from flashgen.table.table import Table, dump, load_with_evidence, save
from flashgen.tune import evaluators, places
from flashgen.tune.driver import Interruptible, Job, Line, Stop, drive
from flashgen.tune.evaluators import Site, Workplace
from flashgen.tune.optuna_journal import OptunaJournal, SeenLog
from flashgen.tune.places import Place, Wanted
from flashgen.tune.progress import (
    Screen,
    entry_of,
    explain_options,
    failure_lines,
    sentence,
    shared_sentence,
    title_of,
)
from flashgen.tune.run_files import Session, run_now, with_conditions
from flashgen.tune.share_kernels import MAX_REGRET, consolidate
from flashgen.tune.transfer import Key, elsewhere, measured_on_chip, neighbours

WINDING_DOWN = "Interrupted: saving the best results so far. Press Ctrl-C again to end at once."

Piece = tuple[AttentionSpec, Problem]

DEFAULT_SEQ = 4096


@dataclass(frozen=True, kw_only=True)
class TuneOptions:
    """The options of `flashgen tune`. Raises InvalidArgument.

    where: the GPUs; cluster: the Ray that has them, as cluster.connected has it. seqs: lengths to
    run, at most one per bucket; pieces: those of a workload instead. budget.seconds is for all
    specs together. restate: without a GPU, write an entry anew whose config stays.
    shard: (i, n) for the i-th of n parts of the specs, from 1.
    """

    specs: tuple[AttentionSpec, ...] = ()
    seqs: tuple[int, ...] = (DEFAULT_SEQ,)
    where: Wanted = field(default_factory=Wanted)
    cluster: str | None = None
    budget: Budget = field(default_factory=Budget)
    method: Method = field(default_factory=lambda: Method(likely_first=True))
    out: Path = Path()
    improve_only: bool = False
    restate: bool = False
    retry_quarantined: bool = False
    max_regret: float = MAX_REGRET
    shard: tuple[int, int] = (1, 1)
    pieces: tuple[Piece, ...] = ()

    def __post_init__(self) -> None:
        for number, seq in enumerate(self.seqs):
            for other in self.seqs[:number]:
                if bucket_of(seq) == bucket_of(other):
                    raise InvalidArgument(
                        f"seq must name at most one length a bucket: "
                        f"got {other} and {seq} of {bucket_of(seq)}"
                    )
        specs = len({spec for spec, _ in self.work})  # raises for a length that cannot be
        part, parts = self.shard
        if not 1 <= part <= parts <= specs:
            raise InvalidArgument(
                f"shard must be i/n, i from 1 to n, and n at most the number of specs, "
                f"{specs}: got {part}/{parts}"
            )

    @property
    def work(self) -> tuple[Piece, ...]:
        """What all shards search together, in order."""
        if self.pieces:
            return self.pieces
        specs = dict.fromkeys(self.specs)
        return tuple((spec, workload(spec, seq)) for spec in specs for seq in sorted(self.seqs))

    @property
    def searches(self) -> tuple[Piece, ...]:
        """What this shard searches, in order: specs are dealt out, with all their lengths."""
        part, parts = self.shard
        mine = tuple(dict.fromkeys(spec for spec, _ in self.work))[part - 1 :: parts]
        return tuple(piece for piece in self.work if piece[0] in mine)


def tune(options: TuneOptions, console: Console) -> tuple[Table, ...]:
    """Search all specs and lengths, for each GPU product of options.where; write
    DIR/configs/<slug>.yaml of each and DIR/generated; return the tables.

    A table is saved after each search, and every outcome is logged, so an interrupt loses only
    what was in progress. Raises FlashgenError, also at the end if a spec had no correct config.
    """
    generate.refuse_foreign(paths.generated_dir(options.out))
    with contextlib.ExitStack() as stack:
        found = stack.enter_context(_places(options, console))
        stack.enter_context(alone_in(paths.state_dir(options.out)))
        screen = Screen(console, len(found) * len(options.searches))
        stop = Stop(lambda: screen.say(WINDING_DOWN))
        stories = []
        for place in found:
            site = Site(
                gpu=place.gpu,
                pools=place.pools,
                out=options.out,
                retry=options.retry_quarantined,
                notice=console.print,
            )
            work = stack.enter_context(evaluators.opened(site))
            stories.append(_Story(options, screen, work, stop))
        _tell_of_others(stories, options)
        try:
            with screen:
                drive([Line(story.jobs(), story.pools) for story in stories], stop)
        except (KeyboardInterrupt, FlashgenError):
            _emit_what_there_is(stories, options, console)
            raise
        if any(story.changed or story.new for story in stories):
            _emit(options)
        for story in stories:
            story.end()
    for story in stories:
        story.report(console)
    _raise_failures(stories, options)
    return tuple(story.table for story in stories)


def _places(
    options: TuneOptions, console: Console
) -> contextlib.AbstractContextManager[tuple[Place, ...]]:
    """The GPU products to tune for, of this host or of a cluster."""
    if options.cluster is None:
        return places.opened(options.where, console.print)
    from flashgen.tune import cluster

    return cluster.opened(options.cluster, options.where, console.print)


def _tell_of_others(stories: Sequence[_Story], options: TuneOptions) -> None:
    """Show each story the tables of other GPUs: of those that this run tunes, as it found them."""
    tables: dict[str, Table] = dict(generate.tables_for(options.out))
    tables |= {story.slug: story.began_with for story in stories}
    for story in stories:
        story.tables = tuple(tables.values())
        story.several = len(stories) > 1


def _emit(options: TuneOptions) -> None:
    """Generate DIR/generated from the tables."""
    generate.write(generate.tables_for(options.out), paths.generated_dir(options.out))


def _emit_what_there_is(stories: Sequence[_Story], options: TuneOptions, console: Console) -> None:
    """Generate after an error, if a table has changed; a second error does not hide the first."""
    try:
        if any(story.changed for story in stories):
            _emit(options)
    except FlashgenError as error:
        console.print(f"generated/ is not what the table says, {error}")


def _raise_failures(stories: Sequence[_Story], options: TuneOptions) -> None:
    """Raise FlashgenError if a search found nothing right, or not what it had to compare with."""
    failed = [story for story in stories if story.failures]
    count = len(stories) * len(options.searches)
    if failed:
        logs = ", ".join(str(paths.log_file(options.out, story.slug)) for story in failed)
        raise FlashgenError(
            f"{sum(story.failures for story in failed)} of {count} searches found no right config: "
            f"{logs} says what became of each; all other results are saved"
        )
    if undecided := sum(story.undecided for story in stories):
        raise FlashgenError(
            f"{undecided} of {count} searches were cut short: their incumbent or default ran out "
            f"of time, twice; an incumbent stays in the table; all results are saved, and the same "
            f"command with --retry-quarantined tries again"
        )


class _Story:
    """One run of the tuner for one GPU product: the table it writes, and its jobs.

    Searches are independent: they see the table that the run found, less what the run searches.
    Jobs run in threads; all that changes the story is done in the driver's.
    """

    def __init__(self, options: TuneOptions, screen: Screen, place: Workplace, stop: Stop) -> None:
        self.options = options
        self.log = place.log
        self.pools = place.pools
        self.evaluator = evaluator = place.evaluator
        self.slug = evaluator.gpu.slug
        self.failures = self.undecided = 0
        self.outcomes: list[Outcome] = []
        self._screen = screen
        self._stop = stop
        self.table = self._held = _held_table(options.out, evaluator.gpu)
        self.tables: tuple[Table, ...] = ()
        self.several = False
        self.found: dict[Key, Entry] = {}
        self._session = Session.begin(
            paths.session_file(options.out, self.slug),
            request=_request(options, evaluator.source),
            run=run_now(evaluator, options.shard),
            table=self.table,
            notice=screen.say,
            new=not paths.table_file(options.out, self.slug).exists(),
        )
        self.new = self._session.new
        self._journal = OptunaJournal(paths.journal_file(options.out, self.slug))
        self._walked = self.began_with = self._session.found
        # What a round before the kill told of clocks and power stands in the table it wrote.
        written = {run.id: run for run in self.table.runs}
        self._run = written.get(self._session.run.id, self._session.run)
        if self._session.resumed:
            screen.say(f"Resuming the run of {self._run.date}.")
        self._start = time.monotonic()
        self._begun = 0  # searches, of which _left have not ended
        self._left = list(options.searches)

    @property
    def changed(self) -> bool:
        """Whether the table is another than the run found."""
        return self.table != self._held

    def jobs(self) -> list[Job]:
        """The searches; each spec's last is followed by the sharing of its kernels."""
        return [
            Job(
                run=partial(self._search, piece, log),
                done=partial(self._searched, piece, log),
                failed=partial(self._search_failed, piece, log),
            )
            for piece in self.options.searches
            for log in [SeenLog(self.log)]
        ]

    def _title(self, spec: AttentionSpec, problem: Problem) -> str:
        return title_of(spec, problem) + f" on {self.slug}" * self.several

    def _search(self, piece: Piece, log: SeenLog) -> Found:
        """Search one spec at one length."""
        spec, problem = piece
        gpu, bucket = self.evaluator.gpu, bucket_of(problem.seq_k)
        title, budget = self._title(*piece), self._budget()
        self._screen.begin(title)
        on_gpu = self.evaluator.source == "measured"
        held = self.began_with.find(spec, bucket)
        executed = self.began_with.executed_for(spec, bucket) if on_gpu else None
        if executed and executed.serves_under(triton_version()):
            held = executed
        incumbent = held.config if held and why_illegal(spec, held.config, gpu) is None else None
        if incumbent is not None and incumbent.executed and not on_gpu:
            incumbent = None  # no estimate may stand for it, and none replaces its time
        likely = (executed.config,) if executed else ()
        searched = [(s, bucket_of(p.seq_k)) for s, p in self.options.work]
        return search(
            goal_for(
                spec,
                problem,
                gpu,
                incumbent,
                neighbours=neighbours(self.began_with, spec, bucket, leave_out=searched),
                elsewhere=(*likely, *elsewhere(self.tables, gpu, spec, bucket)),
                on_gpu=on_gpu,
            ),
            Interruptible(self.evaluator, self._stop),
            log,
            budget=budget,
            method=self.options.method,
            notify=partial(self._screen.show, title),
            on_interrupt=self._stop.ask,
        )

    def _searched(self, piece: Piece, log: SeenLog, found: Found) -> list[Job]:
        """Put the result of a search into the table and save it."""
        spec, problem = piece
        self._run = with_conditions(self._run, self.evaluator)
        entry = entry_of(spec, problem, found, self._run.id)
        held = self.began_with.find(*entry.key)
        self.found[entry.key] = entry
        self.undecided += bool(found.undecided)
        self._screen.finished(self._title(*piece), sentence(entry, found))
        stays = self._why_held_stays(held, entry, found)
        if stays:
            self._screen.say(f"  the table's entry stays: {stays}")
        else:
            self._put(entry)
        if found.interrupted:
            self._stop.ask()
        return self._then(piece, log)

    def _search_failed(self, piece: Piece, log: SeenLog, error: FlashgenError) -> list[Job]:
        if not isinstance(error, NothingRight):
            raise error
        self.failures += 1
        self._screen.finished(self._title(*piece), str(error))
        return self._then(piece, log)

    def _then(self, piece: Piece, log: SeenLog) -> list[Job]:
        """After the last search of a spec, its buckets share kernels if that costs no more than
        allowed. Not with --improve-only.
        """
        self._left.remove(piece)
        self.outcomes += log.seen
        self._journal.record(title_of(*piece), log.seen)
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

    def _measured_elsewhere(self, entry: Entry) -> bool:
        """Whether this run estimates, and a GPU with the same chip was measured with the entry."""
        if self.evaluator.source == "measured":
            return False
        found = measured_on_chip(self.evaluator.gpu, self.tables)
        return found.get(entry.key) == entry.config

    def _share_kernels(self, entries: Sequence[Entry]) -> tuple[Entry, ...]:
        specs = {entry.spec for entry in entries}
        executed = [e.config for e in self._walked.executed if e.spec in specs]
        return consolidate(
            entries,
            Interruptible(self.evaluator, self._stop),
            self.log,
            max_regret=self.options.max_regret,
            run=self._run.id,
            rivals=executed if self.evaluator.source == "measured" else (),
        )

    def _shared(self, entries: Sequence[Entry], shared: Sequence[Entry]) -> list[Job]:
        """Put what changed into the table."""
        for old, new in zip(entries, shared, strict=True):
            if new == old or self._restates(old, new):
                continue
            if new.config != old.config:
                self._screen.say(shared_sentence(old, new))
            self._put(new)
            if new.key in self.found or new.config != old.config:
                self.found[new.key] = new
        return []

    def _put(self, entry: Entry) -> None:
        """Put an entry into the table and save it."""
        mine = entry.evidence.run == self._run.id
        run = self._run if mine else self._walked.run_of(entry)
        self._walked = self._walked.with_entry(entry, run)
        self.table = self.table.with_entry(entry, run)
        save(self.table, paths.table_file(self.options.out, self.slug))

    def end(self) -> None:
        """All is searched and generated: delete the session."""
        self._session.end()

    def report(self, console: Console) -> None:
        """Print the results, where they are, and what to try next."""
        out, slug = self.options.out, self.slug
        elsewhere = "" if out == Path() else shlex.quote(str(out))
        option = elsewhere and f" --out {elsewhere}"
        shipped = paths.generated_dir(out).resolve() == paths.shipped_generated_dir().resolve()
        served = "" if shipped else f"FLASHGEN_GENERATED={elsewhere or '.'} "
        proof = "--gpu" if self.evaluator.source == "measured" else f"--target {slug}"
        keys = [(spec, bucket_of(problem.seq_k)) for spec, problem in self.options.searches]
        order = sorted(self.found, key=lambda key: keys.index(key) if key in keys else len(keys))
        console.print()
        console.print(entries_grid(self.found[key] for key in order))
        changes = sum(entry != self._held.find(*entry.key) for entry in self.table.entries)
        changed = f"{changes} entr{'y' if changes == 1 else 'ies'} changed"
        lines = [
            *failure_lines(self.outcomes),
            f"{len(keys)} search{'es' * (len(keys) != 1)}, {changed}",
        ]
        if changes or self.new:
            lines.append(f"Written: {paths.table_file(out, slug)} and {paths.generated_dir(out)}")
        lines.append("Try next:")
        mine = [self.found[key] for key in keys if key in self.found]
        if mine:  # sharing kernels touches other buckets, too
            lines.append(f"  flashgen explain {explain_options(mine[-1])} --target {slug}{option}")
        lines.append(f"  flashgen verify {proof}{option}")
        lines.append(f"  {served}python -c 'from flashgen import attention; help(attention)'")
        console.print("", *lines, sep="\n", soft_wrap=True)  # a command is copied whole

    def _budget(self) -> Budget:
        """The share of the remaining time for a search that begins now, beside those that run."""
        budget, unfinished = self.options.budget, len(self._left)
        self._begun += 1
        if budget.seconds is None:
            return budget
        running = self._begun - (len(self.options.searches) - unfinished)
        left = max(0.0, budget.seconds - (time.monotonic() - self._start))
        return replace(budget, seconds=left * running / unfinished)

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
        if self._restates(held, entry):
            return "the same config is chosen, and --restate would write its new estimates"
        run = self.began_with.run_of(held)
        named = replace(entry, evidence=replace(entry.evidence, run=held.evidence.run))
        same = _text(self.table.gpu, named) == _text(self.table.gpu, held)
        if same and run and run.protocol == self._run.protocol:
            return "it says the same"
        return None

    def _restates(self, old: Entry, new: Entry) -> bool:
        """Whether the new entry is of the same kernel, has estimates again, and nobody wants them
        anew. A folder without a table takes what was found.
        """
        same = new.config == old.config and new.evidence.digest == old.evidence.digest
        estimated = new.result.source == old.result.source != "measured"
        return same and estimated and not self.options.restate and not self.new


def _raised(error: FlashgenError) -> list[Job]:
    raise error


def _request(options: TuneOptions, source: Source) -> dict[str, Any]:
    """The part of the request that decides the path of the run. The time budget does too, but
    cannot be stored.
    """
    stages: tuple[Stage, ...] = ("compile", "check", "timed", "final")
    return {
        "work": [[asdict(spec), asdict(problem)] for spec, problem in options.work],
        "shard": options.shard,
        "trials": options.budget.trials,
        "method": asdict(options.method),
        "improve_only": options.improve_only,
        "restate": options.restate,
        "max_regret": options.max_regret,
        "source": source,
        "triton": triton_version(),
        "protocols": [protocol_of(stage, source) for stage in stages],
    }


def _held_table(out: Path, gpu: Gpu) -> Table:
    """DIR's table if there is one, otherwise the shipped one, otherwise an empty one. Its GPU is
    `gpu`.
    """
    for path in (paths.table_file(out, gpu.slug), paths.shipped_table(gpu.slug)):
        if path.exists():
            return replace(load_with_evidence(path), gpu=gpu)
    return Table(gpu=gpu)


def _text(gpu: Gpu, entry: Entry) -> str:
    """An entry as in files, where figures have fewer digits."""
    return dump(Table(gpu=gpu, entries=(entry,))) + evidence_text((entry,))
