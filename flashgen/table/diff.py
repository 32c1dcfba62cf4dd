"""What changed between two tables of a GPU, as Markdown for a pull request; and merging tables.

Times compare only with the same source, problem and protocol, which the evidence says. Otherwise
both are shown, without a ratio.

The rule of merging, for entries of one spec and bucket: the stronger source wins. Of the same
source, if the times compare, the faster one wins; if measured, only if its 80th percentile lies
below the other's 20th, because the least of many noisy medians is no winner. (Percentiles are in
the evidence: without it no measured entry is faster.) Otherwise the entry of the later run wins.
Executed entries have no rivals but each other: under each version of Triton that of the later run
wins, where no measured entry rules it out.
"""

from __future__ import annotations

import itertools
import math
import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from flashgen.errors import InvalidArgument
from flashgen.schedules.legality import why_illegal
from flashgen.schedules.outcome import STRENGTH
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.gpu import Gpu
from flashgen.spec.problem import Bucket
from flashgen.table.entry import NO_EVIDENCE, Entry, Run, figure, version_number
from flashgen.table.evidence import missing
from flashgen.table.table import Table, outdone

_Key = tuple[AttentionSpec, Bucket]
ChangeKind = Literal["config", "weakened", "figures", "added", "removed"]
"""What became of an entry: another config; a weaker source; the same config with other figures, or
under other versions of Triton."""

