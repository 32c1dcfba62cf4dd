"""The clock of scoreboard.py: issues one instruction after the other and counts the cycles.

The only importer of numba, and nothing imports it before something is to be replayed. One warp
instruction issues a cycle on each of the SM's four sub-partitions. The next issue of a warp is the
latest of its stall count, the barriers it waits for, and its pipe; of the warps that could issue,
the earliest goes first, and among equals the one that went last. Pipes are of a sub-partition,
but for the one to shared memory and the one to L2, which the SM shares.
"""

# numba compiles these functions for the types it is called with; mypy sees no types here.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import numba
import numpy as np

ALU, FMA, EXP2, MATRIX, SHARED, UNIFORM, CONTROL, HALF = range(8)
"""Pipes. CONTROL stands for what occupies none."""

(
    PLAIN,
    BARRIER,
    BARRIER_ARRIVE,
    COMMIT,
    WAIT_COPIES,
    WARPGROUP_ARRIVE,
    WAIT_WGMMA,
    COPY,
    LOAD,
    WGMMA,
    EXPECT,
    TMA,
    AWAIT,
    ARRIVE,
) = range(14)
"""What an instruction does beyond occupying its pipe."""

WARPS, SUB_PARTITIONS = 32, 4
RING = 256
"""Groups of asynchronous work a warp may have begun in a replay."""

NAMED_BARRIERS = 16
AWAKE, WARPGROUP = -1, NAMED_BARRIERS
"""What a warp sleeps on, where it is no named barrier."""

SHARED_QUEUE = 24.0
"""Cycles of work that may queue for shared memory before a warp stalls at issue."""

READ_SHARED, READ_OTHER = 10.0, 8.0
"""Cycles until the operands of an instruction that says so are read."""

WGMMA_LATENCY, ARRIVE_LATENCY, LOOP_BACK = 18.0, 6.0, 4.0
"""From the end of the last product to its waiter; of WARPGROUP.ARRIVE; of a taken branch."""

NEVER = 1e30


