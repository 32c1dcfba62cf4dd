"""PTX types as numpy has them, and the formats that numpy lacks: bfloat16, 8-bit floats, pairs.

A register holds the bits of 32 lanes as an array of unsigned integers. A Format says how an
instruction reads numbers from them and writes its results back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]

LaneMask = Array | None
"""The active lanes of a step, of which there is at least one; None for all 32."""

DecodedStep = Callable[[Any, LaneMask], int | None]
"""An instruction, decoded: it changes the warp and returns the position of the next instruction, or
None for the one below.
"""


class FusedSteps(NamedTuple):
    """Instructions that may run as one: how many, the registers that they touch, and what runs
    them, for all 32 lanes of a warp. It returns False if they must run one by one.
    """

    length: int
    touched: frozenset[int]
    run: Callable[[Any], bool]


class Undefined(NamedTuple):
    """The undefined bits of a register's 32 lanes, and the register to which nobody wrote."""

    bits: Array
    origin: str


RAW: dict[int, type[Any]] = {
    1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128,
}  # fmt: skip
"""The unsigned integer of so many bytes; of 16 bytes, which are only copied, what numpy has."""

_KINDS = {"b": "u", "u": "u", "s": "i"}
DTYPES: dict[str, np.dtype[Any]] = {
    f"{kind}{bits}": np.dtype(f"{code}{bits // 8}")
    for kind, code in _KINDS.items()
    for bits in (8, 16, 32, 64)
} | {"f16": np.dtype("f2"), "f32": np.dtype("f4"), "f64": np.dtype("f8")}
"""Types that numpy has."""

_PACKED_BYTES = {
    "f16x2": 4, "bf16x2": 4, "f32x2": 8, "bf16": 2, "tf32": 4, "b128": 16,
    "e4m3x2": 2, "e5m2x2": 2, "s16x2": 4, "u16x2": 4,
}  # fmt: skip

SPOILED = 0x7FC07FC07FC07FC0
"""What a register holds to which nothing was written: NaN as float32, bfloat16 and, but for its
lower half, float64.
"""

TYPE_BYTES: dict[str, int] = {
    name: dtype.itemsize for name, dtype in DTYPES.items()
} | _PACKED_BYTES
"""Size of each type in bytes (PTX ISA 5.2, "Types")."""


@dataclass(frozen=True, kw_only=True)
class Format:
    """How bits are numbers. size: bytes of one lane's register. load: bits to numbers; store: the
    reverse. viewed: the numpy type as which bits are read, where that is all that load does. A
    packed format has several numbers a lane, and its arrays are longer than 32.
    """

    name: str
    size: int
    load: Callable[[Array], Array]
    store: Callable[[Array], Array]
    floating: bool
    signed: bool = False
    viewed: np.dtype[Any] | None = None


def bfloat16_to_float(bits: Array) -> Array:
    """The float32 values of bfloat16 bits."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def float_to_bfloat16(values: Array) -> Array:
    """The bits of float32 values rounded to the nearest bfloat16, ties to even; NaN is 0x7fff."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = ((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)).astype(np.uint16)
    nan = np.isnan(values)
    return np.where(nan, np.uint16(0x7FFF), rounded) if np.count_nonzero(nan) else rounded


@cache
def float8_values(name: str) -> Array:
    """The float32 value of each of the 256 patterns of e4m3 or e5m2 (OCP 8-bit Floating Point
    Specification 1.0: e4m3 has no infinities and one NaN a sign).
    """
    exponent_bits, bias = (4, 7) if name == "e4m3" else (5, 15)
    mantissa_bits = 7 - exponent_bits
    bits = np.arange(256)
    sign = np.where(bits & 0x80, -1.0, 1.0)
    exponent = (bits >> mantissa_bits) & ((1 << exponent_bits) - 1)
    mantissa = bits & ((1 << mantissa_bits) - 1)
    fraction = mantissa / (1 << mantissa_bits)
    normal = np.ldexp(1 + fraction, exponent - bias)
    values = sign * np.where(exponent == 0, np.ldexp(fraction, 1 - bias), normal)
    if name == "e4m3":
        values[(bits & 0x7F) == 0x7F] = np.nan
    else:
        top = exponent == (1 << exponent_bits) - 1
        values[top & (mantissa == 0)] = np.inf * sign[top & (mantissa == 0)]
        values[top & (mantissa != 0)] = np.nan
    return values.astype(np.float32)


