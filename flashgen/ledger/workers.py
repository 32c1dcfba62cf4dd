"""Roster: which workers of a run live. Each is a running trial of one study, and so seen by all.

How it is known that one is dead, and how soon:

  - In a database a living worker writes a sign of life every Pace.beat_s (Optuna's heartbeat); one
    that has written none for Pace.grace_s by the database's own clock is dead.
  - At a journal a living worker holds a lock of a file beside it; where the lock is free, its
    process is gone: that is seen at the next look, whatever ended it.

The dead one's trial is ended by whoever sees it first. It never runs again: a worker that was only
asleep comes back as another, and what it held is no longer its own.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import threading
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

from flashgen.ledger.storage import Storage

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial


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
        """Be one of the living, under a new token."""
        self.leave()
        self.token = uuid.uuid4().hex
        if self._storage.journal is not None:
            path = self._lock_of(self.token)
            self._lock = path, os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
            fcntl.flock(self._lock[1], fcntl.LOCK_EX)
        card = {"worker": self.token, "host": socket.gethostname(), "process": os.getpid()}
        self._storage.add(self._study, self._states.RUNNING, card)
        # Where an answer of the storage was lost, it was asked again: there may be two.
        self._trial, *more = (t for t in self._running() if t.user_attrs["worker"] == self.token)
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
        """The tokens of the living, in the order in which they joined; this process is one.

        What this process held is lost where the others took it for dead: then it joins again.
        """
        if self._storage.beats:
            self._storage.fail_stale(self._study)
        else:
            for trial in self._running():
                if self._has_ended(trial.user_attrs["worker"]):
                    self._storage.finish(trial, self._states.FAIL)
        tokens = [trial.user_attrs["worker"] for trial in self._running()]
        if self.token not in tokens:
            self.join()
            tokens.append(self.token)
        return tokens

    def leave(self) -> None:
        """Be none of them any more: what this process holds may be taken at once."""
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

    def _lock_of(self, token: str) -> Path:
        assert self._storage.journal is not None
        return self._storage.journal.with_name(f"{self._storage.journal.name}.{token}")

    def _has_ended(self, token: str) -> bool:
        """Whether nobody holds the lock of a worker; its file is gone then."""
        if token == self.token:
            return False
        path = self._lock_of(token)
        try:
            descriptor = os.open(path, os.O_RDWR)
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
        """A thread's life: show that this worker lives, until it leaves."""
        while not over.wait(self._storage.pace.beat_s):
            self._storage.beat(trial)
        with contextlib.suppress(Exception):  # its connection closes with the process at the latest
            self._storage.end_thread()
