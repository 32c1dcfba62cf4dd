"""benchmarks/gpu_campaign.py: the order, the limits, what is resumed, and all steps without a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_campaign
from benchmarks.campaign_steps import STEPS, Step
from benchmarks.gpu_campaign import Done, Record, campaign, run_step
from flashgen.errors import FlashgenError
from flashgen.spec.gpu import TARGETS

ROOT = Path(__file__).resolve().parents[3]
H200 = TARGETS["nvidia_h200"]


def step(name: str, code: str = "pass", seconds: float = 60.0, **fields: object) -> Step:
    line = f"python -c '{code}'"
    return Step(name=name, command=line, smoke=line, seconds=seconds, **fields)  # type: ignore[arg-type]


def run(
    steps: Sequence[Step], out: Path, seconds: float = 300.0, gpu: str | None = H200.slug
) -> None:
    """A run of these commands."""
    out.mkdir(exist_ok=True)
    record = Record(out, smoke=False, gpu=gpu)
    campaign(steps, record, seconds, lambda *t: run_step(t[0], out, *t[1:], smoke=False))


class Virtual:
    """Steps on a clock of its own: each needs some seconds in all, and keeps what it has done."""

    def __init__(self, out: Path, needed: dict[str, float], failing: Sequence[str] = ()) -> None:
        self.out, self.needed, self.failing = out, needed, failing
        self.now = 0.0
        self.turns: list[tuple[str, float]] = []

    def __call__(self, step: Step, limit_s: float, budget_s: float) -> Done:
        took_s = min(limit_s, self.needed[step.name])
        self.now += took_s
        self.needed[step.name] -= took_s
        self.turns.append((step.name, took_s))
        status = "done" if self.needed[step.name] == 0 else "cut off"
        if step.name in self.failing:
            status = "failed (1)"
        return Done(name=step.name, status=status, seconds=took_s, command="")

    def run(self, steps: Sequence[Step], seconds: float) -> list[tuple[str, float]]:
        """The turns of one run."""
        self.turns = []
        record = Record(self.out, smoke=False, gpu=None)
        campaign(steps, record, seconds, self, clock=lambda: self.now)
        return self.turns


def statuses(out: Path) -> dict[str, str]:
    record = json.loads((out / "campaign.json").read_text())
    return {each["name"]: each["status"] for each in record["steps"]}


def test_what_fails_is_told_and_the_rest_goes_on(tmp_path: Path) -> None:
    steps = [step("a", "raise SystemExit(3)"), step("b", "print(7)")]
    run(steps, tmp_path)
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
    run(steps, tmp_path)
    assert statuses(tmp_path) == {"a": "done", "b": "failed (1)"}
    run(steps, tmp_path)
    assert statuses(tmp_path) == {"a": "done", "b": "done"}
    assert mark.read_text() == "abb"


def test_a_step_is_cut_off_with_all_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is asked to end first; a child of it that does not heed that is killed with it. Limits end
    when the step has begun its work, however busy the machine is.
    """

    class Begun(subprocess.Popen[bytes]):
        limits = 0

        def wait(self, timeout: float | None = None) -> int:
            name = Path(str(self.args[1])).stem  # type: ignore[index]  # a list of words
            while timeout is not None and not begun[name]() and self.poll() is None:
                time.sleep(0.01)
            self.limits += timeout is not None
            ends = timeout is None or (name == "saves" and self.limits == 2)
            return super().wait(None if ends else 0.01)

    begun = {
        "saves": lambda: (tmp_path / "begun").exists(),
        "stubborn": lambda: len((tmp_path / "pids").read_text().split()) == 2,
    }
    (tmp_path / "pids").touch()
    monkeypatch.setattr(gpu_campaign.subprocess, "Popen", Begun)
    saves = f'''
import time
try:
    open("{tmp_path}/begun", "w").close()
    time.sleep(3600)
except KeyboardInterrupt:
    open("{tmp_path}/saved", "w").write("what there is")
'''
    stubborn = f'''
import os, signal, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
os.fork()
open("{tmp_path}/pids", "a").write(f"{{os.getpid()}} ")
time.sleep(3600)
'''
    for name, code in (("saves", saves), ("stubborn", stubborn)):
        file = tmp_path / f"{name}.py"
        file.write_text(code)
        one = Step(name=name, command=f"python {file}", smoke="", seconds=2.0, least=1.0)
        run([one], tmp_path, 2.5)
    assert statuses(tmp_path) == {"saves": "cut off", "stubborn": "cut off"}
    assert (tmp_path / "saved").read_text() == "what there is"
    while any(map(alive, (tmp_path / "pids").read_text().split())):
        time.sleep(
            0.01
        )  # until the kernel has ended them: a limit of pytest's says that it has not


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
            monkeypatch.setattr(gpu_campaign, "gpu_at_hand", lambda: H200)
        assert gpu_campaign.main(options if gpu else [*options, "--smoke"]) == code
    assert "is of a smoke run, this is a run on nvidia_h200: name another --out" in (
        capsys.readouterr().err
    )
    run(one, tmp_path / "h200")
    with pytest.raises(FlashgenError, match="is of a run on nvidia_h200, this is a run on nvid"):
        run(one, tmp_path / "h200", gpu="nvidia_l4")
    assert mark.read_text() == "xx"


