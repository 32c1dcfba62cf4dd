"""Places: where each query and each key stands, of one sequence or of several packed ones, and so
who may attend to whom. Torch alone: for the reference.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flashgen.sequences import Sequences


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
