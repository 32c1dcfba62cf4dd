"""Process: a Gaussian process over a space, fitted to the evaluated points.

The process has a Matern 5/2 covariance with one length per parameter (Rasmussen and Williams,
Gaussian Processes for Machine Learning, 2006, equations 4.17 and 5.1). Ordered values are as far
apart as their ranks, names are equal or not. Points are rated by the expected improvement over the
best so far (Jones, Schonlau and Welch, Efficient Global Optimization, 1998). The fit is chosen from
short lists by the marginal likelihood.

It works on heights: logarithms, clipped at a cap, because a process fitted to times from 1 to 30
resolves little between 1.0 and 1.1. A failure has the height of the cap: no worse than slow.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import lapack
from scipy.special import erfcx, ndtr

from flashgen.search.points import Codes, SpaceParameter

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

MOST_KNOWN = 120
"""Evaluated points that a process is fitted to; more would only take longer."""

TIE = float(np.finfo(np.float64).eps) ** (1 / 3)
"""Guards against rounding, which differs between machines: scores, or evidences, are equal within
this share of the largest, and within this difference. Heights vary by as much at least."""


@dataclass(frozen=True, kw_only=True)
class Fit:
    """The parameters chosen by the evidence; one length per parameter of the space. slope: 1 if
    guesses are believed, or else 0. points: so many were evaluated then.
    """

    lengths: tuple[float, ...]
    noise: float
    slope: float
    points: int = 0

    @classmethod
    def of(cls, text: str) -> Fit:
        """The fit of a JSON text of asdict()."""
        record = json.loads(text)
        return cls(**{**record, "lengths": tuple(record["lengths"])})


class Known(NamedTuple):
    """n evaluated points: codes (n x parameters), heights (n), and trend (n: logarithms of guesses,
    or 0).
    """

    codes: Codes
    heights: Floats
    trend: Floats


class _Solved(NamedTuple):
    """A fit applied to n points: the factor L (n x n) of their covariance, L^-1 (heights - mean)
    (n), mean and variance of the process, and the logarithm of the evidence.
    """

    factor: Floats
    weights: Floats
    mean: float
    variance: float
    evidence: float


class Expectation(NamedTuple):
    """The expected heights of m points, and their standard deviations."""

    mean: Floats
    spread: Floats

    def scores(self, best: float) -> Floats:
        """The logarithm of the expected improvement over the best, of every point."""
        scores: Floats = np.log(self.spread) + _log_improvement((best - self.mean) / self.spread)
        return scores


class Process:
    """A process over the space of these parameters. names_only: no parameter counts as ordered."""

    def __init__(self, parameters: Sequence[SpaceParameter], *, names_only: bool = False) -> None:
        self._counts = [len(each.values) for each in parameters]
        self._ordered = [each.ordered and not names_only for each in parameters]

    def expect(
        self, known: Known, fit: Fit, codes: Codes, trend: Floats, under_way: int
    ) -> Expectation:
        """The expectation of m points of these codes (m x parameters) and trend (m). The first
        under_way of them are believed to come out as expected (kriging believer), which leaves the
        means as they are and lessens the deviations.
        """
        heights = known.heights - fit.slope * known.trend
        seen, others = self._features(known.codes, fit), self._features(codes, fit)
        solved = _solve(_matern(_squares(seen, seen)), heights, fit)
        across = _matern(_squares(seen, others))
        rows = _forward(solved.factor, across)
        mean = solved.mean + solved.weights @ rows + fit.slope * trend
        left = 1.0 - np.einsum("ij,ij->j", rows, rows)  # above 0: the noise is never all removed
        if under_way:
            new = others[:under_way]
            between = _matern(_squares(new, others)) - rows[:, :under_way].T @ rows
            inner = between[:, :under_way] + fit.noise * np.eye(under_way)
            factor, _ = lapack.dpotrf(inner, lower=1, clean=0)
            more = _forward(factor, between)
            left = np.maximum(left - np.einsum("ij,ij->j", more, more), TIE**2)
        return Expectation(mean=mean, spread=np.sqrt(solved.variance * left))

    def refitted(self, fit: Fit | None, known: Known) -> Fit:
        """The fit with the largest evidence in the lists above, changing one thing at a time from
        the fit before.
        """
        sloped = bool(known.trend.any())
        usual = LENGTHS[len(LENGTHS) // 2]
        rounds = 1 if fit else 2
        fit = fit or Fit(lengths=(usual,) * len(self._counts), noise=NOISES[0], slope=float(sloped))
        gaps = self._gaps(known.codes)
        evidence: float | None = None
        for turn in [*range(len(gaps) + 1 + sloped)] * rounds:
            fit, evidence = _better(fit, evidence, turn, gaps, known)
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


def _better(
    fit: Fit, evidence: float | None, turn: int, gaps: Sequence[Floats], known: Known
) -> tuple[Fit, float]:
    """The fit with one thing chosen: a parameter's length, then noise, then slope; and its
    evidence. evidence: that of the fit, if known.
    """
    count = len(known.heights)
    rest = np.zeros((count, count))
    for each, (gap, length) in enumerate(zip(gaps, fit.lengths, strict=True)):
        if each != turn:
            rest += gap / length**2
    if turn < len(gaps):
        before, after = fit.lengths[:turn], fit.lengths[turn + 1 :]
        fits = [replace(fit, lengths=(*before, length, *after)) for length in LENGTHS]
    elif turn == len(gaps):
        fits = [replace(fit, noise=noise) for noise in NOISES]
    else:
        fits = [replace(fit, slope=1.0 - fit.slope)]
    others = [each for each in fits if each != fit]
    plain = _matern(rest) if turn >= len(gaps) else None
    found = [] if evidence is None else [evidence]
    for new in [fit, *others][len(found) :]:
        if (covariance := plain) is None:
            covariance = _matern(rest + gaps[turn] / new.lengths[turn] ** 2)
        found.append(_solve(covariance, known.heights - new.slope * known.trend, new).evidence)
    best = choose_first(found)
    return [fit, *others][best], found[best]


def thinned(heights: Floats) -> NDArray[np.int64]:
    """The places of the best heights and of others at even distances: MOST_KNOWN at most."""
    count, half = len(heights), MOST_KNOWN // 2
    if count <= MOST_KNOWN:
        return np.arange(count)
    order = np.argsort(heights, kind="stable")
    others = order[half + np.arange(half) * (count - half) // half]
    return np.sort(np.concatenate([order[:half], others]))


def _squares(some: Floats, others: Floats) -> Floats:
    """Squared distances of points (n x features) and (m x features): n x m."""
    ours, theirs = np.square(some).sum(axis=1), np.square(others).sum(axis=1)
    squares: Floats = ours[:, None] + theirs[None, :] - 2 * (some @ others.T)
    return np.maximum(squares, 0.0)


def _matern(squares: Floats) -> Floats:
    """Matern 5/2 of squared distances in lengths."""
    scaled = np.sqrt(5.0 * squares)
    covariance: Floats = np.exp(-scaled)
    covariance *= 1.0 + scaled * (1.0 + scaled / 3.0)
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
    return _Solved(factor, weights, mean, total / freedom, evidence)


def choose_first(values: Sequence[float] | Floats) -> int:
    """The index of the first value that equals the largest up to TIE. At least one is finite."""
    largest = float(np.max(values))
    return int(np.argmax(np.asarray(values) >= largest - TIE * max(1.0, abs(largest))))


def heights_of(values: Sequence[float | None]) -> tuple[Floats, float, bool]:
    """Heights of these values, the least of them, and whether they are logarithms; values that are
    not all above 0 are divided by the largest instead.
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
    """log(phi(z) + z Phi(z)): by how much a normal variable is expected to exceed -z. From -1 / TIE
    on all are equally hopeless, because rounding would be more than TIE of what is left.
    """
    near, far = np.maximum(better, -1.0), np.clip(better, -1.0 / TIE, -1.0)
    density = np.exp(-np.square(near) / 2) / math.sqrt(2 * math.pi)
    ratio = math.sqrt(math.pi / 2) * erfcx(-far / math.sqrt(2))
    tail = -np.square(far) / 2 - math.log(2 * math.pi) / 2 + np.log1p(far * ratio)
    gain: Floats = np.where(better > -1.0, np.log(density + near * ndtr(near)), tail)
    return gain