def test_a_record_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "campaign.json").write_text("[]\n")
    with pytest.raises(FlashgenError, match="is no record of a campaign"):
        run([], tmp_path)


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
        ("passed in earlier runs: 0 \\n 3 skipped", "failed (nothing was run)"),
        ("passed in earlier runs: 0 \\n 10 passed, 2 skipped in 9s", "done"),
        ("passed in earlier runs: 12 \\n 12 deselected in 9s", "done"),
    ],
)
def test_where_all_tests_were_skipped_nothing_is_proven(
    says: str, status: str, tmp_path: Path
) -> None:
    (tests,) = (each for each in STEPS if each.name == "tests")
    (tmp_path / "tests.log").write_text("7 passed in 1s, by an earlier run\n")
    line = f"python -c 'print(\"{says}\")'"
    run([replace(tests, command=line)], tmp_path, 1000.0)
    assert statuses(tmp_path) == {"tests": status}


def test_an_option_that_pytest_does_not_know_is_a_failure(tmp_path: Path) -> None:
    """Without pytest-xdist or pytest-timeout it ends with 4, as our programs do when time is over."""
    (tests,) = (each for each in STEPS if each.name == "tests")
    line = "python -c 'raise SystemExit(4)'"
    run([replace(tests, command=line)], tmp_path, 1000.0)
    assert statuses(tmp_path) == {"tests": "failed (4)"}


@pytest.mark.parametrize("ends", [f'print("3 {gpu_campaign.LEFT}: go on")', "raise SystemExit(4)"])
def test_what_its_own_time_cut_off_goes_on(ends: str, tmp_path: Path) -> None:
    """A step keeps its budget by itself, and says what is left; its status may be 0."""
    mark = tmp_path / "mark"
    code = f'open("{mark}", "a").write("x")\nif len(open("{mark}").read()) < 2: {ends}'
    file = tmp_path / "step.py"
    file.write_text(code)
    one = [Step(name="bench", command=f"python {file}", smoke="", seconds=60)]
    for status in ("cut off", "done", "done"):
        run(one, tmp_path)
        assert statuses(tmp_path) == {"bench": status}
    assert mark.read_text() == "xx"
    bench = (ROOT / "flashgen" / "bench" / "run.py").read_text()
    assert gpu_campaign.LEFT in bench


def test_a_step_keeps_to_its_own_seconds_over_all_runs(tmp_path: Path) -> None:
    """What time remains then goes to those that were cut off, in order."""
    steps = [step("a", seconds=100), step("b", seconds=50), step("c", seconds=500)]
    clock = Virtual(tmp_path, {"a": 400.0, "b": 60.0, "c": 80.0})
    assert clock.run(steps, 60.0) == [("a", 60.0)]
    assert clock.run(steps, 110.0) == [("a", 40.0), ("b", 50.0)]
    assert clock.run(steps, 200.0) == [("c", 80.0), ("a", 120.0)]
    assert clock.run(steps, 300.0) == [("a", 180.0), ("b", 10.0)]
    assert statuses(tmp_path) == dict.fromkeys("abc", "done")


def test_a_step_that_does_not_fit_lets_a_shorter_one_pass(tmp_path: Path) -> None:
    steps = [step("long", least=60.0), step("short", least=10.0)]
    clock = Virtual(tmp_path, {"long": 60.0, "short": 15.0})
    assert clock.run(steps, 40.0) == [("short", 15.0)]
    assert clock.run(steps, 60.0) == [("long", 60.0)]


def test_a_step_waits_for_what_it_uses(tmp_path: Path) -> None:
    """Until the other is done or out of its own seconds; then that one does not change any more."""
    steps = [step("tune", seconds=100), step("tuned", after=("tune",), seconds=40)]
    clock = Virtual(tmp_path, {"tune": 300.0, "tuned": 90.0})
    assert clock.run(steps, 60.0) == [("tune", 60.0)]
    assert clock.run(steps, 80.0) == [("tune", 40.0), ("tuned", 40.0)]
    assert clock.run(steps, 500.0) == [("tuned", 50.0)]


