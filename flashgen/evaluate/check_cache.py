"""Check cases of the kernels that serve a cache, and each kernel run on one of them.

A decode kernel is checked by its splits, merged in float64, so an error found is its own. Each
sequence of a batch is compared with float64 attention over the keys gathered for it. For the append
kernel, what it writes is compared in floors, and what it must not write has to stay bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flashgen.kernels.launch import bind
from flashgen.kernels.launch_cache import Append, Combine, Decode, Parts, Rotation
from flashgen.kernels.plan import Kernel
from flashgen.reference import attention as reference
from flashgen.reference import cases as reference_cases
from flashgen.reference.attention import Comparison
from flashgen.reference.cases import CheckCase
from flashgen.runtime.eager import cache as eager_cache
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.cache import Cache
from flashgen.spec.config import KernelConfig
from flashgen.spec.features import Features
from flashgen.spec.from_call import check_scale
from flashgen.spec.problem import Problem


def run_append(
    kernel: Kernel,
    spec: AttentionSpec,
    config: KernelConfig,
    cache: Cache,
    queries: Tensor,
    new_keys: int,
    seed: int,
) -> Comparison:
    """Append `new_keys` random keys to a cache, and rotate queries (B, H, Sq, d) if spec has
    rotary.
    """
    device, dtype = cache.k.device, queries.dtype
    generator = torch.Generator().manual_seed(seed + 1)
    batch, heads = queries.shape[0], cache.k.shape[1]
    cache = replace(cache, k=_without_nan(cache.k), v=_without_nan(cache.v))

    def drawn(dim: int) -> Tensor:
        x = reference_cases.draw((batch, heads, new_keys, dim), "bshd", generator)
        return reference_cases.moved(x, dtype, device)

    k, v = drawn(spec.head_dim), drawn(spec.head_dim_v)
    rotation = None
    if spec.rotary != "none":
        # All but eight elements of a head rotate; queries at one place or, by the seed, at several.
        angles = torch.rand((cache.capacity, spec.head_dim // 2 - 4), generator=generator) * 6
        cos, sin = angles.cos().to(device), angles.sin().to(device)
        rotation = Rotation(q=queries, cos=cos, sin=sin, q_step=seed % 2)
    expected = replace(cache, k=_wide(cache.k), v=_wide(cache.v))
    exact_k, exact_q = k.double(), queries.double()
    if rotation is not None:
        exact_k, exact_q = rotated_pair(exact_k, exact_q, rotation, cache, spec)
    eager_cache.append(expected, exact_k, v.double())
    found = replace(cache, k=cache.k.clone(), v=cache.v.clone())
    q = bind(kernel, spec, config)(Append(k=k, v=v, cache=found, rotation=rotation))
    if spec.kv_dtype != "same" and rotation is None and not _same_bytes(found, k, v, cache):
        return Comparison(floors=float("inf"), lse=0.0)
    verdicts = [_error(found.k, expected.k, cache.k), _error(found.v, expected.v, cache.v)]
    if q is not None:
        verdicts.append(_error(q, exact_q, queries))
    return Comparison(floors=max(verdicts), lse=0.0)


def rotated_pair(
    k: Tensor, q: Tensor, rotation: Rotation, cache: Cache, spec: AttentionSpec
) -> tuple[Tensor, Tensor]:
    """K and Q rotated, each at its positions after the keys of the cache; torch only."""

    def turned(x: Tensor, step: int) -> Tensor:
        steps = torch.arange(x.shape[2], device=x.device) * step
        places = cache.lengths.long().clamp(min=0)[:, None] + steps
        places = places.clamp(max=max(cache.capacity - 1, 0))
        interleaved = spec.rotary == "interleaved"
        return eager_cache.rotated(x, rotation.cos, rotation.sin, places, interleaved=interleaved)

    return turned(k, 1), turned(q, rotation.q_step)


def _error(found: Tensor, exact: Tensor, before: Tensor) -> float:
    """The error in floors; infinite if anything was written that must not change."""
    if found.element_size() == 1:
        ideal = eager_cache.quantized(exact, found.dtype).float()
        exact = exact.clamp(ideal.min(), ideal.max())
        found, before = found.float(), before.float()
    else:
        ideal = exact.to(found.dtype)
    kept = ideal == before
    if not torch.equal(found[kept], before[kept]):
        return float("inf")
    return reference.error_in_floors(found, exact, ideal, reference.max_abs(exact))


def _same_bytes(found: Cache, k: Tensor, v: Tensor, before: Cache) -> bool:
    """Whether an 8-bit cache equals what torch computes, to the bit: one float32 division and
    one rounding have a unique result.
    """
    wanted = replace(before, k=before.k.clone(), v=before.v.clone())
    eager_cache.append(wanted, k, v)
    pairs = ((found.k, wanted.k), (found.v, wanted.v))
    return all(torch.equal(a.view(torch.int8), b.view(torch.int8)) for a, b in pairs)


def _without_nan(x: Tensor) -> Tensor:
    """X with 0 for NaN, in its own strides."""
    if x.dtype == torch.int8:
        return x
    return torch.empty_like(x).copy_(x.float().nan_to_num())


def _wide(x: Tensor) -> Tensor:
    """The elements of a cache as float64."""
    return x.float().double() if x.element_size() == 1 else x.double()


SPARE_PAGES = 3
"""Pages of a drawn pool that no sequence has: NaN, as is what lies beyond a length."""


@dataclass(frozen=True, kw_only=True)
class DecodeCase:
    """One comparison: lengths of the sequences, in a cache with a capacity of `capacity` keys each.

    splits: of the keys; for combine, the parts; for append, the new keys. page_size: of a paged
    cache. layout: the memory layout of Q and the cache, as in cases.draw. shared: all sequences
    start with the same page.
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

    def __str__(self) -> str:
        lengths = ", ".join(map(str, self.lengths))
        return (
            f"lengths {lengths} of {self.capacity}, seq_q {self.seq_q}, "
            f"heads {self.kv_heads * self.group}/{self.kv_heads}, splits {self.splits}, "
            f"page size {self.page_size}, {self.layout}{', shared pages' * self.shared}"
        )


