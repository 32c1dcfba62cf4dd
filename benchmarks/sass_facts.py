"""Facts of the compiled kernels that ship, as one table an architecture. CPU only; compiles.

    python benchmarks/sass_facts.py            write this Triton's part of results/sass_facts.md
        --missing                              compile those alone whose lines the part lacks
        --missing --kernel 'bwd_ds_*'          and these, whose text has changed
    python benchmarks/sass_facts.py --check    fail, and say where, if that part says otherwise
        --kernel 'bwd_*_bf16_d64_*'            compare only the lines of these kernels, as CI does
    make -f tests/sessions.mk facts TRITON=3.8.0    write that of another Triton
                                                    (FACTS=--check: compare)

Compilers change: a new ptxas may undo a schedule, or spill, and no test of results would notice.
Every kernel of the tables is compiled for their architecture, and some of schedule hopper besides.
A line says what its steady main loop does for one tile, and the last column what of it breaks
flashgen's rules:

    spills        loads and stores of spilled registers, in all main loops
    arrives       WARPGROUP.ARRIVE of a tile, at most one a batch of products in the text
                  (Schedule.batches): more, and ptxas has cut them
    exp2 under    share of exp2 that is issued while a wgmma of the same warpgroup runs; a kernel of
                  schedule s_ahead needs LEAST_OVERLAP of it, in the backward
                  BACKWARD_OVERLAP, one of hopper HOPPER_OVERLAP
    advisories    remarks C7510 to C7518 of ptxas: it made wgmma wait

"too large" there is a kernel that the GPU cannot hold: shared memory, registers or tensor memory;
"trap" one that the compiler gave up, so that it computes nothing.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # there are as many processes as cores

import argparse
import difflib
import itertools
import multiprocessing
import re
import sys
from collections.abc import Collection, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple, get_args

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import triton

from flashgen import paths
from flashgen.compile.compiler import Compiled, CompileFailed, compile_kernel
from flashgen.compile.verdict import overlap, residents
from flashgen.files import write_whole
from flashgen.kernels.render import render
from flashgen.schedules.base import TENSOR_COLUMNS, Order
from flashgen.schedules.config import SCHEDULES, KernelConfig, config_of, kernel_name
from flashgen.schedules.legality import why_illegal
from flashgen.spec.attention import AttentionSpec, spec_of
from flashgen.spec.gpu import TARGETS, Gpu
from flashgen.table.table_file import load
from tests.tables import SHIPPED

H200 = TARGETS["nvidia_h200"]
RESULT = ROOT / "benchmarks" / "results" / "sass_facts.md"
HEAD = """# What the compiler makes of the kernels that ship

Written by `benchmarks/sass_facts.py`, which says what the columns mean; a part for each Triton that
it was run with. Compiled, and run on nothing: these are facts of machine code, no times.

