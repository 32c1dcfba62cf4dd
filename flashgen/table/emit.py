"""Tables -> generated/: kernels, a table a GPU, and the dispatcher; and the proof that they agree.

plan() is a pure function of the tables and the templates. write() makes a folder equal to a plan,
and check() says in which files it is not; both go by the bytes of the files alone.

generated/ holds the texts of the kernels that the tables name, and of their pointer twins. With
`defaults` it holds the default kernels too, which the runtime otherwise renders when they are first
needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby, zip_longest
from pathlib import Path

from flashgen import paths
from flashgen.errors import FlashgenError, GeneratedError
from flashgen.files import write_whole
from flashgen.kernels.render import Rendered, render, render_text
from flashgen.kernels.resolve import variant
from flashgen.runtime.folders import MARK, SCHEMA, is_generated
from flashgen.schedules.config import KernelConfig
from flashgen.schedules.defaults import default_configs, specs_with_default
from flashgen.schedules.outcome import STRENGTH, Source
from flashgen.table.entry import Entry, figure, short_digest
from flashgen.table.rows import rows_of
from flashgen.table.table import Table
from flashgen.table.table_file import load_folders


def tables_for(out: Path, *, evidence: bool = False) -> dict[str, Table]:
    """The tables of DIR/generated, by slug: the shipped ones, or those of DIR."""
    folders = paths.shipped_configs_dir(), paths.table_file(out, "any").parent
    return load_folders(*folders, evidence=evidence)


def plan(tables: Mapping[str, Table], *, defaults: bool = False) -> dict[Path, str]:
    """Every file of generated/ and its text, by path relative to it. Raises FlashgenError."""
    kernels = kernels_by_name(tables.values(), defaults=defaults)
    texts = {kernel.text_name: kernel.source for kernel in kernels.values()}
    files = {Path("kernels", f"{name}.py"): text for name, text in texts.items()}
    files[Path("kernels", "__init__.py")] = render_text("kernels.py.jinja")
    files |= {Path("tables", f"{slug}.py"): _table_text(table) for slug, table in tables.items()}
    files[Path("dispatcher.py")] = render_text("dispatcher.py.jinja")
    files[Path("__init__.py")] = render_text("package.py.jinja", schema=SCHEMA)
    return dict(sorted(files.items()))


def write(tables: Mapping[str, Table], out: Path, *, defaults: bool = False) -> list[Path]:
    """Make the folder `out` hold exactly the plan; returns the paths that changed, relative to it.

    Files that are right are not touched. A file that flashgen wrote and the plan lacks is deleted;
    other files stay. Kernels are written before the tables that name them, and deleted after.
    Raises GeneratedError for a package of another project.
    """
    refuse_foreign(out)
    files = plan(tables, defaults=defaults)
    changed = [path for path, text in files.items() if _text_of(out / path) != text]
    for path in sorted(changed, key=lambda path: (path.parent.name != "kernels", path)):
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


def write_variants(tables: Mapping[str, Table], out: Path, *, defaults: bool = False) -> int:
    """Write every kernel to a file of the folder `out`, by its full name, to be read or run by
    itself; returns how many. Other files stay. Raises FlashgenError.
    """
    kernels = kernels_by_name(tables.values(), defaults=defaults)
    for name, kernel in kernels.items():
        write_whole(out / f"{name}.py", variant(kernel))
    return len(kernels)


def refuse_foreign(out: Path) -> None:
    """Raise GeneratedError if the folder is a package that flashgen did not write."""
    if (out / "__init__.py").exists() and not is_generated(out):
        raise GeneratedError(
            f"{out} must not be a package of another project: its __init__.py does not say that "
            f"flashgen generated it; give another --out"
        )


def check(tables: Mapping[str, Table], out: Path, *, defaults: bool = False) -> list[str]:
    """A sentence for each file of `out` that is changed, missing or orphaned."""
    if not out.is_dir():
        return [f"{out} is missing: flashgen generate writes it, and --out names another folder"]
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
    return tuple(dict.fromkeys((entry.config, entry.config.pointer_twin(entry.spec))))


def is_stale(entry: Entry) -> bool:
    """Whether the kernel's code has changed since it was timed; without evidence nobody knows."""
    return bool(stale_of([entry]))


def stale_of(entries: Iterable[Entry]) -> list[Entry]:
    """The stale ones of these entries. Buckets often share a kernel: each is rendered once."""
    held = [entry for entry in entries if entry.evidence.digest is not None]
    pairs = dict.fromkeys((entry.spec, entry.config) for entry in held)
    digests = {pair: short_digest(render(*pair).digest) for pair in pairs}
    return [e for e in held if digests[e.spec, e.config] != e.evidence.digest]


def kernels_by_name(tables: Iterable[Table], *, defaults: bool) -> dict[str, Rendered]:
    """All kernels of generated/, by full name, each rendered once."""
    untuned = specs_with_default() if defaults else ()
    pairs = {(spec, config): None for spec in untuned for config in default_configs(spec)}
    for table in tables:
        for entry in table.everything:
            pairs.update({(entry.spec, config): None for config in kernels_of(entry)})
    return {(kernel := render(spec, config)).name: kernel for spec, config in pairs}


def _table_text(table: Table) -> str:
    """The table of one GPU: a row for neighbouring buckets of a spec that share a config."""
    lines: dict[Source, list[str]] = {}
    for entry, line in _lines(table.entries):
        lines.setdefault(entry.result.source, []).append(line)
    sources = sorted(lines.items(), key=lambda item: -STRENGTH[item[0]])
    by_tritons: dict[str, list[Entry]] = {}
    for entry in table.executed:
        by_tritons.setdefault(" ".join(entry.tritons), []).append(entry)
    executed = [(key, [line for _, line in _lines(held)]) for key, held in by_tritons.items()]
    return render_text(
        "table.py.jinja", arch=table.gpu.arch, sources=sources, executed=sorted(executed)
    )


def _lines(entries: Iterable[Entry]) -> Iterator[tuple[Entry, str]]:
    """The line of each row, and its first entry."""
    for spec, group in groupby(entries, key=lambda entry: entry.spec):
        for row in rows_of(group):
            us = (entry.result.median_us for entry in row)
            times = " ".join("-" if time is None else figure(time) for time in us)
            yield row[0], f"{spec.name} {row[0].bucket.low} {row[0].config.label} {times}"


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
    pairs = zip_longest(found.splitlines(), expected.splitlines())
    differing = (number for number, (a, b) in enumerate(pairs, 1) if a != b)
    return next(differing, len(found.splitlines()) + 1)  # none: they end otherwise
