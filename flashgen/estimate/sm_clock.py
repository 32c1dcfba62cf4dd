"""The clock of estimate/sm.py: issues one instruction after the other and counts the cycles.

This module and estimate/grid_schedule.py need numba, and they are imported when something is
replayed. One warp instruction issues per cycle on each of the SM's four sub-partitions. The next
issue of a warp is the latest of its stall count, the barriers it waits for, and its pipe. Of the
warps that could issue, the earliest goes first, and among equals the one that issued last. Pipes
belong to a sub-partition, except for those to shared memory and to L2, which the SM shares.

A wgmma holds its warp only while it issues. It is queued after those of its warp that have not
started, and the matrix pipe takes them in order of issue, whichever the warp. So a warp works
during its own products, and products of two warps interleave.
"""

# numba compiles these functions for the types it is called with; mypy sees neither those nor the
# fields of a record array.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, attr-defined"

from __future__ import annotations

import numpy as np

from flashgen.estimate.jit import jit

ALU, FMA, EXP2, MATRIX, SHARED, UNIFORM, CONTROL, HALF = range(8)
"""Pipes. CONTROL stands for what occupies none."""

(
    PLAIN, BARRIER, BARRIER_ARRIVE, COMMIT, WAIT_COPIES, WARPGROUP_ARRIVE, WAIT_WGMMA, COPY, LOAD,
    WGMMA, BULK_STORE, EXPECT, TMA, AWAIT, ARRIVE,
) = range(15)  # fmt: skip
"""What an instruction does beyond occupying its pipe."""

SUB_PARTITIONS = 4
NO_BARRIER = 6
"""Numbers of scoreboard barriers from here on mean none."""

RING = 64
"""How many groups of asynchronous work are remembered; an instruction can leave 63 under way."""

NAMED_BARRIERS = 16
AWAKE, WARPGROUP, DONE = -1, NAMED_BARRIERS, NAMED_BARRIERS + 1
"""What a warp sleeps on, other than a named barrier; DONE is final."""

SHARED_QUEUE = 24.0
"""Cycles of work that may queue for shared memory before a warp stalls at issue."""

READ_SHARED, READ_OTHER = 10.0, 8.0
"""Cycles until the operands of an instruction that says so are read."""

READ_CYCLES = 3
"""Cycles in which an instruction of fixed latency reads its operands; it waits for ports before."""

WGMMA_LATENCY, ARRIVE_LATENCY, LOOP_BACK = 18.0, 6.0, 4.0
"""From the end of the last product to its waiter; of WARPGROUP.ARRIVE; of a taken branch."""

NEVER = 1e30
SAME = 1e-9
"""Cycles within which two times count as equal."""


_WHOLE = ("block", "sub", "group", "start", "end", "leads", "counts", "pc", "trip", "asleep_on")
WARP = np.dtype(
    [(name, np.int64) for name in (*_WHOLE, "copies_begun", "products_begun", "products_done")]
    + [(name, np.int64) for name in ("queued", "multiplied")]
    + [(name, np.float64) for name in ("ready", "copying", "producing")]
    + [("falls", np.float64, 6), ("copies", np.float64, RING), ("products", np.float64, RING)]
    + [("queue", np.int64, RING), ("queued_at", np.float64, RING)],
    align=True,
)
"""A warp: its program.PLACE, and what changes while the clock runs.

pc, trip and asleep_on; ready, its next issue as far as the stall count tells; falls, when each of
its scoreboard barriers falls. Of its groups of copies, and of products (wgmma): how many it began,
when they end, in a ring, and the end of the one not yet committed (copying, producing). Of its
wgmma: how many were issued, and how many of them the matrix pipe took (queued, multiplied); which,
and when they were issued, in a ring.
"""

SUB = np.dtype(
    [
        ("port_free", np.float64),
        ("pipe_free", np.float64, 8),
        ("last_issued", np.int64),
        ("even_free", np.float64),
        ("odd_free", np.float64),
    ],
    align=True,
)
"""A sub-partition: from when on its issue port, its pipes and the read ports of its two banks of
registers are free, and the warp that issued last.
"""

MEETING = np.dtype([("last", np.float64), ("here", np.int64)], align=True)
"""A barrier where warps meet: how many are there, and since when the last of them."""

PHASE = np.dtype([("done_at", np.float64), ("last", np.float64), ("parts", np.int64)], align=True)
"""A phase of an mbarrier: its last part so far, how many there were, and when it was complete."""

