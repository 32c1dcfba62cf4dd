"""When the blocks of a grid end: each goes to the first SM with a free slot. Compiled by numba.

estimate/sm_clock.py replays one SM; here a block is a number of trips, and a trip a time.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import Any

import numpy as np

from flashgen.estimate.jit import jit

NEVER = 1e30
DONE_BELOW, DONE_SHARE = 1e-6, 1e-12
"""Cycles below which no work is left, and their share of the time until then."""


def list_schedule(
    kind_of: Any, trips: Any, cycles: Any, overhead: Any, sms: int, residents: int
) -> float:
    """Cycles until the last block of a grid ends.

    kind_of: the kind of each block, in launch order. trips: (kind, phase), how often a block of
    that kind runs each phase. overhead: (kind,), cycles before and after. cycles: (blocks on the
    SM - 1, phase), the duration of a trip. Each block goes to an SM with a free slot, of those that
    have one at the same time to the one with the fewest blocks. Blocks on one SM slow one another,
    so a thin last wave runs faster.
    """
    # Arrays are made here, by numpy: numba takes as long to compile that as all the rest.
    left = np.zeros((sms, residents, trips.shape[1]))
    end: float = _schedule(
        kind_of, trips, cycles, overhead, left, np.zeros((sms, residents)),
        np.zeros(sms, np.int64), np.zeros(sms), np.zeros(sms), np.zeros(sms, np.int64),
    )  # fmt: skip
    return end


@jit
def _schedule(kind_of, trips, cycles, overhead, left, start, held, since, free_at, free):
    """list_schedule, of arrays by SM: what is left of its blocks, how many it holds, since when its
    blocks are advanced, when its first ends, and, for as many as there are, which can take another.
    """
    blocks, residents = kind_of.shape[0], left.shape[1]
    launched, now = 0, 0.0
    while True:
        soon = now + max(DONE_BELOW, now * DONE_SHARE)
        count = 0
        for m in range(free_at.shape[0]):
            if free_at[m] <= soon:
                free[count] = m
                count += 1
        for m in free[:count]:
            if held[m] > 0:
                held[m] = _run(left[m], start[m], held[m], cycles, now - since[m], now)
            since[m] = now
        for level in range(residents):
            for m in free[:count]:
                if held[m] == level and launched < blocks:
                    for p in range(trips.shape[1]):
                        left[m, level, p] = trips[kind_of[launched], p]
                    start[m, level] = overhead[kind_of[launched]]
                    held[m] += 1
                    launched += 1
        for m in free[:count]:
            free_at[m] = _first_end(left[m], start[m], held[m], cycles, now)
        soonest = NEVER
        for at in free_at:
            soonest = min(soonest, at)
        if soonest >= NEVER:
            return now
        now = soonest


@jit
def _run(left, start, held, cycles, passed, now):
    """Advance the blocks of an SM by this number of cycles; returns how many are not done.

    Those are moved to the front of `left` and `start`.
    """
    pace = cycles[held - 1]
    keeps = 0
    for b in range(held):
        time = passed
        used = min(start[b], time)
        start[b] -= used
        time -= used
        rest = start[b]
        for p in range(left.shape[1]):
            used = min(left[b, p], time / pace[p])
            left[b, p] -= used
            time -= used * pace[p]
            rest += left[b, p] * pace[p]
        # What is left of a block must be more than the clock can tell apart this late.
        if rest > max(DONE_BELOW, now * DONE_SHARE):
            for p in range(left.shape[1]):
                left[keeps, p] = left[b, p]
            start[keeps] = start[b]
            keeps += 1
    return keeps


@jit
def _first_end(left, start, held, cycles, now):
    """When the first of an SM's blocks ends, if none starts or ends before."""
    soonest = NEVER
    for b in range(held):
        ends = now + start[b]
        for p in range(left.shape[1]):
            ends += left[b, p] * cycles[held - 1, p]
        soonest = min(soonest, ends)
    return soonest
