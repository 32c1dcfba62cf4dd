"""Memories: the tensors of a launch with their bounds, and the shared memory of a block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from flashgen.ptx.program import Program
from flashgen.ptx.types import RAW, SPOILED, Array

SHARED_BASE = 0x400
"""Address of the first byte of shared memory: CUDA reserves 1 KB below it (CUDA C++ Programming
Guide, compute capability 8.x and later).
"""

PARAMETER_BASE = 0x7000_0000_0000_0000
PARAMETER_STRIDE = 0x1000
"""Generic addresses of kernel parameters: only tensor maps are used by them. In their own space the
first begins at 0, so that addresses there fit into the 32 bits that Triton 3.9 gives them."""

LOCAL_BASE = 0x5000_0000_0000_0000
"""Generic address of the first byte of a thread's stack; in its own space that has address 0."""

CONSTANT_BASE = 0x6000_0000_0000_0000
"""Generic address of the first .global variable of a module."""


class BadAddress(Exception):
    """An access that no memory serves. lane: of the 32 addresses."""

    def __init__(self, message: str, lane: int | None = None) -> None:
        super().__init__(message)
        self.message, self.lane = message, lane


class Words:
    """Bytes that are read and written as unsigned integers of 1 to 8 bytes."""

    def __init__(self, content: Array) -> None:
        self.bytes = content
        self._views: dict[int, Array] = {}

    def of(self, size: int) -> Array:
        """The content as integers of `size` bytes; bytes that do not fill one are left out."""
        if size not in self._views:
            whole = len(self.bytes) // size * size
            self._views[size] = self.bytes[:whole].view(RAW[size])
        return self._views[size]


@dataclass(frozen=True, kw_only=True)
class Buffer:
    """Global memory that a launch may touch: bytes of an array, from `begin` to `end`, of which
    byte 0 has `address`. address and the array are aligned to 16 bytes.
    """

    name: str
    address: int
    content: Array
    begin: int = 0
    end: int = -1

    @cached_property
    def limits(self) -> tuple[int, int]:
        """Addresses of the first byte and behind the last."""
        end = len(self.content) if self.end < 0 else self.end
        return self.address + self.begin, self.address + end

    @cached_property
    def words(self) -> Words:
        """The content as integers."""
        return Words(self.content)


def merged(buffers: Sequence[Buffer]) -> tuple[Buffer, ...]:
    """Buffers of one array, if they touch, as one: views of a tensor are told apart by nobody."""
    found: list[Buffer] = []
    for buffer in sorted(buffers, key=lambda each: each.limits):
        last = found[-1] if found else None
        if last is not None and buffer.limits[0] <= last.limits[1]:
            first, end = last.limits[0], max(last.limits[1], buffer.limits[1])
            base = last if end <= last.address + len(last.content) else buffer
            if base.address <= first and end <= base.address + len(base.content):
                name = last.name if last.name == buffer.name else f"{last.name}, {buffer.name}"
                found[-1] = Buffer(
                    name=name,
                    address=base.address,
                    content=base.content,
                    begin=first - base.address,
                    end=end - base.address,
                )
                continue
        found.append(buffer)
    return tuple(found)


class GlobalMemory:
    """The tensors of a launch. Every access must lie in one of them."""

    def __init__(self, buffers: Sequence[Buffer]) -> None:
        self.buffers = merged([buffer for buffer in buffers if buffer.limits[0] < buffer.limits[1]])

    def find(self, addresses: Array, size: int) -> Buffer:
        """The buffer that holds `size` bytes at each address. Raises BadAddress; LookupError if the
        addresses lie in several buffers.
        """
        low = int(np.minimum.reduce(addresses))
        high = int(np.maximum.reduce(addresses)) + size
        for buffer in self.buffers:
            begin, end = buffer.limits
            if begin <= low and high <= end:
                if size > 1 and int(np.bitwise_or.reduce(addresses)) & size - 1:
                    lane = int(np.argmax((addresses & np.uint64(size - 1)) != 0))
                    raise BadAddress(
                        f"an access of {size} bytes is not aligned: "
                        f"{self.describe(int(addresses[lane]))}",
                        lane,
                    )
                return buffer
        for lane, address in enumerate(map(int, addresses)):
            every = (buffer.limits for buffer in self.buffers)
            if not any(begin <= address and address + size <= end for begin, end in every):
                raise BadAddress(
                    f"{size} bytes outside of every tensor: {self.describe(address)}", lane
                )
        raise LookupError

    def describe(self, address: int) -> str:
        """An address by the tensor that is nearest."""
        if not self.buffers:
            return f"address {address:#x}, and the launch has no tensor"

        def distance(buffer: Buffer) -> int:
            begin, end = buffer.limits
            return max(begin - address, address - end + 1, 0)

        near = min(self.buffers, key=distance)
        begin, end = near.limits
        if address < begin:
            return f"{begin - address} bytes before {near.name}"
        return f"byte {address - begin} of {near.name}, which has {end - begin}"


