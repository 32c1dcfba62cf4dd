"""PTX text to a Program (PTX ISA 9.0, chapters 4 "Syntax" and 11 "Directives")."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import PurePath

from flashgen.errors import cut, one_line
from flashgen.ptx.program import (
    FOREIGN,
    Address,
    Box,
    Group,
    InvalidPtx,
    Name,
    Negated,
    Number,
    Operand,
    Pair,
    Program,
    PtxInstruction,
    PtxParameter,
    Register,
    SourceLine,
    Targets,
    Variable,
)
from flashgen.ptx.types import TYPE_BYTES
from flashgen.ptx.warp import CLOCKS

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_ENTRY = re.compile(r"(?:\.(?:visible|weak)\s+)?\.entry\s+([\w$]+)\s*\(([^)]*)\)([^{]*)\{")
_PARAMETER = re.compile(
    r"\.param\s+(?:\.align\s+\d+\s+)?\.(\w+)\s+(?:\.ptr\s+(?:\.\w+\s+)?(?:\.align\s+\d+\s+)?)?"
    r"([\w$]+)(?:\[(\d+)\])?\s*$"
)
_VARIABLE = re.compile(
    r"(\.extern\s+)?(?:\.visible\s+)?\.(shared|global)\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+"
    r"([\w$]+)(?:\[(\d*)\])?(?:\s*=\s*\{([^}]*)\})?\s*;"
)
_FUNCTION = re.compile(r"\.func\s*(?:\(([^)]*)\)\s*)?([\w$]+)\s*\(([^)]*)\)(?:\s*\.\w+)*\s*\{")
_STACK = re.compile(r"\.(?:param|local)\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+([\w$]+)(?:\[(\d+)\])?$")
_CALL = re.compile(
    r"(?:@!?%?[\w$]+\s+)?call(?:\.uni)?\s+(?:\(([^)]*)\)\s*,\s*)?([\w$]+)(?:\s*,\s*\(([^)]*)\))?$"
)
_RETURN = re.compile(r"(@!?%?[\w$]+\s+)?ret(?:\.uni)?$")
_FILE = re.compile(r'^\s*\.file\s+(\d+)\s+"([^"]*)"(?:\s+"([^"]*)")?', re.MULTILINE)
_LOC = re.compile(r"\.loc\s+(\d+)\s+(\d+)\s+\d+[^\n]*")
_LABEL = re.compile(r"([A-Za-z_$][\w$]*)\s*:(?!:)")
_NO_SPACE = re.compile(r"\S")
_STATEMENT = re.compile(r"[^;]*;")
_GUARD = re.compile(r"@(!?)(%?[\w$]+)\s+")
_OPCODE = re.compile(r"[a-z][\w]*(?:\.[\w:]+)*")
_NUMBER = re.compile(r"-?(?:0[fFdD][0-9A-Fa-f]+|0[xX][0-9A-Fa-f]+|\d+(?:\.\d+)?)U?$")
_OCTAL = re.compile(r"-?0\d")
_DECLARED = re.compile(r"(%?[\w$]+)(?:<(\d+)>)?$")
_IGNORED = (".pragma", ".section")

MOST_REGISTERS = 1 << 18
"""Registers that a kernel may declare; ours declare some thousands."""

MOST_THREADS = 1024
"""Of a block (CUDA C++ Programming Guide, "Technical Specifications per Compute Capability")."""

MOST_VARIABLE_BYTES = 1 << 24
"""Of a variable: shared memory has less, and so do the constants of a kernel."""

MOST_CALLS = 1 << 12
"""Calls in a kernel's text. Each becomes the text of the function that is called."""

DEEPEST = 3
"""Brackets within each other, as in [map, {x, y}]."""


def parse(text: str) -> Program:
    """The kernel of a PTX module that has exactly one. Raises InvalidPtx."""
    try:
        return _parsed(text)
    except InvalidPtx:
        raise
    except FOREIGN as error:
        raise InvalidPtx(f"this PTX cannot be read: {one_line(error)}") from error


