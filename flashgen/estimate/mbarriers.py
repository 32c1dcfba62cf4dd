"""Which mbarrier an instruction names.

A ring has an mbarrier of 8 bytes for each stage, and a loop walks its places. ptxas adds constants
to the address of a place where it likes: some are in the instruction, others in the registers that
it names, and those of a neighbouring place i - 1 or i + 1 differ by a place.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flashgen.compile.sass import Instruction

PLACE_BYTES = 8

_ADDRESS = re.compile(r"\[((?:U?R\w+)(?:\+U?R\w+)?)(?:\+(-?0x[0-9a-f]+))?\]")
_NUMBER = re.compile(r"-?0x[0-9a-f]+$")
_REGISTER = re.compile(r"U?R\d+")
_SHARED_WINDOW = "0x18"
"""The shift by which ptxas makes the address of a block's shared memory: LEA R, R, R, 0x18."""


@dataclass(frozen=True, kw_only=True)
class BarrierAddress:
    """The constant part of an mbarrier's address; fixed: it has no other part."""

    offset: int
    fixed: bool

    def __add__(self, other: BarrierAddress) -> BarrierAddress:
        return BarrierAddress(offset=self.offset + other.offset, fixed=self.fixed and other.fixed)


NOTHING, UNKNOWN = BarrierAddress(offset=0, fixed=True), BarrierAddress(offset=0, fixed=False)


def address_of(i: Instruction) -> int | None:
    """The constant that an instruction adds to the address of an mbarrier: 0x8000 of [UR22+0x8000],
    of [R7+UR7+0x8000]. None if it names no address.
    """
    match = _ADDRESS.search(i.operands)
    return int(match[2] or "0", 16) if match else None


def place_of(code: Sequence[Instruction], number: int, start: int) -> BarrierAddress:
    """The place that instruction `number` names, which has an address, with the constants in its
    registers. start: the address where the code of its role begins.
    """
    match = _ADDRESS.search(code[number].operands)
    assert match is not None
    place = BarrierAddress(offset=int(match[2] or "0", 16), fixed=True)
    for register in match[1].split("+"):
        place += _value(code, number, register, start)
    return place


def _value(code: Sequence[Instruction], number: int, name: str, start: int) -> BarrierAddress:
    """What an operand adds, by the nearest instruction above that sets it."""
    if _NUMBER.match(name):
        value = int(name, 16)
        return BarrierAddress(offset=value - (value >> 31 << 32), fixed=True)
    if name in ("RZ", "URZ"):
        return NOTHING
    for n in range(number - 1, -1, -1):
        i = code[n]
        if i.address < start:
            break
        if not i.operands.startswith(name):  # most by far
            continue
        target, *sources = (operand.strip() for operand in i.operands.split(","))
        if target != name or i.base == "SYNCS":
            continue
        return _sum(code, n, i.base.removeprefix("U"), sources, start)
    return UNKNOWN


def _sum(
    code: Sequence[Instruction], number: int, base: str, sources: Sequence[str], start: int
) -> BarrierAddress:
    """What instruction `number` computes of its sources. Products and what is shifted count places
    of a ring.
    """
    if base == "LEA" and sources[-1] == _SHARED_WINDOW:
        return NOTHING
    terms: Sequence[str] = [
        s for s in sources if _REGISTER.fullmatch(s) or _NUMBER.match(s) or s in ("RZ", "URZ")
    ]
    place = NOTHING
    if base in ("IMAD", "LEA"):
        place = NOTHING if "RZ" in sources[:2] or "URZ" in sources[:2] else UNKNOWN
        terms = sources[2:3] if base == "IMAD" else sources[1:2]
    elif base not in ("MOV", "R2UR", "IADD", "IADD3", "VIADD"):
        return UNKNOWN
    for term in terms:
        place += _value(code, number, term, start)
    return place


def families(
    named: Mapping[int, tuple[BarrierAddress, bool]], initialized: frozenset[int]
) -> dict[int, int]:
    """The first mbarrier of the ring that each instruction names, by the instruction's address.

    named: the place of each, and whether it concerns tiles that are full, not places that are
    empty. initialized: the mbarriers of the kernel. Neighbouring places are of one ring where none
    is fixed and both concern the same.
    """
    walked = {(p.offset, full) for p, full in named.values() if not p.fixed}
    first = {p.offset: p.offset for p, _ in named.values()}
    for offset, full in sorted(walked):
        below = offset - PLACE_BYTES
        if (below, full) in walked:
            first[offset] = first[below] if first[below] in initialized else offset
            first[below] = first[offset]
    return {address: first[p.offset] for address, (p, _) in named.items()}
