"""A block: its shared memory, its barriers and what is under way for it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from flashgen.ptx.clocks import Agents, Engine, Views
from flashgen.ptx.machine import Machine
from flashgen.ptx.memory import SHARED_BASE, SharedMemory
from flashgen.ptx.shadow import SharedShadow
from flashgen.ptx.tensor_memory import TensorMemory
from flashgen.ptx.types import Array


@dataclass
class Mbarrier:
    """An mbarrier object (PTX ISA 9.7.13.15): a phase completes when no arrival and no byte is
    pending. view: what is ordered before the completion of the last phase; arrived: before that of
    this one.
    """

    expected: int
    agent: int
    view: Array
    arrived: Array
    phase: int = 0
    pending: int = 0
    bytes: int = 0
    valid: bool = True
    cells: Array | None = None  # of the shadow

    def __post_init__(self) -> None:
        self.pending = self.expected

    def settle(self) -> None:
        """Complete the phase if nothing is pending."""
        if self.pending == 0 and self.bytes == 0:
            self.phase += 1
            self.pending = self.expected
            self.arrived[:, self.agent] = self.phase
            self.view = self.arrived.copy()

    def describe(self) -> str:
        """The state in words."""
        missing = f"{self.pending} of {self.expected} arrivals and {self.bytes} bytes"
        return f"phase {self.phase}, which lacks {missing}"


@dataclass
class NamedBarrier:
    """One of the 16 barriers of a block (PTX ISA 9.7.13.1, "bar"): the warps that have arrived, and
    what completes it for those that wait.
    """

    view: Array
    threads: int
    arrived: list[int] = field(default_factory=list)
    waiting: list[Callable[[NamedBarrier], None]] = field(default_factory=list)
    votes: list[Array] = field(default_factory=list)
    complete: bool = False


class Block:
    """The state of one block. rng draws the order of everything that PTX leaves open."""

    def __init__(self, machine: Machine, index: tuple[int, int, int], rng: random.Random) -> None:
        self.machine, self.index, self.rng = machine, index, rng
        x, y, _ = machine.grid
        self.number = index[0] + x * (index[1] + y * index[2])
        program = machine.program
        self.agents = Agents(program.warps, machine.loaded.engines)
        self.shared = SharedMemory(machine.shared_bytes)
        shadowed = machine.checks & {"racecheck", "initcheck"}
        self.shadow = (
            SharedShadow(self.agents, machine.shared_bytes, machine.shared_cell)
            if shadowed
            else None
        )
        self.mbarriers: dict[int, Mbarrier] = {}
        self.named: dict[int, NamedBarrier] = {}
        self.copies: list[Callable[[], None]] = []
        self.free_registers = 0
        self.makes_way = False  # for other blocks, although its warps could go on
        self.warpgroups: dict[int, Any] = {}  # see instructions/wgmma.py
        self.acquired: list[tuple[int, int, Views]] = []  # by which warp, at which count
        self.tensor_memory = (
            TensorMemory(self.agents, shadowed=bool(shadowed))
            if Engine.TENSOR in machine.loaded.engines
            else None
        )

    def shared_state(self) -> tuple[object, ...]:
        """What its warps tell each other by."""
        phases = [(each.phase, each.pending) for each in self.mbarriers.values()]
        return self.shared.words.bytes.tobytes(), *phases

    def coin(self) -> bool:
        """Whether something happens as early as it may, or as late."""
        return self.rng.random() < 0.5

    @property
    def under_way(self) -> int:
        """How many asynchronous operations may complete next: every copy, and of the work of the
        tensor cores the oldest.
        """
        memory = self.tensor_memory
        return len(self.copies) + (memory is not None and len(memory.work) > 0)

    def land_one(self) -> bool:
        """Let one operation under way complete; whether there was one."""
        count = self.under_way
        if not count:
            return False
        which = self.rng.randrange(count)
        if which < len(self.copies):
            self.copies.pop(which)()
        elif self.tensor_memory is not None:
            self.tensor_memory.work.popleft()()
        return True

    def new_mbarrier(self, address: int, count: int) -> None:
        """mbarrier.init. Phases go on counting where an address is used again, so that waiting for
        a phase of the old object orders no copy of the new one.
        """
        old = self.mbarriers.get(address)
        view = self.agents.view() if old is None else old.view
        self.mbarriers[address] = Mbarrier(
            expected=count,
            agent=self.agents.barrier(address),
            view=view,
            arrived=view.copy(),
            phase=0 if old is None else old.phase + old.phase % 2,
        )

    def describe_mbarrier(self, address: int) -> str:
        """An mbarrier by its place in shared memory."""
        return f"the mbarrier at byte {address - SHARED_BASE} of shared memory"
