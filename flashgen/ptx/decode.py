"""An instruction becomes a step: the table of instructions, and what their semantics are made of.

A function that is registered for an opcode is called once per instruction of a program, with a
Form; it returns the step that runs. It must take every modifier of the opcode, so that nothing is
skipped silently: what is left over is an error.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np

from flashgen.errors import cut, one_line
from flashgen.ptx.memory import PARAMETER_STRIDE
from flashgen.ptx.program import (
    FOREIGN,
    Address,
    Group,
    InvalidPtx,
    Name,
    Negated,
    Number,
    Operand,
    Pair,
    Program,
    PtxInstruction,
    Register,
    Several,
    Targets,
)
from flashgen.ptx.types import FORMATS, RAW, TYPE_BYTES, Array, DecodedStep, Format, LaneMask, same
from flashgen.ptx.undefined import Uninitialised, mark
from flashgen.ptx.warp import CLOCKS, Warp

OperandReader = Callable[[Warp], Array]
Store = Callable[[Warp, Array, LaneMask], None]
Semantics = Callable[["Form"], DecodedStep]

TABLE: dict[str, Semantics] = {}
"""Semantics by opcode, as far as it says what is done: "add", "wgmma.fence"."""


def instruction(*opcodes: str) -> Callable[[Semantics], Semantics]:
    """Register the semantics of opcodes."""

    def register(semantics: Semantics) -> Semantics:
        for opcode in opcodes:
            if opcode in TABLE:
                raise ValueError(f"{opcode} is registered twice")
            TABLE[opcode] = semantics
        return semantics

    return register


def decode(
    program: Program,
    item: PtxInstruction,
    symbols: dict[str, int],
    of: Sequence[PtxInstruction] = (),
) -> DecodedStep:
    """The step of an instruction, or of several that `item` stands for: see fusion.py. symbols:
    addresses of variables. Raises InvalidPtx.
    """
    try:
        return _decoded(Form(program, item, symbols, of))
    except InvalidPtx:
        raise
    except FOREIGN as error:
        raise InvalidPtx(f"operands that do not fit ({one_line(error)}): {item}") from error


def _decoded(form: Form) -> DecodedStep:
    item = form.item
    words = item.opcode.split(".")
    for count in range(len(words), 1, -1):
        if (opcode := ".".join(words[:count])) in TABLE:
            form.opcode, form.modifiers = opcode, words[count:]
            break
    if form.opcode not in TABLE:
        form.unknown(f"the instruction {form.opcode}")
    step = TABLE[form.opcode](form)
    if form.modifiers:
        form.unknown("the modifier " + ", ".join(f".{left}" for left in form.modifiers))
    return step


class Form:
    """An instruction while it is decoded. modifiers: those that nobody has taken yet. of: the
    instructions that it stands for; then registers have 32 lanes of each.
    """

    def __init__(
        self,
        program: Program,
        item: PtxInstruction,
        symbols: dict[str, int],
        of: Sequence[PtxInstruction] = (),
    ) -> None:
        self.program, self.item, self.symbols = program, item, symbols
        self.lanes, self._first = 32 * max(len(of), 1), of[0] if of else item
        self.opcode, *self.modifiers = item.opcode.split(".")
        self.operands = item.operands

    def unknown(self, what: str) -> NoReturn:
        """Raise the error of an instruction that has no semantics here."""
        raise InvalidPtx(
            f"{cut(what)} is not known: {cut(self.item.opcode)}, PTX line {self.item.line}"
        )

    def wrong(self, what: str) -> NoReturn:
        """Raise the error of an operand that does not fit."""
        raise InvalidPtx(f"{what}: {self.item}")

    # Modifiers

    def flag(self, name: str) -> bool:
        """Take a modifier; whether it was there."""
        if name not in self.modifiers:
            return False
        self.modifiers.remove(name)
        return True

    def choice(self, *names: str) -> str:
        """Take the one of these modifiers that is there; "" if none is."""
        for name in self.modifiers:
            if name in names:
                self.modifiers.remove(name)
                return name
        return ""

    def hint(self, *names: str) -> None:
        """Take modifiers that change no result: caching, and orders that always hold here. A name
        that ends with "*" stands for all that begin so.
        """
        self.modifiers = [
            left
            for left in self.modifiers
            if not any(
                left.startswith(name[:-1]) if name.endswith("*") else left == name for name in names
            )
        ]

    def types(self) -> list[str]:
        """Take all modifiers that are types, in their order."""
        found = [name for name in self.modifiers if name in TYPE_BYTES or name == "pred"]
        self.modifiers = [name for name in self.modifiers if name not in found]
        return found

    def type(self) -> str:
        """Take the modifier that is the only type."""
        found = self.types()
        if len(found) != 1:
            self.unknown("an instruction of " + (" and ".join(found) or "no type"))
        return found[0]

    def format(self) -> Format:
        """Take the only type, one that has numbers."""
        name = self.type()
        if name not in FORMATS:
            self.unknown(f"arithmetic of {name}")
        return FORMATS[name]

    # Operands

    def group(self, at: int) -> tuple[Operand, ...]:
        """The items of an operand in braces; a single operand as one item."""
        operand = self.operands[at]
        return operand.items if isinstance(operand, Group) else (operand,)

    def registers(self, at: int) -> tuple[Register, ...]:
        """The items of an operand in braces, all registers."""
        items = self.group(at)
        found = tuple(item for item in items if isinstance(item, Register))
        if len(found) != len(items):
            self.wrong(f"operand {at} must consist of registers")
        return found

    def used(self) -> list[int]:
        """Which items of the destination something reads."""
        first = self._first.operands[0]
        items = first.items if isinstance(first, Group) else (first,)
        return [n for n, item in enumerate(items) if item in self.program.used]

    def pair(self, at: int) -> tuple[Operand, Operand | None]:
        """Two destinations a|b, or one."""
        operand = self.operands[at]
        if isinstance(operand, Pair):
            return operand.first, operand.second
        return operand, None

    def targets(self, at: int) -> tuple[int, ...]:
        """The positions of a label, or of a list of labels."""
        operand = self.operands[at]
        if not isinstance(operand, Targets):
            self.wrong(f"operand {at} must be a label, or a list of labels")
        return operand.positions

    def constant(self, at: int) -> int:
        """An operand that must be an integer in the text."""
        operand = self.operands[at]
        if not isinstance(operand, Number):
            self.wrong(f"operand {at} must be an integer")
        return int(operand.text, 0)

    def number(self, at: int, kind: str) -> OperandReader:
        """An operand as numbers of a type."""
        return self.numbers(self.operands[at], FORMATS[kind])

    def numbers(self, operand: Operand, kind: Format) -> OperandReader:
        """An operand as numbers of a format."""
        bits, load, viewed = self.bits(operand, kind.size, kind), kind.load, kind.viewed
        if load is same:
            return bits
        if isinstance(operand, Register) and TYPE_BYTES[operand.type] == kind.size:
            index = operand.index

            # Without a function for what numpy does: it would take as long as the rest.
            def view(warp: Warp) -> Array:
                held = warp.registers[index]
                if held is None:
                    raise Uninitialised(operand)
                found: Array = held.view(viewed)
                return found

            def read(warp: Warp) -> Array:
                held = warp.registers[index]
                if held is None:
                    raise Uninitialised(operand)
                return load(held)

            return read if viewed is None else view
        if isinstance(operand, Number | Several):
            constant = load(self._constant(operand, kind.size, kind))
            return lambda warp: constant
        return lambda warp: load(bits(warp))

    def bits(self, operand: Operand, size: int, kind: Format | None = None) -> OperandReader:
        """An operand as raw bits of `size` bytes; of a larger register the lower ones."""
        raw = RAW[size]
        if isinstance(operand, Register):
            index, held_bytes = operand.index, TYPE_BYTES.get(operand.type, 1)

            def read(warp: Warp) -> Array:
                held: Array | None = warp.registers[index]
                if held is None:
                    raise Uninitialised(operand)
                return held if held_bytes == size else held.astype(raw)

            return read
        if isinstance(operand, Number | Several):
            constant = self._constant(operand, size, kind)
        elif isinstance(operand, Name) and operand.text.startswith("%"):
            special = operand.text
            if special in CLOCKS:
                shift = 32 if special.endswith("_hi") else 0
                return lambda warp: np.full(32, warp.block.machine.clock() >> shift).astype(raw)
            return lambda warp: np.full(32, warp.special[special], np.uint32).astype(raw)
        elif isinstance(operand, Name):
            constant = np.full(self.lanes, self._symbol(operand.text), np.uint64).astype(raw)
        else:
            self.wrong("an operand that has no value")
        return lambda warp: constant

    def _constant(self, operand: Number | Several, size: int, kind: Format | None) -> Array:
        texts = operand.texts if isinstance(operand, Several) else (operand.text,)
        found = np.array([_immediate(text, size, kind) for text in texts], RAW[size])
        return np.repeat(found, self.lanes // len(found))

    def predicate(self, operand: Operand) -> OperandReader:
        """A predicate operand as booleans."""
        if isinstance(operand, Negated):
            inner = self.predicate(operand.register)
            return lambda warp: ~inner(warp)
        if isinstance(operand, Number | Several):
            constant = self._constant(operand, 4, None) != 0
            return lambda warp: constant
        if not isinstance(operand, Register):
            self.wrong("a predicate must be a register")

        def read(warp: Warp) -> Array:
            held: Array | None = warp.registers[operand.index]
            if held is None:
                raise Uninitialised(operand)
            return held

        return read

    def address(self, at: int, size: int) -> OperandReader:
        """An operand in square brackets as unsigned addresses of `size` bytes."""
        operand = self.operands[at]
        if not isinstance(operand, Address):
            self.wrong(f"operand {at} must be an address")
        base = self.bits(operand.base, size)
        if not operand.offset:
            return base
        offset: Any = (
            RAW[size](operand.offset % (1 << 8 * size))
            if isinstance(operand.offset, int)
            else self._constant(operand.offset, size, None)
        )
        return lambda warp: base(warp) + offset

    def parameter(self, at: int) -> int | None:
        """How far an address that names a parameter is from the first; None if it names none."""
        operand = self.operands[at]
        if not isinstance(operand, Address) or not isinstance(operand.base, Name):
            return None
        if not isinstance(operand.offset, int):
            self.wrong("parameters at several addresses")
        return self._symbol(operand.base.text) + operand.offset

    def on_stack(self, at: int) -> bool:
        """Whether an operand in square brackets is a variable of the stack."""
        operand = self.operands[at]
        return isinstance(operand, Address) and isinstance(operand.base, Number)

    def _symbol(self, name: str) -> int:
        """The address of a variable or parameter, in its own space."""
        if name in self.symbols:
            return self.symbols[name]
        for number, parameter in enumerate(self.program.parameters):
            if parameter.name == name:
                return number * PARAMETER_STRIDE
        self.wrong(f"{name} is not declared")

    # Destinations

    def store(self, operand: Operand | None) -> Store:
        """How raw bits, of the width of the register, reach a destination; a mask keeps the other
        lanes. Nothing is kept of what goes to "_", or to None, a second destination that is left
        out.
        """
        if operand is None or (isinstance(operand, Name) and operand.text == "_"):
            return lambda warp, bits, mask: None
        if not isinstance(operand, Register):
            self.wrong("a destination must be a register")
        index = operand.index

        def write(warp: Warp, bits: Array, mask: LaneMask) -> None:
            if mask is not None:
                held = warp.registers[index]
                if held is None:
                    held = mark(warp, index, ~mask)
                bits = np.where(mask, bits, held)
            warp.registers[index] = bits

        return write

    def result(self, kind: Format, at: int = 0) -> Store:
        """How numbers reach a destination."""
        operand = self.operands[at]
        store, encode = self.store(operand), kind.store
        if isinstance(operand, Register) and (wide := TYPE_BYTES[operand.type]) > kind.size:
            # A result that is narrower than its register is extended (PTX ISA 9.4.1).
            of_result = np.dtype(f"{'i' if kind.signed else 'u'}{kind.size}")
            extended = np.dtype(f"{'i' if kind.signed else 'u'}{wide}")
            return lambda warp, values, mask: store(
                warp, encode(values).view(of_result).astype(extended).view(RAW[wide]), mask
            )
        viewed, raw = kind.viewed, RAW[kind.size]
        if not isinstance(operand, Register) or viewed is None:
            return lambda warp, values, mask: store(warp, encode(values), mask)
        index = operand.index

        def write(warp: Warp, values: Array, mask: LaneMask) -> None:
            bits = values.view(raw) if values.dtype is viewed else encode(values)
            if mask is None:
                warp.registers[index] = bits
            else:
                store(warp, bits, mask)

        return write


def _immediate(text: str, size: int, kind: Format | None) -> int:
    """The bits of an immediate. 0f and 0d are the bits of a float32 and float64 (PTX ISA 4.5.2)."""
    if text[:2] in ("0f", "0F"):
        bits = int(text[2:], 16)
        if size == 8 and kind is not None and kind.name == "f64":
            single: float = struct.unpack("<f", struct.pack("<I", bits))[0]
            return int.from_bytes(struct.pack("<d", single), "little")
        return bits
    if text[:2] in ("0d", "0D"):
        return int(text[2:], 16)
    return int(text, 0) % (1 << 8 * size)


def elementwise(
    form: Form, function: Callable[..., Array], result: Format, sources: Sequence[Format]
) -> DecodedStep:
    """The step of a function of up to three operands of these formats, behind the destination."""
    write = form.result(result)
    reads = [form.numbers(form.operands[n], kind) for n, kind in enumerate(sources, 1)]
    if len(reads) == 1:
        (only,) = reads
        return lambda warp, mask: write(warp, function(only(warp)), mask)
    if len(reads) == 2:
        left, right = reads
        return lambda warp, mask: write(warp, function(left(warp), right(warp)), mask)
    first, second, third = reads
    return lambda warp, mask: write(warp, function(first(warp), second(warp), third(warp)), mask)
