"""Barriers of a block, fences and the pool of registers (PTX ISA 9.7.13 and 9.7.19.5)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from flashgen.ptx import releases
from flashgen.ptx.block import NamedBarrier
from flashgen.ptx.decode import Form, instruction
from flashgen.ptx.types import Array, DecodedStep, LaneMask
from flashgen.ptx.warp import Wait, Warp, whole_warp

REGISTERS_PER_SM = 65536
"""32-bit registers (CUDA C++ Programming Guide, compute capability 8.0 to 12.0)."""


@instruction("bar", "barrier")
def barrier(form: Form) -> DecodedStep:
    """9.7.13.1: .sync waits, .arrive does not, .red also votes. bar.warp.sync is of one warp, whose
    lanes run together here.
    """
    form.hint("cta", "aligned")
    if form.flag("warp"):
        form.flag("sync")
        return lambda warp, mask: None
    kind = form.choice("sync", "arrive", "red")
    if kind == "red":
        return _barrier_with_vote(form)
    name = form.number(0, "u32")
    threads = form.number(1, "u32") if len(form.operands) > 1 else None

    def step(warp: Warp, mask: LaneMask) -> int | None:
        if mask is not None and warp.hold():
            return warp.position
        whole_warp(warp, mask)
        count = warp.block.machine.program.threads if threads is None else int(threads(warp)[0])
        arrive(warp, int(name(warp)[0]), count, waits=kind == "sync")
        return None

    return step


def arrive(
    warp: Warp,
    name: int,
    threads: int,
    *,
    waits: bool,
    vote: Array | None = None,
    then: Callable[[NamedBarrier], None] | None = None,
) -> None:
    """Arrive at a named barrier, and wait for it if asked to."""
    named = warp.block.named
    held = named.setdefault(name, NamedBarrier(warp.block.agents.view(), threads))
    if name > 15:
        raise warp.fault("synccheck", f"a block has barriers 0 to 15: got {name}")
    if threads % 32 or not threads:
        raise warp.fault("synccheck", f"barrier {name} is for {threads} threads, not whole warps")
    if held.threads != threads:
        raise warp.fault(
            "synccheck",
            f"barrier {name} is for {threads} threads here, and for {held.threads} where warps "
            f"{sorted(held.arrived)} arrived",
        )
    if warp.number in held.arrived:
        raise warp.fault("synccheck", f"it arrives at barrier {name} twice before it completes")
    held.arrived.append(warp.number)
    np.maximum(held.view, warp.publish(), out=held.view)
    if vote is not None:
        held.votes.append(vote)

    def complete(barrier: NamedBarrier) -> None:
        warp.join(barrier.view)
        if then is not None:
            then(barrier)

    if waits:
        held.waiting.append(complete)
        warp.wait = Wait(
            lambda: (
                f"barrier {name}, where warps {sorted(held.arrived)} of {held.threads // 32} "
                "have arrived"
            ),
            lambda: held.complete,
        )
    if 32 * len(held.arrived) == threads:
        held.complete = True
        for waiting in held.waiting:
            waiting(held)
        del named[name]


def _barrier_with_vote(form: Form) -> DecodedStep:
    """bar.red: how many threads vote for it, or whether all or any do."""
    mode, kind = form.choice("popc", "and", "or"), form.type()
    write = form.store(form.operands[0])
    name = form.number(1, "u32")
    threads = form.number(2, "u32") if len(form.operands) > 3 else None
    condition = form.predicate(form.operands[-1])

    def step(warp: Warp, mask: LaneMask) -> None:
        whole_warp(warp, mask)
        count = warp.block.machine.program.threads if threads is None else int(threads(warp)[0])

        def then(barrier: NamedBarrier) -> None:
            votes = np.concatenate(barrier.votes)
            found = {"popc": votes.sum(), "and": votes.all(), "or": votes.any()}[mode]
            write(warp, np.full(32, found, bool if kind == "pred" else np.uint32), mask)

        arrive(warp, int(name(warp)[0]), count, waits=True, vote=condition(warp), then=then)

    return step


@instruction("fence", "membar")
def fence(form: Form) -> DecodedStep:
    """9.7.13.5. Warps see each other's accesses at once; a fence orders them around relaxed
    arrivals and waits, and around relaxed accesses to global memory; that between the proxies for
    the asynchronous one.
    """
    proxy = form.flag("proxy")
    if proxy and form.choice("async", "async::generic", "alias", "tensormap::generic") == "":
        form.unknown("a fence of this proxy")
    between_blocks = form.choice("cta", "cluster", "gpu", "sys", "gl") in ("gpu", "sys", "gl")
    form.modifiers.clear()
    if not proxy and between_blocks:
        return _fence_between_blocks
    if not proxy:
        return lambda warp, mask: warp.fence()
    return lambda warp, mask: warp.fence_proxy()


def _fence_between_blocks(warp: Warp, mask: LaneMask) -> None:
    warp.fence()
    releases.fence(warp)


@instruction("setmaxnreg")
def set_registers(form: Form) -> DecodedStep:
    """9.7.19.5: .dec gives registers back to the block's pool, .inc waits until it has enough."""
    form.hint("sync", "aligned")
    increase = form.choice("inc", "dec") == "inc"
    form.type()
    count = form.constant(0)
    if not 24 <= count <= 256 or count % 8:
        form.wrong("setmaxnreg takes a multiple of 8 from 24 to 256")

    def step(warp: Warp, mask: LaneMask) -> int | None:
        whole_warp(warp, mask)
        block, more = warp.block, 32 * (count - warp.register_limit)
        program = block.machine.program
        if not program.max_registers:
            raise warp.fault("synccheck", "setmaxnreg needs a kernel with .maxnreg")
        if program.max_registers * program.threads > REGISTERS_PER_SM:
            raise warp.fault(
                "synccheck",
                f"{program.threads} threads of {program.max_registers} registers are more than "
                f"the {REGISTERS_PER_SM} of an SM",
            )
        if increase != (more >= 0) and more:
            verb = "raises" if increase else "lowers"
            raise warp.fault(
                "synccheck", f"it {verb} the registers from {warp.register_limit} to {count}"
            )
        if increase and more > block.free_registers:
            warp.wait = Wait(
                lambda: f"{more} registers, of which the pool has {block.free_registers}",
                lambda: more <= block.free_registers,
            )
            return warp.position
        block.free_registers -= more
        warp.register_limit = count
        return None

    return step
