"""Repairs Triton's interpreter: bfloat16, float8, and repeated work. No other module touches it.

Triton 3.6 and 3.7.1 store a bfloat16 as its bit pattern in a uint16, and ignore that in two places:
`dot` multiplies the patterns as integers, and float32 -> bfloat16 truncates where the GPU rounds to
nearest, ties to even. With both repaired a kernel's error is the one it has on a GPU.

An integer cast to bfloat16 becomes a bit pattern, too. float32 -> float8_e4m3 loses numbers below
2^-6, where the spacing of values is constant, and the pattern of NaN is read as 480. All are
repaired. Other conversions of float8_e4m3 are right, and it needs no `dot`: it is widened.

tf32 needs no repair: the kernels round their operands to tf32 themselves, and products of rounded
operands are exact in float32.

Work that the interpreter repeats is done once, or not at all: see _quicken and _share_types.
"""

from __future__ import annotations

from typing import Any

from flashgen import settings

_repaired = False


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
    _repair()
    _quicken()
    _share_types()
    _repaired = True


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

    convert = InterpreterBuilder.create_fp_to_fp
    InterpreterBuilder.cast_impl = cast_impl
    InterpreterBuilder.create_fp_to_fp = create_fp_to_fp
    InterpreterBuilder.create_dot = create_dot


def _quicken() -> None:
    """Skip work of the interpreter that changes no result.

    Triton 3.7.1 replaces the functions of triton.language by interpreted ones at every launch and
    again at every call of a device function, tl.sum's and tl.max's among them, each time searching
    all members of five modules and classes. Here that happens once, and they stay, since a process
    that interprets compiles nothing. For every sum and product of integers it also computes in
    int64 whether it overflows, which is checked only with options.debug, which is off.
    """
    import dataclasses
    from types import SimpleNamespace

    import triton.language as tl
    from triton.runtime import interpreter as runtime

    patch, patched = getattr(runtime, "_patch_lang", None), list[Any]()
    if patch is None:  # a Triton that does it otherwise
        return
    stays = SimpleNamespace(restore=lambda: None)

    def patch_lang(fn: Any) -> Any:
        named = [lang for lang in (tl, tl.core) if any(v is lang for v in fn.__globals__.values())]
        if not named or any(lang not in patched for lang in named):
            patch(fn)
            patched.extend(named)
        return stays

    runtime._patch_lang = patch_lang
    options = runtime.interpreter_builder.options
    if not options.debug:
        runtime.interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=False)


def _share_types() -> None:
    """Make each type of a block once. Results stay the same.

    Triton 3.7.1 derives the type of every value anew, with its name and its shape as a tuple of
    constants. That takes longer than the arithmetic of a small tile. Here equal block types are one
    object, which also keeps the shape of its tensors. Two operands of one type skip promotion and
    broadcasting, and a builtin is called without the wrapper that a compiled kernel needs. A launch
    takes two thirds of the time.
    """
    import triton
    import triton.language as tl
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter as runtime

    if not triton.__version__.startswith("3.7."):  # others may build types in another way
        return
    core, constexpr, semantic = tl.core, tl.core.constexpr, runtime.interpreter_semantic
    never_widened = ("fp32", "int32", "int64", "uint32", "uint64")
    np_dtypes: dict[str, Any] = {}
    blocks: dict[Any, Any] = {}

    def key_of(element: Any, shape: Any) -> Any:
        sizes = [size.value if isinstance(size, constexpr) else size for size in shape]
        return (element.name, getattr(element, "address_space", None), *sizes)

    def new_block(cls: Any, element_ty: Any, shape: Any) -> Any:
        return blocks.get(key_of(element_ty, shape)) or object.__new__(cls)

    def init_block(self: Any, element_ty: Any, shape: Any) -> None:
        if "numel" not in self.__dict__:
            check_block(self, element_ty, shape)
            blocks[key_of(element_ty, shape)] = self

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        if "of_tensor" not in type.__dict__:
            fill_tensor(self, handle, type)
            type.of_tensor = (self.shape, self.numel)
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = type.of_tensor

    def unwrap(value: Any) -> Any:
        if isinstance(value, constexpr):
            return value.value
        return unwrap_all(value) if isinstance(value, (list, tuple, core.tuple)) else value

    def get_np_dtype(dtype: Any) -> Any:
        if dtype.name not in np_dtypes:
            np_dtypes[dtype.name] = find_np_dtype(dtype)
        return np_dtypes[dtype.name]

    def same_type(self: Any, other: Any) -> Any:
        return self is other or equal(self, other)

    def bind_builtin(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        inner = getattr(member, "__wrapped__", member)

        def call(*arguments: Any, _semantic: Any = None, **named: Any) -> Any:
            return inner(*arguments, **named, _semantic=semantic)

        scope.set_attr(obj, name, call)

    def promote(self: Any, lhs: Any, rhs: Any, *options: Any, **named: Any) -> Any:
        both = isinstance(lhs, core.tensor) and isinstance(rhs, core.tensor)
        if both and lhs.type is rhs.type and lhs.dtype.name in never_widened:
            return lhs, rhs
        return promote_all(self, lhs, rhs, *options, **named)

    def broadcast(self: Any, lhs: Any, rhs: Any) -> Any:
        if lhs.shape.values == rhs.shape.values:
            return lhs, rhs
        return broadcast_all(self, lhs, rhs)

    runtime._patch_attr = bind_builtin
    equal, core.dtype.__eq__ = core.dtype.__eq__, same_type
    unwrap_all, core._unwrap_if_constexpr = core._unwrap_if_constexpr, unwrap
    find_np_dtype, runtime._get_np_dtype = runtime._get_np_dtype, get_np_dtype
    fill_tensor, core.tensor.__init__ = core.tensor.__init__, init_tensor
    check_block, core.block_type.__init__ = core.block_type.__init__, init_block
    core.block_type.__new__ = new_block
    promote_all = TritonSemantic.binary_op_type_checking_impl
    TritonSemantic.binary_op_type_checking_impl = promote
    broadcast_all = TritonSemantic.broadcast_impl_value
    TritonSemantic.broadcast_impl_value = broadcast


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
