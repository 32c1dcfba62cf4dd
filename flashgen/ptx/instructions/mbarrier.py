"""Mbarriers: phases that complete by arrivals and bytes (PTX ISA 9.7.13.15)."""

from __future__ import annotations

import numpy as np

from flashgen.ptx.access import active, note_shared_write, report_conflict, shared_offsets
from flashgen.ptx.block import Block, Mbarrier
from flashgen.ptx.clocks import GENERIC, Engine
from flashgen.ptx.decode import Form, instruction
from flashgen.ptx.findings import Fault, Finding
from flashgen.ptx.memory import SHARED_BASE
from flashgen.ptx.program import Address
from flashgen.ptx.types import FORMATS, Array, DecodedStep, LaneMask
from flashgen.ptx.warp import ALL, Wait, Warp, lanes_of

MOST_COUNT = 2**20 - 1
"""Arrivals and bytes of one phase (9.7.13.15.2, "Contents of the mbarrier object")."""


def find(warp: Warp, address: int) -> Mbarrier:
    """The mbarrier at a shared address, whose initialisation must be ordered before."""
    barrier = warp.block.mbarriers.get(address)
    if barrier is None or not barrier.valid:
        raise warp.fault("synccheck", f"there is no mbarrier at byte {address - SHARED_BASE}")
    shadow = warp.block.shadow
    if shadow is not None:
        if barrier.cells is None:
            barrier.cells = shadow.cells(np.array([address - SHARED_BASE]), 8)
        conflict = shadow.note_read(
            barrier.cells, warp.view[GENERIC], warp.number, warp.clock, warp.position
        )
        if conflict is not None:
            doing = f"uses the mbarrier at byte {shadow.byte(conflict.at)} of shared memory"
            report_conflict(warp, conflict, doing)
    return barrier


def arrive(warp: Warp, address: int, count: int = 1, *, relaxed: bool = False) -> None:
    """Arrive at an mbarrier. A relaxed arrival orders only what a fence was before."""
    barrier = find(warp, address)
    if barrier.pending < count:
        raise warp.fault(
            "synccheck",
            f"{count} arrivals at {warp.block.describe_mbarrier(address)}, which is in "
            f"{barrier.describe()}",
        )
    published = warp.released if relaxed else warp.publish()
    np.maximum(barrier.arrived, published, out=barrier.arrived)
    barrier.pending -= count
    barrier.settle()


def complete(block: Block, address: int, published: Array, gone: Finding) -> None:
    """Arrive for an asynchronous operation that is complete. gone: what is wrong if the mbarrier
    expects no arrival. Raises a Fault.
    """
    barrier = block.mbarriers.get(address)
    if barrier is None or not barrier.valid or not barrier.pending:
        raise Fault(gone)
    np.maximum(barrier.arrived, published, out=barrier.arrived)
    barrier.pending -= 1
    barrier.settle()


def expect(warp: Warp, address: int, count: int) -> None:
    """Make the phase wait for so many bytes."""
    barrier = find(warp, address)
    barrier.bytes += count
    if abs(barrier.bytes) > MOST_COUNT:
        raise warp.fault("synccheck", f"an mbarrier expects {barrier.bytes} bytes in one phase")


_HINTS = ("shared", "shared::cta", "b64", "release", "acquire", "cta", "cluster")


@instruction("mbarrier.init")
def initialise(form: Form) -> DecodedStep:
    """9.7.13.15.9: a new object in phase 0."""
    form.hint(*_HINTS)
    address, count = form.address(0, 4), form.number(1, "u32")

    def step(warp: Warp, mask: LaneMask) -> None:
        places = np.unique(active(address(warp), mask))
        counts = active(count(warp), mask)
        for place in map(int, places):
            at = shared_offsets(warp, np.array([place]), 8, mask, "initialises")
            if place in warp.block.mbarriers and warp.block.mbarriers[place].valid:
                warp.report("synccheck", "it initialises an mbarrier that is in use")
            note_object(warp, at)
            warp.block.new_mbarrier(place, int(counts[0]))

    return step


@instruction("mbarrier.inval")
def invalidate(form: Form) -> DecodedStep:
    """9.7.13.15.10: the memory may be used for something else."""
    form.hint(*_HINTS)
    address = form.address(0, 4)

    def step(warp: Warp, mask: LaneMask) -> None:
        for place in map(int, np.unique(active(address(warp), mask))):
            barrier = find(warp, place)
            if barrier.bytes:
                raise warp.fault(
                    "synccheck",
                    f"it invalidates {warp.block.describe_mbarrier(place)} in {barrier.describe()}",
                )
            barrier.valid = False
            note_object(warp, np.array([place - SHARED_BASE]))

    return step


