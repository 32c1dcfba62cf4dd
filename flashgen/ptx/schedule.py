"""The order in which a block's warps and asynchronous copies make progress; deadlocks.

PTX orders warps by barriers alone. The seed of a launch draws which warp goes on and for how long,
and when a copy lands between its issue and the latest time that somebody may rely on it.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

import numpy as np

from flashgen.errors import one_line
from flashgen.ptx import undefined
from flashgen.ptx.block import Block
from flashgen.ptx.clocks import Engine
from flashgen.ptx.machine import Machine
from flashgen.ptx.program import FOREIGN, InvalidPtx
from flashgen.ptx.types import LaneMask
from flashgen.ptx.warp import ALL, Warp

TURNS = (20, 200, 2000)
"""Instructions that a warp may execute before another one goes on."""

MOST_STEPS = 200_000_000
"""Instructions of all warps after which a launch is taken for one that never ends."""


class RunningBlock:
    """A block whose warps have come as far as they can without other blocks, or to their end."""

    def __init__(self, block: Block) -> None:
        self.block = block
        self._eagerness = block.rng.choice((0.0, 0.1, 0.5))
        self._warps = [Warp(block, number) for number in range(block.machine.program.warps)]
        self._live = list(self._warps)

    @property
    def able(self) -> list[Warp]:
        """The warps that may go on."""
        return [warp for warp in self._live if warp.wait is None or warp.wait.ready()]

    @property
    def polling(self) -> Warp | None:
        """A warp that waits for another block to write, if there is one."""
        return next((warp for warp in self._live if warp.wait and warp.wait.elsewhere), None)

    def go(self) -> bool:
        """Run until all warps have ended, or a warp waits for another block and no other can go on;
        whether the block has ended. Raises Fault.
        """
        block, rng, machine = self.block, self.block.rng, self.block.machine
        block.makes_way = False
        while self._live and not block.makes_way:
            if machine.report.steps > machine.most_steps:
                raise self._live[0].fault(
                    "synccheck", f"the launch does not end within {machine.most_steps} steps"
                )
            while block.under_way and rng.random() < self._eagerness:
                block.land_one()
            able = self.able
            if not able:
                if block.land_one():
                    continue
                if self.polling is None:
                    raise _deadlock(self._live)
                break
            warp = rng.choice(able)
            warp.wait = None
            machine.report.steps += run_warp(warp, rng.choice(TURNS))
            if warp.done:
                self._live.remove(warp)
        if not self._live:
            check_exit(block, self._warps)
        return not self._live


def run_blocks(machine: Machine, numbers: Iterable[int], rng: random.Random) -> None:
    """Run blocks one after another; those that wait for another block's write go on after it. As if
    the GPU held all blocks at once. Raises Fault.
    """
    x, y, _ = machine.grid
    fresh = iter(numbers)
    waiting: list[RunningBlock] = []
    while True:
        running = next((each for each in waiting if each.polling and each.able), None)
        if running is None and (number := next(fresh, None)) is not None:
            index = (number % x, number // x % y, number // (x * y))
            running = RunningBlock(Block(machine, index, rng))
        if running is None:
            # One that made way may wait for its own copies, or for nobody else.
            running = next((each for each in waiting if each.able or not each.polling), None)
        if running is None:
            if waiting:
                raise _deadlock_of_blocks(waiting)
            return
        if running in waiting:
            waiting.remove(running)
        if running.go():
            machine.report.blocks += 1
        else:
            waiting.append(running)


def run_warp(warp: Warp, most: int) -> int:
    """Run a warp until it waits, ends, or has executed `most` instructions; how many it did."""
    machine = warp.block.machine
    steps, guards, registers = machine.steps, machine.guards, warp.registers
    touched, fusions, unwritten = machine.loaded.touched, machine.loaded.fusions, warp.undefined
    done = 0
    while done < most and not warp.done:
        if warp.others:
            warp.reconverge()
        position = warp.position
        if position >= len(steps):
            warp.position = len(steps) - 1
            raise warp.fault("memcheck", "it runs past the last instruction")
        guard, active = guards[position], warp.active
        fusion = fusions[position]
        if fusion is not None:
            fits = active is ALL and (not unwritten or fusion.touched.isdisjoint(unwritten))
            if fits and fusion.run(warp):
                done += fusion.length
                warp.position = position + fusion.length
                if warp.wait is not None:
                    break
                continue
            warp.made.clear()
        mask: LaneMask = None if active is ALL else active
        done += 1
        if guard is not None:
            held = registers[guard[0]]
            if held is None:
                held = undefined.mark(warp, guard[0])
            if guard[0] in unwritten:
                undefined.check_guard(warp, guard[0])
            mask = held ^ guard[1] if guard[1] else held
            if active is not ALL:
                mask = mask & active
            held_lanes = np.count_nonzero(mask)
            if held_lanes == 32:
                mask = None
            elif not held_lanes:
                warp.position = position + 1
                continue
        try:
            if unwritten and not touched[position].isdisjoint(unwritten):
                following = undefined.execute(warp, steps[position], mask)
            else:
                following = steps[position](warp, mask)
        except undefined.Uninitialised as error:
            undefined.mark(warp, error.register.index)
            continue
        except InvalidPtx:
            raise
        except FOREIGN as error:
            item = machine.program.instructions[position]
            raise InvalidPtx(f"it cannot be executed ({one_line(error)}): {item}") from error
        warp.position = position + 1 if following is None else following
        if warp.wait is not None:
            break
    return done


def _deadlock(live: list[Warp]) -> Exception:
    """A deadlock as a fault: who waits for what."""
    waiting = [f"warp {warp.number} {_waits(warp)}" for warp in live]
    return live[0].fault("synccheck", "deadlock: " + "; ".join(waiting))


MOST_NAMED = 4
"""Blocks that a finding names."""


def _deadlock_of_blocks(waiting: list[RunningBlock]) -> Exception:
    """A deadlock of blocks as a fault: who waits for which address."""
    polling = [warp for each in waiting if (warp := each.polling) is not None]
    said = [
        f"block {warp.block.number}, warp {warp.number} {_waits(warp)}"
        for warp in polling[:MOST_NAMED]
    ]
    if more := len(polling) - MOST_NAMED:
        said += [f"{more} more blocks wait"] if more > 0 else []
    return polling[0].fault("synccheck", "deadlock of blocks: " + "; ".join(said))


def _waits(warp: Warp) -> str:
    return f"waits for {warp.wait.reason() if warp.wait else 'nothing'}{_where(warp)}"


def _where(warp: Warp) -> str:
    source = warp.block.machine.program.instructions[
        min(warp.position, len(warp.block.machine.steps) - 1)
    ].source
    return f" at {source}" if source else ""


def check_exit(block: Block, warps: Sequence[Warp]) -> None:
    """Report what is still under way when all warps have ended (synccheck)."""
    last = warps[0]
    last.position = min(last.position, len(block.machine.steps)) - 1
    if block.copies:
        last.report("synccheck", f"{len(block.copies)} loads are under way at the end of the block")
    if block.tensor_memory is not None:
        for message in block.tensor_memory.left():
            last.report("synccheck", message, about=message)
    for number, barrier in block.named.items():
        if barrier.arrived:
            last.report(
                "synccheck",
                f"warps {sorted(barrier.arrived)} came to barrier {number}, and nobody else did",
            )
    for address, mbarrier in block.mbarriers.items():
        if mbarrier.valid and mbarrier.bytes:
            last.report(
                "synccheck",
                f"{block.describe_mbarrier(address)} is in {mbarrier.describe()} at the end",
            )
    for warp in warps:
        for engine in (Engine.STORE, Engine.WGMMA):
            if left := warp.queues[engine].unfinished:
                last.report(
                    "synccheck",
                    f"warp {warp.number} ends while {left} of its {engine.value} are under way",
                )
        for queue in warp.queues.values():
            queue.finish()
    while block.land_one():
        pass
