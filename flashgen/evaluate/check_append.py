"""The check of the append kernel: what it writes is compared in floors, and what it must not write
has to stay bit for bit.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from flashgen.inputs.cache import Cache
from flashgen.kernels.launch_cache import Append, Rotation
from flashgen.reference import attention as reference
from flashgen.reference import cases as reference_cases
from flashgen.reference.attention import Comparison
from flashgen.reference.cases import Trial
from flashgen.runtime.eager import cache as eager_cache
from flashgen.spec.attention import AttentionSpec


def append_trial(
    spec: AttentionSpec, cache: Cache, queries: Tensor, new_keys: int, seed: int
) -> Trial:
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
    own = (reference_cases.moved(x, x.dtype, device) for x in (cache.k, cache.v))
    written = replace(cache, **dict(zip("kv", own, strict=True)))
    call = Append(k=k, v=v, cache=written, rotation=rotation)
    return Trial(call=call, compare=partial(_judge, call=call, before=cache, spec=spec))


def _judge(
    rotated: Tensor | None, *, call: Append, before: Cache, spec: AttentionSpec
) -> Comparison:
    """Queries rotated, and the cache that the call has written, beside those before."""
    found, rotation = call.cache, call.rotation
    exact_k = call.k.double()
    parts: list[Comparison] = []
    if rotation is not None and rotated is not None:
        exact_k, exact_q = rotated_pair(exact_k, rotation.q.double(), rotation, before, spec)
        parts.append(_error(rotated, exact_q, rotation.q))
    elif spec.kv_dtype != "same" and not _same_bytes(found, call.k, call.v, before):
        return Comparison(floors=float("inf"))
    expected = replace(before, k=_wide(before.k), v=_wide(before.v))
    eager_cache.write(expected, exact_k, call.v.double())
    pairs = ((found.k, expected.k, before.k), (found.v, expected.v, before.v))
    return reference.worst([*parts, *(_error(*each) for each in pairs)])


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


def _error(found: Tensor, exact: Tensor, before: Tensor) -> Comparison:
    """The errors; infinite if anything was written that must not change."""
    if found.element_size() == 1:
        ideal = eager_cache.quantized(exact, found.dtype).float()
        exact = exact.clamp(ideal.min(), ideal.max())
        found, before = found.float(), before.float()
    else:
        ideal = exact.to(found.dtype)
    kept = ideal == before
    if not torch.equal(found[kept], before[kept]):
        return Comparison(floors=float("inf"))
    return reference.compared(found, exact, ideal, reference.max_abs(exact))


def _same_bytes(found: Cache, k: Tensor, v: Tensor, before: Cache) -> bool:
    """Whether an 8-bit cache equals what torch computes, to the bit: one float32 division and
    one rounding have a unique result.
    """
    wanted = replace(before, k=before.k.clone(), v=before.v.clone())
    eager_cache.write(wanted, k, v)
    pairs = ((found.k, wanted.k), (found.v, wanted.v))
    return all(torch.equal(a.view(torch.int8), b.view(torch.int8)) for a, b in pairs)


def _without_nan(x: Tensor) -> Tensor:
    """X with 0 for NaN, in its own strides."""
    if x.dtype == torch.int8:
        return x
    made = reference_cases.moved(x, x.dtype, x.device)
    return made.copy_(x.float().nan_to_num())


def _wide(x: Tensor) -> Tensor:
    """The elements of a cache as float64."""
    return x.float().double() if x.element_size() == 1 else x.double()
