"""Tensor maps: boxes of global memory as the TMA unit copies them, and swizzled shared memory."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flashgen.ptx.types import Array

SWIZZLE_BITS = {0: 0, 32: 1, 64: 2, 128: 3}
"""Bits of the address that a swizzle of so many bytes changes."""


@dataclass(frozen=True, kw_only=True)
class TensorMap:
    """A tensor in global memory and the box of it that one copy moves (CUDA driver API,
    cuTensorMapEncodeTiled). shape, strides and box: outermost dimension first, in elements of
    `size` bytes, so that the last stride is 1. swizzle: bytes, 0 for none. fill: the bits of
    elements outside of the tensor.
    """

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    size: int
    swizzle: int = 0
    fill: int = 0

    def places(self, coordinates: tuple[int, ...]) -> tuple[Array, Array]:
        """For each row of the box, which elements of it lie inside of the tensor, and the offsets
        of all elements in bytes from its address. coordinates: outermost first.
        """
        inside = np.ones((1,) * len(self.box), bool)
        offsets = np.zeros((1,) * len(self.box), np.int64)
        for axis, (begin, length) in enumerate(zip(coordinates, self.box, strict=True)):
            index = (begin + np.arange(length)).reshape(
                [-1 if axis == other else 1 for other in range(len(self.box))]
            )
            inside = inside & (index >= 0) & (index < self.shape[axis])
            offsets = offsets + index * self.strides[axis] * self.size
        return inside.reshape(-1), offsets.reshape(-1)

    @property
    def bytes(self) -> int:
        """Bytes of a box."""
        return int(np.prod(self.box)) * self.size

    def shared_places(self, begin: int) -> Array:
        """The address of each element of a box that is copied to shared address `begin`."""
        return swizzled(begin + np.arange(int(np.prod(self.box))) * self.size, self.swizzle)


def swizzled(addresses: Array, swizzle: int) -> Array:
    """Shared addresses under a swizzle of 32, 64 or 128 bytes: bits 4 and up are combined by xor
    with the bits from 7 on (PTX ISA 5.5.6, "Swizzling modes"). 16 bytes stay together.
    """
    bits = SWIZZLE_BITS[swizzle]
    if not bits:
        return addresses
    changed: Array = addresses ^ (((addresses >> 7) & ((1 << bits) - 1)) << 4)
    return changed
