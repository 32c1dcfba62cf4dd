"""Quarantine: a file of kernels that killed a process, and the evaluator that skips them.

The file holds JSON lines and is only appended to. A kernel is listed by its digest and the Triton
version that compiled it: an edited template or another Triton gives it a new chance. A kernel that
killed the compiler is skipped by every evaluator. One that killed a process while running, on a GPU
or in the interpreter, is skipped by that kind of evaluator only.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from filelock import FileLock

from flashgen.errors import FlashgenError
from flashgen.evaluate.build import draft
from flashgen.evaluate.evaluator import Evaluator, Request, WrappingEvaluator
from flashgen.files import append_whole, disk_errors, open_own, records_of
from flashgen.schedules.config import KernelConfig, kernel_name
from flashgen.schedules.outcome import KILLERS, PASSING, Outcome, Source, Stage, Status
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.problem import Problem
from flashgen.spec.records import parsed, record_of

QuarantineKey = tuple[str, str]

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class QuarantineRecord:
    """One line of the file: a kernel and its result. OK: it was retried and passed."""

    digest: str
    kernel: str  # its name
    spec: AttentionSpec
    problem: Problem
    config: KernelConfig
    stage: Stage
    status: Status
    detail: str
    source: Source  # the evaluator's
    gpu: str  # slug
    triton: str
    created: str  # ISO 8601, UTC

    @property
    def key(self) -> QuarantineKey:
        """What the record applies to: a kernel, for evaluators of one source or, "", for all."""
        of_compiler = self.stage == "compile" or self.status is Status.COMPILE_CRASH
        return self.digest, "" if of_compiler else self.source

    def settles(self, held: QuarantineRecord) -> bool:
        """Whether it says what became of a kernel where that was stopped before."""
        everywhere = self.stage in ("compile", "check")
        return self.stage == held.stage and (everywhere or self.problem == held.problem)


class Quarantine:
    """The quarantined kernels in `path`, for one Triton version. The file is created with the first
    record.

    retry: earlier records do not count until the kernel kills again. A last record torn by a kill
    is dropped with a notice. Raises FlashgenError if another line cannot be read, or a record
    cannot be written.
    """

    def __init__(
        self,
        path: Path,
        *,
        triton: str,
        retry: bool = False,
        notice: Callable[[str], None] = _logger.warning,
    ) -> None:
        self.path = path
        self._triton = triton
        self._held: dict[QuarantineKey, QuarantineRecord] = {}
        self._lock = threading.Lock()  # of those who add and remove
        with disk_errors(path):
            for record in self._read(notice):
                self._take(record)
        self._retried = set(self._held) if retry else set[QuarantineKey]()

    def __len__(self) -> int:
        """The number of quarantined kernels, without those to be retried."""
        return sum(key not in self._retried for key in tuple(self._held))

    def reason(self, digest: str, source: Source) -> str | None:
        """Why the kernel of this digest is quarantined for evaluators of `source`; None if it is
        not.
        """
        for record in self._of(digest, source):
            if record.key not in self._retried:
                return (
                    f"{record.status} at stage {record.stage} on {record.created}: {record.detail}"
                )
        return None

    def note(self, outcome: Outcome) -> None:
        """Quarantine the kernel of an outcome that cost a process; release one that now passed.

        It passed if the stage that stopped it has ended otherwise, at the same problem if that
        matters. The record is on disk when this returns.
        """
        with self._lock:
            if outcome.status in KILLERS:
                record = _record(outcome, outcome.status)
                self._append(record)
                self._retried.discard(record.key)
            elif outcome.status not in PASSING:
                record = _record(outcome, Status.OK)
                if any(record.settles(held) for held in self._of(outcome.digest, outcome.source)):
                    self._append(record)

    def _of(self, digest: str, source: Source) -> list[QuarantineRecord]:
        keys: list[QuarantineKey] = [(digest, ""), (digest, source)]
        found = map(self._held.get, keys)  # another thread may remove one
        return [record for record in found if record is not None]

    def _take(self, record: QuarantineRecord) -> None:
        """Later records replace earlier ones."""
        if record.triton != self._triton:
            return
        if record.status is not Status.OK:
            self._held[record.key] = record
            return
        for held in self._of(record.digest, record.source):
            if record.settles(held):
                del self._held[held.key]

    def _append(self, record: QuarantineRecord) -> None:
        line = json.dumps(asdict(record), separators=(",", ":")).encode() + b"\n"
        with disk_errors(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with _locked(self.path) as descriptor:
                append_whole(descriptor, line)
        self._take(record)

    def _read(self, notice: Callable[[str], None]) -> Iterator[QuarantineRecord]:
        """The records of a file that exists."""
        if not os.path.lexists(self.path):
            return
        with _locked(self.path) as descriptor:
            lines = records_of(descriptor, self.path, notice)
            for number, line in enumerate(lines, start=1):
                yield self._parse(line, number)

    def _parse(self, line: bytes, number: int) -> QuarantineRecord:
        try:
            return record_of(QuarantineRecord, parsed(line))
        except ValueError as error:
            raise FlashgenError(
                f"{self.path}, line {number}: this is no record of a quarantined kernel ({error}); "
                f"delete the line, or the file to have all kernels tried again"
            ) from None


def _record(outcome: Outcome, status: Status) -> QuarantineRecord:
    own = {"kernel": kernel_name(outcome.spec, outcome.config), "status": status}
    same = {f.name: getattr(outcome, f.name) for f in fields(QuarantineRecord) if f.name not in own}
    return QuarantineRecord(**same | own)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[int]:
    """The file, open for appending and locked."""
    with FileLock(path.with_name(f"{path.name}.lock")):
        descriptor = open_own(path, os.O_RDWR | os.O_APPEND)
        try:
            yield descriptor
        finally:
            os.close(descriptor)


class QuarantiningEvaluator(WrappingEvaluator):
    """`inner`, except that configs with a quarantined kernel are QUARANTINED, with the reason.

    A kernel that kills a process is quarantined before its outcome is returned. Other attributes of
    `inner`, such as `conditions`, are available here too.
    """

    def __init__(self, inner: Evaluator, quarantine: Quarantine) -> None:
        super().__init__(inner)
        self._quarantine = quarantine

    def answers(
        self, request: Request, configs: Sequence[KernelConfig]
    ) -> Generator[Outcome, None, None]:
        """As BaseEvaluator.answers. Also raises errors of writing the quarantine."""
        held = {
            config: request.outcome(config, Status.QUARANTINED, reason, digest=digest)
            for config in configs
            for digest, reason in self._held(request.spec, config)
        }
        with closing(self._beside(held, request, configs)) as outcomes:
            for outcome in outcomes:
                self._quarantine.note(outcome)
                yield outcome

    def _held(self, spec: AttentionSpec, config: KernelConfig) -> Iterator[tuple[str, str]]:
        """The digest of a quarantined kernel, and the reason; nothing of any other."""
        if len(self._quarantine):  # rarely: otherwise nothing is rendered
            digest = draft(spec, config, self.gpu).digest
            if (reason := self._quarantine.reason(digest, self.source)) is not None:
                yield digest, reason

    def __getattr__(self, name: str) -> Any:
        """Attributes that only `inner` has. (While a copy is being made, `inner` itself is
        missing.)
        """
        if name == "_inner":
            raise AttributeError(name)
        return getattr(self._inner, name)
