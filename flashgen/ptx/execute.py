"""Executes a launch: execute() runs its blocks and reports.

Blocks run one after another, in an order drawn from the seed, but for those that wait for another
block's write. What they do to global memory is checked for races as if all ran at once.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from flashgen.errors import InvalidArgument, cut, one_line
from flashgen.ptx.clocks import Engine
from flashgen.ptx.decode import decode
from flashgen.ptx.findings import CHECKS, Fault, Report, Sanitizer
from flashgen.ptx.fusion import fusions
from flashgen.ptx.instructions import load_all
from flashgen.ptx.machine import Decoded, LaunchInputs, Machine
from flashgen.ptx.memory import constants, shared_layout
from flashgen.ptx.program import (
    FOREIGN,
    Group,
    InvalidPtx,
    Number,
    Operand,
    Program,
    PtxInstruction,
    registers_in,
)
from flashgen.ptx.reorder import rescheduled
from flashgen.ptx.schedule import MOST_STEPS, run_blocks
from flashgen.ptx.types import TYPE_BYTES, DecodedStep, LaneMask


class Loaded(Decoded):
    """A program whose instructions are decoded; loading it once serves many launches."""

    def __init__(self, program: Program) -> None:
        load_all()
        self.program, stretches = rescheduled(program)
        try:
            self._load(self.program, stretches)
        except InvalidPtx:
            raise
        except FOREIGN as error:
            raise InvalidPtx(f"{cut(program.name)} cannot be decoded: {one_line(error)}") from error

    def _load(self, program: Program, stretches: Sequence[Sequence[range]]) -> None:
        self.constant_addresses, self.constants = constants(program)
        shared, _ = shared_layout(program, 0)
        symbols = {**self.constant_addresses, **shared}
        self.guards = tuple(
            None if item.predicate is None else (item.predicate.index, item.negated)
            for item in program.instructions
        )
        self.touched = tuple(
            frozenset(register.index for register in registers_in(item.operands))
            for item in program.instructions
        )
        self.fusions = fusions(program, stretches, symbols, self.touched)
        alone = frozenset(range(len(program.instructions))).difference(
            *(range(at, at + each.length) for at, each in enumerate(self.fusions) if each)
        )
        self.steps = [
            decode(program, item, symbols) if at in alone else self._decoded_later(at, symbols)
            for at, item in enumerate(program.instructions)
        ]
        self.engines = _engines(program)
        self.releases = _releases(program)
        self.shared_cell = _cell(program, "shared")
        self.global_cell = _cell(program, "global")

    def _decoded_later(self, position: int, symbols: dict[str, int]) -> DecodedStep:
        """The step of an instruction that runs with others, as a rule."""

        def step(warp: Any, mask: LaneMask) -> int | None:
            found = decode(self.program, self.program.instructions[position], symbols)
            self.steps[position] = found
            return found(warp, mask)

        return step


MOST_BLOCKS = 1 << 24
"""Blocks of a launch: more would take days."""


def execute(
    loaded: Loaded,
    launch: LaunchInputs,
    *,
    seed: int = 0,
    checks: Collection[Sanitizer] = CHECKS,
    most_steps: int = MOST_STEPS,
) -> Report:
    """Run every block of the grid. The same seed gives the same order of everything. A finding that
    a GPU would end the kernel for ends the launch, and so do more steps than `most_steps`. memcheck
    is always on.
    """
    unknown = set(checks) - CHECKS
    if unknown:
        raise InvalidArgument(f"checks must be of {sorted(CHECKS)}: got {sorted(unknown)}")
    if len(launch.grid) != 3 or min(launch.grid) < 0:
        raise InvalidArgument(f"a grid must be three numbers of at least 0: got {launch.grid}")
    if math.prod(launch.grid) > MOST_BLOCKS:
        raise InvalidArgument(f"a grid must have at most {MOST_BLOCKS} blocks: got {launch.grid}")
    machine = Machine(loaded, launch, checks, most_steps)
    rng = random.Random(seed)
    x, y, z = launch.grid
    order = list(range(x * y * z))
    rng.shuffle(order)
    with np.errstate(all="ignore"):
        try:
            run_blocks(machine, order, rng)
        except Fault as fault:
            machine.report.add(fault.finding)
        except InvalidPtx:
            raise
        except FOREIGN as error:  # of a copy that lands
            name = cut(machine.program.name)
            raise InvalidPtx(f"{name} cannot be executed: {one_line(error)}") from error
    return machine.report


def _engines(program: Program) -> frozenset[Engine]:
    """The engines that a program's instructions use."""
    found = {Engine.MBARRIER}
    for item in program.instructions:
        if item.opcode.startswith("cp.async.bulk"):
            found.add(Engine.STORE)
        elif item.opcode.startswith("cp.async"):
            found.add(Engine.COPY)
        elif item.opcode.startswith("wgmma"):
            found.add(Engine.WGMMA)
        elif item.opcode.startswith("tcgen05"):
            found |= {Engine.TENSOR, Engine.TENSOR_LOAD, Engine.TENSOR_STORE, Engine.ISSUED}
    return frozenset(found)


def _releases(program: Program) -> bool:
    """Whether a program has what may order its blocks."""
    return any(
        opcode in ("membar", "fence") or not {"release", "acq_rel"}.isdisjoint(modifiers)
        for item in program.instructions
        for opcode, *modifiers in [item.opcode.split(".")]
        if "proxy" not in modifiers and "mbarrier" not in item.opcode
    )


def _parts(item: PtxInstruction) -> tuple[Operand, ...]:
    """The first operand of an instruction, or the items of it."""
    first = item.operands[0]
    return first.items if isinstance(first, Group) else (first,)


def _cell(program: Program, space: str) -> int:
    """The largest size, at most 16 bytes, that every access of the program to a space is a multiple
    of and aligned to: atomics and vectors by their elements.
    """
    smallest = 16
    for item in program.instructions:
        parts = item.opcode.split(".")
        here = any(part.startswith(space) for part in parts)
        size = 16
        if parts[0] in ("ld", "ldu", "st", "atom", "red") and here:
            kinds = [TYPE_BYTES[part] for part in parts if part in TYPE_BYTES]
            vectors = [len(o.items) for o in item.operands if isinstance(o, Group)]
            size = min(kinds, default=1) * max(vectors, default=1)
            if vectors and not all(part in program.used for part in _parts(item)):
                size = min(kinds, default=1)
        elif parts[:2] == ["cp", "async"] and "tensor" in parts and space == "global":
            size = 4
        elif parts[:2] == ["cp", "async"] and len(item.operands) > 2 and "bulk" not in parts:
            copied = item.operands[2]
            size = int(copied.text, 0) if isinstance(copied, Number) else 4
        elif parts[0] == "mbarrier" and space == "shared":
            size = 8
        smallest = min(smallest, size)
    return smallest
