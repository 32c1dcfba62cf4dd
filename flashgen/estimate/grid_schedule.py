"""When the blocks of a grid end: each goes to the first SM with a free slot. Compiled by numba.

estimate/sm_clock.py replays one SM; here a block is a number of trips, and a trip a time.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import numpy as np

from flashgen.estimate.jit import jit

NEVER = 1e30
DONE_BELOW, DONE_SHARE = 1e-6, 1e-12
"""Cycles below which no work is left, and their share of the time until then."""


@jit
def list_schedule(kind_of, trips, cycles, overhead, sms, residents):
    """Cycles until the last block of a grid ends.

    kind_of: the kind of each block, in launch order. trips: (kind, phase), how often a block of
    that kind runs each phase. overhead: (kind,), cycles before and after. cycles: (blocks on the
    SM - 1, phase), the duration of a trip. Each block goes to an SM with a free slot, of those that
    have one at the same time to the one with the fewest blocks. Blocks on one SM slow one another,
    so a thin last wave runs faster.
    """
    blocks, phases = kind_of.shape[0], trips.shape[1]
    left = np.zeros((sms, residents, phases))
    start = np.zeros((sms, residents))
    held = np.zeros(sms, np.int64)
    since = np.zeros(sms)
    free_at = np.zeros(sms)
    launched, now = 0, 0.0
    while True:
        soon = now + max(DONE_BELOW, now * DONE_SHARE)
        free = np.flatnonzero(free_at <= soon)
        for m in free:
            if held[m] > 0:
                held[m] = _run(left[m], start[m], held[m], cycles, now - since[m], now)
            since[m] = now
        for level in range(residents):
            for m in free:
                if held[m] == level and launched < blocks:
                    left[m, level] = trips[kind_of[launched]]
                    start[m, level] = overhead[kind_of[launched]]
                    held[m] += 1
                    launched += 1
        for m in free:
            free_at[m] = _first_end(left[m], start[m], held[m], cycles, now)
        soonest = free_at.min()
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
            left[keeps] = left[b]
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
