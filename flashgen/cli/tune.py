"""flashgen tune."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from flashgen.cli.grouped import grouped
from flashgen.cli.options import Jobs, UseGpu, check_least, complete_target
from flashgen.cli.tables import write_report_of
from flashgen.cli.what import What
from flashgen.errors import InvalidArgument
from flashgen.spec.gpu import known_target

TRIALS = 60

DEMONSTRATION = "demonstration"
DEMONSTRATION_S = 90.0


@dataclass(frozen=True, kw_only=True)
class Where:
    """Where: on which GPU, with which machines."""

    gpu: UseGpu = False
    target: Annotated[
        str | None,
        typer.Option(
            help="A known GPU by slug, or all of them; none need be present.",
            autocompletion=complete_target,
        ),
    ] = None
    gpus: Annotated[str | None, typer.Option(help="GPUs of this host: all, or 0,2.")] = None
    cluster: Annotated[
        str | None, typer.Option(help="Tune on a Ray cluster: auto, ray://HOST:10001 or local.")
    ] = None
    shard: Annotated[
        str,
        typer.Option(help="2/8: tune the second of eight parts; merge their tables afterwards."),
    ] = "1/1"
    jobs: Jobs = None

    @property
    def unnamed(self) -> bool:
        """Whether no option says which GPU."""
        whole = self.shard == "1/1"
        return not self.gpu and whole and self.target is self.gpus is self.cluster is None

    def __post_init__(self) -> None:
        check_least("--jobs", self.jobs, 1)
        if self.target not in (None, "all"):
            known_target(self.target or "")  # before imports that take seconds
        if sum((self.gpu, self.target is not None, self.gpus is not None)) > 1:
            raise InvalidArgument("--gpu, --gpus and --target exclude each other: name one")
        if self.cluster is not None and (self.gpu or self.gpus is not None):
            raise InvalidArgument(
                "--cluster takes every GPU of the cluster: leave out --gpu and --gpus"
            )


@dataclass(frozen=True, kw_only=True)
class HowLong:
    """How long, and how."""

    trials: Annotated[
        int | None,
        typer.Option(
            help=f"Configs to try per spec and bucket, {TRIALS} by default; on a GPU, to time. "
            "With --from-tables, 0 for no search."
        ),
    ] = None
    time_budget: Annotated[
        float | None, typer.Option(help="Seconds for all searches together.")
    ] = None
    from_tables: Annotated[
        bool,
        typer.Option(
            "--from-tables",
            help="Try what the tables of other GPUs hold, for all of their specs and lengths or "
            "those that the options name, most used first; then search on.",
        ),
    ] = False
    sampler: Annotated[
        str,
        typer.Option(
            help="auto, exhaustive, tpe, gp, cmaes, qmc, random, brute-force, or "
            "package.module:Class of Optuna's kind."
        ),
    ] = "auto"
    seed: Annotated[int, typer.Option(help="Seed of the sampler.")] = 0
    retry_quarantined: Annotated[
        bool,
        typer.Option("--retry-quarantined", help="Retry kernels that killed a process before."),
    ] = False

    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Say what would be searched, and about how long it takes."),
    ] = False

    def __post_init__(self) -> None:
        check_least("--trials", self.trials, 0 if self.from_tables else 1)
        if self.time_budget is not None and not self.time_budget > 0:
            raise InvalidArgument(
                f"--time-budget must be more than 0 seconds: got {self.time_budget}"
            )


@dataclass(frozen=True, kw_only=True)
class Output:
    """Output: what is written, and where."""

    out: Annotated[
        Path | None,
        typer.Option(help="Folder of configs/, generated/ and .flashgen/; the current one."),
    ] = None
    improve_only: Annotated[
        bool,
        typer.Option("--improve-only", help="Write an entry only where a faster config is found."),
    ] = False
    restate: Annotated[
        bool,
        typer.Option(
            "--restate",
            help="Write the estimates of whole tables by the model of today; search nothing.",
        ),
    ] = False
    max_regret: Annotated[
        float, typer.Option(help="How much slower than its best a bucket may be to share a kernel.")
    ] = 0.02

    def __post_init__(self) -> None:
        if not 0 <= self.max_regret < 1:
            raise InvalidArgument(
                f"--max-regret must be 0 or more, and less than 1: got {self.max_regret}"
            )


@grouped
def tune(what: What, where: Where, how_long: HowLong, output: Output) -> None:
    """Find the fastest correct config of each spec and bucket, write the table and the kernels.

    flashgen tune --gpu                                     this machine's GPU
    flashgen tune --gpu --hf-config config.json             what a model calls
    flashgen tune --gpu --head-dim 128 --causal --seq 8192  one spec, one length
    flashgen tune --gpu --from-tables --time-budget 600     from other tables
    flashgen tune --target nvidia_l4 --out here             no GPU: estimates
    flashgen tune --gpu --dry-run                           what, and how long

    Without --gpu and --target: the GPU of this machine; if there is none, a demonstration of two
    minutes for an H100, in the folder demonstration/.
    """
    if how_long.dry_run and where.cluster is not None:
        raise InvalidArgument("--dry-run is of this host: leave out --cluster")
    if output.restate:
        return _restate(what, where, how_long, output)
    demonstrates = where.unnamed and not how_long.dry_run and not _gpu_is_here()
    if demonstrates:
        what, how_long, output = _demonstration(what, how_long, output)
    out = output.out or Path()
    from flashgen.search.space import Budget, Method

    trials = TRIALS if how_long.trials is None else max(1, how_long.trials)
    budget = Budget(trials=trials, seconds=how_long.time_budget)
    method = Method(sampler=how_long.sampler, seed=how_long.seed, likely_first=True)
    listed = not what.in_file
    specs = what.specs() if listed and not how_long.from_tables else ()
    from flashgen.table.show import console
    from flashgen.tune.options import DEFAULT_SEQ, TuneOptions
    from flashgen.tune.places import TargetOptions
    from flashgen.tune.tune import tune as run

    screen = console()
    from_tables = listed and how_long.from_tables
    options = TuneOptions(
        specs=specs,
        seqs=tuple(what.seq or (DEFAULT_SEQ,)),
        pieces=what.of_tables(out) if from_tables else what.pieces(screen.print),
        where=TargetOptions(gpu=where.gpu, target=where.target, gpus=where.gpus, jobs=where.jobs),
        cluster=where.cluster,
        shard=_shard(where.shard),
        budget=budget,
        method=method,
        out=out,
        from_tables=how_long.from_tables,
        improve_only=output.improve_only,
        retry_quarantined=how_long.retry_quarantined,
        max_regret=output.max_regret,
    )
    if how_long.dry_run:
        from flashgen.tune import dry_run

        for line in dry_run.lines(options, screen.print):
            screen.print(line)
        return
    if demonstrates:
        _say_what_it_is(options.budget.seconds, out)
    tables = run(options, screen)
    if demonstrates:
        for table in tables:
            write_report_of(table.gpu.slug, out)


def _restate(what: What, where: Where, how_long: HowLong, output: Output) -> None:
    """What --restate does, which is of a target's whole table."""
    if where.target is None:
        raise InvalidArgument("--restate is of estimates: name the --target that has them, or all")
    searching = what.in_file or what.names_specs or where.shard != "1/1"
    if searching or how_long.from_tables or how_long.dry_run or output.improve_only:
        raise InvalidArgument("--restate searches nothing: it takes --target, --jobs and --out")
    from flashgen.table.show import console
    from flashgen.tune.places import TargetOptions
    from flashgen.tune.restate import restate

    targets = TargetOptions(target=where.target, jobs=where.jobs)
    restate(targets, output.out or Path(), console().print)


