"""Check cases of packed sequences: batches of ragged lengths, empty ones among them, with unused
tokens between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flashgen.reference.cases import CheckCase
from flashgen.spec.config import KernelConfig
from flashgen.spec.features import Features
from flashgen.spec.packed import Sequences, from_bounds
from flashgen.spec.problem import Problem

SPARE_PAGES = 3
"""Pages of a random pool that no sequence uses."""

Lengths = tuple[tuple[int, int], ...]


@dataclass(frozen=True, kw_only=True)
class PackedCase(CheckCase):
    """A CheckCase with packed q, k and v: problem has a batch of 1 and all tokens.

    lengths: (queries, keys) of each sequence; spare: unused tokens after the queries and keys of
    each. index: the dtype of the bounds. page_size: for a spec with paged keys.
    """

    lengths: Lengths
    spare: tuple[int, int] = (0, 0)
    index: str = "int32"
    page_size: int = 16

    @property
    def longest(self) -> Problem:
        """The sizes of the longest sequence."""
        p = self.problem
        return Problem(
            batch=1,
            heads=p.heads,
            kv_heads=p.kv_heads,
            seq_q=max((queries for queries, _ in self.lengths), default=0),
            seq_k=max((keys for _, keys in self.lengths), default=0),
        )

    def sequences(self, device: torch.device | str) -> Sequences:
        """The bounds of its sequences, with used lengths only if there are spare tokens."""
        dtype = getattr(torch, self.index)
        lengths = torch.tensor(self.lengths).T
        room = (lengths + torch.tensor(self.spare)[:, None]).cumsum(1)
        cu_q, cu_k = torch.nn.functional.pad(room, (1, 0)).to(device, dtype)
        used = [
            of.to(device, dtype) if n else None for of, n in zip(lengths, self.spare, strict=True)
        ]
        return from_bounds(
            cu_q,
            cu_k,
            self.longest.seq_q,
            self.longest.seq_k,
            seqused_q=used[0],
            seqused_k=used[1],
            bottom_right=self.alignment != "top_left",
        )

    def __str__(self) -> str:
        p = self.problem
        lengths = " ".join(f"{queries}x{keys}" for queries, keys in self.lengths)
        return (
            f"packed {lengths}, spare {self.spare}, heads {p.heads}/{p.kv_heads}, {self.index}, "
            f"page size {self.page_size}, {self.alignment}, {self.layout}"
        )


def packed_case(
    lengths: Sequence[tuple[int, int]],
    *,
    heads: int = 1,
    kv_heads: int = 1,
    spare: tuple[int, int] = (0, 0),
    tail: tuple[int, int] = (0, 0),
    alignment: str = "bottom_right",
    layout: str = "bshd",
    index: str = "int32",
    page_size: int = 16,
) -> PackedCase:
    """The case of these sequences; tail: the numbers of tokens of queries and keys after all of
    them.
    """
    places = [sum(pair[side] + spare[side] for pair in lengths) + tail[side] for side in range(2)]
    return PackedCase(
        problem=Problem(batch=1, heads=heads, kv_heads=kv_heads, seq_q=places[0], seq_k=places[1]),
        alignment=alignment,
        layout=layout,
        lengths=tuple(lengths),
        spare=spare,
        index=index,
        page_size=page_size,
    )


def varlen_cases(config: KernelConfig) -> tuple[PackedCase, ...]:
    """The cases every candidate must pass: a ragged batch with shared heads; sequences without
    queries, without keys and without both; more queries than keys; whole tiles; unused tokens
    between; few queries of many keys, so that a window is wider than all queries and a page
    together.
    """
    br, bc = config.br, config.bc
    return (
        packed_case(
            [(br + 5, 2 * bc + 7), (0, 3), (3, 0), (1, bc), (0, 0), (br, bc + 1)],
            heads=6,
            kv_heads=2,
        ),
        packed_case([(br, 2 * bc), (br, bc)], index="int64", page_size=1),
        packed_case(
            [(br + 1, bc), (2, bc - 1), (br - 1, 1)],
            spare=(3, 5),
            tail=(br + 2, 2 * bc + 3),
            alignment="top_left",
            layout="sliced",
            page_size=2 * bc,
        ),
        packed_case([(3, 5 * bc + 1), (1, 2 * bc)], heads=2),
    )


def in_pages(
    k: Tensor, v: Tensor, features: Features, case: CheckCase, seed: int
) -> tuple[Tensor, Tensor, Features]:
    """Packed k and v as pools of pages (pages, Hkv, page_size, dim), and the features that
    locate a sequence in them. Pages come in random order; positions without a key are NaN,
    and so are some whole pages.
    """
    packed = features.sequences
    assert packed is not None  # the spec has varlen
    assert isinstance(case, PackedCase)
    size, lengths = case.page_size, packed.lengths()
    width = max(-(-keys // size) for *_, keys in lengths) if lengths else 0
    pages = len(lengths) * width + SPARE_PAGES
    order = torch.randperm(pages, generator=torch.Generator().manual_seed(seed + 3))
    table = order[: len(lengths) * width].view(len(lengths), width).to(k.device)

    def pool(x: Tensor) -> Tensor:
        made = x.new_full((pages, size, x.shape[1], x.shape[3]), float("nan"))
        for number, (*_, begin, keys) in enumerate(lengths):
            places = torch.arange(keys, device=x.device)
            own = x[0, :, begin : begin + keys].transpose(0, 1)
            made[table[number][places // size], places % size] = own
        return made.transpose(1, 2)

    paged = replace(packed, block_table=table.int(), page_size=size)
    return pool(k), pool(v), replace(features, sequences=paged)
