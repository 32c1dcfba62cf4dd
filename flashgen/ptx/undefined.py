"""Values that nobody wrote: how they travel from register to register, and where they matter.

Compilers pad: they leave halves of a register, and lanes, undefined that nothing depends on. So
initcheck reports no read of a register. It follows the bits, as MemorySanitizer does (Stepanov and
Serebryany, CGO 2015), and reports those that reach memory, an address, a guard or a product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from flashgen.ptx.program import (
    Address,
    Box,
    Group,
    Number,
    Operand,
    Pair,
    PtxInstruction,
    Register,
    registers_in,
)
from flashgen.ptx.types import (
    RAW,
    SPOILED,
    TYPE_BYTES,
    Array,
    DecodedStep,
    LaneMask,
    Undefined,
)
from flashgen.ptx.warp import Warp

Operands = tuple[Operand, ...]


class Uninitialised(Exception):
    """A register is read to which nothing was written."""

    def __init__(self, register: Register) -> None:
        super().__init__(register)
        self.register = register


def mark(warp: Warp, index: int, lanes: LaneMask = None) -> Array:
    """Make a register undefined that holds nothing, in some lanes. Returns what it holds now, which
    spoils results.
    """
    kind, name = (
        warp.block.machine.program.registers[index],
        warp.block.machine.program.names[index],
    )
    if index in warp.in_flight:
        raise warp.fault("synccheck", f"it reads {name} before it has waited for the wgmma")
    chosen = np.ones(32, bool) if lanes is None else lanes
    held: Array
    if kind == "pred":
        bits, held = chosen, np.full(32, True)
    else:
        raw = RAW[TYPE_BYTES[kind]]
        bits = np.where(chosen, ~raw(0), raw(0))
        held = np.full(32, SPOILED % (1 << 8 * TYPE_BYTES[kind]), raw)
    warp.undefined[index] = Undefined(bits, name)
    warp.registers[index] = held
    return held


def check_guard(warp: Warp, index: int) -> None:
    """Report a guard that is undefined in an active lane."""
    _report(warp, warp.undefined[index], index, warp.active, "is guarded by")


def execute(warp: Warp, step: DecodedStep, mask: LaneMask) -> int | None:
    """Execute a step of which a register is undefined."""
    item = warp.block.machine.program.instructions[warp.position]
    targets, sources = _sides(warp, item)
    results = _results(warp, item, step, sources, mask)
    for index in targets:
        entry = warp.undefined.pop(index, None)
        if entry is not None and mask is not None:
            _keep(warp, index, entry, ~mask)
    following = step(warp, mask)
    for index, entry in results.items():
        _keep(warp, index, entry, mask)
    return following


def _keep(warp: Warp, index: int, entry: Undefined, mask: LaneMask) -> None:
    """Note the undefined bits of some lanes of a register."""
    bits = entry.bits if mask is None else np.where(mask, entry.bits, entry.bits.dtype.type(0))
    if index in warp.undefined:
        bits = bits | warp.undefined[index].bits
    if np.count_nonzero(bits):
        warp.undefined[index] = Undefined(bits, entry.origin)


def _sides(warp: Warp, item: PtxInstruction) -> tuple[list[int], Operands]:
    """The registers that an instruction writes, and the operands that it reads."""
    opcode, *modifiers = item.opcode.split(".")
    first, *others = item.operands
    reads_first = opcode == "brx" or (opcode in ("bar", "barrier") and "red" not in modifiers)
    if reads_first or not isinstance(first, Register | Group | Pair):
        return [], item.operands
    targets = [register.index for register in registers_in(first)]
    if opcode == "wgmma":
        return targets, item.operands if _accumulates(warp, others[2]) else tuple(others)
    return targets, tuple(others)


def _accumulates(warp: Warp, predicate: Operand) -> bool:
    if isinstance(predicate, Number):
        return predicate.text != "0"
    (register,) = registers_in(predicate)
    held = warp.registers[register.index]
    return held is None or bool(held[0])


def _results(
    warp: Warp,
    item: PtxInstruction,
    step: DecodedStep,
    sources: Operands,
    mask: LaneMask,
) -> dict[int, Undefined]:
    """What becomes undefined, by register; reports undefined values where they matter."""
    registers = list(registers_in(sources))
    entries = [entry for each in registers if (entry := warp.undefined.get(each.index))]
    if not entries:
        return {}
    opcode, *modifiers = item.opcode.split(".")
    rule = _RULES.get(opcode)
    if rule is None:
        _check_uses(warp, opcode, modifiers, sources, mask)
        return {}
    for register in registers:
        if warp.registers[register.index] is None:
            raise Uninitialised(register)
    flow = Flow(warp, item, modifiers, step, mask)
    return {index: Undefined(bits, entries[0].origin) for index, bits in rule(flow)}


def _check_uses(
    warp: Warp, opcode: str, modifiers: list[str], sources: Operands, mask: LaneMask
) -> None:
    """Report what must be defined, of a value that is stored the bytes that are."""
    on_stack = opcode == "st" and not {"param", "local"}.isdisjoint(modifiers)
    size = min((TYPE_BYTES[each] for each in modifiers if each in TYPE_BYTES), default=8)
    for operand in sources:
        is_address = isinstance(operand, Address | Box)
        doing = "takes an address from" if is_address else _DOING.get(opcode, "uses")
        for register in registers_in(operand):
            entry = warp.undefined.get(register.index)
            if entry is None or (on_stack and not is_address):
                continue
            if opcode in ("st", "atom", "red") and not is_address:
                entry = Undefined(entry.bits.astype(RAW[min(size, 8)]), entry.origin)
            _report(warp, entry, register.index, mask, doing)


def _report(warp: Warp, entry: Undefined, index: int, mask: LaneMask, doing: str) -> None:
    lanes = entry.bits if mask is None else np.where(mask, entry.bits, entry.bits.dtype.type(0))
    if np.count_nonzero(lanes):
        name = warp.block.machine.program.names[index]
        why = "" if name == entry.origin else f"which depends on {entry.origin}, "
        lane = int(np.argmax(lanes != 0))
        said = f"it {doing} the register {name}, {why}to which nothing was written"
        warp.report("initcheck", said, lane)


class Flow(NamedTuple):
    """An instruction that makes a result of undefined values."""

    warp: Warp
    item: PtxInstruction
    modifiers: list[str]
    step: DecodedStep
    mask: LaneMask

    def bits(self, operand: Operand, dtype: Any) -> Array:
        """The undefined bits of an operand, of which a larger register has more."""
        found = [self.warp.undefined.get(register.index) for register in registers_in(operand)]
        if found and found[0] is not None:
            return found[0].bits.astype(dtype)
        return np.zeros(32, dtype)

    def value(self, operand: Operand, dtype: Any) -> Array:
        """What an operand holds."""
        if isinstance(operand, Number):
            return np.full(32, int(operand.text, 0) % (1 << 8 * np.dtype(dtype).itemsize)).astype(
                dtype
            )
        (register,) = registers_in(operand)
        held: Array = self.warp.registers[register.index].astype(dtype)
        return held

    def targets(self) -> list[tuple[int, Any]]:
        """The registers of the result, with their numpy types."""
        return [
            (register.index, bool if register.type == "pred" else RAW[TYPE_BYTES[register.type]])
            for register in registers_in(self.item.operands[0])
        ]


Flowing = Iterable[tuple[int, Array]]


def _mixed(flow: Flow, sources: Iterable[Operand] | None = None, parts: int = 0) -> Flowing:
    """Any undefined bit of a number makes the number of the result undefined; packed numbers
    one by one.
    """
    chosen = flow.item.operands[1:] if sources is None else sources
    parts = parts or (2 if any(each.endswith("x2") for each in flow.modifiers) else 1)
    undefined = np.zeros((32, parts), bool)
    for register in registers_in(tuple(chosen)):
        entry = flow.warp.undefined.get(register.index)
        if entry is not None:
            content = np.ascontiguousarray(entry.bits).view(np.uint8).reshape(32, -1)
            split = parts if content.shape[1] % parts == 0 and register.type != "pred" else 1
            undefined |= content.reshape(32, split, -1).any(2)
    targets = flow.targets()
    for place, (index, dtype) in enumerate(targets):
        size = np.dtype(dtype).itemsize
        rows = np.repeat(undefined, max(size // parts, 1), 1)[:, :size]
        if dtype is not bool:
            yield index, (rows.astype(np.uint8) * np.uint8(255)).view(dtype).reshape(32)
        elif parts == len(targets):  # of packed numbers each has its predicate
            yield index, undefined[:, place].copy()
        else:
            yield index, np.asarray(undefined.any(1))


def _moved(flow: Flow) -> Flowing:
    """Bits go where the instruction moves them: it runs on the undefined bits. Operands that say
    where to are kept.
    """
    opcode = flow.item.opcode.split(".", 1)[0]
    kept = registers_in(tuple(flow.item.operands[at] for at in _WHERE.get(opcode, ())))
    where = frozenset(register.index for register in kept)
    if not where.isdisjoint(flow.warp.undefined):
        return _mixed(flow)
    moved = _Moved(flow.warp, where)
    flow.step(moved, flow.mask)
    return [(index, moved.registers[index]) for index, _ in flow.targets()]


class _Moved:
    """A warp whose registers hold their undefined bits, but for those in `kept`."""

    def __init__(self, warp: Warp, kept: frozenset[int]) -> None:
        self.registers = _Bits(warp, kept)
        self.active, self.block = warp.active, warp.block


class _Bits(dict[int, Array]):
    def __init__(self, warp: Warp, kept: frozenset[int]) -> None:
        self._warp, self._kept = warp, kept

    def __missing__(self, index: int) -> Array | None:
        held: Array | None = self._warp.registers[index]
        if index in self._kept:
            return held
        entry = self._warp.undefined.get(index)
        if entry is not None:
            return entry.bits
        return np.zeros(32, np.uint8 if held is None else held.dtype)


def _bitwise(flow: Flow) -> Flowing:
    """Each bit by itself; a defined 0 decides an and, a defined 1 an or."""
    opcode = flow.item.opcode.split(".", 1)[0]
    ((index, dtype),) = flow.targets()
    sources = flow.item.operands[1:]
    undefined = [flow.bits(each, dtype) for each in sources if not isinstance(each, Number)]
    found = np.bitwise_or.reduce(undefined)
    if opcode in ("and", "or"):
        for operand, bits in zip(
            sources, [flow.bits(each, dtype) for each in sources], strict=True
        ):
            value = flow.value(operand, dtype)
            found = found & (bits | (value if opcode == "and" else ~value))
    yield index, found


def _selected(flow: Flow) -> Flowing:
    """What is selected; all of it where the predicate is undefined."""
    _, first, second, predicate = flow.item.operands
    ((index, dtype),) = flow.targets()
    chosen = np.where(
        flow.value(predicate, bool), flow.bits(first, dtype), flow.bits(second, dtype)
    )
    yield index, np.where(flow.bits(predicate, bool), ~np.zeros(32, dtype), chosen)


def _converted(flow: Flow) -> Flowing:
    """Integers are moved, packed numbers are converted one by one."""
    to, of = [each for each in flow.modifiers if each in TYPE_BYTES][:2]
    if len(flow.item.operands) > 2:  # the first source is the upper half
        (index, upper), (_, lower) = (
            next(iter(_mixed(flow, [each], 1))) for each in flow.item.operands[1:3]
        )
        half = upper.dtype.type(4 * upper.dtype.itemsize)
        ones = (upper.dtype.type(1) << half) - upper.dtype.type(1)
        return [(index, (upper & ~ones) | (lower & ones))]
    if to[0] in "usb" and of[0] in "usb" and "sat" not in flow.modifiers:
        return _moved(flow)
    return _mixed(flow)


def _of_the_warp(flow: Flow) -> Flowing:
    """What is made of all active lanes is undefined if one of them is."""
    for index, bits in _mixed(flow):
        active = bits if flow.mask is None else bits[flow.mask]
        yield index, np.full(32, active.max() if len(active) else bits.dtype.type(0))


_WHERE = {
    "shfl": (2, 3, 4), "prmt": (3,), "shl": (2,), "shr": (2,), "shf": (3,), "bfe": (2, 3),
    "bfi": (3, 4),
}  # fmt: skip
"""Operands that say where bits go."""

_RULES: dict[str, Callable[[Flow], Flowing]] = {
    **dict.fromkeys(("mov", "cvta", "mapa", "movmatrix", "brev", *_WHERE), _moved),
    **dict.fromkeys(("and", "or", "xor", "not", "lop3"), _bitwise),
    **dict.fromkeys(("vote", "match", "redux"), _of_the_warp),
    **dict.fromkeys(
        (
            "add", "sub", "mul", "mad", "fma", "min", "max", "neg", "abs", "div", "rem", "dp4a",
            "ex2", "lg2", "rcp", "sqrt", "rsqrt", "sin", "cos", "tanh", "copysign", "testp",
            "setp", "set", "popc", "clz", "bfind", "sad", "addc", "subc", "madc",
        ),
        _mixed,
    ),
    "selp": _selected,
    "cvt": _converted,
}  # fmt: skip

_DOING = {
    **dict.fromkeys(("st", "stmatrix", "atom", "red", "tcgen05"), "stores"),
    **dict.fromkeys(("mma", "wgmma"), "multiplies"),
}
