"""Neighbours: configs that a table holds for similar specs, and what the same chip was measured
with.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import fields, replace

from flashgen.schedules.config import KernelConfig
from flashgen.schedules.defaults import other_half
from flashgen.schedules.legality import why_illegal
from flashgen.schedules.space import likely_order
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.gpu import Gpu
from flashgen.spec.problem import BUCKETS, Bucket
from flashgen.table.entry import Entry
from flashgen.table.table import Table

EntryKey = tuple[AttentionSpec, Bucket]


def neighbours(
    table: Table,
    spec: AttentionSpec,
    bucket: Bucket,
    *,
    leave_out: Collection[tuple[AttentionSpec, Bucket]] = (),
) -> tuple[KernelConfig, ...]:
    """One config per entry, in the order of the table; duplicates stay.

    Similar are the same spec in another bucket and, in the same bucket, a spec with another mask or
    another dtype of the same width, or for a cache in pages where this one has none, or the other
    way round; of an invariant spec also those without invariant. A config for another mask gets the
    order of tiles that the seeds have for this one; configs that are illegal for this spec are left
    out.

    leave_out: keys of entries that do not count. A tuning run leaves out what it has still to
    search. Otherwise a killed run that is resumed would see neighbours that it did not see before.
    """
    found = []
    for entry in table.entries:
        if entry.key not in leave_out and _alike(entry, spec, bucket):
            config = entry.config.kernel
            if entry.spec.mask != spec.mask:
                config = replace(config, order=likely_order(spec))
            if why_illegal(spec, config, table.gpu) is None:
                found.append(config)
    return tuple(found)


def measured_on_chip(gpu: Gpu, tables: Iterable[Table]) -> dict[EntryKey, KernelConfig]:
    """What GPUs with the chip of `gpu`, itself too, were measured with, by spec and bucket."""
    return {
        entry.key: entry.config
        for table in tables
        if table.gpu.same_chip(gpu)
        for entry in table.entries
        if entry.result.source == "measured"
    }


def measured_for(
    measured: Mapping[EntryKey, KernelConfig], spec: AttentionSpec, bucket: Bucket
) -> KernelConfig | None:
    """What the chip was measured with for this spec and bucket, if not for those then for the other
    16-bit type, if not in this bucket then in the nearest; None if nothing like it was measured.
    """
    half = other_half(spec)
    nearest = sorted(BUCKETS, key=lambda each: abs(BUCKETS.index(each) - BUCKETS.index(bucket)))
    keys = [(one, each) for one in (spec, half) if one for each in nearest]
    return next((measured[key] for key in keys if key in measured), None)


def _alike(entry: Entry, spec: AttentionSpec, bucket: Bucket) -> bool:
    """Whether an entry is a neighbour of this spec and bucket, and not its own."""
    other = entry.spec
    if other == spec:
        return entry.bucket != bucket
    if other.invariant and not spec.invariant:
        return False
    spec = replace(spec, invariant=other.invariant)
    if other == spec or entry.bucket != bucket:
        return other == spec
    differs = ("dtype", "mask", "paged") if spec.direction == "decode" else ("dtype", "mask")
    same = [field.name for field in fields(AttentionSpec) if field.name not in differs]
    return other.element_bytes == spec.element_bytes and all(
        getattr(other, name) == getattr(spec, name) for name in same
    )
