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
from flashgen.tune.driver import Line, Stop, drive
from flashgen.tune.ending import report, report_interrupted
from flashgen.tune.options import TuneOptions
from flashgen.tune.places import Place
from flashgen.tune.progress import Screen
from flashgen.tune.story import Story

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
        stories = []
        for place in found:
            held = stack.enter_context(evaluators.opened(place, options, console.print))
            story = Story(options, screen, *held, stop)
            path = paths.journal_file(options.out, story.slug)
            journal = opened(path, console.print, resumed=story.resumed)
            story.storage = stack.enter_context(journal)
            stories.append(story)
        _tell_of_others(stories, options)
        try:
            with screen:
                pairs = zip(stories, found, strict=True)
                drive([Line(story.jobs(), place.pools) for story, place in pairs], stop)
        except (KeyboardInterrupt, FlashgenError) as error:
            generated = _emit_what_there_is(stories, options, console)
            if isinstance(error, KeyboardInterrupt):
                for story in stories:
                    report_interrupted(story, console, generated=generated)
            raise
        for story in stories:
            if story.writes:
                story.save()
        if any(story.writes for story in stories):
            _emit(options)
        for story in stories:
            story.end()
    for story in stories:
        report(story, console)
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


def _tell_of_others(stories: Sequence[Story], options: TuneOptions) -> None:
    """Show each story the tables of other GPUs: of those that this run tunes, as it found them."""
    tables = dict(generate.tables_for(options.out, evidence=True))
    tables |= {story.slug: story.began_with for story in stories}
    for story in stories:
        story.tell(tables.values())
        story.several = len(stories) > 1


def _emit(options: TuneOptions) -> None:
    """Generate DIR/generated from the tables."""
    generate.write(generate.tables_for(options.out), paths.generated_dir(options.out))


def _emit_what_there_is(stories: Sequence[Story], options: TuneOptions, console: Console) -> bool:
    """Generate after an error, if a table has changed; a second error does not hide the first.
    Returns whether there was none.
    """
    try:
        if any(story.changed for story in stories):
            _emit(options)
    except FlashgenError as error:
        console.print(f"generated/ is not what the table says, {error}")
        return False
    return True


def _raise_failures(stories: Sequence[Story], options: TuneOptions) -> None:
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
            f"of time or was killed from outside, twice; an incumbent stays in the table; all "
            f"results are saved, and the same command with --retry-quarantined tries again"
        )
