"""Worker processes that search one landscape together over a storage, and die where a test wants it."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from pathlib import Path

import optuna

from flashgen.search import search
from flashgen.search.goal import Budget, Found, Method
from flashgen.search.log import Log
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.config import KernelConfig
from flashgen.spec.outcome import Outcome, Stage
from flashgen.spec.problem import Problem
from flashgen.tune.shared import Claim, Ledger, Pace, Page, State, Unit
from flashgen.tune.shared.evaluator import SharedEvaluator
from tests import searches
from tests.fakes import FakeEvaluator, digest_of

TRIALS = 30
EVALUATION_S = 0.01
PACE = Pace(beat_s=1, grace_s=4, look_s=0.1)
"""A worker that is not dead beats four times before it would count as dead: enough on a busy machine."""

LIMIT_S = 900.0
Moment = tuple[Stage, KernelConfig]


@dataclass
class Witnessed(FakeEvaluator):
    """Writes down each evaluation as it begins, and is killed in the middle of those in `deadly`."""

    folder: Path = Path()
    deadly: Collection[Moment] = ()

    def outcome(
        self, stage: Stage, spec: AttentionSpec, problem: Problem, config: KernelConfig
    ) -> Outcome:
        with (self.folder / "evaluations").open("a") as file:
            file.write(f"{os.getpid()} {stage} {config.label}\n")
        time.sleep(EVALUATION_S)
        if (stage, config) in self.deadly and self._is_first(stage, config):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().outcome(stage, spec, problem, config)

    def _is_first(self, stage: Stage, config: KernelConfig) -> bool:
        """Whether nobody has died of this before: else it would kill all."""
        try:
            (self.folder / f"died of {stage} {config.label}").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


@dataclass
class Crew:
    """`count` workers of one run. lawless: they take what they want, whoever holds it."""

    url: str
    folder: Path
    count: int
    deadly: Collection[Moment] = ()
    lawless: bool = False
    pids: list[int] = field(default_factory=list)

    def run(self) -> dict[int, Found]:
        """What the workers found that were not killed, by process."""
        self.folder.mkdir(parents=True)
        optuna.storages.RDBStorage("sqlite://")  # imports here, once, what all of them need
        for number in range(self.count):
            self.pids.append(self._start(number))
        try:
            ends = {pid: self._end_of(pid) for pid in tuple(self.pids)}
        finally:
            self._stop()
        assert set(ends.values()) <= {0, -signal.SIGKILL}, ends
        return {
            pid: pickle.loads((self.folder / f"found by {pid}").read_bytes())
            for pid, end in ends.items()
            if end == 0
        }

    @property
    def evaluations(self) -> Counter[tuple[str, str]]:
        """How often each (stage, label) was begun, by whomever."""
        return Counter((stage, label) for _, stage, label in self._lines())

    @property
    def busy(self) -> set[int]:
        """The processes that have evaluated something."""
        return {int(pid) for pid, _, _ in self._lines()}

    def _lines(self) -> list[list[str]]:
        return [line.split() for line in (self.folder / "evaluations").read_text().splitlines()]

    def _start(self, number: int) -> int:
        """A child process; a fork, because a new interpreter takes seconds to import."""
        pid = os.fork()
        if pid:
            return pid
        status = 1
        try:
            self._work(number)
            status = 0
        except BaseException:
            traceback.print_exc(file=sys.__stderr__)
        finally:
            os._exit(status)

    def _work(self, number: int) -> None:
        if self.lawless:
            Page.state = see_nobody  # type: ignore[method-assign]
            Page.claim = take_all  # type: ignore[method-assign]
        evaluator = searches.fake()
        inner = Witnessed(
            us=evaluator.us, gpu=evaluator.gpu, folder=self.folder, deadly=self.deadly
        )
        with (
            Ledger(
                self.url, gpu=searches.GPU.slug, request={"trials": TRIALS}, pace=PACE
            ) as ledger,
            Log(
                self.folder / f"state {number % 2}" / "log.jsonl",  # two hosts, of two workers each
                gpu=searches.GPU.slug,
                triton="3.7.1",
                shared=ledger.id,
            ) as log,
            SharedEvaluator(inner, ledger, memory=log, jobs=1, digest_of=digest_of) as shared,
        ):
            self._await_all()
            found = search(
                searches.make_goal(), shared, log, budget=Budget(trials=TRIALS), method=Method()
            )
        (self.folder / f"found by {os.getpid()}").write_bytes(pickle.dumps(found))

    def _await_all(self) -> None:
        """Begin together."""
        (self.folder / f"ready {os.getpid()}").touch()
        while len(list(self.folder.glob("ready *"))) < self.count:
            time.sleep(0.01)

    def _end_of(self, pid: int) -> int:
        """How a worker ended, as subprocess says it."""
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                self.pids.remove(pid)
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.02)
        raise AssertionError(f"worker {pid} does not end")

    def _stop(self) -> None:
        for pid in self.pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def see_nobody(page: Page) -> State:
    """A state() by which this worker is the only one."""
    return replace(page._look()[1], held={}, workers=1, rank=0)


def take_all(page: Page, units: list[Unit]) -> list[Claim]:
    """A claim() that cares for nobody."""
    time.sleep(3 * EVALUATION_S)  # until the others want the same
    for unit in units:
        page._announce(unit, "lawless")
    trials = {t.user_attrs["key"]: t for t in page._storage.trials(page._study)}
    return [Claim(unit=unit, trial=trials[unit.key], deaths=0) for unit in units]


def alone(folder: Path) -> Found:
    """What one tuner finds that shares nothing."""
    return searches.run(folder, searches.fake(), trials=TRIALS)
