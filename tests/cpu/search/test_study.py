"""search/study.py and search/journal.py: the study of a search goes on where a killed run left it."""

from __future__ import annotations

import ast
import errno
import inspect
import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from flashgen.errors import FlashgenError
from flashgen.schedules.config import KernelConfig
from flashgen.schedules.outcome import Status
from flashgen.search import journal, sampler, study
from flashgen.search.journal import JournalFile, opened
from flashgen.search.log import Log
from flashgen.search.staged import search
from flashgen.search.study import LEAST, Drop
from tests import fakes
from tests.fakes import FakeEvaluator
from tests.makers import each
from tests.searches import BEST, DEFAULT, GPU, Budget, Found, Method, fake, landscape, make_goal

TITLE = make_goal().title


def loaded(path: Path, name: str = TITLE) -> optuna.Study:
    """The study as anybody opens it, without flashgen."""
    storage = optuna.storages.JournalStorage(JournalFileBackend(str(path)))
    return optuna.load_study(study_name=name, storage=storage)


def run(folder: Path, evaluator: FakeEvaluator, sampler: str = "auto", **goal: Any) -> Found:
    """A search whose study is in the journal of a folder, and goes on if that has one."""
    path = folder / "run.journal"
    with (
        opened(path, lambda _: None, resumed=path.exists()) as storage,
        Log(folder / "log.jsonl", gpu=GPU.slug, triton="3.7.1", notice=lambda _: None) as log,
    ):
        return search(
            make_goal(**goal), evaluator, log, budget=Budget(trials=16),
            method=Method(sampler=sampler), storage=storage,
        )  # fmt: skip


def trials(path: Path) -> list[tuple[Any, ...]]:
    """All that a study says, less when."""
    return [
        (t.number, t.state, t.params, t.values, t.intermediate_values, t.user_attrs, t.system_attrs)
        for t in loaded(path).trials
    ]


