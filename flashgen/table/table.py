"""Table: what was chosen for one GPU; configs/<slug>.yaml in and out. The only importer of yaml.

People review these files in git, so dump writes one text for one table: every key, entries sorted,
a spec, config or problem on a line of its own; of a spec's features and a config's options those
that are on. load trusts nothing: what it refuses it names with file, line and mend.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, get_type_hints

import yaml

from flashgen.errors import InvalidArgument, TableError
from flashgen.files import write_whole
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.config import OPTIONS, KernelConfig
from flashgen.spec.features import OFF
from flashgen.spec.gpu import Gpu
from flashgen.spec.legality import why_illegal
from flashgen.spec.outcome import STRENGTH
from flashgen.spec.problem import BUCKETS, Bucket, Problem
from flashgen.table.entry import Entry, Result, Run, RunnerUp
from flashgen.table.yaml import Nodes

__all__ = [
    "Entry",
    "Result",
    "Run",
    "RunnerUp",
    "Table",
    "dump",
    "load",
    "load_folders",
    "parse",
    "save",
]

SCHEMA = 2
"""Version of the layout of configs/*.yaml, which dump writes. parse reads this and 1; a higher one
was written by a newer flashgen."""

KEPT = 32
"""Tables that a process keeps, by their text: all shipped ones and some versions of its own."""
NEW_IN_2 = ("p_value", "regret")
"""Keys of a result that a table of schema 1 does not have; their defaults hold."""


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
    """The table of a file. Raises TableError that names file, line and mend.

    The file is named after the GPU, unless it may have `any_name`: a copy, to compare or to merge.
    InvalidArgument where such a one is not there.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        if any_name:
            raise InvalidArgument(f"{path}: there is no such table") from None
        raise TableError(
            f"{path}: there is no such table; `flashgen tune --target {path.stem}` writes one"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise TableError(f"{path}: cannot be read as UTF-8 text ({error}); restore it") from None
    return parse(text, path, any_name=any_name)


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
    gpu = _node(table.gpu)
    gpu.value.insert(0, (_node("slug"), _node(table.gpu.slug)))
    parts = {"schema": _node(SCHEMA), "gpu": gpu, "runs": _node(table.runs)}
    parts["entries"] = _node(table.entries)
    root = _mapping(parts)
    text = yaml.serialize(root, Dumper=_DUMPER, width=1 << 20, allow_unicode=True)
    text = re.sub(r"^(?=gpu:|runs:|entries:|- spec:)", "\n", text, flags=re.MULTILINE)
    text = text.replace("entries:\n\n", "entries:\n")
    name = table.gpu.name
    return f"# What flashgen chose for {name}. Review it here; `flashgen tune` writes it.\n{text}"


def save(table: Table, path: Path) -> None:
    """Write a table so that `path` holds the old text or the new one, never a part.

    Raises TableError where `path` is not named after the GPU, FlashgenError where it cannot write.
    """
    if path.stem != table.gpu.slug:
        raise TableError(
            f"{path}: the table of {table.gpu.name} is {table.gpu.slug}.yaml; rename it"
        )
    write_whole(path, dump(table), durable=True)


def parse(text: str, path: Path, *, any_name: bool = False) -> Table:
    """The table in a text; `path` stands in errors and says of which GPU, unless the file may have
    `any_name`. Raises TableError.
    """
    return _parsed(text, path, any_name)


@functools.lru_cache(KEPT)
def _parsed(text: str, path: Path, any_name: bool) -> Table:
    reader = _Reader(path, any_name)
    return reader.table(reader.root(text))


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
        table = Table(
            gpu=self.gpu(parts["gpu"]),
            runs=self.value(parts["runs"], tuple[Run, ...], "runs"),
            entries=self.value(parts["entries"], tuple[Entry, ...], "entries"),
        )
        self.runs(table, parts["runs"])
        self.entries(table, parts["entries"])
        return table

    def gpu(self, node: yaml.Node) -> Gpu:
        names = tuple(field.name for field in fields(Gpu))
        parts = self.keys(node, ("slug", *names))
        types = get_type_hints(Gpu)
        gpu = Gpu(**{name: self.value(parts[name], types[name], name) for name in names})
        slug = self.value(parts["slug"], str, "slug")
        if slug != gpu.slug:
            self.fail(parts["slug"].start_mark, f"slug must be that of {gpu.name!r}: {gpu.slug}")
        if gpu.slug != self.path.stem and not self.any_name:
            self.fail(
                parts["name"].start_mark,
                f"this is the table of another product, {gpu.name!r}; its file is {gpu.slug}.yaml",
            )
        return gpu

    def runs(self, table: Table, node: yaml.Node) -> None:
        seen: set[str] = set()
        for run, place in zip(table.runs, node.value, strict=True):
            if run.id in seen:
                self.fail(place.start_mark, f"the run {run.id!r} is here twice; remove one")
            seen.add(run.id)

    def entries(self, table: Table, node: yaml.Node) -> None:
        lines: dict[tuple[AttentionSpec, Bucket], int] = {}
        runs = {run.id for run in table.runs}
        for entry, place in zip(table.entries, node.value, strict=True):
            mark = place.start_mark
            name = f"{entry.spec.name} {entry.bucket}"
            if entry.key in lines:
                line = lines[entry.key]
                self.fail(mark, f"{name} overlaps the entry of line {line}; remove one of them")
            lines[entry.key] = mark.line + 1
            if entry.run not in runs:
                self.fail(
                    mark, f"{name} comes from run {entry.run!r}, which runs lacks; add it there"
                )
            for config in (entry.config, *(other.config for other in entry.runners_up)):
                if reason := why_illegal(entry.spec, config, table.gpu):
                    self.fail(
                        mark, f"{name} has the illegal config {config.label}: {reason}; remove it"
                    )
            if entry.shared_bytes > table.gpu.shared_per_block:
                self.fail(
                    mark,
                    f"{name} takes {entry.shared_bytes} bytes of shared memory, and "
                    f"{table.gpu.slug} has {table.gpu.shared_per_block} a block; tune it again",
                )

    def value(self, node: yaml.Node, kind: Any, name: str) -> Any:
        """As Nodes.value; a bucket is written as its two edges."""
        return self.bucket(node) if kind is Bucket else super().value(node, kind, name)

    def record(
        self,
        node: yaml.Node,
        kind: Any,
        optional: Sequence[str] = (),
        beside: tuple[str, ...] = (),
    ) -> Any:
        """As Nodes.record; what an older schema did not have may be missing."""
        if kind is AttentionSpec:
            optional = (*optional, *OFF)
        elif kind is KernelConfig:
            optional = (*optional, *OPTIONS)
        elif kind is Result and self.schema < 2:
            optional = (*optional, *NEW_IN_2)
        return super().record(node, kind, optional, beside)

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


_DUMPER: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
_OMITTED = (*OFF, *OPTIONS)
_TAG = "tag:yaml.org,2002:"
_NULL = f"{_TAG}null"
_FLOW = (AttentionSpec, KernelConfig, Problem)
_PLAIN = re.compile(r"[a-z]\w*(:[0-9a-f]{64})?")
_WORDS_OF_YAML = {"y", "n", "yes", "no", "on", "off", "true", "false", "null"}


def _node(value: Any) -> yaml.Node:
    """The YAML node of a value of a table; texts that could be read as anything else are quoted."""
    if value is None:
        return yaml.ScalarNode(_NULL, "null")
    if isinstance(value, bool):
        return yaml.ScalarNode(f"{_TAG}bool", str(value).lower())
    if isinstance(value, int):
        return yaml.ScalarNode(f"{_TAG}int", str(value))
    if isinstance(value, float):
        return yaml.ScalarNode(f"{_TAG}float", figure(value))
    if isinstance(value, str):
        plain = _PLAIN.fullmatch(value) and value not in _WORDS_OF_YAML
        return yaml.ScalarNode(f"{_TAG}str", value, style=None if plain else '"')
    if isinstance(value, Bucket):
        return yaml.SequenceNode(
            f"{_TAG}seq", [_node(value.low), _node(value.high)], flow_style=True
        )
    if isinstance(value, tuple):
        return yaml.SequenceNode(f"{_TAG}seq", [_node(v) for v in value], flow_style=not value)
    parts = {
        field.name: _node(getattr(value, field.name))
        for field in fields(value)
        if field.name not in _OMITTED or getattr(value, field.name) != field.default
    }
    return _mapping(parts, flow_style=isinstance(value, _FLOW))


def _mapping(parts: dict[str, yaml.Node], *, flow_style: bool = False) -> yaml.MappingNode:
    pairs = [(_node(key), node) for key, node in parts.items()]
    return yaml.MappingNode(f"{_TAG}map", pairs, flow_style=flow_style)


def figure(value: float) -> str:
    """A number as tables write it: five significant digits or more, never an exponent."""
    digits = max(1, 4 - math.floor(math.log10(abs(value)))) if value else 1
    whole, _, part = f"{value:.{digits}f}".partition(".")
    return f"{whole}.{part.rstrip('0') or '0'}"


def sources(entries: Iterable[Entry]) -> dict[str, int]:
    """How many entries each source has, strongest first."""
    found = [entry.result.source for entry in entries]
    return {s: found.count(s) for s in sorted(set(found), key=lambda s: -STRENGTH[s])}
