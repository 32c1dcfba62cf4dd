"""Memory that all launches of a stream share: zeros to be read, and a counter to count with.

Launches of a stream do not overlap, so one of each is enough for all. CUDA graphs run on any
stream: what is launched while one is captured has its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

COUNTER = 4
"""Numbers from one counter to the next: 16 bytes, to which Triton relies on its being aligned."""
SPARE_COUNTERS = 1023
"""For launches of CUDA graphs: without one, its graph sets it to 0 at each replay."""


class OfStream(NamedTuple):
    """Memory of a stream; None on the CPU. written: launches write it, and leave it as it was."""

    tensor: Tensor
    stream: int | None
    written: bool = False


_zeros: dict[tuple[torch.device, int | None, torch.dtype], OfStream] = {}
"""The longest of each device, stream and dtype."""
_counters: dict[tuple[torch.device, int | None], OfStream] = {}
_spare: dict[torch.device, Iterator[Tensor]] = {}
_every: dict[int, OfStream] = {}
"""All memory, by where it begins. None is freed, because CUDA graphs may hold it."""


def zeros(count: int, like: Tensor) -> Tensor:
    """So many zeros of the dtype and on the device of a tensor, to be read alone."""
    if like.is_cuda and torch.cuda.is_current_stream_capturing():
        return like.new_zeros(count)
    key = (*_current(like.device), like.dtype)
    found = _zeros.get(key)
    if found is None or found.tensor.shape[0] < count:
        found = _zeros[key] = _kept(OfStream(like.new_zeros(max(1024, 2 * count)), key[1]))
    return found.tensor[:count]


def counter(like: Tensor) -> Tensor:
    """Int32 zeros on the device of a tensor, two of which a launch counts with and leaves 0."""
    device = like.device
    if like.is_cuda and torch.cuda.is_current_stream_capturing():
        spare = next(_spare.get(device, iter(())), None)
        return like.new_zeros(COUNTER, dtype=torch.int32) if spare is None else spare
    key = _current(device)
    if (found := _counters.get(key)) is None:
        count = 1 + SPARE_COUNTERS * (device not in _spare)
        every = like.new_zeros((count, COUNTER), dtype=torch.int32)
        found = _counters[key] = _kept(OfStream(every[0], key[1], written=True))
        _spare.setdefault(device, (every[n] for n in range(1, count)))
    return found.tensor


def forget_counters() -> None:
    """Have launches count with new ones: a wrong kernel may have left another number than 0."""
    _counters.clear()


def shared_at(address: int) -> OfStream | None:
    """The memory of a stream that begins at an address."""
    return _every.get(address)


def _current(device: torch.device) -> tuple[torch.device, int | None]:
    return device, torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else None


def _kept(made: OfStream) -> OfStream:
    return _every.setdefault(made.tensor.untyped_storage().data_ptr(), made)
