"""The order in which a program's instructions run: those that are alike follow each other.

Compilers mix instructions that do not depend on each other; the executor runs alike ones as one
(fusion.py). So each stretch without a branch is scheduled anew: registers are read and written in
an order that gives the same values, and what other warps can see stays in the program's order.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

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
    Targets,
    registers_in,
)
from flashgen.ptx.warp import CLOCKS

FREE = frozenset(
    (
        "add", "sub", "mul", "mad", "fma", "min", "max", "neg", "abs", "div", "rem", "and", "or",
        "xor", "not", "shl", "shr", "shf", "lop3", "bfe", "prmt", "setp", "set", "selp", "cvt",
        "mov", "ex2", "lg2", "rcp", "sqrt", "rsqrt", "cvta", "shfl", "elect", "mma", "movmatrix",
    )
)  # fmt: skip
"""Instructions of registers alone, which may run anywhere between their operands and their use."""

_ORDERED = frozenset(
    ("ld", "st", "ldmatrix", "stmatrix", "cp.async", "cp.async.commit_group",
     "cp.async.wait_group", "bar.sync", "barrier.sync")
)  # fmt: skip
"""Instructions that keep their order among each other. All else keeps its place."""

_STRONG = frozenset(("relaxed", "acquire", "release", "volatile", "mmio"))


def rescheduled(program: Program) -> tuple[Program, tuple[tuple[range, ...], ...]]:
    """The program in the order in which it runs, and for each stretch without a branch the groups
    that it consists of: positions of instructions that are alike and need nothing of each other,
    but for sums, of which each level adds to the one before it.
    """
    items: list[PtxInstruction] = []
    stretches = []
    for stretch in _stretches(program):
        groups = []
        for group in _scheduled(stretch, program) if len(stretch) > 1 else [stretch]:
            groups.append(range(len(items), len(items) + len(group)))
            items += group
        stretches.append(tuple(groups))
    return replace(program, instructions=tuple(items)), tuple(stretches)


def _stretches(program: Program) -> Iterator[list[PtxInstruction]]:
    """The instructions between labels, branches and what must keep its place."""
    labels = {
        position
        for item in program.instructions
        for operand in item.operands
        if isinstance(operand, Targets)
        for position in operand.positions
    }
    found: list[PtxInstruction] = []
    for position, item in enumerate(program.instructions):
        stays = _stays(item)
        if found and (stays or position in labels):
            yield found
            found = []
        found.append(item)
        if stays:
            yield found
            found = []
    if found:
        yield found


def _stays(item: PtxInstruction) -> bool:
    opcode, *modifiers = item.opcode.split(".")
    if opcode in FREE:  # a carry is no operand, and a clock moves
        return "cc" in modifiers or any(Name(each) in item.operands for each in CLOCKS)
    return not _is_ordered(item) or not _STRONG.isdisjoint(modifiers)


def _is_ordered(item: PtxInstruction) -> bool:
    opcode, *modifiers = item.opcode.split(".")
    words = 3 if modifiers[-1:] in (["commit_group"], ["wait_group"]) else 2
    short = ".".join([opcode, *modifiers][:words]) if opcode in ("cp", "bar", "barrier") else opcode
    return short in _ORDERED and not {"bulk", "mbarrier"} & set(modifiers)


def _key(item: PtxInstruction, program: Program) -> Hashable:
    """Instructions of one key can run as one if their registers allow it."""
    used: tuple[bool, ...] = ()
    if item.opcode.startswith("ld") and isinstance(item.operands[0], Group):
        used = tuple(part in program.used for part in item.operands[0].items)
    return item.opcode, tuple(map(_shape, item.operands)), item.predicate is not None, used


def _shape(operand: object) -> Hashable:
    """An operand without the numbers of its registers, and without its value."""
    if isinstance(operand, Register):
        return operand.type
    if isinstance(operand, Number):
        return Number
    if isinstance(operand, Group):
        return Group, *map(_shape, operand.items)
    if isinstance(operand, Pair):
        return Pair, _shape(operand.first), _shape(operand.second)
    if isinstance(operand, Address):
        return Address, _shape(operand.base)
    if isinstance(operand, Negated):
        return Negated
    return operand


def written(item: PtxInstruction) -> set[int]:
    """The registers that a free or ordered instruction writes, by index."""
    first = item.operands[0] if item.operands else None
    barrier = item.opcode.startswith("bar")
    if barrier or not isinstance(first, Register | Group | Pair):
        return set()
    return {register.index for register in registers_in(first)}


def _read(item: PtxInstruction, writes: set[int]) -> set[int]:
    found = {register.index for register in registers_in(item.operands[1 if writes else 0 :])}
    if item.predicate is not None:  # other lanes keep what they have
        found |= {item.predicate.index} | writes
    return found


class _Run(NamedTuple):
    """The key of ordered instructions that follow each other; first: the number of the first."""

    alike: Hashable
    first: int


class _Stretch:
    """Instructions by number: who must follow whom, and how many each one still waits for."""

    def __init__(self, items: Sequence[PtxInstruction], program: Program) -> None:
        self.items = items
        self.writes = [written(item) for item in items]
        self.reads = [_read(item, writes) for item, writes in zip(items, self.writes, strict=True)]
        self.keys: list[Hashable] = []
        self.after: list[set[int]] = [set() for _ in items]
        self.waits = [0] * len(items)
        writer: dict[int, int] = {}
        readers: dict[int, list[int]] = defaultdict(list)
        run, last = 0, -1
        for number, item in enumerate(items):
            reads, writes, key = self.reads[number], self.writes[number], _key(item, program)
            for index in reads | writes:
                self._follows(writer.get(index, -1), number)
            for index in writes:
                for reader in readers.pop(index, ()):
                    self._follows(reader, number)
                writer[index] = number
            for index in reads - writes:
                readers[index].append(number)
            if _is_ordered(item) and (program.stack_bytes or ".param" not in item.opcode):
                self._follows(last, number)
                if last < 0 or self.keys[last] != (key, run):
                    run = number
                key, last = _Run(key, run), number
            self.keys.append(key)

    def _follows(self, first: int, second: int) -> None:
        if 0 <= first != second and second not in self.after[first]:
            self.after[first].add(second)
            self.waits[second] += 1

    def released(self, group: Sequence[int]) -> list[int]:
        """What waited for nothing but these."""
        found = []
        for number in group:
            for following in self.after[number]:
                self.waits[following] -= 1
                if not self.waits[following]:
                    found.append(following)
        return sorted(found)


def _scheduled(items: Sequence[PtxInstruction], program: Program) -> Iterator[list[PtxInstruction]]:
    """Groups of alike instructions in an order that gives the same values. Greedy: what comes next
    is the group of which nothing, or the least, still waits for something.
    """
    stretch = _Stretch(items, program)
    left = Counter(stretch.keys)
    ready: dict[Hashable, list[int]] = defaultdict(list)
    for number, waits in enumerate(stretch.waits):
        if not waits:
            ready[stretch.keys[number]].append(number)

    def share(key: Hashable) -> tuple[float, int]:
        return 0.5 if isinstance(key, _Run) else len(ready[key]) / left[key], -ready[key][0]

    while ready:
        key = max(ready, key=share)
        group = level = sorted(ready.pop(key))
        while level:
            released = stretch.released(level)
            level = _next_level(stretch, key, group, level, released)
            group = group + level
            for number in released:
                if number not in level:
                    ready[stretch.keys[number]].append(number)
        left[key] -= len(group)
        yield [items[number] for number in group]


def _next_level(
    stretch: _Stretch, key: Hashable, group: list[int], level: list[int], released: list[int]
) -> list[int]:
    """What goes on with a group: the next one of a run that keeps its order, or what is added to
    each sum of the last level.
    """
    alike = [number for number in released if stretch.keys[number] == key]
    items = stretch.items
    added = carried(items[group[0]])
    if not alike or not (added or isinstance(key, _Run)):
        return []
    writes = set().union(*(stretch.writes[number] for number in group))
    if not added:
        return [number for number in alike if writes.isdisjoint(stretch.reads[number])]
    sums = {items[number].operands[added]: number for number in alike}
    found = [sums.get(items[number].operands[0], -1) for number in level]
    if -1 in found or len(set(found)) < len(found):
        return []
    in_place = added == 3
    for number in (*group, *found) if in_place else found:
        target, *sources = items[number].operands
        total = sources.pop(added - 1)
        others = {register.index for register in registers_in(tuple(sources))}
        if not writes.isdisjoint(others) or (in_place and target != total):
            return []
    return found


def carried(item: PtxInstruction) -> int:
    """Which operand of an instruction may be the result of the one before it in a group; 0: none.
    Products of matrices are summed in place.
    """
    opcode = item.opcode.split(".", 1)[0]
    if opcode == "mma":
        return 3
    chains = opcode in ("add", "max", "min") and item.predicate is None
    registers = all(isinstance(each, Register) for each in item.operands)
    return int(chains and registers and len(item.operands) == 3)
