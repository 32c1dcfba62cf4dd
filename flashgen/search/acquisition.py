"""Acquisition: the point of a space that is worth evaluating next.

It starts with the START best guesses or, if there are none, MIDDLE points near the middle of the
space; one must have a value. Then it takes the candidate with the largest expected improvement by a
Gaussian process (surrogate.py). Two things alternate from trial to trial, because neither
alternative is better everywhere:

  - The candidates, of three kinds in turn. The first are random points and neighbours of the BEST
    points. The second are neighbours of elites, and random points that differ from one of them in
    two parameters. The third are points of another valley: they lack the value that the best point
    has in one parameter, and must improve on the best point without that value.
  - The process: numbers count as ordered, or as names like all else.

If the order of the space means something (likely_first), it is a prior, applied as in Hvarfner et
al., piBO (ICLR 2022). The prior is 1 / (1 + TRUST * rank), with ranks from 0 to 1. The expected
improvement is multiplied by its power TRUST / n after n evaluations. Once the order has proved
wrong, it does not count. docs/notes/2026-11-29-search-constants.md says what an ablation found of
the constants.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.random import RandomState
from numpy.typing import NDArray

from flashgen.search.points import ILLEGAL, Space
from flashgen.search.space import Point
from flashgen.search.surrogate import (
    MOST_KNOWN,
    TIE,
    Fit,
    Floats,
    Known,
    Process,
    choose_first,
    heights_of,
    thinned,
)

START = 5
"""Points, or failures, that are known before a process is fitted, where guesses or the order of the
space say which."""

MIDDLE, PART = 8, 4
"""Central points that a search without either starts with: at most one in PART of the space."""

SAMPLE = 2000
"""Random points that the starting points are chosen from."""

CENTRAL = 0.05
"""The share of them, nearest to the middle of the space, that a search starts in."""

POOL = 400
"""Random points among the candidates; all points of a space that has no more."""

BEST = 3
"""How many of the best, or elites, have candidates next to them, and how many valleys are searched
in turn."""

ELITE_GAP = 3
"""In how many parameters any two elites differ at least."""

TURNS = (("pool", True), ("elites", False), ("pool", False), ("valley", True))
"""The candidates of one trial after the other, and whether numbers count as names."""

GROWTH = 1.1
"""The fit is chosen anew when there are more points by this factor, up to MOST_KNOWN of them."""

TRUST = 10.0
"""How much the order of a space counts, if it means something."""

LIKELY = 0.1
"""The share of such a space that a search starts in."""


@dataclass(kw_only=True)
class Seen:
    """What a study knows of the points of a space, by their numbers.

    values: of evaluated points, lower is better, None for a failure. under_way: those of running
    trials. closed: others that may not be proposed.
    """

    values: dict[int, float | None] = field(default_factory=dict)
    under_way: list[int] = field(default_factory=list)
    closed: set[int] = field(default_factory=set)

    def new(self, numbers: Iterable[int]) -> list[int]:
        """Those of these points that may be proposed, in the order of the space."""
        return sorted(set(numbers).difference(self.values, self.under_way, self.closed))

    def best(self) -> list[int]:
        """The points with a value, the best first."""
        known = sorted((value, n) for n, value in self.values.items() if value is not None)
        return [number for _, number in known]


class Acquisition:
    """Chooses points of a space. guesses and likely_first: as KernelSampler's."""

    def __init__(
        self,
        space: Space,
        seed: int,
        guesses: Callable[[Point], float | None] | None,
        *,
        likely_first: bool,
    ) -> None:
        self._space = space
        self._seed = seed
        self._guesses = guesses
        self._likely_first = likely_first
        self._logarithms: dict[int, float] = {}  # of guesses
        self._neighbours: dict[int, list[int]] = {}
        random = RandomState(seed)
        drawn = space.draw(random, SAMPLE)
        self.sample: list[int] = random.permutation(drawn).tolist()
        self._processes = [Process(space.parameters, names_only=names) for names in (False, True)]
        for number in sorted(self.sample):
            self._logarithm(number)  # a bad guess is refused before anything is evaluated

    def choose(self, seen: Seen, trial: int, fits: dict[bool, Fit]) -> int | None:
        """A new point for the trial of this number; None if there is none. fits: the last ones by
        whether all parameters are names; a new one replaces its predecessor there.
        """
        known = any(value is not None for value in seen.values.values())
        count = len(seen.values) + len(seen.under_way)
        if not known or (count < START + MIDDLE and count < self._start(seen)):
            found = self._first(seen)
        else:
            found = self._expected_best(seen, trial, fits)
        if found is None:  # no candidate is new
            return next((number for number in self._space if seen.new([number])), None)
        return found

    def _start(self, seen: Seen) -> int:
        """How many points are known before a process is fitted."""
        central = max(START, min(MIDDLE, self._space.size // PART))
        if self._guesses is None and not self._likely_first:
            return central
        misled = self._guesses is None and _order_is_wrong(seen)
        return START + central if misled else START

    def _first(self, seen: Seen) -> int | None:
        """A point to start with: the best guess, or else the farthest from all others."""
        new = set(seen.new(self.sample))
        rest = [number for number in self.sample if number in new]
        if not rest:
            return None
        logarithms = [self._logarithm(number) for number in rest]
        if min(logarithms) < math.inf:
            return rest[logarithms.index(min(logarithms))]
        others = [*seen.values, *seen.under_way]
        codes = self._space.codes(rest)
        gaps = np.full(len(rest), codes.shape[1])
        for each in self._space.codes(others):
            np.minimum(gaps, (codes != each).sum(axis=1), out=gaps)
        if self._likely_first and len(others) < START:
            inside = np.asarray(rest) < LIKELY * self._space.size
        else:
            inside = self._is_central(rest)
        gaps[~inside] = -1
        return rest[choose_first(gaps)]

    def _is_central(self, numbers: Sequence[int]) -> NDArray[np.bool_]:
        """Whether these points are as near to the middle as the nearest CENTRAL of the sample.
        Parameters of no more than two numbers have no middle.
        """
        last = np.array([max(1, len(each.values) - 1) for each in self._space.parameters])
        long = np.array([each.ordered and len(each.values) > 2 for each in self._space.parameters])
        sample = self._space.codes(self.sample) / last
        middle = np.median(sample, axis=0)

        def far(ranks: Floats) -> Floats:
            apart = np.square(ranks - middle)
            total: Floats = (apart[:, long] if long.any() else apart).sum(axis=1)
            return total

        count = max(START, int(CENTRAL * len(sample)))
        limit = np.sort(far(sample))[:count][-1] + TIE
        near: NDArray[np.bool_] = far(self._space.codes(numbers) / last) <= limit
        return near

    def _expected_best(self, seen: Seen, trial: int, fits: dict[bool, Fit]) -> int | None:
        """The candidate with the largest expected improvement; of equals the first in the space."""
        random = RandomState([self._seed, trial])
        kind, names = TURNS[trial % len(TURNS)]
        candidates, rivals = self._candidates(kind, seen, random, trial // len(TURNS))
        if not candidates:
            candidates, rivals = self._candidates("pool", seen, random, 0)
            if not candidates:
                return None
        heights, best, on_logarithms = heights_of(list(seen.values.values()))
        asked = [*seen.under_way, *candidates]
        trend: Floats = np.zeros(len(heights) + len(asked))
        if self._guesses is not None and on_logarithms:
            trend = self._trend(seen, [*seen.values, *asked], float(heights.max()) - best)
        codes = self._space.codes([*seen.values, *asked])
        count, pending = len(heights), len(seen.under_way)
        some = thinned(heights)
        known = Known(codes=codes[some], heights=heights[some], trend=trend[some])
        process, fit = self._processes[names], fits.get(names)
        if fit is None or count < fit.points or GROWTH * fit.points <= count <= MOST_KNOWN:
            fit = fits[names] = replace(process.refitted(fit, known), points=count)
        expected = process.expect(known, fit, codes[count:], trend[count:], pending)
        height_of = dict(zip(seen.values, heights.tolist(), strict=True))
        height_of |= zip(seen.under_way, expected.mean[:pending].tolist(), strict=True)
        scores = expected.scores(min(height_of[number] for number in rivals))[pending:]
        if self._likely_first and not _order_is_wrong(seen):
            ranks = np.array(candidates) / self._space.size
            scores = scores - TRUST / len(height_of) * np.log1p(TRUST * ranks)
        return candidates[choose_first(scores)]

    def _candidates(
        self, kind: str, seen: Seen, random: RandomState, turn: int
    ) -> tuple[list[int], list[int]]:
        """New points of this kind, and the points that they are to improve."""
        best = seen.best()
        if kind == "elites" and self._space.parameters:
            elites = self._elites(best)
            found = seen.new([*self._near(elites), *self._mutants(elites, random)])
            return found, best + seen.under_way
        pool = seen.new([*self._near(best), *map(int, self._space.draw(random, POOL))])
        follows = self._likely_first and not _order_is_wrong(seen)
        if kind != "valley" or follows or not self._space.parameters:
            return pool, best + seen.under_way
        codes = self._space.codes(best)
        other = codes != codes[0]  # an argmax of 0 is none
        decided = np.argsort(np.where(other.any(axis=0), -other.argmax(axis=0), 1), kind="stable")
        column = decided[turn % min(BEST, len(decided))]
        valley = [number for number, differs in zip(best, other[:, column], strict=True) if differs]
        pool = seen.new([*pool, *self._near(valley)])
        if not valley or not pool:
            return [], []
        away = self._space.codes(pool)[:, column] != codes[0, column]
        return [number for number, is_away in zip(pool, away, strict=True) if is_away], valley

    def _elites(self, best: Sequence[int]) -> list[int]:
        """The first of these points, and the next that differ enough from those before."""
        codes = self._space.codes(best)
        apart = np.ones(len(best), dtype=bool)
        found: list[int] = []
        while len(found) < BEST and apart.any():
            at = int(apart.argmax())
            found.append(best[at])
            apart &= (codes != codes[at]).sum(axis=1) >= ELITE_GAP
        return found

    def _mutants(self, numbers: Sequence[int], random: RandomState) -> list[int]:
        """Random points that differ from one of these in two parameters at most."""
        counts = np.array([len(each.values) for each in self._space.parameters])
        rows = np.arange(POOL)
        codes = self._space.codes(numbers)[random.randint(len(numbers), size=POOL)]
        for _ in range(2):
            columns = random.randint(len(counts), size=POOL)
            codes[rows, columns] = random.randint(counts[columns])
        found = self._space.numbers(codes)
        return [int(number) for number in found if number != ILLEGAL]

    def _near(self, best: Sequence[int]) -> list[int]:
        """The neighbours of the first of these points."""
        found: list[int] = []
        for number in best[:BEST]:
            if number not in self._neighbours:
                self._neighbours[number] = list(map(int, self._space.neighbours(number)))
            found += self._neighbours[number]
        return found

    def _logarithm(self, number: int) -> float:
        """The logarithm of the guess; infinite if there is none."""
        if self._guesses is None:
            return math.inf
        if number not in self._logarithms:
            guess = self._guesses(self._space.point(number))
            self._logarithms[number] = math.inf if guess is None else math.log(guess)
        return self._logarithms[number]

    def _trend(self, seen: Seen, numbers: Sequence[int], most: float) -> Floats:
        """Logarithms of the guesses, at most so far above the least one of a point with a value;
        the usual one where there is none.
        """
        usual = [each for each in map(self._logarithm, self.sample) if each < math.inf]
        middle = float(np.median(usual)) if usual else 0.0
        found = [self._logarithm(n) for n in [*numbers, *seen.best()]]
        filled = np.array([middle if each == math.inf else each for each in found])
        trend: Floats = np.minimum(filled, filled[len(numbers) :].min() + most)[: len(numbers)]
        return trend


def _order_is_wrong(seen: Seen) -> bool:
    """Whether of two evaluated points the later is the better one more often than by chance: by a
    deviation of Kendall's tau.
    """
    numbers = np.array(list(seen.values))
    values = np.array([math.inf if each is None else each for each in seen.values.values()])
    later = numbers[:, None] > numbers
    worse, better = values[:, None] > values, values[:, None] < values
    count = len(numbers)
    chance = math.sqrt(count * (count - 1) * (2 * count + 5) / 18)
    return int((later & better).sum()) - int((later & worse).sum()) > chance
