"""The cache of bound launches: a repeated call of attention() or decode() takes one look-up.

A launch depends on shapes, strides, dtypes, devices, options and the alignment of the pointers, and
on nothing else. kernels/repeated_launch.py checks the alignment; the rest is the key, with the
types of the options, because 1 is no causal mask although 1 == True. Torch modes are handled before
the look-up.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flashgen import settings
from flashgen.kernels import repeated_launch
from flashgen.kernels.launch_forward import Forward
from flashgen.runtime import autograd
from flashgen.runtime.autograd import Passes
from flashgen.runtime.call import Call, Causal, Gradients, Saved, Wanted
from flashgen.runtime.launcher import Launcher
from flashgen.spec.features import PLAIN, Features, Limits

if TYPE_CHECKING:
    from flashgen.kernels.launch_cache import Decode, Parts

MOST = 2048
"""Entries in each half of the cache."""

Key = tuple[object, ...]
Options = tuple[Causal, float | None, str]
"""causal, scale and precision, as the caller gave them."""


class CallCache:
    """An LRU cache of 2 * most entries; a call gets its entry when it occurs for the second time.

    New entries go to the young half. When it is full it becomes the old one, whose entries come
    back when they are used. A hit in the young half needs no bookkeeping, unlike an LRU list. The
    entry of a call that occurred once is None.
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
        """The bound launch of a call; None if there is none, or if no key can hold the call."""
        try:
            found = self.young.get(key)  # type: ignore[arg-type]  # None is no key
            if found is None and (found := self._old.get(key)) is not None:  # type: ignore[arg-type]
                self.keep(key, found)  # type: ignore[arg-type]  # it is in the old half
        except TypeError:  # an option has no hash
            return None
        return found

    def occurred(self, key: Key) -> bool:
        """Whether a call occurred before. From now on it did."""
        if key in self.young or key in self._old:
            return True
        self.keep(key, None)
        return False

    def keep(self, key: Key, bound: Any) -> None:
        """Make this the entry of a call."""
        if len(self.young) >= self._most:
            self._old, self.young = self.young, {}
        self.young[key] = bound


class BoundAttention:
    """attention() for calls that equal an earlier one; for autograd, their passes."""

    __slots__ = ("_call", "_features", "_forward", "_passes")

    def __init__(
        self,
        forward: repeated_launch.ForwardAgain,
        passes: Passes,
        call: Call,
        features: Features,
    ) -> None:
        self._forward = forward
        self._passes = passes
        self._call = call
        self._features = features

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        deterministic: bool,
        of_heads: tuple[Tensor, ...] = (),
    ) -> tuple[Tensor, Tensor] | None:
        """O and LSE, with their graph where gradients are recorded; None where the alignment or
        the state of torch differs after all, or where gradients are recorded of a call with tensors
        of_heads: sinks, ALiBi slopes.
        """
        if of_heads:
            if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, *of_heads)):
                return None
            return self._forward(q, k, v, *of_heads)
        if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
            call = self._call
            if call.deterministic is not deterministic:
                call = replace(call, deterministic=deterministic)
            return autograd.attention(self, call, q, k, v, self._features)
        return self._forward(q, k, v)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, call: Call, features: Features = PLAIN
    ) -> tuple[Tensor, Tensor]:
        """As Passes.forward."""
        return self._forward(q, k, v) or self._passes.forward(q, k, v, call, features)

    def backward(self, saved: Saved, do: Tensor, dlse: Tensor | None, wanted: Wanted) -> Gradients:
        """As Passes.backward."""
        return self._passes.backward(saved, do, dlse, wanted)


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


def with_heads(key: Key | None, sinks: Tensor | None, slopes: Tensor | None) -> Key | None:
    """The key of a call with sinks and ALiBi slopes besides; None for what is no tensor."""
    try:
        return None if key is None else (*key, _form(sinks), _form(slopes))
    except (AttributeError, RuntimeError, TypeError):
        return None


def _form(x: Tensor | None) -> Key | None:
    """What a key holds of a tensor that a call may leave out."""
    return None if x is None else (x.shape, x.stride(), x.dtype, x.device, type(x))


def keep_attention(
    calls: CallCache,
    key: Key,
    launcher: Launcher,
    passes: Passes,
    call: Call,
    made: tuple[Forward, Tensor, Tensor],
) -> None:
    """Bind the launch of a call that gave this O and LSE, if it can be and occurs again."""
    if not calls.occurred(key):
        return
    forward, o, lse = made
    plan = launcher.plan(*forward.loaded)
    bound = None if plan is None else repeated_launch.forward(plan, forward, o, lse)
    if bound is not None:
        calls.keep(key, BoundAttention(bound, passes, call, forward.features))


Decoded = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]
"""q, k, v, lengths, block table, sinks and ALiBi slopes of a call of decode()."""


def decode_key(tensors: Decoded, options: Options, limits: Limits) -> Key | None:
    """The key of a call; None for what is no tensor, or has no strides. Written out, because a loop
    takes longer.
    """
    try:
        q, k, v, lengths, *others = tensors
        causal, scale, precision = options
        key: Key = (
            q.shape, k.shape, v.shape, lengths.shape,
            q.stride(), k.stride(), v.stride(), lengths.stride(),
            q.dtype, k.dtype, v.dtype, lengths.dtype,
            q.device, k.device, v.device, lengths.device,
            type(q), type(k), type(v), type(lengths),
            causal, type(causal), scale, type(scale), precision, limits, settings.serving(),
        )  # fmt: skip
        return (*key, *map(_form, others))
    except (AttributeError, RuntimeError, TypeError):
        return None


def keep_decode(
    calls: CallCache,
    key: Key,
    tensors: Decoded,
    call: Decode,
    launchers: tuple[Launcher, Launcher],
    made: tuple[Parts, tuple[Tensor, Tensor]],
) -> None:
    """Bind the launches of a call if they can be and the call occurs again. launchers: those of
    decode and combine; made: the parts, and what they were merged to.
    """
    cache, features = call.cache, call.features
    held = (
        call.q, cache.k, cache.v, cache.lengths, cache.block_table, features.sinks, features.slopes,
    )  # fmt: skip
    if any(_moved(x, y) for x, y in zip(tensors, held, strict=True)):
        return
    if not calls.occurred(key):
        return
    parts, result = made
    plan, merging = (launcher.plan() for launcher in launchers)
    if plan is None or (merging is None and not parts.whole):
        return
    bound = repeated_launch.decode(plan, call, parts, None if parts.whole else merging, result)
    if bound is not None:
        calls.keep(key, bound)


def _moved(given: Tensor | None, held: Tensor | None) -> bool:
    """Whether a kernel reads a copy of what was given."""
    if given is None or held is None:
        return given is not held
    return given.data_ptr() != held.data_ptr()


def holds(causal: object, scale: object) -> bool:
    """Whether a key may hold these options: their types are those that calls should use."""
    return type(causal) in (bool, str) and (scale is None or type(scale) is float)
