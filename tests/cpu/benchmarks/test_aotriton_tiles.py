"""benchmarks/aotriton_tiles.py: a table's tile is compared with the three that cases chose most."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import aotriton_tiles
from flashgen import paths
from flashgen.spec.gpu import TARGETS
from flashgen.table.table import Table, save
from tests.makers import make_config, make_spec
from tests.tables import made_entry, made_run


def case(
    kernel: str, tile: tuple[int, int], *, dropout: bool = False, **mask: Any
) -> dict[str, Any]:
    inputs = {"Q.dtype": "torch.bfloat16", "BLOCK_DMODEL": 64, "ENABLE_DROPOUT": dropout, **mask}
    tuned = {"BLOCK_M": tile[0], "BLOCK_N": tile[1]}
    return {"kernel_name": kernel, "inputs": inputs, "tuned_kernel": tuned}


CASES = [
    case("attn_fwd", (128, 64), STAGE=3),
    case("attn_fwd", (64, 64), STAGE=3),
    case("attn_fwd", (32, 32), STAGE=1),  # no entry
    case("attn_fwd", (16, 16), STAGE=3, dropout=True),
    case("bwd_preprocess", (16, 16)),
    *[
        case("bwd_kernel_dq", (side, 32), CAUSAL=True)
        for side in (16, 32, 64)
        for _ in range(2)
    ],
    case("bwd_kernel_dq", (128, 64), CAUSAL=True),
]  # fmt: skip


def test_cases_of_a_tile_among_the_most_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    table = Table(gpu=TARGETS["amd_instinct_mi300x"])
    for direction in ("forward", "backward_dq"):
        spec = make_spec("bfloat16", 64, mask="causal", direction=direction)
        entry = made_entry(spec=spec, config=make_config(128, 64), source="untimed")
        table = table.with_entry(entry, made_run("a"))
    save(table, tmp_path / "amd_instinct_mi300x.yaml")
    monkeypatch.setattr(paths, "table_file", lambda root, slug: tmp_path / f"{slug}.yaml")
    database = tmp_path / "tune.json"
    database.write_text(json.dumps({"arch": "gfx942", "tune_info": CASES}))
    aotriton_tiles.main([str(database)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == "fwd_bf16_d64_causal 2 cases among the 3 most chosen".split()
    assert lines[1].split() == "bwd_dq_bf16_d64_causal 7 cases not among the 3 most chosen".split()
    assert lines[2] == "2 of 9 cases, 22%"