class TestTrials:
    def test_a_config_is_a_trial_with_its_times_and_facts(self, tmp_path: Path) -> None:
        broken = {c for c in make_goal().legal if c.br == 128} - {BEST}
        evaluator = fake(
            guess=lambda c: landscape(c) / 2,
            failing=lambda stage, c: Status.WRONG if stage == "check" and c in broken else None,
        )
        found = run(tmp_path, evaluator)
        study = loaded(tmp_path / "run.journal")
        assert study.user_attrs["winner"] == found.winner.config.label == BEST.label
        assert study.best_value == pytest.approx(landscape(BEST))
        assert study.best_trial.params == {
            name: value for name, value in vars(BEST).items() if name in study.best_trial.params
        }
        by_state: dict[TrialState, list[dict[str, Any]]] = {}
        for trial in study.trials:
            by_state.setdefault(trial.state, []).append(trial.user_attrs)
            assert (trial.state == TrialState.COMPLETE) == (
                sorted(trial.intermediate_values) == [0, 1]
            )
        assert set(by_state) == {TrialState.COMPLETE, TrialState.FAIL, TrialState.PRUNED}
        assert {attrs["status"] for attrs in by_state[TrialState.FAIL]} == {"wrong"}
        assert {attrs["status"] for attrs in by_state[TrialState.PRUNED]} <= {
            "dropped", "not measured", "repeated",
        }  # fmt: skip
        facts = {"config", "stage", "status", "digest", "registers", "estimate_us"}
        assert all(facts <= set(attrs) for attrs in by_state[TrialState.COMPLETE])

    def test_an_incumbent_of_another_space_is_a_trial_too(self, tmp_path: Path) -> None:
        incumbent = KernelConfig(br=64, bc=16, num_warps=4, num_stages=2)
        run(tmp_path, fake(lambda c: 100.0 + c.br - c.bc / 10), incumbent=incumbent)
        *_, last = loaded(tmp_path / "run.journal").trials
        assert last.params["bc"] == 16
        assert last.state in (TrialState.COMPLETE, TrialState.PRUNED)

    def test_the_pruner_drops_what_is_far_from_the_best_of_any_study(self) -> None:
        study = optuna.create_study(pruner=Drop(factor=2.0))
        for value, pruned in (
            (10.0, False),
            (19.0, False),
            (21.0, True),
            (7.0, False),
            (15.0, True),
        ):
            trial = study.ask()
            assert not trial.should_prune()
            trial.report(value, 0)
            assert trial.should_prune() == pruned
            study.tell(trial, value)
        study.set_user_attr(LEAST, 3.0)
        trial = study.ask()
        trial.report(6.5, 0)
        assert trial.should_prune()
        for reported, told, pruned_at in ((2.8, 1.2, 3.0), (0.5, None, 1.1)):
            trial = study.ask()
            trial.report(reported, 0)
            study.tell(trial, told, TrialState.COMPLETE if told else TrialState.FAIL)
            trial = study.ask()
            trial.report(pruned_at, 0)
            assert trial.should_prune()

    @pytest.mark.parametrize("sampler", ["auto", "tpe"])
    def test_the_study_decides_what_is_dropped(
        self, tmp_path: Path, sampler: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(Drop, "prune", lambda *_: True)
        evaluator = fake()
        run(tmp_path, evaluator, sampler)
        assert evaluator.configs("timed") == [DEFAULT]


class Killed(BaseException):
    """Stands for a kill."""


def killed_at(count: int, torn: bool, monkeypatch: pytest.MonkeyPatch) -> Callable[[], bool]:
    """Kill the run when it writes this record of the journal; torn: half of it is written. Returns
    whether that came."""
    write, left, came = journal.append_whole, [count], []

    def writing(descriptor: int, content: bytes, **fields: Any) -> None:
        left[0] -= 1
        if left[0] == 0:
            came.append(True)
            os.write(descriptor, content[: len(content) // 2 * torn])
            raise Killed
        write(descriptor, content, **fields)

    monkeypatch.setattr(journal, "append_whole", writing)
    return lambda: bool(came)


class TestResumed:
    @pytest.mark.parametrize(
        ("sampler", "torn"),
        each([("auto", True), ("auto", False), ("tpe", True), ("qmc", True)], 4, "2.5 s a search"),
    )
    def test_it_goes_on_with_the_same_trials(
        self, tmp_path: Path, sampler: str, torn: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Killed at least 15 times, within trials and between them. torn: half of what it wrote
        then is in the file, so the last line is cut, or the last trial was asked in part.
        """
        whole = fake(guess=lambda c: landscape(c) / 2)
        expected = run(tmp_path / "whole", whole, sampler)
        asked: list[Any] = []
        kills = 0
        while True:
            with monkeypatch.context() as patch:
                came = killed_at(15, torn, patch)
                evaluator = fake(guess=lambda c: landscape(c) / 2)
                try:
                    found = run(tmp_path / "killed", evaluator, sampler)
                except Killed:
                    assert came()
                asked += evaluator.asked
                if not came():
                    break
                kills += 1
        assert kills >= 15
        assert found == expected
        assert len(asked) == len(set(asked))
        assert sorted(map(str, asked)) == sorted(map(str, whole.asked))
        assert trials(tmp_path / "killed/run.journal") == trials(tmp_path / "whole/run.journal")

    def test_what_is_full_ends_the_run_and_loses_nothing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        expected = run(tmp_path / "whole", fake())
        count, write = 0, os.write

        def full(descriptor: int, content: bytes) -> int:
            nonlocal count
            count += b"op_code" in content
            if count >= 60:
                write(descriptor, content[:7])
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return write(descriptor, content)

        folder = tmp_path / "full"
        with monkeypatch.context() as patch:
            patch.setattr("flashgen.files.os.write", full)
            with pytest.raises(
                FlashgenError, match=r"run.journal cannot be written \(No space left"
            ):
                run(folder, fake())
        lines = (folder / "run.journal").read_bytes().splitlines(keepends=True)
        assert len(lines) >= 59
        assert all(line.endswith(b"\n") and json.loads(line) for line in lines)
        assert run(folder, fake()) == expected
        assert trials(folder / "run.journal") == trials(tmp_path / "whole/run.journal")

    def test_what_is_no_journal_is_begun_anew_from_the_log(self, tmp_path: Path) -> None:
        run(tmp_path, fake())
        path = tmp_path / "run.journal"
        before = trials(path)
        path.write_bytes(b"what is this?\n" + path.read_bytes())
        said: list[str] = []
        with opened(path, said.append, resumed=True):
            pass
        assert "is no journal of Optuna" in "".join(said)
        again = fake()
        run(tmp_path, again)
        assert again.asked == []
        assert trials(path) == before

    def test_a_study_of_another_space_is_begun_anew(self, tmp_path: Path) -> None:
        run(tmp_path, fake())
        few = tuple(c for c in make_goal().legal if c.bc == 64)
        run(tmp_path, fake(), legal=few)
        assert {
            trial.params.get("bc", 64) for trial in loaded(tmp_path / "run.journal").trials
        } <= {64, 32}

    def test_another_path_leaves_what_was_under_way(self, tmp_path: Path) -> None:
        """The log is lost, and times are others: trials that are no more asked for are ended."""
        with pytest.raises(fakes.Killed):
            run(tmp_path, fake(kill_after=9))
        (tmp_path / "log.jsonl").unlink()
        seeds = (make_goal().legal[5], DEFAULT)
        found = run(tmp_path, fake(), seeds=seeds)
        assert found.winner.config == BEST
        assert all(trial.state.is_finished() for trial in loaded(tmp_path / "run.journal").trials)

    @pytest.mark.parametrize("sampler", ["auto", "qmc"])
    def test_a_trial_that_somebody_else_left_is_ended(self, tmp_path: Path, sampler: str) -> None:
        """It was asked for and never told, and has no parameters."""
        with pytest.raises(fakes.Killed):
            run(tmp_path, fake(kill_after=9), sampler)
        left = loaded(tmp_path / "run.journal").ask()
        assert run(tmp_path, fake(), sampler).candidates == 16
        study = loaded(tmp_path / "run.journal")
        assert study.trials[left.number].state == TrialState.FAIL
        assert all(trial.state.is_finished() for trial in study.trials)

    def test_an_interrupted_search_leaves_its_study_open(self, tmp_path: Path) -> None:
        turn = itertools.count(1)

        def interrupt(stage: str, _: KernelConfig) -> None:
            if stage == "timed" and next(turn) == 6:
                raise KeyboardInterrupt

        assert run(tmp_path, fake(failing=interrupt)).interrupted
        assert "winner" not in loaded(tmp_path / "run.journal").user_attrs

    def test_a_new_run_begins_a_new_journal(self, tmp_path: Path) -> None:
        path = tmp_path / "a.journal"
        path.write_text("rubbish")
        with opened(path, lambda _: None, resumed=False) as storage:
            optuna.create_study(storage=storage, study_name="new")
        assert loaded(path, "new").trials == []
        assert isinstance(storage._backend, JournalFile)


def test_names_of_optuna_are_public_but_for_one() -> None:
    """The one is where a trial keeps what it was enqueued with, which no public call gives."""
    for module in (journal, sampler, study):
        tree = ast.parse(inspect.getsource(module))
        names = [
            ast.unparse(node)
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and node.attr.startswith("_")
        ]
        assert [name for name in names if not name.startswith(("self._", "super().__"))] == []
    made = optuna.create_study()
    made.enqueue_trial({"rows": 16})
    (waiting,) = made.get_trials()
    assert sampler.params_of(waiting) == {"rows": 16}, (
        "Optuna no longer keeps the parameters of an enqueued trial as fixed_params: "
        "flashgen/search/sampler.py, params_of"
    )
