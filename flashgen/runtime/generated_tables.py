"""generated/tables/<slug>.py: what tables chose, read when a GPU is first looked up.

A file is loaded from its path, and its names are the same in every file: no slug becomes a name of
Python. Importing flashgen reads none of them, and serving a GPU reads its own.
"""

from __future__ import annotations

import importlib.util
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, TypeVar

from flashgen.errors import GeneratedError
from flashgen.runtime.choice import Choice
from flashgen.runtime.selection import Served
from flashgen.schedules.config import config_of
from flashgen.spec.attention import AttentionSpec, spec_of
from flashgen.spec.problem import BUCKETS
from flashgen.spec.vocabulary import Source

HEAD_BYTES = 4096
"""In which a file names its architecture."""

Found = TypeVar("Found")
_ARCH = re.compile(r'^ARCH = "(\w+)"$', re.MULTILINE)
_PLACE = {str(bucket.low): place for place, bucket in enumerate(BUCKETS)}


def served_from(folder: Path) -> Served:
    """The tables of a generated folder. Looking a GPU up in them raises GeneratedError where its
    file cannot be read.
    """
    files = {path.stem: path for path in sorted((folder / "tables").glob("*.py"))}
    return Served(archs=_OfFiles(files, _arch_of), choices=_OfFiles(files, _Table))


class _OfFiles(Mapping[str, Found]):
    """By slug, what `read` reads from the file of a GPU when it is first looked up."""

    def __init__(self, files: Mapping[str, Path], read: Callable[[Path], Found]) -> None:
        self._files = files
        self._read = read
        self._known: dict[str, Found] = {}

    def __getitem__(self, slug: str) -> Found:
        if slug not in self._known:
            self._known[slug] = self._read(self._files[slug])
        return self._known[slug]

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def _arch_of(path: Path) -> str:
    """The architecture that a file names."""
    try:
        with path.open("rb") as file:
            found = _ARCH.search(file.read(HEAD_BYTES).decode())
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(path, error) from None
    if found is None:
        raise _unreadable(path, "it names no ARCH")
    return found[1]


class _Row(NamedTuple):
    """The config of neighbouring buckets, from the first on, and its time in each."""

    source: Source
    first: int
    config: str
    times: tuple[float | None, ...]
    tritons: tuple[str, ...]


class _Table(Mapping[AttentionSpec, tuple[Choice, ...]]):
    """The choices of one GPU, executed ones before those that they stand in for. Those of a spec
    become values when it is first looked up.
    """

    def __init__(self, path: Path) -> None:
        self._rows: dict[str, list[_Row]] = defaultdict(list)
        self._made: dict[AttentionSpec, tuple[Choice, ...]] = {}
        try:
            for source, tritons, text in _rows_of(path):
                for line in text.split("\n")[1:-1]:
                    name, low, config, *times = line.split(" ")
                    us = tuple(None if word == "-" else float(word) for word in times)
                    held: Source = source if any(us) else "untimed"
                    self._rows[name].append(_Row(held, _PLACE[low], config, us, tritons))
        except Exception as error:  # whatever a file that somebody changed raises
            raise _unreadable(path, error) from error

    def __getitem__(self, spec: AttentionSpec) -> tuple[Choice, ...]:
        if spec not in self._made:
            if spec.name not in self._rows:
                raise KeyError(spec)
            self._made[spec] = tuple(
                Choice(
                    spec=spec,
                    bucket=bucket,
                    config=config_of(row.config),
                    source=row.source,
                    median_us=us,
                    tritons=row.tritons,
                )
                for row in sorted(
                    self._rows[spec.name], key=lambda row: (not row.tritons, row.first)
                )
                for bucket, us in zip(BUCKETS[row.first :], row.times, strict=False)
            )
        return self._made[spec]

    def __iter__(self) -> Iterator[AttentionSpec]:
        return map(spec_of, self._rows)

    def __len__(self) -> int:
        return len(self._rows)


def _rows_of(path: Path) -> Iterator[tuple[Source, tuple[str, ...], str]]:
    """The rows of a file, by source; those that are executed first, by versions of Triton. Executed
    ones are estimated, or have no time.
    """
    spec = importlib.util.spec_from_file_location("_flashgen_table", path)
    assert spec is not None  # the file's name ends with .py
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    executed: Mapping[str, str] = getattr(module, "EXECUTED", {})
    rows: Mapping[Source, str] = module.ROWS
    yield from (("estimated", tuple(key.split()), text) for key, text in executed.items())
    yield from ((source, (), text) for source, text in rows.items())


def _unreadable(path: Path, error: object) -> GeneratedError:
    kind = f"{type(error).__name__}: " if isinstance(error, Exception) else ""
    out = path.parents[2]
    return GeneratedError(
        f"{path} cannot be loaded ({kind}{error}): run flashgen generate --out {out}"
    )
