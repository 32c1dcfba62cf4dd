"""report/explain.py, report/kernel_limits.py and report/explain.py: what limits a kernel, and why the others lost."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flashgen import paths
from flashgen.compile.loops import main_bodies
from flashgen.compile.sass import disassemble
from flashgen.estimate import estimate
from flashgen.estimate.sm import Usage
from flashgen.kernels.render import render
from flashgen.report import explain
from flashgen.report.explain import history_of, loss_of, rivals, why_lost
from flashgen.report.history import SearchHistory
from flashgen.report.kernel_limits import Anatomy, describe, dissect, limits, occupancy, shares
from flashgen.runtime.choice import Choice
from flashgen.runtime.selection import Ladder, Selection
from flashgen.schedules.config import KernelConfig
from flashgen.schedules.outcome import Outcome, Status, Timing
from flashgen.spec.gpu import TARGETS
from flashgen.spec.problem import BUCKETS, workload
from flashgen.table.entry import NO_EVIDENCE, Entry, RunnerUp
from flashgen.table.table import Table
from tests.compiled import cache, cubin_of
from tests.makers import each, make_config, make_spec
from tests.tables import AHEAD, DIGEST, FA2, H200, SPEC, made_entry, made_run, with_evidence

BUSY = Usage(matrix=0.5, exp2=0.5, issue=0.25, shared=0.125, memory=0.1)
WINNER = FA2
OTHERS = [replace(FA2, num_stages=stages) for stages in (1, 3, 4, 5)]
TWINNED = replace(FA2, loads="descriptor")


class TestAnatomy:
    def test_the_largest_share_limits_and_all_are_shown(self) -> None:
        assert limits(BUSY) == ("matrix and exp2 and latency", 0.5)
        assert limits(replace(BUSY, exp2=0.49)) == ("matrix and latency", 0.5)
        waiting = replace(BUSY, matrix=0.2, exp2=0.3)
        assert limits(waiting) == ("latency", pytest.approx(0.7))
        assert [name for name, _ in shares(waiting)] == [
            "latency", "exp2", "issue", "matrix", "shared", "memory"
        ]  # fmt: skip

    @pytest.mark.parametrize(
        ("registers", "shared", "words"),
        [
            (255, 1024, "1 block an SM, 8 of 64 warps, limited by registers"),
            (64, 100_000, "2 blocks an SM, 16 of 64 warps, limited by shared memory"),
            (255, 200_000, "1 block an SM, 8 of 64 warps, limited by registers and shared memory"),
            (16, 1024, "8 blocks an SM, 64 of 64 warps, the most it takes"),
            (16, 300_000, "0 blocks an SM, 0 of 64 warps, limited by shared memory"),
        ],
    )  # fmt: skip
    def test_occupancy_says_what_runs_out(self, registers: int, shared: int, words: str) -> None:
        blocks, figures = occupancy(registers, shared, 8, H200)
        assert blocks == words
        assert (
            figures
            == f"{registers} registers per thread, {shared} bytes of shared memory per block"
        )

    def test_spills_outside_the_loops_are_shown(self) -> None:
        assert (
            "255 registers per thread (16 bytes spilled)"
            in occupancy(255, 0, 8, H200, spill_bytes=16)[1]
        )

    def test_a_real_kernel_with_wgmma(self) -> None:
        spec, config = make_spec(), make_config(64, 64)
        found = dissect(spec, config, workload(spec, 4096), H200, cache())
        assert found.unknown == ""
        assert found.compiled is not None
        assert found.usage is not None
        assert found.replay is not None
        first, every, under, time = describe(found)
        name, share = limits(found.usage)
        assert first.startswith(f"limited by {name}: ")
        assert f"{share:.0%} of an iteration of its steady loop" in first
        assert all(f"{name} {share:.0%}" in every for name, share in shares(found.usage))
        assert every.count("%") == 6
        # fa2 waits for S = QK^T before its softmax: nothing of the own warpgroup is under way.
        assert under == "0% of exp2 overlap wgmma"
        assert found.estimate == estimate.estimate(
            found.replay, spec, config, workload(spec, 4096), H200
        )
        assert f"the estimator gives it {found.estimate.median_us:.1f} us (band " in time

    def test_without_wgmma_nothing_is_said_of_exp2(self) -> None:
        spec, config = make_spec(), make_config(16, 16, num_warps=1)
        a100 = TARGETS["nvidia_a100_sxm4_80gb"]
        found = dissect(spec, config, workload(spec, 512), a100, cache())
        assert found.exp2_under_matrix is None
        assert len(describe(found)) == 3

    @pytest.mark.parametrize(
        ("direction", "steady"),
        each([("backward_dkv", 1), ("forward", 0), ("backward_dq", 0)], 3),
    )
    def test_usage_is_of_the_unmasked_loop(self, direction: Any, steady: int) -> None:
        """The masked loop has the mask's instructions on top; by keys it comes first."""
        spec, config = (
            make_spec(head_dim=16, mask="causal", direction=direction),
            make_config(16, 16),
        )
        found = dissect(spec, config, workload(spec, 1024), H200, cache())
        assert found.compiled is not None
        assert found.replay is not None
        lengths = [len(body) for body in main_bodies(disassemble(cubin_of(found.compiled)))]
        assert lengths.index(min(lengths)) == steady
        assert found.compiled.loop is not None
        assert found.compiled.loop.instructions == lengths[steady]
        assert found.usage == found.replay.usage[steady]
        assert found.usage != found.replay.usage[1 - steady]

    def test_usage_of_a_kernel_with_one_loop(self) -> None:
        spec, config = make_spec(head_dim=16, direction="backward_dkv"), make_config(16, 16)
        found = dissect(spec, config, workload(spec, 1024), H200, cache())
        assert found.replay is not None
        assert found.replay.usage == (found.usage,)

    @pytest.mark.parametrize(("seq", "by_bytes"), [(64, True), (8192, False)])
    def test_short_sequences_are_limited_by_their_bytes(self, seq: int, by_bytes: bool) -> None:
        """A tile of keys for a tile of queries: what is read is not used often."""
        spec, config = make_spec(head_dim=64, mask="causal"), make_config(64, 64)
        found = dissect(spec, config, workload(spec, seq), TARGETS["nvidia_l4"], cache())
        first, *rest = describe(found)
        assert first.startswith("limited by memory bandwidth: ") == by_bytes
        assert ("its loop is limited by" in rest[0]) == by_bytes

    def test_a_decode_is_limited_by_its_bytes(self) -> None:
        """At the share of the bandwidth that streams reach; its merge takes little beside them."""
        spec, config = make_spec(head_dim=128, direction="decode"), make_config(16, 32)
        a100 = TARGETS["nvidia_a100_sxm4_80gb"]
        found = dissect(spec, config, workload(spec, 8192), a100, cache())
        first, *rest = describe(found)
        assert first.startswith("limited by memory bandwidth: ")
        assert "its loop is limited by" in rest[0]

    def test_delta_is_limited_by_its_bytes(self) -> None:
        spec = make_spec(direction="backward_delta")
        config, problem = make_config(64, 16, num_stages=1), workload(spec, 4096)
        found = dissect(spec, config, problem, H200, cache())
        assert found.compiled is not None
        assert (found.replay, found.usage, found.unknown) == (None, None, "")
        assert found.estimate == estimate.estimate_streaming(spec, problem, H200)
        why, time = describe(found)
        assert why.startswith("limited by memory: ")
        assert f"the estimator gives it {found.estimate.median_us:.1f} us (band " in time
        unknown = dissect(spec, config, problem, TARGETS["nvidia_b200"], cache())
        assert "not known: " in describe(unknown)[0]

    @pytest.mark.parametrize(
        ("slug", "reason"),
        each([("nvidia_b200", "know sm_100"), ("amd_instinct_mi300x", "know gfx942")], 2),
    )
    def test_an_unknown_architecture_is_compiled_all_the_same(self, slug, reason) -> None:
        spec, config = make_spec(), make_config(32, 32)
        found = dissect(spec, config, workload(spec, 512), TARGETS[slug], cache())
        assert found.compiled is not None
        assert (found.usage, found.estimate) == (None, None)
        (line,) = describe(found)
        assert line.startswith("what limits it is not known: ")
        assert reason in line

    def test_what_is_missing_here_is_one_line(self, tmp_path: Path, monkeypatch) -> None:
        spec, config = make_spec(), make_config(16, 16, num_warps=1)
        ask = spec, config, workload(spec, 512), H200, tmp_path  # nothing is kept there
        with monkeypatch.context() as without:
            without.setitem(sys.modules, "triton", None)
            assert describe(dissect(*ask))[0].endswith(
                "triton is not installed, so no kernel can be compiled"
            )
        with monkeypatch.context() as without:
            for name in ("sm_clock", "jit"):
                without.delitem(sys.modules, f"flashgen.estimate.{name}", raising=False)
            without.delattr("flashgen.estimate.sm_clock", raising=False)
            without.setitem(sys.modules, "numba", None)
            found = dissect(*ask)
        assert found.compiled is not None
        assert paths.install_command("offline") in describe(found)[0]


