"""Launches the kernels of gradients by dS in memory: dK and dV, which store dS, and dQ = dS K."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from flashgen.inputs.features import PLAIN, Features
from flashgen.kernels.arguments import Arguments, feature_arguments, sizes
from flashgen.kernels.descriptors import take_descriptors
from flashgen.kernels.ds_runs import DsRun, DsSizes, in_tiles
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

    ds (1, heads, Sq, keys) of the run, in memory, gets dS, in each tile of DS_TILE rows and keys of
    which a row sees a key; packed sequences have the longest one's Sq and keys. The launch makes
    it, as its kernel stores: by descriptor rows are rows in memory, else keys are.
    """

    run: DsRun
    dk: Tensor
    dv: Tensor
    memory: Tensor
    ds: Tensor = field(init=False)


@dataclass(kw_only=True, eq=False)
class DqOfDs(KernelCall[tuple[Tensor, ...]]):
    """dQ of ds (1, B * H, Sq, Sk), as BackwardDs has it. The result is (dq,), laid out in memory as
    q is, of which nothing else is read.
    """

    q: Tensor
    k: Tensor
    ds: Tensor
    scale: float
    diagonal: int | None
    features: Features = PLAIN

    def takes_descriptors(self) -> bool:
        """Whether the TMA unit can address dS, K, and dQ, which lies as Q does."""
        return self.ds.stride(-1) == 1 and take_descriptors(self.q, self.k)


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
        one = BackwardDs(**vars(call), run=run, dk=found[1], dv=found[2], memory=stored)
        dkv(one)
        total = memory[:begin].view(torch.float32)
        dq(DqOfRun(**of_dq, run=run, ds=one.ds, dq=found[0], sum=total))
    return found


def ds_in(memory: Tensor, of: DsSizes, run: DsRun, *, by_rows: bool) -> Tensor:
    """DS of a run in memory of its elements. by_rows: rows are rows there; else keys are."""
    rows, keys = in_tiles(of.seq_q), in_tiles(run.keys)
    shape, turn = (1, run.heads, rows, keys), not by_rows
    ds = memory.view(1, run.heads, keys, rows).mT if turn else memory.view(shape)
    return ds[..., : of.seq_q, : run.keys]


def ds_like(x: Tensor, of: DsSizes, *, by_rows: bool = False) -> Tensor:
    """A new dS of all blocks, 0, of x's dtype and device."""
    memory = x.new_zeros(of.ds_bytes(of.whole) // x.element_size())
    return ds_in(memory, of, of.whole, by_rows=by_rows)


def run_ds(plan: Plan, call: Backward) -> tuple[Tensor, ...]:
    """DK and dV of a run; without one, of the whole call, and dS, which is 0 where nothing is
    stored.
    """
    if isinstance(call, BackwardDs):
        _launch_ds(plan, call)
        return call.dk, call.dv
    of, dk, dv = ds_sizes(call), empty_like(call.k), empty_like(call.v)
    memory = call.q.new_zeros(of.ds_bytes(of.whole) // call.q.element_size())
    one = BackwardDs(**vars(call), run=of.whole, dk=dk, dv=dv, memory=memory)
    _launch_ds(plan, one)
    return dk, dv, one.ds


def _launch_ds(plan: Plan, call: BackwardDs) -> None:
    of, run, bc = ds_sizes(call), call.run, plan.config.bc
    call.ds = ds_in(call.memory, of, run, by_rows=plan.by_descriptor)
    if nothing_to_do(call):
        call.dk.zero_(), call.dv.zero_()
        return
    tiles, own = (-(-keys // bc) for keys in (of.seq_k, run.keys))
    arguments = backward_arguments(plan, call, dk=call.dk, dv=call.dv, ds=call.ds)
    arguments["stride_dsk"] = call.ds.stride(3)
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
    (k,), ds = plan.in_eights(call.k), call.ds
    if plan.by_descriptor and ds.stride(3) != 1:  # a check's
        ds = ds_like(ds, of, by_rows=True).copy_(ds)
    arguments: Arguments = plan.tensors(k=k, dq=dq, ds=ds)
    arguments |= sizes(call.q, k, call.scale, call.diagonal, packed) | {
        "stride_dsk": ds.stride(3),
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
