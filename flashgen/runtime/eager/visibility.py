"""Which query attends to which key, and which elements dropout keeps. Torch only.

Positions are those of one sequence or of several packed ones. Dropout draws from the counter-based
generator Philox 4x32-10 (Salmon, Moraes, Dror, Shaw: Parallel Random Numbers: As Easy as 1, 2, 3,
SC 2011, section 4.3). The kernels use Triton's own Philox, so their masks equal these bit for bit,
whatever the tile or the kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from flashgen.inputs.features import Features
from flashgen.inputs.packed import Sequences


@dataclass(frozen=True, kw_only=True, eq=False)
class Places:
    """rows (Sq, 1): the key on whose diagonal each query is, counted in its own sequence; keys
    (1, Sk): each key's number there. Of packed sequences, row_owner (Sq,) and together (Sq, Sk):
    the sequence of each query, 0 where it is of none, and whether query and key are of the same.
    """

    rows: Tensor
    keys: Tensor
    row_owner: Tensor | None = None
    together: Tensor | None = None

    def causal(self) -> Tensor:
        """The causal mask (Sq, Sk): True where query i sees key j, j <= i + diagonal."""
        return self.keys <= self.rows

    def in_window(self, window: tuple[int, int]) -> Tensor:
        """The window (Sq, Sk): True where query i sees key j, from `left` keys before i + diagonal
        to `right` behind it; -1 is no end.
        """
        left, right = window
        inside = torch.ones_like(self.keys <= self.rows)
        if left >= 0:
            inside &= self.keys >= self.rows - left
        if right >= 0:
            inside &= self.keys <= self.rows + right
        return inside

    def in_chunk(self, chunk: int, start: Tensor | None) -> Tensor:
        """Whether query i and key j lie in one chunk, (Sq, Sk) or (B, 1, Sq, Sk); start (B,): the
        key at which chunk 0 of each sequence begins.
        """
        begin = torch.zeros_like(self.rows)
        if start is not None and self.row_owner is not None:
            begin = start[self.row_owner, None]
        elif start is not None:
            begin = start[:, None, None, None]
        return (self.keys - begin) // chunk == (self.rows - begin) // chunk

    def seen(self, features: Features, *, causal: bool) -> Iterator[Tensor]:
        """Masks that broadcast to (B, H, Sq, Sk): a query sees a key where all are True."""
        if causal:
            yield self.causal()
        if features.window is not None:
            yield self.in_window(features.window)
        if features.chunk:
            yield self.in_chunk(features.chunk, features.chunk_start)
        if self.together is not None:
            yield self.together

    def slopes(self, slopes: Tensor) -> Tensor:
        """Slopes of ALiBi, (H,) or (B, H), so as to multiply distances: (..., H, Sq or 1, 1)."""
        if self.row_owner is not None and slopes.ndim == 2:
            return slopes[self.row_owner].T[..., None]
        return slopes[..., None, None]


def places(
    seq_q: int, seq_k: int, diagonal: int | None, device: torch.device, packed: Sequences | None
) -> Places:
    """Of queries and keys, that many places each. diagonal None, and of packed sequences any: that
    of a sequence's last query and key, or as packed.bottom_right says.
    """
    if packed is None:
        offset = seq_k - seq_q if diagonal is None else diagonal
        rows = torch.arange(seq_q, device=device) + offset
        return Places(rows=rows[:, None], keys=torch.arange(seq_k, device=device)[None, :])
    rows, of_row = own_positions(packed, "q", seq_q, device)
    keys, of_key = own_positions(packed, "k", seq_k, device)
    if diagonal is None or packed.bottom_right:
        for number, (_, queries, _, known) in enumerate(packed.lengths()):
            rows = torch.where(of_row == number, rows + known - queries, rows)
    return Places(
        rows=rows[:, None],
        keys=keys[None, :],
        row_owner=of_row.clamp(min=0),
        together=(of_row[:, None] == of_key[None, :]) & (of_row >= 0)[:, None],
    )


def own_positions(
    packed: Sequences, which: str, size: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Of `size` packed places of queries ("q") or keys ("k"): each one's number in its own
    sequence, and the number of that; 0 and -1 where there is none.
    """
    position = torch.zeros(size, dtype=torch.int64, device=device)
    owner = torch.full((size,), -1, dtype=torch.int64, device=device)
    for number, (q_begin, queries, k_begin, known) in enumerate(packed.lengths()):
        begin, length = (q_begin, queries) if which == "q" else (k_begin, known)
        position[begin : begin + length] = torch.arange(length, device=device)
        owner[begin : begin + length] = number
    return position, owner


MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
_WORD = 0xFFFFFFFF


def philox(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four random 32-bit words a counter; all are int64 tensors of values below 2^32 that
    broadcast.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        # int64 products wrap around; their halves are right all the same.
        a, b = MULTIPLIERS[0] * c0, MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (b >> 32 & _WORD) ^ c1 ^ k0,
            b & _WORD,
            (a >> 32 & _WORD) ^ c3 ^ k1,
            a & _WORD,
        )
        k0, k1 = (k0 + WEYL[0]) & _WORD, (k1 + WEYL[1]) & _WORD
    return c0, c1, c2, c3


def random_words(
    rng: Tensor, batch: int, heads: int, seq_q: int, seq_k: int, packed: Sequences | None = None
) -> Tensor:
    """The word of every element of S, as a signed 32-bit integer in int64, (B, H, Sq, Sk).

    The counter is the 64-bit index of the element in S with bit 3 of row and key cleared, then the
    64-bit offset; the key is the 64-bit seed. Its four words go to the elements that share those
    bits: by bit 3 of the key (the lower bit of the word's number) and of the row (the higher). S of
    packed sequences is (1, H, all queries, all keys), as if they were one, but for bit 3, which is
    that of row and key in their own sequence.
    """
    device = rng.device
    row_places, key_places = (torch.arange(size, device=device) for size in (seq_q, seq_k))
    rows, keys = row_places[:, None], key_places[None, :]
    if packed is not None:
        rows = own_positions(packed, "q", seq_q, device)[0][:, None]
        keys = own_positions(packed, "k", seq_k, device)[0][None, :]
    heads_before = torch.arange(batch * heads, device=device).view(batch, heads, 1, 1)
    first = row_places[:, None] - (rows & 8)
    element = (heads_before * seq_q + first) * seq_k + key_places[None, :] - (keys & 8)
    seed, offset = rng[0], rng[1]
    words = philox(
        (element & _WORD, element >> 32 & _WORD, offset & _WORD, offset >> 32 & _WORD),
        (seed & _WORD, seed >> 32 & _WORD),
    )
    low = torch.where((keys & 8) == 0, words[0], words[1])
    high = torch.where((keys & 8) == 0, words[2], words[3])
    word = torch.where((rows & 8) == 0, low, high)
    return word - ((word >> 31) << 32)


def keep_mask(features: Features, batch: int, heads: int, seq_q: int, seq_k: int) -> Tensor:
    """The elements of P that dropout leaves, bool (B, H, Sq, Sk)."""
    assert features.rng is not None
    words = random_words(features.rng, batch, heads, seq_q, seq_k, features.sequences)
    return words >= features.dropout_threshold
