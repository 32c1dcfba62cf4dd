"""What products and copies of tcgen05 have in common: they run in the order of their issue (PTX ISA
9.7.16.6.2).

The ISA promises that order for products of the same accumulator and shape. Tensor cores keep it for
all that one thread issues: CUTLASS's attention for sm_100 lets S overwrite the P of the product
that was issued before.
"""

from __future__ import annotations

from collections.abc import Callable

from flashgen.ptx.tensor_access import memory_of
from flashgen.ptx.warp import Warp

HINTS = ("cta_group::1", "sync", "aligned")
"""Modifiers of tcgen05 that change nothing here: a block has no peer, so that cta_group is 1."""


def issue(warp: Warp) -> int:
    """The number of the product or copy that the warp issues, counted from 1."""
    issued = memory_of(warp.block).issued
    issued[warp.number] = issued.get(warp.number, 0) + 1
    return issued[warp.number]


def start(warp: Warp, work: Callable[[], None]) -> None:
    """Do work of the tensor cores at once, or at any time after what was issued before."""
    queue = memory_of(warp.block).work
    if queue or not warp.block.coin():
        queue.append(work)
    else:
        work()
