"""A call bound to its launches: what launches them again for a call that equals it except for its
pointers.

A Binder launches the plans of a call and notes their launches. Each argument that is a tensor is
then traced to where it comes from: an input of the call, a tensor that the call makes, or zeros.
All other arguments, the grids, and the layouts of what is made stay as they are. From that follows
a function without a loop or a look-up by name. The caller guarantees that the calls are alike.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flashgen.kernels.direct_launch import Relaunch, watched
from flashgen.kernels.plan import KernelCall, NotedLaunch, Plan, Result
from flashgen.kernels.stream_memory import StreamMemory, shared_at

ALIGNED = 15
"""Bits that are 0 in an aligned address: for Triton and for descriptors all those are of one class.
"""

MOST_MAPS = 512
"""Tensor maps of an argument that are kept: each is 128 bytes, and serves one address."""

CallResults = tuple[Tensor | None, ...]

ReplayedCall = Callable[..., Any]
"""Takes the inputs of a call and gives its results; None, with nothing launched, where its
launches may not be repeated: a tensor is not aligned, or is the negative of its memory, another
device is current, or something listens to launches."""


@dataclass(eq=False)
class Binder:
    """Launches plans, and notes their launches and the tensors that they made."""

    _launches: list[NotedLaunch] = field(default_factory=list, init=False)
    _made: list[Tensor] = field(default_factory=list, init=False)
    memory: tuple[weakref.ref[StreamMemory], ...] = field(default=(), init=False)
    """Of its stream, what a bound call launches with: without it nothing can be repeated."""

    def __call__(self, plan: Plan, call: KernelCall[Result]) -> Result:
        """Launch a plan for a call; the result is the call's."""
        noting: Plan = object.__new__(Plan)  # copy.copy() takes twice as long
        noting.__dict__ |= plan.__dict__ | {"notes": self._launches}
        found: Any = plan.launch(noting, call)
        several = [found] if isinstance(found, Tensor) else found
        self._made += [each for each in several if isinstance(each, Tensor)]
        return found  # type: ignore[no-any-return]

    def bound(
        self, inputs: Sequence[Tensor | None], named: Mapping[str, int], results: CallResults
    ) -> ReplayedCall | None:
        """What makes these launches again and gives results like these. None where that is not
        possible: nothing was launched, Triton must launch, or a kernel takes or the call returns
        another tensor than inputs, what launches made, or memory of its stream.

        named: which of the inputs the arguments of kernels are views of, by their names without
        _ptr or _desc.
        """
        launches = self._launches
        relaunches = [each.relaunch for each in launches if each.relaunch is not None]
        if not launches or len(relaunches) < len(launches):
            return None
        if len({each.device for each in relaunches}) > 1:
            return None
        made = {x.data_ptr(): x for x in self._made if x.numel()}
        writer = _Writer(inputs, named, made)
        calls = [writer.call(*each) for each in zip(launches, relaunches, strict=True)]
        if None in calls or not all(
            x is None or made.get(x.data_ptr()) is not None for x in results
        ):
            return None
        self.memory = tuple(map(weakref.ref, writer.shared))
        return writer.written(launches, relaunches[0], calls, results)


