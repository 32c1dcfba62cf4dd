"""JournalLock: keeps the writers of an Optuna journal apart, and its records whole."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path


class JournalLock:
    """Keeps writers of a journal apart: a lock of the file itself, which ends with its holder.

    The one that Optuna brings outlives a killed holder by 30 s. A record that a kill has torn is
    cut off before the next is written: Optuna could never read past it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = -1

    def acquire(self) -> bool:
        """Wait for the lock. Raises OSError."""
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        fcntl.flock(self._file, fcntl.LOCK_EX)
        whole = _end_of_records(self._file)
        if whole < os.fstat(self._file).st_size:
            os.ftruncate(self._file, whole)
        return True

    def release(self) -> None:
        """Let another writer in."""
        os.close(self._file)


def _end_of_records(file: int) -> int:
    """Bytes of a file up to and with its last line break."""
    end = os.fstat(file).st_size
    while end > 0:
        start = max(0, end - 65536)
        at = os.pread(file, end - start, start).rfind(b"\n")
        if at >= 0:
            return start + at + 1
        end = start
    return 0


def demand_journal(path: Path) -> None:
    """See to it that a file, if there is one, begins as a journal: anything else is not to be
    written to. Raises OSError, ValueError, TypeError or KeyError.
    """
    if path.exists():
        with path.open("rb") as file:
            first = file.readline()
        if first:
            json.loads(first)["op_code"]
