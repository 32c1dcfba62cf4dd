"""tune/tune.py: what is written, when, and what is left alone; with an evaluator made up for the test."""

from __future__ import annotations

import hashlib
import io
import json
import re
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from flashgen import paths
from flashgen.errors import FlashgenError, InvalidArgument, NoGpuError, ToolchainError
from flashgen.evaluate.evaluator import triton_version
from flashgen.evaluate.measure import Conditions
from flashgen.evaluate.on_gpu import GpuEvaluator
from flashgen.evaluate.payloads import Tasks
from flashgen.schedules.config import KernelConfig, kernel_name
from flashgen.schedules.outcome import Outcome, Source, Stage, Status
from flashgen.schedules.space import legal_configs, seed_configs, tuned_default
from flashgen.search.goal import Budget, rendered_digest
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.gpu import TARGETS, Gpu
from flashgen.spec.problem import BUCKETS
from flashgen.table import emit
from flashgen.table.table import Table
from flashgen.table.table_file import load, load_with_evidence, save
from flashgen.tune import evaluators, gpu_run, places, tune
from flashgen.tune.options import TuneOptions
from flashgen.tune.places import TargetOptions
from tests.fakes import FakeEvaluator, Killed
from tests.makers import make_config, make_spec
from tests.tables import made_entry, made_run, named, with_evidence

H200 = TARGETS["nvidia_h200"]
SPEC = make_spec()
CAUSAL = make_spec(mask="causal")
TRIALS = Budget(trials=6)


def us(config: KernelConfig) -> float:
    """Wide tiles are fast here."""
    return 1000.0 - config.br - config.bc


class Served(FakeEvaluator):
    """A FakeEvaluator whose digests are of the text that is rendered, as the table keeps them."""

    def outcome(self, stage: Stage, *asked: Any) -> Outcome:
        spec, _, config = asked
        made = super().outcome(stage, *asked)
        return replace(made, digest=rendered_digest(spec, config), triton=triton_version())


@pytest.fixture(autouse=True)
def no_shipped_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shipped = tmp_path / "shipped"
    shipped.mkdir()
    monkeypatch.setattr(paths, "shipped_configs_dir", lambda: shipped)
    return shipped


@pytest.fixture
def emitted(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Table]]:
    """What generate.write was given; it is tested elsewhere, and takes seconds."""
    calls: list[dict[str, Table]] = []
    monkeypatch.setattr(emit, "write", lambda tables, out: calls.append(dict(tables)))
    return calls


def run(
    monkeypatch: pytest.MonkeyPatch,
    out: Path,
    evaluator: FakeEvaluator | None = None,
    **fields: Any,
) -> tuple[Table, str]:
    """Tune; the table, and what was printed."""
    used = evaluator or Served(us=us, gpu=H200, source="estimated")
    if used.source == "measured":
        monkeypatch.setattr(places, "choose", lambda *_: ((), {0: used.gpu}))
    else:
        fields.setdefault("where", TargetOptions(target=used.gpu.slug))
    monkeypatch.setattr(evaluators, "make_evaluator", lambda *_: used)
    console = Console(file=io.StringIO(), width=200, highlight=False, markup=False)
    options = TuneOptions(**{"specs": (SPEC,), "budget": TRIALS, "out": out} | fields)
    (table,) = tune.tune(options, console)
    return table, console.file.getvalue()  # type: ignore[attr-defined]


Emitted = list[dict[str, Table]]
Patch = pytest.MonkeyPatch


def test_the_table_on_disk_is_the_one_returned(
    tmp_path: Path, monkeypatch: Patch, emitted: Emitted
) -> None:
    table, _ = run(monkeypatch, tmp_path, specs=(SPEC, CAUSAL), seqs=(512, 4096))
    assert load(tmp_path / "configs" / "nvidia_h200.yaml") == load_again(table, tmp_path)
    assert [entry.key for entry in table.entries] == [
        (spec, bucket) for spec in (SPEC, CAUSAL) for bucket in (BUCKETS[0], BUCKETS[2])
    ]
    assert emitted == [{"nvidia_h200": load(tmp_path / "configs" / "nvidia_h200.yaml")}]


def load_again(table: Table, folder: Path) -> Table:
    """A table as it is after being written: figures are rounded there."""
    path = folder / "again" / f"{table.gpu.slug}.yaml"
    save(table, path)
    return load(path)


def test_an_entry_says_what_was_found(tmp_path: Path, monkeypatch: Patch, emitted: Emitted) -> None:
    table, _ = run(monkeypatch, tmp_path)
    (entry,) = table.entries
    result = entry.result
    assert rendered_digest(SPEC, entry.config).startswith(entry.evidence.digest or "?")
    assert (entry.evidence.registers, entry.evidence.shared_bytes) == (128, 65536)
    assert result.source == table.run_of(entry).source == "estimated"
    assert result.median_us == us(entry.config)
    assert (entry.evidence.low_us, entry.evidence.high_us) == (
        us(entry.config) - 0.5,
        us(entry.config) + 0.5,
    )
    assert entry.evidence.default_us == us(tuned_default(SPEC))
    assert entry.tflops == pytest.approx(4 * 4 * 32 * 4096**2 * 64 / us(entry.config) * 1e-6)
    assert entry.problem.seq_k == 4096
    assert (entry.evidence.candidates, result.max_abs_err_floors) == (6, 1.0)
    assert len(entry.evidence.runners_up) == 2
    assert entry.config not in [other.config for other in entry.evidence.runners_up]


