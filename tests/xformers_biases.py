"""The biases of xformers, made by its own classes or by stand-ins that have their fields alone, with what each shows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor


class StandIns:
    """In place of the module xformers.ops.fmha.attn_bias: every class has the fields it is made of."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (SimpleNamespace,), {})


@dataclass(frozen=True, kw_only=True)
class Shown:
    """Which keys a class shows: diagonal "" for none, causal ones of which begin "top" left or end
    at the "bottom" right; left and right keys of a window.
    """

    diagonal: str = ""
    left: float = math.inf
    right: float = math.inf

    def block(self, queries: int, keys: int) -> Tensor:
        """Boolean (queries, keys)."""
        shift = 0 if self.diagonal == "top" else keys - queries
        beside = torch.arange(keys)[None] - torch.arange(queries)[:, None] - shift
        right = min(self.right, 0.0) if self.diagonal else self.right
        return (beside >= -self.left) & (beside <= right)


WINDOW = {"_window_size": 3}
SIDES = {"window_left": 2, "window_right": 1}
LOCAL = {"left": 2, "right": 0}
DENSE: dict[str, tuple[Shown, dict[str, Any]]] = {
    "LowerTriangularMask": (Shown(diagonal="top"), {}),
    "LowerTriangularFromBottomRightMask": (Shown(diagonal="bottom"), {}),
    "LowerTriangularFromBottomRightLocalAttentionMask": (Shown(**LOCAL), WINDOW),
    "LocalAttentionFromBottomRightMask": (Shown(left=2, right=1), SIDES),
}
PACKED: dict[str, tuple[Shown, dict[str, Any]]] = {
    "BlockDiagonalMask": (Shown(), {}),
    "BlockDiagonalCausalMask": (Shown(diagonal="top"), {}),
    "BlockDiagonalCausalFromBottomRightMask": (Shown(diagonal="bottom"), {}),
    "BlockDiagonalCausalLocalAttentionMask": (Shown(diagonal="top", left=2), WINDOW),
    "BlockDiagonalCausalLocalAttentionFromBottomRightMask": (Shown(**LOCAL), WINDOW),
    "BlockDiagonalPaddedKeysMask": (Shown(), {}),
    "BlockDiagonalCausalWithOffsetPaddedKeysMask": (Shown(diagonal="bottom"), {}),
    "BlockDiagonalLocalAttentionPaddedKeysMask": (Shown(left=2, right=1), SIDES),
    "BlockDiagonalCausalLocalAttentionPaddedKeysMask": (Shown(**LOCAL), WINDOW),
    "BlockDiagonalGappyKeysMask": (Shown(), {}),
    "BlockDiagonalCausalWithOffsetGappyKeysMask": (Shown(diagonal="bottom"), {}),
    "PagedBlockDiagonalPaddedKeysMask": (Shown(), {}),
    "PagedBlockDiagonalCausalWithOffsetPaddedKeysMask": (Shown(diagonal="bottom"), {}),
}
QUERIES, KEYS = (3, 1, 5), (4, 6, 5)
"""The lengths of packed sequences."""
ROOM, GAPS, PAGE = 8, (2, 6, 13, 20), 4
TABLE = torch.tensor([[5, 0], [3, 1], [4, 2]], dtype=torch.int32)
"""Room of padded keys, where gappy ones begin and end, and their pages: for ROOM keys a row."""


def packed(name: str, module: Any) -> tuple[Any, Tensor]:
    """A bias of a class of PACKED, made by a module, and the mask (places, places of keys) that it stands for."""
    shown, fields = PACKED[name]
    fields = {**fields, "q_seqinfo": _info(module, QUERIES)}
    if "Paged" in name or "Padded" in name:
        starts = list(range(0, ROOM * len(KEYS) + 1, ROOM))
        fields["k_seqinfo"] = _info(module, KEYS, starts, padding=ROOM)
    elif "Gappy" in name:
        starts = list(GAPS)
        fields["k_seqinfo"] = _info(module, KEYS, starts)
    else:
        starts = [0, *accumulate(KEYS)]
        fields["k_seqinfo"] = _info(module, KEYS)
    mask = torch.zeros(sum(QUERIES), starts[-1], dtype=torch.bool)
    row = 0
    for queries, keys, start in zip(QUERIES, KEYS, starts, strict=False):
        mask[row : row + queries, start : start + keys] = shown.block(queries, keys)
        row += queries
    if "Paged" in name:
        fields |= {"block_tables": TABLE, "page_size": PAGE}
        places = (TABLE.flatten()[:, None] * PAGE + torch.arange(PAGE)).flatten()
        mask = torch.zeros_like(mask).index_copy(1, places, mask)
    return getattr(module, name)(**fields), mask


def _info(
    module: Any, lengths: tuple[int, ...], starts: list[int] | None = None, **more: Any
) -> Any:
    """The lengths as a class of xformers has them."""
    kind = "_SeqLenInfo" if starts is None else "_PaddedSeqLenInfo" if more else "_GappySeqInfo"
    begins = [0, *accumulate(lengths)] if starts is None else starts
    if starts is not None:
        more |= {"seqlen": torch.tensor(lengths, dtype=torch.int32), "seqlen_py": list(lengths)}
    return getattr(module, kind)(
        seqstart=torch.tensor(begins, dtype=torch.int32), seqstart_py=begins,
        max_seqlen=max(lengths), min_seqlen=min(lengths), **more,
    )  # fmt: skip


def exact(q: Tensor, k: Tensor, v: Tensor, added: Tensor, scale: float | None = None) -> Tensor:
    """O (batch, seq_q, heads, dim) in float64 of tensors in that layout; added to the scores (..., seq_q, seq_k); a
    row without a key is 0.
    """
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(2, 3) * (q.shape[3] ** -0.5 if scale is None else scale)
    hidden = (added == -torch.inf).all(-1, keepdim=True)  # of which softmax has no gradient
    p = (scores + added.double().masked_fill(hidden, 0.0)).softmax(3).masked_fill(hidden, 0.0)
    return (p @ v).transpose(1, 2)


def hiding(mask: Tensor) -> Tensor:
    """What hides in scores what a boolean mask does not show."""
    return torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, -torch.inf)
