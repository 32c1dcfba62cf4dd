"""A run that several workers share: what they agree on, and which of them are alive.

Each worker is a running trial of one study. A dead worker is noticed as follows:

  - In a database, a worker writes a heartbeat every Pace.beat_s. One that has written none for
    Pace.grace_s, by the database's own clock, is dead.
  - With a journal, a worker holds a lock on a file next to it. If the lock is free, its process
    has ended.

The first to notice a dead worker ends its trial, which never runs again. A worker that was only
suspended returns as a new one without its old claims.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import re
import socket
import threading
import time
import uuid
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import flashgen
from flashgen.errors import FlashgenError
from flashgen.files import open_own
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.outcome import Stage
from flashgen.spec.problem import Problem
from flashgen.tune.shared.claims import Page, fields_of_configs
from flashgen.tune.shared.storage import Notice, Pace, Storage, StorageError

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial


_logger = logging.getLogger(__name__)

SHORT = 60
"""Characters of a request's value that an error still shows."""


class Roster:
    """The workers of one run. join() makes this process one of them, leave() ends that."""

    def __init__(self, storage: Storage, name: str) -> None:
        from optuna.trial import TrialState

        self._states = TrialState
        self._storage = storage
        self._study = storage.study(name)
        self._trial: FrozenTrial | None = None
        self._lock: tuple[Path, int] | None = None
        self._beating: threading.Event | None = None
        self.token = ""

    def join(self) -> None:
        """Register this worker under a new token."""
        self.leave()
        self.token = uuid.uuid4().hex
        if self._storage.journal is not None:
            path = self._lock_of(self.token)
            self._lock = path, open_own(path)
            fcntl.flock(self._lock[1], fcntl.LOCK_EX)
        card = {"worker": self.token, "host": socket.gethostname(), "process": os.getpid()}
        self._storage.add(self._study, self._states.RUNNING, card)
        # If a reply of the storage was lost, the request was repeated: there may be two.
        self._trial, *more = (t for t in self._running() if self._token(t) == self.token)
        for trial in more:
            self._storage.finish(trial, self._states.FAIL)
        if self._storage.beats:
            self._storage.beat(self._trial)
            self._beating = threading.Event()
            thread = threading.Thread(
                target=self._beat, args=(self._trial, self._beating), daemon=True
            )
            thread.start()

    def living(self) -> list[str]:
        """The tokens of the living workers in the order in which they joined, including this one.

        If the others took this process for dead, it has lost its claims and joins again.
        """
        if self._storage.beats:
            self._storage.fail_stale(self._study)
        else:
            for trial in self._running():
                if self._has_ended(self._token(trial)):
                    self._storage.finish(trial, self._states.FAIL)
        tokens = list(map(self._token, self._running()))
        if self.token not in tokens:
            self.join()
            tokens.append(self.token)
        return tokens

    def leave(self) -> None:
        """Deregister this worker; its claims become free."""
        if self._beating is not None:
            self._beating.set()
            self._beating = None
        if self._trial is not None:
            trial, self._trial = self._trial, None
            self._storage.finish(trial, self._states.PRUNED)
        if self._lock is not None:
            path, descriptor = self._lock
            self._lock = None
            path.unlink(missing_ok=True)
            os.close(descriptor)

    def _running(self) -> list[FrozenTrial]:
        trials = self._storage.trials(self._study)
        return [trial for trial in trials if trial.state is self._states.RUNNING]

    def _token(self, trial: FrozenTrial) -> str:
        """The token of a worker, which names its lock."""
        token = str(self._storage.said(trial, "worker"))
        if not re.fullmatch(r"[0-9a-f]{32}", token):
            raise self._storage.spoiled(ValueError(f"a worker is called {token[:SHORT]!r}"))
        return token

    def _lock_of(self, token: str) -> Path:
        assert self._storage.journal is not None
        return self._storage.journal.with_name(f"{self._storage.journal.name}.{token}")

    def _has_ended(self, token: str) -> bool:
        """Whether nobody holds the lock of a worker; its file is deleted then."""
        if token == self.token:
            return False
        path = self._lock_of(token)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
        except FileNotFoundError:
            return True
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        else:
            path.unlink(missing_ok=True)
            return True
        finally:
            os.close(descriptor)

    def _beat(self, trial: FrozenTrial, over: threading.Event) -> None:
        """The loop of a thread: write heartbeats until this worker leaves."""
        while not over.wait(self._storage.pace.beat_s):
            self._storage.beat(trial)
        with contextlib.suppress(Exception):  # its connection closes with the process at the latest
            self._storage.end_thread()


