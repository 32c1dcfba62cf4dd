"""The flashgen command: arguments in, one call each, exit codes out.

0 done, 1 failed, 2 usage, 3 no GPU where one was asked for, 130 interrupted with everything saved.
Modules that import torch or optuna are imported by the command that needs them: --help is quick.
"""

from __future__ import annotations

import difflib
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from flashgen import paths, settings
from flashgen.errors import FlashgenError, InvalidArgument, NoGpuError, ToolchainError
from flashgen.gpu import ALIASES, TARGETS, Gpu, known_target, slug_of
from flashgen.spec import AttentionSpec, Direction, check_head_dim, parse_dtype

if TYPE_CHECKING:
    from flashgen.evaluate import Evaluator
    from flashgen.table import Table

INTERRUPTED = 130  # 128 and the number of SIGINT, as shells have it

app = typer.Typer(
    name="flashgen",
    help="Triton attention kernels: tuned for a GPU, proven, and served from a readable table.",
    epilog="--debug, anywhere on the line, shows the traceback of an error.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Out = Annotated[Path, typer.Option(help="Folder of configs/, generated/ and .flashgen/.")]
UseGpu = Annotated[bool, typer.Option("--gpu", help="The GPU of this machine.")]
Target = Annotated[str | None, typer.Option(help="A known GPU by slug, none needed here.")]
DTypes = Annotated[list[str] | None, typer.Option(help="fp16, bf16, fp32 or tf32. Repeatable.")]
HeadDims = Annotated[
    list[str] | None, typer.Option(help="64; or 192x128 where that of V differs. Repeatable.")
]
Directions = Annotated[
    list[str] | None,
    typer.Option(help="forward; backward, or one of its kernels: backward_dkv. Repeatable."),
]
Seqs = Annotated[list[int] | None, typer.Option(help="Length; its bucket is tuned. Repeatable.")]
Causal = Annotated[bool | None, typer.Option(help="One mask only; both if neither is given.")]
Jobs = Annotated[int | None, typer.Option(help="Child processes; one a core by default.")]


def main(arguments: list[str]) -> NoReturn:
    """Run one command and exit. What went wrong is one line on stderr; --debug shows where."""
    debug = "--debug" in arguments
    arguments = [argument for argument in arguments if argument != "--debug"]
    try:
        app(arguments, prog_name="flashgen")
    except SystemExit as ended:  # Typer turns KeyboardInterrupt into this code, and says nothing
        if ended.code == INTERRUPTED:
            _leave("interrupted; what was finished is saved", INTERRUPTED)
        raise
    except FlashgenError as error:
        if debug:
            raise
        _leave(str(error), error.exit_code)
    except Exception as error:
        if debug:
            raise
        _leave(f"a bug, {type(error).__name__}: {error}; again with --debug shows where", 1)
    sys.exit(0)


@app.command()
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
        _spec(word, dims, masked).for_direction(kernel)
        for kernel in _directions(direction or ["forward"])
        for word in dtype or ["bf16"]
        for dims in head_dim or ["64", "128"]
        for masked in masks
    ]
    _check_least("--trials", trials, 1)
    _check_least("--jobs", jobs, 1)
    for length in seq or ():
        _check_least("--seq", length, 1)
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


@app.command()
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


@app.command()
def show(
    slug: Annotated[str, typer.Argument(help="The GPU's slug, as `flashgen targets` lists it.")],
    out: Out = Path(),
) -> None:
    """Print the table of a GPU."""
    from flashgen import show as showing
    from flashgen.generate import is_stale

    table = _table(slug, out)
    console = showing.console()
    console.print(showing.table_heading(table))
    stale = [entry for entry in table.entries if is_stale(entry)]
    console.print(showing.entries_grid(table.entries, stale))
    if stale:
        console.print(f"{len(stale)} stale: their kernels' text has changed since they were timed.")


