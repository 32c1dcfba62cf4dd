"""Gradients of eager calls: the forward and backward pass, and the torch.autograd.Function over
them.

The Function costs 4 microseconds less than a registered operator. The two passes know nothing of
autograd: the eager function, the registered operators and the refusal of double backward share
them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from flashgen.errors import InvalidArgument, NotDifferentiable
from flashgen.inputs.features import BIAS, SINKS
from flashgen.runtime import torch_modes
from flashgen.runtime.call import Call, Gradients, Saved, Tensors, TwoPasses, WantedGradients
from flashgen.runtime.call_cache import (
    Apply,
    CallCache,
    CallKey,
    KeptCall,
    LaunchRunner,
    options_of,
)
from flashgen.runtime.conventions import FEATURES, Convention
from flashgen.runtime.launcher import Launcher
from flashgen.runtime.resolver import Resolver, forward_of
from flashgen.spec.vocabulary import OF_DS, Direction, why_no_gradient

if TYPE_CHECKING:
    from flashgen.kernels.ds_runs import DsPlan
    from flashgen.kernels.launch_backward import Backward


served: dict[str, Passes] = {}
"""By package, for operators; those of paths.SHIPPED_PACKAGE are of whichever folder is current."""


def differentiable(
    passes: TwoPasses, call: Call, q: Tensor, k: Tensor, v: Tensor, tensors: Tensors = ()
) -> tuple[Tensor, Tensor]:
    """O and LSE, both differentiable with respect to q, k, v, an additive bias and sinks.

    Raises InvalidArgument for head dims that have no backward kernel: now, and not in a backward.
    """
    if reason := why_no_gradient(max(q.shape[3], v.shape[3]), q.element_size()):
        raise InvalidArgument(reason)
    function: Any = _Transformed if torch_modes.transformed() else _Attention
    o, lse = function.apply((passes, call), q, k, v, *tensors)  # torch looks at each argument
    return o, lse


def by_autograd(passes: TwoPasses, call: Call) -> Apply:
    """differentiable() of calls that equal one for which it did not raise, from `deterministic`, q,
    k, v and tensors. What torch's apply() does before it calls the same: it looks for transforms,
    of which there are none here.
    """
    asked = [(passes, replace(call, deterministic=each)) for each in (False, True)]
    inner: Any = super(torch.autograd.Function, _Attention).apply
    unwrapped = torch_modes.unwrap_if_dead

    def apply(
        deterministic: bool, q: Tensor, k: Tensor, v: Tensor, *tensors: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        given = asked[1 if deterministic else 0], unwrapped(q), unwrapped(k), unwrapped(v)
        others = [None if x is None else unwrapped(x) for x in tensors] if tensors else ()
        found: tuple[Tensor, Tensor] = inner(*given, *others)
        return found

    return apply


def refuse_second_derivative(*_: object) -> NoReturn:
    """Raise NotDifferentiable: what double backward meets on every road."""
    raise NotDifferentiable(
        "attention has no second derivative: differentiate twice what "
        "torch.nn.attention.sdpa_kernel(SDPBackend.MATH) makes of scaled_dot_product_attention, "
        "or flashgen.runtime.eager.attention.attention"
    )


def refuse_backward_of_pages() -> NoReturn:
    """Raise NotDifferentiable: what a backward over pages meets on every road."""
    raise NotDifferentiable(
        "attention over pages, with block_table, has no gradient: "
        "gather the keys of each sequence, and leave block_table out"
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
        refuse_backward_of_pages()


TwoPassCall = tuple[TwoPasses, Call]


class _OnlyBackward(torch.autograd.Function):
    """What transforms of torch ask of a function besides its backward: it has neither."""

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> NoReturn:
        torch_modes.refuse_forward_mode()

    vmap = staticmethod(torch_modes.refuse_vmap)


class _Attention(_OnlyBackward):
    """The forward pass, which saves q, k, v, O and LSE; the backward recomputes P."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        asked: TwoPassCall,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *tensors: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        (forward, _), call = asked
        o, lse = forward(call, q, k, v, tensors)
        ctx.save_for_backward(q, k, v, o, lse, *tensors)  # type: ignore[arg-type]  # None too
        ctx.asked = asked  # type: ignore[attr-defined]
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        needed = ctx.needs_input_grad
        _, q, k, v, *others = needed
        gradients: list[Tensor | None] = [None] * len(others)
        if do is None and dlse is None:
            return None, None, None, None, *gradients
        bias, sinks = (others[BIAS], others[SINKS]) if any(others) else (False, False)
        found = _backward(
            ctx.asked, WantedGradients(q, k, v, bias, sinks), do, dlse, ctx.saved_tensors
        )
        dq, dk, dv, dbias, dsinks = found
        if any(others):  # those of FEATURES
            gradients[BIAS], gradients[SINKS] = dbias, dsinks
        return None, dq, dk, dv, *gradients


