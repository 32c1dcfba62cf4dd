"""restate: a table's estimates anew, by the model of today. Configs stay.

A search decides by estimates; this tells what the same kernels, their runners-up and their default
are estimated to take now, so that all figures of a table compare.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import groupby
from pathlib import Path

from flashgen import paths
from flashgen.evaluate.evaluator import Evaluator
from flashgen.evaluate.offline import OfflineEvaluator
from flashgen.schedules.config import KernelConfig
from flashgen.schedules.outcome import Timing
from flashgen.schedules.space import tuned_default
from flashgen.table import emit
from flashgen.table.entry import Entry, Run, RunnerUp, speedup
from flashgen.table.table import Table
from flashgen.table.table_file import save
from flashgen.tune import places
from flashgen.tune.alone import alone_in
from flashgen.tune.places import TargetOptions
from flashgen.tune.run_files import held_table, run_now


def restate(where: TargetOptions, out: Path, say: Callable[[str], None]) -> tuple[Table, ...]:
    """Write the estimates of the targets' tables in DIR, or of the shipped ones, anew, where they
    are of an older model, a spec at a time; the same command goes on after a kill. What has no
    estimate now keeps what it has, and is named. Returns the tables. Raises FlashgenError.
    """
    made, state = [], paths.state_dir(out)
    with alone_in(state), places.opened(where, say) as found:
        for place in found:
            with OfflineEvaluator(place.gpu, state, pools=place.pools) as evaluator:
                made.append(_restated(out, evaluator, say))
    emit.write(emit.tables_for(out), paths.generated_dir(out))
    return tuple(made)


def _restated(out: Path, evaluator: Evaluator, say: Callable[[str], None]) -> Table:
    table, now = held_table(out, evaluator.gpu), run_now(evaluator)
    old = [entry for entry in table.everything if _is_old(table, entry, now)]
    say(f"{table.gpu.slug}: {len(old)} of {len(table.everything)} entries have older estimates.")
    count = 0
    for spec, group in groupby(old, key=lambda entry: entry.spec):
        entries = list(group)
        for entry in entries:
            new = _estimated(entry, evaluator)
            if new is None:
                say(f"{spec.name} {entry.bucket} {entry.config.label}: no estimate, left as it is")
                continue
            run = _run_like(table.run_of(entry), now)
            evidence = replace(new.evidence, run=run.id)
            table = table.with_entry(replace(new, evidence=evidence), run)
        table = table.without_idle()
        save(table, paths.table_file(out, table.gpu.slug))
        count += len(entries)
        say(f"{spec.name} [{count}/{len(old)}]")
    return table


def _is_old(table: Table, entry: Entry, now: Run) -> bool:
    run = table.run_of(entry)
    return entry.result.source == "estimated" and (run is None or run.protocol != now.protocol)


def _run_like(old: Run | None, now: Run) -> Run:
    """The run of today, named and lent as the old one was: nobody has searched."""
    if old is None:
        return now
    stamp, (_, _, kind) = now.id.partition("-")[0], old.id.partition("-")
    return replace(now, id=f"{stamp}-{kind}", donor=old.donor)


def _estimated(entry: Entry, evaluator: Evaluator) -> Entry | None:
    """The entry with the estimates of today; None where its config has none."""
    default, others = tuned_default(entry.spec, evaluator.gpu), entry.evidence.runners_up
    configs = list(dict.fromkeys((entry.config, default, *(o.config for o in others))))
    outcomes = evaluator.evaluate("timed", entry.spec, entry.problem, configs)
    times = {outcome.config: outcome.timing for outcome in outcomes if outcome.timing}
    timing = times.get(entry.config)
    if timing is None:
        return None
    default_us = times[default].median_us if default in times else None
    runners_up = tuple(_as_of_today(others, times))
    least = min((o.median_us for o in runners_up[:1] if o.median_us), default=timing.median_us)
    regret = round(max(timing.median_us / least - 1, 0.0), 5) if entry.evidence.regret else 0.0
    return replace(
        entry,
        result=replace(
            entry.result,
            median_us=timing.median_us,
            speedup=speedup(default_us, timing.median_us),
        ),
        evidence=replace(
            entry.evidence,
            default_us=default_us,
            low_us=timing.low_us,
            high_us=timing.high_us,
            batches_us=timing.batches_us,
            regret=regret,
            runners_up=runners_up,
        ),
    )


def _as_of_today(
    others: tuple[RunnerUp, ...], times: dict[KernelConfig, Timing]
) -> Iterator[RunnerUp]:
    """The runners-up in their order, with their times of today; without those that have none."""
    for other in others:
        if timing := times.get(other.config):
            us, batches = timing.median_us, timing.batches_us
            yield replace(other, source="estimated", median_us=us, batches_us=batches)
