"""Launches the kernels that serve a cache: decode, combine and append.

A decode kernel writes O and LSE of each split; combine merges them, and is skipped for one split.
Append writes new keys and values into a cache, rotated first if asked. Grids and arguments depend
on shapes only, never on lengths, so a CUDA graph that captured a launch can be replayed with other
lengths.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flashgen.kernels.launch import (
    LOG2_E,
    Kernel,
    Plan,
    empty_like_layout,
    feature_arguments,
    in_eights,
    on_device,
    positive_scale,
)
from flashgen.reference.cache import Cache
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.config import KernelConfig
from flashgen.spec.features import PLAIN, Features
from flashgen.spec.grid_rules import splits_of, streamed
from flashgen.spec.problem import Problem


@dataclass(frozen=True, kw_only=True, eq=False)
class Decode:
    """One call of decode: q (B, H, Sq, d) in any strides with a contiguous last dimension, a cache
    of the same dtype, the softmax scale. splits None: as many as spec/grid_rules.py says for `sms`
    SMs. features: those that the spec asks for; the last dimension of a bias is the cache's
    capacity.
    """

    q: Tensor
    cache: Cache
    scale: float
    sms: int
    splits: int | None = None
    features: Features = PLAIN

    @property
    def problem(self) -> Problem:
        """The sizes of the call, with every sequence as long as it may get."""
        batch, heads, seq_q, _ = self.q.shape
        return Problem(
            batch=batch,
            heads=heads,
            kv_heads=self.cache.k.shape[1],
            seq_q=seq_q,
            seq_k=self.cache.capacity,
        )

    @property
    def streamed(self) -> Problem:
        """The sizes of the call, with the most keys that a window lets its queries see."""
        problem = self.problem
        left, _ = self.features.bounds(problem.seq_q, problem.seq_k)
        return streamed(problem, left)


@dataclass(frozen=True, kw_only=True, eq=False)
class Parts:
    """What decode leaves. o (B, H, Sq, d_v) of q's dtype and lse (B, H, Sq): of one split, the
    result. Of several, o (splits, B, H, Sq, d_v) and lse (splits, B, H, Sq), float32.
    """

    o: Tensor
    lse: Tensor

    @property
    def whole(self) -> bool:
        """Whether there is nothing to merge."""
        return self.lse.ndim == 3


class DecodeBound:
    """A decode kernel with all settled that does not depend on the call."""

    __slots__ = ("plan",)

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def __call__(self, call: Decode) -> Parts:
        """O and LSE of each split, or of all keys."""
        return _run_decode(self.plan, call)


class CombineBound:
    """A combine kernel with all settled that does not depend on the call."""

    __slots__ = ("plan",)

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def __call__(self, parts: Parts, q: Tensor) -> tuple[Tensor, Tensor]:
        """O (B, H, Sq, d_v) of q's dtype, laid out in memory as q is, and LSE (B, H, Sq)."""
        return _run_combine(self.plan, parts, q)


def bind_decode(kernel: Kernel, spec: AttentionSpec, config: KernelConfig) -> DecodeBound:
    """The launcher of a decode kernel: takes a Decode, returns its Parts."""
    return DecodeBound(Plan(kernel, spec, config))


def bind_combine(kernel: Kernel, spec: AttentionSpec, config: KernelConfig) -> CombineBound:
    """The launcher of a combine kernel: takes Parts and the q they are of."""
    return CombineBound(Plan(kernel, spec, config))


