"""The stack of each thread, and calls of what CUDA's runtime has: vprintf and __assertfail (PTX ISA
9.7.12.5, "call", and the CUDA C++ Programming Guide, "Formatted Output" and "Assertion").
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence

import numpy as np

from flashgen.errors import printable
from flashgen.ptx.access import active, find_global, spread, stack_places
from flashgen.ptx.decode import Form, Store, instruction
from flashgen.ptx.memory import LOCAL_BASE
from flashgen.ptx.program import Group, Name, Number, Register
from flashgen.ptx.types import RAW, TYPE_BYTES, Array, DecodedStep, LaneMask, Undefined
from flashgen.ptx.warp import Warp, lanes_of


def load(form: Form, size: int, writes: Sequence[Store], base: int) -> DecodedStep:
    """Values from the stack; what nobody wrote there is undefined. base: the address of byte 0."""
    address, count = form.address(1, 8), len(writes)
    first = np.uint64(base)

    def step(warp: Warp, mask: LaneMask) -> None:
        at = active(address(warp), mask) - first
        places = stack_places(warp, at, size, count, mask, "reads")
        values = spread(warp.stack.words.of(size)[places], mask)
        undefined = spread(warp.stack.undefined.of(size)[places], mask)
        columns = zip(writes, form.group(0), values.T.copy(), undefined.T, strict=True)
        for write, target, column, bits in columns:
            write(warp, column, mask)
            if bits.any() and isinstance(target, Register):
                wide = bits.astype(RAW[TYPE_BYTES[target.type]])
                held = warp.undefined.get(target.index)
                wide = wide if held is None else wide | held.bits
                warp.undefined[target.index] = Undefined(wide, "the stack")

    return step


def store(form: Form, size: int, base: int) -> DecodedStep:
    """Values to the stack, with their undefined bits."""
    address, sources = form.address(0, 8), form.group(1)
    reads, first = [form.bits(source, size) for source in sources], np.uint64(base)

    def bits(warp: Warp, source: object) -> Array:
        entry = warp.undefined.get(source.index) if isinstance(source, Register) else None
        return np.zeros(32, RAW[size]) if entry is None else entry.bits.astype(RAW[size])

    def step(warp: Warp, mask: LaneMask) -> None:
        values = np.stack([read(warp) for read in reads], 1)
        undefined = np.stack([bits(warp, source) for source in sources], 1)
        at = active(address(warp), mask) - first
        places = stack_places(warp, at, size, len(reads), mask, "writes")
        warp.stack.words.of(size)[places] = active(values, mask)
        warp.stack.undefined.of(size)[places] = active(undefined, mask)

    return step


def generic(form: Form, elsewhere: DecodedStep, here: DecodedStep) -> DecodedStep:
    """A generic access, to the stack if its address is there."""
    if not form.program.stack_bytes:
        return elsewhere
    address = form.address(0 if form.opcode == "st" else 1, 8)

    def step(warp: Warp, mask: LaneMask) -> int | None:
        first = int(active(address(warp), mask)[0])
        return (here if first >> 60 == LOCAL_BASE >> 60 else elsewhere)(warp, mask)

    return step


@instruction("call")
def call(form: Form) -> DecodedStep:
    """Of a function that the module does not define."""
    form.hint("uni")
    name = next((item.text for item in form.operands if isinstance(item, Name)), "")
    if name not in ("vprintf", "__assertfail"):
        form.unknown(f"the function {name}")
    *results, given = (
        [int(part.text) for part in item.items if isinstance(part, Number)]
        for item in form.operands
        if isinstance(item, Group)
    )

    def printing(warp: Warp, mask: LaneMask) -> None:
        for lane in map(int, lanes_of(mask)):
            text, arguments = (_argument(warp, lane, at) for at in given)
            sys.stdout.write(_formatted(warp, lane, _text(warp, text), arguments - LOCAL_BASE))
        places = warp.stack.places(
            lanes_of(mask), np.full(len(lanes_of(mask)), results[0][0]), 4, 1
        )
        warp.stack.words.of(4)[places], warp.stack.undefined.of(4)[places] = 1, 0

    def failing(warp: Warp, mask: LaneMask) -> None:
        lane = int(lanes_of(mask)[0])
        message, file = (_text(warp, _argument(warp, lane, at)) for at in given[:2])
        line = _argument(warp, lane, given[2], 4)
        raise warp.fault("memcheck", f"the assertion fails: {message}, {file}:{line}", lane)

    return printing if name == "vprintf" else failing


def _argument(warp: Warp, lane: int, at: int, size: int = 8) -> int:
    """An integer on the stack of a lane."""
    place = warp.stack.places(np.array([lane]), np.array([at]), size, 1)
    return int(warp.stack.words.of(size)[place][0, 0])


def _text(warp: Warp, address: int) -> str:
    """The text at an address of global memory, up to its 0."""
    buffer = find_global(warp, np.array([address], np.uint64), 1, None, "prints")
    assert buffer is not None
    content = buffer.content[address - buffer.address :].tobytes().split(b"\0", 1)[0]
    return printable(content.decode(errors="replace"))


_CONVERSION = re.compile(
    r"%(?P<flags>[-+ #0]*)(?P<width>\*|\d*)(?P<point>\.(?:\*|\d*))?(?P<length>hh|h|ll|l|z|t|j)?"
    r"(?P<kind>[diouxXcsfFeEgGaAp%])"
)


def _formatted(warp: Warp, lane: int, template: str, at: int) -> str:
    """A format of C with the arguments from `at` on, each aligned to its size."""

    def take(size: int) -> int:
        nonlocal at
        at = -(-at // size) * size + size
        return _argument(warp, lane, at - size, size)

    def converted(found: re.Match[str]) -> str:
        kind, long = found["kind"], found["length"] in ("l", "ll", "z", "t", "j")
        if kind == "%":
            return "%"
        parts = [found["width"] or "", found["point"] or ""]
        width, point = (each.replace("*", str(take(4))) if "*" in each else each for each in parts)
        if kind in "fFeEgGaA":
            value: object = np.array(take(8), np.uint64).view(np.float64).item()
            kind = kind.replace("a", "g").replace("A", "G")
        elif kind == "s":
            value = _text(warp, take(8))
        else:
            size = 8 if long or kind == "p" else 4
            bits = take(size)
            signed = kind in "di" and bits >> (8 * size - 1)
            value = bits - (1 << 8 * size) if signed else chr(bits) if kind == "c" else bits
        prefix, kind = ("0x", "x") if kind == "p" else ("", "d" if kind == "u" else kind)
        return prefix + f"%{found['flags']}{width}{point}{kind}" % value

    return _CONVERSION.sub(converted, template)
