"""configs/evidence/<slug>.jsonl: the evidence of a table's entries, one line of JSON each.

The machine writes it beside the table. Reports, explain, verify and the next search read it; what
is generated and served does not depend on it. A line belongs to the entry of its spec, bucket,
config and time, if the table has its run; lines that belong to none are ignored, and go with the
next save.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from flashgen.errors import FlashgenError, InvalidArgument, TableError
from flashgen.schedules.config import config_of
from flashgen.schedules.legality import why_illegal
from flashgen.schedules.outcome import Source
from flashgen.spec.gpu import Gpu
from flashgen.spec.problem import problem_of
from flashgen.spec.records import parsed, value_of
from flashgen.table.entry import NO_EVIDENCE, Entry, EntryEvidence, Run, RunnerUp, figure
from flashgen.table.yaml import text_of


class EvidencedTable(Protocol):
    """What evidence belongs to: a table.table.Table, whose module reads evidence by this one."""

    @property
    def gpu(self) -> Gpu:
        """The GPU."""

    @property
    def everything(self) -> tuple[Entry, ...]:
        """The entries."""

    @property
    def runs(self) -> tuple[Run, ...]:
        """The tuning runs that they come from."""


_IDENTITY = ("spec", "seq_k", "config", "us")


def evidence_file(table: Path) -> Path:
    """The evidence of the table of a file; it need not exist."""
    return table.parent / "evidence" / f"{table.stem}.jsonl"


def with_evidence(table: EvidencedTable, path: Path) -> tuple[Entry, ...]:
    """The entries of a table with their evidence of a file; an entry without a line there keeps its
    own. Raises TableError that names file and line.
    """
    try:
        text = text_of(path, TableError)
    except (FileNotFoundError, NotADirectoryError):
        return table.everything
    except (OSError, UnicodeDecodeError) as error:
        raise TableError(f"{path}: cannot be read as UTF-8 text ({error}); delete it") from None
    return with_lines(table, text, path)


def with_lines(table: EvidencedTable, text: str, path: Path) -> tuple[Entry, ...]:
    """As with_evidence, of a text; `path` stands in errors."""
    found = {_key(_identity(entry)): entry for entry in table.everything}
    runs = {None, *(run.id for run in table.runs)}
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            record = _record(line)
            key = _key({name: record.pop(name, None) for name in _IDENTITY})
            if key in found:
                evidence = _evidence(record, found[key], table.gpu)
                if evidence.run in runs:
                    found[key] = replace(found[key], evidence=evidence)
        except FlashgenError as error:
            raise TableError(
                f"{path}, line {number}: {error}; delete the line or restore it from git"
            ) from None
    return tuple(found.values())


def missing(entries: Iterable[Entry]) -> list[str]:
    """A sentence on what nobody knows of entries that have no evidence; none where all have it."""
    count = sum(entry.evidence == NO_EVIDENCE for entry in entries)
    what = "entry has" if count == 1 else "entries have"
    lost = "the sizes, kernel text, compiler and search they come from are not known"
    return [f"{count} {what} no evidence: {lost}."] if count else []


def evidence_text(entries: Iterable[Entry]) -> str:
    """The lines of all entries that have evidence."""
    lines = [
        json.dumps({n: v for n, v in _identity(entry).items() if v is not None} | facts_of(entry))
        for entry in entries
        if entry.evidence != NO_EVIDENCE
    ]
    return "".join(f"{line}\n" for line in lines)


def _identity(entry: Entry) -> dict[str, Any]:
    return {
        "spec": entry.spec.name,
        "seq_k": entry.bucket.low,
        "config": entry.config.label,
        "us": _figure(entry.result.median_us),
    }


def _key(identity: dict[str, Any]) -> str:
    return json.dumps(identity)


def _figure(value: float | None) -> float | None:
    """A number with the digits that tables have."""
    return None if value is None else float(figure(value))


def _figures(values: Iterable[float]) -> list[float]:
    return [float(figure(value)) for value in values]


def _interval(entry: Entry) -> tuple[str, str]:
    """How the keys of low_us and high_us are called: a measured entry has percentiles."""
    return ("p20_us", "p80_us") if entry.result.source == "measured" else ("low_us", "high_us")


def facts_of(entry: Entry) -> dict[str, Any]:
    """What a line says of an entry; what is None, 0 or empty is left out."""
    evidence = entry.evidence
    low, high = _interval(entry)
    facts = {
        "run": evidence.run,
        "digest": evidence.digest,
        "problem": evidence.problem and evidence.problem.label,
        "registers": evidence.registers,
        "shared": evidence.shared_bytes,
        "tried": evidence.tried,
        "default_us": _figure(evidence.default_us),
        "sdpa_us": _figure(evidence.sdpa_us),
        low: _figure(evidence.low_us),
        high: _figure(evidence.high_us),
        "batches_us": _figures(evidence.batches_us),
        "p_value": _figure(evidence.p_value),
        "regret": _figure(evidence.regret),
        "runners_up": [
            {"config": other.config.label, "source": other.source}
            | ({} if other.median_us is None else {"us": _figure(other.median_us)})
            | ({"batches_us": _figures(other.batches_us)} if other.batches_us else {})
            | {"digest": other.digest}
            for other in evidence.runners_up
        ],
    }
    return {
        name: value for name, value in facts.items() if value or (name == "shared" and value == 0)
    }


def _record(line: str) -> dict[str, Any]:
    try:
        record = parsed(line)
    except ValueError as error:
        raise InvalidArgument(f"this is not JSON ({error})") from None
    if not isinstance(record, dict):
        raise InvalidArgument("a line must be an object of JSON")
    return record


_TIMES = ("default_us", "sdpa_us", "p_value", "regret")
_WORDS = ("run", "digest", "problem", "tried")
_COUNTS = ("registers", "shared")


def _evidence(record: dict[str, Any], entry: Entry, gpu: Gpu) -> EntryEvidence:
    low, high = _interval(entry)
    runners_up = record.pop("runners_up", [])
    if not isinstance(runners_up, list):
        raise InvalidArgument("runners_up must be a list")
    batches_us = value_of(tuple[float, ...], record.pop("batches_us", []), "batches_us")
    _check_keys(record, (*_WORDS, *_COUNTS, *_TIMES, low, high))
    held: dict[str, Any] = {}
    for name, value in record.items():
        kind = str if name in _WORDS else int if name in _COUNTS else float
        held[name] = value_of(kind, value, name)
    candidates, legal = _tried(held.pop("tried")) if "tried" in held else (None, None)
    found = EntryEvidence(
        problem=problem_of(held.pop("problem")) if "problem" in held else None,
        shared_bytes=held.pop("shared", None),
        low_us=held.pop(low, None),
        high_us=held.pop(high, None),
        batches_us=batches_us,
        candidates=candidates,
        legal=legal,
        runners_up=tuple(_runner_up(other, entry, gpu) for other in runners_up),
        **held,
    )
    if (found.shared_bytes or 0) > gpu.shared_per_block:
        raise InvalidArgument(
            f"the kernel takes {found.shared_bytes} bytes of shared memory, and {gpu.slug} has "
            f"{gpu.shared_per_block} a block"
        )
    return found


def _tried(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"([0-9]{1,18})/([0-9]{1,18})", text)
    if found is None:
        raise InvalidArgument(f"tried must be like 16/540: got {text!r}")
    return int(found[1]), int(found[2])


def _runner_up(record: Any, entry: Entry, gpu: Gpu) -> RunnerUp:
    _check_keys(record, ("config", "source", "us", "batches_us", "digest"))
    config, digest = str(record.get("config")), str(record.get("digest"))
    found = config_of(config)
    if reason := why_illegal(entry.spec, found, gpu):
        raise InvalidArgument(f"the runner-up {config} is illegal on {gpu.slug}: {reason}")
    source = value_of(Source, record.get("source"), "source")
    us = value_of(float, record["us"], "us") if "us" in record else None
    batches_us = value_of(tuple[float, ...], record.get("batches_us", []), "batches_us")
    return RunnerUp(config=found, source=source, median_us=us, batches_us=batches_us, digest=digest)


def _check_keys(record: Any, known: Iterable[str]) -> None:
    unknown = [str(key) for key in record if key not in known] if isinstance(record, dict) else []
    if unknown or not isinstance(record, dict):
        raise InvalidArgument(f"a line has the keys {', '.join(known)}: got {unknown or record!r}")
