"""flashgen compare: whether flashgen is faster here than SDPA and flash_attn."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from flashgen.cli.bench import interpret, serve_from
from flashgen.cli.grouped import grouped
from flashgen.cli.options import CASES_BUDGET, Target, named_table
from flashgen.cli.what import What
from flashgen.errors import InvalidArgument, NoGpuError, printable


@dataclass(frozen=True, kw_only=True)
class On:
    """Where, and how long."""

    target: Target = None
    index: Annotated[int, typer.Option(help="Index of the CUDA device.")] = 0
    tuned: Annotated[
        Path | None, typer.Option(help="Folder of tune --out whose generated/ is used.")
    ] = None
    time_budget: Annotated[float, typer.Option(help=CASES_BUDGET)] = 110.0
    smoke: Annotated[
        bool, typer.Option("--smoke", help="Tiny sizes on a CPU; nothing is measured.")
    ] = False

    def __post_init__(self) -> None:
        if not self.time_budget > 0:
            raise InvalidArgument(
                f"--time-budget must be more than 0 seconds: got {self.time_budget}"
            )
        if self.smoke and self.target is not None:
            raise InvalidArgument("--smoke and --target exclude each other: name one")


@grouped
def compare(what: What, on: On) -> None:
    """Time and check flashgen, SDPA's best backend and flash_attn here: is flashgen faster?

    flashgen compare --hf-config config.json             a model
    flashgen compare --head-dim 128 --causal --seq 8192  one spec, one length
    flashgen compare --target nvidia_h200 --causal       no GPU: by a table

    One table, in about two minutes, most operations first. Yes: flashgen's 80th percentile is below
    the 20th of the best of the others. The mean of a file's cases is by its weights.
    """
    if on.smoke:
        interpret()
    serve_from(on.tuned)
    from flashgen.bench.compare import ComparedCase, cases_of, lines, of_table
    from flashgen.bench.compare import compare as compared

    cases, left = cases_of(what.weighted(print), smoke=on.smoke)
    tunes = "flashgen tune --gpu"
    rows: list[ComparedCase] = []
    if on.target is not None:
        table = named_table(on.target, on.tuned or Path(), evidence=True)
        print(f"By the table of {table.gpu.name}; nothing runs.")
        found = of_table(cases, table)
        tunes += f" on {table.gpu.name}"
    else:
        _demand_gpu(on.smoke)
        found = compared(cases, _tell, index=on.index, seconds=on.time_budget, smoke=on.smoke)
    try:
        for row, weight in zip(found, cases.values(), strict=True):
            rows.append(replace(row, weight=weight))
    finally:  # a contender that breaks the GPU's context ends the run, but not what was found
        for line in lines([*rows, *left]):
            print(printable(line))
    if any(row.faster == "no" for row in rows):
        print(f"To tune for them: {tunes}, with the same model, workload or specs.")


def _demand_gpu(smoke: bool) -> None:
    import torch

    if not smoke and not torch.cuda.is_available():
        raise NoGpuError(
            "flashgen compare times kernels and torch sees no GPU here; --target SLUG shows what a "
            "table and published times say, and --smoke runs without one"
        )


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
