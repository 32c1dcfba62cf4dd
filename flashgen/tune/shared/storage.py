"""Optuna storages named by a URL, with retries, and errors of one sentence.

    postgresql+psycopg://USER@HOST/DATABASE     for many machines; libpq reads PGPASSWORD
    journal:///PATH, PATH.journal or PATH.log   a file, for the processes of one host
    sqlite:///PATH                              a file, for one host, slower than a journal

No message shows a password. A request without an answer is repeated for Pace.patience_s, so that a
database may restart, or its network come back, in the middle of a run. JournalLock keeps the
writers of a journal apart and its records whole.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import random
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from flashgen.errors import FlashgenError, InvalidArgument, ToolchainError
from flashgen.files import open_own
from flashgen.paths import install_command
from flashgen.spec.records import parsed, value_of

if TYPE_CHECKING:
    from optuna import Study
    from optuna.storages import BaseStorage
    from optuna.trial import FrozenTrial, TrialState
    from sqlalchemy.engine import URL


def journal_path(url: str) -> Path | None:
    """The file that a URL names as a journal; None if it names a database."""
    if url.startswith("journal:"):
        path = url.removeprefix("journal:")
        return Path(path.removeprefix("//") or ".")
    if "://" not in url and url.endswith((".journal", ".log")):
        return Path(url)
    return None


def parsed_url(url: str) -> URL:
    """The URL of a supported database. Raises InvalidArgument, which shows nothing secret."""
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import ArgumentError

    known = "postgresql+psycopg://USER@HOST/DATABASE, journal:///PATH or sqlite:///PATH"
    scheme = url.partition("://")[0] if "://" in url else "another kind"
    try:
        read = make_url(url)
    except (ArgumentError, ValueError):
        read = None
    # An unescaped @ ends the password too early: its rest would be shown as a part of the host.
    torn = read and read.drivername != "sqlite" and "@" in f"{read.host}{read.database}"
    if read is None or torn:
        raise InvalidArgument(
            f"--storage must be like {known}: got one of {scheme} that cannot be read; "
            f"a password's signs must be escaped as in URLs, or be in PGPASSWORD"
        )
    if read.drivername in ("postgres", "postgresql"):
        return read.set(drivername="postgresql+psycopg")
    if read.drivername not in ("postgresql+psycopg", "sqlite"):
        raise InvalidArgument(f"--storage must be like {known}: got one of {scheme}")
    return read


def shown_url(url: URL) -> str:
    """The URL without password and options, which may hold one."""
    return url.create(
        url.drivername, url.username, None, url.host, url.port, url.database
    ).render_as_string()


def secrets_of(url: URL) -> tuple[str, ...]:
    """All strings that no message may contain."""
    options = [value for name, value in url.query.items() if "pass" in name]
    texts = [url.password, *options]
    return tuple(text for text in texts if isinstance(text, str) and text)


class JournalLock:
    """Serializes writers of a journal: a lock of the file itself, which ends with its holder.

    Optuna's own outlives a killed holder by 30 s. A record torn by a kill is cut off before the
    next is written: Optuna could not read past it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = -1

    def acquire(self) -> bool:
        """Wait for the lock. Raises OSError."""
        self._file = open_own(self._path)
        fcntl.flock(self._file, fcntl.LOCK_EX)
        whole = _end_of_records(self._file)
        if whole < os.fstat(self._file).st_size:
            os.ftruncate(self._file, whole)
        return True

    def release(self) -> None:
        """Release the lock."""
        os.close(self._file)


def _end_of_records(file: int) -> int:
    """The number of bytes of a file up to and including its last line break."""
    end = os.fstat(file).st_size
    while end > 0:
        start = max(0, end - 65536)
        at = os.pread(file, end - start, start).rfind(b"\n")
        if at >= 0:
            return start + at + 1
        end = start
    return 0


def demand_journal(path: Path) -> None:
    """Check that a file starts as a journal, or create it empty: no other file may be written to,
    nor one that a symbolic link leads to. Raises OSError, ValueError.
    """
    with os.fdopen(open_own(path), "rb") as file:
        first = file.readline()
    if first:
        record = value_of(dict[str, Any], parsed(first), "line 1")
        value_of(int, record.get("op_code"), "op_code")


Notice = Callable[[str], None]
T = TypeVar("T")

CONNECT_LIMIT_S = 10


