"""Curves of regret, and figures that sum up contenders over landscapes.

`score` is the performance score of Willemsen et al., A Methodology for Comparing Auto-Tuning
Optimization Algorithms (Future Generation Computer Systems, 2024), over evaluations instead of
seconds: 0 is a random search, 1 finds the best at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.recorded import Landscape

RESAMPLES = 2000
LEAST, MOST = 1e-3, 10.0
"""What regrets are clipped to before a geometric mean."""

WORST_AT = 80
CUTOFF_START, CUTOFF = 0.01, 0.95
"""A score begins and ends where a random search is expected to have come this part of the way from
the median to the best.
"""

Regrets = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Regrets of one contender after 1, 2, ... evaluations: their median, and its band."""

    contender: str
    runs: int
    median: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    score: float | None = None

    def text(self, after: int) -> str:
        """The figures after so many evaluations, in per cent."""
        place = after - 1
        median, low, high = self.median[place], self.low[place], self.high[place]
        return f"{per_cent(median)} [{per_cent(low)}, {per_cent(high)}]"


def curve_of(name: str, landscape: Landscape, regrets: Regrets) -> Curve:
    """The curve of these regrets (runs x evaluations), with a band of 95 % by the percentile
    bootstrap.
    """
    draws = np.random.default_rng(0).integers(len(regrets), size=(RESAMPLES, len(regrets)))
    medians = np.median(regrets[draws], axis=1)
    low, high = np.quantile(medians, (0.025, 0.975), axis=0, method="nearest")
    return Curve(
        contender=name,
        runs=len(regrets),
        median=tuple(np.median(regrets, axis=0).tolist()),
        low=tuple(low.tolist()),
        high=tuple(high.tolist()),
        score=score(landscape, regrets),
    )


def per_cent(regret: float) -> str:
    """A regret as a table shows it."""
    return f"{100 * regret:.1f}" if math.isfinite(regret) else "-"


def score(landscape: Landscape, regrets: Regrets) -> float | None:
    """The performance score of runs (runs x evaluations); None where a random search would be done
    after two evaluations.

    It ends with the evaluations at hand where the cutoff is later. The random search draws legal
    configs only, as in the methodology; the failures of a contender count as evaluations.
    """
    times = sorted((time for time in landscape.times if time is not None), reverse=True)
    first, last = (_evaluations(times, part) for part in (CUTOFF_START, CUTOFF))
    last = min(last, regrets.shape[1])
    if last - first < 1:
        return None
    best, count = landscape.best, len(times)
    mean = np.mean(best * (1 + np.minimum(regrets, times[0] / best - 1)), axis=0)
    parts = []
    for after in range(max(1, first), last + 1):
        random = times[min(count - 1, round(after * (count + 1) / (after + 1)))]
        if random > best:
            parts.append((random - mean[after - 1]) / (random - best))
    return float(np.mean(parts)) if parts else None


def _evaluations(times: Sequence[float], part: float) -> int:
    """After how many evaluations a random search is expected to have come this part of the way.
    times: slowest first.
    """
    best, count = times[-1], len(times)
    goal = best + (float(np.median(times)) - best) * (1 - part)
    place = next(number for number, time in enumerate(times) if time <= goal)
    if times[place] == best:
        place = max(0, place - 1)
    return math.ceil(place / (count + 1 - place))


def summary(found: Sequence[Sequence[Curve]], at: Sequence[int]) -> list[dict[str, object]]:
    """One record a contender, over the landscapes that all of them have: the geometric means of
    its median regrets after `at` evaluations, its worst median after WORST_AT, and its mean score.
    """
    names = [curve.contender for curve in found[0]] if found else []
    records: list[dict[str, object]] = []
    for name in names:
        curves = [curve for curves in found for curve in curves if curve.contender == name]
        scores = [curve.score for curve in curves if curve.score is not None]
        medians = np.array([[curve.median[after - 1] for after in at] for curve in curves])
        means = np.exp(np.log(np.clip(medians, LEAST, MOST)).mean(axis=0))
        records.append(
            {
                "contender": name,
                "landscapes": len(curves),
                "geometric_mean": [round(float(mean), 5) for mean in means],
                "worst": round(max(curve.median[WORST_AT - 1] for curve in curves), 5),
                "score": round(float(np.mean(scores)), 3) if scores else None,
            }
        )
    return records


def summary_table(records: Sequence[dict[str, object]], at: Sequence[int]) -> str:
    """Markdown of a summary: a row a contender."""
    head = " | ".join(f"after {after}" for after in at)
    rows = [
        f"| geometric mean of median regrets, % | {head} | worst after {WORST_AT} | score |",
        "|---" * (len(at) + 3) + "|",
    ]
    for record in records:
        means = record["geometric_mean"]
        assert isinstance(means, list)
        figures = [per_cent(mean) for mean in [*means, record["worst"]]]
        of_score = "-" if record["score"] is None else f"{record['score']:.2f}"
        rows.append(f"| {record['contender']} | {' | '.join([*figures, of_score])} |")
    return "\n".join(rows)
