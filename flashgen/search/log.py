"""Log: the append-only record of outcomes, from which a killed run resumes.

JSON lines, one record per outcome, each on disk before the next is started: kill -9 loses only what
was in progress. One tuner writes in a folder at a time, or several that share their outcomes
through one storage. The locks are flocks, which end with the process; children do not inherit them.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Self

from flashgen.errors import FlashgenError
from flashgen.evaluate.evaluator import protocol_of
from flashgen.files import append_whole, disk_errors, open_own, whole_lines
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.config import KernelConfig
from flashgen.spec.outcome import PASSING, Outcome, Source, Stage
from flashgen.spec.problem import Problem
from flashgen.spec.records import UnknownKey, parsed

Key = tuple[object, ...]
Notice = Callable[[str], None]

_logger = logging.getLogger(__name__)

OPENING_LIMIT_S = 1.0
"""A folder is taken in milliseconds: so long one who shares it waits for others who are at it."""


class Log:
    """The outcomes of one GPU, stored in `path`; a context manager, or call close().

    Only outcomes of this Triton and of the current protocol of their stage are recalled. Others
    stay in the file, and so do those in outcome.PASSING. A last record torn by a kill is dropped
    with one notice. Raises FlashgenError if another tuner works in the folder, if a line cannot be
    read or is of another GPU, and if the disk cannot be written.

    shared is the id of the storage whose workers use the folder together. A shared log recalls
    nothing by itself, because workers with different memories would take different paths.
    remembered() queries it before a worker evaluates what the storage does not know. Each outcome
    is written once, by the first worker that has it.

    clock_mhz is the GPU's clock after the first known time, if recorded. A resumed run measures at
    this clock, because times at another one do not compare.
    """

    def __init__(
        self,
        path: Path,
        *,
        gpu: str,
        triton: str,
        notice: Notice = _logger.warning,
        shared: str | None = None,
    ) -> None:
        self.path = path
        self.clock_mhz: float | None = None
        self._gpu = gpu
        self._triton = triton
        self._notice = notice
        self._shared = shared
        self._known: dict[Key, tuple[int, Outcome]] = {}
        self._count = 0
        self._written: set[int] = set()  # hashes of all lines
        self._end = 0  # end of what was read or written, in bytes
        with contextlib.ExitStack() as opened, disk_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._lock = _open(path.parent / "lock", os.O_RDWR, opened)
            _take_lock(self._lock, path.parent, shared)
            self._file = _open(path, os.O_RDWR | os.O_APPEND, opened)
            with self._alone():
                self._read()
            opened.pop_all()

    def recall(
        self,
        stage: Stage,
        spec: AttentionSpec,
        problem: Problem,
        config: KernelConfig,
        digest: str,
        *,
        source: Source,
    ) -> Outcome | None:
        """The stored outcome of this stage for the kernel of this digest, if any.

        Compiles and checks hold for every problem and are returned for this one, without an
        estimate made for another. A GPU measures in the order of estimates, so a compiled kernel
        that could have an estimate is evaluated again, which costs no compiling. Checks on a GPU
        and in the interpreter are distinct, as are measured and estimated times: by `source`, that
        of the evaluator.
        """
        if self._shared is not None:
            return None
        return self._recalled(stage, spec, problem, config, digest, source)

    def remembered(
        self,
        stage: Stage,
        spec: AttentionSpec,
        problem: Problem,
        kernels: Sequence[tuple[KernelConfig, str]],
        *,
        source: Source,
    ) -> list[Outcome] | None:
        """The stored outcomes of all these (config, digest) pairs, in their order, or None.

        As recall() and recall_round() of a log that is not shared.
        """
        if stage == "final":
            return self._round(spec, problem, kernels, source)
        found = [self._recalled(stage, spec, problem, *kernel, source) for kernel in kernels]
        known = [outcome for outcome in found if outcome is not None]
        return known if len(known) == len(kernels) else None

    def _recalled(
        self,
        stage: Stage,
        spec: AttentionSpec,
        problem: Problem,
        config: KernelConfig,
        digest: str,
        source: Source,
    ) -> Outcome | None:
        key = _key(stage, spec, problem, config, digest, source)
        _, known = self._known.get(key) or self._known.get(_shared(key)) or (0, None)
        if known is None or (source != "estimated" and _lacks_estimate(known, problem)):
            return None
        return known if known.problem == problem else replace(known, problem=problem, estimate=None)

    def recall_round(
        self,
        spec: AttentionSpec,
        problem: Problem,
        kernels: Sequence[tuple[KernelConfig, str]],
        *,
        source: Source,
    ) -> list[Outcome] | None:
        """The final round of exactly these (config, digest) pairs, in their order, or None.

        Times of different rounds do not compare, so a round counts only whole: its records are
        adjacent.
        """
        return None if self._shared is not None else self._round(spec, problem, kernels, source)

    def _round(
        self,
        spec: AttentionSpec,
        problem: Problem,
        kernels: Sequence[tuple[KernelConfig, str]],
        source: Source,
    ) -> list[Outcome] | None:
        records = [
            self._known.get(_key("final", spec, problem, config, digest, source))
            for config, digest in kernels
        ]
        places = [place for place, _ in filter(None, records)]
        if not places or len(places) < len(records) or max(places) - min(places) >= len(places):
            return None
        return [outcome for _, outcome in filter(None, records)]

    def append(self, *outcomes: Outcome) -> None:
        """Record outcomes, all or none; they are on disk when this returns.

        Raises FlashgenError if the disk cannot be written, in which case nothing is.
        """
        records = [(outcome, _line(outcome)) for outcome in outcomes]
        with disk_errors(self.path), self._alone():
            if self._shared is not None:
                self._read()
                records = [each for each in records if hash(each[1]) not in self._written]
            append_whole(self._file, b"".join(line for _, line in records))
            self._end = os.fstat(self._file).st_size
        for outcome, line in records:
            self._remember(outcome)
            self._written.add(hash(line))

    def close(self) -> None:
        """Release the folder for other tuners. May be called again."""
        for name in ("_file", "_lock"):
            descriptor = getattr(self, name)
            if descriptor >= 0:
                os.close(descriptor)
            setattr(self, name, -1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Context in which no other process that shares the log writes or repairs it."""
        if self._shared is None:  # no other process uses the folder
            yield
            return
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def _read(self) -> None:
        """Read new records; an incomplete last line is cut off."""
        new = os.fstat(self._file).st_size - self._end
        content = os.pread(self._file, new, self._end) if new > 0 else b""
        lines, whole = whole_lines(content)
        for line in lines:
            self._remember(self._parse(line, self._count + 1))
            self._written.add(hash(line))
        self._end += whole
        if whole < len(content):
            os.ftruncate(self._file, self._end)
            os.fsync(self._file)
            self._notice(
                f"{self.path}: the last record was torn when a run was killed; it is dropped"
            )

    def _parse(self, line: bytes, number: int) -> Outcome:
        where = f"{self.path}, line {number}"
        try:
            outcome = Outcome.from_json(parsed(line))
        except UnknownKey as error:
            raise FlashgenError(
                f"{where}: {error}: a newer version wrote this log; update flashgen, "
                f"or name another folder with --out"
            ) from None
        except ValueError as error:
            raise FlashgenError(
                f"{where}: this is no record of an outcome ({error}); "
                f"delete the line, or the file to begin anew"
            ) from None
        if outcome.gpu != self._gpu:
            raise FlashgenError(
                f"{where}: this log must hold outcomes of {self._gpu} alone: "
                f"got {outcome.gpu}; move the file away"
            )
        return outcome

    def _remember(self, outcome: Outcome) -> None:
        """Store records; later ones replace earlier ones."""
        self._count += 1
        today = self._triton, protocol_of(outcome.stage, outcome.source)
        if (outcome.triton, outcome.protocol) == today and outcome.status not in PASSING:
            key = _key(
                outcome.stage,
                outcome.spec,
                outcome.problem,
                outcome.config,
                outcome.digest,
                outcome.source,
            )
            self._known[key] = self._known[_shared(key)] = (self._count, outcome)
            if self.clock_mhz is None and outcome.timing is not None:
                self.clock_mhz = outcome.timing.clock_mhz


