"""Gradients of eager calls: the forward and backward pass, and the torch.autograd.Function over
them.

The Function costs 4 microseconds less than a registered operator. The two passes know nothing of
autograd: the eager function, the registered operators and the refusal of double backward share
them.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from flashgen.errors import InvalidArgument, NotDifferentiable
from flashgen.kernels.launch_forward import Forward
from flashgen.runtime import cpu, torch_modes
from flashgen.runtime.call import (
    NO_SCALARS,
    Call,
    Gradients,
    Saved,
    Scalars,
    TwoPasses,
    Wanted,
    features_of,
    parts_of,
)
from flashgen.runtime.eager.gradients import sink_gradient
from flashgen.runtime.launcher import Launcher
from flashgen.runtime.resolver import Resolver
from flashgen.spec.features import BIAS, PLAIN, SINKS, Features
from flashgen.spec.vocabulary import Direction, why_no_gradient


def attention(
    passes: TwoPasses, call: Call, q: Tensor, k: Tensor, v: Tensor, features: Features
) -> tuple[Tensor, Tensor]:
    """O and LSE, both differentiable with respect to q, k, v, an additive bias and sinks.

    Raises InvalidArgument for head dims that have no backward kernel: now, and not in a backward.
    """
    if reason := why_no_gradient(max(q.shape[3], v.shape[3]), q.element_size()):
        raise InvalidArgument(reason)
    if torch_modes.transformed():
        function: Any = _Transformed
    elif features is PLAIN or features.only_limits:
        scalars = NO_SCALARS if features is PLAIN else Scalars(features=features)
        options = passes, call, scalars  # torch looks at each argument
        return _Plain.apply(options, q, k, v)  # type: ignore[no-any-return, no-untyped-call]
    else:
        function = _Attention
    scalars, tensors = parts_of(features)
    o, lse = function.apply(passes, call, scalars, q, k, v, *tensors)
    return o, lse


def refuse_second_derivative() -> NoReturn:
    """Raise NotDifferentiable: what double backward meets on every road."""
    raise NotDifferentiable(
        "attention has no second derivative: differentiate twice what "
        "torch.nn.attention.sdpa_kernel(SDPBackend.MATH) makes of scaled_dot_product_attention, "
        "or flashgen.runtime.eager.attention.attention"
    )


def without_backward(o: Tensor, lse: Tensor, *inputs: Tensor | None) -> tuple[Tensor, Tensor]:
    """O and LSE of inputs that require gradients, which a backward refuses: of pages no kernel has
    them.
    """
    return _WithoutBackward.apply(o, lse, *inputs)  # type: ignore[no-any-return, no-untyped-call]


class _WithoutBackward(torch.autograd.Function):
    @staticmethod
    def forward(
        _: FunctionCtx, o: Tensor, lse: Tensor, *__: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        return o, lse

    @staticmethod
    def backward(_: Any, *__: Tensor | None) -> NoReturn:
        raise NotDifferentiable(
            "attention over pages, with block_table, has no gradient: "
            "gather the keys of each sequence, and leave block_table out"
        )


Options = tuple[TwoPasses, Call, Scalars]

_FIRST = 6
"""Where TENSORS begin among the arguments of a Function that has features."""


class _Attention(torch.autograd.Function):
    """The forward pass, which saves q, k, v, O and LSE; the backward recomputes P."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        passes: TwoPasses,
        call: Call,
        scalars: Scalars,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *tensors: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        o, lse = passes.forward(q, k, v, call, features_of(scalars, tensors))
        ctx.save_for_backward(q, k, v, o, lse, *tensors)  # type: ignore[arg-type]  # None too
        ctx.options = (passes, call, scalars)  # type: ignore[attr-defined]
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        gradients: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
        if do is None and dlse is None:
            return tuple(gradients)
        places = (3, 4, 5, _FIRST + BIAS, _FIRST + SINKS)
        wanted = Wanted(
            **{
                name: ctx.needs_input_grad[place]
                for name, place in zip(("q", "k", "v", "bias", "sinks"), places, strict=True)
            }
        )
        found = _backward(ctx.options, wanted, do, dlse, ctx.saved_tensors)
        for place, gradient in zip(places, found, strict=True):
            gradients[place] = gradient
        return tuple(gradients)

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> NoReturn:
        torch_modes.refuse_forward_mode()


