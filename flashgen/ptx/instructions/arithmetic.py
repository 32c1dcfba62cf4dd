"""Arithmetic of integers and floats (PTX ISA 9.7.1 to 9.7.5)."""

from __future__ import annotations

from typing import Any

import numpy as np

from flashgen.ptx.decode import Form, elementwise, instruction
from flashgen.ptx.rounding import Function, directed
from flashgen.ptx.types import DTYPES, FORMATS, Array, DecodedStep, Format, LaneMask, flush
from flashgen.ptx.warp import Warp


@instruction("add", "sub", "mul", "mad", "fma")
def arithmetic(form: Form) -> DecodedStep:
    """9.7.1.1 to 9.7.1.4, 9.7.3.3 to 9.7.3.7, 9.7.4.1, 9.7.4.4 and 9.7.5.1 to 9.7.5.3; .f32x2 and
    .bf16x2 lane by lane. mad of floats is fma; .lo, .hi and .wide are of products of integers.
    """
    if "cc" in form.modifiers:
        return with_carry(form)
    function = _OPERATIONS[form.opcode]
    if form.opcode in _MIXED and (narrow := _narrow_type(form)):
        return _mixed(form, function, narrow)
    kind = form.format()
    if form.opcode in ("mul", "mad") and not kind.floating:
        return _integer_product(form, kind, summed=form.opcode == "mad")
    inner = _rounded(form, function, kind)
    if form.opcode == "fma" and form.flag("relu"):
        return elementwise(form, lambda a, b, c: np.maximum(inner(a, b, c), 0), kind, [kind] * 3)
    return elementwise(form, inner, kind, [kind] * (len(form.operands) - 1))


def _narrow_type(form: Form) -> str:
    """Take the second of the types .f32.f16 and .f32.bf16: that of what is added or multiplied."""
    return form.choice("f16", "bf16") if "f32" in form.modifiers else ""


def _mixed(form: Form, function: Function, narrow: str) -> DecodedStep:
    """Mixed precision (9.7.5): the operands but for the last are of 16 bits, the others float32."""
    kind = form.format()
    first = [FORMATS[narrow]] * (len(form.operands) - 2)
    return elementwise(form, _rounded(form, function, kind), kind, [*first, kind])


def fused(a: Array, b: Array, c: Array) -> Array:
    """A * b + c of float32 (or of 16-bit floats in float32): the product is exact in float64, and
    the sum is rounded to float64 before it is rounded to the format. Of float64 the errors of the
    product (Dekker, 1971) and of the sum are added to it.
    """
    if a.dtype == np.float64:
        return _fused_doubles(a, b, c)
    exact: Array = (a.astype(np.float64) * b + c).astype(np.float32)
    return exact


def _fused_doubles(a: Array, b: Array, c: Array) -> Array:
    product = a * b
    (a_high, a_low), (b_high, b_low) = map(_halves, (a, b))
    error = a_low * b_low - (((product - a_high * b_high) - a_low * b_high) - a_high * b_low)
    total = product + c
    part = total - product
    error += (product - (total - part)) + (c - part)
    return np.where(np.isfinite(error), total + error, total)


def _halves(values: Array) -> tuple[Array, Array]:
    """Two numbers of 26 bits whose sum is a float64."""
    scaled = values * 134217729.0  # 2**27 + 1
    high: Array = scaled - (scaled - values)
    return high, values - high


@instruction("min", "max")
def extreme(form: Form) -> DecodedStep:
    """9.7.1.11 and 9.7.3.11: of floats the one that is no number loses, unless .NaN; .xorsign.abs:
    of the sizes, with the sign of the product; .relu of integers: 0 where it is below. Three inputs
    are of sm_100 and later.
    """
    kind = form.format()
    relu = not kind.floating and form.flag("relu")
    sizes = form.flag("xorsign") & form.flag("abs")
    loses = kind.floating and not form.flag("NaN")
    least, most = (np.fmin, np.fmax) if loses else (np.minimum, np.maximum)
    function = _flushed(form, least if form.opcode == "min" else most)
    if relu:
        return elementwise(form, lambda a, b: np.maximum(function(a, b), 0), kind, [kind] * 2)
    if sizes:
        return elementwise(form, _with_sign_of_product(function), kind, [kind] * 2)
    if len(form.operands) == 4:
        return elementwise(form, lambda a, b, c: function(function(a, b), c), kind, [kind] * 3)
    return elementwise(form, function, kind, [kind] * 2)


def _with_sign_of_product(function: Function) -> Function:
    def applied(a: Array, b: Array) -> Array:
        found = function(np.abs(a), np.abs(b))
        return np.where(np.signbit(a) ^ np.signbit(b), -found, found)

    return applied


@instruction("neg", "abs")
def sign(form: Form) -> DecodedStep:
    """9.7.1.9, 9.7.1.10, 9.7.3.9 and 9.7.3.10."""
    function: Function = np.negative if form.opcode == "neg" else np.abs
    kind = form.format()
    return elementwise(form, _flushed(form, function), kind, [kind])


@instruction("div")
def divide(form: Form) -> DecodedStep:
    """9.7.1.7 and 9.7.3.8; .approx and .full are correctly rounded here."""
    kind = form.format()
    if not kind.floating:
        return elementwise(form, truncated_quotient, kind, [kind] * 2)
    form.hint("approx", "full")
    function = in_direction(form, np.divide, kind)
    return elementwise(form, _flushed(form, function), kind, [kind] * 2)


@instruction("sad")
def difference(form: Form) -> DecodedStep:
    """9.7.1.6: the size of a - b, added to c."""
    kind = form.format()
    return elementwise(form, lambda a, b, c: np.where(a < b, b - a, a - b) + c, kind, [kind] * 3)


