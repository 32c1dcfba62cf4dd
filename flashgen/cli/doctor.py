"""flashgen doctor: what a bug report needs, and what this machine can do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from flashgen.cli.options import Out


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
    index: Annotated[int, typer.Option(help="Index of the CUDA device.")] = 0,
    out: Out = Path(),
) -> None:
    """Show what a bug report needs, whether this machine can compile, launch and measure, and what
    to do where it cannot.
    """
    from flashgen.report.doctor import diagnose

    found = diagnose(out, index)
    print(json.dumps(found.to_json(), indent=1) if as_json else "\n".join(found.lines()))
