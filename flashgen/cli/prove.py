"""flashgen verify, sanitize, try and calibrate: check tables again, execute kernels on the CPU, try
one as its template is now, compare estimates with measurements.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from flashgen import paths
from flashgen.cli.options import Jobs, Out, Target, UseGpu, check_least, named_table
from flashgen.errors import InvalidArgument, ToolchainError, printable
from flashgen.files import temporary_folder

if TYPE_CHECKING:
    from flashgen.evaluate.evaluator import Evaluator
    from flashgen.schedules.config import KernelConfig
    from flashgen.spec.attention import AttentionSpec
    from flashgen.spec.gpu import Gpu
    from flashgen.table.entry import Entry
    from flashgen.table.table import Table


def verify(
    gpu: UseGpu = False,
    target: Target = None,
    executed: Annotated[
        bool, typer.Option(help="Execute every kernel on the CPU as Triton compiles it.")
    ] = False,
    record: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="With --executed: add to these results, and trust them."),
    ] = None,
    enter: Annotated[
        Literal["choose", "admit"] | None,
        typer.Option(
            help="With --executed: choose the table's list of executed kernels anew, or admit this "
            "Triton to those that hold under it."
        ),
    ] = None,
    spec: Annotated[
        str, typer.Option(metavar="GLOB", help="With --enter: specs whose names match alone.")
    ] = "*",
    invariant: Annotated[
        bool, typer.Option(help="Compare the machine code of the kernels of each numeric class.")
    ] = False,
    every: Annotated[
        bool, typer.Option("--all", help="All entries, not only those of the last tuning run.")
    ] = False,
    jobs: Jobs = None,
    out: Out = Path(),
) -> None:
    """Verify the entries of the last tuning run again, or all of a table: legal, compiled as
    recorded, correct against float64.

    --executed executes the kernels instead, and prints what the checks of flashgen.ptx find.
    --invariant compares the kernels of each numeric class. They must have the same products and
    sums, and nothing left to fuse.
    """
    from flashgen.compile.known_bugs import warnings_here
    from flashgen.evaluate.build import KEPT_KERNELS
    from flashgen.table.show import console
    from flashgen.tune.progress import Screen
    from flashgen.tune.verify import verify as proofs_of

    if gpu == (target is not None):
        raise InvalidArgument("verify needs either --gpu or --target SLUG")
    check_least("--jobs", jobs, 1)
    if enter is not None and not executed:
        raise InvalidArgument("--enter needs --executed")
    if spec != "*" and enter is None:
        raise InvalidArgument("--spec needs --enter")
    if executed or invariant:
        if target is None:
            option = "--executed" if executed else "--invariant"
            raise InvalidArgument(f"{option} needs --target SLUG: nothing runs on a GPU")
        table = named_table(target, out)
        if executed and enter is not None:
            return _enter(table, enter, spec, out, jobs)
        return _compare(table) if invariant else _execute(table, out, jobs, record)
    # A fresh cache: results of an earlier run verify nothing.
    with temporary_folder("verify", keeps=KEPT_KERNELS) as cache:
        whole, evaluator = _table_and_evaluator(gpu, target, out, cache, jobs)
        table = whole if every else whole.of_last_run()
        failed = undecided = count = 0
        for warning in warnings_here(table.gpu.arch):
            print(f"Warning: {warning}", file=sys.stderr)
        entries, others = len(table.everything), len(whole.everything) - len(table.everything)
        left = f" {others} are not of the last run: --all has them." if others else ""
        what = f"{entries} entr{'y' if entries == 1 else 'ies'} of {table.gpu.slug}"
        print(f"Verifying {what}: each is compiled and checked anew.{left}", file=sys.stderr)
        with evaluator, Screen(console(), entries) as screen:
            for proof in proofs_of(table, evaluator):
                print(printable(str(proof)), flush=True)
                screen.passed()
                failed, count = failed + (not proof.holds), count + 1
                undecided += not proof.decided
    late = f"; {undecided} ran out of time and have no verdict: verify again" if undecided else ""
    print(f"{table.gpu.slug}: {count - failed} of {count} entries hold{late}")
    if failed:
        raise typer.Exit(1)


def _compare(table: Table) -> None:
    """Print what the kernels of each class share. Raises typer.Exit where one differs."""
    from flashgen.tune.invariance import compare_classes

    differ = 0
    for proof in compare_classes(table):
        print(printable(str(proof)), flush=True)
        differ += len(proof.others)
    print(f"{table.gpu.slug}: {differ or 'no'} kernels differ from their class")
    if differ:
        raise typer.Exit(1)


def _enter(table: Table, what: str, specs: str, out: Path, jobs: int | None) -> None:
    """Write the list `executed` of a table, of specs whose names match, and generate."""
    from flashgen.evaluate.offline import OfflineEvaluator
    from flashgen.table import emit
    from flashgen.table.table_file import save
    from flashgen.tune.executed import admit, choose

    tables = emit.tables_for(out, evidence=True)
    table = tables.pop(table.gpu.slug)
    with OfflineEvaluator(table.gpu, paths.state_dir(out), jobs) as evaluator:
        if what == "choose":
            made = choose(table, evaluator, list(tables.values()), specs)
        else:
            made = admit(table, evaluator, specs)
    save(made, paths.table_file(out, table.gpu.slug))
    emit.write(emit.tables_for(out), paths.generated_dir(out))
    print(f"{table.gpu.slug}: {len(made.executed)} executed entries")


def _execute(table: Table, out: Path, jobs: int | None, record: Path | None) -> None:
    """Print the verdict of each kernel of a table. Raises typer.Exit where one does not hold."""
    from flashgen.tune.verify import execute

    log = paths.state_dir(out) / f"{table.gpu.slug}-executed.jsonl"
    found = []
    for name, result in execute(table, log, jobs, record=record):
        found.append((name, result.holds))
        for line in result.lines():
            print(printable(line), flush=True)
    wrong = {name for name, holds in found if not holds}
    specs = dict.fromkeys(entry.spec.name for entry in table.everything)
    print(
        f"{table.gpu.slug}: {sum(holds for _, holds in found)} of {len(found)} kernels execute "
        f"right and without a fault, those of {len(specs) - len(wrong)} of {len(specs)} specs"
    )
    if wrong:
        raise typer.Exit(1)


def sanitize(
    kernel: Annotated[
        list[str],
        typer.Argument(
            metavar="KERNEL|SPEC",
            help="Kernels by name: those of the table, all of a spec, or any other as SPEC_CONFIG.",
        ),
    ],
    target: Annotated[str, typer.Option(help="A known GPU by slug; it need not be present.")],
    seeds: Annotated[int, typer.Option(help="Orders of warps and copies to try.")] = 1,
    out: Out = Path(),
) -> None:
    """Execute kernels on the CPU as they are compiled for a GPU, and print what memcheck,
    racecheck, initcheck and synccheck find.
    """
    from flashgen.evaluate.sanitize import sanitize as sanitized
    from flashgen.schedules.config import kernel_name
    from flashgen.table.emit import kernels_of

    check_least("--seeds", seeds, 1)
    table = named_table(target, out)
    shipped = {
        kernel_name(entry.spec, config): (entry.spec, config)
        for entry in table.everything
        for config in kernels_of(entry)
    }
    failed = 0
    for asked in kernel:
        named = [
            whose
            for name, whose in shipped.items()
            if name == asked or name.startswith(f"{asked}_br")
        ]
        for spec, config in named or [_unshipped(asked, table.gpu, shipped)]:
            result = sanitized(spec, config, table.gpu.arch, seeds=seeds)
            for line in result.lines():
                print(printable(line), flush=True)
            failed += not result.holds
    if failed:
        raise typer.Exit(1)


def try_kernel(
    kernel: Annotated[
        str,
        typer.Argument(
            metavar="KERNEL|SPEC", help="A kernel by name, or the first of a spec's in the table."
        ),
    ],
    gpu: UseGpu = False,
    target: Target = None,
    seq: Annotated[int | None, typer.Option(help="Keys; those of the table's entry.")] = None,
    out: Out = Path(),
) -> None:
    """Try a kernel as the templates make it now: the difference from generated/, the check, the
    time.

    For who changes a template: docs/change-a-kernel.md. Writes nothing. Without --gpu the kernel
    is interpreted or executed on the CPU, and its time is an estimate.
    """
    from flashgen.evaluate.build import KEPT_KERNELS
    from flashgen.schedules.config import kernel_name
    from flashgen.spec.problem import workload
    from flashgen.tune.options import DEFAULT_SEQ
    from flashgen.tune.try_kernel import difference, tried

    if gpu == (target is not None):
        raise InvalidArgument("try needs either --gpu or --target SLUG")
    with temporary_folder("try", keeps=KEPT_KERNELS) as cache:
        table, evaluator = _table_and_evaluator(gpu, target, out, cache, 2)
        entry = next((e for e in table.everything if _is_called(e, kernel)), None)
        if entry is None:
            shipped = (kernel_name(e.spec, e.config) for e in table.everything)
            spec, config = _unshipped(kernel, table.gpu, shipped)
            problem = workload(spec, seq or DEFAULT_SEQ)
        else:
            spec, config = entry.spec, entry.config
            problem = entry.problem if seq is None else workload(spec, seq)
        generated = paths.generated_dir(out)
        shipped_one = generated if generated.is_dir() else paths.shipped_generated_dir()
        changed = difference(spec, config, shipped_one)
        print(kernel_name(spec, config))
        for line in changed or ["diff:   none: generated/ has this text"]:
            print(printable(line))
        with evaluator:
            result = tried(spec, config, problem, evaluator)
    for line in result.lines():
        print(printable(line))
    if not result.holds:
        raise typer.Exit(1)


def _is_called(entry: Entry, name: str) -> bool:
    """Whether this is the name of an entry's kernel, or of its spec."""
    from flashgen.schedules.config import kernel_name

    return name in (kernel_name(entry.spec, entry.config), entry.spec.name)


