"""Alike instructions that run as one: one operation of numpy on the lanes of all.

An operation on 32 lanes takes as long as one on a thousand. The step of a group is that of one
instruction whose registers have 32 lanes for each of the group. It is for whole warps whose
registers are defined, and for what no check objects to; else the steps run one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any, NamedTuple, NoReturn

import numpy as np

from flashgen.ptx.decode import decode
from flashgen.ptx.program import (
    Address,
    Group,
    Name,
    Negated,
    Number,
    Pair,
    Program,
    PtxInstruction,
    Register,
    Several,
    registers_in,
)
from flashgen.ptx.reorder import FREE, carried, written
from flashgen.ptx.types import Array, FusedSteps
from flashgen.ptx.warp import Warp

_FUSED = (FREE - {"elect"}) | {"ld", "st", "ldmatrix", "stmatrix", "cp"}
"""Instructions whose semantics are those of any number of lanes."""


class Apart(Exception):
    """Something that only the instructions themselves can do or report, one by one."""


class Wide:
    """A warp in whose place a group of instructions runs. registers: 32 lanes for each of them."""

    def __init__(self, warp: Warp, registers: list[Any], positions: Array) -> None:
        self.warp, self.registers, self._positions = warp, registers, positions

    def __getattr__(self, name: str) -> Any:
        return getattr(self.warp, name)

    def places(self, count: int) -> Array:
        """As Warp.places."""
        each, rest = divmod(count, len(self._positions))
        return np.repeat(self._positions, each) if not rest else self._positions[-1]

    def whole(self) -> Warp:
        """The warp."""
        return self.warp

    def fault(self, *about: object) -> NoReturn:
        """What cannot go on, or is reported, is for the instructions one by one."""
        raise Apart

    report = remark = divide = fault


class _Fusion:
    """A group of instructions as one step. made: what the groups before it in its stretch, which
    ran as one, have left in registers.
    """

    def __init__(
        self, program: Program, positions: range, symbols: dict[str, int], made: dict[int, _Made]
    ) -> None:
        items = [program.instructions[position] for position in positions]
        self._positions = np.array(positions, np.int32)
        self._guards = tuple({(i.predicate.index, i.negated) for i in items if i.predicate})
        slots: list[tuple[int, ...]] = []
        opened = _opened(items)
        item = _joined(items, opened, slots)
        in_levels = opened < len(items) and carried(item) == 1
        self._levels = len(items) // opened if in_levels else 1
        self._step = decode(program, item, symbols, items[:opened] if in_levels else items)
        count = len(written(item))
        self._keys: list[int | None] = [None] * count  # in Warp.made, of what is read there
        self._targets, self._blank = slots[:count], [None] * count
        self._takes = [_taken(indices, made) for indices in slots[count:]]
        for slot, indices in enumerate(self._targets):
            for row, index in enumerate(indices):
                if self._guards:
                    made.pop(index, None)
                else:
                    made[index] = _Made(self._keys, slot, positions.start << 8 | slot, row)

    def run(self, warp: Warp) -> bool:
        """Run the group, if it can run as one; whether it did."""
        registers = warp.registers
        for index, negated in self._guards:
            held = registers[index]
            if held is None:
                return False
            lanes = np.count_nonzero(held)
            if lanes == (32 if negated else 0) and len(self._guards) == 1:
                return True
            if lanes != (0 if negated else 32):
                return False
        try:
            taken = [take(warp) for take in self._takes]
        except ValueError:  # of None, which has no lanes
            return False
        wide = Wide(warp, [*self._blank, *taken], self._positions)
        try:
            if self._levels > 1:
                self._add_up(wide, *taken)
            else:
                self._step(wide, None)
        except Apart:
            return False
        for indices, key, found in zip(self._targets, self._keys, wide.registers, strict=False):
            if found is not None:
                rows = found.reshape(-1, 32)
                if key is not None:
                    warp.made[key] = rows
                for index, row in zip(indices, rows, strict=True):
                    registers[index] = row
        return True

    def _add_up(self, wide: Wide, total: Array, added: Array) -> None:
        """Each level adds to what the one before it has made."""
        found = []
        for row in added.reshape(self._levels, -1):
            wide.registers = [None, total, row]
            self._step(wide, None)
            total = wide.registers[0]
            found.append(total)
        wide.registers = [np.concatenate(found)]


class _Made(NamedTuple):
    """Where the value of a register is, too: a row of what a slot of a group has made. keys: those
    of the group, by slot.
    """

    keys: list[int | None]
    slot: int
    key: int
    row: int


def _taken(indices: tuple[int, ...], made: dict[int, _Made]) -> Callable[[Warp], Array]:
    """What gathers registers, or takes them from where one group has made all of them."""
    take = itemgetter(*indices) if len(indices) > 1 else lambda held: (held[indices[0]],)
    sources = [made.get(index) for index in indices]
    first = sources[0]
    if first is None or any(each is None or each.key != first.key for each in sources):
        return lambda warp: np.concatenate(take(warp.registers))
    key = first.keys[first.slot] = first.key
    rows = [each.row for each in sources if each]
    step = rows[1] - rows[0] if len(rows) > 1 else 1
    regular = step > 0 and rows == list(range(rows[0], rows[-1] + 1, step))
    chosen: Any = slice(rows[0], rows[-1] + 1, step) if regular else np.array(rows)

    def taken(warp: Warp) -> Array:
        held = warp.made.get(key)
        if held is None:
            return np.concatenate(take(warp.registers))
        found: Array = held[chosen].reshape(-1)
        return found

    return taken


def fusions(
    program: Program,
    stretches: Sequence[Sequence[range]],
    symbols: dict[str, int],
    touched: Sequence[frozenset[int]],
) -> tuple[FusedSteps | None, ...]:
    """By position, the group that begins there."""
    found: list[FusedSteps | None] = [None] * len(program.instructions)
    for groups in stretches:
        made: dict[int, _Made] = {}
        for group in groups:
            if len(group) > 1 and _fits(program.instructions[group.start], program):
                about = frozenset().union(*touched[group.start : group.stop])
                run = _Fusion(program, group, symbols, made).run
                found[group.start] = FusedSteps(len(group), about, run)
            else:
                for position in group if len(groups) > 1 else ():
                    for index in written(program.instructions[position]):
                        made.pop(index, None)
    return tuple(found)


def _fits(item: PtxInstruction, program: Program) -> bool:
    """Whether instructions like this one can run as one."""
    opcode, *modifiers = item.opcode.split(".")
    if opcode in ("ld", "st") and (program.stack_bytes or "param" in modifiers):
        return False
    special = any(isinstance(o, Name) and o.text.startswith("%") for o in item.operands)
    doubles = opcode == "mma" and "f64" in modifiers
    waits = not item.operands or "_group" in item.opcode
    return opcode in _FUSED and not (special or doubles or waits)


def _opened(items: Sequence[PtxInstruction]) -> int:
    """How many instructions are of the first level, which reads nothing that the group writes."""
    writes: set[int] = set()
    for count, item in enumerate(items):
        if not writes.isdisjoint(register.index for register in registers_in(item.operands[1:])):
            return count
        writes |= written(item)
    return len(items)


def _joined(
    items: Sequence[PtxInstruction], opened: int, slots: list[tuple[int, ...]]
) -> PtxInstruction:
    """One instruction in place of several, of which register n stands for the registers slots[n];
    of sums for those of the first level.
    """
    sums = {carried(items[0])} if opened < len(items) else set()
    if 3 in sums:  # in place
        sums.add(0)
    operands = []
    for at in range(len(items[0].operands)):
        parts = [item.operands[at] for item in (items[:opened] if at in sums else items)]
        operands.append(_of_all(parts, slots))
    return replace(items[0], operands=tuple(operands), predicate=None)


def _of_all(parts: Sequence[Any], slots: list[tuple[int, ...]]) -> Any:
    """The operand for the same one of several instructions."""
    first = parts[0]
    if isinstance(first, Register):
        slots.append(tuple(part.index for part in parts))
        return Register(len(slots) - 1, first.type)
    if isinstance(first, Number):
        texts = tuple(part.text for part in parts)
        return first if len(set(texts)) == 1 else Several(texts)
    if isinstance(first, Group):
        columns = zip(*(part.items for part in parts), strict=True)
        return Group(tuple(_of_all(column, slots) for column in columns))
    if isinstance(first, Pair):
        both = ([part.first for part in parts], [part.second for part in parts])
        return Pair(*(_of_all(each, slots) for each in both))
    if isinstance(first, Negated):
        return Negated(_of_all([part.register for part in parts], slots))
    if isinstance(first, Address):
        offsets = tuple(str(part.offset) for part in parts)
        same = len(set(offsets)) == 1
        base = _of_all([part.base for part in parts], slots)
        return Address(base, first.offset if same else Several(offsets))
    return first