def float_to_float8(values: Array, name: str) -> Array:
    """The bits of float32 values rounded to e4m3 or e5m2, ties to even, .satfinite (PTX ISA 9.7.9,
    "cvt"): what is too large becomes the largest finite value.
    """
    table = float8_values(name)
    finite = np.flatnonzero(np.isfinite(table[:128]))
    positive = table[finite].astype(np.float64)
    size = np.minimum(np.abs(values.astype(np.float64)), positive[-1])
    above = np.clip(np.searchsorted(positive, size), 1, len(positive) - 1)
    below = above - 1
    gap = (size - positive[below]) - (positive[above] - size)
    chosen = np.where((gap > 0) | ((gap == 0) & (above % 2 == 0)), above, below)
    bits = finite[chosen] | np.where(np.signbit(values), 0x80, 0)
    return np.where(np.isnan(values), 0x7F, bits).astype(np.uint8)


_NORMAL, _ZERO = np.float32(np.finfo(np.float32).tiny), np.float32(0)


def flush(values: Array) -> Array:
    """Subnormal float32 values to zero of the same sign, as .ftz asks."""
    sizes = np.abs(values)
    if np.minimum.reduce(sizes) >= _NORMAL:  # as nearly always
        return values
    tiny = (sizes < _NORMAL) & (sizes > _ZERO)
    return np.where(tiny, np.copysign(_ZERO, values), values) if np.count_nonzero(tiny) else values


def same(bits: Array) -> Array:
    """The numbers of a format without a sign: they are its bits."""
    return bits


def _viewed(dtype: Any) -> tuple[Callable[[Array], Array], Callable[[Array], Array]]:
    raw = RAW[np.dtype(dtype).itemsize]
    if dtype == raw:
        return same, lambda values: values.astype(raw, copy=False)
    return (
        lambda bits: bits.view(dtype),
        lambda values: values.astype(dtype, copy=False).view(raw),
    )


def _formats() -> dict[str, Format]:
    found = {}
    for name, dtype in DTYPES.items():
        load, store = _viewed(dtype)
        found[name] = Format(
            name=name,
            size=dtype.itemsize,
            load=load,
            store=store,
            floating=name.startswith("f"),
            signed=name.startswith("s"),
            viewed=dtype,
        )
    for name, dtype in (("s16x2", np.dtype(np.int16)), ("u16x2", np.dtype(np.uint16))):
        found[name] = Format(
            name=name,
            size=4,
            load=lambda bits, dtype=dtype: bits.view(dtype),  # type: ignore[misc]
            store=lambda values: values.view(np.uint32),
            floating=False,
            signed=name.startswith("s"),
        )
    half, half_bits = _viewed(np.float16)

    def floats(
        name: str, size: int, load: Callable[[Array], Array], store: Callable[[Array], Array]
    ) -> None:
        found[name] = Format(name=name, size=size, load=load, store=store, floating=True)

    floats("f16", 2, lambda bits: half(bits).astype(np.float32), half_bits)
    floats(
        "f16x2",
        4,
        lambda bits: half(bits).astype(np.float32),
        lambda values: half_bits(values).view(np.uint32),
    )
    floats("bf16", 2, bfloat16_to_float, float_to_bfloat16)
    floats(
        "bf16x2",
        4,
        lambda bits: bfloat16_to_float(bits.view(np.uint16)),
        lambda values: float_to_bfloat16(values).view(np.uint32),
    )
    floats(
        "f32x2",
        8,
        lambda bits: bits.view(np.float32),
        lambda values: values.astype(np.float32, copy=False).view(np.uint64),
    )
    return found


FORMATS: dict[str, Format] = _formats()
"""Formats by PTX type. f16 and bf16 are computed in float32 and rounded once."""