SHARED_QUEUE_END, L2_QUEUE_END = range(2)
"""Places in `queues`, the ends of what is queued for shared memory and for L2."""


def replay(
    code, places, arrivals, credit, blocks, trips, l2_cycles_per_byte, barrier_late, stagger
):
    """Finish times (block, trip) in cycles; -1 in [0, 0] if the warps deadlock.

    code and places: arrays of loop_program.ROW and loop_program.PLACE. arrivals: the number of
    warps that complete a phase, by family of mbarriers. credit: warps that have already arrived, by
    named barrier. barrier_late: cycles from the last arrival to the waiters' next issue. stagger:
    cycles between the starts of blocks.
    """
    # Arrays are made here, by numpy: numba takes longer to compile that than the clock.
    warps = _warps(places, stagger)
    subs = np.zeros(SUB_PARTITIONS, SUB)
    subs["last_issued"] = -1
    meetings = np.zeros((blocks, len(credit)), MEETING)
    meetings["here"] = credit
    group_meetings = np.zeros(places["group"].max() + 1, MEETING)
    families = len(arrivals)
    most = trips * np.count_nonzero(code["kind"] >= EXPECT)
    phases = np.zeros((blocks, families, most), PHASE)
    phases["done_at"] = NEVER
    issued = np.zeros((blocks, families), np.int64)
    arrived, awaited = (np.zeros((len(warps), families), np.int64) for _ in range(2))
    finish = np.zeros((blocks, trips + 1))
    asynchronous = bool((code["kind"] == WGMMA).any())
    _run(
        code, warps, subs, np.zeros(2), meetings, group_meetings, phases, issued, arrived, awaited,
        finish, arrivals, trips, l2_cycles_per_byte, barrier_late, asynchronous,
    )  # fmt: skip
    return finish


def _warps(places, stagger):
    """All warps before their loops; those of later blocks start later."""
    warps = np.zeros(len(places), WARP)
    for name in places.dtype.names:
        warps[name] = places[name]
    warps["pc"], warps["asleep_on"] = places["start"], AWAKE
    warps["ready"] = places["block"] * stagger
    return warps


@jit
def _run(
    code, warps, subs, queues, meetings, group_meetings, phases, issued, arrived, awaited,
    finish, arrivals, trips, l2_cycles_per_byte, barrier_late, asynchronous,
):  # fmt: skip
    """Fill `finish`: every warp issues until all are done, or none can go on."""
    left = warps.shape[0]
    while left > 0:
        w, t = _next_issue(code, warps, subs, queues, phases, awaited)
        if asynchronous:
            multiplier, at = _next_product(warps, subs)
            if multiplier >= 0 and at <= t:
                warp = warps[multiplier]
                _multiply(code, warp, subs[warp.sub], queues, at)
                continue
        if w < 0:
            finish[0, 0] = -1.0
            return
        warp, row = warps[w], code[warps[w].pc]
        sub = subs[warp.sub]
        _read_registers(row, sub, w == sub.last_issued, t)
        sub.last_issued, sub.port_free = w, t + 1.0
        warp.ready = t + row.stall
        read, complete = _occupy(row, warp, sub, queues, t, l2_cycles_per_byte)
        if row.kind == COMMIT:
            _commit_copies(warp)
        elif row.kind in (BARRIER, BARRIER_ARRIVE):
            _meet(row, w, warps, meetings[warp.block, int(row.amount)], t, barrier_late)
        elif row.kind == WARPGROUP_ARRIVE:
            _meet_group(w, warps, group_meetings[warp.group], t)
        elif row.kind in (EXPECT, TMA) and warp.leads:
            of_family = phases[warp.block, row.count]
            _load(row, issued[warp.block], of_family, queues, t, l2_cycles_per_byte)
        elif row.kind == ARRIVE:
            phase = phases[warp.block, row.count, arrived[w, row.count]]
            _arrive(phase, t + row.latency, arrivals[row.count])
            arrived[w, row.count] += 1
        elif row.kind == AWAIT:
            number = awaited[w, row.count] - int(row.amount)
            if number >= 0:
                done = phases[warp.block, row.count, number].done_at
                complete = max(complete, done + row.latency)
            awaited[w, row.count] += 1
        if row.reads < NO_BARRIER:
            warp.falls[row.reads] = max(warp.falls[row.reads], read)
        if row.writes < NO_BARRIER:
            warp.falls[row.writes] = max(warp.falls[row.writes], complete)
        left -= _advance(warp, finish, t, trips)


