"""Launches the kernels of the backward pass.

Given O, LSE and the gradients dO and dLSE: delta first, then dK and dV, dQ, and the gradient of the
bias, each by a kernel of its own direction. Every kernel recomputes P, and dropout's mask too.
Those here store nothing of the size of S; launch_ds.py has those that do.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from flashgen.errors import InvalidArgument
from flashgen.inputs.features import PLAIN, Features
from flashgen.kernels.arguments import (
    Arguments,
    empty_like_layout,
    feature_arguments,
    positive_scale,
    sizes,
)
from flashgen.kernels.descriptors import take_descriptors
from flashgen.kernels.launch_forward import order_limits
from flashgen.kernels.plan import KernelCall, Plan
from flashgen.kernels.stream_memory import counter
from flashgen.schedules import grid_rules
from flashgen.schedules.config import SCHEDULES
from flashgen.spec.vocabulary import padded


@dataclass(kw_only=True, eq=False)
class Delta(KernelCall[Tensor]):
    """o and do (B, H, Sq, d_v) and dlse (B, H, Sq) in any strides; dlse None is a gradient of 0.

    The result is delta = rowsum(dO * O) - dLSE, (B, H, Sq) float32.
    """

    o: Tensor
    do: Tensor
    dlse: Tensor | None


@dataclass(kw_only=True, eq=False)
class Backward(KernelCall[tuple[Tensor, ...]]):
    """The inputs of the backward kernels: the forward's arguments and LSE, dO, and delta.

    q (B, H, Sq, d), k (B, Hkv, Sk, d), v (B, Hkv, Sk, d_v), do (B, H, Sq, d_v) of one dtype, in any
    strides with a contiguous last dimension (of do, any: see contiguous_rows); lse and delta (B, H,
    Sq) float32.

    The result of backward_dkv is (dk, dv), of backward_dq (dq,), of backward_fused (dq, dk, dv):
    with the dtype and the memory layout of q, k and v. That of backward_dbias is (dbias,), of the
    bias's shape and dtype.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    lse: Tensor
    delta: Tensor
    scale: float
    diagonal: int | None
    features: Features = PLAIN

    def takes_descriptors(self) -> bool:
        """Whether the TMA unit can address what it loads."""
        return take_descriptors(self.q, self.k, self.v, self.do)


def contiguous_rows(x: Tensor) -> Tensor:
    """x, copied unless its last dimension is contiguous, as every kernel requires.

    Gradients come in any strides: that of a sum is one element expanded.
    """
    return x if x.stride(-1) == 1 else x.contiguous()