def test_what_failed_is_tried_once_a_run_and_what_needs_it_may_fail(tmp_path: Path) -> None:
    steps = [step("tune"), step("tuned", after=("tune",))]
    clock = Virtual(tmp_path, {"tune": 5.0, "tuned": 5.0}, failing=("tune", "tuned"))
    for _ in range(2):
        clock.needed = {"tune": 5.0, "tuned": 5.0}
        assert clock.run(steps, 500.0) == [("tune", 5.0), ("tuned", 5.0)]
    clock.failing, clock.needed = (), {"tune": 5.0, "tuned": 5.0}
    clock.run(steps, 500.0)
    assert statuses(tmp_path) == {"tune": "done", "tuned": "done"}


def test_a_step_that_stopped_goes_on_at_once_but_not_for_ever(tmp_path: Path) -> None:
    """As flashgen bench, which leaves out the contender that has broken the GPU's context."""
    mark = tmp_path / "mark"
    file = tmp_path / "step.py"
    file.write_text(
        f'open("{mark}", "a").write("x")\n'
        f'if len(open("{mark}").read()) < LEAST: raise SystemExit("{gpu_campaign.AGAIN}")'
    )
    for least, marks, status in ((9, "xxx", "stopped"), (5, "xxxxx", "done")):
        file.write_text(file.read_text().replace("LEAST", str(least)))
        run([Step(name="bench", command=f"python {file}", smoke="", seconds=60)], tmp_path)
        file.write_text(file.read_text().replace(f"< {least}", "< LEAST"))
        assert (mark.read_text(), statuses(tmp_path)) == (marks, {"bench": status})
    assert gpu_campaign.AGAIN in (ROOT / "flashgen" / "bench" / "run.py").read_text()


def test_a_step_that_ends_early_without_results_does_not_fill_the_run(tmp_path: Path) -> None:
    class Idle(Virtual):
        def __call__(self, step: Step, limit_s: float, budget_s: float) -> Done:
            self.turns.append((step.name, 1.0))
            assert len(self.turns) < 10
            return Done(name=step.name, status="cut off", seconds=1.0, command="")

    assert len(Idle(tmp_path, {}).run([step("idle", seconds=30.5)], 500.0)) == gpu_campaign.TURNS


def test_a_step_that_was_killed_with_the_campaign_goes_on(tmp_path: Path) -> None:
    class Dead(Virtual):
        def __call__(self, step: Step, limit_s: float, budget_s: float) -> Done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Dead(tmp_path, {}).run([step("a")], 100.0)
    assert statuses(tmp_path) == {"a": "running"}
    assert Virtual(tmp_path, {"a": 5.0}).run([step("a")], 100.0) == [("a", 5.0)]
    assert statuses(tmp_path) == {"a": "done"}


def test_the_order_is_that_of_worth_and_what_a_step_needs_comes_before_it() -> None:
    names = [each.name for each in STEPS]
    assert names[:5] == ["first_checks", "ladder_d128", "ladder_d64", "tune", "forward_tuned"]
    assert STEPS[0].seconds == 180
    assert len(set(names)) == len(names)
    for number, each in enumerate(STEPS):
        assert set(each.after) <= set(names[:number])
        assert each.least <= each.seconds


def test_compiling_ahead_ends_with_the_campaign(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its children, which would hold the cores."""
    program = tmp_path / "benchmarks" / "compile_ahead.py"
    program.parent.mkdir()
    program.write_text(
        "import os, pathlib, sys, time\n"
        f"pathlib.Path(r'{tmp_path}/words').write_text(' '.join(sys.argv[1:]))\n"
        "os.fork()\n"
        f"open(r'{tmp_path}/pids', 'a').write(f'{{os.getpid()}} ')\n"
        "time.sleep(3600)\n"
    )
    monkeypatch.setattr(gpu_campaign, "ROOT", tmp_path)
    with gpu_campaign.compiling_ahead(tmp_path, H200):
        pids = tmp_path / "pids"
        while not (pids.exists() and pids.read_text().count(" ") == 2):
            time.sleep(0.02)  # the test's own time limit ends this
    # A killed process that is no child of this one ends when the kernel comes to it.
    while any(map(alive, pids.read_text().split())):
        time.sleep(0.02)
    assert (tmp_path / "words").read_text() == (
        f"--gpu {tmp_path}/gpu.json --state {tmp_path}/.flashgen"
    )
    with gpu_campaign.compiling_ahead(tmp_path / "smoke", None):
        assert not (tmp_path / "smoke").exists()


def alive(pid: str) -> bool:
    state = Path("/proc", pid, "stat")
    return state.exists() and state.read_text().rpartition(")")[2].split()[0] != "Z"


def test_every_command_parses() -> None:
    """flashgen's options are those there are; the other programs' are walked by the smoke run."""
    import typer

    from flashgen.cli import app

    group = typer.main.get_command(app)
    for each in STEPS:
        for line in (each.command, each.smoke):
            words = line.format(out="out", seconds="9", budget="9", jobs="2").split()
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
    assert (tmp_path / "campaign" / "configs" / "nvidia_l4.yaml").exists()