def decoding_cases(spec: AttentionSpec, config: KernelConfig) -> tuple[DecodeCase, ...]:
    """The cases every candidate must pass: no key, one, a tile and its neighbours, primes; pages
    smaller than a tile, as large and larger; rows that fill a tile and more; splits without a key.
    """
    bc, br = config.bc, config.br
    if spec.direction == "combine":
        rows = DecodeCase(lengths=(0, 0), capacity=0, seq_q=3, kv_heads=2, group=2)
        return tuple(replace(rows, splits=n) for n in (1, 2, bc, bc + 1, 2 * bc + 3))
    if spec.direction == "append":
        case = DecodeCase(
            lengths=(0, 1, 15, 16, 37, 38, 39, 40), capacity=40, seq_q=3, kv_heads=2, group=2
        )
        return (
            replace(case, splits=1, page_size=1),
            replace(case, splits=br + 1, page_size=8, layout="bshd"),
            replace(case, splits=2, page_size=64, layout="sliced"),
        )
    edges = (0, 1, bc - 1, bc, bc + 1)
    queries = 1 if not spec.causal else 5
    return (
        DecodeCase(lengths=edges, capacity=2 * bc, seq_q=queries, kv_heads=2, group=3, splits=2),
        DecodeCase(
            lengths=(4 * bc, 3 * bc + 7, 2 * bc), capacity=5 * bc, splits=4, seq_q=queries,
            page_size=1, layout="bshd", kv_heads=2, shared=True,
        ),
        DecodeCase(
            lengths=(127, 31), capacity=131, seq_q=br // 2 + 1, group=2, page_size=256,
            layout="sliced",
        ),
        DecodeCase(
            lengths=(2 * bc + 5,), capacity=3 * bc, splits=3, seq_q=2, group=br, page_size=bc
        ),
    )  # fmt: skip


def nasty_decode_cases(spec: AttentionSpec, config: KernelConfig) -> Iterator[DecodeCase]:
    """More than tuning checks: 1 to 8 query heads per head of K and V, 1 to 16 queries, pages of
    1, 16 and 256 keys, and among them the lengths that find errors.
    """
    bc = config.bc
    lengths = (0, 1, bc - 1, bc, bc + 1, 37, 2 * bc + 3)
    layouts = ("bhsd", "bshd", "sliced")
    for number, (group, seq_q) in enumerate(((1, 1), (2, 2), (3, 16), (5, 5), (8, 1), (8, 5))):
        for turn, page_size in enumerate((1, 16, 256)):
            if turn and not spec.paged and number > 2:
                continue  # the lengths were all had
            yield DecodeCase(
                lengths=lengths[turn::3],
                capacity=3 * bc + 1,
                seq_q=seq_q,
                kv_heads=1 + number % 2,
                group=group,
                splits=1 + number % 4,
                page_size=page_size,
                layout=layouts[number % 3],
                shared=number % 2 == 1,
            )


def run_decoding(
    kernel: Kernel,
    spec: AttentionSpec,
    config: KernelConfig,
    case: DecodeCase,
    *,
    seed: int,
    device: str,
) -> Comparison:
    """One case of a decode or combine kernel, with fresh inputs from the seed."""
    if spec.direction == "combine":
        return _run_combine(kernel, spec, config, case, seed, device)
    q, cache = make_call(spec, case, seed, device)
    if spec.direction == "append":
        return run_append(kernel, spec, config, cache, q, case.splits, seed)
    scale = check_scale(None, spec.head_dim)
    features = make_features(spec, case, cache, seed, device)
    call = Decode(q=q, cache=cache, scale=scale, sms=1, splits=case.splits, features=features)
    parts = bind(kernel, spec, config)(call)
    return judge(*merged(parts, q.dtype), call, spec)