@instruction("rem")
def remainder(form: Form) -> DecodedStep:
    """9.7.1.8: it has the sign of the dividend."""
    kind = form.format()
    return elementwise(form, lambda a, b: a - truncated_quotient(a, b) * b, kind, [kind] * 2)


def truncated_quotient(a: Array, b: Array) -> Array:
    """The quotient of integers, rounded towards zero; all ones by zero, which PTX leaves open."""
    zero = b == 0
    safe = np.where(zero, b.dtype.type(1), b)
    floor = a // safe
    upwards = (a % safe != 0) & ((a < 0) != (safe < 0))
    return np.where(zero, np.full_like(a, -1 if a.dtype.kind == "i" else ~a.dtype.type(0)),
                    floor + upwards.astype(a.dtype))  # fmt: skip


@instruction("dp4a")
def dot_of_bytes(form: Form) -> DecodedStep:
    """9.7.1.23: the sum of four products of bytes, added to c."""
    left, right = form.types()
    result = FORMATS["s32" if "s32" in (left, right) else "u32"]

    def parts(bits: Array, kind: str) -> Array:
        content = np.ascontiguousarray(bits).view("i1" if kind == "s32" else "u1")
        return content.reshape(32, 4).astype(np.int64)

    def dot(a: Array, b: Array, c: Array) -> Array:
        found: Array = ((parts(a, left) * parts(b, right)).sum(1) + c).astype(np.int32)
        return found

    bits, added = FORMATS["u32"], FORMATS["s32"]
    return elementwise(form, dot, result, [bits, bits, added])


@instruction("addc", "subc", "madc")
def with_carry(form: Form) -> DecodedStep:
    """9.7.2, "Extended-precision integer arithmetic": "c" adds the carry of the lane, or subtracts
    its borrow; .cc sets it.
    """
    name, takes = form.opcode.removesuffix("c"), form.opcode.endswith("c")
    sets, part, kind = form.flag("cc"), form.choice("lo", "hi"), form.format()
    reads = [form.numbers(item, FORMATS[f"u{8 * kind.size}"]) for item in form.operands[1:]]
    product = np.multiply if part == "lo" else _upper_half(kind)
    write = form.result(FORMATS[f"u{8 * kind.size}"])

    def step(warp: Warp, mask: LaneMask) -> None:
        values = [read(warp) for read in reads]
        if name == "mad":
            signed = [value.view(DTYPES[kind.name]) for value in values[:2]]
            values = [product(*signed).view(values[0].dtype), values[2]]
        first, second = values
        carry = warp.carry.astype(first.dtype) if takes else first.dtype.type(0)
        if name == "sub":
            found = first - second - carry
            over = (first < second) | ((first == second) & (carry != 0))
        else:
            found = first + second + carry
            over = (found < first) | ((found == first) & (carry != 0) & (second != 0))
        if sets:
            warp.carry = over if mask is None else np.where(mask, over, warp.carry)
        write(warp, found, mask)

    return step


_OPERATIONS: dict[str, Function] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "mad": fused, "fma": fused,
}  # fmt: skip
_MIXED = ("add", "sub", "fma")
"""Those that take operands of 16 bits beside float32 (9.7.5)."""


def in_direction(form: Form, function: Function, kind: Format) -> Function:
    """Take the rounding modifier; the function that rounds so."""
    direction = form.choice("rn", "rz", "rm", "rp")
    if direction in ("", "rn"):
        return function
    if kind.name not in ("f32", "f32x2", "f64"):
        form.unknown(f".{direction} of {kind.name}")
    return directed(form.opcode, direction, function)


def _rounded(form: Form, function: Function, kind: Format) -> Function:
    """The function with the modifiers of its result: rounding, .ftz, .sat."""
    function = in_direction(form, function, kind)
    saturated = form.flag("sat")
    if saturated and not kind.floating:
        if kind.name != "s32":
            form.unknown(f".sat of {kind.name}")
        return lambda a, b: np.clip(
            function(a.astype(np.int64), b.astype(np.int64)), -(2**31), 2**31 - 1
        ).astype(np.int32)
    inner = _flushed(form, function)
    if saturated:
        return lambda *values: np.fmin(np.fmax(inner(*values), np.float32(0)), np.float32(1))
    return inner


def _flushed(form: Form, function: Function) -> Function:
    if not form.flag("ftz"):
        return function
    return lambda *values: flush(function(*map(flush, values)))


def _integer_product(form: Form, kind: Format, *, summed: bool) -> DecodedStep:
    """The lower or upper half of a product of integers, or all of it, and a sum."""
    part, result = form.choice("lo", "hi", "wide"), kind
    function: Function = np.multiply if part == "lo" else _upper_half(kind)
    if part == "wide":
        result = FORMATS[f"{kind.name[0]}{16 * kind.size}"]
        dtype = DTYPES[result.name]

        def function(a: Array, b: Array) -> Array:
            return a.astype(dtype) * b

    if not summed:
        return elementwise(form, function, result, [kind] * 2)
    return elementwise(form, lambda a, b, c: function(a, b) + c, result, [kind, kind, result])


def _upper_half(kind: Format) -> Function:
    if kind.size < 8:
        wide: Any = np.int64 if kind.signed else np.uint64
        bits = wide(8 * kind.size)
        return lambda a, b: ((a.astype(wide) * b.astype(wide)) >> bits).astype(a.dtype)

    def exact(a: Array, b: Array) -> Array:
        products = [(int(x) * int(y)) >> 64 for x, y in zip(a, b, strict=True)]
        return np.array(products, dtype=a.dtype)

    return exact
