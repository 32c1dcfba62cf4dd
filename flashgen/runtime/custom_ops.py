"""Attention as operators of torch.library: what torch.compile, torch.export, FakeTensor and
torch.func see of it.

Eager calls do not come here: see autograd.py. An operator belongs to the process, so an argument
names the package that serves it; autograd.served has its passes. O has the memory layout of q
(kernels/arguments.py, empty_like_layout), gradients that of their tensors; the gradient of a bias
is contiguous, and a gradient that is not wanted is a tensor of no element.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flashgen import paths
from flashgen.errors import GeneratedError
from flashgen.inputs.features import ALL_NUMBERS, ALL_TENSORS, BIAS, SINKS, from_parts
from flashgen.kernels.arguments import empty_like_layout
from flashgen.runtime import autograd, torch_modes
from flashgen.runtime.autograd import Passes, refuse_backward_of_pages, refuse_second_derivative
from flashgen.runtime.call import Call, Saved, Tensors, WantedGradients
from flashgen.runtime.resolver import spec_of_call

_ARGUMENTS = ", ".join(
    (
        *(f"Tensor {name}" for name in "qkv"),
        *(f"Tensor? {name}" for name in ALL_TENSORS),
        *(f"{kind} {name}" for name, kind in ALL_NUMBERS.items()),
        "float? scale, str causal, str precision, bool deterministic, str package",
    )
)
_FORWARD = f"({_ARGUMENTS}) -> (Tensor o, Tensor lse)"
_BACKWARD = (
    f"(Tensor do, Tensor? dlse, Tensor o, Tensor lse, bool[] wanted, {_ARGUMENTS}) "
    "-> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dsinks)"
)
_TENSORS = 3 + len(ALL_TENSORS)
"""How many arguments are tensors."""


@torch.library.custom_op("flashgen::attention_forward", mutates_args=(), schema=_FORWARD)
def attention_forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    """O and LSE of q, k, v, all_parts_of() features, scale, causal, precision, deterministic and
    package.

    causal is "none", "top_left" or "bottom_right"; a window of -1 and -1 is none. Where sequences
    are packed, q, k and v are as kernels take them (inputs/packed.py).
    """
    q, k, v, call, tensors, package = _read(arguments)
    passes = _passes_of(package)
    if passes.resolver.find_checked(call, q, k, v, tensors) is None:
        spec_of_call(call, q, k, v, tensors)  # raises for what does not fit
    return passes.forward(call, q, k, v, tensors)


@attention_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return (
        empty_like_layout(q, v.shape[3]),
        torch.empty(q.shape[:3], dtype=torch.float32, device=q.device),
    )


@torch.library.custom_op("flashgen::attention_backward", mutates_args=(), schema=_BACKWARD)
def attention_backward(
    do: Tensor,
    dlse: Tensor | None,
    o: Tensor,
    lse: Tensor,
    wanted: Sequence[bool],
    *arguments: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of q, k, v, bias and sinks, those of `wanted` in this order."""
    q, k, v, call, tensors, package = _read(arguments)
    if call.features.sequences is not None and tensors[-1] is not None:  # the block table
        refuse_backward_of_pages()
    passes, saved = _passes_of(package), Saved(q, k, v, o, lse, tensors)
    found = passes.backward(call, saved, do, dlse, WantedGradients(*wanted))
    dq, dk, dv, dbias, dsinks = (q.new_empty(0) if x is None else x for x in found)
    return dq, dk, dv, dbias, dsinks


@attention_backward.register_fake
def _(
    do: Tensor,
    dlse: Tensor | None,
    o: Tensor,
    lse: Tensor,
    wanted: Sequence[bool],
    *arguments: Any,
) -> tuple[Tensor, ...]:
    q, k, v, *others = arguments
    bias, sinks = others[BIAS], others[SINKS]
    found = [
        empty_like_layout(x, x.shape[3]) if needed else q.new_empty(0)
        for x, needed in zip((q, k, v), wanted, strict=False)
    ]
    for x, needed in zip((bias, sinks), wanted[3:], strict=True):
        given = needed and x is not None
        like = torch.empty(x.shape, dtype=x.dtype, device=x.device) if given else q.new_empty(0)
        found.append(like)
    return tuple(found)


@torch.library.custom_op(
    "flashgen::sequences_of_rows", mutates_args=(), tags=torch.Tag.cudagraph_unsafe
)
def sequences_of_rows(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Where sequences lie among the tokens of a batch, row by row, of which numbers, int64 (batch,
    seq), ascending in a row, has each token's sequence: bounds, int32 (batch * seq + 1,), behind
    the last of them its end again; and Sequences.sizes, for which the host waits.
    """
    begins = torch.ones_like(numbers, dtype=torch.bool)  # also at the start of each row
    begins[:, 1:] = numbers[:, 1:] != numbers[:, :-1]
    first = begins.flatten().nonzero().flatten().int()
    bounds = first.new_full((numbers.numel() + 1,), numbers.numel())
    bounds[: len(first)] = first
    longest = int(bounds.diff().max()) if numbers.numel() else 0
    return bounds, torch.tensor([len(first), longest])


@sequences_of_rows.register_fake
def _(numbers: Tensor) -> tuple[Tensor, Tensor]:
    bounds = numbers.new_empty((numbers.numel() + 1,), dtype=torch.int32)
    return bounds, torch.empty(2, dtype=torch.int64, device="cpu")


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*output, *inputs[:_TENSORS])
    ctx.options = inputs[_TENSORS:]
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    gradients: list[Tensor | None] = [None] * (_TENSORS + len(ctx.options))
    if do is None and dlse is None:
        return tuple(gradients)
    torch_modes.check_gradients(do, dlse)
    o, lse, *tensors = ctx.saved_tensors
    places = (0, 1, 2, 3 + BIAS, 3 + SINKS)
    wanted = [ctx.needs_input_grad[place] for place in places]
    do = torch.zeros_like(o) if do is None else do
    found = attention_backward(do, dlse, o, lse, wanted, *tensors, *ctx.options)
    for place, x, needed in zip(places, found, wanted, strict=True):
        gradients[place] = x if needed else None
    return tuple(gradients)


def _passes_of(package: str) -> Passes:
    """The passes that a graph names; the current ones where this process has none of that name,
    as after torch.export elsewhere. Raises GeneratedError where nothing serves yet.
    """
    found = autograd.served.get(package) or autograd.served.get(paths.SHIPPED_PACKAGE)
    if found is None:
        raise GeneratedError(f"nothing serves {package} yet: import flashgen.runtime.operators")
    return found


def _read(arguments: tuple[Any, ...]) -> tuple[Tensor, Tensor, Tensor, Call, Tensors, str]:
    """q, k, v, the call, its tensors and the package of an operator's arguments."""
    q, k, v, *tensors = arguments[:_TENSORS]
    *numbers, scale, causal, precision, deterministic, package = arguments[_TENSORS:]
    features = from_parts(tensors, numbers)
    if features.sequences is not None:
        places = q.shape[2], k.shape[2]
        features = replace(features, sequences=features.sequences.sized().within(*places))
    call, of_features = Call(
        causal=False if causal == "none" else causal,  # check() judges it
        scale=scale,
        precision=precision,
        deterministic=deterministic,
        features=features,
    ).parts
    call.scale_of(q)
    return q, k, v, call, of_features, package


attention_forward.register_autograd(_differentiate, setup_context=_save)
attention_backward.register_autograd(refuse_second_derivative)
attention_forward.register_vmap(torch_modes.refuse_vmap)
attention_backward.register_vmap(torch_modes.refuse_vmap)