def merged(parts: Parts, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """O of `dtype` and LSE of all parts, merged in float64 over the parts that have keys."""
    if parts.whole:
        return parts.o, parts.lse
    o, lse = reference.merge(parts.o.double(), parts.lse.double())
    return o.to(dtype), lse.float()


def judge(o: Tensor, lse: Tensor, call: Decode, spec: AttentionSpec) -> Comparison:
    """The worst of all sequences of a call, each by reference.judge."""
    worst = Comparison(floors=0.0, lse=0.0)
    for number, q, k, v, own in eager_cache.sequences(call.q, call.cache, call.features):
        one = slice(number, number + 1)
        verdict = reference.judge(
            o[one], lse[one], q, k, v,
            scale=call.scale,
            diagonal=k.shape[2] - q.shape[2] if spec.causal else None,
            precision=spec.precision,
            features=own,
        )  # fmt: skip
        if not verdict.passed:
            return verdict
        worst = replace(
            worst, floors=max(worst.floors, verdict.floors), lse=max(worst.lse, verdict.lse)
        )
    return worst


def make_call(
    spec: AttentionSpec, case: DecodeCase, seed: int, device: torch.device | str
) -> tuple[Tensor, Cache]:
    """Random normal q (B, H, Sq, d) and cache of a case, with NaN where no sequence has a key.
    In an indexed cache the rows of the sequences are in random order among others; left pads
    include 0 and the whole length.
    """
    generator = torch.Generator().manual_seed(seed)
    dtype, batch = getattr(torch, spec.dtype), len(case.lengths)
    lengths = torch.tensor(case.lengths, dtype=torch.int32)

    def drawn(outer: int, heads: int, size: int, dim: int) -> Tensor:
        x = reference_cases.draw((outer, heads, size, dim), case.layout, generator)
        return reference_cases.moved(x, dtype, "cpu")

    q = drawn(batch, case.kv_heads * case.group, case.seq_q, spec.head_dim)
    table = None
    outer, size = batch, case.capacity
    if spec.paged:
        size, each = case.page_size, -(-case.capacity // case.page_size)
        outer = batch * each + SPARE_PAGES
        table = torch.randperm(outer, generator=generator)[: batch * each].int().view(batch, each)
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
    k = drawn(outer, case.kv_heads, size, spec.head_dim)
    v = drawn(outer, case.kv_heads, size, spec.head_dim_v)
    cache = Cache(k=k, v=v, lengths=lengths, block_table=table, rows=rows, leftpad=leftpad)
    _poison(cache)
    if spec.kv_dtype != "same":
        cache = _quantized(cache, spec, generator)
    fields = {name: getattr(cache, name) for name in Cache.__dataclass_fields__}
    here: dict[str, Any] = {n: x if x is None else x.to(device) for n, x in fields.items()}
    for name in ("k", "v"):
        here[name] = reference_cases.moved(fields[name], fields[name].dtype, device)
    return reference_cases.moved(q, dtype, device), Cache(**here)


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
    heads = case.kv_heads * case.group
    problem = Problem(
        batch=len(case.lengths), heads=heads, kv_heads=case.kv_heads, seq_q=case.seq_q,
        seq_k=cache.capacity,
    )  # fmt: skip
    drawn = CheckCase(problem=problem, layout=case.layout)
    features = reference_cases.make_features(spec, drawn, seed, device)
    bias, own = features.bias, (problem.batch, cache.capacity)
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


def _run_combine(
    kernel: Kernel, spec: AttentionSpec, config: KernelConfig, case: DecodeCase, seed: int,
    device: str,
) -> Comparison:  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    rows = (len(case.lengths), case.kv_heads * case.group, case.seq_q)
    o = torch.randn((case.splits, *rows, spec.head_dim_v), generator=generator)
    lse = 8.0 * torch.randn((case.splits, *rows), generator=generator)
    lse[torch.rand(lse.shape, generator=generator) < 0.3] = float("-inf")
    lse[:, 0, 0, 0] = float("-inf")  # a row for which no part has a key
    o[lse.isinf()] = float("nan")
    exact_o, exact_lse = reference.merge(o.double(), lse.double())
    q = reference_cases.draw((*rows, spec.head_dim_v), "bshd", generator)
    q = reference_cases.moved(q, getattr(torch, spec.dtype), device)
    parts = Parts(o=o.to(device), lse=lse.to(device))
    found, found_lse = bind(kernel, spec, config)(Combine(parts=parts, q=q))
    found, found_lse = found.cpu(), found_lse.cpu()
    largest = float(o.nan_to_num().abs().max())
    floors = reference.error_in_floors(found, exact_o, exact_o.to(found.dtype), largest)
    tolerance = reference.LSE_TOLERANCE * exact_lse.abs().clamp(min=1.0).nan_to_num(posinf=1.0)
    off = torch.where(exact_lse == found_lse, 0.0, exact_lse - found_lse) / tolerance
    return Comparison(floors=floors, lse=reference.max_abs(off))
