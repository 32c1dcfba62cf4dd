"""Comparison and selection (PTX ISA 9.7.6 and 9.7.7)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from flashgen.ptx.decode import Form, OperandReader, instruction
from flashgen.ptx.types import FORMATS, Array, DecodedStep, Format, flush
from flashgen.ptx.warp import Warp

_COMPARISONS: dict[str, Callable[..., Array]] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal,
    "gt": np.greater, "ge": np.greater_equal,
    "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal,
}  # fmt: skip
_JOINED: dict[str, Callable[..., Array]] = {
    "and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor,
}  # fmt: skip


def _comparison(form: Form, kind: Format) -> OperandReader:
    """What a comparison gives: with a NaN false, or true if unordered (9.7.6, "Floating-point
    comparisons").
    """
    name = form.choice(*_COMPARISONS, *_UNORDERED)
    compare = _COMPARISONS.get(name) or _UNORDERED[name]
    if name == "ne" and kind.floating:  # numpy's is true of NaN, which is .neu
        compare = _ordered_and_unequal
    a, b = (form.numbers(form.operands[n], kind) for n in (1, 2))
    if form.flag("ftz"):
        return lambda warp: compare(flush(a(warp)), flush(b(warp)))
    return lambda warp: compare(a(warp), b(warp))


def _nan(x: Array, y: Array) -> Array:
    return np.isnan(x) | np.isnan(y)


def _ordered_and_unequal(x: Array, y: Array) -> Array:
    return np.not_equal(x, y) & ~_nan(x, y)


_UNORDERED: dict[str, Callable[..., Array]] = {
    "equ": lambda x, y: (x == y) | _nan(x, y), "neu": np.not_equal,
    "ltu": lambda x, y: ~(x >= y), "leu": lambda x, y: ~(x > y),
    "gtu": lambda x, y: ~(x <= y), "geu": lambda x, y: ~(x < y),
    "num": lambda x, y: ~_nan(x, y), "nan": _nan,
}  # fmt: skip
"""Comparisons that are true of a NaN, and those for one."""


@instruction("setp")
def set_predicate(form: Form) -> DecodedStep:
    """9.7.6.2: p = comparison, joined with c; q = its opposite, joined with c. Of packed numbers p
    is of the lower ones, q of the upper ones.
    """
    first, second = form.pair(0)
    kind = form.format()
    joined = form.choice(*_JOINED)
    compared = _comparison(form, kind)
    write = form.store(first)
    if not joined:
        if second is not None:
            other, packed = form.store(second), kind.name.endswith("x2")

            def both(warp: Warp, mask: Array | None) -> None:
                found = compared(warp)
                write(warp, found[::2] if packed else found, mask)
                other(warp, found[1::2] if packed else ~found, mask)

            return both
        return lambda warp, mask: write(warp, compared(warp), mask)
    if second is not None:
        form.unknown("setp with two destinations and a joined predicate")
    join, also = _JOINED[joined], form.predicate(form.operands[3])
    return lambda warp, mask: write(warp, join(compared(warp), also(warp)), mask)


@instruction("set")
def set_value(form: Form) -> DecodedStep:
    """9.7.6.1: all ones or 1.0 where the comparison holds."""
    result, compared = form.types()
    found = _comparison(form, FORMATS[compared])
    kind = FORMATS[result]
    if kind.floating:
        write = form.result(kind)
        return lambda warp, mask: write(warp, found(warp).astype(np.float32), mask)
    store = form.store(form.operands[0])
    ones = ~np.dtype(f"u{kind.size}").type(0)
    return lambda warp, mask: store(warp, np.where(found(warp), ones, ones.dtype.type(0)), mask)


@instruction("selp")
def select(form: Form) -> DecodedStep:
    """9.7.6.3: a where the predicate holds, b elsewhere."""
    kind = form.format()
    size = kind.size
    a, b = (form.bits(form.operands[n], size, kind) for n in (1, 2))
    chosen, write = form.predicate(form.operands[3]), form.store(form.operands[0])
    return lambda warp, mask: write(warp, np.where(chosen(warp), a(warp), b(warp)), mask)
