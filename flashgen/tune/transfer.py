"""Neighbours: the configs that tables hold for what is much alike, here and on other GPUs."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import fields, replace

from flashgen.spec.attention import AttentionSpec
from flashgen.spec.config import KernelConfig
from flashgen.spec.gpu import Gpu
from flashgen.spec.legality import why_illegal
from flashgen.spec.outcome import STRENGTH
from flashgen.spec.problem import Bucket
from flashgen.table.entry import Entry
from flashgen.table.table import Table


def neighbours(
    table: Table,
    spec: AttentionSpec,
    bucket: Bucket,
    *,
    leave_out: Collection[tuple[AttentionSpec, Bucket]] = (),
) -> tuple[KernelConfig, ...]:
    """One config an entry, in the table's order, so that one chosen twice stands there twice.

    Alike are the same spec in another bucket and, in the same bucket, a spec of another mask or of
    another dtype as wide. A config of another mask comes with the order of tiles that the seeds
    have for this one; what is illegal for this spec does not come at all.

    leave_out: keys of entries that do not count. A tuning run leaves out what it has still to
    search: else one that was killed would, begun again, see neighbours that it did not see before.
    """
    found = []
    for entry in table.entries:
        if entry.key not in leave_out and _alike(entry, spec, bucket):
            config = entry.config
            if entry.spec.mask != spec.mask:
                config = replace(config, order="longest_first" if spec.causal else "plain")
            if why_illegal(spec, config, table.gpu) is None:
                found.append(config)
    return tuple(found)


def elsewhere(
    tables: Iterable[Table], gpu: Gpu, spec: AttentionSpec, bucket: Bucket
) -> tuple[KernelConfig, ...]:
    """What other GPUs' tables hold for this very spec and bucket, as far as it is legal on `gpu`.

    Those of GPUs of its architecture come first, and then what was measured; none twice. The
    GPU's own table, if it is among them, does not count.
    """
    found = [
        (other.gpu.arch != gpu.arch, -STRENGTH[entry.result.source], entry.config)
        for other in tables
        if other.gpu.slug != gpu.slug and (entry := other.find(spec, bucket)) is not None
    ]
    found.sort(key=lambda each: each[:2])
    legal = [config for *_, config in found if why_illegal(spec, config, gpu) is None]
    return tuple(dict.fromkeys(legal))


def _alike(entry: Entry, spec: AttentionSpec, bucket: Bucket) -> bool:
    """Whether an entry is of a neighbour of this spec and bucket, and not of itself."""
    other = entry.spec
    if other == spec or entry.bucket != bucket:
        return other == spec and entry.bucket != bucket
    same = [field.name for field in fields(AttentionSpec) if field.name not in ("dtype", "mask")]
    return other.element_bytes == spec.element_bytes and all(
        getattr(other, name) == getattr(spec, name) for name in same
    )
