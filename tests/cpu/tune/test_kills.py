"""kill -9 at random moments: what was known is not computed again, and the end is the same."""

from __future__ import annotations

import hashlib
import os
import random
import re
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import optuna
import pytest
from optuna.storages.journal import JournalFileBackend
from rich.console import Console

from flashgen import paths
from flashgen.evaluate.evaluator import triton_version
from flashgen.schedules.config import KernelConfig
from flashgen.schedules.outcome import Outcome, Stage
from flashgen.schedules.space import legal_configs
from flashgen.search.goal import Budget, Goal, goal_for
from flashgen.search.log import outcomes_of
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.gpu import TARGETS
from flashgen.spec.problem import Problem, workload
from flashgen.table import emit
from flashgen.table.table_file import load
from flashgen.tune import evaluators, goals, places, tune
from flashgen.tune.options import TuneOptions
from tests.fakes import FakeEvaluator
from tests.makers import each, make_spec
from tests.replayed import ReplayEvaluator

H200 = TARGETS["nvidia_h200"]
SPECS = (make_spec(), make_spec(mask="causal"))
SEQS = (512, 4096)
STAGES: tuple[Stage, ...] = ("compile", "check", "rough", "timed", "final")
KILLS = 50
MOST_BETWEEN = 6
MOST_LATER = 4
"""Answers after those, until it is killed."""
"""Evaluations between two kills. They are so few that the run is not over before the last."""


def digest_of(spec: AttentionSpec, config: KernelConfig) -> str:
    """Quicker than rendering."""
    return "sha256:" + hashlib.sha256(f"{spec}{config}".encode()).hexdigest()


def recorded() -> list[Outcome]:
    """A landscape of all legal configs: wide tiles are fast, and no two take the same time."""
    landscape = FakeEvaluator(
        us=lambda c: 1000.0 - c.br - c.bc / 2 + 3 * c.num_stages + c.num_warps,
        gpu=H200,
        spread=0.1,
    )
    return [
        replace(
            landscape.outcome(stage, spec, workload(spec, seq), config),
            digest=digest_of(spec, config),
            triton=triton_version(),
        )
        for spec in SPECS
        for seq in SEQS
        for config in legal_configs(spec, H200)
        for stage in STAGES
    ]


class Counting(ReplayEvaluator):
    """Replays, and writes down what it was asked for before it answers. When it has answered `most`, it
    waits for its end: on a busy machine it may take long to be killed.
    """

    ledger: Path
    most = sys.maxsize

    def evaluate(
        self, stage: Stage, spec: AttentionSpec, problem: Problem, configs: Sequence[KernelConfig]
    ) -> Iterator[Outcome]:
        for outcome in super().evaluate(stage, spec, problem, configs):
            while self.most == 0:
                time.sleep(600)
            self.most -= 1
            with self.ledger.open("a") as file:
                file.write(f"{key(outcome)}\n")
            time.sleep(0.001)
            yield outcome


def key(outcome: Outcome) -> str:
    return f"{outcome.stage} {outcome.spec.name} {outcome.problem.seq_k} {outcome.config.label}"


def tune_into(out: Path, evaluator: Counting, trials: int = 30) -> None:
    """What a child does: tune all specs, with nothing emitted. What it prints is in printed.txt."""
    places.choose = lambda *_: ((), {0: H200})  # type: ignore[assignment]
    evaluators.make_evaluator = lambda *_: evaluator  # type: ignore[assignment]
    goals.goal_for = cheap_goal  # type: ignore[attr-defined]
    emit.write = lambda *_: []  # type: ignore[assignment]
    paths.shipped_configs_dir = lambda: out / "nothing shipped"  # type: ignore[assignment]
    options = TuneOptions(specs=SPECS, seqs=SEQS, budget=Budget(trials=trials), out=out)
    out.mkdir(exist_ok=True)
    with (out / "printed.txt").open("w") as file:
        tune.tune(options, Console(file=file, width=200))


def cheap_goal(*arguments: object, **fields: object) -> Goal:
    return replace(goal_for(*arguments, **fields), digest_of=digest_of)  # type: ignore[arg-type]


def started(out: Path, evaluator: Counting) -> int:
    """A child process that tunes; a fork, because a new interpreter takes a second to import."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        tune_into(out, evaluator)
        status = 0
    except BaseException:
        traceback.print_exc(file=sys.__stderr__)
    finally:
        os._exit(status)


def killed_after(pid: int, ledger: Path, more: int, delay_s: float) -> None:
    """Kill the child when it has been asked so much more, and a little later."""
    lines = count(ledger) + more
    while count(ledger) < lines:
        assert os.waitpid(pid, os.WNOHANG) == (0, 0), "the run ended before it was killed"
        time.sleep(0.0005)
    time.sleep(delay_s)
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status), f"the run ended before it was killed: {status}"


def count(ledger: Path) -> int:
    return ledger.read_bytes().count(b"\n") if ledger.exists() else 0


def known(out: Path) -> set[str]:
    """The keys of what the log holds; a torn end counts for nothing."""
    log = paths.log_file(out, H200.slug)
    return {key(outcome) for outcome in outcomes_of(log, lambda _: None)} if log.exists() else set()


def table_of(out: Path, slug: str = H200.slug) -> str:
    """The table's text, less the time at which the run began."""
    text = paths.table_file(out, slug).read_text()
    return re.sub(r"20\d{6}T\d{6}Z|20\d\d-\d\d-\d\dT[\d:]+Z", "THEN", text)


