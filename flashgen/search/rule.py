"""THE RULE of the final round: who is written into the table.

A challenger is chosen only if it beats the incumbent and the default, each beyond chance; of
several such challengers the one of the least median. Failing that the default is, if it beats the
incumbent so; else the incumbent stays.

Beyond chance is a test of the passes of the round, in pairs: what one candidate's pass took over
what the other's took in the same pass, at the same clock, whatever the clock did meanwhile.

  - Wilcoxon's signed-rank test (Biometrics Bulletin 1, 1945), one-sided, of the logarithms of these
    ratios. It asks for no normal noise, and one pass that was hit by something else counts as one.
  - What is refused is "not faster by SMALLEST_EFFECT", not "not faster". A pass's neighbours and
    its place in the round leave something that no number of passes averages out, and a table whose
    kernels change for less is not worth its review.
  - A challenger's p is the larger of its two: both must be beaten, so no other correction is due
    for that. For the number of challengers in the round, the default against the incumbent being
    one, the p are corrected by Holm's step-down (Scandinavian Journal of Statistics 6, 1979), so
    that LEVEL is the chance of any mistake in a round, not in each of its comparisons.

Passes that are all equal, or too few for LEVEL, prove nothing, and the incumbent stays. Where there
are no passes, in what was replayed or recorded before there were any, a challenger beats another
if its 80th percentile lies below the other's 20th, and there is no p.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Collection, Sequence
from typing import Any

from flashgen.config import KernelConfig
from flashgen.errors import ToolchainError
from flashgen.outcome import Outcome

LEVEL = 0.01
"""One final round in a hundred, at most, may replace an incumbent by what is not faster. A table is
of hundreds of rounds, over its life, and each mistake stays until somebody tunes again: 5 % would
be felt. Ten passes, the least of a round, can still reach it with ten challengers."""

SMALLEST_EFFECT = 0.005
"""The share of its time by which a challenger must be faster, at least. Chosen, not measured."""

LEAST_P = 1e-6
"""Smaller ones are told as this: so far out neither noise nor the test is what it is taken for."""


def choose(finals: Sequence[Outcome], held: Sequence[Outcome]) -> Outcome | None:
    """The winner of a final round, by THE RULE. finals are sorted by median and include `held`.

    held: the incumbent, if any, then the default, as far as they ran. None where nothing ran.
    Raises ToolchainError where scipy is missing.
    """
    if not held:
        return finals[0] if finals else None
    beating = _beating(finals, held)
    winner = next((o for o in finals if o not in held and o.config in beating), None)
    incumbent, default = held[0], held[-1]
    return winner or (default if default.config in beating else incumbent)


def p_value(winner: Outcome, finals: Sequence[Outcome], held: Sequence[Outcome]) -> float | None:
    """The p of a round's winner against the strongest of the others in `held`.

    A challenger's is corrected, an incumbent's that stays is its own. None where nothing else was
    held, or no passes are known.
    """
    others = [other for other in held if other.config != winner.config]
    if not others or not _paired(finals):
        return None
    if winner.config == held[0].config:
        return max(LEAST_P, _largest_p(winner, others))
    return max(LEAST_P, _corrected(finals, held)[winner.config])


@functools.lru_cache(maxsize=256)
def p_faster(challenger: tuple[float, ...], other: tuple[float, ...]) -> float:
    """The p of "not faster by SMALLEST_EFFECT", of microseconds of the same passes."""
    shift = math.log1p(SMALLEST_EFFECT)
    ratios = [math.log(a / b) + shift for a, b in zip(challenger, other, strict=True)]
    if not any(ratios):
        return 1.0
    return float(_stats().wilcoxon(ratios, alternative="less").pvalue)


def _beating(finals: Sequence[Outcome], held: Sequence[Outcome]) -> Collection[KernelConfig]:
    """The challengers that beat all that are held; the default is one to the incumbent."""
    if _paired(finals):
        return [config for config, p in _corrected(finals, held).items() if p <= LEVEL]
    return [
        challenger.config
        for challenger in _challengers(finals, held)
        if all(_apart(challenger, other) for other in held if other.config != challenger.config)
    ]


def _challengers(finals: Sequence[Outcome], held: Sequence[Outcome]) -> list[Outcome]:
    """All but the incumbent; where there is none, all but the default."""
    return [outcome for outcome in finals if outcome.config != held[0].config]


def _corrected(finals: Sequence[Outcome], held: Sequence[Outcome]) -> dict[KernelConfig, float]:
    """Each challenger's p against the stronger of those it must beat, by Holm's step-down."""
    alone = {
        challenger.config: _largest_p(
            challenger, [o for o in held if o.config != challenger.config]
        )
        for challenger in _challengers(finals, held)
    }
    least, corrected = 0.0, {}
    for place, config in enumerate(sorted(alone, key=alone.__getitem__)):
        least = max(least, min(1.0, (len(alone) - place) * alone[config]))
        corrected[config] = least
    return corrected


def _largest_p(outcome: Outcome, others: Sequence[Outcome]) -> float:
    return max(p_faster(outcome.passes_us, other.passes_us) for other in others)


def _paired(finals: Sequence[Outcome]) -> bool:
    """Whether all have times of the same passes."""
    counts = {len(outcome.passes_us) for outcome in finals}
    return len(counts) == 1 and all(o.passes_us and min(o.passes_us) > 0 for o in finals)


def _apart(challenger: Outcome, other: Outcome) -> bool:
    """Whether the challenger's band lies below the other's."""
    if challenger.timing is None or other.timing is None:
        return False
    return challenger.timing.high_us < other.timing.low_us


def _stats() -> Any:
    """scipy.stats, imported when a round is decided: it takes a second."""
    try:
        return importlib.import_module("scipy.stats")
    except ImportError:
        raise ToolchainError(
            "a final round is decided by scipy's rank test, and scipy is missing: "
            "pip install 'flashgen[tune]'"
        ) from None
