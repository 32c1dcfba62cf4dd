"""What of a kernel's PTX decides the bits of a row: matrix instructions, how many are chained into
one accumulator, the order in which lanes add up P, and what a compiler might still fuse.

Values are followed through the text in order, register by register. Masks are left out: a masked
score is -inf, and adds 0.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

_OPERATION = re.compile(r"^\s*(?:@!?%p\d+\s+)?([a-z][\w.:]*)\s+(.*);")
_REGISTER = re.compile(r"%\w+")
_SUMMED = ("add", "sub", "mul", "fma", "neg", "ex2", "shfl")
"""Operations whose order decides bits. A maximum has the same bits in any order."""
_FUSIBLE = re.compile(r"^(add|sub|mul|mad)(\.ftz)?\.f32$")
"""Without a rounding mode ptxas may fuse them."""
_PRODUCTS = {
    # How each kind of matrix instruction writes its shape: without what another tile changes.
    "wgmma.mma_async": re.compile(r"\.m64n\d+(k\d+\.[\w.]+)$"),
    "mma.sync": re.compile(r"\.(m16n8k\d+)\.row\.col\.([\w.]+)$"),
    "tcgen05.mma": re.compile(r"(\.kind::\w+)"),
}

Term = tuple[object, ...]
"""An operation and its operands, or ("leaf", number)."""


@dataclass(frozen=True, kw_only=True)
class Arithmetic:
    """What two kernels of one numeric class have in common.

    products: the matrix instructions, without the width that a tile decides. chains: how many of
    them are added into one accumulator between two labels, as in a trip of a loop. sums: digests of
    what is added up over the lanes of a row, or where nothing is, of what exp2 takes. approximate:
    other operations that round in a way of their own. fusible: operations that a compiler may still
    fuse.
    """

    products: frozenset[str]
    chains: frozenset[int]
    sums: frozenset[str]
    approximate: frozenset[str]
    fusible: int

    def difference(self, other: Arithmetic) -> str | None:
        """What differs from another kernel, in a few words; None where nothing does."""
        for what in ("products", "chains", "sums", "approximate"):
            own, others = getattr(self, what), getattr(other, what)
            if own != others:
                return f"{what} {_listed(own)}, and not {_listed(others)}"
        if self.fusible:
            return f"{self.fusible} operations that ptxas may fuse"
        return None

    def __str__(self) -> str:
        chains = _listed(self.chains)
        return f"{_listed(self.products)}, chains of {chains}, sums {_listed(self.sums)}"


def _listed(values: frozenset[str] | frozenset[int]) -> str:
    return " and ".join(map(str, sorted(values, key=str))) or "none"


def arithmetic_of(ptx: str) -> Arithmetic:
    """What of a kernel's text decides its bits."""
    walk = _Walk()
    for line in ptx.splitlines():
        if line.startswith("$L__BB"):
            walk.end_chains()
        found = _OPERATION.match(line.split("//")[0])
        if found is not None:
            walk.step(found[1], found[2])
    return walk.result()


