"""ledger: whoever claims first holds, what ends is final, the dead are seen; and what can be wrong with a storage."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.exceptions import StorageInternalError
from optuna.trial import TrialState

from flashgen.errors import FlashgenError, InvalidArgument, ToolchainError
from flashgen.search.log import Log
from flashgen.spec.outcome import Outcome, Status, Timing
from flashgen.tune.shared import Answer, Ledger, Pace, Page, StorageError, Unit
from flashgen.tune.shared.storage import JournalLock, Storage
from tests import searches
from tests.makers import make_config
from tests.postgres import free_port

ROOT = Path(__file__).parents[3]
PACE = Pace(beat_s=1, grace_s=60, patience_s=0.2, look_s=0.0)
ONE, OTHER = (Unit(key=f"config {br}", configs=(make_config(br),)) for br in (64, 128))
REQUEST = {"triton": "3.7.1", "seed": 0}

Open = Callable[..., Ledger]


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database with Optuna's tables: to make them takes longer than to copy them."""
    path = tmp_path_factory.mktemp("tables") / "empty.db"
    optuna.storages.RDBStorage(f"sqlite:///{path}").engine.dispose()
    return path


@pytest.fixture
def sqlite(tmp_path: Path, tables: Path) -> str:
    shutil.copy(tables, tmp_path / "run.db")
    return f"sqlite:///{tmp_path}/run.db"


@pytest.fixture(params=["journal", "sqlite"])
def any_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Of either kind: locks tell who lives at the one, signs of life at the other."""
    return (
        str(request.getfixturevalue("sqlite")) if request.param == "sqlite" else journal(tmp_path)
    )


@pytest.fixture
def url(tmp_path: Path) -> str:
    return journal(tmp_path)


def journal(folder: Path) -> str:
    return f"journal://{folder}/run.journal"


@pytest.fixture
def opened() -> Iterator[Open]:
    """Makes ledgers that are closed after the test."""
    with ExitStack() as stack:

        def make(url: str, **changes: Any) -> Ledger:
            fields = {"gpu": "nvidia_h200", "request": REQUEST, "pace": PACE} | changes
            return stack.enter_context(Ledger(url, **fields))

        yield make


def page_of(ledger: Ledger) -> Page:
    return ledger.page("timed", searches.SPEC, searches.PROBLEM)


def answer_of(unit: Unit, us: float | None = 10.0, **changes: Any) -> Answer:
    outcomes = []
    for config in unit.configs:
        made = searches.fake(lambda _: us or 1.0).outcome(
            "timed", searches.SPEC, searches.PROBLEM, config
        )
        outcomes.append(replace(made, **({} if us else {"timing": None}), **changes))
    return Answer(outcomes=tuple(outcomes))


def die(ledger: Ledger) -> None:
    """What the death of the worker's process leaves: nothing is written, its lock is free, its heart still."""
    roster = ledger._roster
    if roster._lock is not None:
        os.close(roster._lock[1])
        roster._lock = None
    else:
        assert roster._beating is not None
        roster._beating.set()
        with sqlite3.connect(str(ledger._storage._raw.engine.url.database)) as database:  # type: ignore[attr-defined]
            database.execute(
                "UPDATE trial_heartbeats SET heartbeat = datetime('now', '-1 hour') "
                "WHERE trial_id = ?",
                (roster._trial._trial_id,),  # type: ignore[union-attr]
            )


def states(page: Page) -> list[str]:
    return [trial.state.name for trial in page._storage.trials(page._study)]


def test_workers_agree_on_what_the_first_one_said(url: str, opened: Open) -> None:
    first, second = opened(url), opened(url)
    assert first.id == second.id
    assert [ledger.agree("run", {"date": day}) for day, ledger in ((1, first), (2, second))] == [
        {"date": 1},
        {"date": 1},
    ]
    assert opened(url).agree("run", None) == {"date": 1}


