"""flashgen.bench in parts: who is judged wrong, refused, blamed; what is gone on with; the ladder's picks."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from flashgen.bench import contenders, ladder, listing, peers, picture, race
from flashgen.bench import ladder as steps
from flashgen.bench import run as ceilings
from flashgen.bench.case import BenchCase, BenchInputs, Sizes, cases, left_out, make_inputs
from flashgen.bench.contenders import Contender, LeftOut, Made
from flashgen.bench.race import CaseDevice, RaceResult, SmokeStopwatch, Spoiled, run_case, timed
from flashgen.bench.record import BenchRecord, Measured, provenance
from flashgen.errors import FlashgenError
from flashgen.runtime.choice import Choice, by_spec
from flashgen.runtime.selection import Served
from flashgen.schedules.config import KernelConfig
from flashgen.schedules.legality import why_illegal
from flashgen.schedules.outcome import Outcome, Status, Timing
from flashgen.spec.gpu import TARGETS
from flashgen.spec.problem import Problem

H200 = TARGETS["nvidia_h200"]
NOWHERE = CaseDevice(gpu=None, index=0, stopwatch=SmokeStopwatch())


def sizes(direction: str = "forward", **fields: Any) -> Sizes:
    fields = {
        "dtype": "bfloat16",
        "head_dims": [16],
        "seqs": [33],
        "masks": ["causal"],
        "batches": [2],
    } | fields
    return Sizes(directions=[direction], smoke=True, **fields)  # type: ignore[list-item]


def case_of(direction: str = "forward", **fields: Any) -> tuple[BenchCase, BenchInputs]:
    case = next(iter(cases(sizes(direction, **fields))))
    return case, make_inputs(case, "cpu")


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def contender(name: str, attention: Any, own: bool = False) -> Contender:
    return Contender(
        name=name, group="sdpa", own=own, make=lambda _: Made(attention=attention, detail="made up")
    )


class Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        return grad / 2


def half_a_gradient(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return sdpa(q, k, Halved.apply(v))  # type: ignore[no-untyped-call]


class TestJudging:
    @pytest.mark.parametrize("direction", ["forward", "backward", "both"])
    def test_a_right_contender_is_ok(self, direction: str) -> None:
        case, x = case_of(direction)
        line, ready = race.judged(contender("right", sdpa), case, x)
        assert (line.status, ready is None) == ("ok", False)
        assert line.floors is not None
        assert 0 < line.floors <= 2

    @pytest.mark.parametrize(
        ("direction", "wrong"),
        [
            ("forward", lambda q, k, v: sdpa(q, k, v) * 1.1),
            ("both", lambda q, k, v: sdpa(q, k, v) * 1.1),
            ("backward", half_a_gradient),
            ("both", half_a_gradient),
        ],
    )
    def test_a_wrong_result_is_seen(self, direction: str, wrong: Any) -> None:
        """One gradient of three, or O alone, off: the worst of all results is told."""
        case, x = case_of(direction)
        line, _ = race.judged(contender("wrong", wrong), case, x)
        assert line.status == "wrong"
        assert line.floors is not None
        assert line.floors > 10

    def test_nan_is_wrong(self) -> None:
        case, x = case_of()
        line, _ = race.judged(
            contender("nan", lambda q, k, v: sdpa(q, k, v) * float("nan")), case, x
        )
        assert line.status == "wrong"

    def test_the_last_sequence_of_a_decode_counts(self) -> None:
        case, x = case_of("decode")

        def right() -> Tensor:
            return torch.nn.functional.scaled_dot_product_attention(x.q, x.k, x.v, enable_gqa=True)

        def wrong() -> Tensor:
            o = right()
            o[-1] *= 1.1
            return o

        assert race.judged(contender("right", right), case, x)[0].status == "ok"
        assert race.judged(contender("wrong", wrong), case, x)[0].status == "wrong"


class TestRunning:
    def race_of(self, *contenders: Contender) -> dict[str, RaceResult]:
        case, x = case_of()
        return {line.name: line for line in run_case(case, x, contenders, NOWHERE)[0]}

    def test_a_wrong_kernel_of_flashgen_is_not_timed_a_wrong_peer_is(self) -> None:
        called: list[str] = []

        def off(name: str) -> Any:
            def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                called.append(name)
                return sdpa(q, k, v) * 1.1

            return attention

        found = self.race_of(contender("own", off("own"), own=True), contender("peer", off("peer")))
        assert {line.status for line in found.values()} == {"wrong"}
        assert called.count("own") == 1
        assert called.count("peer") >= 10

    def test_what_raises_costs_the_others_nothing(self) -> None:
        def refuses(*_: Tensor) -> Tensor:
            raise TypeError("head dim 16 is not for us\nand more")

        def left(_: BenchInputs) -> Made:
            raise LeftOut("not here")

        found = self.race_of(
            contender("refuses", refuses),
            Contender(name="left", group="flex", make=left),
            contender("right", sdpa),
        )
        assert [(line.status, line.detail) for line in found.values()] == [
            ("unavailable", "head dim 16 is not for us"), ("left out", "not here"), ("ok", "made up"),
        ]  # fmt: skip

    def test_no_room_beside_the_others_is_told_of_whose_turn_it_was(self) -> None:
        calls = iter(range(100))

        def greedy(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if next(calls):
                raise torch.OutOfMemoryError("tried to allocate 9 GiB")
            return sdpa(q, k, v)

        found = self.race_of(contender("right", sdpa), contender("greedy", greedy))
        assert found["greedy"].status == "refused"
        assert "not with the others: tried to allocate" in found["greedy"].detail
        assert found["right"].status == "ok"

    def test_a_spoiled_context_ends_the_run_and_names_who(self) -> None:
        def faults(*_: Tensor) -> Tensor:
            raise torch.AcceleratorError("an illegal memory access")

        with pytest.raises(Spoiled, match="bad failed in forward_bf16_d16_causal") as caught:
            self.race_of(contender("bad", faults))
        assert caught.value.contender == "bad"

    def test_an_unsteady_clock_is_tried_once_more(self, monkeypatch: pytest.MonkeyPatch) -> None:
        tries = []

        def unsteady(*_: Any, **__: Any) -> Any:
            tries.append(1)
            raise race.measure.Unsteady("the clock dropped")

        monkeypatch.setattr(race.measure, "interleave", unsteady)
        timings, refused = race.race({"a": tuple, "b": tuple}, NOWHERE)
        assert (len(tries), timings) == (2, {})
        assert refused == {"a": "the clock dropped", "b": "the clock dropped"}


class TestFigures:
    PLACE = CaseDevice(
        gpu=H200, index=0, stopwatch=SmokeStopwatch(), matmul_tflops=800.0, copy_gbs=4000.0
    )
    LINE = RaceResult(name="x", group="sdpa", detail="", status="ok")

    def case(self, direction: str) -> BenchCase:
        return next(iter(cases(Sizes(
            directions=[direction], dtype="bfloat16", head_dims=[128], seqs=[4096], masks=["none"],  # type: ignore[list-item]
            batches=[64],
        ))))  # fmt: skip

    @pytest.mark.parametrize(
        ("direction", "forwards"), [("forward", 1), ("backward", 2.5), ("both", 3.5)]
    )
    def test_rates_follow_the_papers_convention(self, direction: str, forwards: float) -> None:
        case = self.case(direction)
        assert case.problem == Problem(batch=4, heads=16, kv_heads=16, seq_q=4096, seq_k=4096)
        operations = forwards * 4 * 16384 * 4096 * 2048
        time = Timing(median_us=operations / 400e6, low_us=1.0, high_us=1.0)  # 400 TFLOP/s
        line = timed(self.LINE, time, case, self.PLACE)
        assert (line.status, line.gbs) == ("ok", None)
        assert line.tflops == pytest.approx(400)
        assert line.share == pytest.approx(0.5)
        soon = Timing(median_us=operations / 1300e6, low_us=1.0, high_us=1.0)
        assert timed(self.LINE, soon, case, self.PLACE).status == "refused"

    def test_a_decode_is_told_by_its_bytes(self) -> None:
        case = self.case("decode")
        moved = 64 * (2 * 8 * 4096 * 128 * 2 + 32 * (2 * 128 * 2 + 4))
        assert case.bytes == moved
        time = Timing(median_us=moved / 2000e3, low_us=1.0, high_us=1.0)  # 2000 GB/s
        line = timed(self.LINE, time, case, self.PLACE)
        assert (line.gbs, line.share) == (pytest.approx(2000), pytest.approx(0.5))
        soon = Timing(median_us=moved / 6000e3, low_us=1.0, high_us=1.0)
        assert timed(self.LINE, soon, case, self.PLACE).status == "refused"

    def test_ceilings_are_asked_for_and_not_made_up(self) -> None:
        assert ceilings.matmul_tflops("bfloat16", NOWHERE) is None
        assert ceilings.copy_gbs(NOWHERE) is None

    def test_caches_too_large_are_named(self) -> None:
        asked = sizes("decode", batches=[2, 4], gigabytes=1e-5)
        assert [case.problem.batch for case in cases(asked)] == [2]
        (sentence,) = left_out(asked)
        assert "_b4_" in sentence


RUN = {"measured": True, "gpu": {"name": "NVIDIA H200"}, "protocol": 2, "torch": "2.13"}


def measured(tflops: float, name: str = "flashgen", seq: int = 4096, **fields: Any) -> RaceResult:
    timing = Timing(median_us=1e3 / tflops, low_us=1.0, high_us=2.0)
    return RaceResult(
        name=name,
        group="g",
        detail="",
        status="ok",
        timing=timing,
        tflops=tflops,
        floors=0.5,
        **fields,
    )


class TestRecord:
    def test_it_goes_on_with_what_is_missing(self, tmp_path: Path) -> None:
        case, _ = case_of()
        record = BenchRecord(tmp_path, dict(RUN))
        assert record.missing(case, ["flashgen"])
        record.add(case, [measured(500)], (None, None, None))
        again = BenchRecord(tmp_path, dict(RUN))
        assert not again.missing(case, ["flashgen"])
        assert again.missing(case, ["flashgen", "SDPA flash"])
        assert again.cases == record.cases
        assert again.cases[case.key].lines[0].timing == measured(500).timing

    def test_figures_of_another_machine_are_not_mixed_in(self, tmp_path: Path) -> None:
        case, _ = case_of()
        BenchRecord(tmp_path, dict(RUN)).add(case, [measured(500)], (None, None, None))
        other = RUN | {"gpu": {"name": "NVIDIA B200"}}
        with pytest.raises(FlashgenError, match="with gpu NVIDIA H200, here it is NVIDIA B200"):
            BenchRecord(tmp_path, other)
        (path,) = tmp_path.glob("*.json")
        path.write_text(path.read_text().replace('"name": "NVIDIA H200"', '"nothing": 1'))
        with pytest.raises(FlashgenError, match=r"with gpu \{'nothing': 1\}"):
            BenchRecord(tmp_path, other)

    def test_who_was_at_work_at_a_kill_is_struck_from_that_case(self, tmp_path: Path) -> None:
        case, _ = case_of()
        record = BenchRecord(tmp_path, dict(RUN))
        record.at_work(case, "ladder: hopper")
        killed = BenchRecord(tmp_path, dict(RUN))  # without anybody having taken the mark away
        assert killed.struck(case) == {"ladder: hopper"}
        assert killed.struck(case_of("decode")[0]) == set()
        killed.add(case, [measured(500)], (None, None, None))
        assert BenchRecord(tmp_path, dict(RUN)).struck(case) == {"ladder: hopper"}
        killed.at_work(case, "flashgen")
        killed.at_work(None, "")
        assert "flashgen" not in BenchRecord(tmp_path, dict(RUN)).struck(case)

    @pytest.mark.parametrize("text", ["", "[]", '{"schema": 2, "runs": []}', '{"schema": 1}'])
    def test_another_file_is_one_sentence(self, tmp_path: Path, text: str) -> None:
        (tmp_path / "bench.json").write_text(text)
        with pytest.raises(FlashgenError, match="is no record of flashgen bench"):
            BenchRecord(tmp_path, dict(RUN))

    def test_provenance_names_what_must_not_change(self) -> None:
        from flashgen.bench.record import SAME

        found = provenance(
            None, command="flashgen bench", dtype="bfloat16", tables="sha256:0", conditions=None
        )
        assert set(SAME) <= set(found)
        json.dumps(found)


def measured_cases() -> list[Measured]:
    found = []
    for seq, ours, theirs in ((512, 300.0, 400.0), (4096, 550.0, 500.0), (8192, 440.0, 500.0)):
        case = next(iter(cases(Sizes(
            directions=["forward"], dtype="bfloat16", head_dims=[64], seqs=[seq], masks=["none"], batches=[]
        ))))  # fmt: skip
        wrong = dataclasses.replace(measured(900, "SDPA cuDNN"), status="wrong", floors=9.0)
        lines = (measured(ours), measured(theirs, "SDPA flash"), wrong)
        found.append(Measured(
            key=case.key, direction="forward", spec=dataclasses.asdict(case.spec),
            problem=dataclasses.asdict(case.problem), run=0, lines=lines,
        ))  # fmt: skip
    return found


class TestTelling:
    def test_summary_is_of_right_peers_and_long_keys(self) -> None:
        (sentence,) = listing.summaries(measured_cases())
        assert "0.98 in geometric mean of 2, least 0.88" in sentence  # sqrt(1.1 * 0.88)
        assert "s8192" in sentence

    def test_markdown_strikes_wrong_figures_through(self) -> None:
        text = listing.markdown(measured_cases(), ["H200"])
        assert "| contender | 512 | 4096 | 8192 |" in text
        assert "| flashgen | 300 (0.50) | 550 (0.50) | 440 (0.50) |" in text
        assert "~~900~~ (9.00)" in text

    def test_pictures_hold_right_figures_alone(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        drawn: list[Any] = []
        monkeypatch.setattr(
            picture, "save", lambda figure, path, option: drawn.append((figure, path))
        )
        files = picture.draw(measured_cases(), tmp_path, ceilings=(800.0, None))
        assert files == [tmp_path / "forward_none.png"]
        ((figure, _),) = drawn
        (axes,) = figure.axes
        series = {line.get_label(): list(line.get_ydata()) for line in axes.lines}
        assert series["flashgen"] == [300.0, 550.0, 440.0]
        assert series["cuBLAS, 800"] == [800.0, 800.0]
        assert "SDPA cuDNN" not in series
        assert axes.get_title() == "forward, head dim 64"
        assert axes.get_ylim() == (0.0, pytest.approx(1.05 * 800.0))  # the frame cuts no mark


class FakeEvaluator:
    """Answers by label: statuses of each stage, estimates and rough times in microseconds."""

    def __init__(
        self,
        bad: dict[tuple[str, str], Status],
        estimates: dict[str, float],
        rough: dict[str, float] | None = None,
    ) -> None:
        self.bad, self.estimates, self.asked = bad, estimates, []  # type: ignore[var-annotated]
        self.rough, self.source = rough or {}, "measured" if rough else "estimated"

    def evaluate(self, stage: str, spec: Any, problem: Any, configs: Sequence[KernelConfig]) -> Any:
        for config in configs:
            self.asked.append((stage, config.label))
            us = self.estimates.get(config.label)
            yield Outcome(
                spec=spec, problem=problem, config=config, stage=stage, gpu="nvidia_h200", triton="3",  # type: ignore[arg-type]
                status=self.bad.get((stage, config.label), Status.OK), source="measured", digest="", protocol=1,
                estimate=us and Timing(median_us=us, low_us=us, high_us=us), timing=self.timing(stage, config),
            )  # fmt: skip

    def timing(self, stage: str, config: KernelConfig) -> Timing | None:
        us = self.rough.get(config.label) if stage == "rough" else None
        return None if us is None else Timing(median_us=us, low_us=us, high_us=us)


class TestLadder:
    STEP = next(step for step in ladder.STEPS if step.name == "s_ahead, descriptors")

    def ladder_of(self, evaluator: Any, tmp_path: Path, choices: Any = None) -> ladder.LadderSteps:
        served = Served(archs={"nvidia_h200": "sm_90"}, choices=choices or {})
        return ladder.LadderSteps(gpu=H200, served=served, evaluator=evaluator, folder=tmp_path)

    def labels(self, case: BenchCase) -> list[str]:
        return [config.label for config in self.STEP.candidates(case.spec)]

    def test_the_best_by_estimate_is_taken_if_it_is_right(self, tmp_path: Path) -> None:
        case, _ = case_of(head_dims=[128])
        first, second, third = self.labels(case)[:3]
        evaluator = FakeEvaluator(
            {("check", third): Status.WRONG}, {first: 900.0, second: 700.0, third: 600.0}
        )
        config, why = self.ladder_of(evaluator, tmp_path).pick(self.STEP, case.spec, case.problem)
        assert (config.label, why) == (second, "the best by estimate")
        assert ("check", third) in evaluator.asked

    def test_the_tables_choice_of_the_step_comes_before_it(self, tmp_path: Path) -> None:
        case, _ = case_of(head_dims=[128], seqs=[2048])
        tabled = KernelConfig(
            br=128, bc=32, num_warps=4, num_stages=2, schedule="s_ahead", loads="descriptor"
        )
        bucket = Choice(
            spec=case.spec, bucket=ladder.bucket_of(2048), config=tabled, source="untimed",
            median_us=None,
        )  # fmt: skip
        evaluator = FakeEvaluator({}, {self.labels(case)[0]: 1.0, tabled.label: 900.0})
        found = self.ladder_of(evaluator, tmp_path, {"nvidia_h200": by_spec([bucket])})
        assert found.pick(self.STEP, case.spec, case.problem) == (tabled, "the table's choice")

    def test_a_gpu_times_three_tiles_of_a_step_and_the_fastest_is_taken(
        self, tmp_path: Path
    ) -> None:
        case, _ = case_of(head_dims=[128])
        first, second, third, fourth = self.labels(case)[:4]
        evaluator = FakeEvaluator(
            {("check", first): Status.WRONG},
            {first: 1.0, second: 2.0, third: 3.0, fourth: 4.0},
            {second: 90.0, third: 70.0, fourth: 80.0},
        )
        config, why = self.ladder_of(evaluator, tmp_path).pick(self.STEP, case.spec, case.problem)
        assert (config.label, why) == (third, "the fastest of 3 tiles")

    def test_none_right_is_said(self, tmp_path: Path) -> None:
        case, _ = case_of(head_dims=[128])
        evaluator = FakeEvaluator(
            {("compile", label): Status.SPILLS for label in self.labels(case)}, {}
        )
        with pytest.raises(FlashgenError, match="no config of step s_ahead, descriptors"):
            self.ladder_of(evaluator, tmp_path).pick(self.STEP, case.spec, case.problem)

    @pytest.mark.parametrize("mask", ["none", "causal"])
    @pytest.mark.parametrize("steps", [steps.STEPS, steps.BACKWARD_STEPS])
    def test_every_step_holds_its_own_candidates_and_no_others(self, steps: Any, mask: str) -> None:
        case, _ = case_of(head_dims=[128], masks=[mask])
        for step in steps:
            for spec in step.specs(case.spec):
                holding = {
                    other.name
                    for other in steps
                    if spec in other.specs(case.spec)
                    and other.holds(next(step.candidates(spec)), spec)
                }
                if spec.direction == "backward_dq_of_ds":  # which has fa2 alone
                    assert step.name in holding
                else:
                    assert holding == {step.name}

    def test_steps_a_case_has_no_variant_of_are_not_there(self, tmp_path: Path) -> None:
        case, _ = case_of(masks=["none"])  # head dim 16
        names = [each.name for each in self.ladder_of(None, tmp_path).contenders(case)]
        assert "ladder: fa2" in names
        assert not {"ladder: longest first", "ladder: hopper"} & set(names)

    @pytest.mark.parametrize("mask", ["none", "causal"])
    def test_a_backward_step_picks_a_config_a_kernel(self, tmp_path: Path, mask: str) -> None:
        case, _ = case_of("backward", head_dims=[64], masks=[mask])
        ladder_ = self.ladder_of(None, tmp_path)
        names = [each.name for each in ladder_.contenders(case)]
        assert names == [f"ladder: {step.name}" for step in steps.BACKWARD_STEPS]
        pair = next(step for step in steps.BACKWARD_STEPS if step.name == "pair: hopper")
        hopper = self.ladder_of(FakeEvaluator({}, {}), tmp_path)
        for spec in pair.specs(case.spec):
            config, _ = hopper.pick(pair, spec, case.problem)
            assert (config.schedule, why_illegal(spec, config, H200)) == ("hopper", None)
        with pytest.raises(LeftOut, match="needs an sm_90 GPU"):
            ladder_.pick(pair, spec, case.problem)


class FakeWrapper:
    """FlashInfer's wrappers, by their own layouts, in float64."""

    def __init__(self, workspace: Tensor, layout: str) -> None:
        assert layout == "NHD"

    def plan(self, *arguments: Any, **options: Any) -> None:
        self.plan_, self.causal = arguments, options.get("causal", False)


