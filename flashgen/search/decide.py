"""The decisions of a search: the order in which configs are measured, and which one is chosen.

The rule of the final round: a challenger is chosen only if it beats both the incumbent and the
default significantly; among several, the first of by_loss. Otherwise the default is chosen if it
beats the incumbent significantly, else the incumbent stays. The test compares the passes of the
round in pairs, because both candidates of a pass ran at the same clock:

  - Wilcoxon's signed-rank test (Biometrics Bulletin 1, 1945), one-sided, on the logarithms of the
    ratios. It assumes no normal noise, and one disturbed pass counts as one.
  - The null hypothesis is "not faster by SMALLEST_EFFECT". The position in a round biases a pass by
    an amount that more passes do not average out, and a smaller gain is not worth a review.
  - A challenger's p is the larger of its two comparisons. The default counts as a challenger of
    the incumbent. For their number, p values are corrected by Holm's step-down (Scandinavian
    Journal of Statistics 6, 1979), so LEVEL bounds the chance of any mistake in a round.

Equal passes, or too few for LEVEL, prove nothing.
"""

from __future__ import annotations

import functools
import math
import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Sequence

from flashgen.schedules.base import BY_KEYS
from flashgen.schedules.config import KernelConfig
from flashgen.schedules.outcome import Outcome, Timing

LEVEL = 0.01
"""One final round in a hundred, at most, may replace an incumbent by what is not faster. Ten
passes, the least of a round, can still reach it with ten challengers."""

SMALLEST_EFFECT = 0.005
"""The share of its time by which a challenger must be faster, at least. Chosen, not measured."""

LEAST_P = 1e-6
"""Lower bound of p values: further out neither noise nor the test follows its assumptions."""


def choose(finals: Sequence[Outcome], held: Sequence[Outcome]) -> Outcome | None:
    """The winner of a final round, by the rule above. finals are in the order of by_loss() and
    include `held`.

    held: the incumbent, if any, then the default, if they ran. None if nothing ran.
    """
    if not held:
        return finals[0] if finals else None
    p_of = _corrected(finals, held)
    beating = [o for o in finals if p_of.get(o.config, 1.0) <= LEVEL]
    winner = next((o for o in beating if o not in held), None)
    return winner or (held[-1] if held[-1] in beating else held[0])


def p_value(winner: Outcome, finals: Sequence[Outcome], held: Sequence[Outcome]) -> float | None:
    """The p of a round's winner against the strongest of the others in `held`.

    A challenger's p is corrected; that of an incumbent that stays is not. None if there is nothing
    else in `held`, or these are times of no round.
    """
    others = _others(winner, held)
    if not others or not all(outcome.passes_us for outcome in finals):
        return None
    stays = winner.config == held[0].config
    p = _largest_p(winner, others) if stays else _corrected(finals, held)[winner.config]
    return max(LEAST_P, p)


@functools.lru_cache(maxsize=256)
def p_faster(challenger: tuple[float, ...], other: tuple[float, ...]) -> float:
    """The p of "not faster by SMALLEST_EFFECT", from the times of common passes in microseconds."""
    shift = math.log1p(SMALLEST_EFFECT)
    ratios = [math.log(a / b) + shift for a, b in zip(challenger, other, strict=True)]
    if not any(ratios):
        return 1.0
    from scipy import stats  # takes a second

    return float(stats.wilcoxon(ratios, alternative="less").pvalue)


def _others(outcome: Outcome, held: Sequence[Outcome]) -> list[Outcome]:
    return [other for other in held if other.config != outcome.config]


def _corrected(finals: Sequence[Outcome], held: Sequence[Outcome]) -> dict[KernelConfig, float]:
    """Each challenger's p against the stronger of those it must beat, by Holm's step-down."""
    alone = {
        each.config: _largest_p(each, _others(each, held))
        for each in finals
        if each.config != held[0].config  # the incumbent or, without one, the default
    }
    least, corrected = 0.0, {}
    for place, config in enumerate(sorted(alone, key=alone.__getitem__)):
        least = max(least, min(1.0, (len(alone) - place) * alone[config]))
        corrected[config] = least
    return corrected


def _largest_p(outcome: Outcome, others: Sequence[Outcome]) -> float:
    return max(p_faster(outcome.passes_us, other.passes_us) for other in others)


PROMISING = 1.5
"""So many times the least estimate. An earlier study, with another model of one SM, saw none of 834
landscapes lose its winner to this limit, and one to 1.3; nobody has looked again."""

ENOUGH_RATIOS = 8
"""Measured configs with an estimate, before the ratio of the two, or their order, says anything."""

LEAST_CORRELATION = 0.4
"""Of estimates and times, by rank. Estimates below are ignored."""

TIE = 1.05
"""Estimates closer to the best are not told apart: the estimator errs by more than this."""


def losses(timed: Iterable[Outcome]) -> dict[KernelConfig, float]:
    """How many times as slow each is as the best of these, at the number of sequences where that is
    most; infinite if it has no time. All are of one problem.
    """
    times = {o.config: o.timing.batches_us or (o.timing.median_us,) for o in timed if o.timing}
    best = [min(each) for each in zip(*times.values(), strict=True)]
    found = {o.config: math.inf for o in timed}
    return found | {
        config: max(us / least for us, least in zip(own, best, strict=True))
        for config, own in times.items()
    }


