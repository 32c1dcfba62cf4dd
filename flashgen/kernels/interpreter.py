"""Repairs the bfloat16 and float8 of Triton's interpreter.

Triton 3.6 and 3.7.1 store a bfloat16 as its bit pattern in a uint16, and ignore that in two places:
`dot` multiplies the patterns as integers, and float32 -> bfloat16 truncates where the GPU rounds to
nearest, ties to even. With both repaired a kernel's error is the one it has on a GPU.

An integer cast to bfloat16 becomes a bit pattern, too. float32 -> float8_e4m3 loses numbers below
2^-6, where the spacing of values is constant, and the pattern of NaN is read as 480. All are
repaired. Other conversions of float8_e4m3 are right, and it needs no `dot`: it is widened.
log2 of 0 is -inf, the LSE of a row without keys, and numpy warns of it, where a GPU does not.
A comparison of numbers has the type of the numbers, and Triton 3.9 takes no such mask.
Bounds of loops are arrays of one element in Triton 3.6, which numpy takes for numbers up to 2.4.

tf32 needs no repair: the kernels round their operands to tf32 themselves, and products of rounded
operands are exact in float32.

Threads share the interpreter's globals, so their launches take turns.

kernels/interpreter_speed.py makes it faster, with the same results. No other module touches it.
"""

from __future__ import annotations

import functools
import os
import threading
from typing import Any

from flashgen import settings

_repaired = False
_in_one_order = False
"""Whether products of the kernel that runs are summed in one order. BLAS has one for each shape."""
_lock = threading.RLock()


def _renew() -> None:
    """In the child of a fork nobody would release a lock that another thread held."""
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)


def active() -> bool:
    """Whether kernels of this process run in Triton's interpreter, on CPU tensors."""
    return settings.interpreting()


def prepare() -> None:
    """Repair the interpreter once, if this process uses it. Call before a kernel module is
    imported.
    """
    global _repaired
    if _repaired or not active():
        return
    from flashgen.kernels import interpreter_speed

    with _lock:
        if not _repaired:
            _repair()
            _index_by_item()
            interpreter_speed.quicken()
            _launch_one_by_one()
            _repaired = True


def _launch_one_by_one() -> None:
    """Have threads wait for each other's launches: the interpreter keeps its state in globals."""
    from triton.runtime.interpreter import InterpretedFunction

    launch = InterpretedFunction.run

    @functools.wraps(launch)
    def launched(self: Any, *arguments: Any, **options: Any) -> Any:
        global _in_one_order
        with _lock:
            _in_one_order = not options.get("enable_fp_fusion", True)
            return launch(self, *arguments, **options)

    InterpretedFunction.run = launched


def _index_by_item() -> None:
    """Have a bound of a loop be a number under Triton 3.6, too, which asks numpy for the int of an
    array of one element: an error from numpy 2.5 on.
    """
    import triton
    from triton.runtime import interpreter

    if not triton.__version__.startswith("3.6."):
        return
    patch = interpreter._patch_lang_tensor

    @functools.wraps(patch)
    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patched


