"""Errors of estimates compared with measurements: ranks, regret and time, from logs of GPUs.

Configs compare within one search: one spec and problem, on one GPU, under one Triton and one
measuring protocol. The estimates are those in the log, made before the kernels were measured;
nothing is estimated again, and no parameter of the model changes.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from flashgen.errors import FlashgenError
from flashgen.schedules.base import Loads
from flashgen.schedules.outcome import Outcome, Timing
from flashgen.search.decide import spearman
from flashgen.search.log import outcomes_of
from flashgen.spec.vocabulary import Direction

LEAST_CONFIGS = 5
"""Ranks and regrets of searches with fewer configs mean nothing and are not counted."""

PICKS = 3
"""The table keeps a winner and two runners-up: who measures so many first picks gets the best."""

TRUST: dict[str, int] = {"rough": 0, "final": 1, "timed": 2}
"""Which of a config's measurements counts. Timed is what most configs of a search have, under one
procedure; a final round has but a few, and rough samples are those of the dropped."""


def family_of(direction: Direction, schedule: str, loads: Loads) -> str:
    """The family's name: "fa2 pointer" of the forward, "dkv fa2 pointer" of backward_dkv."""
    backward = "" if direction == "forward" else f"{direction.removeprefix('backward_')} "
    return f"{backward}{schedule} {loads}"


@dataclass(frozen=True, kw_only=True)
class MeasuredEstimate:
    """The outcome of one kernel that was measured, its estimate and its measurement."""

    outcome: Outcome
    estimate: Timing
    measured_us: float

    @property
    def family(self) -> str:
        """Kernels that the model treats alike, by family_of."""
        o = self.outcome
        return family_of(o.spec.direction, o.config.schedule, o.config.loads)

    @property
    def search(self) -> tuple[object, ...]:
        """The search within which its time compares."""
        o = self.outcome
        return o.gpu, o.triton, o.protocol, o.spec, o.problem

    @property
    def ratio(self) -> float:
        """Measured over estimated."""
        return self.measured_us / self.estimate.median_us

    @property
    def in_band(self) -> bool:
        """Whether the measurement lies in the band of the estimate."""
        return self.estimate.low_us <= self.measured_us <= self.estimate.high_us


