"""Block masks for attention(block_mask=...), made once and used by many calls.

document(document_ids, causal=True), prefix_lm(prefix_lengths, seq_q, seq_k) and from_boolean(mask)
each make one; dense(mask) is what it holds, element by element.

A rule first judges a block by its bounds, and only undecided blocks element by element. So no mask
of the size of S is created, except the one given to from_boolean.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from flashgen.errors import InvalidArgument, shown
from flashgen.inputs.block_mask import BlockMask, Listed
from flashgen.spec.vocabulary import BLOCK

__all__ = ["BlockMask", "dense", "document", "from_boolean", "prefix_lm"]

SKIPPED, PARTIAL, WHOLE = 0, 1, 2


def prefix_lm(prefix_lengths: Tensor, seq_q: int, seq_k: int) -> BlockMask:
    """All queries see the keys of the prefix, and later keys causally.

    Query i of sequence b sees key j if j < prefix_lengths[b] or j <= i + seq_k - seq_q.

    Args:
        prefix_lengths: integers (batch,).
        seq_q: how many queries there are.
        seq_k: how many keys there are.

    Returns:
        A BlockMask for attention(block_mask=...).

    Raises:
        InvalidArgument: naming the argument; it is a ValueError.

    Examples:
        >>> import torch, flashgen
        >>> mask = flashgen.block_mask.prefix_lm(torch.tensor([2]), 4, 4)
        >>> mask.seq_q, mask.seq_k
        (4, 4)
    """
    _check_ids("prefix_lengths", prefix_lengths, (1,))
    seq_q, seq_k = _length("seq_q", seq_q), _length("seq_k", seq_k)
    prefix = prefix_lengths.long()[:, None]  # (batch, 1)
    diagonal = seq_k - seq_q
    rows = _bounds(torch.arange(seq_q, device=prefix.device)[None] + diagonal)
    keys = _bounds(torch.arange(seq_k, device=prefix.device)[None])
    (first_row, last_row), (first_key, last_key) = rows, keys
    before = first_key[:, None, :] < prefix[..., None]
    kinds = _kinds(
        none=~before & (first_key[:, None, :] > last_row[..., None]),
        whole=(last_key[:, None, :] < prefix[..., None])
        | (last_key[:, None, :] <= first_row[..., None]),
    )

    def sees(batch: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return (key < prefix[batch, 0][:, None, None]) | (key <= row + diagonal)

    return _build(seq_q, seq_k, kinds, sees)


def document(
    document_ids: Tensor, key_ids: Tensor | None = None, *, causal: bool = False
) -> BlockMask:
    """A query sees the keys of its own document: those with the same id.

    Args:
        document_ids: integers (seq,) or (batch, seq), of queries; a negative id is in no document.
        key_ids: those of keys, (seq_k,) or (batch, seq_k); document_ids unless given.
        causal: also require j <= i + seq_k - seq_q.

    Returns:
        A BlockMask for attention(block_mask=...).

    Raises:
        InvalidArgument: naming the argument; it is a ValueError.

    Examples:
        >>> import torch, flashgen
        >>> mask = flashgen.block_mask.document(torch.tensor([0, 0, 1]), causal=True)
        >>> q = torch.randn(1, 2, 3, 64)
        >>> flashgen.attention(q, q, q, block_mask=mask).shape
        torch.Size([1, 2, 3, 64])
    """
    keys_of = document_ids if key_ids is None else key_ids
    for name, ids in (("document_ids", document_ids), ("key_ids", keys_of)):
        _check_ids(name, ids, (1, 2))
    of_q, of_k = (ids.long().view(-1, ids.shape[-1]) for ids in (document_ids, keys_of))
    batch = max(of_q.shape[0], of_k.shape[0])
    if {of_q.shape[0], of_k.shape[0]} - {1, batch}:
        raise InvalidArgument(
            f"key_ids must have the batch of document_ids, {of_q.shape[0]}: got {of_k.shape[0]}"
        )
    of_q, of_k = of_q.expand(batch, -1), of_k.expand(batch, -1)
    seq_q, seq_k = of_q.shape[1], of_k.shape[1]
    (low_q, high_q), (low_k, high_k) = _bounds(of_q), _bounds(of_k)
    low_q, high_q = low_q[..., None], high_q[..., None]
    low_k, high_k = low_k[:, None], high_k[:, None]
    none = (high_q < low_k) | (high_k < low_q) | (high_q < 0) | (high_k < 0)
    whole = (low_q == high_q) & (low_k == high_k) & (low_q == low_k) & (low_q >= 0)
    diagonal = seq_k - seq_q
    if causal:
        rows = _bounds(torch.arange(seq_q, device=of_q.device)[None] + diagonal)
        keys = _bounds(torch.arange(seq_k, device=of_q.device)[None])
        none = none | (keys[0][:, None, :] > rows[1][..., None])
        whole = whole & (keys[1][:, None, :] <= rows[0][..., None])

    def sees(batch: Tensor, row: Tensor, key: Tensor) -> Tensor:
        batches = batch[:, None, None]
        own = of_q[batches, row.clamp(max=seq_q - 1)]
        seen = (own == of_k[batches, key.clamp(max=seq_k - 1)]) & (own >= 0)
        return seen & (key <= row + diagonal) if causal else seen

    return _build(seq_q, seq_k, _kinds(none=none, whole=whole), sees)


def from_boolean(mask: Tensor) -> BlockMask:
    """Any mask, given element by element.

    Args:
        mask: bool ([[batch,] heads,] seq_q, seq_k), True may attend; batch and heads may be 1.

    Returns:
        A BlockMask for attention(block_mask=...).

    Raises:
        InvalidArgument: naming the argument; it is a ValueError.

    Examples:
        >>> import torch, flashgen
        >>> mask = flashgen.block_mask.from_boolean(torch.ones(4, 6, dtype=torch.bool).tril())
        >>> mask.seq_q, mask.seq_k
        (4, 6)
    """
    fits = isinstance(mask, Tensor) and mask.dtype == torch.bool and mask.ndim in (2, 3, 4)
    if not fits or 0 in mask.shape:
        given = (
            f"{mask.dtype} {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        )
        raise InvalidArgument(
            f"mask must be bool of shape (batch, heads, seq_q, seq_k), the first two or the first "
            f"left out, none of them 0: got {given}"
        )
    mask = mask[(None,) * (4 - mask.ndim)]
    heads, seq_q, seq_k = mask.shape[1:]
    flat = mask.flatten(0, 1)
    padded = torch.nn.functional.pad(flat, (0, -seq_k % BLOCK, 0, -seq_q % BLOCK))
    shape = (padded.shape[0], padded.shape[1] // BLOCK, BLOCK, padded.shape[2] // BLOCK, BLOCK)
    seen = padded.view(shape).sum((2, 4))  # (batch * heads, blocks of queries, blocks of keys)
    full = _rows_of(seq_q, mask.device)[:, None] * BLOCK
    kinds = _kinds(none=seen == 0, whole=seen == full)

    def sees(which: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return padded[which[:, None, None], row, key]

    return _build(seq_q, seq_k, kinds, sees, heads=heads)


def dense(mask: BlockMask) -> Tensor:
    """The elements of a block mask, to look at or to compare; they have the size of S.

    Args:
        mask: a BlockMask that a function of this module made.

    Returns:
        bool (batch, heads, seq_q, seq_k), True may attend; batch and heads are 1 where all are
        alike.

    Raises:
        Nothing: the mask was checked when it was made.

    Examples:
        >>> import torch, flashgen
        >>> mask = flashgen.block_mask.document(torch.tensor([0, 0, 1]))
        >>> flashgen.block_mask.dense(mask)[0, 0].int().tolist()
        [[1, 1, 0], [1, 1, 0], [0, 0, 1]]
    """
    batch, heads, rows, keys = mask.shape
    found = torch.zeros(
        (batch, heads, rows, BLOCK, keys, BLOCK), dtype=torch.bool, device=mask.tiles.device
    )
    counts = mask.by_rows.counts.tolist()
    for b in range(batch):
        for h in range(heads):
            for row in range(rows):
                whole, partial = counts[b][h][row]
                blocks = mask.by_rows.blocks[b, h, row].long()
                found[b, h, row][:, blocks[:whole]] = True
                chosen = blocks[whole : whole + partial]
                tiles = mask.by_rows.tiles[b, h, row, whole : whole + partial].long()
                found[b, h, row][:, chosen] = mask.tiles[tiles].bool().transpose(0, 1)
    whole_mask = found.reshape(batch, heads, rows * BLOCK, keys * BLOCK)
    return whole_mask[:, :, : mask.seq_q, : mask.seq_k]


Sees = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Of n blocks: the number of the batch or list (n,), queries (n, BLOCK, 1) and keys (n, 1, BLOCK);
answers bool (n, BLOCK, BLOCK), whatever beyond the lengths."""


