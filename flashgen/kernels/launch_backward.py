"""Launches the kernels of the backward pass; kernels/launch.py does so for the forward.

Of O, LSE and the gradients dO and dLSE: delta first, then dK and dV, dQ, and the bias's gradient,
each by a kernel of its own direction. P is recomputed by every kernel, dropout's mask too, so
nothing of the size of S is kept or made.
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
    describe,
    describe_for_gluon,
    diagonal_argument,
    empty_like_layout,
    feature_arguments,
    in_eights,
    on_device,
    place_arguments,
    positive_scale,
)
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.config import WARPGROUP_ROWS, KernelConfig
from flashgen.spec.features import PLAIN, Features


@dataclass(frozen=True, kw_only=True, eq=False)
class Backward:
    """What the backward kernels read: the forward's arguments and LSE, dO, and delta.

    q (B, H, Sq, d), k (B, Hkv, Sk, d), v (B, Hkv, Sk, d_v), do (B, H, Sq, d_v) of one dtype, in any
    strides with a contiguous last dimension (of do, any: see contiguous_rows); lse and delta
    (B, H, Sq) float32.
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


DeltaBound = Callable[[Tensor, Tensor, Tensor | None], Tensor]
BackwardBound = Callable[[Backward], tuple[Tensor, ...]]


def contiguous_rows(x: Tensor) -> Tensor:
    """x, copied unless its last dimension is contiguous, as every kernel asks.

    Gradients come in any strides: that of a sum is one element expanded.
    """
    return x if x.stride(-1) == 1 else x.contiguous()


def bind_delta(kernel: Kernel, spec: AttentionSpec, config: KernelConfig) -> DeltaBound:
    """The launcher of a backward_delta kernel: takes o, do and dlse, or None where the LSE has no
    gradient; returns delta = rowsum(dO * O) - dLSE, (B, H, Sq) float32.

    o and do (B, H, Sq, d_v), dlse (B, H, Sq), in any strides.
    """
    return functools.partial(_run_delta, Plan(kernel, spec, config))


def bind_backward(kernel: Kernel, spec: AttentionSpec, config: KernelConfig) -> BackwardBound:
    """The launcher of any other backward kernel: takes a Backward, returns its gradients.

    backward_dkv: (dk, dv). backward_dq: (dq,). backward_fused: (dq, dk, dv). They have the dtype
    and lie in memory as q, k and v do. backward_dbias: (dbias,), of the bias's shape and dtype.
    """
    return functools.partial(_RUN[spec.direction], Plan(kernel, spec, config))


