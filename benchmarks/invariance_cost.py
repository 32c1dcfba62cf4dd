"""What invariant=True costs by estimate: the entries of each numeric class beside those of the
plain spec, as a table of percent.

    python -m benchmarks.invariance_cost

A cell compares the kernels that serve 4,096 to 16,383 keys, the executed ones among them, where
both are estimated for the same sizes. It is the time of the class over that of the plain kernel,
less one.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from flashgen.spec.attention import AttentionSpec, spec_of
from flashgen.spec.problem import BUCKETS, Bucket
from flashgen.table import emit
from flashgen.table.entry import Entry
from flashgen.table.table import Table
from tests.tables import SHIPPED

SPECS = {
    "prefill d64": "fwd_bf16_d64_causal",
    "prefill d128": "fwd_bf16_d128_causal",
    "prefill d192/128": "fwd_bf16_d192v128_causal",
    "prefill d256": "fwd_bf16_d256_causal",
    "decode d64, sinks": "decode_bf16_d64_sink_paged",
    "decode d128": "decode_bf16_d128_paged",
    "decode d256": "decode_bf16_d256_paged",
    "dK, dV d128": "bwd_dkv_bf16_d128_causal",
    "dQ d128": "bwd_dq_bf16_d128_causal",
}
"""Columns, and the plain spec of each; of decode over pages."""
BUCKET = next(bucket for bucket in BUCKETS if bucket.low == 4096)


def served(table: Table, spec: AttentionSpec, bucket: Bucket) -> Entry | None:
    """The entry that serves with the Triton of its table: the executed one, where it is faster."""
    found = [table.find(spec, bucket), table.executed_for(spec, bucket)]
    timed = [entry for entry in found if entry is not None and entry.result.median_us is not None]
    return min(timed, key=lambda entry: entry.result.median_us or 0.0, default=None)


def cost(table: Table, spec: AttentionSpec, bucket: Bucket) -> float | None:
    """The share of its time that the class takes more; None for two that cannot be compared."""
    plain = served(table, spec, bucket)
    own = served(table, replace(spec, invariant=True), bucket)
    if plain is None or own is None:
        return None
    if plain.result.source != own.result.source or plain.problem != own.problem:
        return None
    return (own.result.median_us or 0.0) / (plain.result.median_us or 1.0) - 1


def rows(tables: dict[str, Table]) -> Iterator[str]:
    """The lines of the table, a GPU each; those without a cell are left out."""
    yield f"| GPU | {' | '.join(SPECS)} |"
    yield f"|---|{'---|' * len(SPECS)}"
    for table in (tables[slug] for slug in SHIPPED):
        costs = [cost(table, spec_of(name), BUCKET) for name in SPECS.values()]
        if any(each is not None for each in costs):
            cells = ("-" if each is None else f"{round(100 * each)} %" for each in costs)
            yield f"| {table.gpu.name.removeprefix('NVIDIA ')} | {' | '.join(cells)} |"


def main() -> int:
    """Print the table."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    print(*rows(emit.tables_for(Path(), evidence=True)), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