def _build(seq_q: int, seq_k: int, kinds: Tensor, sees: Sees, *, heads: int = 1) -> BlockMask:
    """The mask of a rule. kinds (batch * heads, blocks of queries, blocks of keys): SKIPPED and
    WHOLE if that is certain; PARTIAL blocks, and those that reach beyond the keys, are
    decided by `sees`.
    """
    device = kinds.device
    rows_of, keys_of = _rows_of(seq_q, device), _rows_of(seq_k, device)
    kinds = torch.where((kinds == WHOLE) & (keys_of < BLOCK), PARTIAL, kinds)
    which, row_blocks, key_blocks = (kinds == PARTIAL).nonzero(as_tuple=True)
    places = torch.arange(BLOCK, device=device)
    rows = (row_blocks[:, None] * BLOCK + places)[:, :, None]
    keys = (key_blocks[:, None] * BLOCK + places)[:, None, :]
    seen = sees(which, rows, keys) & (rows < seq_q) & (keys < seq_k)
    count = seen.sum((1, 2))
    found = torch.where(count == 0, SKIPPED, PARTIAL)
    found = torch.where(count == rows_of[row_blocks] * BLOCK, WHOLE, found)
    kinds = kinds.clone()
    kinds[which, row_blocks, key_blocks] = found
    kept = found == PARTIAL
    tiles, number = torch.unique(seen[kept].to(torch.uint8), dim=0, return_inverse=True)
    numbers = torch.zeros(kinds.shape, dtype=torch.int32, device=device)
    numbers[which[kept], row_blocks[kept], key_blocks[kept]] = number.int()
    if len(tiles) == 0:
        tiles = torch.zeros((1, BLOCK, BLOCK), dtype=torch.uint8, device=device)
    return BlockMask(
        seq_q=seq_q,
        seq_k=seq_k,
        by_rows=_listed(kinds, numbers, heads),
        by_keys=_listed(kinds.transpose(1, 2), numbers.transpose(1, 2), heads),
        tiles=tiles.contiguous(),
    )


