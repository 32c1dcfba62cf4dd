"""BenchRecord: bench.json, all times with their provenance, rewritten atomically after each case.

A run that is started again continues with what is missing. A contender that was running when an
earlier run was killed is excluded from that case: a kernel that hangs costs one run, not every one.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import flashgen
from flashgen import paths
from flashgen.bench.case import SEED, BenchCase
from flashgen.bench.race import RaceResult
from flashgen.errors import FlashgenError
from flashgen.evaluate import measure
from flashgen.evaluate.evaluator import triton_version
from flashgen.evaluate.gpu_state import Conditions
from flashgen.files import content_of, write_whole
from flashgen.spec.gpu import Gpu
from flashgen.spec.records import parsed, record_of, value_of

SCHEMA = 1
SAME = ("measured", "gpu", "protocol", "seed", "dtype", "flashgen", "torch", "triton", "tables")
"""What must not change between the runs of one file, or their times would not compare."""


def provenance(
    gpu: Gpu | None, *, command: str, dtype: str, tables: str, conditions: Conditions | None
) -> dict[str, Any]:
    """The provenance of the times of a run. tables: the digest of what the dispatcher serves."""
    return {
        "measured": gpu is not None,
        "gpu": asdict(gpu) if gpu else None,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command,
        "commit": _commit(),
        "protocol": measure.PROTOCOL,
        "seed": SEED,
        "dtype": dtype,
        "flashgen": flashgen.__version__,
        "torch": str(torch.__version__),
        "triton": triton_version(),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
        "tables": tables,
        "conditions": conditions and asdict(conditions),
    }


def _commit() -> str | None:
    """The commit of the checkout, with "-dirty" if files differ from it; None outside of one."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty"],
            cwd=paths.ROOT, capture_output=True, text=True, check=False,
        )  # fmt: skip
    except OSError:  # no git here
        return None
    return done.stdout.strip() or None


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A case as stored in the file."""

    key: str
    direction: str
    spec: dict[str, Any]
    problem: dict[str, Any]
    run: int
    lines: tuple[RaceResult, ...]
    before: dict[str, Any] | None = None
    during: dict[str, Any] | None = None
    after: dict[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class _File:
    """What bench.json holds."""

    benchmark: str
    schema: int
    runs: tuple[dict[str, Any], ...]
    struck: tuple[tuple[str, str], ...]
    cases: tuple[Measured, ...]


class BenchRecord:
    """The file of a folder, and the mark of the running contender next to it."""

    def __init__(self, folder: Path, run: dict[str, Any]) -> None:
        """Continue the file of `folder` if there is one. Raises FlashgenError if it cannot be
        read, or was made with something else.
        """
        self.path = folder / "bench.json"
        self._mark = folder / "in_flight.json"
        self._runs: list[dict[str, Any]] = []
        self._struck: list[tuple[str, str]] = []
        self.cases: dict[str, Measured] = {}
        self.run = run
        if self.path.exists():
            self._read(run)
        self._runs.append(run)
        if self._mark.exists():
            self._struck += self._marked()
            self.at_work(None, "")

    def _marked(self) -> list[tuple[str, str]]:
        """The contender that was running when an earlier run was killed. A mark that cannot be
        read says of none.
        """
        try:
            return [value_of(tuple[str, str], parsed(content_of(self._mark)), "the mark")]
        except (OSError, ValueError):
            return []

    def _read(self, run: dict[str, Any]) -> None:
        try:
            record = value_of(dict[str, Any], parsed(content_of(self.path)), "the file")
            if record.get("schema") != SCHEMA:
                raise ValueError(f"schema {record.get('schema')!r}, not {SCHEMA}")
            found = record_of(_File, record, "the file")
        except (OSError, ValueError) as error:
            raise FlashgenError(
                f"{self.path} is no record of flashgen bench ({error}): name another --out"
            ) from error
        self._runs, self._struck = list(found.runs), list(found.struck)
        self.cases = {case.key: case for case in found.cases}
        now = json.loads(json.dumps(run))
        for name in SAME if self._runs else ():
            if self._runs[-1].get(name) != now.get(name):
                before, here = _short(self._runs[-1].get(name)), _short(now.get(name))
                raise FlashgenError(
                    f"{self.path} was made with {name} {before}, here it is {here}: "
                    "name another --out, or delete it"
                )

    def missing(self, case: BenchCase, names: Iterable[str]) -> bool:
        """Whether any of these contenders has no line in the case yet."""
        found = self.cases.get(case.key)
        return found is None or not set(names) <= {line.name for line in found.lines}

    def struck(self, case: BenchCase) -> set[str]:
        """Contenders that were running when an earlier run was killed."""
        return {name for key, name in self._struck if key == case.key}

    def strike(self, case: BenchCase, name: str) -> None:
        """Exclude this contender from the case from now on."""
        self._struck.append((case.key, name))
        self._write()

    def at_work(self, case: BenchCase | None, name: str) -> None:
        """Mark the running contender, "" for none: the mark stays if this process is killed."""
        if case is None or not name:
            self._mark.unlink(missing_ok=True)
        else:
            write_whole(self._mark, json.dumps([case.key, name]))

    def add(
        self, case: BenchCase, lines: Sequence[RaceResult], conditions: Sequence[Conditions | None]
    ) -> None:
        """Write a case with the conditions before, during and after it."""
        before, during, after = (None if each is None else asdict(each) for each in conditions)
        self.cases[case.key] = Measured(
            key=case.key, direction=case.direction, spec=asdict(case.spec),
            problem=asdict(case.problem), run=len(self._runs) - 1, lines=tuple(lines),
            before=before, during=during, after=after,
        )  # fmt: skip
        self._write()

    def _write(self) -> None:
        used = [asdict(case) for case in self.cases.values()]
        record = {
            "benchmark": "flashgen bench", "schema": SCHEMA, "runs": self._runs,
            "struck": self._struck, "cases": used,
        }  # fmt: skip
        write_whole(self.path, json.dumps(record, indent=1, allow_nan=False) + "\n", durable=True)


def _short(value: Any) -> str:
    """A value as errors show it: for a GPU its name."""
    return str(value.get("name", value) if isinstance(value, dict) else value)
