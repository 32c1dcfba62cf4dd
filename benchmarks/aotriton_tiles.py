"""How often a table's tile is among those that AOTriton's tuning chose most. CPU only.

    python benchmarks/aotriton_tiles.py tune-flash-gfx942.json --table amd_instinct_mi300x

AOTriton measured its tiles on a GPU, those of a table of AMD are chosen by facts. The file is
v2python/rules/flash/tune-flash-<arch>.json of github.com/ROCm/aotriton at commit 62c8129d; later
versions have databases of SQLite, which this does not read. Cases of one kernel, dtype, head dim
and mask are compared with the one entry of the table for them: a case counts if the tile of that
entry is among the three that these cases chose most. Cases with dropout, and those without an
entry, are left out.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from flashgen import paths
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.vocabulary import Direction
from flashgen.table.table import Table, load

MOST = 3
"""Tiles of AOTriton that count as its choice."""

DIRECTIONS: dict[str, Direction] = {
    "attn_fwd": "forward",
    "bwd_kernel_dk_dv": "backward_dkv",
    "bwd_kernel_dq": "backward_dq",
}

Tile = tuple[int, int]


def chosen(cases: Iterable[Mapping[str, Any]]) -> dict[AttentionSpec, Counter[Tile]]:
    """How often AOTriton chose each tile, rows and keys, for each spec; without dropout."""
    found: dict[AttentionSpec, Counter[Tile]] = defaultdict(Counter)
    for case in cases:
        inputs, tuned = case["inputs"], case["tuned_kernel"]
        if inputs["ENABLE_DROPOUT"] or case["kernel_name"] not in DIRECTIONS:
            continue
        causal = inputs["CAUSAL"] if "CAUSAL" in inputs else inputs["STAGE"] == 3
        spec = AttentionSpec(
            dtype=inputs["Q.dtype"].removeprefix("torch."),
            head_dim=inputs["BLOCK_DMODEL"],
            head_dim_v=inputs["BLOCK_DMODEL"],
            mask="causal" if causal else "none",
            direction=DIRECTIONS[case["kernel_name"]],
        )
        found[spec][tuned["BLOCK_M"], tuned["BLOCK_N"]] += 1
    return found


def rows(table: Table, tiles: Mapping[AttentionSpec, Counter[Tile]]) -> list[tuple[str, int, bool]]:
    """Name, number of cases, and whether the table's tile is among the MOST, of each spec that the
    table has an entry for.
    """
    ours = {entry.spec: (entry.config.br, entry.config.bc) for entry in table.entries}
    return [
        (spec.name, counts.total(), ours[spec] in dict(counts.most_common(MOST)))
        for spec, counts in tiles.items()
        if spec in ours
    ]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("database", type=Path)
    parser.add_argument("--table", default="amd_instinct_mi300x", help="slug of the table")
    options = parser.parse_args(arguments)
    table = load(paths.table_file(ROOT, options.table))
    found = rows(table, chosen(json.loads(options.database.read_text())["tune_info"]))
    for name, cases, among in found:
        print(
            f"{name:30} {cases:5} cases  {'among' if among else 'not among'} the {MOST} most chosen"
        )
    total, hits = sum(n for _, n, _ in found), sum(n for _, n, among in found if among)
    share = f"{hits / total:.0%}" if total else "none"
    print(f"{hits} of {total} cases, {share}")


if __name__ == "__main__":
    main()