@dataclass(frozen=True, kw_only=True)
class Miss:
    """The first pick of one search, and its best config, both as measured."""

    first: MeasuredEstimate
    best: MeasuredEstimate

    @property
    def regret(self) -> float:
        """How much slower the first pick is: 0.04 is 4 %."""
        return self.first.measured_us / self.best.measured_us - 1


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Statistics of the pairs of one GPU, or of one family of them (None: of all).

    searches are those with at least LEAST_CONFIGS configs. rank (Spearman) is the mean over them,
    regrets are geometric means and worst cases; None without such a search, and rank also if all
    times of each are equal. Errors are factors in either direction, as their excess over 1: 0.25
    means that the estimate was 1.25 times too long or too short. off is the median of measured over
    estimated.
    """

    family: str | None
    configs: int
    searches: int
    rank: float | None
    first: float | None
    worst: Miss | None
    best_of_three: float | None
    worst_of_three: float | None
    off: float
    error: float
    error_90: float
    in_band: float


def pairs_of(outcomes: Iterable[Outcome]) -> tuple[list[MeasuredEstimate], int]:
    """The configs that were measured and estimated, one Pair each; and the number that were only
    measured.

    Of a config's measurements the most trusted counts, and of several such ones the last.
    """
    chosen: dict[tuple[object, ...], Outcome] = {}
    for outcome in outcomes:
        if outcome.source != "measured" or outcome.timing is None or outcome.stage not in TRUST:
            continue
        kernel = outcome.gpu, outcome.triton, outcome.protocol, outcome.digest
        key = (*kernel, outcome.spec, outcome.problem, outcome.config)
        held = chosen.get(key)
        if held is None or TRUST[outcome.stage] >= TRUST[held.stage]:
            chosen[key] = outcome
    pairs = [
        MeasuredEstimate(
            outcome=outcome, estimate=outcome.estimate, measured_us=outcome.timing.median_us
        )
        for outcome in chosen.values()
        if outcome.estimate and outcome.timing
    ]
    return pairs, len(chosen) - len(pairs)


def read_pairs(
    logs: Sequence[Path], say: Callable[[str], None]
) -> dict[str, list[MeasuredEstimate]]:
    """The pairs of these logs, by the slug of their GPU. Notices say what is left out.

    Raises InvalidArgument for a log that does not exist, FlashgenError for one that cannot be read,
    and if there is no pair at all.
    """
    outcomes = [outcome for log in logs for outcome in outcomes_of(log, say)]
    pairs, alone = pairs_of(outcomes)
    names = ", ".join(map(str, logs))
    if not pairs and not alone:
        raise FlashgenError(
            f"no outcome of {names} was measured, {len(outcomes)} outcomes in all: "
            "name a log that flashgen tune --gpu wrote"
        )
    if not pairs:
        raise FlashgenError(
            f"no measured config of {names} has an estimate, of {alone} configs in all: "
            "measure them again with flashgen tune --gpu"
        )
    if alone:
        say(f"{alone} measured configs have no estimate and are left out.")
    return by_gpu(pairs)


def by_gpu(pairs: Iterable[MeasuredEstimate]) -> dict[str, list[MeasuredEstimate]]:
    """The pairs of each GPU, by slug."""
    found: dict[str, list[MeasuredEstimate]] = defaultdict(list)
    for pair in pairs:
        found[pair.outcome.gpu].append(pair)
    return dict(sorted(found.items()))


def calibrations(pairs: Sequence[MeasuredEstimate]) -> list[Calibration]:
    """For the pairs of one GPU: the Calibration of all, then those of the families, by name."""
    families = sorted({pair.family for pair in pairs})
    each = [calibration([p for p in pairs if p.family == family], family) for family in families]
    return [calibration(pairs), *each]


def calibration(pairs: Sequence[MeasuredEstimate], family: str | None = None) -> Calibration:
    """The statistics of these pairs, at least one, all of one GPU."""
    searches: dict[tuple[object, ...], list[MeasuredEstimate]] = defaultdict(list)
    for pair in pairs:
        searches[pair.search].append(pair)
    large = [search for search in searches.values() if len(search) >= LEAST_CONFIGS]
    ranks = [rank for search in large if (rank := _rank(search)) is not None]
    misses = [_miss(search) for search in large]
    of_three = [_regret_of_three(search) for search in large]
    errors = sorted(math.exp(abs(math.log(pair.ratio))) - 1 for pair in pairs)
    return Calibration(
        family=family,
        configs=len(pairs),
        searches=len(large),
        rank=statistics.fmean(ranks) if ranks else None,
        first=_geometric([miss.regret for miss in misses]),
        worst=max(misses, key=lambda miss: miss.regret, default=None),
        best_of_three=_geometric(of_three),
        worst_of_three=max(of_three, default=None),
        off=statistics.median(pair.ratio for pair in pairs),
        error=statistics.median(errors),
        error_90=errors[math.ceil(0.9 * len(errors)) - 1],  # nine in ten are no further off
        in_band=sum(pair.in_band for pair in pairs) / len(pairs),
    )


def _rank(search: Sequence[MeasuredEstimate]) -> float | None:
    return spearman(
        [pair.estimate.median_us for pair in search], [pair.measured_us for pair in search]
    )


def _miss(search: Sequence[MeasuredEstimate]) -> Miss:
    return Miss(
        first=min(search, key=lambda pair: pair.estimate.median_us),
        best=min(search, key=lambda pair: pair.measured_us),
    )


def _regret_of_three(search: Sequence[MeasuredEstimate]) -> float:
    picks = sorted(search, key=lambda pair: pair.estimate.median_us)[:PICKS]
    best = min(pair.measured_us for pair in search)
    return min(pair.measured_us for pair in picks) / best - 1


def _geometric(regrets: Sequence[float]) -> float | None:
    """The geometric mean of factors, given and returned as their excess over 1."""
    if not regrets:
        return None
    return math.exp(statistics.fmean(math.log1p(regret) for regret in regrets)) - 1


def table_lines(rows: Sequence[Calibration]) -> list[str]:
    """Calibrations as a table of 80 columns, one per row; LEGEND explains its columns."""
    width = max(18, *(len(row.family or "") for row in rows))
    cells = f"{{:<{width}}} " + "{:>8}  {:>5}  {:>5} {:>5}  {:>5} {:>5}  {:>6} {:>4} {:>4}"
    heads = (
        ("", "configs/", "rank", "first", "pick ", "best", "of 3 ", "time", "err.", "in"),
        ("family", "searches", "corr.", "mean", "worst", "mean", "worst", "median", "90th", "band"),
    )
    return [cells.format(*cells_of_row).rstrip() for cells_of_row in (*heads, *map(_cells, rows))]


def _cells(row: Calibration) -> tuple[str, ...]:
    worst = None if row.worst is None else row.worst.regret
    return (
        row.family or "all",
        f"{row.configs}/{row.searches}",
        "-" if row.rank is None else f"{row.rank:.2f}",
        *map(_percent, (row.first, worst, row.best_of_three, row.worst_of_three)),
        f"{row.error * 100:.0f}",
        f"{row.error_90 * 100:.0f}",
        f"{row.in_band * 100:.0f}",
    )


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value * 100:.1f}"


def remarks(row: Calibration) -> list[str]:
    """Sentences that explain the statistics of a GPU."""
    found = [f"Measured times are {row.off:.2f} times the estimated ones, in the median."]
    if row.worst is None:
        found.append(
            f"No search has {LEAST_CONFIGS} measured configs, which ranks and regret need."
        )
    elif row.worst.regret:
        first, best = row.worst.first.outcome, row.worst.best.outcome
        found.append(
            f"Worst first pick: {first.config.label}, {row.worst.regret:.1%} slower than "
            f"{best.config.label} ({first.spec.name} seq {first.problem.seq_k})."
        )
    return found


LEGEND = f"""\
configs/searches  measured configs, and the searches (one spec and problem each)
                  with {LEAST_CONFIGS} of them or more, over which ranks and picks are taken
rank corr.        Spearman's correlation of estimate and measurement, the mean
first pick        % slower than the measured best: geometric mean, worst search
best of {PICKS}         the same, had the {PICKS} first picks been measured
time error        % too long or too short: median, 90th percentile
in band           % of configs measured within the band of their estimate"""
"""What the columns of table_lines hold."""
