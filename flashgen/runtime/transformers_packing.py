"""Rows of packed sequences in transformers, whose position_ids begin anew with each, and sliding
windows: where they are instead of a mask of all tokens by all, which at 64k tokens takes 4 GiB.

The mask function hands the numbers of the sequences to the layers, int64 (batch, 1, 1, 2 + seq): a
window, or 0; the length seq, by which a layer knows that its model cut nothing off; and the number
of each token's sequence, ascending in a row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

HEAD = 2
"""What stands before the numbers of sequences."""


class PackedRows(NamedTuple):
    """Where sequences lie among the tokens of a batch, row by row.

    bounds: int32 (sequences + 1,); longest: tokens of the longest one; window: keys that a query
    sees, its own included, or None; rows: int64 (batch, seq), the number of each token's sequence.
    whole: each row is one sequence.
    """

    bounds: Tensor
    longest: int
    window: int | None
    rows: Tensor
    whole: bool


def numbers_of(
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
) -> Tensor | None:
    """What the layers are handed, if a mask of transformers is that of packed sequences or of a
    window under a causal mask, or of both, and of nothing else; else None.

    The masks of transformers are closures: the one of packed sequences holds their numbers.
    """
    if torch.compiler.is_compiling() or q_length != kv_length:
        return None
    if not isinstance(q_offset, int) or q_offset != 0 or kv_offset != 0:
        return None
    if attention_mask is not None and not bool(attention_mask.all()):  # padding
        return None
    from transformers.masking_utils import causal_mask_function

    packed, window = None, None
    for part in _parts(mask_function):
        held = captured(part)
        if part is causal_mask_function:
            continue
        if part.__qualname__.startswith("packed_sequence_mask_function."):
            packed = held["packed_sequence_mask"]
        elif part.__qualname__.startswith("sliding_window_overlay.") and window is None:
            window = held["sliding_window"]
        else:
            return None
    if causal_mask_function not in _parts(mask_function):
        return None
    if packed is None:
        if window is None or (allow_is_causal_skip and kv_length <= window):  # all keys are seen
            return None
        packed = torch.zeros(batch_size, kv_length, dtype=torch.int64, device=device)
    head = packed.new_tensor([window or 0, packed.shape[1]]).expand(len(packed), HEAD)
    return torch.cat([head, packed.long()], 1)[:, None, None]


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


def holds_numbers(mask: Tensor | None) -> bool:
    """Whether a layer is handed what numbers_of() gives."""
    return mask is not None and mask.dtype is torch.int64 and mask.shape[1:3] == (1, 1)


def rows_of(mask: Tensor) -> PackedRows | None:
    """Where the sequences are; None where a model changed what numbers_of() gave. It is read once
    for all layers of a step.
    """
    if mask not in _read:
        _read[mask] = _sequences(mask)
    found: PackedRows | None = _read[mask]
    return found


_read: Any = WeakTensorKeyDictionary()


def _sequences(mask: Tensor) -> PackedRows | None:
    batch, seq = mask.shape[0], mask.shape[3] - HEAD
    if seq < 1 or int(mask[0, 0, 0, 1]) != seq:
        return None
    rows = mask[:, 0, 0, HEAD:]
    begins = torch.ones_like(rows, dtype=torch.bool)  # also at the start of each row
    begins[:, 1:] = rows[:, 1:] != rows[:, :-1]
    first = begins.flatten().nonzero().flatten()
    bounds = torch.cat([first, first.new_tensor([batch * seq])])
    return PackedRows(
        bounds=bounds.int(), longest=int(bounds.diff().max()),
        window=int(mask[0, 0, 0, 0]) or None, rows=rows, whole=len(first) == batch,
    )  # fmt: skip


def arguments_of(sequences: PackedRows) -> dict[str, Any]:
    """The same as the arguments by which a program says where the sequences of a batch are."""
    bounds, longest = sequences.bounds, sequences.longest
    return {
        "cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": longest,
        "max_length_k": longest, "sliding_window": sequences.window,
    }  # fmt: skip


def mask_of(sequences: PackedRows) -> Tensor:
    """The mask itself, bool (batch, 1, seq, seq), True where a query may attend."""
    rows = sequences.rows
    places = torch.arange(rows.shape[1], device=rows.device)
    seen = places[:, None] >= places
    if sequences.window is not None:
        seen &= places[:, None] - places < sequences.window
    return ((rows[:, :, None] == rows[:, None]) & seen)[:, None]
