"""Stamp table entries anew whose kernel's text changed and whose machine code did not. CPU only.

    git worktree add ../before COMMIT        the commit whose kernels the entries name
    python benchmarks/restamp.py --before ../before            say what would be stamped
    python benchmarks/restamp.py --before ../before --write    and write configs/*.yaml

An entry carries the digest of the text that was timed. After an edit of the templates that changes
no instruction (a comment, a name, a step that becomes a function) the figures still hold, and only
the digest is old. For every entry with an old digest this program takes the text of that digest
from generated/kernels of the earlier checkout, compiles it and the text of today for the table's
architecture, and compares the machine code byte by byte, and registers and shared memory with it.
Where all are equal, the entry gets the digest of today. Where they are not, it is listed and left
alone: tune it again (`flashgen tune --target SLUG`).

With --constant=-1e30=-3.4e38 the two are equal too where they differ in this float32 alone, which
the old code has as an immediate and the new one has in its place: the instructions are the same.

Compiled code is kept in --cache, by the text without the kernel's name, so a second run is quick.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # there are as many processes as cores

import argparse
import hashlib
import itertools
import json
import multiprocessing
import struct
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from flashgen import paths
from flashgen.compile.compiler import CompileFailed, build
from flashgen.files import write_whole
from flashgen.kernels.render import HEADER_LINES, Rendered, render
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.config import KernelConfig
from flashgen.spec.gpu import TARGETS
from flashgen.table.emit import is_stale
from flashgen.table.entry import Entry, short_digest
from flashgen.table.table import load, restamped, save

ATTEMPTS = 4
"""Of one text Triton 3.7.1 makes one of two machine codes for sm_100, at random."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A kernel of today, the text that its entries name, and what to compile both for."""

    spec: AttentionSpec
    config: KernelConfig
    arch: str
    before: Rendered
    constant: tuple[bytes, bytes] | None = None


def texts_by_digest(folder: Path) -> dict[str, Rendered]:
    """The kernels of a folder, by the short digest of the one in their headers."""
    found = {}
    for file in sorted(folder.glob("*.py")):
        source = file.read_text()
        head = source.splitlines()[:HEADER_LINES]
        if len(head) == HEADER_LINES and head[-1].startswith("# sha256:"):
            digest = head[-1].removeprefix("# ")
            found[short_digest(digest)] = Rendered(
                name=file.stem, source=source, digest=digest, template=""
            )
    return found


def same_code(job: Job, cache: Path) -> str:
    """What differs in the machine code of both texts; an empty string where nothing does."""
    now = render(job.spec, job.config)
    old, new = [], []
    for attempt in range(ATTEMPTS):
        try:
            old.append(code_of(job.before, job, cache, attempt))
            new.append(code_of(now, job, cache, attempt))
        except CompileFailed as error:
            return str(error)
        if any(code in new for code in old):
            return ""
    return ", ".join(name for name in old[-1] if old[-1][name] != new[-1][name])


def code_of(rendered: Rendered, job: Job, cache: Path, attempt: int) -> dict[str, str]:
    """A kernel's machine code, as a digest of it, and its resources."""
    import triton

    # The text says neither its types nor its warps: spec and config do.
    anonymous = rendered.source.replace(rendered.name, "kernel").split("\n", HEADER_LINES)[-1]
    parts = anonymous, job.spec, job.config, job.arch, triton.__version__, job.constant
    key = hashlib.sha256(repr((*parts, attempt)).encode()).hexdigest()
    path = cache / f"{key}.json"
    if path.is_file():
        kept: dict[str, str] = json.loads(path.read_text())
        return kept
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / f"{rendered.name}.py"
        source.write_text(rendered.source)
        built, _ = build(source, rendered, job.spec, job.config, job.arch)
    found = b"".join(sections(built.kernel))
    if job.constant is not None:
        found = found.replace(*job.constant)
    code = {
        "code": hashlib.sha256(found).hexdigest(),
        "shared memory": str(built.metadata.shared),
    }
    write_whole(path, json.dumps(code))
    return code


