"""The check of the kernels that serve a cache: their cases, the call of each, and its comparison.

A decode kernel is checked by its splits, merged in float64, so an error found is its own. Each
sequence of a batch is compared with float64 attention over the keys gathered for it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flashgen.evaluate.check_append import append_trial
from flashgen.evaluate.check_attention import FAR_PAGES, SPARE_PAGES, attention_trial
from flashgen.inputs.cache import Cache
from flashgen.inputs.features import Features
from flashgen.kernels.launch_cache import Combine, Decode, Parts, decode_of
from flashgen.reference import attention as reference
from flashgen.reference import cases as reference_cases
from flashgen.reference.attention import Comparison
from flashgen.reference.cases import CheckCase, Scores, Trial
from flashgen.runtime.eager import cache as eager_cache
from flashgen.schedules.config import KernelConfig
from flashgen.schedules.numeric_class import SEGMENT
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.problem import Problem

SPLITS_OF_A_FORWARD = (3, 2, 7)


@dataclass(frozen=True, kw_only=True)
class DecodeCase:
    """One comparison: lengths of the sequences, in a cache with a capacity of `capacity` keys each.

    splits: of the keys; for combine, the parts; for append, the new keys. page_size: of a paged
    cache. layout: the memory layout of Q and the cache, as in cases.draw. shared: all sequences
    start with the same page. scores: as CheckCase has them; for combine, the LSE of the parts.
    varied: as CheckCase has it. far: pages before all that are used.
    """

    lengths: tuple[int, ...]
    capacity: int
    seq_q: int = 1
    kv_heads: int = 1
    group: int = 1
    splits: int = 1
    page_size: int = 16
    layout: str = "bhsd"
    shared: bool = False
    scores: Scores = "even"
    varied: bool = False
    far: int = 0

    def of_attention(self) -> CheckCase:
        """The case of as many full sequences."""
        problem = Problem(
            batch=len(self.lengths), heads=self.kv_heads * self.group, kv_heads=self.kv_heads,
            seq_q=self.seq_q, seq_k=self.capacity,
        )  # fmt: skip
        return CheckCase(problem=problem, layout=self.layout, varied=self.varied)

    def __str__(self) -> str:
        lengths = ", ".join(map(str, self.lengths))
        return (
            f"lengths {lengths} of {self.capacity}, seq_q {self.seq_q}, "
            f"heads {self.kv_heads * self.group}/{self.kv_heads}, splits {self.splits}, "
            f"page size {self.page_size}, {self.layout}, {self.scores} scores"
            f"{', shared pages' * self.shared}{', varied' * self.varied}"
            f"{f', from page {self.far}' * bool(self.far)}"
        )


def cache_cases(
    spec: AttentionSpec, config: KernelConfig, device: str = "cpu"
) -> tuple[DecodeCase, ...]:
    """The cases every candidate must pass.

    Their keys: none, one, a tile and its neighbours, primes. Pages are smaller than a tile, as
    large and larger, and some have numbers that 16 bits do not hold. Rows fill a tile and more.
    Some splits have no key. The tiles of one fill the ring of loads twice, at a place where seed 0
    draws a window of all keys. An invariant decode has three segments.
    """
    bc, br = config.bc, config.br
    ring = (2 * config.num_stages + 2) * bc
    if spec.direction == "combine":
        rows = DecodeCase(lengths=(0, 0), capacity=0, seq_q=3, kv_heads=2, group=2)
        even = tuple(replace(rows, splits=n) for n in (1, 2, bc, bc + 1, ring + 3))
        return (*even, *(replace(rows, splits=3 * bc, scores=s) for s in UNEVEN))
    if spec.direction == "append":
        case = DecodeCase(
            lengths=(0, 1, 15, 16, 37, 38, 39, 40), capacity=40, seq_q=3, kv_heads=2, group=2
        )
        return (
            replace(case, splits=1, page_size=1),
            replace(case, splits=br + 1, page_size=8, layout="bshd", varied=True),
            replace(case, splits=2, page_size=64, layout="sliced"),
        )
    edges = (0, 1, bc - 1, bc, bc + 1)
    queries = 1 if not spec.causal else 5
    segments = DecodeCase(
        lengths=(2 * SEGMENT + bc + 5, 3), capacity=2 * SEGMENT + 2 * bc, seq_q=queries, group=4
    )
    return (
        DecodeCase(lengths=edges, capacity=2 * bc, seq_q=queries, kv_heads=2, group=4, splits=2,
                   varied=True),
        DecodeCase(
            lengths=(4 * bc, 3 * bc + 7, 2 * bc), capacity=5 * bc, splits=5, seq_q=queries,
            page_size=1, layout="bshd", kv_heads=2, group=4, shared=True,
        ),
        DecodeCase(
            lengths=(127, 31), capacity=131, seq_q=br // 2 + 1, group=2, page_size=256,
            layout="sliced",
        ),
        DecodeCase(
            lengths=(2 * bc + 5,), capacity=3 * bc, splits=3, seq_q=2, group=br, page_size=bc
        ),
        DecodeCase(
            lengths=(3 * bc + 1,), capacity=4 * bc, group=7, page_size=1, far=FAR_PAGES,
            scores="growing",
        ),
        DecodeCase(lengths=(ring + 5,), capacity=ring + bc, group=12),
        DecodeCase(lengths=(3 * bc + 1,), capacity=4 * bc, group=4, scores="falling"),
        *((segments,) if spec.invariant else ()),
    )  # fmt: skip


UNEVEN: tuple[Scores, ...] = ("growing", "falling")


def cache_trial(
    spec: AttentionSpec, case: DecodeCase, seed: int, device: torch.device | str
) -> Trial:
    """A case of a decode, combine or append kernel, with fresh inputs."""
    if spec.direction == "combine":
        return _combine(spec, case, seed, device)
    q, cache = make_call(spec, case, seed, device)
    if spec.direction == "append":
        return append_trial(spec, cache, q, case.splits, seed)
    scale = case.of_attention().scale(spec.head_dim)
    features = make_features(spec, case, cache, seed, device)
    call = Decode(q=q, cache=cache, scale=scale, sms=1, splits=case.splits, features=features)
    return Trial(
        call=call, compare=lambda parts: judge(*merged(parts, q.dtype), call=call, spec=spec)
    )


def split_trial(
    spec: AttentionSpec, case: CheckCase, seed: int, device: torch.device | str
) -> Trial:
    """A case of a forward whose keys a decode splits, of packed sequences."""
    case = replace(case, alignment="bottom_right")
    trial = attention_trial(spec.for_direction("forward"), case, seed, device)
    call = decode_of(trial.call, sms=1, splits=SPLITS_OF_A_FORWARD[seed % 3])
    dtype = trial.call.q.dtype
    return Trial(call=call, compare=lambda parts: trial.compare(merged(parts, dtype)))


def merged(parts: Parts, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """O of `dtype` and LSE of all parts, merged in float64 over the parts that have keys. A part of
    an invariant decode is a sum not yet divided, with its maximum, in units of log2, and weight.
    """
    if parts.whole:
        return parts.o, parts.lse
    o, lse = parts.o.double(), parts.lse.double()
    if lse.ndim == o.ndim:
        maximum, weight = lse.unbind(1)
        o, lse = o / weight[..., None], (maximum + weight.log2()) * math.log(2)
    o, lse = reference.merge(o, lse)
    return o.to(dtype), lse.float()


def judge(o: Tensor, lse: Tensor, call: Decode, spec: AttentionSpec) -> Comparison:
    """All sequences of a call, each by reference.judge."""
    return reference.pooled(
        [
            reference.judge(
                o[number : number + 1], lse[number : number + 1], q, k, v,
                scale=call.scale,
                diagonal=k.shape[2] - q.shape[2] if spec.causal else None,
                precision=spec.precision,
                features=own,
                v_scales=_scales_of_keys(call.cache, number),
            )
            for number, q, k, v, own in eager_cache.sequences(
                call.q, call.cache, call.features
            )
        ]
    )  # fmt: skip


def _scales_of_keys(cache: Cache, number: int) -> Tensor | None:
    """The scales of V of a sequence's keys (1, Hkv, keys, 1); None if all of a head are alike."""
    if cache.v_scale is None or cache.v_scale.ndim == 1:
        return None
    pages = eager_cache.pages_of(cache, number, *eager_cache.held(cache)[number])
    return eager_cache.scale_of(cache.v_scale, pages)[None]


