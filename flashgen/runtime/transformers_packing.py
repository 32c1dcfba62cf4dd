"""Masks of transformers that are not made unless something reads them: of rows of packed sequences,
whose position_ids begin anew with each, and of sliding windows. One of 64k tokens takes 4 GiB.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only


class PackedRows(NamedTuple):
    """Where sequences lie among the tokens of a batch, row by row: bounds, int32 (sequences + 1,),
    and longest, the tokens of the longest one.
    """

    bounds: Tensor
    longest: int


class SequenceMask(Tensor):
    """A causal mask, bool (batch, 1, seq, seq), True where a query may attend, which is made when
    first read. Layers ask for what it says instead: numbers, int64 (batch, seq), ascending, of each
    token's sequence, None where a row is one; window: keys that a query sees, its own included.

    A model may compute with its mask, or change it, as with any tensor: then layers get the result,
    or `made` is what they must take.
    """

    numbers: Tensor | None
    window: int | None
    made: Tensor | None

    @staticmethod
    def __new__(
        cls, batch: int, seq: int, device: torch.device | None, *,
        numbers: Tensor | None, window: int | None,
    ) -> SequenceMask:  # fmt: skip
        """Its shape, and no memory."""
        mask = Tensor._make_wrapper_subclass(
            cls, (batch, 1, seq, seq), dtype=torch.bool, device=device
        )
        mask.numbers, mask.window, mask.made = numbers, window, None
        return mask

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Any operation, with the mask itself."""
        args, kwargs = tree_map_only(cls, cls.whole, (args, kwargs or {}))
        return func(*args, **kwargs)

    def whole(self) -> Tensor:
        """The mask itself, once made always the same tensor."""
        if self.made is None:
            places = torch.arange(self.shape[2], device=self.device)
            seen = places[:, None] >= places
            if self.window is not None:
                seen &= places[:, None] - places < self.window
            seen = seen.expand(self.shape[0], -1, -1)
            if self.numbers is not None:
                seen = (self.numbers[:, :, None] == self.numbers[:, None]) & seen
            self.made = seen[:, None]
        return self.made

    @functools.cached_property
    def packed(self) -> PackedRows:
        """Where the sequences are, read from the device once for all layers of a step."""
        assert self.numbers is not None
        begins = torch.ones_like(self.numbers, dtype=torch.bool)  # also at the start of each row
        begins[:, 1:] = self.numbers[:, 1:] != self.numbers[:, :-1]
        first = begins.flatten().nonzero().flatten()
        bounds = torch.cat([first, first.new_tensor([self.numbers.numel()])])
        return PackedRows(bounds=bounds.int(), longest=int(bounds.diff().max()))


def sequence_mask(
    mask_function: Any = None,
    attention_mask: Tensor | None = None,
    batch_size: int = 1,
    q_length: int = 0,
    kv_length: int = 0,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    allow_is_causal_skip: bool = True,
    device: torch.device | None = None,
    **_: Any,
) -> SequenceMask | None:
    """The mask that these arguments of a mask function of transformers describe, if it is that of
    packed sequences or of a window under a causal mask, or of both, and of nothing else; else None.

    The masks of transformers are closures: the one of packed sequences holds their numbers.
    """
    if torch.compiler.is_compiling() or q_length != kv_length:
        return None
    if not isinstance(q_offset, int) or q_offset != 0 or kv_offset != 0:
        return None
    from transformers.masking_utils import causal_mask_function

    causal, numbers, window = False, None, None
    for part in _parts(mask_function):
        held = captured(part)
        if part is causal_mask_function:
            causal = True
        elif part.__qualname__.startswith("packed_sequence_mask_function."):
            numbers = held["packed_sequence_mask"]
        elif part.__qualname__.startswith("sliding_window_overlay.") and window is None:
            window = held["sliding_window"]
        else:
            return None
    hides = window is not None and (window < kv_length or not allow_is_causal_skip)
    if not causal or (numbers is None and not hides):
        return None
    if attention_mask is not None and not bool(attention_mask.all()):  # padding
        return None
    return SequenceMask(batch_size, kv_length, device, numbers=numbers, window=window)


def _parts(function: Any) -> tuple[Any, ...]:
    """The functions that a mask function is the intersection of."""
    held = captured(function)
    if function.__qualname__.startswith("and_masks."):
        return tuple(part for each in held["mask_functions"] for part in _parts(each))
    if function.__qualname__.startswith("remap_positions_for_packed_sequence."):
        return _parts(held["mask_function"])  # of distances in a sequence, which are those in a row
    return (function,)


def captured(function: Any) -> dict[str, Any]:
    """The variables that a closure holds, by name."""
    cells = getattr(function, "__closure__", None) or ()
    names = function.__code__.co_freevars if cells else ()
    return {name: cell.cell_contents for name, cell in zip(names, cells, strict=True)}
