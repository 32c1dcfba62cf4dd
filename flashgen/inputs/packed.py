"""Sequences: the bounds of the sequences of a batch in packed tensors.

Packed q is (1, heads, all queries, head_dim), packed k and v (1, kv_heads, all keys, head_dim): the
sequences follow one another, with or without unused tokens between them. torch is not imported:
tensors are read by their attributes.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from flashgen.errors import InvalidArgument, shown
from flashgen.inputs.tensors import check_device, check_form

if TYPE_CHECKING:
    from torch import Tensor

OF_PLACES = "q_begins", "q_ends", "k_begins", "k_ends", "block_table"
"""The fields of Sequences that are tensors."""
SIZES = "sizes"
"""The one more that operators take, where torch traces."""
NUMBERS = {"max_q": "SymInt", "max_k": "SymInt", "bottom_right": "bool", "page_size": "int"}
"""Those that are not, with their types, as operators take them."""

Zeros = Callable[[int, "Tensor"], "Tensor"]
"""Makes so many zeros of the dtype and on the device of a tensor."""

INDICES = ("int32", "int64")


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
    block_table   (B, pages of a sequence) int32, or None: key j of sequence b lies in slot
                  j % page_size of page block_table[b, j // page_size] of pools k and v (pages,
                  kv_heads, page_size, dim), and k_begins, k_ends count the keys alone
    page_size     of such pools, a power of two
    bottom_right  whether the causal diagonal of a sequence ends at its last key, or begins at its
                  first
    sizes         None, or int64 (2,) on the host, where torch traces what only the device knows:
                  how many sequences the other tensors really have, and the tokens of the longest

    A sequence may have no query, no key, or neither.
    """

    q_begins: Tensor
    q_ends: Tensor
    k_begins: Tensor
    k_ends: Tensor
    max_q: int
    max_k: int
    bottom_right: bool = True
    block_table: Tensor | None = None
    page_size: int = 1
    sizes: Tensor | None = None

    @property
    def page_bits(self) -> int:
        """log2 of the page size."""
        return self.page_size.bit_length() - 1

    @property
    def count(self) -> int:
        """The number of sequences, including those without a query or a key."""
        return int(self.q_ends.shape[0])

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """Where the sequences are."""
        return self.q_begins, self.q_ends, self.k_begins, self.k_ends, self.block_table

    @property
    def numbers(self) -> tuple[int, int, bool, int]:
        """NUMBERS."""
        return self.max_q, self.max_k, self.bottom_right, self.page_size

    def with_tensors(
        self, tensors: Iterable[Tensor | None], longest: tuple[int, int] | None = None
    ) -> Sequences:
        """The same with other tensors, or none, and max_q and max_k: they were checked, so this is
        a plain copy.
        """
        made = object.__new__(Sequences)
        made.__dict__.update(self.__dict__, **dict(zip(OF_PLACES, tensors, strict=True)))
        if longest is not None:
            made.__dict__["max_q"], made.__dict__["max_k"] = longest
        return made

    @property
    def paged(self) -> bool:
        """Whether the keys are paged."""
        return self.block_table is not None

    def most_keys(self, places: int) -> int:
        """The maximum of keys of a sequence, given the number of tokens of k: for pages, what
        its row of the table holds.
        """
        table = self.block_table
        return places if table is None else table.shape[1] * self.page_size

    def within(self, places_q: int, places_k: int) -> Sequences:
        """The same with max_q and max_k no more than the places of the packed tensors, or the keys
        of a row of the block table.
        """
        max_q, max_k = min(self.max_q, places_q), min(self.max_k, self.most_keys(places_k))
        if (max_q, max_k) == (self.max_q, self.max_k):
            return self
        return replace(self, max_q=max_q, max_k=max_k)

    def sized(self) -> Sequences:
        """The same without sizes: as many sequences as they say."""
        if self.sizes is None:
            return self
        count, longest = self.sizes.tolist()
        begins = self.q_begins[: count + 1], self.k_begins[: count + 1]
        ends = self.q_ends[:count], self.k_ends[:count]
        return replace(
            self, q_begins=begins[0], k_begins=begins[1], q_ends=ends[0], k_ends=ends[1],
            max_q=longest, max_k=longest, sizes=None,
        )  # fmt: skip

    def check_places(self, places_q: int, places_k: int) -> None:
        """Raise InvalidArgument unless the sequences lie in packed tensors of so many places, one
        behind the other. Synchronizes with the device, as lengths() does.
        """
        sides = {"cu_seqlens_q": (self.q_begins, places_q)}
        if not self.paged:
            sides["cu_seqlens_k"] = self.k_begins, places_k
        for name, (begins, places) in sides.items():
            bounds = begins.tolist()
            if bounds != sorted(bounds) or bounds[0] != 0 or bounds[-1] > places:
                raise InvalidArgument(
                    f"{name} must ascend from 0 to at most {places}, the places there are: "
                    f"got {bounds}"
                )

    def lengths(self) -> list[tuple[int, int, int, int]]:
        """For each sequence the index of its first query, its queries, the index of its first
        key and its keys. Synchronizes with the device: only for the reference and CPU
        tensors.
        """
        columns = (self.q_begins[:-1], self.q_ends, self.k_begins[:-1], self.k_ends)
        rows = zip(*(column.tolist() for column in columns), strict=True)
        most = None if self.block_table is None else self.most_keys(0)
        return [
            (q0, max(q1 - q0, 0), k0, max(k1 - k0 if most is None else min(k1 - k0, most), 0))
            for q0, q1, k0, k1 in rows
        ]