def _listed(kinds: Tensor, numbers: Tensor, heads: int) -> Listed:
    """The lists of one side, whole blocks first."""
    order = torch.sort(kinds, dim=2, descending=True, stable=True).indices
    counts = torch.stack([(kinds == kind).sum(2) for kind in (WHOLE, PARTIAL)], 2)

    def of_heads(x: Tensor) -> Tensor:
        return x.int().contiguous().view(-1, heads, *x.shape[1:])

    return Listed(
        counts=of_heads(counts), blocks=of_heads(order), tiles=of_heads(numbers.gather(2, order))
    )


def _kinds(*, none: Tensor, whole: Tensor) -> Tensor:
    kinds = torch.where(whole, WHOLE, PARTIAL)
    return torch.where(none, SKIPPED, kinds)


def _rows_of(length: int, device: torch.device) -> Tensor:
    """The number of positions in each block: BLOCK, and the rest in the last one."""
    starts = torch.arange(0, length, BLOCK, device=device)
    return (length - starts).clamp(max=BLOCK)


def _bounds(values: Tensor) -> tuple[Tensor, Tensor]:
    """The minimum and maximum of each block of values (batch, length): (batch, blocks)."""
    missing = -values.shape[1] % BLOCK
    last = values[:, -1:].expand(-1, missing) if values.shape[1] else values
    blocks = torch.cat((values, last), 1).view(values.shape[0], -1, BLOCK)
    return blocks.amin(2), blocks.amax(2)


def _length(name: str, value: object) -> int:
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not isinstance(value, int) or not whole or value < 1:
        raise InvalidArgument(f"{name} must be a whole number above 0: got {shown(value)}")
    return value


def _check_ids(name: str, ids: object, ranks: tuple[int, ...]) -> None:
    whole = isinstance(ids, Tensor) and not ids.is_floating_point() and not ids.is_complex()
    if not isinstance(ids, Tensor) or not whole or ids.ndim not in ranks or 0 in ids.shape:
        given = f"{ids.dtype} {tuple(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
        raise InvalidArgument(
            f"{name} must be whole numbers in {' or '.join(map(str, ranks))} dimensions, none of "
            f"them empty: got {given}"
        )
