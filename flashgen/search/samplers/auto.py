"""AutoProposer: flashgen's own sampler. It rates some candidates, never the whole of a large space.

It starts with the START best guesses or, if there are none, MIDDLE points near the middle of the
space, where fewer configs are bad. Points learnt before count, and one must have a value. From then
on it proposes the candidate with the largest expected improvement. Two things alternate, because
neither alternative is better everywhere:

  - The candidates. In turn: random points of the space, with neighbours of the BEST points;
    neighbours of elites, with random points that differ from one of them in two parameters; and
    points of another valley. Elites are good points that differ in ELITE_GAP parameters. A
    neighbour differs in one. A proposal for another valley keeps away from the value that the best
    point has in one parameter, and what it must improve is the best point without that value. The
    parameters are those by which the best seem most decided.
  - The process: numbers count as ordered, or as names like all else.

If the order of the space means something (Method.likely_first), it is a prior, applied as in
Hvarfner et al., piBO (ICLR 2022): the expected improvement is multiplied by the prior to the power
TRUST / n after n evaluations, so observations soon outweigh it. The prior of a point is
1 / (1 + TRUST * rank), with ranks from 0 to 1. Once the order has proved wrong, it does not count,
and other valleys are searched, too.

docs/lab-notes.md says what an ablation found of the constants.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import numpy as np
from numpy.random import RandomState
from numpy.typing import NDArray

from flashgen.search.points import ILLEGAL, Space
from flashgen.search.samplers import Proposer
from flashgen.search.samplers.surrogate import (
    TIE,
    Floats,
    Known,
    Process,
    choose_first,
    heights_of,
)
from flashgen.search.space import Method

START = 5
"""Points that are known before a process is fitted, where guesses or the order of the space say
which. A failure counts: where many fail, it is worth knowing soon which."""

MIDDLE, PART = 8, 4
"""How many central points a search starts with that knows nothing better, and in a small space one
in how many of its points at most."""

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

Kind = Literal["pool", "elites", "valley"]
TURNS: tuple[tuple[Kind, bool], ...] = (
    ("pool", True),
    ("elites", False),
    ("pool", False),
    ("valley", True),
)
"""The candidates of one proposal after the other, and whether numbers count as names."""

TRUST = 10.0
"""How much the order of a space counts, if it means something."""

LIKELY = 0.1
"""The share of such a space that a search starts in."""


class AutoProposer(Proposer):
    """Proposes by expected improvement. guesses: another model's prediction for the point of a
    number.

    If a point is learnt again, the last value counts.
    """

    def __init__(
        self,
        space: Space,
        method: Method,
        guesses: Callable[[int], float | None] | None = None,
    ) -> None:
        super().__init__(space)
        self._likely_first = method.likely_first
        self._random = RandomState(method.seed)
        self._guesses = guesses
        self._logarithms: dict[int, float] = {}  # of guesses
        self._neighbours: dict[int, list[int]] = {}
        self._processes = {
            names: Process(space.parameters, names_only=names) for names in (False, True)
        }
        drawn = self._random.permutation(space.draw(self._random, SAMPLE))
        self._sample: list[int] = drawn.tolist()
        for number in sorted(self._sample):
            self._logarithm(number)  # a guess that is none is refused before anything is evaluated
        self._turn = 0

    def propose(self, count: int) -> list[int]:
        """As Proposer.propose."""
        before = len(self._pending)
        while len(self._pending) < before + count and (found := self._next()):
            number, height = found
            self._pending[number] = height
        return list(self._pending)[before:]

    def _told(self, number: int, value: float | None, *, first: bool) -> None:
        self._pending.pop(number, None)

    def _next(self) -> tuple[int, float | None] | None:
        """A new point, with the height that is expected of it if any is; None if there is none."""
        known = any(value is not None for value in self._learnt.values())
        seen = len(self._learnt) + len(self._pending)
        if not known or (seen < START + MIDDLE and seen < self._start()):
            found = self._first()
        else:
            found = self._expected_best()
        if found is None:  # no candidate is new
            rest = next(filter(self._is_new, self._space), None)
            found = None if rest is None else (rest, None)
        return found

    def _new(self, numbers: Iterable[int]) -> list[int]:
        """The new points among these, in the order of the space."""
        return sorted(set(numbers).difference(self._learnt, self._pending, self._excluded))

    def _start(self) -> int:
        """How many points are known before a process is fitted."""
        central = max(START, min(MIDDLE, self._space.size // PART))
        if self._guesses is None and not self._likely_first:
            return central
        misled = self._guesses is None and self._order_is_wrong()
        return START + central if misled else START

    def _first(self) -> tuple[int, float | None] | None:
        """A point to start with: the best guess, or else the farthest from all others."""
        rest = list(filter(self._is_new, self._sample))
        if not rest:
            return None
        logarithms = [self._logarithm(number) for number in rest]
        if min(logarithms) < math.inf:
            return rest[logarithms.index(min(logarithms))], None
        seen = [*self._learnt, *self._pending]
        codes = self._space.codes(rest)
        gaps = np.full(len(rest), codes.shape[1])
        for each in self._space.codes(seen):
            np.minimum(gaps, (codes != each).sum(axis=1), out=gaps)
        if self._likely_first and len(seen) < START:
            inside = np.asarray(rest) < LIKELY * self._space.size
        else:
            inside = self._is_central(rest)
        gaps[~inside] = -1
        return rest[choose_first(gaps)], None

    def _is_central(self, numbers: Sequence[int]) -> NDArray[np.bool_]:
        """Whether these points are as near to the middle as the nearest CENTRAL of the sample.
        Parameters of no more than two numbers have no middle.
        """
        last = np.array([max(1, len(each.values) - 1) for each in self._space.parameters])
        long = np.array([each.ordered and len(each.values) > 2 for each in self._space.parameters])
        sample = self._space.codes(self._sample) / last
        middle = np.median(sample, axis=0)

        def far(ranks: Floats) -> Floats:
            apart = np.square(ranks - middle)
            total: Floats = (apart[:, long] if long.any() else apart).sum(axis=1)
            return total

        count = max(START, int(CENTRAL * len(sample)))
        limit = np.sort(far(sample))[:count][-1] + TIE
        near: NDArray[np.bool_] = far(self._space.codes(numbers) / last) <= limit
        return near

    def _expected_best(self) -> tuple[int, float] | None:
        """The candidate with the largest expected improvement, assuming that pending points turn
        out as expected (kriging believer); of equals the first in the space.
        """
        kind, names = TURNS[self._turn % len(TURNS)]
        self._turn += 1
        candidates, rivals = self._candidates(kind)
        if not candidates:
            candidates, rivals = self._candidates("pool")
        if not candidates:
            return None
        heights, best, on_logarithms = heights_of(list(self._learnt.values()))
        mean = float(heights.mean())
        believed = [mean if height is None else height for height in self._pending.values()]
        seen = [*self._learnt, *self._pending]
        trend: Floats = np.zeros(len(seen) + len(candidates))
        if self._guesses is not None and on_logarithms:
            trend = self._trend([*seen, *candidates], float(heights.max()) - best)
        known = Known(
            codes=self._space.codes(seen),
            heights=np.concatenate([heights, believed]),
            trend=trend[: len(seen)],
            evaluated=len(heights),
        )
        codes = self._space.codes(candidates)
        expected = self._processes[names].expect(known, codes, trend[len(seen) :])
        place = {number: at for at, number in enumerate(seen)}
        target = min(float(known.heights[place[number]]) for number in rivals)
        scores = expected.scores(target)
        if self._likely_first and not self._order_is_wrong():
            ranks = np.array(candidates) / self._space.size
            scores = scores - TRUST / len(seen) * np.log1p(TRUST * ranks)
        chosen = choose_first(scores)
        return candidates[chosen], float(expected.mean[chosen])

    def _candidates(self, kind: Kind) -> tuple[list[int], list[int]]:
        """New points of this kind, and the points that they are to improve."""
        order = sorted((value, n) for n, value in self._learnt.items() if value is not None)
        best, pending = [number for _, number in order], list(self._pending)
        if kind == "elites" and self._space.parameters:
            elites = self._elites(best)
            return self._new([*self._near(elites), *self._mutants(elites)]), best + pending
        pool = self._new([*self._near(best), *map(int, self._space.draw(self._random, POOL))])
        follows = self._likely_first and not self._order_is_wrong()
        if kind != "valley" or follows or not self._space.parameters:
            return pool, best + pending
        codes = self._space.codes(best)
        other = codes != codes[0]  # an argmax of 0 is none
        decided = np.argsort(np.where(other.any(axis=0), -other.argmax(axis=0), 1), kind="stable")
        column = decided[self._turn // len(TURNS) % min(BEST, len(decided))]
        valley = [number for number, differs in zip(best, other[:, column], strict=True) if differs]
        pool = self._new([*pool, *self._near(valley)])
        if not valley or not pool:
            return [], []
        away = self._space.codes(pool)[:, column] != codes[0, column]
        return [number for number, is_away in zip(pool, away, strict=True) if is_away], valley

    def _order_is_wrong(self) -> bool:
        """Whether of two evaluated points the later is the better one more often than by chance:
        by a deviation of Kendall's tau.
        """
        numbers = np.array(list(self._learnt))
        values = np.array([math.inf if each is None else each for each in self._learnt.values()])
        later = numbers[:, None] > numbers
        worse, better = values[:, None] > values, values[:, None] < values
        count = len(numbers)
        chance = math.sqrt(count * (count - 1) * (2 * count + 5) / 18)
        return int((later & better).sum()) - int((later & worse).sum()) > chance

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

    def _mutants(self, numbers: Sequence[int]) -> list[int]:
        """Random points that differ from one of these in two parameters at most."""
        counts = np.array([len(each.values) for each in self._space.parameters])
        rows = np.arange(POOL)
        codes = self._space.codes(numbers)[self._random.randint(len(numbers), size=POOL)]
        for _ in range(2):
            columns = self._random.randint(len(counts), size=POOL)
            codes[rows, columns] = self._random.randint(counts[columns])
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
            guess = self._guesses(number)
            self._logarithms[number] = math.inf if guess is None else math.log(guess)
        return self._logarithms[number]

    def _trend(self, numbers: Sequence[int], most: float) -> Floats:
        """Logarithms of the guesses, at most so far above the least one of a point with a value;
        the usual one where there is none.
        """
        known = [n for n, value in self._learnt.items() if value is not None]
        usual = [each for each in map(self._logarithm, self._sample) if each < math.inf]
        middle = float(np.median(usual)) if usual else 0.0
        found = [self._logarithm(n) for n in [*numbers, *known]]
        filled = np.array([middle if each == math.inf else each for each in found])
        trend: Floats = np.minimum(filled, filled[len(numbers) :].min() + most)[: len(numbers)]
        return trend
