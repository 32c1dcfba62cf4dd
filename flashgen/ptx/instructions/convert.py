"""Conversion (PTX ISA 9.7.9.21, "cvt")."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from flashgen.ptx.decode import Form, elementwise, instruction
from flashgen.ptx.rounding import directed
from flashgen.ptx.types import (
    DTYPES,
    FORMATS,
    Array,
    DecodedStep,
    float8_values,
    float_to_float8,
    flush,
)
from flashgen.ptx.warp import Warp

_TO_INTEGER: dict[str, Callable[..., Array]] = {
    "rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil,
}  # fmt: skip
_PAIRS = {"f16x2": "f16", "bf16x2": "bf16", "e4m3x2": "e4m3", "e5m2x2": "e5m2"}


@instruction("cvt")
def convert(form: Form) -> DecodedStep:
    """Between any two of the formats, rounding to nearest unless an integer rounding is given."""
    kinds = form.types()
    if len(kinds) != 2:
        form.unknown("a conversion of " + " and ".join(kinds))
    to, of = kinds
    rounding = form.choice("rn", "rz", "rm", "rp", "rna", *_TO_INTEGER)
    saturated = form.flag("satfinite") | form.flag("sat")
    flushes, relu = form.flag("ftz"), form.flag("relu")
    if to == "tf32":
        return _to_tf32(form, rounding)
    if to in _PAIRS or of in _PAIRS:
        return _convert_pair(form, to, of, relu)
    if rounding in ("rz", "rm", "rp") and to in ("f32", "f64"):
        nearest = directed("cvt", rounding, lambda values: values.astype(DTYPES[to]))
        return elementwise(form, _flushed(nearest, flushes), FORMATS[to], [FORMATS[of]])
    if rounding == "rz" and FORMATS[to].floating:
        return _towards_zero(form, to, of)
    if relu or rounding in ("rna", "rm", "rp"):
        form.unknown("this rounding")
    target, source = FORMATS[to], FORMATS[of]
    read, write = form.numbers(form.operands[1], source), form.result(target)
    if target.floating:

        def to_float(warp: Warp, mask: Array | None) -> None:
            values = read(warp)
            values = _TO_INTEGER[rounding](values) if rounding in _TO_INTEGER else values
            dtype = np.float64 if to == "f64" else np.float32
            result = values.astype(dtype)
            if saturated:
                result = np.fmin(np.fmax(result, dtype(0)), dtype(1))
            write(warp, flush(result) if flushes else result, mask)

        return to_float
    dtype: np.dtype[np.integer[Any]] = np.dtype(f"{'i' if target.signed else 'u'}{target.size}")
    if not source.floating:
        if not saturated:
            return lambda warp, mask: write(warp, read(warp).astype(dtype), mask)
        limits = np.iinfo(dtype)
        return lambda warp, mask: write(
            warp,
            np.array([min(max(int(v), limits.min), limits.max) for v in read(warp)], dtype),
            mask,
        )
    to_whole = _TO_INTEGER[rounding or "rzi"]
    return lambda warp, mask: write(warp, _clamped(to_whole(read(warp)), dtype), mask)


def _flushed(function: Callable[..., Array], flushes: bool) -> Callable[..., Array]:
    return (lambda values: flush(function(values))) if flushes else function


def _clamped(values: Array, dtype: np.dtype[np.integer[Any]]) -> Array:
    """Whole floats as integers; what does not fit becomes the nearest limit, NaN becomes 0."""
    limits = np.iinfo(dtype)
    exact = np.nan_to_num(values.astype(np.float64), nan=0.0, posinf=np.inf, neginf=-np.inf)
    top = exact >= float(limits.max)
    inside = np.clip(exact, float(limits.min), np.nextafter(float(limits.max), 0))
    return np.where(top, np.asarray(limits.max, dtype), inside.astype(dtype))


def _to_tf32(form: Form, rounding: str) -> DecodedStep:
    """10 bits of mantissa in a 32-bit register."""
    if rounding not in ("rna", "rn"):
        form.unknown("this rounding")
    read, write = form.bits(form.operands[1], 4), form.store(form.operands[0])

    def rounded(bits: Array) -> Array:
        odd = (bits >> np.uint32(13)) & np.uint32(1)
        half = odd + np.uint32(0xFFF) if rounding == "rn" else np.uint32(0x1000)
        kept: Array = (bits + half) & np.uint32(0xFFFFE000)
        return kept

    return lambda warp, mask: write(warp, rounded(read(warp)), mask)


def _towards_zero(form: Form, to: str, of: str) -> DecodedStep:
    """float32 to bfloat16 or float16 without rounding up."""
    if of != "f32" or to not in ("bf16", "f16"):
        form.unknown("this rounding")
    read, write = form.number(1, "f32"), form.store(form.operands[0])

    def cut(values: Array) -> Array:
        if to == "bf16":
            return (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
        near = values.astype(np.float16)
        back = np.nextafter(near, np.float16(0))
        over = np.abs(near.astype(np.float32)) > np.abs(values)
        return np.where(over, back, near).view(np.uint16)

    return lambda warp, mask: write(warp, cut(read(warp)), mask)


def _convert_pair(form: Form, to: str, of: str, relu: bool) -> DecodedStep:
    """Two numbers at a time: the first source is the upper half (9.7.9.21)."""
    write = form.store(form.operands[0])
    if of == "f32":
        high, low = form.number(1, "f32"), form.number(2, "f32")

        def two(warp: Warp) -> Array:
            values = np.empty(2 * form.lanes, np.float32)  # a third of the time of np.stack
            values[::2], values[1::2] = low(warp), high(warp)
            return np.maximum(values, np.float32(0)) if relu else values

        return lambda warp, mask: write(warp, _packed(two(warp), to), mask)
    if relu:
        form.unknown(".relu of this conversion")
    size = 4 if of in ("f16x2", "bf16x2") else 2
    read = form.bits(form.operands[1], size)
    return lambda warp, mask: write(warp, _packed(_unpacked(read(warp), of), to), mask)


def _unpacked(bits: Array, of: str) -> Array:
    """64 float32 values of 32 pairs."""
    if of in FORMATS:
        return FORMATS[of].load(bits)
    return float8_values(_PAIRS[of])[np.ascontiguousarray(bits).view(np.uint8)]


def _packed(values: Array, to: str) -> Array:
    """32 pairs of 64 float32 values."""
    if to in FORMATS:
        return FORMATS[to].store(values)
    return float_to_float8(values, _PAIRS[to]).view(np.uint16)
