"""Table: what was chosen for one GPU."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from flashgen.errors import InvalidArgument
from flashgen.schedules.config import KernelConfig
from flashgen.schedules.outcome import STRENGTH
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.gpu import Gpu
from flashgen.spec.problem import Bucket
from flashgen.spec.vocabulary import Direction
from flashgen.table.entry import Entry, Run

APART: tuple[Direction, ...] = ("backward_dkv", "backward_dq")
"""The kernels that a fused backward replaces."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """All entries of one GPU, sorted by spec and bucket, and the runs they come from. Of executed
    ones of a spec and bucket no two name the same version of Triton.

    Args:
        gpu: the GPU.
        runs: the tuning runs.
        entries: what was chosen.
        executed: entries that serve in place of others under the versions of Triton that they name.

    Examples:
        >>> from flashgen import paths
        >>> from flashgen.table import load
        >>> load(paths.shipped_table("nvidia_l4")).gpu.sms
        58
    """

    gpu: Gpu
    runs: tuple[Run, ...] = ()
    entries: tuple[Entry, ...] = ()
    executed: tuple[Entry, ...] = ()

    @property
    def everything(self) -> tuple[Entry, ...]:
        """The entries, then those that are executed."""
        return (*self.entries, *self.executed)

    def of(self, everything: Iterable[Entry]) -> Table:
        """The table with these entries, executed ones among them."""
        found = tuple(everything)
        entries = tuple(entry for entry in found if not entry.tritons)
        return replace(self, entries=entries, executed=tuple(e for e in found if e.tritons))

    def of_last_run(self) -> Table:
        """The table with what its latest tuning run wrote alone, which may have had shards: of each
        the latest. All of it without evidence.
        """
        begun: dict[tuple[int, int], str] = {}
        for run in self.runs:  # a run has an id for each donor, all of one date
            begun[run.shard] = max(begun.get(run.shard, ""), run.date)
        _, shards = max(begun, key=begun.__getitem__, default=(1, 1))
        last = {r.id for r in self.runs if r.shard[1] == shards and r.date == begun[r.shard]}
        mine = [entry for entry in self.everything if entry.evidence.run in last]
        return self.of(mine) if mine else self

    def find(
        self, spec: AttentionSpec, bucket: Bucket, config: KernelConfig | None = None
    ) -> Entry | None:
        """The entry of exactly this spec and bucket; with a config, the executed one that has it
        before others.
        """
        found = [entry for entry in self.everything if entry.key == (spec, bucket)]
        having = (entry for entry in found if entry.tritons and entry.config == config)
        plain = (entry for entry in found if not entry.tritons)
        return next(itertools.chain(having, plain), None)

    def executed_for(self, spec: AttentionSpec, bucket: Bucket, triton: str) -> Entry | None:
        """The executed entry of exactly this spec and bucket, if there is one that serves under a
        version of Triton.
        """
        found = (entry for entry in self.executed if entry.key == (spec, bucket))
        return next((entry for entry in found if entry.serves_under(triton)), None)

    def serving(self, spec: AttentionSpec, bucket: Bucket, triton: str) -> Entry | None:
        """What serves this spec and bucket under a version of Triton, if there is an entry."""
        return self.executed_for(spec, bucket, triton) or self.find(spec, bucket)

    def run_of(self, entry: Entry) -> Run | None:
        """The run that an entry of this table comes from; None without its evidence."""
        return next((run for run in self.runs if run.id == entry.evidence.run), None)

    def with_entry(self, entry: Entry, run: Run | None) -> Table:
        """The table with `entry`, of `run`, in place of the one of its spec and bucket. run is None
        for an entry without evidence.

        An entry whose source is weaker than that of the one in place changes nothing. A measured
        one takes the place of the executed one too, unless it is of a plain kernel under a version
        of Triton in which that one does not serve: there it was no rival. An executed one takes
        that of another under the versions that it names. All entries of the spec
        that have its kernel get the largest error that was seen of it. Runs that no entry comes
        from any more are dropped. Raises InvalidArgument for an entry of another run.
        """
        name = None if run is None else run.id
        if entry.evidence.run != name:
            raise InvalidArgument(
                f"entry must come from the run {name!r}: got {entry.evidence.run!r}"
            )
        held = self.find(*entry.key)
        if held and STRENGTH[entry.result.source] < STRENGTH[held.result.source]:
            return self
        stay = [
            each
            for other in self.everything
            for each in ([other] if other.key != entry.key else _beside(other, entry, run))
        ]
        runs = [other for other in self.runs if other.id != name] + ([run] if run else [])
        everything = _with_largest_floors([*stay, entry], entry)
        return replace(self.of(everything), runs=tuple(runs)).in_order()

    def without_idle(self) -> Table:
        """The table without fused backwards that no call gets: in their bucket dK/dV and dQ are no
        slower together, by times of the same source, or there is none.
        """
        held = {entry.key: entry.result for entry in self.entries}

        def idle(entry: Entry) -> bool:
            apart = [held.get((entry.spec.for_direction(each), entry.bucket)) for each in APART]
            results = [entry.result, *filter(None, apart)]
            if len(results) < 3 or len({result.source for result in results}) > 1:
                return False
            fused, *two = (result.median_us or math.inf for result in results)
            return fused >= sum(two)

        return self.of(
            entry
            for entry in self.everything
            if entry.spec.direction != "backward_fused" or not idle(entry)
        )

    def in_order(self) -> Table:
        """The table as files have it: sorted, without runs that no entry can come from."""
        used = {entry.evidence.run for entry in self.everything}
        kept = (run for run in self.runs if run.id in used or None in used)
        runs = sorted(kept, key=lambda run: run.id)
        entries = sorted(self.everything, key=lambda e: (e.spec.sort_key, e.bucket.low, e.tritons))
        return replace(self.of(entries), runs=tuple(runs))


def _beside(other: Entry, new: Entry, run: Run | None) -> Iterator[Entry]:
    """What is left of an entry beside a new one of its spec and bucket."""
    if bool(other.tritons) != bool(new.tritons):
        if not outdone(other, new, run):
            yield other
        return
    left = tuple(each for each in other.tritons if each not in new.tritons)
    if left and other.config != new.config:
        yield replace(other, tritons=left)


def _with_largest_floors(everything: Sequence[Entry], new: Entry) -> list[Entry]:
    """`everything`, in which all entries of the kernel of `new` have one error, the largest: it
    is the kernel's, whatever the bucket in which a check saw it.
    """
    alike = [e.spec == new.spec and e.config.kernel == new.config.kernel for e in everything]
    floors = max(e.result.max_abs_err_floors for e in itertools.compress(everything, alike))
    return [
        replace(entry, result=replace(entry.result, max_abs_err_floors=floors)) if same else entry
        for entry, same in zip(everything, alike, strict=True)
    ]


def outdone(executed: Entry, entry: Entry, run: Run | None) -> bool:
    """Whether an entry of this run was timed where the executed one of its key was its rival."""
    if entry.result.source != "measured":
        return False
    return entry.config.executed or run is None or executed.serves_under(run.triton)


def sources(entries: Iterable[Entry]) -> dict[str, int]:
    """How many entries each source has, strongest first."""
    found = [entry.result.source for entry in entries]
    return {s: found.count(s) for s in sorted(set(found), key=lambda s: -STRENGTH[s])}
