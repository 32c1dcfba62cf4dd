"""What a tuning run prints at its end: the results, where they are, and what to try next."""

from __future__ import annotations

import shlex
from pathlib import Path

from rich.console import Console

from flashgen import paths
from flashgen.evaluate.evaluator import triton_version
from flashgen.schedules.config import kernel_name
from flashgen.spec.problem import bucket_of
from flashgen.table.entry import Entry
from flashgen.table.show import entries_grid
from flashgen.tune.gpu_run import GpuRun
from flashgen.tune.progress import explain_options, failure_lines


def report(run: GpuRun, console: Console) -> None:
    """Print the end of a run that searched all it was asked for."""
    options, found = run.options, run.results.found
    keys = [(spec, bucket_of(problem.seq_k)) for spec, problem in options.searches]
    order = sorted(found, key=lambda key: keys.index(key) if key in keys else len(keys))
    console.print()
    if order:
        console.print(entries_grid(found[key] for key in order))
    lines = [
        *failure_lines(run.outcomes),
        f"{len(keys)} search{'es' * (len(keys) != 1)}, {_changes(run)}",
    ]
    if run.unbegun:
        lines.append(f"{run.unbegun} of them did not begin: the time was over")
    if run.results.writes:
        copy = "" if run.results.changed else " (a copy of the shipped table)"
        table = paths.table_file(options.out, run.slug)
        lines.append(f"Written: {table}{copy} and {paths.generated_dir(options.out)}")
    to_try = _to_try(run) if found else ()
    console.print("", *lines, *to_try, sep="\n", soft_wrap=True)  # commands stay whole


def report_interrupted(run: GpuRun, console: Console, *, generated: bool) -> None:
    """Print what Ctrl-C leaves of a run. generated: whether generated/ agrees with the table."""
    out = run.options.out
    log, table = paths.log_file(out, run.slug), paths.table_file(out, run.slug)
    if run.results.changed:
        also = f" and {paths.generated_dir(out)}" if generated else ""
        lines = [f"Interrupted: {_changes(run)}", f"Written: {table}{also}"]
    else:
        lines = [
            f"Interrupted: nothing is written to {table}, for nothing was found so far that is "
            "checked and better than what is there."
        ]
    if log.exists():
        lines.append(f"{log} has all that was tried: the same command goes on from there.")
    console.print(*lines, sep="\n", soft_wrap=True)


def _changes(run: GpuRun) -> str:
    """How many entries are others than the run found, and how many of them keep their config."""
    before = run.results.began_with
    pairs = [(before.find(*entry.key), entry) for entry in run.results.table.entries]
    changed = [(old, new) for old, new in pairs if old != new]
    kept = sum(old is not None and old.config == new.config for old, new in changed)
    said = f"{len(changed)} entr{'y' if len(changed) == 1 else 'ies'} changed"
    some = "" if kept == len(changed) else f"{kept} of them "
    return said + f", {some}in figures alone" * (kept > 0)


def _serving(run: GpuRun, found: Entry) -> str:
    """The kernel that serves what was searched, which may be that of an entry that stays."""
    entry = run.results.table.serving(*found.key, triton_version()) or found
    kernel = kernel_name(entry.spec, entry.config)
    apart = ", which was executed on a CPU: searches without a GPU leave such kernels out"
    served = f"{entry.spec.name} of {found.problem.seq_k} keys is served by {kernel}"
    return served + apart * bool(entry.tritons)


def _to_try(run: GpuRun) -> list[str]:
    """Commands that show, verify and use what was found."""
    options, slug = run.options, run.slug
    elsewhere = "" if options.out == Path() else shlex.quote(str(options.out))
    option = elsewhere and f" --out {elsewhere}"
    written = paths.generated_dir(options.out).resolve()
    shipped = written == paths.shipped_generated_dir().resolve()
    served = "" if shipped else f"FLASHGEN_GENERATED={elsewhere or '.'} "
    keys = [(spec, bucket_of(problem.seq_k)) for spec, problem in options.searches]
    mine = [run.results.found[key] for key in keys if key in run.results.found]
    lines = [_serving(run, entry) for entry in mine[:1]]
    lines.append("Try next:")
    if mine:  # sharing kernels touches other buckets, too
        lines.append(f"  flashgen explain {explain_options(mine[-1])} --target {slug}{option}")
    if run.results.changed:  # otherwise the last run of the table is another
        lines.append(f"  flashgen verify {'--gpu' if run.on_gpu else f'--target {slug}'}{option}")
    lines.append(f"  {served}python -c 'from flashgen import attention; help(attention)'")
    return lines
