"""The ways to compute dQ, dK and dV, and which of them serves a call.

pair: a kernel for dK and dV and one for dQ, which compute S and dP each. ds: a kernel for dK and dV
that stores dS, and dQ = dS K, in runs of as many heads or keys as memory is allowed for. fused: one
kernel, which adds dQ up in any order. The fastest by the times of the table serves; where it has
none, the one with the least bound, of its products and of the bytes that it moves.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from flashgen.kernels.ds_runs import DsPlan, DsSizes, planned
from flashgen.runtime.selection import Ladder, Selection
from flashgen.schedules.config import KernelConfig
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.gpu import Gpu
from flashgen.spec.problem import BUCKET_SEQ, bytes_moved, flops, workload
from flashgen.spec.vocabulary import OF_DS, Direction

Way = Literal["pair", "ds", "fused"]
WAYS: dict[Way, tuple[Direction, ...]] = {
    "pair": ("backward_dkv", "backward_dq"),
    "ds": OF_DS,
    "fused": ("backward_fused",),
}
"""The kernels of each way."""
SURE = 0.95
"""The share of the pair's bound that another way's must stay below: bounds are less than times."""
OF_WAYS = frozenset(direction for directions in WAYS.values() for direction in directions)
"""The kernels of all ways."""


class ChosenWay(NamedTuple):
    """The way of a call, and the runs of ds."""

    way: Way
    plan: DsPlan | None = None


PAIR = ChosenWay("pair")


@dataclass(frozen=True, kw_only=True)
class Ways:
    """What a table says of the ways of calls that are resolved alike.

    times: of the kernels of each way, in us; it lacks a way whose times do not compare with those
    of the pair. Those of ds are of one run. bounds: they are no times, but the least that products
    and bytes take. bc: keys of a block of dK and dV that stores dS; slots: how many of those the
    GPU has room for.
    """

    times: Mapping[Way, tuple[float, ...]]
    bounds: bool = False
    bc: int = 0
    slots: int = 0

    def plan(self, of: DsSizes, most: int) -> DsPlan | None:
        """The runs of ds in so many bytes; None where they have no room, or the table has none."""
        return planned(of, most, self.bc, self.slots) if "ds" in self.times else None

    def us(self, way: Way, plan: DsPlan | None) -> float:
        """The time of a way, ds in runs."""
        first, *others = self.times[way]
        return first * (plan.stretch if way == "ds" and plan else 1.0) + sum(others)

    def chosen(self, of: DsSizes, most: int, *, deterministic: bool) -> ChosenWay:
        """The fastest of the ways, if there are several, for a call of these sizes, with so many
        bytes for dS. deterministic: dQ must be summed in one order.
        """
        plan = self.plan(of, most)
        admitted = [
            way
            for way in self.times
            if (way != "ds" or plan is not None) and (way != "fused" or not deterministic)
        ]
        to_beat = SURE if self.bounds else 1.0
        us = {way: self.us(way, plan) * (to_beat if way == "pair" else 1.0) for way in admitted}
        fastest = min(admitted, key=us.__getitem__)
        return ChosenWay(fastest, plan if fastest == "ds" else None)

    def described(self, of: DsSizes, most: int, *, deterministic: bool) -> str:
        """Which way serves such a call, and the times of all, in one sentence."""
        if len(self.times) < 2:
            return "gradients by pair: the table has no other way whose times compare"
        plan = self.plan(of, most)
        way, _ = self.chosen(of, most, deterministic=deterministic)
        words = [f"{each} {self.us(each, plan):.1f} us" for each in self.times if each != "ds"]
        if plan is not None:
            words.insert(1, f"ds {self.us('ds', plan):.1f} us in {_counted(len(plan.runs), 'run')}")
        elif "ds" in self.times:
            words.insert(1, "ds has no room")
        return (
            f"gradients by {way}{' by products and bytes' if self.bounds else ''}: "
            f"{', '.join(words)}, with {most >> 20} MB for dS"
            f"{'' if deterministic else ' and dQ summed in any order'}"
        )


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def ways_of(
    spec: AttentionSpec,
    gpu: Gpu,
    has_entry: Callable[[AttentionSpec], bool],
    ladder_of: Callable[[AttentionSpec], Ladder],
) -> Ways:
    """The ways of a spec of any direction, by the first rungs of the ladders of its kernels.
    has_entry: whether the table of the GPU has one. The pair alone is invariant, and ds has
    no block masks.
    """
    found: dict[Way, tuple[Ladder, ...]] = {}
    for way, directions in WAYS.items():
        if (way != "pair" and spec.invariant) or (way == "ds" and spec.block_mask):
            continue
        specs = [spec.for_direction(direction) for direction in directions]
        if way == "pair" or all(map(has_entry, specs)):
            found[way] = tuple(map(ladder_of, specs))
    times = dict(_comparable(found, _times))
    if bounds := not times:
        times = dict(_comparable(found, functools.partial(_bounds, gpu)))
    if "ds" not in times:
        return Ways(times=times, bounds=bounds)
    choice = found["ds"][0].rungs[0].choice
    slots = slots_of(choice.spec, choice.config, gpu)
    return Ways(times=times, bounds=bounds, bc=choice.config.bc, slots=slots)


def slots_of(spec: AttentionSpec, config: KernelConfig, gpu: Gpu) -> int:
    """How many blocks of dK and dV a GPU has room for: 8 warps take the registers of an SM."""
    return gpu.sms * max(1, 8 // config.block_warps(spec))


def _comparable(
    found: Mapping[Way, tuple[Ladder, ...]],
    times_of: Callable[[Sequence[Selection]], tuple[float, ...] | None],
) -> Iterator[tuple[Way, tuple[float, ...]]]:
    """The times of the ways that compare: with the pair's, all are of one GPU's table and one
    source, in the nearest bucket that has them all. Those of another bucket than the pair's are in
    proportion to its time here.
    """
    here = _in_one_bucket(found["pair"])
    own = None if here is None else times_of(here)
    for way, ladders in found.items():
        selections = _in_one_bucket((*found["pair"], *ladders))
        if own is None or selections is None:
            continue
        if (times := times_of(selections)) is not None:
            share = sum(own) / sum(times[:2])
            yield way, tuple(share * time for time in times[2:])


def _in_one_bucket(ladders: Sequence[Ladder]) -> tuple[Selection, ...] | None:
    """The first selections of all ladders that are of the table of the first, and of one bucket and
    source: the nearest that has them all. None without any.
    """
    slug = ladders[0].rungs[0].slug
    for like in ladders[0].rungs if slug is not None else ():
        origin = slug, like.choice.bucket, like.choice.source
        of_origin = (
            (s for s in each.rungs if (s.slug, s.choice.bucket, s.choice.source) == origin)
            for each in ladders
        )
        found = [next(selections, None) for selections in of_origin]
        if None not in found:
            return tuple(each for each in found if each is not None)
    return None


def _times(selections: Sequence[Selection]) -> tuple[float, ...] | None:
    """Those of the table; None where one has none."""
    known = [s.choice.median_us for s in selections]
    return None if None in known else tuple(time for time in known if time is not None)


def _bounds(gpu: Gpu, selections: Sequence[Selection]) -> tuple[float, ...] | None:
    """The least us of the products and of the bytes of each kernel, of the problem that is tuned.
    None where a kernel may be far from them: all but the product of ds have warps with roles.
    """
    choices = [s.choice for s in selections]
    near = all(c.config.specialized or c.spec.direction == "backward_dq_of_ds" for c in choices)
    bucket, tflops, gbs = choices[0].bucket, gpu.peak_tflops, gpu.bandwidth_gbs
    if not near or bucket is None or not tflops or not gbs:
        return None
    sizes = [(c.spec, workload(c.spec, BUCKET_SEQ[bucket])) for c in choices]
    return tuple(max(flops(*of) / tflops * 1e-6, bytes_moved(*of) / gbs * 1e-3) for of in sizes)
