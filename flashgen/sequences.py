"""Sequences: where the sequences of a batch of several lengths lie in packed tensors.

Packed q is (1, heads, all queries, head_dim), packed k and v (1, kv_heads, all keys, head_dim): the
sequences stand one behind the other, with or without unused places between them. torch is not
imported: tensors are read by their attributes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from flashgen.errors import InvalidArgument

if TYPE_CHECKING:
    from torch import Tensor

INDICES = ("torch.int32", "torch.int64")


@dataclass(frozen=True, kw_only=True, eq=False)
class Sequences:
    """Where the queries and keys of each of B sequences are. The kernels read it when they run.

    q_begins      (B + 1,) int32 or int64: the place of the first query of each sequence in the
                  packed tensors, ascending, the first 0; the last element is where the room of the
                  last sequence ends
    q_ends        (B,) likewise: one behind the last query that is used, from q_begins[b] to
                  q_begins[b + 1]. A place of no sequence has O = 0, LSE = -inf and gradients of 0
    k_begins      (B + 1,) and k_ends (B,): the same of keys
    max_q, max_k  bounds of the lengths, known to the host: what lies beyond is not computed
    bottom_right  whether the causal diagonal of a sequence ends at its last key, or begins at its
                  first

    A sequence may have no query, no key, or neither.
    """

    q_begins: Tensor
    q_ends: Tensor
    k_begins: Tensor
    k_ends: Tensor
    max_q: int
    max_k: int
    bottom_right: bool = True

    @property
    def count(self) -> int:
        """How many there are, those without a query or a key included."""
        return int(self.q_ends.shape[0])

    @property
    def bounds(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The tensors, in the order in which kernels take them."""
        return self.q_begins, self.q_ends, self.k_begins, self.k_ends

    def lengths(self) -> list[tuple[int, int, int, int]]:
        """Of each sequence the place of its first query, its queries, the place of its first key
        and its keys. Waits for the device: for the reference and CPU tensors alone.
        """
        columns = (self.q_begins[:-1], self.q_ends, self.k_begins[:-1], self.k_ends)
        rows = zip(*(column.tolist() for column in columns), strict=True)
        return [(q0, max(q1 - q0, 0), k0, max(k1 - k0, 0)) for q0, q1, k0, k1 in rows]


def from_bounds(
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    bottom_right: bool = True,
) -> Sequences:
    """The Sequences of cumulative lengths, (B + 1,) each, sequence b from place cu_seqlens[b] to
    cu_seqlens[b + 1]; of these places it uses the first seqused[b], (B,), or all.

    What seqused says beyond the room there is counts as the room, below 0 as 0. Nothing is read
    from the device. Raises InvalidArgument, naming the argument, for shapes, types and devices that
    do not fit, and lengths below 0.
    """
    for name, cu in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if cu.ndim != 1 or cu.shape[0] < 1 or str(cu.dtype) not in INDICES:
            raise InvalidArgument(
                f"{name} must be int32 or int64 of shape (sequences + 1,): "
                f"got {cu.dtype} {tuple(cu.shape)}"
            )
    count = cu_seqlens_q.shape[0] - 1
    if cu_seqlens_k.shape[0] != count + 1:
        raise InvalidArgument(
            f"cu_seqlens_k must have the length of cu_seqlens_q, {count + 1}: "
            f"got {cu_seqlens_k.shape[0]}"
        )
    for name, used in (("seqused_q", seqused_q), ("seqused_k", seqused_k)):
        if used is not None and (tuple(used.shape) != (count,) or str(used.dtype) not in INDICES):
            raise InvalidArgument(
                f"{name} must be int32 or int64 of shape ({count},): "
                f"got {used.dtype} {tuple(used.shape)}"
            )
    for name, length in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        if not isinstance(length, int) or isinstance(length, bool) or length < 0:
            raise InvalidArgument(f"{name} must be a whole number >= 0: got {length!r}")
    return Sequences(
        q_begins=cu_seqlens_q.contiguous(),
        q_ends=_ends(cu_seqlens_q, seqused_q),
        k_begins=cu_seqlens_k.contiguous(),
        k_ends=_ends(cu_seqlens_k, seqused_k),
        max_q=max_seqlen_q,
        max_k=max_seqlen_k,
        bottom_right=bottom_right,
    )


def _ends(cu: Tensor, used: Tensor | None) -> Tensor:
    """One behind the last place that each sequence uses."""
    if used is None:
        return cu[1:].contiguous()
    return (cu[:-1] + used.clamp(min=0)).minimum(cu[1:])


def check_sequences(sequences: Sequences, q: Tensor, k: Tensor) -> None:
    """Raise InvalidArgument unless the tensors are packed, and the sequences on their device."""
    for name, x in (("q", q), ("k", k)):
        if x.shape[0] != 1:
            raise InvalidArgument(
                f"{name} must be packed, of shape (1, heads, places, head_dim): "
                f"got {tuple(x.shape)}"
            )
    for name, indices in (
        ("cu_seqlens_q", sequences.q_begins),
        ("seqused_q", sequences.q_ends),
        ("cu_seqlens_k", sequences.k_begins),
        ("seqused_k", sequences.k_ends),
    ):
        if indices.device != q.device:
            raise InvalidArgument(
                f"{name} must be on the device of q, {q.device}: got {indices.device}"
            )
