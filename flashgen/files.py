"""Writes files atomically, and appends to files of lines."""

from __future__ import annotations

import contextlib
import errno
import gzip
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from flashgen.errors import FlashgenError, ToolchainError

MOST_BYTES = 16 << 20
"""Larger files are refused: a table of all kernels that ship has less than 1 % of that."""

OWN = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
"""How files of flashgen's own are opened; Windows has the other flag of the two."""

MOST_UNPACKED = 256 << 20
"""Of a log or a landscape, which may be gzipped: some 200,000 outcomes."""


@contextlib.contextmanager
def temporary_folder(purpose: str, *, keeps: str = "") -> Iterator[Path]:
    """A folder of this process, with mode 0700, that is deleted at the end, but for what it has
    under `keeps`. Raises ToolchainError where there is no folder for temporary files.
    """
    try:
        folder = Path(tempfile.mkdtemp(prefix=f"flashgen-{purpose}-"))
    except OSError as error:
        raise no_temporary(error) from None
    try:
        yield folder
    finally:
        stays = keeps and (folder / keeps).is_dir()
        for path in list(folder.iterdir()) if stays else [folder]:
            if path.is_file():
                path.unlink()
            elif not stays or path.name != keeps:
                shutil.rmtree(path, ignore_errors=True)


def no_temporary(error: OSError) -> ToolchainError:
    """The error where the tempfile module finds no folder."""
    return ToolchainError(
        f"there is no folder for temporary files ({error.strerror}): set TMPDIR to one that can be "
        "written"
    )


def write_whole(path: Path, content: str | bytes, *, durable: bool = False) -> None:
    """Write a file by renaming a temporary one: other processes see the new content or the old.

    Text is written as UTF-8. durable: the content is on disk when this returns and survives a power
    cut. If the folder cannot be written, raises ToolchainError and leaves the old file.
    """
    data = content.encode() if isinstance(content, str) else content
    writer = f"{os.getpid()}-{threading.get_native_id()}"
    temporary = path.with_name(f".{path.name[:200]}.{writer}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # A symbolic link under this name is not followed.
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | OWN
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()  # left behind by a killed writer of this number
        with open(os.open(temporary, flags, 0o666), "wb") as file:
            file.write(data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise ToolchainError(
            f"{path} cannot be written ({error.strerror}) and is as it was: "
            f"{_space(error)}name another folder with --out"
        ) from None
    finally:
        with contextlib.suppress(OSError):  # an unreachable folder holds no temporary file either
            temporary.unlink(missing_ok=True)


def _space(error: OSError) -> str:
    return "free some space there, or " if error.errno == errno.ENOSPC else ""


def content_of(path: Path, most: int = MOST_BYTES) -> bytes:
    """The content of a file. Raises OSError, and ValueError where it is larger than `most`."""
    with path.open("rb") as file:
        return _limited(file, most)


def unpacked_content_of(path: Path) -> bytes:
    """The content of a file, gzipped or not. Raises OSError, EOFError and zlib.error, as gzip does,
    and ValueError where it is larger than MOST_UNPACKED.
    """
    with path.open("rb") as file:
        packed = file.peek(2)[:2] == b"\x1f\x8b"
        return _limited(gzip.GzipFile(fileobj=file) if packed else file, MOST_UNPACKED)


def _limited(file: BinaryIO | gzip.GzipFile, most: int) -> bytes:
    content = file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"files over {most >> 20} MB are refused")
    return content


def open_own(path: Path, flags: int = os.O_RDWR) -> int:
    """A descriptor of a lock or a record of flashgen's own, created if necessary. Children do not
    inherit it. Raises OSError, also for a symbolic link, which somebody may have planted.
    """
    return os.open(path, flags | os.O_CREAT | OWN, 0o644)


def records_of(descriptor: int, path: Path, notice: Callable[[str], None]) -> Iterator[bytes]:
    """The lines of an open file. Once all are read, an incomplete last one is cut off."""
    os.lseek(descriptor, 0, os.SEEK_SET)
    with os.fdopen(descriptor, "rb", closefd=False) as file:
        content = file.read()
    lines, whole = whole_lines(content)
    yield from lines
    if whole < len(content):
        os.ftruncate(descriptor, whole)
        os.fsync(descriptor)
        notice(f"{path}: the last record was torn when a run was killed; it is dropped")


def append_whole(descriptor: int, content: bytes, *, durable: bool = True) -> None:
    """Append all of the content to an open file, or nothing. durable: it is on disk when this
    returns, and survives a power cut.

    Raises OSError.
    """
    size = os.fstat(descriptor).st_size
    try:
        written = 0
        while written < len(content):
            written += os.write(descriptor, content[written:])
        if durable:
            os.fsync(descriptor)
    except OSError:
        os.ftruncate(descriptor, size)
        raise


def whole_lines(content: bytes) -> tuple[list[bytes], int]:
    """The lines that end in a line break, and their size in bytes.

    Text after the last line break is incomplete: its writer was killed or is still writing.
    """
    whole = content.rfind(b"\n") + 1
    return content[:whole].splitlines(keepends=True), whole


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Convert an OSError into a FlashgenError of one sentence."""
    try:
        yield
    except OSError as error:
        raise FlashgenError(
            f"{path} cannot be written ({error.strerror}); what it held is still there: "
            f"{_space(error)}name another folder with --out"
        ) from None
