"""The rows of configs/<slug>.yaml: neighbouring buckets of a spec with one config, in columns."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby, islice
from operator import attrgetter
from typing import Any

from flashgen.errors import InvalidArgument
from flashgen.schedules.config import config_of
from flashgen.schedules.outcome import STRENGTH
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.problem import BUCKETS, Bucket
from flashgen.table.entry import Entry, Result, figure

LEGEND = f"""\
# A block names its source and its specs: bfloat16 and float16 share one where only floors differ.
# A row names the features that it adds to them, and the number of keys at which it begins. Its
# columns of us and of x default (times as fast as the default) are the buckets that begin at
# {", ".join(str(bucket.low) for bucket in BUCKETS)}.
# The time of a decode is the geometric mean for 1, 4, 16 and 64 sequences.
# Floors are the error of each spec."""
EXECUTED_LEGEND = """\
# A block `executed` serves in place of those above it, under the versions of Triton that it names:
# what those compile was executed on a CPU, was right and had no fault. No GPU has timed it.
# With another Triton, and with FLASHGEN_PLAIN=1, those above it serve."""
EXECUTED, TRITON = "executed", "triton"
"""The source of a block that serves under the versions of Triton that stand behind its specs."""

_HEADS = ("# from", "config", "us", "x default", "floors")
_NOT_TIMED = "-"
"""What stands in the place of a time that is missing."""

_NUMBER = re.compile(r"[0-9]{1,18}(\.[0-9]{1,18})?")

Row = tuple[Entry, ...]
"""Neighbouring buckets of a spec whose entries share config, source and floors."""


def rows_of(entries: Iterable[Entry]) -> list[Row]:
    """The rows of the entries of one spec."""
    held = {entry.bucket: entry for entry in entries}
    groups = groupby(BUCKETS, key=lambda bucket: _shared(held.get(bucket)))
    return [tuple(held[bucket] for bucket in buckets) for shared, buckets in groups if shared]


def _shared(entry: Entry | None) -> tuple[str, str, str] | None:
    """The columns that entries of one row have in common; None where there is no entry."""
    if entry is None:
        return None
    return entry.config.label, entry.result.source, _floors(entry)


def _floors(entry: Entry) -> str:
    return f"{entry.result.max_abs_err_floors:.3f}"


def _ratio(value: float) -> str:
    return f"{max(value, 0.01):.2f}"  # 0 is no ratio


def _figures(row: Row, field: str, form: Callable[[float], str]) -> tuple[str, ...]:
    """A figure of each entry, in the column of its bucket."""
    found = dict.fromkeys(BUCKETS, "")
    for entry in row:
        value = getattr(entry.result, field)
        found[entry.bucket] = form(value) if value else _NOT_TIMED
    return tuple(found.values())


def _cells(row: Row) -> tuple[Any, ...]:
    """Where a row begins, its config, and the figures of its buckets."""
    us, speedups = _figures(row, "median_us", figure), _figures(row, "speedup", _ratio)
    spec = row[0].spec
    features = spec.name.removeprefix(spec.plain_name).removeprefix("_")
    begin = f"{features} {row[0].bucket.low}:"
    return f"  {begin.lstrip()}", row[0].config.label, us, speedups


def lines_of(entries: Iterable[Entry]) -> Iterator[str]:
    """The heads of the columns; then of each block its source and specs, and its rows."""
    blocks = list(_blocks(entries))
    lines = iter(_in_columns([row for _, rows in blocks for row in rows]))
    yield next(lines)
    for begin, rows in blocks:
        yield begin
        yield from islice(lines, len(rows))


def _blocks(entries: Iterable[Entry]) -> Iterator[tuple[str, list[tuple[Any, ...]]]]:
    """Of each block its first line, and the cells of its rows."""
    twins: dict[tuple[Any, ...], list[tuple[str, list[str]]]] = {}
    key = attrgetter("spec", "tritons", "result.source")
    for (spec, tritons, source), group in groupby(sorted(entries, key=_place), key=key):
        rows = rows_of(group)
        twin = spec.name.replace("_fp16_", "_bf16_"), tritons, source, *map(_cells, rows)
        found = twins.setdefault(twin, [])
        found.append((spec.plain_name, [_floors(row[0]) for row in rows]))
    blocks: dict[tuple[str, ...], list[tuple[Any, ...]]] = {}
    for (_, tritons, source, *cells), found in twins.items():
        names, floors = zip(*found, strict=True)
        words = (EXECUTED, *names, TRITON, *tritons) if tritons else (source, *names)
        blocks.setdefault(words, []).extend(
            (*each, " ".join(errors)) for each, *errors in zip(cells, *floors, strict=True)
        )
    for words, held in blocks.items():
        yield f"- {words[0]}: {' '.join(words[1:])}", held


def _place(entry: Entry) -> tuple[Any, ...]:
    """Sort key of entries in the text: twins stand together, and what is executed behind them."""
    direction, dtype, *more = entry.spec.sort_key
    strength = STRENGTH[entry.result.source]
    return direction, more, bool(entry.tritons), dtype, entry.tritons, -strength, entry.bucket.low


def _in_columns(rows: Sequence[tuple[Any, ...]]) -> list[str]:
    us, speedups = (_joined([row[place] for row in rows]) for place in (2, 3))
    lines = [_HEADS]
    for row, *times in zip(rows, us, speedups, strict=True):
        lines.append((*row[:2], *times, row[4]))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]


def _joined(rows: Sequence[Sequence[str]]) -> list[str]:
    """The cells of each row as one text, right-aligned in columns of their own."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [" ".join(map(str.rjust, row, widths)) for row in rows]


def read(
    source: str,
    specs: Sequence[AttentionSpec],
    tritons: tuple[str, ...],
    buckets: Sequence[Bucket],
    text: str,
) -> Iterator[Entry]:
    """The entries of a row of a block, which may have these buckets. Raises InvalidArgument."""
    config, *words = text.split()
    count, rest = divmod(len(words) - len(specs), 2)
    if rest or not 0 < count <= len(buckets):
        lows = ", ".join(str(bucket.low) for bucket in buckets)
        raise InvalidArgument(
            f"a row must have config, us of each bucket, x default of each, and the floors of each "
            f"spec: got {len(words)} numbers for {len(specs)} spec{'s' * (len(specs) > 1)} and "
            f"buckets from {lows}"
        )
    us = [_number("us", word) for word in words[:count]]
    speedups = [_number("x default", word) for word in words[count : 2 * count]]
    if source == EXECUTED:
        source = "untimed" if us[0] is None else "estimated"
    for spec, floors in zip(specs, words[2 * count :], strict=True):
        error = _number("floors", floors)
        if error is None:
            raise InvalidArgument("floors must be a number, like 12.5: got '-'")
        for bucket, median_us, speedup in zip(buckets, us, speedups, strict=False):
            result = Result(
                source=source,  # type: ignore[arg-type]  # a key that was read
                median_us=median_us,
                speedup=speedup,
                max_abs_err_floors=error,
            )
            yield Entry(
                spec=spec,
                bucket=bucket,
                config=config_of(config),
                result=result,
                tritons=tritons,
            )


def _number(name: str, word: str) -> float | None:
    """A number of a row; None where there is none."""
    if word != _NOT_TIMED and not _NUMBER.fullmatch(word):
        raise InvalidArgument(f"{name} must be a number, like 12.5: got {word!r}")
    return None if word == _NOT_TIMED else float(word)