def _parsed(text: str) -> Program:
    if ".version" not in text or ".target" not in text:
        raise InvalidPtx("this is not PTX: it has no .version and .target directives")
    # Of a comment its line ends stay, so that lines keep their numbers.
    clean = _COMMENT.sub(lambda comment: "\n" * comment[0].count("\n"), text)
    entries = list(_ENTRY.finditer(clean))
    if len(entries) != 1:
        raise InvalidPtx(f"a PTX module must have one kernel: got {len(entries)}")
    name, parameters, directives = entries[0].groups()
    body = _Body(clean, entries[0].end())
    body.read(_Scope())
    threads = re.search(r"\.(?:reqntid|maxntid)\s+(\d+)", directives)
    if threads is None:
        raise InvalidPtx(f"{name} must state its threads by .reqntid or .maxntid")
    if not 1 <= int(threads[1]) <= MOST_THREADS:
        raise InvalidPtx(f"a block must have 1 to {MOST_THREADS} threads: got {threads[1]}")
    registers = re.search(r"\.maxnreg\s+(\d+)", directives)
    target = re.search(r"\.target\s+(\w+)", clean)
    return Program(
        name=name,
        target=target[1] if target else "",
        parameters=tuple(_parameters(parameters)),
        threads=int(threads[1]),
        max_registers=int(registers[1]) if registers else None,
        stack_bytes=body.stack_bytes,
        registers=tuple(body.types),
        names=tuple(body.names),
        variables=tuple(_variables(clean[: entries[0].start()])),
        instructions=tuple(body.instructions()),
    )


def _parameters(text: str) -> Iterator[PtxParameter]:
    for part in filter(None, map(str.strip, text.split(","))):
        found = _PARAMETER.match(part)
        if found is None:
            raise InvalidPtx(f"a parameter that cannot be read: {cut(part)}")
        kind, name, count = found.groups()
        yield PtxParameter(name=name, size=_bytes_of(kind, count, name))


def _bytes_of(kind: str, count: str | None, name: str) -> int:
    """The size of a parameter or variable of so many elements."""
    size = TYPE_BYTES.get(kind)
    if size is None:
        raise InvalidPtx(f"a type that is not known: .{cut(kind)} {cut(name)}")
    size *= int(count or 1)
    if size > MOST_VARIABLE_BYTES:
        raise InvalidPtx(f"{cut(name)} must have at most {MOST_VARIABLE_BYTES} bytes: got {size}")
    return size


def _variables(text: str) -> Iterator[Variable]:
    for extern, space, align, kind, name, count, values in _VARIABLE.findall(text):
        length = 0 if extern else _bytes_of(kind, count, name)
        size = _bytes_of(kind, None, name)
        if not 1 <= int(align or size) <= MOST_VARIABLE_BYTES:
            raise InvalidPtx(f"{cut(name)} must be aligned to a number of bytes: got {align}")
        given = [int(value, 0) for value in values.split(",")] if values else []
        content = b"".join((value % (1 << 8 * size)).to_bytes(size, "little") for value in given)
        yield Variable(
            name=name,
            space=space,
            align=int(align or size),
            content=content.ljust(length, b"\0"),
            extern=bool(extern),
        )