def trials_of(out: Path) -> dict[str, list[tuple[object, ...]]]:
    """The studies of the journal as Optuna reads it, less when."""
    path = paths.journal_file(out, H200.slug)
    storage = optuna.storages.JournalStorage(JournalFileBackend(str(path)))
    return {
        name: [
            (trial.state, trial.params, trial.values, trial.intermediate_values, trial.user_attrs)
            for trial in optuna.load_study(study_name=name, storage=storage).trials
        ]
        for name in sorted(optuna.get_all_study_names(storage))
    }


@pytest.mark.parametrize("kills", each([6, KILLS], 2, "make test kills six times"))
def test_kills_cost_nothing_and_change_nothing(kills: int, tmp_path: Path) -> None:
    evaluator = Counting(recorded(), H200)
    evaluator.ledger = tmp_path / "undisturbed.txt"
    pid = started(tmp_path / "undisturbed", evaluator)
    assert os.waitpid(pid, 0)[1] == 0
    asked = count(evaluator.ledger)
    assert asked > kills * (
        MOST_BETWEEN / 2 + MOST_LATER
    )  # on average, so not over before the last kill

    chance = random.Random(0)
    out, evaluator.ledger = tmp_path / "killed", tmp_path / "killed.txt"
    for _ in range(kills):
        before, start = known(out), count(evaluator.ledger)
        more, delay_s = chance.randint(0, MOST_BETWEEN), chance.uniform(0, 0.008)
        evaluator.most = more + MOST_LATER
        killed_after(started(out, evaluator), evaluator.ledger, more, delay_s)
        again = evaluator.ledger.read_text().splitlines()[start:]
        assert not before.intersection(again)
    evaluator.most = sys.maxsize
    pid = started(out, evaluator)
    assert os.waitpid(pid, 0)[1] == 0
    assert table_of(out) == table_of(tmp_path / "undisturbed")
    assert trials_of(out) == trials_of(tmp_path / "undisturbed")
    assert not paths.session_file(out, H200.slug).exists()


@pytest.mark.parametrize(
    ("answers", "found"),
    each([(150, True), (3, False)], 2, "test_tune has it without a process"),
)
def test_ctrl_c_names_what_it_wrote_or_says_that_it_wrote_nothing(
    answers: int, found: bool, tmp_path: Path
) -> None:
    out, evaluator = tmp_path / "out", Counting(recorded(), H200)
    evaluator.ledger = tmp_path / "ledger.txt"
    pid = os.fork()
    if not pid:
        status = 1
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            tune_into(out, evaluator, trials=10_000)
        except KeyboardInterrupt:
            status = 130
        finally:
            os._exit(status)
    while count(evaluator.ledger) < answers:
        assert os.waitpid(pid, os.WNOHANG) == (0, 0), "the run ended before Ctrl-C"
        time.sleep(0.0005)
    os.kill(pid, signal.SIGINT)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 130
    table, log = paths.table_file(out, H200.slug), paths.log_file(out, H200.slug)
    *_, ended, last, kept = ["", *(out / "printed.txt").read_text().splitlines()]
    if found:
        assert ended == "Interrupted: 1 entry changed"
        assert last == f"Written: {table} and {paths.generated_dir(out)}"
        assert len(load(table).entries) == 1
    else:
        assert last.startswith(f"Interrupted: nothing is written to {table}, ")
        assert not table.exists()
    assert kept == f"{log} has all that was tried: the same command goes on from there."
    assert known(out)


REAL = ("tune --target nvidia_a100_sxm4_80gb --head-dim 64 --no-causal --seq 512 --seq 4096 "
        "--trials 6 --jobs 2 --out").split()  # fmt: skip


@pytest.mark.slow("kills real tuning runs: minutes, and make test kills stand-ins")
def test_kills_of_the_real_thing_leave_no_child_and_change_nothing(tmp_path: Path) -> None:
    """Compiler and interpreter, in processes of their own, killed with their parent."""
    chance = random.Random(1)
    log = paths.log_file(tmp_path / "killed", "nvidia_a100_sxm4_80gb")
    for number in range(3):
        process = subprocess.Popen([sys.executable, "-m", "flashgen", *REAL, tmp_path / "killed"])
        while process.poll() is None and count(log) < 4 * (number + 1):
            time.sleep(0.01)
        time.sleep(chance.uniform(0, 0.5))
        workers = children_of(process.pid)
        assert workers
        process.kill()
        assert process.wait() == -signal.SIGKILL
        while any(Path(f"/proc/{pid}").exists() for pid in workers):
            time.sleep(0.01)  # the test's own time limit ends this
    for out in (tmp_path / "killed", tmp_path / "undisturbed"):
        subprocess.run([sys.executable, "-m", "flashgen", *REAL, out], check=True)
    found = [key(outcome) for outcome in outcomes_of(log, lambda _: None)]
    assert len(found) == len(set(found))
    assert table_of(tmp_path / "killed", log.stem) == table_of(tmp_path / "undisturbed", log.stem)


def children_of(parent: int) -> list[int]:
    """The processes that this one has started, whichever of its threads did."""
    lists = Path(f"/proc/{parent}/task").glob("*/children")
    return [int(pid) for each in lists for pid in each.read_text().split()]