def entry(source: Any = "estimated", median_us: float = 100.0, **changes: Any) -> Entry:
    made = made_entry(config=WINNER, source=source, median_us=median_us)
    return with_evidence(replace(made, **changes), runners_up=())


def outcome(config: KernelConfig, us: float | None = None, **changes: Any) -> Outcome:
    """Of made_entry's search, as its run had it."""
    made = Outcome(
        spec=SPEC,
        problem=made_entry().problem,
        config=config,
        stage="timed",
        status=Status.OK,
        source="estimated",
        gpu="nvidia_h200",
        triton="3.10",
        digest=DIGEST,
        protocol=1,
        timing=None
        if us is None
        else Timing(median_us=us, low_us=max(us - 1, us / 2), high_us=us + 1),
        registers=100,
        spill_bytes=0,
    )
    return replace(made, **changes)


def lost(config: KernelConfig, outcomes: Iterable[Outcome], of: Entry, neighbours: Any = ()) -> str:
    history = SearchHistory(outcomes)
    return why_lost(loss_of(config, of, history), of, history, neighbours)


class TestWhyItLost:
    def test_slower(self) -> None:
        told = outcome(WINNER, 100), outcome(OTHERS[0], 120)
        assert lost(OTHERS[0], told, entry()) == "20.0% slower"
        same = outcome(WINNER, 100), outcome(OTHERS[0], 100.001)
        assert lost(OTHERS[0], same, entry(), None) == "as fast"

    def test_a_tie_is_broken_as_rank_breaks_it(self) -> None:
        other = OTHERS[0]
        best = outcome(WINNER, 100)
        spilling = outcome(other, 97, spill_bytes=8)
        assert (
            lost(other, (best, spilling), entry())
            == "3.0% faster, a tie: the winner spills nothing"
        )
        equal = outcome(other, 102)
        shared = "2.0% slower, a tie: 2 neighbours share the winner's config, 1 this one"
        assert lost(other, (best, equal), entry(), (WINNER, WINNER, other)) == shared
        larger = outcome(other, 102, registers=200)
        fewer = "2.0% slower, a tie: the winner has fewer registers, 174, not 200"
        assert lost(other, (best, larger), entry()) == fewer
        assert lost(other, (best, larger), entry(), None) == "2.0% slower"  # before there were ties

    def test_a_tie_is_one_with_the_best_and_not_with_the_winner(self) -> None:
        told = outcome(WINNER, 104), outcome(OTHERS[0], 106), outcome(OTHERS[1], 100)
        assert lost(OTHERS[0], told, entry()) == "1.9% slower"
        assert "a tie" in lost(OTHERS[1], told, entry())

    def test_measured_within_the_spread(self) -> None:
        of, changes = entry("measured"), {"source": "measured"}
        best = outcome(WINNER, 100, **changes)
        assert lost(OTHERS[0], (best, outcome(OTHERS[0], 110, **changes)), of) == "10.0% slower"
        near = outcome(OTHERS[0], 101.5, **changes)
        assert lost(OTHERS[0], (best, near), of) == "1.5% slower, within the spread"
        faster = outcome(OTHERS[0], 99, **changes)
        assert "1.0% faster, but not beyond the spread" in lost(OTHERS[0], (best, faster), of)

    def test_only_times_of_the_same_stage_compare(self) -> None:
        of, changes = entry("measured"), {"source": "measured"}
        told = (
            outcome(WINNER, 100, **changes),
            outcome(WINNER, 50, stage="final", **changes),
            outcome(OTHERS[0], 110, **changes),
        )
        assert lost(OTHERS[0], told, of) == "10.0% slower"

    def test_a_twin_that_failed(self) -> None:
        twin = TWINNED.pointer_twin(SPEC)
        told = (
            outcome(WINNER, 100),
            outcome(TWINNED, 80),
            outcome(twin, stage="check", status=Status.WRONG),
        )
        assert (
            lost(TWINNED, told, entry(config=OTHERS[0]))
            == "20.0% faster, but its pointer twin is wrong"
        )
        near = (told[0], outcome(TWINNED, 102), told[2])
        assert "2.0% slower, but its pointer twin" in lost(TWINNED, near, entry(config=OTHERS[0]))
        far = (told[0], outcome(TWINNED, 130), told[2])
        assert lost(TWINNED, far, entry(config=OTHERS[0])) == "30.0% slower"

    @pytest.mark.parametrize(
        ("status", "words"),
        [
            (Status.SPILLS, "spills: 12 of them"),
            (Status.WRONG, "is wrong: 12 of them"),
            (Status.OUT_OF_RESOURCES, "does not fit: 12 of them"),
            (Status.NO_OVERLAP, "does not overlap: 12 of them"),
        ],
    )
    def test_a_failure_is_named_with_its_detail(self, status: Status, words: str) -> None:
        told = (outcome(OTHERS[0], stage="compile", status=status, detail="12 of them"),)
        assert lost(OTHERS[0], told, entry()) == words

    def test_untimed(self) -> None:
        assert "later by rule" in lost(OTHERS[0], (), entry("untimed"))


