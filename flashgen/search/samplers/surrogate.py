"""Process: a Gaussian process over a space, fitted to the evaluated points.

The process has a Matern 5/2 covariance with one length per parameter (Rasmussen and Williams,
Gaussian Processes for Machine Learning, 2006, equations 4.17 and 5.1): ordered values are as far
apart as their ranks, names are equal or not. It is rated at any points, by the expected improvement
over the best so far (Jones, Schonlau and Welch, Efficient Global Optimization, 1998).

The fit is chosen from short lists by the marginal likelihood. The last bits of a sum differ between
machines, so choose_first() treats values that differ only by such bits as equal.

A process fitted to times from 1 to 30 resolves little between 1.0 and 1.1. So it works on heights:
logarithms, clipped at a cap. A failure has the height of the cap: worth avoiding, but no worse than
slow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import lapack
from scipy.special import erfcx, ndtr

from flashgen.search.points import Codes, Parameter

Floats = NDArray[np.floating[Any]]

CAP = 0.3
"""Cap = median + CAP * (median - best)."""

LENGTHS = (0.1, 0.2, 0.4, 0.8, 1.6, 3.2)
"""In units of an ordered parameter's whole range, or of the step from one name to another."""

NOISES = (1e-2, 1e-4, 1e-1)
"""What no parameter explains, as a part of the variance."""

LENGTH_PRIOR = (math.log(0.5), 0.8)
NOISE_PRIOR = (math.log(1e-2), 2.5)
"""Mean and deviation of the logarithm, before anything is known."""

MOST_TO_FIT = 120
"""Evaluated points that a fit is chosen by; more would only take longer."""

GROWTH = 1.1
"""The fit is chosen anew when there are more points by this factor, to save time."""

TIE = float(np.finfo(np.float64).eps) ** (1 / 3)
"""Guards against rounding, which differs between machines: a third of the digits of a float are not
relied on. Scores, or evidences, are equal within this share of the largest, and within this
difference. Heights vary by as much, and a failure lies as far above the only value: else rounding
would be all that tells points apart.
"""


@dataclass(frozen=True, kw_only=True)
class Fit:
    """The parameters chosen by the evidence; one length per parameter of the space. slope: 1 if
    guesses are believed, or else 0.
    """

    lengths: tuple[float, ...]
    noise: float
    slope: float


@dataclass(frozen=True, kw_only=True)
class Known:
    """n points: codes (n x parameters), heights (n), and trend (n: logarithms of guesses, or 0).

    evaluated: so many come first that were evaluated; of the others the height is assumed.
    """

    codes: Codes
    heights: Floats
    trend: Floats
    evaluated: int


@dataclass(frozen=True, kw_only=True)
class _Solved:
    """A fit applied to n points: the factor L (n x n) of their covariance, L^-1 (heights - mean)
    (n), mean and variance of the process, and the logarithm of the evidence.
    """

    factor: Floats
    weights: Floats
    mean: float
    variance: float
    evidence: float


@dataclass(frozen=True, kw_only=True)
class Expectation:
    """The expected heights of m points, and their standard deviations."""

    mean: Floats
    spread: Floats

    def scores(self, best: float) -> Floats:
        """The logarithm of the expected improvement over the best, of every point."""
        gain = _log_improvement((best - self.mean) / self.spread)
        scores: Floats = np.log(self.spread) + gain
        return scores


