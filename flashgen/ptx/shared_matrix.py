"""Operands of matrix instructions in shared memory: wgmma's and those of tcgen05."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from flashgen.ptx.access import note_shared_read
from flashgen.ptx.clocks import Engine
from flashgen.ptx.fragments import (
    BadDescriptor,
    Descriptor,
    Element,
    descriptor_places,
)
from flashgen.ptx.memory import SHARED_BASE
from flashgen.ptx.types import Array
from flashgen.ptx.warp import Warp


@lru_cache(maxsize=4096)
def _layout(
    read: Callable[[int], Descriptor], bits: int, rows: int, columns: int, size: int, k_major: bool
) -> tuple[Array, Array]:
    """Where in shared memory the elements are, in elements, and each 16 bytes of them, once."""
    places = descriptor_places(read(bits), rows, columns, size, k_major=k_major) - SHARED_BASE
    return places // size, np.unique(places >> 4) << 4


@dataclass(frozen=True, kw_only=True)
class SharedMatrix:
    """A matrix by the bits of its descriptor, which `read` reads: `rows` along M or N, `columns`
    along K.
    """

    read: Callable[[int], Descriptor]
    bits: int
    rows: int
    columns: int
    element: Element
    k_major: bool = True

    def note_read(
        self, warp: Warp, engine: Engine, count: int, order: Array | None = None
    ) -> Callable[[], Array]:
        """Check and record a read by an engine, as note_shared_read. Returns what reads the
        elements, whenever that is. Raises a Fault.
        """
        sizes = self.rows, self.columns, self.element.size
        try:
            at, units = _layout(self.read, self.bits, *sizes, self.k_major)
        except BadDescriptor as error:
            raise warp.fault("memcheck", f"a matrix descriptor: {error}") from None
        first, last = int(units[0]), int(units[-1]) + 15
        if first < 0 or last >= warp.block.shared.size:
            raise warp.fault(
                "memcheck",
                f"a matrix descriptor reaches from byte {first} to {last} of shared memory, of "
                f"which the block has {warp.block.shared.size}",
            )
        note_shared_read(warp, units, 16, engine=engine, count=count, order=order)
        words = warp.block.shared.words.of(self.element.size)
        return lambda: self.element.load(words[at])
