"""Log: the append-only record of outcomes, from which a killed run resumes.

JSON lines, one record per outcome, each on disk before its search goes on: kill -9 loses only what
was in progress. outcomes_of() reads such a file later: it is not written and not locked.
"""

from __future__ import annotations

import gzip
import json
import logging
import os
import threading
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Self

from flashgen.errors import FlashgenError, InvalidArgument
from flashgen.evaluate.evaluator import protocol_of
from flashgen.files import (
    append_whole,
    disk_errors,
    open_own,
    records_of,
    unpacked_content_of,
    whole_lines,
)
from flashgen.schedules.config import KernelConfig
from flashgen.schedules.outcome import PASSING, Outcome, Source, Stage
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.problem import Problem
from flashgen.spec.records import UnknownKey, parsed

LogKey = tuple[object, ...]
Notice = Callable[[str], None]

_logger = logging.getLogger(__name__)


class Log:
    """The outcomes of one GPU, stored in `path`; a context manager, or call close().

    Only outcomes of this Triton and of the current protocol of their stage are recalled, and none
    in outcome.PASSING. A last record torn by a kill is dropped with one notice. Several threads may
    use it. Raises FlashgenError if a line cannot be read or is of another GPU, and if the disk
    cannot be written.

    clock_mhz: the GPU's clock after the first known time, if recorded; times at another one do not
    compare.
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
        self.clock_mhz: float | None = None
        self._triton = triton
        self._known: dict[LogKey, tuple[int, Outcome]] = {}
        self._count = 0
        self._waiting: deque[tuple[Outcome, ...]] = deque()
        self._writing = threading.Lock()
        with disk_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open_own(path, os.O_RDWR | os.O_APPEND)
            try:
                for number, line in enumerate(records_of(self._file, path, notice), 1):
                    outcome = outcome_of(line, path, number)
                    if outcome.gpu != gpu:
                        raise FlashgenError(
                            f"{path}, line {number}: this log must hold outcomes of {gpu} alone: "
                            f"got {outcome.gpu}; move the file away"
                        )
                    self._remember(outcome)
            except BaseException:
                self.close()
                raise

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
        """The stored outcome of this stage for the kernel of this digest, if any. source: that of
        the evaluator.

        Compiles and checks hold for every problem and are returned for this one, without an
        estimate made for another. A GPU measures in the order of estimates, so a compiled kernel
        that could have an estimate is evaluated again, which costs no compiling.
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
        """The final round of exactly these (config, digest) pairs, in their order, or None. Times
        of different rounds do not compare, so its records must be adjacent.
        """
        keys = [_key("final", spec, problem, *kernel, source) for kernel in kernels]
        records = [self._known[key] for key in keys if key in self._known]
        places = [place for place, _ in records]
        if not places or len(places) < len(keys) or max(places) - min(places) >= len(places):
            return None
        return [outcome for _, outcome in records]

    def append(self, *outcomes: Outcome) -> None:
        """Record outcomes, all or none; they are on disk when this returns.

        Threads that wait for the disk have theirs written together. Raises FlashgenError if the
        disk cannot be written; the next call writes what waits, too.
        """
        self._waiting.append(outcomes)
        with self._writing:
            batch = tuple(self._waiting)
            if lines := b"".join(_line(outcome) for some in batch for outcome in some):
                with disk_errors(self.path):
                    append_whole(self._file, lines)
            for some in batch:
                self._waiting.popleft()
                for outcome in some:
                    self._remember(outcome)

    def close(self) -> None:
        """Close the file. May be called again."""
        with self._writing:
            if self._file >= 0:
                os.close(self._file)
            self._file = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _remember(self, outcome: Outcome) -> None:
        """Store a record; later ones replace earlier ones."""
        self._count += 1
        today = self._triton, protocol_of(outcome.stage, outcome.source)
        if (outcome.triton, outcome.protocol) == today and outcome.status not in PASSING:
            o = outcome
            key = _key(o.stage, o.spec, o.problem, o.config, o.digest, o.source)
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
) -> LogKey:
    """The key of an outcome within one GPU, Triton and protocol. Compilers are all one source."""
    kind = "estimated" if source == "untimed" else source
    return stage, spec, config, digest, None if stage == "compile" else kind, problem


def _shared(key: LogKey) -> LogKey:
    """The key of an outcome that holds for other problems too; otherwise `key`."""
    return key[:-1] if key[0] in ("compile", "check") else key


def _lacks_estimate(outcome: Outcome, problem: Problem) -> bool:
    """Whether a kernel compiled but was not estimated at `problem` yet. Without a GPU, the stage
    timed makes the estimates. On a GPU, a kernel without any estimate cannot have one.
    """
    if outcome.stage != "compile" or not outcome.ok:
        return False
    if outcome.estimate is None:
        return outcome.source == "estimated"
    return outcome.problem != problem


def _line(outcome: Outcome) -> bytes:
    text = json.dumps(outcome.to_json(), separators=(",", ":"), allow_nan=False)
    return text.encode() + b"\n"


def outcomes_of(path: Path, notice: Callable[[str], None]) -> list[Outcome]:
    """All outcomes of a log in their order, of any GPU, Triton and protocol.

    An incomplete last record, torn by a kill or still being written, is left out.

    Args:
        path: the log, which may be gzipped.
        notice: is called with a sentence on what is left out.

    Returns:
        The outcomes.

    Raises:
        InvalidArgument: if there is no such file.
        FlashgenError: if it cannot be read, or a line is no outcome.

    Examples:
        >>> from pathlib import Path
        >>> from flashgen.search.log import outcomes_of
        >>> outcomes = outcomes_of(Path("tuning.jsonl"), print)  # doctest: +SKIP
    """
    try:
        content = unpacked_content_of(path)
    except FileNotFoundError:
        raise InvalidArgument(
            f"{path}: there is no such log; flashgen tune writes .flashgen/<slug>.jsonl"
        ) from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise FlashgenError(f"{path} is no gzip file ({error}): copy it again") from None
    except OSError as error:
        raise FlashgenError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise FlashgenError(f"{path}: {error}; name another") from None
    lines, whole = whole_lines(content)
    outcomes = [outcome_of(line, path, number) for number, line in enumerate(lines, 1)]
    if whole < len(content):
        notice(f"{path}: the last record is torn; it is left out")
    return outcomes


def outcome_of(line: bytes, path: Path, number: int) -> Outcome:
    """The outcome of a line of a log. Raises FlashgenError."""
    where = f"{path}, line {number}"
    try:
        return Outcome.from_json(parsed(line))
    except UnknownKey as error:
        raise FlashgenError(
            f"{where}: {error}: a newer version wrote this log; update flashgen, "
            "or name another log or folder"
        ) from None
    except ValueError as error:
        raise FlashgenError(
            f"{where}: this is no record of an outcome ({error}); delete the line, "
            "or name another log"
        ) from None
