"""flashgen warmup and flashgen aot: compile kernels before the first call."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flashgen.cli.options import FeatureNames, Jobs, Out, check_least, named_table, tables_of
from flashgen.errors import FlashgenError, printable

if TYPE_CHECKING:
    from flashgen.spec.gpu import Gpu
    from flashgen.table.table import Table
    from flashgen.tune.precompile import Precompiled

Defaults = Annotated[
    bool, typer.Option("--defaults", help="Also the default kernels, which serve all other specs.")
]
HeadDim = Annotated[
    list[int] | None,
    typer.Option(min=1, help="Also kernels of this head dim, which no table has. Repeatable."),
]


def warmup(
    defaults: Defaults = False,
    head_dim: HeadDim = None,
    feature: FeatureNames = None,
    jobs: Jobs = None,
    out: Out = Path(),
) -> None:
    """Compile the kernels of this machine's GPU into Triton's cache."""
    from flashgen.kernels.launch import device_gpu
    from flashgen.tune.precompile import kernels_to_build, precompile

    check_least("--jobs", jobs, 1)
    gpu = device_gpu(0, instead="flashgen aot --target nvidia_h200 --out DIR")
    table = _table_serving(gpu, out)
    pairs = kernels_to_build(
        table, gpu, defaults=defaults or table is None, features=feature or (),
        head_dims=head_dim or (),
    )  # fmt: skip
    built = _told(precompile(pairs, gpu, jobs=jobs), len(pairs))
    whose = f"the table of {table.gpu.slug}" if table else "the default kernels: it has no table"
    print(f"{gpu.slug}: {built} kernels are in Triton's cache, from {whose}")


def aot(
    target: Annotated[str, typer.Option(help="The GPU's slug; no GPU is needed.")],
    out: Annotated[
        Path, typer.Option(help="The folder to write to: one folder of binaries per GPU.")
    ],
    defaults: Defaults = False,
    head_dim: HeadDim = None,
    feature: FeatureNames = None,
    jobs: Jobs = None,
) -> None:
    """Compile a GPU's kernels to files, which the runtime loads from the folder in FLASHGEN_AOT."""
    from flashgen.tune.precompile import kernels_to_build, package

    check_least("--jobs", jobs, 1)
    table = named_table(target, Path())
    pairs = kernels_to_build(
        table, table.gpu, defaults=defaults, features=feature or (), head_dims=head_dim or ()
    )
    built = _told(package(table, pairs, out, jobs=jobs), len(pairs))
    print(f"{out / table.gpu.slug}: {built} kernels. To use them: export FLASHGEN_AOT={out}")


def _told(kernels: Iterator[Precompiled], count: int) -> int:
    """Print the result of each of `count` kernels as it comes, and return the number of those
    built. Raises FlashgenError if there is none.
    """
    built, failed = 0, 0
    for number, made in enumerate(kernels, start=1):
        verdict = f"FAILED  {made.name}: {made.failure}" if made.failure else f"ok  {made.name}"
        print(printable(f"[{number}/{count}] {verdict}"), flush=True)
        built, failed = built + (not made.failure), failed + bool(made.failure)
    if not built:
        raise FlashgenError(f"none of {failed} kernels compiled: the lines above say why")
    return built


def _table_serving(gpu: Gpu, out: Path) -> Table | None:
    """The table that the runtime would use for a GPU: its own, its alias's, or a relative's.

    None if there is none and default kernels serve.
    """
    from flashgen.runtime.selection import relatives

    tables = tables_of(out)
    archs = {slug: table.gpu.arch for slug, table in tables.items()}
    for slug in (gpu.slug, *relatives(archs, gpu.slug, gpu)):
        if slug in tables:
            return tables[slug]
    return None
