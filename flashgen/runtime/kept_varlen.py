"""Kept calls of attention_varlen(): one that equals an earlier call is not resolved again.

Its arguments are laid out anew each time, because the ends of sequences are new tensors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashgen import settings
from flashgen.inputs.features import Limits, tensors_of_heads
from flashgen.inputs.packed import places_of
from flashgen.kernels.launch_forward import Forward
from flashgen.runtime import torch_modes
from flashgen.runtime.call import Call
from flashgen.runtime.call_cache import Key, Options, requires_grad
from flashgen.runtime.launcher import Launcher
from flashgen.spec.problem import bucket_of

Packed = tuple[Tensor | None, ...]
"""q, k, v, cu_seqlens of queries and keys, seqused of both, block table and numbers of heads."""

_OF_PLACES = 4
"""How many of these, behind q, k, v and cu_seqlens of queries, say where sequences are."""


Longest = tuple[int, int]
"""max_seqlen_q and max_seqlen_k."""


def varlen_key(tensors: Packed, longest: Longest, options: Options, limits: Limits) -> Key | None:
    """The key of a call; None where none can hold it, or torch modes or gradients are on.

    What differs from step to step of a program is not in it: how many places and sequences there
    are, but that the arguments agree on them, and the longest lengths, but for their bucket.
    """
    q, k, v, cu_q, *others = tensors
    beside, heads = others[:_OF_PLACES], others[_OF_PLACES:]
    max_q, max_k = longest
    if type(max_q) is not int or type(max_k) is not int or max_q < 0 or max_k < 0:
        return None
    try:
        if torch_modes.special(q):  # type: ignore[arg-type]  # q is no None
            return None
        if torch.is_grad_enabled() and requires_grad(*tensors):
            return None
        if k is None or v is None or cu_q is None or (sequences := cu_q.shape[0] - 1) < 0:
            return None
        forms = [
            None if x is None else (x.shape[1:], x.stride(), x.dtype, x.device, type(x))
            for x in tensors
        ]
        agreed = [None if x is None else x.shape[0] - sequences for x in beside]
        of_heads = [
            None if x is None else x.shape[0] - (sequences if x.ndim == 2 else 0) for x in heads
        ]
        places, (_, most) = k.shape[0], _bounded(longest, q, k, beside[-1])
        sizes = places - v.shape[0], bucket_of(most).low, bucket_of(places).low
    except (AttributeError, IndexError, RuntimeError, TypeError):
        return None
    causal, scale, precision = options
    more = sizes, type(causal), type(scale), limits, settings.serving()
    return "varlen", *forms, *agreed, *of_heads, causal, scale, precision, *more


def _bounded(longest: Longest, q: Any, k: Any, table: Tensor | None) -> Longest:
    """The longest lengths, no longer than there are places or slots in a row of the table."""
    most = k.shape[0] if table is None else table.shape[1] * k.shape[1]
    return min(longest[0], q.shape[0]), min(longest[1], most)


def heads_first(q: Tensor, k: Tensor, v: Tensor, *, paged: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Packed q, k and v, or pools of pages, as kernels take them: (batch, heads, seq, head_dim)."""
    q = q.transpose(0, 1)[None]
    if paged:
        return q, k.transpose(1, 2), v.transpose(1, 2)
    return q, k.transpose(0, 1)[None], v.transpose(0, 1)[None]


class KeptVarlen:
    """attention_varlen() for calls that equal an earlier one."""

    __slots__ = ("_diagonal", "_features", "_launcher", "_scale")

    def __init__(
        self, launcher: Launcher, _: object, call: Call, scale: float, diagonal: int | None
    ) -> None:
        self._launcher = launcher
        self._features = call.features
        self._scale = scale
        self._diagonal = diagonal

    def __call__(
        self, longest: Longest, q: Tensor, k: Tensor, v: Tensor, *others: Any
    ) -> tuple[Tensor, Tensor] | None:
        """O and LSE of tensors as Packed has them, of which no sequence is longer; None, with
        nothing launched, where one is the negative of its memory.
        """
        bounds, heads = others[: _OF_PLACES + 1], others[_OF_PLACES + 1 :]
        if q.is_neg() or k.is_neg() or v.is_neg():
            return None
        longest = _bounded(longest, q, k, bounds[-1])
        q, k, v = heads_first(q, k, v, paged=bounds[-1] is not None)
        tensors = *tensors_of_heads(heads), *places_of(*bounds)
        features = self._features.with_tensors(tensors, longest)
        o, lse = self._launcher(
            Forward(
                q=q, k=k, v=v, scale=self._scale, diagonal=self._diagonal,
                features=features,
            )
        )  # fmt: skip
        return o[0].transpose(0, 1), lse[0]
