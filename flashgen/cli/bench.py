"""flashgen bench: compares flashgen with other implementations in one run."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from flashgen import paths
from flashgen.bench import GROUPS
from flashgen.cli.options import CASES_BUDGET, COMMAND_LINE, CausalOption, check_least, check_word
from flashgen.errors import InvalidArgument, printable
from flashgen.runtime import folders
from flashgen.spec.vocabulary import check_head_dim, parse_dtype

DIRECTIONS = ("forward", "backward", "both", "decode")
SEQS = (512, 1024, 2048, 4096, 8192, 16384)
DECODE_SEQS = tuple(1 << n for n in range(10, 18))
HEAD_DIMS = (64, 128, 256)
BATCHES = (1, 4, 16, 64, 128)


def bench(
    direction: Annotated[
        list[str] | None, typer.Option(help=f"{', '.join(DIRECTIONS)}. Repeatable.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="fp16, bf16 or fp32.")] = "bf16",
    head_dim: Annotated[list[int] | None, typer.Option(help="Repeatable: 64, 128, 256.")] = None,
    seq: Annotated[list[int] | None, typer.Option(help="Keys. Repeatable.")] = None,
    causal: CausalOption = None,
    batch: Annotated[
        list[int] | None, typer.Option(help="Batch sizes of decode. Repeatable.")
    ] = None,
    contender: Annotated[
        list[str] | None,
        typer.Option(help=f"{', '.join(GROUPS)}; all if none is given. Repeatable."),
    ] = None,
    time_budget: Annotated[float | None, typer.Option(help=CASES_BUDGET)] = None,
    gigabytes: Annotated[
        float, typer.Option(help="Upper bound for K and V of a decode, in GB.")
    ] = 24.0,
    tuned: Annotated[
        Path | None, typer.Option(help="Folder of tune --out whose generated/ is used.")
    ] = None,
    index: Annotated[int, typer.Option(help="Index of the CUDA device.")] = 0,
    out: Annotated[
        Path, typer.Option(help="Folder of results; an existing run is resumed.")
    ] = Path("bench"),
    smoke: Annotated[
        bool, typer.Option("--smoke", help="Tiny sizes on a CPU; nothing is measured.")
    ] = False,
) -> None:
    """Time flashgen, each step of its ladder and other implementations in one run, with errors."""
    for option, values in (("--seq", seq), ("--batch", batch)):
        for value in values or ():
            check_least(option, value, 1)
    for value in head_dim or ():
        check_head_dim(value, "--head-dim")
    for word in direction or ():
        check_word("--direction", word, DIRECTIONS)
    if time_budget is not None and not time_budget > 0:
        raise InvalidArgument(f"--time-budget must be more than 0 seconds: got {time_budget}")
    if not gigabytes > 0:
        raise InvalidArgument(f"--gigabytes must be more than 0: got {gigabytes}")
    element: Any = parse_dtype(dtype)
    if smoke:
        interpret()
    serve_from(tuned)

    from flashgen.bench.case import Sizes
    from flashgen.bench.peers import why_absent
    from flashgen.bench.run import BenchOptions, run

    for word in contender or ():
        check_word("--contender", word, GROUPS)
    directions: Any = tuple(dict.fromkeys(direction or ["forward"]))
    for word in contender or ():
        if why := why_absent(word, directions):
            raise InvalidArgument(f"--contender {word}: {why}")
    masks: Any = ("none", "causal") if causal is None else ("causal" if causal else "none",)
    lengths = SEQS if directions != ("decode",) else DECODE_SEQS
    sizes = Sizes(
        directions=directions,
        dtype=element,
        head_dims=head_dim or ([64] if smoke else HEAD_DIMS),
        seqs=seq or ([33] if smoke else lengths),
        masks=masks,
        batches=batch or ([1, 2] if smoke else BATCHES),
        gigabytes=gigabytes,
        smoke=smoke,
    )
    options = BenchOptions(
        sizes=sizes,
        groups=tuple(contender or ()),
        out=out,
        seconds=time_budget,
        index=index,
        command=COMMAND_LINE.get(),
    )
    run(options, lambda text: print(printable(text), flush=True))


def serve_from(folder: Path | None) -> None:
    """Serve by the tables of a folder in place of the shipped ones."""
    if folder is None:
        return
    problem = folders.why_not_generated(paths.generated_dir(folder))
    if problem is not None:
        raise InvalidArgument(f"--tuned must name a folder that tune --out wrote: {problem}")
    folders.use(folder)


def interpret() -> None:
    """Run kernels in Triton's interpreter, as those of a known GPU.

    Triton reads its variable at import, and no command imports it before this.
    """
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        raise InvalidArgument("--smoke needs a new process: run it as `flashgen bench`")
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ.setdefault("FLASHGEN_GPU", "nvidia_h200")
