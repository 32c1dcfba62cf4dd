"""What a mask of transformers says, where its tensor has to be read."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from flashgen.errors import InvalidArgument
from flashgen.runtime.adapters.transformers_packing import SequenceMask, captured

HIDDEN = -1e4
"""What hides a key where it is added to a score: models take the least number of their dtype."""

INSTEAD = {"cache": "sdpa"}
"""The implementation that has an argument that is refused, where "eager" has not."""


def chunk_start_of(
    mask_function: Any = None,
    attention_mask: Tensor | None = None,
    q_length: int = 0,
    kv_length: int = 0,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    allow_is_causal_skip: bool = True,
    **_: Any,
) -> Tensor | None:
    """Where chunk 0 of each sequence begins among the keys, int32 (batch, 1, 1, 1), if a mask is
    that of chunks under a causal mask and nothing else; else None.

    The masks of transformers are closures: that of chunks holds the number of pads, where chunk 0
    begins. Queries see no pad before them, for it is of another chunk, and none behind them.
    """
    if torch.compiler.is_compiling() or not allow_is_causal_skip or not isinstance(q_offset, int):
        return None
    if kv_offset + kv_length != q_offset + q_length:  # the last query is not at the last key
        return None
    from transformers.masking_utils import causal_mask_function

    parts = captured(mask_function).get("mask_functions")
    if not isinstance(parts, tuple) or len(parts) != 2 or parts[1] is not causal_mask_function:
        return None
    if not parts[0].__qualname__.startswith("chunked_overlay."):
        return None
    pads = captured(parts[0]).get("left_padding")
    if not isinstance(pads, Tensor):
        return None
    if attention_mask is not None:
        begins = attention_mask.bool()[:, 1:] & ~attention_mask.bool()[:, :-1]
        inner = begins.sum(1) + attention_mask.bool()[:, 0]
        if bool((inner > 1).any()):  # pads between tokens
            return None
    return (pads - kv_offset).int()[:, None, None, None]


def check_is_mask(mask: Tensor) -> None:
    """Raise InvalidArgument for what is no mask of transformers."""
    if mask.ndim != 4:
        raise InvalidArgument(
            "attention_mask must have 4 dimensions, (batch, heads, seq_q, seq_k): got "
            f'{tuple(mask.shape)}; use attn_implementation="eager"'
        )
    if mask.dtype is not torch.bool and not mask.is_floating_point() and not is_chunk_start(mask):
        raise InvalidArgument(f"attention_mask must be bool or floating: got {mask.dtype}")


def is_chunk_start(mask: Tensor) -> bool:
    """Whether it says where chunk 0 of each sequence begins, as chunk_start_of()."""
    return mask.dtype is torch.int32 and mask.shape[1:] == (1, 1, 1)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def padded_left(mask: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """How many keys of each sequence are padding, and where its last key ends, int32 (batch,), of a
    causal mask (batch, 1, seq_q, seq_k). Raises InvalidArgument for any other.
    """
    if mask.dtype is torch.bool and mask.ndim == 4 and mask.shape[1] == 1:
        keys = torch.arange(mask.shape[3], device=mask.device)
        seen = mask[:, 0, -1]
        ends = torch.where(seen, keys + 1, 0).amax(1)
        pads = torch.where(seen, keys, ends[:, None]).amin(1)
        last = torch.arange(rows, device=mask.device) + (ends - rows)[:, None]  # of each query
        own = (keys >= pads[:, None, None]) & (keys <= last[..., None])
        token = (last >= pads[:, None])[..., None]
        if not bool(((mask[:, 0] ^ own) & token).any()):
            return pads.int(), ends.int()
    raise InvalidArgument(
        "attention_mask must be causal, with padding to the left alone, in an invariant layer"
    )


@torch.compiler.disable  # type: ignore[untyped-decorator]
def chunks_of(
    mask: Tensor, others: dict[str, Any], size: int | None, *, causal: bool
) -> dict[str, Any]:
    """The chunks that the mask of a packed batch has, as attention_varlen takes them; size: of a
    chunk, if the layer may have them. Raises InvalidArgument unless the mask is that of the bounds,
    with a window and with chunks if the layer has them.
    """
    bounds = others["cu_seq_lens_k"]
    if is_chunk_start(mask):
        return {"chunk": size, "chunk_start": (mask.flatten() - bounds[:-1]).int()}
    key = causal, others.get("sliding_window"), bounds.data_ptr(), bounds._version
    if _known.get(mask, (None,))[0] != key:
        found = _chunk_of_mask(mask, others, size, causal=causal)
        _known[mask] = key, found
    chunk = _known[mask][1]
    return {} if chunk is None else {"chunk": chunk}


_known: Any = WeakTensorKeyDictionary()
"""Masks of packed batches that were read, and their chunks: all layers are handed the same few."""


def _chunk_of_mask(
    mask: Tensor, others: dict[str, Any], size: int | None, *, causal: bool
) -> int | None:
    """None where the mask is that of the bounds and the window; the size where it is that of
    chunks, too. As chunks_of.
    """
    cu, window = others["cu_seq_lens_q"], others.get("sliding_window")
    total, possible = int(cu[-1]), []
    of_bounds = mask.ndim == 4 and (mask.shape[0], *mask.shape[2:]) == (1, total, total)
    if of_bounds and torch.equal(cu, others["cu_seq_lens_k"]):
        places = torch.arange(total, device=mask.device)
        sequences = torch.searchsorted(cu[1:].to(places), places, right=True)
        runs: dict[int | None, Tensor] = {None: sequences}
        if size is not None:  # the first token of each chunk
            runs[size] = places - (places - cu.to(places)[sequences]) % size
        if isinstance(mask, SequenceMask) and mask.made is None:
            if causal and mask.window == window:
                possible = [each for each, own in runs.items() if _hides(mask, own, sequences)]
        else:
            possible = _shown(mask, runs, sequences, window, causal=causal)
    if not possible:
        raise refused("attention_mask", "with cu_seq_lens_q, but a causal one of windows or chunks")
    return possible[0]


def _hides(mask: SequenceMask, runs: Tensor, sequences: Tensor) -> bool:
    """Whether within the sequences a mask that nobody made has runs of tokens where the numbers of
    these (tokens,) are equal.
    """
    numbers = torch.zeros_like(runs) if mask.numbers is None else mask.numbers[0]
    differ = numbers.diff().ne(0) != runs.diff().ne(0)
    return not bool((differ & sequences.diff().eq(0)).any())


def _shown(
    mask: Tensor,
    runs: dict[int | None, Tensor],
    sequences: Tensor,
    window: int | None,
    *,
    causal: bool,
) -> list[int | None]:
    """Those of runs, by their names, of which a mask shows each token its own, within a window."""
    possible, places = list(runs), torch.arange(len(sequences), device=mask.device)
    # Of many tokens the mask alone fills much of the memory.
    for rows in places.split(1024):  # type: ignore[no-untyped-call]
        own = sequences[rows, None] == sequences
        wanted = own & (rows[:, None] >= places) if causal else own
        if window is not None:
            wanted = wanted & ((rows[:, None] - places).abs() < window)
        part = mask[:, :, rows]
        possible = [
            each
            for each in possible
            if _shows(part, wanted & (runs[each][rows, None] == runs[each]), own)
        ]
    return possible


def _shows(mask: Tensor, wanted: Tensor, own: Tensor) -> bool:
    """Whether a mask shows the wanted keys alone, among a sequence's own; it adds nothing there."""
    shown = mask if mask.dtype is torch.bool else mask > HIDDEN
    adds = mask.dtype is not torch.bool and bool((mask[shown] != 0).any())
    return not adds and not bool(((shown & own) != wanted).any())


def refused(name: str, where: str = "") -> InvalidArgument:
    """The error for an argument that a model passes to its attention."""
    return InvalidArgument(
        f"{name} must not be given{where and ' '}{where}: this model passes it to its attention, "
        "and flashgen does not know what it changes; "
        f'use attn_implementation="{INSTEAD.get(name, "eager")}"'
    )