def retry(
    do: Callable[[], T],
    is_transient: Callable[[Exception], bool],
    waits: Iterable[float],
    on_failure: Callable[[Exception], None] = lambda _: None,
) -> T:
    """The result of `do`. After a transient error it is called again, `waits` seconds later.

    Raises the error of the last call, and errors that are not transient.
    """
    for wait_s in waits:
        try:
            return do()
        except Exception as error:
            if not is_transient(error):
                raise
            on_failure(error)
        time.sleep(wait_s)
    return do()


def backoff(limit_s: float) -> Iterator[float]:
    """Waits that double, from 0.1 to 5 seconds, until `limit_s` seconds have passed."""
    begun, wait_s = time.monotonic(), 0.1
    while time.monotonic() - begun < limit_s:
        yield wait_s
        wait_s = min(2 * wait_s, 5.0)


OPENINGS = 8
"""Attempts to create the tables: workers that start together on an empty database collide."""

# Seconds until libpq gives up a server that went away without a word; TCP alone would wait hours.
SILENCE_LIMITS = {"keepalives_idle": 10, "keepalives_interval": 5, "keepalives_count": 3}
TCP_TIMEOUT_MS = 25_000


class StorageError(FlashgenError, RuntimeError):
    """A storage that cannot be used or was lost; this worker's outcomes are in its log."""


@dataclass(frozen=True, kw_only=True)
class Pace:
    """Seconds: between two heartbeats of a worker; without one, until it counts as dead; of
    retrying a storage that does not answer; at most, between two looks at the work of others.
    """

    beat_s: int = 5
    grace_s: int = 30
    patience_s: float = 120.0
    look_s: float = 0.5


