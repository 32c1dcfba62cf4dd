"""Which registers instructions read, by bank: the load on the read ports of the register file.

After Huerta et al., "Dissecting and Modeling the Architecture of Modern GPU Cores", MICRO 2025
(arXiv 2503.20481), section 5.3: the registers of a sub-partition lie in two banks, the even and the
odd ones, and each bank delivers one register of a warp a cycle. What an operand marked "reuse" has
read stays in a cache, by bank and by the operand's place in its instruction, until the next read of
that bank at that place; it serves its own warp alone.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from flashgen.compile.sass import WARP, Instruction

BANKS = 2
NOTHING = range(0)

ALSO_REGISTERS = ("LOP3",)
"""What names the predicate it writes before the register it writes; others write but predicates."""

_REGISTER = re.compile(r"\bR(\d+)\b(\.reuse)?")
_TARGET = re.compile(r"R(\d+|Z)")
_PREDICATE = re.compile(r"!?U?P[0-9T]")


@dataclass(frozen=True, slots=True)
class RegisterOperand:
    """Numbers of registers; place is the index of the operand."""

    place: int
    registers: range
    reuse: bool


class Reads(NamedTuple):
    """Registers read from the even and the odd bank; again_*: directly after the warp's own
    previous instruction, whose operands are still cached.
    """

    even: int
    odd: int
    again_even: int
    again_odd: int


def operands(i: Instruction) -> tuple[RegisterOperand, ...]:
    """The registers that an instruction without memory operands reads, without RZ."""
    parts = [part.strip() for part in i.operands.split(",")]
    named = [part for part in parts if not _PREDICATE.fullmatch(part)]
    has_target = not _PREDICATE.fullmatch(parts[0]) or i.base in ALSO_REGISTERS
    if has_target and named and _TARGET.fullmatch(named[0]):
        named = named[1:]
    found = []
    for place, part in enumerate(named):
        if match := _REGISTER.search(part):
            first = int(match[1])
            registers = range(first, first + _count(i, place))
            found.append(RegisterOperand(place, registers, bool(match[2])))
    return tuple(found)


def _count(i: Instruction, place: int) -> int:
    """How many registers the operand at an index takes: more than one for tiles of a matrix."""
    if i.is_matrix and place < 3:
        rows, columns, depth = i.shape
        bits = 32 if ".TF32" in i.opcode else 16 if i.base == "HMMA" else 8
        sums = 16 if i.opcode.split(".")[2:3] == ["F16"] else 32
        tile = (rows * depth * bits, depth * columns * bits, rows * columns * sums)[place]
        return max(1, tile // (32 * WARP))
    return 2 if ".WIDE" in i.opcode and place == 2 else 1


def reads(body: Sequence[Instruction]) -> list[Reads]:
    """The reads of the instructions of a loop in its steady iterations."""
    known: dict[tuple[str, str], tuple[RegisterOperand, ...]] = {}
    of_body = []
    for i in body:  # a block has the same instructions once a trip
        text = i.opcode, i.operands
        if text not in known:
            known[text] = operands(i)
        of_body.append(known[text])
    held: dict[tuple[int, int], range] = {}
    for _ in range(2):  # the first trip fills the cache for the second
        found = [_reads(each, held) for each in of_body]
    return found


def _reads(of_one: Sequence[RegisterOperand], held: dict[tuple[int, int], range]) -> Reads:
    """One instruction's reads; held: by bank and place, the registers of the operand cached."""
    every, again = [0] * BANKS, [0] * BANKS
    for operand in of_one:
        for register in operand.registers:
            bank = register % BANKS
            every[bank] += 1
            again[bank] += register not in held.get((bank, operand.place), NOTHING)
        for bank in {register % BANKS for register in operand.registers}:
            held[bank, operand.place] = operand.registers if operand.reuse else NOTHING
    return Reads(*every, *again)
