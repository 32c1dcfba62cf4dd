"""Kept calls of attention_varlen(): one that equals an earlier call is not resolved again.

Its arguments are laid out anew each time, because the ends of sequences are new tensors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashgen import settings
from flashgen.kernels.launch_forward import Forward
from flashgen.runtime import torch_modes
from flashgen.runtime.call import Call, TwoPasses
from flashgen.runtime.call_cache import Key, Options, requires_grad
from flashgen.runtime.launcher import Launcher
from flashgen.spec.features import Limits, tensors_of_heads
from flashgen.spec.packed import places_of

Packed = tuple[Tensor | None, ...]
"""q, k, v, cu_seqlens of queries and keys, seqused of both, block table, sinks and ALiBi slopes."""


def varlen_key(
    tensors: Packed, longest: tuple[int, int], options: Options, limits: Limits
) -> Key | None:
    """The key of a call; None where none can hold it, or torch modes or gradients are on."""
    causal, scale, precision = options
    if any(type(length) is not int for length in longest):
        return None
    try:
        if torch_modes.special(tensors[0]):  # type: ignore[arg-type]  # q is no None
            return None
        if torch.is_grad_enabled() and requires_grad(*tensors):
            return None
        forms = [
            None if x is None else (x.shape, x.stride(), x.dtype, x.device, type(x))
            for x in tensors
        ]
    except (AttributeError, RuntimeError, TypeError):
        return None
    more = longest, type(causal), type(scale), limits, settings.serving()
    return "varlen", *forms, causal, scale, precision, *more


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
        self, launcher: Launcher, _: TwoPasses, call: Call, scale: float, diagonal: int | None
    ) -> None:
        self._launcher = launcher
        self._features = call.features
        self._scale = scale
        self._diagonal = diagonal

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *others: Any
    ) -> tuple[Tensor, Tensor] | None:
        """O and LSE of tensors as Packed has them; None, with nothing launched, where one is the
        negative of its memory.
        """
        *bounds, sinks, slopes = others
        if any(x is not None and x.is_neg() for x in (q, k, v)):
            return None
        q, k, v = heads_first(q, k, v, paged=bounds[-1] is not None)
        places = places_of(*bounds)
        features = self._features.with_tensors((*tensors_of_heads(sinks, slopes), *places))
        o, lse = self._launcher(
            Forward(
                q=q, k=k, v=v, scale=self._scale, diagonal=self._diagonal,
                features=features,
            )
        )  # fmt: skip
        return o[0].transpose(0, 1), lse[0]
