"""Memory that launches of a call share with those of other calls of its stream."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

_free: dict[tuple[torch.device, int | None], Tensor] = {}
"""The workspace of each device and stream that no thread uses."""


@contextlib.contextmanager
def workspace(near: Tensor, size: int) -> Iterator[Tensor]:
    """So many bytes, uint8, on the device of a tensor. What they hold before does not matter.

    All calls of a stream have the same memory, one after another. A thread that finds it in use
    makes another, of which one stays. A CUDA graph that is captured has memory of its own, which
    its calls share: its pool gives to one what the one before gave back.
    """
    stream = None
    if near.is_cuda:
        if torch.cuda.is_current_stream_capturing():
            yield torch.empty(size, dtype=torch.uint8, device=near.device)
            return
        stream = torch.cuda.current_stream(near.device).cuda_stream
    key = near.device, stream
    memory = _free.pop(key, None)
    if memory is None or memory.numel() < size:
        memory = None  # to be given back before there is a longer one
        memory = torch.empty(size, dtype=torch.uint8, device=near.device)
    try:
        yield memory
    finally:
        _free[key] = memory
