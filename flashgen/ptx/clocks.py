"""Who is ordered after whom: vector clocks of warps, asynchronous copies and products.

An *agent* accesses memory: a warp by its loads and stores, or an engine on its behalf. Each agent
counts what it does. A *view* says, per agent, up to which count its accesses are ordered before
whoever holds the view (the happens-before relation of Lamport, "Time, Clocks, and the Ordering of
Events in a Distributed System", 1978; vector clocks as in FastTrack, PLDI 2009). A view has two
rows, because memory is accessed by two proxies (PTX ISA 8.5, "Proxies"): accesses that are ordered,
and accesses of the generic proxy that a proxy fence has made visible to the asynchronous proxy.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property

import numpy as np

from flashgen.ptx.types import Array

GENERIC, ASYNC = 0, 1
"""Rows of a view."""

MOST_BARRIERS = 128
"""Addresses of mbarriers that one block may use."""


Views = Mapping[int, Array]
"""By the number of a block, the view of it that was published: see releases.py."""

Place = tuple[int, int | None]
"""An address, and the only block that sees it, of an operation whose scope is the block."""


@dataclass
class ReleaseState:
    """What orders a warp between blocks. fenced: what its last fence has made ready for relaxed
    writes; unfenced: what relaxed reads have seen, until a fence; last: what it acquired last;
    known: what it knew when known_at.
    """

    fenced: Views | None = None
    unfenced: Views | None = None
    last: Views | None = None
    known: Views = field(default_factory=dict)
    known_at: tuple[int, bytes] = (0, b"")


class Engine(Enum):
    """What accesses memory on a warp's behalf, until the warp has waited for it. ISSUED stands for
    products of tcgen05 that are issued, but need not be complete.
    """

    COPY = "cp.async"
    STORE = "cp.async.bulk"
    WGMMA = "wgmma"
    TENSOR = "tcgen05"
    TENSOR_LOAD = "tcgen05.ld"
    TENSOR_STORE = "tcgen05.st"
    ISSUED = "tcgen05 that is issued"
    MBARRIER = "mbarrier"


_READERS = (Engine.STORE, Engine.WGMMA, Engine.TENSOR, Engine.TENSOR_LOAD)
"""Engines that read shared or tensor memory; the others only write."""

_TENSOR_MEMORY = (Engine.TENSOR, Engine.TENSOR_LOAD, Engine.TENSOR_STORE, Engine.ISSUED)


class Agents:
    """Numbers for the agents of a block. An engine has one number a warp, wgmma one a warpgroup.
    Its count is that of its groups, so that waiting for a group is exact; that of tcgen05 counts
    instructions. What the TMA unit loads belongs to the mbarrier that it completes on; its count is
    the phase. Engines that the program does not use have no numbers.
    """

    def __init__(self, warps: int, engines: Collection[Engine]) -> None:
        self.warps = warps
        self._engines: dict[Engine, int] = {}
        at = self.readers = warps
        for engine in sorted(Engine, key=lambda each: each not in _READERS):
            if engine in engines:
                self._engines[engine] = at
                at += -(-warps // 4) if engine is Engine.WGMMA else warps
            if engine in _READERS:
                self.readers = at
        self._barriers: dict[int, int] = {}
        self._first_barrier = at
        self.count = at + MOST_BARRIERS + 1
        self.generic = np.zeros(self.count, bool)  # those that access memory by the generic proxy
        self.generic[:warps] = True
        if Engine.COPY in engines:
            first = self._engines[Engine.COPY]
            self.generic[first : first + warps] = True
        self.nobody = self.count - 1

    def engine(self, engine: Engine, warp: int) -> int:
        """The number of an engine that works for `warp`."""
        return self._engines[engine] + (warp // 4 if engine is Engine.WGMMA else warp)

    @cached_property
    def of_tensor_memory(self) -> Array:
        """The numbers of the engines that access tensor memory."""
        return np.array(
            [
                first + warp
                for engine, first in self._engines.items()
                if engine in _TENSOR_MEMORY
                for warp in range(self.warps)
            ]
        )

    def barrier(self, address: int) -> int:
        """The number of what completes on the mbarrier at a shared address."""
        number = self._barriers.setdefault(address, len(self._barriers))
        if number >= MOST_BARRIERS:
            raise ValueError(f"a block may use {MOST_BARRIERS} mbarriers at most")
        return self._first_barrier + number

    def view(self) -> Array:
        """A view that orders nothing."""
        return np.zeros((2, self.count), np.int64)

    def describe(self, agent: int) -> str:
        """An agent in words."""
        if agent < self.warps:
            return f"warp {agent}"
        for address, number in self._barriers.items():
            if agent == self._first_barrier + number:
                return f"the copy that completes on the mbarrier at {address:#x}"
        engine, first = max(
            ((engine, first) for engine, first in self._engines.items() if first <= agent),
            key=lambda each: each[1],
        )
        who = "warpgroup" if engine is Engine.WGMMA else "warp"
        return f"{engine.value} of {who} {agent - first}"

    def order(self, view: Array, proxy: int) -> Array:
        """Per agent, the count up to which its accesses are ordered before an access by `proxy`
        that is made with `view`.
        """
        if proxy == GENERIC:
            ordered: Array = view[GENERIC]
            return ordered
        seen: Array = np.where(self.generic, view[ASYNC], view[GENERIC])
        return seen

    def pipelined(self, view: Array, warp: int) -> Array:
        """The order before a product of tcgen05 that `warp` issues: products run in the order of
        their issue, so that those of this warp, and those whose issue is ordered before it, need
        not be complete (PTX ISA 9.7.16.6.2).
        """
        order: Array = view[GENERIC].copy()
        products, issued = (self._engines[each] for each in (Engine.TENSOR, Engine.ISSUED))
        after = slice(products, products + self.warps)
        order[after] = np.maximum(order[after], view[GENERIC, issued : issued + self.warps])
        order[products + warp] = np.iinfo(np.int64).max
        return order
