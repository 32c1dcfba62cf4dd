"""Repeats of decode(): calls over a plain cache, contiguous or in pages, that are like one made
before; as repeats.py has them for attention().
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashgen import launch_again, settings
from flashgen.launch_decode import Decode, Parts
from flashgen.runtime import modes
from flashgen.runtime.kinds import Key, Kinds
from flashgen.runtime.launcher import KernelLauncher

Options = tuple[bool | str, float | None, str]
"""causal, scale and precision, as they were given."""


class DecodeRepeats:
    """The kinds of calls that were met before. Tensors are q, k, v, lengths and, of pages, the
    block table, as decode() is given them.
    """

    def __init__(self) -> None:
        self.kinds: Kinds[launch_again.DecodeAgain] = Kinds()

    def run(self, tensors: tuple[Tensor, ...], options: Options) -> tuple[Tensor, Tensor] | None:
        """O and LSE of a call; None, with nothing launched, unless its kind was met and nothing is
        between it and its kernels.
        """
        if not (young := self.kinds.young) or modes.special(tensors[0]):
            return None
        try:
            key = _key(tensors, options)
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
        launchers: tuple[KernelLauncher, KernelLauncher],
        made: tuple[Parts, tuple[Tensor, Tensor]],
    ) -> None:
        """Keep the kind of a call that was made, if it can be, and is met for the second time.
        launchers: those of decode and combine; made: the parts, and what they were merged to.
        """
        causal, scale, _ = options
        if type(causal) not in (bool, str) or (scale is not None and type(scale) is not float):
            return
        key, cache = _key(tensors, options), call.cache
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
        again = launch_again.decode(plan, call, parts, None if parts.whole else merging, result)
        if again is not None:
            self.kinds.keep(key, again)


def _key(tensors: tuple[Tensor, ...], options: Options) -> Key:
    """All that a call's launches follow from. Written out, for a loop takes longer."""
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
