"""Stamp table entries anew whose kernel's text changed and whose machine code did not. CPU only.

    git worktree add ../before COMMIT        the commit whose kernels the entries name
    python benchmarks/compare_machine_code.py collect before.jsonl --tree ../before
    python benchmarks/compare_machine_code.py collect after.jsonl --like before.jsonl
    python benchmarks/restamp.py before.jsonl after.jsonl              say what would be stamped
    python benchmarks/restamp.py before.jsonl after.jsonl --write      and write the tables

An entry carries the digest of the kernel that was timed. After an edit of the templates that
changes no instruction (a name, a number that becomes a parameter) the figures still
hold, and only the digest is old. An entry with an old digest gets the digest of today where the
kernel of that digest and the one of today have the same machine code, registers and shared memory
for the table's architecture. All others are listed and left alone: tune them again
(`flashgen tune --target SLUG`).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.compare_machine_code import Code, read
from flashgen import paths
from flashgen.kernels.render import render
from flashgen.spec.gpu import TARGETS
from flashgen.table.emit import is_stale
from flashgen.table.entry import Entry, short_digest
from flashgen.table.table import Table, load_with_evidence, save


def why_not(entry: Entry, arch: str, before: Iterable[Code], after: Iterable[Code]) -> str:
    """Why an entry with an old digest cannot get that of today; an empty string where it can."""
    digest, recorded = render(entry.spec, entry.config).digest, entry.evidence.digest
    old = {c.whole: c for c in before if c.arch == arch and short_digest(c.digest) == recorded}
    new = {c.whole: c for c in after if c.arch == arch and c.digest == digest}
    if not old or old.keys() != new.keys():
        return "the files lack it" if old else f"no file has the kernel {recorded}"
    changed = {
        name
        for whole, code in old.items()
        for name in ("code", "registers", "shared")
        if getattr(code, name) != getattr(new[whole], name)
    }
    return ", ".join(sorted(changed))


def stamp(slug: str, before: Sequence[Code], after: Sequence[Code], *, write: bool) -> list[str]:
    """Stamp a table's entries, and write it if asked to; a sentence on each that stays as it is."""
    path = paths.shipped_table(slug)
    table = load_with_evidence(path)
    digests: dict[str, str] = {}
    left = []
    for entry in filter(is_stale, table.everything):
        reason = why_not(entry, table.gpu.arch, before, after)
        if reason:
            left.append(f"{slug}: {render(entry.spec, entry.config).name}: {reason}")
        else:
            digests[entry.evidence.digest or ""] = render(entry.spec, entry.config).digest
    new = restamped(table, digests)
    pairs = zip(table.everything, new.everything, strict=True)
    count = sum(a != b for a, b in pairs)
    print(f"{slug}: {count} of {len(table.everything)} entries get the digest of today")
    if write and count:
        save(new, path)
    return left


def restamped(table: Table, digests: Mapping[str, str]) -> Table:
    """The table with digests of its evidence replaced, from the old to the new one, short or full.
    Runners-up are as they were.
    """
    new = {short_digest(old): short_digest(text) for old, text in digests.items()}

    def stamped(entry: Entry) -> Entry:
        digest = entry.evidence.digest
        evidence = replace(entry.evidence, digest=new.get(digest or "", digest))
        return replace(entry, evidence=evidence)

    return table.of(map(stamped, table.everything))


def main(arguments: Sequence[str]) -> int:
    """Compare, and stamp if asked to; 1 where an entry stays as it is."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("slugs", nargs="*", default=sorted(TARGETS), metavar="SLUG")
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args(arguments)
    before, after = (list(read(path).values()) for path in (given.before, given.after))
    slugs = [slug for slug in given.slugs if paths.shipped_table(slug).is_file()]
    left = [line for slug in slugs for line in stamp(slug, before, after, write=given.write)]
    print("\n".join(left))
    return int(bool(left))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
