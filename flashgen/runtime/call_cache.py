"""Caches of resolved calls: a repeated call of attention() or decode() is found with one look-up.

A launch depends on shapes, strides, dtypes, devices, options and the alignment of the pointers, and
on nothing else. Alignment is checked by kernels/repeated_launch.py; the rest is the key, including
the types of the options, because 1 is no causal mask although 1 == True. Torch modes are handled
before the look-up.
"""

from __future__ import annotations

from typing import Generic, TypeVar

import torch
from torch import Tensor

from flashgen import settings
from flashgen.kernels import repeated_launch
from flashgen.kernels.launch_cache import Decode, Parts
from flashgen.kernels.launch_forward import Forward
from flashgen.runtime import autograd, torch_modes
from flashgen.runtime.autograd import Passes
from flashgen.runtime.call import Call, Causal, Gradients, Saved, Wanted
from flashgen.runtime.launcher import Launcher
from flashgen.spec.features import PLAIN, Features

MOST = 2048
"""Kinds in each of the two halves of what is kept."""

Key = tuple[object, ...]
Kept = TypeVar("Kept")


class Kinds(Generic[Kept]):
    """A bounded cache, at most 2 * most entries, evicting the least recently used.

    Entries are stored on their second occurrence and kept in two halves. A hit moves an entry to
    the young half; when that is full it becomes the old half. A hit in the young half needs no
    bookkeeping, unlike an LRU list. None marks a key that occurred once.
    """

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._old: dict[Key, Kept | None] = {}
        self.young: dict[Key, Kept | None] = {}

    def __len__(self) -> int:
        return len(self.young) + len(self._old)

    def clear(self) -> None:
        """Remove all entries."""
        self.young, self._old = {}, {}

    def get(self, key: Key) -> Kept | None:
        """The entry of a key."""
        found = self.young.get(key)
        if found is None and (found := self._old.get(key)) is not None:
            self.keep(key, found)
        return found

    def meet(self, key: Key) -> bool:
        """Whether a key occurred before; records it."""
        if key in self.young or key in self._old:
            return True
        self.keep(key, None)
        return False

    def keep(self, key: Key, kept: Kept | None) -> None:
        """Store the entry of a key."""
        if len(self.young) >= self._most:
            self._old, self.young = self.young, {}
        self.young[key] = kept


class Again:
    """A cached call. For autograd, the passes of such calls."""

    __slots__ = ("_backward", "_call", "_forward", "_passes", "_undetermined")

    def __init__(self, forward: repeated_launch.ForwardAgain, passes: Passes, call: Call) -> None:
        self._forward = forward
        self._passes = passes
        self._call = call
        self._undetermined = Call(
            causal=call.causal, scale=call.scale, precision=call.precision, deterministic=False
        )

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, deterministic: bool
    ) -> tuple[Tensor, Tensor] | None:
        """O and LSE, with their graph if gradients are required; None if this call differs from
        the cached one after all.
        """
        if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
            call = self._call if deterministic else self._undetermined
            return autograd.attention(self, call, q, k, v, PLAIN)
        return self._forward(q, k, v)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, call: Call, features: Features = PLAIN
    ) -> tuple[Tensor, Tensor]:
        """As Passes.forward."""
        return self._forward(q, k, v) or self._passes.forward(q, k, v, call, features)

    def backward(self, saved: Saved, do: Tensor, dlse: Tensor | None, wanted: Wanted) -> Gradients:
        """As Passes.backward."""
        return self._passes.backward(saved, do, dlse, wanted)


