"""The types of a kernel's arguments by name, and what Triton may assume of them.

Types are written as Triton's own compile.py takes them: "*bf16:16" is a pointer to bfloat16 that is
a multiple of 16 bytes, "i32:16" an int32 that is a multiple of 16. The order of the arguments is
the kernel's own, its arg_names.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

from flashgen.errors import FlashgenError
from flashgen.kernels.constants import Constant, constants_of
from flashgen.kernels.parameters import given
from flashgen.schedules.config import SCHEDULES, KernelConfig
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.problem import PAGE_SIZE
from flashgen.spec.vocabulary import SHORT_DTYPE

_ALIGNED = ":16"


class Signature(NamedTuple):
    """A kernel's argument types and what Triton may assume of them, as triton.compiler.ASTSource
    takes it.
    """

    types: dict[str, str]
    constexprs: dict[str, Constant]
    attrs: dict[tuple[int, ...], list[list[object]]]


def variants(spec: AttentionSpec) -> tuple[bool, ...]:
    """The values of `whole` for which a kernel of this spec is compiled."""
    return (False, True) if spec.direction in ("decode", "backward_dbias") else (False,)


def compile_signature(
    spec: AttentionSpec, config: KernelConfig, arg_names: Sequence[str], *, whole: bool = False
) -> Signature:
    """The signature that Triton gives a launch with aligned, contiguous tensors; no tensor and no
    GPU is needed. arg_names: those of the kernel.

    Strides are multiples of 16 elements where the head dim is one, and so are the head dims that a
    padded kernel takes. The keys of a bias are contiguous. Lengths, head counts and the diagonal
    are never specialized, and constants are those of the config. whole: a decode whose keys are one
    split, or the gradient of a bias that has all rows and keys; without, both store float32 parts.
    Raises FlashgenError for an argument without a type.
    """
    known = argument_types(spec, config, whole=whole)
    constants = constants_of(spec, config, arg_names)
    kinds = {
        name: "constexpr" if name in constants else _kind_of(name, known) for name in arg_names
    }
    attrs: dict[tuple[int, ...], list[list[object]]] = {}
    words = [name for name, value in constants.items() if isinstance(value, str)]
    for i, (name, kind) in enumerate(kinds.items()):
        if kind.endswith(_ALIGNED):
            attrs[i,] = [["tt.divisibility", 16]]
        elif kind == "constexpr" and (_lists_constants() or name in words):
            attrs[i,] = []
    return Signature(
        types={name: kind.removesuffix(_ALIGNED) for name, kind in kinds.items()},
        constexprs={n: constants.get(n, 1) for n, kind in kinds.items() if kind == "constexpr"},
        attrs=attrs,
    )


@functools.cache
def _lists_constants() -> bool:
    """Whether a launch gives Triton an empty list of attributes for every constant, and an argument
    that is 1, as from 3.7 on: the key of Triton's cache has its text. Before, it gave one for
    constants that are words.
    """
    import triton

    major, minor, *_ = triton.__version__.split(".")
    return (int(major), int(minor)) >= (3, 7)


def _kind_of(name: str, known: dict[str, str]) -> str:
    if name not in known:
        raise FlashgenError(f"kernels/parameters.py has no parameter {name}")
    return known[name]


def argument_types(
    spec: AttentionSpec, config: KernelConfig, *, whole: bool = False
) -> dict[str, str]:
    """The types of the arguments that a kernel is given, by name.

    A decode of several splits writes a float32 O of each; of one split, where `whole`, the result.
    The gradient of a bias that is broadcast over rows or keys is written as float32 parts likewise.
    """
    out = SHORT_DTYPE[spec.dtype]
    element = "fp8e4nv" if spec.fp8 else out
    words = {
        "out": out,
        "element": element,
        "cached": element if spec.kv_dtype == "same" else _byte(config),
        "whole": out if whole else "fp32",
        "by_k": _ALIGNED * (spec.head_dim % 16 == 0),
        "by_v": _ALIGNED * (spec.head_dim_v % 16 == 0),
    }
    types: dict[str, str] = {}
    for each in given(spec, config):
        if each.type == "desc":
            tensor = each.name.removesuffix("_desc")
            types[each.name] = _descriptor(spec, config, tensor, out if tensor == "o" else element)
        else:
            types[each.name] = _CONSTANTS.get(each.type, each.type).format(**words)
    return types


_CONSTANTS = {"i32:1": "constexpr"}
"""Types of arguments that are constants: Triton compiles a kernel anew for a number that is 1."""


def _byte(config: KernelConfig) -> str:
    """The elements of an 8-bit cache: plain bytes, unless the kernel widens them natively."""
    return "fp8e4nv" if config.widening == "native" else "i8"


def descriptor_block(
    spec: AttentionSpec, config: KernelConfig, tensor: str, page_size: int = PAGE_SIZE
) -> tuple[int, int]:
    """Rows and padded dim of the blocks that a kernel loads or stores of a tensor by descriptor.
    Where K and V lie in pages, they depend on the page size.
    """
    return SCHEDULES[config.schedule].block(spec, config, tensor, page_size)


def _descriptor(spec: AttentionSpec, config: KernelConfig, tensor: str, element: str) -> str:
    if config.loads != "descriptor":
        return ""
    # Letter by letter as a launch prints it: Triton's cache key contains this text.
    packed = spec.varlen and tensor != "ds"
    block = [1] * (3 if packed else 2) + [*descriptor_block(spec, config, tensor)]
    layout = f",{gluon_layout_text(len(block), block[-1])}" if config.specialized else ""
    return f"tensordesc<{element}{block}{layout}>"


def gluon_layout_text(rank: int, columns: int) -> str:
    """The layout in shared memory of a block of 16-bit elements, at least 32 of them a row, as
    Gluon prints it: swizzled over 128 bytes, or a row, for the TMA unit and wgmma alike.
    """
    swizzle = min(2 * columns, 128)
    return (
        f"NVMMASharedLayout(swizzle_byte_width={swizzle}, element_bitwidth=16, rank={rank}, "
        "transposed=False, fp4_padded=False, cga_layout=[])"
    )