_HEADINGS: dict[ChangeKind, str] = {
    "weakened": "Weaker source than before",
    "removed": "Removed",
    "config": "Another config",
    "added": "Added",
    "figures": "Same config, other figures or versions of Triton",
}
"""In the order of the Markdown: what a reviewer must not miss comes first."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """One spec and bucket that differs: its entry before (None: there was none) and after."""

    before: Entry | None
    after: Entry | None
    ratio: float | None = None
    """The median before over the one after, more than 1 is faster; None where they do not
    compare."""

    @property
    def kind(self) -> ChangeKind:
        """The heading of the change."""
        if self.before is None:
            return "added"
        if self.after is None:
            return "removed"
        if STRENGTH[self.after.result.source] < STRENGTH[self.before.result.source]:
            return "weakened"
        return "figures" if self.before.config == self.after.config else "config"

    @property
    def entry(self) -> Entry:
        """The entry after, or before if there is none after."""
        entry = self.after or self.before
        assert entry is not None  # a change has one of them
        return entry


@dataclass(frozen=True, kw_only=True)
class Diff:
    """All that differs between two tables of one GPU. facts: names of differing facts of it."""

    old: Table
    new: Table
    changes: tuple[Change, ...]
    unchanged: int
    facts: tuple[str, ...]

    def of(self, kind: ChangeKind) -> tuple[Change, ...]:
        """The changes under one heading, in the order of tables."""
        return tuple(change for change in self.changes if change.kind == kind)


def diff(old: Table, new: Table) -> Diff:
    """What changed between two tables of a GPU.

    An entry found again with equal figures by another run is no difference.

    Args:
        old: the table before.
        new: the table after.

    Returns:
        The differences.

    Raises:
        InvalidArgument: if the tables are of different GPUs.

    Examples:
        >>> from flashgen import paths
        >>> from flashgen.table import diff, load
        >>> table = load(paths.shipped_table("nvidia_l4"))
        >>> diff.diff(table, table).changes
        ()
    """
    _demand_one_gpu((old, new), "compared")
    changes, unchanged = [], 0
    for before, after in _pairs(old, new):
        if before and after and _same(before, after):
            unchanged += 1
            continue
        ratio = None
        if before and after and _compare(before, old.run_of(before), after, new.run_of(after)):
            assert before.result.median_us is not None
            assert after.result.median_us is not None
            ratio = before.result.median_us / after.result.median_us
        changes.append(Change(before=before, after=after, ratio=ratio))
    names = [field.name for field in fields(Gpu)]
    return Diff(
        old=old,
        new=new,
        changes=tuple(changes),
        unchanged=unchanged,
        facts=tuple(name for name in names if getattr(old.gpu, name) != getattr(new.gpu, name)),
    )


def merge(tables: Sequence[Table]) -> Table:
    """One table of the entries of several, the strongest source and the latest run first.

    The GPU's facts are those of the run with the strongest source, of several the latest: a device
    that was read beats a list of targets.

    Args:
        tables: one or more tables of one GPU.

    Returns:
        The table.

    Raises:
        InvalidArgument: for no table, different GPUs, or an entry that these facts do not allow.

    Examples:
        >>> from flashgen import paths
        >>> from flashgen.table import diff, load
        >>> table = load(paths.shipped_table("nvidia_l4"))
        >>> len(diff.merge([table, table]).entries) == len(table.entries)
        True
    """
    if not tables:
        raise InvalidArgument("tables must be one at least: got none")
    _demand_one_gpu(tables, "merged")
    strongest = max(tables, key=lambda table: max(map(_weight, table.runs), default=(-1, "")))
    won: dict[_Key, tuple[Entry, Run | None]] = {}
    for table in tables:
        for entry in table.entries:
            key, found = entry.key, (entry, table.run_of(entry))
            if key not in won or _wins(*found, *won[key]):
                won[key] = found
    winners = [*won.values(), *_executed_winners(tables, won)]
    merged = _of_winners(winners, tables, strongest.gpu)
    for entry in merged.everything:
        reason = why_illegal(entry.spec, entry.config, merged.gpu)
        if reason is not None:
            raise InvalidArgument(
                f"{entry.spec.name} {entry.bucket} must be legal on {merged.gpu.slug} as its "
                f"strongest run found it: {entry.config.label}: {reason}; tune it again"
            )
    return merged


def _executed_winners(
    tables: Sequence[Table], won: Mapping[_Key, tuple[Entry, Run | None]]
) -> Iterator[tuple[Entry, Run | None]]:
    """Of the executed entries that the plain ones leave, under each version of Triton the one of
    the latest run.
    """
    latest: dict[tuple[_Key, str], tuple[Entry, Run | None]] = {}
    for table in tables:
        for entry in table.executed:
            run = table.run_of(entry)
            if entry.key not in won or outdone(entry, *won[entry.key]):
                continue
            for version in entry.tritons:
                held = latest.get((entry.key, version))
                if held is None or (run.date if run else "") > (held[1].date if held[1] else ""):
                    latest[entry.key, version] = entry, run
    versions = defaultdict[tuple[Any, ...], list[str]](list)
    kernels: dict[tuple[Any, ...], tuple[Entry, Run | None]] = {}
    for (key, version), (entry, run) in latest.items():
        kernel = key, entry.config, entry.result
        versions[kernel].append(version)
        kernels.setdefault(kernel, (entry, run))
    for kernel, (entry, run) in kernels.items():
        tritons = tuple(sorted(versions[kernel], key=version_number))
        yield replace(entry, tritons=tritons), run


def _weight(run: Run) -> tuple[int, str]:
    """Sort key of runs: which run determines the facts of the GPU."""
    return STRENGTH[run.source], run.date


def _of_winners(
    won: Sequence[tuple[Entry, Run | None]], tables: Sequence[Table], gpu: Gpu
) -> Table:
    """The table of these entries and their runs, whose names are distinct. An entry of an unknown
    run may come from any.
    """
    named: dict[str, Run] = {}

    def name_of(run: Run) -> str:
        number, name = 1, run.id
        while named.setdefault(name, there := replace(run, id=name)) != there:
            number += 1
            name = f"{run.id}-{number}"
        return name

    entries = []
    for entry, run in won:
        name = name_of(run) if run else None
        entries.append(replace(entry, evidence=replace(entry.evidence, run=name)))
    if any(run is None for _, run in won):
        for each in tables:
            for run in each.runs:
                name_of(run)
    return Table(gpu=gpu, runs=tuple(named.values()), entries=tuple(entries)).in_order()


def _wins(entry: Entry, run: Run | None, held: Entry, held_run: Run | None) -> bool:
    """The rule of merging."""
    new, old = entry.result, held.result
    if STRENGTH[new.source] != STRENGTH[old.source]:
        return STRENGTH[new.source] > STRENGTH[old.source]
    if _compare(entry, run, held, held_run):
        if _faster(entry, held):
            return True
        if _faster(held, entry):
            return False
    return (run.date if run else "") > (held_run.date if held_run else "")


def _pairs(old: Table, new: Table) -> Iterator[tuple[Entry | None, Entry | None]]:
    """The entries of each spec and bucket before and after. Of those that are executed, one before
    those with its config, then those of the newest Triton with each other.
    """
    held = [defaultdict[_Key, list[Entry]](list) for _ in (old, new)]
    for table, by_key in zip((old, new), held, strict=True):
        for entry in (*table.entries, *sorted(table.executed, key=_newest, reverse=True)):
            by_key[entry.key].append(entry)
    for key in sorted(set().union(*held), key=lambda key: (key[0].sort_key, key[1].low)):
        before, after = ({e.config: e for e in each[key] if e.tritons} for each in held)
        plain = [next((e for e in each[key] if not e.tritons), None) for each in held]
        alike = [config for config in before if config in after]
        others = [[e for c, e in each.items() if c not in alike] for each in (before, after)]
        if any(plain):
            yield plain[0], plain[1]
        yield from ((before[config], after[config]) for config in alike)
        yield from itertools.zip_longest(*others)


def _newest(entry: Entry) -> tuple[int, ...]:
    return max(map(version_number, entry.tritons))


def _same(one: Entry, other: Entry) -> bool:
    """Whether two entries say the same, whatever their runs; evidence need not be there."""
    names = ("digest", "problem", "registers", "shared_bytes", "tried")
    known = NO_EVIDENCE not in (one.evidence, other.evidence)
    same = [(e.config, e.tritons, e.result) for e in (one, other)]
    return same[0] == same[1] and all(
        getattr(one.evidence, name) == getattr(other.evidence, name) for name in names if known
    )


def _compare(one: Entry, run: Run | None, other: Entry, other_run: Run | None) -> bool:
    """Whether the two times compare; without evidence nobody knows."""
    alike = one.result.source == other.result.source and one.problem == other.problem
    timed = one.result.median_us is not None and other.result.median_us is not None
    return bool(alike and timed and run and other_run and run.protocol == other_run.protocol)


def _faster(one: Entry, other: Entry) -> bool:
    """Whether the first of two comparable entries is faster, if measured beyond the spread."""
    if one.result.source == "measured":
        return (one.evidence.high_us or math.inf) < (other.evidence.low_us or 0.0)
    return (one.result.median_us or math.inf) < (other.result.median_us or math.inf)


def _demand_one_gpu(tables: Sequence[Table], what: str) -> None:
    """Raise InvalidArgument unless all tables are of one product."""
    slugs = dict.fromkeys(table.gpu.slug for table in tables)
    if len(slugs) > 1:
        raise InvalidArgument(
            f"only tables of one GPU can be {what}: got {' and '.join(slugs)}; "
            f"a configuration that wins on one may not even fit another"
        )


def markdown(found: Diff) -> str:
    """A diff as text for a pull request.

    Args:
        found: the differences.

    Returns:
        The text.

    Raises:
        Nothing: the differences were checked when they were made.

    Examples:
        >>> from flashgen import paths
        >>> from flashgen.table import diff, load
        >>> table = load(paths.shipped_table("nvidia_l4"))
        >>> text = diff.markdown(diff.diff(table, table))
    """
    old, new = found.old.gpu, found.new.gpu
    total = len(found.changes) + found.unchanged
    lines = [f"### {_text(new.name)}: {len(found.changes)} of {total} entries differ", ""]
    if found.facts:
        facts = (f"{name} {getattr(old, name)} → {getattr(new, name)}" for name in found.facts)
        lines += [f"Facts of the GPU differ: {_text(', '.join(facts))}.", ""]
    under = {heading: changes for kind, heading in _HEADINGS.items() if (changes := found.of(kind))}
    if not under:
        return "\n".join([*lines, "All entries are the same.", ""])
    counts = [
        f"{len(changes)} {heading[0].lower()}{heading[1:]}" for heading, changes in under.items()
    ]
    lines += [f"{'; '.join(counts)}; {found.unchanged} unchanged.", "", *_verdict(found)]
    changed = [e for change in found.changes for e in (change.before, change.after) if e]
    lines += [line for sentence in missing(changed) for line in (sentence, "")]
    for heading, changes in under.items():
        lines += [f"#### {heading}", "", *_grid(changes), ""]
    lines += ["#### Runs", "", *_runs(found), ""]
    return "\n".join(lines)


def _verdict(found: Diff) -> list[str]:
    """The speed-up and the worst case, over the times that compare."""
    compared = [change for change in found.changes if change.ratio is not None]
    if not compared:
        return ["No two times compare: another source, problem or protocol, or no evidence.", ""]
    ratios = [change.ratio or 1.0 for change in compared]
    worst = min(compared, key=lambda change: change.ratio or 1.0)
    mean = math.exp(statistics.fmean(map(math.log, ratios)))
    sentence = (
        f"Where times compare ({len(compared)} entries) the new ones are {mean:.2f} times as fast, "
        f"in the geometric mean; the worst is {worst.ratio:.2f}, "
        f"of `{worst.entry.spec.name}` {worst.entry.bucket}."
    )
    return [sentence, ""]


_Column = tuple[str, Callable[[Change], str]]


def _grid(changes: Sequence[Change]) -> list[str]:
    """The changes under one heading as a table, without empty columns."""
    columns: list[_Column] = [
        ("spec", lambda change: f"`{change.entry.spec.name}`"),
        ("seq_k", lambda change: str(change.entry.bucket)),
        ("config", lambda change: _both(change, lambda entry: f"`{entry.config.label}`")),
        ("median us", lambda change: _both(change, lambda entry: _us(entry.result.median_us))),
        ("old / new", lambda change: "" if change.ratio is None else f"{change.ratio:.2f}"),
        ("source", lambda change: _both(change, lambda entry: entry.result.source)),
        ("Triton", _tritons_change),
        ("kernel text", _text_change),
        ("tried", _tried_change),
        ("p", lambda change: _number(change.entry.evidence.p_value, ".2g")),
        ("regret", lambda change: _number(change.entry.evidence.regret or None, ".1%")),
    ]
    rows = [[cell(change) for _, cell in columns] for change in changes]
    kept = [n for n in range(len(columns)) if any(row[n] for row in rows)]
    heads = [columns[n][0] for n in kept]
    return _table(heads, [[row[n] for n in kept] for row in rows])


def _both(change: Change, cell: Callable[[Entry], str]) -> str:
    """The cell before and after; once where they are the same."""
    cells = [cell(entry) for entry in (change.before, change.after) if entry is not None]
    return " → ".join(dict.fromkeys(cells))


def _tried_change(change: Change) -> str:
    """How many configs each search tried, if one tried more."""
    tried = _both(change, lambda entry: str(entry.evidence.candidates or "?"))
    return tried if change.before and change.after and "→" in tried else ""


def _tritons_change(change: Change) -> str:
    """Under which versions executed entries serve, if not under the same."""
    tritons = _both(change, lambda entry: ", ".join(entry.tritons))
    return tritons if not (change.before and change.after) or "→" in tritons else ""


def _text_change(change: Change) -> str:
    if change.kind != "figures" or change.before is None or change.after is None:
        return ""
    digests = {change.before.evidence.digest, change.after.evidence.digest}
    return "changed" if len(digests) > 1 and None not in digests else ""


def _runs(found: Diff) -> list[str]:
    """The runs of the entries that differ."""
    names = [field.name for field in fields(Run)]
    rows = []
    for word, table, entries in (
        ("old", found.old, [change.before for change in found.changes if change.before]),
        ("new", found.new, [change.after for change in found.changes if change.after]),
    ):
        used = [entry.evidence.run for entry in entries]
        for run in table.runs:
            if run.id in used:
                facts = (getattr(run, name) for name in names)
                cells = ("-" if fact is None else _text(str(fact)) for fact in facts)
                rows.append([word, *cells, str(used.count(run.id))])
    return _table(["", *names, "entries"], rows)


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [heads, ["---"] * len(heads), *rows]
    return [f"| {' | '.join(line)} |" for line in lines]


def _us(value: float | None) -> str:
    return "untimed" if value is None else figure(value)


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _text(free: str) -> str:
    """Text of a file for a line of Markdown: no markup, no new line, no new cell."""
    return re.sub(r"([\\`*_|<>\[\]#~])", r"\\\1", " ".join(free.split()))
