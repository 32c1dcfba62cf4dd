"""Launches the kernels that serve a cache: decode, combine and append.

A decode kernel writes O and LSE of each split; combine merges them, and is skipped for one split.
Append writes new keys and values into a cache, and may rotate them first. Grids and arguments
depend on shapes only, never on lengths, so a CUDA graph that captured a launch can be replayed with
other lengths.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from flashgen.inputs.cache import Cache
from flashgen.inputs.features import PLAIN, Features
from flashgen.kernels.arguments import (
    LOG2_E,
    Arguments,
    empty_like_layout,
    feature_arguments,
    near,
    positive_scale,
    strided,
)
from flashgen.kernels.launch_forward import Forward, Launch, lse_of_no_key
from flashgen.kernels.plan import KernelCall, Plan
from flashgen.kernels.stream_memory import endless
from flashgen.schedules.grid_rules import splits_of, streamed
from flashgen.schedules.numeric_class import segments
from flashgen.spec.problem import Problem


@dataclass(kw_only=True, eq=False)
class Decode(KernelCall["Parts"]):
    """One call of decode: q (B, H, Sq, d) in any strides with a contiguous last dimension, a cache
    of the same dtype, the softmax scale. splits None: as many as grid_rules.py gives for `sms`
    SMs. features: those that the spec names; the last dimension of a bias is the cache's capacity.

    Of packed sequences q is (1, H, places, d), and so are keys that are in no pages: the features
    say where they are, and the lengths of the cache are not read. There must be several splits.
    """

    q: Tensor
    cache: Cache
    scale: float
    sms: int
    splits: int | None = None
    features: Features = PLAIN

    @functools.cached_property
    def problem(self) -> Problem:
        """The sizes of the call, with every sequence as long as it may get."""
        batch, heads, seq_q, _ = self.q.shape
        seq_k, packed = self.cache.capacity, self.features.sequences
        if packed is not None:
            batch, seq_q, seq_k = packed.count, packed.max_q, packed.max_k
        return Problem(
            batch=batch, heads=heads, kv_heads=self.cache.k.shape[1], seq_q=seq_q, seq_k=seq_k
        )

    @property
    def streamed(self) -> Problem:
        """The sizes of the call, with the most keys that a window lets its queries see."""
        problem = self.problem
        left, _ = self.features.bounds(problem.seq_q, problem.seq_k)
        return streamed(problem, left)


def decode_of(call: Forward, sms: int, splits: int) -> Decode:
    """A forward whose keys are split. Its diagonal is the bottom-right one, if it has one."""
    packed, table = call.features.sequences, None
    if packed is None:
        lengths = endless(call.q.shape[0], call.q)
    else:
        lengths, table = packed.k_ends, packed.block_table
    cache = Cache(k=call.k, v=call.v, lengths=lengths, block_table=table)
    return Decode(
        q=call.q, cache=cache, scale=call.scale, sms=sms, splits=splits, features=call.features
    )


class Parts(NamedTuple):
    """The result of decode. For one split, o (B, H, Sq, d_v) of q's dtype and lse (B, H, Sq).
    For several, o (splits, B, H, Sq, d_v) and lse (splits, B, H, Sq), float32; of an invariant
    decode the maximum and the sum of each row in place of its LSE, (splits, 2, B, H, Sq).

    pdl: the decode lets the combine kernel start before it ends.
    """

    o: Tensor
    lse: Tensor
    pdl: bool = False

    @property
    def whole(self) -> bool:
        """Whether there is nothing to merge."""
        return self.lse.ndim == 3

    @property
    def splits(self) -> int:
        """How many they are."""
        return 1 if self.whole else self.lse.shape[0]


@dataclass(kw_only=True, eq=False)
class Combine(KernelCall[tuple[Tensor, Tensor]]):
    """Parts of several splits, and the q that they are of.

    The result is O (B, H, Sq, d_v) of q's dtype, laid out in memory as q is, and LSE (B, H, Sq).
    """

    parts: Parts
    q: Tensor


def run_decode(plan: Plan, call: Decode) -> Parts:
    """O and LSE of each split, or of all keys."""
    q, capacity, head_dim_v = call.q, call.cache.capacity, call.cache.v.shape[3]
    rows, empty_call = q.shape[:3], 0 in (*q.shape[:3], call.cache.k.shape[1])
    invariant = plan.spec.invariant
    if invariant:
        splits = segments(capacity, call.streamed.seq_k)
    else:
        splits = call.splits or splits_of(plan.config, call.streamed, call.sms)
    empty = functools.partial(torch.empty, dtype=torch.float32, device=q.device)
    if empty_call or capacity == 0 or splits == 1:
        o, lse = empty_like_layout(q, head_dim_v), empty(rows)
        if empty_call or capacity == 0:
            sinks = call.features.sinks
            lse[...] = lse_of_no_key(sinks, rows, plan.spec)
            return Parts(o=o.zero_(), lse=lse)
    else:
        o = empty((splits, *rows, head_dim_v))
        lse = empty((splits, 2, *rows) if invariant else (splits, *rows))
    parts = Parts(o=o, lse=lse, pdl=plan.config.pdl)
    plan.start(q, *decode_arguments(plan, call, parts, capacity))
    return parts


def decode_arguments(plan: Plan, call: Decode, parts: Parts, capacity: int) -> Launch:
    """How many programs the launch has, and its arguments. No tensor is empty."""
    cache, packed = call.cache, call.features.sequences
    batch, heads, seq_q, head_dim = call.q.shape
    kv_heads = cache.k.shape[1]
    o, lse = (parts.o[None], parts.lse[None]) if parts.whole else (parts.o, parts.lse)
    splits = o.shape[0]
    q, k, v = plan.in_eights(call.q, cache.k, cache.v)
    q, scale = positive_scale(q, call.scale)
    arguments = strided("q", q) | _cache_arguments(plan, cache, k, v, capacity)
    arguments |= strided("o", o[0]) | {
        "o_ptr": parts.o,
        "lse_ptr": parts.lse,
        "stride_part": o.stride(0) if splits > 1 else 0,
        "stride_lse": lse.stride(0) if splits > 1 else 0,
        "scale_log2e": scale * LOG2_E,
        "heads": heads,
        "group": heads // kv_heads,
        "seq_q": seq_q,
        "splits": splits,
        "head_dim": head_dim,
        "head_dim_v": v.shape[3],
    }
    if packed is not None:
        batch, seq_q = packed.count, max(1, packed.max_q)
        arguments |= {"total_q": q.shape[2], "total_k": capacity, "seq_q": seq_q}
    if plan.featured:
        shape = (batch, heads, seq_q, capacity)
        arguments |= feature_arguments(call.features, shape, q.device)
    tiles = -(-(heads // kv_heads) * seq_q // plan.config.br)
    blocks = batch * kv_heads * splits * tiles * plan.config.v_parts
    return blocks, arguments


def _cache_arguments(plan: Plan, cache: Cache, k: Tensor, v: Tensor, capacity: int) -> Arguments:
    """The arguments of a cache whose keys and values are k and v."""
    arguments: Arguments = {"lengths_ptr": cache.lengths, "seq_k": capacity}
    if (table := cache.block_table) is not None:
        arguments |= {"table_ptr": table, "stride_table": table.stride(0)}
        arguments["page_bits"] = cache.page_bits
    if cache.rows is not None:
        arguments["rows_ptr"] = cache.rows
    if cache.leftpad is not None:
        arguments["leftpad_ptr"] = cache.leftpad
    for name, scale in (("k_scale", cache.k_scale), ("v_scale", cache.v_scale)):
        if scale is not None:
            arguments |= strided(name, near(scale), ("_p", "_h") if scale.ndim == 2 else ("_h",))
    arguments |= strided("k", k) | strided("v", v)
    if cache.k_scale is not None and plan.config.widening != "native":
        arguments |= {"k_ptr": k.view(torch.int8), "v_ptr": v.view(torch.int8)}
    return arguments


def run_combine(plan: Plan, call: Combine) -> tuple[Tensor, Tensor]:
    """O and LSE of all splits together."""
    parts = call.parts
    count, batch, heads, seq_q, head_dim_v = parts.o.shape
    o = empty_like_layout(call.q, head_dim_v)
    lse = torch.empty((batch, heads, seq_q), dtype=torch.float32, device=call.q.device)
    if o.numel() == 0:
        return o, lse
    arguments = strided("o", o) | {
        "part_o_ptr": parts.o,
        "part_lse_ptr": parts.lse,
        "lse_ptr": lse,
        "stride_part": parts.o.stride(0),
        "stride_lse": parts.lse.stride(0),
        "heads": heads,
        "seq_q": seq_q,
        "count": count,
        "head_dim_v": head_dim_v,
    }
    plan.start(call.q, batch * heads * seq_q, arguments, pdl=parts.pdl)
    return o, lse


@dataclass(frozen=True, kw_only=True, eq=False)
class Rotation:
    """Rotary embedding: cos and sin (positions, rotary_dim / 2), a row for each key that fits the
    cache, and the q (B, H, Sq, d) to rotate with the new keys.

    q_step: 1 if query i is at position length + i; 0 if all are at position length.
    """

    q: Tensor
    cos: Tensor
    sin: Tensor
    q_step: int


@dataclass(kw_only=True, eq=False)
class Append(KernelCall[Tensor | None]):
    """New k (B, Hkv, S, d) and v (B, Hkv, S, d_v) for a cache of the same dtype or of 8 bits, whose
    lengths are those before.

    The result is the rotation's q, rotated; None without a rotation.
    """

    k: Tensor
    v: Tensor
    cache: Cache
    rotation: Rotation | None = None


def run_append(plan: Plan, call: Append) -> Tensor | None:
    """Write the keys and values into the cache, and rotate q."""
    k, v, rotation = call.k, call.v, call.rotation
    batch, kv_heads, rows, head_dim = k.shape
    arguments = strided("new_k", k) | strided("new_v", v)
    arguments |= _cache_arguments(plan, call.cache, call.cache.k, call.cache.v, call.cache.capacity)
    arguments |= {"heads": 0, "kv_heads": kv_heads, "new_keys": rows}
    arguments |= dict.fromkeys(("pool_pages", "cache_rows"), call.cache.k.shape[0])
    arguments |= {"head_dim": head_dim, "head_dim_v": v.shape[3]}
    rotated, heads = None, 0
    if rotation is not None:
        _, heads, seq_q, _ = rotation.q.shape
        rotated = empty_like_layout(rotation.q, head_dim)
        arguments |= _rotation_arguments(rotation, rotated)
        rows = max(rows, seq_q)
    blocks = batch * (kv_heads + heads) * -(-rows // plan.config.br)
    if blocks:
        plan.start(k, blocks, arguments)
    return rotated


def _rotation_arguments(rotation: Rotation, rotated: Tensor) -> Arguments:
    return {
        **strided("q", rotation.q),
        **strided("o", rotated),
        "cos_ptr": rotation.cos,
        "sin_ptr": rotation.sin,
        "stride_cos": rotation.cos.stride(0),
        "stride_sin": rotation.sin.stride(0),
        "heads": rotation.q.shape[1],
        "seq_q": rotation.q.shape[2],
        "rotary_dim": 2 * rotation.cos.shape[1],
        "q_step": rotation.q_step,
    }
