"""Fewer kernels: the smallest set of configs that serves all buckets of a spec almost as well.

Each bucket was searched separately, so the winners of neighbouring buckets often differ only by
noise, and each is a kernel to compile, check and keep. Here all winners are timed in all buckets,
and a bucket takes another's winner if that costs at most `max_regret` of its time. The entry
records the cost.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import TypeVar

from flashgen.errors import InvalidArgument
from flashgen.evaluate.evaluator import Evaluator
from flashgen.schedules.config import KernelConfig
from flashgen.schedules.outcome import STRENGTH, Outcome
from flashgen.schedules.space import tuned_default
from flashgen.search.decide import TIE, losses, median_us, p_value
from flashgen.search.evidence import Evidence
from flashgen.search.goal import RUNNERS_UP, Goal
from flashgen.search.log import Log
from flashgen.spec.problem import Bucket
from flashgen.table.entry import Entry, RunnerUp
from flashgen.tune.progress import entry_with, runner_up_of

MAX_REGRET = 0.02
"""By default: what one kernel less is worth. Two runs of one kernel differ by as much."""

B = TypeVar("B", bound=Hashable)
C = TypeVar("C", bound=Hashable)


def smallest_set(times: Mapping[B, Mapping[C, float | None]], max_regret: float) -> dict[B, C]:
    """The config of each bucket, such that they need the fewest kernels.

    times: bucket -> config -> microseconds, None if it cannot run there. A bucket's config is
    within `max_regret`, a share of the time, of that bucket's best. Among sets of equal size the
    one with the least sum of regrets is taken, then the one whose configs come first. Exact: all
    sets of each size are tried. Raises InvalidArgument.
    """
    if not 0 <= max_regret < math.inf:
        raise InvalidArgument(f"max_regret must be finite and >= 0: got {max_regret}")
    allowed = {bucket: _regrets(row, max_regret, bucket) for bucket, row in times.items()}
    useful = list(dict.fromkeys(config for regrets in allowed.values() for config in regrets))
    for size in range(len(times) + 1):
        found = [
            _served(allowed, chosen)
            for chosen in combinations(useful, size)
            if all(any(config in regrets for config in chosen) for regrets in allowed.values())
        ]
        if found:
            return min(found, key=lambda served: served[0])[1]
    raise AssertionError("the best of each bucket serve all of them")


def _regrets(row: Mapping[C, float | None], max_regret: float, bucket: object) -> dict[C, float]:
    """The regrets of the allowed configs of one bucket, in order."""
    known = {config: us for config, us in row.items() if us is not None}
    if not known:
        raise InvalidArgument(
            f"times must hold a config that runs in each bucket: got none that does in {bucket}"
        )
    best = min(known.values())
    regrets = {config: us / best - 1 for config, us in known.items()}
    return {config: regret for config, regret in regrets.items() if regret <= max_regret}


def _served(
    allowed: Mapping[B, Mapping[C, float]], chosen: Collection[C]
) -> tuple[float, dict[B, C]]:
    """The sum of regrets, and the best of these configs for each bucket; of equals the first."""
    best = {
        bucket: min((config for config in regrets if config in chosen), key=regrets.__getitem__)
        for bucket, regrets in allowed.items()
    }
    return sum(allowed[bucket][config] for bucket, config in best.items()), best


def consolidate(
    entries: Sequence[Entry],
    evaluator: Evaluator,
    log: Log,
    *,
    max_regret: float,
    run: str,
    rivals: Sequence[KernelConfig] = (),
) -> tuple[Entry, ...]:
    """The entries of one spec, in order, changed to those that need the fewest kernels.

    The winners of all buckets, and these rivals, are timed in each: on a GPU in one final round per
    bucket, with the default; without one they are estimated. Configs that are wrong, do not fit,
    fail or lose to the default in a bucket do not count there. A config that is faster there than
    the bucket's own winner counts as equally fast: the search had its reasons.

    Not so an entry that was estimated, once a round has measured it: there the times decide, the
    default's too, and the entry is measured from then on.

    An entry that gets another config is of `run`, and its searched winner becomes the first
    runner-up. One that keeps its config keeps its times, except for the regret. Some entries do not
    change, though others may take their configs: those whose own config cannot be timed any more,
    and measured ones if the evaluator only estimates. Untimed ones play no part. Outcomes come from
    `log` and go there. Raises InvalidArgument, and the errors of evaluator and log.
    """
    if len({entry.spec for entry in entries}) > 1:
        raise InvalidArgument("entries must be of one spec: got several")
    timed = [entry for entry in entries if entry.result.source != "untimed"]
    own = (config for entry in timed for config in _winners(entry))
    may = [c for c in (*own, *rivals) if evaluator.source == "measured" or not c.executed]
    winners = list(dict.fromkeys(may))
    if len(timed) < 2 or len(winners) < 2:
        return tuple(entries)
    weight = STRENGTH[evaluator.source]
    cases = {
        entry.bucket: _case(entry, winners, evaluator, log)
        for entry in timed
        if STRENGTH[entry.result.source] <= weight
    }
    cases = {b: case for b, case in cases.items() if case.entry.config in case.outcomes}
    times: dict[Bucket, Mapping[KernelConfig, float | None]] = {
        entry.bucket: cases[entry.bucket].times if entry.bucket in cases else {entry.config: 1.0}
        for entry in timed
    }
    chosen = smallest_set(times, max_regret)
    new = {bucket: _entry(case, chosen[bucket], run) for bucket, case in cases.items()}
    return tuple(new.get(entry.bucket, entry) for entry in entries)


def _winners(entry: Entry) -> tuple[KernelConfig, ...]:
    """The config that the search of a bucket chose, then the bucket's current one if it differs.

    If a regret was paid before, the first runner-up is the one it was relative to. So regrets
    always refer to that one and do not accumulate from run to run.
    """
    searched = entry.evidence.runners_up[:1] if entry.evidence.regret else ()
    return tuple(dict.fromkeys((*(other.config for other in searched), entry.config)))


@dataclass(frozen=True, kw_only=True)
class _Case:
    """One bucket: its entry, and the winners that were timed there, with all their facts."""

    entry: Entry
    outcomes: Mapping[KernelConfig, Outcome]
    default: Outcome | None
    stronger: bool
    """Whether these times are measured and the entry's was not: what is faster here, is faster."""

    def us(self, config: KernelConfig) -> float:
        """The time of a config here; infinite if it has none."""
        outcome = self.outcomes.get(config)
        return median_us(outcome.timing if outcome else None)

    @property
    def times(self) -> dict[KernelConfig, float | None]:
        """The configs that may serve here, the bucket's own first; none counts as faster than
        that, unless these times are the stronger ones. Of a decode none is slower by more than TIE,
        or than the bucket's own is, for any number of sequences.
        """
        own = _winners(self.entry)
        best = 0.0 if self.stronger else min(self.us(config) for config in own)
        lost = losses(self.outcomes.values())
        most = max(TIE, *(lost.get(config, 0.0) for config in own))
        slowest = math.inf if self.default is None else median_us(self.default.timing)
        order = dict.fromkeys((*own, *self.outcomes))
        return {
            config: max(best, self.us(config))
            for config in order
            if config in own or (self.us(config) <= slowest and lost[config] <= most)
            if self.us(config) < math.inf
        }


