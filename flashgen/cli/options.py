"""Options that commands share: specs, directions, tables."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flashgen import paths
from flashgen.errors import FlashgenError, InvalidArgument
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.features import FEATURE_WORDS, KV_WORDS
from flashgen.spec.gpu import LONGEST_NAME, TARGETS, did_you_mean, product_of, slug_of
from flashgen.spec.vocabulary import (
    BACKWARD,
    Direction,
    check_head_dim,
    parse_dtype,
)

if TYPE_CHECKING:
    from flashgen.table.table import Table

COMMAND_LINE: ContextVar[tuple[str, ...]] = ContextVar("COMMAND_LINE", default=())
"""The arguments after `flashgen`."""

Out = Annotated[Path, typer.Option(help="Folder of configs/, generated/ and .flashgen/.")]
UseGpu = Annotated[bool, typer.Option("--gpu", help="Use the GPU of this machine.")]


def _completion(words: Iterable[str]) -> Callable[[str], list[str]]:
    """Completes a word in a shell that has flashgen's completion."""

    def complete(incomplete: str) -> list[str]:
        return [word for word in words if word.startswith(incomplete)]

    return complete


complete_target = _completion(TARGETS)

Target = Annotated[
    str | None,
    typer.Option(
        help="A known GPU by slug; it need not be present.", autocompletion=complete_target
    ),
]
DTypes = Annotated[
    list[str] | None, typer.Option(help="fp16, bf16, fp32 or tf32; bf16 by default. Repeatable.")
]
HeadDimsOption = Annotated[
    list[str] | None,
    typer.Option(help="64; or 192x128 if that of V differs. 64 and 128 by default. Repeatable."),
]
Directions = Annotated[
    list[str] | None,
    typer.Option(
        help="forward, the default; decode, backward, or one of its kernels such as backward_dkv; "
        "of a model packed_forward, packed_backward and paged_prefill, too. Repeatable."
    ),
]
Paged = Annotated[
    bool,
    typer.Option("--paged", help="For decode, or forward with varlen: the cache is paged."),
]
Kv = Annotated[
    str | None,
    typer.Option("--kv", help=f"For decode, an 8-bit cache: {', '.join(KV_WORDS)}."),
]
CausalOption = Annotated[bool | None, typer.Option(help="One mask only; both if neither is given.")]
FeatureNames = Annotated[
    list[str] | None,
    typer.Option(
        "--feature",
        help=f"{', '.join(FEATURE_WORDS)}. Repeatable; one spec has all that are given.",
        autocompletion=_completion(FEATURE_WORDS),
    ),
]
NoFeature = Annotated[
    bool, typer.Option("--no-feature", help="Of a table, only specs without features.")
]
CASES_BUDGET = "Seconds: no case begins that would end later, by the longest so far."
Jobs = Annotated[int | None, typer.Option(help="Child processes; one per core by default.")]


def named_spec(dtype: str, head_dim: str, causal: bool) -> AttentionSpec:
    """The forward spec of a dtype word (tf32: float32, multiplied as tf32) and a head dim word."""
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


def spec_filter(
    directions: list[str] | None,
    dtypes: list[str] | None,
    head_dims: list[str] | None,
    causal: bool | None,
    features: list[str] | None,
    *,
    only: bool = False,
) -> Callable[[AttentionSpec], bool]:
    """Whether a spec is one of those that the options name; an option that is not given names all.

    A spec has at least the features that are given; with `only` no others. Raises InvalidArgument.
    """
    kernels = named_directions(directions or [])
    types = [named_spec(word, "64", False) for word in dtypes or []]
    dims = [named_spec("fp16", word, False) for word in head_dims or []]
    for word in features or ():
        check_word("--feature", word, FEATURE_WORDS)

    def wanted(spec: AttentionSpec) -> bool:
        pairs = (
            (kernels, spec.direction),
            ([(each.dtype, each.precision) for each in types], (spec.dtype, spec.precision)),
            ([(each.head_dim, each.head_dim_v) for each in dims], (spec.head_dim, spec.head_dim_v)),
            ([] if causal is None else [causal], spec.causal),
        )
        named = all(not known or mine in known for known, mine in pairs)
        given, its = set(features or ()), set(spec.feature_words)
        return named and (given == its if only else given <= its)

    return wanted


