"""Small PTX programs: a few instructions on the 32 lanes of a warp, or a whole kernel's body."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from flashgen.ptx.execute import Loaded, execute
from flashgen.ptx.findings import CHECKS, Report, Sanitizer
from flashgen.ptx.machine import LaunchInputs
from flashgen.ptx.memory import Buffer
from flashgen.ptx.tensor_map import TensorMap
from flashgen.ptx.text import parse
from flashgen.ptx.types import bfloat16_to_float, float8_values, float_to_bfloat16

HEADER = ".version 8.8\n.target sm_100a\n.address_size 64\n"
Array = np.ndarray[Any, Any]
RNG = np.random.default_rng(1)
KINDS = {"f16": (np.float16, 16), "bf16": (np.uint16, 16), "tf32": (np.float32, 8), "e4m3": (np.uint8, 32), "s8": (np.int8, 32)}  # fmt: skip
"""Types of products: what numpy holds them in, and elements of 32 bytes."""


def drawn(kind: str, shape: tuple[int, ...]) -> Array:
    """Elements of a type as memory has them."""
    if kind == "s8":
        return RNG.integers(-9, 9, shape).astype(np.int8)
    if kind == "e4m3":
        return RNG.integers(0x20, 0x48, shape).astype(np.uint8)
    values = RNG.integers(-8, 8, shape).astype(np.float32) / 4
    return {"bf16": float_to_bfloat16, "f16": lambda x: x.astype(np.float16), "tf32": lambda x: x}[
        kind
    ](values)


def values(kind: str, array: Array) -> Array:
    """Numbers of elements."""
    if kind == "bf16":
        return bfloat16_to_float(array)
    return float8_values("e4m3")[array] if kind == "e4m3" else array.astype(np.float32)


def kernel(
    body: str, parameters: int, threads: int = 32, registers: str = "", extra: str = ""
) -> str:
    """A module of one kernel: parameters p0, p1, ... of 64 bits and dynamic shared memory."""
    listed = ", ".join(f".param .u64 p{n}" for n in range(parameters))
    return (
        f"{HEADER}.extern .shared .align 16 .b8 smem[];\n"
        f".visible .entry test({listed})\n.reqntid {threads}\n{extra}{{\n"
        f".reg .pred %p<10>; .reg .b16 %h<20>; .reg .b32 %r<80>; .reg .b64 %d<40>;\n{registers}\n"
        f"{body}\nret;\n}}\n"
    )


def aligned(array: Array) -> Array:
    """A copy whose memory is aligned to 16 bytes, with whole words of 16 bytes."""
    size = -(-array.nbytes // 16) * 16
    content = np.zeros(size + 16, np.uint8)
    begin = -content.ctypes.data % 16
    found = content[begin : begin + size]
    found[: array.nbytes] = np.frombuffer(array.tobytes(), np.uint8)
    return found


def run(
    text: str,
    arrays: Sequence[Array],
    *,
    grid: tuple[int, int, int] = (1, 1, 1),
    shared: int = 4096,
    seed: int = 0,
    checks: Collection[Sanitizer] = CHECKS,
    maps: dict[int, TensorMap] | None = None,
) -> tuple[list[Array], Report]:
    """The arrays as a kernel leaves them, and its report; each array is a parameter."""
    contents = [aligned(array) for array in arrays]
    buffers = [
        Buffer(name=f"p{n}", address=0x10000 * (n + 1), content=content, end=array.nbytes)
        for n, (content, array) in enumerate(zip(contents, arrays, strict=True))
    ]
    launch = LaunchInputs(
        grid=grid,
        parameters=[buffer.address.to_bytes(8, "little") for buffer in buffers],
        buffers=buffers,
        tensor_maps=maps or {},
        shared_bytes=shared,
    )
    report = execute(Loaded(parse(text)), launch, seed=seed, checks=checks)
    left = [
        content[: array.nbytes].view(array.dtype).reshape(array.shape)
        for content, array in zip(contents, arrays, strict=True)
    ]
    return left, report


_PREFIX = {1: "%h", 2: "%h", 4: "%r", 8: "%d"}
_LETTER = {1: "b8", 2: "b16", 4: "b32", 8: "b64"}


def lanes(
    instructions: str,
    inputs: Sequence[Array],
    dtype: Any,
    *,
    check: bool = True,
    functions: str = "",
) -> Array:
    """What `{d}` holds in each lane after instructions on `{0}`, `{1}`, ...: arrays of 32 lanes.
    functions: the text of those that are called.
    """
    result = np.zeros(32, dtype)
    lines = ["mov.u32 %r60, %tid.x;"]
    names = []
    for n, array in enumerate((*inputs, result)):
        size = array.dtype.itemsize
        names.append(f"{_PREFIX[size]}{n}")
        lines.append(f"ld.param.u64 %d{20 + n}, [p{n}];")
        lines.append(f"mad.wide.u32 %d{20 + n}, %r60, {size}, %d{20 + n};")
        if n < len(inputs):
            lines.append(f"ld.global.{_LETTER[size]} {names[-1]}, [%d{20 + n}];")
    lines.append(instructions.format(*names[:-1], d=names[-1]))
    lines.append(f"st.global.{_LETTER[result.dtype.itemsize]} [%d{20 + len(inputs)}], {names[-1]};")
    text = kernel("\n".join(lines), len(inputs) + 1).replace(HEADER, HEADER + functions)
    arrays, report = run(text, [*inputs, result])
    if check:
        assert not report.findings, list(report.lines())
    return arrays[-1]