Kernels that break no rule, of all:
"""
HOPPER_TILES = {64: "br128_bc128_w8", 128: "br128_bc128_w8", 256: "br128_bc64_w8"}
"""Tiles of the forward by head dim, in rings of two places."""
HOPPER_BACKWARD = (
    ("bwd_dkv_bf16_d64", "br128_bc128_w8_s2_hopper_tma"),
    ("bwd_dkv_bf16_d128", "br64_bc128_w8_s2_hopper_tma"),
    ("bwd_dkv_bf16_d256", "br64_bc64_w8_s2_hopper_tma"),
    ("bwd_dq_bf16_d64", "br128_bc128_w8_s2_hopper_tma"),
    ("bwd_dq_bf16_d128", "br128_bc128_w8_s2_hopper_tma"),
    ("bwd_dq_bf16_d256", "br128_bc64_w8_s2_hopper_tma"),
    ("bwd_fused_bf16_d64", "br64_bc128_w8_s2_hopper_tma"),
    ("bwd_fused_bf16_d64", "br128_bc128_w8_s2_hopper_tma_nexts"),
    ("bwd_fused_bf16_d128", "br64_bc128_w8_s2_hopper_tma"),
    ("bwd_fused_bf16_d128", "br64_bc128_w8_s2_hopper_tma_nexts"),
    ("bwd_fused_bf16_d256", "br64_bc64_w8_s2_hopper_tma"),
)
"""Those of the backward, each without and with a causal mask."""
COLUMNS = (
    "kernel", "registers", "shared", "instructions a tile", "arrives", "exp2 under", "spills",
    "advisories", "breaks",
)  # fmt: skip

HOPPER = "schedule hopper"


class Kernel(NamedTuple):
    """A kernel, the GPU that holds it, and the heading under which its facts stand."""

    heading: str
    gpu: Gpu
    spec: AttentionSpec
    config: KernelConfig


def shipped() -> list[Kernel]:
    """The kernels of shipped tables of NVIDIA that were searched, in the order of architectures and
    specs. Where GPUs of one architecture share a kernel, it is there once.
    """
    nvidia = (slug for slug, gpu in TARGETS.items() if gpu.is_nvidia and slug in SHIPPED)
    tables = [
        table
        for table in map(load, map(paths.shipped_table, nvidia))
        if any(run.donor in (None, table.gpu.slug) for run in table.runs)
    ]
    found: dict[tuple[str, AttentionSpec, KernelConfig], Kernel] = {}
    for table in sorted(tables, key=lambda table: _version(table.gpu.arch)):
        gpu = TARGETS[table.gpu.slug]
        for entry in table.entries:
            kernel = Kernel(gpu.arch, gpu, entry.spec, entry.config)
            found.setdefault((gpu.arch, entry.spec, entry.config), kernel)
    return sorted(found.values(), key=lambda each: (_version(each.heading), each.spec.sort_key))


def of_hopper() -> list[Kernel]:
    """Kernels of schedule hopper: of the forward in bfloat16 every order of tiles, in float16 two;
    of the backward in bfloat16 the plain one.
    """
    found = []
    ways = tuple(itertools.product(get_args(Order), (False, True)))
    for dtype, (dim, tile), mask, (order, persistent) in itertools.product(
        ("bf16", "fp16"), HOPPER_TILES.items(), ("", "_causal"), ways
    ):
        spec = spec_of(f"fwd_{dtype}_d{dim}{mask}")
        plain = config_of(f"{tile}_s2_hopper_tma")
        config = replace(plain, order=order, persistent=persistent)
        usual = order == ("longest_first" if spec.causal else "plain")
        if why_illegal(spec, config, H200) is None and (usual or dtype == "bf16"):
            found.append(Kernel(HOPPER, H200, spec, config))
    for (name, label), mask in itertools.product(HOPPER_BACKWARD, ("", "_causal")):
        found.append(Kernel(HOPPER, H200, spec_of(name + mask), config_of(label)))
    return found


def row(kernel: Kernel) -> str:
    """A kernel's line of the table, compiled for it."""
    rendered = render(kernel.spec, kernel.config)
    try:
        built = compile_kernel(rendered, kernel.spec, kernel.config, kernel.gpu.arch)
        return line(built, kernel)
    except CompileFailed as error:
        cells = ["-"] * (len(COLUMNS) - 2) + [f"does not compile: {error}".replace("|", "/")]
        return f"| `{rendered.name}` | {' | '.join(cells)} |"


def line(built: Compiled, kernel: Kernel) -> str:
    """A kernel's line of the table."""
    _, gpu, spec, config = kernel
    loop, its = built.loop, SCHEDULES[config.schedule]
    arrives = max((each.warpgroup_arrives for each in built.loops), default=0)
    under = overlap(built, config) if loop and loop.exp2_under_matrix is not None else None
    spills = sum(each.spills for each in built.loops)
    on_hopper = gpu.arch == H200.arch  # wgmma alone runs beside exp2
    broken = {
        "trap": built.only_traps,
        "too large": built.shared_bytes > gpu.shared_per_block
        or built.tensor_columns > TENSOR_COLUMNS
        or residents(built, gpu) == 0,
        "spills": spills,
        "serialized": built.advisories or arrives > its.batches(spec, config),
        "no overlap": on_hopper and (under or 0.0) < its.least_overlap.get(spec.direction, 0.0),
    }
    cells = (
        built.registers, built.shared_bytes, loop.instructions if loop else "-", arrives,
        "-" if under is None else f"{under:.0%}", spills, len(built.advisories),
        ", ".join(rule for rule, breaks in broken.items() if breaks) or "nothing",
    )  # fmt: skip
    return f"| `{built.name}` | {' | '.join(map(str, cells))} |"