class _Plain(torch.autograd.Function):
    """The same without tensors of features."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, options: Options, q: Tensor, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor]:
        passes, call, scalars = options
        o, lse = passes.forward(q, k, v, call, scalars.features)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.options = options  # type: ignore[attr-defined]
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        if do is None and dlse is None:
            return (None,) * 4
        _, q, k, v = ctx.needs_input_grad
        wanted = Wanted(q=q, k=k, v=v, bias=False, sinks=False)
        dq, dk, dv, *_ = _backward(ctx.options, wanted, do, dlse, ctx.saved_tensors)
        return None, dq, dk, dv

    jvp = _Attention.jvp


class _Transformed(torch.autograd.Function):
    """The same for torch.func's transforms, which ask for a forward without ctx. Apart, for torch
    takes five times as long to apply such a function.
    """

    @staticmethod
    def forward(passes: TwoPasses, call: Call, scalars: Scalars, *tensors: Any) -> Any:
        q, k, v, *others = tensors
        return passes.forward(q, k, v, call, features_of(scalars, others))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        q, k, v, *features = inputs[3:]
        ctx.save_for_backward(q, k, v, *output, *features)
        ctx.options = inputs[:3]
        ctx.set_materialize_grads(False)

    backward = _Attention.backward
    jvp = _Attention.jvp

    @staticmethod
    def vmap(*_: Any) -> NoReturn:
        torch_modes.refuse_vmap()


class _Gradients(torch.autograd.Function):
    """The backward pass where a graph of it is recorded."""

    @staticmethod
    def forward(*arguments: Any) -> Gradients:
        return _gradients(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Gradients) -> None:
        """Nothing to keep: there is no second derivative."""

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> NoReturn:
        refuse_second_derivative()

    jvp = _Attention.jvp

    @staticmethod
    def vmap(*_: Any) -> NoReturn:
        torch_modes.refuse_vmap()


def _backward(
    options: Options,
    wanted: Wanted,
    do: Tensor | None,
    dlse: Tensor | None,
    saved: tuple[Any, ...],
) -> Gradients:
    """The gradients of what a forward saved, one of do and dlse being a tensor."""
    torch_modes.check_gradients(do, dlse)
    do = torch.zeros_like(saved[3]) if do is None else do
    if torch.is_grad_enabled():  # create_graph: somebody may differentiate once more
        found: Gradients = _Gradients.apply(*options, wanted, do, dlse, *saved)  # type: ignore[no-untyped-call]
        return found
    return _gradients(*options, wanted, do, dlse, *saved)


def _gradients(
    passes: TwoPasses,
    call: Call,
    scalars: Scalars,
    wanted: Wanted,
    do: Tensor,
    dlse: Tensor | None,
    *saved: Any,
) -> Gradients:
    q, k, v, o, lse, *others = saved
    features = features_of(scalars, others)
    forward = Saved(q=q, k=k, v=v, o=o, lse=lse, call=call, features=features)
    return passes.backward(forward, do, dlse, wanted)


class Passes:
    """Forward and backward by the kernels that a resolver finds."""

    def __init__(self, resolver: Resolver) -> None:
        self._resolver = resolver

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, call: Call, features: Features = PLAIN
    ) -> tuple[Tensor, Tensor]:
        """O (B, H, Sq, d_v), laid out in memory as q is, and LSE (B, H, Sq)."""
        if self._resolver.left_to_torch(q.device):
            return cpu.forward(q, k, v, call, features)
        launcher = self._resolver.launcher("forward", q, k, v, call, features)
        q, k, v = self._resolver.all_addressed(q, k, v)
        diagonal = call.diagonal(q, k)
        return launcher(
            Forward(q=q, k=k, v=v, scale=call.scale, diagonal=diagonal, features=features)
        )

    def backward(self, saved: Saved, do: Tensor, dlse: Tensor | None, wanted: Wanted) -> Gradients:
        """The gradients that are wanted, dq, dk and dv laid out in memory as q, k and v are.

        do (B, H, Sq, d_v) and dlse (B, H, Sq) in any strides; dlse None is a gradient of 0.
        """
        q, k, v = saved.q, saved.k, saved.v
        if self._resolver.left_to_torch(q.device):
            return cpu.backward(saved, do, dlse, wanted)
        from flashgen.kernels.launch_backward import Backward, Delta, contiguous_rows

        addressed = self._resolver.addressed
        do = addressed(contiguous_rows(do), "the gradient of O")
        dlse = None if dlse is None else dlse.resolve_neg()
        delta = self._kernel("backward_delta", saved)(Delta(o=saved.o, do=do, dlse=dlse))
        backward = Backward(
            q=addressed(q, "q"),
            k=addressed(k, "k"),
            v=addressed(v, "v"),
            do=do,
            lse=saved.lse,
            delta=delta,
            scale=saved.call.scale,
            diagonal=saved.call.diagonal(q, k),
            features=saved.features,
        )
        dq = dk = dv = dbias = None
        fused = self._fused(saved) if wanted.q and (wanted.k or wanted.v) else None
        if fused is not None:
            dq, dk, dv = fused(backward)
        else:
            if wanted.k or wanted.v:
                dk, dv = self._kernel("backward_dkv", saved)(backward)
            if wanted.q:
                (dq,) = self._kernel("backward_dq", saved)(backward)
        if wanted.bias:
            (dbias,) = self._kernel("backward_dbias", saved)(backward)
            dbias = dbias.contiguous()
        sinks = saved.features.sinks if wanted.sinks else None
        dsinks = None
        if sinks is not None:
            dsinks = sink_gradient(sinks, saved.lse, backward.delta).to(sinks.dtype)
        return dq, dk if wanted.k else None, dv if wanted.v else None, dbias, dsinks

    def _kernel(self, direction: Direction, saved: Saved) -> Launcher:
        return self._resolver.launcher(
            direction, saved.q, saved.k, saved.v, saved.call, saved.features
        )

    def _fused(self, saved: Saved) -> Launcher | None:
        """The fused kernel, which sums dQ in any order, where that is allowed and faster."""
        if saved.call.deterministic or torch.are_deterministic_algorithms_enabled():
            return None
        return self._resolver.fused(saved.q, saved.k, saved.v, saved.call, saved.features)
