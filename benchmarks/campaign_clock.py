"""Estimates what gpu_campaign.py reaches, on a virtual clock: nothing is run and nothing measured.

    python benchmarks/campaign_clock.py                      prints the table of docs/lab-notes.md
    python benchmarks/campaign_clock.py --from-tables SLUG   of flashgen tune --gpu --from-tables

The real scheduler decides which step runs when, in runs of nine minutes each. A step is a model of
its real command: its kernels, cases and contenders are those that the command would have. Measuring
takes the most that evaluate/measure.py allows; all other times are in Costs. Compilers work through
the list of compile_ahead.py; what a step needs and they do not have yet goes first.

--from-tables: how many specs have an entry after so many minutes, on a GPU that has no table. Each
is of what other tables hold, and nothing is compiled ahead.
"""

from __future__ import annotations

import argparse
import contextlib
import heapq
import io
import itertools
import math
import shlex
import sys
import tempfile
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import compile_ahead, first_checks, gpu_campaign, landscape
from benchmarks.campaign_steps import STEPS, Step
from flashgen import cli
from flashgen.bench.case import BenchCase, cases
from flashgen.bench.contenders import flashgen_and_torch, served_directions
from flashgen.bench.ladder import BACKWARD_STEPS, LadderSteps
from flashgen.bench.ladder import STEPS as LADDER_STEPS
from flashgen.evaluate.measure import BUDGETS
from flashgen.search.explore import BATCH, LOOK_AHEAD
from flashgen.search.goal import Goal, goal_for
from flashgen.search.staged import FINALISTS, FINALISTS_LENT
from flashgen.spec.config import KernelConfig
from flashgen.spec.gpu import TARGETS, Gpu
from flashgen.spec.legality import why_illegal
from flashgen.spec.problem import bucket_of
from flashgen.spec.space import tuned_default
from flashgen.table import emit
from flashgen.tune import workloads
from flashgen.tune.donors import Donors
from tests.tables import SHIPPED

GPU = TARGETS["nvidia_h200"]
RUNS_MIN = (9.0, 9.0, 9.0)
WORKERS = (16, 2)
AFTER_MIN = (5, 10, 20, 27)

# Seconds of what measure.py does not limit. Those of compiling were seen on a 2-core CPU with
# Triton 3.7.1; the others are guesses.
START_S = 10.0  # a process imports torch, and opens the GPU; so does a compiler
COMPILE_S, COMPILE_HOPPER_S = 1.5, 3.0
CHECK_S = 1.5  # five small cases against float64
JUDGE_S = 1.0  # a contender of the bench against float64
FLEX_S = 25.0  # torch.compile, for each case
TEST_S = 2.8  # 640 tests in 30 minutes
OTHER_S = 45.0  # overhead, gpt2, memory

Pair = first_checks.Pair


def compile_s(config: KernelConfig) -> float:
    """Seconds of one core for one kernel."""
    return COMPILE_HOPPER_S if config.schedule == "hopper" else COMPILE_S


def longest_s(effort: str) -> float:
    """The most that warming and sampling one kernel may take."""
    budget = BUDGETS[effort]  # type: ignore[index]
    return budget.warm_s + budget.sample_s


def tried_s() -> float:
    """The most that a trial may take, compiling aside."""
    return CHECK_S + longest_s("rough") + longest_s("timed")


def raced_s(challengers: int) -> float:
    """The most that a final round may take: with the default and SDPA."""
    return (challengers + 2) * longest_s("final") + CHECK_S


