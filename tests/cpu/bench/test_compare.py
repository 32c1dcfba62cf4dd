"""flashgen compare: who is compared with whom, and when the answer is yes, no, or not known."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from flashgen import cli
from flashgen.bench import compare, contenders, race
from flashgen.bench.case import BenchCase, make_inputs
from flashgen.bench.compare import ComparedCase, cases_of, lines, of_table
from flashgen.bench.race import RaceResult
from flashgen.evaluate.evaluator import triton_version
from flashgen.schedules.outcome import Timing
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.problem import Problem, workload
from flashgen.tune.workloads import WeightedPiece
from tests import programs
from tests.makers import make_spec
from tests.tables import H200, SPEC, made_entry, made_table

WORDS = ["--head-dim", "16", "--causal", "--smoke"]


def line(name: str, us: float | None, *, group: str = "sdpa", status: str = "ok") -> RaceResult:
    timing = us and Timing(median_us=us, low_us=0.99 * us, high_us=1.01 * us, samples=10)
    return RaceResult(name=name, group=group, detail="", status=status, timing=timing or None)


def pieces(work: Iterable[tuple[AttentionSpec, Problem]]) -> list[WeightedPiece]:
    return [WeightedPiece(spec=spec, problem=problem) for spec, problem in work]


def row(ours: RaceResult | None, *others: RaceResult) -> ComparedCase:
    return ComparedCase(title="made up", ours=ours, others=others)


class TestVerdict:
    @pytest.mark.parametrize(("us", "verdict"), [(90.0, "yes"), (99.0, "no"), (120.0, "no")])
    def test_yes_is_beyond_noise(self, us: float, verdict: str) -> None:
        made = row(line("flashgen", us), line("SDPA flash", 140.0), line("SDPA cuDNN", 100.0))
        assert (made.faster, made.ratio) == (verdict, 100 / us)

    def test_a_wrong_rival_does_not_count(self) -> None:
        wrong = line("flash_attn 2", 50.0, group="flash-attn-2", status="wrong")
        made = row(line("flashgen", 90.0), line("SDPA flash", 100.0), wrong)
        assert (made.faster, made.ratio) == ("yes", 100 / 90)
        assert "50.0 us 2 WRONG" in "\n".join(lines([made]))

    def test_a_wrong_kernel_of_flashgen_is_no(self) -> None:
        made = row(line("flashgen", None, status="wrong"), line("SDPA flash", 100.0))
        assert (made.faster, made.ratio) == ("no", None)

    def test_without_a_time_of_both_it_is_not_known(self) -> None:
        for made in (
            ComparedCase(title="nothing"),
            row(line("flashgen", 9.0)),
            row(None, line("SDPA", 9)),
        ):
            assert made.faster == "unknown"
        told = list(lines([row(line("flashgen", 9.0))]))
        assert told[-1].endswith("whether flashgen is faster is not known.")

    def test_the_sum_counts_the_unknown(self) -> None:
        rows = [
            row(line("flashgen", 50.0), line("SDPA", 100.0)),
            row(line("flashgen", 200.0), line("SDPA", 100.0)),
            ComparedCase(title="nothing"),
        ]
        assert list(lines(rows))[-1] == (
            "\nflashgen is faster than the best of the others in 1 of 3 cases, unknown in 1: "
            "1.00 x in geometric mean, each case counted once."
        )

    def test_the_mean_is_by_the_weights_of_the_file(self) -> None:
        faster = row(line("flashgen", 50.0), line("SDPA", 100.0))
        slower = row(line("flashgen", 200.0), line("SDPA", 100.0))
        told = list(lines([replace(faster, weight=3.0), slower]))[-1]
        assert told.endswith(
            "1.41 x in geometric mean, by the weights of the file."
        )  # 2^(3/4 - 1/4)


class TestCases:
    def test_a_case_has_the_weight_of_its_heaviest_piece(self) -> None:
        spec = make_spec("bfloat16", 64, "causal")
        dkv, dq = (spec.for_direction(each) for each in ("backward_dkv", "backward_dq"))
        weights = {dkv: 2.0, dq: 3.0, spec: 1.0}
        weighted = [
            WeightedPiece(spec=each, problem=workload(spec, 512), weight=weight)
            for each, weight in weights.items()
        ]
        cases, _ = cases_of(weighted, smoke=False)
        assert {case.direction: weight for case, weight in cases.items()} == {
            "backward": 3.0,
            "forward": 1.0,
        }

    def test_the_kernels_of_a_backward_are_one_case(self) -> None:
        spec = make_spec("bfloat16", 64, "causal")
        problem = Problem(batch=2, heads=8, kv_heads=2, seq_q=512, seq_k=512)
        kernels = [spec, *map(spec.for_direction, ("backward_delta", "backward_dkv"))]
        cases, left = cases_of(pieces((each, problem) for each in kernels), smoke=False)
        assert ([case.direction for case in cases], left) == (["backward", "forward"], [])
        assert [case.problem.kv_heads for case in cases] == [8, 2]

    def test_what_the_others_are_not_called_with_is_named(self) -> None:
        specs = [
            make_spec("bfloat16", 64, "causal", softcap=True),
            make_spec("bfloat16", 64, direction="decode", paged=True),
            make_spec("float32", 64, precision="tf32"),
        ]
        cases, left = cases_of(pieces((spec, workload(spec, 512)) for spec in specs), smoke=False)
        assert not cases
        assert [each.note.split()[-1] for each in left] == ["softcap", "paged", "tf32"]


def test_grouped_heads_are_judged_whole_and_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem(batch=1, heads=6, kv_heads=2, seq_q=33, seq_k=33)
    case = BenchCase(direction="forward", spec=make_spec("float32", 16, "causal"), problem=problem)
    x = make_inputs(case, "cpu")
    made = contenders._sdpa(contenders.SDPA[-1][1], case, x)
    for heads in (6, 5, 2, 1):
        monkeypatch.setattr(race, "FORWARD_ELEMENTS", heads * 33 * 33)
        assert race.floors((made.attention(x.q, x.k, x.v),), case, x) <= 2
        wrong = made.attention(x.q, x.k, x.v.flip(1))
        assert race.floors((wrong,), case, x) > 2


class TestOfATable:
    def case(self) -> BenchCase:
        return BenchCase(direction="forward", spec=SPEC, problem=workload(SPEC, 2048))

    def test_a_measured_entry_has_sdpa_of_its_round(self) -> None:
        entry = made_entry(source="measured")
        us = entry.result.median_us
        entry = replace(entry, evidence=replace(entry.evidence, high_us=us, sdpa_us=2 * us))  # type: ignore[operator]
        (found,) = of_table([self.case()], made_table(entry))
        assert (found.faster, found.ratio) == ("yes", 2.0)

    def test_an_estimate_says_that_no_time_of_sdpa_is_known(self) -> None:
        (found,) = of_table([self.case()], made_table(made_entry()))
        assert found.faster == "unknown"
        assert found.note.endswith("estimated; no time of SDPA on this GPU is published")

    def test_times_of_another_problem_are_named_so(self) -> None:
        other = Problem(batch=1, heads=32, kv_heads=8, seq_q=1500, seq_k=1500)
        (found,) = of_table([replace(self.case(), problem=other)], made_table(made_entry()))
        assert "2048 keys, 8 x 16 heads" in found.title
        assert "; the table's problem in place of 1500 keys, 1 x 32/8 heads" in found.note

    def test_the_executed_entry_is_compared_where_it_serves(self) -> None:
        """With SDPA's time of the measured one's round."""
        held = made_entry(source="measured")
        us = held.result.median_us
        assert us is not None
        held = replace(held, evidence=replace(held.evidence, high_us=us, sdpa_us=2 * us))
        here = ".".join(triton_version().split(".")[:2])
        for triton, ratio in ((here, 4.0), ("0.1", 2.0)):
            executed = made_entry(median_us=us / 2)
            executed = replace(executed, tritons=(triton,))
            (found,) = of_table([self.case()], replace(made_table(held), executed=(executed,)))
            assert found.ratio == ratio

    def test_gradients_are_not_read_from_a_table(self) -> None:
        case = replace(self.case(), direction="backward")
        (found,) = of_table([case], made_table(made_entry()))
        assert found.note == "a table has its kernels apart: see flashgen show"

    def test_what_a_table_lacks(self) -> None:
        (absent,) = of_table([self.case()], replace(made_table(), entries=()))
        assert absent.note == f"{H200.slug} has no time of it"


class TestOfItsOwn:
    """A decode is served from the whole cache and from pages: the fastest right one counts."""

    case = BenchCase(
        direction="decode",
        spec=make_spec("bfloat16", 64, direction="decode"),
        problem=Problem(batch=1, heads=2, kv_heads=1, seq_q=1, seq_k=64),
    )

    def row(self, flat: float | None, pages: float | None, status: str = "ok") -> ComparedCase:
        own = [
            replace(line("flashgen", flat, status=status), own=True),
            replace(line("flashgen, pages of 16", pages), own=True),
        ]
        return compare._row(self.case, [*own, line("SDPA", 100.0)])

    def test_the_fastest_counts(self) -> None:
        assert self.row(120.0, 90.0).faster == "yes"
        assert self.row(120.0, 90.0).note == "pages of 16"
        assert self.row(90.0, 120.0).note == ""

    def test_a_wrong_one_does_not_count_and_is_named(self) -> None:
        found = self.row(None, 90.0, status="wrong")
        assert (found.faster, found.note) == ("yes", "pages of 16; flashgen is wrong")


def test_rows_that_are_made_are_printed_when_a_contender_breaks_the_context(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object, **__: object) -> Iterator[ComparedCase]:
        yield row(line("flashgen", 50.0), line("SDPA", 100.0))
        raise race.Spoiled("flash_attn 2 has broken the GPU's context", "flash_attn 2")

    monkeypatch.setattr(compare, "compare", broken)
    monkeypatch.setattr("flashgen.cli.compare._demand_gpu", lambda _: None)
    with pytest.raises(SystemExit):
        cli.main(["compare", "--causal"])
    printed = capsys.readouterr()
    assert "made up  100.0 us" in printed.out
    assert "has broken the GPU's context" in printed.err


def test_a_loss_by_a_table_names_what_tunes_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lost = row(line("flashgen", 200.0), line("SDPA", 100.0))
    monkeypatch.setattr(compare, "of_table", lambda *_: iter([lost]))
    with contextlib.suppress(SystemExit):
        cli.main(["compare", "--target", "nvidia_h200", "--causal", "--head-dim", "128"])
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == (
        "To tune for them: flashgen tune --gpu on NVIDIA H200, with the same model, workload or "
        "specs."
    )


def test_the_heaviest_case_comes_first() -> None:
    spec = make_spec("float32", 16)
    cases, _ = cases_of(pieces((spec, workload(spec, seq)) for seq in (64, 4096, 512)), smoke=False)
    assert [case.problem.seq_k for case in cases] == [4096, 512, 64]


def test_no_case_begins_that_would_not_end_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = make_spec("float32", 16)
    cases, _ = cases_of(pieces((spec, workload(spec, seq)) for seq in (64, 4096)), smoke=False)
    clock = iter((0.0, 0.0, 80.0, 80.0))
    monkeypatch.setattr(compare.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(
        compare, "run_case", lambda *_: ((replace(line("flashgen", 1.0), own=True),), None)
    )
    monkeypatch.setattr(compare, "make_inputs", lambda *_: None)
    said: list[str] = []
    found = list(compare.compare(cases, said.append, index=0, seconds=110, smoke=True))
    assert (len(said), [each.note for each in found]) == (1, ["", "not begun: the time is over"])


def test_a_smoke_run_checks_everybody(tmp_path: Path) -> None:
    """Kernels run in the interpreter; times are not claimed."""
    words = ["--direction", "forward", "--direction", "decode", *WORDS]
    done = programs.run(["-m", "flashgen", "compare", *words], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    head, forward, decode, _, last = done.stdout.splitlines()
    assert head.split() == ["what", "SDPA", "flash_attn", "flashgen", "ratio", "faster"]
    for told in (forward, decode):
        assert told.count("ok") == 2
        assert "unknown" in told
    assert "fwd_bf16_d16_causal" in forward
    assert "decode_bf16_d16" in decode
    assert last.endswith("whether flashgen is faster is not known.")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_it_says_what_it_can() -> None:
    done = programs.run(["-m", "flashgen", "compare", "--causal"])
    assert (done.returncode, done.stderr.count("\n")) == (3, 1)
    assert "--target SLUG shows what a table and published times say" in done.stderr


@pytest.mark.parametrize("words", [["--causal"], ["--workload", "w.yaml"]])
def test_what_selects_from_tables_is_refused(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli.main(["compare", "--no-feature", *words])
    assert "--no-feature selects specs of tables: leave it out" in capsys.readouterr().err
