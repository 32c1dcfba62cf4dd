"""Launches the append kernel: new keys and values into a cache, rotated on the way if asked for.

As of a decode, the grid and the arguments follow from shapes alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flashgen.config import KernelConfig
from flashgen.decoding import Cache
from flashgen.launch import Kernel, Plan, empty_like_layout, on_device
from flashgen.spec import AttentionSpec


@dataclass(frozen=True, kw_only=True, eq=False)
class Rotation:
    """Rotary embedding: cos and sin (positions, rotary_dim / 2), a row for each key that the cache
    has room for, and the q (B, H, Sq, d) to rotate with the new keys.

    q_step: 1 where query i is at place length + i; 0 where all are at place length.
    """

    q: Tensor
    cos: Tensor
    sin: Tensor
    q_step: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Append:
    """New k (B, Hkv, S, d) and v (B, Hkv, S, d_v) for a cache of the same dtype or of 8 bits, whose
    lengths are those before.
    """

    k: Tensor
    v: Tensor
    cache: Cache
    rotation: Rotation | None = None


AppendBound = Callable[[Append], Tensor | None]


def bind_append(kernel: Kernel, spec: AttentionSpec, config: KernelConfig) -> AppendBound:
    """The launcher of an append kernel: writes into the cache of an Append, returns its q rotated,
    None where there is no rotation.
    """
    return functools.partial(_run, Plan(kernel, spec, config))


def _run(plan: Plan, call: Append) -> Tensor | None:
    k, v, cache, rotation = call.k, call.v, call.cache, call.rotation
    batch, kv_heads, new_keys, head_dim = k.shape
    tensors: list[Any] = [k, v, cache.k, cache.v]
    rows, heads, rotated = new_keys, 0, None
    if rotation is not None:
        q = rotation.q
        rotated = empty_like_layout(q, head_dim)
        tensors += [q, rotated]
        rows, heads = max(rows, q.shape[2]), q.shape[1]
    tensors.append(cache.lengths)
    if cache.block_table is not None:
        tensors.append(cache.block_table)
    if cache.rows is not None:
        tensors.append(cache.rows)
    if cache.k_scale is not None and cache.v_scale is not None:
        tensors += [cache.k_scale, cache.v_scale, *cache.k_scale.stride(), *cache.v_scale.stride()]
        tensors[2:4] = cache.k.view(torch.int8), cache.v.view(torch.int8)
    strided = [k, v, cache.k, cache.v]
    sizes = [heads, kv_heads, new_keys, cache.capacity]
    if rotation is not None and rotated is not None:
        tensors += [rotation.cos, rotation.sin]
        strided += [rotation.q, rotated]
        sizes += [rotation.q.shape[2], 2 * rotation.cos.shape[1], rotation.q_step]
    numbers: list[Any] = [stride for x in strided for stride in x.stride()[:3]]
    if cache.block_table is not None:
        numbers += [cache.block_table.stride(0), cache.page_bits]
    if rotation is not None:
        numbers += [rotation.cos.stride(0), rotation.sin.stride(0)]
    numbers += sizes
    if plan.any_dim:
        numbers += [head_dim, v.shape[3]]
    blocks = batch * (kv_heads + heads) * -(-rows // plan.br)
    if blocks:
        with on_device(k):
            plan.start(blocks, [*tensors, *numbers])
    return rotated
