"""The words that commands share: options, specs, directions, tables."""

from __future__ import annotations

import difflib
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flashgen import paths
from flashgen.errors import FlashgenError, InvalidArgument
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.features import FEATURE_WORDS, KV_WORDS
from flashgen.spec.gpu import ALIASES, TARGETS, slug_of
from flashgen.spec.vocabulary import (
    BACKWARD,
    Direction,
    check_head_dim,
    parse_dtype,
)

if TYPE_CHECKING:
    from flashgen.table.table import Table

COMMAND_LINE: ContextVar[tuple[str, ...]] = ContextVar("COMMAND_LINE", default=())
"""What stands behind `flashgen` on the line: the workers of a fleet are told the same."""

Out = Annotated[Path, typer.Option(help="Folder of configs/, generated/ and .flashgen/.")]
UseGpu = Annotated[bool, typer.Option("--gpu", help="The GPU of this machine.")]
Target = Annotated[str | None, typer.Option(help="A known GPU by slug, none needed here.")]
DTypes = Annotated[list[str] | None, typer.Option(help="fp16, bf16, fp32 or tf32. Repeatable.")]
HeadDims = Annotated[
    list[str] | None, typer.Option(help="64; or 192x128 where that of V differs. Repeatable.")
]
Directions = Annotated[
    list[str] | None,
    typer.Option(
        help="forward; backward, or one of its kernels: backward_dkv; decode. Repeatable."
    ),
]
Paged = Annotated[
    bool,
    typer.Option("--paged", help="Of decode, or forward with varlen: the cache lies in pages."),
]
Kv = Annotated[
    str | None,
    typer.Option("--kv", help=f"Of direction decode, 8 bits: {', '.join(KV_WORDS)}."),
]
Seqs = Annotated[list[int] | None, typer.Option(help="Length; its bucket is tuned. Repeatable.")]
Causal = Annotated[bool | None, typer.Option(help="One mask only; both if neither is given.")]
FeatureNames = Annotated[
    list[str] | None,
    typer.Option("--feature", help=f"{', '.join(FEATURE_WORDS)}. Repeatable: all together."),
]
WorkloadFile = Annotated[
    Path | None, typer.Option("--workload", help="YAML of what to tune, and how much each counts.")
]
ModelFile = Annotated[
    Path | None, typer.Option("--hf-config", help="config.json of a model on Hugging Face.")
]
Trials = Annotated[
    int, typer.Option(help="Configs to try a spec and bucket; on a GPU those timed.")
]
Seconds = Annotated[float | None, typer.Option(help="Seconds for all searches together.")]
SamplerName = Annotated[
    str, typer.Option(help="auto, exhaustive, random, tpe, gp, cmaes or genetic.")
]
Seed = Annotated[int, typer.Option(help="Of the sampler.")]
MaxRegret = Annotated[
    float, typer.Option(help="Time over the best that a bucket may pay for sharing a kernel.")
]
ImproveOnly = Annotated[
    bool, typer.Option("--improve-only", help="Leave unbeaten entries as they are.")
]
RetryQuarantined = Annotated[
    bool, typer.Option("--retry-quarantined", help="Try again what killed a process before.")
]
Gpus = Annotated[
    str | None, typer.Option(help="Several GPUs of this host, one worker each: all, or 0,2.")
]
StorageUrl = Annotated[
    str | None,
    typer.Option("--storage", help="Share the work: postgresql+psycopg://..., or a journal file."),
]
Jobs = Annotated[int | None, typer.Option(help="Child processes; one a core by default.")]


def named_spec(dtype: str, head_dim: str, causal: bool) -> AttentionSpec:
    """The forward spec of a dtype word (tf32 is float32, multiplied so) and a head dim word."""
    name = "float32" if dtype == "tf32" else parse_dtype(dtype, beside=("tf32",))
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


def in_pages(specs: tuple[AttentionSpec, ...]) -> tuple[AttentionSpec, ...]:
    """The specs that --paged asks for. Raises InvalidArgument for directions without a cache."""
    for spec in specs:
        if spec.direction != "decode" and not (spec.varlen and spec.direction == "forward"):
            raise InvalidArgument(
                "--paged goes with --direction decode, or forward and --feature varlen: "
                f"got {spec.direction}"
            )
    return tuple(replace(spec, paged=True) for spec in specs)


def in_8_bits(specs: tuple[AttentionSpec, ...], word: str) -> tuple[AttentionSpec, ...]:
    """The specs that --kv asks for. Raises InvalidArgument."""
    if word not in KV_WORDS:
        raise InvalidArgument(f"--kv must be one of {', '.join(KV_WORDS)}: got {word!r}")
    for spec in specs:
        if spec.direction != "decode":
            raise InvalidArgument(f"--kv goes with --direction decode: got {spec.direction}")
    kv_dtype, kv_scales = KV_WORDS[word]
    return tuple(replace(spec, kv_dtype=kv_dtype, kv_scales=kv_scales) for spec in specs)


def named_directions(words: list[str], *, whole_backward: bool = True) -> list[Direction]:
    """The kernels that these words name, none twice."""
    kernels: tuple[Direction, ...] = ("forward", *BACKWARD, "backward_dbias", "decode")
    found: list[Direction] = []
    for word in words:
        if word == "backward" and whole_backward:
            found += BACKWARD
        elif word in kernels:
            found += [kernel for kernel in kernels if kernel == word]
        else:
            known = ("forward", "backward", *kernels[1:]) if whole_backward else kernels
            raise InvalidArgument(f"--direction must be one of {', '.join(known)}: got {word!r}")
    return list(dict.fromkeys(found))


def check_least(option: str, value: float | None, least: int) -> None:
    """Raise InvalidArgument where an option that was given is less than `least`."""
    if value is not None and not value >= least:
        raise InvalidArgument(f"{option} must be at least {least}: got {value}")


def tables_of(out: Path) -> dict[str, Table]:
    """All tables by slug: those of `out`, and of the shipped ones the rest."""
    from flashgen.table.emit import tables_for

    return tables_for(out)


def demand_folder(out: Path) -> None:
    """Raise InvalidArgument where --out names no folder to read from."""
    if not out.is_dir():
        raise InvalidArgument(f"--out must name a folder of configs/ and generated/: got {out}")


def named_table(slug: str, out: Path) -> Table:
    """The table of a slug or alias. Raises InvalidArgument that names the nearest there is."""
    from flashgen.table.table import load

    demand_folder(out)
    for name in dict.fromkeys((slug, ALIASES.get(slug, slug))):
        for path in (paths.table_file(out, name), paths.shipped_table(name)):
            if path.exists():
                return load(path)
    tables = tables_of(out)
    if slug in TARGETS:
        raise FlashgenError(f"{slug} has no table yet: run flashgen tune --target {slug}")
    near = difflib.get_close_matches(slug_of(slug), [*tables, *TARGETS], n=1, cutoff=0.3)
    hint = f"did you mean {near[0]}?" if near else "flashgen targets lists them."
    raise InvalidArgument(f"there is no table {slug!r}; {hint}")