class Storage:
    """The Optuna storage of `url`. `shown` is the URL without secrets.

    Methods raise StorageError. One thread at a time may use it; one more may call beat() at the
    same time.
    """

    def __init__(self, url: str, pace: Pace, notice: Notice) -> None:
        self.pace = pace
        self.journal = journal_path(url)
        self._notice = notice
        self._optuna = _optuna()
        self._secrets: tuple[str, ...] = ()
        self._away = False
        self.mended: float | None = None  # when it last became available, by time.monotonic()
        if self.journal is not None:
            self.shown = str(self.journal)
            self._raw: BaseStorage = self._open_journal(self.journal)
        else:
            parsed = parsed_url(url)
            self.shown = shown_url(parsed)
            self._secrets = secrets_of(parsed)
            self._raw = self._open_database(parsed)

    def study(self, name: str) -> Study:
        """The study of this name, created if necessary. Its trials are minimized."""
        made: Study = self._ask(
            lambda: self._optuna.create_study(
                storage=self._raw, study_name=name, direction="minimize", load_if_exists=True
            )
        )
        return made

    def timed_study(self, name: str) -> Study:
        """As study(); the dashboard names its values as microseconds."""
        study = self.study(name)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", self._optuna.exceptions.ExperimentalWarning)
            if self._ask(lambda: study.metric_names) is None:
                self._ask(lambda: study.set_metric_names(["time, us"]))
        return study

    def note(self, study: Study, name: str, value: Any) -> None:
        """Set an attribute of a study, for inspection by people."""
        self._ask(lambda: study.set_user_attr(name, value))

    def trials(self, study: Study) -> list[FrozenTrial]:
        """All trials of a study in the order of their numbers. Do not change them."""
        return self._ask(lambda: study.get_trials(deepcopy=False))

    def add(
        self,
        study: Study,
        state: TrialState,
        attributes: Mapping[str, Any],
        params: Mapping[str, Any] | None = None,
        distributions: Mapping[str, Any] | None = None,
    ) -> None:
        """Add a trial. Trials added concurrently get different numbers, and a trial is visible to
        all before any with a higher number is.

        After a lost reply it may exist twice.
        """
        trial = self._optuna.trial.create_trial(
            state=state,
            params=dict(params or {}),
            distributions=dict(distributions or {}),
            user_attrs=dict(attributes),
        )
        self._ask(lambda: study.add_trial(trial))

    def said(self, trial: FrozenTrial, name: str, kind: Any = str) -> Any:
        """The attribute of a trial, of this type. Raises StorageError if it has no such one."""
        try:
            return value_of(kind, trial.user_attrs.get(name), name)
        except (ValueError, AttributeError) as error:
            raise self.spoiled(error) from None

    def put(self, trial: FrozenTrial, name: str, value: Any) -> bool:
        """Set an attribute of a running trial; False if it no longer runs."""
        return self._unless_finished(
            lambda: self._raw.set_trial_user_attr(trial._trial_id, name, value)
        )

    def finish(self, trial: FrozenTrial, state: TrialState, value: float | None = None) -> bool:
        """End a running trial; False if it no longer runs. Of two callers, one gets True."""
        values = None if value is None else [value]
        return self._unless_finished(
            lambda: self._raw.set_trial_state_values(trial._trial_id, state, values)
        )

    @property
    def beats(self) -> bool:
        """Whether workers write heartbeats with beat(); a journal's hold a lock instead."""
        return self.journal is None

    def beat(self, trial: FrozenTrial) -> None:
        """Write a heartbeat for the worker of this running trial. If that fails, a later one
        follows.
        """
        try:
            self._raw.record_heartbeat(trial._trial_id)  # type: ignore[attr-defined]
        except self._losses():
            self._away = True
        else:
            self._answered()

    def end_thread(self) -> None:
        """Call this last in a thread that called beat()."""
        if self.beats:
            self._raw.remove_session()

    def fail_stale(self, study: Study) -> None:
        """End the running trials of workers without a heartbeat for Pace.grace_s.

        Not soon after the storage itself was unavailable: then nobody could write one.
        """
        if self._away:
            self.trials(study)  # this records when it became available
        if self.mended is not None and time.monotonic() - self.mended < self.pace.grace_s:
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", self._optuna.exceptions.ExperimentalWarning)
            self._ask(lambda: self._optuna.storages.fail_stale_trials(study))

    def close(self) -> None:
        """Close the connections. May be called again."""
        self.end_thread()
        if self.beats:
            self._raw.engine.dispose()  # type: ignore[attr-defined]

    @contextlib.contextmanager
    def hurried(self) -> Iterator[None]:
        """Context without retries: the worker is about to end."""
        pace, self.pace = self.pace, Pace(patience_s=0.0)
        try:
            yield
        finally:
            self.pace = pace

    def _unless_finished(self, do: Callable[[], object]) -> bool:
        """Whether `do` found the trial running: if not, Optuna raises RuntimeError or a
        subclass.
        """
        try:
            self._ask(do)
        except StorageError:
            raise
        except RuntimeError:
            return False
        return True

    def _ask(self, do: Callable[[], T]) -> T:
        """The result of `do`, retried while the storage is unavailable, until patience ends."""
        begun, patience = time.monotonic(), self.pace.patience_s
        losses = self._losses()

        def lost(error: Exception) -> None:
            if not self._away:
                reason = self._reason(error)
                self._notice(f"{self.shown} does not answer ({reason}); trying for {patience:g} s")
            self._away = True

        try:
            answer = retry(do, lambda error: isinstance(error, losses), backoff(patience), lost)
        except losses as error:
            raise StorageError(
                f"{self.shown} does not answer ({self._reason(error)}), asked for "
                f"{time.monotonic() - begun:.0f} s: see that it runs; {_KEPT}"
            ) from None
        except OSError as error:
            raise StorageError(
                f"{self.shown} cannot be used ({error.strerror}): free some space there, or "
                f"make it readable and writable; {_KEPT}"
            ) from None
        except RuntimeError as error:
            if not isinstance(error, RecursionError):
                raise  # Optuna says so of a trial that has ended
            raise self.spoiled(error) from None
        except Exception as error:  # a journal is read again and again: any error of its reader
            raise self.spoiled(error) from None
        self._answered()
        return answer

    def spoiled(self, error: Exception) -> StorageError:
        """The error for contents that no worker of this run wrote."""
        return StorageError(
            f"{self.shown} is not as this run left it "
            f"({type(error).__name__}: {_first_line(error)}): leave its studies alone "
            f"while the run lasts, or begin with an empty storage; {_KEPT}"
        )

    def _answered(self) -> None:
        if self._away:
            self._away, self.mended = False, time.monotonic()

    def _losses(self) -> tuple[type[Exception], ...]:
        """The exceptions of Optuna if a database does not answer."""
        if not self.beats:
            return ()
        from sqlalchemy.exc import SQLAlchemyError

        return (self._optuna.exceptions.StorageInternalError, SQLAlchemyError)

    def _reason(self, error: BaseException) -> str:
        """The error of the database's driver, in one line and without secrets."""
        said: BaseException = error
        while said.__cause__ is not None:
            said = said.__cause__
        text = _first_line(getattr(said, "orig", None) or said)
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text

    def _open_journal(self, path: Path) -> BaseStorage:
        journal = self._optuna.storages.journal
        try:
            demand_journal(path)
            backend = journal.JournalFileBackend(str(path), lock_obj=JournalLock(path))
            opened: BaseStorage = self._optuna.storages.JournalStorage(backend)
        except OSError as error:
            raise StorageError(
                f"{path} cannot be opened as a journal ({error.strerror}): name a file, "
                f"not a link, in a folder that is there and can be written"
            ) from None
        except Exception as error:  # any error of a reader of foreign records
            raise StorageError(
                f"{path} is no journal that Optuna {self._optuna.__version__} can read "
                f"({type(error).__name__}): name another file, or have the same Optuna everywhere"
            ) from None
        return opened

    def _open_database(self, url: URL) -> BaseStorage:
        from sqlalchemy.exc import OperationalError

        def refused(error: Exception) -> bool:
            said = self._reason(error)
            return isinstance(error, OperationalError) or "permission denied" in said

        def collided(error: Exception) -> bool:
            said = self._reason(error)
            if not isinstance(error, self._losses()):
                return False
            return "already exists" in said or "locked" in said or not refused(error)

        waits = (random.uniform(0.05, 0.4) for _ in range(OPENINGS - 1))
        try:
            return retry(lambda: self._database(url), collided, waits)
        except ImportError:
            raise ToolchainError(
                f"--storage {self.shown} needs the package psycopg: "
                + install_command("distributed")
            ) from None
        except self._losses() as error:
            raise StorageError(self._refused(self._reason(error), url)) from None
        except RuntimeError:  # Optuna's check of its tables
            raise StorageError(self._foreign()) from None

    def _database(self, url: URL) -> BaseStorage:
        limits: dict[str, Any] = {"timeout": CONNECT_LIMIT_S}
        if url.get_backend_name() == "postgresql":
            limits = {"connect_timeout": CONNECT_LIMIT_S, "tcp_user_timeout": TCP_TIMEOUT_MS}
            limits |= SILENCE_LIMITS
        # Optuna fills in {SCHEMA_VERSION}: braces of a password are not meant.
        text = url.render_as_string(hide_password=False).replace("{", "{{").replace("}", "}}")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", self._optuna.exceptions.ExperimentalWarning)
            opened: BaseStorage = self._optuna.storages.RDBStorage(
                text,
                engine_kwargs={"pool_pre_ping": True, "connect_args": limits},
                heartbeat_interval=self.pace.beat_s,
                grace_period=self.pace.grace_s,
            )
        return opened

    def _refused(self, reason: str, url: URL) -> str:
        """The error message for a database that cannot be opened."""
        if url.get_backend_name() == "sqlite":
            remedy = "name a file in a folder that is there and can be written"
        elif "password" in reason:
            remedy = f"set PGPASSWORD or ~/.pgpass to the password of {url.username}"
        elif "database" in reason and "does not exist" in reason:
            remedy = f"create it (createdb {url.database}), or correct the name in --storage"
        elif "permission denied" in reason:
            remedy = f"give {url.username} a database of its own, or the right to make tables in it"
        else:
            remedy = "see that it runs, and that host, port, user and database are right"
        return f"the storage {self.shown} cannot be used ({reason}): {remedy}"

    def _foreign(self) -> str:
        """The error message for tables that another Optuna version made."""
        return (
            f"the storage {self.shown} has tables of another Optuna, not those of "
            f"{self._optuna.__version__}: install on all workers the Optuna that made them, "
            f"bring them up to date with optuna storage upgrade, or name an empty database"
        )


_KEPT = "the results of this worker are in its log, and the same command resumes from there"


def _first_line(error: object) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].strip()[:300] if lines else type(error).__name__


def _optuna() -> Any:
    """Optuna with logging off. Raises ToolchainError if it is not installed."""
    try:
        import optuna
    except ImportError:
        raise ToolchainError(f"--storage needs optuna: {install_command('tune')}") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    logging.getLogger("alembic").setLevel(logging.WARNING)
    return optuna
