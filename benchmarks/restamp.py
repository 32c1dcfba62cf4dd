"""Which kernels have the machine code that they had in an earlier checkout; entries of the tables
whose kernel changed in its text alone are stamped anew. CPU only.

    git worktree add ../before COMMIT        the commit whose kernels the entries name
    cp benchmarks/restamp.py ../before/benchmarks/
    python ../before/benchmarks/restamp.py collect before.jsonl
    python benchmarks/restamp.py collect after.jsonl --like before.jsonl
    python benchmarks/restamp.py compare before.jsonl after.jsonl
    python benchmarks/restamp.py stamp before.jsonl after.jsonl            say what would be stamped
    python benchmarks/restamp.py stamp before.jsonl after.jsonl --write    and write the tables

With --ir, collect takes the first form into which Triton brings a kernel, inlined and simplified,
without names and line numbers: 0.3 seconds a kernel, where machine code takes 6. Of equal forms
Triton and ptxas make equal machine code, so stamp takes them; they have no registers to compare.
Collect the kernels that `compare` names again without --ir, into files of their own.

`collect` compiles every kernel that the tables of its checkout name, and their pointer twins, for
the architectures of those tables, and appends one line each: a digest of the executable sections,
which hold neither names nor line numbers, registers, spills and shared memory. Kernels whose text
is in the file already are skipped, so an interrupted run goes on. --kernels 'fwd_*_hopper_*' takes
those alone whose names match, for a change of few templates. With --like FILE, a kernel whose
code differs from that file's is compiled again, up to four times: of one text Triton 3.7.1 makes
one of two machine codes for sm_100, at random.

`compare` prints how many are equal, names all others with both sides' registers and spills, and
ends with status 1 if any has more of either, or the files do not have the same kernels.

`stamp`: an entry carries the digest of the kernel that was timed. After an edit of the templates
that changes no instruction (a name, a number that becomes a parameter) the figures still hold, and
only the digest is old. It becomes that of today where the kernel of that digest and the one of
today have the same machine code, registers and shared memory for the table's architecture. All
others are listed and left alone: tune them again (`flashgen tune --target SLUG`).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import struct
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from flashgen import paths
from flashgen.compile.compiler import cache_file, compile_kernel, source_of, target_of
from flashgen.files import temporary_folder
from flashgen.kernels.loader import load_kernel
from flashgen.kernels.render import render
from flashgen.kernels.signature import variants
from flashgen.schedules.config import KernelConfig, kernel_name
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.gpu import TARGETS
from flashgen.table.emit import is_stale, kernels_of
from flashgen.table.entry import Entry, short_digest
from flashgen.table.table_file import load, load_with_evidence, save

ATTEMPTS = 4
"""Compilations of a kernel whose code differs from the one that --like names."""


@dataclass(frozen=True, kw_only=True)
class Code:
    """The machine code of a kernel for one architecture. digest: that of its text; whole: as
    signature.compile_signature has it.
    """

    kernel: str
    arch: str
    whole: bool
    digest: str
    code: str
    registers: int
    spill_bytes: int
    shared: int

    @property
    def key(self) -> tuple[str, str, bool]:
        """What it is the machine code of."""
        return self.kernel, self.arch, self.whole

    @property
    def resources(self) -> str:
        """Registers and spills, in a few words."""
        return f"{self.registers} registers, {self.spill_bytes} bytes spilled"


def named() -> list[tuple[AttentionSpec, KernelConfig, str, bool]]:
    """The kernels that the tables name, with their twins: spec, config, architecture and whole."""
    tables = map(load, sorted((ROOT / "configs").glob("*.yaml")))
    found = (
        (entry.spec, config, table.gpu.arch, whole)
        for table in tables
        for entry in table.everything
        for config in kernels_of(entry)
        for whole in variants(entry.spec)
    )
    return list(dict.fromkeys(found))


def simplified(spec: AttentionSpec, config: KernelConfig, arch: str, whole: bool) -> Code:
    """The first form into which Triton brings one kernel, in place of machine code."""
    from triton._C.libtriton import ir
    from triton.compiler import make_backend

    rendered = render(spec, config)
    with temporary_folder("restamp") as folder:
        file = folder / "kernel.py"
        file.write_text(rendered.source)
        kernel = load_kernel(file, rendered.text_name, "kernel")
        source, target = source_of(kernel, spec, config, whole=whole), target_of(arch)
        backend, context = make_backend(target), ir.context()
        stages: dict[str, Any] = {}
        options = backend.parse_options(config.launch_options(spec) | source.parse_options())
        ir.load_dialects(context)
        backend.load_dialects(context)
        needs = backend.get_codegen_implementation(options), backend.get_module_map()
        module = source.make_ir(target, options, *needs, context)
        backend.add_stages(stages, options, source.language)
        form = next(iter(stages.values()))(module, {}).str_nodebug()
    return Code(
        kernel=rendered.name, arch=arch, whole=whole, digest=rendered.digest,
        code="ir:" + hashlib.sha256("\n".join(without_constants(form)).encode()).hexdigest(),
        registers=0, spill_bytes=0, shared=0,
    )  # fmt: skip


def by_vendor() -> Callable[[AttentionSpec, KernelConfig, str, bool], Code]:
    """simplified(), once for all architectures of a vendor: no text asks for which it is."""
    known: dict[tuple[str, bool, bool], Code] = {}

    def found(spec: AttentionSpec, config: KernelConfig, arch: str, whole: bool) -> Code:
        key = kernel_name(spec, config), whole, arch.startswith("sm_")
        if key not in known:
            known[key] = simplified(spec, config, arch, whole)
        return replace(known[key], arch=arch)

    return found


def without_constants(form: str) -> Iterator[str]:
    """Its lines, with constants where they are used: Triton has them in the order of first uses."""
    known: dict[str, str] = {}
    for line in form.splitlines():
        if found := re.fullmatch(r" *(%[a-z]\w*) = (arith\.constant .*)", line):
            known[found[1]] = found[2]
        else:
            yield re.sub(r"%[a-z]\w*", lambda name: known.get(name[0], name[0]), line)


def compiled(spec: AttentionSpec, config: KernelConfig, arch: str, whole: bool) -> Code:
    """Compile one kernel."""
    rendered = render(spec, config)
    with temporary_folder("restamp") as folder:
        built = compile_kernel(rendered, spec, config, arch, whole=whole, cache=folder)
        file = cache_file(built.digest, arch, built.triton, folder, "cubin", whole=whole)
        code = hashlib.sha256(b"".join(sections(file.read_bytes()))).hexdigest()
    return Code(
        kernel=rendered.name, arch=arch, whole=whole, digest=rendered.digest, code=code,
        registers=built.registers, spill_bytes=built.spill_bytes, shared=built.shared_bytes,
    )  # fmt: skip


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


Codes = dict[tuple[str, str, bool], Code]


def read(path: Path) -> Codes:
    """The lines of a file; of one kernel, the last."""
    lines = path.read_text().splitlines() if path.is_file() else []
    return {code.key: code for code in (Code(**json.loads(line)) for line in lines)}


def collect(path: Path, like: Path | None, pattern: str, *, first_form: bool) -> None:
    """Append the kernels that the file lacks, of those whose names match."""
    made = by_vendor() if first_form else compiled
    before = read(like) if like else {}
    have = {key: code.digest for key, code in read(path).items()}
    kernels = [each for each in named() if fnmatchcase(kernel_name(*each[:2]), pattern)]
    for n, (spec, config, arch, whole) in enumerate(kernels, 1):
        rendered = render(spec, config)
        if have.get((rendered.name, arch, whole)) == rendered.digest:
            continue
        for _ in range(ATTEMPTS):
            code = made(spec, config, arch, whole)
            if code.key not in before or code.code == before[code.key].code:
                break
        with path.open("a") as file:
            file.write(json.dumps(asdict(code)) + "\n")
        print(f"{n} of {len(kernels)}: {arch} {code.kernel}", flush=True)


def compare(before: Codes, after: Codes) -> int:
    """Print the report; 1 if a kernel takes more registers or spills more, or a file lacks one."""
    both = sorted(before.keys() & after.keys())
    other = [key for key in both if before[key].code != after[key].code]
    bad = [
        key
        for key in both
        if after[key].registers > before[key].registers
        or after[key].spill_bytes > before[key].spill_bytes
    ]
    of = f"{len(both)} compilations of {len({key[0] for key in both})} kernels"
    equal = f"{len(both) - len(other)} have equal machine code, {len(other)} do not"
    print(f"{of}: {equal}, {len(bad)} are worse.")
    for side, lack in (("before", after.keys() - before), ("after", before.keys() - after)):
        if lack:
            print(f"{len(lack)} compilations are not in the file {side}.")
    for key in other:
        mark = " (worse)" if key in bad else ""
        print(f"{key[1]} {key[0]}: {before[key].resources}; now {after[key].resources}{mark}")
    return int(bool(bad) or before.keys() != after.keys())


def why_not(entry: Entry, arch: str, before: Iterable[Code], after: Iterable[Code]) -> str:
    """Why an entry with an old digest cannot get that of today; an empty string where it can."""
    digest, recorded = render(entry.spec, entry.config).digest, entry.evidence.digest
    old = {c.whole: c for c in before if c.arch == arch and short_digest(c.digest) == recorded}
    new = {c.whole: c for c in after if c.arch == arch and c.digest == digest}
    if not old or old.keys() != new.keys():
        return "the files lack it" if old else f"no file has the kernel {recorded}"
    names = ("code", "registers", "shared")
    same = {
        name: all(getattr(c, name) == getattr(new[w], name) for w, c in old.items())
        for name in names
    }
    return ", ".join(name for name in names if not same[name])


def stamp(slug: str, before: Sequence[Code], after: Sequence[Code], *, write: bool) -> list[str]:
    """Stamp a table's entries, and write it if asked to; a sentence on each that stays as it is."""
    path = paths.shipped_table(slug)
    table, left = load_with_evidence(path), []

    def stamped(entry: Entry) -> Entry:
        if not is_stale(entry):
            return entry
        rendered = render(entry.spec, entry.config)
        if reason := why_not(entry, table.gpu.arch, before, after):
            left.append(f"{slug}: {rendered.name}: {reason}")
            return entry
        evidence = replace(entry.evidence, digest=short_digest(rendered.digest))
        return replace(entry, evidence=evidence)

    new = table.of(map(stamped, table.everything))
    count = sum(a != b for a, b in zip(table.everything, new.everything, strict=True))
    print(f"{slug}: {count} of {len(table.everything)} entries get the digest of today")
    if write and count:
        save(new, path)
    return left


def main(arguments: Sequence[str]) -> int:
    """Collect, compare or stamp; 1 where a kernel is worse, or an entry stays as it is."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("command", choices=("collect", "compare", "stamp"))
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="before, after")
    parser.add_argument("--like", type=Path, metavar="FILE", help="of collect")
    parser.add_argument("--kernels", default="*", metavar="PATTERN", help="of collect")
    parser.add_argument("--ir", action="store_true", help="of collect: no machine code")
    parser.add_argument("--slugs", nargs="+", default=sorted(TARGETS), help="of stamp: tables")
    parser.add_argument("--write", action="store_true", help="of stamp")
    given = parser.parse_args(arguments)
    if len(given.files) != (1 if given.command == "collect" else 2):
        parser.error("collect takes one file, all else two: before and after")
    if given.command == "collect":
        collect(given.files[0], given.like, given.kernels, first_form=given.ir)
        return 0
    before, after = map(read, given.files)
    if given.command == "compare":
        return compare(before, after)
    codes = list(before.values()), list(after.values())
    slugs = [slug for slug in given.slugs if paths.shipped_table(slug).is_file()]
    left = [line for slug in slugs for line in stamp(slug, *codes, write=given.write)]
    print("\n".join(left))
    return int(bool(left))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
