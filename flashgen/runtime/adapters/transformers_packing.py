"""Masks of transformers that are not made unless something reads them: of rows of packed sequences,
whose position_ids begin anew with each, of sliding windows and of chunks. One of 64k tokens takes
4 GiB.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from flashgen.inputs.packed import Sequences
from flashgen.runtime import folders
from flashgen.runtime.call import Call
from flashgen.runtime.conventions import heads_first, packed_again
from flashgen.runtime.general_path import asked_features


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
    or `made` is what they must take. So it is where torch compiles: there it is a tensor of the
    graph, and what makes it and reads its fields are functions that the graph holds whole.
    """

    numbers: Tensor | None
    window: int | None
    made: Tensor | None
    empty: Tensor
    """Of no element: torch has no tensor of tensors without any."""

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
        mask.empty = torch.empty(0, device=device)
        return mask

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        """What torch asks of a tensor that graphs may hold: the tensors in it, by name."""
        named = ("empty", "numbers", "made")
        return [name for name in named if getattr(self, name) is not None], self.window

    @staticmethod
    def __tensor_unflatten__(
        held: dict[str, Tensor], window: Any, size: Any, _: Any
    ) -> SequenceMask:
        mask = SequenceMask(
            size[0], size[2], held["empty"].device, numbers=held.get("numbers"), window=window
        )
        mask.empty, mask.made = held["empty"], held.get("made")
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

    def within(self, bounds: Tensor) -> SequenceMask:
        """The same of sequences that also end at bounds, int32 (sequences + 1,), of one row."""
        assert self.numbers is not None
        begins = self.numbers.new_zeros(self.numbers.shape[1] + 1)
        begins = begins.index_fill(0, bounds.long(), 1)[:-1]
        found: SequenceMask = in_graph(self.numbers + begins.cumsum(0), self.window)
        return found

    @functools.cached_property
    def traced(self) -> tuple[Tensor, Tensor]:
        """custom_ops.sequences_of_rows(), once for all layers of a graph."""
        from flashgen.runtime import custom_ops

        assert self.numbers is not None
        found: tuple[Tensor, Tensor] = custom_ops.sequences_of_rows(self.numbers)
        return found

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
    if q_length != kv_length:
        return None
    if not isinstance(q_offset, int) or q_offset != 0 or kv_offset != 0:
        return None
    from transformers.masking_utils import causal_mask_function

    causal, chunked, numbers, window = False, False, None, None
    for part in _parts(mask_function):
        held = captured(part)
        if part is causal_mask_function:
            causal = True
        elif part.__qualname__.startswith("packed_sequence_mask_function."):
            numbers = held["packed_sequence_mask"]
        elif part.__qualname__.startswith("sliding_window_overlay.") and window is None:
            window = held["sliding_window"]
        elif part.__qualname__.startswith("chunked_overlay."):
            chunked = True
        else:
            return None
    hides = window is not None and (window < kv_length or not allow_is_causal_skip)
    if not causal or (numbers is None and not hides):
        return None
    if attention_mask is not None and not bool(attention_mask.all()):  # padding
        return None
    if chunked:
        numbers = token_runs(mask_function, batch_size, kv_length, device)
    return SequenceMask(batch_size, kv_length, device, numbers=numbers, window=window)


def traced_mask(
    mask_function: Any = None,
    attention_mask: Tensor | None = None,
    batch_size: int = 1,
    q_length: int = 0,
    kv_length: int = 0,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    local_size: int | None = None,
    use_vmap: bool = True,
    allow_is_causal_skip: bool = True,
    device: torch.device | None = None,
    config: Any = None,
    **others: Any,
) -> SequenceMask | None:
    """sequence_mask() where torch compiles, which looks into no closure. So the arguments must be
    those that create_causal_mask(), create_sliding_window_causal_mask() and
    create_chunked_causal_mask() hand over, but for masks of a caller's own (use_vmap), and the
    function itself says where a token does not see the one before it.
    """
    if attention_mask is not None or use_vmap or "allow_is_bidirectional_skip" in others:
        return None
    if mask_function.__name__ != "and_mask" or not isinstance(q_offset, int):
        return None
    if q_length != kv_length or q_offset != 0 or kv_offset != 0:
        return None
    lone = allow_is_causal_skip  # which rows of packed sequences do not
    if lone and local_size is not None and kv_length <= local_size:  # it hides nothing
        return None
    found: SequenceMask
    if lone and local_size != getattr(config, "attention_chunk_size", None):
        numbers = torch.zeros(batch_size, kv_length, dtype=torch.int64, device=device)
        found = in_graph(numbers, local_size, True)
    else:
        found = in_graph(token_runs(mask_function, batch_size, kv_length, device), local_size)
    return found


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def in_graph(numbers: Tensor, window: int | None, lone: bool = False) -> SequenceMask:
    """The mask of rows that torch traces; lone: each row is one sequence."""
    (batch, seq), own = numbers.shape, None if lone else numbers
    return SequenceMask(batch, seq, numbers.device, numbers=own, window=window)


def traced_attention(
    mask: SequenceMask,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float | None,
    deterministic: bool,
    **features: Any,
) -> Tensor:
    """O (batch, seq, heads, head_dim) of rows that torch traces. How many sequences there are is
    known when the graph runs: it waits once for the device to say so.
    """
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    bounds, sizes = mask.traced
    tokens, ends = q.shape[0], bounds[1:]
    sequences = Sequences(
        q_begins=bounds, q_ends=ends, k_begins=bounds, k_ends=ends, max_q=tokens, max_k=tokens,
        sizes=sizes,
    )  # fmt: skip
    window = None if mask.window is None else (mask.window - 1, 0)
    call = Call(
        causal=True, scale=scale, deterministic=deterministic,
        features=asked_features(q, causal=True, window=window, sequences=sequences, **features),
    )  # fmt: skip
    o, lse = folders.current().general.serve(call, *heads_first(q, k, v, paged=False))
    assert lse is not None  # return_lse
    o, _ = packed_again(o, lse)
    return o.reshape(query.shape[0], query.shape[2], *o.shape[1:])


def token_runs(function: Any, batch: int, seq: int, device: torch.device | None) -> Tensor:
    """The numbers, int64 (batch, seq), of runs of tokens of which each sees the one before it, by a
    mask function under which a token sees all of its run before it, or a window of it.
    """
    rows = torch.arange(batch, device=device)[:, None]
    tokens = torch.arange(1, seq, device=device)[None]
    seen = function(rows, rows.new_zeros(()), tokens, tokens - 1).expand(batch, seq - 1)
    return torch.nn.functional.pad(seen.logical_not().cumsum(1), (1, 0))


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