def _repair() -> None:
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    cast, dot = InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        pair = (src.dtype.scalar, dst_type.scalar)
        if pair == (tl.float32, tl.bfloat16):
            return TensorHandle(round_to_bfloat16(src.data), tl.bfloat16)
        if pair == (tl.bfloat16, tl.float32):
            return TensorHandle(widen_bfloat16(src.data), tl.float32)
        if src.dtype.scalar.is_int() and pair[1] == tl.bfloat16:
            return TensorHandle(round_to_bfloat16(src.data.astype("float32")), tl.bfloat16)
        return cast(self, src, dst_type)

    def create_fp_to_fp(self: Any, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
        if (src.dtype.scalar, dst_type.scalar) == (tl.float32, tl.bfloat16):
            return TensorHandle(round_to_bfloat16(src.data), tl.bfloat16)
        if dst_type.scalar == tl.float8e4nv:
            wide = widen_bfloat16(src.data) if src.dtype.scalar == tl.bfloat16 else src.data
            return TensorHandle(round_to_float8(wide), tl.float8e4nv)
        if src.dtype.scalar == tl.float8e4nv:
            return widened_float8(self, src, dst_type, rounding_mode)
        return convert(self, src, dst_type, rounding_mode)

    def widened_float8(self: Any, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
        import numpy as np

        found = convert(self, src, dst_type, rounding_mode)
        nan = np.uint16(0x7FC0) if dst_type.scalar == tl.bfloat16 else np.nan
        data = np.where((src.data & 0x7F) == 0x7F, nan, found.data).astype(found.data.dtype)
        return TensorHandle(data, found.dtype)

    def create_dot(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        if _in_one_order:
            return TensorHandle(
                _summed_in_order(_widened(a).data, _widened(b).data, d.data), d.dtype
            )
        return dot(self, _widened(a), _widened(b), d, *options)

    def _widened(operand: Any) -> Any:
        """The operand in float32, exactly; a 16-bit one, for which numpy has no BLAS, all the
        more.
        """
        if operand.dtype.scalar == tl.bfloat16:
            return TensorHandle(widen_bfloat16(operand.data), tl.float32)
        if operand.dtype.scalar == tl.float16:
            return TensorHandle(operand.data.astype("float32"), tl.float32)
        if operand.dtype.scalar == tl.float8e4nv:
            return TensorHandle(widen_float8(operand.data), tl.float32)
        return operand

    def create_log2(self: Any, arg: Any) -> Any:
        import numpy as np

        with np.errstate(divide="ignore"):
            return log2(self, arg)

    def create_masked_load(self: Any, ptrs: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        return load(self, ptrs, boolean(mask), *rest, **named)

    def create_masked_store(
        self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any, **named: Any
    ) -> Any:
        return store(self, ptrs, value, boolean(mask), *rest, **named)

    def boolean(mask: Any) -> Any:
        compared = isinstance(mask, TensorHandle) and mask.data.dtype != bool
        return TensorHandle(mask.data.astype(bool), tl.int1) if compared else mask

    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store
    InterpreterBuilder.create_masked_load = create_masked_load
    InterpreterBuilder.create_masked_store = create_masked_store
    convert, log2 = InterpreterBuilder.create_fp_to_fp, InterpreterBuilder.create_log2
    InterpreterBuilder.cast_impl = cast_impl
    InterpreterBuilder.create_fp_to_fp = create_fp_to_fp
    InterpreterBuilder.create_dot = create_dot
    InterpreterBuilder.create_log2 = create_log2


_PRODUCTS = 16
"""Of one mma.sync, and of one wgmma, for each element of D, where operands have 16 bits."""


def _summed_in_order(a: Any, b: Any, d: Any) -> Any:
    """D + A B (M, N) as a chain of matrix instructions sums it: D first, then the sum of each 16
    products over k, so that a product in parts of k has the same bits. Other rows and columns
    change no bit.
    """
    import numpy as np

    found, of_one, product = np.array(d), np.empty_like(d), np.empty_like(d)
    columns = np.ascontiguousarray(a.T)[:, :, None]
    for start in range(0, len(b), _PRODUCTS):
        of_one.fill(0.0)
        for k in range(start, min(start + _PRODUCTS, len(b))):
            of_one += np.multiply(columns[k], b[k], out=product)
        found += of_one
    return found


def widen_bfloat16(bits: Any) -> Any:
    """The float32 values of bfloat16 bit patterns (numpy uint16, any shape); exact."""
    return (bits.astype("uint32") << 16).view("float32")


def round_to_bfloat16(values: Any) -> Any:
    """The bfloat16 bit patterns (numpy uint16) nearest to float32 values, ties to even; NaN stays
    NaN.
    """
    import numpy as np

    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded).reshape(np.shape(values))


def widen_float8(bits: Any) -> Any:
    """The float32 values of float8_e4m3 bit patterns (numpy uint8, any shape); exact."""
    import torch

    return torch.from_numpy(bits.copy()).view(torch.float8_e4m3fn).float().numpy()


def round_to_float8(values: Any) -> Any:
    """The float8_e4m3 bit patterns (numpy uint8) nearest to floating values, ties to even; beyond
    448 the sign's 448, as the GPU's instruction has it. NaN stays NaN.
    """
    import numpy as np
    import torch

    wide = torch.from_numpy(np.array(values, dtype=np.float32))
    narrow = wide.clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
    return narrow.view(torch.uint8).numpy()
