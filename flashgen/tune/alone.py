"""alone_in: one tuner works in a folder at a time."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from flashgen.errors import FlashgenError
from flashgen.files import disk_errors, write_whole


@contextlib.contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """The folder of a tuner's logs, for this tuner alone, by a lock that ends with the process;
    children do not inherit it. Raises FlashgenError if another one works
    there, or it cannot be written.
    """
    with contextlib.ExitStack() as opened:
        with disk_errors(folder / "lock"):
            folder.mkdir(parents=True, exist_ok=True)
            try:
                opened.enter_context(FileLock(folder / "lock", timeout=0))
            except Timeout:
                raise FlashgenError(
                    f"another flashgen tunes in {folder}{_holder(folder)}: wait for it to end, or "
                    f"name another folder with --out"
                ) from None
            write_whole(folder / "process", f"{os.getpid()}\n")
        yield


def _holder(folder: Path) -> str:
    with contextlib.suppress(OSError):
        number = (folder / "process").read_bytes()[:64].decode(errors="replace").strip()
        if number.isdecimal():
            return f" (process {number})"
    return ""
