"""Launches a kernel again for a call that is like an earlier one in all but where its tensors lie.

What follows from shapes, strides, dtypes and options was worked out for the earlier call, and is
kept: the grid, the numbers among the arguments, the outputs' shapes and strides, what of a
descriptor does not depend on its tensor. Whoever calls vouches that the calls are alike.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flashgen.direct import Repeated
from flashgen.launch import Plan, arguments_of, in_eights, on_device

ALIGNED = 15
"""Bits that are 0 in the address of every tensor of a call that is launched again: for Triton, and
for descriptors, all of them are then of one class."""

_TENSORS = 5
"""Arguments of a forward that lie elsewhere in each call: q, k, v, o and lse."""

Forward = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor] | None]
"""Takes q, k and v; gives O and LSE, or None, with nothing launched, where the call must be made as
if it were the first: a tensor is not aligned, or Repeated.stream() says so."""


def forward(
    plan: Plan, tensors: tuple[Tensor, ...], scale: float, diagonal: int | None
) -> Forward | None:
    """Launches a plan again for calls like this one, which was launched: of q, k, v, its O and its
    LSE. None where that cannot be: there was nothing to launch, tensors were copied for it, or the
    launch is Triton's.
    """
    q, k, v, o, lse = tensors
    if not q.numel() or not k.numel() or not v.numel() or scale <= 0 or plan.fa1:
        return None
    if misaligned(*tensors) or plan.has_features:
        return None
    if plan.rows_of_eight and any(in_eights(x) is not x for x in (q, k, v)):
        return None
    with on_device(q):
        blocks, arguments = arguments_of(plan, q, k, v, o, lse, scale, diagonal)
        repeated = plan.start.repeated(blocks, arguments, first=_TENSORS)
    if repeated is None:
        return None
    twins = [twin_maker(x) for x in arguments[:4]] if plan.by_descriptor else None
    return _forward(repeated, o, lse, twins)


def _forward(
    repeated: Repeated, o: Tensor, lse: Tensor, twins: list[Callable[[Tensor], Any]] | None
) -> Forward:
    """The launch as a closure, whose variables are what Python finds fastest."""
    stream_of, launch, empty = repeated.stream, repeated.launch, torch.empty_strided
    of_o, steps_o, of_lse, steps_lse = o.shape, o.stride(), lse.shape, lse.stride()
    dtype, float32, device = o.dtype, lse.dtype, o.device

    def by_pointer(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor] | None:
        at_q, at_k, at_v = q.data_ptr(), k.data_ptr(), v.data_ptr()
        if (at_q | at_k | at_v) & ALIGNED or (stream := stream_of()) is None:
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


def misaligned(*tensors: Tensor) -> bool:
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
