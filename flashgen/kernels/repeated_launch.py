"""Launches a kernel again for a call that equals an earlier one except for its pointers.

The grid, the scalar arguments, the shapes and strides of the outputs and the fixed parts of
descriptors are reused. The caller guarantees that the calls are alike.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flashgen.kernels.arguments import Arguments, lies_in_eights
from flashgen.kernels.direct_launch import Repeated
from flashgen.kernels.launch_cache import Decode, Parts, combine_arguments, decode_arguments
from flashgen.kernels.launch_forward import Forward, forward_arguments
from flashgen.kernels.plan import Plan, on_device

ALIGNED = 15
"""Bits that are 0 in the address of every tensor of a call that is launched again: for Triton, and
for descriptors, all of them are then of one class."""

ForwardAgain = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor] | None]
"""Takes q, k and v; gives O and LSE, or None, with nothing launched, where the call must be made as
if it were the first: a tensor is not aligned, or is the negative of its memory, or
Repeated.stream() says so."""


def forward(plan: Plan, call: Forward, o: Tensor, lse: Tensor) -> ForwardAgain | None:
    """Launches a plan again for calls like this one, which it launched with this O and LSE.

    None if that is impossible: nothing was launched, tensors were copied, or Triton must launch.
    """
    q, k, v = call.q, call.k, call.v
    if plan.config.schedule == "fa1" or plan.featured:
        return None
    if not _repeatable(plan, q, k, v, call.scale) or _misaligned(q, k, v, o, lse):
        return None
    kind = "desc" if plan.by_descriptor else "ptr"
    names = [f"{x}_{kind}" for x in "qkvo"]
    blocks, arguments = forward_arguments(plan, call, o, lse)
    repeated = _repeated(plan, q, blocks, arguments, [*names, "lse_ptr"])
    if repeated is None:
        return None
    twins = [twin_maker(arguments[name]) for name in names] if plan.by_descriptor else None
    return _forward(repeated, o, lse, twins)


def _repeated(
    plan: Plan, beside: Tensor, blocks: int, arguments: Arguments, given: list[str]
) -> Repeated | None:
    """The launch of a plan, with the arguments of these names given anew each time."""
    places = [plan.names.index(name) for name in given]
    with on_device(beside):
        return plan.direct.repeated(blocks, plan.in_order(arguments), places)


def _forward(
    repeated: Repeated, o: Tensor, lse: Tensor, twins: list[Callable[[Tensor], Any]] | None
) -> ForwardAgain:
    """The launch as a closure, whose variables are what Python finds fastest."""
    stream_of, launch, empty = repeated.stream, repeated.launch, torch.empty_strided
    of_o, steps_o, of_lse, steps_lse = o.shape, o.stride(), lse.shape, lse.stride()
    dtype, float32, device = o.dtype, lse.dtype, o.device

    def by_pointer(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor] | None:
        at_q, at_k, at_v = q.data_ptr(), k.data_ptr(), v.data_ptr()
        if (at_q | at_k | at_v) & ALIGNED or q.is_neg() or k.is_neg() or v.is_neg():
            return None
        if (stream := stream_of()) is None:
            return None
        o = empty(of_o, steps_o, dtype=dtype, device=device)
        lse = empty(of_lse, steps_lse, dtype=float32, device=device)
        at_o, at_lse = o.data_ptr(), lse.data_ptr()
        if (at_o | at_lse) & ALIGNED:
            return None
        launch(stream, at_q, at_k, at_v, at_o, at_lse)
        return o, lse

    if twins is None:
        return by_pointer
    twin_q, twin_k, twin_v, twin_o = twins

    def by_descriptor(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor] | None:
        if (q.data_ptr() | k.data_ptr() | v.data_ptr()) & ALIGNED:
            return None
        if q.is_neg() or k.is_neg() or v.is_neg():
            return None
        if (stream := stream_of()) is None:
            return None
        o = empty(of_o, steps_o, dtype=dtype, device=device)
        lse = empty(of_lse, steps_lse, dtype=float32, device=device)
        at_lse = lse.data_ptr()
        if (o.data_ptr() | at_lse) & ALIGNED:
            return None
        launch(stream, twin_q(q), twin_k(k), twin_v(v), twin_o(o), at_lse)
        return o, lse

    return by_descriptor


DecodeAgain = Callable[..., tuple[Tensor, Tensor] | None]
"""Takes q, k, v, lengths and, for pages, the block table; gives O and LSE, or None as
ForwardAgain."""


def decode(
    plan: Plan, call: Decode, parts: Parts, merging: Plan | None, result: tuple[Tensor, Tensor]
) -> DecodeAgain | None:
    """Launches decode again for calls like this one, which left these parts; merging: the plan that
    merged them to the result, None where they were whole. None as forward() has it, or because the
    cache is not plain: of another dtype, indexed, padded on the left.
    """
    q, cache = call.q, call.cache
    if plan.featured or any(x is not None for x in (cache.rows, cache.leftpad, cache.k_scale)):
        return None
    if not _repeatable(plan, q, cache.k, cache.v, call.scale):
        return None
    table = () if cache.block_table is None else (cache.block_table,)
    if _misaligned(q, cache.k, cache.v, cache.lengths, *table, parts.o, parts.lse, *result):
        return None
    given = ["q_ptr", "k_ptr", "v_ptr", "o_ptr", "lse_ptr", "lengths_ptr"]
    given += ["table_ptr"] * len(table)
    split, merge = _repeated(plan, q, *decode_arguments(plan, call, parts), given), None
    if merging is not None:
        given = ["part_o_ptr", "part_lse_ptr", "o_ptr", "lse_ptr"]
        merge = _repeated(merging, q, *combine_arguments(parts, *result), given)
    if split is None or (merging is not None and merge is None):
        return None
    return _decode(split, parts, merge, result)


def _decode(
    split: Repeated, parts: Parts, merge: Repeated | None, result: tuple[Tensor, Tensor]
) -> DecodeAgain:
    new_o, new_lse = _maker(parts.o), _maker(parts.lse)
    new_result, new_rows = _maker(result[0]), _maker(result[1])

    def again(q: Tensor, k: Tensor, v: Tensor, *others: Tensor) -> tuple[Tensor, Tensor] | None:
        at_q, at_k, at_v = q.data_ptr(), k.data_ptr(), v.data_ptr()
        at = [x.data_ptr() for x in others]
        if (at_q | at_k | at_v | at[0] | at[-1]) & ALIGNED or (stream := split.stream()) is None:
            return None
        if q.is_neg() or k.is_neg() or v.is_neg() or others[0].is_neg() or others[-1].is_neg():
            return None
        o, lse = new_o(), new_lse()
        at_o, at_lse = o.data_ptr(), lse.data_ptr()
        if (at_o | at_lse) & ALIGNED:
            return None
        if merge is None:
            split.launch(stream, at_q, at_k, at_v, at_o, at_lse, *at)
            return o, lse
        merged, rows = new_result(), new_rows()
        at_merged, at_rows = merged.data_ptr(), rows.data_ptr()
        if (at_merged | at_rows) & ALIGNED or merge.stream() is None:
            return None
        split.launch(stream, at_q, at_k, at_v, at_o, at_lse, *at)
        merge.launch(stream, at_o, at_lse, at_merged, at_rows)
        return merged, rows

    return again


def _maker(like: Tensor) -> Callable[[], Tensor]:
    """Makes tensors of this one's shape, strides, dtype and device."""
    return functools.partial(
        torch.empty_strided, like.shape, like.stride(), dtype=like.dtype, device=like.device
    )


def _repeatable(plan: Plan, q: Tensor, k: Tensor, v: Tensor, scale: float) -> bool:
    """Whether a launch was made, and of these very tensors: none is empty, and none was copied."""
    return (
        plan.direct.undisturbed()
        and scale > 0
        and all(x.numel() > 0 for x in (q, k, v))
        and (not plan.rows_of_eight or all(map(lies_in_eights, (q, k, v))))
    )


def _misaligned(*tensors: Tensor) -> bool:
    """Whether one of them begins where a launch cannot be repeated."""
    return any(x.data_ptr() & ALIGNED for x in tensors)


def twin_maker(descriptor: Any) -> Callable[[Tensor], Any]:
    """Makes descriptors like this one of tensors like its own. It keeps no tensor alive."""
    kind, new = type(descriptor), object.__new__
    fields = {name: value for name, value in vars(descriptor).items() if name != "base"}

    def twin(tensor: Tensor) -> Any:
        made = new(kind)
        made.__dict__ = {**fields, "base": tensor}
        return made

    return twin
