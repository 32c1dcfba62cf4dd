"""Moves between tensor memory, registers and shared memory: tcgen05.ld, .st, .wait and .cp
(PTX ISA 9.7.16.8 and 9.7.16.9).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from flashgen.ptx.clocks import ASYNC, GENERIC, Engine
from flashgen.ptx.decode import Form, OperandReader, instruction
from flashgen.ptx.fragments import Descriptor, Element
from flashgen.ptx.instructions.tensor_work import HINTS, issue, start
from flashgen.ptx.program import Operand
from flashgen.ptx.shared_matrix import SharedMatrix
from flashgen.ptx.tensor_access import (
    address_parts,
    check_region,
    memory_of,
    note_read,
    note_write,
)
from flashgen.ptx.tensor_memory import LANES_OF_WARP, Region, fragment
from flashgen.ptx.types import Array, DecodedStep, LaneMask, same
from flashgen.ptx.warp import Warp, only_lane, whole_warp

_SHAPES = ("16x64b", "16x128b", "16x256b", "32x32b", "16x32bx2")
_COUNT = re.compile(r"x(\d+)$")


@dataclass(frozen=True)
class Fragment:
    """Where the registers of a warp lie from an address on: lanes and columns, (registers, 32)."""

    address: OperandReader
    lanes: Array
    columns: Array

    @cached_property
    def touched(self) -> tuple[Array, Array]:
        """The lanes and the columns, once each."""
        return np.unique(self.lanes), np.unique(self.columns)

    def place(self, warp: Warp, mask: LaneMask, doing: str) -> tuple[Region, Array, Array]:
        """What the warp touches, and the lane and column of each register and thread."""
        whole_warp(warp, mask)
        given = self.address(warp)
        if (given != given[0]).any():
            raise warp.fault("memcheck", "its lanes have different addresses of tensor memory")
        lane, column = address_parts(int(given[0]))
        rows, columns = self.touched[0] + lane, self.touched[1] + column
        first = warp.number % 4 * LANES_OF_WARP
        if rows[0] < first or rows[-1] >= first + LANES_OF_WARP:
            raise warp.fault(
                "memcheck",
                f"it {doing} lanes {rows[0]} to {rows[-1]} of tensor memory, of which a warp of "
                f"this number may touch {first} to {first + LANES_OF_WARP - 1}",
            )
        region = Region(rows, columns)
        check_region(warp, region, doing)
        return region, self.lanes + lane, self.columns + column


@instruction("tcgen05.ld", "tcgen05.st")
def move(form: Form) -> DecodedStep:
    """9.7.16.8.3 and 9.7.16.8.4: a warp moves registers to or from its quarter of the lanes."""
    form.hint(*HINTS)
    stores = form.opcode == "tcgen05.st"
    shape = form.choice(*_SHAPES)
    count = next((found for m in form.modifiers if (found := _COUNT.match(m))), None)
    if not shape or count is None:
        form.unknown("a move of this shape")
    form.modifiers.remove(count[0])
    form.hint("b32")
    halves = shape == "16x32bx2"
    at_address, at_registers = (0, 1 + halves) if stores else (1, 0)
    split = form.constant(1 if stores else 2) if halves else 0
    lanes, columns = fragment(shape, int(count[1]), split)
    if len(form.group(at_registers)) != len(lanes):
        form.wrong(f"it moves {len(lanes)} registers")
    moved = Fragment(form.address(at_address, 4), lanes, columns)
    return (_store if stores else _load)(form, moved, form.group(at_registers))


def _load(form: Form, moved: Fragment, registers: Sequence[Operand]) -> DecodedStep:
    """It reads at once; until the warp waits for it, nobody may overwrite what it reads."""
    writes = [form.store(item) for item in registers]

    def step(warp: Warp, mask: LaneMask) -> None:
        region, lanes, columns = moved.place(warp, mask, "reads")
        group = warp.queues[Engine.TENSOR_LOAD].current
        note_read(warp, region, Engine.TENSOR_LOAD, group, warp.view[GENERIC])
        values = memory_of(warp.block).bits[lanes, columns]
        for write, row in zip(writes, values, strict=True):
            write(warp, row, mask)

    return step


def _store(form: Form, moved: Fragment, registers: Sequence[Operand]) -> DecodedStep:
    """It writes early, or late: when the warp waits for it."""
    reads = [form.bits(item, 4) for item in registers]

    def step(warp: Warp, mask: LaneMask) -> None:
        region, lanes, columns = moved.place(warp, mask, "writes")
        values = np.stack([read(warp) for read in reads])
        group = warp.queues[Engine.TENSOR_STORE].current
        note_write(warp, region, Engine.TENSOR_STORE, group, warp.view[GENERIC])
        bits = memory_of(warp.block).bits

        def land() -> None:
            bits[lanes, columns] = values

        warp.perform(Engine.TENSOR_STORE, land)

    return step


@instruction("tcgen05.wait::ld", "tcgen05.wait::st")
def wait(form: Form) -> DecodedStep:
    """9.7.16.8.5: all loads, or all stores, of the warp are complete."""
    form.hint(*HINTS)
    loads = form.opcode == "tcgen05.wait::ld"
    engine = Engine.TENSOR_LOAD if loads else Engine.TENSOR_STORE

    def step(warp: Warp, mask: LaneMask) -> None:
        whole_warp(warp, mask)
        warp.queues[engine].commit()
        warp.await_groups(engine, 0)

    return step


_QUARTERS = {"": ((0,), (1,), (2,), (3,)), "warpx2::02_13": ((0, 2), (1, 3)),
             "warpx2::01_23": ((0, 1), (2, 3)), "warpx4": ((0, 1, 2, 3),)}  # fmt: skip
"""Which quarters of the lanes hold the same rows (9.7.16.2.3)."""

_WORD = Element(4, same)

_COPIES = ("128x256b", "4x256b", "128x128b", "64x128b", "32x128b")


@instruction("tcgen05.cp")
def copy(form: Form) -> DecodedStep:
    """9.7.16.9.2: rows of shared memory to lanes, in the order of products."""
    form.hint(*HINTS)
    shape, quarters = form.choice(*_COPIES), form.choice(*_QUARTERS)
    if not shape or ({"64": 2, "32": 4}.get(shape[:2], 0) == 0) != (quarters == ""):
        form.unknown("a copy of this shape")
    rows, bits = map(int, shape[:-1].split("x"))
    words = bits // 32
    each = max(rows // len(_QUARTERS[quarters]), 1)
    lanes = np.array(
        [
            [quarter * LANES_OF_WARP + row for row in range(each)]
            for group in zip(*_QUARTERS[quarters], strict=True)
            for quarter in group
        ]
    ).reshape(-1, rows)
    address, source = form.address(0, 4), form.bits(form.operands[1], 8)

    def step(warp: Warp, mask: LaneMask) -> None:
        lane = only_lane(warp, mask)
        first, column = address_parts(int(address(warp)[lane]))
        target = Region(np.sort(lanes.reshape(-1)) + first, column + np.arange(words))
        check_region(warp, target, "copies to")
        matrix = SharedMatrix(
            read=Descriptor.of_tcgen05, bits=int(source(warp)[lane]), rows=rows, columns=words,
            element=_WORD,
        )  # fmt: skip
        number, agents = issue(warp), warp.block.agents
        held = matrix.note_read(warp, Engine.TENSOR, number, agents.order(warp.view, ASYNC))
        order = agents.pipelined(warp.view, warp.number)
        note_write(warp, target, Engine.TENSOR, number, order)
        memory = memory_of(warp.block)

        def land() -> None:
            for one in lanes:
                memory.bits[(one + first)[:, None], column + np.arange(words)] = held()

        start(warp, land)

    return step