class SharedMemory:
    """The shared memory of a block: static variables first, then dynamic memory."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.words = Words(np.full(-(-size // 16) * 16, 0xFF, np.uint8))

    def offsets(self, addresses: Array, size: int) -> Array:
        """Addresses as bytes from the beginning, as int64. Raises BadAddress."""
        at = addresses.astype(np.int64) - SHARED_BASE
        low, high = int(np.minimum.reduce(at)), int(np.maximum.reduce(at))
        if low < 0 or high + size > self.size:
            lane = int(np.argmax((at < 0) | (at + size > self.size)))
            raise BadAddress(
                f"{size} bytes at byte {int(at[lane])} of shared memory, "
                f"of which the block has {self.size}",
                lane,
            )
        if size > 1 and int(np.bitwise_or.reduce(at)) & size - 1:
            lane = int(np.argmax((at & (size - 1)) != 0))
            raise BadAddress(
                f"an access of {size} bytes at byte {int(at[lane])} of shared memory is not "
                "aligned",
                lane,
            )
        return at


class Stack:
    """The stacks of 32 lanes. undefined: its bits that nobody wrote, like those of registers."""

    def __init__(self, size: int) -> None:
        self.size, self._row = size, -(-size // 16) * 16
        self.words = Words(np.full(32 * self._row, SPOILED & 0xFF, np.uint8))
        self.undefined = Words(np.full(32 * self._row, 0xFF, np.uint8))

    def places(self, lanes: Array, addresses: Array, unit: int, count: int) -> Array:
        """Where in the words of `unit` bytes each lane has `count` of them. Raises BadAddress."""
        at = addresses.astype(np.int64)
        bad = (at < 0) | (at + unit * count > self.size) | (at % unit != 0)
        if np.count_nonzero(bad):
            lane = int(np.argmax(bad))
            said = f"{unit * count} bytes at byte {int(at[lane])} of a stack of {self.size} bytes"
            raise BadAddress(said, lane)
        found: Array = ((lanes * self._row + at) // unit)[:, None] + np.arange(count)
        return found


def shared_layout(program: Program, dynamic: int) -> tuple[dict[str, int], int]:
    """The address of each shared variable, and the size of all with `dynamic` bytes of dynamic
    memory. Every extern variable names the beginning of the dynamic memory.
    """
    addresses: dict[str, int] = {}
    at = 0
    for variable in program.variables:
        if variable.space == "shared" and not variable.extern:
            at = -(-at // variable.align) * variable.align
            addresses[variable.name] = SHARED_BASE + at
            at += variable.size
    at = -(-at // 16) * 16
    for variable in program.variables:
        if variable.space == "shared" and variable.extern:
            addresses[variable.name] = SHARED_BASE + at
    return addresses, at + dynamic


def constants(program: Program) -> tuple[dict[str, int], tuple[Buffer, ...]]:
    """The address of each .global variable, and the buffers that hold them."""
    addresses: dict[str, int] = {}
    buffers = []
    at = CONSTANT_BASE
    for variable in program.variables:
        if variable.space == "global":
            size = -(-max(variable.size, 1) // 16) * 16
            content = np.frombuffer(variable.content.ljust(size, b"\0"), np.uint8).copy()
            addresses[variable.name] = at
            buffers.append(Buffer(name=variable.name, address=at, content=content))
            at += size + 16  # a gap, so that an access beyond one is outside of every buffer
    return addresses, tuple(buffers)
