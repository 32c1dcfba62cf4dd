"""A warp: the registers of 32 lanes, which of them are active, and what the warp waits for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from flashgen.ptx.block import Block
from flashgen.ptx.clocks import ASYNC, GENERIC, Engine, ReleaseState
from flashgen.ptx.findings import Fault, Finding, Sanitizer
from flashgen.ptx.memory import Buffer, Stack
from flashgen.ptx.queue import Queue
from flashgen.ptx.types import Array, LaneMask, Undefined

LANES = np.arange(32)
ALL = np.ones(32, bool)


class Wait(NamedTuple):
    """What a blocked warp waits for, in words, and whether that has come. elsewhere: it comes from
    another block.
    """

    reason: Callable[[], str]
    ready: Callable[[], bool]
    elsewhere: bool = False


@dataclass
class Poll:
    """What a warp has read from global memory at each instruction; how many reads in a row, without
    a write between them, gave what the one before at their instruction gave; and the registers at
    one of these.
    """

    repeats: int = 0
    seen: dict[int, tuple[Buffer, Array, Array]] = field(default_factory=dict)
    position: int = -1
    registers: list[Any] = field(default_factory=list)


class Warp:
    """One warp of a block. registers: per register of the program an array of 32 lanes, or None
    while nothing was written to it. Arrays are never changed in place: a write replaces them.

    Lanes that diverged wait in `others` with their position. The lanes that are furthest back run
    first and join the others when they reach them, which is one of the orders that PTX allows.
    Those in `held` wait at a barrier until the others come, or have ended.
    """

    def __init__(self, block: Block, number: int) -> None:
        self.block = block
        self.number = number
        self.position = 0
        self.active: Array = ALL
        self.others: list[tuple[int, Array]] = []
        self.held: list[tuple[int, Array]] = []
        self.done = False
        self.wait: Wait | None = None
        self.registers: list[Any] = [None] * len(block.machine.program.registers)
        self.stack = Stack(block.machine.program.stack_bytes)
        self.carry: Array = np.zeros(32, bool)  # PTX ISA 9.7.2, CC.CF
        self.undefined: dict[int, Undefined] = {}  # registers with bits that nobody wrote
        self.made: dict[int, Array] = {}  # by groups of instructions that ran as one: fusion.py
        self.view = block.agents.view()
        self.view[GENERIC, number] = 1
        self.released = block.agents.view()  # what a fence has made known to relaxed arrivals
        self.relaxed = block.agents.view()  # what relaxed waits have seen, until a fence
        self.releases = ReleaseState()
        self.poll = Poll()
        self.register_limit = block.machine.program.max_registers or 0
        self.in_flight: set[int] = set()  # registers that wgmma will write
        self.fenced: list[Any] | None = None  # registers at the last wgmma.fence
        self.queues = {engine: Queue() for engine in Engine}
        self.awaited: dict[int, int] = {}  # the last phase that it awaited, by mbarrier
        self.special = _special_registers(block, number)

    @property
    def clock(self) -> int:
        """The count of this warp's own accesses."""
        return int(self.view[GENERIC, self.number])

    def places(self, count: int) -> int | Array:
        """Where it is in the program, for each of so many cells that it accesses."""
        return self.position

    def whole(self) -> Warp:
        """Itself: see Wide."""
        return self

    def divide(self) -> None:
        """Something that instructions which run as one must do one by one: see Wide."""

    def publish(self) -> Array:
        """What is ordered before an arrival of this warp; its later accesses are not."""
        objects = self.block.agents.engine(Engine.MBARRIER, self.number)
        self.view[GENERIC, objects] = self.clock
        published = self.view.copy()
        self.view[GENERIC, self.number] += 1
        return published

    def join(self, view: Array) -> None:
        """Order everything of a published view before what this warp does from now on."""
        np.maximum(self.view, view, out=self.view)

    def await_groups(self, engine: Engine, pending: int) -> None:
        """Complete all groups of an engine but the `pending` newest, and order them before what
        follows.
        """
        agent = self.block.agents.engine(engine, self.number)
        self.view[:, agent] = np.maximum(self.view[:, agent], self.queues[engine].wait(pending))

    def await_write(self, buffer: Buffer, at: Array, values: Array) -> None:
        """Wait until other values are in these words of a buffer, or until other warps have changed
        what the block shares.
        """
        before, words = self.block.shared_state(), buffer.words.of(values.itemsize)
        first = buffer.address + int(at.reshape(-1)[0]) * values.itemsize

        def ready() -> bool:
            return bool((words[at] != values).any()) or self.block.shared_state() != before

        self.wait = Wait(lambda: self.block.machine.memory.describe(first), ready, elsewhere=True)

    def perform(self, engine: Engine, work: Callable[[], None]) -> None:
        """Do a piece of work of the open group of an engine now, or when it is awaited."""
        early = self.block.coin()
        if early:
            work()
        self.queues[engine].open.append((lambda: None) if early else work)

    def fence(self, agents: Array | None = None) -> None:
        """Order what relaxed waits have seen before what follows, and what is before ahead of
        relaxed arrivals: of all agents, or of some.
        """
        chosen = slice(None) if agents is None else agents
        np.maximum(self.view, self.relaxed, out=self.view, where=_where(self.view, chosen))
        np.maximum(self.released, self.view, out=self.released, where=_where(self.view, chosen))
        self.view[GENERIC, self.number] += 1

    def fence_proxy(self) -> None:
        """Make what is ordered before this warp visible to the asynchronous proxy."""
        np.maximum(self.view[ASYNC], self.view[GENERIC], out=self.view[ASYNC])
        self.view[GENERIC, self.number] += 1

    def diverge(self, target: int, taken: Array) -> int:
        """Send the lanes `taken` to `target`; the others go on below. Returns where to go on."""
        self.others.append((target, taken))
        self.active = self.active & ~taken
        return self.position + 1

    def hold(self) -> bool:
        """Let the other lanes run before a barrier, which they may come to, too: they may also fail
        an assertion. False if there are none.
        """
        if self.others:
            self.held.append((self.position, self.active))
            self.active = np.zeros(32, bool)
            return True
        here = [lanes for position, lanes in self.held if position == self.position]
        self.held = [each for each in self.held if each[0] != self.position]
        active = np.logical_or.reduce([self.active, *here])
        self.active = ALL if active.all() else active
        return bool(here)

    def leave(self, lanes: Array) -> int:
        """End some lanes. Returns where the warp goes on."""
        self.active = self.active & ~lanes
        following = self.position + 1
        if not self.others and not self.active.any():
            if self.held:
                following, self.active = self.held.pop()
            else:
                self.done = True
        return following

    def reconverge(self) -> None:
        """Run the lanes that are furthest back, with all that are at the same position."""
        paths = [(self.position, self.active), *self.others] if self.active.any() else self.others
        self.position = min(position for position, _ in paths)
        active = np.zeros(32, bool)
        for position, lanes in paths:
            if position == self.position:
                active |= lanes
        self.others = [path for path in paths if path[0] != self.position]
        self.active = ALL if active.all() else active

    def finding(self, check: Sanitizer, message: str, lane: int | None = None) -> Finding:
        """A finding at the instruction that this warp runs."""
        machine = self.block.machine
        return Finding(
            check=check,
            message=message,
            instruction=machine.program.instructions[self.position],
            block=self.block.index,
            warp=self.number,
            lane=lane,
        )

    def report(
        self, check: Sanitizer, message: str, lane: int | None = None, about: str = ""
    ) -> None:
        """Record a finding after which the warp goes on, if its check is on."""
        if check in self.block.machine.checks:
            self.block.machine.report.add(self.finding(check, message, lane), about)

    def remark(self, check: Sanitizer, message: str) -> None:
        """Record what is no fault, if its check is on."""
        if check in self.block.machine.checks:
            self.block.machine.report.remark(self.finding(check, message))

    def fault(self, check: Sanitizer, message: str, lane: int | None = None) -> Fault:
        """A finding after which the warp cannot go on, to be raised."""
        return Fault(self.finding(check, message, lane))


