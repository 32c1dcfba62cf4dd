"""flashgen export: tables in the form that other programs read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from flashgen.cli.options import Out, Target, named_table, tables_of
from flashgen.errors import InvalidArgument, printable


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
