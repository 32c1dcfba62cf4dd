"""Resolves calls of attention(): with features, under autocast, transformed, traced, or plain."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flashgen.errors import InvalidArgument
from flashgen.kernels.launch_forward import Forward
from flashgen.runtime import autograd, cpu, torch_modes
from flashgen.runtime.autograd import Passes
from flashgen.runtime.call import (
    Call,
    Causal,
    agree,
    check_block_mask,
    check_plain,
    check_tensors,
    refuse_scale_gradient,
    scale_of,
)
from flashgen.runtime.call_cache import CallCache, Key, holds, keep_attention
from flashgen.runtime.launcher import Launcher
from flashgen.runtime.resolver import Resolver, addressable
from flashgen.spec.features import (
    NOTHING_GIVEN,
    PLAIN,
    Features,
    Given,
    check_features,
    numbers_of,
    tensors_of,
)
from flashgen.spec.from_call import from_tensors


@dataclass(kw_only=True, eq=False)
class CallArguments:
    """The arguments of a call besides q, k and v, as Dispatcher.attention describes them."""

    causal: Causal = False
    scale: float | None = None
    given: Given = NOTHING_GIVEN
    deterministic: bool = True
    precision: str = "ieee"
    return_lse: bool = True

    def call(self, q: Tensor) -> Call:
        """The options. Raises InvalidArgument for an invalid scale."""
        return Call(
            causal=self.causal,
            scale=scale_of(self.scale, q.shape[-1] if q.ndim else 0),  # its shape is judged later
            precision=self.precision,
            deterministic=self.deterministic,
        )

    def features(self, rng: Tensor | None) -> Features:
        """The features; rng: from draw_rng. Raises InvalidArgument."""
        return self.given.features(causal=self.causal is not False, rng=rng)


class GeneralPath:
    """Resolves calls of attention() that the cache of bound launches does not hold."""

    def __init__(self, package: str, resolver: Resolver, passes: Passes, calls: CallCache) -> None:
        self._package = package
        self._resolver = resolver
        self._passes = passes
        self._calls = calls

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, arguments: CallArguments, key: Key | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """O and LSE, as Dispatcher.attention describes them. key: where to keep the launch, of a
        call without torch modes, and without features but numbers, of the call or of heads. LSE may
        be None unless arguments.return_lse.
        """
        given = arguments.given
        tensors = {} if given is NOTHING_GIVEN else given.tensors
        if key is not None and not tensors and agree(q, k, v):  # plain tensors that fit together
            call = arguments.call(q)
            features = PLAIN if given is NOTHING_GIVEN else arguments.features(None)
            launcher = self._resolver.find(q, v, call, features)
        else:
            check_tensors(q=q, k=k, v=v)
            if torch_modes.autocasts():
                q, k, v = torch_modes.autocast(q), torch_modes.autocast(k), torch_modes.autocast(v)
            rng = self._drawn(q, k, v, arguments, tensors)
            if torch_modes.traced(q):
                return self._traced(q, k, v, arguments, rng)
            check_plain(k=k, v=v, **tensors)
            call, features = arguments.call(q), arguments.features(rng)
            launcher = self._found(q, k, v, call, features)
        if launcher is None:
            from_tensors(q, k, v, causal=call.causal, precision=call.precision, features=features)
            if self._resolver.left_to_torch(q.device):
                return cpu.attention(
                    q, k, v, call, features=features, return_lse=arguments.return_lse
                )
            launcher = self._resolver.launcher("forward", q, k, v, call, features)
        at_hand = addressable(q) and addressable(k) and addressable(v)
        if not at_hand:
            q, k, v = self._resolver.all_addressed(q, k, v)
        forward = Forward(
            q=q, k=k, v=v, scale=call.scale, diagonal=call.diagonal(q, k), features=features
        )
        if self._differentiates(q, k, v, features):
            o, lse = autograd.attention(self._passes, call, q, k, v, features)
        else:
            o, lse = launcher(forward)
        if key is not None and at_hand and holds(arguments.causal, arguments.scale):
            keep_attention(self._calls, key, launcher, self._passes, call, (forward, o, lse))
        return o, lse

    def _drawn(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        arguments: CallArguments,
        tensors: dict[str, Tensor],
    ) -> Tensor | None:
        """The seed and offset of dropout. Raises for what no path of torch can take, where
        `tensors` are those of the arguments.
        """
        given = arguments.given
        check_tensors(**tensors)
        slopes = given.alibi_slopes
        if slopes is not None and slopes.requires_grad and torch.is_grad_enabled():
            raise InvalidArgument("alibi_slopes have no gradient: detach them")
        refuse_scale_gradient(arguments.scale)
        rng = torch_modes.draw_rng(given.dropout_p, q.device)
        if not torch.compiler.is_compiling():
            torch_modes.refuse_tangents(q, k, v, given.bias, given.sinks)
        if given.block_mask is not None:
            check_block_mask(given.block_mask, traced=torch_modes.traced(q))
        return rng

    def _differentiates(self, q: Tensor, k: Tensor, v: Tensor, features: Features) -> bool:
        """Whether autograd records the call, or a transform of torch.func runs it."""
        if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
            return True
        if features is not PLAIN and torch.is_grad_enabled():
            others = (features.bias, features.sinks)
            if any(x is not None and x.requires_grad for x in others):
                return True
        return torch_modes.transformed()

    def _traced(
        self, q: Tensor, k: Tensor, v: Tensor, arguments: CallArguments, rng: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """By the registered operators, which are registered here, at the first call."""
        from flashgen.runtime import custom_ops

        causal, features = arguments.causal, arguments.features(rng)
        word = "none" if causal is False else "bottom_right" if causal is True else causal
        o, lse = custom_ops.attention_forward(
            q, k, v, *tensors_of(features), *numbers_of(features),
            arguments.scale, word, arguments.precision, arguments.deterministic, self._package,
        )  # fmt: skip
        return o, lse

    def check(self, q: Tensor, k: Tensor, v: Tensor, call: Call, features: Features) -> None:
        """Raise InvalidArgument, naming the argument, unless kernels can serve this."""
        if self._found(q, k, v, call, features) is None:
            from_tensors(q, k, v, causal=call.causal, precision=call.precision, features=features)

    def _found(
        self, q: Tensor, k: Tensor, v: Tensor, call: Call, features: Features
    ) -> Launcher | None:
        """The launcher of a call whose spec was resolved before, and whose arguments certainly fit
        together; None where that is not so. Raises InvalidArgument for features that do not fit.
        """
        if not agree(q, k, v):
            return None
        launcher = self._resolver.find(q, v, call, features)
        if launcher is not None and features is not PLAIN:
            check_features(features, q, k)
        return launcher
