"""Table: what was chosen for one GPU; configs/<slug>.yaml in and out.

People review these files in git, so dump writes one text for one table: a line for each spec, below
it a line for each bucket, both sorted; values that are None or usual are left out. load trusts
nothing: errors name file, line and what to do.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import yaml

from flashgen.errors import InvalidArgument, TableError
from flashgen.files import write_whole
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.config import config_of
from flashgen.spec.gpu import Gpu
from flashgen.spec.legality import why_illegal
from flashgen.spec.outcome import STRENGTH, Source
from flashgen.spec.problem import BUCKETS, Bucket, problem_of
from flashgen.table.entry import (
    NO_EVIDENCE,
    Entry,
    Result,
    Run,
    RunnerUp,
    figure,
    short_digest,
    spec_fields,
)
from flashgen.table.evidence import evidence_file, evidence_text, with_evidence
from flashgen.table.schema2 import OldEntry
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
    "restamped",
    "save",
]

SCHEMA = 3
"""Version of the layout of configs/*.yaml, which dump writes. parse reads this, 1 and 2; a higher
one was written by a newer flashgen."""

KEPT = 32
"""Tables that a process keeps, by their text: all shipped ones and some versions of its own."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """All entries of one GPU, sorted by spec and bucket, and the runs they come from."""

    gpu: Gpu
    runs: tuple[Run, ...] = ()
    entries: tuple[Entry, ...] = ()

    def find(self, spec: AttentionSpec, bucket: Bucket) -> Entry | None:
        """The entry of exactly this spec and bucket."""
        return next((entry for entry in self.entries if entry.key == (spec, bucket)), None)

    def run_of(self, entry: Entry) -> Run:
        """The run that an entry of this table comes from."""
        return next(run for run in self.runs if run.id == entry.run)

    def with_entry(self, entry: Entry, run: Run) -> Table:
        """The table with `entry`, of `run`, in place of the one of its spec and bucket.

        An entry whose source is weaker than that of the one in place changes nothing. Runs that no
        entry comes from any more are dropped. Raises InvalidArgument for an entry of another run.
        """
        if entry.run != run.id:
            raise InvalidArgument(f"entry must come from the run {run.id!r}: got {entry.run!r}")
        held = self.find(*entry.key)
        if held and STRENGTH[entry.result.source] < STRENGTH[held.result.source]:
            return self
        entries = [other for other in self.entries if other.key != entry.key] + [entry]
        runs = [other for other in self.runs if other.id != run.id] + [run]
        return replace(self, entries=tuple(entries), runs=tuple(runs))._in_order()

    def _in_order(self) -> Table:
        used = {entry.run for entry in self.entries}
        runs = sorted((run for run in self.runs if run.id in used), key=lambda r: (r.date, r.id))
        entries = sorted(self.entries, key=lambda e: (e.spec.sort_key, e.bucket.low))
        return replace(self, runs=tuple(runs), entries=tuple(entries))


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
    entries = with_evidence(table.entries, table.gpu, evidence_file(path))
    return replace(table, entries=entries)


def load_folders(*folders: Path) -> dict[str, Table]:
    """All tables of these folders by slug; a later folder's wins. A missing folder holds none."""
    tables: dict[str, Table] = {}
    for folder in dict.fromkeys(folder.resolve() for folder in folders):
        for path in sorted(folder.glob("*.yaml")):
            tables[path.stem] = load(path)
    return dict(sorted(tables.items()))


def dump(table: Table) -> str:
    """Write a table as text. Any text that this made, parsed and written again, is the same."""
    table = table._in_order()
    gpu = {"slug": table.gpu.slug} | _held(table.gpu)
    lines = [
        f"# What flashgen chose for {table.gpu.name}. Review it here; `flashgen tune` writes it.",
        f"schema: {SCHEMA}",
        "",
        "gpu:",
        *(f"  {name}: {_word(value)}" for name, value in gpu.items()),
        "",
        "runs:" if table.runs else "runs: []",
        *(f"- {_flow(_held(run))}" for run in table.runs),
        "",
        "entries:" if table.entries else "entries: []",
    ]
    for spec, entries in groupby(table.entries, key=lambda entry: entry.spec):
        lines.append(f"- spec: {_flow(spec_fields(spec))}")
        lines += [f"  {f'{entry.bucket.low}:':6} {_flow(row_of(entry))}" for entry in entries]
    return "\n".join(lines) + "\n"


def _held(value: Gpu | Run) -> dict[str, Any]:
    """The fields of a dataclass that are not None."""
    held = {field.name: getattr(value, field.name) for field in fields(value)}
    return {name: each for name, each in held.items() if each is not None}


def row_of(entry: Entry) -> dict[str, Any]:
    """The line of an entry."""
    result = entry.result
    row = {
        "config": entry.config.label,
        "source": result.source,
        "us": result.median_us,
        "default_us": result.default_us,
        "floors": result.max_abs_err_floors,
        "tried": f"{result.candidates}/{result.legal}",
        "registers": entry.registers,
        "shared": entry.shared_bytes,
        "problem": result.problem.label,
        "run": entry.run,
        "digest": entry.digest,
    }
    return {name: value for name, value in row.items() if value is not None}


_PLAIN = re.compile(r"[a-z]\w*(:[0-9a-f]{12})?|[0-9]+/[0-9]+", re.ASCII)
_WORDS_OF_YAML = {"y", "n", "yes", "no", "on", "off", "true", "false", "null"}


def _word(value: Any) -> str:
    """A value as YAML has it; texts that could be read as anything else are quoted."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return figure(value)
    if isinstance(value, str):
        plain = _PLAIN.fullmatch(value) and value not in _WORDS_OF_YAML
        return value if plain else json.dumps(value, ensure_ascii=False)
    return str(value)


def _flow(values: Mapping[str, Any]) -> str:
    """A mapping on one line."""
    return "{" + ", ".join(f"{name}: {_word(value)}" for name, value in values.items()) + "}"


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
    table = table._in_order()
    beside = evidence_file(path)
    unread = [entry for entry in table.entries if entry.evidence == NO_EVIDENCE]
    read = with_evidence(unread, table.gpu, beside) if unread else ()
    kept = {entry.key: entry for entry in read}
    evidence = evidence_text(kept.get(entry.key, entry) for entry in table.entries)
    write_whole(path, dump(table), durable=True)
    if evidence or beside.exists():
        write_whole(beside, evidence, durable=True)


def restamped(table: Table, digests: Mapping[str, str]) -> Table:
    """The table with digests replaced, for kernels whose new text compiles to the same machine
    code: from the old to the new one, short or full. Runners-up are as they were.
    """
    new = {short_digest(old): short_digest(text) for old, text in digests.items()}
    entries = [replace(e, digest=new.get(e.digest, e.digest)) for e in table.entries]
    return replace(table, entries=tuple(entries))


def parse(text: str, path: Path, *, any_name: bool = False) -> Table:
    """The table in a text; `path` stands in errors and says of which GPU, unless the file may have
    `any_name`. Raises TableError.
    """
    return _parsed(text, path, any_name)


@functools.lru_cache(KEPT)
def _parsed(text: str, path: Path, any_name: bool) -> Table:
    reader = _Reader(path, any_name)
    return reader.table(reader.root(text))


_ROW = {
    "config": str,
    "source": Source,
    "us": float | None,
    "default_us": float | None,
    "floors": float,
    "tried": str,
    "registers": int,
    "shared": int,
    "problem": str,
    "run": str,
    "digest": str,
}
"""What stands on the line of an entry."""

_ABSENT = ("us", "default_us")
"""Keys of a line that may be left out."""

_COUNT = re.compile(r"[0-9]{1,18}")

_LOW = {str(bucket.low): bucket for bucket in BUCKETS}


class _Reader(Nodes):
    """Reads the nodes of a table into the dataclasses above."""

    def __init__(self, path: Path, any_name: bool) -> None:
        super().__init__(path, TableError)
        self.schema = SCHEMA
        self.any_name = any_name

    def table(self, root: yaml.Node) -> Table:
        schema = self.keys(root, None).get("schema")
        if schema is not None:
            self.schema = self.value(schema, int, "schema")
            if self.schema > SCHEMA:
                self.fail(
                    schema.start_mark,
                    f"schema {self.schema} is newer than this flashgen, which reads {SCHEMA}; "
                    f"update flashgen",
                )
        parts = self.keys(root, ("schema", "gpu", "runs", "entries"))
        if self.schema < 1:
            self.fail(parts["schema"].start_mark, f"schema must be 1 to {SCHEMA}; tune again")
        gpu = self.gpu(parts["gpu"])
        runs = self.runs(parts["runs"])
        read = self.old_entries if self.schema < 3 else self.entries
        marked = read(parts["entries"])
        self.check(marked, gpu, {run.id for run in runs})
        return Table(gpu=gpu, runs=runs, entries=tuple(entry for entry, _ in marked))

    def gpu(self, node: yaml.Node) -> Gpu:
        gpu: Gpu = self.record(node, Gpu, beside=("slug",))
        parts = self.keys(node, None)
        slug = self.value(parts["slug"], str, "slug")
        if slug != gpu.slug:
            self.fail(parts["slug"].start_mark, f"slug must be that of {gpu.name!r}: {gpu.slug}")
        if gpu.slug != self.path.stem and not self.any_name:
            self.fail(
                parts["name"].start_mark,
                f"this is the table of another product, {gpu.name!r}; its file is {gpu.slug}.yaml",
            )
        return gpu

    def runs(self, node: yaml.Node) -> tuple[Run, ...]:
        found: dict[str, Run] = {}
        for item in self.items(node, "runs"):
            run: Run = self.record(item, Run)
            if run.id in found:
                self.fail(item.start_mark, f"the run {run.id!r} is here twice; remove one")
            found[run.id] = run
        return tuple(found.values())

    def entries(self, node: yaml.Node) -> list[tuple[Entry, yaml.Mark]]:
        """The entries of schema 3, each with its line."""
        found = []
        for group in self.items(node, "entries"):
            parts = self.keys(group, ("spec", *_LOW), tuple(_LOW))
            spec = self.spec(parts.pop("spec"))
            for low, row in parts.items():
                found.append((self.entry(spec, _LOW[low], row), row.start_mark))
        return found

    def entry(self, spec: AttentionSpec, bucket: Bucket, node: yaml.Node) -> Entry:
        parts = self.keys(node, tuple(_ROW), _ABSENT)
        row = {name: self.value(value, _ROW[name], name) for name, value in parts.items()}
        tried, _, legal = row["tried"].partition("/")
        if not (_COUNT.fullmatch(tried) and _COUNT.fullmatch(legal)):
            self.fail(parts["tried"].start_mark, f"tried must be like 16/540: got {row['tried']!r}")
        try:
            return Entry(
                spec=spec,
                bucket=bucket,
                config=config_of(row["config"]),
                digest=row["digest"],
                shared_bytes=row["shared"],
                registers=row["registers"],
                run=row["run"],
                result=Result(
                    source=row["source"],
                    problem=problem_of(row["problem"]),
                    median_us=row.get("us"),
                    default_us=row.get("default_us"),
                    max_abs_err_floors=row["floors"],
                    candidates=int(tried),
                    legal=int(legal),
                ),
            )
        except InvalidArgument as error:
            self.fail(node.start_mark, f"{error}; correct it or remove the line")

    def old_entries(self, node: yaml.Node) -> list[tuple[Entry, yaml.Mark]]:
        """The entries of schema 1 or 2, each with its first line."""
        found = []
        for item in self.items(node, "entries"):
            old: OldEntry = self.record(item, OldEntry)
            try:
                found.append((old.entry(), item.start_mark))
            except InvalidArgument as error:
                self.fail(item.start_mark, f"{error}; correct it or remove the entry")
        return found

    def check(
        self, marked: Sequence[tuple[Entry, yaml.Mark]], gpu: Gpu, runs: Collection[str]
    ) -> None:
        """Refuse entries that no run or no other entry allows, or that the GPU cannot run."""
        lines: dict[tuple[AttentionSpec, Bucket], int] = {}
        for entry, mark in marked:
            name = f"{entry.spec.name} {entry.bucket}"
            if entry.key in lines:
                line = lines[entry.key]
                self.fail(mark, f"{name} overlaps the entry of line {line}; remove one of them")
            lines[entry.key] = mark.line + 1
            if entry.run not in runs:
                self.fail(
                    mark, f"{name} comes from run {entry.run!r}, which runs lacks; add it there"
                )
            for config in (entry.config, *(o.config for o in entry.evidence.runners_up)):
                if reason := why_illegal(entry.spec, config, gpu):
                    self.fail(
                        mark, f"{name} has the illegal config {config.label}: {reason}; remove it"
                    )
            if entry.shared_bytes > gpu.shared_per_block:
                self.fail(
                    mark,
                    f"{name} takes {entry.shared_bytes} bytes of shared memory, and "
                    f"{gpu.slug} has {gpu.shared_per_block} a block; tune it again",
                )

    def value(self, node: yaml.Node, kind: Any, name: str) -> Any:
        """As Nodes.value, for a spec, and for a bucket of schemas 1 and 2, which is its edges."""
        if kind is AttentionSpec:
            return self.spec(node)
        return self.bucket(node) if kind is Bucket else super().value(node, kind, name)

    def spec(self, node: yaml.Node) -> AttentionSpec:
        """The spec of a mapping; head_dim_v is head_dim unless it stands there."""
        if isinstance(node, yaml.MappingNode):
            held = {key.value: (key, value) for key, value in node.value}
            if "head_dim" in held and "head_dim_v" not in held:
                key, value = held["head_dim"]
                key = yaml.ScalarNode(key.tag, "head_dim_v", key.start_mark)
                node.value.append((key, value))
        spec: AttentionSpec = self.record(node, AttentionSpec)
        return spec

    def bucket(self, node: yaml.Node) -> Bucket:
        if not isinstance(node, yaml.SequenceNode) or len(node.value) != 2:
            self.fail(
                node.start_mark, "bucket must be two edges; write [low, high], high may be null"
            )
        low, high = node.value
        edges = Bucket(
            low=self.value(low, int, "bucket"), high=self.value(high, int | None, "bucket")
        )
        if edges not in BUCKETS:
            known = ", ".join(map(str, BUCKETS))
            self.fail(node.start_mark, f"{edges} is no bucket; write one of {known}")
        return edges


def sources(entries: Iterable[Entry]) -> dict[str, int]:
    """How many entries each source has, strongest first."""
    found = [entry.result.source for entry in entries]
    return {s: found.count(s) for s in sorted(set(found), key=lambda s: -STRENGTH[s])}
