"""flashgen explain and doctor: which kernel would serve a call, and what this machine can do."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flashgen import paths, settings
from flashgen.cli.options import (
    FeatureNames,
    Kv,
    Out,
    Paged,
    cache_fields,
    named_directions,
    named_spec,
    table_of,
    with_cache,
)
from flashgen.errors import GeneratedError, InvalidArgument, NoGpuError
from flashgen.runtime import folders
from flashgen.spec.gpu import OFFLINE_TARGET, Gpu, known_target
from flashgen.spec.problem import workload

if TYPE_CHECKING:
    from flashgen.runtime.selection import Served
    from flashgen.spec.attention import AttentionSpec


def explain(
    head_dim: Annotated[str, typer.Option(help="64; or 192x128 if that of V differs.")],
    seq: Annotated[int, typer.Option(help="Number of keys.")],
    causal: Annotated[bool, typer.Option(help="Whether the mask is causal.")] = False,
    dtype: Annotated[str, typer.Option(help="fp16, bf16, fp32 or tf32.")] = "bf16",
    direction: Annotated[
        str, typer.Option(help="forward, decode, or a kernel of the backward such as backward_dkv.")
    ] = "forward",
    paged: Paged = False,
    kv: Kv = None,
    feature: FeatureNames = None,
    target: Annotated[
        str | None, typer.Option(help="Serve as this GPU; by default the one here, or an H100.")
    ] = None,
    compiled: Annotated[
        bool, typer.Option("--compile", help="Compile the kernels, and say what limits each.")
    ] = False,
    out: Out = Path(),
) -> None:
    """Show which kernel would serve a call, from which entry, what limits it, and why others
    lost.
    """
    from flashgen.report.explain import Question, explanation
    from flashgen.runtime.generated_tables import served_from
    from flashgen.runtime.selection import ladder, tune_command
    from flashgen.runtime.ways import OF_WAYS
    from flashgen.table import show as showing

    if seq < 0:
        raise InvalidArgument(f"--seq must be 0 or more: got {seq}")
    (kernel,) = named_directions([direction], whole_backward=False)
    spec = named_spec(dtype, head_dim, causal).with_features(feature or ()).for_direction(kernel)
    spec = with_cache(spec, cache_fields(paged, kv))
    gpu, here = _gpu_to_explain(target, out)
    folder = _package_folder(out)
    if (problem := folders.why_not_generated(folder)) is not None:
        raise GeneratedError(problem)
    served = served_from(folder)
    found = ladder(served, gpu.slug, gpu, spec, seq)
    table = table_of(found.rungs[0].slug or "", out, evidence=True)
    question = Question(spec=spec, seq=seq, gpu=gpu, out=out, compiled=compiled)
    for line in explanation(question, found, folder, table):
        print(showing.wrapped(line), flush=True)
    if spec.direction in OF_WAYS:
        print(showing.wrapped(f"  {_way(served, gpu, spec, seq)}"))
    if found.rungs[0].rung != "exact":
        print(f"\n  to improve it: {tune_command(spec, seq, None if here else gpu.slug)}")


def _way(served: Served, gpu: Gpu, spec: AttentionSpec, seq: int) -> str:
    """How the gradients of the problem that is timed are computed, in one sentence."""
    from flashgen.kernels.ds_runs import DsSizes
    from flashgen.runtime.selection import ladder
    from flashgen.runtime.ways import ways_of

    held = served.choices.get(gpu.slug, {})
    ways = ways_of(
        spec, gpu, held.__contains__, lambda each: ladder(served, gpu.slug, gpu, each, seq)
    )
    of = DsSizes.of_problem(spec, workload(spec, max(1, seq)))
    return ways.described(of, settings.workspace_bytes(), deterministic=True)


def _gpu_to_explain(slug: str | None, out: Path) -> tuple[Gpu, bool]:
    """The Gpu to serve as, and whether it is present.

    It is the one named, the one in FLASHGEN_GPU, the present one, or OFFLINE_TARGET.
    """
    slug = slug or settings.served_gpu()
    if slug is None:
        from flashgen.kernels.launch import device_gpu

        try:
            return device_gpu(0), True
        except NoGpuError:
            slug = OFFLINE_TARGET
            print(f"no GPU here; as {slug} (--target names another)", file=sys.stderr)
    table = table_of(slug, out)
    return (table.gpu if table else known_target(slug)), False


def _package_folder(out: Path) -> Path:
    """generated/ of `out` if flashgen wrote it, or the folder that serves this process."""
    own = paths.generated_dir(out)
    return own if folders.is_generated(own) else folders.default_folder()


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