def note_object(warp: Warp, at: Array, size: int = 8) -> None:
    """Record that an object is made or ends here. Both proxies see that: Triton's programs use the
    place for copies of the TMA unit after a barrier, without a fence between the proxies.
    """
    agent = warp.block.agents.engine(Engine.MBARRIER, warp.number)
    warp.view[GENERIC, agent] = warp.clock
    note_shared_write(warp, at, size, agent=agent, count=warp.clock)


@instruction("mbarrier.arrive")
def arrive_by_lane(form: Form) -> DecodedStep:
    """9.7.13.15.13, .expect_tx first; each active lane arrives."""
    expects, relaxed = form.flag("expect_tx"), form.flag("relaxed")
    form.hint(*_HINTS, "noComplete", "shared::cluster")
    has_state = not isinstance(form.operands[0], Address)
    address = form.address(int(has_state), 4)
    rest = form.operands[1 + has_state :]
    number = form.numbers(rest[0], FORMATS["u32"]) if rest else None
    store = form.store(form.operands[0] if has_state else None)

    def step(warp: Warp, mask: LaneMask) -> None:
        places = address(warp)
        numbers = None if number is None else number(warp)
        states = np.zeros(32, np.uint64)
        for lane in lanes_of(mask):
            place = int(places[lane])
            given = 1 if numbers is None else int(numbers[lane])
            states[lane] = find(warp, place).phase
            if expects:
                expect(warp, place, given)
            arrive(warp, place, 1 if expects else given, relaxed=relaxed)
        store(warp, states, mask)

    return step


@instruction("mbarrier.expect_tx", "mbarrier.complete_tx")
def transact(form: Form) -> DecodedStep:
    """9.7.13.15.11 and 9.7.13.15.12."""
    form.hint(*_HINTS, "shared::cluster", "relaxed")
    address, number = form.address(0, 4), form.number(1, "u32")
    factor = 1 if form.opcode == "mbarrier.expect_tx" else -1

    def step(warp: Warp, mask: LaneMask) -> None:
        for lane in lanes_of(mask):
            place = int(address(warp)[lane])
            expect(warp, place, factor * int(number(warp)[lane]))
            find(warp, place).settle()

    return step


@instruction("mbarrier.test_wait", "mbarrier.try_wait")
def wait(form: Form) -> DecodedStep:
    """9.7.13.15.16: whether a phase is complete. try_wait may suspend the warp, and always does
    here until the phase is complete; test_wait lets other warps go on.
    """
    blocks = form.opcode == "mbarrier.try_wait"
    by_parity, relaxed = form.flag("parity"), form.flag("relaxed")
    form.hint(*_HINTS, "shared::cluster")
    write, address = form.store(form.operands[0]), form.address(1, 4)
    wanted = form.number(2, "u32" if by_parity else "u64")

    def step(warp: Warp, mask: LaneMask) -> int | None:
        places, phases = active(address(warp), mask), active(wanted(warp), mask)
        place, phase = int(places[0]), int(phases[0])
        if np.count_nonzero(places != place) or np.count_nonzero(phases != phase):
            raise warp.fault("synccheck", "its lanes wait for different mbarriers or phases")
        barrier = find(warp, place)

        def done() -> bool:
            return barrier.phase % 2 != phase & 1 if by_parity else barrier.phase > phase

        if done():
            if relaxed:
                np.maximum(warp.relaxed, barrier.view, out=warp.relaxed)
            else:
                warp.join(barrier.view)
            _check_awaited(warp, place, barrier)
            write(warp, ALL, mask)
            return None
        if blocks:
            warp.wait = Wait(
                lambda: f"{warp.block.describe_mbarrier(place)} in {barrier.describe()}", done
            )
            return warp.position
        warp.wait = Wait(lambda: "its turn", lambda: True)
        write(warp, ~ALL, mask)
        return None

    return step


def _check_awaited(warp: Warp, place: int, barrier: Mbarrier) -> None:
    """Report a warp that waits for a phase it has waited for: a parity that was not flipped."""
    phase = barrier.phase - 1
    if warp.awaited.get(place) == phase:
        warp.report(
            "synccheck",
            f"it waits again for phase {phase} of {warp.block.describe_mbarrier(place)}, "
            "which it has waited for",
        )
    warp.awaited[place] = phase