class TestRivals:
    def test_the_fastest_and_two_kinds_of_failure(self) -> None:
        runner_up = RunnerUp(config=OTHERS[0], source="estimated", median_us=101.0, digest=DIGEST)
        of = with_evidence(entry(), runners_up=(runner_up,))
        timed = [replace(FA2, num_warps=4, num_stages=n) for n in (1, 2, 3, 4, 5)]
        near, far = replace(FA2, bc=32), replace(FA2, br=64, bc=32, num_warps=4)
        told = [
            outcome(WINNER, 100),
            outcome(OTHERS[0], 101),
            *(outcome(config, 200 - 10 * number) for number, config in enumerate(timed)),
            outcome(far, stage="compile", status=Status.SPILLS),
            outcome(near, stage="compile", status=Status.SPILLS),
            outcome(replace(FA2, bc=128), stage="check", status=Status.WRONG),
            outcome(replace(FA2, bc=16), stage="compile"),
        ]
        chosen = rivals(SearchHistory(told), of)
        assert chosen == [timed[4], timed[3], timed[2], near, replace(FA2, bc=128)]
        assert rivals(SearchHistory(told[:7]), of) == timed[::-1]
        assert rivals(SearchHistory(told[7:]), of) == [near, replace(FA2, bc=128)]
        assert SearchHistory(told).tally() == "11 configs: 7 timed, 2 spills, 1 wrong, 1 not timed"

    def test_a_wrong_kernel_is_no_rival_by_its_time(self) -> None:
        told = outcome(OTHERS[0], 10), outcome(OTHERS[0], stage="check", status=Status.WRONG)
        assert rivals(SearchHistory(told), entry()) == [OTHERS[0]]
        assert SearchHistory(told).tally() == "1 configs: 1 wrong"

    def test_history_holds_this_search_alone(self, tmp_path: Path) -> None:
        of = entry()
        table = Table(gpu=H200).with_entry(of, made_run())
        log = tmp_path / "log"
        other_sizes = workload(SPEC, 9000)
        told = [
            outcome(WINNER, 100),
            outcome(OTHERS[0], 90, problem=other_sizes),
            outcome(OTHERS[1], 90, protocol=2),
            outcome(OTHERS[2], 90, triton="3.9"),
            outcome(OTHERS[3], 90, source="measured"),
            outcome(replace(FA2, bc=32), 90, spec=make_spec()),
            outcome(replace(FA2, bc=16), stage="compile", problem=other_sizes),
        ]
        write(log, told)
        history, notes = history_of(log, table, of)
        assert (history.configs, notes) == ([WINNER, replace(FA2, bc=16)], [])

    def test_a_log_that_cannot_be_read_is_said(self, tmp_path: Path) -> None:
        of = entry()
        table = Table(gpu=H200).with_entry(of, made_run())
        log = tmp_path / "log"
        assert history_of(log, table, of)[1] == [f"rivals are not known: there is no log {log}"]
        log.write_text("no record\n")
        assert "line 1: this is no record" in history_of(log, table, of)[1][0]
        write(log, [outcome(WINNER, 1, triton="3.9")])
        assert history_of(log, table, of)[1] == [
            f"rivals are not known: {log} holds nothing of this search"
        ]