def sections(binary: bytes) -> Iterator[bytes]:
    """The machine code of a binary of NVIDIA or AMD: its executable sections, each behind the field
    of its header in which NVIDIA's has the number of registers.
    """
    (start,) = struct.unpack_from("<Q", binary, 0x28)
    size, count = struct.unpack_from("<HH", binary, 0x3A)
    for n in range(count):
        _, kind, flags, _, offset, length, _, info = struct.unpack_from(
            "<IIQQQQII", binary, start + n * size
        )
        if kind == 1 and flags & 4:  # PROGBITS, EXECINSTR
            yield struct.pack("<I", info) + binary[offset : offset + length]


def float32_pair(text: str) -> tuple[bytes, bytes]:
    """Two float32 numbers, written OLD=NEW, as they are in machine code."""
    old, new = (struct.pack("<f", float(number)) for number in text.split("="))
    return old, new


def jobs_of(
    slugs: Iterable[str], texts: dict[str, Rendered], constant: tuple[bytes, bytes] | None = None
) -> tuple[list[Job], list[str]]:
    """What is to be compared, and sentences on entries whose text is in no file."""
    jobs: dict[Job, None] = {}
    missing = []
    for slug in slugs:
        table = load(paths.shipped_table(slug))
        for entry in table.entries:
            if not is_stale(entry):
                continue
            if entry.digest in texts:
                jobs[job_of(entry, table.gpu.arch, texts, constant)] = None
            else:
                missing.append(f"{slug}: {entry.spec.name}: --before has no text of {entry.digest}")
    return list(jobs), missing


def job_of(
    entry: Entry, arch: str, texts: dict[str, Rendered], constant: tuple[bytes, bytes] | None
) -> Job:
    """The comparison that decides about an entry."""
    before = texts[entry.digest]
    return Job(spec=entry.spec, config=entry.config, arch=arch, before=before, constant=constant)


def stamp(slugs: Iterable[str], equal: set[Job]) -> int:
    """Write the digests of today into the entries whose machine code is equal; how many."""
    count = 0
    for slug in slugs:
        path = paths.shipped_table(slug)
        table = load(path)
        digests = {
            job.before.digest: render(job.spec, job.config).digest
            for job in equal
            if job.arch == table.gpu.arch
        }
        new = restamped(table, digests)
        count += sum(a != b for a, b in zip(table.entries, new.entries, strict=True))
        save(new, path)
    return count


def main(arguments: Sequence[str]) -> int:
    """Compare, and stamp if asked to; 1 where an entry stays as it is."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("slugs", nargs="*", default=sorted(TARGETS), metavar="SLUG")
    parser.add_argument("--before", type=Path, required=True, metavar="DIR")
    parser.add_argument("--write", action="store_true")
    parser.add_argument(
        "--cache", type=Path, default=Path(tempfile.gettempdir()) / "flashgen-restamp"
    )
    parser.add_argument("--constant", type=float32_pair, metavar="OLD=NEW")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    given = parser.parse_args(arguments)
    texts = texts_by_digest(given.before / "generated" / "kernels")
    slugs = [slug for slug in given.slugs if paths.shipped_table(slug).is_file()]
    jobs, missing = jobs_of(slugs, texts, given.constant)
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(given.jobs, mp_context=spawn) as workers:
        found = list(workers.map(same_code, jobs, itertools.repeat(given.cache)))
    for job, difference in zip(jobs, found, strict=True):
        if difference:
            print(f"{job.arch}: {render(job.spec, job.config).name}: {difference}")
    print("\n".join(missing))
    equal = {job for job, difference in zip(jobs, found, strict=True) if not difference}
    print(f"{len(equal)} of {len(jobs)} kernels with another text have the same machine code")
    if given.write:
        print(f"{stamp(slugs, equal)} entries were stamped anew: run flashgen generate")
    return int(len(equal) < len(jobs) or bool(missing))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
