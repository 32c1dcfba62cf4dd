"""Surrogate: a Gaussian process over all points of a space, fitted to the evaluated ones.

The process has a Matern 5/2 covariance with one length per parameter (Rasmussen and Williams,
Gaussian Processes for Machine Learning, 2006, equations 4.17 and 5.1): ordered values are as far
apart as their ranks, names are equal or not. The next point has the largest expected improvement
over the best so far (Jones, Schonlau and Welch, Efficient Global Optimization, 1998). Several
points are chosen one by one, each assuming the mean for those before: the kriging believer of
Ginsbourger, Le Riche and Carraro (2010).

The fit is chosen from short lists by the marginal likelihood. The last bits of a sum differ between
machines and between orders of the same numbers. So points are sorted first, and choose_first()
treats values that differ only by such bits as equal.

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
from scipy.special import erfcx, ndtr

from flashgen.search.space import Parameter, Point

Floats = NDArray[np.floating[Any]]

CAP = 0.3
"""Cap = median + CAP * (median - best)."""

LEAST_CAP = 0.1
"""How far the cap lies above the best at least: else one value and a failure would be the same."""

LENGTHS = (0.1, 0.2, 0.4, 0.8, 1.6, 3.2)
"""In units of an ordered parameter's whole range, or of the step from one name to another."""

NOISES = (1e-2, 1e-4, 1e-1)
"""What no parameter explains, as a part of the variance."""

SLOPES = (1.0, 0.5, 0.0)
"""How far a guess is believed: the part of its logarithm's changes that is expected."""

LENGTH_PRIOR = (math.log(0.5), 0.8)
NOISE_PRIOR = (math.log(1e-2), 2.5)
"""Mean and deviation of the logarithm, before anything is known."""

USUAL_LENGTH = 0.8
"""Where the choice of lengths begins."""

PRIOR_COUNT = 2.0
"""Points that the plain variance of the heights weighs, beside what the process makes of it."""

ENOUGH_TO_FIT, MOST_TO_FIT = 4, 120
"""Evaluated points that lengths, noise and slope are chosen by; more would only take longer."""

SWEEPS = 2
TIE = 1e-6
"""Scores, or evidences, are equal within this share of the largest, and within this difference."""

FAR = -1e5
"""Deviations from the best below which all are equally hopeless."""

LEAST_LEFT = 1e-9
"""Of the variance of a point that is known."""


@dataclass(frozen=True, kw_only=True)
class Fit:
    """The parameters chosen by the evidence; one length per parameter of the space."""

    lengths: tuple[float, ...]
    noise: float
    slope: float


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


