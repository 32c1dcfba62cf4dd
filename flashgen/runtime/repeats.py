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
from flashgen.runtime.call import Call, Causal, Gradients, Saved, Wanted
from flashgen.runtime.kinds import Key, Kinds
from flashgen.runtime.launcher import Launcher
from flashgen.runtime.passes import Passes


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
    """The kinds of plain calls that were met before."""

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
        """What is kept of a call's kind."""
        if not (young := self.kinds.young):  # torch serves, perhaps
            return None
        try:
            key = _key(q, k, v, causal, scale, precision)
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
        """Keep the kind of a call that was made, of q, k, v, its O and its LSE, if it can be, and
        is met for the second time.
        """
        q, k, v, *_ = tensors
        causal, scale, precision = options
        if type(causal) not in (bool, str) or (scale is not None and type(scale) is not float):
            return
        key = _key(q, k, v, causal, scale, precision)
        if self.kinds.meet(key):
            forward = launcher.again(tensors, call.scale, call.diagonal(q, k))
            if forward is not None:
                self.kinds.keep(key, Again(forward, passes, call))


def _key(
    q: Tensor, k: Tensor, v: Tensor, causal: Causal, scale: float | None, precision: str
) -> Key:
    return (
        q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(),
        q.dtype, k.dtype, v.dtype, q.device, k.device, v.device, type(k), type(v),
        causal, type(causal), scale, type(scale), precision, *settings.serving(),
    )  # fmt: skip