def test_runs_of_other_studies_are_other_runs(tmp_path: Path, opened: Open) -> None:
    url = journal(tmp_path)
    first, second = opened(url), opened(url, study="another", gpu="nvidia_l4")
    assert first.id != second.id
    assert page_of(first).claim([ONE])
    assert page_of(second).claim([ONE])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"gpu": "nvidia_l4"}, r"another gpu \(nvidia_h200 there, nvidia_l4 here\)"),
        ({"request": REQUEST | {"triton": "3.8.0"}}, r"another triton \(3.7.1 there, 3.8.0 here\)"),
        ({"request": REQUEST | {"seed": 1}}, r"another seed \(0 there, 1 here\)"),
        ({"request": REQUEST | {"work": "x" * 99}}, "another work: all workers"),
        ({"request": {"triton": "3.7.1"}}, r"another seed \(0 there, null here\)"),
    ],
)
def test_a_worker_of_another_run_is_refused(
    tmp_path: Path, opened: Open, changes: dict[str, Any], said: str
) -> None:
    first = opened(journal(tmp_path))
    with pytest.raises(FlashgenError, match=said) as caught:
        opened(journal(tmp_path), **changes)
    assert "\n" not in str(caught.value)
    assert len(first._roster.living()) == 1


def test_a_config_space_that_has_grown_is_another_run(
    tmp_path: Path, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened(journal(tmp_path))
    monkeypatch.setattr("flashgen.tune.shared.run.fields_of_configs", lambda: {"br": ["more"]})
    with pytest.raises(FlashgenError, match="another configs"):
        opened(journal(tmp_path))


def test_what_is_held_is_left_to_its_holder(any_url: str, opened: Open) -> None:
    mine, theirs = page_of(opened(any_url)), page_of(opened(any_url))
    (claim,) = mine.claim([ONE])
    assert claim.unit == ONE
    assert list(theirs.state().held) == [ONE.key]
    assert [claim.unit for claim in theirs.claim([ONE, OTHER])] == [OTHER]
    assert states(mine) == ["RUNNING", "FAIL", "RUNNING"]  # the loser's claim has ended


def test_of_two_that_claim_at_once_the_earlier_holds(
    url: str, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = page_of(opened(url)), page_of(opened(url))
    look, got = first._look, []

    def late() -> Any:
        monkeypatch.setattr(first, "_look", look)
        got.append(second.claim([ONE]))  # announced and looked at between our two steps
        return look()

    monkeypatch.setattr(first, "_look", late)
    assert len(first.claim([ONE])) == 1
    assert got == [[]]


def test_a_claim_whose_news_was_lost_is_not_lost(tmp_path: Path, opened: Open) -> None:
    """A network that answers too late: the trial is there, and added again."""
    page = page_of(opened(journal(tmp_path)))
    announce = page._announce
    page._announce = lambda unit, mark: [announce(unit, mark) for _ in range(2)]  # type: ignore
    (claim,) = page.claim([ONE])
    assert states(page) == ["RUNNING", "FAIL"]
    assert page.record(claim, answer_of(ONE))
    assert states(page) == ["COMPLETE", "FAIL"]


def test_who_has_joined_since_the_last_look_is_not_taken_for_dead(url: str, opened: Open) -> None:
    """Who lives is asked seldom: but a claim of one that was not there then says that it is now."""
    pace = replace(PACE, look_s=3600.0)
    first = opened(url, pace=pace)
    page_of(first).state()  # looked: alone
    later = page_of(opened(url, pace=pace))
    (claim,) = later.claim([ONE])
    assert page_of(first).claim([ONE]) == []
    assert later.record(claim, answer_of(ONE))


def test_an_answer_whose_news_was_lost_has_been_given(url: str, opened: Open) -> None:
    page = page_of(opened(url))
    (claim,) = page.claim([ONE])
    assert page.record(claim, answer_of(ONE))
    assert page.record(claim, answer_of(ONE))  # asked again: it is there, and this worker's
    (other,) = page.claim([OTHER])
    page.release([other])
    assert not page.record(other, answer_of(OTHER))


def test_a_worker_whose_card_was_added_twice_dies_all_the_same(
    sqlite: str, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The news of the first was lost. A second card without a heart would never be dead."""
    add = Storage.add

    def twice(self: Storage, study: Any, state: Any, fields: Any, *more: Any) -> None:
        for _ in range(2 if "worker" in fields else 1):
            add(self, study, state, fields, *more)

    monkeypatch.setattr(Storage, "add", twice)
    mine, theirs = opened(sqlite), opened(sqlite)
    assert len(theirs._roster.living()) == 2
    assert page_of(mine).claim([ONE])
    die(mine)
    assert [claim.unit for claim in page_of(theirs).claim([ONE])] == [ONE]


def test_no_reason_holds_a_secret(tmp_path: Path) -> None:
    storage = Storage(journal(tmp_path), PACE, lambda _: None)
    storage._secrets = ("s3cret",)
    error = StorageError("outer")
    error.__cause__ = ValueError("password s3cret of anna\nis wrong")
    assert storage._reason(error) == "password *** of anna"


def test_all_read_the_answer_and_nobody_claims_it_again(url: str, opened: Open) -> None:
    mine, theirs = page_of(opened(url)), page_of(opened(url))
    (claim,) = mine.claim([ONE])
    made = replace(answer_of(ONE), conditions={"sm_mhz": 1980})
    assert mine.record(claim, made)
    assert theirs.state().answer(ONE.key) == made
    assert theirs.state().answer(OTHER.key) is None
    assert theirs.claim([ONE]) == []
    (trial,) = [t for t in theirs._storage.trials(theirs._study) if t.state.name == "COMPLETE"]
    assert trial.value == 10.0
    assert trial.params == vars(ONE.configs[0])


GUESS = Timing(median_us=7.0, low_us=6.0, high_us=8.0)


@pytest.mark.parametrize(
    ("us", "changes", "value"),
    [
        (10.0, {}, 10.0),
        (10.0, {"estimate": GUESS}, 10.0),
        (None, {"estimate": GUESS}, 7.0),
        (None, {}, None),
        (10.0, {"status": Status.WRONG}, None),
    ],
)
def test_a_trial_has_the_microseconds_that_there_are(
    tmp_path: Path, opened: Open, us: float | None, changes: dict[str, Any], value: float | None
) -> None:
    page = page_of(opened(journal(tmp_path)))
    (claim,) = page.claim([ONE])
    assert page.record(claim, answer_of(ONE, us, **changes))
    (trial,) = page._storage.trials(page._study)
    assert (trial.state, trial.value) == (
        TrialState.PRUNED if value is None else TrialState.COMPLETE,
        value,
    )


def test_a_round_of_several_is_one_trial(tmp_path: Path, opened: Open) -> None:
    page = page_of(opened(journal(tmp_path)))
    whole = Unit(key="round", configs=(*ONE.configs, *OTHER.configs))
    (claim,) = page.claim([whole])
    assert page.record(claim, answer_of(whole))
    (trial,) = page._storage.trials(page._study)
    assert trial.params == {}
    assert all(config.label in trial.user_attrs["configs"] for config in whole.configs)
    found = page.state().answer("round")
    assert found is not None
    assert [outcome.config for outcome in found.outcomes] == list(whole.configs)


def test_what_is_released_may_be_taken_at_once(url: str, opened: Open) -> None:
    mine, theirs = page_of(opened(url)), page_of(opened(url))
    claims = mine.claim([ONE, OTHER])
    mine.release(claims[:1])
    assert [claim.unit for claim in theirs.claim([ONE, OTHER])] == [ONE]


def test_what_could_not_be_released_is_with_the_next_claim(
    tmp_path: Path, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, theirs = (page_of(opened(journal(tmp_path))) for _ in range(2))
    claims = mine.claim([ONE])
    with monkeypatch.context() as patched:
        patched.setattr(mine._storage, "finish", lost)
        mine.release(claims)
    assert theirs.claim([ONE]) == []
    mine.claim([OTHER])
    assert len(theirs.claim([ONE])) == 1


def lost(*_: object) -> bool:
    raise StorageError("gone")


def test_who_leaves_leaves_what_was_held(url: str, opened: Open) -> None:
    first, second = opened(url), opened(url)
    assert page_of(first).claim([ONE])
    first.close()
    first.close()
    assert len(page_of(second).claim([ONE])) == 1
    assert not list(Path(url.partition("://")[2]).parent.glob(f"*.{first._roster.token}"))


def test_what_a_dead_worker_held_is_taken_over_and_its_late_answer_is_refused(
    any_url: str, opened: Open
) -> None:
    dead, heir = opened(any_url), opened(any_url)
    (late,) = page_of(dead).claim([ONE])
    assert page_of(heir).claim([ONE]) == []
    die(dead)
    (claim,) = page_of(heir).claim([ONE])
    assert claim.deaths == 1
    assert not page_of(dead).record(late, answer_of(ONE, 1.0))
    assert page_of(heir).record(claim, answer_of(ONE, 2.0))
    for page in (page_of(dead), page_of(heir)):
        assert page.state().answer(ONE.key) == answer_of(ONE, 2.0)
    assert optuna_states(any_url, "flashgen: workers")[0] is TrialState.FAIL


def optuna_states(url: str, study: str) -> list[TrialState]:
    """What Optuna says itself."""
    if url.startswith("sqlite"):
        storage: Any = optuna.storages.RDBStorage(url)
    else:
        backend = optuna.storages.journal.JournalFileBackend(url.removeprefix("journal://"))
        storage = optuna.storages.JournalStorage(backend)
    return [t.state for t in optuna.load_study(study_name=study, storage=storage).trials]


def test_a_worker_killed_between_answer_and_end_has_answered(url: str, opened: Open) -> None:
    dead, heir = opened(url), opened(url)
    (claim,) = page_of(dead).claim([ONE])
    page_of(dead)._storage.put(claim.trial, "answer", answer_of(ONE).to_json())
    assert page_of(heir).state().answer(ONE.key) is None  # not before it is final
    die(dead)
    assert page_of(heir).claim([ONE]) == []
    assert page_of(heir).state().answer(ONE.key) == answer_of(ONE)
    assert page_of(heir)._storage.trials(page_of(heir)._study)[0].value == 10.0


def test_who_was_only_asleep_comes_back_as_another(any_url: str, opened: Open) -> None:
    sleeper, other = opened(any_url), opened(any_url)
    token = sleeper._roster.token
    (held,) = page_of(sleeper).claim([ONE])
    die(sleeper)
    assert other._roster.living() == [other._roster.token]
    (claim,) = page_of(sleeper).claim([OTHER])
    assert sleeper._roster.token != token
    assert other._roster.living() == [other._roster.token, sleeper._roster.token]
    assert page_of(other).claim([OTHER]) == []
    assert page_of(sleeper).record(claim, answer_of(OTHER))
    assert len(page_of(other).claim([ONE])) == 1
    assert not page_of(sleeper).record(held, answer_of(ONE))


@pytest.mark.parametrize("noticed_by", ["a question", "a beat"])
def test_nobody_is_judged_soon_after_the_storage_was_away(
    sqlite: str, opened: Open, monkeypatch: pytest.MonkeyPatch, noticed_by: str
) -> None:
    """For then nobody could show that it lives."""
    first, second = opened(sqlite), opened(sqlite, pace=replace(PACE, patience_s=60.0))
    storage, trial = second._storage, second._roster._trial
    assert trial is not None
    failures = [StorageInternalError("away")]

    def unsteady(*_: object) -> None:
        if failures:
            raise failures.pop()

    if noticed_by == "a question":
        storage._ask(unsteady)
    else:
        monkeypatch.setattr(storage._raw, "record_heartbeat", unsteady)
        storage.beat(trial)
    die(first)
    assert len(second._roster.living()) == 2
    assert storage.mended is not None
    storage.mended -= PACE.grace_s
    assert len(second._roster.living()) == 1


def test_a_storage_that_comes_back_is_waited_for(
    sqlite: str, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    notices: list[str] = []
    ledger = opened(sqlite, pace=replace(PACE, patience_s=30.0), notice=notices.append)
    (claim,) = page_of(ledger).claim([ONE])
    write, failures = ledger._storage._raw.set_trial_user_attr, [StorageInternalError("x")] * 2

    def unsteady(*arguments: Any) -> None:
        if failures:
            raise failures.pop()
        write(*arguments)

    monkeypatch.setattr(ledger._storage._raw, "set_trial_user_attr", unsteady)
    assert page_of(ledger).record(claim, answer_of(ONE))
    assert len(notices) == 1
    assert "does not answer (x); trying for 30 s" in notices[0]


def test_a_storage_that_stays_away_is_one_sentence(
    sqlite: str, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = opened(sqlite)

    def away(*_: Any, **__: Any) -> None:
        raise StorageInternalError("An exception") from OSError("server closed\nthe connection")

    monkeypatch.setattr(ledger._storage._raw, "_get_trials", away)
    with pytest.raises(StorageError, match=r"run\.db does not answer \(server closed\).* log") as e:
        page_of(ledger).claim([ONE])
    assert "\n" not in str(e.value)


def test_a_full_disk_under_a_journal_is_one_sentence(
    tmp_path: Path, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = opened(journal(tmp_path))
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(StorageError, match=r"No space left.*free some space.* log"):
            page_of(ledger).claim([ONE])
    assert len(page_of(ledger).claim([OTHER])) == 1


def full(*_: object) -> None:
    raise OSError(28, os.strerror(28))


def test_a_study_that_somebody_deletes_is_one_sentence(sqlite: str, opened: Open) -> None:
    page = page_of(opened(sqlite))
    optuna.delete_study(study_name=page._study.study_name, storage=sqlite)
    with pytest.raises(StorageError, match="leave its studies alone"):
        page.claim([ONE])


def test_nobody_listens(tmp_path: Path) -> None:
    url = f"postgresql://anna:sec%20ret@127.0.0.1:{free_port()}/flash"
    with pytest.raises(StorageError, match=r"Connection refused.*see that it runs") as caught:
        Ledger(url, gpu="g", request={}, pace=PACE)
    assert "postgresql+psycopg://anna@127.0.0.1" in str(caught.value)
    assert_secret(caught.value)


def assert_secret(error: BaseException) -> None:
    """One sentence, without what must not be seen; nor is there any below it."""
    assert "\n" not in str(error)
    assert error.__context__ is None or error.__suppress_context__
    for word in ("sec ret", "sec%20ret", "s3cret"):
        assert word not in str(error)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("flash", "got one of another kind"),
        ("postgresql://bob:hun@ter2@localhost/db", "must be escaped"),
        ("postgresql://bob:p@ss/word@localhost/db", "must be escaped"),
        ("mysql://anna:s3cret@db/flash", "got one of mysql"),
        ("redis://:s3cret@db", "got one of redis"),
        ("postgresql+psycopg2://anna:s3cret@db/flash", "got one of postgresql.psycopg2"),
        ("postgresql://anna:s3cret@db:port/flash", "escaped as in URLs"),
    ],
)
def test_other_urls_are_refused(url: str, said: str) -> None:
    with pytest.raises(InvalidArgument, match=f"--storage must be like .*{said}") as caught:
        Ledger(url, gpu="g", request={})
    assert_secret(caught.value)


def test_without_psycopg_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(ToolchainError, match=r"psycopg: pip install .*\[distributed\]") as e:
        Ledger("postgresql+psycopg://anna:s3cret@db/flash", gpu="g", request={})
    assert_secret(e.value)


@pytest.mark.parametrize("version", ["v9.9.9", "v2.6.0.a"], ids=["newer", "older"])
def test_tables_of_another_optuna(tmp_path: Path, sqlite: str, opened: Open, version: str) -> None:
    opened(sqlite).close()
    with sqlite3.connect(tmp_path / "run.db") as database:
        database.execute("UPDATE alembic_version SET version_num = ?", (version,))
    with pytest.raises(StorageError, match=r"tables of another Optuna.*optuna storage upgrade"):
        opened(sqlite)


@pytest.mark.parametrize(
    ("content", "name"),
    [
        (b"no journal\n", "garbage"),
        (b'{"op_code":99,"worker_id":"x"}\n', "a newer Optuna's"),
        (b'{"spec":1}\n', "a log of outcomes"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_file_that_is_no_journal_is_left_as_it_is(
    tmp_path: Path, opened: Open, content: bytes, name: str
) -> None:
    file = tmp_path / "run.journal"
    file.write_bytes(content)
    with pytest.raises(StorageError, match=r"run\.journal is no journal that Optuna .* can read"):
        opened(str(file))
    assert file.read_bytes() == content


@pytest.mark.parametrize("scheme", ["journal://", "sqlite:///"])
def test_a_folder_that_is_not_there_is_one_sentence(
    tmp_path: Path, opened: Open, scheme: str
) -> None:
    with pytest.raises(StorageError, match="in a folder that is there and can be written"):
        opened(f"{scheme}{tmp_path}/none/run.log")


def test_a_torn_record_of_a_journal_is_cut_off(tmp_path: Path, opened: Open) -> None:
    """Else the next one would stand on the same line, and nobody could read on."""
    first = page_of(opened(journal(tmp_path)))
    assert first.claim([ONE])
    with (tmp_path / "run.journal").open("ab") as file:
        file.write(b'{"op_code":8,"trial_id":0,"user_attr":{"answ')
    assert first.claim([OTHER])
    assert len(page_of(opened(journal(tmp_path))).state().held) == 2


def test_a_writer_killed_with_the_journals_lock_keeps_nobody_waiting(tmp_path: Path) -> None:
    path = tmp_path / "run.journal"
    pid = os.fork()
    if not pid:
        JournalLock(path).acquire()
        os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    lock = JournalLock(path)
    assert lock.acquire()
    lock.release()


HEIRLESS = """
import os, pathlib, signal, subprocess, sys
from flashgen.tune.shared import Ledger
from flashgen.search.log import Log
folder, url = pathlib.Path(sys.argv[1]), sys.argv[2]
ledger = Ledger(url, gpu="nvidia_h200", request={"triton": "3.7.1", "seed": 0})
log = Log(folder / "log.jsonl", gpu="nvidia_h200", triton="3.7.1", shared=ledger.id)
quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
child = subprocess.Popen(["sleep", "100"], close_fds=False, **quiet)
print(child.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_child_that_outlives_its_worker_keeps_none_of_its_locks(
    tmp_path: Path, opened: Open
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", HEIRLESS, tmp_path, journal(tmp_path)],
        capture_output=True, text=True, cwd=ROOT, check=False,
    )  # fmt: skip
    child = int(done.stdout)
    try:
        assert Path(f"/proc/{child}").exists()
        assert len(opened(journal(tmp_path))._roster.living()) == 1
        Log(tmp_path / "log.jsonl", gpu="nvidia_h200", triton="3.7.1").close()
    finally:
        os.kill(child, signal.SIGKILL)


def test_the_answers_of_a_run_are_there_when_all_have_left(url: str, opened: Open) -> None:
    with opened(url) as first:
        (claim,) = page_of(first).claim([ONE])
        page_of(first).record(claim, answer_of(ONE))
    assert page_of(opened(url)).state().answer(ONE.key) == answer_of(ONE)


def test_an_answer_reads_back_as_it_was_written() -> None:
    made = replace(answer_of(ONE), conditions={"power_w": 640.5})
    assert Answer.from_json(made.to_json()) == made
    assert isinstance(made.outcomes[0], Outcome)


def test_stages_of_a_search_share_a_study_and_not_their_answers(url: str, opened: Open) -> None:
    ledger = opened(url)
    rough, timed = (
        ledger.page(stage, searches.SPEC, searches.PROBLEM) for stage in ("rough", "timed")
    )  # type: ignore[arg-type]
    (claim,) = rough.claim([ONE])
    assert len(timed.claim([ONE])) == 1  # held in the other stage alone
    assert rough.record(claim, answer_of(ONE, 3.0))
    assert rough.state().answer(ONE.key) == answer_of(ONE, 3.0)
    assert timed.state().answer(ONE.key) is None
    assert rough._study.study_name == timed._study.study_name
