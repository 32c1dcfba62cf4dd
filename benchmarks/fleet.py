"""How well one driver keeps N workers busy: real searches over simulated evaluations.

Search, proposals, rendering, log and driver are flashgen's own. Workers are simulated: each task
takes COMPILE_S or MEASURE_S of a simulated clock, two in a hundred fail at once, and one in a
hundred hangs until LIMIT_S. The clock stands still while a search computes, and then advances by
the CPU time of that: a driver is one process whose threads take turns. So the result does not
depend on what else the machine does.

    python benchmarks/fleet.py 64                  64 workers
    python benchmarks/fleet.py 64 --at-once 1      the same, one search after the other
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # threads of BLAS that spin would count as work
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from flashgen.evaluate.evaluator import Ranks, Request, triton_version
from flashgen.evaluate.pools import Pools
from flashgen.evaluate.workers.answers import Answer, Done, Raised, Task, TimedOut
from flashgen.evaluate.workers.crew import Crew
from flashgen.schedules.config import KernelConfig
from flashgen.schedules.outcome import Outcome, Stage, Status
from flashgen.search import search
from flashgen.search.goal import Budget, Found, Method, NothingRight, goal_for
from flashgen.search.log import Log
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.gpu import TARGETS
from flashgen.spec.problem import Problem, workload
from flashgen.spec.vocabulary import Direction
from flashgen.tune import driver
from flashgen.tune.driver import Job, JobQueue, Stop, drive
from tests.fakes import FakeEvaluator

GPU = TARGETS["nvidia_h200"]
COMPILE_S, MEASURE_S, LIMIT_S = 0.4, 0.2, 10.0
FAIL, HANG = 0.02, 0.01
TRIALS = 30
SEQS = (512, 2048, 4096, 16384)


class Clock:
    """Simulated seconds, which advance when all searches wait. driver_s: those of the driver."""

    def __init__(self) -> None:
        self.now = 0.0
        self.driver_s = 0.0
        self.waiting = 0
        self._lock = threading.Lock()
        self._events: list[tuple[float, int, Future[Answer], Answer]] = []
        self._order = itertools.count()

    def after(self, seconds: float, answer: Answer) -> Future[Answer]:
        """A future that has this answer then."""
        future: Future[Answer] = Future()
        future.set_running_or_notify_cancel()
        with self._lock:
            heapq.heappush(self._events, (self.now + seconds, next(self._order), future, answer))
        return future

    def wait(self, future: Future[Answer]) -> Answer:
        """The answer; the search that asks for it waits meanwhile."""
        if future.done():
            return future.result()
        with self._lock:
            self.waiting += 1
        try:
            return future.result()
        finally:
            with self._lock:
                self.waiting -= 1

    def run(self, line: JobQueue, counts: dict[str, int], over: threading.Event) -> None:
        """The loop of a thread: advance whenever all searches wait and the driver has looked."""
        mine, used = time.thread_time(), time.process_time()
        while not over.wait(0.0002):
            looks = counts["looks"]
            if not self._still(line, counts):
                continue
            while line.waiting and counts["looks"] < looks + 2 and not over.is_set():
                time.sleep(0.0002)
            if not self._still(line, counts):
                continue
            spent = time.process_time() - used - (time.thread_time() - mine)
            mine, used = time.thread_time(), time.process_time()
            self.driver_s += spent
            with self._lock:
                when, _, future, answer = heapq.heappop(self._events)
                self.now = max(self.now + spent, when)
                due = [(future, answer)]
                while self._events and self._events[0][0] <= self.now:
                    due.append(heapq.heappop(self._events)[2:])
            for future, answer in due:
                future.set_result(answer)

    def _still(self, line: JobQueue, counts: dict[str, int]) -> bool:
        live = len(line.running) - (counts["ended"] - counts["taken"])
        return bool(self._events) and live > 0 and self.waiting == live


@dataclass(eq=False)
class Seat:
    """A worker. busy_s: how long it had a task."""

    clock: Clock
    size: int = 1
    busy_s: float = 0.0

    def submit(self, task: Task) -> Future[Answer]:
        """As Pool.submit."""
        chance = random.Random(task.payload["name"])
        seconds, answer = COMPILE_S if task.kind == "compile" else MEASURE_S, Done({})
        lot = chance.random()
        if lot < HANG:
            seconds, answer = LIMIT_S, TimedOut(LIMIT_S)  # type: ignore[assignment]
        elif lot < HANG + FAIL:
            answer = Raised("RuntimeError", "made to fail", "")  # type: ignore[assignment]
        self.busy_s += seconds
        return self.clock.after(seconds, answer)

    def close(self) -> None:
        """As Pool.close."""


@dataclass
class Simulated(FakeEvaluator):
    """Outcomes of a landscape, once the workers have answered."""

    clock: Clock = field(default_factory=Clock)
    crew: Crew = field(default_factory=Crew)
    ranks: Ranks = field(default_factory=Ranks)

    def evaluate(
        self, stage: Stage, spec: AttentionSpec, problem: Problem, configs: Sequence[KernelConfig]
    ) -> Iterator[Outcome]:
        """As Evaluator.evaluate."""
        request = Request(stage=stage, spec=spec, problem=problem, gpu=GPU.slug, source="measured")
        named = f"{stage} {spec.name} {problem.seq_k} "
        units = [configs] if stage == "final" else [[config] for config in configs]
        sent = [
            self.crew.submit(
                Task(
                    function=stage, payload={"name": named + unit[0].label}, limit_s=LIMIT_S,
                    kind="compile" if stage == "compile" else "device",
                    rank=self.ranks.of(request),
                )
            )
            for unit in units
        ]  # fmt: skip
        for unit, future in zip(units, sent, strict=True):
            answer = self.clock.wait(future)
            for config in unit:
                made = self.outcome(stage, spec, problem, config)
                if not isinstance(answer, Done) and stage != "final":
                    made = replace(made, status=Status.RUN_ERROR, timing=None, detail="made")
                yield replace(made, triton=triton_version())


def us(config: KernelConfig) -> float:
    """A landscape: wide tiles are fast."""
    return 1000.0 - config.br - config.bc / 2 + 3 * config.num_stages + config.num_warps


def specs(count: int) -> list[AttentionSpec]:
    """So many specs of different kernels."""
    directions: tuple[Direction, ...] = ("forward", "backward_dkv", "backward_dq", "decode")
    made = (
        AttentionSpec(dtype=dtype, head_dim=d, head_dim_v=d, mask=mask).for_direction(direction)
        for direction in directions
        for d in (64, 128, 96, 80, 256, 192)
        for mask in ("causal", "none")
        for dtype in ("bfloat16", "float16")
    )
    return list(itertools.islice(made, count))


def simulate(workers: int, count: int, at_once: int | None, folder: Path) -> str:
    """Tune `count` specs at all lengths with so many workers; a row of the table."""
    clock = Clock()
    seats = [Seat(clock) for _ in range(workers)]
    crew = Crew(seats)
    counts = dict.fromkeys(("ended", "taken", "looks", "proposed"), 0)

    class Looking(JobQueue):
        @property
        def has_room(self) -> bool:
            counts["looks"] += 1
            if at_once is not None:
                return len(self.running) < at_once
            return JobQueue.has_room.fget(self)  # type: ignore[attr-defined,no-any-return]

    evaluator = Simulated(
        us=us, gpu=GPU, guess=lambda c: us(c) / 2, clock=clock, crew=crew, spread=0.1
    )
    with Log(folder / "log.jsonl", gpu=GPU.slug, triton=triton_version()) as log:

        def job(spec: AttentionSpec, seq: int) -> Job:
            problem = workload(spec, seq)

            def run() -> Found:
                goal = goal_for(spec, problem, GPU, on_gpu=True)
                try:
                    return search(
                        goal, evaluator, log, budget=Budget(trials=TRIALS),
                        method=Method(likely_first=True),
                    )  # fmt: skip
                finally:
                    counts["ended"] += 1

            def done(_: object) -> Sequence[Job]:
                counts["taken"] += 1
                return ()

            def failed(error: Exception) -> Sequence[Job]:
                assert isinstance(error, NothingRight), error
                return done(None)

            return Job(run=run, done=done, failed=failed)

        pieces = [(spec, seq) for spec in specs(count) for seq in SEQS]
        line = Looking([job(*piece) for piece in pieces], Pools(cpu=crew, device=crew))
        over = threading.Event()
        driver.LOOK_S = 0.002
        ticking = threading.Thread(target=clock.run, args=(line, counts, over))
        ticking.start()
        try:
            drive([line], Stop(lambda: None))
        finally:
            over.set()
            ticking.join()
    busy = sum(seat.busy_s for seat in seats)
    proposals = len(pieces) * TRIALS
    return (
        f"| {workers} | {len(pieces)} | {clock.now:.0f} | {busy / (workers * clock.now):.2f} | "
        f"{busy / clock.now:.1f} | {1e3 * clock.driver_s / proposals:.1f} | "
        f"{clock.driver_s / clock.now:.2f} |"
    )


def main(arguments: Sequence[str]) -> int:
    """Print a row."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("workers", type=int)
    parser.add_argument("--specs", type=int, default=96, help="of at most 96, at four lengths each")
    parser.add_argument(
        "--at-once", type=int, metavar="N", help="searches at once; as the driver chooses"
    )
    asked = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        print(simulate(asked.workers, asked.specs, asked.at_once, Path(folder)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
