"""Tables as one JSON document for other programs, and its JSON Schema."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, fields
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from flashgen import __version__
from flashgen.schedules.config import KernelConfig
from flashgen.schedules.outcome import Source
from flashgen.spec.attention import AttentionSpec
from flashgen.table.emit import stale_of
from flashgen.table.entry import Run
from flashgen.table.show import BESIDE, record_of
from flashgen.table.table import Table

FORMAT = 1
"""The version of the document. It rises when a field changes its meaning or goes."""


def document(tables: Iterable[Table]) -> str:
    """Tables with all that is known of each entry, as schema() describes it."""
    found = []
    for table in tables:
        record = record_of(table, table.entries, stale_of(table.entries))
        for row, entry in zip(record["entries"], table.entries, strict=True):
            row |= {"spec": asdict(entry.spec), "config": asdict(entry.config)}
            row["config"]["label"] = entry.config.label
            row["seq_k"] = {"low": entry.bucket.low, "high": entry.bucket.high}
        found.append(record)
    return json.dumps({"format": FORMAT, "flashgen": __version__, "tables": found}, indent=1)


def schema() -> str:
    """The JSON Schema of document(), draft 2020-12."""
    text, number, whole = {"type": "string"}, {"type": "number"}, {"type": "integer"}
    config = _object(**_of_fields(KernelConfig), label=text)
    timed = {"source": {"enum": list(get_args(Source))}, "us": number}
    runner_up = _object(config=text, digest=text, **timed, optional=("us",))
    evidence = _object(
        low_us=number, high_us=number, p20_us=number, p80_us=number, sdpa_us=number,
        p_value=number, regret=number,
        runners_up={"type": "array", "items": runner_up},
        optional=(
            "low_us", "high_us", "p20_us", "p80_us", "sdpa_us", "p_value", "regret", "runners_up",
        ),
    )  # fmt: skip
    high = {"type": ["integer", "null"], "description": "the first length of the next interval"}
    entry = _object(
        name=text | {"description": "the spec in one word"},
        spec=_object(**_of_fields(AttentionSpec)),
        seq_k=_object(low=whole, high=high) | {"description": "key lengths: low <= seq_k < high"},
        config=config,
        **timed,
        default_us=number | {"description": "the default kernel in the same run, microseconds"},
        floors=number | {"description": "largest error, in floors of docs/numerics.md"},
        tried=text | {"description": "configs that were tried, of the legal ones"},
        registers=whole | {"description": "per thread"},
        shared=whole | {"description": "bytes of shared memory"},
        problem=text | {"description": "the sizes that were timed"},
        run=text,
        digest=text | {"description": "of the kernel's text"},
        stale={"type": "boolean", "description": "the kernel's text changed since it was timed"},
        tflops=number,
        gbs=number,
        evidence=evidence,
        optional=("us", "default_us", "tflops", "gbs", *BESIDE),
    )
    table = _object(
        gpu=_object(slug=text, name=text, arch=text),
        runs={"type": "array", "items": _object(**_of_fields(Run), date=text)},
        entries={"type": "array", "items": entry},
    )
    tables = {"type": "array", "items": table}
    whole_document = _object(format={"const": FORMAT}, flashgen=text, tables=tables)
    dialect = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    return json.dumps(dialect | whole_document, indent=1)


def _object(*, optional: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": [name for name in properties if name not in optional],
        "additionalProperties": False,
    }


def _of_fields(kind: type[Any]) -> dict[str, Any]:
    """The properties of a dataclass: all its fields."""
    hints = get_type_hints(kind)
    return {field.name: _of_type(hints[field.name]) for field in fields(kind)}


def _of_type(hint: Any) -> dict[str, Any]:
    if get_origin(hint) is Literal:
        return {"enum": list(get_args(hint))}
    if get_origin(hint) is UnionType:  # of a value and None
        return {"anyOf": [_of_type(each) for each in get_args(hint)]}
    words = {int: "integer", bool: "boolean", str: "string", float: "number", type(None): "null"}
    return {"type": words[hint]}
