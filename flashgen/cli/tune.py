"""flashgen tune."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from flashgen.cli.options import (
    Causal,
    Directions,
    DTypes,
    FeatureNames,
    HeadDims,
    Jobs,
    Kv,
    Out,
    Paged,
    UseGpu,
    cache_fields,
    check_least,
    named_directions,
    named_spec,
    spec_filter,
    with_cache,
)
from flashgen.errors import InvalidArgument
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.features import masks_of
from flashgen.spec.gpu import known_target
from flashgen.spec.problem import Problem


def tune(
    gpu: UseGpu = False,
    target: Annotated[
        str | None, typer.Option(help="A known GPU by slug, or all of them; none need be present.")
    ] = None,
    direction: Directions = None,
    dtype: DTypes = None,
    head_dim: HeadDims = None,
    causal: Causal = None,
    paged: Paged = False,
    kv: Kv = None,
    feature: FeatureNames = None,
    invariant: Annotated[
        bool,
        typer.Option(help="Only kernels that give the same bits in any batch: for invariant=True."),
    ] = False,
    seq: Annotated[
        list[int] | None,
        typer.Option(help="Sequence length, 4096 by default; its bucket is tuned. Repeatable."),
    ] = None,
    workload: Annotated[
        Path | None, typer.Option(help="YAML file of specs, lengths and their weights.")
    ] = None,
    hf_config: Annotated[
        Path | None, typer.Option(help="config.json of a model on Hugging Face.")
    ] = None,
    trials: Annotated[
        int,
        typer.Option(
            help="Configs to try per spec and bucket; on a GPU, to time. With --from-tables, 0 for "
            "no search."
        ),
    ] = 60,
    time_budget: Annotated[
        float | None, typer.Option(help="Seconds for all searches together.")
    ] = None,
    sampler: Annotated[
        str,
        typer.Option(
            help="auto, exhaustive, tpe, gp, cmaes, qmc, random, brute-force, or "
            "package.module:Class of Optuna's kind."
        ),
    ] = "auto",
    seed: Annotated[int, typer.Option(help="Seed of the sampler.")] = 0,
    max_regret: Annotated[
        float, typer.Option(help="How much slower than its best a bucket may be to share a kernel.")
    ] = 0.02,
    jobs: Jobs = None,
    out: Out = Path(),
    from_tables: Annotated[
        bool,
        typer.Option(
            "--from-tables",
            help="Try what the tables of other GPUs hold, for all of their specs and lengths or "
            "those that the options name, most used first; then search on.",
        ),
    ] = False,
    improve_only: Annotated[
        bool, typer.Option("--improve-only", help="Do not rewrite entries that nothing beat.")
    ] = False,
    restate: Annotated[
        bool, typer.Option("--restate", help="Write estimates anew where the config stays.")
    ] = False,
    retry_quarantined: Annotated[
        bool,
        typer.Option("--retry-quarantined", help="Retry kernels that killed a process before."),
    ] = False,
    gpus: Annotated[str | None, typer.Option(help="GPUs of this host: all, or 0,2.")] = None,
    cluster: Annotated[
        str | None, typer.Option(help="Tune on a Ray cluster: auto, ray://HOST:10001 or local.")
    ] = None,
    shard: Annotated[
        str,
        typer.Option(help="2/8: tune the second of eight parts; merge their tables afterwards."),
    ] = "1/1",
) -> None:
    """Find the fastest correct config of each spec and bucket, write the table and the kernels.

    Without --gpu and --target: the GPU of this machine, or an H100 offline if there is none.
    """
    check_least("--trials", trials, 0 if from_tables else 1)
    check_least("--jobs", jobs, 1)
    for length in seq or ():
        check_least("--seq", length, 1)
    if time_budget is not None and not time_budget > 0:
        raise InvalidArgument(f"--time-budget must be more than 0 seconds: got {time_budget}")
    if not 0 <= max_regret < 1:
        raise InvalidArgument(f"--max-regret must be 0 or more, and less than 1: got {max_regret}")
    named = _demand_one_source(
        workload,
        hf_config,
        *(direction, paged or None, kv),
        listed=(dtype, head_dim, causal, seq, feature),
    )
    if target not in (None, "all"):
        known_target(target)  # before the imports below, which take seconds
    if sum((gpu, target is not None, gpus is not None)) > 1:
        raise InvalidArgument("--gpu, --gpus and --target exclude each other: name one")
    if cluster is not None and (gpu or gpus is not None):
        raise InvalidArgument(
            "--cluster takes every GPU of the cluster: leave out --gpu and --gpus"
        )

    from flashgen.search.space import Budget, Method

    budget = Budget(trials=max(1, trials), seconds=time_budget)
    method = Method(sampler=sampler, seed=seed, likely_first=True)
    features = [*(feature or ()), *["invariant"] * invariant]
    cache = cache_fields(paged, kv)
    specs: tuple[AttentionSpec, ...] = ()
    if not named and not from_tables:
        named_specs = _specs(direction, dtype, head_dim, causal, features)
        specs = tuple(with_cache(spec, cache) for spec in named_specs)
    from flashgen.table.show import console
    from flashgen.tune.options import DEFAULT_SEQ, TuneOptions
    from flashgen.tune.places import Wanted
    from flashgen.tune.tune import tune as run

    screen = console()
    if from_tables and not named:
        wanted = spec_filter(direction, dtype, head_dim, causal, features)
        pieces = _of_tables(out, wanted, cache, seq)
    else:
        pieces = _pieces(workload, hf_config, direction, cache, screen.print, invariant=invariant)
    options = TuneOptions(
        specs=specs,
        seqs=tuple(seq or (DEFAULT_SEQ,)),
        pieces=pieces,
        where=Wanted(gpu=gpu, target=target, gpus=gpus, jobs=jobs),
        cluster=cluster,
        shard=_shard(shard),
        budget=budget,
        method=method,
        out=out,
        from_tables=from_tables,
        improve_only=improve_only,
        restate=restate,
        retry_quarantined=retry_quarantined,
        max_regret=max_regret,
    )
    run(options, screen)


def _shard(text: str) -> tuple[int, int]:
    """The numbers of "i/n"."""
    part, _, parts = text.partition("/")
    if not (re.fullmatch(r"[0-9]{1,9}", part) and re.fullmatch(r"[0-9]{1,9}", parts)):
        raise InvalidArgument(f"--shard must be like 2/8: got {text!r}")
    return int(part), int(parts)


def _demand_one_source(
    workload: Path | None, model: Path | None, *of_both: object, listed: Sequence[object]
) -> bool:
    """Whether a file says what to tune. Raises InvalidArgument if options say it too; of_both are
    those that a model leaves open.
    """
    if workload is not None and model is not None:
        raise InvalidArgument("--workload and --hf-config exclude each other: name one")
    if workload is not None and any(option is not None for option in (*listed, *of_both)):
        raise InvalidArgument(
            "--workload says what to tune: leave out "
            "--dtype, --head-dim, --causal, --feature, --seq, --direction, --paged and --kv, or "
            "put them into the file"
        )
    if model is not None and any(option is not None for option in listed):
        raise InvalidArgument(
            "--hf-config says what to tune: "
            "leave out --dtype, --head-dim, --causal, --feature and --seq"
        )
    return workload is not None or model is not None


def _specs(
    direction: list[str] | None,
    dtype: list[str] | None,
    head_dim: list[str] | None,
    causal: bool | None,
    features: list[str],
) -> tuple[AttentionSpec, ...]:
    """All specs that the options name."""
    either = [mask == "causal" for mask in masks_of(features)]
    masks = either if causal is None else [causal]
    kernels = named_directions(direction or ["forward"])
    if "backward" in (direction or ()) and "bias" in features:
        kernels += [] if "backward_dbias" in kernels else ["backward_dbias"]
    if "invariant" in features and "backward" in (direction or ()):
        kernels = [kernel for kernel in kernels if kernel != "backward_fused"]
    return tuple(
        named_spec(word, dims, masked).with_features(features).for_direction(kernel)
        for kernel in kernels
        for word in dtype or ["bf16"]
        for dims in head_dim or ["64", "128"]
        for masked in masks
    )


def _of_tables(
    out: Path,
    wanted: Callable[[AttentionSpec], bool],
    cache: Mapping[str, Any],
    seqs: list[int] | None,
) -> tuple[tuple[AttentionSpec, Problem], ...]:
    """What tables hold of all that the options name. Raises InvalidArgument if that is nothing."""
    from flashgen.table.emit import tables_for
    from flashgen.tune import workloads

    found = workloads.of_tables(
        tables_for(out, evidence=True).values(),
        lambda spec: wanted(spec) and cache.items() <= asdict(spec).items(),
        seqs,
    )
    if not found:
        raise InvalidArgument(
            "--from-tables needs a spec and a length of a table, and the options name none that a "
            "table has: leave out some, or --from-tables"
        )
    return found


def _pieces(
    workload: Path | None,
    model: Path | None,
    direction: list[str] | None,
    cache: Mapping[str, Any],
    say: Callable[[str], object],
    *,
    invariant: bool,
) -> tuple[tuple[AttentionSpec, Problem], ...]:
    """The pieces of a workload or a model's configuration, after printing them; otherwise none.
    invariant: each in its numeric class, but for the fused backward, which adds up in any order.
    """
    from flashgen.tune import hf_config, workloads

    if workload is not None:
        found = workloads.load(workload)
    elif model is not None:
        directions = tuple(direction or ["forward"])
        found = hf_config.from_hf_config(model, directions=directions, cache=cache)
    else:
        return ()
    for line in (f"{found.name}:", *found.lines(), *found.notes):
        say(line)
    if not invariant:
        return found.work
    return tuple(
        (replace(spec, invariant=True), problem)
        for spec, problem in found.work
        if spec.direction != "backward_fused"
    )
