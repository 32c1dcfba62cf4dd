"""The check of the two kernels that have dS in memory: what dQ is made of, and what was stored.

The heads of all sequences lie one behind the other, (1, B * H, Sk, Sq) in whole tiles, packed ones
with the lengths of the longest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from flashgen.kernels.ds_runs import DsSizes
from flashgen.kernels.launch_ds import DqOfDs, ds_like
from flashgen.reference import gradients
from flashgen.reference.attention import Comparison
from flashgen.runtime.eager import attention as eager
from flashgen.runtime.eager.gradients import GradientInputs, score_gradients
from flashgen.schedules.legality import DS_TILE

_Place = tuple[int, slice, slice, slice]


def dq_call(inputs: GradientInputs, lse: Tensor, delta: Tensor) -> DqOfDs:
    """The call of a kernel that makes dQ of dS, of an ideally rounded dS: NaN in the tiles that no
    row sees, which are in no memory.
    """
    x = inputs
    with eager.float32_products():
        _, ds = score_gradients(_operands(x), lse, delta)
    ds = eager.operand(ds.to(x.q.dtype), x.precision).to(x.q.dtype)
    seen = ~torch.isinf(eager.scores(x.q, x.k, x.scale, x.diagonal, x.features))
    stored = ds_like(x.q, DsSizes.of(x.q, x.k, x.diagonal, x.features))
    heads = _by_sequence(stored, x)
    for sequence, (n, own, rows, keys) in enumerate(_places(x)):
        heads[sequence, :, : _length(rows), : _length(keys)] = torch.where(
            _tiles(seen[n, own, rows, keys]), ds[n, own, rows, keys], float("nan")
        )
    given = {name: getattr(x, name) for name in ("q", "k", "scale", "diagonal", "features")}
    return DqOfDs(**given, ds=stored)


def _operands(x: GradientInputs) -> GradientInputs:
    """The same, with tensors in float32 as a kernel multiplies them."""
    q, k, v, do = (eager.operand(each, x.precision) for each in (x.q, x.k, x.v, x.do))
    return replace(x, q=q, k=k, v=v, do=do)


def judge(found: tuple[Tensor, Tensor, Tensor], inputs: GradientInputs) -> Comparison:
    """Compare dK, dV and, by dQ that it makes, dS with float64."""
    dk, dv, ds = found
    return gradients.judge("backward_fused", (_dq_of(ds, inputs), dk, dv), inputs)


def _dq_of(ds: Tensor, x: GradientInputs) -> Tensor:
    """Scale * dS K, of x's dtype."""
    dq = torch.zeros(x.q.shape, dtype=torch.float32, device=x.q.device)
    heads = _by_sequence(ds, x)
    keys = eager.per_query_head(x.k, x.q.shape[1]).float()
    with eager.float32_products():
        for sequence, (n, own, of_q, of_k) in enumerate(_places(x)):
            part = heads[sequence, :, : _length(of_q), : _length(of_k)].float()
            dq[n, own, of_q] = x.scale * (part @ keys[n, own, of_k])
    return dq.to(x.q.dtype)


def _places(x: GradientInputs) -> Iterator[_Place]:
    """Where the rows and keys of each sequence are: batch, heads, rows, keys."""
    packed, every = x.features.sequences, slice(None)
    if packed is None:
        for batch in range(x.q.shape[0]):
            yield batch, every, slice(0, x.q.shape[2]), slice(0, x.k.shape[2])
        return
    for q_begin, queries, k_begin, keys in packed.lengths():
        yield 0, every, slice(q_begin, q_begin + queries), slice(k_begin, k_begin + keys)


def _by_sequence(ds: Tensor, x: GradientInputs) -> Tensor:
    """(sequences, heads, Sq, Sk), in the same memory."""
    return ds.view(-1, x.q.shape[1], *ds.shape[2:]).mT


def _length(of: slice) -> int:
    return int(of.stop - of.start)


def _tiles(seen: Tensor) -> Tensor:
    """Whether anything is seen in the tile of each score (..., Sq, Sk)."""
    *_, rows, keys = seen.shape
    if seen.numel() == 0:
        return seen
    pooled = torch.nn.functional.max_pool2d(
        seen.float(), DS_TILE, ceil_mode=True
    ).repeat_interleave(DS_TILE, -2).repeat_interleave(DS_TILE, -1)  # fmt: skip
    return pooled[..., :rows, :keys] > 0
