"""Launches the kernels of the forward pass."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from flashgen.inputs.features import PLAIN, Features, as_kernels_add
from flashgen.kernels.arguments import (
    LN_2,
    LOG2_E,
    Arguments,
    empty_like_layout,
    feature_arguments,
    positive_scale,
    sizes,
)
from flashgen.kernels.descriptors import take_descriptors, take_pages
from flashgen.kernels.plan import KernelCall, Plan
from flashgen.kernels.stream_memory import counter
from flashgen.schedules import grid_rules
from flashgen.schedules.config import SCHEDULES
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.vocabulary import padded


@dataclass(kw_only=True, eq=False)
class Forward(KernelCall[tuple[Tensor, Tensor]]):
    """q (B, H, Sq, d), k (B, Hkv, Sk, d), v (B, Hkv, Sk, d_v) in any strides with a contiguous last
    dimension; diagonal as spec.diagonal_of gives it; the features that the spec names.

    The result is O (B, H, Sq, d_v), laid out in memory as q is, of q's dtype or the one that fp8
    names, and LSE (B, H, Sq) float32, natural logarithm.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    diagonal: int | None
    features: Features = PLAIN

    def takes_descriptors(self) -> bool:
        """Whether the TMA unit can address what it loads."""
        packed = self.features.sequences
        fits = packed is None or packed.block_table is None or take_pages(self.k, self.v)
        return fits and take_descriptors(self.q, self.k, self.v)


Launch = tuple[int, Arguments]
"""How many programs a launch has, and its arguments."""


def run_forward(plan: Plan, call: Forward) -> tuple[Tensor, Tensor]:
    """O and LSE, as Forward describes them. Raises whatever Triton raises."""
    q, k, v, features = call.q, call.k, call.v, call.features
    of_o = None if features.fp8 is None else getattr(torch, features.fp8.dtype)
    o = empty_like_layout(q, v.shape[3], of_o)
    batch, heads, seq_q, _ = q.shape
    lse = q.new_empty((batch, heads, seq_q), dtype=torch.float32)
    if o.numel() == 0:
        return o, lse
    packed = features.sequences
    if packed is None and k.shape[2] == 0:
        lse[...] = lse_of_no_key(features.sinks, lse.shape, plan.spec)
        return o.zero_(), lse
    if packed is not None and packed.count == 0:
        return o.zero_(), lse.fill_(-math.inf)
    plan.start(q, *forward_arguments(plan, call, o, lse))
    return o, lse


def lse_of_no_key(
    sinks: Tensor | None, shape: tuple[int, ...], spec: AttentionSpec
) -> Tensor | float:
    """The LSE of rows (B, H, Sq) without a key; of an invariant spec with the kernels' rounding."""
    if sinks is None:
        return -math.inf
    lse = as_kernels_add(sinks.float())
    lse = lse.masked_fill(lse == math.inf, math.nan)[:, None].expand(shape)
    return lse * LOG2_E * LN_2 if spec.invariant else lse


def forward_arguments(plan: Plan, call: Forward, o: Tensor, lse: Tensor) -> Launch:
    """How many programs the launch has, and its arguments. No tensor is empty."""
    features = call.features
    packed = features.sequences
    q, k, v = plan.in_eights(call.q, call.k, call.v)
    q, scale = positive_scale(q, call.scale)
    batch, heads, seq_q, _ = q.shape
    seq_k, longest = k.shape[2], seq_q
    if packed is not None:
        batch, longest = packed.count, max(1, packed.max_q)
        seq_k = packed.most_keys(seq_k)
    arguments = plan.tensors(q=q, k=k, v=v, o=o)
    if packed is not None and packed.paged and plan.by_descriptor:
        arguments |= rows_of_pages(k=k, v=v)
    arguments["lse_ptr"] = lse
    arguments |= sizes(q, v, scale, call.diagonal, packed)
    if plan.featured:
        arguments |= feature_arguments(features, (batch, heads, seq_q, seq_k), q.device)
    blocks = batch * heads * plan.config.v_parts
    if SCHEDULES[plan.config.schedule].state_in_memory:
        return blocks, arguments | _scratch(plan, q)
    persistent = plan.config.persistent
    if packed is not None and persistent:
        blocks = heads * grid_rules.packed_tiles(seq_q, packed.count, plan.config.br)
    else:
        blocks *= -(-longest // plan.config.br)
    if plan.config.takes_heads:
        arguments |= _order_arguments(q, v)
        sms = order_limits(q.device).sms
        blocks = grid_rules.launched_blocks(blocks, sms, persistent=persistent)
        if persistent:
            arguments["counter_ptr"] = counter(q)
    return blocks, arguments


def rows_of_pages(**pools: Tensor) -> Arguments:
    """How many rows a page of K and V takes, of those that their descriptors count."""
    return {f"rows_of_{name}_page": x.stride(0) // x.stride(2) for name, x in pools.items()}


def _order_arguments(q: Tensor, v: Tensor) -> Arguments:
    """The arguments of kernels that order the tiles of all heads."""
    batch, heads, _, head_dim = q.shape
    _, kv_heads, seq_k, head_dim_v = v.shape
    of_a_key = q.element_size() * (head_dim + head_dim_v)
    l2_bytes = order_limits(q.device).l2_bytes
    together = grid_rules.heads_together(of_a_key, seq_k, heads // kv_heads, l2_bytes)
    # The kernel multiplies heads_together by tiles, in 32 bits.
    return {"batch_heads": batch * heads, "heads_together": min(together, batch * heads)}


class OrderLimits(NamedTuple):
    """What of a device orders of tiles depend on."""

    sms: int
    l2_bytes: int


INTERPRETED = OrderLimits(sms=5, l2_bytes=1 << 15)
"""Of the CPU, where kernels are interpreted: so small that runs and strides are many and ragged."""


@functools.cache
def order_limits(device: torch.device) -> OrderLimits:
    """Those of a device."""
    if device.type != "cuda":
        return INTERPRETED
    found = torch.cuda.get_device_properties(device)
    return OrderLimits(sms=found.multi_processor_count, l2_bytes=found.L2_cache_size)


def _scratch(plan: Plan, q: Tensor) -> Arguments:
    """FlashAttention-1's state in memory: O, row sum and row maximum, float32."""
    empty = functools.partial(torch.empty, dtype=torch.float32, device=q.device)
    rows = q.shape[:3]
    return {
        "acc_ptr": empty((*rows, padded(plan.spec.head_dim_v))),
        "sum_ptr": empty(rows),
        "max_ptr": empty(rows),
    }
