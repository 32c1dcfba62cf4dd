"""benchmarks/executed_tables.py: rows of what was executed, and what is left to execute."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import executed_tables
from flashgen.evaluate.evaluator import triton_version
from flashgen.evaluate.sanitize import Sanitized
from flashgen.kernels.render import render
from flashgen.table.table import Table, save
from tests.makers import make_config, make_spec
from tests.tables import made_entry, made_table

SPEC = make_spec("bfloat16", 64, direction="backward_delta")
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


def test_a_kernel_whose_text_has_changed_counts_as_not_executed(table: Table) -> None:
    line = {"triton": triton_version(), "arch": table.gpu.arch, "name": "kernel", "faults": 0}
    executed_tables.RECORD.write_text(json.dumps(line | {"digest": "sha256:of another text"}))
    assert row() == ["2", "0", "0"]