class Process:
    """A process over the space of these parameters. names_only: no parameter counts as ordered."""

    def __init__(self, parameters: Sequence[Parameter], *, names_only: bool = False) -> None:
        self._counts = [len(each.values) for each in parameters]
        self._ordered = [each.ordered and not names_only for each in parameters]
        self._fit: Fit | None = None
        self._fitted_to = 0

    def expect(self, known: Known, codes: Codes, trend: Floats) -> Expectation:
        """The expectation of the points of these codes (m x parameters) and trend (m)."""
        fit = self.fitted(known)
        heights = known.heights - fit.slope * known.trend
        seen, others = self._features(known.codes, fit), self._features(codes, fit)
        solved = _solve(_matern(_squares(seen, seen)), heights, fit)
        rows = _forward(solved.factor, _matern(_squares(seen, others)))
        mean = solved.mean + solved.weights @ rows + fit.slope * trend
        left = 1.0 - np.einsum("ij,ij->j", rows, rows)  # above 0: the noise is never all removed
        return Expectation(mean=mean, spread=np.sqrt(solved.variance * left))

    def fitted(self, known: Known) -> Fit:
        """The fit to these points, chosen anew if there are many more than when it was chosen."""
        count = known.evaluated
        if self._fit is None or not self._fitted_to <= count < GROWTH * self._fitted_to:
            self._fit = self._choose(_thinned(known))
            self._fitted_to = count
        return self._fit

    def _choose(self, known: Known) -> Fit:
        """The fit with the largest evidence in the lists above, changing one thing at a time."""
        sloped = bool(known.trend.any())
        usual = LENGTHS[len(LENGTHS) // 2]
        fit = self._fit or Fit(
            lengths=(usual,) * len(self._counts), noise=NOISES[0], slope=float(sloped)
        )
        gaps = self._gaps(known.codes)
        for _ in range(1 if self._fit else 2):
            for turn in range(len(gaps) + 1 + sloped):
                fit = _better(fit, turn, gaps, known)
        return fit

    def _gaps(self, codes: Codes) -> list[Floats]:
        """The squared distance of any two of n points in each parameter, n x n."""
        found = []
        for column, count, ordered in zip(codes.T, self._counts, self._ordered, strict=True):
            between = column[:, None] - column[None, :]
            found.append(np.square(between / (count - 1)) if ordered else 1.0 * (between != 0))
        return found

    def _features(self, codes: Codes, fit: Fit) -> Floats:
        """Coordinates of n points, n x features: their squared distance is that of the fit."""
        found = []
        for column, count, ordered, length in zip(
            codes.T, self._counts, self._ordered, fit.lengths, strict=True
        ):
            if ordered:
                found.append(column[:, None] / ((count - 1) * length))
            else:  # two different names have a distance of 1 / length
                found.append(np.eye(count)[column] * (math.sqrt(0.5) / length))
        return np.concatenate(found, axis=1) if found else np.zeros((len(codes), 1))


def _better(fit: Fit, turn: int, gaps: Sequence[Floats], known: Known) -> Fit:
    """The fit with one thing chosen: a parameter's length, then noise, then slope."""
    count = len(known.heights)
    lengths = fit.lengths
    rest = np.zeros((count, count))
    for each, (gap, length) in enumerate(zip(gaps, lengths, strict=True)):
        if each != turn:
            rest += gap / length**2
    if turn < len(gaps):
        fits = [
            replace(fit, lengths=(*lengths[:turn], length, *lengths[turn + 1 :]))
            for length in (lengths[turn], *LENGTHS)
        ]
        matrices = [_matern(rest + gaps[turn] / each.lengths[turn] ** 2) for each in fits]
    else:
        if turn == len(gaps):
            fits = [fit, *(replace(fit, noise=noise) for noise in NOISES)]
        else:
            fits = [fit, replace(fit, slope=1.0 - fit.slope)]
        matrices = [_matern(rest)] * len(fits)
    evidences = [
        _solve(matrix, known.heights - each.slope * known.trend, each).evidence
        for each, matrix in zip(fits, matrices, strict=True)
    ]
    return fits[choose_first(evidences)]


def _thinned(known: Known) -> Known:
    """The evaluated points; of many the best, and others at even distances: MOST_TO_FIT."""
    count, half = known.evaluated, MOST_TO_FIT // 2
    order = np.argsort(known.heights[:count], kind="stable")
    if count > MOST_TO_FIT:
        others = order[half + np.arange(half) * (count - half) // half]
        order = np.concatenate([order[:half], others])
    kept = np.sort(order)
    return Known(
        codes=known.codes[kept],
        heights=known.heights[kept],
        trend=known.trend[kept],
        evaluated=len(kept),
    )


def _squares(some: Floats, others: Floats) -> Floats:
    """Squared distances of points (n x features) and (m x features): n x m."""
    ours, theirs = np.square(some).sum(axis=1), np.square(others).sum(axis=1)
    squares: Floats = ours[:, None] + theirs[None, :] - 2 * (some @ others.T)
    return np.maximum(squares, 0.0)


def _matern(squares: Floats) -> Floats:
    """Matern 5/2 of squared distances in lengths."""
    scaled = np.sqrt(5.0 * squares)
    covariance: Floats = (1.0 + scaled + np.square(scaled) / 3.0) * np.exp(-scaled)
    return covariance


def _forward(factor: Floats, right: Floats) -> Floats:
    """factor^-1 right, for a lower triangular factor."""
    found, _ = lapack.dtrtrs(factor, right, lower=1)
    solved: Floats = found
    return solved


def _solve(covariance: Floats, heights: Floats, fit: Fit) -> _Solved:
    """The process of this fit through these heights, with the likeliest mean and variance."""
    count = len(heights)
    factor, _ = lapack.dpotrf(covariance + fit.noise * np.eye(count), lower=1, clean=0)
    ones, plain = _forward(factor, np.stack([np.ones(count), heights], axis=1)).T
    mean = float(ones @ plain / (ones @ ones))
    weights = plain - mean * ones
    # The plain variance of the heights counts as one point, next to what the process makes of it.
    apart = heights - heights.sum() / count
    total = max(float(apart @ apart) / count, TIE**2) + float(weights @ weights)
    freedom = 1 + count
    evidence = -float(np.log(np.diag(factor)).sum()) - freedom / 2 * math.log(total / freedom)
    evidence += sum(_log_prior(length, LENGTH_PRIOR) for length in fit.lengths)
    evidence += _log_prior(fit.noise, NOISE_PRIOR)
    return _Solved(
        factor=factor, weights=weights, mean=mean, variance=total / freedom, evidence=evidence
    )


def choose_first(values: Sequence[float] | Floats) -> int:
    """The index of the first value that equals the largest up to TIE. At least one is finite."""
    largest = float(np.max(values))
    return int(np.argmax(np.asarray(values) >= largest - TIE * max(1.0, abs(largest))))


def heights_of(values: Sequence[float | None]) -> tuple[Floats, float, bool]:
    """Heights of these values, the least of them, and whether they are logarithms.

    Values that are not all above 0 have no logarithms and are divided by the largest instead.
    """
    known = np.array([value for value in values if value is not None], dtype=np.float64)
    on_logarithms = bool((known > 0).all())
    if on_logarithms:
        known = np.log(known)
    else:
        known = known / max(float(np.abs(known).max()), np.finfo(np.float64).tiny)
    best, median = float(known.min()), float(np.median(known))
    cap = max(median + CAP * (median - best), best + TIE)
    capped = iter(np.minimum(known, cap))
    heights = [cap if value is None else next(capped) for value in values]
    return np.array(heights), best, on_logarithms


def _log_prior(value: float, prior: tuple[float, float]) -> float:
    mean, deviation = prior
    return -0.5 * ((math.log(value) - mean) / deviation) ** 2


def _log_improvement(better: Floats) -> Floats:
    """log(phi(z) + z Phi(z)): by how much a normal variable is expected to exceed -z.

    Below -1 as log(phi(z)) + log(1 + z Phi(z) / phi(z)), of which 1 / z**2 is left by 1 - 1. So all
    are equally hopeless from -1 / TIE on, where rounding would be more than TIE of that.
    """
    near, far = np.maximum(better, -1.0), np.clip(better, -1.0 / TIE, -1.0)
    density = np.exp(-np.square(near) / 2) / math.sqrt(2 * math.pi)
    ratio = math.sqrt(math.pi / 2) * erfcx(-far / math.sqrt(2))
    tail = -np.square(far) / 2 - math.log(2 * math.pi) / 2 + np.log1p(far * ratio)
    gain: Floats = np.where(better > -1.0, np.log(density + near * ndtr(near)), tail)
    return gain
