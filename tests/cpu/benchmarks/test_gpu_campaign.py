"""benchmarks/gpu_campaign.py: the order, the limits, what is gone on with, and a walk without a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_campaign
from benchmarks.gpu_campaign import STEPS, Step, campaign
from flashgen.errors import FlashgenError

ROOT = Path(__file__).resolve().parents[3]


def step(name: str, code: str, share: float = 0.5, **fields: object) -> Step:
    line = f"python -c '{code}'"
    return Step(name=name, command=line, smoke=line, share=share, **fields)  # type: ignore[arg-type]


def statuses(out: Path) -> dict[str, str]:
    record = json.loads((out / "campaign.json").read_text())
    return {each["name"]: each["status"] for each in record["steps"]}


def test_what_fails_is_told_and_the_rest_goes_on(tmp_path: Path) -> None:
    steps = [step("a", "raise SystemExit(3)"), step("b", "print(7)")]
    campaign(steps, tmp_path, 100.0, smoke=False)
    assert statuses(tmp_path) == {"a": "failed (3)", "b": "done"}
    assert (tmp_path / "b.log").read_text().endswith("7\n")


def test_the_same_command_does_what_is_not_done(tmp_path: Path) -> None:
    mark = tmp_path / "marks"
    steps = [
        step("a", f'open("{mark}", "a").write("a")'),
        step(
            "b", f'open("{mark}", "a").write("b"); raise SystemExit(len(open("{mark}").read()) < 3)'
        ),
    ]
    campaign(steps, tmp_path, 100.0, smoke=False)
    assert statuses(tmp_path) == {"a": "done", "b": "failed (1)"}
    campaign(steps, tmp_path, 100.0, smoke=False)
    assert statuses(tmp_path) == {"a": "done", "b": "done"}
    assert mark.read_text() == "abb"


def test_a_step_is_cut_off_with_all_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is asked to end first; a child of it that does not heed that is killed with it."""
    monkeypatch.setattr(gpu_campaign, "LEAST_S", 0.0)
    monkeypatch.setattr(gpu_campaign, "GRACE_S", 1.0)
    saves = f'''
import time
try:
    time.sleep(60)
except KeyboardInterrupt:
    open("{tmp_path}/saved", "w").write("what there is")
'''
    stubborn = f'''
import os, signal, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
os.fork()
open("{tmp_path}/pids", "a").write(f"{{os.getpid()}} ")
time.sleep(60)
'''
    began = time.monotonic()
    for name, code in (("saves", saves), ("stubborn", stubborn)):
        file = tmp_path / f"{name}.py"
        file.write_text(code)
        one = Step(name=name, command=f"python {file}", smoke="", share=1.0)
        campaign([one], tmp_path, 2.0, smoke=False)
    assert time.monotonic() - began < 20
    assert statuses(tmp_path) == {"saves": "cut off", "stubborn": "cut off"}
    assert (tmp_path / "saved").read_text() == "what there is"
    time.sleep(0.2)
    for pid in (tmp_path / "pids").read_text().split():
        state = Path("/proc", pid, "stat")
        assert not state.exists() or state.read_text().split()[2] == "Z"


def test_a_folder_is_gone_on_with_by_its_own_kind_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A smoke run's steps are done for no other run, nor those of one GPU for another."""
    mark = tmp_path / "mark"
    one = [step("memory", f'open("{mark}", "a").write("x")')]
    monkeypatch.setattr(gpu_campaign, "STEPS", one)
    options = ["--minutes", "5", "--out", str(tmp_path / "out")]
    assert gpu_campaign.main([*options, "--smoke"]) == 0
    for gpu, code in (("nvidia_h200", 2), (None, 0)):
        if gpu:
            monkeypatch.setattr(gpu_campaign, "gpu_at_hand", lambda: "nvidia_h200")
        assert gpu_campaign.main(options if gpu else [*options, "--smoke"]) == code
    assert "is of a smoke run, this is a run on nvidia_h200: name another --out" in (
        capsys.readouterr().err
    )
    campaign(one, tmp_path / "h200", 100.0, smoke=False, gpu="nvidia_h200")
    with pytest.raises(FlashgenError, match="is of a run on nvidia_h200, this is a run on nvid"):
        campaign(one, tmp_path / "h200", 100.0, smoke=False, gpu="nvidia_l4")
    assert mark.read_text() == "xx"