@jit
def _next_issue(code, warps, subs, queues, phases, awaited):
    """The warp that issues next, and when: the earliest, among equals the one that issued last.

    (-1, NEVER) if none can, except after a product that it waits for.
    """
    chosen, soonest = -1, NEVER
    for w in range(warps.shape[0]):
        warp = warps[w]
        if warp.asleep_on != AWAKE:
            continue
        row, sub = code[warp.pc], subs[warp.sub]
        if row.kind == AWAIT:
            number = awaited[w, row.count] - int(row.amount)
            if number >= 0 and phases[warp.block, row.count, number].done_at == NEVER:
                continue  # what completes this phase has not started
        if row.kind == WGMMA and warp.queued - warp.multiplied == RING:
            continue
        at = _earliest(row, warp, sub, queues, w == sub.last_issued)
        if at < soonest - SAME or (at < soonest + SAME and w == sub.last_issued):
            chosen, soonest = w, at
    return chosen, soonest


@jit
def _next_product(warps, subs):
    """The warp whose wgmma a matrix pipe takes next, and when: of those that can start first,
    the one that was issued first. (-1, NEVER) if none waits.
    """
    chosen, soonest, oldest = -1, NEVER, NEVER
    for w in range(warps.shape[0]):
        warp = warps[w]
        if warp.queued > warp.multiplied:
            issued = warp.queued_at[warp.multiplied % RING]
            at = max(issued, subs[warp.sub].pipe_free[MATRIX])
            if at < soonest - SAME or (at < soonest + SAME and issued < oldest):
                chosen, soonest, oldest = w, at, issued
    return chosen, soonest


@jit
def _earliest(row, warp, sub, queues, again):
    """When a warp may issue its next instruction, ignoring mbarriers.

    again: the sub-partition issued last for this very warp.
    """
    at = max(warp.ready, sub.port_free)
    if row.waits:
        for barrier in range(NO_BARRIER):
            if (row.waits >> barrier) & 1:
                at = max(at, warp.falls[barrier])
    if row.pipe == SHARED:
        at = max(at, queues[SHARED_QUEUE_END] - SHARED_QUEUE)
    elif row.pipe != CONTROL and row.kind != WGMMA:
        at = max(at, sub.pipe_free[row.pipe])
    even, odd = (row.again_even, row.again_odd) if again else (row.even, row.odd)
    if even > 0:
        at = max(at, sub.even_free + even - max(READ_CYCLES, even))
    if odd > 0:
        at = max(at, sub.odd_free + odd - max(READ_CYCLES, odd))
    if row.kind == WAIT_COPIES and warp.copies_begun > row.count:
        at = max(at, warp.copies[(warp.copies_begun - row.count - 1) % RING])
    elif row.kind == WAIT_WGMMA and warp.products_begun > row.count:
        at = max(at, warp.products[(warp.products_begun - row.count - 1) % RING])
    return at


@jit
def _read_registers(row, sub, again, t):
    """Occupies the read ports of both banks from cycle t on, one register of a warp per cycle
    each.
    """
    even, odd = (row.again_even, row.again_odd) if again else (row.even, row.odd)
    if even > 0:
        sub.even_free = max(sub.even_free, t) + even
    if odd > 0:
        sub.odd_free = max(sub.odd_free, t) + odd


@jit
def _occupy(row, warp, sub, queues, t, l2_cycles_per_byte):
    """Occupies the pipe from cycle t on; returns when the operands are read and when the result
    is there.
    """
    if row.pipe == SHARED:
        start = max(t + 2.0, queues[SHARED_QUEUE_END])
        end = start + row.shared
        queues[SHARED_QUEUE_END] = end
        if row.kind in (COPY, LOAD):
            end = max(start, queues[L2_QUEUE_END]) + row.amount * l2_cycles_per_byte
            queues[L2_QUEUE_END] = end
            if row.kind == COPY:
                warp.copying = max(warp.copying, end + row.latency)
        return start + READ_SHARED, end + row.latency
    if row.kind == WGMMA:
        place = warp.queued % RING
        warp.queue[place], warp.queued_at[place] = warp.pc, t
        warp.queued += 1
        if row.commits:
            warp.products[warp.products_begun % RING] = NEVER  # until the pipe took the last of it
            warp.products_begun += 1
        return t + READ_OTHER, t + READ_OTHER
    if row.kind == BULK_STORE:
        warp.copying = max(warp.copying, t + row.latency)
        return t + READ_OTHER, t + READ_OTHER
    if row.pipe == CONTROL:
        # TMA takes its operands at once; the tile comes later, and an mbarrier tells of it.
        late = READ_OTHER if row.kind == TMA else row.latency
        return t + late, t + late
    sub.pipe_free[row.pipe] = t + row.occupies
    return t + READ_OTHER, t + row.occupies + row.latency