def test_it_is_saved_after_every_search_and_emitted_when_interrupted(
    tmp_path: Path, monkeypatch: Patch, emitted: Emitted
) -> None:
    def interrupt(stage: Stage, config: KernelConfig) -> Status | None:
        if (tmp_path / "configs").exists():
            raise KeyboardInterrupt
        return None

    evaluator = Served(us=us, gpu=H200, source="estimated", failing=interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(monkeypatch, tmp_path, evaluator, specs=(SPEC, CAUSAL))
    saved = load(tmp_path / "configs" / "nvidia_h200.yaml")
    assert [entry.spec for entry in saved.entries] == [SPEC]
    assert emitted == [{"nvidia_h200": saved}]
    asked = evaluator.asked[:-1]  # the last was in flight
    resumed = Served(us=us, gpu=H200, source="estimated")
    table, _ = run(monkeypatch, tmp_path, resumed, specs=(SPEC, CAUSAL))
    assert [entry.spec for entry in table.entries] == [SPEC, CAUSAL]
    assert len(resumed.asked) == len(asked)  # of the second spec; of the first nothing


def test_ctrl_c_saves_the_best_and_the_same_command_ends_as_if_nothing_had_been(
    tmp_path: Path, monkeypatch: Patch, emitted: Emitted
) -> None:
    count = 0

    def interrupt(stage: Stage, config: KernelConfig) -> Status | None:
        nonlocal count
        count += stage == "timed"
        if count == 8 and stage == "timed":
            raise KeyboardInterrupt
        return None

    options: dict[str, Any] = {"specs": (SPEC, CAUSAL), "budget": Budget(trials=30)}
    evaluator = Served(us=us, gpu=H200, failing=interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(monkeypatch, tmp_path / "stopped", evaluator, **options)
    (saved,) = load_with_evidence(tmp_path / "stopped" / "configs" / "nvidia_h200.yaml").entries
    timed = {config for stage, config in evaluator.asked[:-1] if stage == "timed"}
    assert us(saved.config) == min(us(config) for config in timed)
    assert (saved.evidence.candidates or 99) < 30
    again, printed = run(monkeypatch, tmp_path / "stopped", Served(us=us, gpu=H200), **options)
    assert "Resuming the run of" in printed
    whole, _ = run(monkeypatch, tmp_path / "whole", Served(us=us, gpu=H200), **options)
    assert [with_evidence(entry, run="") for entry in again.entries] == [
        with_evidence(entry, run="") for entry in whole.entries
    ]


@pytest.mark.parametrize("source", ["estimated", "measured"])
@pytest.mark.parametrize("shipped", [True, False])
def test_ctrl_c_before_there_is_a_better_result_says_that_the_log_alone_is_kept(
    tmp_path: Path,
    monkeypatch: Patch,
    emitted: Emitted,
    no_shipped_tables: Path,
    source: Source,
    shipped: bool,
) -> None:
    def interrupt(stage: Stage, config: KernelConfig) -> Status | None:
        if stage == "timed":
            raise KeyboardInterrupt
        return None

    if shipped:
        held = Table(gpu=H200).with_entry(TestWhatIsHeld.HELD, made_run())
        save(held, no_shipped_tables / "nvidia_h200.yaml")
    screen = Console(file=io.StringIO(), width=200)
    evaluator = Served(us=us, gpu=H200, source=source, failing=interrupt)
    monkeypatch.setattr(evaluators, "make_evaluator", lambda *_: evaluator)
    monkeypatch.setattr(places, "choose", lambda *_: ((), {0: H200}))
    with pytest.raises(KeyboardInterrupt):
        tune.tune(TuneOptions(specs=(SPEC,), budget=TRIALS, out=tmp_path), screen)
    *_, nothing, kept = screen.file.getvalue().splitlines()  # type: ignore[attr-defined]
    table = tmp_path / "configs" / "nvidia_h200.yaml"
    assert nothing.startswith(f"Interrupted: nothing is written to {table}, ")
    assert not table.exists()
    assert emitted == []
    log, words, _ = kept.partition(" has all that was tried: the same command goes on")
    assert words
    assert Path(log).stat().st_size > 0


def test_a_run_that_found_nothing_leaves_no_copy_of_the_shipped_table(
    tmp_path: Path, monkeypatch: Patch, emitted: Emitted
) -> None:
    """As of fp8 for a GPU without it; and no command is suggested."""
    fails = Served(us=us, gpu=H200, failing=lambda *_: Status.COMPILE_ERROR)
    console = Console(file=io.StringIO(), width=200)
    monkeypatch.setattr(evaluators, "make_evaluator", lambda *_: fails)
    where = TargetOptions(target=H200.slug)
    with pytest.raises(FlashgenError, match="1 of 1 searches found no right config"):
        tune.tune(TuneOptions(specs=(SPEC,), budget=TRIALS, out=tmp_path, where=where), console)
    assert emitted == []
    assert not list(tmp_path.glob("configs/*"))
    assert "flashgen" not in console.file.getvalue().splitlines()[-1]  # type: ignore[attr-defined]


def test_a_run_that_was_killed_before_it_generated_generates_when_it_goes_on(
    tmp_path: Path, monkeypatch: Patch, emitted: Emitted
) -> None:
    save(Table(gpu=H200), tmp_path / "configs" / "nvidia_h200.yaml")
    with monkeypatch.context() as patched:
        patched.setattr(emit, "write", _killed)
        with pytest.raises(Killed):
            run(patched, tmp_path)
    table, printed = run(monkeypatch, tmp_path, Served(us=us, gpu=H200, source="estimated"))
    assert "1 search, 1 entry changed" in printed
    assert len(table.entries) == len(emitted) == 1


def test_a_first_ctrl_c_in_the_final_round_saves_the_winner_too(
    tmp_path: Path, monkeypatch: Patch, emitted: Emitted
) -> None:
    times = [0]

    def interrupt(stage: Stage, config: KernelConfig) -> Status | None:
        times[0] += stage == "final"
        if stage == "final" and times[0] == 2:
            raise KeyboardInterrupt
        return None

    with pytest.raises(KeyboardInterrupt):
        run(monkeypatch, tmp_path, Served(us=us, gpu=H200, failing=interrupt), specs=(SPEC, CAUSAL))
    (saved,) = load_with_evidence(tmp_path / "configs" / "nvidia_h200.yaml").entries
    whole, _ = run(monkeypatch, tmp_path / "whole", Served(us=us, gpu=H200))
    assert saved.config == whole.entries[0].config
    assert saved.result.source == "measured"


def test_a_resumed_run_keeps_the_clocks_of_the_rounds_before(
    tmp_path: Path, monkeypatch: Patch, emitted: Emitted
) -> None:
    """Killed after the first search; all rounds of the second are answered by the log."""
    first = Served(us=us, gpu=H200)
    first.conditions = Conditions(driver="575.1", power_w=612.4)  # type: ignore[attr-defined]
    with monkeypatch.context() as patched:
        patched.setattr(gpu_run.GpuRun, "_share_kernels", _killed)
        with pytest.raises(Killed):
            run(patched, tmp_path, first, specs=(SPEC, CAUSAL))
    table, printed = run(monkeypatch, tmp_path, Served(us=us, gpu=H200), specs=(SPEC, CAUSAL))
    assert "Resuming the run" in printed
    assert {table.run_of(entry).driver for entry in table.entries} == {"575.1"}


def _killed(*_: object) -> None:
    raise Killed


class TestOtherGpus:
    """Another GPU's table says what to try."""

    TILE = legal_configs(SPEC, H200)[-1]

    def test_what_it_holds_is_evaluated_before_the_seeds(
        self, tmp_path: Path, monkeypatch: Patch, emitted: Emitted
    ) -> None:
        elsewhere = Table(gpu=TARGETS["nvidia_h100_80gb_hbm3"]).with_entry(
            made_entry(SPEC, BUCKETS[2], self.TILE), made_run()
        )
        save(elsewhere, tmp_path / "configs" / "nvidia_h100_80gb_hbm3.yaml")
        evaluator = Served(us=us, gpu=H200, source="estimated")
        run(monkeypatch, tmp_path, evaluator, budget=Budget(trials=2))
        assert self.TILE in evaluator.configs("timed")

    @pytest.mark.parametrize("seqs", [(512,), (4096,)], ids=["it is searched", "another bucket is"])
    @pytest.mark.parametrize(
        ("slug", "stays"), [("nvidia_h100_80gb_hbm3", True), ("nvidia_h100_pcie", False)]
    )
    def test_no_estimate_replaces_what_the_same_chip_was_measured_with(
        self,
        tmp_path: Path,
        monkeypatch: Patch,
        emitted: Emitted,
        seqs: tuple[int, ...],
        slug: str,
        stays: bool,
    ) -> None:
        """An H100 has the chip of an H200; its PCIe card has fewer SMs. Every config is faster by
        estimate than this one.
        """
        slow = KernelConfig(br=64, bc=32, num_warps=4, num_stages=2)
        gpu = TARGETS[slug]
        measured = made_entry(SPEC, BUCKETS[0], slow, source="measured")
        there = Table(gpu=H200).with_entry(measured, made_run(source="measured"))
        held = Table(gpu=gpu).with_entry(made_entry(SPEC, BUCKETS[0], slow), made_run())
        held = held.with_entry(made_entry(SPEC, BUCKETS[2], tuned_default(SPEC)), made_run())
        for table in (there, held):
            save(table, tmp_path / "configs" / f"{table.gpu.slug}.yaml")
        quick = Served(us=us, gpu=gpu, source="estimated")
        table, printed = run(monkeypatch, tmp_path, quick, seqs=seqs)
        found = table.find(SPEC, BUCKETS[0])
        assert found is not None
        assert (found.config == slow) is stays
        assert ("the same chip was measured with it" in printed) is (stays and seqs == (512,))


class TestNeighbours:
    """Offline, all that lies in a tie goes to what was chosen before for what is alike."""

    HALF = make_spec(dtype="float16")

    def evaluator(self, **fields: Any) -> Served:
        """All take the same time. Registers differ, and not alike in all searches."""

        class Tied(Served):
            def outcome(tied, stage: Stage, spec: Any, problem: Any, config: Any) -> Outcome:
                name = f"{spec.name} {problem.seq_k} {config.br} {config.num_warps}"
                digest = hashlib.sha256(name.encode()).hexdigest()
                made = super().outcome(stage, spec, problem, config)
                return replace(made, registers=32 + int(digest[:4], 16) % 200)

        return Tied(us=lambda _: 100.0, gpu=H200, source="estimated", **fields)

    def run(self, folder: Path, patch: Patch, *specs: AttentionSpec, **fields: Any) -> Table:
        table, _ = run(patch, folder, self.evaluator(**fields), specs=specs, seqs=(512, 4096))
        return table

    def test_searches_of_one_run_do_not_see_each_other(
        self, tmp_path: Path, monkeypatch: Patch, emitted: Emitted
    ) -> None:
        """In whatever order they end, and in whichever shard they are."""
        alone = self.run(tmp_path / "alone", monkeypatch, self.HALF)
        both = self.run(tmp_path / "both", monkeypatch, SPEC, self.HALF)
        tiles = {e.key: e.config for e in both.entries}
        assert [tiles[e.key] for e in alone.entries] == [e.config for e in alone.entries]

    def test_what_the_run_does_not_search_counts_from_the_table(
        self, tmp_path: Path, monkeypatch: Patch, emitted: Emitted
    ) -> None:
        first = self.run(tmp_path, monkeypatch, SPEC)
        then = self.run(tmp_path, monkeypatch, self.HALF)
        assert {e.config for e in then.entries} == {e.config for e in first.entries}

    def test_what_the_run_searches_does_not_count_from_the_table(
        self, tmp_path: Path, monkeypatch: Patch, emitted: Emitted
    ) -> None:
        """The table holds a choice for CAUSAL; the run makes another, and is killed after that."""
        held = next(c for c in seed_configs(CAUSAL, H200) if c.schedule == "s_ahead")
        before = Table(gpu=H200).with_entry(made_entry(CAUSAL, BUCKETS[2], held), made_run())

        class Clear(Served):
            """CAUSAL has a clear winner; of the others all are tied, and pointers are leanest."""

            def outcome(self, stage: Stage, spec: Any, problem: Any, config: Any) -> Outcome:
                best = (config.schedule, config.loads) == ("fa2", "descriptor")
                self.us = lambda _: 100.0 if best or spec != CAUSAL else 200.0
                self.registers = lambda c: 96 if c.loads == "pointer" else 128
                return super().outcome(stage, spec, problem, config)

        def evaluator(**fields: Any) -> Served:
            return Clear(us=us, gpu=H200, source="estimated", **fields)

        def tuned(name: str, evaluator: Served) -> Table:
            return run(monkeypatch, tmp_path / name, evaluator, specs=(SPEC, CAUSAL, self.HALF))[0]

        for name in ("whole", "killed"):
            save(before, tmp_path / name / "configs" / "nvidia_h200.yaml")
        whole = evaluator()
        expected = tuned("whole", whole)
        with pytest.raises(Killed):
            tuned("killed", evaluator(kill_after=len(whole.asked) - 1))
        saved = load(tmp_path / "killed" / "configs" / "nvidia_h200.yaml")
        assert held not in [entry.config for entry in saved.entries]  # CAUSAL is done
        again = tuned("killed", evaluator())
        for made in (expected, again):
            chosen = made.find(SPEC, BUCKETS[2])
            assert chosen is not None
            assert chosen.config.loads == "pointer"
        assert [e.config for e in again.entries] == [e.config for e in expected.entries]
        assert [with_evidence(e, run="") for e in again.entries] == [
            with_evidence(e, run="") for e in expected.entries
        ]


class TestErrorInTheMiddle:
    """A machine that fails in the second search: the first one's result is emitted."""

    @staticmethod
    def full(spec: AttentionSpec) -> Served:
        class Full(Served):
            def outcome(self, stage: Stage, asked: AttentionSpec, *rest: Any) -> Outcome:
                if asked == spec:
                    raise ToolchainError("the disk is full")
                return super().outcome(stage, asked, *rest)

        return Full(us=us, gpu=H200, source="estimated")

    def test_what_was_found_is_emitted(
        self, tmp_path: Path, monkeypatch: Patch, emitted: Emitted
    ) -> None:
        with pytest.raises(ToolchainError, match="the disk is full"):
            run(monkeypatch, tmp_path, self.full(CAUSAL), specs=(SPEC, CAUSAL))
        assert emitted == [{"nvidia_h200": load(tmp_path / "configs" / "nvidia_h200.yaml")}]

    def test_nothing_is_emitted_where_nothing_changed(
        self, tmp_path: Path, monkeypatch: Patch, emitted: Emitted
    ) -> None:
        with pytest.raises(ToolchainError, match="the disk is full"):
            run(monkeypatch, tmp_path, self.full(SPEC), specs=(SPEC, CAUSAL))
        assert emitted == []

    def test_a_second_error_does_not_hide_the_first(
        self, tmp_path: Path, monkeypatch: Patch
    ) -> None:
        def refuse(*_: object) -> None:
            raise FlashgenError("generated/ cannot be written")

        monkeypatch.setattr(emit, "write", refuse)
        with pytest.raises(ToolchainError, match="the disk is full"):
            run(monkeypatch, tmp_path, self.full(CAUSAL), specs=(SPEC, CAUSAL))


def test_a_finished_run_again_changes_nothing(
    tmp_path: Path, monkeypatch: Patch, emitted: Emitted
) -> None:
    """Clocks and power of a round are not in the log: the run that measured it stays."""
    first = Served(us=lambda config: us(config) / 7, gpu=H200)  # more digits than the table keeps
    first.conditions = Conditions(driver="575.1", power_w=612.4)  # type: ignore[attr-defined]
    run(monkeypatch, tmp_path, first, specs=(SPEC, CAUSAL))
    text = (tmp_path / "configs" / "nvidia_h200.yaml").read_text()
    assert "612 W" in text
    again = Served(us=us, gpu=H200)
    _, printed = run(monkeypatch, tmp_path, again, specs=(SPEC, CAUSAL))
    assert again.asked == []
    assert (tmp_path / "configs" / "nvidia_h200.yaml").read_text() == text
    assert printed.count("the table's entry stays: it says the same") == 2


def test_the_same_by_another_protocol_is_written(
    tmp_path: Path, monkeypatch: Patch, emitted: Emitted
) -> None:
    """Else `explain` would ask for ever to have an entry of an older model made anew."""
    run(monkeypatch, tmp_path, Served(us=us, gpu=H200))
    file = tmp_path / "configs" / "nvidia_h200.yaml"
    text = file.read_text()
    told, run_id = re.search(r"protocol: \d+", text), re.search(r"searched: (.*)", text)
    assert told
    assert run_id
    file.write_text(text.replace(told[0], "protocol: 1").replace(run_id[1], "20250101T000000Z"))
    _, printed = run(monkeypatch, tmp_path, Served(us=us, gpu=H200))
    assert "it says the same" not in printed
    assert told[0] in file.read_text()
    assert "protocol: 1\n" not in file.read_text()


def test_improve_only_shares_no_kernels(
    tmp_path: Path, monkeypatch: Patch, emitted: Emitted
) -> None:
    """Two buckets with winners that cost the same: another's is no improvement."""
    other = KernelConfig(br=64, bc=32, num_warps=4, num_stages=2)
    held = Table(gpu=H200)
    for bucket, config in ((BUCKETS[0], other), (BUCKETS[2], tuned_default(SPEC))):
        held = held.with_entry(made_entry(SPEC, bucket, config), made_run())
    save(held, tmp_path / "configs" / "nvidia_h200.yaml")
    same = Served(us=lambda _: 100.0, gpu=H200, source="estimated")
    for improve_only, kernels in ((True, 2), (False, 1)):
        table, _ = run(monkeypatch, tmp_path, same, improve_only=improve_only)
        assert len({entry.config for entry in table.entries}) == kernels


def test_a_second_run_evaluates_nothing_again(
    tmp_path: Path, monkeypatch: Patch, emitted: Emitted
) -> None:
    first, _ = run(monkeypatch, tmp_path)
    again = Served(us=us, gpu=H200, source="estimated")
    second, _ = run(monkeypatch, tmp_path, again)
    assert again.asked == []
    assert [e.config for e in second.entries] == [e.config for e in first.entries]


class TestWhatIsHeld:
    """Merging with the table there is."""

    HELD = made_entry(SPEC, BUCKETS[2], KernelConfig(br=64, bc=32, num_warps=4, num_stages=2))

    def held(self, folder: Path, **result: Any) -> str:
        entry = replace(self.HELD, result=replace(self.HELD.result, **result))
        save(
            Table(gpu=H200).with_entry(entry, made_run("a", entry.result.source)),
            folder / "nvidia_h200.yaml",
        )
        return (folder / "nvidia_h200.yaml").read_text()

    def test_the_shipped_table_is_the_start_where_dir_has_none(
        self, tmp_path: Path, monkeypatch: Patch, emitted: Emitted, no_shipped_tables: Path
    ) -> None:
        text = self.held(no_shipped_tables)
        table, _ = run(monkeypatch, tmp_path / "out", specs=(CAUSAL,))
        assert {entry.spec for entry in table.entries} == {SPEC, CAUSAL}
        assert (no_shipped_tables / "nvidia_h200.yaml").read_text() == text
        assert (tmp_path / "out" / "configs" / "nvidia_h200.yaml").exists()

    def test_dirs_own_table_comes_before_the_shipped(
        self, tmp_path: Path, monkeypatch: Patch, emitted: Emitted, no_shipped_tables: Path
    ) -> None:
        self.held(no_shipped_tables)
        save(Table(gpu=H200), tmp_path / "configs" / "nvidia_h200.yaml")
        table, _ = run(monkeypatch, tmp_path, specs=(CAUSAL,))
        assert {entry.spec for entry in table.entries} == {CAUSAL}

    def test_an_estimate_never_replaces_a_measurement(
        self, tmp_path: Path, monkeypatch: Patch, emitted: Emitted
    ) -> None:
        text = self.held(tmp_path / "configs", source="measured")
        _, printed = run(monkeypatch, tmp_path)
        assert (tmp_path / "configs" / "nvidia_h200.yaml").read_text() == text
        assert "the table's entry stays: it is measured, and estimated never replaces" in printed

    def test_a_new_folder_gets_the_shipped_table_where_nothing_beats_it(
        self, tmp_path: Path, monkeypatch: Patch, no_shipped_tables: Path
    ) -> None:
        self.held(no_shipped_tables, source="measured")
        _, printed = run(monkeypatch, tmp_path / "new")
        assert "1 search, 0 entries changed" in printed
        (said,) = re.findall("^Written: (.*) and (.*)$", printed, re.MULTILINE)
        table, copy, _ = said[0].partition(" (a copy of the shipped table)")
        assert copy
        assert load(Path(table)) == load(no_shipped_tables / "nvidia_h200.yaml")
        assert emit.check(emit.tables_for(tmp_path / "new"), Path(said[1])) == []

    def test_a_measurement_replaces_an_estimate(
        self, tmp_path: Path, monkeypatch: Patch, emitted: Emitted
    ) -> None:
        self.held(tmp_path / "configs")
        table, _ = run(monkeypatch, tmp_path, Served(us=us, gpu=H200))
        assert [entry.result.source for entry in table.entries] == ["measured"]
        assert [run.source for run in table.runs] == ["measured"]

    def test_a_kernel_that_was_measured_and_cannot_be_estimated_stays(
        self, tmp_path: Path, monkeypatch: Patch, emitted: Emitted
    ) -> None:
        """As schedule hopper in the table of the H200, on a machine without a GPU."""
        hopper = make_config(128, 64, num_warps=8, schedule="hopper", loads="descriptor")
        result = replace(self.HELD.result, source="measured")
        measured = replace(self.HELD, config=hopper, result=result)
        other = replace(self.HELD, bucket=BUCKETS[1])
        held = Table(gpu=H200).with_entry(
            with_evidence(measured, run=named("b")), made_run("b", "measured")
        )
        held = held.with_entry(other, made_run())
        save(held, tmp_path / "configs" / "nvidia_h200.yaml")
        quick = Served(us=lambda c: 1.0 if c == hopper else us(c), gpu=H200, source="estimated")
        table, printed = run(monkeypatch, tmp_path, quick, seqs=(2048, 4096))
        assert "the table's entry stays: it is measured" in printed
        assert table.find(SPEC, BUCKETS[2]) == held.find(SPEC, BUCKETS[2])
        found = table.find(SPEC, BUCKETS[1])
        assert found is not None
        assert found.result.source == "estimated"

    @pytest.mark.parametrize("tritons", [("0.1",), None])
    def test_what_was_executed_is_timed_first_on_a_gpu(
        self, tmp_path: Path, monkeypatch: Patch, emitted: Emitted, tritons: tuple[str, ...] | None
    ) -> None:
        """It is what serves, or would under another Triton; a short search must not pass it over."""
        hopper = make_config(128, 64, num_warps=8, schedule="hopper", loads="descriptor")
        here = (".".join(triton_version().split(".")[:2]),)
        executed = replace(self.HELD, config=hopper, tritons=tritons or here)
        held = Table(gpu=H200).with_entry(self.HELD, made_run())
        save(held.of([self.HELD, executed]), tmp_path / "configs" / "nvidia_h200.yaml")
        _, printed = run(monkeypatch, tmp_path, Served(us=us, gpu=H200, source="estimated"))
        served = f"is served by {kernel_name(SPEC, hopper)}, which was executed on a CPU: searches"
        assert (served in printed) is (tritons is None)
        slow = Served(us=lambda config: 100.0 if config == hopper else us(config), gpu=H200)
        table, _ = run(monkeypatch, tmp_path, slow)
        assert [entry.config for entry in table.everything] == [hopper]
        assert table.entries[0].result.source == "measured"

    @pytest.mark.parametrize("improve_only", [True, False])
    def test_an_unbeaten_entry_is_refreshed_unless_asked_to_be_left(
        self, tmp_path: Path, monkeypatch: Patch, emitted: Emitted, improve_only: bool
    ) -> None:
        text = self.held(tmp_path / "configs")
        best = Served(
            us=lambda c: 1.0 if c == self.HELD.config else us(c), gpu=H200, source="estimated"
        )
        table, printed = run(monkeypatch, tmp_path, best, improve_only=improve_only)
        kept = (tmp_path / "configs" / "nvidia_h200.yaml").read_text()
        assert table.entries[0].config == self.HELD.config
        assert (kept == text) is improve_only
        assert ("nothing beat it" in printed) is improve_only
        assert improve_only or table.entries[0].result.median_us == 1.0

    def test_improve_only_takes_what_is_better(
        self, tmp_path: Path, monkeypatch: Patch, emitted: Emitted
    ) -> None:
        self.held(tmp_path / "configs")
        table, _ = run(monkeypatch, tmp_path, improve_only=True)
        assert table.entries[0].config != self.HELD.config

    def test_what_only_restates_is_not_written(
        self, tmp_path: Path, monkeypatch: Patch, emitted: Emitted
    ) -> None:
        run(monkeypatch, tmp_path)
        text = (tmp_path / "configs" / "nvidia_h200.yaml").read_text()
        (tmp_path / ".flashgen" / "nvidia_h200.jsonl").unlink()
        other = Served(us=lambda config: 2 * us(config), gpu=H200, source="estimated")
        _, printed = run(monkeypatch, tmp_path, other)
        assert (tmp_path / "configs" / "nvidia_h200.yaml").read_text() == text
        assert len(emitted) == 1
        assert "Written" not in printed
        assert "0 entries changed" in printed
        assert "its estimates stay (--restate)" in printed

    def test_a_new_folder_takes_what_was_found_after_a_kill_too(
        self, tmp_path: Path, monkeypatch: Patch, emitted: Emitted, no_shipped_tables: Path
    ) -> None:
        run(monkeypatch, tmp_path / "first", specs=(SPEC, CAUSAL))
        for path in (tmp_path / "first" / "configs").rglob("nvidia_h200.*"):
            shipped = no_shipped_tables / path.relative_to(tmp_path / "first" / "configs")
            shipped.parent.mkdir(exist_ok=True)
            shipped.write_bytes(path.read_bytes())
        other, killed, again = (
            Served(us=lambda config: 2 * us(config), gpu=H200, source="estimated") for _ in range(3)
        )
        whole, _ = run(monkeypatch, tmp_path / "whole", other, specs=(SPEC, CAUSAL))
        killed.kill_after = len(other.asked) - 1
        with pytest.raises(Killed):
            run(monkeypatch, tmp_path / "killed", killed, specs=(SPEC, CAUSAL))
        assert (tmp_path / "killed" / "configs" / "nvidia_h200.yaml").exists()
        resumed, printed = run(monkeypatch, tmp_path / "killed", again, specs=(SPEC, CAUSAL))
        assert "Resuming the run" in printed
        assert "stays" not in printed
        assert [e.config for e in resumed.entries] == [e.config for e in whole.entries]
        assert {e.evidence.run for e in resumed.entries} == {resumed.runs[-1].id}

    @pytest.mark.parametrize("stage", ["compile", "check"])
    def test_an_incumbent_without_a_verdict_stays_and_the_end_says_so(
        self, tmp_path: Path, monkeypatch: Patch, emitted: Emitted, stage: Stage
    ) -> None:
        """As on a machine too busy to compile it, or the default."""
        text = self.held(tmp_path / "configs")
        late = (self.HELD.config, tuned_default(SPEC, H200))
        for status, words in (
            (Status.KILLED, "2 kernels failed:\n  2 killed: the first is fwd_bf16_d64_br64_"),
            (Status.TIMEOUT, "2 kernels failed:\n  2 timeout: the first is fwd_bf16_d64_br64_"),
            (None, "2 quarantined"),
        ):
            busy = Served(
                us=us, gpu=H200, source="estimated",
                failing=lambda at, c, now=status: now if at == stage and c in late else None,
            )  # fmt: skip
            console = Console(file=io.StringIO(), width=60, highlight=False, markup=False)
            monkeypatch.setattr(evaluators, "make_evaluator", lambda *_, made=busy: made)
            options = TuneOptions(
                specs=(SPEC,),
                budget=TRIALS,
                out=tmp_path,
                where=TargetOptions(target="nvidia_h200"),
            )
            with pytest.raises(FlashgenError, match="1 of 1 searches were cut short"):
                tune.tune(options, console)
            printed = console.file.getvalue()  # type: ignore[attr-defined]
            assert (tmp_path / "configs" / "nvidia_h200.yaml").read_text() == text
            assert words in printed
            assert "1 search, 0 entries changed" in printed
            explained = [line for line in printed.splitlines() if "flashgen explain" in line]
            assert len(explained[0]) > 60  # a command is one line

    def test_an_incumbent_whose_twin_has_no_verdict_stays(
        self, tmp_path: Path, monkeypatch: Patch, emitted: Emitted
    ) -> None:
        """The twin serves tensors without descriptors, and its process was killed from outside."""
        best = replace(self.HELD.config, br=128, bc=256, num_warps=8, loads="descriptor")
        twin = best.pointer_twin(SPEC)
        assert twin != best
        held = replace(self.HELD, config=best)
        table = Table(gpu=H200).with_entry(held, made_run("a", held.result.source))
        save(table, tmp_path / "configs" / "nvidia_h200.yaml")
        shot = Served(
            us=lambda config: us(config) / (1 + (config == best)), gpu=H200, source="estimated",
            failing=lambda at, c: Status.KILLED if (at, c) == ("check", twin) else None,
        )  # fmt: skip
        with pytest.raises(FlashgenError, match="1 of 1 searches were cut short"):
            run(monkeypatch, tmp_path, shot)
        (entry,) = load(tmp_path / "configs" / "nvidia_h200.yaml").entries
        assert entry.config == best


def test_a_spec_without_a_right_config_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: Patch, emitted: Emitted
) -> None:
    class Picky(Served):
        def outcome(self, stage: Stage, spec: AttentionSpec, *asked: Any) -> Outcome:
            self.failing = lambda *_: Status.COMPILE_ERROR if spec == SPEC else None
            return super().outcome(stage, spec, *asked)

    with pytest.raises(FlashgenError, match=r"1 of 2 searches .*\.flashgen/nvidia_h200\.jsonl"):
        run(monkeypatch, tmp_path, Picky(us=us, gpu=H200, source="estimated"), specs=(SPEC, CAUSAL))
    saved = load(tmp_path / "configs" / "nvidia_h200.yaml")
    assert [entry.spec for entry in saved.entries] == [CAUSAL]
    assert len(emitted) == 1


def test_untimed_entries_carry_no_figures(
    tmp_path: Path, monkeypatch: Patch, emitted: Emitted
) -> None:
    gpu = TARGETS["nvidia_b200"]
    evaluator = Served(
        us=us,
        gpu=gpu,
        source="estimated",
        failing=lambda stage, _: Status.NO_ESTIMATE if stage == "timed" else None,
    )
    _, printed = run(monkeypatch, tmp_path, evaluator)
    (entry,) = load(tmp_path / "configs" / "nvidia_b200.yaml").entries
    assert entry.result.source == "untimed"
    assert entry.result.median_us is entry.result.speedup is entry.tflops is None
    assert "the estimator does not know sm_100, so configs are chosen by rule" in printed
    assert "Warning: Triton" in printed
    assert "pytorch/pytorch#181248" in printed


def test_clocks_and_power_of_the_final_round_are_kept(
    tmp_path: Path, monkeypatch: Patch, emitted: Emitted
) -> None:
    evaluator = Served(us=us, gpu=H200)
    evaluator.conditions = Conditions(  # type: ignore[attr-defined]
        driver="575.1", sm_mhz=1755, memory_mhz=3201, power_w=612.4, power_limit_w=700.0
    )
    table, _ = run(monkeypatch, tmp_path, evaluator)
    (made,) = table.runs
    assert (made.driver, made.clocks, made.power) == (
        "575.1", "SM 1755 MHz, memory 3201 MHz", "612 W of 700 W",
    )  # fmt: skip


@pytest.mark.parametrize("known", [{"sm_mhz": 1755}, {"power_w": 600.0}], ids=["clock", "power"])
def test_conditions_may_be_known_in_part(
    tmp_path: Path, monkeypatch: Patch, emitted: Emitted, known: dict[str, Any]
) -> None:
    evaluator = Served(us=us, gpu=H200)
    evaluator.conditions = Conditions(**known)  # type: ignore[attr-defined]
    table, _ = run(monkeypatch, tmp_path, evaluator)
    assert "None" not in f"{table.runs[0].clocks or ''}{table.runs[0].power or ''}"


class TestWhereItRuns:
    """Choice of the GPU, and the first line."""

    def choose(self, here: Gpu | None, **fields: Any) -> tuple[Gpu, bool, str]:
        console = Console(file=io.StringIO(), width=200)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("flashgen.kernels.launch.device_gpu", self.device(here))
            targets, devices = places.choose(TargetOptions(**fields), console.print)
        (chosen,) = targets or devices.values()
        return chosen, bool(devices), console.file.getvalue()  # type: ignore[attr-defined]

    @staticmethod
    def device(gpu: Gpu | None) -> Callable[..., Gpu]:
        def device_gpu(index: int = 0, **_: object) -> Gpu:
            if gpu is None:
                raise NoGpuError(
                    "torch sees no GPU here; without one, type: flashgen tune --target x"
                )
            return gpu

        return device_gpu

    def test_without_a_gpu_it_is_an_h100_offline_and_says_why(self) -> None:
        gpu, measured, printed = self.choose(None)
        assert (gpu.slug, measured) == ("nvidia_h100_80gb_hbm3", False)
        assert "the results are estimates" in printed
        assert "because there is no GPU here" in printed
        assert printed.count("\n") == 1

    def test_the_gpu_that_is_there_is_taken(self) -> None:
        new = replace(H200, name="NVIDIA Z999", arch="sm_130", clock_mhz=None)
        assert self.choose(new)[:2] == (new, True)  # known or not
        assert self.choose(new, gpu=True)[:2] == (new, True)

    def test_a_target_comes_before_the_gpu_that_is_there(self) -> None:
        gpu, measured, printed = self.choose(H200, target="nvidia_l4")
        assert (gpu.slug, measured) == ("nvidia_l4", False)
        assert "because --target uses no GPU" in printed

    def test_gpu_without_one(self) -> None:
        with pytest.raises(NoGpuError, match="--target") as caught:
            self.choose(None, gpu=True)
        assert caught.value.exit_code == 3

    def test_an_unknown_target(self) -> None:
        with pytest.raises(InvalidArgument, match="did you mean nvidia_h200"):
            self.choose(None, target="nvidia_h2000")


def test_the_end_names_the_files_and_what_to_try(
    tmp_path: Path, monkeypatch: Patch, emitted: Emitted
) -> None:
    _, printed = run(monkeypatch, tmp_path, specs=(CAUSAL,))
    *_, explain, verify, imported = printed.rstrip().splitlines()
    assert explain.split()[:2] == ["flashgen", "explain"]
    assert "--dtype bf16 --head-dim 64 --seq 4096 --causal" in explain
    assert f"flashgen verify --target nvidia_h200 --out {tmp_path}" in verify
    assert imported.split()[:2] == [f"FLASHGEN_GENERATED={tmp_path}", "python"]
    assert "from flashgen import attention" in imported
    assert str(tmp_path / "configs" / "nvidia_h200.yaml") in printed


def test_what_to_try_is_a_length_that_was_asked(
    tmp_path: Path, monkeypatch: Patch, emitted: Emitted
) -> None:
    """Sharing kernels comes last, and changes the entries of other buckets."""
    config = KernelConfig(br=64, bc=32, num_warps=4, num_stages=2)
    held_entry = made_entry(SPEC, BUCKETS[0], tuned_default(SPEC))
    held = Table(gpu=H200).with_entry(held_entry, made_run())
    save(held, tmp_path / "configs" / "nvidia_h200.yaml")
    monkeypatch.setattr(
        gpu_run,
        "consolidate",
        lambda entries, *_, **__: [replace(e, config=config) for e in entries],
    )
    _, printed = run(monkeypatch, tmp_path)
    assert str(BUCKETS[0]) in printed
    assert "flashgen explain --dtype bf16 --head-dim 64 --seq 4096 " in printed


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"shard": (2, 2)}, "at most the number of specs, 1: got 2/2"),
        ({"seqs": (5000, 8192)}, r"one length a bucket: got 5000 and 8192 of \[4096, 16384\)"),
        ({"seqs": (0,)}, "seq must be from 1 to 16777216: got 0"),
    ],
)
def test_options_that_cannot_be(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        _ = TuneOptions(specs=(SPEC,), **fields).work


def test_time_is_shared_between_searches(
    tmp_path: Path, monkeypatch: Patch, emitted: Emitted
) -> None:
    budgets: list[Budget] = []
    search = gpu_run.search
    monkeypatch.setattr(
        gpu_run,
        "search",
        lambda *args, **fields: budgets.append(fields["budget"]) or search(*args, **fields),
    )
    run(monkeypatch, tmp_path, specs=(SPEC, CAUSAL), budget=Budget(trials=3, seconds=1000.0))
    first, second = (budget.seconds or 0.0 for budget in budgets)
    assert first == pytest.approx(500.0, abs=20)
    assert second == pytest.approx(1000.0, abs=20)  # what the first left over


def test_a_gpu_nobody_listed_is_tuned_in_the_order_of_the_seeds(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    """The device, the compiler and the clock are made up; all between them is real."""
    device = replace(
        H200, name="NVIDIA Z999", arch="sm_130", clock_mhz=None, bandwidth_gbs=None,
        matrix_flops_per_clock=None,
    )  # fmt: skip
    monkeypatch.setattr("flashgen.kernels.launch.device_gpu", lambda index=0, **_: device)
    made_up = Tasks(**{f.name: f"tests.worker_faults:{MADE_UP[f.name]}" for f in fields(Tasks)})
    monkeypatch.setattr(
        evaluators,
        "make_evaluator",
        lambda place, out, _: GpuEvaluator(
            place.gpu, 0, paths.state_dir(out), tasks=made_up, pools=place.pools
        ),
    )
    console = Console(file=io.StringIO(), width=200)
    options = TuneOptions(
        specs=(CAUSAL,),
        where=TargetOptions(gpu=True, jobs=1),
        budget=Budget(trials=4),
        out=tmp_path,
    )
    (table,) = tune.tune(options, console)

    assert load(tmp_path / "configs" / "nvidia_z999.yaml").gpu == device
    (entry,) = table.entries
    assert entry.result.source == "measured"
    assert entry.evidence.sdpa_us == 123.0
    records = (tmp_path / ".flashgen" / "nvidia_z999.jsonl").read_text().splitlines()
    compiled = [r for r in map(json.loads, records) if r["stage"] == "compile"]
    tried = [KernelConfig(**r["config"]) for r in compiled]
    seeds = seed_configs(CAUSAL, device)
    assert [config for config in tried if config != tuned_default(CAUSAL)] == list(
        seeds[:3]
    )  # the default is the fourth
    assert (tmp_path / "generated" / "tables" / "nvidia_z999.py").is_file()
    assert emit.check(emit.tables_for(tmp_path), tmp_path / "generated") == []


MADE_UP = {
    "answers": "device_answers",
    "compile": "compile_one",
    "check": "check_one",
    "measure": "measure_one",
    "final": "measure_round",
}
