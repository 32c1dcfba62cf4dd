"""Launches a kernel again for a call that equals an earlier one except for its pointers.

The grid, the scalar arguments, the shapes and strides of the outputs and the fixed parts of
descriptors are reused. The caller guarantees that the calls are alike.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flashgen.inputs.features import Features
from flashgen.kernels.arguments import Arguments, lies_in_eights
from flashgen.kernels.direct_launch import Repeated
from flashgen.kernels.inner_launch import MOST_MAPS
from flashgen.kernels.launch_forward import Forward, prepared
from flashgen.kernels.plan import Plan
from flashgen.schedules.config import SCHEDULES
from flashgen.spec.features import PER_HEAD

if TYPE_CHECKING:
    from flashgen.kernels.launch_cache import Combine, Decode, Parts

ALIGNED = 15
"""Bits that are 0 in the address of every tensor of a call that is launched again: for Triton, and
for descriptors, all of them are then of one class."""

ForwardAgain = Callable[..., tuple[Tensor, Tensor] | None]
"""Takes q, k and v, then the numbers of heads that the call that is repeated had; gives O and LSE,
or None, with nothing launched, where the call must be made as if it were the first: a tensor is not
aligned, or is the negative of its memory, or Repeated.stream() says so."""


def bind_forward(plan: Plan, call: Forward) -> tuple[tuple[Tensor, Tensor], ForwardAgain | None]:
    """O and LSE of a call whose features are numbers, of the call or of heads; and what launches
    the plan again for calls like it, None if that is impossible: nothing was launched, tensors were
    copied, or Triton must launch.
    """
    o, lse, launch = prepared(plan, call)
    if launch is None:
        return (o, lse), None
    blocks, arguments = launch
    q, k, v = call.q, call.k, call.v
    others = _of_heads(call.features)
    if (
        SCHEDULES[plan.config.schedule].state_in_memory
        or not _repeatable(plan, q, k, v, call.scale)
        or _misaligned(q, k, v, *others.values(), o, lse)
        or _copied(others, arguments)
    ):
        plan.start(q, blocks, arguments)
        return (o, lse), None
    names = _DESCRIPTORS if plan.by_descriptor else _POINTERS
    repeated = plan.repeated(q, blocks, arguments, (*names, *others))
    if repeated is None:
        return (o, lse), None
    if not plan.by_descriptor:
        return (o, lse), _by_pointer(repeated, o, lse)
    twins = [arguments[name].twin for name in names[:4]]
    if repeated.encoders is None:
        return (o, lse), _by_pointer(repeated, o, lse, twins)
    return (o, lse), _by_map(repeated, o, lse, twins, repeated.encoders)


_POINTERS = ("q_ptr", "k_ptr", "v_ptr", "o_ptr", "lse_ptr")
_DESCRIPTORS = ("q_desc", "k_desc", "v_desc", "o_desc", "lse_ptr")


def _of_heads(features: Features) -> dict[str, Tensor]:
    """The tensors of a number for each head that a call brings, by argument."""
    named = {f"{name}_ptr": getattr(features, name) for name in PER_HEAD}
    return {name: x for name, x in named.items() if x is not None}


def _copied(given: dict[str, Tensor], arguments: Arguments) -> bool:
    """Whether a kernel reads another tensor than the one that was given."""
    return any(arguments[name].data_ptr() != x.data_ptr() for name, x in given.items())


def _addresses(tensors: Sequence[Tensor | None]) -> list[int] | None:
    """Where those that are given begin; None if a launch cannot be repeated with one of them."""
    given = [x for x in tensors if x is not None]
    found = [x.data_ptr() for x in given]
    if any(address & ALIGNED for address in found) or any(x.is_neg() for x in given):
        return None
    return found


# The launches are closures, whose variables are what Python finds fastest.


def _by_pointer(
    repeated: Repeated, o: Tensor, lse: Tensor, twins: Sequence[Callable[[Tensor], Any]] = ()
) -> ForwardAgain:
    """A launch that takes the addresses of q, k, v, O and LSE. With twins it takes descriptors of
    the first four, from which Triton makes tensor maps.
    """
    stream_of, launch = repeated.stream, repeated.launch
    new_o, new_lse = maker(o), maker(lse)

    def again(q: Tensor, k: Tensor, v: Tensor, *others: Tensor) -> tuple[Tensor, Tensor] | None:
        at_q, at_k, at_v = q.data_ptr(), k.data_ptr(), v.data_ptr()
        if (at_q | at_k | at_v) & ALIGNED:
            return None
        if q.is_neg() or k.is_neg() or v.is_neg():
            return None
        if (at := _addresses(others) if others else ()) is None:
            return None
        if (stream := stream_of()) is None:
            return None
        o, lse = new_o(), new_lse()
        at_o, at_lse = o.data_ptr(), lse.data_ptr()
        if (at_o | at_lse) & ALIGNED:
            return None
        if twins:
            twin_q, twin_k, twin_v, twin_o = twins
            launch(stream, twin_q(q), twin_k(k), twin_v(v), twin_o(o), at_lse, *at)
        else:
            launch(stream, at_q, at_k, at_v, at_o, at_lse, *at)
        return o, lse

    return again


def _by_map(
    repeated: Repeated,
    o: Tensor,
    lse: Tensor,
    twins: Sequence[Callable[[Tensor], Any]],
    encoders: Sequence[Callable[[Any], Any]],
) -> ForwardAgain:
    """A launch that takes tensor maps of q, k, v and O. Each is encoded once for an address."""
    call, fixed, device = repeated.call, repeated.arguments, repeated.device
    current_device, current_stream = repeated.current_device, repeated.current_stream
    undisturbed = repeated.direct.undisturbed
    place_q, place_k, place_v, place_o, place_lse, *other_places = repeated.places
    new_o, new_lse = maker(o), maker(lse)
    encode_q, encode_k, encode_v, encode_o = map(_Maps, twins, encoders)
    of_q, of_k, of_v, of_o = (each.known for each in (encode_q, encode_k, encode_v, encode_o))

    def again(q: Tensor, k: Tensor, v: Tensor, *others: Tensor) -> tuple[Tensor, Tensor] | None:
        at_q, at_k, at_v = q.data_ptr(), k.data_ptr(), v.data_ptr()
        if (at_q | at_k | at_v) & ALIGNED:
            return None
        if q.is_neg() or k.is_neg() or v.is_neg():
            return None
        if (at := _addresses(others) if others else ()) is None:
            return None
        if current_device() != device or not undisturbed():  # as Repeated.stream()
            return None
        o, lse = new_o(), new_lse()
        at_o, at_lse = o.data_ptr(), lse.data_ptr()
        if (at_o | at_lse) & ALIGNED:
            return None
        arguments = fixed.copy()
        arguments[place_q] = of_q.get(at_q) or encode_q(q)
        arguments[place_k] = of_k.get(at_k) or encode_k(k)
        arguments[place_v] = of_v.get(at_v) or encode_v(v)
        arguments[place_o] = of_o.get(at_o) or encode_o(o)
        arguments[place_lse] = at_lse
        if at:
            for place, address in zip(other_places, at, strict=True):
                arguments[place] = address
        call(current_stream(device), arguments)
        return o, lse

    return again


class _Maps:
    """The tensor maps of one argument by address. The layout is fixed, and a map holds nothing else
    of a tensor, so it serves any tensor at its address.
    """

    __slots__ = ("_encode", "_twin", "known")

    def __init__(self, twin: Callable[[Tensor], Any], encode: Callable[[Any], Any]) -> None:
        self._twin = twin
        self._encode = encode
        self.known: dict[int, Any] = {}

    def __call__(self, tensor: Tensor) -> Any:
        """The map of a tensor, which is kept."""
        made = self._encode(self._twin(tensor))
        if len(self.known) >= MOST_MAPS:
            self.known.clear()
        self.known[tensor.data_ptr()] = made
        return made


DecodeAgain = Callable[..., tuple[Tensor, Tensor] | None]
"""Takes q, k, v, lengths, block table and numbers of heads, all behind lengths None as in the call
that is repeated; gives O and LSE, or None as ForwardAgain."""


def bind_decode(plan: Plan, call: Decode) -> tuple[Parts, Repeated | None]:
    """The parts of a call over a plain cache, neither indexed nor padded nor of 8 bits, whose
    features are numbers; and further launches of its plan, as bind_forward() has them.
    """
    from flashgen.kernels.launch_cache import prepared_parts

    parts, launch = prepared_parts(plan, call)
    if launch is None:
        return parts, None
    (blocks, arguments), q, cache = launch, call.q, call.cache
    others = {"lengths_ptr": cache.lengths}
    if cache.block_table is not None:
        others["table_ptr"] = cache.block_table
    others |= _of_heads(call.features)
    tensors = q, cache.k, cache.v
    if (
        not _repeatable(plan, *tensors, call.scale)
        or _misaligned(*tensors, *others.values(), parts.o, parts.lse)
        or _copied(others, arguments)
    ):
        plan.start(q, blocks, arguments)
        return parts, None
    return parts, plan.repeated(q, blocks, arguments, (*_POINTERS, *others))


def bind_combine(plan: Plan, call: Combine) -> tuple[tuple[Tensor, Tensor], Repeated | None]:
    """O and LSE of the parts, and further launches of the plan."""
    from flashgen.kernels.launch_cache import prepared_sums

    o, lse, launch = prepared_sums(call)
    if launch is None:
        return (o, lse), None
    given = "part_o_ptr", "part_lse_ptr", "o_ptr", "lse_ptr"
    return (o, lse), plan.repeated(call.q, *launch, given)


def decode_again(
    split: Repeated, parts: Parts, merge: Repeated | None, result: tuple[Tensor, Tensor]
) -> DecodeAgain:
    """Repeats the launches that left these parts and, unless they were whole, merged them to the
    result.
    """
    new_o, new_lse = maker(parts.o), maker(parts.lse)
    new_result, new_rows = maker(result[0]), maker(result[1])

    def again(
        q: Tensor, k: Tensor, v: Tensor, *others: Tensor | None
    ) -> tuple[Tensor, Tensor] | None:
        at_q, at_k, at_v = q.data_ptr(), k.data_ptr(), v.data_ptr()
        at = []
        bits = at_q | at_k | at_v
        for x in others:
            if x is not None:
                at.append(address := x.data_ptr())
                bits |= address
                if x.is_neg():
                    return None
        if bits & ALIGNED or (stream := split.stream()) is None:
            return None
        if q.is_neg() or k.is_neg() or v.is_neg():
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


def maker(like: Tensor) -> Callable[[], Tensor]:
    """Makes tensors of this one's shape, strides, dtype and device. That device must be current."""
    # What torch's Inductor calls: it takes half the time of torch.empty_strided.
    fast = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
    fast = getattr(fast, "_empty_strided_cuda", None)
    shape, strides = tuple(like.shape), like.stride()
    if like.is_cuda and fast is not None:
        return functools.partial(fast, shape, strides, like.dtype)
    return functools.partial(
        torch.empty_strided, shape, strides, dtype=like.dtype, device=like.device
    )


def _repeatable(plan: Plan, q: Tensor, k: Tensor, v: Tensor, scale: float) -> bool:
    """Whether a launch takes these very tensors: none is copied."""
    return scale > 0 and (not plan.rows_of_eight or all(map(lies_in_eights, (q, k, v))))


def _misaligned(*tensors: Tensor) -> bool:
    """Whether one of them begins where a launch cannot be repeated."""
    bits = 0
    for x in tensors:
        bits |= x.data_ptr()
    return bits & ALIGNED != 0