class _Writer:
    """Writes the function that launches again.

    Inputs are x0, x1, ..., at addresses p0, p1, ...; made tensors m0, m1, ..., at a0, a1, ...; what
    the function holds is v0, v1, ....
    """

    def __init__(
        self,
        inputs: Sequence[Tensor | None],
        named: Mapping[str, int],
        made: Mapping[int, Tensor],
    ) -> None:
        self._inputs = [(x, 0 if x is None else x.untyped_storage().data_ptr()) for x in inputs]
        self._named = named
        self._made = {address: (number, x) for number, (address, x) in enumerate(made.items())}
        self._values: list[Any] = []
        self._read: dict[int, bool] = {}
        """The inputs that kernels take, and whether they must be aligned."""
        self._makes: dict[int, Tensor] = {}
        self._stream: int | None = None
        self.shared: dict[StreamMemory, None] = {}
        """Memory of their stream that kernels take."""

    def call(self, launched: NotedLaunch, relaunch: Relaunch) -> str | None:
        """The line that makes a launch; None if an argument is a tensor of unknown source."""
        direct, inner = launched.direct, relaunch.inner
        line: list[Any] = [(value,) for value in relaunch.flat]
        for place, argument in enumerate(launched.arguments):
            if argument is None or type(argument) in (int, float):
                continue
            make = getattr(argument, "maker", None)
            x = argument if make is None else argument.base
            if not isinstance(x, Tensor):
                continue
            address, memory = x.data_ptr(), x.untyped_storage().data_ptr()
            number = self._named.get(launched.names[place].rpartition("_")[0], -1)
            is_input = 0 <= number < len(self._inputs)
            given, own = self._inputs[number] if is_input else (None, 0)
            if (found := self._made.get(address)) is not None:
                number, whole = found
                if whole.numel() != x.numel() or whole.dtype != x.dtype:
                    return None
                self._makes[number] = whole
                tensor, at, offset = f"m{number}", f"a{number}", 0
            elif given is not None and own == memory:
                offset = address - given.data_ptr()
                must = direct.specializes[place]
                if (must and (address | offset) & ALIGNED) or (offset and make is not None):
                    return None
                self._read[number] = self._read.get(number, False) or must
                tensor, at = f"x{number}", f"p{number}"
            elif (shared := shared_at(memory)) is not None:
                self._stream, self.shared[shared] = shared.stream, None
                if make is None:  # a tensor map of it stays as it is
                    line[inner.places[place]] = (address,)
                continue
            else:
                return None
            source = f"{at} + {offset}" if offset else at
            if make is not None:
                if (encode := inner.encoders.get(place)) is None:
                    source = f"{self._hold(make)[0]}({tensor})"
                else:  # a tensor map is encoded once for an address
                    maps = _Maps(make, encode)
                    maps.known[address] = relaunch.flat[inner.places[place]]
                    get, new = self._hold(maps.known.get, maps)
                    source = f"({get}({at}) or {new}({tensor}))"
            line[inner.places[place]] = source
        # Neighbours that stay as they are stand together, in one tuple.
        runs = [list(run) for _, run in itertools.groupby(line, key=type)]
        fixed = [tuple(itertools.chain(*run)) for run in runs if type(run[0]) is tuple]
        grid = relaunch.blocks, 1, 1
        call, *names = self._hold(inner.call, *grid, *inner.after, *fixed)
        known, held = names[: -len(fixed) or None], iter(names[-len(fixed) :])
        known.insert(len(grid), "stream")
        parts = [f"*{next(held)}" if type(run[0]) is tuple else ", ".join(run) for run in runs]
        arguments = ", ".join(parts)
        return f"{call}({', '.join(known)}, {f'[{arguments}]' if inner.as_list else arguments})"

    def _hold(self, *values: Any) -> list[str]:
        """Values that the function is to hold, as they stand in its text."""
        first = len(self._values)
        self._values += values
        return [
            "None" if value is None else f"v{number}" for number, value in enumerate(values, first)
        ]

    def written(
        self,
        launches: Sequence[NotedLaunch],
        on: Relaunch,
        calls: Sequence[str | None],
        results: CallResults,
    ) -> ReplayedCall | None:
        """The function; None if a result is written by none of the launches."""
        numbers = [None if x is None else self._made[x.data_ptr()][0] for x in results]
        for number, x in zip(numbers, results, strict=True):
            if number is None or x is None:
                continue
            if number not in self._makes or self._makes[number].numel() != x.numel():
                return None
            self._makes[number] = x  # its shape and strides
        kernels = dict.fromkeys(each.direct for each in launches)
        here, current, stream, expected, observed, knobs, *names = self._hold(
            on.device, on.current_device, on.current_stream, self._stream, watched,
            launches[0].direct.knobs, *map(maker, self._makes.values()), *kernels,
        )  # fmt: skip
        conditions = [f"{current}() != {here}", f"{observed}({knobs})"]
        for kernel in names[len(self._makes) :]:
            conditions.append(f"not {kernel}.on or {kernel}.kernel.pre_run_hooks")
        aligned = " | ".join(f"p{n}" for n, must in self._read.items() if must)
        lines = [f"p{n} = x{n}.data_ptr()" for n in self._read]
        lines.append(f"if ({aligned or 0}) & {ALIGNED}: return None")
        lines.append(f"if {' or '.join(f'x{n}.is_neg()' for n in self._read)}: return None")
        lines.append(f"if {' or '.join(conditions)}: return None")
        lines.append(f"stream = {stream}({here})")
        if self._stream is not None:
            lines.append(f"if stream != {expected}: return None")
        usable = self._hold(*(_usable(shared) for shared in self.shared if shared.written))
        lines += [f"if not {each}(): return None" for each in usable]
        for number, make in zip(self._makes, names, strict=False):
            lines.append(f"m{number} = {make}()")
            lines.append(f"a{number} = m{number}.data_ptr()")
        addresses = " | ".join(f"a{n}" for n in self._makes)
        lines.append(f"if ({addresses}) & {ALIGNED}: return None")
        lines += [str(each) for each in calls]
        lines.append(f"return {', '.join('None' if n is None else f'm{n}' for n in numbers)},")
        body = "".join(f"        {line}\n" for line in lines)
        inputs = ", ".join(f"x{n}" for n in range(len(self._inputs)))
        held = ", ".join(f"v{n}" for n in range(len(self._values)))
        text = f"def holding({held}):\n    def replay({inputs}):\n{body}    return replay\n"
        made: ReplayedCall = compiled(text)(*self._values)
        return made


