"""Makes Triton's interpreter faster, with the same results: what it repeats is done once.

Imported by kernels/interpreter.py, in processes that interpret.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import itertools
import linecache
from types import SimpleNamespace
from typing import Any

import numpy as np
import triton
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter as runtime

core, tensor, TensorHandle = tl.core, tl.core.tensor, runtime.TensorHandle
SIGNED = (tl.int8, tl.int16, tl.int32, tl.int64)
UNSIGNED = (tl.uint8, tl.uint16, tl.uint32, tl.uint64)
INTEGERS = frozenset(dtype.name for dtype in (*SIGNED, *UNSIGNED))
WIDER: dict[tuple[str, str], Any] = {
    ("fp32", "fp32"): tl.float32,
    ("int1", "int1"): tl.int1,
    **{
        (a.name, b.name): max(a, b, key=dtypes.index)
        for dtypes in (SIGNED, UNSIGNED)
        for a, b in itertools.product(dtypes, repeat=2)
    },
}
"""The type in which operands of two types are computed; other pairs are left to Triton."""
LIMITS: dict[str, tuple[int, int, tuple[type, ...]]] = {
    "fp32": (-(2**31), 2**31, (int, float)),
    **{name: (np.iinfo(name).min, np.iinfo(name).max, (int,)) for name in INTEGERS},
}
"""By type: the whole numbers that an operand of it may be combined with, and of which classes."""


def quicken() -> None:
    """Replace parts of the interpreter, once."""
    _patch_once()
    if triton.__version__.startswith("3.7."):  # others may do it in another way
        _share_types()
        _check_sizes_directly()
        _promote_directly()
        _parse_once()


def _patch_once() -> None:
    """Patch triton.language once.

    Triton 3.7.1 replaces the functions of triton.language by interpreted ones at every launch and
    again at every call of a device function, tl.sum's and tl.max's among them, each time searching
    all members of five modules and classes. Here that happens once, and they stay, since a process
    that interprets compiles nothing. For every sum and product of integers it also computes in
    int64 whether it overflows, which is checked only with options.debug, which is off.
    """
    patch, patched = getattr(runtime, "_patch_lang", None), list[Any]()
    if patch is None:  # a Triton that does it otherwise
        return
    stays, seen = SimpleNamespace(restore=lambda: None), set[Any]()

    def patch_lang(fn: Any) -> Any:
        if fn in seen:  # the interpreter keeps every function that it runs as well
            return stays
        seen.add(fn)
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
    """Make each type of a block once.

    Triton 3.7.1 derives the type of every value anew, with its name and its shape as a tuple of
    constants. That takes longer than the arithmetic of a small tile. Here equal block types are one
    object, which also keeps the shape of its tensors, and a builtin is called without the wrapper
    that a compiled kernel needs.
    """
    constexpr, semantic = core.constexpr, runtime.interpreter_semantic
    np_dtypes: dict[str, Any] = {}
    blocks: dict[Any, Any] = {}
    plain = {tensor, int, float, bool, str, type(None)}

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
        if type(value) in plain:
            return value
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

    def with_element_ty(self: Any, scalar: Any) -> Any:
        if scalar.is_ptr():  # its name does not say all
            return core.block_type(scalar, self.shape)
        others = self.__dict__.setdefault("of_elements", {})
        if scalar.name not in others:
            others[scalar.name] = core.block_type(scalar, self.shape)
        return others[scalar.name]

    def to_ir(self: Any, builder: Any) -> Any:
        if "of_builder" not in self.__dict__:
            self.of_builder = block_to_ir(self, builder)
        return self.of_builder

    runtime._patch_attr = bind_builtin
    equal, core.dtype.__eq__ = core.dtype.__eq__, same_type
    unwrap_all, core._unwrap_if_constexpr = core._unwrap_if_constexpr, unwrap
    find_np_dtype, runtime._get_np_dtype = runtime._get_np_dtype, get_np_dtype
    fill_tensor, tensor.__init__ = tensor.__init__, init_tensor
    check_block, core.block_type.__init__ = core.block_type.__init__, init_block
    core.block_type.__new__ = new_block
    core.block_type.with_element_ty = with_element_ty
    block_to_ir, core.block_type.to_ir = core.block_type.to_ir, to_ir


def _check_sizes_directly() -> None:
    """Ask every new value for its size in line, not by two calls."""
    pointer, check = core.pointer_type, TensorHandle.__post_init__

    def post_init(self: Any) -> None:
        kind, size = self.dtype, self.data.itemsize
        if size > 1 and type(kind) is not pointer and size * 8 > kind.primitive_bitwidth:
            check(self)

    TensorHandle.__post_init__ = post_init


def _promote_directly() -> None:
    """Bring two operands to one type and shape without Triton's many checks, if they are of the
    usual types: integers of one sign, two float32, a pointer and an integer, a tensor and a number.
    """
    promote_all = TritonSemantic.binary_op_type_checking_impl
    broadcast_all = TritonSemantic.broadcast_impl_value

    def promote(self: Any, lhs: Any, rhs: Any, *options: Any, **named: Any) -> Any:
        found = None
        if not named and (len(options) < 3 or options[2]):  # the third: whether types may change
            found = _promoted(self, lhs, rhs, options[:1] == (True,))
        return found or promote_all(self, lhs, rhs, *options, **named)

    def broadcast(self: Any, lhs: Any, rhs: Any) -> Any:
        return _broadcast(lhs, rhs) or broadcast_all(self, lhs, rhs)

    def expand_dims(self: Any, value: Any, axis: int) -> Any:
        return TensorHandle(value.data[(slice(None),) * axis + (None,)], value.dtype.scalar)

    TritonSemantic.binary_op_type_checking_impl = functools.update_wrapper(promote, promote_all)
    TritonSemantic.broadcast_impl_value = functools.update_wrapper(broadcast, broadcast_all)
    runtime.InterpreterBuilder.create_expand_dims = expand_dims


def _promoted(semantic: Any, lhs: Any, rhs: Any, pointer: bool) -> Any:
    """Both operands, or None where Triton decides; pointer: the left one may be one."""
    if not isinstance(rhs, tensor):
        other = _constant(rhs, lhs.type) if isinstance(lhs, tensor) else None
        return None if other is None else (lhs, other)
    if not isinstance(lhs, tensor):
        other = _constant(lhs, rhs.type)
        return None if other is None else (other, rhs)
    left, right = lhs.dtype.name, rhs.dtype.name
    if lhs.type is rhs.type and left in LIMITS:
        return lhs, rhs
    if both := WIDER.get((left, right)):
        return semantic.broadcast_impl_value(_converted(lhs, both), _converted(rhs, both))
    if pointer and right in INTEGERS and lhs.dtype.is_ptr():
        return semantic.broadcast_impl_value(lhs, rhs)
    return None


def _constant(number: Any, type_: Any) -> Any:
    """The number as a tensor of this type, or None if that is not all there is to it."""
    low, high, classes = LIMITS.get(type_.scalar.name, (0, 0, ()))
    if type(number) not in classes or not (type(number) is float or low <= number <= high):
        return None
    sizes = type_.shape.values if type_.is_block() else 1
    data = np.full(sizes, number or 0, runtime._get_np_dtype(type_.scalar))  # no -0.0, as in Triton
    return tensor(TensorHandle(data, type_.scalar), type_)


def _converted(value: Any, scalar: Any) -> Any:
    if value.dtype.name == scalar.name:
        return value
    data = value.handle.data.astype(runtime._get_np_dtype(scalar))
    return tensor(TensorHandle(data, scalar), value.type.with_element_ty(scalar))


def _broadcast(lhs: Any, rhs: Any) -> Any:
    """Both operands, or None where Triton adds axes, or says why it cannot be."""
    left, right = lhs.shape.values, rhs.shape.values  # of constants, which equal numbers
    if left == right:
        return lhs, rhs
    if not right:
        return lhs, _filled(rhs, lhs.type)
    if not left:
        return _filled(lhs, rhs.type), rhs
    left, right = lhs.type.shape.values, rhs.type.shape.values
    if len(left) != len(right):
        return None
    if any(a != b and 1 not in (a, b) for a, b in zip(left, right, strict=True)):
        return None
    both = list(map(max, left, right))
    return _stretched(lhs, both), _stretched(rhs, both)


def _filled(value: Any, block: Any) -> Any:
    data = np.full(block.shape.values, value.handle.data, runtime._get_np_dtype(value.dtype))
    return tensor(TensorHandle(data, value.dtype), block.with_element_ty(value.dtype))


def _stretched(value: Any, sizes: list[int]) -> Any:
    if value.type.shape.values == sizes:
        return value
    data = np.empty(sizes, value.handle.data.dtype)
    data[...] = value.handle.data
    return tensor(TensorHandle(data, value.dtype), core.block_type(value.dtype, sizes))


def _parse_once() -> None:
    """Parse and rewrite a text of kernels once, whichever files hold it, not each function of each
    file. Their code stays the same.

    Triton 3.7.1 finds the text of each function by inspect, twice, which reads it token by token.
    """

    @functools.lru_cache(maxsize=4)
    def functions_of(text: str) -> dict[int, ast.FunctionDef]:
        functions = (each for each in ast.parse(text).body if isinstance(each, ast.FunctionDef))
        return {min([f.lineno, *(d.lineno for d in f.decorator_list)]): f for f in functions}

    @functools.lru_cache(maxsize=256)
    def rewritten(text: str, line: int, name: str) -> ast.Module | None:
        function = functions_of(text).pop(line, None)  # it is changed below
        if function is None or function.name != name:
            return None
        function.decorator_list = []
        tree = ast.Module([rewriter.ast_transformer.visit(function)], [])
        return ast.fix_missing_locations(tree)

    def rewrite_ast(self: Any) -> Any:
        code = self.fn.__code__
        linecache.checkcache(code.co_filename)
        text = "".join(linecache.getlines(code.co_filename, self.fn.__globals__))
        tree = rewritten(text, code.co_firstlineno, self.fn.__name__)
        if tree is None:
            return rewrite(self)
        self.filename = code.co_filename
        return self._compile_and_exec(tree)

    rewriter = runtime.FunctionRewriter
    rewrite, rewriter.rewrite_ast = rewriter.rewrite_ast, rewrite_ast