def make_call(
    spec: AttentionSpec, case: DecodeCase, seed: int, device: torch.device | str
) -> tuple[Tensor, Cache]:
    """Random q (B, H, Sq, d) and cache of a case, for its scores, with NaN where no sequence has a
    key.
    In an indexed cache the rows of the sequences are in random order among others; left pads
    include 0 and the whole length.
    """
    generator = torch.Generator().manual_seed(seed)
    dtype, batch = getattr(torch, spec.dtype), len(case.lengths)
    lengths = torch.tensor(case.lengths, dtype=torch.int32)

    of_attention = case.of_attention()

    def drawn(name: str, outer: int, heads: int, size: int, dim: int) -> Tensor:
        x = reference_cases.draw((outer, heads, size, dim), of_attention.layout_of(name), generator)
        if name != "q" and spec.paged and case.far:
            x = torch.cat((x.new_full((case.far, *x.shape[1:]), float("nan")), x))
        return reference_cases.moved(x, dtype, "cpu")

    q = drawn("q", batch, case.kv_heads * case.group, case.seq_q, spec.head_dim)
    table = None
    outer, size = batch, case.capacity
    if spec.paged:
        size, each = case.page_size, -(-case.capacity // case.page_size)
        outer = batch * each + SPARE_PAGES
        table = torch.randperm(outer, generator=generator)[: batch * each].int().view(batch, each)
        table += case.far
        if case.shared:
            table[:, 0] = table[0, 0]
    rows = leftpad = None
    if spec.indexed:
        outer = batch + SPARE_PAGES
        rows = torch.randperm(outer, generator=generator)[:batch].int()
    if spec.leftpad:
        share = torch.rand(batch, generator=generator)
        share[::3], share[1::3] = (0.0, 1.0) if seed % 2 else (0.5, 0.0)
        leftpad = (share * lengths).int()
    k = drawn("k", outer, case.kv_heads, size, spec.head_dim)
    v = drawn("v", outer, case.kv_heads, size, spec.head_dim_v)
    cache = Cache(k=k, v=v, lengths=lengths, block_table=table, rows=rows, leftpad=leftpad)
    if case.scores != "even":
        q *= reference_cases.LARGEST_SCORES
        _weigh(cache, case.scores)
    _poison(cache)
    if spec.kv_dtype != "same":
        cache = _quantized(cache, spec, generator)
    fields = {name: getattr(cache, name) for name in Cache.__dataclass_fields__}
    here: dict[str, Any] = {n: x if x is None else x.to(device) for n, x in fields.items()}
    for name in ("k", "v"):
        here[name] = reference_cases.moved(fields[name], fields[name].dtype, device)
    return reference_cases.moved(q, dtype, device), Cache(**here)


def _weigh(cache: Cache, scores: Scores) -> None:
    """Multiply the keys of each sequence by weights_of its positions."""
    weights = reference_cases.weights_of(scores, cache.capacity)
    for number in range(len(cache.lengths)):
        if cache.block_table is None:
            cache.k[eager_cache.row_of(cache, number)] *= weights
            continue
        pages = eager_cache.pages_of(cache, number, 0, cache.capacity)
        slots = torch.arange(cache.capacity) & (cache.k.shape[2] - 1)
        cache.k[pages, :, slots] *= weights[:, None]


def _quantized(cache: Cache, spec: AttentionSpec, generator: torch.Generator) -> Cache:
    """A cache in 8 bits, with scales that saturate some elements and leave others a few steps;
    NaN in pages that no sequence uses.
    """
    dtype = torch.int8 if spec.kv_dtype == "int8" else torch.float8_e4m3fn
    heads = cache.k.shape[1]
    shape = (cache.k.shape[0], heads) if spec.kv_scales == "page" else (heads,)
    found: dict[str, Tensor] = {}
    for name, x in (("k", cache.k), ("v", cache.v)):
        spread = torch.exp2(2.0 * torch.rand(shape, generator=generator) - 1.0)
        scale = 2.5 / eager_cache.LARGEST[dtype] * spread
        if spec.kv_scales == "page":
            assert cache.block_table is not None  # a spec's pages have scales where it is paged
            spare = torch.ones(shape[0], dtype=torch.bool)
            spare[cache.block_table.long().flatten()] = False
            per_element = scale[:, :, None, None]
            scale[spare] = float("nan")
        else:
            per_element = scale[:, None, None]
        base = torch.zeros((x if x._base is None else x._base).shape, dtype=dtype)
        narrow = base.as_strided(x.shape, x.stride(), x.storage_offset())
        narrow.copy_(eager_cache.quantized(x.float() / per_element, dtype))
        found |= {name: narrow, f"{name}_scale": scale}
    return replace(cache, **found)


def make_features(
    spec: AttentionSpec, case: DecodeCase, cache: Cache, seed: int, device: torch.device | str
) -> Features:
    """The features of a spec, as cases.make_features draws them for a full cache. A bias per
    sequence has NaN where the sequence has no key.
    """
    drawn = case.of_attention()
    drawn = replace(drawn, problem=replace(drawn.problem, seq_k=cache.capacity))
    features = reference_cases.make_features(spec, drawn, seed, device)
    bias, own = features.bias, (len(case.lengths), cache.capacity)
    if spec.bias == "additive" and bias is not None and bias.shape[::3] == own:
        for number, (first, end) in enumerate(eager_cache.held(cache)):
            bias[number, ..., :first] = float("nan")
            bias[number, ..., end:] = float("nan")
    return features


def _poison(cache: Cache) -> None:
    """Write NaN into every position of a cache that holds no key of a sequence."""
    held = torch.zeros(cache.k.shape[0], cache.k.shape[2], dtype=torch.bool)
    for number, (first, length) in enumerate(eager_cache.held(cache)):
        if cache.block_table is None:
            held[eager_cache.row_of(cache, number), first:length] = True
            continue
        places = torch.arange(first, length)
        pages = cache.block_table[number].long()[places >> cache.page_bits]
        held[pages, places & (cache.k.shape[2] - 1)] = True
    for x in (cache.k, cache.v):
        x.masked_fill_(~held[:, None, :, None], float("nan"))


def _combine(spec: AttentionSpec, case: DecodeCase, seed: int, device: torch.device | str) -> Trial:
    generator = torch.Generator().manual_seed(seed)
    rows = (len(case.lengths), case.kv_heads * case.group, case.seq_q)
    o = torch.randn((case.splits, *rows, spec.head_dim_v), generator=generator)
    lse = 8.0 * torch.randn((case.splits, *rows), generator=generator)
    if case.scores != "even":
        steps = reference_cases.weights_of(case.scores, case.splits)[..., None, None]
        lse += 4 * reference_cases.LARGEST_SCORES * steps
    lse[torch.rand(lse.shape, generator=generator) < 0.3] = float("-inf")
    lse[:, 0, 0, 0] = float("-inf")  # a row for which no part has a key
    o[lse.isinf()] = float("nan")
    exact_o, exact_lse = reference.merge(o.double(), lse.double())
    q = reference_cases.draw((*rows, spec.head_dim_v), "bshd", generator)
    q = reference_cases.moved(q, getattr(torch, spec.dtype), device)
    largest = float(o.nan_to_num().abs().max())

    def compare(found: tuple[Tensor, Tensor]) -> Comparison:
        found_o, found_lse = (x.cpu() for x in found)
        tolerance = reference.LSE_TOLERANCE * exact_lse.abs().clamp(min=1.0).nan_to_num(posinf=1.0)
        off = torch.where(exact_lse == found_lse, 0.0, exact_lse - found_lse) / tolerance
        of_o = reference.compared(found_o, exact_o, exact_o.to(found_o.dtype), largest)
        return replace(of_o, lse=reference.max_abs(off))

    parts = Parts(o=o.to(device), lse=lse.to(device))
    return Trial(call=Combine(parts=parts, q=q), compare=compare)
