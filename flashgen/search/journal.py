"""The journal of a run's studies: Optuna's JournalStorage in a file, as its dashboard reads it.

One process writes it, so nothing is locked. A kill tears the last batch of records at most, which
is cut off when the file is opened again. Records survive a kill as they are written, and a power
cut as far as the disk had them: outcomes are in the log, so what a journal lost is not evaluated
again.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from optuna.storages import JournalStorage
from optuna.storages.journal import BaseJournalBackend

from flashgen.files import append_whole, disk_errors, open_own, records_of

GOES_ON = " \n"
"""Ends a line whose batch goes on. JSON allows the space, so Optuna reads such a file."""


class JournalFile(BaseJournalBackend):
    """The records of a file, which are read once, and those that are appended since."""

    def __init__(self, descriptor: int, path: Path, notice: Callable[[str], None]) -> None:
        self._file = descriptor
        self._path = path
        lines = list(records_of(descriptor, path, notice))
        while lines and lines[-1].endswith(GOES_ON.encode()):
            os.ftruncate(descriptor, os.fstat(descriptor).st_size - len(lines.pop()))
        self._logs = [json.loads(line) for line in lines]
        self._lock = threading.Lock()
        self._waiting: list[str] = []
        self._batches = 0

    def read_logs(self, log_number_from: int) -> list[dict[str, Any]]:
        """As BaseJournalBackend.read_logs."""
        return self._logs[log_number_from:]

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """As BaseJournalBackend.append_logs. Raises FlashgenError if the disk cannot be written;
        the file is as it was then, and the next call writes what waits, too.
        """
        with self._lock:
            lines = [json.dumps(each, separators=(",", ":")) for each in logs]
            self._waiting += lines
            self._logs += map(json.loads, lines)  # before: else numbers of trials would differ
            self._write()

    @contextlib.contextmanager
    def batch(self) -> Iterator[None]:
        """Write the records of a trial together, so that a kill leaves all of them or none. Those
        of other threads wait with them: their order is what numbers trials.
        """
        with self._lock:
            self._batches += 1
        try:
            yield
        finally:
            with self._lock:
                self._batches -= 1
                self._write()

    def _write(self) -> None:
        """Write what waits, unless a batch is under way."""
        if self._waiting and not self._batches:
            with disk_errors(self._path):
                content = GOES_ON.join(self._waiting) + "\n"
                append_whole(self._file, content.encode(), durable=False)
            self._waiting.clear()


class Journal(JournalStorage):
    """The storage in a JournalFile. batch: as JournalFile.batch."""

    def __init__(self, file: JournalFile) -> None:
        super().__init__(file)
        self.batch = file.batch


@contextlib.contextmanager
def opened(path: Path, notice: Callable[[str], None], *, resumed: bool) -> Iterator[Journal]:
    """The storage of a journal, begun anew unless the run is resumed. Raises FlashgenError if the
    disk cannot be written.
    """
    if not resumed:
        path.unlink(missing_ok=True)
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = open_own(path, os.O_RDWR | os.O_APPEND)
    try:
        try:
            storage = Journal(JournalFile(descriptor, path, notice))
        except (ValueError, KeyError, TypeError) as error:
            notice(f"{path} is no journal of Optuna ({error}): it is begun anew, from the log")
            os.ftruncate(descriptor, 0)
            storage = Journal(JournalFile(descriptor, path, notice))
        yield storage
    finally:
        os.close(descriptor)