def cache_fields(paged: bool, kv: str | None) -> dict[str, Any]:
    """The fields of a spec that --paged and --kv name. Raises InvalidArgument."""
    fields: dict[str, Any] = {"paged": True} if paged else {}
    if kv is not None:
        check_word("--kv", kv, KV_WORDS)
        kv_dtype, kv_scales = KV_WORDS[kv]
        fields |= {"kv_dtype": kv_dtype, "kv_scales": kv_scales}
    return fields


def with_cache(spec: AttentionSpec, fields: Mapping[str, Any]) -> AttentionSpec:
    """The spec with these fields of a cache. Raises InvalidArgument for directions without one."""
    decode = spec.direction == "decode"
    if "paged" in fields and not decode and not (spec.varlen and spec.direction == "forward"):
        raise InvalidArgument(
            "--paged needs --direction decode, or forward and --feature varlen: "
            f"got {spec.direction}"
        )
    if "kv_dtype" in fields and not decode:
        raise InvalidArgument(f"--kv needs --direction decode: got {spec.direction}")
    if decode and spec.varlen:
        raise InvalidArgument(
            "--feature varlen needs --direction forward or backward: packed decodes serve forwards "
            "of few blocks, and are not tuned"
        )
    return replace(spec, **fields)


def named_directions(words: list[str], *, whole_backward: bool = True) -> list[Direction]:
    """The kernels that these words name, without duplicates."""
    kernels: tuple[Direction, ...] = ("forward", *BACKWARD, "backward_dbias", "decode")
    found: list[Direction] = []
    for word in words:
        if word == "backward" and whole_backward:
            found += BACKWARD
        else:
            known = ("forward", "backward", *kernels[1:]) if whole_backward else kernels
            check_word("--direction", word, known)
            found.append(word)  # type: ignore[arg-type]  # one of them
    return list(dict.fromkeys(found))


def check_word(option: str, word: str, known: Collection[str]) -> None:
    """Raise InvalidArgument if the word of an option is none of those that are known."""
    if word not in known:
        raise InvalidArgument(f"{option} must be one of {', '.join(known)}: got {word!r}")


def check_no_feature(features: list[str] | None, no_feature: bool) -> None:
    """Raise InvalidArgument if features are both named and excluded."""
    if features and no_feature:
        raise InvalidArgument("--feature and --no-feature exclude each other: name one")


def check_least(option: str, value: float | None, least: int) -> None:
    """Raise InvalidArgument if an option is given and less than `least`."""
    if value is not None and not value >= least:
        raise InvalidArgument(f"{option} must be at least {least}: got {value}")


def tables_of(out: Path) -> dict[str, Table]:
    """All tables by slug: those of `out`, and for other GPUs the shipped ones."""
    from flashgen.table.emit import tables_for

    return tables_for(out)


def demand_folder(out: Path) -> None:
    """Raise InvalidArgument if --out is no folder to read from."""
    if not out.is_dir():
        raise InvalidArgument(f"--out must name a folder of configs/ and generated/: got {out}")


def table_of(slug: str, out: Path, *, evidence: bool = False) -> Table | None:
    """The table of a slug: that of `out`, else the shipped one, else None. No other is read."""
    from flashgen.table.table_file import load, load_with_evidence

    if slug != slug_of(slug) or len(slug) > LONGEST_NAME:  # a path is no slug
        return None
    for path in (paths.table_file(out, slug), paths.shipped_table(slug)):
        if path.exists():
            return load_with_evidence(path) if evidence else load(path)
    return None


def named_table(slug: str, out: Path, *, evidence: bool = False) -> Table:
    """The table of a slug or alias, with its evidence if that is wanted.

    Raises InvalidArgument that suggests the nearest slug.
    """
    demand_folder(out)
    for name in (slug, product_of(slug)):
        if (table := table_of(name, out, evidence=evidence)) is not None:
            return table
    tables = tables_of(out)
    if slug in TARGETS:
        raise FlashgenError(f"{slug} has no table yet: run flashgen tune --target {slug}")
    hint = did_you_mean(slug, dict.fromkeys((*tables, *TARGETS)))
    raise InvalidArgument(f"there is no table {slug!r}; {hint}")
