"""Which elements dropout keeps: the counter-based generator Philox 4x32-10, in torch.

Salmon, Moraes, Dror, Shaw: Parallel Random Numbers: As Easy as 1, 2, 3 (SC 2011), section 4.3. The
kernels draw the same words by Triton's own Philox, so their masks equal these bit for bit, whatever
the tile and whichever the kernel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashgen.features import Features
from flashgen.places import own_positions
from flashgen.sequences import Sequences

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