def by_loss(timed: Iterable[Outcome]) -> list[Outcome]:
    """The fastest first: those within TIE of the best for every number of sequences, by time; then
    the others, by losses().
    """
    outcomes = list(timed)
    lost = losses(outcomes)
    return sorted(outcomes, key=lambda o: (max(TIE, lost[o.config]), median_us(o.timing)))


def median_us(timing: Timing | None) -> float:
    """The median in microseconds; infinite if there is none."""
    return timing.median_us if timing else math.inf


def to_measure(
    compiled: Sequence[Outcome], least_us: float, always: Collection[KernelConfig]
) -> tuple[list[Outcome], list[Outcome]]:
    """The promising and the postponed of these compiled configs, each in the order of measuring.

    Those of `always` without an estimate come first, since only a GPU can judge them. Promising are
    those within PROMISING of the least known estimate, and all of `always`. They follow by
    estimate; one without keeps the place at which it was proposed, sound kernels before others.
    """
    first, promising, postponed = (list[Outcome]() for _ in range(3))
    for outcome in compiled:
        if outcome.config in always:
            (promising if outcome.estimate else first).append(outcome)
        else:
            us = outcome.estimate.median_us if outcome.estimate else 0.0
            (postponed if us > PROMISING * least_us else promising).append(outcome)

    def far(outcome: Outcome) -> float:
        return median_us(outcome.estimate)

    ranked = iter(sorted((o for o in promising if o.estimate), key=far))
    blind = [outcome for outcome in promising if not outcome.estimate]
    sound_first = iter(sorted(blind, key=lambda outcome: outcome.shortcomings or 0))
    order = [next(ranked) if outcome.estimate else next(sound_first) for outcome in promising]
    return first + order, sorted(postponed, key=far)


def can_win(estimate: Timing | None, measured: Sequence[tuple[float, float]]) -> bool:
    """Whether a config might be faster than all (estimated, measured) medians, in microseconds."""
    if estimate is None or len(measured) < ENOUGH_RATIOS:
        return True
    ratio = min(actual / estimated for estimated, actual in measured)
    return estimate.low_us * ratio <= min(actual for _, actual in measured)


def believable(measured: Sequence[tuple[float, float]]) -> bool:
    """Whether these (estimated, measured) medians agree in order, or are too few to tell."""
    if len(measured) < ENOUGH_RATIOS:
        return True
    correlation = spearman(*zip(*measured, strict=True))
    return correlation is None or correlation >= LEAST_CORRELATION


def spearman(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Spearman's rank correlation; None if all values of either are equal."""
    try:
        return statistics.correlation(ranks(first), ranks(second))
    except statistics.StatisticsError:
        return None


def ranks(values: Sequence[float]) -> list[float]:
    """The rank of each value, from 1; equal values share their mean rank."""
    order = sorted(values)
    return [(bisect_left(order, v) + bisect_right(order, v) + 1) / 2 for v in values]


def by_facts(untimed: Sequence[Outcome]) -> list[Outcome]:
    """The order of choice where no time is known.

    First comes what Triton's interpreter runs, then what has no signs of trouble. Next are the
    cycles that a score takes, on the pipe that bounds the kernel and to issue. The warps that an SM
    holds and the stages decide the rest. Equal ones keep their order.

    Where a tile's instructions are not known, larger tiles come first, first on their own side.
    """

    def rank(outcome: Outcome) -> tuple[float, ...]:
        config = outcome.config
        sound = not config.interpretable, outcome.shortcomings or 0
        if outcome.residents is None:
            return *sound, 0, 0, 0, 0
        warps = outcome.residents * config.block_warps(outcome.spec)
        sides = (config.br, config.bc)
        if outcome.spec.direction in BY_KEYS:
            sides = sides[::-1]
        bound, issue = outcome.cycles or (1 / sides[0], 1 / sides[1])
        return *sound, bound, issue, -warps, -config.num_stages

    return sorted(untimed, key=rank)


def by_estimate(timed: Sequence[Outcome], neighbours: Sequence[KernelConfig] = ()) -> list[Outcome]:
    """The order of choice without a GPU, where timing is the estimate; neighbours may repeat a
    config. Of those within TIE of the best, what Triton's interpreter runs comes first, because a
    model of Gluon is weaker proof; then what spills nothing, what most neighbours share, and what
    has fewer registers.
    """
    ordered, lost = by_loss(timed), losses(timed)
    limit = max(TIE, lost[ordered[0].config]) if ordered else 0.0
    tied = [outcome for outcome in ordered if lost[outcome.config] <= limit < math.inf]
    kernels = [config.kernel for config in neighbours]

    def robust(outcome: Outcome) -> tuple[float, ...]:
        registers = math.inf if outcome.registers is None else outcome.registers
        shared_by = kernels.count(outcome.config.kernel)
        return (
            not outcome.config.interpretable,
            bool(outcome.spill_bytes),
            -shared_by,
            registers,
            median_us(outcome.timing),
        )

    return sorted(tied, key=robust) + ordered[len(tied) :]