def _run_decode(plan: Plan, call: Decode) -> Parts:
    q, cache, problem = call.q, call.cache, call.problem
    head_dim_v = cache.v.shape[3]
    rows = (problem.batch, problem.heads, problem.seq_q)
    splits = call.splits or splits_of(plan.config, call.streamed, call.sms)
    empty = functools.partial(torch.empty, dtype=torch.float32, device=q.device)
    if problem.empty or problem.seq_k == 0 or splits == 1:
        o, lse = empty_like_layout(q, head_dim_v), empty(rows)
        if problem.seq_k == 0 or problem.empty:
            sinks = call.features.sinks
            unseen = -torch.inf if sinks is None else sinks[:, None].expand(rows)
            lse[...] = unseen
            return Parts(o=o.zero_(), lse=lse)
    else:
        o, lse = empty((splits, *rows, head_dim_v)), empty((splits, *rows))
    parts = Parts(o=o, lse=lse)
    _launch(plan, q, *arguments_of_decode(plan, call, parts))
    return parts


def arguments_of_decode(plan: Plan, call: Decode, parts: Parts) -> tuple[int, list[Any]]:
    """How many programs a decode launch has, whose tensors are not empty, and what they are handed:
    first q, k, v, o, lse, lengths and, of pages, the block table.
    """
    q, cache, problem = call.q, call.cache, call.problem
    o, lse, head_dim_v = parts.o, parts.lse, cache.v.shape[3]
    if parts.whole:
        splits, out = 1, [*o.stride()[:3], 0, 0]
    else:
        splits, out = o.shape[0], [*o.stride()[1:4], o.stride(0), lse.stride(0)]
    q, scale = positive_scale(q, call.scale)
    k, v = cache.k, cache.v
    if plan.rows_of_eight:
        q, k, v = in_eights(q), in_eights(k), in_eights(v)
    table = cache.block_table
    tensors: list[Any] = [q, k, v, o, lse, cache.lengths]
    strides = [*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out]
    if table is not None:
        tensors.append(table)
        strides += [table.stride(0), cache.page_bits]
    tensors += [x for x in (cache.rows, cache.leftpad) if x is not None]
    if cache.k_scale is not None and cache.v_scale is not None:
        tensors += [cache.k_scale, cache.v_scale, *cache.k_scale.stride(), *cache.v_scale.stride()]
        if not plan.native:
            tensors[1:3] = k.view(torch.int8), v.view(torch.int8)
    sizes: list[Any] = [scale * LOG2_E, problem.heads, problem.group, problem.seq_q]
    sizes += [problem.seq_k, splits]
    if plan.any_dim:
        sizes += [q.shape[3], head_dim_v]
    if plan.has_features:
        shape = (problem.batch, problem.heads, problem.seq_q, problem.seq_k)
        sizes += feature_arguments(plan, call.features, *shape)
    tiles = -(-problem.group * problem.seq_q // plan.br)
    blocks = problem.batch * problem.kv_heads * splits * tiles * plan.v_parts
    return blocks, [*tensors, *strides, *sizes]


def _run_combine(plan: Plan, parts: Parts, q: Tensor) -> tuple[Tensor, Tensor]:
    _, batch, heads, seq_q, head_dim_v = parts.o.shape
    o = empty_like_layout(q, head_dim_v)
    lse = torch.empty((batch, heads, seq_q), dtype=torch.float32, device=q.device)
    if o.numel() == 0:
        return o, lse
    _launch(plan, q, *arguments_of_combine(plan, parts, o, lse))
    return o, lse


def arguments_of_combine(plan: Plan, parts: Parts, o: Tensor, lse: Tensor) -> tuple[int, list[Any]]:
    """How many programs a combine launch has, and what they are handed: first O and LSE of the
    parts, and of the result.
    """
    count, batch, heads, seq_q, head_dim_v = parts.o.shape
    strides = [parts.o.stride(0), parts.lse.stride(0), *o.stride()[:3]]
    sizes = [heads, seq_q, count]
    if plan.any_dim:
        sizes.append(head_dim_v)
    return batch * heads * seq_q, [parts.o, parts.lse, o, lse, *strides, *sizes]


def _launch(plan: Plan, q: Tensor, blocks: int, arguments: list[Any]) -> None:
    with on_device(q):
        plan.start(blocks, arguments)


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