def _unshipped(name: str, gpu: Gpu, shipped: Iterable[str]) -> tuple[AttentionSpec, KernelConfig]:
    """The kernel SPEC_CONFIG that no table needs to have. Raises InvalidArgument."""
    from flashgen.schedules.config import config_of
    from flashgen.schedules.legality import why_illegal
    from flashgen.spec.attention import spec_of

    spec_name, _, label = name.rpartition("_br")
    try:
        spec, config = spec_of(spec_name), config_of(f"br{label}")
    except InvalidArgument:
        near = difflib.get_close_matches(name, shipped, n=1, cutoff=0)
        raise InvalidArgument(
            f"{name!r} is no kernel of {gpu.slug}'s table: the nearest is {near[0]}"
        ) from None
    if reason := why_illegal(spec, config, gpu):
        raise InvalidArgument(f"{name} is illegal: {reason}")
    return spec, config


def calibrate(
    logs: Annotated[
        list[Path], typer.Argument(metavar="LOG", help=".flashgen/SLUG.jsonl of a tune --gpu.")
    ],
    plot: Annotated[
        Path | None, typer.Option(help="PNG file to draw; calibration.png by default.")
    ] = None,
) -> None:
    """Compare the estimates in logs of `tune --gpu` with their measurements; changes no
    parameter.
    """
    from flashgen.report import calibrate as calibrating
    from flashgen.report import charts
    from flashgen.table.show import console

    picture = plot or Path("calibration.png")
    charts.check_file(picture)
    screen = console()
    pairs = calibrating.read_pairs(logs, screen.print)
    for slug, of_gpu in pairs.items():
        rows = calibrating.calibrations(of_gpu)
        screen.print(slug, style="bold")
        for line in (*calibrating.table_lines(rows), *calibrating.remarks(rows[0]), ""):
            screen.print(line)
    screen.print(calibrating.LEGEND)
    try:
        charts.draw(pairs, picture)
    except ToolchainError as error:
        if plot is not None:
            raise
        screen.print(f"No plot: {error}")
    else:
        screen.print(f"Drawn: {picture}")


def _table_and_evaluator(
    gpu: bool, target: str | None, out: Path, cache: Path, jobs: int | None
) -> tuple[Table, Evaluator]:
    if not gpu:
        from flashgen.evaluate.offline import OfflineEvaluator

        table = named_table(target or "", out, evidence=True)
        return table, OfflineEvaluator(table.gpu, cache, jobs)
    from flashgen.evaluate.on_gpu import GpuEvaluator
    from flashgen.kernels.launch import device_gpu

    here = device_gpu(0, instead="--target nvidia_h200 in place of --gpu")
    return named_table(here.slug, out, evidence=True), GpuEvaluator(here, 0, cache, jobs)
