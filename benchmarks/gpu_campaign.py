"""Runs everything that needs a GPU, most valuable first, within some minutes, into one folder.

    python benchmarks/gpu_campaign.py --minutes 9 --out campaign

Three minutes of correctness come first, because a fast wrong kernel is worth nothing; then the
ladder, which shows what each optimization brings; then tuning, and the same comparison with the
tuned table; then the backward, decode, all other tests, and the landscape that validates the
estimates. Meanwhile all cores but one compile what the next steps will launch, at low priority.

Each step may take its own number of seconds, of all runs together. It is a separate command, killed
with all it started when these or the run's minutes are over; what it has written stays. What time
remains goes to the steps that were cut off, in order. campaign.json records each step, and the GPU.
The same command resumes: every step continues from its own results. A folder of another GPU is
refused.

--smoke runs the steps with tiny sizes on a CPU and measures nothing; its folder is separate. Exit
codes: 0 all is done, 1 steps are open, 2 usage, 3 no GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.campaign_steps import STEPS, Step
from flashgen.errors import FlashgenError, NoGpuError
from flashgen.evaluate.build import cpu_count
from flashgen.files import write_whole
from flashgen.spec.gpu import Gpu

LATE = 4
"""The exit status of our programs whose own time was over; pytest's of a wrong option."""

LEFT = "cases are left, because the time is over"
"""What flashgen bench says where its --time-budget ended before its cases."""

AGAIN = "the same command resumes"
"""What a failed step says if it goes on when it is started again, as flashgen bench after a
contender that has broken the GPU's context."""

GRACE_S = 20.0
"""From SIGINT, at which a step saves what it has, to SIGKILL at its limit."""

FINAL_S = 60.0
"""What a tuner takes after its time budget: the final round of the last search, and the kernels."""

TURNS = 3
"""Of a step in one run: within its own seconds, again if it stopped, and in what time remains."""

MOST_JOBS = 8
"""Test processes that share the GPU: each holds a CUDA context."""


@dataclass(frozen=True, kw_only=True)
class Done:
    """The result of a step: done, failed (its exit status), stopped (it failed, and goes on when
    started again), cut off at its limit, or running.

    seconds: of all its turns so far. A step that is still "running" when a record is read was
    killed together with the campaign.
    """

    name: str
    status: str
    seconds: float
    command: str


Clock = Callable[[], float]
Run = Callable[[Step, float, float], Done]
"""A step, the limit of its turn and its budget in seconds -> how the turn ended."""