@numba.njit(cache=True)
def replay(
    pipe,
    occupies,
    latency,
    kind,
    count,
    amount,
    shared,
    stall,
    writes,
    reads,
    waits,
    commits,
    warp_block,
    warp_sub,
    warp_group,
    warp_start,
    warp_end,
    warp_leads,
    warp_counts,
    arrivals,
    credit,
    blocks,
    trips,
    l2_cycles_per_byte,
    barrier_latency,
    stagger,
):
    """Finish times (block, trip) in cycles; -1 in [0, 0] where the warps wait for one another.

    Arrays of one entry an instruction: pipe, occupies and latency (cycles), kind, count (what a
    wait leaves under way, a barrier's warps, or a family of mbarriers), amount (bytes, or by how
    many phases a wait lags), shared (cycles of shared memory), stall, writes and reads (the barrier
    set, or 7), waits (mask), commits (1 on the last of a group of wgmma, or of a phase's loads by
    TMA). Of one entry a warp: its block, sub-partition and warpgroup, its first and last
    instruction, whether it leads its role, whether its trips count. arrivals: how many warps
    complete a phase, by family of mbarriers. credit: warps already arrived, by named barrier.
    """
    warps = warp_block.shape[0]
    families = arrivals.shape[0]
    pc = warp_start.copy()
    trip = np.zeros(warps, np.int64)
    ready = np.zeros(warps)
    falls = np.zeros((warps, 6))
    copies = np.zeros((warps, RING))
    copies_begun = np.zeros(warps, np.int64)
    copying = np.zeros(warps)
    products = np.zeros((warps, RING))
    products_begun = np.zeros(warps, np.int64)
    producing = np.zeros(warps)
    pipe_free = np.zeros((SUB_PARTITIONS, 8))
    port_free = np.zeros(SUB_PARTITIONS)
    shared_free = 0.0
    l2_free = 0.0
    here = np.zeros((blocks, NAMED_BARRIERS), np.int64)
    here_last = np.zeros((blocks, NAMED_BARRIERS))
    for b in range(blocks):
        for n in range(NAMED_BARRIERS):
            here[b, n] = credit[n]
    groups = 0
    for w in range(warps):
        groups = max(groups, warp_group[w] + 1)
    group_here = np.zeros(groups, np.int64)
    group_last = np.zeros(groups)
    phases = 4 * trips + 64
    done_at = np.full((blocks, families, phases), NEVER)
    done_last = np.zeros((blocks, families, phases))
    done_parts = np.zeros((blocks, families, phases), np.int64)
    issued = np.zeros((blocks, families), np.int64)
    arrived = np.zeros((warps, families), np.int64)
    awaited = np.zeros((warps, families), np.int64)
    asleep_on = np.full(warps, AWAKE)
    finished = np.zeros(warps, np.int64)
    finish = np.zeros((blocks, trips + 1))
    last_issued = np.full(SUB_PARTITIONS, -1)
    for w in range(warps):
        ready[w] = warp_block[w] * stagger
    left = warps
    while left > 0:
        chosen = -1
        soonest = NEVER
        for w in range(warps):
            if finished[w] == 1 or asleep_on[w] != AWAKE:
                continue
            s = warp_sub[w]
            k = pc[w]
            at = max(ready[w], port_free[s])
            mask = waits[k]
            if mask:
                for b in range(6):
                    if (mask >> b) & 1 and falls[w, b] > at:
                        at = falls[w, b]
            p = pipe[k]
            does = kind[k]
            if p == SHARED:
                at = max(at, shared_free - SHARED_QUEUE)
            elif p != CONTROL and does != WGMMA:
                at = max(at, pipe_free[s, p])
            if does == WAIT_COPIES:
                group = copies_begun[w] - count[k] - 1
                if group >= 0:
                    at = max(at, copies[w, group % RING])
            elif does == WAIT_WGMMA:
                group = products_begun[w] - count[k] - 1
                if group >= 0:
                    at = max(at, products[w, group % RING])
            elif does == AWAIT:
                phase = awaited[w, count[k]] - int(amount[k])
                if phase >= 0 and done_at[warp_block[w], count[k], phase] == NEVER:
                    continue  # nobody has begun what completes this phase
            if at < soonest - 1e-9 or (at < soonest + 1e-9 and w == last_issued[s]):
                soonest = at
                chosen = w
        if chosen < 0:
            finish[0, 0] = -1.0
            return finish
        w = chosen
        s = warp_sub[w]
        block = warp_block[w]
        k = pc[w]
        t = soonest
        last_issued[s] = w
        port_free[s] = t + 1.0
        p = pipe[k]
        does = kind[k]
        complete = t + latency[k]
        ready[w] = t + stall[k]
        if p == SHARED:
            start = max(t + 2.0, shared_free)
            shared_free = start + shared[k]
            complete = shared_free + latency[k]
            if does in (COPY, LOAD):
                l2_free = max(start, l2_free) + amount[k] * l2_cycles_per_byte
                complete = l2_free + latency[k]
                if does == COPY:
                    copying[w] = max(copying[w], complete)
            read = start + READ_SHARED
        elif does == WGMMA:
            end = max(t, pipe_free[s, p]) + max(occupies[k], SUB_PARTITIONS * shared[k])
            pipe_free[s, p] = end
            complete = end
            producing[w] = max(producing[w], end + WGMMA_LATENCY)
            if commits[k] == 1:
                products[w, products_begun[w] % RING] = producing[w]
                products_begun[w] += 1
            read = t + READ_OTHER
        elif p != CONTROL:
            pipe_free[s, p] = t + occupies[k]
            complete = t + occupies[k] + latency[k]
            read = t + READ_OTHER
        else:
            read = t + latency[k]

        if does == COMMIT:
            group_end = copying[w]
            if copies_begun[w] > 0:
                group_end = max(group_end, copies[w, (copies_begun[w] - 1) % RING])
            copies[w, copies_begun[w] % RING] = group_end
            copies_begun[w] += 1
            copying[w] = 0.0
        elif does in (BARRIER, BARRIER_ARRIVE):
            name = int(amount[k])
            here[block, name] += 1
            here_last[block, name] = max(here_last[block, name], t)
            if does == BARRIER:
                asleep_on[w] = name
            if here[block, name] >= count[k]:
                here[block, name] -= count[k]
                for v in range(warps):
                    if warp_block[v] == block and asleep_on[v] == name:
                        asleep_on[v] = AWAKE
                        ready[v] = max(ready[v], here_last[block, name] + barrier_latency)
                here_last[block, name] = 0.0
        elif does == WARPGROUP_ARRIVE:
            g = warp_group[w]
            group_here[g] += 1
            group_last[g] = max(group_last[g], t)
            asleep_on[w] = WARPGROUP
            if group_here[g] == SUB_PARTITIONS:
                for v in range(warps):
                    if warp_group[v] == g and asleep_on[v] == WARPGROUP:
                        asleep_on[v] = AWAKE
                        ready[v] = max(ready[v], group_last[g] + ARRIVE_LATENCY)
                group_here[g] = 0
                group_last[g] = 0.0
        elif does == EXPECT and warp_leads[w] == 1:
            issued[block, count[k]] += 1
        elif does == TMA and warp_leads[w] == 1:
            f = count[k]
            l2_free = max(t, l2_free) + amount[k] * l2_cycles_per_byte
            phase = issued[block, f] - 1
            done_last[block, f, phase] = max(done_last[block, f, phase], l2_free + latency[k])
            if commits[k] == 1:
                done_at[block, f, phase] = done_last[block, f, phase]
        elif does == ARRIVE:
            f = count[k]
            phase = arrived[w, f]
            arrived[w, f] += 1
            done_last[block, f, phase] = max(done_last[block, f, phase], t + latency[k])
            done_parts[block, f, phase] += 1
            if done_parts[block, f, phase] == arrivals[f]:
                done_at[block, f, phase] = done_last[block, f, phase]
        elif does == AWAIT:
            f = count[k]
            phase = awaited[w, f] - int(amount[k])
            awaited[w, f] += 1
            if phase >= 0:
                complete = max(complete, done_at[block, f, phase] + latency[k])

        if reads[k] < 6:
            falls[w, reads[k]] = max(falls[w, reads[k]], read)
        if writes[k] < 6:
            falls[w, writes[k]] = max(falls[w, writes[k]], complete)

        pc[w] += 1
        if pc[w] == warp_end[w]:
            pc[w] = warp_start[w]
            trip[w] += 1
            if warp_counts[w] == 1:
                finish[block, trip[w]] = max(finish[block, trip[w]], t)
            ready[w] += LOOP_BACK
            if trip[w] == trips:
                finished[w] = 1
                left -= 1
    return finish


