"""Kept calls: one that equals an earlier call takes one look-up, and repeats its launches.

A launch depends on shapes, strides, dtypes, devices, options and the alignment of the pointers, and
on nothing else. kernels/bound_call.py checks the alignment; the rest is the key, with the types of
the options, because 1 is no causal mask although 1 == True. Torch modes are handled before the
look-up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from flashgen import settings
from flashgen.kernels.bound_call import Binder, ReplayedCall
from flashgen.runtime.conventions import Given
from flashgen.runtime.launcher import Launcher
from flashgen.runtime.likeness import IsLike, likeness

MOST = 2048
"""Entries in each half of the cache."""
FEW = 4
"""Calls of the same options whose tensors are compared before a key is made."""

CallKey = tuple[object, ...]


class CallCache:
    """An LRU cache of 2 * most kept calls.

    New entries go to the young half. When it is full it becomes the old one, whose entries come
    back when they are used. A hit in the young half needs no bookkeeping, unlike an LRU list.
    """

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._old: dict[CallKey, Any] = {}
        self.young: dict[CallKey, Any] = {}
        self._last: dict[CallKey, list[tuple[IsLike, KeptCall]]] = {}
        """The kept calls of some options that were found last, without a key of their tensors."""

    def __len__(self) -> int:
        return len(self.young) + len(self._old)

    def clear(self) -> None:
        """Remove all entries."""
        self.young, self._old, self._last = {}, {}, {}

    def find(self, options: CallKey, *tensors: Tensor | None) -> tuple[Any, CallKey | None]:
        """The kept call of these options and tensors, or else None and where to keep it: None where
        no key can hold the call. The options fix how many tensors there are.
        """
        try:
            for is_like, kept in self._last.get(options, ()):
                if is_like(*tensors):
                    return kept, None
        except TypeError:  # an option has no hash
            return None, None
        if (key := key_of(options, tensors)) is None:
            return None, None
        if (found := self.get(key)) is None:
            return None, key
        self._remember(options, tensors, found)
        return found, None

    def _remember(self, options: CallKey, tensors: Given, kept: KeptCall) -> None:
        """Have find() compare these tensors."""
        if (is_like := kept.is_like) is None or not is_like(*tensors):
            is_like = kept.is_like = likeness(tensors)
        if is_like is not None:
            self._last[options] = [(is_like, kept), *self._last.get(options, ())][:FEW]

    def get(self, key: CallKey) -> Any:
        """What is kept under a key; None if there is nothing."""
        found = self.young.get(key)
        if found is None and (found := self._old.get(key)) is not None:
            self.keep(key, found)
        return found

    def keep(self, key: CallKey, kept: Any) -> None:
        """Make this the entry of a call."""
        if len(self.young) >= self._most:
            self._old, self.young, self._last = self.young, {}, {}
        self.young[key] = kept


def options_of(
    name: str, count: int, causal: object, scale: object, precision: object, *others: object
) -> CallKey:
    """The options of a call of the function `name`, which takes so many tensors beside q, k and v,
    as find() takes them. torch_modes.special() judges the type of q.
    """
    return (
        name, count, causal, type(causal), scale, type(scale), precision, settings.serving(),
        *others,
    )  # fmt: skip


def key_of(options: CallKey, tensors: Given) -> CallKey | None:
    """The key of a call; None for what is no tensor, or has no strides. Devices are compared with
    that of the first tensor, because their hashes take longer.
    """
    try:
        device = tensors[0].device if tensors else None  # type: ignore[union-attr]
        forms = [
            None if x is None else (x.shape, x.stride(), x.dtype, x.device == device, type(x))
            for x in tensors
        ]
    except (AttributeError, RuntimeError, TypeError):
        return None
    return *options, device, *forms


LaunchRunner = Callable[[Launcher, Any], Any]
"""Has a launcher launch a KernelCall; the result is the call's."""

LaunchMaker = Callable[..., tuple[Any, ...]]
"""Makes the launches of a call, from Run and Given; gives its results."""

Apply = Callable[..., Any]
"""Makes a call by a torch.autograd.Function, from `deterministic` and Given."""


class KeptCall:
    """A call that was checked and resolved, for those that equal it.

    launches: makes its launches; named: which of Given the arguments of its kernels are, by name;
    autograd: gives what makes it where gradients are recorded; None where that is not kept.

    The first of them makes the launches so and binds them. All others repeat those.
    """

    __slots__ = (
        "_apply", "_autograd", "_memory", "_named", "_tries", "is_like", "launches", "replay",
    )  # fmt: skip

    def __init__(
        self,
        launches: LaunchMaker,
        named: Mapping[str, int],
        autograd: Callable[[], Apply] | None = None,
    ) -> None:
        self.launches = launches
        self._named = named
        self._tries = 0
        self._memory: Iterable[Callable[[], object | None]] = ()
        self._autograd = autograd
        self._apply: Apply | None = None
        self.replay: ReplayedCall = self._bind
        self.is_like: IsLike | None = None
        """Of the tensors with which it was found last."""

    def call(
        self, deterministic: bool, q: Tensor, k: Tensor, v: Tensor, *others: Tensor | None
    ) -> Any:
        """The results of the call, with their graph where gradients are recorded; None where those
        are not kept, or where another than q, k and v requires gradients.
        """
        if torch.is_grad_enabled():
            if others and requires_grad(*others):
                return None
            if q.requires_grad or k.requires_grad or v.requires_grad:
                if (apply := self._apply) is None:
                    if self._autograd is None:
                        return None
                    apply = self._apply = self._autograd()
                return apply(deterministic, q, k, v, *others)
        if not others:  # which takes half the time of a call with *
            return self.replay(q, k, v) or self._launch(q, k, v)
        return self.replay(q, k, v, *others) or self._launch(q, k, v, *others)

    def without_graph(self, *given: Tensor | None) -> Any:
        """The results of the call, whether gradients are recorded or not."""
        return self.replay(*given) or self._launch(*given)

    def _launch(self, *given: Tensor | None) -> tuple[Any, ...]:
        """Launch, and keep nothing of it: of what cannot be bound, or not be replayed now. What is
        bound to a workspace that was given back is bound anew.
        """
        if any(memory() is None for memory in self._memory):
            self.replay, self._memory, self._tries = self._bind, (), 0
            if (found := self._bind(*given)) is not None:
                return found
        near = [None if x is None else x.resolve_neg() for x in given]
        return self.launches(Launcher.__call__, *near)

    def _bind(self, *given: Tensor | None) -> tuple[Any, ...] | None:
        """Launch, and keep how to do so again; None where a tensor is a negative view. What cannot
        be bound is tried ever more rarely, for that takes as long as some launches.
        """
        if any_negative(*given):
            return None
        self._tries += 1
        if self._tries & (self._tries - 1):
            return self.launches(Launcher.__call__, *given)
        binder = Binder()
        found = self.launches(lambda launcher, call: launcher.run(call, binder), *given)
        replay = binder.bound(given, self._named, found)
        if replay is not None:
            self.replay, self._memory = replay, binder.memory
        return found


def requires_grad(*tensors: Tensor | None) -> bool:
    """Whether one of them does."""
    return any(x is not None and x.requires_grad for x in tensors)


def any_negative(*tensors: Tensor | None) -> bool:
    """Whether one of them is the negative of its memory."""
    return any(x is not None and x.is_neg() for x in tensors)
