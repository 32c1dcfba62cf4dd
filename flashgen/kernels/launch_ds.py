"""Launches the kernels of gradients by dS in memory: dK and dV, which store dS, and dQ = dS K."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from flashgen.inputs.features import PLAIN, Features
from flashgen.kernels.arguments import Arguments, feature_arguments, sizes
from flashgen.kernels.descriptors import take_descriptors
from flashgen.kernels.ds_runs import DsRun, DsSizes
from flashgen.kernels.launch_backward import (
    Backward,
    backward_arguments,
    empty_like,
    nothing_to_do,
)
from flashgen.kernels.plan import KernelCall, Plan


@dataclass(kw_only=True, eq=False)
class BackwardDs(Backward):
    """A run of a Backward. The result is (dk, dv), of which it writes its keys.

    ds (1, heads, keys, Sq) of the run, of whole tiles, gets dS, in each tile of DS_TILE keys and
    rows of which a row sees a key; packed sequences have the longest one's keys and Sq.
    """

    run: DsRun
    dk: Tensor
    dv: Tensor
    ds: Tensor


@dataclass(kw_only=True, eq=False)
class DqOfDs(KernelCall[tuple[Tensor, ...]]):
    """dQ of ds (1, B * H, Sk, Sq), as BackwardDs has it. The result is (dq,), laid out in memory as
    q is, of which nothing else is read.
    """

    q: Tensor
    k: Tensor
    ds: Tensor
    scale: float
    diagonal: int | None
    features: Features = PLAIN

    def takes_descriptors(self) -> bool:
        """Whether the TMA unit can address K, and dQ, which lies as Q does."""
        return take_descriptors(self.q, self.k)


@dataclass(kw_only=True, eq=False)
class DqOfRun(DqOfDs):
    """The same of a run, into dq; or where keys follow, into sum, float32 (heads of the run, Sq,
    padded head dim), whence the run with the next keys takes it.
    """

    run: DsRun
    dq: Tensor
    sum: Tensor


def ds_sizes(call: Backward | DqOfDs) -> DsSizes:
    """The sizes of a call."""
    return DsSizes.of(call.q, call.k, call.diagonal, call.features)


def gradients_in_runs(
    call: Backward,
    runs: Iterable[DsRun],
    memory: Tensor,
    dkv: Callable[[BackwardDs], object],
    dq: Callable[[DqOfRun], object],
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv of a call, run by run, by what launches the two kernels. memory: as many bytes
    as a run has of dS and sum, aligned to 16; what it holds before does not matter.
    """
    of = ds_sizes(call)
    found = empty_like(call.q), empty_like(call.k), empty_like(call.v)
    of_dq = {name: getattr(call, name) for name in ("q", "k", "scale", "diagonal", "features")}
    for run in runs:
        begin = of.sum_bytes(run)  # which is first, where it is for the next range, too
        stored = memory[begin : begin + of.ds_bytes(run)].view(call.q.dtype)
        ds = stored.as_strided(of.ds_shape(run), of.ds_strides(run))
        total = memory[:begin].view(torch.float32)
        dkv(BackwardDs(**vars(call), run=run, dk=found[1], dv=found[2], ds=ds))
        dq(DqOfRun(**of_dq, run=run, ds=ds, dq=found[0], sum=total))
    return found


def ds_like(x: Tensor, of: DsSizes) -> Tensor:
    """A new dS of all blocks, 0, of x's dtype and device."""
    return x.new_zeros(of.ds_shape(of.whole))


def _of_plan(plan: Plan, ds: Tensor, of: DsSizes, run: DsRun) -> Tensor:
    """What a plan takes: a descriptor ends with keys and rows, and loads 0 behind them."""
    return ds[..., : run.keys, : of.seq_q] if plan.by_descriptor else ds


def run_ds(plan: Plan, call: Backward) -> tuple[Tensor, ...]:
    """DK and dV of a run; without one, of the whole call, and dS, which is 0 where nothing is
    stored.
    """
    if isinstance(call, BackwardDs):
        _launch_ds(plan, call)
        return call.dk, call.dv
    of, dk, dv = ds_sizes(call), empty_like(call.k), empty_like(call.v)
    ds = ds_like(call.q, of)
    _launch_ds(plan, BackwardDs(**vars(call), run=of.whole, dk=dk, dv=dv, ds=ds))
    return dk, dv, ds


def _launch_ds(plan: Plan, call: BackwardDs) -> None:
    if nothing_to_do(call):
        call.dk.zero_(), call.dv.zero_()
        return
    of, run, bc = ds_sizes(call), call.run, plan.config.bc
    tiles, own = (-(-keys // bc) for keys in (of.seq_k, run.keys))
    ds = _of_plan(plan, call.ds, of, run)
    arguments = backward_arguments(plan, call, dk=call.dk, dv=call.dv, ds=ds)
    arguments["first_block"] = run.first_head // of.group * tiles + run.first_key // bc
    plan.start(call.q, run.heads // of.group * own, arguments)


def run_dq_of_ds(plan: Plan, call: DqOfDs) -> tuple[Tensor, ...]:
    """DQ of a run; without one, of the whole call."""
    of, packed = ds_sizes(call), call.features.sequences
    if isinstance(call, DqOfRun):
        run, dq, total = call.run, call.dq, call.sum
    else:
        run, dq, total = of.whole, empty_like(call.q), call.q.new_empty(0, dtype=torch.float32)
    if 0 in (call.q.numel(), call.k.numel(), of.sequences):
        return (dq.zero_(),)
    (k,), ds = plan.in_eights(call.k), _of_plan(plan, call.ds, of, run)
    arguments: Arguments = plan.tensors(k=k, dq=dq, ds=ds)
    arguments |= sizes(call.q, k, call.scale, call.diagonal, packed) | {
        "scale": call.scale,
        "sum_ptr": total,
        "first_head": run.first_head,
        "first_key": run.first_key,
        "last_key": run.first_key + run.keys,
        "keys_follow": int(run.keys_follow),
    }
    if plan.featured:
        shape = (of.sequences, of.heads, of.seq_q, of.seq_k)
        arguments |= feature_arguments(call.features, shape, k.device)
    plan.start(k, run.heads * -(-of.seq_q // plan.config.br), arguments)
    return (dq,)
