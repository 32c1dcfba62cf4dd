"""Runs everything that needs a GPU, most valuable first, within some minutes, into one folder.

    python benchmarks/gpu_campaign.py --minutes 27 --out campaign

Correctness comes first, because a fast wrong kernel is worth nothing; then each step of the ladder;
then comparisons with other implementations, forward, backward and decode. Then it tunes and times
again with the tuned table; then it measures the landscape that validates the estimates, and
training. A step is a separate command, killed with all it started when its share of the time is
over; what it has written stays. campaign.json records the result of each step, and the GPU. The
same command resumes: finished steps are skipped, interrupted ones are repeated, and tuning and the
benchmark continue from their results. A folder of another GPU is refused.

--smoke runs the steps with tiny sizes on a CPU and measures nothing; its folder is separate. Exit
codes: 0 all is done, 1 steps are open, 2 usage, 3 no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from flashgen.errors import FlashgenError, NoGpuError

LATE = 4
"""The exit status of a step whose own time was over: the same command goes on."""

LEFT = "cases are left, because the time is over"
"""What flashgen bench says where its --time-budget ended before its cases."""

LEAST_S = 20.0
"""A step that would get less is left for the next run."""

GRACE_S = 10.0
"""From SIGINT, at which the tuner saves what it has, to SIGKILL."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """A command. share: of the remaining time when it starts; needs: steps that must be done.

    Words {out} and {seconds} stand for the folder and the limit of the step. proof: a regular
    expression that its output must contain for exit status 0 to count as done; not required in a
    smoke run.
    """

    name: str
    command: str
    smoke: str
    share: float
    needs: tuple[str, ...] = ()
    proof: str = ""


BENCH = "python -m flashgen bench"
PEERS = "--contender flashgen --contender default --contender sdpa"
LADDER = f"{PEERS} --contender ladder"

STEPS = (
    Step(
        name="correct",
        command="python -m pytest -q -p no:cacheprovider tests/gpu -k 'not fifth_longer'",
        smoke="python -m pytest -q -p no:cacheprovider tests/gpu/test_forward_gpu.py",
        share=0.3,
        proof=r"\b[1-9]\d* passed\b",  # pytest exits with 0 where all tests are skipped
    ),
    Step(
        name="ladder_d128",
        command=f"{BENCH} --head-dim 128 --seq 8192 {LADDER} --time-budget {{seconds}} "
        "--out {out}/ladder_d128",
        smoke=f"{BENCH} --smoke --head-dim 128 --no-causal {LADDER} --out {{out}}/ladder_d128",
        share=0.2,
    ),
    Step(
        name="ladder_d64",
        command=f"{BENCH} --head-dim 64 --seq 8192 {LADDER} --time-budget {{seconds}} "
        "--out {out}/ladder_d64",
        smoke=f"{BENCH} --smoke --head-dim 64 --no-causal {LADDER} --out {{out}}/ladder_d64",
        share=0.2,
    ),
    Step(
        name="forward",
        command=f"{BENCH} --head-dim 128 --head-dim 64 --seq 4096 --seq 16384 --seq 1024 "
        f"{PEERS} --time-budget {{seconds}} --out {{out}}/forward",
        smoke=f"{BENCH} --smoke --seq 33 --no-causal {PEERS} --out {{out}}/forward",
        share=0.2,
    ),
    Step(
        name="backward",
        command=f"{BENCH} --direction backward --direction both --head-dim 128 --head-dim 64 "
        "--seq 4096 --seq 16384 --time-budget {seconds} --out {out}/backward",
        smoke=f"{BENCH} --direction backward --smoke --seq 33 --no-causal --out {{out}}/backward",
        share=0.25,
    ),
    Step(
        name="decode",
        command=f"{BENCH} --direction decode --head-dim 128 --batch 1 --batch 64 --seq 4096 "
        "--seq 32768 --time-budget {seconds} --out {out}/decode",
        smoke=f"{BENCH} --direction decode --smoke --batch 2 --out {{out}}/decode",
        share=0.25,
    ),
    Step(
        name="tune",
        command="python -m flashgen tune --gpu --dtype bf16 --head-dim 128 --head-dim 64 "
        "--seq 4096 --seq 16384 --seq 2048 --trials 40 --time-budget {seconds} --out {out}/tuned",
        smoke="python -m flashgen tune --target nvidia_l4 --head-dim 64 --no-causal --trials 1 "
        "--jobs 1 --out {out}/tuned",
        share=0.35,
    ),
    Step(
        name="forward_tuned",
        command=f"{BENCH} --tuned {{out}}/tuned --head-dim 128 --head-dim 64 --seq 4096 "
        "--seq 16384 --time-budget {seconds} --out {out}/forward_tuned",
        smoke=f"{BENCH} --smoke --tuned {{out}}/tuned --seq 33 --no-causal --contender flashgen "
        "--out {out}/forward_tuned",
        share=0.3,
        needs=("tune",),
    ),
    Step(
        name="freeze",
        command="python benchmarks/landscape.py freeze --state {out}/landscape "
        "--out {out}/landscape_estimates.json",
        smoke="python benchmarks/landscape.py freeze --smoke --state {out}/landscape "
        "--out {out}/landscape_estimates.json",
        share=0.3,
    ),
    Step(
        name="landscape",
        command="python benchmarks/landscape.py measure --state {out}/landscape "
        "--estimates {out}/landscape_estimates.json --time-budget {seconds} "
        "--out {out}/landscape_forward.json",
        smoke="python benchmarks/landscape.py measure --smoke --state {out}/landscape "
        "--estimates {out}/landscape_estimates.json --out {out}/landscape_forward.json",
        share=0.5,
        needs=("freeze",),
    ),
    Step(
        name="tune_backward",
        command="python -m flashgen tune --gpu --direction backward --dtype bf16 --head-dim 128 "
        "--head-dim 64 --seq 4096 --trials 24 --time-budget {seconds} --out {out}/tuned",
        smoke="python -m flashgen tune --target nvidia_l4 --direction backward_delta "
        "--head-dim 64 --no-causal --trials 1 --jobs 1 --out {out}/tuned",
        share=0.4,
    ),
    Step(
        name="overhead",
        command="python benchmarks/dispatch_overhead.py --json {out}/overhead.json",
        smoke="python benchmarks/dispatch_overhead.py --json {out}/overhead.json",
        share=0.5,
    ),
    Step(
        name="gpt2",
        command="python examples/gpt2/train.py --attention eager sdpa flashgen "
        "--json {out}/gpt2.json --plot {out}/gpt2.png",
        smoke="python examples/gpt2/train.py --attention eager sdpa flashgen --device cpu "
        "--layers 1 --heads 2 --width 32 --length 32 --batch 1 --steps 2 --warm 1 "
        "--json {out}/gpt2.json",
        share=0.7,
    ),
    Step(
        name="memory",
        command="python benchmarks/memory.py --out {out}/memory.json",
        smoke="python benchmarks/memory.py --smoke --out {out}/memory.json",
        share=0.9,
    ),
)


USABLE = ("done", "cut off")
"""A tuner that was cut off has saved what it found."""


@dataclass(frozen=True, kw_only=True)
class Done:
    """The result of a step: done, failed (its exit status), or cut off at its limit."""

    name: str
    status: str
    seconds: float
    command: str


def run_step(step: Step, out: Path, limit_s: float, *, smoke: bool) -> Done:
    """Run a step with its output in OUT/<name>.log, its whole process group ended at limit_s."""
    words = {"out": str(out), "seconds": f"{max(1.0, limit_s - 2 * GRACE_S):.0f}"}
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
        status = _ended(child, limit_s)
        log.seek(start)
        if status == "done":
            status = _read(log.read(), step.proof if not smoke else "")
    seconds = round(time.monotonic() - began, 1)
    return Done(name=step.name, status=status, seconds=seconds, command=line)


def _read(said: str, proof: str) -> str:
    """What a step's own words make of its exit status 0."""
    if not re.search(proof, said):
        return "failed (nothing was run)"
    return "cut off" if LEFT in said else "done"