def _where(view: Array, agents: Array | slice) -> Array:
    found = np.zeros(view.shape, bool)
    found[:, agents] = True
    return found


def lanes_of(mask: LaneMask) -> Array:
    """The numbers of the active lanes."""
    return LANES if mask is None else LANES[mask]


def only_lane(warp: Warp, mask: LaneMask) -> int:
    """The one active lane of an instruction that must be issued by one thread."""
    lanes = lanes_of(mask)
    if len(lanes) != 1:
        raise warp.fault(
            "synccheck", f"one thread of the warp must issue it: {len(lanes)} threads do"
        )
    return int(lanes[0])


def whole_warp(warp: Warp, mask: LaneMask) -> None:
    """Raise unless all 32 lanes are active, as .aligned instructions demand."""
    if mask is not None and np.count_nonzero(mask) < 32:
        raise warp.fault(
            "synccheck", f"all 32 lanes must execute it together: {int(mask.sum())} do"
        )


def _special_registers(block: Block, number: int) -> dict[str, Any]:
    """Special registers (PTX ISA, chapter 10): of all lanes, or an array of theirs."""
    threads = np.arange(number * 32, number * 32 + 32, dtype=np.uint32)
    values: dict[str, Any] = {
        "%laneid": LANES,
        "%warpid": number,
        "%nwarpid": block.machine.program.warps,
        "%smid": 0,
        "%nsmid": 1,
        "%lanemask_eq": 1 << LANES,
        "%lanemask_lt": (1 << LANES) - 1,
        "%lanemask_le": (2 << LANES) - 1,
        "%lanemask_gt": 0xFFFFFFFF - ((2 << LANES) - 1),
        "%lanemask_ge": 0xFFFFFFFF - ((1 << LANES) - 1),
        "%total_smem_size": block.shared.size,
        "%dynamic_smem_size": block.shared.size,
        "%cluster_ctarank": 0,
        "%cluster_nctarank": 1,
    }
    for axis, name in enumerate("xyz"):
        values[f"%tid.{name}"] = threads if axis == 0 else 0
        values[f"%ntid.{name}"] = block.machine.program.threads if axis == 0 else 1
        values[f"%ctaid.{name}"] = block.index[axis]
        values[f"%nctaid.{name}"] = block.machine.grid[axis]
        values[f"%clusterid.{name}"] = block.index[axis]
        values[f"%nclusterid.{name}"] = block.machine.grid[axis]
        values[f"%cluster_ctaid.{name}"] = 0
        values[f"%cluster_nctaid.{name}"] = 1
    return values


CLOCKS = ("%clock", "%clock64", "%globaltimer", "%clock_hi", "%globaltimer_lo", "%globaltimer_hi")
"""Special registers that move: with the instructions of the launch, and with each reading."""
