"""Trace: the history of one search, read from the log.

The log has only outcomes. Those of an entry's search have its spec, problem and source, and the
Triton and protocol of its run. Of a config timed again, the last one counts.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from flashgen.spec.attention import AttentionSpec
from flashgen.spec.config import KernelConfig
from flashgen.spec.outcome import Outcome, Stage, Status
from flashgen.table.entry import Entry, Run

TIMING: tuple[Stage, ...] = ("rough", "timed")
"""The stages that time a config for the search, the more trusted last. A final round times but a
few, and under other conditions."""


@dataclass(frozen=True, kw_only=True)
class TimedConfig:
    """One config's time in a search. estimate_us: the estimate of a measured one, if there is one.

    dropped: it was timed roughly, found far slower than the best, and not timed further.
    """

    config: KernelConfig
    us: float
    estimate_us: float | None
    dropped: bool


@dataclass(frozen=True, kw_only=True)
class Trace:
    """The points of a search in the order in which they were timed, and why others were not.

    failed: how many configs of the spec ended with which status, in any search of it.
    """

    points: tuple[TimedConfig, ...]
    failed: Mapping[str, int]

    @property
    def times_us(self) -> dict[KernelConfig, float]:
        """The time of each config."""
        return {point.config: point.us for point in self.points}

    @property
    def best_us(self) -> list[float]:
        """The best time so far, after each point."""
        best: list[float] = []
        for point in self.points:
            best.append(min([point.us, *best[-1:]]))
        return best

    @property
    def tiles_us(self) -> dict[tuple[int, int], float]:
        """The best time of each tile, (br, bc), that was timed."""
        tiles: dict[tuple[int, int], float] = {}
        for point in self.points:
            tile = point.config.br, point.config.bc
            tiles[tile] = min(point.us, tiles.get(tile, point.us))
        return tiles


class Traces:
    """The traces of a log. One pass over its outcomes serves all entries of a table."""

    def __init__(self, outcomes: Iterable[Outcome]) -> None:
        self._of_spec: dict[AttentionSpec, list[Outcome]] = defaultdict(list)
        for outcome in outcomes:
            self._of_spec[outcome.spec].append(outcome)

    def of(self, entry: Entry, run: Run) -> Trace:
        """The trace of the search that produced an entry of `run`; it may be empty."""
        points: dict[KernelConfig, TimedConfig] = {}
        ended: dict[KernelConfig, Status] = {}
        for outcome in self._of_spec[entry.spec]:
            if outcome.triton != run.triton:
                continue
            ended[outcome.config] = outcome.status
            if self._is_of(outcome, entry, run) and outcome.timing is not None:
                points[outcome.config] = TimedConfig(
                    config=outcome.config,
                    us=outcome.timing.median_us,
                    estimate_us=_estimate_us(outcome),
                    dropped=outcome.status is Status.DROPPED,
                )
        fine = Status.OK, Status.DROPPED, Status.NO_ESTIMATE
        failed = Counter(str(status) for status in ended.values() if status not in fine)
        return Trace(points=tuple(points.values()), failed=dict(failed.most_common()))

    @staticmethod
    def _is_of(outcome: Outcome, entry: Entry, run: Run) -> bool:
        """Whether it is a time of the entry's search."""
        return (
            outcome.stage in TIMING
            and outcome.status in (Status.OK, Status.DROPPED)
            and outcome.problem == entry.result.problem
            and (outcome.source, outcome.protocol) == (entry.result.source, run.protocol)
        )


def _estimate_us(outcome: Outcome) -> float | None:
    """The estimate of a config that was measured."""
    if outcome.source == "estimated" or outcome.estimate is None:
        return None
    return outcome.estimate.median_us
