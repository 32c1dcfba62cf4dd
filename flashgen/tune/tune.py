"""Tune: search each spec and length, write the winner into the table, then generate the kernels."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from rich.console import Console

from flashgen import paths
from flashgen.errors import FlashgenError
from flashgen.search.journal import opened
from flashgen.table import emit as generate
from flashgen.table.table import Table
from flashgen.tune import evaluators, places
from flashgen.tune.alone import alone_in
from flashgen.tune.driver import JobQueue, Stop, drive
from flashgen.tune.ending import report, report_interrupted
from flashgen.tune.gpu_run import GpuRun
from flashgen.tune.options import TuneOptions
from flashgen.tune.places import TuningTarget
from flashgen.tune.progress import Screen

WINDING_DOWN = (
    "Interrupted: searches end with the best of what they have. Press Ctrl-C again to end at once."
)


def tune(options: TuneOptions, console: Console) -> tuple[Table, ...]:
    """Search all specs and lengths, for each GPU product of options.where; write
    DIR/configs/<slug>.yaml of each and DIR/generated; return the tables.

    A table is saved after each search that improves it, and every outcome is logged, so an
    interrupt loses only what was in progress. Into a folder without a table of the GPU goes the
    shipped one, with what was found. Raises FlashgenError, also at the end if a spec had no correct
    config.
    """
    generate.refuse_foreign(paths.generated_dir(options.out))
    with contextlib.ExitStack() as stack:
        found = stack.enter_context(_places(options, console))
        stack.enter_context(alone_in(paths.state_dir(options.out)))
        screen = Screen(console, len(found) * len(options.searches), options.budget.seconds)
        stop = Stop(lambda: screen.say(WINDING_DOWN))
        runs = []
        for place in found:
            held = stack.enter_context(evaluators.opened(place, options, console.print))
            run = GpuRun(options, screen, *held, stop)
            path = paths.journal_file(options.out, run.slug)
            journal = opened(path, console.print, resumed=run.results.resumed)
            run.storage = stack.enter_context(journal)
            runs.append(run)
        _begin_from_tables(runs, options)
        try:
            with screen:
                pairs = zip(runs, found, strict=True)
                drive([JobQueue(run.jobs(), place.pools) for run, place in pairs], stop)
        except (KeyboardInterrupt, FlashgenError) as error:
            generated = _emit_what_there_is(runs, options, console)
            if isinstance(error, KeyboardInterrupt):
                for run in runs:
                    report_interrupted(run, console, generated=generated)
            raise
        for run in runs:
            if run.results.writes:
                run.results.save()
        if any(run.results.writes for run in runs):
            _emit(options)
        for run in runs:
            run.results.end()
    for run in runs:
        report(run, console)
    _raise_failures(runs, options)
    return tuple(run.results.table for run in runs)


def _places(
    options: TuneOptions, console: Console
) -> contextlib.AbstractContextManager[tuple[TuningTarget, ...]]:
    """The GPU products to tune for, of this host or of a cluster."""
    if options.cluster is None:
        return places.opened(options.where, console.print)
    from flashgen.tune import cluster

    return cluster.opened(options.cluster, options.where, console.print)


def _begin_from_tables(runs: Sequence[GpuRun], options: TuneOptions) -> None:
    """Have each begin from the tables of all GPUs; of those that are tuned, as they were found."""
    tables = dict(generate.tables_for(options.out, evidence=True))
    tables |= {run.slug: run.results.began_with for run in runs}
    for run in runs:
        run.begin_from(tables.values())
        run.several = len(runs) > 1


def _emit(options: TuneOptions) -> None:
    """Generate DIR/generated from the tables."""
    generate.write(generate.tables_for(options.out), paths.generated_dir(options.out))


def _emit_what_there_is(runs: Sequence[GpuRun], options: TuneOptions, console: Console) -> bool:
    """Generate after an error, if a table has changed; a second error does not hide the first.
    Returns whether there was none.
    """
    try:
        if any(run.results.changed for run in runs):
            _emit(options)
    except FlashgenError as error:
        console.print(f"generated/ is not what the table says, {error}")
        return False
    return True


def _raise_failures(runs: Sequence[GpuRun], options: TuneOptions) -> None:
    """Raise FlashgenError if a search found nothing right, or not what it had to compare with."""
    failed = [run for run in runs if run.failures]
    count = len(runs) * len(options.searches)
    if failed:
        logs = ", ".join(str(paths.log_file(options.out, run.slug)) for run in failed)
        raise FlashgenError(
            f"{sum(run.failures for run in failed)} of {count} searches found no right config: "
            f"{logs} says what became of each; all other results are saved"
        )
    if undecided := sum(run.results.undecided for run in runs):
        raise FlashgenError(
            f"{undecided} of {count} searches were cut short: their incumbent or default ran out "
            f"of time or was killed from outside, twice; an incumbent stays in the table; all "
            f"results are saved, and the same command with --retry-quarantined tries again"
        )