class FakePrefill(FakeWrapper):
    def run(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        starts = self.plan_[0]
        out = []
        for begin, end in itertools.pairwise(starts):
            one = [x[begin:end].transpose(0, 1)[None].double() for x in (q, k, v)]
            o = torch.nn.functional.scaled_dot_product_attention(*one, is_causal=self.causal)
            out.append(o[0].transpose(0, 1).to(q.dtype))
        return torch.cat(out)


class FakeDecode(FakeWrapper):
    def run(self, q: Tensor, pools: tuple[Tensor, Tensor]) -> Tensor:
        starts, pages, last, heads, kv_heads, _, size = self.plan_
        out = []
        for number, (begin, end) in enumerate(itertools.pairwise(starts)):
            length = (end - begin - 1) * size + last[number]
            k, v = (
                pool[pages[begin:end]].flatten(0, 1)[:length].transpose(0, 1)[None].double()
                for pool in pools
            )
            one = q[number][None, :, None].double()
            o = torch.nn.functional.scaled_dot_product_attention(
                one, k, v, enable_gqa=heads != kv_heads
            )
            out.append(o[0, :, 0].to(q.dtype))
        return torch.stack(out)


class TestPeers:
    def test_none_is_listed_that_is_not_installed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(peers, "_installed", lambda module: module == "flash_attn")
        case, _ = case_of()
        assert [each.name for each in peers.peers(case)] == ["flash_attn 2"]
        monkeypatch.setattr(peers, "_installed", lambda module: True)
        assert len(list(peers.peers(case))) == 4
        assert "FlashInfer" not in [each.name for each in peers.peers(case_of("backward")[0])]
        assert [each.name for each in peers.peers(case_of("decode")[0])] == [
            "flash_attn 2",
            "FlashAttention-3",
            "FlashInfer",
        ]

    def test_one_that_is_asked_for_and_cannot_be_had_says_why(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(peers, "_installed", lambda module: module != "flash_attn_interface")
        assert peers.why_absent("flash-attn-3", ["forward"]) == (
            "flash_attn_3 is not installed, there is no module flash_attn_interface"
        )
        assert peers.why_absent("flash-attn-4", ["decode"]) == "it has no direction decode"
        assert peers.why_absent("flashinfer", ["backward", "both"]) == (
            "it has no direction backward or both"
        )
        for group, direction in (
            ("flash-attn-4", "both"),
            ("flashinfer", "decode"),
            ("sdpa", "decode"),
        ):
            assert peers.why_absent(group, [direction]) is None
        assert peers.why_absent("flash-attn-4", ["decode", "forward"]) is None

    @pytest.mark.parametrize("direction", ["forward", "backward", "decode"])
    def test_operands_and_results_are_turned_as_they_ask(
        self, direction: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def flash(
            q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, cache_seqlens: Any = None,
            deterministic: bool = False,
        ) -> Any:  # fmt: skip
            asked.append(deterministic)
            turned = [x.transpose(1, 2) for x in (q, k, v)]
            gqa = q.shape[2] != k.shape[2]
            o = torch.nn.functional.scaled_dot_product_attention(
                *turned, is_causal=causal, enable_gqa=gqa
            )
            return o.transpose(1, 2)

        asked: list[bool] = []
        modules = {
            "flash_attn": SimpleNamespace(flash_attn_func=flash, flash_attn_with_kvcache=flash),
            "flash_attn_interface": SimpleNamespace(
                flash_attn_func=lambda *a, **o: (flash(*a, **o), None),
                flash_attn_with_kvcache=flash,
            ),
            "flash_attn.cute": SimpleNamespace(flash_attn_func=flash),
            "flashinfer": SimpleNamespace(
                BatchPrefillWithRaggedKVCacheWrapper=FakePrefill,
                BatchDecodeWithPagedKVCacheWrapper=FakeDecode,
            ),
        }
        monkeypatch.setattr(peers, "WORKSPACE_BYTES", 16)
        monkeypatch.setattr(peers, "_installed", lambda module: True)
        monkeypatch.setattr(peers.importlib, "import_module", modules.__getitem__)
        case, x = case_of(direction)
        found = [race.judged(each, case, x)[0] for each in peers.peers(case)]
        assert len(found) == {"forward": 4, "backward": 3, "decode": 3}[direction]
        assert [line.status for line in found] == ["ok"] * len(found), found
        assert not any(asked)
        asked.clear()
        fixed = list(peers.deterministic_peers(case))
        found = [race.judged(each, case, x)[0] for each in fixed]
        assert [line.status for line in found] == ["ok"] * len(found), found
        names = ["SDPA flash", "flash_attn 2", "FlashAttention-3", "flash-attn-4"]
        assert [each.name for each in fixed] == (
            [f"{name}, deterministic" for name in names] if direction == "backward" else []
        )
        assert all(asked)


@pytest.mark.parametrize("direction", ["backward", "both"])
def test_a_contender_of_deterministic_gradients_runs_under_torchs_switch(direction: str) -> None:
    seen: list[bool] = []

    class Seen(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, grad: Tensor) -> Tensor:
            seen.append(torch.are_deterministic_algorithms_enabled())
            return grad

    case, x = case_of(direction)
    (made,) = [each.make(x) for each in contenders.sdpa_deterministic(case)]
    plain = dataclasses.replace(made, attention=lambda q, k, v: sdpa(q, k, Seen.apply(v)))  # type: ignore[no-untyped-call]
    race.pass_of(plain, case, x)()
    race.pass_of(dataclasses.replace(plain, around=contextlib.nullcontext), case, x)()
    assert seen == [True, False]
    assert not torch.are_deterministic_algorithms_enabled()
