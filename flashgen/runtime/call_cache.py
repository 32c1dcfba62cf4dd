"""Kept calls of attention(): one that equals an earlier call takes one look-up.

A launch depends on shapes, strides, dtypes, devices, options and the alignment of the pointers, and
on nothing else. kernels/repeated_launch.py checks the alignment; the rest is the key, with the
types of the options, because 1 is no causal mask although 1 == True. Torch modes are handled before
the look-up.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flashgen import settings
from flashgen.inputs.features import Limits, tensors_of_heads
from flashgen.kernels import repeated_launch
from flashgen.kernels.launch_forward import Forward
from flashgen.runtime import autograd
from flashgen.runtime.autograd import Passes
from flashgen.runtime.call import Call, Causal, Tensors
from flashgen.runtime.launcher import Launcher

MOST = 2048
"""Entries in each half of the cache."""

Key = tuple[object, ...]
Options = tuple[Causal, float | None, str]
"""causal, scale and precision, as the caller gave them."""

OfHeads = tuple[Tensor | None, ...]
"""The numbers of heads of a call, in the order of PER_HEAD."""


class CallCache:
    """An LRU cache of 2 * most kept calls.

    New entries go to the young half. When it is full it becomes the old one, whose entries come
    back when they are used. A hit in the young half needs no bookkeeping, unlike an LRU list.
    """

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._old: dict[Key, Any] = {}
        self.young: dict[Key, Any] = {}

    def __len__(self) -> int:
        return len(self.young) + len(self._old)

    def clear(self) -> None:
        """Remove all entries."""
        self.young, self._old = {}, {}

    def find(self, key: Key | None) -> Any:
        """The kept call of a key; None if there is none, or if no key can hold the call."""
        try:
            found = self.young.get(key)  # type: ignore[arg-type]  # None is no key
            if found is None and (found := self._old.get(key)) is not None:  # type: ignore[arg-type]
                self.keep(key, found)  # type: ignore[arg-type]  # it is in the old half
        except TypeError:  # an option has no hash
            return None
        return found

    def keep(self, key: Key, kept: Any) -> None:
        """Make this the entry of a call. A call whose options have no hash is not kept."""
        if len(self.young) >= self._most:
            self._old, self.young = self.young, {}
        self.young[key] = kept


class KeptAttention:
    """attention() for calls that equal an earlier one; for autograd, their passes.

    The call that leaves it was resolved. The next one is launched with nothing checked or resolved
    again, and binds the launch; all others repeat that.
    """

    __slots__ = ("_again", "_call", "_diagonal", "_launcher", "_passes", "_scale")

    def __init__(
        self, launcher: Launcher, passes: Passes, call: Call, scale: float, diagonal: int | None
    ) -> None:
        self._launcher = launcher
        self._passes = passes
        self._call = call
        self._scale = scale
        self._diagonal = diagonal
        self._again: repeated_launch.ForwardAgain | None = None

    def launched(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        deterministic: bool,
        of_heads: OfHeads = (),
    ) -> tuple[Tensor, Tensor] | None:
        """O and LSE, with their graph where gradients are recorded; None where the alignment or
        the state of torch differs after all, or where gradients are recorded of a call with tensors
        of_heads.
        """
        if of_heads:
            if torch.is_grad_enabled() and requires_grad(q, k, v, *of_heads):
                return None
        elif torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
            call = self._call
            if call.deterministic is not deterministic:
                call = replace(call, deterministic=deterministic)
            return autograd.differentiable((self._forward, self._passes.backward), call, q, k, v)
        again = self._again
        return self._bind(q, k, v, of_heads) if again is None else again(q, k, v, *of_heads)

    def _bind(
        self, q: Tensor, k: Tensor, v: Tensor, of_heads: OfHeads = ()
    ) -> tuple[Tensor, Tensor] | None:
        """Launch, and keep how to do so again; None where a tensor is a negative view."""
        if q.is_neg() or k.is_neg() or v.is_neg():
            return None
        features = self._call.features
        if of_heads:
            features = features.with_tensors(tensors_of_heads(of_heads))
        call = Forward(q=q, k=k, v=v, scale=self._scale, diagonal=self._diagonal, features=features)
        found, self._again = self._launcher.by(call, repeated_launch.bind_forward)
        return found

    def _forward(
        self, call: Call, q: Tensor, k: Tensor, v: Tensor, tensors: Tensors
    ) -> tuple[Tensor, Tensor]:
        """As Passes.forward."""
        again = self._again
        found = self._bind(q, k, v) if again is None else again(q, k, v)
        return found or self._passes.forward(call, q, k, v, tensors)


def attention_key(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: Causal,
    scale: float | None,
    precision: str,
    limits: Limits,
) -> Key | None:
    """The key of a call without features but a window and a softcap; None for what is no tensor, or
    has no strides.
    """
    try:
        return (
            q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(),
            q.dtype, k.dtype, v.dtype, q.device, k.device, v.device, type(k), type(v),
            causal, type(causal), scale, type(scale), precision, limits, settings.serving(),
        )  # fmt: skip
    except (AttributeError, RuntimeError, TypeError):
        return None


def with_heads(key: Key | None, of_heads: OfHeads) -> Key | None:
    """The key of a call with numbers of heads besides; None for what is no tensor."""
    try:
        return None if key is None else (*key, *map(form_of, of_heads))
    except (AttributeError, RuntimeError, TypeError):
        return None


def requires_grad(*tensors: Tensor | None) -> bool:
    """Whether one of them does."""
    return any(x is not None and x.requires_grad for x in tensors)


def form_of(x: Tensor | None) -> Key | None:
    """What a key holds of a tensor that a call may leave out."""
    return None if x is None else (x.shape, x.stride(), x.dtype, x.device, type(x))


def holds(causal: object, scale: object) -> bool:
    """Whether a key may hold these options: their types are those that calls should use."""
    return type(causal) in (bool, str) and (scale is None or type(scale) is float)
