"""Logic, shifts and bit fields (PTX ISA 9.7.1 "Integer", 9.7.8 "Logic and shift")."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from flashgen.ptx.decode import Form, elementwise, instruction
from flashgen.ptx.program import Number
from flashgen.ptx.types import DTYPES, FORMATS, RAW, Array, DecodedStep

U32 = FORMATS["u32"]
_LOGIC: dict[str, Callable[..., Array]] = {
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert,
}  # fmt: skip


@instruction("and", "or", "xor", "not")
def logic(form: Form) -> DecodedStep:
    """9.7.8.1 to 9.7.8.4, of predicates too."""
    function, kind = _LOGIC[form.opcode], form.type()
    if kind != "pred":
        return elementwise(
            form, function, FORMATS[kind], [FORMATS[kind]] * (len(form.operands) - 1)
        )
    write = form.store(form.operands[0])
    a = form.predicate(form.operands[1])
    if form.opcode == "not":
        return lambda warp, mask: write(warp, function(a(warp)), mask)
    b = form.predicate(form.operands[2])
    return lambda warp, mask: write(warp, function(a(warp), b(warp)), mask)


@instruction("shl", "shr")
def shift(form: Form) -> DecodedStep:
    """9.7.8.7 and 9.7.8.8: amounts above the width count as the width."""
    kind = form.format()
    width = 8 * kind.size
    left = form.opcode == "shl"
    last = form.operands[2]
    if isinstance(last, Number) and 0 <= (places := int(last.text, 0)) < width:  # as nearly all are
        move, fixed = (np.left_shift if left else np.right_shift), DTYPES[kind.name].type(places)
        write, value = form.result(kind), form.numbers(form.operands[1], kind)
        return lambda warp, mask: write(warp, move(value(warp), fixed), mask)

    def shifted(a: Array, by: Array) -> Array:
        count = np.minimum(by, np.uint32(width - 1)).astype(a.dtype)
        moved: Array = a << count if left else a >> count
        if kind.signed and not left:
            return moved
        bounded: Array = np.where(by >= width, a.dtype.type(0), moved)
        return bounded

    return elementwise(form, shifted, kind, [kind, U32])


@instruction("shf")
def funnel_shift(form: Form) -> DecodedStep:
    """9.7.8.6: 32 bits out of 64, shifted."""
    left = form.choice("l", "r") == "l"
    wrap = form.choice("wrap", "clamp") == "wrap"
    form.type()

    def shifted(a: Array, b: Array, by: Array) -> Array:
        count = by & np.uint32(31) if wrap else np.minimum(by, np.uint32(32))
        both = (b.astype(np.uint64) << np.uint64(32)) | a
        if left:
            return ((both << count.astype(np.uint64)) >> np.uint64(32)).astype(np.uint32)
        return (both >> count.astype(np.uint64)).astype(np.uint32)

    return elementwise(form, shifted, U32, [U32] * 3)


@instruction("bfe")
def extract_field(form: Form) -> DecodedStep:
    """9.7.1.17: length bits from a position, sign-extended if signed."""
    kind = form.format()
    width = 8 * kind.size
    constants = [int(o.text, 0) & 0xFF for o in form.operands[2:] if isinstance(o, Number)]
    if len(constants) == 2 and constants[1] and sum(constants) <= width:  # as nearly all are
        low, many = constants
        up, down = DTYPES[kind.name].type(width - low - many), DTYPES[kind.name].type(width - many)
        return elementwise(form, lambda a: (a << up) >> down, kind, [kind])

    def field(a: Array, at: Array, count: Array) -> Array:
        at, count = (at & np.uint32(0xFF)).astype(int), (count & np.uint32(0xFF)).astype(int)
        count = np.minimum(count, 2 * width)
        end = np.minimum(at + count, width)
        up = np.clip(width - end, 0, width - 1).astype(a.dtype)
        down = np.clip(width - end + at, 0, width - 1).astype(a.dtype)
        outside = np.clip(a >> a.dtype.type(width - 1), -1, 0) if kind.signed else a.dtype.type(0)
        found = np.where(at >= width, outside, (a << up) >> down)
        result: Array = np.where(count == 0, a.dtype.type(0), found)
        return result

    return elementwise(form, field, kind, [kind, U32, U32])


@instruction("bfi")
def insert_field(form: Form) -> DecodedStep:
    """9.7.1.18: the lower bits of a, placed in b."""
    kind = form.format()
    width = 8 * kind.size
    write = form.result(kind)
    a, b = (form.numbers(form.operands[n], kind) for n in (1, 2))
    position, length = form.number(3, "u32"), form.number(4, "u32")

    def placed(inner: Array, outer: Array, at: Array, count: Array) -> Array:
        fields = []
        for x, y, p, n in zip(inner, outer, at, count, strict=True):
            p, n = int(p) & 0xFF, int(n) & 0xFF
            field = (((1 << n) - 1) << p) & ((1 << width) - 1)
            fields.append((int(y) & ~field) | ((int(x) << p) & field))
        return np.array(fields, dtype=inner.dtype)

    return lambda warp, mask: write(
        warp, placed(a(warp), b(warp), position(warp), length(warp)), mask
    )


@instruction("popc", "clz", "brev", "bfind")
def count_bits(form: Form) -> DecodedStep:
    """9.7.1.13 to 9.7.1.16, but for signed bfind."""
    name = form.type()
    if name[0] == "s":
        form.unknown(f"{form.opcode} of {name}")
    amount = form.flag("shiftamt")
    kind = FORMATS[name]
    width = 8 * kind.size

    def of_one(bits: int) -> int:
        if form.opcode == "popc":
            return bits.bit_count()
        if form.opcode == "clz":
            return width - bits.bit_length()
        if form.opcode == "brev":
            return int(f"{bits:0{width}b}"[::-1], 2)
        if not bits:
            return 0xFFFFFFFF
        return width - bits.bit_length() if amount else bits.bit_length() - 1

    result = kind if form.opcode == "brev" else U32
    dtype = RAW[result.size]
    return elementwise(
        form, lambda a: np.array([of_one(int(bits)) for bits in a], dtype), result, [kind]
    )


@instruction("prmt")
def permute(form: Form) -> DecodedStep:
    """9.7.9.7 without a mode: each byte of the result is one of eight, or its sign."""
    form.type()
    shifts = np.arange(0, 16, 4, dtype=np.uint32)

    def chosen(low: Array, high: Array, select: Array) -> Array:
        content = np.stack([low, high], 1).view(np.uint8).reshape(-1, 8)
        nibbles = ((select[:, None] >> shifts) & np.uint32(15)).astype(np.int64)
        picked = np.take_along_axis(content, nibbles & 7, 1)
        signs = np.where(picked & 0x80, np.uint8(0xFF), np.uint8(0))
        return np.where(nibbles & 8, signs, picked).view(np.uint32).reshape(-1)

    return elementwise(form, chosen, U32, [U32] * 3)


@instruction("lop3")
def logic_of_three(form: Form) -> DecodedStep:
    """9.7.8.5: a function of three bits, by its table of eight values."""
    form.type()
    table = form.constant(4)

    def looked_up(a: Array, b: Array, c: Array) -> Array:
        found = np.zeros(len(a), np.uint32)
        for row in range(8):
            if table >> row & 1:
                found |= (a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c)
        return found

    return elementwise(form, looked_up, U32, [U32] * 3)
