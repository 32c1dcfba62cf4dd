"""Table: what was chosen for one GPU; configs/<slug>.yaml in and out.

People review these files in git, so dump writes one text for one table: a line for each spec, below
it a row for each config, in columns. load trusts nothing: errors name file, line and what to do.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import get_args

import yaml

from flashgen.errors import InvalidArgument, TableError
from flashgen.files import write_whole
from flashgen.schedules.config import KernelConfig
from flashgen.schedules.legality import why_illegal
from flashgen.schedules.outcome import STRENGTH, Source
from flashgen.spec.attention import AttentionSpec, spec_of
from flashgen.spec.gpu import Gpu
from flashgen.spec.problem import BUCKETS, Bucket
from flashgen.spec.vocabulary import Direction
from flashgen.table import rows
from flashgen.table.entry import (
    NO_EVIDENCE,
    Entry,
    Result,
    Run,
    RunnerUp,
    figure,
    run_name,
)
from flashgen.table.evidence import evidence_file, evidence_text, with_evidence
from flashgen.table.yaml import Nodes, text_of

__all__ = [
    "Entry",
    "Result",
    "Run",
    "RunnerUp",
    "Table",
    "dump",
    "figure",
    "load",
    "load_folders",
    "load_with_evidence",
    "parse",
    "save",
]

SCHEMA = 5
"""Version of the layout of configs/*.yaml, the only one that is read."""

COLUMNS = 120
"""Of a line at most."""

APART: tuple[Direction, ...] = ("backward_dkv", "backward_dq")
"""The kernels that a fused backward replaces."""

KEPT = 32
"""Tables that a process keeps, by their text: all shipped ones and some versions of its own."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """All entries of one GPU, sorted by spec and bucket, and the runs they come from.

    Args:
        gpu: the GPU.
        runs: the tuning runs.
        entries: what was chosen.
        executed: entries that serve in place of others under the versions of Triton that they name.

    Examples:
        >>> from flashgen import paths
        >>> from flashgen.table import load
        >>> load(paths.shipped_table("nvidia_l4")).gpu.sms
        58
    """

    gpu: Gpu
    runs: tuple[Run, ...] = ()
    entries: tuple[Entry, ...] = ()
    executed: tuple[Entry, ...] = ()

    @property
    def everything(self) -> tuple[Entry, ...]:
        """The entries, then those that are executed."""
        return (*self.entries, *self.executed)

    def of(self, everything: Iterable[Entry]) -> Table:
        """The table with these entries, executed ones among them."""
        found = tuple(everything)
        entries = tuple(entry for entry in found if not entry.tritons)
        return replace(self, entries=entries, executed=tuple(e for e in found if e.tritons))

    def of_last_run(self) -> Table:
        """The table with what its latest tuning run wrote alone, which may have had shards: of each
        the latest. All of it without evidence.
        """
        begun: dict[tuple[int, int], str] = {}
        for run in self.runs:  # a run has an id for each donor, all of one date
            begun[run.shard] = max(begun.get(run.shard, ""), run.date)
        _, shards = max(begun, key=begun.__getitem__, default=(1, 1))
        last = {r.id for r in self.runs if r.shard[1] == shards and r.date == begun[r.shard]}
        mine = [entry for entry in self.everything if entry.evidence.run in last]
        return self.of(mine) if mine else self

    def find(
        self, spec: AttentionSpec, bucket: Bucket, config: KernelConfig | None = None
    ) -> Entry | None:
        """The entry of exactly this spec and bucket; with a config, the executed one that has it
        before others.
        """
        executed = self.executed_for(spec, bucket) if config else None
        if executed and executed.config == config:
            return executed
        return next((entry for entry in self.entries if entry.key == (spec, bucket)), None)

    def executed_for(self, spec: AttentionSpec, bucket: Bucket) -> Entry | None:
        """The executed entry of exactly this spec and bucket, if there is one."""
        return next((entry for entry in self.executed if entry.key == (spec, bucket)), None)

    def run_of(self, entry: Entry) -> Run | None:
        """The run that an entry of this table comes from; None without its evidence."""
        return next((run for run in self.runs if run.id == entry.evidence.run), None)

    def with_entry(self, entry: Entry, run: Run | None) -> Table:
        """The table with `entry`, of `run`, in place of the one of its spec and bucket. run is None
        for an entry without evidence.

        An entry whose source is weaker than that of the one in place changes nothing. A measured
        one takes the place of the executed one too, unless it is of a plain kernel under a version
        of Triton in which that one does not serve: there it was no rival. All entries of the spec
        that have its kernel get the largest error that was seen of it. Runs that no entry comes
        from any more are dropped. Raises InvalidArgument for an entry of another run.
        """
        name = None if run is None else run.id
        if entry.evidence.run != name:
            raise InvalidArgument(
                f"entry must come from the run {name!r}: got {entry.evidence.run!r}"
            )
        held = self.find(*entry.key)
        if held and STRENGTH[entry.result.source] < STRENGTH[held.result.source]:
            return self
        stay = [
            other
            for other in self.everything
            if other.key != entry.key
            or (bool(other.tritons) != bool(entry.tritons) and not _outdone(other, entry, run))
        ]
        runs = [other for other in self.runs if other.id != name] + ([run] if run else [])
        everything = _with_largest_floors([*stay, entry], entry)
        return replace(self.of(everything), runs=tuple(runs)).in_order()

    def without_idle(self) -> Table:
        """The table without fused backwards that no call gets: in their bucket dK/dV and dQ are no
        slower together, by times of the same source, or there is none.
        """
        held = {entry.key: entry.result for entry in self.entries}

        def idle(entry: Entry) -> bool:
            apart = [held.get((entry.spec.for_direction(each), entry.bucket)) for each in APART]
            results = [entry.result, *filter(None, apart)]
            if len(results) < 3 or len({result.source for result in results}) > 1:
                return False
            fused, *two = (result.median_us or math.inf for result in results)
            return fused >= sum(two)

        return self.of(
            entry
            for entry in self.everything
            if entry.spec.direction != "backward_fused" or not idle(entry)
        )

    def in_order(self) -> Table:
        """The table as files have it: sorted, without runs that no entry can come from."""
        used = {entry.evidence.run for entry in self.everything}
        kept = (run for run in self.runs if run.id in used or None in used)
        runs = sorted(kept, key=lambda run: run.id)
        entries = sorted(self.everything, key=lambda e: (e.spec.sort_key, e.bucket.low))
        return replace(self.of(entries), runs=tuple(runs))


def _with_largest_floors(everything: Sequence[Entry], new: Entry) -> list[Entry]:
    """`everything`, in which all entries of the kernel of `new` have one error, the largest: it
    is the kernel's, whatever the bucket in which a check saw it.
    """
    alike = [e.spec == new.spec and e.config.kernel == new.config.kernel for e in everything]
    floors = max(e.result.max_abs_err_floors for e in itertools.compress(everything, alike))
    return [
        replace(entry, result=replace(entry.result, max_abs_err_floors=floors)) if same else entry
        for entry, same in zip(everything, alike, strict=True)
    ]


def _outdone(executed: Entry, entry: Entry, run: Run | None) -> bool:
    """Whether an entry of this run was timed where the executed one of its key was its rival."""
    if entry.result.source != "measured":
        return False
    return entry.config.executed or run is None or executed.serves_under(run.triton)


def load(path: Path, *, any_name: bool = False) -> Table:
    """The table of a file, without its evidence.

    Args:
        path: the file, named after its GPU.
        any_name: it may have another name: a copy, to compare or to merge.

    Returns:
        The table.

    Raises:
        TableError: naming file and line.
        InvalidArgument: if a file of any name is not there.

    Examples:
        >>> from flashgen import paths
        >>> from flashgen.table import load
        >>> load(paths.shipped_table("nvidia_l4")).gpu.slug
        'nvidia_l4'
    """
    try:
        text = text_of(path, TableError)
    except FileNotFoundError:
        if any_name:
            raise InvalidArgument(f"{path}: there is no such table") from None
        raise TableError(
            f"{path}: there is no such table; `flashgen tune --target {path.stem}` writes one"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise TableError(f"{path}: cannot be read as UTF-8 text ({error}); restore it") from None
    return parse(text, path, any_name=any_name)


def load_with_evidence(path: Path, *, any_name: bool = False) -> Table:
    """The table of a file, and the evidence that lies beside it. Raises as load does."""
    table = load(path, any_name=any_name)
    return table.of(with_evidence(table, evidence_file(path)))


def load_folders(*folders: Path, evidence: bool = False) -> dict[str, Table]:
    """All tables of these folders by slug; a later folder's wins. A missing folder holds none."""
    tables: dict[str, Table] = {}
    read = load_with_evidence if evidence else load
    for folder in dict.fromkeys(folder.resolve() for folder in folders):
        for path in sorted(folder.glob("*.yaml")):
            tables[path.stem] = read(path)
    return dict(sorted(tables.items()))


def dump(table: Table) -> str:
    """Write a table as text. Any text that this made, parsed and written again, is the same."""
    table = table.in_order()
    lines = [
        f"# What flashgen chose for {table.gpu.name}. Review it here; `flashgen tune` writes it.",
        f"schema: {SCHEMA}",
        "",
        *_flow("gpu: ", table.gpu),
        "",
        "runs:" if table.runs else "runs: []",
        *_lines_of_runs(table.runs),
        "",
        *([rows.LEGEND] if table.entries else ()),
        *([rows.EXECUTED_LEGEND] if table.executed else ()),
        "entries:" if table.entries else "entries: []",
        *(rows.lines_of(table.everything) if table.entries else ()),
    ]
    return "\n".join(lines) + "\n"


def _lines_of_runs(runs: Iterable[Run]) -> Iterator[str]:
    """The facts that runs share, once; below them, by the GPU that lent configs, their dates."""
    groups: dict[str, dict[str, list[str]]] = {}
    for run in runs:
        facts = "\n".join(_flow("- facts: ", run, ("id", "donor")))
        stamp = run.id.partition("-")[0]
        word = stamp if run.id == run_name(stamp, run.source, run.donor) else run.id
        donor = f"from {run.donor}" if run.donor else _SEARCHED
        groups.setdefault(facts, {}).setdefault(donor, []).append(word)
    for facts, donors in groups.items():
        yield facts
        for donor, words in donors.items():
            line = f"  {donor}: {' '.join(words)}"
            yield textwrap.fill(line, COLUMNS, subsequent_indent="    ", break_on_hyphens=False)


def _flow(begin: str, value: Gpu | Run, but: tuple[str, ...] = ()) -> list[str]:
    """The fields of a dataclass that are not None after `begin`, on lines that are short enough."""
    lines, line = [], begin + "{"
    for name, each in asdict(value).items():
        if each is None or name in but:
            continue
        word = figure(each) if isinstance(each, float) else json.dumps(each, ensure_ascii=False)
        item = f"{name}: {word}, "
        if len(line + item) > COLUMNS and not line.endswith("{"):
            lines.append(line.rstrip())
            line = "    "
        line += item
    return [*lines, line.removesuffix(", ") + "}"]


def save(table: Table, path: Path, *, any_name: bool = False) -> None:
    """Write a table, and its evidence beside it; each file holds the old text or the new one.

    Entries whose evidence was not read keep the lines they have.

    Args:
        table: the table.
        path: the file, named after its GPU.
        any_name: it may have another name.

    Returns:
        None.

    Raises:
        TableError: if the file is not named after the GPU.
        FlashgenError: if it cannot be written.

    Examples:
        >>> from flashgen.table import save
        >>> save(table, Path("configs/nvidia_l4.yaml"))  # doctest: +SKIP
    """
    if not any_name and path.stem != table.gpu.slug:
        raise TableError(
            f"{path}: the table of {table.gpu.name} is {table.gpu.slug}.yaml; rename it"
        )
    table = table.in_order()
    beside = evidence_file(path)
    unread = [entry for entry in table.everything if entry.evidence == NO_EVIDENCE]
    read = with_evidence(table.of(unread), beside) if unread else ()
    kept = {(entry.key, entry.tritons): entry for entry in read}
    evidence = evidence_text(kept.get((e.key, e.tritons), e) for e in table.everything)
    write_whole(path, dump(table), durable=True)
    if evidence or beside.exists():
        write_whole(beside, evidence, durable=True)


@functools.lru_cache(KEPT)
def parse(text: str, path: Path, *, any_name: bool = False) -> Table:
    """The table in a text; `path` stands in errors and says of which GPU, unless the file may have
    `any_name`. Raises TableError.
    """
    reader = _Reader(path, any_name)
    return reader.table(reader.root(text))


_SEARCHED = "searched"
_A_NAME = "20260102T030405Z-any"
"""Stands for the name of a run while the facts that it shares are read."""
_SOURCES = (*get_args(Source), rows.EXECUTED)
_PLACE = {str(bucket.low): place for place, bucket in enumerate(BUCKETS)}


class _Reader(Nodes):
    """Reads the nodes of a table into the dataclasses above."""

    def __init__(self, path: Path, any_name: bool) -> None:
        super().__init__(path, TableError)
        self.any_name = any_name

    def table(self, root: yaml.Node) -> Table:
        schema = self.keys(root, None).get("schema")
        if schema is not None and (found := self.value(schema, int, "schema")) != SCHEMA:
            newer = "is newer than" if found > SCHEMA else "is not that of"
            remedy = "update flashgen" if found > SCHEMA else "tune again"
            self.fail(
                schema.start_mark,
                f"schema {found} {newer} this flashgen, which reads {SCHEMA}; {remedy}",
            )
        parts = self.keys(root, ("schema", "gpu", "runs", "entries"))
        table = Table(gpu=self.gpu(parts["gpu"]), runs=self.runs(parts["runs"]))
        marked = [
            each for block in self.items(parts["entries"], "entries") for each in self.block(block)
        ]
        self.check(marked, table.gpu)
        return table.of(entry for entry, _ in marked).in_order()

    def gpu(self, node: yaml.Node) -> Gpu:
        gpu: Gpu = self.record(node, Gpu)
        if gpu.slug != self.path.stem and not self.any_name:
            self.fail(
                node.start_mark,
                f"this is the table of another product, {gpu.name!r}; its file is {gpu.slug}.yaml",
            )
        return gpu

    def runs(self, node: yaml.Node) -> tuple[Run, ...]:
        found: dict[str, Run] = {}
        for group in self.items(node, "runs"):
            parts = self.keys(group, None)
            self.keys(group, ("facts", *parts))
            facts: Run = self.record(parts.pop("facts"), Run, id=_A_NAME, donor=None)
            for name, words in parts.items():
                donor = None if name == _SEARCHED else name.removeprefix("from ")
                for word in self.value(words, str, name).split():
                    named = word if "-" in word else run_name(word, facts.source, donor)
                    if named in found:
                        self.fail(words.start_mark, f"the run {named!r} is here twice; remove one")
                    try:
                        found[named] = replace(facts, id=named, donor=donor)
                    except InvalidArgument as error:
                        self.fail(words.start_mark, f"{error}; correct it or remove it")
        return tuple(found.values())

    def block(self, node: yaml.Node) -> Iterator[tuple[Entry, yaml.Mark]]:
        """The entries of a block, each with its line."""
        parts = self.keys(node, None)
        source, *more = [name for name in parts if name in _SOURCES] or [""]
        if more or not source:
            self.fail(
                node.start_mark,
                f"a block must have one of {', '.join(_SOURCES)} before its specs; correct it",
            )
        line = parts.pop(source)
        try:
            names, _, versions = self.value(line, str, "the specs").partition(f" {rows.TRITON} ")
            tritons = tuple(versions.split())
            if bool(tritons) != (source == rows.EXECUTED):
                raise InvalidArgument(
                    f"a block `executed`, and no other, must name versions of Triton, like "
                    f"`- executed: fwd_bf16_d64 {rows.TRITON} 3.6 3.7`"
                )
            specs = tuple(map(spec_of, names.split()))
        except InvalidArgument as error:
            self.fail(line.start_mark, f"{error}; correct it or remove the block")
        if not parts:
            self.fail(line.start_mark, "a block must have a row below its specs; remove it")
        for features, begins in self.by_features(parts).items():
            lows = sorted(begins, key=_PLACE.__getitem__)
            for low, after in zip(lows, [*lows[1:], None], strict=True):
                buckets, row = BUCKETS[_PLACE[low] : _PLACE[after] if after else None], begins[low]
                try:
                    with_features = [spec_of("_".join((s.name, *features))) for s in specs]
                    text = self.value(row, str, "a row")
                    for entry in rows.read(source, with_features, tritons, buckets, text):
                        yield entry, row.start_mark
                except InvalidArgument as error:
                    self.fail(row.start_mark, f"{error}; correct it or remove the row")

    def by_features(
        self, parts: dict[str, yaml.Node]
    ) -> dict[tuple[str, ...], dict[str, yaml.Node]]:
        """The rows of a block by the features that they add, and by where they begin."""
        found: dict[tuple[str, ...], dict[str, yaml.Node]] = {}
        for name, row in parts.items():
            *features, low = name.split(" ")
            if len(features) > 1 or low not in _PLACE:
                self.fail(
                    row.start_mark,
                    f"a row must have its features, if any, and one of {', '.join(_PLACE)} before "
                    f"it, like `window_sink 4096`: got {name!r}; correct it or remove it",
                )
            found.setdefault(tuple(features), {})[low] = row
        return found

    def check(self, marked: Sequence[tuple[Entry, yaml.Mark]], gpu: Gpu) -> None:
        """Refuse entries that another entry does not allow, or that the GPU cannot run."""
        held = {entry.key for entry, _ in marked if not entry.tritons}
        lines: dict[tuple[AttentionSpec, Bucket, bool], int] = {}
        for entry, mark in marked:
            name, key = f"{entry.spec.name} {entry.bucket}", (*entry.key, bool(entry.tritons))
            if key in lines:
                line = lines[key]
                self.fail(mark, f"{name} overlaps the entry of line {line}; remove one of them")
            lines[key] = mark.line + 1
            if entry.key not in held:
                self.fail(mark, f"{name} must stand in place of an entry; remove it")
            if reason := why_illegal(entry.spec, entry.config, gpu):
                label = entry.config.label
                self.fail(mark, f"{name} has the illegal config {label}: {reason}; remove it")


def sources(entries: Iterable[Entry]) -> dict[str, int]:
    """How many entries each source has, strongest first."""
    found = [entry.result.source for entry in entries]
    return {s: found.count(s) for s in sorted(set(found), key=lambda s: -STRENGTH[s])}
