"""The recording driver computes: launches of kernels that Triton compiled go to flashgen.ptx.

Kernels of torch still compute nothing: what a test fills, it fills on the CPU and copies.
"""

from __future__ import annotations

import contextlib
import ctypes
import struct
from collections.abc import Iterator

import numpy as np
from triton.compiler.compiler import CompiledKernel

from flashgen.ptx.execute import execute
from flashgen.ptx.findings import Report
from flashgen.ptx.machine import LaunchInputs
from flashgen.ptx.memory import Buffer
from flashgen.ptx.tensor_map import TensorMap
from flashgen.ptx.triton_kernel import loaded_text

ELEMENT_BYTES = (1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4)
"""Of a CUtensorMapDataType."""
SWIZZLES = (0, 32, 64, 128)
MAP_BYTES = 128

_PTX: dict[int, str] = {}
"""The program of each kernel that this process has loaded, by its CUfunction."""


def remember() -> None:
    """Keep the program of every kernel that is loaded from now on."""
    load = CompiledKernel._init_handles

    def remembering(kernel: CompiledKernel) -> None:
        load(kernel)
        if "ptx" in kernel.asm:  # not of one that flashgen aot packaged
            _PTX[kernel.function] = kernel.asm["ptx"]

    CompiledKernel._init_handles = remembering


EXECUTOR = ctypes.CFUNCTYPE(
    None,
    ctypes.c_void_p,
    ctypes.POINTER(ctypes.c_uint),
    ctypes.c_uint,
    ctypes.c_int,
    ctypes.POINTER(ctypes.c_int),
    ctypes.POINTER(ctypes.c_void_p),
)


class Executing:
    """What launches do while it is active. report: of all of them; errors: what they raised, for a
    callback of C cannot raise.
    """

    def __init__(self) -> None:
        self.report, self.errors, self.launches = Report(), list[BaseException](), 0
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._driver.recording_view.restype = ctypes.c_void_p

    @contextlib.contextmanager
    def active(self) -> Iterator[Executing]:
        """Launches compute; afterwards, none raised an error and no check found anything."""
        callback = EXECUTOR(self._guarded)
        self._driver.recording_execute(callback)
        try:
            yield self
        finally:
            self._driver.recording_execute(None)
        assert self.errors == []
        assert list(self.report.lines()) == []

    def _guarded(self, *launch: object) -> None:
        try:
            self._launch(*launch)  # type: ignore[arg-type]
        except BaseException as error:
            self.errors.append(error)

    def _launch(self, kernel, grid, shared, count, sizes, values) -> None:  # type: ignore[no-untyped-def]
        parameters = [ctypes.string_at(values[n], sizes[n]) for n in range(count)]
        buffers: dict[int, Buffer] = {}
        maps: dict[int, TensorMap] = {}
        for number, content in enumerate(parameters):
            address = None
            if len(content) == MAP_BYTES:
                maps[number] = _map_of(content)
                address = maps[number].address
            elif len(content) == 8:
                (address,) = struct.unpack("<Q", content)
            if address is not None and (found := self._buffer(f"parameter {number}", address)):
                buffers[found.address] = found
        made = LaunchInputs(
            grid=(grid[0], grid[1], grid[2]),
            parameters=parameters,
            buffers=list(buffers.values()),
            tensor_maps=maps,
            shared_bytes=shared,
        )
        self.report.merge(execute(loaded_text(_PTX[kernel]), made, seed=self.launches))
        self.launches += 1

    def _buffer(self, name: str, address: int) -> Buffer | None:
        """The allocation that holds an address of the device."""
        begin, size = ctypes.c_uint64(), ctypes.c_uint64()
        view = self._driver.recording_view(
            ctypes.c_uint64(address), ctypes.byref(begin), ctypes.byref(size)
        )
        if not view:
            return None
        content = np.ctypeslib.as_array((ctypes.c_uint8 * size.value).from_address(view))
        return Buffer(name=name, address=begin.value, content=content)


def _map_of(content: bytes) -> TensorMap:
    """The tensor map that tests/driver/recording/tensor_map.cpp wrote."""
    words = struct.unpack("<16Q", content)
    rank = words[1] & 0xFFFFFFFF
    size = ELEMENT_BYTES[words[2] & 0xFFFFFFFF]
    strides = (*(stride // size for stride in reversed(words[8 : 7 + rank])), 1)
    return TensorMap(
        address=words[0],
        shape=tuple(reversed(words[3 : 3 + rank])),
        strides=strides,
        box=tuple(reversed([(words[12] >> 8 * n & 0xFF) + 1 for n in range(rank)])),
        size=size,
        swizzle=SWIZZLES[words[2] >> 32],
    )
