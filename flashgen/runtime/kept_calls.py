"""The launches of kept calls of attention(), attention_varlen() and decode(). Those of a backward
are in autograd.py.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

from torch import Tensor

from flashgen import settings
from flashgen.inputs.cache import Cache
from flashgen.inputs.features import TENSORS, Features, tensors_of_heads
from flashgen.inputs.packed import OF_PLACES, places_of
from flashgen.kernels.launch_cache import Combine, Decode
from flashgen.kernels.launch_forward import Forward
from flashgen.runtime.autograd import Passes, by_autograd
from flashgen.runtime.call import Call
from flashgen.runtime.call_cache import Apply, CallKey, KeptCall, LaunchRunner
from flashgen.runtime.conventions import BOUNDS, HEADS, PLACES, Convention, Given, bounds
from flashgen.runtime.launcher import Launcher
from flashgen.runtime.likeness import IsLike
from flashgen.spec.features import PER_HEAD
from flashgen.spec.problem import bucket_of
from flashgen.spec.vocabulary import why_no_gradient


class Resolved:
    """Calls of attention() or attention_varlen() that have one launcher. first: one of them."""

    def __init__(self, launcher: Launcher, passes: Passes, call: Call, first: Forward) -> None:
        self._launcher = launcher
        self._passes = passes
        self._call = call
        self._scale, self._diagonal = first.scale, first.diagonal
        head_dim = max(first.q.shape[3], first.v.shape[3])
        self._differentiable = why_no_gradient(head_dim, first.q.element_size()) is None

    def dense(self) -> KeptCall:
        """The kept call of attention(), from q, k, v and numbers of heads."""
        return self._kept(self._call, HEADS)

    def packed(self, longest: Longest, given: Given) -> KeptCall | WithUsed:
        """The kept call of attention_varlen() for sequences no longer than that, from q, k, v,
        BOUNDS and numbers of heads.
        """
        q, k, _, _, _, used_q, used_k, table, *_ = given
        assert q is not None  # its key has it
        assert k is not None
        nothing = (None,) * (len(TENSORS) + len(OF_PLACES))
        features = self._call.features.with_tensors(nothing, _bounded(longest, q, k, table))
        call, paged = replace(self._call, features=features), table is not None
        if not paged and (used_q is not None or used_k is not None):
            return WithUsed(self._kept(call, PLACES))
        return self._kept(call, bounds(paged=paged, used_k=used_k is not None))

    def _kept(self, call: Call, convention: Convention) -> KeptCall:
        launcher, scale, diagonal = self._launcher, self._scale, self._diagonal

        def launches(run: LaunchRunner, q: Tensor, k: Tensor, v: Tensor, *others: Any) -> Any:
            q, k, v = convention.inputs(q, k, v)
            features = call.features_with(convention.tensors(others))
            forward = Forward(q=q, k=k, v=v, scale=scale, diagonal=diagonal, features=features)
            return convention.results(*run(launcher, forward))

        def forward(_: Call, q: Tensor, k: Tensor, v: Tensor, others: Given) -> Any:
            return kept.without_graph(q, k, v, *others)

        def autograd() -> Apply:
            backward = functools.partial(self._passes.backward, convention=convention)
            return by_autograd((forward, backward), call)

        differentiable = self._differentiable and not convention.paged
        kept = KeptCall(launches, convention.named(), autograd if differentiable else None)
        return kept


class WithUsed:
    """A kept call of attention_varlen() with lengths in use, of which the places of sequences are
    computed before: the lengths may change before the backward.
    """

    def __init__(self, kept: KeptCall) -> None:
        self._kept = kept
        self.is_like: IsLike | None = None

    def call(self, deterministic: bool, q: Tensor, k: Tensor, v: Tensor, *others: Any) -> Any:
        """The same of KeptCall, from what attention_varlen() gives."""
        where, heads = others[: len(BOUNDS)], others[len(BOUNDS) :]
        return self._kept.call(deterministic, q, k, v, *places_of(*where), *heads)


Longest = tuple[int, int]
"""max_seqlen_q and max_seqlen_k."""


def kind_of_packed(
    longest: Longest,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    others: Given,
    causal: object,
    scale: object,
    *options: object,
) -> CallKey | None:
    """The key of packed calls that are resolved alike, whatever differs from step to step of a
    program: how many places and sequences there are, but that the arguments agree on them, and the
    longest lengths, but for their bucket. None where none can hold the call.
    """
    (cu_q, *bounds), heads = others[: len(BOUNDS)], others[len(BOUNDS) :]
    try:
        if cu_q is None or (sequences := cu_q.shape[0] - 1) < 0 or min(longest) < 0:
            return None
        forms = [
            None if x is None else (x.shape[1:], x.stride(), x.dtype, x.device, type(x))
            for x in (q, k, v, *others)
        ]
        agreed = [None if x is None else x.shape[0] - sequences for x in bounds]
        of_heads = [
            None if x is None else x.shape[0] - (sequences if x.ndim == 2 else 0) for x in heads
        ]
        places, (_, most) = k.shape[0], _bounded(longest, q, k, bounds[-1])
    except (AttributeError, IndexError, RuntimeError, TypeError):
        return None
    sizes = places - v.shape[0], bucket_of(most).low, bucket_of(places).low
    types = type(causal), type(scale)
    return (
        "attention_varlen, of any sizes", *forms, *agreed, *of_heads, *sizes, causal, scale, *types,
        *options, settings.serving(),
    )  # fmt: skip


def _bounded(longest: Longest, q: Tensor, k: Tensor, table: Tensor | None) -> Longest:
    """The longest lengths, no longer than there are places or slots in a row of the table."""
    most = k.shape[0] if table is None else table.shape[1] * k.shape[1]
    return min(longest[0], q.shape[0]), min(longest[1], most)


_DECODED = {
    name: place for place, name in enumerate(("q", "k", "v", "lengths", "table", *PER_HEAD))
}


def decode(
    decoding: Launcher, combine: Launcher, features: Features, paged: bool, **numbers: Any
) -> KeptCall:
    """The kept call of a decode, from q, k, v, lengths, block table and numbers of heads; numbers:
    those of Decode.
    """
    whole = numbers["splits"] == 1

    def launches(
        run: LaunchRunner,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        lengths: Tensor,
        table: Tensor | None,
        *heads: Any,
    ) -> tuple[Tensor, Tensor]:
        if paged:
            k, v = k.transpose(1, 2), v.transpose(1, 2)
        own = features.with_tensors(tensors_of_heads(heads)) if heads else features
        cache = Cache(k=k, v=v, lengths=lengths, block_table=table)
        parts = run(decoding, Decode(q=q, cache=cache, features=own, **numbers))
        if whole:
            return parts.o, parts.lse
        found: tuple[Tensor, Tensor] = run(combine, Combine(parts=parts, q=q))
        return found

    return KeptCall(launches, _DECODED)
