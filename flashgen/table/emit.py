"""Tables -> generated/: kernels, dispatch table and dispatcher; and the proof that they agree.

plan() is a pure function of the tables and the templates. write() makes a folder equal to a plan,
and check() says in which files it is not; both go by the bytes of the files alone.

generated/ holds the texts of the kernels that the tables name, and of their pointer twins. With
`defaults` it holds the default kernels too, which the runtime otherwise renders when they are first
needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from itertools import groupby
from pathlib import Path
from typing import Any

from flashgen import paths
from flashgen.errors import FlashgenError, GeneratedError
from flashgen.files import write_whole
from flashgen.kernels.render import Rendered, quoted, render, render_text
from flashgen.runtime.registry import MARK, SCHEMA, is_generated
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.config import KernelConfig, kernel_name
from flashgen.spec.defaults import default_configs, specs_with_default
from flashgen.spec.outcome import STRENGTH
from flashgen.table.entry import Entry
from flashgen.table.table import Table, figure, load_folders

LINE_LENGTH = 100


@dataclass(frozen=True, kw_only=True)
class _Rows:
    """One GPU as the template of table.py prints it."""

    slug: str
    arch: str
    groups: tuple[str, ...]


def tables_for(out: Path) -> dict[str, Table]:
    """The tables of DIR/generated, by slug: the shipped ones, or those of DIR."""
    return load_folders(paths.shipped_configs_dir(), paths.table_file(out, "any").parent)


def plan(tables: Mapping[str, Table], *, defaults: bool = False) -> dict[Path, str]:
    """Every file of generated/ and its text, by path relative to it. Raises FlashgenError."""
    kernels = kernels_by_name(tables.values(), defaults=defaults)
    texts = {kernel.text_name: kernel for kernel in kernels.values()}
    files = {Path("kernels", f"{name}.py"): kernel.source for name, kernel in texts.items()}
    ordered = [texts[name] for name in sorted(texts)]
    files[Path("kernels", "__init__.py")] = render_text("kernels.py.jinja", kernels=ordered)
    files[Path("table.py")] = _table_text(tables, kernels)
    files[Path("dispatcher.py")] = render_text("dispatcher.py.jinja")
    files[Path("__init__.py")] = render_text("package.py.jinja", schema=SCHEMA)
    return dict(sorted(files.items()))


def write(tables: Mapping[str, Table], out: Path, *, defaults: bool = False) -> list[Path]:
    """Make the folder `out` hold exactly the plan; returns the paths that changed, relative to it.

    Files that are right are not touched. A file that flashgen wrote and the plan lacks is deleted;
    other files stay. Kernels are written before the table that names them, and deleted after.
    Raises GeneratedError for a package of another project.
    """
    refuse_foreign(out)
    files = plan(tables, defaults=defaults)
    changed = [path for path, text in files.items() if _text_of(out / path) != text]
    for path in sorted(changed, key=lambda path: (path.parent == Path(), path)):
        write_whole(out / path, files[path])
    orphans = [path for path in _orphans(files, out) if _is_ours(out / path)]
    for path in orphans:
        try:
            (out / path).unlink(missing_ok=True)
        except OSError as error:
            raise FlashgenError(
                f"{out / path} is orphaned and cannot be deleted ({error.strerror}): delete it"
            ) from None
    return changed + orphans


def refuse_foreign(out: Path) -> None:
    """Raise GeneratedError if the folder is a package that flashgen did not write."""
    if (out / "__init__.py").exists() and not is_generated(out):
        raise GeneratedError(
            f"{out} must not be a package of another project: its __init__.py does not say that "
            f"flashgen generated it; give another --out"
        )


def check(tables: Mapping[str, Table], out: Path, *, defaults: bool = False) -> list[str]:
    """A sentence for each file of `out` that is changed, missing or orphaned."""
    files = plan(tables, defaults=defaults)
    problems = []
    for path, expected in files.items():
        found = _text_of(out / path)
        if found is None:
            problems.append(f"{out / path} is missing: run flashgen generate")
        elif found != expected:
            line = _first_difference(found, expected)
            problems.append(
                f"{out / path} is not what flashgen emits, from line {line} on: edit the template "
                f"or configs/*.yaml instead, and run flashgen generate"
            )
    for path in _orphans(files, out):
        remedy = "run flashgen generate" if _is_ours(out / path) else "move it elsewhere"
        problems.append(f"{out / path} is orphaned, no table names it: {remedy}")
    return problems


def demand_agreement(tables: Mapping[str, Table], out: Path, *, defaults: bool = False) -> None:
    """Raise GeneratedError, with all of check's sentences, unless `out` holds exactly the plan."""
    if problems := check(tables, out, defaults=defaults):
        raise GeneratedError("\n".join(problems))


def kernels_of(entry: Entry) -> tuple[KernelConfig, ...]:
    """The configs for which an entry needs kernels: its own and, if it differs, the pointer
    twin.
    """
    return tuple(dict.fromkeys((entry.config, entry.config.pointer_twin())))


def is_stale(entry: Entry) -> bool:
    """Whether the kernel's text has changed since it was timed."""
    return not render(entry.spec, entry.config).digest.startswith(entry.digest)


