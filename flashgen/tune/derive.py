"""derive(): the table of a GPU that nobody tuned, from what the tables of other GPUs chose.

For each spec and bucket that a table has, the configs that any table chose for the spec, in any
bucket, and the default are compiled for this GPU. The least estimate on this GPU is chosen; where
there are no estimates, the best by facts. So no entry is estimated slower than the default, nor
than what a relative would have lent.

A measurement on the same chip (an H200's, for an H100) says more than an estimate: its config is
chosen, and takes the place of one that a search estimated here.

Nothing is checked again that was checked before: a kernel's text does not depend on the GPU, so the
error of the donor's entry is that of this one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from flashgen.errors import FlashgenError
from flashgen.estimate.estimate import estimable
from flashgen.evaluate.evaluator import SLOW, Evaluator
from flashgen.search.decide import by_facts, median_us
from flashgen.search.goal import RUNNERS_UP
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.config import KernelConfig
from flashgen.spec.gpu import Gpu
from flashgen.spec.legality import why_illegal
from flashgen.spec.outcome import Outcome, Stage, Status
from flashgen.spec.problem import Bucket, Problem
from flashgen.spec.space import tuned_default
from flashgen.table.entry import (
    Entry,
    EntryEvidence,
    Result,
    Run,
    must_have_run,
    short_digest,
    speedup,
)
from flashgen.table.table import Table
from flashgen.tune.progress import runner_up_of
from flashgen.tune.transfer import Key, measured_on_chip

DEFAULT = "default"
"""The donor of an entry whose config is the default, which no table had for its spec."""


@dataclass(frozen=True, kw_only=True)
class Donor:
    """An entry that lends its config, and the GPU whose table has it."""

    gpu: Gpu
    entry: Entry


def derive(
    gpu: Gpu, tables: Iterable[Table], evaluator: Evaluator, run: Run, settled: Collection[Key] = ()
) -> Iterator[tuple[Entry, Run]]:
    """The entries of a table for `gpu`, with the run of each, which names its donor.

    Args:
        gpu: the GPU, which is the evaluator's.
        tables: those of other GPUs, with their evidence; and what the GPU's own lends.
        evaluator: compiles and estimates for the GPU; one without a device.
        run: what the runs of the entries are like.
        settled: specs and buckets that need no entry.

    Yields:
        An entry and its run, in the order of the tables. A spec and bucket for which no config is
        right has none.

    Raises:
        FlashgenError: whatever the evaluator raises.
    """
    nearest = sorted(
        tables, key=lambda table: (table.gpu.arch != gpu.arch, abs(table.gpu.sms - gpu.sms))
    )
    measured = measured_on_chip(gpu, nearest)
    runs: dict[str | None, Run] = {}
    specs = dict.fromkeys(entry.spec for table in nearest for entry in table.entries)
    for spec in sorted(specs, key=lambda spec: spec.sort_key):
        donors = [
            Donor(gpu=table.gpu, entry=entry)
            for table in nearest
            for entry in table.entries
            if entry.spec == spec
        ]
        problems = {
            donor.entry.bucket: donor.entry.problem
            for donor in reversed(donors)
            if donor.entry.key not in settled
        }
        if not problems:
            continue
        choice = _Choice(spec, gpu, donors, evaluator)
        for bucket, problem in sorted(problems.items(), key=lambda item: item[0].low):
            found = choice.entry(bucket, problem, measured.get((spec, bucket)))
            if found is None:
                continue
            entry, slug = found
            own = runs.setdefault(slug, _run_from(run, slug))
            yield replace(entry, evidence=replace(entry.evidence, run=own.id)), own


def _run_from(run: Run, donor: str | None) -> Run:
    return replace(run, id=f"{run.id}-{donor or DEFAULT}", donor=donor or DEFAULT)


class _Choice:
    """Chooses for the buckets of one spec."""

    def __init__(
        self, spec: AttentionSpec, gpu: Gpu, donors: Sequence[Donor], evaluator: Evaluator
    ) -> None:
        self._spec = spec
        self._evaluator = evaluator
        self._default = tuned_default(spec, gpu)
        self._donors: dict[KernelConfig, Donor] = {}
        for donor in donors:
            self._donors.setdefault(donor.entry.config, donor)
        legal = [
            config
            for config in self._donors
            if why_illegal(spec, config, gpu) is None and not must_have_run(config)
        ]
        self._configs = tuple(dict.fromkeys((*legal, self._default)))

    def entry(
        self, bucket: Bucket, problem: Problem, first: KernelConfig | None
    ) -> tuple[Entry, str | None] | None:
        """The entry of a bucket, without a run, and its donor; None where nothing is right. The
        config `first` comes before estimates.
        """
        outcomes = self._ask("timed", problem, self._configs)
        usable = [o for o in outcomes.values() if o.ok or o.status is Status.NO_ESTIMATE]
        timed = [outcome for outcome in usable if outcome.timing is not None]
        ranked = sorted(timed, key=lambda o: median_us(o.timing)) if timed else by_facts(usable)
        ranked = sorted(ranked, key=lambda outcome: outcome.config != first)
        for outcome in ranked:
            if self._twin_serves(outcome.config, problem):
                floors = self._floors(outcome, problem)
                if floors is not None:
                    donor = self._donors.get(outcome.config)
                    default = outcomes[self._default]
                    losers = [other for other in ranked if other is not outcome][:RUNNERS_UP]
                    entry = self._entry(bucket, problem, outcome, default, floors, losers)
                    return entry, None if donor is None else donor.gpu.slug
        return None

    def _ask(
        self, stage: Stage, problem: Problem, configs: Sequence[KernelConfig]
    ) -> Mapping[KernelConfig, Outcome]:
        found = self._evaluator.evaluate(stage, self._spec, problem, configs)
        return dict(zip(configs, found, strict=True))

    def _twin_serves(self, config: KernelConfig, problem: Problem) -> bool:
        twin = config.pointer_twin()
        if twin == config:
            return True
        built = self._ask("compile", problem, [twin])[twin]
        return built.ok or built.status in SLOW

    def _floors(self, outcome: Outcome, problem: Problem) -> float | None:
        """The error of a config: its donor's, if the text is still the same; else it is checked.
        None if it is wrong.
        """
        donor = self._donors.get(outcome.config)
        if donor is not None and donor.entry.evidence.digest == short_digest(outcome.digest):
            return donor.entry.result.max_abs_err_floors
        checked = self._ask("check", problem, [outcome.config])[outcome.config]
        return checked.check.floors if checked.ok and checked.check else None

    def _entry(
        self,
        bucket: Bucket,
        problem: Problem,
        best: Outcome,
        default: Outcome,
        floors: float,
        losers: Sequence[Outcome],
    ) -> Entry:
        timing = best.timing
        us = None if timing is None else timing.median_us
        default_us = default.timing.median_us if default.ok and default.timing else None
        return Entry(
            spec=self._spec,
            bucket=bucket,
            config=best.config,
            result=Result(
                source=best.source,
                median_us=us,
                speedup=speedup(default_us, us),
                max_abs_err_floors=floors,
            ),
            evidence=EntryEvidence(
                digest=short_digest(best.digest),
                problem=problem,
                registers=best.registers,
                shared_bytes=best.shared_bytes,
                default_us=default_us,
                low_us=None if timing is None else timing.low_us,
                high_us=None if timing is None else timing.high_us,
                runners_up=tuple(map(runner_up_of, losers)),
            ),
        )


def derived_table(held: Table, tables: Iterable[Table], evaluator: Evaluator, run: Run) -> Table:
    """The table of a GPU with derived entries wherever nobody tuned.

    held: what there is; its tuned entries stay, and derived ones are made anew. So are estimated
    ones of which the same chip has a measurement; and untimed ones where there are estimates, whose
    configs are among the candidates.

    Raises:
        FlashgenError: if no kernel of the tables fits the GPU.
    """
    table = Table(gpu=held.gpu)
    for entry in held.everything:
        if entry.tritons or not is_derived(held, entry):
            table = table.with_entry(entry, held.run_of(entry))
    donors = [
        replace(other, entries=tuple(e for e in other.entries if not is_derived(other, e)))
        for other in tables
        if other.gpu.slug != held.gpu.slug
    ]
    untimed = [
        entry
        for entry in table.entries
        if entry.result.source == "untimed" and estimable(held.gpu.arch)
    ]
    measured = measured_on_chip(held.gpu, donors)
    outdone = [
        entry
        for entry in table.entries
        if entry.result.source != "measured"
        and (config := measured.get(entry.key, entry.config)) != entry.config
        and not must_have_run(config)
    ]
    anew = {entry.key for entry in (*untimed, *outdone)}
    settled = {entry.key for entry in table.entries} - anew
    donors.append(replace(table, entries=tuple(untimed)))
    for entry, own in derive(held.gpu, donors, evaluator, run, settled):
        table = table.with_entry(entry, own)
    if not table.entries:
        raise FlashgenError(f"no kernel of the tables is right and fits {held.gpu.slug}")
    return table


def is_derived(table: Table, entry: Entry) -> bool:
    """Whether an entry's config was lent by another GPU's table, and searched by nobody here."""
    run = table.run_of(entry)
    return run is not None and run.derived and run.donor != table.gpu.slug