@dataclass
class _Scope:
    """The names that a pair of braces declares: registers, labels and variables on the stack, by
    their addresses there.
    """

    registers: dict[str, Register] = field(default_factory=dict)
    stack: dict[str, int] = field(default_factory=dict)
    labels: dict[str, int] = field(default_factory=dict)
    tables: dict[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass
class _Statement:
    """An instruction that waits for the labels below it."""

    text: str
    line: int
    source: SourceLine | None
    scopes: tuple[_Scope, ...]


class _Body:
    """Reads what stands between the braces of a kernel. A call is read as the text of its function,
    whose names are its own: lanes that diverged join behind it, as in all code.
    """

    def __init__(self, text: str, begin: int) -> None:
        self.text, self.at = text, begin
        self.types: list[str] = []
        self.names: list[str] = []
        self.stack_bytes = 0
        self._scopes: list[_Scope] = []
        self._statements: list[_Statement] = []
        self._functions = {found[2]: found for found in _FUNCTION.finditer(text)}
        self._called: list[str] = []
        self._calls = 0
        self._files = {
            number: PurePath(second or first).name for number, first, second in _FILE.findall(text)
        }
        self._source: SourceLine | None = None
        self._label = ""
        self._line_ends = [end.start() for end in re.finditer("\n", text)]

    def read(self, outermost: _Scope) -> None:
        """Read up to the closing brace of the outermost scope."""
        before, self._scopes = self._scopes, [outermost]
        while self._scopes:
            begins = _NO_SPACE.search(self.text, self.at)
            if begins is None:
                raise InvalidPtx("the PTX text ends inside of the kernel: it is truncated")
            start, self.at = begins[0], begins.start()
            if start == "{":
                self._scopes.append(_Scope())
                self.at += 1
            elif start == "}":
                self._scopes.pop()
                self.at += 1
            elif found := _LOC.match(self.text, self.at):
                file = self._files.get(found[1], f"file {found[1]}")
                self._source = SourceLine(file, int(found[2]))
                self.at = found.end()
            elif found := _LABEL.match(self.text, self.at):
                self._label = found[1]
                self._scopes[-1].labels[found[1]] = len(self._statements)
                self.at = found.end()
            elif found := _STATEMENT.match(self.text, self.at):
                self._statement(" ".join(found[0][:-1].split()))
                self.at = found.end()
            else:
                raise InvalidPtx("the PTX text ends inside of an instruction: it is truncated")
        self._scopes = before

    def instructions(self) -> Iterator[PtxInstruction]:
        """The instructions; all labels are known by now."""
        for statement in self._statements:
            yield _instruction(statement)

    def _statement(self, text: str) -> None:
        if text.startswith(".reg"):
            self._declare(text)
        elif found := _STACK.match(text):
            align, kind, name, count = found.groups()
            size = _bytes_of(kind, count, name)
            self._scopes[-1].stack[name] = self._on_stack(size, int(align or size))
        elif text.startswith(".branchtargets"):
            labels = tuple(label.strip() for label in text.split(None, 1)[1].split(","))
            self._scopes[-1].tables[self._label] = labels
        elif text.startswith("."):
            if not text.startswith(_IGNORED):
                line = self._line()
                raise InvalidPtx(f"a directive that is not known, PTX line {line}: {cut(text)}")
        elif (call := _CALL.match(text)) and call[2] in self._functions:
            self._call(call)
        elif text:
            if self._called and (leave := _RETURN.match(text)):
                text = f"{leave[1] or ''}bra {_END}"
            self._statements.append(
                _Statement(text, self._line(), self._source, tuple(self._scopes))
            )

    def _on_stack(self, size: int, align: int) -> int:
        """The address of a new variable on the stack."""
        begin = -(-self.stack_bytes // max(align, 1)) * max(align, 1)
        self.stack_bytes = begin + size
        if self.stack_bytes > MOST_VARIABLE_BYTES:
            raise InvalidPtx(
                f"a stack of {self.stack_bytes} bytes, of {MOST_VARIABLE_BYTES} at most"
            )
        return begin

    def _call(self, call: re.Match[str]) -> None:
        """Read the function that is called here; its parameters are the variables of the call."""
        function, name = self._functions[call[2]], call[2]
        self._calls += 1
        if name in self._called or self._calls > MOST_CALLS or call[0].startswith("@"):
            raise InvalidPtx(f"a call that is not known, PTX line {self._line()}: {cut(call[0])}")
        scope, at = _Scope(), self.at
        for formal, given in ((function[1], call[1]), (function[3], call[3])):
            for parameter, variable in zip(
                _parameters(formal or ""), split(given or ""), strict=True
            ):
                scope.stack[parameter.name] = self._on_stack_of(variable)
        self._called.append(name)
        self.at = function.end()
        self.read(scope)
        scope.labels[_END] = len(self._statements)
        self._called.pop()
        self.at = at

    def _on_stack_of(self, variable: str) -> int:
        for scope in reversed(self._scopes):
            if variable in scope.stack:
                return scope.stack[variable]
        raise InvalidPtx(f"{cut(variable)} is not declared, PTX line {self._line()}")

    def _line(self) -> int:
        return bisect_right(self._line_ends, self.at) + 1

    def _declare(self, text: str) -> None:
        _, kind, names = text.split(None, 2)
        kind = kind.removeprefix(".")
        if kind not in TYPE_BYTES and kind != "pred":
            raise InvalidPtx(f"a register type that is not known: {cut(text)}")
        for part in names.split(","):
            found = _DECLARED.match(part.strip())
            if found is None:
                raise InvalidPtx(f"a declaration that cannot be read: {cut(text)}")
            name, count = found.groups()
            if len(self.types) + int(count or 1) > MOST_REGISTERS:
                raise InvalidPtx(
                    f"a kernel may declare {MOST_REGISTERS} registers: got more by {cut(text)}"
                )
            for one in [f"{name}{i}" for i in range(int(count))] if count else [name]:
                self._scopes[-1].registers[one] = Register(len(self.types), kind)
                self.types.append(kind)
                self.names.append(one)


_END = "$returned"
"""The label behind a function that was read in place of a call."""


def _instruction(statement: _Statement) -> PtxInstruction:
    text, negated = statement.text, False
    predicate: Register | None = None
    if guard := _GUARD.match(text):
        negated = bool(guard[1])
        found = _lookup(guard[2], statement)
        if not isinstance(found, Register):
            raise InvalidPtx(f"a guard that is no register, PTX line {statement.line}: {cut(text)}")
        predicate = found
        text = text[guard.end() :]
    opcode = _OPCODE.match(text)
    if opcode is None:
        raise InvalidPtx(
            f"an instruction that cannot be read, PTX line {statement.line}: {cut(text)}"
        )
    operands = [_operand(part, statement) for part in split(text[opcode.end() :])]
    return PtxInstruction(
        opcode=opcode[0],
        operands=tuple(operands),
        predicate=predicate,
        negated=negated,
        line=statement.line,
        source=statement.source,
        text=statement.text,
    )


def split(text: str) -> list[str]:
    """The parts of a list, separated by commas outside of brackets."""
    parts, depth, begin = [], 0, 0
    for at, letter in enumerate(text):
        if letter in "{[(":
            depth += 1
            if depth > DEEPEST:
                raise InvalidPtx(f"brackets within each other that are not known: {cut(text)}")
        elif letter in "}])":
            depth -= 1
        elif letter == "," and not depth:
            parts.append(text[begin:at].strip())
            begin = at + 1
    last = text[begin:].strip()
    return [*parts, last] if last else parts


def _operand(text: str, statement: _Statement) -> Operand:
    if text.startswith(("{", "(")):
        return Group(tuple(_operand(part, statement) for part in split(text[1:-1])))
    if text.startswith("["):
        return _memory(text[1:-1].strip(), statement)
    if text.startswith("!"):
        register = _lookup(text[1:].strip(), statement)
        if not isinstance(register, Register):
            raise InvalidPtx(
                f"a negation of no register, PTX line {statement.line}: {cut(statement.text)}"
            )
        return Negated(register)
    if "|" in text:
        first, second = text.split("|")
        return Pair(_operand(first.strip(), statement), _operand(second.strip(), statement))
    if not text:
        raise InvalidPtx(
            f"an operand that is missing, PTX line {statement.line}: {cut(statement.text)}"
        )
    return Number(text.rstrip("U")) if _NUMBER.match(text) else _lookup(text, statement)


def _memory(text: str, statement: _Statement) -> Operand:
    """What stands between square brackets: an address, or a tensor map with coordinates."""
    parts = split(text)
    if len(parts) > 1:
        coordinates = _operand(parts[1], statement)
        if len(parts) > 2 or not isinstance(coordinates, Group):
            raise InvalidPtx(
                f"an address that is not known, PTX line {statement.line}: [{cut(text)}]"
            )
        return Box(_operand(parts[0], statement), coordinates.items)
    base, _, offset = map(str.strip, text.partition("+"))
    if offset and not _NUMBER.match(offset):
        raise InvalidPtx(f"an address that is not known, PTX line {statement.line}: [{cut(text)}]")
    return Address(_operand(base, statement), int(offset or "0", 8 if _OCTAL.match(offset) else 0))


def _lookup(name: str, statement: _Statement) -> Operand:
    """What a name stands for: a register, a label or a table of labels of the innermost scope that
    declares it; otherwise a Name.
    """
    for scope in reversed(statement.scopes):
        if name in scope.registers:
            return scope.registers[name]
        if name in scope.stack:
            return Number(str(scope.stack[name]))
        if name in scope.tables:
            return Targets(tuple(_position(label, statement) for label in scope.tables[name]))
        if name in scope.labels:
            return Targets((scope.labels[name],))
    if name.startswith("%") and "." not in name and name not in _SPECIAL:
        raise InvalidPtx(
            f"{cut(name)} is not declared, PTX line {statement.line}: {cut(statement.text)}"
        )
    return Name(name)


def _position(label: str, statement: _Statement) -> int:
    for scope in reversed(statement.scopes):
        if label in scope.labels:
            return scope.labels[label]
    raise InvalidPtx(f"the label {cut(label)} is not declared, PTX line {statement.line}")


_SPECIAL = frozenset(
    {"%laneid", "%warpid", "%nwarpid", "%smid", "%nsmid", "%cluster_ctarank", "%cluster_nctarank"}
    | set(CLOCKS)
    | {f"%lanemask_{which}" for which in ("eq", "le", "lt", "ge", "gt")}
    | {"%total_smem_size", "%dynamic_smem_size"}
)
"""Special registers whose names have no dot (PTX ISA, chapter 10)."""
