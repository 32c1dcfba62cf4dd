"""configs/evidence/<slug>.jsonl: the evidence of a table's entries, one line of JSON each.

The machine writes it beside the table. Reports, explain and the next search read it; what is
generated and served does not depend on it. A line belongs to the entry of its spec, bucket, config
and run; lines that belong to none are ignored, and go with the next save.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from flashgen.errors import FlashgenError, InvalidArgument, TableError
from flashgen.spec.config import config_of
from flashgen.spec.gpu import Gpu
from flashgen.spec.legality import why_illegal
from flashgen.spec.outcome import Source
from flashgen.spec.records import parsed, value_of
from flashgen.table.entry import (
    NO_EVIDENCE,
    Entry,
    EntryEvidence,
    RunnerUp,
    figure,
    spec_fields,
)
from flashgen.table.yaml import text_of

_IDENTITY = ("spec", "seq_k", "config", "run")


def evidence_file(table: Path) -> Path:
    """The evidence of the table of a file; it need not exist."""
    return table.parent / "evidence" / f"{table.stem}.jsonl"


def with_evidence(entries: Iterable[Entry], gpu: Gpu, path: Path) -> tuple[Entry, ...]:
    """The entries with their evidence of a file; an entry without a line there keeps its own.

    Raises TableError that names file and line.
    """
    try:
        text = text_of(path, TableError)
    except (FileNotFoundError, NotADirectoryError):
        return tuple(entries)
    except (OSError, UnicodeDecodeError) as error:
        raise TableError(f"{path}: cannot be read as UTF-8 text ({error}); delete it") from None
    return with_lines(entries, gpu, text, path)


def with_lines(entries: Iterable[Entry], gpu: Gpu, text: str, path: Path) -> tuple[Entry, ...]:
    """As with_evidence, of a text; `path` stands in errors."""
    found = {_key(_identity(entry)): entry for entry in entries}
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            record = _record(line)
            key = _key({name: record.pop(name, None) for name in _IDENTITY})
            if key in found:
                found[key] = replace(found[key], evidence=_evidence(record, found[key], gpu))
        except FlashgenError as error:
            raise TableError(
                f"{path}, line {number}: {error}; delete the line or restore it from git"
            ) from None
    return tuple(found.values())


def evidence_text(entries: Iterable[Entry]) -> str:
    """The lines of all entries that have evidence."""
    lines = [
        json.dumps(_identity(entry) | facts_of(entry))
        for entry in entries
        if entry.evidence != NO_EVIDENCE
    ]
    return "".join(f"{line}\n" for line in lines)


def _identity(entry: Entry) -> dict[str, Any]:
    return {
        "spec": spec_fields(entry.spec),
        "seq_k": entry.bucket.low,
        "config": entry.config.label,
        "run": entry.run,
    }


def _key(identity: dict[str, Any]) -> str:
    return json.dumps(identity, sort_keys=True)


def _interval(entry: Entry) -> tuple[str, str]:
    """How the keys of low_us and high_us are called: a measured entry has percentiles."""
    return ("p20_us", "p80_us") if entry.result.source == "measured" else ("low_us", "high_us")


def facts_of(entry: Entry) -> dict[str, Any]:
    """What a line says of an entry; what is None or 0 is left out."""
    evidence = entry.evidence
    low, high = _interval(entry)
    facts = {
        low: evidence.low_us,
        high: evidence.high_us,
        "sdpa_us": evidence.sdpa_us,
        "p_value": evidence.p_value,
        "regret": evidence.regret,
    }
    runners_up = [
        {"config": other.config.label, "source": other.source}
        | ({} if other.median_us is None else {"us": float(figure(other.median_us))})
        | {"digest": other.digest}
        for other in evidence.runners_up
    ]
    found = {name: float(figure(value)) for name, value in facts.items() if value}
    return found | ({"runners_up": runners_up} if runners_up else {})


def _record(line: str) -> dict[str, Any]:
    try:
        record = parsed(line)
    except ValueError as error:
        raise InvalidArgument(f"this is not JSON ({error})") from None
    if not isinstance(record, dict):
        raise InvalidArgument("a line must be an object of JSON")
    return record


def _evidence(record: dict[str, Any], entry: Entry, gpu: Gpu) -> EntryEvidence:
    low, high = _interval(entry)
    runners_up = record.pop("runners_up", [])
    if not isinstance(runners_up, list):
        raise InvalidArgument("runners_up must be a list")
    names = {low: "low_us", high: "high_us"} | {
        name: name for name in ("sdpa_us", "p_value", "regret")
    }
    _check_keys(record, names)
    return EntryEvidence(
        **{names[key]: _number(key, value) for key, value in record.items()},
        runners_up=tuple(_runner_up(other, entry, gpu) for other in runners_up),
    )


def _runner_up(record: Any, entry: Entry, gpu: Gpu) -> RunnerUp:
    _check_keys(record, ("config", "source", "us", "digest"))
    config, source, digest = (record.get(name) for name in ("config", "source", "digest"))
    if source not in get_args(Source) or not isinstance(digest, str):
        raise InvalidArgument(f"a runner-up must have a source and a digest: got {record}")
    found = config_of(str(config))
    if reason := why_illegal(entry.spec, found, gpu):
        raise InvalidArgument(f"the runner-up {config} is illegal on {gpu.slug}: {reason}")
    us = _number("us", record["us"]) if "us" in record else None
    return RunnerUp(config=found, source=source, median_us=us, digest=digest)


def _check_keys(record: Any, known: Iterable[str]) -> None:
    unknown = [str(key) for key in record if key not in known] if isinstance(record, dict) else []
    if unknown or not isinstance(record, dict):
        raise InvalidArgument(f"a line has the keys {', '.join(known)}: got {unknown or record!r}")


def _number(key: str, value: object) -> float:
    return float(value_of(float, value, key))