def stale_of(entries: Iterable[Entry]) -> list[Entry]:
    """The stale ones of these entries. Buckets often share a kernel: each is rendered once."""
    held = list(entries)
    pairs = dict.fromkeys((entry.spec, entry.config) for entry in held)
    digests = {pair: render(*pair).digest for pair in pairs}
    return [e for e in held if not digests[e.spec, e.config].startswith(e.digest)]


def kernels_by_name(tables: Iterable[Table], *, defaults: bool) -> dict[str, Rendered]:
    """All kernels of generated/, by full name, each rendered once."""
    untuned = specs_with_default() if defaults else ()
    pairs = {(spec, config): None for spec in untuned for config in default_configs(spec)}
    for table in tables:
        for entry in table.entries:
            pairs.update({(entry.spec, config): None for config in kernels_of(entry)})
    return {(kernel := render(spec, config)).name: kernel for spec, config in pairs}


def _table_text(tables: Mapping[str, Table], kernels: Mapping[str, Rendered]) -> str:
    entries = [entry for table in tables.values() for entry in table.entries]
    specs = {entry.spec for entry in entries}
    configs = {entry.config for entry in entries}
    return render_text(
        "table.py.jinja",
        sources=sorted({entry.result.source for entry in entries}, key=_by_strength),
        specs=[_made(spec) for spec in sorted(specs, key=lambda spec: spec.sort_key)],
        configs=[_made(config) for config in sorted(configs, key=_natural)],
        gpus=[_rows(tables[slug], kernels) for slug in sorted(tables)],
    )


def _rows(table: Table, kernels: Mapping[str, Rendered]) -> _Rows:
    groups = []
    for spec, entries in groupby(table.entries, key=lambda entry: entry.spec):
        rows = [_row(entry, kernels[kernel_name(spec, entry.config)].digest) for entry in entries]
        lines = "".join(f"    {line}\n" for row in rows for line in f"{row},".splitlines())
        groups.append(f"*serve(\n    {quoted(spec.name)},\n{lines}),")
    return _Rows(slug=table.gpu.slug, arch=table.gpu.arch, groups=tuple(groups))


def _row(entry: Entry, digest: str) -> str:
    arguments = [str(entry.bucket.low), quoted(entry.config.label)]
    arguments += [str(entry.shared_bytes), str(entry.registers)]
    if entry.result.median_us is not None:
        arguments.append(figure(entry.result.median_us))
    if not digest.startswith(entry.digest):
        arguments.append(f"digest={quoted(entry.digest)}")
    # The row stands three steps in, and a comma follows it.
    return _call(entry.result.source, arguments, room=LINE_LENGTH - len("            ,"))


def _made(value: AttentionSpec | KernelConfig) -> str:
    """The call that makes a spec or config, and a comma; fields at their defaults are left out."""
    held = {field.name: getattr(value, field.name) for field in fields(value)}
    arguments = [
        f"{field.name}={_literal(held[field.name])}"
        for field in fields(value)
        if field.default is MISSING or held[field.name] != field.default
    ]
    return _call(type(value).__name__, arguments, room=LINE_LENGTH - len("        ,")) + ","


def _literal(value: object) -> str:
    return quoted(value) if isinstance(value, str) else repr(value)


def _call(head: str, arguments: list[str], *, room: int) -> str:
    """A call, broken where ruff format would: not at all, around all arguments, or around each."""
    inside = ", ".join(arguments)
    if len(f"{head}({inside})") <= room:
        return f"{head}({inside})"
    if len(inside) + 4 <= room:
        return f"{head}(\n    {inside}\n)"
    each = "".join(f"    {argument},\n" for argument in arguments)
    return f"{head}(\n{each})"


def _by_strength(source: str) -> tuple[int, str]:
    return -STRENGTH[source], source


def _natural(config: KernelConfig) -> tuple[Any, ...]:
    """Sort key of configs: numbers by size, then words."""
    return tuple(getattr(config, field.name) for field in fields(config))


def _orphans(files: Mapping[Path, str], out: Path) -> list[Path]:
    """Files in the folder that are not in the plan, without compiled Python and hidden files."""
    found = (path.relative_to(out) for path in out.rglob("*") if path.is_file())
    return sorted(
        path
        for path in found
        if path not in files
        and "__pycache__" not in path.parts
        and not any(part.startswith(".") for part in path.parts)
    )


def _is_ours(path: Path) -> bool:
    """Whether flashgen wrote the file, by the header it carries."""
    head = (_text_of(path) or "").splitlines()[:5]
    return any(line.startswith(MARK) for line in head)


def _text_of(path: Path) -> str | None:
    """The text of a file; None if there is none to read."""
    try:
        return path.read_bytes().decode()
    except (OSError, UnicodeDecodeError):
        return None


def _first_difference(found: str, expected: str) -> int:
    """The number of the first line in which two texts differ."""
    pairs = zip(found.splitlines(), expected.splitlines(), strict=False)
    same = next((n for n, (a, b) in enumerate(pairs) if a != b), None)
    shorter = min(len(found.splitlines()), len(expected.splitlines()))
    return (shorter if same is None else same) + 1
