"""Log: the append-only record of outcomes that lets a killed run go on where it stopped.

JSON lines, one record an outcome, each on the disk before the next one is begun: kill -9 at any
moment loses only what was in flight. One tuner writes in a folder at a time.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Self

from flashgen.config import KernelConfig
from flashgen.errors import FlashgenError
from flashgen.evaluate import protocol_of
from flashgen.outcome import PASSING, Outcome, Source, Stage
from flashgen.spec import AttentionSpec, Problem

Key = tuple[object, ...]
Notice = Callable[[str], None]

_logger = logging.getLogger(__name__)


class Log:
    """The outcomes of one GPU, kept in `path`; a context manager, or closed.

    Only outcomes of this Triton and of their stage's protocol of today are recalled; others stay in
    the file, and so do those that outcome.PASSING names.
    A last record that a kill has torn is dropped with one notice. Raises FlashgenError where
    another tuner works in the folder, where a line cannot be read or is of another GPU, and where
    the disk does not take it.
    """

    def __init__(
        self,
        path: Path,
        *,
        gpu: str,
        triton: str,
        notice: Notice = _logger.warning,
    ) -> None:
        self.path = path
        self._gpu = gpu
        self._triton = triton
        self._known: dict[Key, tuple[int, Outcome]] = {}
        self._count = 0
        with contextlib.ExitStack() as opened, _disk_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._lock = _open(path.parent / "lock", os.O_RDWR, opened)
            _take_lock(self._lock, path.parent)
            self._file = _open(path, os.O_RDWR | os.O_APPEND, opened)
            self._read(notice)
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
        """What this stage found out before about the kernel of this digest, if it did.

        Compiles and checks hold for every problem, and come back as of this one, less an estimate
        of another. A GPU measures in the order of estimates, so where it could have one, a kernel
        that compiled is asked for again: that costs no compiling. A check on a GPU and one in the
        interpreter are told apart, as are measured and estimated times: by `source`, the
        evaluator's.
        """
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
        records = [
            self._known.get(_key("final", spec, problem, config, digest, source))
            for config, digest in kernels
        ]
        places = [place for place, _ in filter(None, records)]
        if not places or len(places) < len(records) or max(places) - min(places) >= len(places):
            return None
        return [outcome for _, outcome in filter(None, records)]

    def append(self, *outcomes: Outcome) -> None:
        """Record outcomes, all or none; they are on the disk when this returns.

        Raises FlashgenError, having written nothing, where the disk does not take them.
        """
        lines = "".join(
            json.dumps(outcome.to_json(), separators=(",", ":"), allow_nan=False) + "\n"
            for outcome in outcomes
        )
        with _disk_errors(self.path):
            size = os.fstat(self._file).st_size
            try:
                _write_all(self._file, lines.encode())
                os.fsync(self._file)
            except OSError:
                os.ftruncate(self._file, size)
                raise
        for outcome in outcomes:
            self._remember(outcome)

    def close(self) -> None:
        """Let another tuner work in the folder. May be called again."""
        for name in ("_file", "_lock"):
            descriptor = getattr(self, name)
            if descriptor >= 0:
                os.close(descriptor)
            setattr(self, name, -1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self, notice: Notice) -> None:
        """Take in the file; what stands behind its last line break was torn, and is cut off."""
        content = self.path.read_bytes()
        whole = content.rfind(b"\n") + 1
        for number, line in enumerate(content[:whole].splitlines(), start=1):
            self._remember(self._parse(line, number))
        if whole < len(content):
            os.ftruncate(self._file, whole)
            os.fsync(self._file)
            notice(f"{self.path}: the last record was torn when a run was killed; it is dropped")

    def _parse(self, line: bytes, number: int) -> Outcome:
        where = f"{self.path}, line {number}"
        try:
            outcome = Outcome.from_json(json.loads(line))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
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
        """Later records take the place of earlier ones."""
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


def _key(
    stage: Stage,
    spec: AttentionSpec,
    problem: Problem,
    config: KernelConfig,
    digest: str,
    source: Source,
) -> Key:
    """What makes two outcomes of one GPU, Triton and protocol the same."""
    kind = "estimated" if source == "untimed" else source
    if stage == "compile":
        return stage, spec, config, digest, problem
    return stage, spec, config, digest, kind, problem


def _shared(key: Key) -> Key:
    """The key under which an outcome is kept for other problems, too; `key` where it is not."""
    return key[:-1] if key[0] in ("compile", "check") else key


def _lacks_estimate(outcome: Outcome, problem: Problem) -> bool:
    """Whether a kernel compiled whose estimate at `problem` was not asked for yet.

    With no GPU it is the stage timed that estimates. On a GPU, what has none has none at all.
    """
    if outcome.stage != "compile" or not outcome.ok:
        return False
    if outcome.estimate is None:
        return outcome.source == "estimated"
    return outcome.problem != problem


def _open(path: Path, flags: int, opened: contextlib.ExitStack) -> int:
    """An open descriptor that `opened` closes. Children of this process do not inherit it."""
    descriptor = os.open(path, flags | os.O_CREAT, 0o644)
    opened.callback(os.close, descriptor)
    return descriptor


def _take_lock(descriptor: int, folder: Path) -> None:
    """Hold the folder until this process ends or closes the log; the file says who holds it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
        raise FlashgenError(
            f"another flashgen tunes in {folder} (process {holder}): "
            f"wait for it, or name another folder with --out"
        ) from None
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)


def _write_all(descriptor: int, content: bytes) -> None:
    while content:
        content = content[os.write(descriptor, content) :]


@contextlib.contextmanager
def _disk_errors(path: Path) -> Iterator[None]:
    """Say in one sentence what the operating system refused."""
    try:
        yield
    except OSError as error:
        raise FlashgenError(
            f"{path} cannot be written ({error.strerror}); all outcomes before are kept: "
            f"make room there, or name another folder with --out"
        ) from None
