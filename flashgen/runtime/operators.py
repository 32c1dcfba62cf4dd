"""Attention as operators of torch.library: what torch.compile, torch.export, FakeTensor and
torch.func see of it.

Eager calls do not come here: see autograd.py. An operator is the process's, so it is told by name
which generated package serves it. O lies in memory as launch.empty_like_layout says, gradients as
what they are gradients of, that of a bias contiguous; a gradient nobody wants is a tensor of no
element.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from flashgen.kernels.launch import empty_like_layout
from flashgen.runtime import registry, torch_modes
from flashgen.runtime.autograd import refuse_second_derivative
from flashgen.runtime.call import Call, Saved, Scalars, Wanted, features_of
from flashgen.spec.features import UNBOUNDED
from flashgen.spec.from_call import check_scale

_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? slopes, Tensor? rng, Tensor? sinks, "
    "float dropout_p, int window_left, int window_right, float softcap, "
    "float? scale, str causal, str precision, bool deterministic, str package"
)
_FORWARD = f"({_ARGUMENTS}) -> (Tensor o, Tensor lse)"
_BACKWARD = (
    f"(Tensor do, Tensor? dlse, Tensor o, Tensor lse, bool[] wanted, {_ARGUMENTS}) "
    "-> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dsinks)"
)
_TENSORS = 7  # q, k, v, bias, slopes, rng, sinks


@torch.library.custom_op("flashgen::attention_forward", mutates_args=(), schema=_FORWARD)
def attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    slopes: Tensor | None,
    rng: Tensor | None,
    sinks: Tensor | None,
    dropout_p: float,
    window_left: int,
    window_right: int,
    softcap: float,
    scale: float | None,
    causal: str,
    precision: str,
    deterministic: bool,
    package: str,
) -> tuple[Tensor, Tensor]:
    """O and LSE. causal is "none", "top_left" or "bottom_right"; a window of -1 and -1 is none."""
    scalars = _scalars(dropout_p, window_left, window_right, softcap)
    features = features_of(bias, slopes, rng, sinks, scalars)
    call = _call(q, scale, causal, precision, deterministic)
    dispatcher = registry.dispatcher_of(package)
    dispatcher.featured.check(q, k, v, call, features)
    return dispatcher.passes.forward(q, k, v, call, features)


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
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    slopes: Tensor | None,
    rng: Tensor | None,
    sinks: Tensor | None,
    dropout_p: float,
    window_left: int,
    window_right: int,
    softcap: float,
    scale: float | None,
    causal: str,
    precision: str,
    deterministic: bool,
    package: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of q, k, v, bias and sinks, those of `wanted` in this order."""
    scalars = _scalars(dropout_p, window_left, window_right, softcap)
    features = features_of(bias, slopes, rng, sinks, scalars)
    call = _call(q, scale, causal, precision, deterministic)
    saved = Saved(q=q, k=k, v=v, o=o, lse=lse, call=call, features=features)
    asked = Wanted(q=wanted[0], k=wanted[1], v=wanted[2], bias=wanted[3], sinks=wanted[4])
    found = registry.dispatcher_of(package).passes.backward(saved, do, dlse, asked)
    dq, dk, dv, dbias, dsinks = (q.new_empty(0) if x is None else x for x in found)
    return dq, dk, dv, dbias, dsinks


@attention_backward.register_fake
def _(
    do: Tensor,
    dlse: Tensor | None,
    o: Tensor,
    lse: Tensor,
    wanted: Sequence[bool],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    slopes: Tensor | None,
    rng: Tensor | None,
    sinks: Tensor | None,
    *_: Any,
) -> tuple[Tensor, ...]:
    found = [
        empty_like_layout(x, x.shape[3]) if asked else q.new_empty(0)
        for x, asked in zip((q, k, v), wanted, strict=False)
    ]
    dbias = q.new_empty(0)
    if wanted[3] and bias is not None:
        dbias = torch.empty(bias.shape, dtype=bias.dtype, device=bias.device)
    dsinks = q.new_empty(0)
    if wanted[4] and sinks is not None:
        dsinks = torch.empty(sinks.shape, dtype=sinks.dtype, device=sinks.device)
    return (*found, dbias, dsinks)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*output, *inputs[:_TENSORS])
    ctx.options = inputs[_TENSORS:]
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    after = (None,) * len(ctx.options)
    if do is None and dlse is None:
        return (*(None,) * _TENSORS, *after)
    torch_modes.check_gradients(do, dlse)
    o, lse, *tensors = ctx.saved_tensors
    wanted = [*ctx.needs_input_grad[:4], ctx.needs_input_grad[6]]
    do = torch.zeros_like(o) if do is None else do
    found = attention_backward(do, dlse, o, lse, wanted, *tensors, *ctx.options)
    *found, dsinks = (x if asked else None for x, asked in zip(found, wanted, strict=True))
    return (*found, None, None, dsinks, *after)


def _differentiate_twice(ctx: Any, *_: Tensor | None) -> NoReturn:
    refuse_second_derivative()


def _refuse_vmap(*_: Any) -> NoReturn:
    torch_modes.refuse_vmap()


def _scalars(dropout_p: float, left: int, right: int, softcap: float) -> Scalars:
    window = None if left == right == UNBOUNDED else (left, right)
    return Scalars(dropout_p=dropout_p, window=window, softcap=softcap)


def _call(q: Tensor, scale: float | None, causal: str, precision: str, deterministic: bool) -> Call:
    return Call(
        causal=False if causal == "none" else causal,  # type: ignore[arg-type]  # check() judges it
        scale=check_scale(scale, q.shape[3]),
        precision=precision,
        deterministic=deterministic,
    )


attention_forward.register_autograd(_differentiate, setup_context=_save)
attention_backward.register_autograd(_differentiate_twice)
attention_forward.register_vmap(_refuse_vmap)
attention_backward.register_vmap(_refuse_vmap)