def run_step(step: Step, out: Path, limit_s: float, budget_s: float, *, smoke: bool) -> Done:
    """Run a step with its output in OUT/<name>.log, its whole process group ended at limit_s."""
    words = {
        "out": str(out),
        "seconds": f"{max(1.0, limit_s - GRACE_S):.0f}",
        "budget": f"{max(1.0, budget_s - FINAL_S):.0f}",
        "jobs": str(min(MOST_JOBS, max(1, cpu_count() // 2))),
    }
    line = (step.smoke if smoke else step.command).format_map(words)
    command = shlex.split(line)
    command[0] = sys.executable
    began = time.monotonic()
    with (out / f"{step.name}.log").open("a+") as log:
        print(f"$ {line}", file=log, flush=True)
        start = log.tell()
        child = subprocess.Popen(
            command,
            cwd=ROOT,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        status = _ended(child, limit_s, late=LATE if not step.proof else None)
        log.seek(start)
        status = _read(log.read(), status, step.proof if not smoke else "")
    seconds = round(time.monotonic() - began, 1)
    return Done(name=step.name, status=status, seconds=seconds, command=line)


def _read(said: str, status: str, proof: str) -> str:
    """What a step's own words make of its status."""
    if status != "done":
        return "stopped" if status.startswith("failed") and AGAIN in said else status
    if not re.search(proof, said):
        return "failed (nothing was run)"
    return "cut off" if LEFT in said else "done"


def _ended(child: subprocess.Popen[bytes], limit_s: float, late: int | None) -> str:
    """Wait for a child to end, then for it to save its results, then kill it, at limit_s. late:
    the exit status that says that its own time was over.
    """
    grace_s = min(GRACE_S, limit_s / 2)
    try:
        for signal_, wait_s in ((signal.SIGINT, limit_s - grace_s), (signal.SIGKILL, grace_s)):
            try:
                code = child.wait(wait_s)
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, signal_)
                continue
            if signal_ is signal.SIGKILL or code == late:
                return "cut off"
            return f"failed ({code})" if code else "done"
        child.wait()
        return "cut off"
    except BaseException:
        os.killpg(child.pid, signal.SIGKILL)
        raise


def gpu_at_hand() -> Gpu:
    """The first GPU, from a child process: this one must not occupy it.

    Raises NoGpuError if torch sees none, FlashgenError if it cannot be used.
    """
    code = (
        "import dataclasses, json; from flashgen.kernels.launch import device_gpu; "
        "print(json.dumps(dataclasses.asdict(device_gpu())))"
    )
    asked = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if asked.returncode == 0:
        return Gpu(**json.loads(asked.stdout.strip().rpartition("\n")[2]))
    kind, _, why = asked.stderr.strip().rpartition("\n")[2].partition(": ")
    if kind.endswith("NoGpuError"):
        raise NoGpuError("a campaign needs a GPU, and torch sees none here: --smoke walks it")
    raise FlashgenError(f"the GPU of this machine cannot be used: {kind}: {why}")


class Record:
    """campaign.json of a folder: smoke or not, the GPU, and the result of each step.

    Raises FlashgenError if the folder is of the other type, of another GPU, or damaged.
    """

    def __init__(self, out: Path, *, smoke: bool, gpu: str | None) -> None:
        self._path = out / "campaign.json"
        self._kind = {"smoke": smoke, "gpu": gpu}
        self.steps: dict[str, Done] = {}
        if not self._path.exists():
            return
        try:
            found = json.loads(self._path.read_text(encoding="utf-8"))
            kind = {name: found[name] for name in self._kind}
            self.steps = {each["name"]: Done(**each) for each in found["steps"]}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise FlashgenError(
                f"{self._path} is no record of a campaign ({error!r}): name another --out"
            ) from error
        if kind != self._kind:
            raise FlashgenError(
                f"{self._path} is of {_said(**kind)}, this is {_said(**self._kind)}: "
                "name another --out, or delete it"
            )

    def used_s(self, step: Step) -> float:
        """The seconds that a step took of all runs so far."""
        known = self.steps.get(step.name)
        return known.seconds if known else 0.0

    def has_results(self, step: Step) -> bool:
        """Whether a step has begun, and has not failed."""
        known = self.steps.get(step.name)
        return known is not None and not known.status.startswith("failed")

    def is_over(self, step: Step) -> bool:
        """Whether a step is done, failed, or has used up its own seconds."""
        known = self.steps.get(step.name)
        if known is None:
            return False
        running = known.status in ("cut off", "stopped", "running")
        return not running or step.seconds - known.seconds < step.least

    def add(self, done: Done) -> None:
        """Record the result of a step; it is on disk when this returns."""
        self.steps[done.name] = done
        record = self._kind | {"steps": [asdict(each) for each in self.steps.values()]}
        write_whole(self._path, json.dumps(record, indent=1) + "\n", durable=True)


def _said(*, smoke: bool, gpu: str | None) -> str:
    return "a smoke run" if smoke else f"a run on {gpu}"


@dataclass(frozen=True, kw_only=True)
class Turn:
    """The step to run next, the limit of this turn, and what the step may take in all runs."""

    step: Step
    limit_s: float
    budget_s: float


def next_turn(
    steps: Sequence[Step], record: Record, left_s: float, turns: Counter[str]
) -> Turn | None:
    """The first step that has own seconds left, else the first that was cut off; None if no open
    step fits into the time that is left. turns: those of this run, by step.
    """
    names = {step.name: step for step in steps}
    used_by = {need for step in steps if record.has_results(step) for need in step.after}
    opened = [
        step
        for step in steps
        if (step.name not in record.steps or record.steps[step.name].status != "done")
        and turns[step.name] < TURNS
        and step.name not in used_by  # another result would spoil what was made with this one
        and all(record.is_over(names[need]) for need in step.after if need in names)
    ]
    for step in opened:
        own_s = step.seconds - record.used_s(step)
        stopped = step.name in record.steps and record.steps[step.name].status == "stopped"
        if (stopped or not turns[step.name]) and min(left_s, own_s) >= step.least:
            return Turn(step=step, limit_s=min(left_s, own_s), budget_s=own_s)
    for step in opened:
        if left_s >= step.least and step.seconds - record.used_s(step) < step.least:
            return Turn(step=step, limit_s=left_s, budget_s=left_s)
    return None


def campaign(
    steps: Sequence[Step], record: Record, seconds: float, run: Run, clock: Clock = time.monotonic
) -> None:
    """Run what is not done yet, in order, while there is time, and record it."""
    end, turns = clock() + seconds, Counter[str]()
    while turn := next_turn(steps, record, end - clock(), turns):
        step, used_s = turn.step, record.used_s(turn.step)
        print(f"{step.name}: up to {turn.limit_s:.0f} s of {end - clock():.0f} s left", flush=True)
        record.add(Done(name=step.name, status="running", seconds=used_s, command=step.command))
        turns[step.name] += 1
        done = run(step, turn.limit_s, turn.budget_s)
        print(f"{step.name}: {done.status}, {done.seconds:.0f} s", flush=True)
        record.add(replace(done, seconds=round(used_s + done.seconds, 1)))
        if done.status.startswith("failed"):
            turns[step.name] = TURNS  # the next run may bring what it lacked


@contextlib.contextmanager
def compiling_ahead(out: Path, gpu: Gpu | None) -> Iterator[None]:
    """Meanwhile benchmarks/compile_ahead.py runs; its whole process group ends with this block.

    gpu None: nothing is compiled.
    """
    if gpu is None:
        yield
        return
    write_whole(out / "gpu.json", json.dumps(asdict(gpu)) + "\n")
    with (out / "compile_ahead.log").open("a") as log:
        child = subprocess.Popen(
            [sys.executable, "benchmarks/compile_ahead.py", "--gpu", out / "gpu.json",
             "--state", out / ".flashgen"],
            cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def main(arguments: Sequence[str]) -> int:
    """Run, then say what is left."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, required=True, help="for all steps together")
    parser.add_argument("--out", type=Path, default=Path("campaign"), metavar="DIR")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes on a CPU")
    parser.add_argument("--step", action="append", choices=[s.name for s in STEPS], help="only it")
    asked = parser.parse_args(arguments)
    if not asked.minutes > 0:
        parser.error("--minutes must be more than 0")
    end = time.monotonic() + 60 * asked.minutes
    steps = [step for step in STEPS if not asked.step or step.name in asked.step]
    out = asked.out.resolve()
    try:
        gpu = None if asked.smoke else gpu_at_hand()
        out.mkdir(parents=True, exist_ok=True)
        record = Record(out, smoke=asked.smoke, gpu=gpu.slug if gpu else None)
        with compiling_ahead(out, gpu):
            campaign(
                steps,
                record,
                end - time.monotonic(),
                lambda *turn: run_step(turn[0], out, *turn[1:], smoke=asked.smoke),
            )
    except FlashgenError as error:
        print(error, file=sys.stderr)
        return 3 if isinstance(error, NoGpuError) else 2
    finished = {each.name for each in record.steps.values() if each.status == "done"}
    rest = [step.name for step in steps if step.name not in finished]
    print(f"done: {', '.join(sorted(finished)) or 'nothing'}; open: {', '.join(rest) or 'nothing'}")
    return bool(rest)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
