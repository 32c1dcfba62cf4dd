"""Who is ordered after whom: vector clocks of warps, asynchronous copies and products.

An *agent* accesses memory: a warp by its loads and stores, or an engine on its behalf. Each agent
counts what it does. A *view* says, per agent, up to which count its accesses are ordered before
whoever holds the view (the happens-before relation of Lamport, "Time, Clocks, and the Ordering of
Events in a Distributed System", 1978; vector clocks as in FastTrack, PLDI 2009). A view has two
rows, because memory is accessed by two proxies (PTX ISA 8.5, "Proxies"): accesses that are ordered,
and accesses of the generic proxy that a proxy fence has made visible to the asynchronous proxy.
"""

from __future__ import annotations

from enum import Enum

import numpy as np

from flashgen.ptx.types import Array

GENERIC, ASYNC = 0, 1
"""Rows of a view."""

MOST_BARRIERS = 128
"""Addresses of mbarriers that one block may use."""


class Engine(Enum):
    """What accesses memory on a warp's behalf, until the warp has waited for it."""

    COPY = "cp.async"
    STORE = "cp.async.bulk"
    WGMMA = "wgmma"
    TENSOR = "tcgen05"
    MBARRIER = "mbarrier"


class Agents:
    """Numbers for the agents of a block. An engine has one number a warp, wgmma one a warpgroup.
    Its count is that of its groups, so that waiting for a group is exact. What the TMA unit loads
    belongs to the mbarrier that it completes on; its count is the phase.
    """

    def __init__(self, warps: int) -> None:
        self.warps = warps
        self._engines = {
            Engine.COPY: warps,
            Engine.STORE: 2 * warps,
            Engine.TENSOR: 3 * warps,
            Engine.MBARRIER: 4 * warps,
            Engine.WGMMA: 5 * warps,
        }
        self.readers = 5 * warps + -(-warps // 4)
        self._barriers: dict[int, int] = {}
        self.count = self.readers + MOST_BARRIERS + 1
        self.generic = np.zeros(self.count, bool)
        self.generic[: 2 * warps] = True  # warps and cp.async, which is of the generic proxy
        self.nobody = self.count - 1

    def engine(self, engine: Engine, warp: int) -> int:
        """The number of an engine that works for `warp`."""
        return self._engines[engine] + (warp // 4 if engine is Engine.WGMMA else warp)

    def barrier(self, address: int) -> int:
        """The number of what completes on the mbarrier at a shared address."""
        number = self._barriers.setdefault(address, len(self._barriers))
        if number >= MOST_BARRIERS:
            raise ValueError(f"a block may use {MOST_BARRIERS} mbarriers at most")
        return self.readers + number

    def view(self) -> Array:
        """A view that orders nothing."""
        return np.zeros((2, self.count), np.int64)

    def describe(self, agent: int) -> str:
        """An agent in words."""
        if agent < self.warps:
            return f"warp {agent}"
        for address, number in self._barriers.items():
            if agent == self.readers + number:
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
