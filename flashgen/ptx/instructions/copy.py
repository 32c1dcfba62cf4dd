"""cp.async: copies from global to shared memory, waited for in groups (PTX ISA 9.7.9.25.3)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from flashgen.ptx.access import active, find_global, note_global, note_shared_write, shared_offsets
from flashgen.ptx.clocks import GENERIC, Engine
from flashgen.ptx.decode import Form, OperandReader, instruction
from flashgen.ptx.instructions import mbarrier
from flashgen.ptx.instructions.move import CACHING
from flashgen.ptx.memory import Buffer, Words
from flashgen.ptx.program import Number, Register
from flashgen.ptx.types import Array, DecodedStep, LaneMask
from flashgen.ptx.warp import Warp, lanes_of


@instruction("cp.async.commit_group")
def commit(form: Form) -> DecodedStep:
    """9.7.9.25.3.2: closes the group of the copies so far."""
    return lambda warp, mask: warp.queues[Engine.COPY].commit()


@instruction("cp.async.wait_group")
def wait(form: Form) -> DecodedStep:
    """9.7.9.25.3.3: wait for all groups but some of the newest."""
    pending = form.constant(0)
    return lambda warp, mask: warp.await_groups(Engine.COPY, pending)


@instruction("cp.async.wait_all")
def wait_for_all(form: Form) -> DecodedStep:
    """9.7.9.25.3.3: wait for all copies."""
    return lambda warp, mask: _complete(warp)


def _complete(warp: Warp) -> None:
    warp.queues[Engine.COPY].commit()
    warp.await_groups(Engine.COPY, 0)


@instruction("cp.async.mbarrier.arrive")
def arrive(form: Form) -> DecodedStep:
    """9.7.13.15.15: an arrival once all copies so far are complete, which they are at once here."""
    form.hint("shared", "shared::cta", "b64")
    counted = form.flag("noinc")
    address = form.address(0, 4)

    def step(warp: Warp, mask: LaneMask) -> None:
        _complete(warp)
        for lane in lanes_of(mask):
            place = int(address(warp)[lane])
            if not counted:
                mbarrier.find(warp, place).pending += 1
            mbarrier.arrive(warp, place)

    return step


@instruction("cp.async")
def copy(form: Form) -> DecodedStep:
    """9.7.9.25.3.1: `size` bytes a lane; those beyond the source size are zeros."""
    form.hint(*CACHING, "shared", "shared::cta", "global")
    operand = form.operands[2]
    if not isinstance(operand, Number) or int(operand.text, 0) not in (4, 8, 16):
        form.wrong("cp.async copies 4, 8 or 16 bytes")
    size = int(operand.text, 0)
    target, source = form.address(0, 4), form.address(1, 8)
    given = None
    if len(form.operands) > 3:
        last = form.operands[3]
        if isinstance(last, Register) and last.type == "pred":
            given = _unless(form.predicate(last), size)
        else:
            given = form.number(3, "u32")

    def step(warp: Warp, mask: LaneMask) -> None:
        to, of = active(target(warp), mask), active(source(warp), mask)
        at = shared_offsets(warp, to, size, mask, "copies to")
        lengths = np.full(len(to), size) if given is None else active(given(warp), mask).astype(int)
        reads = _sources(warp, of, lengths, size, mask)
        group = warp.queues[Engine.COPY].current
        agent = warp.block.agents.engine(Engine.COPY, warp.number)
        note_shared_write(warp, at, size, agent=agent, count=group, proxy=GENERIC)
        words, first = warp.block.shared.words.of(size), at // size

        def land() -> None:
            values = np.zeros(len(first), words.dtype)
            for lanes, held, begin, length in reads:
                if length == size:
                    values[lanes] = held.of(size)[begin // size]
                    continue
                rows = held.bytes[begin[:, None] + np.arange(length)]
                values.view(np.uint8).reshape(len(first), size)[lanes, :length] = rows
            words[first] = values

        warp.perform(Engine.COPY, land)

    return step


def _unless(ignored: OperandReader, size: int) -> OperandReader:
    """The bytes of a source, of which lanes that ignore it have none."""
    return lambda warp: np.where(ignored(warp), 0, size)


def _sources(
    warp: Warp, addresses: Array, lengths: Array, size: int, mask: LaneMask
) -> list[tuple[Array, Words, Array, int]]:
    """What the lanes read: which lanes, of which memory, from which offsets, how many bytes."""
    found = []
    alike = (lengths == lengths[0]).all()
    for length in map(int, lengths[:1] if alike else np.unique(lengths)):
        if not 0 <= length <= size:
            raise warp.fault("memcheck", f"it copies {length} of {size} bytes")
        if not length:
            continue
        which = np.arange(len(lengths)) if alike else np.flatnonzero(lengths == length)
        unit = length if length == size else 1
        for part, buffer in _parts(warp, addresses, which, unit, mask):
            begin = (addresses[part] - np.uint64(buffer.address)).astype(np.int64)
            note_global(warp, buffer, begin, length, writes=False)
            found.append((part, buffer.words, begin, length))
    return found


def _parts(
    warp: Warp, addresses: Array, lanes: Array, unit: int, mask: LaneMask
) -> Iterator[tuple[Array, Buffer]]:
    """Lanes with the buffer that they read: all of them, or each one if they read several."""
    buffer = find_global(warp, addresses[lanes], unit, mask, "copies from")
    if buffer is not None:
        yield lanes, buffer
        return
    for lane in lanes:
        buffer = find_global(warp, addresses[[lane]], unit, mask, "copies from")
        assert buffer is not None
        yield np.array([lane]), buffer
