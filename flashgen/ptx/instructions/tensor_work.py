"""What products and copies of tcgen05 have in common: operands in shared memory, and that they run
in the order of their issue (PTX ISA 9.7.16.6.2).

The ISA promises that order for products of the same accumulator and shape. Tensor cores keep it for
all that one thread issues: CUTLASS's attention for sm_100 lets S overwrite the P of the product
that was issued before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from flashgen.ptx.access import note_shared_read
from flashgen.ptx.clocks import ASYNC, Engine
from flashgen.ptx.fragments import BadDescriptor, Descriptor, descriptor_places, descriptor_units
from flashgen.ptx.memory import SHARED_BASE
from flashgen.ptx.tensor_access import memory_of
from flashgen.ptx.types import Array
from flashgen.ptx.warp import Warp


@dataclass(frozen=True, kw_only=True)
class Operand:
    """A matrix in shared memory by its descriptor: elements of `size` bytes, `rows` along M or N,
    `columns` along K.
    """

    bits: int
    rows: int
    columns: int
    size: int
    k_major: bool = True

    def places(self, warp: Warp) -> Array:
        """Offsets in shared memory of the elements. Raises a Fault."""
        try:
            descriptor = Descriptor.of_tcgen05(self.bits)
            places = descriptor_places(
                descriptor, self.rows, self.columns, self.size, k_major=self.k_major
            )
        except BadDescriptor as error:
            raise warp.fault("memcheck", f"a matrix descriptor: {error}") from None
        offsets = places - SHARED_BASE
        if offsets.min() < 0 or offsets.max() + self.size > warp.block.shared.size:
            raise warp.fault(
                "memcheck",
                f"a matrix descriptor reaches from byte {offsets.min()} to {offsets.max()} of "
                f"shared memory, of which the block has {warp.block.shared.size}",
            )
        return offsets

    def note_read(self, warp: Warp, number: int) -> None:
        """Check and record that instruction `number` of the warp reads the matrix."""
        self.places(warp)
        if warp.block.shadow is None:
            return
        units = descriptor_units(
            Descriptor.of_tcgen05(self.bits),
            self.rows,
            self.columns,
            self.size,
            k_major=self.k_major,
        )
        order = warp.block.agents.order(warp.view, ASYNC)
        note_shared_read(
            warp, units - SHARED_BASE, 16, engine=Engine.TENSOR, count=number, order=order
        )


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
