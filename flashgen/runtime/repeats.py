"""Repeats: plain calls of attention() that are like one made before, found with one look-up.

A call's launch follows from shapes, strides, dtypes, devices and options; from where its tensors
lie only as far as their alignment goes, which launch_again.py sees to. All of that is the key, the
options with their types: 1 is no causal mask, though True equals it. What a mode of torch may do to
a call is asked before anybody looks here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashgen import launch_again, settings
from flashgen.features import PLAIN, Features
from flashgen.runtime import autograd
from flashgen.runtime.call import PLAIN_TYPES, Call, Causal, Gradients, Saved, Wanted
from flashgen.runtime.launcher import Launcher
from flashgen.runtime.passes import Passes

MOST = 2048
"""Kinds of call in each of the two halves of what is kept: see Repeats."""

Key = tuple[object, ...]


class Again:
    """A kind of call. For autograd, the passes of such calls."""

    __slots__ = ("_backward", "_call", "_forward", "_passes", "_undetermined")

    def __init__(self, forward: launch_again.Forward, passes: Passes, call: Call) -> None:
        self._forward = forward
        self._passes = passes
        self._call = call
        self._undetermined = Call(
            causal=call.causal, scale=call.scale, precision=call.precision, deterministic=False
        )

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, deterministic: bool
    ) -> tuple[Tensor, Tensor] | None:
        """O and LSE, with their graph where gradients are asked for; None where this call is unlike
        the others after all.
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
    """The kinds of call met before: at most 2 * MOST, those used least recently forgotten first.

    They are kept in two halves. What is met goes to the young half; when that is full it becomes
    the old one, whose kinds come back when they are met again. Unlike a list in order of use, this
    costs a call nothing that finds its kind among the young.
    """

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._young: dict[Key, Again] = {}
        self._old: dict[Key, Again] = {}

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def clear(self) -> None:
        """Forget all."""
        self._young, self._old = {}, {}

    def find(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        causal: Causal,
        scale: float | None,
        precision: str,
    ) -> Again | None:
        """The kind of a call, if it was met."""
        if not self._young:
            return None
        try:
            key = _key(q, k, v, causal, scale, precision)
            return self._young.get(key) or self._return(key)
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
        """Keep the kind of a call that was made, of q, k, v, its O and its LSE, if it can be."""
        q, k, v, *_ = tensors
        causal, scale, precision = options
        if type(causal) not in (bool, str) or (scale is not None and type(scale) is not float):
            return
        if not all(type(x) in PLAIN_TYPES for x in (q, k, v)):
            return
        forward = launcher.again(tensors, call.scale, call.diagonal(q, k))
        if forward is not None:
            self._put(_key(q, k, v, causal, scale, precision), Again(forward, passes, call))

    def _return(self, key: Key) -> Again | None:
        """Move a kind from the old half to the young."""
        found = self._old.get(key)
        if found is not None:
            self._put(key, found)
        return found

    def _put(self, key: Key, found: Again) -> None:
        if len(self._young) >= self._most:
            self._old, self._young = self._young, {}
        self._young[key] = found


def _key(
    q: Tensor, k: Tensor, v: Tensor, causal: Causal, scale: float | None, precision: str
) -> Key:
    return (
        q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(),
        q.dtype, k.dtype, v.dtype, q.device, k.device, v.device, type(k), type(v),
        causal, type(causal), scale, type(scale), precision, *settings.serving(),
    )  # fmt: skip
