"""Whether a warp polls: whether it only repeats its reads of global memory, until another block
changes what it reads.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from flashgen.ptx.memory import Buffer
from flashgen.ptx.types import Array
from flashgen.ptx.warp import Warp

PATIENCE = 8
"""Reads that repeat before the warp is looked at."""


def note(warp: Warp, buffer: Buffer, at: Array, values: Array) -> None:
    """Record a read of words of a buffer, and let a warp that polls wait until another value is
    there. One whose registers change too, as in a loop that counts, makes way for once.
    """
    poll = warp.poll
    last = poll.seen.get(warp.position)
    poll.seen[warp.position] = buffer, at, values
    if last is None or last[0] is not buffer or not _same(last[1:], (at, values)):
        poll.repeats = 0
        return
    poll.repeats += 1
    if poll.repeats == PATIENCE:
        poll.position, poll.registers = warp.position, list(warp.registers)
    elif poll.repeats > PATIENCE and warp.position == poll.position:
        poll.repeats = 0
        if all(map(_equal, poll.registers, warp.registers)):
            warp.await_write(buffer, at, values)
        else:
            warp.block.makes_way = True


def _same(first: tuple[Array, ...], second: tuple[Array, ...]) -> bool:
    return all(map(np.array_equal, first, second))


def _equal(first: Any, second: Any) -> bool:
    return first is second or (
        first is not None and second is not None and np.array_equal(first, second)
    )
