"""Tensor memory: 128 lanes of 512 columns of 32 bits a block (PTX ISA 9.7.16.1), who holds which
columns, and the work of the tensor cores on it, which runs in the order of its issue.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from flashgen.ptx.clocks import Agents
from flashgen.ptx.memory import BadAddress
from flashgen.ptx.shadow import AgentShadow
from flashgen.ptx.types import Array

LANES, COLUMNS = 128, 512
"""Of sm_100 (9.7.16.1)."""

LANES_OF_WARP = 32
"""A warp loads and stores a quarter of the lanes, by its number modulo 4 (9.7.16.8.1)."""

ALL_LANES = np.arange(LANES)

_GROUP = 16
"""Lanes of a cell of the shadow: no access touches fewer, but for copies of four lanes."""


@dataclass(frozen=True)
class Region:
    """Lanes and columns that an access touches: each of the columns in each of the lanes."""

    lanes: Array
    columns: Array

    def cells(self) -> Array:
        """The cells of the shadow, once each."""
        return _cells(self.lanes.tobytes(), self.columns.tobytes())

    @property
    def index(self) -> tuple[Any, slice]:
        """It in an array of tensor memory: its columns follow each other."""
        first, last = int(self.columns[0]), int(self.columns[-1])
        lanes: Any = self.lanes
        if len(lanes) == lanes[-1] - lanes[0] + 1:
            lanes = slice(int(lanes[0]), int(lanes[-1]) + 1)
        return lanes, slice(first, last + 1)


@lru_cache(maxsize=1024)
def _cells(lanes: bytes, columns: bytes) -> Array:
    groups = np.unique(np.frombuffer(lanes, np.int64) // _GROUP)
    return (groups[:, None] * COLUMNS + np.frombuffer(columns, np.int64)).reshape(-1)


class TensorMemory:
    """The tensor memory of a block. bits: of all cells. work: products, copies and commits under
    way, the oldest first. shadow: None without racecheck and initcheck.
    """

    def __init__(self, agents: Agents, *, shadowed: bool) -> None:
        self.bits = np.full((LANES, COLUMNS), 0xFFFFFFFF, np.uint32)
        self.held: dict[int, int] = {}  # columns by the first of them
        self.permitted = True
        self.work: deque[Callable[[], None]] = deque()
        self.issued: dict[int, int] = {}  # products and copies so far, by warp
        self.shadow = AgentShadow(agents, LANES // _GROUP * COLUMNS) if shadowed else None

    def place_for(self, columns: int, rng: random.Random) -> int | None:
        """The first of `columns` free columns: any that fits, since other blocks may hold the
        lower ones. None if there is no place.
        """
        free = [
            first
            for first in range(0, COLUMNS, columns)
            if not any(first < at + held and at < first + columns for at, held in self.held.items())
        ]
        return rng.choice(free) if free else None

    def free(self, first: int, columns: int) -> None:
        """Give columns back; what they hold is lost."""
        del self.held[first]
        self.bits[:, first : first + columns] = 0xFFFFFFFF
        if self.shadow is not None:
            self.shadow.forget(Region(ALL_LANES, first + np.arange(columns)).cells())

    def check(self, region: Region) -> None:
        """Raises BadAddress for what lies outside of the columns that the block holds."""
        low, high = int(region.columns.min()), int(region.columns.max())
        if int(region.lanes.min()) < 0 or int(region.lanes.max()) >= LANES:
            raise BadAddress(f"lane {int(region.lanes.max())} of tensor memory, which has {LANES}")
        if not any(first <= low and high < first + held for first, held in self.held.items()):
            held = ", ".join(f"{at} to {at + many - 1}" for at, many in sorted(self.held.items()))
            raise BadAddress(
                f"columns {low} to {high} of tensor memory, of which the block holds "
                f"{held or 'none'}"
            )

    def left(self) -> Iterator[str]:
        """What a block that ends has left undone."""
        if self.work:
            yield f"{len(self.work)} operations of tcgen05 are under way at the end of the block"
        for first, columns in self.held.items():
            yield f"columns {first} to {first + columns - 1} of tensor memory are not given back"


def describe(cell: int) -> str:
    """A cell of the shadow in words."""
    group, column = divmod(cell, COLUMNS)
    lanes = f"lanes {group * _GROUP} to {group * _GROUP + _GROUP - 1}"
    return f"column {column} of {lanes} of tensor memory"


@lru_cache(maxsize=256)
def fragment(shape: str, count: int, split: int) -> tuple[Array, Array]:
    """For each register and thread of a warp, the lane and the column that tcgen05.ld and .st move
    (9.7.16.2.3.1): both (registers, 32), from the address on. `count` is .num; split: columns
    between the two halves of .16x32bx2. Of .16x64b to .16x256b, the lanes are those that Triton's
    layouts give them (lib/Dialect/TritonNvidiaGPU, TMemAccessAtom).
    """
    thread = np.arange(32)[None, :]
    if shape == "32x32b":
        lanes, columns, width = thread, np.zeros((1, 32), np.int64), 1
    elif shape == "16x32bx2":
        lanes, columns, width = thread % 16, thread // 16 * split, 1
    elif shape == "16x64b":
        lanes, columns, width = thread % 2 * 8 + thread // 4, thread // 2 % 2, 2
    elif shape == "16x128b":
        lanes = np.vstack([thread // 4, thread // 4 + 8])
        columns, width = np.vstack([thread % 4] * 2), 4
    elif shape == "16x256b":
        lanes = np.vstack([thread // 4 + half for half in (0, 0, 8, 8)])
        columns = np.vstack([thread % 4 * 2 + odd for odd in (0, 1, 0, 1)])
        width = 8
    else:
        raise KeyError(shape)
    all_lanes = np.tile(lanes, (count, 1))
    steps = np.repeat(np.arange(count), len(lanes))[:, None] * width
    return all_lanes, np.tile(columns, (count, 1)) + steps
