"""Commands on tables: generate, show, targets, report, export; table diff and merge."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from flashgen import paths
from flashgen.cli.options import (
    CausalOption,
    Directions,
    DTypes,
    FeatureNames,
    HeadDimsOption,
    NoFeature,
    Out,
    Target,
    check_no_feature,
    named_table,
    spec_filter,
    tables_of,
)
from flashgen.errors import InvalidArgument, printable
from flashgen.spec.gpu import TARGETS, recognised_as


def generate(
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; fail if a file would change.")
    ] = False,
    defaults: Annotated[
        bool,
        typer.Option("--defaults", help="The default kernels too, which are otherwise rendered."),
    ] = False,
    variants: Annotated[
        Path | None,
        typer.Option(help="Write each kernel to a file of this folder instead, to be read alone."),
    ] = None,
    out: Out = Path(),
) -> None:
    """Write generated/ from configs/ and the templates: the kernels that the tables name.

    With --defaults also the default kernels of every spec without features and of each feature
    alone; without it, those that an earlier generate wrote are deleted. With --variants DIR,
    generated/ stays as it is, and DIR gets a file for each kernel, with its numbers in place and
    its static branches resolved.
    """
    from flashgen.table import emit as generating

    tables, folder = generating.tables_for(out), paths.generated_dir(out)
    if variants is not None:
        if check:
            raise InvalidArgument("--variants has nothing to check: leave out --check")
        count = generating.write_variants(tables, variants, defaults=defaults)
        print(f"{variants}: {count} kernels, from {len(tables)} tables")
        return
    if check:
        generating.demand_agreement(tables, folder, defaults=defaults)
        print(f"{folder} agrees with configs/ and templates/ ({len(tables)} tables)")
        return
    changed = generating.write(tables, folder, defaults=defaults)
    print(f"{folder}: {len(changed)} files changed, from {len(tables)} tables")


def show(
    slug: Annotated[
        str | None, typer.Argument(help="The GPU's slug, as `flashgen targets` lists it.")
    ] = None,
    direction: Directions = None,
    dtype: DTypes = None,
    head_dim: HeadDimsOption = None,
    causal: CausalOption = None,
    feature: FeatureNames = None,
    no_feature: NoFeature = False,
    as_json: Annotated[bool, typer.Option("--json", help="For programs, with runs.")] = False,
    kernel: Annotated[
        str | None,
        typer.Option("--kernel", help="A kernel's name: print it, its switches resolved."),
    ] = None,
    out: Out = Path(),
) -> None:
    """Print the table of a GPU, or the entries that the options name; or one kernel."""
    from flashgen.table import show as showing
    from flashgen.table.emit import stale_of

    if kernel is not None and slug is None:
        print(_variant(kernel, out), end="")
        return
    if slug is None or kernel is not None:
        got = "neither" if slug is None else "both"
        raise InvalidArgument(f"show takes the slug of a GPU, or --kernel NAME: got {got}")
    check_no_feature(feature, no_feature)
    wanted = spec_filter(direction, dtype, head_dim, causal, feature, only=no_feature)
    table = named_table(slug, out, evidence=True)
    entries = [entry for entry in table.everything if wanted(entry.spec)]
    stale = stale_of(entries)
    if as_json:
        print(json.dumps(showing.record_of(table, entries, stale), indent=1))
        return
    console = showing.console()
    console.print(showing.table_heading(table))
    if not entries:
        console.print("No entry matches the options.")
        return
    if len(entries) < len(table.everything):
        console.print(f"{len(entries)} of them match:")
    console.print(showing.entries_grid(entries, stale))
    if stale:
        console.print(f"{len(stale)} stale: their kernels' code changed after they were timed.")


def _variant(name: str, out: Path) -> str:
    """The kernel that a table, or a default, has under this name, to be read by itself."""
    from flashgen.kernels.resolve import variant
    from flashgen.table.emit import kernels_by_name

    tables = tables_of(out).values()
    for defaults in (False, True):
        found = kernels_by_name(tables, defaults=defaults)
        if name in found:
            return variant(found[name])
    raise InvalidArgument(
        "--kernel must be the name of a kernel that a table names, its pointer twin, or a default, "
        f"as explain() and profilers say it: got {name!r}"
    )


def targets(
    mine: Annotated[
        bool, typer.Option("--mine", help="Those of this machine, and how each was recognised.")
    ] = False,
    named: Annotated[
        bool, typer.Option("--named", help="Others that are known by name, and what serves them.")
    ] = False,
    out: Out = Path(),
) -> None:
    """List the known GPUs, which need not be present, and what their tables hold."""
    from flashgen.table import show as showing

    tables, console = tables_of(out), showing.console()
    if named:
        console.print(showing.named_grid(tables))
        return
    if not mine:
        others = [table.gpu for slug, table in tables.items() if slug not in TARGETS]
        console.print(showing.targets_grid([*TARGETS.values(), *others], tables, console.width))
        return
    import torch

    from flashgen.kernels.launch import device_gpu

    count = max(1, torch.cuda.device_count())  # of none, device 0 says what to do
    found = [device_gpu(index, instead="flashgen targets") for index in range(count)]
    console.print(showing.targets_grid(dict.fromkeys(found), tables, console.width))
    for gpu in dict.fromkeys(found):
        console.print(f"{gpu.name}: {recognised_as(gpu)}")


def report(
    slug: Annotated[str, typer.Argument(help="The GPU's slug, as `flashgen targets` lists it.")],
    out: Out = Path(),
) -> None:
    """Write DIR/report.html: the table and the history of its searches in one file."""
    write_report_of(slug, out)


def write_report_of(slug: str, out: Path) -> None:
    """Write the report of a GPU, and say where it is."""
    from flashgen.report.html import write_report
    from flashgen.search.log import outcomes_of
    from flashgen.table.show import console

    table, page = named_table(slug, out, evidence=True), out / "report.html"
    say = console().print
    log = paths.log_file(out, table.gpu.slug)
    if not log.exists():
        say(f"there is no {log}: the report has the table, without the history of its searches.")
    write_report(table, outcomes_of(log, say) if log.exists() else [], page, notice=say)
    print(f"Written: {page}")


def diff(
    old: Annotated[Path, typer.Argument(help="The table before; its file may have any name.")],
    new: Annotated[Path, typer.Argument(help="The table now.")],
) -> None:
    """Print what changed between two tables of a GPU, as Markdown for a pull request."""
    from flashgen.table import diff as table_diff
    from flashgen.table.table_file import load_with_evidence

    before, after = (load_with_evidence(path, any_name=True) for path in (old, new))
    print(printable(table_diff.markdown(table_diff.diff(before, after))), end="")


def merge(
    tables: Annotated[list[Path], typer.Argument(help="Tables of one GPU, in files of any name.")],
    out: Annotated[Path, typer.Option(help="The file to write: any name that ends in .yaml.")],
) -> None:
    """Merge the best entries of several tables of a GPU into one."""
    from flashgen.table import diff as table_diff
    from flashgen.table.table_file import load_with_evidence, save

    if out.suffix != ".yaml":
        raise InvalidArgument(f"--out must end in .yaml, the suffix of tables: got {out}")
    if out.exists() and out.resolve() not in [path.resolve() for path in tables]:
        raise InvalidArgument(f"{out} exists and is not among the tables to merge: name it too")
    merged = table_diff.merge([load_with_evidence(path, any_name=True) for path in tables])
    save(merged, out, any_name=True)
    print(f"Written: {out}, {len(merged.entries)} entries of {len(tables)} tables")


def export(
    where: Annotated[
        Path | None,
        typer.Argument(help="The file to write; the folder, for hf-kernel.", show_default=False),
    ] = None,
    to: Annotated[
        Literal["json", "json-schema", "flex", "hf-kernel"], typer.Option(help="The form.")
    ] = "json",
    target: Target = None,
    out: Out = Path(),
) -> None:
    """Export the tables: as JSON (json, with its json-schema), as kernel_options of FlexAttention
    (flex), or as a folder that Hugging Face kernels load (hf-kernel). Without WHERE, to standard
    output.
    """
    from flashgen.table import export_flex, export_hf_kernel, export_json

    if to == "hf-kernel":
        if where is None:
            raise InvalidArgument("--to hf-kernel needs the folder to write: name it")
        export_hf_kernel.write(where, out)
        print(f"Written: {where}. To load it: kernels.get_local_kernel(Path({str(where)!r}))")
        return
    if target is None:
        tables = [named_table(slug, out, evidence=True) for slug in sorted(tables_of(out))]
    else:
        tables = [named_table(target, out, evidence=True)]
    if to == "json-schema":
        text = export_json.schema()
    else:
        text = (export_flex if to == "flex" else export_json).document(tables)
    if where is None:
        print(printable(text))
        return
    where.write_text(text + "\n")
    print(f"Written: {where}")