def _ended(child: subprocess.Popen[bytes], limit_s: float) -> str:
    """Wait for a child to end, then for it to save its results, then kill it."""
    try:
        for signal_, wait_s in ((signal.SIGINT, limit_s), (signal.SIGKILL, GRACE_S)):
            try:
                code = child.wait(wait_s)
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, signal_)
                continue
            return _status(code, cut=signal_ is signal.SIGKILL)
        child.wait()
        return "cut off"
    except BaseException:
        os.killpg(child.pid, signal.SIGKILL)
        raise


def _status(code: int, *, cut: bool) -> str:
    if cut:
        return "cut off"
    return {0: "done", LATE: "cut off"}.get(code, f"failed ({code})")


def gpu_at_hand() -> str:
    """The slug of the first GPU, from a child process: this one must not occupy the GPU.

    Raises NoGpuError if torch sees none, FlashgenError if it cannot be used.
    """
    code = "from flashgen.kernels.launch import device_gpu; print(device_gpu().slug)"
    asked = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if asked.returncode == 0:
        return asked.stdout.split()[-1]
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

    def add(self, done: Done) -> None:
        """Record the result of a step."""
        self.steps[done.name] = done
        record = self._kind | {"steps": [asdict(each) for each in self.steps.values()]}
        self._path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def _said(*, smoke: bool, gpu: str | None) -> str:
    return "a smoke run" if smoke else f"a run on {gpu}"


def campaign(
    steps: Sequence[Step], out: Path, seconds: float, *, smoke: bool, gpu: str | None = None
) -> list[Done]:
    """Run what is not done yet, in order, while there is time; returns the results of all so far.

    gpu: the slug of the measured GPU, None in a smoke run. Raises the errors of Record.
    """
    out.mkdir(parents=True, exist_ok=True)
    record, end = Record(out, smoke=smoke, gpu=gpu), time.monotonic() + seconds
    found = record.steps
    for step in steps:
        if step.name in found and found[step.name].status == "done":
            continue
        if not all(need in found and found[need].status in USABLE for need in step.needs):
            continue
        left = end - time.monotonic()
        limit_s = step.share * left
        if limit_s < LEAST_S:
            continue
        print(f"{step.name}: up to {limit_s:.0f} s of {left:.0f} s left", flush=True)
        done = run_step(step, out, limit_s, smoke=smoke)
        print(f"{step.name}: {done.status}, {done.seconds:.0f} s", flush=True)
        record.add(done)
    return list(found.values())


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
    steps = [step for step in STEPS if not asked.step or step.name in asked.step]
    try:
        gpu = None if asked.smoke else gpu_at_hand()
        seconds = 60 * asked.minutes
        done = campaign(steps, asked.out.resolve(), seconds, smoke=asked.smoke, gpu=gpu)
    except FlashgenError as error:
        print(error, file=sys.stderr)
        return 3 if isinstance(error, NoGpuError) else 2
    finished = {each.name for each in done if each.status == "done"}
    rest = [step.name for step in steps if step.name not in finished]
    print(f"done: {', '.join(sorted(finished)) or 'nothing'}; open: {', '.join(rest) or 'nothing'}")
    return bool(rest)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