@jit
def _multiply(code, warp, sub, queues, t):
    """The matrix pipe takes a warp's next wgmma in cycle t, and reads its tiles from shared memory
    meanwhile.
    """
    row = code[warp.queue[warp.multiplied % RING]]
    if warp.queued - warp.multiplied == RING:
        warp.ready = max(warp.ready, t)  # its next wgmma had to wait for this place
    warp.multiplied += 1
    queues[SHARED_QUEUE_END] = max(t, queues[SHARED_QUEUE_END]) + row.shared
    end = max(t + row.occupies, queues[SHARED_QUEUE_END])
    sub.pipe_free[MATRIX] = end
    warp.producing = max(warp.producing, end + WGMMA_LATENCY)
    if row.commits:
        warp.products[warp.products_done % RING] = warp.producing
        warp.products_done += 1


@jit
def _commit_copies(warp):
    """Closes a group of copies, which ends no earlier than the one before it."""
    begun = warp.copies_begun
    before = warp.copies[(begun - 1) % RING] if begun > 0 else 0.0
    warp.copies[begun % RING] = max(warp.copying, before)
    warp.copies_begun = begun + 1
    warp.copying = 0.0


@jit
def _meet(row, w, warps, meeting, t, barrier_late):
    """Warp w has reached a named barrier of its block; the last to arrive wakes those that wait."""
    meeting.here += 1
    meeting.last = max(meeting.last, t)
    name = int(row.amount)
    if row.kind == BARRIER:
        warps[w].asleep_on = name
    if meeting.here >= row.count:
        meeting.here -= row.count
        for other in warps:
            if other.block == warps[w].block and other.asleep_on == name:
                other.asleep_on = AWAKE
                other.ready = max(other.ready, meeting.last + barrier_late)
        meeting.last = 0.0


@jit
def _meet_group(w, warps, meeting, t):
    """Warp w has reached the point where its warpgroup starts together."""
    meeting.here += 1
    meeting.last = max(meeting.last, t)
    warps[w].asleep_on = WARPGROUP
    if meeting.here == SUB_PARTITIONS:
        for other in warps:
            if other.group == warps[w].group and other.asleep_on == WARPGROUP:
                other.asleep_on = AWAKE
                other.ready = max(other.ready, meeting.last + ARRIVE_LATENCY)
        meeting.here, meeting.last = 0, 0.0


@jit
def _load(row, issued, phases, queues, t, l2_cycles_per_byte):
    """A role's first warp starts a phase (EXPECT), or makes TMA load for the one it started
    last.
    """
    if row.kind == EXPECT:
        issued[row.count] += 1
        return
    queues[L2_QUEUE_END] = max(t, queues[L2_QUEUE_END]) + row.amount * l2_cycles_per_byte
    phase = phases[issued[row.count] - 1]
    phase.last = max(phase.last, queues[L2_QUEUE_END] + row.latency)
    if row.commits:
        phase.done_at = phase.last


@jit
def _arrive(phase, at, needed):
    """A warp's arrival completes a phase if it is the last of those needed."""
    phase.last = max(phase.last, at)
    phase.parts += 1
    if phase.parts == needed:
        phase.done_at = phase.last


@jit
def _advance(warp, finish, t, trips):
    """Moves a warp to its next instruction; returns 1 at the end of its last trip, else 0."""
    warp.pc += 1
    if warp.pc < warp.end:
        return 0
    warp.pc = warp.start
    warp.trip += 1
    warp.ready += LOOP_BACK
    if warp.counts:
        finish[warp.block, warp.trip] = max(finish[warp.block, warp.trip], t)
    if warp.trip < trips:
        return 0
    warp.asleep_on = DONE
    return 1