def section(kernels: Sequence[Kernel], jobs: int, anew: Collection[Kernel], held: str) -> str:
    """The part of the installed Triton: a table a heading, in the order of `kernels`. held: a part
    whose lines are taken over, but for those of `anew`.
    """
    known = {
        (heading, name_of(each)): each for heading, rows in tables_of(held).items() for each in rows
    }
    keys = {kernel: (kernel.heading, kernel_name(kernel.spec, kernel.config)) for kernel in kernels}
    missing = [kernel for kernel, key in keys.items() if key not in known or kernel in anew]
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as workers:
        known |= zip((keys[kernel] for kernel in missing), workers.map(row, missing), strict=True)
    lines = [f"## Triton {triton.__version__}"]
    for heading, those in itertools.groupby(kernels, lambda kernel: kernel.heading):
        rows = [known[keys[kernel]] for kernel in those]
        lines += ["", f"### {heading}, Triton {triton.__version__}", ""]
        lines += [f"{sound(rows)} kernels break no rule.", ""]
        lines += [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|", *rows]
    return "\n".join(lines) + "\n"


def sound(rows: Sequence[str]) -> str:
    """How many of these lines are of kernels that break no rule."""
    return f"{sum(each.endswith('| nothing |') for each in rows)} of {len(rows)}"


def name_of(line: str) -> str:
    """The kernel of a line."""
    return line.split("`")[1]


def sections_of(text: str) -> dict[str, str]:
    """The parts of a file, by the version of Triton."""
    parts = re.split(r"^(?=## Triton )", text, flags=re.MULTILINE)[1:]
    return {part.split()[2]: part.rstrip() + "\n" for part in parts}


def tables_of(part: str) -> dict[str, list[str]]:
    """The lines of kernels of a part, by heading: an architecture, or HOPPER."""
    tables: dict[str, list[str]] = {}
    for under in part.split("\n### ")[1:]:
        heading, *lines = under.splitlines()
        tables[heading.split(",")[0]] = [each for each in lines if each.startswith("| `")]
    return tables


def _version(name: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", name)))


def merged(text: str, new: str) -> str:
    """The file with the part of the same Triton replaced, or a part added."""
    parts = sections_of(text) | sections_of(new)
    versions = sorted(parts, key=_version)
    return "\n".join([HEAD, summary(parts, versions), *(parts[name] for name in versions)])


def summary(parts: dict[str, str], versions: Sequence[str]) -> str:
    """How many kernels break no rule: a line a heading, a column a version."""
    tables = {version: tables_of(parts[version]) for version in versions}
    headings = dict.fromkeys(heading for each in tables.values() for heading in each)
    lines = [f"| compiled for | {' | '.join(versions)} |", "|---" * (len(versions) + 1) + "|"]
    for heading in headings:
        found = [tables[version].get(heading) for version in versions]
        lines.append(
            f"| {heading} | {' | '.join(sound(rows) if rows else '-' for rows in found)} |"
        )
    return "\n".join(lines) + "\n"


def differences(text: str, new: str, patterns: Sequence[str] = ()) -> list[str]:
    """The lines of the file that differ from `new`, and those of `new`. patterns: select the
    compared kernels; none compares the whole part.
    """
    (version,) = sections_of(new)
    old = sections_of(text).get(version, "")
    held, now = (_lines(part, patterns) for part in (old, new))
    return list(difflib.unified_diff(held, now, "held", "compiled now", n=0, lineterm=""))


def _lines(part: str, patterns: Sequence[str]) -> list[str]:
    return [
        f"{heading}: {each}"
        for heading, rows in tables_of(part).items()
        for each in rows
        if _is_of(name_of(each), patterns)
    ]


def _is_of(name: str, patterns: Sequence[str]) -> bool:
    return not patterns or any(fnmatchcase(name, pattern) for pattern in patterns)


def main(arguments: Sequence[str]) -> int:
    """Compile, then write or compare."""
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if facts differ")
    parser.add_argument("--kernel", action="append", default=[], metavar="GLOB", help="see above")
    parser.add_argument("--missing", action="store_true", help="keep the lines that are there")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, default=RESULT)
    asked = parser.parse_args(arguments)
    if asked.jobs < 1:
        parser.error("--jobs must be at least 1")
    if asked.missing and asked.check:
        parser.error("--missing excludes --check, which compiles what it compares")
    if asked.kernel and not (asked.check or asked.missing):
        parser.error("--kernel needs --check or --missing: the file holds all kernels")
    every = [*shipped(), *of_hopper()]
    chosen = [each for each in every if _is_of(kernel_name(each.spec, each.config), asked.kernel)]
    if not chosen:
        parser.error(f"no kernel of the table is called {' or '.join(asked.kernel)}")
    held = asked.out.read_text() if asked.out.exists() else ""
    kept = sections_of(held).get(triton.__version__, "") if asked.missing else ""
    new = section(chosen if asked.check else every, asked.jobs, asked.kernel and chosen, kept)
    if not asked.check:
        write_whole(asked.out, merged(held, new))
        print(f"Written: {asked.out}, the part of Triton {triton.__version__}")
        return 0
    found = differences(held, new, asked.kernel)
    said = f"{asked.out} says what Triton {triton.__version__} makes of {len(chosen)} kernels"
    print("\n".join(found) or said)
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