class _Transformed(_OnlyBackward):
    """The same for torch.func's transforms, which ask for a forward without ctx. Apart, for torch
    takes five times as long to apply such a function.
    """

    @staticmethod
    def forward(asked: TwoPassCall, q: Tensor, k: Tensor, v: Tensor, *tensors: Any) -> Any:
        (forward, _), call = asked
        return forward(call, q, k, v, tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        asked, q, k, v, *tensors = inputs
        ctx.save_for_backward(q, k, v, *output, *tensors)
        ctx.asked = asked
        ctx.set_materialize_grads(False)

    backward = _Attention.backward


class _Gradients(_OnlyBackward):
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


def _backward(
    asked: TwoPassCall,
    wanted: WantedGradients,
    do: Tensor | None,
    dlse: Tensor | None,
    saved: tuple[Any, ...],
) -> Gradients:
    """The gradients of what a forward saved, one of do and dlse being a tensor."""
    torch_modes.check_gradients(do, dlse)
    do = torch.zeros_like(saved[3]) if do is None else do
    if torch.is_grad_enabled():  # create_graph: somebody may differentiate once more
        found: Gradients = _Gradients.apply(asked, wanted, do, dlse, *saved)  # type: ignore[no-untyped-call]
        return found
    return _gradients(asked, wanted, do, dlse, *saved)


def _gradients(
    asked: TwoPassCall, wanted: WantedGradients, do: Tensor, dlse: Tensor | None, *saved: Any
) -> Gradients:
    (_, backward), call = asked
    q, k, v, o, lse, *tensors = saved
    return backward(call, Saved(q, k, v, o, lse, tuple(tensors)), do, dlse, wanted)


class Passes:
    """Forward and backward by the kernels that a resolver finds. calls: where backwards that may
    occur again are kept; they are not without.
    """

    def __init__(self, resolver: Resolver, calls: CallCache | None = None) -> None:
        self.resolver = resolver
        self._calls = calls

    def forward(
        self, call: Call, q: Tensor, k: Tensor, v: Tensor, tensors: Tensors = ()
    ) -> tuple[Tensor, Tensor]:
        """O (B, H, Sq, d_v), laid out in memory as q is, and LSE (B, H, Sq)."""
        if self.resolver.left_to_torch(q.device):
            from flashgen.runtime import cpu

            return cpu.forward_by_torch(call, q, k, v, tensors)
        launcher = self.resolver.launcher("forward", call, q, k, v, tensors)
        return launcher(forward_of(call, *self.resolver.all_addressed(q, k, v), tensors))

    def backward(
        self,
        call: Call,
        saved: Saved,
        do: Tensor,
        dlse: Tensor | None,
        wanted: WantedGradients,
        convention: Convention = FEATURES,
    ) -> Gradients:
        """The gradients that are wanted, dq, dk and dv laid out in memory as q, k and v are.

        do (B, H, Sq, d_v) and dlse (B, H, Sq) in any strides; dlse None is a gradient of 0. All are
        as a convention has them; by another than FEATURES neither bias nor sinks has a gradient.
        """
        q, k, v, o, lse, tensors = saved
        given: tuple[Any, ...] = (q, k, v, o, lse, do, dlse, *tensors)
        kept = key = None
        if self._calls is not None and (options := _options(call, q, wanted, convention, tensors)):
            kept, key = self._calls.find(options, *given)
        if kept is not None:
            found = kept.without_graph(*given)
        elif self.resolver.left_to_torch(q.device):
            from flashgen.runtime import cpu

            q, k, v, o, lse, do, dlse, *others = convention.saved(*given)
            saved = Saved(q, k, v, o, lse, tuple(others))
            found = cpu.backward_by_torch(call, saved, do, dlse, wanted)
            return convention.gradients(*found)
        else:
            found = self._launched(call, wanted, key, convention, given)
        dq, dk, dv, dbias, delta = found
        dsinks = None
        if wanted.sinks and (sinks := call.features_with(tensors).sinks) is not None:
            from flashgen.runtime.eager.gradients import sink_gradient

            dsinks = sink_gradient(sinks, lse, delta).to(sinks.dtype)
        dbias = None if dbias is None else dbias.contiguous()
        return dq, dk if wanted.k else None, dv if wanted.v else None, dbias, dsinks

    def _launched(
        self,
        call: Call,
        wanted: WantedGradients,
        key: CallKey | None,
        convention: Convention,
        given: tuple[Any, ...],
    ) -> tuple[Any, ...]:
        """The gradients of q, k, v and the bias, and delta, of a call that is kept from now on
        where a key may hold it.
        """

        def launches(run: LaunchRunner, *given: Any) -> tuple[Any, ...]:
            found = self._launches(call, wanted, run, *convention.saved(*given))
            return convention.gradients(*found)

        taken = convention.saved(*given)
        addressed = self._addressed(taken)
        found = self._launches(call, wanted, Launcher.__call__, *addressed)
        copied = any(x is not y for x, y in zip(addressed, taken, strict=True))
        if self._calls is not None and key is not None and not copied:
            named = convention.named("o", "lse", "do", "dlse")
            self._calls.keep(key, KeptCall(launches, named))
        return convention.gradients(*found)

    def _addressed(self, given: tuple[Any, ...]) -> tuple[Any, ...]:
        """The same, copied where no kernel can address it."""
        from flashgen.kernels.launch_backward import contiguous_rows

        q, k, v, o, lse, do, dlse, *tensors = given
        q, k, v = self.resolver.all_addressed(q, k, v)
        do = self.resolver.addressed(contiguous_rows(do), "the gradient of O")
        return q, k, v, o, lse, do, None if dlse is None else dlse.resolve_neg(), *tensors

    def _launches(
        self,
        call: Call,
        wanted: WantedGradients,
        run: LaunchRunner,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        lse: Tensor,
        do: Tensor,
        dlse: Tensor | None,
        *tensors: Tensor | None,
    ) -> tuple[Any, ...]:
        """The gradients of q, k, v and the bias, and delta."""
        from flashgen.kernels.launch_backward import Backward, Delta

        def kernel(direction: Direction) -> Launcher:
            return self.resolver.launcher(direction, call, q, k, v, tensors)

        delta = run(kernel("backward_delta"), Delta(o=o, do=do, dlse=dlse))
        backward = Backward(
            q=q, k=k, v=v, do=do, lse=lse, delta=delta, scale=call.scale_of(q),
            diagonal=call.diagonal(q, k), features=call.features_with(tensors),
        )  # fmt: skip
        dq = dk = dv = dbias = way = plan = None
        if wanted.q and (wanted.k or wanted.v):
            certain = _is_deterministic(call)
            way, plan = self.resolver.way(call, backward, tensors, deterministic=certain)
        if plan is not None:
            kernels = [functools.partial(run, kernel(each)) for each in OF_DS]
            dq, dk, dv = _by_ds(backward, plan, *kernels)
        elif way == "fused":
            dq, dk, dv = run(kernel("backward_fused"), backward)
        else:
            if wanted.k or wanted.v:
                dk, dv = run(kernel("backward_dkv"), backward)
            if wanted.q:
                (dq,) = run(kernel("backward_dq"), backward)
        if wanted.bias:
            (dbias,) = run(kernel("backward_dbias"), backward)
        return dq, dk, dv, dbias, delta


def _by_ds(
    call: Backward, plan: DsPlan, dkv: Callable[[Any], object], dq: Callable[[Any], object]
) -> tuple[Tensor, Tensor, Tensor]:
    """DQ, dK and dV by what launches the kernels of ds."""
    from flashgen.kernels.launch_ds import ds_sizes, gradients_in_runs
    from flashgen.kernels.stream_memory import workspace

    memory = workspace(max(map(ds_sizes(call).run_bytes, plan.runs)), call.q)
    return gradients_in_runs(call, plan.runs, memory, dkv, dq)


def _options(
    call: Call, q: Tensor, wanted: WantedGradients, convention: Convention, tensors: Tensors
) -> CallKey | None:
    """The options of a backward; None where a torch mode is on, or no key can hold the call."""
    if call.options is None or torch_modes.special(q):
        return None
    return options_of(
        "backward", len(tensors), call.causal, call.scale, call.precision, call.options, wanted,
        _is_deterministic(call), convention.name if tensors else None,
    )  # fmt: skip


def _is_deterministic(call: Call) -> bool:
    """Whether dQ must be summed in one order, which the fused kernel does not do."""
    certain = call.deterministic or call.features.invariant
    return certain or torch.are_deterministic_algorithms_enabled()
