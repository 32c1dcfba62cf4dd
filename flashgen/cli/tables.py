"""Commands on tables: generate, show, targets."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flashgen import paths
from flashgen.cli.words import (
    Out,
    named_table,
    tables_of,
)
from flashgen.gpu import TARGETS


def generate(
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; fail if a file differs.")
    ] = False,
    out: Out = Path(),
) -> None:
    """Emit generated/ from configs/ and the templates."""
    from flashgen import generate as generating

    tables, folder = generating.tables_for(out), paths.generated_dir(out)
    if check:
        generating.demand_agreement(tables, folder)
        print(f"{folder} is what configs/ and templates/ say ({len(tables)} tables)")
        return
    changed = generating.write(tables, folder)
    print(f"{folder}: {len(changed)} files changed, of {len(tables)} tables")


def show(
    slug: Annotated[str, typer.Argument(help="The GPU's slug, as `flashgen targets` lists it.")],
    out: Out = Path(),
) -> None:
    """Print the table of a GPU."""
    from flashgen import show as showing
    from flashgen.generate import is_stale

    table = named_table(slug, out)
    console = showing.console()
    console.print(showing.table_heading(table))
    stale = [entry for entry in table.entries if is_stale(entry)]
    console.print(showing.entries_grid(table.entries, stale))
    if stale:
        console.print(f"{len(stale)} stale: their kernels' text has changed since they were timed.")


def targets(out: Out = Path()) -> None:
    """List the GPUs known without being present, and what their tables hold."""
    from flashgen import show as showing

    tables = tables_of(out)
    others = [table.gpu for slug, table in tables.items() if slug not in TARGETS]
    showing.console().print(showing.targets_grid([*TARGETS.values(), *others], tables))