def _usable(shared: StreamMemory) -> Callable[[], bool]:
    """Whether memory of a stream is there and may be used now. What launches again does not keep
    a workspace, which is given back when there is a longer one; the rest is never freed.
    """
    if shared.thread is None:
        return shared.usable
    held = weakref.ref(shared)

    def usable() -> bool:
        memory = held()
        return memory is not None and memory.usable()

    return usable


@functools.lru_cache(maxsize=256)
def compiled(text: str) -> Callable[..., Any]:
    """The function `holding` that a text defines, which returns another that has its arguments. A
    text has numbers of its own making, and no caller's.
    """
    namespace: dict[str, Any] = {}
    exec(text, namespace)
    found: Callable[..., Any] = namespace["holding"]
    return found


class _Maps:
    """The tensor maps of one argument by address. The layout is fixed, and a map holds nothing else
    of a tensor, so it serves any tensor at its address.
    """

    __slots__ = ("_encode", "_make", "known")

    def __init__(self, make: Callable[[Tensor], Any], encode: Callable[[Any], Any]) -> None:
        self._make = make
        self._encode = encode
        self.known: dict[int, Any] = {}

    def __call__(self, tensor: Tensor) -> Any:
        """The map of a tensor, which is kept."""
        made, *_ = self._encode(self._make(tensor))
        if len(self.known) >= MOST_MAPS:
            self.known.clear()
        self.known[tensor.data_ptr()] = made
        return made


def maker(like: Tensor) -> Callable[[], Tensor]:
    """Makes tensors of this one's shape, strides, dtype and device. That device must be current."""
    # What torch's Inductor calls: it takes half the time of torch.empty_strided.
    fast = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
    fast = getattr(fast, "_empty_strided_cuda", None)
    shape, strides = tuple(like.shape), like.stride()
    if like.is_cuda and fast is not None:
        return functools.partial(fast, shape, strides, like.dtype)
    return functools.partial(
        torch.empty_strided, shape, strides, dtype=like.dtype, device=like.device
    )