def _key(
    stage: Stage,
    spec: AttentionSpec,
    problem: Problem,
    config: KernelConfig,
    digest: str,
    source: Source,
) -> Key:
    """The key of an outcome within one GPU, Triton and protocol."""
    kind = "estimated" if source == "untimed" else source
    if stage == "compile":
        return stage, spec, config, digest, problem
    return stage, spec, config, digest, kind, problem


def _shared(key: Key) -> Key:
    """The key of an outcome that holds for other problems too; otherwise `key`."""
    return key[:-1] if key[0] in ("compile", "check") else key


def _lacks_estimate(outcome: Outcome, problem: Problem) -> bool:
    """Whether a kernel compiled but was not estimated at `problem` yet.

    Without a GPU, the stage timed makes the estimates. On a GPU, a kernel without any estimate
    cannot have one.
    """
    if outcome.stage != "compile" or not outcome.ok:
        return False
    if outcome.estimate is None:
        return outcome.source == "estimated"
    return outcome.problem != problem


def _open(path: Path, flags: int, opened: contextlib.ExitStack) -> int:
    """An open descriptor that `opened` closes. Children of this process do not inherit it."""
    descriptor = open_own(path, flags)
    opened.callback(os.close, descriptor)
    return descriptor


def _take_lock(descriptor: int, folder: Path, shared: str | None) -> None:
    """Lock the folder until this process ends or closes the log, exclusively or with those who
    share.

    The file names the holder: a process or a storage. To write that down, a sharing process locks
    the folder exclusively for a moment, if nobody else is there.
    """
    deadline = time.monotonic() + OPENING_LIMIT_S
    shared = shared and f"ledger {shared}"
    while True:
        if _locked(descriptor, fcntl.LOCK_EX):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid() if shared is None else shared}\n".encode(), 0)
            if shared is None or _locked(descriptor, fcntl.LOCK_SH):
                return
        elif shared is not None and _locked(descriptor, fcntl.LOCK_SH):
            if _holder(descriptor) == shared:
                return
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        if shared is None or time.monotonic() > deadline:
            raise FlashgenError(_occupied(folder, _holder(descriptor), shared))
        time.sleep(0.01)


def _holder(descriptor: int) -> str:
    """The current or last holder of the folder: a process number or the id of a storage."""
    return os.pread(descriptor, 64, 0).decode(errors="replace").strip()


def _occupied(folder: Path, holder: str, shared: str | None) -> str:
    """The error message for a folder that others hold."""
    if not holder.isdecimal():
        who = "other flashgens, which share a storage, tune in"
    elif shared is None:
        who = "another flashgen tunes in"
    else:
        who = "another flashgen, which shares no storage, tunes in"
    process = f" (process {holder})" if holder.isdecimal() else ""
    return (
        f"{who} {folder}{process}: wait for it to end, name another folder with --out, "
        f"or give all the same --storage to share the work"
    )


def _locked(descriptor: int, kind: int) -> bool:
    """Take a lock of this type, or change the held one, if that is possible without waiting."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _line(outcome: Outcome) -> bytes:
    """The record of an outcome."""
    text = json.dumps(outcome.to_json(), separators=(",", ":"), allow_nan=False)
    return text.encode() + b"\n"
