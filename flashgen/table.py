"""Table: what was chosen for one GPU; configs/<slug>.yaml in and out. The only importer of yaml.

People review these files in git, so dump writes one text for one table: every key, entries sorted,
a spec, config or problem on a line of its own; of a spec's features those that are on. load trusts
nothing: what it refuses it names with file, line and mend.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

import yaml

from flashgen.config import KernelConfig, why_illegal
from flashgen.entry import Entry, Result, Run, RunnerUp
from flashgen.errors import FlashgenError, InvalidArgument, TableError
from flashgen.gpu import Gpu
from flashgen.outcome import STRENGTH
from flashgen.spec import BUCKETS, FEATURES, AttentionSpec, Bucket, Problem

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

SCHEMA = 1
"""Version of the layout of configs/*.yaml; a higher one was written by a newer flashgen."""


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


def load(path: Path) -> Table:
    """The table of a file. Raises TableError that names file, line and mend."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise TableError(
            f"{path}: there is no such table; `flashgen tune --target {path.stem}` writes one"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise TableError(f"{path}: cannot be read as UTF-8 text ({error}); restore it") from None
    return parse(text, path)


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
    text = yaml.serialize(root, Dumper=yaml.SafeDumper, width=1 << 20, allow_unicode=True)
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
    write_text(path, dump(table))


def write_text(path: Path, text: str) -> None:
    """Write a file by way of a temporary one beside it. Raises FlashgenError, leaving nothing."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise FlashgenError(
            f"{path} cannot be written ({error.strerror}) and is as it was: "
            f"make room there or name another folder with --out"
        ) from None
    finally:
        with contextlib.suppress(OSError):  # a folder out of reach holds no temporary file either
            temporary.unlink(missing_ok=True)


def parse(text: str, path: Path) -> Table:
    """The table in a text; `path` stands in errors and says of which GPU. Raises TableError."""
    reader = _Reader(path)
    try:
        root = yaml.compose(text, Loader=_LOADER)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        reader.fail(mark, f"this is not YAML: {error.problem}; mend it or restore it from git")
    except yaml.YAMLError as error:
        reader.fail(None, f"this is not YAML: {error}; restore it from git")
    return reader.table(root)


class _Reader:
    """Turns YAML nodes into the dataclasses above; each refusal carries the line of its node."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def fail(self, mark: yaml.Mark | None, sentence: str) -> NoReturn:
        line = mark.line + 1 if mark else 1
        raise TableError(f"{self.path}, line {line}: {sentence}")

    def table(self, root: yaml.Node | None) -> Table:
        if root is None:
            self.fail(None, "the table is empty; delete the file or restore it from git")
        schema = self.keys(root, None).get("schema")
        if schema is not None and (number := self.value(schema, int, "schema")) > SCHEMA:
            self.fail(
                schema.start_mark,
                f"schema {number} is newer than this flashgen, which reads {SCHEMA}; "
                f"update flashgen",
            )
        parts = self.keys(root, ("schema", "gpu", "runs", "entries"))
        if self.value(parts["schema"], int, "schema") != SCHEMA:
            self.fail(parts["schema"].start_mark, f"schema must be {SCHEMA}; tune again")
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
        if gpu.slug != self.path.stem:
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

    def keys(
        self, node: yaml.Node, names: tuple[str, ...] | None, optional: tuple[str, ...] = ()
    ) -> dict[str, yaml.Node]:
        """The values of a mapping, by key: exactly `names`, but that `optional` ones may be
        missing; or any if names is None.
        """
        if not isinstance(node, yaml.MappingNode):
            self.fail(node.start_mark, "a mapping must stand here; write its keys out")
        found: dict[str, yaml.Node] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                self.fail(key.start_mark, "a key must be a word; restore the line from git")
            if key.value in found:
                self.fail(key.start_mark, f"the key {key.value!r} is here twice; remove one")
            if names is not None and key.value not in names:
                known = ", ".join(names)
                self.fail(key.start_mark, f"unknown key {key.value!r}; remove it (known: {known})")
            found[key.value] = value
        for name in names or ():
            if name not in found and name not in optional:
                self.fail(node.start_mark, f"the key {name!r} is missing; add it")
        return found

    def value(self, node: yaml.Node, kind: Any, name: str) -> Any:
        """The value of type `kind` that a node holds; `name` is what errors call it."""
        if get_origin(kind) in (Union, UnionType):
            if node.tag == _NULL:
                return None
            kind = next(option for option in get_args(kind) if option is not NoneType)
        if kind is Bucket:
            return self.bucket(node)
        if get_origin(kind) is tuple:
            if not isinstance(node, yaml.SequenceNode):
                self.fail(node.start_mark, f"{name} must be a list; write [] if it is empty")
            return tuple(self.value(item, get_args(kind)[0], name) for item in node.value)
        if is_dataclass(kind):
            return self.record(node, kind)
        return self.scalar(node, kind, name)

    def record(self, node: yaml.Node, kind: Any) -> Any:
        types = get_type_hints(kind)
        names = tuple(field.name for field in fields(kind))
        parts = self.keys(node, names, FEATURES if kind is AttentionSpec else ())
        values = {name: self.value(part, types[name], name) for name, part in parts.items()}
        try:
            return kind(**values)
        except InvalidArgument as error:
            self.fail(node.start_mark, f"{error}; correct it or remove the entry")

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

    def scalar(self, node: yaml.Node, kind: Any, name: str) -> Any:
        if get_origin(kind) is Literal:
            words = get_args(kind)
            if not isinstance(node, yaml.ScalarNode) or node.value not in words:
                self.fail(node.start_mark, f"{name} must be one of {', '.join(words)}; correct it")
            return node.value
        if kind is bool:
            if node.tag != f"{_TAG}bool" or node.value not in ("true", "false"):
                self.fail(node.start_mark, f"{name} must be true or false: got {_shown(node)}")
            return node.value == "true"
        tags, pattern, mend = _SCALARS[kind]
        if node.tag not in tags or not re.fullmatch(pattern, str(node.value), re.DOTALL):
            self.fail(node.start_mark, f"{name} must be {mend}: got {_shown(node)}")
        return kind(node.value)


_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_TAG = "tag:yaml.org,2002:"
_NULL = f"{_TAG}null"
_SCALARS: dict[type, tuple[tuple[str, ...], str, str]] = {
    int: ((f"{_TAG}int",), r"0|[1-9]\d*", "a whole number >= 0; write it in digits"),
    float: ((f"{_TAG}int", f"{_TAG}float"), r"\d+(\.\d+)?", "a number; write it like 12.5"),
    str: ((f"{_TAG}str",), r".+", "text; put it in double quotes"),
}
_FLOW = (AttentionSpec, KernelConfig, Problem)
_PLAIN = re.compile(r"[a-z]\w*(:[0-9a-f]{64})?")
_WORDS_OF_YAML = {"y", "n", "yes", "no", "on", "off", "true", "false", "null"}


def _shown(node: yaml.Node) -> str:
    return repr(node.value) if isinstance(node, yaml.ScalarNode) else "a list or a mapping"


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
        if field.name not in FEATURES or getattr(value, field.name) != field.default
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
