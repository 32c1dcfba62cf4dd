"""The searches of a log, for reports: what each config took, or why it failed."""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from flashgen.evaluate.evaluator import SLOW
from flashgen.schedules.config import KernelConfig
from flashgen.schedules.outcome import Outcome, Source, Stage, Status, Timing
from flashgen.search.evidence import ALL_STAGES, RIGHT_ALL_THE_SAME
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.problem import Problem
from flashgen.table.entry import Entry, Run

TIMED_STAGES: tuple[Stage, ...] = ("final", "timed", "rough")
"""The most trusted first. Times of two stages do not compare."""

SEARCH_STAGES: tuple[Stage, ...] = ("rough", "timed")
"""The stages that time a config for the search, the more trusted last. A final round times only a
few configs, and under other conditions."""


@dataclass(frozen=True, kw_only=True)
class TimedConfig:
    """One config's time in a search. estimate_us: the estimate of a measured one, if there is one.

    dropped: it was timed roughly, found far slower than the best, and not timed further.
    """

    config: KernelConfig
    us: float
    estimate_us: float | None
    dropped: bool


class SearchHistory:
    """The outcomes of one search, whose times compare. Of a config timed again, the last counts."""

    def __init__(self, outcomes: Iterable[Outcome]) -> None:
        self._known = {(outcome.config, outcome.stage): outcome for outcome in outcomes}

    @property
    def configs(self) -> list[KernelConfig]:
        """Every config with an outcome, in the order of the log."""
        return list(dict.fromkeys(config for config, _ in self._known))

    def timing(self, config: KernelConfig, stage: Stage) -> Timing | None:
        """The time of a stage."""
        found = self._known.get((config, stage))
        return found.timing if found else None

    def last_timing(self, config: KernelConfig) -> Timing | None:
        """The most trusted time of a config."""
        times = (self.timing(config, stage) for stage in TIMED_STAGES)
        return next((timing for timing in times if timing), None)

    def least_us(self) -> float:
        """The least time of a config that never failed, in microseconds; infinite without one."""
        times = (self.last_timing(c) for c in self.configs if self.failure(c) is None)
        return min((timing.median_us for timing in times if timing), default=math.inf)

    def failure(self, config: KernelConfig) -> Outcome | None:
        """The outcome that ended a config, if any."""
        outcomes = (self._known.get((config, stage)) for stage in ALL_STAGES)
        ended = (o for o in outcomes if o and not o.ok and o.status not in RIGHT_ALL_THE_SAME)
        return next(ended, None)

    def twin_failure(self, spec: AttentionSpec, config: KernelConfig) -> Outcome | None:
        """The outcome that ended a config's pointer twin, so that neither could be chosen."""
        twin = config.pointer_twin(spec)
        found = self.failure(twin) if twin != config else None
        return None if found is None or found.status in SLOW else found

    def fact(self, config: KernelConfig, name: str) -> int | None:
        """A figure of the compiler: registers or spill_bytes."""
        outcomes = (self._known.get((config, stage)) for stage in ALL_STAGES)
        values = (getattr(outcome, name) for outcome in outcomes if outcome)
        return next((value for value in values if value is not None), None)

    def tally(self) -> str:
        """The results of all configs in a few words: "60 configs: 52 timed, 8 spills"."""
        ends: Counter[str] = Counter()
        for config in self.configs:
            failed = self.failure(config)
            timed = "timed" if self.last_timing(config) else "not timed"
            ends[str(failed.status) if failed else timed] += 1
        return f"{len(self.configs)} configs: " + ", ".join(
            f"{number} {end}" for end, number in ends.most_common()
        )

    @property
    def points(self) -> tuple[TimedConfig, ...]:
        """The timed configs in the order in which they were first timed."""
        points: dict[KernelConfig, TimedConfig] = {}
        for (config, stage), outcome in self._known.items():
            right = outcome.status in (Status.OK, Status.DROPPED)
            if stage in SEARCH_STAGES and right and outcome.timing is not None:
                points[config] = TimedConfig(
                    config=config,
                    us=outcome.timing.median_us,
                    estimate_us=_estimate_us(outcome),
                    dropped=outcome.status is Status.DROPPED,
                )
        return tuple(points.values())

    @property
    def timed(self) -> Outcome | None:
        """One outcome with a time: all have its source and its problem."""
        return next((outcome for outcome in self._known.values() if outcome.timing), None)

    @property
    def failed(self) -> dict[str, int]:
        """How many configs ended in which failure, the most frequent first."""
        ends = (self.failure(config) for config in self.configs)
        return dict(Counter(str(end.status) for end in ends if end).most_common())

    @property
    def times_us(self) -> dict[KernelConfig, float]:
        """The time of each timed config."""
        return {point.config: point.us for point in self.points}

    @property
    def best_us(self) -> list[float]:
        """The best time so far, after each point."""
        return list(itertools.accumulate((point.us for point in self.points), min))

    @property
    def tiles_us(self) -> dict[tuple[int, int], float]:
        """The best time of each tile, (br, bc), that was timed."""
        tiles: dict[tuple[int, int], float] = {}
        for point in self.points:
            tile = point.config.br, point.config.bc
            tiles[tile] = min(point.us, tiles.get(tile, point.us))
        return tiles


class Searches:
    """The searches of a log. One pass over its outcomes serves all entries of a table."""

    def __init__(self, outcomes: Iterable[Outcome]) -> None:
        self._of_spec: dict[AttentionSpec, list[Outcome]] = defaultdict(list)
        for outcome in outcomes:
            self._of_spec[outcome.spec].append(outcome)

    def of(self, entry: Entry, run: Run | None) -> SearchHistory:
        """The search that produced an entry of `run`; it may be empty, and is where the entry's
        evidence, which names the run, is missing.

        A log knows outcomes, no searches. Those of another Triton are left out, and times of
        another problem, protocol or source.
        """
        if run is None:
            return SearchHistory(())
        return self._search(
            entry.spec, run.triton, entry.problem, run.protocol, entry.result.source
        )

    def latest(self, entry: Entry) -> SearchHistory:
        """The last search that timed configs for an entry, of any run: where the entry stayed, its
        own time is older. It may be empty.
        """
        for outcome in reversed(self._of_spec[entry.spec]):
            timed = outcome.stage in SEARCH_STAGES and outcome.timing is not None
            if timed and outcome.problem.seq_k in entry.bucket:
                return self._search(
                    entry.spec, outcome.triton, outcome.problem, outcome.protocol, outcome.source
                )
        return SearchHistory(())

    def _search(
        self, spec: AttentionSpec, triton: str, problem: Problem, protocol: int, source: Source
    ) -> SearchHistory:
        def belongs(outcome: Outcome) -> bool:
            if outcome.triton != triton:
                return False
            found = outcome.problem, outcome.protocol, outcome.source
            return outcome.stage in ("compile", "check") or found in (
                (problem, protocol, source),
                (problem, protocol, "untimed"),
            )

        return SearchHistory(filter(belongs, self._of_spec[spec]))


def _estimate_us(outcome: Outcome) -> float | None:
    """The estimate of a config that was measured."""
    if outcome.source == "estimated" or outcome.estimate is None:
        return None
    return outcome.estimate.median_us
