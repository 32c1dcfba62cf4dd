"""AutoProposer: flashgen's own sampler. It rates some candidates, never the whole of a large space.

It starts with the START best guesses or, if there are none, MIDDLE points near the middle of the
space, where fewer configs are bad, and SPREAD points that are far apart: a process that has seen
only the middle is misled. Points learnt before count, and LEAST_KNOWN must
have values. From then on it proposes the candidate with the largest expected improvement. Two
things alternate, because neither alternative is better everywhere:

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
1 / (1 + DECAY * rank), with ranks from 0 to 1.
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

START, LEAST_KNOWN = 5, 3
"""Points that are known before a process is fitted, and those of them that did not fail. A
failure counts among the first: where many fail, it is worth knowing soon which."""

SAMPLE = 2000
"""Random points that the starting points are chosen from."""

CENTRAL = 0.05
"""The share of them, nearest to the middle of the space, that a search starts in."""

MIDDLE, SPREAD, INNER = 8, 3, 0.5
"""How many central points there are, how many follow that are far apart, and the share of the
sample that these are drawn from: the corners are left out. With fewer central points a search
learns sooner, but a wide valley traps it more often.
"""

PART = 4
"""One in so many points of a small space is such a point at most, but START are."""

POOL = 400
"""Random points among the candidates; all points of a space that has no more than WHOLE."""

WHOLE = 1000
BEST = 3
"""How many good points have candidates next to them, and how many valleys are searched in turn."""

ELITES, ELITE_GAP = 3, 3
"""How many elites there are, and in how many parameters any two differ at least."""

Kind = Literal["pool", "elites", "valley"]
TURNS: tuple[tuple[Kind, bool], ...] = (
    ("pool", True),
    ("elites", False),
    ("pool", False),
    ("valley", True),
)
"""The candidates of one proposal after the other, and whether numbers count as names."""

TRUST, DECAY = 10.0, 10.0
LIKELY = 0.1
"""The share of a space whose order means something that a search starts in."""


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
        plain = guesses is None and not method.likely_first
        self._start = min(MIDDLE + SPREAD, max(START, space.size // PART)) if plain else START
        self._logarithms: dict[int, float] = {}  # of guesses
        self._neighbours: dict[int, list[int]] = {}
        self._processes = {
            names: Process(space.parameters, names_only=names) for names in (False, True)
        }
        drawn = self._random.permutation(space.draw(self._random, SAMPLE))
        self._sample: list[int] = drawn.tolist()
        for number in sorted(self._sample):
            self._logarithm(number)  # a guess that is none is refused before anything is evaluated
        self._pending: dict[int, float | None] = {}  # with the heights that are expected
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
        known = sum(value is not None for value in self._learnt.values())
        missing = max(self._start - len(self._learnt), LEAST_KNOWN - known)
        if not known or missing > len(self._pending):
            found = self._first()
        else:
            found = self._expected_best()
        if found is None:  # no candidate is new
            rest = next(filter(self._is_new, self._space), None)
            found = None if rest is None else (rest, None)
        return found

    def _is_new(self, number: int) -> bool:
        """Whether a point was neither proposed nor learnt."""
        return not any(number in each for each in (self._learnt, self._pending, self._excluded))

    def _new(self, numbers: Iterable[int]) -> list[int]:
        """The new points among these, in the order of the space."""
        return sorted(filter(self._is_new, set(numbers)))

    def _first(self) -> tuple[int, float | None] | None:
        """A point to start with: the best guess, or else the farthest from all others."""
        rest = list(filter(self._is_new, self._sample))
        if not rest:
            return None
        logarithms = [self._logarithm(number) for number in rest]
        if min(logarithms) < math.inf:
            return rest[logarithms.index(min(logarithms))], None
        seen = [*self._learnt, *self._pending]
        central = not self._likely_first and len(seen) < MIDDLE
        if self._likely_first:
            inside = np.asarray(rest) < LIKELY * self._space.size
        else:
            inside = self._inside(rest, central=central)
        places = self._space.codes if central else self._ranks
        points = places(rest)
        gaps = np.where(inside, float(points.shape[1]), -1.0)
        for each in places(seen):
            apart = points != each if central else np.abs(points - each)
            np.minimum(gaps, apart.sum(axis=1), out=gaps)
        return rest[choose_first(gaps)], None

    def _inside(self, numbers: Sequence[int], *, central: bool) -> NDArray[np.bool_]:
        """Whether these points are as near to the middle as the nearest CENTRAL, or INNER, of the
        sample. Central points are so in parameters of more than two numbers; the others have no
        middle.
        """
        sample = self._ranks(self._sample)
        middle = np.median(sample, axis=0)
        long = np.array([each.ordered and len(each.values) > 2 for each in self._space.parameters])

        def far(ranks: Floats) -> Floats:
            apart = np.abs(ranks - middle)
            if central:
                apart = np.square(apart[:, long] if long.any() else apart)
            total: Floats = apart.sum(axis=1)
            return total

        count = max(MIDDLE, int((CENTRAL if central else INNER) * len(sample)))
        limit = np.sort(far(sample))[:count][-1] + TIE
        inside: NDArray[np.bool_] = far(self._ranks(numbers)) <= limit
        return inside

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
        if self._likely_first:
            ranks = np.array(candidates) / self._space.size
            scores = scores - TRUST / len(seen) * np.log1p(DECAY * ranks)
        chosen = choose_first(scores)
        return candidates[chosen], float(expected.mean[chosen])

    def _candidates(self, kind: Kind) -> tuple[list[int], list[int]]:
        """New points of this kind, and the points that they are to improve."""
        order = sorted((value, n) for n, value in self._learnt.items() if value is not None)
        best, pending = [number for _, number in order], list(self._pending)
        if kind == "elites" and self._space.parameters:
            elites = self._elites(best)
            return self._new([*self._near(elites), *self._mutants(elites)]), best + pending
        count = WHOLE if self._space.size <= WHOLE else POOL
        pool = self._new([*self._near(best), *map(int, self._space.draw(self._random, count))])
        if kind != "valley" or self._likely_first or not self._space.parameters:
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

    def _elites(self, best: Sequence[int]) -> list[int]:
        """The first of these points, and the next that differ enough from those before."""
        codes = self._space.codes(best)
        differ = np.full(len(best), ELITE_GAP)
        found: list[int] = []
        while len(found) < ELITES and (differ >= ELITE_GAP).any():
            at = int((differ >= ELITE_GAP).argmax())
            found.append(best[at])
            differ = np.minimum(differ, (codes != codes[at]).sum(axis=1))
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

    def _ranks(self, numbers: Sequence[int]) -> Floats:
        """The codes of these points, scaled to 0..1."""
        last = [max(1, len(each.values) - 1) for each in self._space.parameters]
        return self._space.codes(numbers) / np.array(last, dtype=np.float64)

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