def write(log: Path, outcomes: Iterable[Outcome]) -> None:
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text("".join(json.dumps(each.to_json()) + "\n" for each in outcomes))


class TestExplanation:
    @pytest.fixture
    def lines(self, tmp_path: Path, monkeypatch):
        """What explain says of an entry of made_table, with a log of these outcomes."""
        found = {WINNER: replace(BUSY, matrix=0.75), OTHERS[0]: replace(BUSY, matrix=0.6)}

        def told(spec: Any, config: KernelConfig, *_: Any) -> Anatomy:
            replayed: Any = SimpleNamespace(residents=1)
            timing = Timing(median_us=80.0, low_us=48.0, high_us=160.0)
            return Anatomy(
                replay=replayed,
                usage=found.get(config, BUSY),
                estimate=timing if config.schedule == "hopper" else None,
            )

        monkeypatch.setattr(explain, "dissect", told)

        def of(made: Entry, outcomes: Iterable[Outcome]) -> list[str]:
            run = made_run(source=made.result.source)
            run = replace(run, protocol=estimate.PROTOCOL)
            table = Table(gpu=H200).with_entry(made, run)
            write(
                paths.log_file(tmp_path, "nvidia_h200"),
                (replace(o, protocol=run.protocol) for o in outcomes),
            )
            choice: Any = made_choice(made)
            rung = Selection(choice=choice, rung="exact", slug="nvidia_h200", reason="it is there")
            asked = explain.Question(spec=SPEC, seq=2048, gpu=H200, out=tmp_path, compiled=True)
            return list(
                explain.explanation(
                    asked, Ladder(rungs=(rung,), skipped=()), Path("generated"), table
                )
            )

        return of

    def test_an_entry_its_runner_up_and_its_rivals(self, lines) -> None:
        runner_up = RunnerUp(config=OTHERS[0], source="estimated", median_us=110.0, digest=DIGEST)
        said = lines(
            with_evidence(entry(), runners_up=(runner_up,)),
            [
                outcome(WINNER, 100),
                outcome(OTHERS[0], 110),
                outcome(OTHERS[1], 150),
                outcome(OTHERS[2], stage="compile", status=Status.SPILLS, detail="so many"),
            ],
        )
        text = "\n".join(said)
        assert said[0] == f"{SPEC.name} on nvidia_h200: {SPEC.name}_{WINNER.label}"
        assert "  limited by matrix: busy 75% of an iteration of its steady loop\n" in text
        assert (
            f"  runner-up: {OTHERS[0].label}\n"
            "    estimated, 110.0 us: 10.0% slower; limited by matrix, 60%; "
            "matrix busy 60%, the winner's 75%\n"
        ) in text
        assert (
            f"  rival: {OTHERS[1].label}\n    estimated, 150.0 us: 50.0% slower; limited by" in text
        )
        assert f"  rival: {OTHERS[2].label}\n    spills: so many\n" in text
        assert said[-1] == "  its log has 4 configs: 3 timed, 1 spills"

    def test_schedule_hopper_is_estimated_beside_what_was_not_measured(self, lines) -> None:
        said = lines(entry(), [])
        place = next(n for n, each in enumerate(said) if "not a candidate without a GPU" in each)
        assert "_hopper_" in said[place]
        assert said[place + 1] == "    the estimator gives it 80.0 us (band 48.0 to 160.0)"
        assert not any("_hopper_" in each for each in lines(entry("measured"), []))

    def test_runners_up_are_listed_fastest_first(self, lines) -> None:
        """A table keeps the order of choice, in which a tie goes to the one with fewer registers."""
        times = {OTHERS[0]: 130.0, OTHERS[1]: 110.0}
        held = tuple(
            RunnerUp(config=config, source="estimated", median_us=us, digest=DIGEST)
            for config, us in times.items()
        )
        said = lines(with_evidence(entry(), runners_up=held), [outcome(WINNER, 100)])
        named = [line.split()[1] for line in said if line.startswith("  runner-up: ")]
        assert named == [OTHERS[1].label, OTHERS[0].label]

    def test_an_untimed_entry_was_chosen_by_rule(self, lines) -> None:
        runner_up = RunnerUp(config=OTHERS[0], source="untimed", median_us=None, digest=DIGEST)
        said = lines(with_evidence(entry("untimed"), runners_up=(runner_up,)), [])
        assert any(line.startswith("  chosen by rule, not by time: ") for line in said)
        assert "    untimed: not timed, and later by rule" in said
        assert not any("older model" in line for line in said)