class _Walk:
    """The values of registers, as far as floating-point operations made them."""

    def __init__(self) -> None:
        self._values: dict[str, Term] = {}
        self._chains: dict[str, int] = {}
        self._false: set[str] = set()
        self._leaves = 0
        self._products: set[str] = set()
        self._ended: set[int] = set()
        self._sums: list[Term] = []
        self._partial: set[int] = set()
        self._powers: list[Term] = []
        self._approximate: set[str] = set()
        self._fusible = 0

    def step(self, opcode: str, operands: str) -> None:
        kind = next((kind for kind in _PRODUCTS if opcode.startswith(kind)), None)
        names = _REGISTER.findall(operands)
        if kind is not None:
            self._product(kind, opcode, operands)
        elif opcode == "mov.pred":
            (self._false.add if operands.endswith(" 0") else self._false.discard)(names[0])
        elif opcode.endswith("f32x2"):
            self._two(opcode, operands)
        elif opcode == "mov.b64" and "{" in operands:
            self._pair(operands)
        elif names:
            self._other(opcode, operands)

    def _two(self, opcode: str, operands: str) -> None:
        """An operation on two numbers at once, which rounds each as the one on a single number."""
        target, *rest = (x.strip() for x in operands.split(","))
        values = [self._value(x) for x in rest]
        if any(value[0] != "pair" for value in values):
            self._values[target] = self._leaf()
            return
        single = opcode.removesuffix("x2")
        both = ((single, *(value[n] for value in values)) for n in (1, 2))
        self._values[target] = ("pair", *map(self._noted, both))

    def _pair(self, operands: str) -> None:
        """Two registers become one, or one two."""
        inside = re.search(r"{(.*)}", operands)
        halves = [x.strip() for x in inside[1].split(",")] if inside else []
        outside = _REGISTER.findall(re.sub(r"{.*}", "", operands))
        if len(halves) != 2 or not outside:
            return
        if operands.lstrip().startswith("{"):
            value = self._value(outside[0])
            for n, half in enumerate(halves, 1):
                self._end(half)
                found = value[n] if value[0] == "pair" else self._leaf()
                self._values[half] = found  # type: ignore[assignment]
        else:
            self._values[outside[0]] = ("pair", *map(self._value, halves))

    def _noted(self, value: Term) -> Term:
        """The value of an operation; what it adds up over lanes, or raises, is noted."""
        opcode = str(value[0])
        if opcode.startswith("add.") and _over_lanes(value):
            self._partial.update(id(x) for x in value[1:])
            self._sums.append(value)
        if opcode.startswith("ex2."):
            self._powers.append(value)
        return value

    def _product(self, kind: str, opcode: str, operands: str) -> None:
        found = _PRODUCTS[kind].search(opcode)
        shape = ".".join(filter(None, found.groups())) if found else opcode
        self._products.add(f"{kind} {shape.lstrip('.')}")
        if kind == "tcgen05.mma":
            return  # its accumulators are in tensor memory
        written = _REGISTER.findall(operands.split("}")[0])
        first = kind == "wgmma.mma_async" and self._starts(operands)
        length = 1 if first else self._chains.get(written[0], 0) + 1
        if first:
            self._end(written[0])
        for name in written:
            self._values[name] = self._leaf()
            self._chains[name] = length

    def _starts(self, operands: str) -> bool:
        """Whether a wgmma overwrites its accumulator: the operand behind descriptors is false."""
        behind = (x.strip() for x in operands.rpartition("}")[2].split(","))
        scale = next(x for x in behind if x and not x.startswith("%rd"))
        return scale == "0" or scale in self._false

    def end_chains(self) -> None:
        """Begin to count anew: how many loops follow one another does not change a sum."""
        for name in list(self._chains):
            self._end(name)

    def _end(self, name: str) -> None:
        if length := self._chains.pop(name, 0):
            self._ended.add(length)

    def _leaf(self) -> Term:
        self._leaves += 1
        return ("leaf", self._leaves)

    def _value(self, operand: str) -> Term:
        operand = operand.strip()
        if operand.startswith("%"):
            return self._values.setdefault(operand, self._leaf())
        return ("constant", operand)

    def _other(self, opcode: str, operands: str) -> None:
        name, *rest = operands.split(",")
        target = name.split("|")[0].strip()
        word = opcode.split(".")[0]
        self._fusible += _FUSIBLE.match(opcode) is not None
        if opcode.endswith("f32") and word in ("ex2", "lg2", "div", "rcp", "sqrt", "tanh"):
            self._approximate.add(opcode)
        value: Term
        if word == "mov" and len(rest) == 1:
            value = self._value(rest[0])
        elif word == "selp":  # of a masked score the other value is -inf
            chosen = [each for each in rest[:2] if each.strip().startswith("%")]
            value = self._value(chosen[0]) if len(chosen) == 1 else self._leaf()
        elif word == "shfl" and len(rest) >= 2:
            value = ("shfl", self._value(rest[0]), rest[1].strip())
        elif word in _SUMMED and opcode.endswith("f32"):
            value = self._noted((opcode, *map(self._value, rest)))
        else:
            value = self._leaf()
        self._end(target)
        self._values[target] = value

    def result(self) -> Arithmetic:
        self.end_chains()
        whole = [value for value in self._sums if id(value) not in self._partial]
        return Arithmetic(
            products=frozenset(self._products),
            chains=frozenset(self._ended),
            sums=frozenset(map(_digest, whole or self._powers)),
            approximate=frozenset(self._approximate),
            fusible=self._fusible,
        )


def _over_lanes(value: Term) -> bool:
    """Whether it adds what a shuffle brings from another lane to the lane's own."""
    terms = [x for x in value[1:] if isinstance(x, tuple)]
    return any(x[0] == "shfl" and any(x[1] is y for y in terms) for x in terms)


def _digest(value: Term) -> str:
    """Of an expression, whatever its registers are called: leaves are numbered as they come."""
    numbers: dict[Term, str] = {}
    parts: list[str] = []
    stack: list[object] = [value]
    while stack:
        each = stack.pop()
        if not isinstance(each, tuple):
            parts.append(str(each))
        elif each[0] in ("leaf", "constant"):
            parts.append(numbers.setdefault(each, f"x{len(numbers)}"))
        else:
            parts.append(f"{each[0]}/{len(each)}")
            stack += each[:0:-1]
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:8]
