"""configs/<slug>.yaml: tables in and out.

People review these files in git, so dump writes one text for one table: a line for each spec, below
it a row for each config, in columns. load trusts nothing: errors name file, line and what to do.
"""

from __future__ import annotations

import functools
import json
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import get_args

import yaml

from flashgen.errors import InvalidArgument, TableError
from flashgen.files import write_whole
from flashgen.schedules.legality import why_illegal
from flashgen.schedules.outcome import Source
from flashgen.spec.attention import AttentionSpec, spec_of
from flashgen.spec.gpu import Gpu
from flashgen.spec.problem import BUCKETS, Bucket
from flashgen.table import rows
from flashgen.table.entry import NO_EVIDENCE, Entry, Run, figure, run_name
from flashgen.table.evidence import evidence_file, evidence_text, with_evidence
from flashgen.table.table import Table
from flashgen.table.yaml import Nodes, text_of

SCHEMA = 5
"""Version of the layout of configs/*.yaml, the only one that is read."""

COLUMNS = 120
"""Of a line at most."""

KEPT = 32
"""Tables that a process keeps, by their text: all shipped ones and some versions of its own."""


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
    """Reads the nodes of a table into entries and runs."""

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
        lines: dict[tuple[AttentionSpec, Bucket, str], int] = {}
        for entry, mark in marked:
            name = f"{entry.spec.name} {entry.bucket}"
            # One serves under a version, and an executed kernel has one list of versions.
            once = (*entry.tritons, entry.config.label) if entry.tritons else ("",)
            for key in ((*entry.key, each) for each in once):
                if key in lines:
                    line = lines[key]
                    self.fail(mark, f"{name} overlaps the entry of line {line}; remove one of them")
                lines[key] = mark.line + 1
            if entry.key not in held:
                self.fail(mark, f"{name} must stand in place of an entry; remove it")
            if reason := why_illegal(entry.spec, entry.config, gpu):
                label = entry.config.label
                self.fail(mark, f"{name} has the illegal config {label}: {reason}; remove it")