def run_delta(plan: Plan, call: Delta) -> Tensor:
    """The rowsum that Delta describes."""
    batch, heads, seq_q, head_dim_v = call.o.shape
    found = torch.empty((batch, heads, seq_q), dtype=torch.float32, device=call.o.device)
    if found.numel() == 0:
        return found
    o, do = plan.in_eights(contiguous_rows(call.o), contiguous_rows(call.do))
    dlse = found if call.dlse is None else call.dlse.float()
    step_b, step_h, step_s = dlse.stride()
    arguments: Arguments = plan.tensors(o=o, do=do) | {
        "dlse_ptr": dlse,
        "delta_ptr": found,
        "stride_dlb": step_b,
        "stride_dlh": step_h,
        "stride_dls": step_s,
        "heads": heads,
        "seq_q": seq_q,
        "dlse_rows": 0 if call.dlse is None else seq_q,
        "head_dim_v": head_dim_v,
    }
    plan.start(o, batch * heads * -(-seq_q // plan.config.br), arguments)
    return found


def run_dkv(plan: Plan, call: Backward) -> tuple[Tensor, ...]:
    """DK and dV."""
    dk, dv = empty_like(call.k), empty_like(call.v)
    if nothing_to_do(call):
        return dk.zero_(), dv.zero_()
    plan.start(call.q, _blocks(plan, call), backward_arguments(plan, call, dk=dk, dv=dv))
    return dk, dv


def run_fused(plan: Plan, call: Backward) -> tuple[Tensor, ...]:
    """DQ, dK and dV; dQ is summed in float32, in any order."""
    dq, dk, dv = empty_like(call.q), empty_like(call.k), empty_like(call.v)
    if nothing_to_do(call):
        return dq.zero_(), dk.zero_(), dv.zero_()
    seq_q, head_dim = call.q.shape[2:]
    its = SCHEDULES[plan.config.schedule]
    shape, order = its.added(call.q.shape, plan.config.br)
    added = torch.zeros(shape, dtype=torch.float32, device=call.q.device)
    arguments = backward_arguments(plan, call, dk=dk, dv=dv) | {"dq_ptr": added}
    plan.start(call.q, _blocks(plan, call), arguments)
    if order:
        added = added.permute(order).reshape(*call.q.shape[:2], -1, padded(head_dim))
    return dq.copy_(added[:, :, :seq_q, :head_dim].mul_(call.scale)), dk, dv


def run_dq(plan: Plan, call: Backward) -> tuple[Tensor, ...]:
    """DQ."""
    found = empty_like(call.q)
    if nothing_to_do(call):
        return (found.zero_(),)
    # q may carry the sign of the scale; K, which dQ is a sum of, does not.
    arguments = backward_arguments(plan, call, dq=found) | {"scale": call.scale}
    plan.start(call.q, _blocks(plan, call), arguments)
    return (found,)


def run_dbias(plan: Plan, call: Backward) -> tuple[Tensor, ...]:
    """The gradient of the bias, summed over the dimensions in which it is broadcast."""
    bias = call.features.bias
    assert bias is not None  # the spec has one
    if 0 in (call.q.numel(), call.k.numel()):
        return (torch.zeros_like(bias),)
    br, bc = plan.config.br, plan.config.bc
    lengths = (*call.q.shape[:3], call.k.shape[2])
    tiles, steps = [], []
    for own, length, tile in zip(bias.shape, lengths, (1, 1, br, bc), strict=True):
        count = -(-length // tile)
        tiles.append(count if own == length else 1)
        steps.append(1 if own == length else count)
    if math.prod(steps) >= 1 << 31:
        raise InvalidArgument(
            f"bias of shape {tuple(bias.shape)} has too many scores an element for its gradient, "
            f"{tuple(lengths)}: expand it"
        )
    rows = lengths[2] if bias.shape[2] == lengths[2] else br
    keys = lengths[3] if bias.shape[3] == lengths[3] else bc
    whole = bias.shape[2:] == lengths[2:]  # else these are parts of sums, not to be rounded yet
    found = torch.empty(
        (*bias.shape[:2], rows, keys),
        dtype=bias.dtype if whole else torch.float32,
        device=bias.device,
    )
    arguments = backward_arguments(plan, call) | {
        "dbias_ptr": found,
        "dbias_rows": rows,
        "dbias_keys": keys,
        "head_tiles": tiles[1],
        "row_tiles": tiles[2],
        "key_tiles": tiles[3],
        "batch_steps": steps[0],
        "head_steps": steps[1],
        "row_steps": steps[2],
        "key_steps": steps[3],
    }
    plan.start(call.q, tiles[0] * tiles[1] * tiles[2] * tiles[3], arguments)
    summed = [d for d in (2, 3) if found.shape[d] != bias.shape[d]]
    if summed:
        found = found.sum(summed, keepdim=True)
    return (found.to(bias.dtype),)


def empty_like(x: Tensor) -> Tensor:
    """A gradient of x, not written yet, laid out in memory as x is."""
    return empty_like_layout(x, x.shape[3])


def nothing_to_do(call: Backward) -> bool:
    """Whether all gradients are 0: there is no query, no key, or no packed sequence."""
    packed = call.features.sequences
    none_packed = packed is not None and packed.count == 0
    return none_packed or 0 in (call.q.numel(), call.k.numel(), call.v.numel())


def backward_arguments(plan: Plan, call: Backward, **gradients: Tensor) -> Arguments:
    """The arguments of a call, with the tensors that take its gradients."""
    packed = call.features.sequences
    q, scale = positive_scale(call.q, call.scale)
    q, k, v, do = plan.in_eights(q, call.k, call.v, contiguous_rows(call.do))
    arguments = plan.tensors(q=q, k=k, v=v, do=do, **gradients)
    arguments["lse_ptr"] = call.lse.contiguous()
    arguments["delta_ptr"] = call.delta.contiguous()
    arguments["scale"] = scale
    arguments |= sizes(q, v, scale, call.diagonal, packed)
    if plan.featured:
        batch, heads, seq_q, _ = q.shape
        shape = (batch if packed is None else packed.count, heads, seq_q, k.shape[2])
        arguments |= feature_arguments(call.features, shape, q.device, by_keys=plan.by_keys)
    if plan.config.order == "grouped":
        arguments["heads_together"] = _heads_together(plan, call)
    if plan.config.persistent:
        owned = call.k if plan.by_keys else call.q
        arguments["batch_heads"] = owned.shape[0] * owned.shape[1]
        arguments["counter_ptr"] = counter(q)
    return arguments


def _blocks(plan: Plan, call: Backward) -> int:
    """Programs of a launch: as many for each sequence and head as the longest has tiles, or, of a
    persistent kernel, SMs.
    """
    by_keys, packed, persistent = plan.by_keys, call.features.sequences, plan.config.persistent
    owned, tile = (call.k, plan.config.bc) if by_keys else (call.q, plan.config.br)
    batches, heads, rows, _ = owned.shape
    if packed is None:
        tiles = batches * -(-rows // tile)
    elif persistent:
        tiles = grid_rules.packed_tiles(rows, packed.count, tile)
    else:
        longest = max(1, packed.max_k if by_keys else packed.max_q)
        tiles = packed.count * -(-longest // tile)
    blocks = tiles * heads * SCHEDULES[plan.config.schedule].blocks_of_a_tile(plan.spec)
    sms = order_limits(call.q.device).sms
    return grid_rules.launched_blocks(blocks, sms, persistent=persistent)


def _heads_together(plan: Plan, call: Backward) -> int:
    """The heads to a run of order grouped."""
    (batch, heads, *_), kv_heads = call.q.shape, call.k.shape[1]
    packed, sms = call.features.sequences, order_limits(call.q.device).sms
    together = grid_rules.gradient_heads_together(heads // kv_heads, sms, by_keys=plan.by_keys)
    if packed is not None and not plan.config.persistent:  # whose runs are of one sequence
        batch = packed.count
    # The kernel multiplies it by tiles, in 32 bits: no more than there are heads.
    return min(together, batch * (kv_heads if plan.by_keys else heads))
