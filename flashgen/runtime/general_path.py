"""attention() with features, under autocast, transformed or traced: all but the plain call."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flashgen.errors import InvalidArgument
from flashgen.runtime import autograd, cpu, operators, torch_modes
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
from flashgen.runtime.resolver import Resolver
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


@dataclass(frozen=True, kw_only=True, eq=False)
class Asked:
    """The arguments of a call besides q, k and v, as Dispatcher.attention describes them."""

    causal: Causal = False
    scale: float | None = None
    given: Given = NOTHING_GIVEN
    deterministic: bool = True
    precision: str = "ieee"

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


class Featured:
    """Serves such calls by the kernels that a resolver finds."""

    def __init__(self, package: str, resolver: Resolver, passes: Passes) -> None:
        self._package = package
        self._resolver = resolver
        self._passes = passes

    def attention(self, q: Tensor, k: Tensor, v: Tensor, asked: Asked) -> tuple[Tensor, Tensor]:
        """O and LSE, as Dispatcher.attention describes them."""
        check_tensors(q=q, k=k, v=v)
        given, beside, slopes = asked.given, asked.given.tensors, asked.given.alibi_slopes
        check_tensors(**beside)
        if slopes is not None and slopes.requires_grad and torch.is_grad_enabled():
            raise InvalidArgument("alibi_slopes have no gradient: detach them")
        refuse_scale_gradient(asked.scale)
        if torch_modes.autocasts():
            q, k, v = torch_modes.autocast(q), torch_modes.autocast(k), torch_modes.autocast(v)
        rng = torch_modes.draw_rng(given.dropout_p, q.device)
        if not torch.compiler.is_compiling():
            torch_modes.refuse_tangents(q, k, v, given.bias, given.sinks)
        if given.block_mask is not None:
            check_block_mask(given.block_mask, traced=torch_modes.traced(q))
        if torch_modes.traced(q):
            return self._traced(q, k, v, asked, rng)
        check_plain(k=k, v=v, **beside)
        call, features = asked.call(q), asked.features(rng)
        self.check(q, k, v, call, features)
        if self._resolver.left_to_torch(q.device):
            o, maybe = cpu.attention(q, k, v, call, features=features, return_lse=True)
            assert maybe is not None
            return o, maybe
        differentiated = torch.is_grad_enabled() and any(
            x is not None and x.requires_grad for x in (q, k, v, features.bias, features.sinks)
        )
        if differentiated or torch_modes.transformed():
            q, k, v = self._resolver.all_addressed(q, k, v)
            return autograd.attention(self._passes, call, q, k, v, features)
        return self._passes.forward(q, k, v, call, features)

    def _traced(
        self, q: Tensor, k: Tensor, v: Tensor, asked: Asked, rng: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """By the registered operators."""
        causal, features = asked.causal, asked.features(rng)
        word = "none" if causal is False else "bottom_right" if causal is True else causal
        o, lse = operators.attention_forward(
            q, k, v, *tensors_of(features), *numbers_of(features),
            asked.scale, word, asked.precision, asked.deterministic, self._package,
        )  # fmt: skip
        return o, lse

    def check(self, q: Tensor, k: Tensor, v: Tensor, call: Call, features: Features) -> None:
        """Raise InvalidArgument, naming the argument, unless kernels support this call."""
        if not agree(q, k, v) or not self._resolver.knows(q, v, call, features):
            from_tensors(q, k, v, causal=call.causal, precision=call.precision, features=features)
        elif features is not PLAIN:
            check_features(features, q, k)
