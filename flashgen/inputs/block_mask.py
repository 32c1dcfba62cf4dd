"""BlockMask: which blocks of BLOCK keys each block of BLOCK queries attends to, listed once.

A block that no query of it may see is in no list, and no kernel reads it. One that all may see is
whole: no element of it is masked. Of the others, partial ones, the elements are kept, BLOCK x BLOCK
bytes; equal ones once, so that a diagonal costs one. runtime/block_mask.py makes them. torch is
not imported.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from flashgen.errors import InvalidArgument
from flashgen.inputs.tensors import check_device

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Listed:
    """Of each block of one side, the blocks of the other: Bm and Hm are the batches and heads of
    the mask, 1 where they are alike; N blocks of this side, M of the other.

    counts  int32 (Bm, Hm, N, 2): how many whole ones, and how many partial ones
    blocks  int32 (Bm, Hm, N, M): their numbers, whole ones first, both ascending; then others
    tiles   int32 (Bm, Hm, N, M): of each partial one the number of its elements among BlockMask's
    """

    counts: Tensor
    blocks: Tensor
    tiles: Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class BlockMask:
    """What flashgen.block_mask's functions make, and attention(block_mask=...) takes.

    Args:
        seq_q: the number of queries that it is for.
        seq_k: the number of keys.
        by_rows: blocks of keys of each block of queries.
        by_keys: blocks of queries of each block of keys, for dK and dV.
        tiles: uint8 (T, BLOCK, BLOCK), queries by keys: 1 where one may attend.

    Examples:
        >>> import torch, flashgen
        >>> flashgen.block_mask.prefix_lm(torch.tensor([2]), 4, 8).seq_k
        8
    """

    seq_q: int
    seq_k: int
    by_rows: Listed
    by_keys: Listed
    tiles: Tensor

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Batches and heads of the mask, blocks of queries and blocks of keys."""
        batch, heads, rows, _ = self.by_rows.counts.shape
        return batch, heads, rows, int(self.by_keys.counts.shape[2])

    @property
    def steps(self) -> tuple[int, int]:
        """How many lists further the next batch's are, and the next head's; 0 where alike."""
        batch, heads, _, _ = self.shape
        return heads if batch > 1 else 0, 1 if heads > 1 else 0


def check_block_mask(mask: BlockMask, q: Tensor, k: Tensor) -> None:
    """Raise InvalidArgument unless the mask is for these lengths, batches and heads, and beside
    them.
    """
    batch, heads, seq_q, _ = q.shape
    if (mask.seq_q, mask.seq_k) != (seq_q, k.shape[2]):
        raise InvalidArgument(
            f"block_mask must be for the lengths of q and k, {seq_q} and {k.shape[2]}: "
            f"got one for {mask.seq_q} and {mask.seq_k}"
        )
    if mask.shape[0] not in (1, batch) or mask.shape[1] not in (1, heads):
        raise InvalidArgument(
            f"block_mask must have 1 or {batch} batches and 1 or {heads} heads: "
            f"got {mask.shape[0]} and {mask.shape[1]}"
        )
    check_device("block_mask", mask.tiles, q)
