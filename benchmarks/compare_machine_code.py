"""Whether the shipped kernels have the machine code that they had in an earlier checkout. CPU only.

    git worktree add ../before COMMIT
    python benchmarks/compare_machine_code.py collect before.jsonl --tree ../before
    python benchmarks/compare_machine_code.py collect after.jsonl
    python benchmarks/compare_machine_code.py compare before.jsonl after.jsonl

`collect` compiles every kernel that the tables of a checkout name, and their pointer twins, for the
architectures of those tables, and appends one line each: a digest of the executable sections, which
hold neither names nor line numbers, registers, spills and shared memory. Kernels whose text is in
the file already are skipped, so an interrupted run goes on. With --like FILE, a kernel whose code
differs from that file's is compiled again, up to four times: of one text Triton 3.7.1 makes one of
two machine codes for sm_100, at random.

`compare` prints how many are equal, names all others with both sides' registers and spills, and
ends with status 1 if any has more of either.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import re
import struct
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

ATTEMPTS = 4
"""Compilations of a kernel whose code differs from the one that --like names."""

_RESOURCES = {
    "registers": re.compile(r"Used (\d+) registers"),
    "spill_stores": re.compile(r"(\d+) bytes spill stores"),
    "spill_loads": re.compile(r"(\d+) bytes spill loads"),
}


@dataclass(frozen=True, kw_only=True)
class Code:
    """The machine code of a kernel for one architecture. digest: that of its text."""

    kernel: str
    arch: str
    whole: bool
    digest: str
    code: str
    registers: int
    spill_stores: int
    spill_loads: int
    shared: int

    @property
    def key(self) -> tuple[str, str, bool]:
        """What it is the machine code of."""
        return self.kernel, self.arch, self.whole

    @property
    def resources(self) -> str:
        """Registers and spills, in a few words."""
        return f"{self.registers} registers, {self.spill_stores}/{self.spill_loads} bytes spilled"


def kernels_of(tree: Path) -> list[tuple[Any, Any, str, bool]]:
    """The kernels that the tables of a checkout name, with their twins: spec, config, architecture
    and whether it stores results.
    """
    emit = importlib.import_module("flashgen.table.emit")
    signature = importlib.import_module("flashgen.kernels.signature")
    load = importlib.import_module("flashgen.table.table").load
    found: dict[tuple[Any, Any, str, bool], None] = {}
    for path in sorted((tree / "configs").glob("*.yaml")):
        table = load(path)
        for entry in table.everything:
            for config in emit.kernels_of(entry):
                for whole in signature.variants(entry.spec):
                    found[entry.spec, config, table.gpu.arch, whole] = None
    return list(found)


def compiled(rendered: Any, spec: Any, config: Any, arch: str, whole: bool) -> Code:
    """Compile one kernel."""
    compiler = importlib.import_module("flashgen.compile.compiler")
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / f"{rendered.name}.py"
        source.write_text(rendered.source)
        built, log = compiler.build(source, rendered, spec, config, arch, whole=whole)
    return Code(
        kernel=rendered.name,
        arch=arch,
        whole=whole,
        digest=rendered.digest,
        code=hashlib.sha256(b"".join(sections(built.kernel))).hexdigest(),
        shared=int(built.metadata.shared),
        **{name: largest(pattern, log) for name, pattern in _RESOURCES.items()},
    )


def largest(pattern: re.Pattern[str], log: str) -> int:
    """The largest number that ptxas printed there."""
    return max(map(int, pattern.findall(log)), default=0)


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


def read(path: Path) -> dict[tuple[str, str, bool], Code]:
    """The lines of a file; of one kernel, the last."""
    lines = path.read_text().splitlines() if path.is_file() else []
    return {code.key: code for code in (Code(**json.loads(line)) for line in lines)}


def collect(path: Path, tree: Path, like: Path | None) -> None:
    """Append the kernels of a checkout that the file lacks."""
    sys.path.insert(0, str(tree))
    render = importlib.import_module("flashgen.kernels.render").render
    before = read(like) if like else {}
    have = {key: code.digest for key, code in read(path).items()}
    kernels = kernels_of(tree)
    for n, (spec, config, arch, whole) in enumerate(kernels, 1):
        rendered = render(spec, config)
        if have.get((rendered.name, arch, whole)) == rendered.digest:
            continue
        for _ in range(ATTEMPTS):
            code = compiled(rendered, spec, config, arch, whole)
            if code.key not in before or code.code == before[code.key].code:
                break
        with path.open("a") as file:
            file.write(json.dumps(asdict(code)) + "\n")
        print(f"{n} of {len(kernels)}: {arch} {code.kernel}", flush=True)


def worse(before: Code, after: Code) -> bool:
    """Whether a kernel takes more registers than before, or spills more."""
    spilled = after.spill_stores + after.spill_loads > before.spill_stores + before.spill_loads
    return after.registers > before.registers or spilled


def compare(before: dict[Any, Code], after: dict[Any, Code]) -> Iterable[str]:
    """The lines of the report."""
    both = sorted(before.keys() & after.keys())
    other = [key for key in both if before[key].code != after[key].code]
    kernels = {key[0] for key in both}
    yield (
        f"{len(both)} compilations of {len(kernels)} kernels: {len(both) - len(other)} have equal "
        f"machine code, {len(other)} do not, {sum(worse(before[k], after[k]) for k in other)} are "
        "worse."
    )
    for side, lack in (("before", after.keys() - before), ("after", before.keys() - after)):
        if lack:
            yield f"{len(lack)} compilations are not in the file {side}."
    for key in other:
        mark = " (worse)" if worse(before[key], after[key]) else ""
        yield f"{key[1]} {key[0]}: {before[key].resources}; now {after[key].resources}{mark}"


def main(arguments: Sequence[str]) -> int:
    """Run `collect` or `compare`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    gather = commands.add_parser("collect", help="compile the kernels of a checkout")
    gather.add_argument("file", type=Path)
    gather.add_argument("--tree", type=Path, default=ROOT, metavar="DIR")
    gather.add_argument("--like", type=Path, metavar="FILE")
    both = commands.add_parser("compare", help="compare two files")
    both.add_argument("before", type=Path)
    both.add_argument("after", type=Path)
    given = parser.parse_args(arguments)
    if given.command == "collect":
        collect(given.file, given.tree.resolve(), given.like)
        return 0
    before, after = read(given.before), read(given.after)
    print("\n".join(compare(before, after)))
    alike = before.keys() == after.keys()
    return int(not alike or any(worse(before[key], after[key]) for key in before))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
