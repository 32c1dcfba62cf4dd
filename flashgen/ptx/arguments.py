"""The arguments of a Triton kernel as a launch takes them: tensors, descriptors and numbers to
parameters, buffers and tensor maps. Tensors are recognised by their methods; torch is not imported.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flashgen.errors import InvalidArgument
from flashgen.ptx.machine import Grid, LaunchInputs
from flashgen.ptx.memory import Buffer
from flashgen.ptx.tensor_map import TensorMap

MAP_BYTES = 128
"""A CUtensorMap."""

_SWIZZLES = (0, 32, 64, 128)
"""Bytes by the value of CUtensorMapSwizzle."""

_FLOATS = {"fp32": "<f", "f32": "<f", "fp64": "<d", "f64": "<d", "fp16": "<e", "f16": "<e"}


@dataclass(frozen=True, kw_only=True)
class LaunchArgument:
    """An argument that is no constant: its name, its Triton type ("*bf16", "i32") and its value."""

    name: str
    type: str
    value: Any


def launch_of(
    arguments: Iterable[LaunchArgument],
    grid: Grid,
    shared_bytes: int,
    descriptors: Sequence[Mapping[str, Any]] = (),
    scratch_bytes: int = 0,
    memory: Sequence[Any] = (),
) -> LaunchInputs:
    """The launch of a kernel that Triton compiled. descriptors: metadata.tensordesc_meta, one item
    a tensor descriptor; empty where the kernel does not use the TMA unit. scratch_bytes: of global
    scratch memory for all blocks. memory: tensors that are no arguments. Raises InvalidArgument for
    a value that does not fit.
    """
    parameters: list[bytes] = []
    buffers = [_memory(number, tensor) for number, tensor in enumerate(memory)]
    maps: dict[int, TensorMap] = {}
    left = list(descriptors)
    for argument in arguments:
        value = argument.value
        if hasattr(value, "block_shape"):
            buffers.append(buffer_of(argument.name, value.base))
            if not left:
                raise InvalidArgument(
                    f"{argument.name} is a tensor descriptor, which this target has no TMA unit for"
                )
            maps[len(parameters)] = tensor_map_of(argument.name, value, left.pop(0))
            parameters.append(bytes(MAP_BYTES))
            parameters += [struct.pack("<i", length) for length in value.shape]
            parameters += [struct.pack("<q", stride) for stride in value.strides]
        elif hasattr(value, "data_ptr"):
            buffers.append(buffer_of(argument.name, value))
            parameters.append(struct.pack("<Q", value.data_ptr()))
        else:
            parameters.append(_packed(argument))
    if scratch_bytes:
        content = np.zeros(-(-scratch_bytes // MAP_BYTES) * MAP_BYTES + MAP_BYTES, np.uint8)
        address = content.ctypes.data
        begin = -address % MAP_BYTES  # it may hold tensor maps
        buffers.append(
            Buffer(name="global scratch", address=address + begin, content=content[begin:])
        )
        parameters.append(struct.pack("<Q", address + begin))
    return LaunchInputs(
        grid=grid,
        parameters=parameters,
        buffers=buffers,
        tensor_maps=maps,
        shared_bytes=shared_bytes,
    )


def _memory(number: int, tensor: Any) -> Buffer:
    if not hasattr(tensor, "data_ptr"):
        raise InvalidArgument(f"memory must hold tensors: got {type(tensor).__name__}")
    return buffer_of(f"memory[{number}]", tensor)


def buffer_of(name: str, tensor: Any) -> Buffer:
    """The memory of a CPU tensor: its storage, of which the tensor may be a part. Reads and writes
    of it are those of the tensor.
    """
    if str(tensor.device) != "cpu":
        raise InvalidArgument(f"{name} must be a CPU tensor: it is on {tensor.device}")
    storage = tensor.untyped_storage()
    size, address = storage.nbytes(), storage.data_ptr()
    if not size or not tensor.numel():
        return Buffer(name=name, address=16, content=np.zeros(0, np.uint8))
    content = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))
    strides = zip(tensor.shape, tensor.stride(), strict=True)
    elements = 1 + sum((length - 1) * stride for length, stride in strides)
    begin = tensor.data_ptr() - address
    return Buffer(
        name=name,
        address=address,
        content=content,
        begin=begin,
        end=begin + elements * tensor.element_size(),
    )


def tensor_map_of(name: str, descriptor: Any, meta: Mapping[str, Any]) -> TensorMap:
    """The tensor map that Triton's launcher makes of a descriptor (backends/nvidia/driver.py,
    make_tensordesc_arg). Raises InvalidArgument for what the CUDA driver would refuse.
    """
    base = descriptor.base
    size = base.element_size()
    strides = tuple(map(int, descriptor.strides))
    unaligned = [stride for stride in strides[:-1] if stride * size % 16]
    if base.data_ptr() % 16 or unaligned or strides[-1] != 1:
        raise InvalidArgument(
            f"{name} must be aligned to 16 bytes, and its strides too but for the last, which "
            f"must be 1: got strides {strides}"
        )
    if meta.get("fp4_padded"):
        raise InvalidArgument(f"{name} is padded fp4, which is not supported")
    nan = getattr(descriptor, "padding", "zero") == "nan"
    return TensorMap(
        address=base.data_ptr(),
        shape=tuple(map(int, descriptor.shape)),
        strides=strides,
        box=tuple(map(int, meta["block_size"])),
        size=size,
        swizzle=_SWIZZLES[int(meta["swizzle"])],
        fill=(1 << 8 * size - 1) - 1 if nan else 0,
    )


def _packed(argument: LaunchArgument) -> bytes:
    """A number as its parameter."""
    kind, value = argument.type, argument.value
    if kind.startswith("*"):
        if value is not None:
            raise InvalidArgument(f"{argument.name} must be a tensor: got {value!r}")
        return bytes(8)
    try:
        if kind in _FLOATS:
            return struct.pack(_FLOATS[kind], value)
        bits = int(kind.lstrip("iu"))
        return (int(value) % (1 << max(bits, 8))).to_bytes(max(bits // 8, 1), "little")
    except (ValueError, TypeError, struct.error) as error:
        raise InvalidArgument(
            f"{argument.name} must be a number of type {kind}: got {value!r}"
        ) from error