class Repeats:
    """The cache of plain calls of attention()."""

    def __init__(self) -> None:
        self.kinds: Kinds[Again] = Kinds()

    def find(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        causal: Causal,
        scale: float | None,
        precision: str,
    ) -> Again | None:
        """The cached entry of a call."""
        if not (young := self.kinds.young):  # torch serves, perhaps
            return None
        try:
            key = _attention_key(q, k, v, causal, scale, precision)
            return young.get(key) or self.kinds.get(key)
        except (AttributeError, RuntimeError, TypeError):
            return None  # no tensors, none with strides, or options that no key can hold

    def keep(
        self,
        launcher: Launcher,
        passes: Passes,
        call: Call,
        tensors: tuple[Tensor, ...],
        options: tuple[Causal, float | None, str],
    ) -> None:
        """Store a call with its q, k, v, O and LSE, if it can be cached and occurs for the
        second time.
        """
        q, k, v, o, lse = tensors
        causal, scale, precision = options
        if type(causal) not in (bool, str) or (scale is not None and type(scale) is not float):
            return
        key = _attention_key(q, k, v, causal, scale, precision)
        if self.kinds.meet(key):
            plan, diagonal = launcher.plan(q, k, v), call.diagonal(q, k)
            made = Forward(q=q, k=k, v=v, scale=call.scale, diagonal=diagonal)
            forward = None if plan is None else repeated_launch.forward(plan, made, o, lse)
            if forward is not None:
                self.kinds.keep(key, Again(forward, passes, call))


def _attention_key(
    q: Tensor, k: Tensor, v: Tensor, causal: Causal, scale: float | None, precision: str
) -> Key:
    return (
        q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(),
        q.dtype, k.dtype, v.dtype, q.device, k.device, v.device, type(k), type(v),
        causal, type(causal), scale, type(scale), precision, *settings.serving(),
    )  # fmt: skip


Options = tuple[bool | str, float | None, str]
"""causal, scale and precision, as they were given."""


class DecodeRepeats:
    """The cache of calls of decode(). Tensors are q, k, v, lengths and optionally the block
    table, as given to decode().
    """

    def __init__(self) -> None:
        self.kinds: Kinds[repeated_launch.DecodeAgain] = Kinds()

    def run(self, tensors: tuple[Tensor, ...], options: Options) -> tuple[Tensor, Tensor] | None:
        """O and LSE of a call; None, with nothing launched, unless the call is cached and no
        torch mode intervenes.
        """
        if not (young := self.kinds.young) or torch_modes.special(tensors[0]):
            return None
        try:
            key = _decode_key(tensors, options)
            again = young.get(key) or self.kinds.get(key)
            if again is None:
                return None
            q, k, v, *_ = tensors
            if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
                return None
        except (AttributeError, RuntimeError, TypeError):
            return None  # no tensors, none with strides, or options that no key can hold
        return again(*tensors)

    def keep(
        self,
        tensors: tuple[Tensor, ...],
        options: Options,
        call: Decode,
        launchers: tuple[Launcher, Launcher],
        made: tuple[Parts, tuple[Tensor, Tensor]],
    ) -> None:
        """Store a call, if it can be cached and occurs for the second time. launchers: those of
        decode and combine; made: the parts, and the merged results.
        """
        causal, scale, _ = options
        if type(causal) not in (bool, str) or (scale is not None and type(scale) is not float):
            return
        key, cache = _decode_key(tensors, options), call.cache
        held = (call.q, cache.k, cache.v, cache.lengths, cache.block_table)
        if any(
            x is None or x.data_ptr() != y.data_ptr() for x, y in zip(held, tensors, strict=False)
        ):
            return  # one was copied
        if not self.kinds.meet(key):
            return
        parts, result = made
        plan, merging = (launcher.plan() for launcher in launchers)
        if plan is None or (merging is None and not parts.whole):
            return
        again = repeated_launch.decode(plan, call, parts, None if parts.whole else merging, result)
        if again is not None:
            self.kinds.keep(key, again)


def _decode_key(tensors: tuple[Tensor, ...], options: Options) -> Key:
    """All that the launches of a call depend on. Written out, because a loop takes longer."""
    q, k, v, lengths, *table = tensors
    causal, scale, precision = options
    key = (
        q.shape, k.shape, v.shape, lengths.shape,
        q.stride(), k.stride(), v.stride(), lengths.stride(),
        q.dtype, k.dtype, v.dtype, lengths.dtype,
        q.device, k.device, v.device, lengths.device,
        type(q), type(k), type(v), type(lengths),
        causal, type(causal), scale, type(scale), precision, *settings.serving(),
    )  # fmt: skip
    if not table:
        return key
    (pages,) = table
    return (*key, pages.shape, pages.stride(), pages.dtype, pages.device, type(pages))