@app.command()
def explain(
    head_dim: Annotated[str, typer.Option(help="64; or 192x128 where that of V differs.")],
    seq: Annotated[int, typer.Option(help="Keys of the call.")],
    causal: Annotated[bool, typer.Option(help="Whether the mask is causal.")] = False,
    dtype: Annotated[str, typer.Option(help="fp16, bf16, fp32 or tf32.")] = "bf16",
    direction: Annotated[
        str, typer.Option(help="forward, or a kernel of the backward: backward_dkv.")
    ] = "forward",
    gpu_slug: Annotated[
        str | None, typer.Option(help="Serve as this GPU; by default the one here, or nvidia_h200.")
    ] = None,
    out: Out = Path(),
) -> None:
    """Say which kernel would serve a call, from where, what limits it, and why no other does."""
    from flashgen import show as showing
    from flashgen.explain import Question, explanation
    from flashgen.runtime.select import Served, ladder, tune_command

    if seq < 0:
        raise InvalidArgument(f"--seq must be 0 or more: got {seq}")
    (kernel,) = _directions([direction], whole_backward=False)
    spec = _spec(dtype, head_dim, causal).for_direction(kernel)
    gpu, here = _gpu_to_explain(gpu_slug, out)
    package = showing.load_package(_package_folder(out))
    served = Served(archs=package.archs, choices=package.choices, defaults=package.defaults)
    found = ladder(served, gpu.slug, gpu, spec, seq)
    table = _tables(out).get(found.rungs[0].slug or "")
    asked = Question(spec=spec, seq=seq, gpu=gpu, out=out)
    for line in explanation(asked, found, package, table):
        print(showing.wrapped(line), flush=True)
    if found.rungs[0].rung != "exact":
        print(f"\n  to improve it: {tune_command(spec, seq, None if here else gpu.slug)}")


@app.command()
def verify(
    gpu: UseGpu = False, target: Target = None, jobs: Jobs = None, out: Out = Path()
) -> None:
    """Prove the entries of a table again: legal, compiled as recorded, right against float64."""
    from flashgen.verify import verify as proofs_of

    if gpu == (target is not None):
        raise InvalidArgument("verify needs either --gpu or --target SLUG")
    _check_least("--jobs", jobs, 1)
    # A cache of its own: what an earlier run remembers proves nothing.
    with tempfile.TemporaryDirectory(prefix="flashgen-verify-") as cache:
        table, evaluator = _table_and_evaluator(gpu, target, out, Path(cache), jobs)
        failed = 0
        with evaluator:
            for proof in proofs_of(table, evaluator):
                print(proof, flush=True)
                failed += not proof.holds
    print(f"{table.gpu.slug}: {len(table.entries) - failed} of {len(table.entries)} entries hold")
    if failed:
        raise typer.Exit(1)


@app.command()
def calibrate(
    logs: Annotated[
        list[Path], typer.Argument(metavar="LOG...", help=".flashgen/SLUG.jsonl of a tune --gpu.")
    ],
    plot: Annotated[
        Path | None, typer.Option(help="PNG to draw; calibration.png unless given.")
    ] = None,
) -> None:
    """Hold the estimates of measured logs against their measurements; changes no parameter."""
    from flashgen import calibrate as calibrating
    from flashgen import plot as plotting
    from flashgen.show import console

    picture = plot or Path("calibration.png")
    plotting.check_file(picture)
    screen = console()
    pairs = calibrating.read_pairs(logs, screen.print)
    for slug, of_gpu in pairs.items():
        rows = calibrating.calibrations(of_gpu)
        screen.print(slug, style="bold")
        for line in (*calibrating.table_lines(rows), *calibrating.remarks(rows[0]), ""):
            screen.print(line)
    screen.print(calibrating.LEGEND)
    try:
        plotting.draw(pairs, picture)
    except ToolchainError as error:
        if plot is not None:
            raise
        screen.print(f"No plot: {error}")
    else:
        screen.print(f"Drawn: {picture}")


@app.command()
def targets(out: Out = Path()) -> None:
    """List the GPUs known without being present, and what their tables hold."""
    from flashgen import show as showing

    tables = _tables(out)
    others = [table.gpu for slug, table in tables.items() if slug not in TARGETS]
    showing.console().print(showing.targets_grid([*TARGETS.values(), *others], tables))


def _leave(sentence: str, code: int) -> NoReturn:
    print(f"flashgen: {sentence}", file=sys.stderr)
    sys.exit(code)


