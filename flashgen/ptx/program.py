"""A PTX kernel as values: Program, Instruction and the operands of an instruction."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, is_dataclass
from functools import cached_property
from struct import error as StructError

from flashgen.errors import FlashgenError, cut

FOREIGN = (
    ArithmeticError, AssertionError, AttributeError, LookupError, RecursionError, StructError,
    TypeError, ValueError,
)  # fmt: skip
"""What a text that is no PTX makes Python and numpy raise. Where it is read, decoded and executed,
these become an InvalidPtx: a check of every operand would be as long as the PTX ISA.
"""


class InvalidPtx(FlashgenError, ValueError):
    """PTX that cannot be read, or an instruction that this package does not know."""


@dataclass(frozen=True)
class Register:
    """A register of the kernel: its position in Program.registers, and its PTX type (b32, pred)."""

    index: int
    type: str


@dataclass(frozen=True)
class Negated:
    """A predicate operand with a "!" before it."""

    register: Register


@dataclass(frozen=True)
class Number:
    """An immediate, as it is written: -1, 0x7fff, 0f3F800000. The instruction gives it a type."""

    text: str


@dataclass(frozen=True)
class Several:
    """The immediates of instructions that run as one, each as the text of a Number."""

    texts: tuple[str, ...]


@dataclass(frozen=True)
class Name:
    """A variable, a parameter, a special register such as %tid.x, or "_"."""

    text: str


@dataclass(frozen=True)
class Targets:
    """A label, as the position of the instruction that follows it, or those of .branchtargets."""

    positions: tuple[int, ...]


@dataclass(frozen=True)
class Address:
    """[base + offset], offset in bytes."""

    base: Operand
    offset: int | Several


@dataclass(frozen=True)
class Group:
    """{a, b, ...}."""

    items: tuple[Operand, ...]


@dataclass(frozen=True)
class Box:
    """[map, {x, y, ...}]: where a tensor copy begins, the innermost coordinate first."""

    tensor_map: Operand
    coordinates: tuple[Operand, ...]


@dataclass(frozen=True)
class Pair:
    """a|b: two destinations."""

    first: Operand
    second: Operand


Operand = Register | Negated | Number | Several | Name | Targets | Address | Group | Box | Pair


@dataclass(frozen=True)
class SourceLine:
    """A line of the source that PTX was compiled from, as a .loc directive names it."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True, kw_only=True)
class PtxInstruction:
    """One instruction. predicate: its guard; negated: the guard has a "!". line: of the PTX text,
    counted from 1. source: the line of the kernel's source, if the PTX has line information.
    """

    opcode: str
    operands: tuple[Operand, ...]
    predicate: Register | None
    negated: bool
    line: int
    source: SourceLine | None
    text: str

    def __str__(self) -> str:
        return f"PTX line {self.line}: {cut(self.text)}"


@dataclass(frozen=True, kw_only=True)
class PtxParameter:
    """A parameter of the kernel: its name and its size in bytes."""

    name: str
    size: int


@dataclass(frozen=True, kw_only=True)
class Variable:
    """A variable of the module: `space` is shared or global. An `extern` one has size 0: the launch
    says how many bytes of dynamic shared memory there are.
    """

    name: str
    space: str
    align: int
    content: bytes
    extern: bool = False

    @property
    def size(self) -> int:
        """Bytes."""
        return len(self.content)


@dataclass(frozen=True, kw_only=True)
class Program:
    """A kernel. threads: of a block, by .reqntid or .maxntid. max_registers: a thread's, by
    .maxnreg; None without it. stack_bytes: of a thread's local memory, in which its variables and
    the parameters of calls are. registers: the PTX type and the name of each register.
    """

    name: str
    target: str
    parameters: tuple[PtxParameter, ...]
    threads: int
    max_registers: int | None
    stack_bytes: int
    registers: tuple[str, ...]
    names: tuple[str, ...]
    variables: tuple[Variable, ...]
    instructions: tuple[PtxInstruction, ...]

    @property
    def warps(self) -> int:
        """Warps of a block."""
        return -(-self.threads // 32)

    @cached_property
    def used(self) -> frozenset[Register]:
        """Registers that an instruction reads: those of a load's destination alone are not used."""
        found: set[Register] = set()
        for item in self.instructions:
            skipped = 1 if item.opcode.startswith("ld") else 0
            for operand in item.operands[skipped:]:
                found.update(registers_in(operand))
            if item.predicate is not None:
                found.add(item.predicate)
        return frozenset(found)

    @cached_property
    def _writers(self) -> dict[int, list[PtxInstruction]]:
        """The instructions that write each register, by its index."""
        found: dict[int, list[PtxInstruction]] = {}
        for item in self.instructions:
            for register in registers_in(item.operands[:1]):
                found.setdefault(register.index, []).append(item)
        return found

    def loads_address(self, item: PtxInstruction) -> bool:
        """Whether an address that an instruction uses was loaded from global memory, and not an
        offset to it.
        """
        addresses = [each for each in item.operands if isinstance(each, Address | Box)]
        left, seen = [each.index for each in registers_in(tuple(addresses))], set()
        while left:
            index = left.pop()
            if index in seen or self.registers[index] != "b64":
                continue
            seen.add(index)
            for writer in self._writers.get(index, ()):
                opcode, *modifiers = writer.opcode.split(".")
                if opcode == "ld" and "global" in modifiers:
                    return True
                if opcode in ("add", "sub", "mov", "cvta", "selp"):
                    left += [each.index for each in registers_in(writer.operands[1:])]
                elif opcode == "mad":
                    left += [each.index for each in registers_in(writer.operands[3:])]
        return False


def registers_in(operand: object) -> Iterator[Register]:
    """The registers in an operand, or in what it consists of."""
    if isinstance(operand, Register):
        yield operand
    elif isinstance(operand, tuple):
        for item in operand:
            yield from registers_in(item)
    elif is_dataclass(operand):
        yield from registers_in(tuple(vars(operand).values()))
