"""Accesses to memory by the lanes of a warp, with the checks: bounds, alignment, races, contents.

Addresses are those of the active lanes; values have one row a lane.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from flashgen.ptx import poll, releases
from flashgen.ptx.clocks import ASYNC, GENERIC, Engine
from flashgen.ptx.memory import BadAddress, Buffer
from flashgen.ptx.releases import MemoryOrder, synchronize
from flashgen.ptx.shadow import Conflict
from flashgen.ptx.types import Array, LaneMask
from flashgen.ptx.warp import LANES, Warp, lanes_of


def active(values: Array, mask: LaneMask) -> Array:
    """The values of the active lanes."""
    return values if mask is None else values[mask]


def spread(values: Array, mask: LaneMask) -> Array:
    """One row for each of 32 lanes: those of the active ones, zeros for the others."""
    if mask is None:
        return values
    found = np.zeros((32, *values.shape[1:]), values.dtype)
    found[mask] = values
    return found


def _bad_lane(warp: Warp, mask: LaneMask, error: BadAddress, doing: str) -> Exception:
    warp.divide()
    lane = None if error.lane is None else int(lanes_of(mask)[error.lane])
    return warp.fault("memcheck", f"it {doing} {error.message}", lane)


# Shared memory


def shared_offsets(warp: Warp, addresses: Array, size: int, mask: LaneMask, doing: str) -> Array:
    """Where an access to shared memory lies; raises a Fault if outside or misaligned."""
    try:
        return warp.block.shared.offsets(addresses, size)
    except BadAddress as error:
        raise _bad_lane(warp, mask, error, doing) from None


def read_shared(
    warp: Warp, addresses: Array, unit: int, count: int, mask: LaneMask, used: Sequence[int] = ()
) -> Array:
    """`count` integers of `unit` bytes per active lane. used: the integers that matter, where a
    vector has some that nobody uses.
    """
    at = shared_offsets(warp, addresses, unit * count, mask, "reads")
    if used:
        for which in used:
            note_shared_read(warp, at + unit * which, unit)
    else:
        note_shared_read(warp, at, unit * count)
    words = warp.block.shared.words.of(unit)
    first = at // unit
    found: Array = words[first[:, None] + LANES[:count]]
    return found


def write_shared(warp: Warp, addresses: Array, values: Array, mask: LaneMask) -> None:
    """Store a row of integers per active lane."""
    unit, count = values.dtype.itemsize, values.shape[1]
    at = shared_offsets(warp, addresses, unit * count, mask, "writes")
    words, places = warp.block.shared.words.of(unit), (at // unit)[:, None] + LANES[:count]
    # Warps may write what is there already, as Triton's do where a value is that of all of them.
    note_shared_write(warp, at, unit * count, changes=lambda: bool((words[places] != values).any()))
    words[places] = values


def note_shared_read(
    warp: Warp,
    offsets: Array,
    size: int,
    *,
    engine: Engine | None = None,
    count: int = 0,
    order: Array | None = None,
) -> None:
    """Check and record a read of `size` bytes at each offset, by the warp or by an engine of it,
    which reads through the asynchronous proxy.
    """
    block = warp.block
    shadow = block.shadow
    if shadow is None:
        return
    cells = shadow.cells(offsets, size)
    missing = shadow.unwritten(cells)
    if missing is not None:
        warp.report(
            "initcheck",
            f"it reads byte {shadow.byte(missing)} of shared memory, which nobody has written",
        )
    if engine is None:
        agent, count, seen = warp.number, warp.clock, warp.view[GENERIC]
    else:
        agent = block.agents.engine(engine, warp.number)
        seen = block.agents.order(warp.view, ASYNC) if order is None else order
    conflict = shadow.note_read(cells, seen, agent, count, warp.places(len(cells)))
    if conflict is not None:
        by = "" if engine is None else f" through {engine.value}"
        report_conflict(
            warp, conflict, f"reads byte {shadow.byte(conflict.at)} of shared memory{by}"
        )


def note_shared_write(
    warp: Warp,
    offsets: Array,
    size: int,
    *,
    agent: int | None = None,
    count: int = 0,
    proxy: int = GENERIC,
    changes: Callable[[], bool] = lambda: True,
) -> None:
    """Check and record a write, by the warp or by another agent. changes: whether it writes another
    value than there is; if not, it does not race with the other write.
    """
    block, shadow = warp.block, warp.block.shadow
    if shadow is None:
        return
    if agent is None:
        agent, count = warp.number, warp.clock
    cells = shadow.cells(offsets, size)
    order = block.agents.order(warp.view, proxy)
    conflict = shadow.check_write(cells, order, warp.view[GENERIC])
    if conflict is not None and not (conflict.wrote and not changes()):
        report_conflict(warp, conflict, f"writes byte {shadow.byte(conflict.at)} of shared memory")
    shadow.note_write(cells, agent, count, warp.places(len(cells)))


def report_conflict(warp: Warp, conflict: Conflict, doing: str) -> None:
    """A race in shared or tensor memory as a finding; doing: what the warp does, and where."""
    earlier = warp.block.machine.program.instructions[conflict.position]
    what = "wrote" if conflict.wrote else "reads or has read"
    where = f" at {earlier.source}" if earlier.source else f" at PTX line {earlier.line}"
    warp.report(
        "racecheck",
        f"it {doing}, which {conflict.earlier} {what}{where}, and nothing orders the two",
    )


# The stack


def stack_places(
    warp: Warp, addresses: Array, unit: int, count: int, mask: LaneMask, doing: str
) -> Array:
    """Where an access to the stack lies; raises a Fault if outside or misaligned."""
    try:
        return warp.stack.places(lanes_of(mask), addresses, unit, count)
    except BadAddress as error:
        raise _bad_lane(warp, mask, error, doing) from None


# Global memory


def find_global(
    warp: Warp, addresses: Array, size: int, mask: LaneMask, doing: str
) -> Buffer | None:
    """The buffer of an access by the active lanes; None if they are in several."""
    machine = warp.block.machine
    try:
        return machine.memory.find(addresses, size)
    except BadAddress as error:
        if machine.program.loads_address(machine.program.instructions[warp.position]):
            error.message += "; the address was loaded from memory: pass its tensor in memory=[...]"
        raise _bad_lane(warp, mask, error, doing) from None
    except LookupError:
        warp.divide()
        return None


def read_global(
    warp: Warp,
    addresses: Array,
    unit: int,
    count: int,
    mask: LaneMask,
    order: MemoryOrder | None = None,
) -> Array:
    """`count` integers of `unit` bytes per active lane. order: None of a weak read."""
    buffer = find_global(warp, addresses, unit * count, mask, "reads")
    if buffer is None:
        rows = [
            read_global(warp, addresses[n : n + 1], unit, count, _one(mask, n), order)
            for n in range(len(addresses))
        ]
        joined: Array = np.concatenate(rows)
        return joined
    at = (addresses - np.uint64(buffer.address)).astype(np.int64)
    if order is None:
        note_global(warp, buffer, at, unit * count, writes=False)
    else:
        synchronize(warp, addresses, order)
    places = (at // unit)[:, None] + LANES[:count]
    found: Array = buffer.words.of(unit)[places]
    poll.note(warp.whole(), buffer, places, found)
    return found


def write_global(
    warp: Warp, addresses: Array, values: Array, mask: LaneMask, order: MemoryOrder | None = None
) -> None:
    """Store a row of integers per active lane. order: None of a weak write."""
    unit, count = values.dtype.itemsize, values.shape[1]
    buffer = find_global(warp, addresses, unit * count, mask, "writes")
    if buffer is None:
        for n in range(len(addresses)):
            write_global(warp, addresses[n : n + 1], values[n : n + 1], _one(mask, n), order)
        return
    at = (addresses - np.uint64(buffer.address)).astype(np.int64)
    words, places = buffer.words.of(unit), (at // unit)[:, None] + LANES[:count]

    def changes() -> bool:
        return bool((words[places] != values).any())

    if order is None:
        note_global(warp, buffer, at, unit * count, writes=True, changes=changes)
    else:
        synchronize(warp, addresses, order, written=addresses, replaces=True)
    words[places] = values
    warp.poll.repeats = 0


def _one(mask: LaneMask, which: int) -> Array:
    chosen = np.zeros(32, bool)
    chosen[lanes_of(mask)[which]] = True
    return chosen


def note_global(
    warp: Warp,
    buffer: Buffer,
    offsets: Array,
    size: int,
    *,
    writes: bool,
    changes: Callable[[], bool] = lambda: True,
) -> None:
    """Check and record an access to a tensor that is not atomic. changes: as note_shared_write."""
    machine = warp.block.machine
    shadow = machine.shadow_of(buffer)
    if shadow is None or not len(offsets):
        return
    cells, block, order = shadow.cells(offsets, size), warp.block.number, warp.view[GENERIC]
    known = releases.known(warp) if warp.block.acquired else {}
    check = shadow.check_write if writes else shadow.check_read
    found = check(cells, block, order, known)
    if found is not None and not (writes and found[2] and not changes()):
        cell, earlier, wrote = found
        who = (
            "another warp" if earlier == block else f"block {earlier}" if earlier >= 0 else "others"
        )
        warp.report(
            "racecheck",
            f"it {'writes' if writes else 'reads'} byte {shadow.byte(cell) - buffer.begin} of "
            f"{buffer.name}, which {who} {'wrote' if wrote else 'read'}, "
            "and nothing orders the two",
        )
    if writes:
        shadow.note_write(cells, block, warp.number, warp.clock)
    else:
        shadow.note_read(cells, block, order, known, warp.number, warp.clock)
