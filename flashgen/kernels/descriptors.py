"""Descriptors: the arguments of kernels that load by the TMA unit, instead of tensors.

The part of a descriptor that does not depend on its pointer is made once per layout, and so are
Triton's checks of it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

DESCRIPTOR_ALIGNMENT = 16
"""Bytes to which a descriptor's base and strides must be aligned (CUDA driver API, tensor maps)."""


def takes_descriptor(tensor: Tensor) -> bool:
    """Whether the TMA unit can address this 4-D tensor: aligned base, aligned strides, none of them
    0.
    """
    if tensor.data_ptr() % DESCRIPTOR_ALIGNMENT:
        return False
    strides, size = tensor.stride(), tensor.element_size()
    b, h, s, d = strides
    if d == 1 and b > 0 and h > 0 and s > 0 and (b | h | s) * size % DESCRIPTOR_ALIGNMENT == 0:
        return True
    return _strides_fit(tensor.shape, strides, size)


def _strides_fit(shape: tuple[int, ...], strides: tuple[int, ...], size: int) -> bool:
    if strides[3] != 1:
        return False
    return all(
        length <= 1 or (stride > 0 and stride * size % DESCRIPTOR_ALIGNMENT == 0)
        for length, stride in zip(shape[:3], strides[:3], strict=True)
    )


def take_descriptors(*tensors: Tensor) -> bool:
    """Whether the TMA unit can address all of them."""
    return all(map(takes_descriptor, tensors))


LEAST_PAGE = 8
"""Rows of a swizzled tile that repeat its order, 1,024 bytes: the smallest box of it."""


def take_pages(*pools: Tensor) -> bool:
    """Whether the TMA unit can address pools of pages (pages, kv_heads, page_size, dim) as rows
    that lie at multiples of the row stride: END and _packed_extents say how.
    """
    for pool in pools:
        pages, _, size, _ = pool.shape
        page_step, _, step, _ = pool.stride()
        if size < LEAST_PAGE or step <= 0 or page_step % step:
            return False
        if pages * page_step // step + size > MOST_ROWS:
            return False
    return True


_Layout = tuple[object, ...]
_DESCRIBED: dict[_Layout, Callable[[Tensor], Any]] = {}
_MOST_DESCRIBED = 1024


def descriptor_of(
    tensor: Tensor, rows: int, dim: int, *, gluon: bool = False, packed: bool = False
) -> Any:
    """The descriptor of a tensor (batch, heads, seq, head_dim) in blocks of `rows` by `dim`; gluon:
    with the layout of a block in shared memory, which a kernel of Gluon needs. packed: of sequences
    (1, heads, total, head_dim), as _packed_extents has it. The part that does not depend on the
    pointer is cached, and Triton's checks of it run once.
    """
    shape, strides = tuple(tensor.shape), tensor.stride()
    if packed:  # of any number of places, because its last row is not the descriptor's
        shape, strides = (shape[1], min(shape[2], 2), shape[3]), strides[1:]
    layout = (gluon, packed, shape, strides, tensor.dtype, rows, dim)
    maker = _DESCRIBED.get(layout)
    if maker is None or tensor.data_ptr() % DESCRIPTOR_ALIGNMENT:
        made = _made(tensor, rows, dim, gluon, packed)
        block, of_block = tuple(made.block_shape), getattr(made, "layout", None)
        made.compiled_for = (type(made), tensor.dtype, block, of_block)  # for direct_launch.py
        made.maker = _maker(made)  # for bound_call.py
        if len(_DESCRIBED) >= _MOST_DESCRIBED:
            _DESCRIBED.clear()
        _DESCRIBED[layout] = made.maker
        return made
    return maker(tensor)


def _maker(descriptor: Any) -> Callable[[Tensor], Any]:
    """Makes descriptors like this one of tensors like its own. It keeps no tensor alive."""
    kind, new = type(descriptor), object.__new__
    fields = {name: value for name, value in vars(descriptor).items() if name != "base"}

    def make(tensor: Tensor) -> Any:
        made = new(kind)
        made.__dict__ = {**fields, "base": tensor, "maker": make}
        return made

    return make


def _made(tensor: Tensor, rows: int, dim: int, gluon: bool, packed: bool) -> Any:
    shape, strides = _extents(tensor, dim)
    if packed:
        shape, strides = _packed_extents(shape, strides)
    parts = (tensor, shape, strides, [1] * (len(shape) - 2) + [rows, dim])
    if gluon:
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as OfGluon

        return OfGluon(*parts, gluon_layout(len(shape), dim))
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(*parts)


@functools.cache
def gluon_layout(rank: int, columns: int) -> Any:
    """The layout that signature.gluon_layout_text() names."""
    from triton.experimental.gluon.language import NVMMASharedLayout

    return NVMMASharedLayout(
        swizzle_byte_width=min(2 * columns, 128), element_bitwidth=16, rank=rank
    )


def _extents(tensor: Tensor, dim: int) -> tuple[list[int], list[int]]:
    """Shape and strides of a descriptor."""
    shape = list(tensor.shape)
    # The stride of a dimension of one element means nothing, and may be unaligned: any other will
    # do.
    strides = [
        stride if length > 1 else dim for length, stride in zip(shape, tensor.stride(), strict=True)
    ]
    strides[3] = 1
    return shape, strides


END = 1 << 30
"""Where the rows of packed sequences end in their descriptors; tensors have fewer."""
MOST_ROWS = 0x7FFF0000
"""That a dimension of a descriptor counts."""


def _packed_extents(shape: list[int], strides: list[int]) -> tuple[list[int], list[int]]:
    """Shape and strides of sequences packed in (1, heads, total, head_dim).

    A block at (END, e, h, END - n + i, 0) begins at row i of the sequence of n rows that ends
    before row e: END * (2^34 - step) + e * step + (END - n + i) * step is the place of row
    e - n + i, modulo 2^64 bytes, and rows from n on lie behind the tensor's last, so that they are
    read as 0 and not written. Of Triton's tools/ragged_tma.py. A pool of pages (pages, heads,
    page_size, head_dim) has a sequence in each page.
    """
    _, heads, _, dim = shape
    _, head_step, step, _ = strides
    extents = [MOST_ROWS, MOST_ROWS, heads, END, dim]
    return extents, [(1 << 34) - step, step, head_step, step, 1]
