"""Log: the append-only record of outcomes, from which a killed run resumes.

JSON lines, one record per outcome, each on disk before its search goes on: kill -9 loses only what
was in progress.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from flashgen.errors import FlashgenError
from flashgen.evaluate.evaluator import protocol_of
from flashgen.files import append_whole, disk_errors, open_own, records_of
from flashgen.schedules.config import KernelConfig
from flashgen.schedules.outcome import PASSING, Outcome, Source, Stage
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.problem import Problem
from flashgen.spec.records import UnknownKey, parsed

Key = tuple[object, ...]
Notice = Callable[[str], None]

_logger = logging.getLogger(__name__)


@dataclass
class _Records:
    """Outcomes of one append() and their lines."""

    outcomes: tuple[Outcome, ...]
    lines: bytes
    written: bool = False
    error: FlashgenError | None = None


class Log:
    """The outcomes of one GPU, stored in `path`; a context manager, or call close().

    Only outcomes of this Triton and of the current protocol of their stage are recalled. Others
    stay in the file, and so do those in outcome.PASSING. A last record torn by a kill is dropped
    with one notice. Several threads may use it. Raises FlashgenError if a line cannot be read or is
    of another GPU, and if the disk cannot be written.

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
    ) -> None:
        self.path = path
        self.clock_mhz: float | None = None
        self._gpu = gpu
        self._triton = triton
        self._known: dict[Key, tuple[int, Outcome]] = {}
        self._count = 0
        self._waiting: deque[_Records] = deque()
        self._writing = threading.Lock()
        with disk_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open_own(path, os.O_RDWR | os.O_APPEND)
            try:
                for line in records_of(self._file, path, notice):
                    self._remember(self._parse(line, self._count + 1))
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
        """The stored outcome of this stage for the kernel of this digest, if any.

        Compiles and checks hold for every problem and are returned for this one, without an
        estimate made for another. A GPU measures in the order of estimates, so a compiled kernel
        that could have an estimate is evaluated again, which costs no compiling. Checks on a GPU
        and in the interpreter are distinct, as are measured and estimated times: by `source`, that
        of the evaluator.
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
        """Record outcomes, all or none; they are on disk when this returns.

        Threads that wait for the disk have theirs written together. Raises FlashgenError if the
        disk cannot be written, in which case nothing is.
        """
        records = _Records(outcomes=outcomes, lines=b"".join(map(_line, outcomes)))
        self._waiting.append(records)
        with self._writing:
            if not records.written:
                self._write()
        if records.error is not None:
            raise records.error

    def _write(self) -> None:
        """Write what waits."""
        batch = []
        while self._waiting:
            batch.append(self._waiting.popleft())
        try:
            with disk_errors(self.path):
                append_whole(self._file, b"".join(each.lines for each in batch))
        except FlashgenError as error:
            for each in batch:
                each.written, each.error = True, error
            return
        for each in batch:
            each.written = True
            for outcome in each.outcomes:
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


def _line(outcome: Outcome) -> bytes:
    """The record of an outcome."""
    text = json.dumps(outcome.to_json(), separators=(",", ":"), allow_nan=False)
    return text.encode() + b"\n"
