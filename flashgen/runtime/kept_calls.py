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
from flashgen.kernels.bound_call import zeros
from flashgen.kernels.launch_cache import Combine, Decode
from flashgen.kernels.launch_forward import Forward
from flashgen.runtime.autograd import Passes, by_autograd
from flashgen.runtime.call import Call, Gradients, Saved, Wanted
from flashgen.runtime.call_cache import By, Given, KeptCall, Key, Record, once
from flashgen.runtime.launcher import Launcher
from flashgen.spec.features import PER_HEAD
from flashgen.spec.problem import bucket_of
from flashgen.spec.vocabulary import why_no_gradient

_NAMED = {name: place for place, name in enumerate(("q", "k", "v", *PER_HEAD))}
_AT = [TENSORS.index(name) for name in PER_HEAD]


def attention(launcher: Launcher, passes: Passes, call: Call, first: Forward) -> KeptCall:
    """The kept call of attention, from q, k, v and numbers of heads; first: the one made first."""
    scale, diagonal = first.scale, first.diagonal

    def launches(by: By, q: Tensor, k: Tensor, v: Tensor, *heads: Any) -> tuple[Tensor, Tensor]:
        features = call.features
        if heads:
            features = features.with_tensors(tensors_of_heads(heads))
        found: tuple[Tensor, Tensor] = by(
            launcher,
            Forward(q=q, k=k, v=v, scale=scale, diagonal=diagonal, features=features),
        )
        return found

    def forward(_: Call, q: Tensor, k: Tensor, v: Tensor, tensors: Given) -> Any:
        heads = [tensors[place] for place in _AT] if tensors else ()
        return kept.run(q, k, v, *heads) or plain_launches(kept, q, k, v, *heads)

    def recorder() -> Record:
        record = by_autograd((forward, passes.backward), call)
        if not call.features.per_head:
            return record
        return lambda deterministic, q, k, v, *heads: record(
            deterministic, q, k, v, *tensors_of_heads(heads)
        )

    kept = KeptCall(launches, _NAMED, recorder if _has_gradient(first) else None)
    return kept


def plain_launches(kept: KeptCall, *given: Tensor | None) -> Any:
    """The results of a kept call whose launches cannot be repeated after all."""
    return kept.launches(once, *[None if x is None else x.resolve_neg() for x in given])


Longest = tuple[int, int]
"""max_seqlen_q and max_seqlen_k."""

BOUNDS = "cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "table"
"""What says where sequences are. A packed call gives q, k, v, these, and numbers of heads."""
_PACKED = {name: place for place, name in enumerate(("q", "k", "v", *BOUNDS, *PER_HEAD))}


def kind_of_packed(
    longest: Longest, q: Tensor, k: Tensor, v: Tensor, others: Given, *options: object
) -> Key | None:
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
    return "packed", *forms, *agreed, *of_heads, *sizes, *options, settings.serving()


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
        longest = _bounded(longest, q, k, table)

        def launches(by: By, q: Tensor, k: Tensor, v: Tensor, *others: Any) -> Any:
            cu_q, cu_k, used_q, used_k, pages, *heads = others
            q, k, v = heads_first(q, k, v, paged=table is not None)
            places = places_of(cu_q, cu_k, used_q, used_k, pages, zeros)
            tensors = *tensors_of_heads(heads), *places
            features = self._call.features.with_tensors(tensors, longest)
            o, lse = by(
                self._launcher,
                Forward(
                    q=q, k=k, v=v, scale=self._scale, diagonal=self._diagonal, features=features
                ),
            )
            return o[0].transpose(0, 1), lse[0]

        def recorder() -> Record:
            features = self._call.features
            features = features.with_tensors((None,) * (len(TENSORS) + len(OF_PLACES)), longest)
            passes = functools.partial(_forward, kept), functools.partial(_backward, self._passes)
            return by_autograd(passes, replace(self._call, features=features))

        named = _PACKED | {f"{x}_begins": _PACKED[f"cu_seqlens_{x}"] for x in "qk"}
        for side, used in (("q", used_q), ("k", used_k)):
            end = "cu_seqlens" if used is None else "seqused"
            named[f"{side}_ends"] = _PACKED[f"{end}_{side}"]
        differentiable = table is None and self._differentiable
        kept = KeptCall(launches, named, recorder if differentiable else None)
        return kept


def _forward(kept: KeptCall, _: Call, q: Tensor, k: Tensor, v: Tensor, others: Given) -> Any:
    """The forward pass of packed tensors."""
    return kept.run(q, k, v, *others) or plain_launches(kept, q, k, v, *others)


def _backward(
    passes: Passes, call: Call, saved: Saved, do: Tensor, dlse: Tensor | None, wanted: Wanted
) -> Gradients:
    """The backward pass of packed tensors, of which none but q, k and v has a gradient."""
    others: tuple[Any, ...] = saved.tensors
    bounds, heads = others[: len(BOUNDS)], others[len(BOUNDS) :]
    q, k, v = heads_first(*saved[:3], paged=False)
    o, do = (x.transpose(0, 1)[None] for x in (saved.o, do))
    tensors = *tensors_of_heads(heads), *places_of(*bounds)
    inputs = Saved(q, k, v, o, saved.lse[None], tensors)
    found = passes.backward(call, inputs, do, None if dlse is None else dlse[None], wanted)
    dq, dk, dv = (None if x is None else x[0].transpose(0, 1) for x in found[:3])
    return dq, dk, dv, None, None


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
        by: By, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, table: Tensor | None, *heads: Any
    ) -> tuple[Tensor, Tensor]:
        if paged:
            k, v = k.transpose(1, 2), v.transpose(1, 2)
        own = features.with_tensors(tensors_of_heads(heads)) if heads else features
        cache = Cache(k=k, v=v, lengths=lengths, block_table=table)
        parts = by(decoding, Decode(q=q, cache=cache, features=own, **numbers))
        if whole:
            return parts.o, parts.lse
        found: tuple[Tensor, Tensor] = by(combine, Combine(parts=parts, q=q))
        return found

    return KeptCall(launches, _DECODED)
