"""benchmarks/gpu_campaign.py: the order, the limits, what is gone on with, and a walk without a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import gpu_campaign
from benchmarks.gpu_campaign import STEPS, Step, campaign

ROOT = Path(__file__).resolve().parents[2]


def step(name: str, code: str, share: float = 0.5, **fields: object) -> Step:
    line = f"python -c '{code}'"
    return Step(name=name, command=line, smoke=line, share=share, **fields)  # type: ignore[arg-type]


def statuses(out: Path) -> dict[str, str]:
    return {
        each["name"]: each["status"] for each in json.loads((out / "campaign.json").read_text())
    }


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


def test_a_step_without_time_or_what_it_needs_is_left_for_the_next_run(tmp_path: Path) -> None:
    steps = [step("late", "pass", share=0.1), step("then", "pass", needs=("late",))]
    assert campaign(steps, tmp_path, 100.0, smoke=False) == []
    assert [done.status for done in campaign(steps, tmp_path, 1000.0, smoke=False)] == ["done"] * 2


def test_correctness_comes_first_and_what_a_step_needs_before_it() -> None:
    names = [each.name for each in STEPS]
    assert names[0] == "correct"
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


@pytest.mark.slow
def test_the_whole_walk_without_a_gpu(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "gpu_campaign.py", "--smoke", "--minutes", "60",
         "--out", tmp_path / "campaign"],
        capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert set(statuses(tmp_path / "campaign").values()) == {"done"}
    assert (tmp_path / "campaign" / "tuned" / "configs" / "nvidia_l4.yaml").exists()
