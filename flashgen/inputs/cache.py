"""Cache: keys and values of a batch of sequences, contiguous or in pages. torch is not imported."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Cache:
    """Keys and values of a batch of sequences, each with its own length.

    k (B, Hkv, capacity, d) and v (B, Hkv, capacity, d_v), in any strides; or, with a block_table
    int32 (B, pages of a sequence), pools k (pages, Hkv, page_size, d) and v likewise: key j of
    sequence b is in slot j % page_size of page block_table[b, j // page_size]. lengths: int32 (B,),
    the keys of each sequence; what is beyond is never read. rows: int32 (B,) or None, the row of k
    and v of each sequence, without a block_table. leftpad: int32 (B,) or None, the position of each
    sequence's first key; nothing before it is read, and the sequence has lengths - leftpad keys.
    k_scale and v_scale, for elements float8_e4m3fn or int8: float32 (Hkv,), or (pages, Hkv) in any
    strides, the factors of the elements.
    """

    k: Tensor
    v: Tensor
    lengths: Tensor
    block_table: Tensor | None = None
    rows: Tensor | None = None
    leftpad: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None

    @property
    def paged(self) -> bool:
        """Whether the cache is paged."""
        return self.block_table is not None

    @property
    def capacity(self) -> int:
        """The number of keys that fit per sequence."""
        size: int = self.k.shape[2]
        return size if self.block_table is None else size * self.block_table.shape[1]

    @property
    def page_bits(self) -> int:
        """log2 of the page size."""
        return int(self.k.shape[2]).bit_length() - 1
