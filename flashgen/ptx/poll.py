"""Whether a warp polls: whether it only repeats its reads of global memory, until another block
changes what it reads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from flashgen.ptx.types import Array

if TYPE_CHECKING:
    from flashgen.ptx.memory import Buffer
    from flashgen.ptx.warp import Warp

PATIENCE = 8
"""Reads that repeat before the warp is looked at."""


class Poll:
    """What a warp has read from global memory at each instruction, and how many reads in a row,
    without a write between them, gave what the one before at their instruction gave.
    """

    def __init__(self) -> None:
        self.repeats = 0
        self._seen: dict[int, tuple[Buffer, Array, Array]] = {}
        self._position = -1
        self._registers: list[Any] = []

    def note(self, warp: Warp, buffer: Buffer, at: Array, values: Array) -> None:
        """Record a read of words of a buffer, and let a warp that polls wait until another value is
        there. One whose registers change too, as in a loop that counts, makes way for once.
        """
        last = self._seen.get(warp.position)
        self._seen[warp.position] = buffer, at, values
        if last is None or last[0] is not buffer or not _same(last[1:], (at, values)):
            self.repeats = 0
            return
        self.repeats += 1
        if self.repeats == PATIENCE:
            self._position, self._registers = warp.position, list(warp.registers)
        elif self.repeats > PATIENCE and warp.position == self._position:
            self.repeats = 0
            if all(map(_equal, self._registers, warp.registers)):
                warp.await_write(buffer, at, values)
            else:
                warp.block.makes_way = True


def _same(first: tuple[Array, ...], second: tuple[Array, ...]) -> bool:
    return all(map(np.array_equal, first, second))


def _equal(first: Any, second: Any) -> bool:
    return first is second or (
        first is not None and second is not None and np.array_equal(first, second)
    )