def made_choice(made: Entry) -> Any:
    from flashgen.runtime.choice import Choice

    return Choice(
        spec=made.spec,
        bucket=made.bucket,
        config=made.config,
        source=made.result.source,
        median_us=made.result.median_us,
    )


@pytest.mark.slow("7 s; TestAnatomy has the kernels, and test_cli the command")
def test_the_whole_command_on_real_kernels(tmp_path: Path, monkeypatch, capsys) -> None:
    """No fake: a table of two small kernels, compiled and replayed, and no cache nor log left."""
    from flashgen import __main__
    from flashgen.table import emit as generating
    from flashgen.table.table_file import save

    monkeypatch.setattr(paths, "shipped_configs_dir", lambda: tmp_path / "shipped")
    spec = make_spec(head_dim=16)
    small, next_one = (make_config(16, bc, num_warps=1) for bc in (32, 16))
    runner_up = RunnerUp(config=next_one, source="estimated", median_us=850.0, digest=DIGEST)
    made = with_evidence(made_entry(spec, BUCKETS[1], small), runners_up=(runner_up,))
    table = Table(gpu=H200).with_entry(made, made_run())
    save(table, tmp_path / "configs" / "nvidia_h200.yaml")
    generating.write({"nvidia_h200": table}, tmp_path / "generated")
    line = "explain --head-dim 16 --seq 2048 --target nvidia_h200 --compile --out"
    with pytest.raises(SystemExit) as caught:
        __main__.main([*line.split(), str(tmp_path)])
    output, errors = capsys.readouterr()
    assert (caught.value.code or 0, errors) == (0, "")
    assert "\n  limited by " in output
    assert " of 64 warps, " in output
    assert (
        "estimates are of an older model: flashgen tune --target" in output
    )  # made_run is of protocol 1
    assert (
        f"  runner-up: {next_one.label}\n    estimated, 850.0 us: 4.6% slower; limited by "
        in output
    )
    assert "rivals are not known: there is no log " in output
    assert not (tmp_path / ".flashgen").exists()