def from_bounds(
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    page_size: int = 1,
    bottom_right: bool = True,
    zeros: Zeros | None = None,
) -> Sequences:
    """The Sequences of cumulative lengths, (B + 1,) each: sequence b has the tokens from
    cu_seqlens[b] to cu_seqlens[b + 1]. It uses the first seqused[b] of them, (B,), or all.

    seqused is clamped to that range. With a block_table, (B, pages of a sequence) int32, the keys
    are in pages of page_size, and the row is the range: keys beyond it do not exist. seqused_k, if
    given, is the number of keys, and cu_seqlens_k may be None then. Nothing is read from the
    device. Raises InvalidArgument, naming the argument, for shapes, types and devices that do not
    fit, and negative lengths.

    zeros: makes the zeros at which keys of pages begin; torch does unless it is given.
    """
    check_form("cu_seqlens_q", cu_seqlens_q, INDICES, ("sequences + 1",))
    count = cu_seqlens_q.shape[0] - 1
    if count < 0:
        raise InvalidArgument("cu_seqlens_q must have shape (sequences + 1,): got (0,)")
    for name, x, size in (
        ("cu_seqlens_k", cu_seqlens_k, count + 1),
        ("seqused_q", seqused_q, count),
        ("seqused_k", seqused_k, count),
    ):
        if x is not None:
            check_form(name, x, INDICES, (size,))
    if block_table is not None:
        _check_pages(block_table, page_size, count)
    if cu_seqlens_k is None and (seqused_k is None or block_table is None):
        raise InvalidArgument(
            "cu_seqlens_k must be given, but with block_table and seqused_k: got None"
        )
    q_begins, q_ends, k_begins, k_ends, _ = places_of(
        cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, block_table, zeros=zeros
    )
    return Sequences(
        q_begins=q_begins,
        q_ends=q_ends,
        k_begins=k_begins,
        k_ends=k_ends,
        max_q=_length("max_seqlen_q", max_seqlen_q),
        max_k=_length("max_seqlen_k", max_seqlen_k),
        bottom_right=bottom_right,
        block_table=block_table,
        page_size=page_size,
    )


def places_of(
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    seqused_q: Tensor | None,
    seqused_k: Tensor | None,
    block_table: Tensor | None,
    *,
    zeros: Zeros | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Sequences.tensors of checked arguments of from_bounds()."""
    q_begins, q_ends = cu_seqlens_q.contiguous(), _ends(cu_seqlens_q, seqused_q)
    if seqused_k is not None and (block_table is not None or cu_seqlens_k is None):
        count = seqused_k.shape[0] + 1
        k_begins = seqused_k.new_zeros(count) if zeros is None else zeros(count, seqused_k)
        k_ends = seqused_k.contiguous()
    else:
        assert cu_seqlens_k is not None  # one of them was given
        k_begins, k_ends = cu_seqlens_k.contiguous(), _ends(cu_seqlens_k, seqused_k)
    return q_begins, q_ends, k_begins, k_ends, block_table


def _check_pages(table: Tensor, page_size: int, count: int) -> None:
    check_form("block_table", table, ("int32",), (count, "pages"))
    if table.stride(1) != 1 and table.shape[1] > 1:
        raise InvalidArgument("block_table must have contiguous rows: call .contiguous()")
    if page_size < 1 or page_size & (page_size - 1):
        raise InvalidArgument(
            f"the page size of k and v, shape[1], must be a power of two: got {page_size}"
        )


def _length(name: str, value: object) -> int:
    """An integer of 0 or more, from anything that has one: also a tensor of one element. One that
    torch traces as a symbol stays one, as it would not in operator.index().
    """
    length = -1
    if isinstance(value, int):
        length = -1 if isinstance(value, bool) else value
    else:
        with contextlib.suppress(TypeError):
            length = operator.index(value)  # type: ignore[arg-type]
    if length < 0:
        raise InvalidArgument(f"{name} must be a whole number >= 0: got {shown(value)}")
    return length


def _ends(cu: Tensor, used: Tensor | None) -> Tensor:
    """The end of what each sequence uses, clamped to its range before it is added to the start:
    near 2^31 the sum would be negative.
    """
    if used is None:
        return cu[1:].contiguous()
    return cu[:-1] + used.clamp(min=0).minimum(cu.diff())


def check_sequences(sequences: Sequences, q: Tensor, k: Tensor) -> None:
    """Raise InvalidArgument unless the tensors are packed, and the sequences on their device."""
    for name, x in (("q", q),) if sequences.paged else (("q", q), ("k", k)):
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
        ("block_table", sequences.block_table),
    ):
        if indices is not None:
            check_device(name, indices, q)
