"""flashgen paper: the claims of the FlashAttention papers, shown on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def paper(
    claim: Annotated[
        list[str] | None, typer.Argument(help="Claims to show, by name; all if none is given.")
    ] = None,
    out: Annotated[Path, typer.Option(help="The page to write, an .html file.")] = Path(
        "paper.html"
    ),
) -> None:
    """Show the claims of the FlashAttention papers on this machine, without a GPU, as one page."""
    from flashgen.errors import printable
    from flashgen.paper.claims import named
    from flashgen.paper.page import check_file, show, write_page

    check_file(out)
    shown = []
    for one in show(named(claim or [])):
        shown.append(one)
        held = "holds" if one.holds else "FAILS" if one.finding else "not shown"
        print(f"{one.claim.name:15} {held:9} {one.claim.title}", flush=True)
        for check in one.finding.checks if one.finding else ():
            if not check.holds:
                print(printable(f"  fails: {check.text}"))
        if one.why:
            print(printable(f"  {one.why}"))
    write_page(shown, out)
    print(f"Written: {out}")
    if not all(one.holds for one in shown):
        raise typer.Exit(1)
