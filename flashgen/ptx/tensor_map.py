"""Tensor maps: boxes of global memory as the TMA unit copies them, and swizzled shared memory."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from flashgen.ptx.types import RAW, Array

PIECE = 16
"""Bytes that a swizzle keeps together."""

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

    def places(self, coordinates: tuple[int, ...]) -> tuple[int, Array, Array]:
        """The box in pieces of 16 bytes, where it consists of them, or in elements: their size,
        which of them lie inside of the tensor, and the offsets of all in bytes from its address.
        coordinates: outermost first.
        """
        per = PIECE // self.size
        whole = not any(each % per for each in (coordinates[-1], self.shape[-1], self.box[-1]))
        if not whole or any(each % per for each in self.strides[:-1]) or self.address % PIECE:
            per = 1
        inside, offsets = _places(
            (*coordinates[:-1], coordinates[-1] // per),
            (*self.box[:-1], self.box[-1] // per),
            (*self.shape[:-1], self.shape[-1] // per),
            tuple(each * self.size for each in (*self.strides[:-1], per)),
        )
        return per * self.size, inside, offsets

    @property
    def bytes(self) -> int:
        """Bytes of a box."""
        return math.prod(self.box) * self.size

    def shared_places(self, begin: int, piece: int) -> Array:
        """The address of each piece of a box that is copied to shared address `begin`."""
        return _shared_places(begin, self.bytes // piece, piece, self.swizzle)

    def filled(self, piece: int) -> Any:
        """What a piece outside of the tensor is filled with."""
        content = self.fill.to_bytes(self.size, "little") * (piece // self.size)
        return np.frombuffer(content, RAW[piece])[0]


@lru_cache(maxsize=256)
def _places(
    coordinates: tuple[int, ...],
    box: tuple[int, ...],
    shape: tuple[int, ...],
    steps: tuple[int, ...],
) -> tuple[Array, Array]:
    """Which elements lie inside, and their offsets; steps: bytes from one to the next, by axis."""
    inside = np.ones((1,) * len(box), bool)
    offsets = np.zeros((1,) * len(box), np.int64)
    for axis, (begin, length) in enumerate(zip(coordinates, box, strict=True)):
        index = (begin + np.arange(length)).reshape(
            [-1 if axis == other else 1 for other in range(len(box))]
        )
        inside = inside & (index >= 0) & (index < shape[axis])
        offsets = offsets + index * steps[axis]
    return inside.reshape(-1), offsets.reshape(-1)


@lru_cache(maxsize=256)
def _shared_places(begin: int, count: int, piece: int, swizzle: int) -> Array:
    return swizzled(begin + np.arange(count) * piece, swizzle)


ENCODED = np.dtype(
    [
        ("global_address", "u8"), ("global_stride", "u8", 4), ("global_dim", "u4", 5),
        ("box_dim", "u4", 5), ("element_stride", "u4", 5), ("rank", "u4"), ("elemtype", "u4"),
        ("interleave_layout", "u4"), ("swizzle_mode", "u4"), ("fill_mode", "u4"), ("rest", "u4", 2),
    ]
)  # fmt: skip
"""A map that a program makes, by the fields of tensormap.replace (PTX ISA 9.7.9.28). How its 128
bytes lie on a GPU is not documented.
"""

_ELEMENT_BYTES = (1, 2, 4, 4, 8, 8, 2, 4, 4, 8, 2, 4, 4)
"""By the number of .elemtype, from u8 to tf32.ftz."""


def decoded(content: bytes) -> TensorMap:
    """The tensor map of 128 bytes. Raises ValueError for what the TMA unit does not take."""
    held = np.frombuffer(content, ENCODED)[0]
    rank = int(held["rank"]) + 1
    if rank > 5 or held["elemtype"] >= len(_ELEMENT_BYTES) or held["swizzle_mode"] > 3:
        raise ValueError(f"a tensor map of {rank} dimensions, element type {held['elemtype']}")
    size, strides = _ELEMENT_BYTES[held["elemtype"]], held["global_stride"][: rank - 1]
    if held["interleave_layout"] or (held["element_stride"][:rank] != 1).any():
        raise ValueError("a tensor map that skips or interleaves elements is not supported")
    if int(held["global_address"]) % 16 or (strides % 16).any():
        raise ValueError("a tensor map whose address or strides are not aligned to 16 bytes")
    if not held["box_dim"][:rank].all() or (held["box_dim"] > 256).any():
        raise ValueError(f"a tensor map with a box of {held['box_dim'][:rank].tolist()}")
    return TensorMap(
        address=int(held["global_address"]),
        shape=tuple(map(int, held["global_dim"][:rank][::-1])),
        strides=(*(int(each) // size for each in strides[::-1]), 1),
        box=tuple(map(int, held["box_dim"][:rank][::-1])),
        size=size,
        swizzle=tuple(SWIZZLE_BITS)[held["swizzle_mode"]],
        fill=(1 << 8 * size - 1) - 1 if held["fill_mode"] else 0,
    )


def swizzled(addresses: Array, swizzle: int) -> Array:
    """Shared addresses under a swizzle of 32, 64 or 128 bytes: bits 4 and up are combined by xor
    with the bits from 7 on (PTX ISA 5.5.6, "Swizzling modes"). 16 bytes stay together.
    """
    bits = SWIZZLE_BITS[swizzle]
    if not bits:
        return addresses
    changed: Array = addresses ^ (((addresses >> 7) & ((1 << bits) - 1)) << 4)
    return changed