def _run_delta(plan: Plan, o: Tensor, do: Tensor, dlse: Tensor | None) -> Tensor:
    batch, heads, seq_q, head_dim_v = o.shape
    delta = torch.empty((batch, heads, seq_q), dtype=torch.float32, device=o.device)
    if delta.numel() == 0:
        return delta
    o, do = contiguous_rows(o), contiguous_rows(do)
    if plan.rows_of_eight:
        o, do = in_eights(o), in_eights(do)
    rows = 0 if dlse is None else seq_q
    dlse = delta if dlse is None else dlse.float()
    strides = [*o.stride()[:3], *do.stride()[:3], *dlse.stride()]
    sizes = [heads, seq_q, rows]
    if plan.any_dim:
        sizes.append(head_dim_v)
    grid = batch * heads * -(-seq_q // plan.br)
    _launch(plan, grid, [o, do, dlse, delta, *strides, *sizes])
    return delta


def _run_dkv(plan: Plan, call: Backward) -> tuple[Tensor, ...]:
    """DK and dV, and where the kernel is the fused one dQ before them."""
    q, k, v = call.q, call.k, call.v
    dk, dv = empty_like_layout(k, k.shape[3]), empty_like_layout(v, v.shape[3])
    fused = plan.direction == "backward_fused"
    added = torch.zeros(q.shape, dtype=torch.float32, device=q.device) if fused else None
    if q.numel() == 0 or dk.numel() == 0 or _none_packed(call):
        dk.zero_(), dv.zero_()
    else:
        tensors, scale = _operands(plan, call)
        strided = [*tensors, dk, dv]
        rows = [call.lse.contiguous(), call.delta.contiguous()]
        if added is not None:
            rows.append(added)
        arguments = _addresses(plan, strided, "rkkrKK", rows)
        _launch(plan, _blocks(plan, call), [*arguments, scale, *_sizes(plan, call, scale)])
    if added is None:
        return dk, dv
    dq = empty_like_layout(q, q.shape[3])
    torch.mul(added, call.scale, out=added)
    return dq.copy_(added), dk, dv


def _run_dq(plan: Plan, call: Backward) -> tuple[Tensor, ...]:
    q, k = call.q, call.k
    dq = empty_like_layout(q, q.shape[3])
    if dq.numel() == 0 or k.numel() == 0 or _none_packed(call):
        return (dq.zero_(),)
    tensors, scale = _operands(plan, call)
    rows = [call.lse.contiguous(), call.delta.contiguous()]
    arguments = _addresses(plan, [*tensors, dq], "RkkRR", rows)
    # q may carry the sign of the scale: K, which dQ is a sum of, does not.
    _launch(plan, _blocks(plan, call), [*arguments, call.scale, *_sizes(plan, call, scale)])
    return (dq,)


def _run_dbias(plan: Plan, call: Backward) -> tuple[Tensor, ...]:
    bias = call.features.bias
    assert bias is not None  # the spec has one
    batch, heads, seq_q, _ = call.q.shape
    seq_k = call.k.shape[2]
    if 0 in (call.q.numel(), call.k.numel()):
        return (torch.zeros_like(bias),)
    tiles, steps = [], []
    for own, length, tile in zip(
        bias.shape, (batch, heads, seq_q, seq_k), (1, 1, plan.br, plan.bc), strict=True
    ):
        count = -(-length // tile)
        tiles.append(count if own == length else 1)
        steps.append(1 if own == length else count)
    rows = seq_q if bias.shape[2] == seq_q else plan.br
    keys = seq_k if bias.shape[3] == seq_k else plan.bc
    whole = bias.shape[2:] == (seq_q, seq_k)  # else these are parts of sums, not to be rounded yet
    dbias = torch.empty(
        (*bias.shape[:2], rows, keys),
        dtype=bias.dtype if whole else torch.float32,
        device=bias.device,
    )
    tensors, scale = _operands(plan, call)
    between = [dbias, call.lse.contiguous(), call.delta.contiguous()]
    arguments = _addresses(plan, tensors, "rkkr", between)
    arguments += _sizes(plan, call, scale)
    arguments += [rows, keys, tiles[2], tiles[3], tiles[1], steps[2], steps[3], steps[1], steps[0]]
    _launch(plan, tiles[0] * tiles[1] * tiles[2] * tiles[3], arguments)
    summed = [d for d in (2, 3) if dbias.shape[d] != bias.shape[d]]
    if summed:
        dbias = dbias.sum(summed, keepdim=True)
    return (dbias.to(bias.dtype),)


_RUN: dict[str, Callable[[Plan, Backward], tuple[Tensor, ...]]] = {
    "backward_dkv": _run_dkv,
    "backward_dq": _run_dq,
    "backward_fused": _run_dkv,
    "backward_dbias": _run_dbias,
}


def _operands(plan: Plan, call: Backward) -> tuple[list[Tensor], float]:
    """q, k, v and do as the kernel takes them, and a scale above 0."""
    q, scale = positive_scale(call.q, call.scale)
    tensors = [q, call.k, call.v, contiguous_rows(call.do)]
    return [in_eights(x) for x in tensors] if plan.rows_of_eight else tensors, scale


def _addresses(plan: Plan, tensors: list[Tensor], tiles: str, between: list[Tensor]) -> list[Any]:
    """Pointers, what stands between, and strides; or descriptors, whose tiles have br ("r") or bc
    ("k") rows, or as many of them as one consumer of schedule hopper owns ("R", "K").
    """
    if not plan.by_descriptor:
        strides = (stride for x in tensors for stride in x.stride()[plan.outer : 3])
        return [*tensors, *between, *strides]
    rows = {"r": plan.br, "k": plan.bc, "R": plan.br, "K": plan.bc}
    if plan.hopper:
        rows |= dict.fromkeys("RK", WARPGROUP_ROWS)
    descriptor = describe_for_gluon if plan.hopper else describe
    described = [
        descriptor(x, rows[tile], max(16, 1 << (x.shape[3] - 1).bit_length()))
        for x, tile in zip(tensors, tiles, strict=True)
    ]
    return [*described, *between]


def _sizes(plan: Plan, call: Backward, scale: float) -> list[Any]:
    """The numbers after the scale, and the features."""
    batch, heads, seq_q, head_dim = call.q.shape
    _, kv_heads, seq_k, head_dim_v = call.v.shape
    sizes: list[Any] = [scale * LOG2_E, heads, heads // kv_heads, seq_q]
    if call.features.sequences is None or plan.counts_keys:
        sizes.append(seq_k)
    if (packed := call.features.sequences) is not None:
        batch = packed.count
        sizes.append(max(1, packed.max_k if plan.by_keys else packed.max_q))
    if plan.takes_diagonal:
        sizes.append(diagonal_argument(call.diagonal, seq_q, seq_k, packed))
    if plan.any_dim:
        sizes += [head_dim, head_dim_v]
    if plan.has_features:
        sizes += feature_arguments(plan, call.features, batch, heads, seq_q, seq_k)
        # Behind these, dBias takes numbers of its own: with a bias there are no such arguments.
        sizes += place_arguments(plan, call.features)
    return sizes


def _blocks(plan: Plan, call: Backward) -> int:
    """Programs of a launch: as many for each sequence and head as the longest has tiles."""
    by_keys, packed = plan.by_keys, call.features.sequences
    owned, tile = (call.k, plan.bc) if by_keys else (call.q, plan.br)
    batches, heads, longest, _ = owned.shape
    if packed is not None:
        batches, longest = packed.count, max(1, packed.max_k if by_keys else packed.max_q)
    return batches * heads * -(-longest // tile)


def _none_packed(call: Backward) -> bool:
    """Whether the tensors are packed, and hold no sequence."""
    return call.features.sequences is not None and call.features.sequences.count == 0


def _launch(plan: Plan, blocks: int, arguments: list[Any]) -> None:
    first = arguments[0]
    with on_device(first.base if plan.by_descriptor else first):
        plan.start(blocks, arguments)