def _case(entry: Entry, winners: Sequence[KernelConfig], evaluator: Evaluator, log: Log) -> _Case:
    """Time all winners in the bucket of an entry."""
    default = tuned_default(entry.spec, evaluator.gpu)
    goal = Goal(
        spec=entry.spec,
        problem=entry.problem,
        legal=tuple(winners),
        seeds=(),
        default=default,
    )
    evidence = Evidence(goal, evaluator, log, notify=lambda _: None)
    configs = list(dict.fromkeys((*winners, default)))
    for stage in ("compile", "check"):
        configs = [o.config for o in evidence.ask(stage, configs) if o.ok]
    configs = [config for config in configs if evidence.twin_serves(config)]
    timed = evidence.ask_round(configs) if evidence.on_gpu else evidence.ask("timed", configs)
    found = {outcome.config: evidence.full(outcome.config) for outcome in timed if outcome.ok}
    stronger = STRENGTH[entry.result.source] < STRENGTH[evaluator.source]
    serving = configs if stronger else winners
    return _Case(
        entry=entry,
        outcomes={config: found[config] for config in serving if config in found},
        default=found.get(default),
        stronger=stronger,
    )


def _entry(case: _Case, config: KernelConfig, run: str) -> Entry:
    """The entry of a bucket with `config`."""
    entry, times = case.entry, case.times
    best, us = min(filter(None, times.values())), times[config]
    assert us is not None
    regret = round(us / best - 1, 5)  # a thousandth of a percent
    if config == entry.config and not case.stronger:
        return replace(entry, evidence=replace(entry.evidence, regret=regret))
    outcome = case.outcomes[config]
    held = [case.default] if case.default else []
    finals = list(dict.fromkeys((*case.outcomes.values(), *held)))
    evidence = replace(
        entry.evidence,
        problem=entry.problem,
        p_value=p_value(outcome, finals, held),
        regret=regret,
        runners_up=_runners_up(case, config),
    )
    return entry_with(entry.spec, evidence, outcome, case.default, run)


def _runners_up(case: _Case, config: KernelConfig) -> tuple[RunnerUp, ...]:
    """The bucket's own winners with their new times, then their runners-up. If the times are
    stronger than the entry's, all that were timed, the fastest first.
    """
    raced = sorted(case.outcomes, key=case.us) if case.stronger else _winners(case.entry)
    now = [runner_up_of(case.outcomes[own]) for own in raced if own in case.outcomes]
    unlike: dict[KernelConfig, RunnerUp] = {}
    for other in (*now, *case.entry.evidence.runners_up):
        unlike.setdefault(other.config, other)
    unlike.pop(config, None)
    return tuple(unlike.values())[:RUNNERS_UP]
