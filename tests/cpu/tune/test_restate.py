"""tune/restate.py: a table's estimates by the model of today, with an evaluator made up for the test."""

from __future__ import annotations

import contextlib
import dataclasses
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flashgen import paths
from flashgen.cli import main
from flashgen.evaluate.evaluator import protocol_of
from flashgen.schedules.config import KernelConfig
from flashgen.schedules.outcome import Source, Status
from flashgen.spec.gpu import TARGETS
from flashgen.spec.problem import BUCKETS
from flashgen.table.entry import Entry, RunnerUp
from flashgen.table.table import Table
from flashgen.table.table_file import load_with_evidence, save
from flashgen.tune import restate
from flashgen.tune.places import TargetOptions
from tests.fakes import FakeEvaluator, Killed
from tests.makers import make_spec
from tests.tables import DIGEST, FA2, made_entry, made_run, with_evidence

L4 = TARGETS["nvidia_l4"]
SPEC = make_spec()
OTHER = replace(FA2, br=64)
TODAY = protocol_of("final", "estimated")
DONOR = "nvidia_a40"


def us(config: KernelConfig) -> float:
    """The model of today finds the runner-up faster."""
    return {FA2: 300.0, OTHER: 200.0}.get(config, 600.0)


def restated(out: Path, monkeypatch: pytest.MonkeyPatch, **fields: Any) -> tuple[Table, str]:
    """The table as it is written, and what was said."""
    fake = FakeEvaluator(**{"us": us, "gpu": L4, "source": "estimated"} | fields)
    monkeypatch.setattr(restate, "OfflineEvaluator", lambda *_, **__: contextlib.nullcontext(fake))
    monkeypatch.setattr(restate.emit, "write", lambda *_: None)
    said: list[str] = []
    (table,) = restate.restate(TargetOptions(target=L4.slug, jobs=1), out, said.append)
    written = load_with_evidence(paths.table_file(out, L4.slug))
    assert [entry.result for entry in written.everything] == [e.result for e in table.everything]
    assert {stage for stage, _ in fake.asked} <= {"timed"}
    return written, "\n".join(said)


def hold(out: Path, *entries: Entry) -> None:
    runs = {entry.evidence.run: made_run("old", entry.result.source) for entry in entries}
    runs = [replace(run, id=name, donor=DONOR) for name, run in runs.items()]
    save(Table(gpu=L4, runs=tuple(runs), entries=entries), paths.table_file(out, L4.slug))


def an_entry(source: Source = "estimated", **where: Any) -> Entry:
    entry = made_entry(SPEC, config=FA2, run=f"{source}-{DONOR}", source=source, **where)
    runner_up = RunnerUp(config=OTHER, source="estimated", median_us=120.0, digest=DIGEST)
    return with_evidence(entry, runners_up=(runner_up,), regret=0.01)


def test_all_times_are_of_today_and_nothing_else_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = an_entry()
    hold(tmp_path, old)
    table, said = restated(tmp_path, monkeypatch)
    (new,) = table.everything
    assert "1 of 1 entries have older estimates" in said
    assert (new.config, new.result.median_us, new.result.speedup) == (FA2, 300.0, 2.0)
    assert (new.evidence.low_us, new.evidence.high_us) == (299.5, 300.5)
    assert (new.evidence.default_us, new.evidence.regret) == (600.0, 0.5)
    assert [(o.config, o.median_us) for o in new.evidence.runners_up] == [(OTHER, 200.0)]
    run = table.run_of(new)
    assert run is not None
    assert (run.protocol, run.donor) == (TODAY, DONOR)
    times = ("median_us", "speedup"), ("run", "default_us", "low_us", "high_us", "regret")
    for held, kept, changed in zip(
        (old.result, old.evidence), (new.result, new.evidence), times, strict=True
    ):
        same = {field.name for field in dataclasses.fields(held)} - {*changed, "runners_up"}
        assert all(getattr(held, name) == getattr(kept, name) for name in same)


def test_what_is_of_today_is_left_so_the_same_command_goes_on_after_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = [an_entry(bucket=bucket) for bucket in BUCKETS[:2]]
    other = replace(entries[0], spec=make_spec(mask="causal"))
    hold(tmp_path, *entries, other)
    with pytest.raises(Killed):
        restated(tmp_path, monkeypatch, kill_after=7)  # after the two of the first spec
    _, said = restated(tmp_path, monkeypatch)
    assert "1 of 3 entries" in said
    _, said = restated(tmp_path, monkeypatch)
    assert "0 of 3 entries" in said


def test_a_measured_entry_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hold(tmp_path, an_entry("measured"))
    path = paths.table_file(tmp_path, L4.slug)
    text = path.read_bytes()
    restated(tmp_path, monkeypatch)
    assert path.read_bytes() == text


def test_what_has_no_estimate_now_keeps_what_it_has_and_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold(tmp_path, an_entry())
    _, said = restated(tmp_path, monkeypatch, failing=lambda stage, config: Status.NO_ESTIMATE)
    assert f"{FA2.label}: no estimate, left as it is" in said
    (entry,) = load_with_evidence(paths.table_file(tmp_path, L4.slug)).everything
    assert entry.result.median_us == 812.3


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("--restate", "name the --target"),
        ("--restate --gpu", "name the --target"),
        ("--restate --target nvidia_l4 --from-tables", "searches nothing"),
        ("--restate --target nvidia_l4 --causal", "searches nothing"),
        ("--restate --target nvidia_l4 --improve-only", "searches nothing"),
    ],
)
def test_the_option_is_of_whole_tables(
    command: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["tune", *command.split()])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
