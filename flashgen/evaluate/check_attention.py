"""The check of forward and backward kernels: their cases, the call of each, and its comparison.

The sizes are the least that show each mistake. There are ragged tiles and whole ones, shared heads,
rows without keys, and one query with one key. As many tiles follow each other as fill the ring of
loads twice. Scores make the running maximum jump at each tile, or never. The first case varies all
that may vary, in three batches of eight heads, four of which share K and V. Packed sequences have
unused tokens between them, and empty ones among them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flashgen.evaluate import check_ds
from flashgen.evaluate.check_sampled import SampledCase, operands, sampled_cases, sampled_trial
from flashgen.inputs.features import Features
from flashgen.inputs.packed import Sequences, from_bounds
from flashgen.kernels.descriptors import LEAST_PAGE
from flashgen.kernels.launch_backward import Backward, Delta
from flashgen.kernels.launch_forward import Forward, order_limits
from flashgen.reference import attention as reference
from flashgen.reference import cases as reference_cases
from flashgen.reference import gradients
from flashgen.reference.attention import Comparison
from flashgen.reference.cases import CheckCase, Trial
from flashgen.schedules.base import BY_KEYS
from flashgen.schedules.config import KernelConfig
from flashgen.schedules.numeric_class import SEGMENT
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.problem import Problem
from flashgen.spec.vocabulary import BLOCK


def attention_cases(
    spec: AttentionSpec, config: KernelConfig, device: str = "cpu"
) -> tuple[CheckCase, ...]:
    """The cases every forward and backward kernel must pass on a device. The order counts: a case's
    place is added to the seed, which draws the shape of a bias, a window and chunks.
    """
    if spec.block_mask:
        return block_mask_cases(spec, config)
    if spec.varlen:
        return packed_cases(spec, config)
    return (
        *tile_cases(spec, config),
        *walking_cases(spec, config, device),
        *sampled_cases(spec, device),
        *segment_cases(spec, config),
    )


def case(
    sq: int, sk: int, batch: int = 1, heads: int = 1, kv: int = 1, **options: Any
) -> CheckCase:
    """The case of these lengths and numbers of heads; options as CheckCase has them."""
    problem = Problem(batch=batch, heads=heads, kv_heads=kv, seq_q=sq, seq_k=sk)
    return CheckCase(problem=problem, **options)


LONG_WALK, SMALL_DIM = 20, 64
"""Tiles in a row of a kernel whose head dims are this small: elsewhere they take too long."""


def ring_tiles(config: KernelConfig) -> int:
    """Tiles in a row after which each stage of a ring of loads was filled twice, and two more."""
    return 2 * config.num_stages + 2


def long_side(spec: AttentionSpec, config: KernelConfig) -> tuple[int, int]:
    """One tile of what a program owns, and ring_tiles() of what it walks: (queries, keys)."""
    br, bc, tiles = config.br, config.bc, ring_tiles(config)
    if max(spec.head_dim, spec.head_dim_v) <= SMALL_DIM:
        tiles = max(tiles, LONG_WALK)
    return (tiles * br, bc) if spec.direction in BY_KEYS else (br, tiles * bc)


def tile_cases(spec: AttentionSpec, config: KernelConfig) -> tuple[CheckCase, ...]:
    """Of plain tensors. At the sixth place of seed 0 the window and the chunk hold all keys, and
    the bias has one element for all keys, so that the kernel of its gradient walks them.
    """
    br, bc = config.br, config.bc
    # By keys the causal mask hides all but the last rows of many from few keys, unless it starts at
    # the first.
    alignment = "top_left" if spec.direction in BY_KEYS else "bottom_right"
    return (
        case(br - 3, bc + 7, batch=3, heads=8, kv=2, layout="bshd", varied=True),
        case(br, 3 * bc + 1, scores="growing"),
        case(br, bc + 1, heads=7),
        case(2 * br + 1, 2 * bc + 1, batch=2, heads=2, kv=2, layout="bshd", alignment="top_left"),
        case(max(br, bc) + 1, max(1, bc - 1)),
        case(*long_side(spec, config), alignment=alignment),
        case(br, 3 * bc, scores="falling"),
        case(1, 1),
        case(1, 2 * bc + 3),
    )


def walking_cases(spec: AttentionSpec, config: KernelConfig, device: str) -> tuple[CheckCase, ...]:
    """Further cases for a persistent kernel on a GPU, which has more SMs than tile_cases has
    tiles: three tiles per program, of several lengths under a causal mask.
    """
    programs = order_limits(torch.device(device)).sms if config.persistent else 0
    by_keys = spec.direction in BY_KEYS

    def tiles(of: Problem) -> int:
        heads, length = (of.kv_heads, of.seq_k) if by_keys else (of.heads, of.seq_q)
        return of.batch * heads * -(-length // (config.bc if by_keys else config.br))

    if 2 * programs <= max(tiles(each.problem) for each in tile_cases(spec, config)):
        return ()
    kv_heads = -(-3 * programs // (3 if by_keys else 6))  # two heads each, three tiles per head
    sq, sk = 2 * config.br + 1, 2 * config.br + config.bc + 7
    if by_keys:
        sq, sk = config.bc + config.br + 7, 2 * config.bc + 1
    return (case(sq, sk, heads=2 * kv_heads, kv=kv_heads, alignment="top_left"),)


def segment_cases(spec: AttentionSpec, config: KernelConfig) -> tuple[CheckCase, ...]:
    """Of an invariant forward, more keys than two segments, after each of which it closes its sums:
    the third has a tile and a part of one.
    """
    if not spec.invariant or spec.direction != "forward":
        return ()
    return (case(config.br, 2 * SEGMENT + config.bc + 7),)


def block_mask_cases(spec: AttentionSpec, config: KernelConfig) -> tuple[CheckCase, ...]:
    """Several blocks of queries and keys, ragged and whole ones; each kind of block mask occurs
    whatever the first seed. At the fourth place of seed 0 two of three blocks are seen, which fill
    the ring.
    """
    tile = config.br if spec.direction in BY_KEYS else config.bc
    blocks = max(3, -(-3 * ring_tiles(config) * tile // (2 * BLOCK)) + 1)
    few, many = 3, blocks * BLOCK - 1
    return (
        case(BLOCK + 5, 2 * BLOCK + 7, batch=2, heads=2, layout="bshd"),
        case(2 * BLOCK, BLOCK + 1, heads=2, kv=2, scores="growing"),
        case(BLOCK + 1, 2 * BLOCK, batch=2, scores="falling"),
        case(*((many, few) if spec.direction in BY_KEYS else (few, many)), heads=2),
    )


SPARE_PAGES = 3
"""Pages of a drawn pool that no sequence has: NaN, as is what lies beyond a length."""

FAR_PAGES = 1 << 15
"""Pages before all others of some pools: 16 bits with a sign do not hold their numbers."""

Lengths = tuple[tuple[int, int], ...]


@dataclass(frozen=True, kw_only=True)
class PackedCase(CheckCase):
    """A CheckCase with packed q, k and v: problem has a batch of 1 and all tokens.

    lengths: (queries, keys) of each sequence; spare: unused tokens after the queries and keys of
    each. index: the dtype of the bounds. page_size: for a spec with paged keys. far: pages before
    all that are used.
    """

    lengths: Lengths
    spare: tuple[int, int] = (0, 0)
    index: str = "int32"
    page_size: int = 16
    far: int = 0

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
            f"page size {self.page_size}, {self.alignment}, {self.layout}, {self.scores} scores"
            f"{', varied' * self.varied}"
        )


def packed_case(
    lengths: Sequence[tuple[int, int]],
    *,
    heads: int = 1,
    kv_heads: int = 1,
    spare: tuple[int, int] = (0, 0),
    tail: tuple[int, int] = (0, 0),
    **options: Any,
) -> PackedCase:
    """The case of these sequences; tail: the numbers of tokens of queries and keys after all of
    them; options as PackedCase has them.
    """
    sq, sk = (sum(pair[side] + spare[side] for pair in lengths) + tail[side] for side in range(2))
    problem = Problem(batch=1, heads=heads, kv_heads=kv_heads, seq_q=sq, seq_k=sk)
    options = {"layout": "bshd"} | options
    return PackedCase(problem=problem, lengths=tuple(lengths), spare=spare, **options)


def packed_cases(spec: AttentionSpec, config: KernelConfig) -> tuple[PackedCase, ...]:
    """A ragged batch with shared heads, of which sequences lack queries, keys or both; more queries
    than keys; whole tiles; unused tokens between. Few queries have many keys, so that a window is
    wider than all queries and a page together. At the sixth place of seed 0 it holds all keys.
    """
    br, bc = config.br, config.bc
    alignment = "top_left" if spec.direction in BY_KEYS else "bottom_right"
    smallest = LEAST_PAGE if config.loads == "descriptor" else 1
    return (
        packed_case(
            [(br + 5, bc + 7), (0, 3), (3, 0), (1, bc), (0, 0)],
            heads=8,
            kv_heads=2,
            varied=True,
        ),
        packed_case([(br, 2 * bc), (br, bc)], index="int64", page_size=smallest, far=FAR_PAGES),
        packed_case(
            [(br + 1, bc), (2, bc - 1), (br - 1, 1)],
            spare=(3, 5),
            tail=(br + 2, 2 * bc + 3),
            alignment="top_left",
            layout="sliced",
            page_size=2 * bc,
        ),
        packed_case([(3, 5 * bc + 1), (1, 2 * bc)], heads=2, scores="falling"),
        packed_case([(br, 3 * bc + 1)], scores="growing"),
        packed_case([long_side(spec, config)], alignment=alignment),
        *(packed_case([(3, 5), (br, each.problem.seq_k)]) for each in segment_cases(spec, config)),
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
    pages = case.far + len(lengths) * width + SPARE_PAGES
    order = case.far + torch.randperm(
        pages - case.far, generator=torch.Generator().manual_seed(seed + 3)
    )
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


def attention_trial(
    spec: AttentionSpec, case: CheckCase, seed: int, device: torch.device | str
) -> Trial:
    """A case with fresh inputs. A backward kernel gets the O, LSE and delta of an ideally rounded
    forward, so that its errors are its own.
    """
    if isinstance(case, SampledCase):
        return sampled_trial(spec, case, seed, device)
    if spec.direction == "forward":
        return _forward(spec, case, seed, device)
    inputs = gradients.make_inputs(spec, case, seed, device)
    o, lse, delta = gradients.forward(inputs)
    if spec.direction == "backward_delta":
        return Trial(
            call=Delta(o=o, do=inputs.do, dlse=inputs.dlse),
            compare=partial(gradients.judge_delta, o=o, do=inputs.do, dlse=inputs.dlse),
        )
    if spec.direction == "backward_dq_of_ds":
        of_ds = check_ds.dq_call(inputs, lse, delta)
        return Trial(call=of_ds, compare=partial(gradients.judge, "backward_dq", inputs=inputs))
    call = Backward(**operands(inputs), do=inputs.do, lse=lse, delta=delta)
    if spec.direction == "backward_ds":
        return Trial(call=call, compare=partial(check_ds.judge, inputs=inputs))
    return Trial(call=call, compare=partial(gradients.judge, spec.direction, inputs=inputs))


def _forward(spec: AttentionSpec, case: CheckCase, seed: int, device: torch.device | str) -> Trial:
    q, k, v = reference_cases.make_inputs(spec, case, seed, device)
    features = reference_cases.make_features(spec, case, seed, device)
    scale, diagonal = case.scale(spec.head_dim), case.diagonal(spec)
    keys, values, given = in_pages(k, v, features, case, seed) if spec.paged else (k, v, features)

    def compare(found: tuple[Tensor, Tensor]) -> Comparison:
        return reference.judge(
            *found, q, k, v,
            scale=scale, diagonal=diagonal, precision=spec.precision, features=features,
        )  # fmt: skip

    call = Forward(q=q, k=keys, v=values, scale=scale, diagonal=diagonal, features=given)
    return Trial(call=call, compare=compare)
