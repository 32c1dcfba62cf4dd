"""flashgen tune."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flashgen.cli.words import (
    Causal,
    Directions,
    DTypes,
    HeadDims,
    Jobs,
    Out,
    Seqs,
    Target,
    UseGpu,
    check_least,
    named_directions,
    named_spec,
)
from flashgen.errors import InvalidArgument
from flashgen.gpu import known_target


def tune(
    gpu: UseGpu = False,
    target: Target = None,
    direction: Directions = None,
    dtype: DTypes = None,
    head_dim: HeadDims = None,
    causal: Causal = None,
    seq: Seqs = None,
    trials: Annotated[
        int, typer.Option(help="Configs to try a spec and bucket; on a GPU those timed.")
    ] = 60,
    time_budget: Annotated[
        float | None, typer.Option(help="Seconds for all searches together.")
    ] = None,
    sampler: Annotated[
        str, typer.Option(help="auto, exhaustive, random, tpe or genetic.")
    ] = "auto",
    seed: Annotated[int, typer.Option(help="Of the sampler.")] = 0,
    jobs: Jobs = None,
    out: Out = Path(),
    improve_only: Annotated[
        bool, typer.Option("--improve-only", help="Leave unbeaten entries as they are.")
    ] = False,
) -> None:
    """Find the fastest right config of each spec and bucket, write the table, emit the kernels.

    With neither --gpu nor --target: the GPU of this machine, or nvidia_h200 offline without one.
    """
    masks = (False, True) if causal is None else (causal,)
    specs = [
        named_spec(word, dims, masked).for_direction(kernel)
        for kernel in named_directions(direction or ["forward"])
        for word in dtype or ["bf16"]
        for dims in head_dim or ["64", "128"]
        for masked in masks
    ]
    check_least("--trials", trials, 1)
    check_least("--jobs", jobs, 1)
    for length in seq or ():
        check_least("--seq", length, 1)
    if time_budget is not None and not time_budget > 0:
        raise InvalidArgument(f"--time-budget must be more than 0 seconds: got {time_budget}")
    if target is not None:
        known_target(target)  # before the imports below, which take seconds

    from flashgen.search.goal import Budget, Method
    from flashgen.show import console
    from flashgen.tune import DEFAULT_SEQ, TuneOptions
    from flashgen.tune import tune as run

    options = TuneOptions(
        specs=tuple(specs),
        seqs=tuple(seq or (DEFAULT_SEQ,)),
        gpu=gpu,
        target=target,
        budget=Budget(trials=trials, seconds=time_budget),
        method=Method(sampler=sampler, seed=seed),  # type: ignore[arg-type]  # Method refuses others
        out=out,
        improve_only=improve_only,
        jobs=jobs,
    )
    run(options, console())
