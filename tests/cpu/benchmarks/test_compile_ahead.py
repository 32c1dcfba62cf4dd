"""benchmarks/compile_ahead.py: what is compiled, in which order, and into the folder that the steps read."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks import compile_ahead, first_checks
from benchmarks.campaign_steps import STEPS
from benchmarks.compile_ahead import compile_all, pairs, specs
from flashgen.bench import ladder
from flashgen.bench.case import Sizes, cases
from flashgen.bench.ladder import LadderSteps
from flashgen.evaluate.tasks import Tasks
from flashgen.runtime.selection import Served
from flashgen.search.goal import goal_for
from flashgen.spec.gpu import TARGETS
from flashgen.spec.problem import workload
from tests.fakes import FakeEvaluator

H200 = TARGETS["nvidia_h200"]
FAKES = Tasks(compile="tests.worker_faults:compile_one")


def test_it_has_all_that_the_first_steps_compile_in_their_order(tmp_path: Path) -> None:
    found = pairs(H200)
    place = {pair: number for number, pair in enumerate(found)}
    checks = first_checks.kernels(H200)
    assert found[: len(checks)] == checks
    goals = [goal_for(spec, workload(spec, 4096), H200, on_gpu=True) for spec in specs()]
    seeds = {(goal.spec, config) for goal in goals for config in goal.first}
    asked = FakeEvaluator(us=lambda config: 1.0, gpu=H200)
    steps = LadderSteps(
        gpu=H200, served=Served(archs={}, choices={}), evaluator=asked, folder=tmp_path
    )
    sizes = Sizes(
        directions=("forward",), dtype="bfloat16", head_dims=(128, 64), seqs=(8192,),
        masks=("none", "causal"), batches=(),
    )  # fmt: skip
    candidates = set()
    for case in cases(sizes):
        for step in ladder.STEPS:
            if steps._legal(step, case.spec):
                asked.asked.clear()
                steps.pick(step, case.spec, case.problem)
                candidates |= {(case.spec, config) for config in asked.configs("compile")}
    assert candidates
    assert max(place[pair] for pair in candidates) < len(checks) + len(candidates)
    assert max(place[pair] for pair in seeds) < len(checks) + len(candidates) + len(seeds)
    assert {(g.spec, c) for g in goals for c in g.space} <= set(found)


def test_the_steps_read_the_folder_that_it_fills() -> None:
    """A step's compilers use OUT/.flashgen of its --out, the landscape the one that --state names."""
    for name in ("first_checks", "ladder_d128", "ladder_d64", "tune"):
        (step,) = (each for each in STEPS if each.name == name)
        assert step.command.endswith("--out {out}")
    for name in ("freeze", "landscape"):
        (step,) = (each for each in STEPS if each.name == name)
        assert "--state {out}/.flashgen" in step.command


def test_kernels_are_compiled_side_by_side_into_the_cache(tmp_path: Path) -> None:
    wanted = first_checks.kernels(H200)[:4]
    lines = list(compile_all(wanted, H200, tmp_path, jobs=2, tasks=FAKES))
    assert [line.rpartition(" ")[0] for line in lines] == [f"{s.name} {c.label}" for s, c in wanted]
    assert lines[2].endswith(" ok")  # fa2; the others lack the overlap of a real kernel


def test_it_runs_at_the_lowest_priority_for_the_gpu_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    nice: list[int] = []
    monkeypatch.setattr(compile_ahead.os, "nice", nice.append)
    monkeypatch.setattr(
        compile_ahead,
        "compile_all",
        lambda wanted, gpu, state, *, jobs: [f"{gpu.slug} {len(wanted)} {state.name} {jobs}"],
    )
    (tmp_path / "gpu.json").write_text(json.dumps(asdict(TARGETS["nvidia_l4"])))
    words = ["--gpu", str(tmp_path / "gpu.json"), "--state", str(tmp_path / "state"), "--jobs", "3"]
    assert compile_ahead.main(words) == 0
    assert nice == [19]
    count = len(pairs(TARGETS["nvidia_l4"]))
    assert capsys.readouterr().out == f"nvidia_l4 {count} state 3\n"