class Ledger:
    """A run that workers share at `url`; a context manager, or call close().

    request is all that must be equal on all workers, as JSON, in addition to `gpu`, the slug. study
    is the run's name: a storage can hold several. Raises StorageError, ToolchainError and
    InvalidArgument if the storage cannot be used, and FlashgenError if its run has another request.
    """

    def __init__(
        self,
        url: str,
        *,
        gpu: str,
        request: Mapping[str, Any],
        study: str = "flashgen",
        pace: Pace | None = None,
        notice: Notice = _logger.warning,
    ) -> None:
        self.pace = pace or Pace()
        self._notice = notice
        self._name = study
        self._storage = Storage(url, self.pace, notice)
        self._agreed: dict[str, Any] = {}
        self._pages: dict[tuple[Stage, AttentionSpec, Problem], Page] = {}
        self._living: tuple[float, list[str]] = (0.0, [])
        self._run = self._storage.study(f"{study}: run")
        self._demand({"gpu": gpu, "flashgen": flashgen.__version__, **request})
        self.id = str(self.agree("id", uuid.uuid4().hex))
        self._roster = Roster(self._storage, f"{study}: workers")
        self._roster.join()

    @property
    def shown(self) -> str:
        """The storage for messages: without a password."""
        return self._storage.shown

    def agree(self, name: str, value: Any) -> Any:
        """The value of `name` on which all workers agree, as JSON: `value`, if this one is the
        first.
        """
        if name not in self._agreed:
            from optuna.trial import TrialState

            said = self._said(name)
            if not said:
                self._storage.add(self._run, TrialState.PRUNED, {"name": name, "value": value})
                said = self._said(name)
                self._storage.note(self._run, name, said[0])
            self._agreed[name] = said[0]
        return self._agreed[name]

    def page(self, stage: Stage, spec: AttentionSpec, problem: Problem) -> Page:
        """The page of one stage of one search."""
        key = stage, spec, problem
        if key not in self._pages:
            p = problem
            sizes = f"b{p.batch} h{p.heads}/{p.kv_heads} q{p.seq_q} k{p.seq_k}"
            study = self._storage.timed_study(f"{self._name}: {spec.name} {sizes}")
            self._pages[key] = Page(self._storage, study, stage, self._alive)
        return self._pages[key]

    def close(self) -> None:
        """Leave: the claims of this worker become free. May be called again."""
        with self._storage.hurried():
            with contextlib.suppress(StorageError):  # otherwise the others notice it a little later
                self._roster.leave()
            self._storage.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _said(self, name: str) -> list[Any]:
        trials = self._storage.trials(self._run)
        named = [t for t in trials if self._storage.said(t, "name") == name]
        return [trial.user_attrs.get("value") for trial in named]

    def spoiled(self, error: Exception) -> StorageError:
        """As Storage.spoiled."""
        return self._storage.spoiled(error)

    def _demand(self, request: Mapping[str, Any]) -> None:
        """Make sure that the run in the storage is this one. Raises FlashgenError."""
        here = json.loads(json.dumps({**request, "configs": fields_of_configs()}))
        there = self.agree("request", here)
        if not isinstance(there, dict):
            raise self.spoiled(ValueError("its request must be an object"))
        for name in [*here, *there]:
            if here.get(name) != there.get(name):
                raise FlashgenError(
                    f"{self.shown} holds a run of another {name}{_both(there, here, name)}: "
                    f"all workers of a run must have the same; "
                    f"start this one like them, or give it a storage of its own"
                )

    def _alive(self, owners: Collection[str]) -> tuple[list[str], str]:
        """The tokens of the living workers and of this one.

        `owners` were read before this is called, so an owner that is not among them is dead.
        """
        seen, living = self._living
        late = time.monotonic() - seen > self.pace.look_s
        if late or not {*owners, self._roster.token} <= set(living):
            living = self._roster.living()
            self._living = time.monotonic(), living
        return living, self._roster.token


def _both(there: Mapping[str, Any], here: Mapping[str, Any], name: str) -> str:
    """Both differing values, if they are short enough to be read."""
    texts = [json.dumps(request.get(name)).strip('"') for request in (there, here)]
    return "" if max(map(len, texts)) > SHORT else f" ({texts[0]} there, {texts[1]} here)"
