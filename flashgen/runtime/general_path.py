"""Checks, resolves and launches calls that no kept call serves: first ones, and those with
features, under autocast, transformed or traced.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashgen import settings
from flashgen.errors import InvalidArgument
from flashgen.inputs.features import (
    TENSOR_ARGUMENTS,
    WITHOUT_GRADIENT,
    Features,
    all_parts_of,
    check_invariant,
    features_of,
    named_tensors,
    tensors_of,
)
from flashgen.runtime import autograd, torch_modes
from flashgen.runtime.autograd import Passes
from flashgen.runtime.call import (
    Call,
    agree,
    check_is_block_mask,
    check_plain,
    check_tensors,
    holds,
    refuse_scale_gradient,
)
from flashgen.runtime.call_cache import CallCache, CallKey, requires_grad
from flashgen.runtime.kept_calls import Resolved
from flashgen.runtime.launcher import Launcher
from flashgen.runtime.resolver import Resolver, forward_of, spec_of_call


class GeneralPath:
    """Serves the calls of one dispatcher, and keeps those that may occur again."""

    def __init__(self, package: str, resolver: Resolver, passes: Passes, calls: CallCache) -> None:
        self._package = package
        self._resolver = resolver
        self._passes = passes
        self._calls = calls

    def serve(
        self,
        call: Call,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        key: CallKey | None = None,
        return_lse: bool = True,
    ) -> tuple[Tensor, Tensor | None]:
        """O and LSE, as Dispatcher.attention describes them. The features of the call have their
        tensors. key: where to keep the call, if no torch mode is on and its features are numbers,
        of the call or of heads. LSE may be None unless return_lse.
        """
        if key is not None and call.features.only_limits and agree(q, k, v):
            refuse_scale_gradient(call.scale)
            launcher = self._resolver.find(call, q, v)
            return self._launched(launcher, call, q, k, v, key, return_lse)
        check_tensors(q=q, k=k, v=v)
        if torch_modes.traced(q):
            self._refuse_lost_derivatives(call, q, k, v)
            return self._traced(call, *torch_modes.autocast_all(q, k, v))
        check_plain(k=k, v=v, **named_tensors(tensors_of(call.features)))
        return self.serve_eager(call, q, k, v, key=key, return_lse=return_lse)

    def serve_eager(
        self,
        call: Call,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        key: CallKey | None = None,
        return_lse: bool = True,
    ) -> tuple[Tensor, Tensor | None]:
        """serve() of plain tensors, which is not traced."""
        q, k, v = torch_modes.autocast_all(q, k, v)
        self._refuse_lost_derivatives(call, q, k, v)
        packed = call.features.sequences
        if packed is not None and packed.paged and differentiates(call, q, k, v):
            return self._without_backward(call, q, k, v)
        launcher = self._resolver.find_checked(call, q, k, v)
        return self._launched(launcher, call, q, k, v, key, return_lse)

    def _launched(
        self,
        launcher: Launcher | None,
        call: Call,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key: CallKey | None,
        return_lse: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """O and LSE of checked tensors, by a launcher, or None where it is not found yet."""
        if launcher is None:
            spec_of_call(call, q, k, v)
            if self._resolver.left_to_torch(q.device):
                from flashgen.runtime import cpu

                return cpu.attention_by_torch(call, q, k, v, return_lse=return_lse)
            launcher = self._resolver.launcher("forward", call, q, k, v)
        addressed = self._resolver.all_addressed(q, k, v)
        forward = forward_of(call, *addressed)
        if differentiates(call, q, k, v) or torch_modes.transformed():
            bare, tensors = call.parts
            passes = self._passes.forward, self._passes.backward
            o, lse = autograd.differentiable(passes, bare, *addressed, tensors)
        else:
            o, lse = launcher(forward)
        copied = addressed[0] is not q or addressed[1] is not k or addressed[2] is not v
        if key is not None and not copied and holds(call.causal, call.scale):
            bare, _ = call.parts
            resolved = Resolved(launcher, self._passes, bare, forward)
            dense = call.features.sequences is None
            self._calls.keep(key, resolved.dense() if dense else resolved)
        return o, lse

    def _without_backward(
        self, call: Call, q: Tensor, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """O and LSE over pages, of which the backward is refused when it runs."""
        with torch.no_grad():
            o, lse = self.serve_eager(call, q, k, v)
        assert lse is not None  # return_lse
        return autograd.without_backward(o, lse, q, k, v, call.features.sinks)

    def _refuse_lost_derivatives(self, call: Call, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Raise for derivatives that no path of torch can take."""
        features = call.features
        for name, argument in WITHOUT_GRADIENT.items():
            x = getattr(features, name)
            if x is not None and x.requires_grad and torch.is_grad_enabled():
                raise InvalidArgument(f"{argument} has no gradient: detach it")
        refuse_scale_gradient(call.scale)
        if not torch.compiler.is_compiling():
            torch_modes.refuse_tangents(q, k, v, features.bias, features.sinks)

    def _traced(self, call: Call, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """By the registered operators, which are registered here, at the first call."""
        from flashgen.runtime import custom_ops

        causal, features = call.causal, call.features
        if features.block_mask is not None:
            check_is_block_mask(features.block_mask, traced=True)
        word = "none" if causal is False else "bottom_right" if causal is True else causal
        o, lse = custom_ops.attention_forward(
            q, k, v, *all_parts_of(features),
            call.scale, word, call.precision, call.deterministic, self._package,
        )  # fmt: skip
        return o, lse


def asked_features(
    q: Tensor,
    *,
    causal: bool,
    dropout_p: float = 0.0,
    invariant: bool = False,
    draws: bool = True,
    **given: Any,
) -> Features:
    """features_of() the arguments of a call, with a seed for dropout, which is drawn unless `draws`
    is False. FLASHGEN_INVARIANT counts as invariant. Raises InvalidArgument, naming the argument.
    """
    given["invariant"] = check_invariant(invariant) or settings.invariant()
    tensors = {name: given[name] for name in TENSOR_ARGUMENTS if given.get(name) is not None}
    check_tensors(**tensors)
    if (mask := given.get("block_mask")) is not None:
        check_is_block_mask(mask, traced=False)
    rng = None
    if dropout_p != 0.0:
        check_tensors(q=q)
        torch_modes.check_dropout(dropout_p)
        seed = torch.zeros(2, dtype=torch.int64, device=q.device)
        rng = torch_modes.draw_rng(dropout_p, q.device) if draws else seed
    return features_of(causal=causal, dropout_p=dropout_p, rng=rng, **given)


def differentiates(call: Call, q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether autograd records a call."""
    features = call.features
    return torch.is_grad_enabled() and requires_grad(q, k, v, features.bias, features.sinks)
