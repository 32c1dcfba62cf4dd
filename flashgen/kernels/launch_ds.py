"""Launches the kernels of gradients by dS in memory: dK and dV, which store dS, and dQ = dS K.

dS of all heads may be larger than memory, so it is there for one run of blocks at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from flashgen.inputs.features import PLAIN, Features
from flashgen.kernels.arguments import Arguments, feature_arguments, sizes
from flashgen.kernels.descriptors import take_descriptors
from flashgen.kernels.launch_backward import (
    Backward,
    backward_arguments,
    empty_like,
    nothing_to_do,
)
from flashgen.kernels.plan import KernelCall, Plan
from flashgen.schedules.legality import DS_TILE
from flashgen.spec.vocabulary import padded

STEP = 16
"""Elements of which a row of dS has a multiple in memory: Triton and the TMA unit rely on it."""


@dataclass(frozen=True, kw_only=True)
class DsRun:
    """Blocks of dK and dV whose dS is in memory at once: of `heads` heads of Q from first_head on,
    of all sequences one behind the other, and of `keys` keys from first_key on.

    Either these are all keys, or the heads are those of one head of K. first_key is a multiple of
    DS_TILE. keys_follow: a later run has the next keys of these heads.
    """

    first_head: int
    heads: int
    keys: int
    first_key: int = 0
    keys_follow: bool = False


@dataclass(kw_only=True, eq=False)
class BackwardDs(Backward):
    """A run of a Backward. The result is (dk, dv), of which it writes its keys.

    ds (1, heads, Sq, keys) of the run gets dS, in each tile of DS_TILE rows and keys of which a row
    sees a key; packed sequences have the longest one's Sq and keys.
    """

    run: DsRun
    dk: Tensor
    dv: Tensor
    ds: Tensor


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


@dataclass(frozen=True, kw_only=True)
class DsSizes:
    """Of a call: sequences, heads of Q, heads of K, and queries, keys and head dim of the longest.
    element_bytes: those of an element of dS.
    """

    sequences: int
    heads: int
    kv_heads: int
    seq_q: int
    seq_k: int
    head_dim: int
    element_bytes: int

    @classmethod
    def of(cls, q: Tensor, k: Tensor, features: Features) -> DsSizes:
        """Those of these tensors."""
        batch, heads, seq_q, head_dim = q.shape
        seq_k, packed = k.shape[2], features.sequences
        if packed is not None:
            batch, seq_q, seq_k = packed.count, max(1, packed.max_q), max(1, packed.max_k)
        return cls(
            sequences=batch, heads=heads, kv_heads=k.shape[1], seq_q=seq_q, seq_k=seq_k,
            head_dim=head_dim, element_bytes=q.element_size(),
        )  # fmt: skip

    @property
    def group(self) -> int:
        """Heads of Q that share a head of K."""
        return self.heads // self.kv_heads

    @property
    def whole(self) -> DsRun:
        """All blocks."""
        return DsRun(first_head=0, heads=self.sequences * self.heads, keys=self.seq_k)

    def ds_bytes(self, run: DsRun) -> int:
        """Bytes of dS of a run."""
        return run.heads * self.seq_q * -(-run.keys // STEP) * STEP * self.element_bytes

    def sum_bytes(self, run: DsRun) -> int:
        """Bytes of the sum of a run, where it has not all keys of its heads."""
        ranges = run.keys < self.seq_k
        return run.heads * self.seq_q * padded(self.head_dim) * 4 * ranges


def runs_of(of: DsSizes, most: int) -> tuple[DsRun, ...]:
    """The runs of a call in the order in which dQ adds them up, of which none has more than `most`
    bytes of dS and sum; () where a tile of keys of one head of K has more.
    """
    every = of.whole.heads
    one = DsRun(first_head=0, heads=of.group, keys=of.seq_k)
    if together := most // of.ds_bytes(one) * of.group:
        firsts = range(0, every, together)
        return tuple(
            DsRun(first_head=first, heads=min(together, every - first), keys=of.seq_k)
            for first in firsts
        )
    tile = DsRun(first_head=0, heads=of.group, keys=DS_TILE)
    keys = max(0, most - of.sum_bytes(tile)) // of.ds_bytes(tile) * DS_TILE
    return tuple(_ranges(of, keys)) if keys else ()


def _ranges(of: DsSizes, keys: int) -> Iterator[DsRun]:
    """Runs of so many keys of each head of K."""
    for first_head in range(0, of.whole.heads, of.group):
        for first_key in range(0, of.seq_k, keys):
            behind = first_key + keys
            yield DsRun(
                first_head=first_head, heads=of.group, keys=min(keys, of.seq_k - first_key),
                first_key=first_key, keys_follow=behind < of.seq_k,
            )  # fmt: skip


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
    of = DsSizes.of(call.q, call.k, call.features)
    found = empty_like(call.q), empty_like(call.k), empty_like(call.v)
    of_dq = {name: getattr(call, name) for name in ("q", "k", "scale", "diagonal", "features")}
    for run in runs:
        ds, total = _in_memory(memory, of, run, call.q.dtype)
        dkv(BackwardDs(**vars(call), run=run, dk=found[1], dv=found[2], ds=ds))
        dq(DqOfRun(**of_dq, run=run, ds=ds, dq=found[0], sum=total))
    return found


def _in_memory(
    memory: Tensor, of: DsSizes, run: DsRun, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """DS and sum of a run. The sum is first, where it is for the next range, too."""
    begin = of.sum_bytes(run)
    ds = memory[begin : begin + of.ds_bytes(run)].view(dtype).view(1, run.heads, of.seq_q, -1)
    return ds[..., : run.keys], memory[:begin].view(torch.float32)


def ds_like(x: Tensor, of: DsSizes) -> Tensor:
    """A new dS of all blocks, 0, of x's dtype and device."""
    shape = (1, of.whole.heads, of.seq_q, -(-of.seq_k // STEP) * STEP)
    return torch.zeros(shape, dtype=x.dtype, device=x.device)[..., : of.seq_k]


def run_ds(plan: Plan, call: Backward) -> tuple[Tensor, ...]:
    """DK and dV of a run; without one, of the whole call, and dS, which is 0 where nothing is
    stored.
    """
    if isinstance(call, BackwardDs):
        _launch_ds(plan, call)
        return call.dk, call.dv
    of, dk, dv = DsSizes.of(call.q, call.k, call.features), empty_like(call.k), empty_like(call.v)
    ds = ds_like(call.q, of)
    _launch_ds(plan, BackwardDs(**vars(call), run=of.whole, dk=dk, dv=dv, ds=ds))
    return dk, dv, ds


def _launch_ds(plan: Plan, call: BackwardDs) -> None:
    if nothing_to_do(call):
        call.dk.zero_(), call.dv.zero_()
        return
    of, run, bc = DsSizes.of(call.q, call.k, call.features), call.run, plan.config.bc
    tiles, own = (-(-keys // bc) for keys in (of.seq_k, run.keys))
    arguments = backward_arguments(plan, call, dk=call.dk, dv=call.dv, ds=call.ds)
    arguments["first_block"] = run.first_head // of.group * tiles + run.first_key // bc
    plan.start(call.q, run.heads // of.group * own, arguments)


def run_dq_of_ds(plan: Plan, call: DqOfDs) -> tuple[Tensor, ...]:
    """DQ of a run; without one, of the whole call."""
    of, packed = DsSizes.of(call.q, call.k, call.features), call.features.sequences
    if isinstance(call, DqOfRun):
        run, dq, total = call.run, call.dq, call.sum
    else:
        run, dq, total = of.whole, empty_like(call.q), call.q.new_empty(0, dtype=torch.float32)
    if 0 in (call.q.numel(), call.k.numel(), of.sequences):
        return (dq.zero_(),)
    (k,) = plan.in_eights(call.k)
    arguments: Arguments = plan.tensors(k=k, dq=dq, ds=call.ds)
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