def test_the_winner_of_made_tables_is_a_descriptor_kernel() -> None:
    """TWINNED and AHEAD have twins, FA2 none: what the tests above rest on."""
    assert TWINNED.pointer_twin(SPEC) != TWINNED
    assert AHEAD.pointer_twin(SPEC) != AHEAD
    assert FA2.pointer_twin(SPEC) == FA2


@pytest.mark.parametrize(("rung", "stale"), [("exact", True), ("exact", False), ("default", False)])
def test_only_an_entry_goes_stale(rung: Any, stale: bool) -> None:
    digest = DIGEST if stale else render(SPEC, WINNER).digest
    made = made_entry(config=WINNER, digest=digest)
    choice = replace(made_choice(made), bucket=made.bucket if rung == "exact" else None)
    first = Selection(choice=choice, rung=rung, slug="a", reason="nothing else is there")
    asked = explain.Question(spec=SPEC, seq=2048, gpu=H200, out=Path())
    held = made if rung == "exact" else None
    folder = Path("generated")
    said = list(explain._served(asked, Ladder(rungs=(first,), skipped=()), folder, held))
    assert said[1] == f"  {rung}: nothing else is there"
    assert ("stale" in said[2]) == stale
    assert ("from generated/tables/a.py" in said[2]) == (rung == "exact")
    assert ("rendered by the first call" in said[2]) == (rung == "default")


def test_an_entry_without_evidence_says_what_is_lost() -> None:
    made = replace(made_entry(config=WINNER), evidence=NO_EVIDENCE)
    said = list(explain._recorded(Table(gpu=H200, entries=(made,)), made, H200))
    assert said[:2] == [
        "2.00 times as fast as the default tile",
        "1 entry has no evidence: the sizes, kernel text, compiler and search they come from are "
        "not known.",
    ]


@pytest.mark.parametrize("source", ["estimated", "measured"])
def test_gluon_that_ran_on_no_gpu_is_said(source: Any) -> None:
    gpu = TARGETS["nvidia_a100_sxm4_80gb"]
    config = make_config(64, 64, num_stages=1, schedule="ampere")
    spec = make_spec("bfloat16", 64)
    choice = Choice(spec=spec, bucket=None, config=config, source=source, median_us=9.0)
    selection = Selection(choice=choice, rung="exact", slug=gpu.slug, reason="the entry")
    question = SimpleNamespace(spec=spec, gpu=gpu)
    found = Ladder(rungs=(selection,), skipped=())
    said = list(explain._served(question, found, Path("generated"), None))  # type: ignore[arg-type]
    assert any("not yet timed on a GPU" in line for line in said) is (source == "estimated")
