"""Random cases of invariant attention: one sequence alone, and the same rows computed in another way.

Each way returns pairs of tensors that must have the same bits: rows of O and LSE, or gradients, of the sequence
alone, and of it among others, in chunks, over pages, as decode, or packed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from flashgen.runtime import flash_attn
from flashgen.runtime.api import attention, decode
from flashgen.runtime.sdpa import scaled_dot_product_attention
from flashgen.runtime.varlen import attention_varlen
from flashgen.schedules.base import BY_KEYS
from flashgen.schedules.config import KernelConfig
from flashgen.schedules.defaults import default_config, default_configs
from flashgen.schedules.space import likely_order
from flashgen.spec.attention import AttentionSpec

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
SEGMENTS = (64, 128)
"""In place of the true segment, so that short sequences have several."""

WIDE = ((192, 128), (256, 256), (136, 136), (192, 192), (128, 256), (160, 64), (256, 128))
"""Head dims of Q and K, and of V: GPUs with mma.sync have other kernels for them."""

Pairs = list[tuple[Tensor, Tensor]]
Rows = tuple[Tensor, Tensor, Tensor]


@dataclass(kw_only=True)
class Case:
    """A sequence q (n, H, d), k and v (n, Hkv, d or d_v), its features, and all it is drawn from.

    longer: how many times as long sequences may be as where the interpreter runs them.
    """

    seed: int
    random: random.Random
    generator: torch.Generator
    dtype: torch.dtype
    heads: int
    kv_heads: int
    dims: tuple[int, int]
    features: dict[str, Any] = field(default_factory=dict)
    longer: int = 1

    def length(self, most: int) -> int:
        """Of a sequence: from one row to so many, or `longer` times as many."""
        return self.random.randint(1, most * self.longer)

    def rows(self, n: int) -> Rows:
        """Q, K and V of a sequence of n keys; some scores are large."""

        def drawn(heads: int, dim: int) -> Tensor:
            return torch.randn(n, heads, dim, generator=self.generator)

        large = 1.0 + 5.0 * (torch.rand(n, 1, 1, generator=self.generator) < 0.05)
        q, k, v = (
            drawn(self.heads, self.dims[0]),
            drawn(self.kv_heads, self.dims[0]),
            drawn(self.kv_heads, self.dims[1]),
        )
        return q.to(self.dtype), (k * large).to(self.dtype), v.to(self.dtype)

    def others(self, most: int = 4) -> list[Rows]:
        """Sequences beside it; once in a while nearly 200 short ones."""
        crowd = self.random.random() < 0.03
        count = self.random.randint(100, 199) if crowd else self.random.randint(1, most)
        longest = 3 if crowd else 70
        return [self.rows(self.length(longest)) for _ in range(count)]


def case_of(seed: int, wide: bool = False) -> Case:
    """The case of a seed; wide: of head dims above 128."""
    drawn = random.Random(seed)
    kv_heads, group = drawn.choice((1, 2)), drawn.choice((1, 2, 3))
    dim = drawn.choice((16, 32, 40))
    case = Case(
        seed=seed, random=drawn, generator=torch.Generator().manual_seed(seed), dtype=drawn.choice(DTYPES),
        heads=kv_heads * group, kv_heads=kv_heads, dims=(dim, drawn.choice((dim, dim, 32))),
    )  # fmt: skip
    if wide:
        case.dims = random.Random(f"wide {seed}").choice(WIDE)
    heads, features = case.heads, case.features
    match drawn.randrange(8):
        case 0:
            features["window"] = (drawn.randint(0, 90), 0)
        case 1:
            features["chunk"] = drawn.randint(1, 90)
        case 2:
            features["window"] = (drawn.randint(0, 90), 0)
            features["sinks"] = torch.randn(heads, generator=case.generator)
    if drawn.random() < 0.2:
        features["softcap"] = drawn.choice((1.5, 30.0))
    if drawn.random() < 0.2:
        features.setdefault("sinks", torch.randn(heads, generator=case.generator))
    if drawn.random() < 0.2:
        features["alibi_slopes"] = torch.rand(heads, generator=case.generator)
    return case


def batched(*rows: Tensor) -> list[Tensor]:
    """Packed rows (n, heads, dim) as (1, heads, n, dim)."""
    return [x.transpose(0, 1)[None] for x in rows]


def alone(case: Case, own: Rows) -> tuple[Tensor, Tensor]:
    """O (n, H, d_v) and LSE (n, H) of the sequence alone."""
    o, lse = attention(
        *batched(*own), causal=True, invariant=True, return_lse=True, **case.features
    )
    return o[0].transpose(0, 1), lse[0].T


def in_batch(case: Case) -> Pairs:
    """Among sequences of its length, and only its last queries."""
    own = case.rows(case.length(160))
    n, place, size = len(own[0]), case.random.randrange(3), 3
    first = case.random.randrange(n)
    all_rows = [case.rows(n) for _ in range(size)]
    all_rows[place] = own
    q, k, v = (torch.stack(x).transpose(1, 2) for x in zip(*all_rows, strict=True))
    o, lse = attention(
        q[:, :, first:], k, v, causal=True, invariant=True, return_lse=True, **case.features
    )
    alone_o, alone_lse = alone(case, own)
    return [
        (alone_o[first:], o[place].transpose(0, 1)),
        (alone_lse[first:], lse[place].T),
    ]


def packed(case: Case) -> Pairs:
    """Packed among others, the training forward of which its gradients are computed too."""
    own = case.rows(case.length(160))
    return _packed(case, own, case.others())


def _packed(case: Case, own: Rows, others: list[Rows]) -> Pairs:
    place = case.random.randint(0, len(others))
    sequences = [*others[:place], own, *others[place:]]
    bounds = torch.tensor([0, *(len(x[0]) for x in sequences)]).cumsum(0).to(torch.int32)
    longest = max(len(x[0]) for x in sequences)
    q, k, v = (torch.cat(x) for x in zip(*sequences, strict=True))
    o, lse = attention_varlen(
        q, k, v, bounds, bounds, longest, longest, causal=True, invariant=True, return_lse=True,
        **case.features,
    )  # fmt: skip
    here = slice(int(bounds[place]), int(bounds[place + 1]))
    alone_o, alone_lse = alone(case, own)
    return [(alone_o, o[here]), (alone_lse, lse.T[here])]


def backward(case: Case) -> Pairs:
    """Gradients alone and packed among others, and the forward of a call that records them."""
    own, others = case.rows(case.length(130)), case.others(1)
    place = case.random.randint(0, len(others))
    sequences = [*others[:place], own, *others[place:]]
    bounds = torch.tensor([0, *(len(x[0]) for x in sequences)]).cumsum(0).to(torch.int32)
    longest = max(len(x[0]) for x in sequences)
    here = slice(int(bounds[place]), int(bounds[place + 1]))
    leaves = [torch.cat(x).requires_grad_() for x in zip(*sequences, strict=True)]
    o, lse = attention_varlen(
        *leaves, bounds, bounds, longest, longest, causal=True, invariant=True, return_lse=True,
        **case.features,
    )  # fmt: skip
    do = torch.randn(o.shape, generator=case.generator).to(o.dtype)
    many = torch.autograd.grad(o, leaves, do)
    single = [x.clone().requires_grad_() for x in own]
    alone_o, alone_lse = alone(case, tuple(single))  # type: ignore[arg-type]
    one = torch.autograd.grad(alone_o, single, do[here])
    pairs = [(x, y[here]) for x, y in zip(one, many, strict=True)]
    return [(alone_o, o[here]), (alone_lse, lse.T[here]), *pairs]


@dataclass(kw_only=True)
class Pages:
    """A cache in pages of sequences, in any order: k and v (pages, size, kv_heads, dim), table."""

    k: Tensor
    v: Tensor
    table: Tensor


def pages_of(case: Case, sequences: list[Rows]) -> Pages:
    """A cache with all keys of these sequences, and what is not theirs in the rest."""
    size = case.random.choice((16, 32, 64, 128, 256))
    counts = [-(-len(x[1]) // size) for x in sequences]
    room = max(counts) + case.random.randrange(2)
    order = list(range(sum(counts) + 1))
    case.random.shuffle(order)
    table = torch.full((len(sequences), room), order.pop(), dtype=torch.int32)
    k, v = (
        torch.randn(sum(counts) + 1, size, case.kv_heads, dim, generator=case.generator).to(
            case.dtype
        )
        for dim in case.dims
    )
    for number, (_, keys, values) in enumerate(sequences):
        for page in range(counts[number]):
            at = table[number, page] = order.pop()
            part = slice(page * size, (page + 1) * size)
            k[at, : len(keys[part])], v[at, : len(keys[part])] = keys[part], values[part]
    return Pages(k=k, v=v, table=table)


def in_chunks(case: Case) -> Pairs:
    """A prefill over pages in chunks of any size, each beside chunks of others."""
    own, others = case.rows(case.length(160)), case.others(2)[:8]
    sequences = [own, *others]
    pages = pages_of(case, sequences)
    alone_o, alone_lse = alone(case, own)
    pairs, begin = [], 0
    while begin < len(own[0]):
        end = min(len(own[0]), begin + case.random.choice((1, 7, 64, 100, 160)))
        spans = [(begin, end)]
        for other in others:
            last = case.random.randint(1, len(other[0]))
            spans.append((case.random.randrange(last), last))
        q = torch.cat([x[0][a:b] for x, (a, b) in zip(sequences, spans, strict=True)])
        bounds = torch.tensor([0, *(b - a for a, b in spans)]).cumsum(0).to(torch.int32)
        used = torch.tensor([b for _, b in spans], dtype=torch.int32)
        longest = max(b - a for a, b in spans)
        o, lse = attention_varlen(
            q, pages.k, pages.v, bounds, None, longest, int(used.max()), seqused_k=used,
            block_table=pages.table, causal=True, invariant=True, return_lse=True, **case.features,
        )  # fmt: skip
        pairs += [
            (alone_o[begin:end], o[: end - begin]),
            (alone_lse[begin:end], lse.T[: end - begin]),
        ]
        begin = end
    return pairs


def by_decode(case: Case) -> Pairs:
    """Some of its rows as decode, one or a few at a time, in a batch, over pages or a padded cache."""
    own = case.rows(case.length(160))
    alone_o, alone_lse = alone(case, own)
    pairs = []
    for _ in range(3):
        few = case.random.choice((1, 1, 1, 2, 3))
        last = case.random.randint(min(few, len(own[0])), len(own[0]))
        few = min(few, last)
        step = (own[0][last - few : last], own[1][:last], own[2][:last])
        others = [x for x in case.others() if len(x[0]) >= few] or [case.rows(few)]
        place = case.random.randint(0, len(others))
        steps = [(x[0][-few:], x[1], x[2]) for x in others]
        steps.insert(place, step)
        q = torch.stack([x[0] for x in steps]).transpose(1, 2)
        lengths = torch.tensor([len(x[1]) for x in steps], dtype=torch.int32)
        cache = _cached(case, steps, lengths)
        o, lse = decode(q, causal=True, invariant=True, return_lse=True, **cache, **case.features)
        rows = slice(last - few, last)
        pairs += [(alone_o[rows], o[place].transpose(0, 1)), (alone_lse[rows], lse[place].T)]
    return pairs


def _cached(case: Case, steps: list[Rows], lengths: Tensor) -> dict[str, Tensor]:
    """The arguments of decode that hold the keys of these sequences."""
    way = case.random.choice(("pages", "pages", "capacity", "leftpad", "indexed"))
    if way == "pages":
        pages = pages_of(case, steps)
        return {"k": pages.k, "v": pages.v, "lengths": lengths, "block_table": pages.table}
    pads = torch.zeros_like(lengths)
    if way == "leftpad":
        pads = torch.tensor([case.random.randrange(50) for _ in steps], dtype=torch.int32)
    capacity = int((lengths + pads).max()) + case.random.choice((0, 1, 150))
    k, v = (
        torch.randn(len(steps), case.kv_heads, capacity, dim, generator=case.generator).to(
            case.dtype
        )
        for dim in case.dims
    )
    order = list(range(len(steps)))
    if way == "indexed":
        case.random.shuffle(order)
    for at, (_, keys, values), pad in zip(order, steps, pads.tolist(), strict=True):
        part = slice(pad, pad + len(keys))
        k[at, :, part], v[at, :, part] = keys.transpose(0, 1), values.transpose(0, 1)
    found = {"k": k, "v": v, "lengths": lengths + pads}
    if way == "leftpad":
        found["cache_leftpad"] = pads
    if way == "indexed":
        found["cache_batch_idx"] = torch.tensor(order, dtype=torch.int32)
    return found


def by_drop_ins() -> Pairs:
    """flash_attn's functions and torch's, of one sequence whole, packed beside another, and its last
    row over pages.
    """
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 150, 4, 64, generator=generator)
    k, v = (torch.randn(1, 150, 2, 64, generator=generator) for _ in "kv")
    whole = flash_attn.flash_attn_func(q, k, v, causal=True, invariant=True)
    bounds, others = torch.tensor([0, 70, 220], dtype=torch.int32), slice(40, 110)
    packed = flash_attn.flash_attn_varlen_func(
        *(torch.cat([x[0, others], x[0]]) for x in (q, k, v)), bounds, bounds, 150, 150,
        causal=True, invariant=True,
    )  # fmt: skip
    pages = [torch.cat([x[0], x.new_zeros(10, 2, 64)]).view(10, 16, 2, 64) for x in (k, v)]
    step = flash_attn.flash_attn_with_kvcache(
        q[:, -1:], *(x.flip(0) for x in pages), cache_seqlens=150,
        block_table=torch.arange(9, -1, -1, dtype=torch.int32)[None], causal=True, num_splits=2,
        invariant=True,
    )  # fmt: skip
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    of_torch = scaled_dot_product_attention(
        *heads_first, is_causal=True, enable_gqa=True, invariant=True
    )
    pairs = [(whole[0], packed[70:]), (whole[:, -1:], step), (whole, of_torch.transpose(1, 2))]
    kv = torch.stack([k, v], 2)
    pairs += [(whole, flash_attn.flash_attn_kvpacked_func(q, kv, causal=True, invariant=True))]
    return pairs


WAYS: tuple[Callable[[Case], Pairs], ...] = (
    in_batch,
    packed,
    in_chunks,
    by_decode,
    by_decode,
    backward,
)
"""Decode twice as often: it has most forms."""


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """What a seed chooses, each independently of the others: a remainder of the seed would tie them.

    gpu: a number.
    """

    way: Callable[[Case], Pairs]
    wide: bool
    segment: int
    gpu: int


def drawn_of(seed: int, gpus: int = 2) -> Drawn:
    """The choices of a seed; two in five cases are wide."""
    drawn = random.Random(f"choices {seed}")
    return Drawn(
        way=drawn.choice(WAYS),
        wide=drawn.random() < 0.4,
        segment=drawn.choice(SEGMENTS),
        gpu=drawn.randrange(gpus),
    )


def quick_seeds() -> list[int]:
    """The first seeds that reach every way with every segment, on every GPU, of narrow and wide heads."""
    wanted = {
        (way.__name__, kind, value)
        for way in WAYS
        for kind, values in (("wide", (False, True)), ("segment", SEGMENTS), ("gpu", (0, 1)))
        for value in values
    }
    found = []
    for seed in range(1000):
        drawn = drawn_of(seed)
        reached = {
            (drawn.way.__name__, kind, getattr(drawn, kind)) for kind in ("wide", "segment", "gpu")
        }
        if len(reached & wanted) > (
            len(wanted) > 8
        ):  # one that is new alone is worth it at the end
            found.append(seed)
            wanted -= reached
    assert not wanted
    return found


def pairs_of(seed: int) -> Pairs:
    """What must be equal, bit for bit, in the case of a seed."""
    drawn = drawn_of(seed)
    return drawn.way(case_of(seed, wide=drawn.wide))


def differing(pairs: Pairs) -> int:
    """Elements whose bits differ."""
    as_bits = {2: torch.int16, 4: torch.int32}
    count = 0
    for one, other in pairs:
        assert one.shape == other.shape
        assert not one.isnan().any()
        kind = as_bits[one.element_size()]
        a, b = (x.detach().contiguous().view(kind) for x in (one, other))
        count += int((a != b).sum())
    return count


def free_choices(seed: int) -> Callable[[AttentionSpec], tuple[KernelConfig, ...]]:
    """What the runtime takes for a default: another tile of the class for every spec of head dims to 128, drawn by a
    seed.
    """

    def configs(spec: AttentionSpec) -> tuple[KernelConfig, ...]:
        first = default_config(spec)
        drawn = random.Random(f"{seed} {spec.name}")
        if max(spec.head_dim, spec.head_dim_v) > 128:
            return default_configs(spec)
        if (
            not spec.invariant
            or spec.element_bytes == 4
            or spec.direction in ("combine", "backward_delta")
        ):
            return (first,)
        side = "bc" if spec.direction in BY_KEYS else "br"
        owned = drawn.choice((64, 128))
        order = drawn.choice(("plain", likely_order(spec)))
        found = replace(first, num_warps=owned // 16, order=order, **{side: owned})  # type: ignore[arg-type]
        return (found, first)

    return configs


def seeds(first: int, count: int) -> Iterator[int]:
    """So many seeds."""
    return iter(range(first, first + count))
