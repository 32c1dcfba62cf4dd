"""benchmarks/first_checks.py: which kernels, in which order, what a cut-off run resumes, what is a fault."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

from benchmarks import first_checks
from benchmarks.first_checks import HEAD_DIMS, Pair, check, faults, kernels, summary
from benchmarks.landscape import Journal
from flashgen.kernels.render import render
from flashgen.spec.config import KernelConfig, Schedule
from flashgen.spec.gpu import TARGETS
from flashgen.spec.legality import why_illegal
from flashgen.spec.outcome import Outcome, Stage, Status
from flashgen.spec.space import legal_configs, seed_configs
from tests.fakes import Failing, FakeEvaluator, Killed

H200 = TARGETS["nvidia_h200"]


class Fake(FakeEvaluator):
    """Digests are those of the text."""

    def outcome(self, stage: Stage, spec: Any, problem: Any, config: Any) -> Outcome:
        made = super().outcome(stage, spec, problem, config)
        return replace(made, digest=render(spec, config).digest)


def fake(failing: Failing = lambda stage, config: None, **fields: Any) -> Fake:
    return Fake(us=lambda config: 1.0, gpu=H200, failing=failing, **fields)


def run(pairs: Sequence[Pair], evaluator: Fake, folder: Path, seconds: float | None = None) -> bool:
    return check(pairs, evaluator, Journal(path=folder / "checks.jsonl"), seconds=seconds)


def outcomes(folder: Path) -> list[Outcome]:
    return [outcome for _, outcome in Journal(path=folder / "checks.jsonl").read()]


def test_causal_kernels_of_every_schedule_and_head_dim_and_one_without_a_mask() -> None:
    pairs = kernels(H200)
    assert len(set(pairs)) == len(pairs)
    assert all(why_illegal(*pair, H200) is None for pair in pairs)
    forward = [(spec, config) for spec, config in pairs if spec.direction == "forward"]
    counts = Counter((config.schedule, spec.head_dim, spec.mask) for spec, config in forward)
    several, once = ("hopper", "s_ahead", "fa2"), ("auto", "fa1")
    assert {*several, *once} == set(get_args(Schedule)) - {"ampere", "blackwell"}
    wanted = {(schedule, dim, "causal"): 3 for schedule in several for dim in HEAD_DIMS}
    wanted |= {(schedule, dim, "causal"): 1 for schedule in once for dim in HEAD_DIMS}
    wanted |= {(schedule, dim, "none"): 1 for schedule in (*several, "auto") for dim in HEAD_DIMS}
    assert counts == wanted


def test_one_backward_and_one_decode_of_every_schedule_and_head_dim() -> None:
    others = [(spec, config) for spec, config in kernels(H200) if spec.direction != "forward"]
    found = Counter((s.direction, c.schedule, s.head_dim) for s, c in others)
    gradients = ("backward_dkv", "backward_dq", "backward_fused")
    have = [(way, schedule) for way in gradients for schedule in ("hopper", "s_ahead", "fa2")]
    wanted = {(*kind, dim) for kind in (*have, ("decode", "fa2")) for dim in HEAD_DIMS}
    assert set(found) == wanted
    assert set(found.values()) == {1}


def test_a_b200_begins_with_schedule_blackwell() -> None:
    pairs = kernels(TARGETS["nvidia_b200"])
    assert pairs[0][1].schedule == "blackwell"
    dims = {spec.head_dim for spec, config in pairs if config.schedule == "blackwell"}
    assert dims == set(HEAD_DIMS)
    fused = {
        (spec.head_dim, config.schedule)
        for spec, config in pairs
        if spec.direction == "backward_fused"
    }
    assert {(64, "blackwell"), (128, "blackwell")} <= fused


def test_each_schedule_comes_before_a_second_kernel_of_any_one() -> None:
    """A run of a minute has hopper and s_ahead at head dims 128 and 64 behind it."""
    pairs = kernels(H200)
    each = len({(config.schedule, spec) for spec, config in pairs})
    assert len({(config.schedule, spec) for spec, config in pairs[:each]}) == each
    assert [config.schedule for _, config in pairs[:2]] == ["hopper", "s_ahead"]
    assert {spec.head_dim for spec, _ in pairs[:18]} == {64, 128}


def test_the_kernels_of_a_schedule_differ_in_more_than_their_tile() -> None:
    causal = [c for s, c in kernels(H200) if (s.head_dim, s.mask) == (128, "causal")]
    hopper = [config for config in causal if config.schedule == "hopper"]
    assert len({(config.order, config.persistent) for config in hopper}) == 3
    assert {config.loads for config in causal if config.schedule == "fa2"} == {
        "pointer", "descriptor",
    }  # fmt: skip


def test_a_gpu_without_hoppers_units_has_the_other_schedules() -> None:
    found = [config.schedule for _, config in kernels(TARGETS["nvidia_l4"])]
    assert found[0] == "ampere"
    assert set(found) == {"ampere", "s_ahead", "fa2", "fa1"}


def test_all_but_fa1_are_kernels_of_the_search() -> None:
    spaces = {spec: set(legal_configs(spec, H200, on_gpu=True)) for spec in first_checks.specs()}
    for spec, config in kernels(H200):
        searched = config in spaces[spec] or config in seed_configs(spec, H200, on_gpu=True)
        assert searched != (config.schedule == "fa1")


def test_a_cut_off_run_resumes(tmp_path: Path) -> None:
    pairs = kernels(H200, each=1)
    with pytest.raises(Killed):
        run(pairs, fake(kill_after=7), tmp_path)
    assert len(outcomes(tmp_path)) == 7
    assert not run(pairs, fake(), tmp_path, seconds=0.0)  # one kernel, then the time is over
    rest = fake()
    assert run(pairs, rest, tmp_path, seconds=60.0)
    assert len(rest.asked) == len(pairs) - 8
    assert [(o.spec, o.config) for o in outcomes(tmp_path)] == pairs
    again = fake()
    assert run(pairs, again, tmp_path)
    assert again.asked == []


def test_a_kernel_with_another_text_is_checked_again(tmp_path: Path) -> None:
    pairs = kernels(H200, each=1)[:3]
    run(pairs, fake(), tmp_path)
    file = tmp_path / "checks.jsonl"
    old = render(*pairs[1]).digest
    file.write_text(file.read_text().replace(old, "sha256:" + "0" * 64))
    again = fake()
    run(pairs, again, tmp_path)
    assert again.configs("check") == [pairs[1][1]]


def test_what_is_wrong_is_a_fault_and_what_spills_is_not(tmp_path: Path) -> None:
    def failing(stage: Stage, config: KernelConfig) -> Status | None:
        return {"fa1": Status.SPILLS, "auto": Status.WRONG}.get(config.schedule)

    run(kernels(H200, each=1)[:5], fake(failing), tmp_path)
    found = outcomes(tmp_path)
    said = list(faults(found))
    assert [line.split("  ")[2] for line in said if "  " in line] == ["wrong"]
    assert said[1:] == [
        "no forward of schedule auto is right", "no forward of schedule fa1 is right",
    ]  # fmt: skip
    assert "fa1      0 right, 1 refused, 0 wrong" in summary(found)
    assert "auto     0 right, 0 refused, 1 wrong" in summary(found)


@pytest.mark.parametrize(("wrong", "seconds", "code"), [(0, "60", 0), (1, "60", 1), (0, "0", 4)])
def test_the_exit_code(
    wrong: int, seconds: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hurt = [config for _, config in kernels(H200)][:wrong]
    made = fake(lambda stage, config: Status.WRONG if config in hurt else None)
    monkeypatch.setattr(first_checks, "_device", lambda: H200)
    monkeypatch.setattr(first_checks, "_evaluator", lambda asked, gpu: made)
    assert first_checks.main(["--out", str(tmp_path), "--time-budget", seconds]) == code
