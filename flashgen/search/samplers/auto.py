"""AutoProposer: flashgen's own sampler, which rates every point of a finite space.

It starts with the best guesses, or with random points if there are none, until START points are
known and LEAST_KNOWN of them have values, including those learnt before. From then on it proposes
the points with the largest expected improvement of the surrogate.

The order of a space is a prior: likely points come first. It is applied as in Hvarfner et al., piBO
(ICLR 2022): the expected improvement is multiplied by the prior to the power TRUST / n after n
evaluations, so observations soon outweigh it. The prior of a point is 1 / (1 + DECAY * rank), with
ranks from 0 to 1.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import numpy as np

from flashgen.search.samplers import P, Proposer
from flashgen.search.samplers.surrogate import Surrogate, choose_first
from flashgen.search.space import Point, parameters_of

START, LEAST_KNOWN = 5, 3
"""Points that are known before the surrogate is asked, and those of them that did not fail. A
failure counts among the first: where many fail, it is worth knowing soon which."""

TRUST, DECAY = 10.0, 10.0


class AutoProposer(Proposer[P]):
    """Proposes by expected improvement. guesses: one for each of `legal`, if any.

    If a point is learnt again, the last value counts.
    """

    def __init__(
        self,
        legal: Sequence[P],
        point_of: Callable[[P], Point],
        seed: int,
        guesses: Sequence[float | None] | None = None,
    ) -> None:
        super().__init__(legal)
        self._points = list(self._legal)
        points = [point_of(point) for point in self._points]
        self._surrogate = Surrogate(points, parameters_of(points), guesses)
        self._first = list(range(len(points)))
        random.Random(seed).shuffle(self._first)
        if guesses is not None:
            opinions = [math.inf if guess is None else guess for guess in guesses]
            self._first.sort(key=opinions.__getitem__)
        ranks = np.arange(len(points)) / len(points)
        self._log_belief = -np.log1p(DECAY * ranks)
        self._pending: dict[int, None] = {}

    def propose(self, count: int) -> list[P]:
        """As Proposer.propose."""
        known = sum(value is not None for value in self._learnt.values())
        missing = max(START - len(self._learnt), LEAST_KNOWN - known)
        left = len(self._points) - len(self._learnt) - len(self._pending)
        count = min(count, left)
        by_chance = count if not known else missing - len(self._pending)
        before = len(self._pending)
        self._draw(max(0, min(count, by_chance)))
        self._expect_most(count - (len(self._pending) - before))
        return [self._points[number] for number in list(self._pending)[before:]]

    def _told(self, point: P, value: float | None, *, first: bool) -> None:
        self._pending.pop(self._legal[point], None)

    def _draw(self, count: int) -> None:
        """Propose `count` points in the random order drawn at the start."""
        for number in self._first:
            if count <= 0:
                return
            if number not in self._pending and self._points[number] not in self._learnt:
                self._pending[number] = None
                count -= 1

    def _expect_most(self, count: int) -> None:
        """Propose `count` points greedily by expected improvement, assuming the mean for pending
        ones (kriging believer).

        Of equals the first in the space.
        """
        if count <= 0:
            return
        seen = [self._legal[point] for point in self._learnt]
        expectation = self._surrogate.expect(seen, list(self._learnt.values()))
        for number in self._pending:
            expectation.believe(number)
        for _ in range(count):
            scores = expectation.scores() + TRUST / len(seen) * self._log_belief
            scores[[*seen, *self._pending]] = -math.inf
            best = choose_first(scores)
            self._pending[best] = None
            expectation.believe(best)