def _spec(dtype: str, head_dim: str, causal: bool) -> AttentionSpec:
    """The forward spec of a dtype word (tf32 is float32, multiplied so) and a head dim word."""
    name = "float32" if dtype == "tf32" else parse_dtype(dtype)
    dims = head_dim.split("x")
    if len(dims) > 2 or not all(dim.isascii() and dim.isdigit() for dim in dims):
        raise InvalidArgument(f"--head-dim must be like 64 or 192x128: got {head_dim!r}")
    for dim in dims:
        check_head_dim(int(dim), "--head-dim")
    return AttentionSpec(
        dtype=name,  # type: ignore[arg-type]  # parse_dtype returns no other
        head_dim=int(dims[0]),
        head_dim_v=int(dims[-1]),
        mask="causal" if causal else "none",
        precision="tf32" if dtype == "tf32" else "ieee",
    )


BACKWARD: tuple[Direction, ...] = (
    "backward_delta",
    "backward_dkv",
    "backward_dq",
    "backward_fused",
)
"""What the word backward stands for: the kernels that a training step without a bias may run."""


def _directions(words: list[str], *, whole_backward: bool = True) -> list[Direction]:
    """The kernels that these words name, none twice."""
    kernels: tuple[Direction, ...] = ("forward", *BACKWARD)
    found: list[Direction] = []
    for word in words:
        if word == "backward" and whole_backward:
            found += BACKWARD
        elif word in kernels:
            found += [kernel for kernel in kernels if kernel == word]
        else:
            known = ("forward", "backward", *BACKWARD) if whole_backward else kernels
            raise InvalidArgument(f"--direction must be one of {', '.join(known)}: got {word!r}")
    return list(dict.fromkeys(found))


def _check_least(option: str, value: float | None, least: int) -> None:
    if value is not None and not value >= least:
        raise InvalidArgument(f"{option} must be at least {least}: got {value}")


def _tables(out: Path) -> dict[str, Table]:
    from flashgen.generate import tables_for

    return tables_for(out)


def _table(slug: str, out: Path) -> Table:
    """The table of a slug or alias. Raises InvalidArgument that names the nearest there is."""
    tables = _tables(out)
    found = tables.get(slug) or tables.get(ALIASES.get(slug, slug))
    if found is not None:
        return found
    if slug in TARGETS:
        raise FlashgenError(f"{slug} has no table yet: run flashgen tune --target {slug}")
    near = difflib.get_close_matches(slug_of(slug), [*tables, *TARGETS], n=1, cutoff=0.3)
    hint = f"did you mean {near[0]}?" if near else "flashgen targets lists them."
    raise InvalidArgument(f"there is no table {slug!r}; {hint}")


def _gpu_to_explain(slug: str | None, out: Path) -> tuple[Gpu, bool]:
    """The Gpu to serve as, and whether it is here.

    It is the one named, that of FLASHGEN_GPU, the one here, or nvidia_h200.
    """
    slug = slug or settings.served_gpu()
    if slug is None:
        from flashgen.launch import device_gpu
        from flashgen.tune import OFFLINE_TARGET

        try:
            return device_gpu(0), True
        except NoGpuError:
            slug = OFFLINE_TARGET
            print(f"no GPU here; as {slug} (--gpu-slug names another)", file=sys.stderr)
    table = _tables(out).get(slug)
    return (table.gpu if table else known_target(slug)), False


def _package_folder(out: Path) -> Path:
    """generated/ of `out`, or the one installed with flashgen."""
    own = paths.generated_dir(out)
    return own if own.is_dir() else paths.generated_dir(paths.ROOT)


def _table_and_evaluator(
    gpu: bool, target: str | None, out: Path, cache: Path, jobs: int | None
) -> tuple[Table, Evaluator]:
    if not gpu:
        from flashgen.evaluators.offline import OfflineEvaluator

        table = _table(target or "", out)
        return table, OfflineEvaluator(table.gpu, cache, jobs)
    from flashgen.evaluators.gpu import GpuEvaluator
    from flashgen.launch import device_gpu

    here = device_gpu(0)
    return _table(here.slug, out), GpuEvaluator(here, 0, cache, jobs)
