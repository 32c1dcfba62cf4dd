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
from flashgen.kernels.stream_memory import zeros
from flashgen.runtime.autograd import Passes, by_autograd, named
from flashgen.runtime.call import Call, Gradients, Saved, WantedGradients
from flashgen.runtime.call_cache import Apply, CallKey, Given, KeptCall, LaunchRunner
from flashgen.runtime.launcher import Launcher
from flashgen.spec.features import PER_HEAD
from flashgen.spec.problem import bucket_of
from flashgen.spec.vocabulary import why_no_gradient

_NAMED = {name: place for place, name in enumerate(("q", "k", "v", *PER_HEAD))}
_AT = [TENSORS.index(name) for name in PER_HEAD]


def attention(launcher: Launcher, passes: Passes, call: Call, first: Forward) -> KeptCall:
    """The kept call of attention, from q, k, v and numbers of heads; first: the one made first."""
    scale, diagonal = first.scale, first.diagonal

    def launches(
        run: LaunchRunner, q: Tensor, k: Tensor, v: Tensor, *heads: Any
    ) -> tuple[Tensor, Tensor]:
        features = call.features
        if heads:
            features = features.with_tensors(tensors_of_heads(heads))
        found: tuple[Tensor, Tensor] = run(
            launcher,
            Forward(q=q, k=k, v=v, scale=scale, diagonal=diagonal, features=features),
        )
        return found

    def forward(_: Call, q: Tensor, k: Tensor, v: Tensor, tensors: Given) -> Any:
        heads = [tensors[place] for place in _AT] if tensors else ()
        return kept.without_graph(q, k, v, *heads)

    def autograd() -> Apply:
        apply = by_autograd((forward, passes.backward), call)
        if not call.features.per_head:
            return apply
        return lambda deterministic, q, k, v, *heads: apply(
            deterministic, q, k, v, *tensors_of_heads(heads)
        )

    kept = KeptCall(launches, _NAMED, autograd if _has_gradient(first) else None)
    return kept


Longest = tuple[int, int]
"""max_seqlen_q and max_seqlen_k."""

BOUNDS = "cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "table"
"""What says where sequences are. A packed call gives q, k, v, these, and numbers of heads."""
_PACKED = {name: place for place, name in enumerate(("q", "k", "v", *BOUNDS, *PER_HEAD))}


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


def heads_first(q: Tensor, k: Tensor, v: Tensor, *, paged: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Packed q, k and v, or pools of pages, as kernels take them: (batch, heads, seq, head_dim)."""
    q = q.transpose(0, 1)[None]
    if paged:
        return q, k.transpose(1, 2), v.transpose(1, 2)
    return q, k.transpose(0, 1)[None], v.transpose(0, 1)[None]


def packed_again(o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """O (places, heads, head_dim_v) and LSE (heads, places) of what kernels made. The gradients of
    both are views, as they would not be of o[0].
    """
    return o.squeeze(0).transpose(0, 1), lse.squeeze(0)


class Packed:
    """attention_varlen() of calls that are resolved alike."""

    def __init__(self, launcher: Launcher, passes: Passes, call: Call, first: Forward) -> None:
        self._launcher = launcher
        self._passes = passes
        self._call = call
        self._scale, self._diagonal = first.scale, first.diagonal
        self._differentiable = _has_gradient(first)

    def kept(self, longest: Longest, given: Given) -> KeptCall:
        """The kept call of one of them, of which no sequence is longer, from Given."""
        q, k, _, _, _, used_q, used_k, table, *_ = given
        assert q is not None  # its key has it
        assert k is not None
        longest, paged = _bounded(longest, q, k, table), table is not None

        def launches(run: LaunchRunner, q: Tensor, k: Tensor, v: Tensor, *others: Any) -> Any:
            bounds, heads = others[: len(BOUNDS)], others[len(BOUNDS) :]
            tensors = *tensors_of_heads(heads), *places_of(*bounds, zeros=zeros)
            return self._launches(longest, run, *heads_first(q, k, v, paged=paged), tensors)

        named = _PACKED | {f"{x}_begins": _PACKED[f"cu_seqlens_{x}"] for x in "qk"}
        for side, used in (("q", used_q), ("k", used_k)):
            end = "cu_seqlens" if used is None else "seqused"
            named[f"{side}_ends"] = _PACKED[f"{end}_{side}"]
        differentiable = self._differentiable and not paged
        autograd = functools.partial(self._by_autograd, longest)
        return KeptCall(launches, named, autograd if differentiable else None)

    def _launches(
        self, longest: Longest, run: LaunchRunner, q: Tensor, k: Tensor, v: Tensor, tensors: Given
    ) -> tuple[Tensor, Tensor]:
        """O and LSE, packed, of tensors as kernels take them."""
        forward = Forward(
            q=q, k=k, v=v, scale=self._scale, diagonal=self._diagonal,
            features=self._call.features.with_tensors(tensors, longest),
        )  # fmt: skip
        o, lse = run(self._launcher, forward)
        return packed_again(o, lse)

    def _by_autograd(self, longest: Longest) -> Apply:
        """What makes the call with its graph. Where the sequences are is computed once, and saved:
        seqused may change before the backward.
        """

        def launches(run: LaunchRunner, q: Tensor, k: Tensor, v: Tensor, *tensors: Any) -> Any:
            return self._launches(longest, run, *heads_first(q, k, v, paged=False), tensors)

        def forward(_: Call, q: Tensor, k: Tensor, v: Tensor, tensors: Given) -> Any:
            return kept.without_graph(q, k, v, *tensors)

        def with_places(deterministic: bool, q: Tensor, k: Tensor, v: Tensor, *others: Any) -> Any:
            places = places_of(*others[: len(BOUNDS)])
            heads = tensors_of_heads(others[len(BOUNDS) :])
            return apply(deterministic, q, k, v, *heads, *places)

        kept = KeptCall(launches, named())
        bare = self._call.features.with_tensors((None,) * (len(TENSORS) + len(OF_PLACES)), longest)
        passes = forward, functools.partial(_backward, self._passes)
        apply = by_autograd(passes, replace(self._call, features=bare))
        return with_places


def _backward(
    passes: Passes,
    call: Call,
    saved: Saved,
    do: Tensor,
    dlse: Tensor | None,
    wanted: WantedGradients,
) -> Gradients:
    """The backward pass of packed tensors, of which none but q, k and v has a gradient."""
    q, k, v = heads_first(*saved[:3], paged=False)
    inputs = Saved(q, k, v, _as_made(saved.o), saved.lse[None], saved.tensors)
    do, dlse = do.transpose(0, 1)[None], None if dlse is None else dlse[None]
    found = passes.backward(call, inputs, do, dlse, wanted)
    dq, dk, dv = (None if x is None else x[0].transpose(0, 1) for x in found[:3])
    return dq, dk, dv, None, None


def _as_made(o: Tensor) -> Tensor:
    """O of packed_again() in the strides of what a kernel made: they decide what is compiled."""
    (places, heads, head_dim_v), (of_place, of_head, step) = o.shape, o.stride()
    strides = o.numel(), of_head, of_place, step
    return o.as_strided((1, heads, places, head_dim_v), strides)


def _has_gradient(call: Forward) -> bool:
    """Whether there is a backward of a forward."""
    head_dim = max(call.q.shape[3], call.v.shape[3])
    return why_no_gradient(head_dim, call.q.element_size()) is None


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
