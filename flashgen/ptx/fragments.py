"""Matrices in registers and in shared memory: what the lanes of a warp hold of them.

The layouts are those of PTX ISA 9.7.14.5 (mma), 9.7.15.5 (wgmma) and 9.7.16.4 (tcgen05).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from flashgen.ptx.tensor_map import swizzled
from flashgen.ptx.types import RAW, Array, bfloat16_to_float, float8_values


@dataclass(frozen=True)
class Element:
    """An element type of a product: its bytes, and its values from raw bits."""

    size: int
    load: Callable[[Array], Array]


def _tf32(bits: Array) -> Array:
    """float32 whose lower 13 bits of mantissa a tensor core does not read."""
    cut: Array = (bits & np.uint32(0xFFFFE000)).view(np.float32)
    return cut


ELEMENTS: dict[str, Element] = {
    "f16": Element(2, lambda bits: bits.view(np.float16).astype(np.float32)),
    "bf16": Element(2, bfloat16_to_float),
    "tf32": Element(4, _tf32),
    "e4m3": Element(1, lambda bits: float8_values("e4m3")[bits]),
    "e5m2": Element(1, lambda bits: float8_values("e5m2")[bits]),
    "s8": Element(1, lambda bits: bits.view(np.int8).astype(np.int32)),
    "u8": Element(1, lambda bits: bits.astype(np.int32)),
}
"""Element types by their PTX names."""


def _elements(registers: list[Array], element: Element) -> Array:
    """For each 32-bit register of n times 32 lanes, n times 8 rows of consecutive elements."""
    raw = np.array(registers).view(RAW[element.size])
    return element.load(raw).reshape(len(registers), -1, 8, 4 // element.size * 4)


def matrix_a(registers: list[Array], element: Element) -> Array:
    """A of 16 rows, n times: registers alternate between the upper and the lower 8 rows."""
    held = _elements(registers, element)
    columns = held.reshape(len(registers) // 2, 2, *held.shape[1:])
    return columns.transpose(2, 1, 3, 0, 4).reshape(held.shape[1], 16, -1)


def matrix_b(registers: list[Array], element: Element) -> Array:
    """B of 8 columns, (k, 8), n times: lanes hold columns."""
    held = _elements(registers, element)
    return held.transpose(1, 0, 3, 2).reshape(held.shape[1], -1, 8)


def accumulator(registers: list[Array], dtype: np.dtype[np.generic]) -> Array:
    """(16, n) values of an accumulator of n / 2 registers of 32 bits."""
    held = np.array(registers).view(dtype)
    blocks = held.reshape(-1, 2, 2, 8, 4)  # columns / 8, upper or lower rows, pair, row, lane
    return np.ascontiguousarray(blocks.transpose(1, 3, 0, 4, 2)).reshape(16, -1)


def accumulator_registers(values: Array) -> Array:
    """The registers of (16, n) values, one row each: the inverse of accumulator()."""
    blocks = values.reshape(2, 8, -1, 4, 2).transpose(2, 0, 4, 1, 3)
    return np.ascontiguousarray(blocks).reshape(-1, 32).view(np.uint32)


@dataclass(frozen=True)
class Descriptor:
    """A matrix in shared memory (PTX ISA 9.7.15.5.1, "Matrix descriptor format"), in bytes."""

    start: int
    leading: int
    stride: int
    swizzle: int
    base_offset: int

    @classmethod
    def of_wgmma(cls, bits: int) -> Descriptor:
        """The fields of a 64-bit descriptor of wgmma."""
        return cls._of(bits, (0, 128, 64, 32)[bits >> 62 & 3])

    @classmethod
    def of_tcgen05(cls, bits: int) -> Descriptor:
        """The fields of a 64-bit descriptor of tcgen05 (9.7.16.4.1). Raises BadDescriptor."""
        swizzle = {0: 0, 2: 128, 4: 64, 6: 32}.get(bits >> 61 & 7)
        if swizzle is None:
            raise BadDescriptor(f"its swizzling mode is {bits >> 61 & 7}")
        if bits >> 46 & 7 != 1 or bits >> 53 & 0xFF:
            raise BadDescriptor("bits 46 to 48 and 53 to 60 must be 1 and 0")
        if bits >> 52 & 1:
            raise BadDescriptor("its leading dimension is an absolute address")
        return cls._of(bits, swizzle)

    @classmethod
    def _of(cls, bits: int, swizzle: int) -> Descriptor:
        start, leading, stride = ((bits >> at & 0x3FFF) << 4 for at in (0, 16, 32))
        return cls(start, leading, stride, swizzle, bits >> 49 & 7)


class BadDescriptor(Exception):
    """A descriptor with a layout that has no semantics here."""


def descriptor_places(
    descriptor: Descriptor, rows: int, columns: int, size: int, *, k_major: bool
) -> Array:
    """The shared address of each element (row, k) of an operand: `rows` along M or N, `columns`
    along K, elements of `size` bytes. k_major: consecutive elements go along K.
    """
    if descriptor.base_offset:
        raise BadDescriptor("its base offset is not 0")
    row, k = np.arange(rows)[:, None], np.arange(columns)[None, :]
    width = descriptor.swizzle
    if k_major and not width:
        offsets = row // 8 * descriptor.stride + row % 8 * 16
        offsets = offsets + k * size // 16 * descriptor.leading + k * size % 16
    elif k_major:
        if descriptor.start % width + columns * size > width:
            raise BadDescriptor("its rows are wider than its swizzle")
        offsets = row // 8 * descriptor.stride + row % 8 * width + k * size
    elif width:
        per = width // size
        offsets = row // per * descriptor.leading + k // 8 * descriptor.stride
        offsets = offsets + k % 8 * width + row % per * size
    else:
        per = 16 // size
        offsets = row // per * descriptor.stride + k // 8 * descriptor.leading
        offsets = offsets + k % 8 * 16 + row % per * size
    return swizzled(descriptor.start + offsets, width)
