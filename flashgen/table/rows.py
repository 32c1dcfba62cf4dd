"""The rows of configs/<slug>.yaml: neighbouring buckets of a spec with one config, in columns."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from typing import get_args

from flashgen.errors import InvalidArgument
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.config import config_of
from flashgen.spec.problem import BUCKETS, Bucket
from flashgen.spec.vocabulary import Source
from flashgen.table.entry import Entry, Result, figure

LEGEND = (
    "# A row holds from the number of keys before it to the next row's. Its columns of us and of",
    "# x default (times as fast as the default) are the buckets of lengths that begin at "
    f"{', '.join(str(bucket.low) for bucket in BUCKETS[:-1])}",
    f"# and {BUCKETS[-1].low}. The error is in floors.",
)
EXECUTED_LEGEND = (
    "# These serve in place of the entries above under the versions of Triton that they name: what",
    "# those compile was executed on a CPU, was right and had no fault. No GPU has timed them.",
    "# With another Triton, and with FLASHGEN_PLAIN=1, the entries above serve.",
)
_HEADS = ("# from", "config", "source", "us", "x default", "floors")
_NO_ENTRY, _NOT_TIMED = "none", "-"
"""What stands in a row for buckets without an entry, and in the place of a time that is missing."""

_NUMBER = re.compile(r"[0-9]{1,18}(\.[0-9]{1,18})?")


@dataclass(frozen=True, kw_only=True)
class Row:
    """Neighbouring buckets of a spec whose entries share config, source and floors. entries is
    empty from where on there is none, up to the next row.
    """

    low: int
    entries: tuple[Entry, ...]

    def _cells(self, field: str, form: Callable[[float], str]) -> list[str]:
        """A figure of each entry, in the column of its bucket."""
        found = dict.fromkeys(BUCKETS, "")
        for entry in self.entries:
            value = getattr(entry.result, field)
            found[entry.bucket] = form(value) if value else _NOT_TIMED
        return list(found.values())


def rows_of(entries: Iterable[Entry]) -> list[Row]:
    """The rows of the entries of one spec."""
    held = {entry.bucket: entry for entry in entries}
    found: list[Row] = []
    for shared, group in groupby(BUCKETS, key=lambda bucket: _shared(held.get(bucket))):
        buckets = list(group)
        if shared or found:
            row = tuple(held[bucket] for bucket in buckets if shared)
            found.append(Row(low=buckets[0].low, entries=row))
    return found


def _shared(entry: Entry | None) -> tuple[str, str, str] | None:
    """The columns that entries of one row have in common; None where there is no entry."""
    if entry is None:
        return None
    result = entry.result
    return entry.config.label, result.source, f"{result.max_abs_err_floors:.3f}"


def lines_of(entries: Iterable[Entry]) -> Iterator[str]:
    """The heads of the columns; then of each spec its line, and its rows."""
    groups = groupby(entries, key=lambda entry: entry.spec)
    blocks = {spec.name: rows_of(group) for spec, group in groups}
    lines = iter(_in_columns([row for rows in blocks.values() for row in rows]))
    yield next(lines)
    for name, rows in blocks.items():
        yield f"- spec: {name}"
        tritons = next(row.entries[0].tritons for row in rows if row.entries)
        if tritons:
            yield f'  triton: "{" ".join(tritons)}"'
        yield from islice(lines, len(rows))


def _in_columns(rows: Sequence[Row]) -> list[str]:
    us = _joined([row._cells("median_us", figure) for row in rows])
    speedups = _joined([row._cells("speedup", _ratio) for row in rows])
    lines: list[tuple[str, ...]] = [_HEADS]
    for row, *times in zip(rows, us, speedups, strict=True):
        shared = _shared(row.entries[0]) if row.entries else None
        config, source, floors = shared or (_NO_ENTRY, "", "")
        lines.append((f"  {row.low}:", config, source, *times, floors))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]


def _ratio(value: float) -> str:
    return f"{max(value, 0.01):.2f}"  # 0 is no ratio


def _joined(rows: Sequence[Sequence[str]]) -> list[str]:
    """The cells of each row as one text, right-aligned in columns of their own."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [" ".join(map(str.rjust, row, widths)) for row in rows]


def read(
    spec: AttentionSpec, buckets: Sequence[Bucket], text: str, tritons: tuple[str, ...] = ()
) -> tuple[Entry, ...]:
    """The entries of the row of these buckets, executed ones under `tritons`. Raises
    InvalidArgument.
    """
    count = len(buckets)
    config, *words = text.split()
    if (config, words) == (_NO_ENTRY, []):
        return ()
    if len(words) != 2 + 2 * count:
        lows = ", ".join(str(bucket.low) for bucket in buckets)
        raise InvalidArgument(
            f"a row must have config, source, us and x default of each bucket, and floors, which "
            f"is {3 + 2 * count} words for the buckets from {lows}: got {1 + len(words)}"
        )
    source, *times, floors = words
    if source not in get_args(Source):
        raise InvalidArgument(
            f"source must be one of {', '.join(get_args(Source))}: got {source!r}"
        )
    us = [_number("us", word) for word in times[:count]]
    speedups = [_number("x default", word) for word in times[count:]]
    error = _number("floors", floors)
    if error is None:
        raise InvalidArgument("floors must be a number, like 12.5: got '-'")
    return tuple(
        Entry(
            spec=spec,
            bucket=bucket,
            config=config_of(config),
            result=Result(
                source=source,  # type: ignore[arg-type]  # checked above
                median_us=median_us,
                speedup=speedup,
                max_abs_err_floors=error,
            ),
            tritons=tritons,
        )
        for bucket, median_us, speedup in zip(buckets, us, speedups, strict=True)
    )


def _number(name: str, word: str) -> float | None:
    """A number of a row; None where there is none."""
    if word != _NOT_TIMED and not _NUMBER.fullmatch(word):
        raise InvalidArgument(f"{name} must be a number, like 12.5: got {word!r}")
    return None if word == _NOT_TIMED else float(word)
