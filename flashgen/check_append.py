"""The append kernel against torch: check_decode.py draws the caches.

What is written is judged in floors, as O is. What is not to be written must stay, bit for bit.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from flashgen import decoding, nasty, reference
from flashgen.config import KernelConfig
from flashgen.decoding import Cache
from flashgen.launch import Kernel
from flashgen.launch_append import Append, Rotation, bind_append
from flashgen.reference import Verdict
from flashgen.spec import AttentionSpec


def run_append(
    kernel: Kernel,
    spec: AttentionSpec,
    config: KernelConfig,
    cache: Cache,
    queries: Tensor,
    new_keys: int,
    seed: int,
) -> Verdict:
    """Append `new_keys` drawn keys to a cache, and rotate queries (B, H, Sq, d) if spec does so."""
    device, dtype = cache.k.device, queries.dtype
    generator = torch.Generator().manual_seed(seed + 1)
    batch, heads = queries.shape[0], cache.k.shape[1]
    cache = replace(cache, k=_without_nan(cache.k), v=_without_nan(cache.v))

    def drawn(dim: int) -> Tensor:
        x = nasty.draw((batch, heads, new_keys, dim), "bshd", generator)
        return nasty.moved(x, dtype, device)

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
    decoding.append(expected, exact_k, v.double())
    found = replace(cache, k=cache.k.clone(), v=cache.v.clone())
    q = bind_append(kernel, spec, config)(Append(k=k, v=v, cache=found, rotation=rotation))
    if spec.kv_dtype != "same" and rotation is None and not _same_bytes(found, k, v, cache):
        return Verdict(floors=float("inf"), lse=0.0)
    verdicts = [_error(found.k, expected.k, cache.k), _error(found.v, expected.v, cache.v)]
    if q is not None:
        verdicts.append(_error(q, exact_q, queries))
    return Verdict(floors=max(verdicts), lse=0.0)


def rotated_pair(
    k: Tensor, q: Tensor, rotation: Rotation, cache: Cache, spec: AttentionSpec
) -> tuple[Tensor, Tensor]:
    """K and Q rotated, each at its places behind the keys of the cache; torch alone."""

    def turned(x: Tensor, step: int) -> Tensor:
        steps = torch.arange(x.shape[2], device=x.device) * step
        places = cache.lengths.long().clamp(min=0)[:, None] + steps
        places = places.clamp(max=max(cache.capacity - 1, 0))
        interleaved = spec.rotary == "interleaved"
        return decoding.rotated(x, rotation.cos, rotation.sin, places, interleaved=interleaved)

    return turned(k, 1), turned(q, rotation.q_step)


def _error(found: Tensor, exact: Tensor, before: Tensor) -> float:
    """The error in floors; infinite where something else was written than should be."""
    if found.element_size() == 1:
        ideal = decoding.quantized(exact, found.dtype).float()
        exact = exact.clamp(ideal.min(), ideal.max())
        found, before = found.float(), before.float()
    else:
        ideal = exact.to(found.dtype)
    kept = ideal == before
    if not torch.equal(found[kept], before[kept]):
        return float("inf")
    return reference.error_in_floors(found, exact, ideal, reference.max_abs(exact))


def _same_bytes(found: Cache, k: Tensor, v: Tensor, before: Cache) -> bool:
    """Whether an 8-bit cache holds what torch makes of it, to the bit: a division in float32 and
    one rounding leave no choice.
    """
    wanted = replace(before, k=before.k.clone(), v=before.v.clone())
    decoding.append(wanted, k, v)
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
