"""Accesses to tensor memory with the checks: bounds, races, contents (PTX ISA 9.7.16.6)."""

from __future__ import annotations

import numpy as np

from flashgen.ptx.access import report_conflict
from flashgen.ptx.block import Block
from flashgen.ptx.clocks import GENERIC, Engine
from flashgen.ptx.memory import BadAddress
from flashgen.ptx.tensor_memory import ALL_LANES, Region, TensorMemory, describe
from flashgen.ptx.types import Array
from flashgen.ptx.warp import Warp


def memory_of(block: Block) -> TensorMemory:
    """The tensor memory of a block whose program has tcgen05."""
    assert block.tensor_memory is not None
    return block.tensor_memory


def address_parts(address: int) -> tuple[int, int]:
    """Lane and column of an address (9.7.16.1.1)."""
    return address >> 16, address & 0xFFFF


def check_region(warp: Warp, region: Region, doing: str) -> None:
    """Raises a Fault for an access to what the block does not hold."""
    try:
        memory_of(warp.block).check(region)
    except BadAddress as error:
        raise warp.fault("memcheck", f"it {doing} {error.message}") from None


def note_read(warp: Warp, region: Region, engine: Engine, count: int, order: Array) -> None:
    """Check and record a read of tensor memory by an engine of the warp. A load of what nobody has
    written is a remark alone: Triton loads so after a loop without trips, and drops the values.
    """
    shadow = memory_of(warp.block).shadow
    if shadow is None:
        return
    cells = region.cells()
    missing = shadow.unwritten(cells)
    if missing is not None:
        message = f"it reads {describe(missing)}, which nobody has written"
        if engine is not Engine.TENSOR_LOAD:
            warp.report("initcheck", message)
        else:
            warp.remark("initcheck", message)
    agent = warp.block.agents.engine(engine, warp.number)
    conflict = shadow.note_read(cells, order, agent, count, warp.position)
    if conflict is not None:
        report_conflict(warp, conflict, f"reads {describe(conflict.at)}")


def note_write(warp: Warp, region: Region, engine: Engine, count: int, order: Array) -> None:
    """Check and record a write of tensor memory by an engine of the warp."""
    shadow = memory_of(warp.block).shadow
    if shadow is None:
        return
    agent = warp.block.agents.engine(engine, warp.number)
    cells = region.cells()
    conflict = shadow.check_write(cells, order, order)
    shadow.note_write(cells, agent, count, warp.position)
    if conflict is not None:
        report_conflict(warp, conflict, f"writes {describe(conflict.at)}")


def note_return(warp: Warp, first: int, columns: int) -> None:
    """Check that no access to columns that are given back may be under way."""
    shadow = memory_of(warp.block).shadow
    if shadow is None:
        return
    cells = Region(ALL_LANES, first + np.arange(columns)).cells()
    conflict = shadow.check_write(cells, warp.view[GENERIC], warp.view[GENERIC])
    if conflict is not None:
        report_conflict(warp, conflict, f"gives back {describe(conflict.at)}")
