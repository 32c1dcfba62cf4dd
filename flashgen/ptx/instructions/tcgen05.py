"""Tensor cores of sm_100: who holds tensor memory, commits and fences (PTX ISA 9.7.16). Moves are
in tensor_move.py, products in tensor_product.py.
"""

from __future__ import annotations

from flashgen.ptx.access import shared_offsets
from flashgen.ptx.clocks import GENERIC, Engine
from flashgen.ptx.decode import Form, instruction
from flashgen.ptx.instructions import mbarrier, tensor_work
from flashgen.ptx.instructions.tensor_work import HINTS
from flashgen.ptx.tensor_access import memory_of, note_return
from flashgen.ptx.tensor_memory import COLUMNS
from flashgen.ptx.types import DecodedStep, LaneMask
from flashgen.ptx.warp import Wait, Warp, only_lane, whole_warp


@instruction("tcgen05.alloc")
def allocate(form: Form) -> DecodedStep:
    """9.7.16.7.1: the address of the first column goes to shared memory; it waits for columns."""
    form.hint(*HINTS, "shared::cta", "b32")
    target, count = form.address(0, 4), form.number(1, "u32")

    def step(warp: Warp, mask: LaneMask) -> int | None:
        whole_warp(warp, mask)
        memory, columns = memory_of(warp.block), int(count(warp)[0])
        if columns not in (32, 64, 128, 256, 512):
            raise warp.fault(
                "memcheck", f"a power of two from 32 to 512 columns may be asked for: got {columns}"
            )
        if not memory.permitted:
            raise warp.fault("synccheck", "it asks for columns after relinquish_alloc_permit")
        first = memory.place_for(columns, warp.block.rng)
        if first is None:
            warp.wait = Wait(
                lambda: (
                    f"{columns} columns of tensor memory, of which the block itself holds "
                    f"{sum(memory.held.values())} of {COLUMNS}"
                ),
                lambda: memory.place_for(columns, warp.block.rng) is not None,
            )
            return warp.position
        memory.held[first] = columns
        at = shared_offsets(warp, target(warp)[:1], 4, None, "writes")
        # Ordered with other accesses of the same address (9.7.16.6.1), so of both proxies.
        mbarrier.note_object(warp, at, 4)
        warp.block.shared.words.of(4)[at // 4] = first
        return None

    return step


@instruction("tcgen05.dealloc")
def free(form: Form) -> DecodedStep:
    """9.7.16.7.1: what was allocated as a whole, when nobody uses it any more."""
    form.hint(*HINTS, "b32")
    address, count = form.number(0, "u32"), form.number(1, "u32")

    def step(warp: Warp, mask: LaneMask) -> None:
        whole_warp(warp, mask)
        memory = memory_of(warp.block)
        first, columns = int(address(warp)[0]), int(count(warp)[0])
        if memory.held.get(first) != columns:
            raise warp.fault(
                "memcheck",
                f"it gives back {columns} columns from {first} on, and the block holds "
                f"{memory.held.get(first, 0)} from there on",
            )
        note_return(warp, first, columns)
        memory.free(first, columns)

    return step


@instruction("tcgen05.relinquish_alloc_permit")
def relinquish(form: Form) -> DecodedStep:
    """9.7.16.7.1: the block asks for no more columns."""
    form.hint(*HINTS)

    def step(warp: Warp, mask: LaneMask) -> None:
        whole_warp(warp, mask)
        memory_of(warp.block).permitted = False

    return step


@instruction("tcgen05.commit")
def commit(form: Form) -> DecodedStep:
    """9.7.16.12.1: an arrival at an mbarrier once all products and copies of this thread so far are
    complete. It orders what was before their issue, too.
    """
    if not form.flag("mbarrier::arrive::one"):
        form.unknown("a commit of this completion")
    form.hint(*HINTS, "shared::cluster", "shared::cta", "b64")
    blocks = form.number(1, "u16") if form.flag("multicast::cluster") else None
    address = form.address(0, 4)

    def step(warp: Warp, mask: LaneMask) -> None:
        lane = only_lane(warp, mask)
        if blocks is not None and int(blocks(warp)[lane]) != 1:
            raise warp.fault(
                "synccheck", f"a cluster has one block here: got the mask {blocks(warp)[lane]:#x}"
            )
        memory, place = memory_of(warp.block), int(address(warp)[lane])
        mbarrier.find(warp, place)
        published = warp.publish()
        agent = warp.block.agents.engine(Engine.TENSOR, warp.number)
        published[:, agent] = memory.issued.get(warp.number, 0)
        finding = warp.finding("synccheck", "it completes on an mbarrier that expects no arrival")

        tensor_work.start(warp, lambda: mbarrier.complete(warp.block, place, published, finding))

    return step


@instruction("tcgen05.fence::before_thread_sync", "tcgen05.fence::after_thread_sync")
def fence(form: Form) -> DecodedStep:
    """9.7.16.11.1: orders accesses to tensor memory around relaxed arrivals and waits; those that
    release and acquire order them without a fence (github.com/NVIDIA/cutlass, issue 2974). Products
    that this warp has issued are ordered before those that follow the next synchronisation.
    """
    form.hint(*HINTS)

    def step(warp: Warp, mask: LaneMask) -> None:
        agents = warp.block.agents
        issued = agents.engine(Engine.ISSUED, warp.number)
        warp.view[GENERIC, issued] = memory_of(warp.block).issued.get(warp.number, 0)
        warp.fence(agents.of_tensor_memory)

    return step