@numba.njit(cache=True)
def list_schedule(kind_of, trips, cycles, overhead, sms, residents):
    """Cycles until the last block of a grid ends.

    kind_of: the kind of each block, in launch order. trips: (kind, phase), how often a block of
    that kind goes through each phase. cycles: (blocks on the SM - 1, phase), what a trip takes.
    Blocks go to the SMs in turn until all are full, then each to the first that has room; those of
    an SM slow one another, so that a last wave runs the faster for being thin.
    """
    blocks, phases = kind_of.shape[0], trips.shape[1]
    left = np.zeros((sms, residents, phases))
    start = np.zeros((sms, residents))
    held = np.zeros(sms, np.int64)
    since = np.zeros(sms)
    free_at = np.full(sms, NEVER)
    launched = 0
    for _ in range(residents):
        for m in range(sms):
            if launched < blocks:
                left[m, held[m]] = trips[kind_of[launched]]
                start[m, held[m]] = overhead
                held[m] += 1
                launched += 1
    for m in range(sms):
        free_at[m] = _first_end(left[m], start[m], held[m], cycles, 0.0)
    end = 0.0
    while True:
        m = int(np.argmin(free_at))
        now = free_at[m]
        if now >= NEVER:
            return end
        end = now
        passed = now - since[m]
        pace = cycles[held[m] - 1]
        keeps = 0
        for b in range(held[m]):
            time = passed
            used = min(start[m, b], time)
            start[m, b] -= used
            time -= used
            rest = start[m, b]
            for p in range(phases):
                used = min(left[m, b, p], time / pace[p])
                left[m, b, p] -= used
                time -= used * pace[p]
                rest += left[m, b, p] * pace[p]
            if rest > 1e-6:
                left[m, keeps] = left[m, b]
                start[m, keeps] = start[m, b]
                keeps += 1
        for _ in range(held[m] - keeps):
            if launched < blocks:
                left[m, keeps] = trips[kind_of[launched]]
                start[m, keeps] = overhead
                keeps += 1
                launched += 1
        held[m] = keeps
        since[m] = now
        free_at[m] = _first_end(left[m], start[m], keeps, cycles, now)


@numba.njit(cache=True)
def _first_end(left, start, held, cycles, now):
    """When the first of an SM's blocks ends, if none comes or goes before."""
    soonest = NEVER
    for b in range(held):
        ends = now + start[b]
        for p in range(left.shape[1]):
            ends += left[b, p] * cycles[held - 1, p]
        soonest = min(soonest, ends)
    return soonest
