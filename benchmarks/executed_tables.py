"""What flashgen.ptx has executed of the shipped tables: a row a table.

    python -m benchmarks.executed_tables            # the rows
    python -m benchmarks.executed_tables SLUG...    # first executes what RECORD lacks of these

A line of RECORD is a kernel of one architecture, by its digest: a kernel whose text has changed
since counts as not executed, and one that several tables share is executed once. That holds across
SAME_PTX, too: where its PTX is the same but for the target, the line says for which architecture it
was executed. A run that was cut off goes on; it also continues `flashgen verify --executed` in this
folder.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from flashgen import paths
from flashgen.compile.ptx import build_ptx
from flashgen.evaluate.evaluator import triton_version
from flashgen.evaluate.sanitize import Sanitized
from flashgen.kernels.render import render
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.config import KernelConfig
from flashgen.table.emit import kernels_of
from flashgen.table.table import Table, load
from flashgen.tune.verify import execute
from tests.tables import SHIPPED

RECORD = Path(__file__).parent / "results" / "executed.jsonl"
SEEDS = 1
"""Orders of blocks, warps and copies that each kernel is executed in."""

SAME_PTX = ("sm_80", "sm_86", "sm_89")
"""Architectures for which Triton writes the same instructions. instructions() is compared for each
kernel, as its signature has it; not for the other types of tensors that a case may have."""


def main() -> None:
    """Execute the tables that are named, and print the rows of all."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("slugs", nargs="*", metavar="SLUG", help="tables to execute first")
    parser.add_argument("--jobs", type=int, help="children that work; one a core by default")
    asked = parser.parse_args()
    for slug in asked.slugs:
        execute_table(load(paths.shipped_table(slug)), asked.jobs)
    print("\n".join(rows()))


def execute_table(table: Table, jobs: int | None = None) -> None:
    """Execute the kernels of a table that RECORD lacks, and append them. `jobs` children work."""
    version, arch = triton_version(), table.gpu.arch
    for line in lent(table):
        _record(line)
    log = paths.state_dir(Path()) / f"{table.gpu.slug}-executed.jsonl"
    known = {
        line["digest"]: Sanitized(name=line["name"], digest=line["digest"], passed=True)
        for line in recorded()
        if (line["triton"], line["arch"], line["faults"]) == (version, arch, 0)
    }
    log.parent.mkdir(exist_ok=True)
    with log.open("a") as file:
        file.writelines(
            json.dumps({"triton": version} | asdict(done)) + "\n" for done in known.values()
        )
    for _, found in execute(table, log, jobs):
        if found.digest not in known:
            line = {"triton": version, "arch": arch, "name": found.name, "digest": found.digest}
            _record(line | {"faults": len(found.findings) + (not found.passed)})
            print("\n".join(found.lines()), flush=True)


def lent(table: Table) -> Iterator[dict[str, str | int]]:
    """A line for each kernel that RECORD lacks for the table's architecture, and has for another
    one of SAME_PTX, without a fault and with the same PTX.
    """
    version, arch = triton_version(), table.gpu.arch
    lines = [line for line in recorded() if line["triton"] == version]
    here = {line["digest"] for line in lines if line["arch"] == arch}
    executed = {
        line["digest"]: line
        for line in lines
        if line["arch"] in SAME_PTX and not line["faults"] and "executed_for" not in line
    }
    for spec, config in _kernels(table) if arch in SAME_PTX else ():
        digest = render(spec, config).digest
        line = executed.get(digest)
        if line is None or digest in here:
            continue
        if instructions(spec, config, arch) == instructions(spec, config, str(line["arch"])):
            yield line | {"arch": arch, "executed_for": line["arch"]}


def instructions(spec: AttentionSpec, config: KernelConfig, arch: str) -> str:
    """The PTX of a kernel without its target, lines of the source and debug sections."""
    ptx = build_ptx(render(spec, config), spec, config, arch).ptx.partition("\t.section\t")[0]
    return re.sub(r"^\s*\.(target|file|loc)\b.*\n", "", ptx, flags=re.MULTILINE)


def _kernels(table: Table) -> dict[tuple[AttentionSpec, KernelConfig], None]:
    return dict.fromkeys((e.spec, config) for e in table.everything for config in kernels_of(e))


def _record(line: dict[str, str | int]) -> None:
    with RECORD.open("a") as file:
        file.write(json.dumps(line) + "\n")


def recorded() -> list[dict[str, str | int]]:
    """The lines of RECORD."""
    return [json.loads(line) for line in RECORD.read_text().splitlines()]


def rows() -> list[str]:
    """A header, then a row for each shipped table of a GPU of NVIDIA."""
    lines = recorded()
    versions = ", ".join(sorted({str(line["triton"]) for line in lines}))
    faults = {(line["arch"], line["digest"]): int(line["faults"]) for line in lines}
    found = [
        f"Triton {versions}, all cases of the check, some on fewer blocks, seeds: {SEEDS}",
        f"{'table':34} {'arch':8} {'kernels':>8} {'executed':>9} {'with faults':>12}",
    ]
    for path in filter(Path.exists, map(paths.shipped_table, SHIPPED)):
        table = load(path)
        if not table.gpu.is_nvidia:  # whose code is no PTX
            continue
        keys = [(table.gpu.arch, render(*kernel).digest) for kernel in _kernels(table)]
        done = [faults[key] for key in keys if key in faults]
        wrong = sum(count > 0 for count in done)
        found.append(
            f"{table.gpu.slug:34} {table.gpu.arch:8} {len(keys):8} {len(done):9} {wrong:12}"
        )
    return found


if __name__ == "__main__":
    main()
