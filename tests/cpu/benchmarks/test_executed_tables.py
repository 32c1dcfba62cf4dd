"""benchmarks/executed_tables.py: rows of what was executed, and what is left to execute."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import executed_tables
from flashgen.evaluate.evaluator import triton_version
from flashgen.evaluate.sanitize import Sanitized
from flashgen.kernels.render import render
from flashgen.spec.gpu import TARGETS
from flashgen.table.table import Table, save
from tests.makers import make_config, make_spec
from tests.tables import made_entry, made_table

SPEC = make_spec("bfloat16", 64, direction="backward_delta")
A10, H200 = TARGETS["nvidia_a10"], TARGETS["nvidia_h200"]
CONFIGS = [make_config(br, 16, num_warps=2, num_stages=1) for br in (16, 32)]


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Table:
    """A table of two kernels, of which the record holds none."""
    specs = SPEC, make_spec("float16", 64, direction="backward_delta")
    entries = [made_entry(spec, config=config) for spec, config in zip(specs, CONFIGS, strict=True)]
    made = made_table(*entries)
    save(made, tmp_path / f"{made.gpu.slug}.yaml")
    monkeypatch.setattr(executed_tables, "RECORD", tmp_path / "executed.jsonl")
    monkeypatch.setenv("FLASHGEN_CONFIGS", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    executed_tables.RECORD.touch()
    return made


def row() -> list[str]:
    (found,) = executed_tables.rows()[2:]
    return found.split()[2:]


def test_a_table_is_executed_but_for_what_the_record_holds(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests = [render(e.spec, e.config).digest for e in table.entries]
    of_log: list[str] = []

    def executed(table: Table, log: Path, jobs: int | None) -> Iterator[tuple[str, Sanitized]]:
        of_log.extend(json.loads(line)["digest"] for line in log.read_text().splitlines())
        log.unlink()
        for digest, findings in zip(digests, ((), ("racecheck: it writes",)), strict=True):
            yield "spec", Sanitized(name="kernel", digest=digest, passed=True, findings=findings)

    monkeypatch.setattr(executed_tables, "execute", executed)
    assert row() == ["2", "0", "0"]
    executed_tables.execute_table(table)
    assert (row(), of_log) == (["2", "2", "1"], [])
    # The one with a fault is executed again.
    executed_tables.execute_table(table)
    assert of_log == digests[:1]


def test_ptx_that_another_architecture_shares_is_executed_once(table: Table) -> None:
    spec, config = table.entries[0].spec, table.entries[0].config
    line = {"triton": triton_version(), "name": "kernel", "faults": 0}
    line |= {"digest": render(spec, config).digest}
    for arch, gpu, count in (
        ("sm_90", A10, 0),
        ("sm_80", A10, 1),
        ("sm_80", H200, 0),
        ("sm_80", replace(A10, arch="sm_80"), 0),
    ):
        executed_tables.RECORD.write_text(json.dumps(line | {"arch": arch}))
        found = list(executed_tables.lent(replace(table, gpu=gpu)))
        assert found == [line | {"arch": gpu.arch, "executed_for": arch}] * count


def test_the_ptx_of_products_is_that_of_a_family() -> None:
    spec, config = make_spec("bfloat16", 64), make_config(64, 32, num_warps=4)
    a100, ada, hopper = (
        executed_tables.instructions(spec, config, arch) for arch in ("sm_80", "sm_89", "sm_90")
    )
    assert a100 == ada != hopper
    assert "mma.sync" in a100
    assert ".target" not in a100


def test_a_kernel_whose_text_has_changed_counts_as_not_executed(table: Table) -> None:
    line = {"triton": triton_version(), "arch": table.gpu.arch, "name": "kernel", "faults": 0}
    executed_tables.RECORD.write_text(json.dumps(line | {"digest": "sha256:of another text"}))
    assert row() == ["2", "0", "0"]
