"""Tune: search each spec and length, write the winner into the table, then generate the kernels."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from flashgen import paths
from flashgen.errors import FlashgenError, InvalidArgument, NoGpuError
from flashgen.estimate.estimate import estimable, require_estimator
from flashgen.evaluate.evaluator import protocol_of, triton_version
from flashgen.search import search
from flashgen.search.goal import Budget, Found, Method, NothingRight, goal_for
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.gpu import Gpu, known_target
from flashgen.spec.known_bugs import warnings_here
from flashgen.spec.legality import why_illegal
from flashgen.spec.outcome import STRENGTH, Source, Stage
from flashgen.spec.problem import Bucket, Problem, bucket_of, workload
from flashgen.table import emit as generate
from flashgen.table.entry import Entry
from flashgen.table.evidence import evidence_text
from flashgen.table.show import entries_grid
from flashgen.table.table import Table, dump, load_folders, load_with_evidence, save
from flashgen.tune import evaluators
from flashgen.tune.evaluators import Site, Workplace
from flashgen.tune.progress import (
    Screen,
    entry_of,
    explain_options,
    sentence,
    shared_sentence,
    title_of,
)
from flashgen.tune.run_files import Session, run_now, with_conditions
from flashgen.tune.share_kernels import MAX_REGRET, consolidate
from flashgen.tune.transfer import elsewhere, neighbours

WINDING_DOWN = "Interrupted: saving the best results so far. Press Ctrl-C again to end at once."

Key = tuple[AttentionSpec, Bucket]

OFFLINE_TARGET = "nvidia_h200"
"""The target if there is no GPU and none is named."""

DEFAULT_SEQ = 4096


@dataclass(frozen=True, kw_only=True)
class TuneOptions:
    """The options of `flashgen tune`. Raises InvalidArgument.

    gpu: require the GPU of this machine; target: tune offline for that slug; neither: a GPU if
    there is one. seqs: lengths to run, at most one per bucket; pieces: those of a workload instead.
    budget.seconds is for all specs together.
    """

    specs: tuple[AttentionSpec, ...] = ()
    seqs: tuple[int, ...] = (DEFAULT_SEQ,)
    gpu: bool = False
    target: str | None = None
    budget: Budget = field(default_factory=Budget)
    method: Method = field(default_factory=lambda: Method(likely_first=True))
    out: Path = Path()
    improve_only: bool = False
    retry_quarantined: bool = False
    max_regret: float = MAX_REGRET
    storage: str | None = None
    device: int = 0
    jobs: int | None = None
    pieces: tuple[tuple[AttentionSpec, Problem], ...] = ()

    def __post_init__(self) -> None:
        if self.storage is not None and self.budget.seconds is not None:
            raise InvalidArgument(
                "time-budget does not go with storage: workers that share a run must all stop at "
                "the same place; say --trials in the place of --time-budget"
            )
        if self.gpu and self.target is not None:
            raise InvalidArgument("gpu and target exclude each other: name one of --gpu, --target")
        for number, seq in enumerate(self.seqs):
            for other in self.seqs[:number]:
                if bucket_of(seq) == bucket_of(other):
                    raise InvalidArgument(
                        f"seq must name at most one length a bucket: "
                        f"got {other} and {seq} of {bucket_of(seq)}"
                    )
        _ = self.work  # raises for a length that cannot be

    @property
    def work(self) -> tuple[tuple[AttentionSpec, Problem], ...]:
        """What is searched, in order."""
        if self.pieces:
            return self.pieces
        specs = dict.fromkeys(self.specs)
        return tuple((spec, workload(spec, seq)) for spec in specs for seq in sorted(self.seqs))


def tune(options: TuneOptions, console: Console) -> Table:
    """Search all specs and lengths, write DIR/configs/<slug>.yaml and DIR/generated; return the
    table.

    The table is saved after each search, and every outcome is logged, so an interrupt loses only
    what was in progress. Raises FlashgenError, also at the end if a spec had no correct config.
    """
    generate.refuse_foreign(paths.generated_dir(options.out))
    gpu, here = _choose_gpu(options, console)
    failures: list[str] = []
    site = Site(
        gpu=gpu,
        device=options.device if here else None,
        out=options.out,
        jobs=options.jobs,
        storage=options.storage,
        request=_request(options, "measured" if here else "estimated"),
        retry=options.retry_quarantined,
        notice=console.print,
    )
    with evaluators.opened(site) as place:
        story = _Story(options, console, place, site.request)
        try:
            for spec, problem in story.searches():
                try:
                    story.search(spec, problem)
                except NothingRight as error:
                    failures.append(str(error))
                    console.print(str(error))
            story.share_kernels()
        except (KeyboardInterrupt, FlashgenError):
            story.emit_what_there_is()
            raise
        story.end()
    story.report()
    if failures:
        raise FlashgenError(
            f"{len(failures)} of {len(options.work)} searches found no right config: "
            f"{paths.log_file(options.out, gpu.slug)} says what became of each; "
            f"all other results are saved"
        )
    return story.table


class _Story:
    """One run of the tuner: the table it writes and the progress it shows.

    Searches see the table that the run found and what it has chosen since. After a kill, the
    written table already has more: what the same run chose before.
    """

    def __init__(
        self,
        options: TuneOptions,
        console: Console,
        place: Workplace,
        request: Mapping[str, Any],
    ) -> None:
        self.options = options
        self.console = console
        self.log = place.log
        self.evaluator = evaluator = place.evaluator
        self.table = self._held = _held_table(options.out, evaluator.gpu)
        self._tables = _tables(options)
        self.found: dict[Key, Entry] = {}
        self._session = Session.begin(
            paths.session_file(options.out, evaluator.gpu.slug),
            request=request,
            run=run_now(evaluator),
            table=self.table,
            notice=console.print,
            ledger=place.ledger,
        )
        self._walked = self._session.found
        # What a round before the kill told of clocks and power stands in the table it wrote.
        written = {run.id: run for run in self.table.runs}
        self._run = written.get(self._session.run.id, self._session.run)
        if self._session.resumed:
            console.print(f"Resuming the run of {self._run.date}.")
        self._begun = time.monotonic()
        self._done = 0
        self._screen = Screen(console, len(options.work))

    def searches(self) -> Iterator[tuple[AttentionSpec, Problem]]:
        """The searches to run, with the progress on the screen."""
        with self._screen:
            for number, (spec, problem) in enumerate(self.options.work):
                self._done = number
                self._screen.begin(number, title_of(spec, problem))
                yield spec, problem

    def search(self, spec: AttentionSpec, problem: Problem) -> None:
        """Search one spec at one length; put the result into the table and save it."""
        gpu, bucket = self.evaluator.gpu, bucket_of(problem.seq_k)
        held = self._walked.find(spec, bucket)
        incumbent = held.config if held and why_illegal(spec, held.config, gpu) is None else None
        to_come = [(s, bucket_of(p.seq_k)) for s, p in self.options.work[self._done :]]
        alike = neighbours(self._walked, spec, bucket, leave_out=to_come)
        found = search(
            goal_for(
                spec,
                problem,
                gpu,
                incumbent,
                neighbours=alike,
                elsewhere=elsewhere(self._tables, gpu, spec, bucket),
                on_gpu=self.evaluator.source == "measured",
            ),
            self.evaluator,
            self.log,
            budget=self._budget(),
            method=self.options.method,
            notify=self._screen.show,
            on_interrupt=lambda: self._screen.say(WINDING_DOWN),
        )
        self._run = with_conditions(self._run, self.evaluator)
        entry = entry_of(spec, problem, found, self._run.id)
        self.found[entry.key] = entry
        self._screen.finished(sentence(entry, found))
        stays = self._why_held_stays(held, entry, found)
        if stays:
            self._screen.say(f"  the table's entry stays: {stays}")
        else:
            self._put(entry)
        if found.interrupted:
            raise KeyboardInterrupt

    def share_kernels(self) -> None:
        """Let the buckets of a spec share kernels if that costs no more than allowed.

        Not with --improve-only.
        """
        if self.options.improve_only:
            return
        self._screen.wind_up("sharing kernels")
        for spec in dict.fromkeys(spec for spec, _ in self.options.work):
            entries = [entry for entry in self._walked.entries if entry.spec == spec]
            shared = consolidate(
                entries,
                self.evaluator,
                self.log,
                max_regret=self.options.max_regret,
                run=self._run.id,
                notify=self._screen.show,
            )
            for old, new in zip(entries, shared, strict=True):
                if new == old:
                    continue
                if new.config != old.config:
                    self._screen.say(shared_sentence(old, new))
                self._put(new)
                if new.key in self.found or new.config != old.config:
                    self.found[new.key] = new

    def _put(self, entry: Entry) -> None:
        """Put an entry into the table and save it."""
        mine = entry.evidence.run == self._run.id
        run = self._run if mine else self._walked.run_of(entry)
        self._walked = self._walked.with_entry(entry, run)
        self.table = self.table.with_entry(entry, run)
        save(self.table, paths.table_file(self.options.out, self.evaluator.gpu.slug))

    def end(self) -> None:
        """All is searched: generate the kernels and delete the session."""
        self.emit()
        self._session.end()

    def emit(self) -> None:
        """Generate DIR/generated from the tables."""
        folder = paths.generated_dir(self.options.out)
        generate.write(generate.tables_for(self.options.out), folder)

    def emit_what_there_is(self) -> None:
        """Generate after an error, if the table has changed; a second error does not hide the
        first.
        """
        try:
            if self.table != self._held:
                self.emit()
        except FlashgenError as error:
            self.console.print(f"generated/ is not what the table says, {error}")

    def report(self) -> None:
        """Print the results, where they are, and what to try next."""
        out, slug = self.options.out, self.evaluator.gpu.slug
        elsewhere = "" if out == Path() else shlex.quote(str(out))
        option = elsewhere and f" --out {elsewhere}"
        shipped = paths.generated_dir(out).resolve() == paths.shipped_generated_dir().resolve()
        served = "" if shipped else f"FLASHGEN_GENERATED={elsewhere or '.'} "
        proof = "--gpu" if self.evaluator.source == "measured" else f"--target {slug}"
        self.console.print()
        self.console.print(entries_grid(self.found.values()))
        self.console.print(
            f"\nWritten: {paths.table_file(out, slug)} and {paths.generated_dir(out)}. Try next:"
        )
        keys = {(spec, bucket_of(problem.seq_k)) for spec, problem in self.options.work}
        mine = (entry for entry in reversed(self.found.values()) if entry.key in keys)
        last = next(mine, None)  # sharing kernels touches other buckets, too
        if last is not None:
            self.console.print(
                f"  flashgen explain {explain_options(last)} --target {slug}{option}"
            )
        self.console.print(f"  flashgen verify {proof}{option}")
        self.console.print(f"  {served}python -c 'from flashgen import attention; help(attention)'")

    def _budget(self) -> Budget:
        """The share of the remaining time for the current search."""
        budget = self.options.budget
        if budget.seconds is None:
            return budget
        left = max(0.0, budget.seconds - (time.monotonic() - self._begun))
        return replace(budget, seconds=left / (len(self.options.work) - self._done))

    def _why_held_stays(self, held: Entry | None, entry: Entry, found: Found) -> str | None:
        """Why the new entry is not written, if it is not."""
        if held is None:
            return None
        old, new = held.result.source, entry.result.source
        if STRENGTH[new] < STRENGTH[old]:
            return f"it is {old}, and {new} never replaces that"
        if self.options.improve_only and not found.replaced and STRENGTH[new] == STRENGTH[old]:
            return "nothing beat it"
        run = self._walked.run_of(held)
        named = replace(entry, evidence=replace(entry.evidence, run=held.evidence.run))
        same = _text(self.table.gpu, named) == _text(self.table.gpu, held)
        if same and run and run.protocol == self._run.protocol:
            return "it says the same"
        return None


def _choose_gpu(options: TuneOptions, console: Console) -> tuple[Gpu, bool]:
    """The GPU to tune for, and whether it is present; prints which, and why nothing is measured."""
    if options.target is None:
        from flashgen.kernels.launch import device_gpu

        try:
            gpu = device_gpu(options.device)
        except NoGpuError:
            if options.gpu:
                raise
        else:
            console.print(f"Tuning for {gpu.name} ({gpu.slug}), measuring on it.")
            _warn(console, gpu)
            return gpu, True
    gpu = known_target(options.target or OFFLINE_TARGET)
    why = "--target uses no GPU" if options.target else "there is no GPU here"
    result = "the results are estimates"
    if estimable(gpu.arch):
        require_estimator()
    else:
        result = f"the estimator does not know {gpu.arch}, so configs are chosen by rule"
    console.print(
        f"Tuning offline for {gpu.name} ({gpu.slug}): {result}; nothing is measured, because {why}."
    )
    _warn(console, gpu)
    return gpu, False


def _warn(console: Console, gpu: Gpu) -> None:
    """Say what is known to be wrong with this Triton on the GPU."""
    for warning in warnings_here(gpu.arch):
        console.print(f"Warning: {warning}")


def _request(options: TuneOptions, source: Source) -> dict[str, Any]:
    """The part of the request that decides the path of the run. The time budget does too, but
    cannot be stored.
    """
    stages: tuple[Stage, ...] = ("compile", "check", "timed", "final")
    return {
        "work": [[asdict(spec), asdict(problem)] for spec, problem in options.work],
        "trials": options.budget.trials,
        "method": asdict(options.method),
        "improve_only": options.improve_only,
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


def _tables(options: TuneOptions) -> tuple[Table, ...]:
    """The tables of other GPUs that a search starts with. Workers that share a storage must see
    the same: those that ship.
    """
    if options.storage is not None:
        return tuple(load_folders(paths.shipped_configs_dir()).values())
    return tuple(generate.tables_for(options.out).values())


def _text(gpu: Gpu, entry: Entry) -> str:
    """An entry as in files, where figures have fewer digits."""
    return dump(Table(gpu=gpu, entries=(entry,))) + evidence_text((entry,))