class Surrogate:
    """A process over one space. guesses: another model's prediction for each point, lower is
    better.

    A guess is above 0 and correct up to a common factor; None is no prediction.
    """

    def __init__(
        self,
        points: Sequence[Point],
        parameters: Sequence[Parameter],
        guesses: Sequence[float | None] | None = None,
    ) -> None:
        self._ordered = tuple(parameter.ordered for parameter in parameters)
        columns = [_places(points, parameter) for parameter in parameters]
        self._places = np.array(columns, dtype=np.float64).reshape(len(parameters), len(points))
        self._guess = None if guesses is None else _logarithms(guesses)

    def expect(self, seen: Sequence[int], values: Sequence[float | None]) -> Expectation:
        """The expectation of all points, given the values of those at `seen` (at least one).

        None is a failure. The order of `seen` changes nothing, not even the last bits.
        """
        order = sorted(range(len(seen)), key=seen.__getitem__)
        seen, values = [seen[i] for i in order], [values[i] for i in order]
        heights, best, on_logarithms = _heights(values)
        trend = np.zeros(self._places.shape[1])
        if self._guess is not None and on_logarithms:
            known = [i for i, value in zip(seen, values, strict=True) if value is not None]
            trend = np.minimum(self._guess, self._guess[known].min() + heights.max() - best)
        fit = self._fitted(self._places[:, seen], heights, trend[seen])
        solved = self._solve(self._places[:, seen], heights - fit.slope * trend[seen], fit)
        rows = np.linalg.solve(solved.factor, self.covariance(seen, fit))
        mean = solved.mean + solved.weights @ rows + fit.slope * trend
        return Expectation(self, fit, solved.variance, rows, mean, best)

    def covariance(self, at: Sequence[int], fit: Fit) -> Floats:
        """Covariance of these points with the whole space, without noise and variance."""
        return self._covariance(self._places[:, list(at)], self._places, fit)

    def _covariance(self, some: Floats, others: Floats, fit: Fit) -> Floats:
        """Matern 5/2 of coordinates (parameters x n) and (parameters x m): n x m."""
        squares = np.zeros((some.shape[1], others.shape[1]))
        for a, b, length, ordered in zip(some, others, fit.lengths, self._ordered, strict=True):
            gaps = a[:, None] - b[None, :]
            squares += np.square(gaps if ordered else gaps != 0) / length**2
        scaled = np.sqrt(5.0 * squares)
        covariance: Floats = (1.0 + scaled + np.square(scaled) / 3.0) * np.exp(-scaled)
        return covariance

    def _fitted(self, places: Floats, heights: Floats, trend: Floats) -> Fit:
        """The fit with the largest evidence in the lists above, changing one thing at a time."""
        every = -(-len(heights) // MOST_TO_FIT)
        places, heights, trend = places[:, ::every], heights[::every], trend[::every]
        sloped = bool(trend.any())
        fit = Fit(lengths=(USUAL_LENGTH,) * len(places), noise=NOISES[0], slope=SLOPES[0] * sloped)

        def evidence(other: Fit) -> float:
            return self._solve(places, heights - other.slope * trend, other).evidence

        turns = range(len(places) + 1 + sloped) if len(heights) >= ENOUGH_TO_FIT else ()
        for turn in (*turns,) * SWEEPS:
            fits = [fit, *_variants(fit, turn)]
            fit = fits[choose_first([evidence(other) for other in fits])]
        return fit

    def _solve(self, places: Floats, heights: Floats, fit: Fit) -> _Solved:
        """The process of this fit through these heights, with the likeliest mean and variance."""
        count = len(heights)
        covariance = self._covariance(places, places, fit)
        factor = np.linalg.cholesky(covariance + fit.noise * np.eye(count))
        ones, plain = np.linalg.solve(factor, np.stack([np.ones(count), heights], axis=1)).T
        mean = float(ones @ plain / (ones @ ones))
        weights = plain - mean * ones
        total = PRIOR_COUNT * max(float(np.var(heights)), LEAST_CAP**2)
        total += float(weights @ weights)
        freedom = PRIOR_COUNT + count
        evidence = -float(np.log(np.diag(factor)).sum()) - freedom / 2 * math.log(total / freedom)
        evidence += sum(_log_prior(length, LENGTH_PRIOR) for length in fit.lengths)
        evidence += _log_prior(fit.noise, NOISE_PRIOR)
        return _Solved(
            factor=factor, weights=weights, mean=mean, variance=total / freedom, evidence=evidence
        )


class Expectation:
    """The expected height of every point of a space, and its uncertainty.

    rows: L^-1 times the covariance of the n known points with all, n x points.
    """

    def __init__(
        self,
        surrogate: Surrogate,
        fit: Fit,
        variance: float,
        rows: Floats,
        mean: Floats,
        best: float,
    ) -> None:
        self.fit = fit
        self.mean = mean
        self.best = best
        self._surrogate = surrogate
        self._variance = variance
        self._rows = rows
        self._left = 1.0 - np.square(rows).sum(axis=0)  # of the variance

    def scores(self) -> Floats:
        """The logarithm of the expected improvement over the best, of every point."""
        spread = np.sqrt(self._variance * np.maximum(self._left, LEAST_LEFT))
        gain = _log_improvement((self.best - self.mean) / spread)
        scores: Floats = np.log(spread) + gain
        return scores

    def believe(self, point: int) -> None:
        """Continue as if this point had been evaluated with its expected result."""
        covariance = self._surrogate.covariance([point], self.fit)[0]
        covariance -= self._rows[:, point] @ self._rows
        row = covariance / math.sqrt(max(covariance[point], LEAST_LEFT) + self.fit.noise)
        self._rows = np.vstack([self._rows, row])
        self._left = self._left - np.square(row)
        self.best = min(self.best, float(self.mean[point]))


def choose_first(values: Sequence[float] | Floats) -> int:
    """The index of the first value that equals the largest up to TIE. At least one is finite."""
    largest = float(np.max(values))
    return int(np.argmax(np.asarray(values) >= largest - TIE * max(1.0, abs(largest))))


def _places(points: Sequence[Point], parameter: Parameter) -> list[float]:
    """Coordinates of each point: 0 to 1 in an ordered parameter, the number of its name in
    others.
    """
    last = len(parameter.values) - 1 if parameter.ordered else 1
    place = {value: number / last for number, value in enumerate(parameter.values)}
    return [place[point[parameter.name]] for point in points]


def _logarithms(guesses: Sequence[float | None]) -> Floats:
    """Logarithms of the guesses; the usual one where there is none."""
    known = [math.log(guess) for guess in guesses if guess is not None]
    usual = float(np.median(known)) if known else 0.0
    return np.array([usual if guess is None else math.log(guess) for guess in guesses])


def _heights(values: Sequence[float | None]) -> tuple[Floats, float, bool]:
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
    cap = max(median + CAP * (median - best), best + LEAST_CAP)
    capped = iter(np.minimum(known, cap))
    heights = [cap if value is None else next(capped) for value in values]
    return np.array(heights), best, on_logarithms


def _variants(fit: Fit, turn: int) -> list[Fit]:
    """The fit with one thing changed: the length of parameter `turn`, then the noise, the slope."""
    count = len(fit.lengths)
    if turn < count:
        before, after = fit.lengths[:turn], fit.lengths[turn + 1 :]
        return [replace(fit, lengths=(*before, length, *after)) for length in LENGTHS]
    if turn == count:
        return [replace(fit, noise=noise) for noise in NOISES]
    return [replace(fit, slope=slope) for slope in SLOPES]


def _log_prior(value: float, prior: tuple[float, float]) -> float:
    mean, deviation = prior
    return -0.5 * ((math.log(value) - mean) / deviation) ** 2


def _log_improvement(better: Floats) -> Floats:
    """log(phi(z) + z Phi(z)): by how much a normal variable is expected to exceed -z.

    Below -1 as log(phi(z)) + log(1 + z Phi(z) / phi(z)), which does not cancel before FAR.
    """
    near, far = np.maximum(better, -1.0), np.clip(better, FAR, -1.0)
    density = np.exp(-np.square(near) / 2) / math.sqrt(2 * math.pi)
    ratio = math.sqrt(math.pi / 2) * erfcx(-far / math.sqrt(2))
    tail = -np.square(far) / 2 - math.log(2 * math.pi) / 2 + np.log1p(far * ratio)
    gain: Floats = np.where(better > -1.0, np.log(density + near * ndtr(near)), tail)
    return gain
