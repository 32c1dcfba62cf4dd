"""Memory that the launches of a stream share: zeros to be read, a counter, and a workspace.

Launches of a stream do not overlap, so one of each is enough for all. CUDA graphs run on any
stream: what is launched while one is captured has its own.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

COUNTER = 4
"""Numbers from one counter to the next: 16 bytes, to which Triton relies on its being aligned."""
SPARE_COUNTERS = 1023
"""For launches of CUDA graphs: without one, its graph sets it to 0 at each replay."""


@dataclass(frozen=True, eq=False, kw_only=True)
class StreamMemory:
    """Memory of a stream; None on the CPU. written: launches write it. thread: the only one whose
    launches do; None is any.
    """

    tensor: Tensor
    stream: int | None
    written: bool = False
    thread: int | None = None

    def usable(self) -> bool:
        """Whether a launch on its stream may be repeated with it: in its thread, and into no CUDA
        graph.
        """
        if self.thread not in (None, threading.get_ident()):
            return False
        return self.stream is None or not torch.cuda.is_current_stream_capturing()


_constants: dict[tuple[torch.device, int | None, torch.dtype, int], StreamMemory] = {}
"""The longest of each device, stream, dtype and number."""
_counters: dict[tuple[torch.device, int | None], StreamMemory] = {}
_spare: dict[torch.device, Iterator[Tensor]] = {}


class _OfThread(threading.local):
    """The longest workspace of each device and stream: gone with its thread."""

    def __init__(self) -> None:
        self.longest: dict[tuple[torch.device, int | None], StreamMemory] = {}


_workspaces = _OfThread()
_every: weakref.WeakValueDictionary[int, StreamMemory] = weakref.WeakValueDictionary()
"""All that is in use, by where it begins."""
_never_freed: list[StreamMemory] = []
"""What CUDA graphs may hold."""


def zeros(count: int, like: Tensor) -> Tensor:
    """So many zeros of the dtype and on the device of a tensor, to be read alone."""
    return _constant(0, count, like, like.dtype)


def endless(count: int, like: Tensor) -> Tensor:
    """So many lengths, int32, on the device of a tensor, to be read alone: of sequences that fill
    whatever room they have.
    """
    return _constant(torch.iinfo(torch.int32).max, count, like, torch.int32)


def _constant(number: int, count: int, like: Tensor, dtype: torch.dtype) -> Tensor:
    """So many of a number."""
    if _captured(like):
        return like.new_full((count,), number, dtype=dtype)
    key = (*_current(like.device), dtype, number)
    found = _constants.get(key)
    if found is None or found.tensor.shape[0] < count:
        made = like.new_full((max(1024, 2 * count),), number, dtype=dtype)
        found = _constants[key] = _kept(StreamMemory(tensor=made, stream=key[1]))
        _never_freed.append(found)
    return found.tensor[:count]


def counter(like: Tensor) -> Tensor:
    """Int32 zeros on the device of a tensor, two of which a launch counts with and leaves 0."""
    device = like.device
    if _captured(like):
        spare = next(_spare.get(device, iter(())), None)
        return like.new_zeros(COUNTER, dtype=torch.int32) if spare is None else spare
    key = _current(device)
    if (found := _counters.get(key)) is None:
        count = 1 + SPARE_COUNTERS * (device not in _spare)
        every = like.new_zeros((count, COUNTER), dtype=torch.int32)
        found = _kept(StreamMemory(tensor=every[0], stream=key[1], written=True))
        _counters[key] = found
        _never_freed.append(found)
        _spare.setdefault(device, (every[n] for n in range(1, count)))
    return found.tensor


def forget_counters() -> None:
    """Have launches count with new ones: a wrong kernel may have left another number than 0."""
    _counters.clear()


def workspace(size: int, like: Tensor) -> Tensor:
    """So many bytes or more, uint8, on the device of a tensor, for the launches of one call of this
    thread; what they hold before does not matter. Calls that a CUDA graph captures have memory of
    its pool, which gives to one what the one before gave back.
    """
    if _captured(like):
        return torch.empty(size, dtype=torch.uint8, device=like.device)
    key, longest = _current(like.device), _workspaces.longest
    found = longest.get(key)
    if found is None or found.tensor.shape[0] < size:
        longest.pop(key, None)
        found = None  # to be given back before there is a longer one
        made = torch.empty(size, dtype=torch.uint8, device=like.device)
        thread = threading.get_ident()
        found = StreamMemory(tensor=made, stream=key[1], written=True, thread=thread)
        longest[key] = _kept(found)
    return found.tensor


def shared_at(address: int) -> StreamMemory | None:
    """The memory of a stream that begins at an address."""
    return _every.get(address)


def _captured(like: Tensor) -> bool:
    """Whether what is launched near a tensor becomes part of a CUDA graph."""
    return like.is_cuda and torch.cuda.is_current_stream_capturing()


def _current(device: torch.device) -> tuple[torch.device, int | None]:
    return device, torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else None


def _kept(made: StreamMemory) -> StreamMemory:
    _every[made.tensor.untyped_storage().data_ptr()] = made
    return made