def test_a_record_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "campaign.json").write_text("[]\n")
    with pytest.raises(FlashgenError, match="is no record of a campaign"):
        campaign([], tmp_path, 100.0, smoke=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_begun(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_campaign.main(["--minutes", "5", "--out", str(tmp_path / "out")]) == 3
    assert capsys.readouterr().err == (
        "a campaign needs a GPU, and torch sees none here: --smoke walks it\n"
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("says", "status"),
    [
        ("12 skipped in 0.5s", "failed (nothing was run)"),
        ("0 passed, 3 skipped", "failed (nothing was run)"),
        ("10 passed, 2 skipped in 9s", "done"),
    ],
)
def test_where_all_tests_were_skipped_nothing_is_proven(
    says: str, status: str, tmp_path: Path
) -> None:
    correct = STEPS[0]
    (tmp_path / "correct.log").write_text("7 passed in 1s, by an earlier run\n")
    line = f"python -c 'print(\"{says}\")'"
    campaign([replace(correct, command=line)], tmp_path, 100.0, smoke=False, gpu="nvidia_h200")
    assert statuses(tmp_path) == {"correct": status}


@pytest.mark.parametrize("ends", [f'print("3 {gpu_campaign.LEFT}: go on")', "raise SystemExit(4)"])
def test_what_its_own_time_cut_off_goes_on(ends: str, tmp_path: Path) -> None:
    """A step keeps its budget by itself, and says what is left; its status may be 0."""
    mark = tmp_path / "mark"
    code = f'open("{mark}", "a").write("x")\nif len(open("{mark}").read()) < 2: {ends}'
    file = tmp_path / "step.py"
    file.write_text(code)
    one = [Step(name="bench", command=f"python {file}", smoke="", share=0.9)]
    for status in ("cut off", "done", "done"):
        campaign(one, tmp_path, 100.0, smoke=False)
        assert statuses(tmp_path) == {"bench": status}
    assert mark.read_text() == "xx"
    bench = (ROOT / "flashgen" / "bench" / "run.py").read_text()
    assert gpu_campaign.LEFT in bench


def test_a_step_without_time_or_what_it_needs_is_left_for_the_next_run(tmp_path: Path) -> None:
    steps = [step("late", "pass", share=0.1), step("then", "pass", needs=("late",))]
    assert campaign(steps, tmp_path, 100.0, smoke=False) == []
    assert [done.status for done in campaign(steps, tmp_path, 1000.0, smoke=False)] == ["done"] * 2


def test_the_order_is_that_of_worth_and_what_a_step_needs_comes_before_it() -> None:
    names = [each.name for each in STEPS]
    worth = ["correct", "ladder_d128", "ladder_d64", "forward", "tune", "landscape"]
    assert [name for name in names if name in worth] == worth
    assert names[:4] == worth[:4]
    for number, each in enumerate(STEPS):
        assert set(each.needs) <= set(names[:number])


def test_every_command_parses() -> None:
    """flashgen's options are those there are; the other programs' are walked by the smoke run."""
    import typer

    from flashgen.cli import app

    group = typer.main.get_command(app)
    for each in STEPS:
        for line in (each.command, each.smoke):
            words = line.format(out="out", seconds="9").split()
            if words[1:3] == ["-m", "flashgen"]:
                command = group.commands[words[3]]  # type: ignore[attr-defined]
                command.make_context(words[3], words[4:])


@pytest.mark.slow("a whole campaign: minutes, and each step is tested by itself")
def test_the_whole_walk_without_a_gpu(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "gpu_campaign.py", "--smoke", "--minutes", "60",
         "--out", tmp_path / "campaign"],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert set(statuses(tmp_path / "campaign").values()) == {"done"}
    assert (tmp_path / "campaign" / "tuned" / "configs" / "nvidia_l4.yaml").exists()