def _gpu_is_here() -> bool:
    import torch

    return torch.cuda.is_available()


def _demonstration(what: What, how_long: HowLong, output: Output) -> tuple[What, HowLong, Output]:
    """What a run does that has no GPU and no name of one, where the options leave it open."""
    out = output.out or Path(DEMONSTRATION)
    seconds = how_long.time_budget or (DEMONSTRATION_S if how_long.trials is None else None)
    if not (what.in_file or how_long.from_tables or what.names_specs):
        what = replace(what, head_dim=["128"], causal=True)
    return what, replace(how_long, time_budget=seconds), replace(output, out=out)


def _say_what_it_is(seconds: float | None, out: Path) -> None:
    print(
        "No GPU is here, so this is a demonstration, for an H100 that is not there: kernels are "
        "compiled and checked, and their times are estimates. "
        + (f"It searches for {seconds:.0f} seconds, and w" if seconds else "It w")
        + f"rites to {out}. --target names another GPU.",
        flush=True,
    )


def _shard(text: str) -> tuple[int, int]:
    """The numbers of "i/n"."""
    part, _, parts = text.partition("/")
    if not (re.fullmatch(r"[0-9]{1,9}", part) and re.fullmatch(r"[0-9]{1,9}", parts)):
        raise InvalidArgument(f"--shard must be like 2/8: got {text!r}")
    return int(part), int(parts)
