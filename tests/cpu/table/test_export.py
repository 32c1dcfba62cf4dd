"""Exports of tables: JSON with its schema, and options of FlexAttention."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from flashgen import paths
from flashgen.spec.problem import BUCKETS
from flashgen.table import export_flex, export_json
from flashgen.table.entry import EntryEvidence, RunnerUp
from flashgen.table.table import Table
from flashgen.table.table_file import load_with_evidence
from tests.tables import AHEAD, DIGEST, FA2, H200, SHIPPED, SPEC, made_entry, made_run

HOPPER = replace(
    AHEAD, br=192, bc=128, num_warps=12, schedule="hopper", order="plain", num_stages=2
)


def made_table(*entries: Any) -> Table:
    return Table(gpu=H200, runs=(made_run("a", entries[0].result.source),), entries=entries)


def validate(text: str) -> Any:
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads(export_json.schema())
    jsonschema.Draft202012Validator.check_schema(schema)
    found = json.loads(text)
    jsonschema.Draft202012Validator(schema).validate(found)
    return found


@pytest.mark.parametrize("source", ["measured", "estimated", "untimed"])
def test_a_document_has_its_schema(monkeypatch: pytest.MonkeyPatch, source: Any) -> None:
    monkeypatch.setattr(export_json, "stale_of", lambda entries: [])
    other = RunnerUp(config=FA2, source="estimated", median_us=900.0, digest=DIGEST)
    evidence = EntryEvidence(low_us=800.0, high_us=850.0, p_value=0.5, runners_up=(other,))
    entry = replace(made_entry(source=source), evidence=evidence)
    last = made_entry(bucket=BUCKETS[3], source=source)
    found = validate(export_json.document([made_table(entry, last)]))
    (table,) = found["tables"]
    first, second = table["entries"]
    assert (table["gpu"]["slug"], table["runs"][0]["source"]) == (H200.slug, source)
    assert (first["spec"]["dtype"], first["config"]["br"]) == (SPEC.dtype, AHEAD.br)
    assert first["config"]["label"] == AHEAD.label
    assert first["seq_k"] == {"low": 1024, "high": 4096}
    assert second["seq_k"] == {"low": 16384, "high": None}
    assert first["evidence"]["runners_up"][0]["config"] == FA2.label
    assert ("us" in first) == (source != "untimed")


def test_runners_up_come_fastest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export_json, "stale_of", lambda entries: [])
    held = tuple(
        RunnerUp(config=config, source="estimated", median_us=us, digest=DIGEST)
        for config, us in ((FA2, 950.0), (replace(FA2, bc=32), 900.0))
    )
    entry = replace(made_entry(), evidence=EntryEvidence(runners_up=held))
    (table,) = json.loads(export_json.document([made_table(entry)]))["tables"]
    assert [x["us"] for x in table["entries"][0]["evidence"]["runners_up"]] == [900.0, 950.0]


@pytest.mark.slow("validates every entry of the shipped tables: 5 s")
def test_the_shipped_tables_have_the_schema() -> None:
    tables = [load_with_evidence(paths.shipped_table(slug)) for slug in SHIPPED]
    found = validate(export_json.document(tables))
    assert [len(each["entries"]) for each in found["tables"]] == [len(t.entries) for t in tables]


def options(*entries: Any) -> list[dict[str, Any]]:
    return export_flex.options_of(made_table(*entries))


def test_options_of_forward_and_backward() -> None:
    dkv, dq = (SPEC.for_direction(d) for d in ("backward_dkv", "backward_dq"))  # type: ignore[arg-type]
    found = options(
        made_entry(),
        made_entry(dkv, config=replace(FA2, br=64, bc=128)),
        made_entry(dq, config=replace(FA2, br=128, bc=32, num_warps=4, num_stages=1)),
        made_entry(bucket=BUCKETS[2], config=FA2),
    )
    assert [each["seq_k"] for each in found] == [[1024, 4096], [4096, 16384]]
    assert (found[0]["dtype"], found[0]["head_dim"], found[0]["mask"]) == (
        "bfloat16",
        128,
        "causal",
    )
    assert found[0]["kernel_options"] == {
        "fwd_BLOCK_M": AHEAD.br, "fwd_BLOCK_N": AHEAD.bc, "fwd_num_warps": AHEAD.num_warps,
        "fwd_num_stages": AHEAD.num_stages, "fwd_USE_TMA": True,
        "bwd_BLOCK_M1": 64, "bwd_BLOCK_N1": 128, "bwd_BLOCK_M2": 128, "bwd_BLOCK_N2": 32,
        "bwd_num_warps": FA2.num_warps, "bwd_num_stages": 1,
    }  # fmt: skip
    assert found[1]["kernel_options"] == {
        "fwd_BLOCK_M": FA2.br, "fwd_BLOCK_N": FA2.bc, "fwd_num_warps": FA2.num_warps,
        "fwd_num_stages": FA2.num_stages,
    } | DEFAULT_BACKWARD  # fmt: skip


DEFAULT_BACKWARD = {
    "bwd_BLOCK_M1": 32, "bwd_BLOCK_N1": 32, "bwd_BLOCK_M2": 32, "bwd_BLOCK_N2": 32,
    "bwd_num_warps": 4, "bwd_num_stages": 2,
}  # fmt: skip
"""Of bfloat16 and head dim 128."""


@pytest.mark.parametrize(
    ("direction", "br", "bc"), [("backward_dkv", 64, 32), ("backward_dq", 32, 64)]
)
def test_a_tile_that_does_not_divide_gives_way(direction: Any, br: int, bc: int) -> None:
    spec = SPEC.for_direction(direction)
    entry = made_entry(spec, config=replace(FA2, br=br, bc=bc))
    entry = replace(entry, evidence=EntryEvidence())
    (found,) = options(made_entry(), entry)
    assert DEFAULT_BACKWARD.items() <= found["kernel_options"].items()
    other = RunnerUp(
        config=replace(FA2, br=bc, bc=br), source="estimated", median_us=900.0, digest=DIGEST
    )
    (found,) = options(made_entry(), replace(entry, evidence=EntryEvidence(runners_up=(other,))))
    number = 1 if direction == "backward_dkv" else 2
    tile = [found["kernel_options"][f"bwd_BLOCK_{x}{number}"] for x in "MN"]
    assert tile == [bc, br]


@pytest.mark.parametrize("slug", SHIPPED)
def test_every_shipped_option_is_one_of_flex_attention(slug: str) -> None:
    for each in export_flex.options_of(load_with_evidence(paths.shipped_table(slug))):
        given = each["kernel_options"]
        assert given["bwd_BLOCK_N1"] % given["bwd_BLOCK_M1"] == 0
        assert given["bwd_BLOCK_M2"] % given["bwd_BLOCK_N2"] == 0


def test_a_config_that_flex_attention_cannot_run_gives_way_to_a_runner_up() -> None:
    other = RunnerUp(config=FA2, source="measured", median_us=900.0, digest=DIGEST)
    entry = replace(made_entry(config=HOPPER, source="measured"), evidence=EntryEvidence())
    assert options(entry) == []
    (found,) = options(replace(entry, evidence=EntryEvidence(runners_up=(other,))))
    assert found["kernel_options"]["fwd_BLOCK_M"] == FA2.br
    assert "fwd_USE_TMA" not in found["kernel_options"]


def test_kernels_with_features_are_no_options() -> None:
    assert options(made_entry(replace(SPEC, window=True))) == []
    assert options(made_entry(replace(SPEC, softcap=True))) == []
