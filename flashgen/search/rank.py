"""Rank: what estimates decide. On a GPU the order of measuring, with no GPU the choice.

Pure functions of outcomes. On a GPU:

  - Seeds without an estimate come first, in the order of the seeds: what only a GPU can judge leads
    them.
  - Promising are all within PROMISING of the least estimate, in the order of their estimates. Seeds
    and default are promising whatever their estimates.
  - Among the promising, a config without an estimate keeps the place at which it was given: that is
    the opinion of whoever proposed it, and the only one there is.
  - The others are postponed, in the order of their estimates.
  - A config cannot win where the lower edge of its band, times the least measured/estimated ratio
    seen so far, lies above the best measured time.

With no GPU:

  - All within TIE of the best estimate are equally good as far as anyone knows. Of these come first
    the ones that spill nothing at all, then those that most neighbours share, then those with fewer
    registers, then those with the lower estimate.
  - The others follow in the order of their estimates; last, those of which there is none.

The order in which configs are given decides what is left open.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence

from flashgen.config import KernelConfig
from flashgen.outcome import Outcome, Timing

PROMISING = 1.5
"""So many times the least estimate. An earlier study, with another model of one SM, saw none of 834
landscapes lose its winner to this limit, and one to 1.3. They are not kept here, and with the
model of scoreboard.py nobody has looked again."""

ENOUGH_RATIOS = 8
"""Measured configs with an estimate, before the ratio of the two is believed."""

TIE = 1.05
"""Estimates closer to the best are not told apart: the estimator errs by more than this."""


def median_us(timing: Timing | None) -> float:
    """The median in microseconds; infinite where there is none."""
    return timing.median_us if timing else math.inf


def to_measure(
    compiled: Sequence[Outcome], least_us: float, always: Collection[KernelConfig]
) -> tuple[list[Outcome], list[Outcome]]:
    """The promising and the postponed of these compiled configs, each in the order of measuring.

    least_us is the least estimate that is known. always: configs that must be measured.
    """

    def slow(outcome: Outcome) -> bool:
        far = outcome.estimate is not None and outcome.estimate.median_us > PROMISING * least_us
        return far and outcome.config not in always

    def blind_seed(outcome: Outcome) -> bool:
        return outcome.estimate is None and outcome.config in always

    rest = [outcome for outcome in compiled if not slow(outcome) and not blind_seed(outcome)]
    ranked = iter(_ranked(outcome for outcome in rest if outcome.estimate))
    promising = [next(ranked) if outcome.estimate else outcome for outcome in rest]
    return [*filter(blind_seed, compiled), *promising], _ranked(filter(slow, compiled))


def _ranked(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """In the order of their estimates."""
    return sorted(outcomes, key=lambda outcome: median_us(outcome.estimate))


def can_win(estimate: Timing | None, measured: Sequence[tuple[float, float]]) -> bool:
    """Whether a config might be faster than all (estimated, measured) medians, in microseconds."""
    if estimate is None or len(measured) < ENOUGH_RATIOS:
        return True
    ratio = min(actual / estimated for estimated, actual in measured)
    return estimate.low_us * ratio <= min(actual for _, actual in measured)


def by_estimate(timed: Sequence[Outcome], neighbours: Sequence[KernelConfig] = ()) -> list[Outcome]:
    """The order of choice with no GPU: timing is the estimate. neighbours may name one twice."""
    ordered = sorted(timed, key=lambda outcome: median_us(outcome.timing))
    limit = TIE * median_us(ordered[0].timing) if ordered else 0.0
    tied = [outcome for outcome in ordered if median_us(outcome.timing) <= limit < math.inf]

    def robust(outcome: Outcome) -> tuple[float, ...]:
        registers = math.inf if outcome.registers is None else outcome.registers
        shared_by = neighbours.count(outcome.config)
        return bool(outcome.spill_bytes), -shared_by, registers, median_us(outcome.timing)

    return sorted(tied, key=robust) + ordered[len(tied) :]
