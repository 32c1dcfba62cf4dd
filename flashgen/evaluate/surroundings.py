"""Surroundings: whether a launch leaves all memory but its outputs as it was.

Tensors of a call lie amid larger buffers (cases.moved), and so do outputs, while this is active. A
kernel that writes a row too far changes a margin, instead of the heap of its process.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from flashgen.kernels.launch_cache import Append
from flashgen.reference.cases import MARGIN, in_margins

_ALLOCATED: dict[Any, int] = {
    torch.empty: 0xFF,
    torch.Tensor.new_empty: 0xFF,
    torch.zeros: 0,
}
"""What launchers get outputs by, and the bytes of their margins."""

_MOST_BYTES = 1 << 28
"""Of a tensor that is compared whole: those of a GPU's timed sizes are not."""


class Surroundings(TorchFunctionMode):
    """A context for one launch. kept, at its end: whether nothing changed but outputs, and of an
    Append the keys and values of the cache.
    """

    def __init__(self, call: Any) -> None:
        super().__init__()
        self.kept = True
        self._outputs: list[tuple[Tensor, int]] = []
        written = (call.cache.k, call.cache.v) if isinstance(call, Append) else ()
        self._before = [
            (part, part.clone())
            for x in tensors_in(call)
            for part in (_margins_of(x) if any(x is y for y in written) else (_storage(x),))
            if part.numel() <= _MOST_BYTES
        ]

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """An output amid a buffer of its own."""
        x = func(*args, **(kwargs or {}))
        fill = _ALLOCATED.get(func)
        if fill is None or not isinstance(x, Tensor) or not x.numel():
            return x
        buffer = in_margins(x.numel(), x.dtype, x.device, fill)
        inner = buffer.as_strided(x.shape, x.stride(), MARGIN)
        inner.copy_(x)
        margins = (buffer[:MARGIN], buffer[MARGIN + x.numel() :])
        self._outputs += [(margin.view(torch.uint8), fill) for margin in margins]
        return inner

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]  # torch has no types there
        self.kept = all(torch.equal(now, was) for now, was in self._before) and all(
            _holds(margin, fill) for margin, fill in self._outputs
        )


def tensors_in(value: Any) -> Iterator[Tensor]:
    """All tensors of a value: of a dataclass, or a tuple."""
    if isinstance(value, Tensor):
        yield value
    elif is_dataclass(value):
        for field in fields(value):
            yield from tensors_in(getattr(value, field.name))
    elif isinstance(value, tuple | list):
        for each in value:
            yield from tensors_in(each)


def _holds(margin: Tensor, fill: int) -> bool:
    """Whether all of these bytes are `fill`; eight at a time, which takes a fifth of the time."""
    before = -margin.storage_offset() % 8  # up to where words begin
    words, behind = margin[before:], (margin.numel() - before) % 8
    ends = torch.cat((margin[:before], words[words.numel() - behind :]))
    whole = words[: words.numel() - behind].view(torch.int64)
    word = int.from_bytes(bytes([fill]) * 8, signed=True)
    return bool((ends == fill).all()) and bool((whole == word).all())


def _storage(x: Tensor) -> Tensor:
    """The bytes of a tensor's storage."""
    return torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage())


def _margins_of(x: Tensor) -> tuple[Tensor, ...]:
    """What lies before the first of a tensor's elements and behind its last, in bytes."""
    whole, size = _storage(x), x.itemsize
    ends = ((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    last = x.storage_offset() + sum(ends) + 1
    return whole[: x.storage_offset() * size], whole[last * size :]