class Machine:
    """A virtual clock in seconds, and compilers that work through a queue, what is needed now
    first.
    """

    def __init__(self, workers: int, ahead: Sequence[Pair]) -> None:
        self.now = 0.0
        self.workers = workers
        self.test_processes = min(gpu_campaign.MOST_JOBS, max(1, workers // 2))
        self._ahead = ahead
        self._compiled: dict[Pair, float] = {}

    def begin_run(self) -> None:
        """What was being compiled is lost, what was compiled is kept."""
        self._compiled = {pair: at for pair, at in self._compiled.items() if at <= self.now}
        self._queue = deque(self._ahead)
        self._free = [self.now + START_S] * self.workers

    def need(self, wanted: Sequence[Pair]) -> float:
        """The time at which all of these are compiled, or now."""
        while self._queue and self._free[0] < self.now:
            self._compile(self._queue.popleft(), 0.0)
        for pair in wanted:
            self._compile(pair, self.now)
        return max([self.now, *(self._compiled[pair] for pair in wanted)])

    def _compile(self, pair: Pair, earliest: float) -> None:
        if pair not in self._compiled:
            ends = max(heapq.heappop(self._free), earliest) + compile_s(pair[1])
            heapq.heappush(self._free, ends)
            self._compiled[pair] = ends


@dataclass(frozen=True, kw_only=True)
class Unit:
    """What a step records as a whole: kernels that must be compiled, then seconds on the GPU.

    shared: several processes of the step divide such units among them.
    """

    kernels: tuple[Pair, ...] = ()
    seconds: float
    shared: bool = False


class Model(Protocol):
    """A step. times: when each of its `total` units was recorded, in seconds."""

    times: list[float]
    total: int

    def turn(self, machine: Machine, end: float, budget_end: float) -> bool:
        """Go on until `end` at the latest; returns whether the step is done. It would have ended
        by itself at budget_end.
        """


class Walk:
    """One unit after the other. whole: it begins none that would take too long, as flashgen bench
    does, which judges by the longest so far.
    """

    def __init__(self, units: Sequence[Unit], *, whole: bool = False) -> None:
        self.times: list[float] = []
        self.total = len(units)
        self._units, self._whole = units, whole

    def turn(self, machine: Machine, end: float, budget_end: float) -> bool:
        """As Model.turn."""
        longest = 0.0
        for unit in self._units[len(self.times) :]:
            began = machine.now
            if self._whole and began + longest > end:
                return False
            processes = machine.test_processes if unit.shared else 1
            ends = machine.need(unit.kernels) + unit.seconds / processes
            if ends > end:
                machine.now = end
                return False
            machine.now = ends
            longest = max(longest, ends - began)
            self.times.append(ends)
        return True


class Searches:
    """A tuning run. A unit is a trial. A search ends after its trials or its share of the time
    budget, then with a final round, and `chosen` has when.
    """

    def __init__(self, goals: Sequence[Goal], trials: int) -> None:
        self.times: list[float] = []
        self.chosen: list[float] = []
        self.total = len(goals) * trials
        self.goals, self._trials = goals, trials
        self._tried = [0] * len(goals)

    def turn(self, machine: Machine, end: float, budget_end: float) -> bool:
        """As Model.turn."""
        trial_s, final_s = tried_s(), raced_s(FINALISTS)
        for number in range(len(self.chosen), len(self.goals)):
            share_s = (budget_end - machine.now) / (len(self.goals) - number)
            share_end = machine.now + max(0.0, share_s)
            while self._tried[number] < self._trials and machine.now < share_end:
                ends = machine.need(self._batch(number)) + trial_s
                if ends > end:
                    machine.now = end
                    return False
                machine.now = ends
                self._tried[number] += 1
                self.times.append(ends)
            if machine.now + final_s > end:
                machine.now = end
                return False
            machine.now += final_s
            self.chosen.append(machine.now)
        return True

    def _batch(self, number: int) -> list[Pair]:
        """What is compiled before the next trial: LOOK_AHEAD configs for each of its batch."""
        goal, first = self.goals[number], self._tried[number] // BATCH * BATCH * LOOK_AHEAD
        return [(goal.spec, c) for c in goal.space[first : first + BATCH * LOOK_AHEAD]]


def model_of(step: Step) -> Model:
    """The model of a step's command."""
    if "flashgen tune" in step.command:
        return Searches(*searches_of(step))
    return Walk(units_of(step), whole="flashgen bench" in step.command)


@cache
def searches_of(step: Step) -> tuple[tuple[Goal, ...], int]:
    """The goals of a tuning run, and the trials of each."""
    options = called("flashgen.tune.tune.tune", _words(step)[3:])
    goals = (goal_for(spec, problem, GPU, on_gpu=True) for spec, problem in options.work)
    return tuple(goals), options.budget.trials


@cache
def units_of(step: Step) -> tuple[Unit, ...]:
    """The units of any other step."""
    words = _words(step)
    if words[1:4] == ["-m", "flashgen", "bench"]:
        options = called("flashgen.bench.run.run", words[3:])
        return tuple(_case(case, options.groups) for case in cases(options.sizes))
    if words[1:3] == ["-m", "pytest"]:
        count = sum(TESTS[Path(word).name] for word in words if word.endswith(".py"))
        return (Unit(seconds=TEST_S, shared="-n" in words),) * count
    if words[1] == "benchmarks/first_checks.py":
        return tuple(Unit(kernels=(p,), seconds=CHECK_S) for p in first_checks.kernels(GPU))
    if words[1] == "benchmarks/landscape.py":
        return tuple(_landscape(words[2]))
    return (Unit(seconds=OTHER_S),)


def _words(step: Step) -> list[str]:
    return shlex.split(step.command.format(out="out", seconds=1, budget=1, jobs=1))


TESTS = {
    "test_decode_gpu.py": 160,
    "test_evaluator_gpu.py": 38,
    "test_forward_gpu.py": 310,
    "test_gpu_schedules.py": 52,
    "test_invariance_gpu.py": 26,
    "test_overhead_gpu.py": 6,
    "test_training_gpu.py": 90,
    "test_varlen_gpu.py": 114,
}
"""How many there are, by file."""


def called(function: str, words: Sequence[str]) -> Any:
    """The first argument that a flashgen command would pass to this function."""
    with mock.patch(function) as run, mock.patch("flashgen.cli.bench._serve_from"):
        cli.app(list(words), standalone_mode=False)
    return run.call_args.args[0]


def _case(case: BenchCase, groups: Sequence[str]) -> Unit:
    """A case of flashgen bench: contenders are compiled, checked and judged, then race."""
    steps = LadderSteps(gpu=GPU, served=None, evaluator=None, folder=Path())  # type: ignore[arg-type]
    others = flashgen_and_torch(case, mock.Mock(), mock.Mock(), smoke=False)
    names = [each.group for each in (*others, *steps.contenders(case)) if each.group in groups]
    own = names.count("flashgen") + names.count("default")
    launched = 2 if case.direction == "decode" else len(served_directions(case.direction))
    in_process_s = COMPILE_S * launched * own
    seconds = names.count("flex") * FLEX_S + names.count("ladder") * CHECK_S + in_process_s
    seconds += len(names) * (JUDGE_S + longest_s("final"))
    return Unit(kernels=tuple(_ladder(case)) if "ladder" in groups else (), seconds=seconds)


def _ladder(case: BenchCase) -> Iterator[Pair]:
    steps = LADDER_STEPS if case.direction == "forward" else BACKWARD_STEPS
    for step in steps:
        for spec in step.specs(case.spec):
            legal = (c for c in step.candidates(spec) if why_illegal(spec, c, GPU) is None)
            yield from ((spec, config) for config in legal)


def _landscape(verb: str) -> list[Unit]:
    """Freezing only compiles; measuring checks in the first of its passes."""
    drawn = [
        (spec, config)
        for spec in first_checks.specs()
        for config in landscape.sample(spec, GPU, landscape.CONFIGS, 0)
    ]
    if verb == "freeze":
        return [Unit(kernels=(pair,), seconds=0.0) for pair in drawn]
    once = longest_s("timed")
    first = [Unit(kernels=(pair,), seconds=CHECK_S + once) for pair in drawn]
    return [*first, *[Unit(seconds=once)] * len(drawn) * (landscape.PASSES - 1)]


@cache
def ahead() -> list[Pair]:
    """What the compilers work through."""
    return compile_ahead.pairs(GPU)


@cache
def simulated(workers: int) -> dict[str, Model]:
    """The models of all steps after RUNS_MIN, with this number of compilers."""
    machine = Machine(workers, ahead())
    models = {step.name: model_of(step) for step in STEPS}

    def run(step: Step, limit_s: float, budget_s: float) -> gpu_campaign.Done:
        began, model = machine.now, models[step.name]
        machine.now += START_S
        end = began + limit_s - gpu_campaign.GRACE_S
        done = model.turn(machine, end, began + budget_s - gpu_campaign.FINAL_S)
        return gpu_campaign.Done(
            name=step.name,
            status="done" if done else "cut off",
            seconds=machine.now - began,
            command=step.command,
        )

    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        for end_min in itertools.accumulate(RUNS_MIN):
            machine.begin_run()
            record = gpu_campaign.Record(Path(folder), smoke=False, gpu=GPU.slug)
            left_s = 60 * end_min - machine.now
            gpu_campaign.campaign(STEPS, record, left_s, run, clock=lambda: machine.now)
            machine.now = 60 * end_min
    return models


def from_tables(gpu: Gpu, minutes: Sequence[int] = AFTER_MIN) -> Iterator[str]:
    """For each number of WORKERS, how many specs flashgen tune --from-tables has entries for."""
    held = emit.tables_for(ROOT, evidence=True)
    tables = [held[slug] for slug in SHIPPED]
    donors = Donors(tables, gpu)
    units = []
    for spec, problem in workloads.of_tables(tables):
        lent = donors.chosen(spec, bucket_of(problem.seq_k), on_gpu=True)
        configs = dict.fromkeys((*lent, tuned_default(spec, gpu)))
        challengers = min(FINALISTS_LENT, len(configs) - 1)
        units.append(
            Unit(
                kernels=tuple((spec, config) for config in configs),
                seconds=len(configs) * tried_s() + raced_s(challengers),
            )
        )
    yield f"| compile workers | {' | '.join(f'{each} min' for each in minutes)} |"
    yield f"|---:|{'---:|' * len(minutes)}"
    for workers in WORKERS:
        walk, machine = Walk(units), Machine(workers, ())
        machine.begin_run()
        machine.now = START_S
        walk.turn(machine, 60.0 * max(minutes), math.inf)
        counts = (sum(at <= 60 * each for at in walk.times) for each in minutes)
        yield f"| {workers} | {' | '.join(map(str, counts))} |"


def table() -> Iterator[str]:
    """One row per step that begins: units recorded after AFTER_MIN, by number of WORKERS."""
    found = [simulated(workers) for workers in WORKERS]
    heads = [f"{workers}: {minutes} min" for workers in WORKERS for minutes in AFTER_MIN]
    yield f"| step | of | {' | '.join(heads)} |"
    yield f"|---|---:|{'---:|' * len(heads)}"
    for step in STEPS:
        models = [each[step.name] for each in found]
        if not any(each.times for each in models):
            continue
        yield _row(step.name, models[0].total, [each.times for each in models])
        if isinstance(models[0], Searches):
            chosen = [each.chosen for each in models if isinstance(each, Searches)]
            yield _row(f"{step.name}, searches that end", len(models[0].goals), chosen)


def _row(name: str, total: int, times: Sequence[Sequence[float]]) -> str:
    cells = [
        str(sum(at <= 60 * minutes for at in each) or "-")
        for each in times
        for minutes in AFTER_MIN
    ]
    return f"| {name} | {total} | {' | '.join(cells)} |"


def main(arguments: Sequence[str]) -> int:
    """Print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--from-tables", choices=TARGETS, metavar="SLUG")
    slug = parser.parse_args(arguments).from_tables
    print("\n".join(from_tables(TARGETS[slug]) if slug else table()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
