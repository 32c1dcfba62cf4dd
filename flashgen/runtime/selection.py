"""Which kernels may serve a call, best first. Pure: no torch, no GPU, no file.

The rungs: the GPU's own entry of the bucket; its entry of the nearest bucket of the same spec; an
entry of a relative, by alias or by architecture; the config of its sibling, the same spec of the
other 16-bit type; the tile of the entry of a plainer spec, without its features or of the next head
dim that is tuned, in the textbook schedule; the spec's default kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from flashgen import settings
from flashgen.errors import GeneratedError, InvalidArgument
from flashgen.runtime.choice import Choice, Choices
from flashgen.schedules.config import KernelConfig
from flashgen.schedules.defaults import (
    WIDEST_DECODE,
    default_configs,
    default_spec,
    is_default_of,
    other_half,
    plainer_specs,
)
from flashgen.schedules.legality import may_spill, why_illegal, why_unserved
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.data_sheets import FAMILY
from flashgen.spec.gpu import TARGETS, Gpu, product_of, unlikeness
from flashgen.spec.named import Named
from flashgen.spec.problem import BUCKETS, bucket_of
from flashgen.spec.vocabulary import OF_DS, SHORT_DTYPE, Direction

BY_TIME: tuple[Direction, ...] = ("backward_fused", *OF_DS)
"""Directions that serve where the table of the GPU has them faster than others."""

Rung = Literal["exact", "nearest_bucket", "relative", "sibling", "plain_tile", "default"]


@dataclass(frozen=True, kw_only=True)
class Served:
    """The contents of generated/tables: the architecture and choices of each GPU with a table.

    triton: gives the version that compiles, like 3.7, under which executed entries serve. plain:
    kernels in Gluon and of schedule auto are left out.
    """

    archs: Mapping[str, str]
    choices: Mapping[str, Choices]
    triton: Callable[[], str] = settings.compiling_triton
    plain: bool = field(default_factory=settings.plain_kernels)


@dataclass(frozen=True, kw_only=True)
class Selection:
    """A choice, its rung of the ladder, and the reason for that rung, in one sentence."""

    choice: Choice
    rung: Rung
    slug: str | None
    reason: str

    @property
    def has_twin(self) -> bool:
        """Whether the pointer twin of a descriptor kernel may run in its place. For a tile of the
        plain spec it is a rung of its own, where it fits.
        """
        return self.rung != "plain_tile" or not self.choice.config.needs_aligned


@dataclass(frozen=True, kw_only=True)
class Ladder:
    """All selections that fit the GPU, best first, and a sentence for each kernel that would come
    before them and does not.
    """

    rungs: tuple[Selection, ...]
    skipped: tuple[str, ...]


def ladder(served: Served, slug: str, gpu: Gpu, spec: AttentionSpec, seq_k: int) -> Ladder:
    """The ladder of a call with seq_k keys, served as the GPU `slug`, within the limits of `gpu`.

    Raises InvalidArgument for what this GPU has no kernels for, and GeneratedError where not even a
    default kernel fits.
    """
    if (reason := why_unserved(spec, gpu)) is not None:
        raise InvalidArgument(reason)
    rungs: list[Selection] = []
    skipped: list[str] = []

    def add(selections: Iterable[Selection]) -> None:
        for selection in selections:
            reason = _left_out(selection.choice, served)
            reason = reason or why_illegal(selection.choice.spec, selection.choice.config, gpu)
            if reason is None and selection.rung == "plain_tile":
                reason = may_spill(selection.choice.spec, selection.choice.config, gpu)
            if reason is None:
                rungs.append(selection)
            elif not rungs:
                skipped.append(f"{selection.choice.kernel}: {reason}")

    add(_own(served, slug, spec, seq_k))
    if not rungs:  # or no other table need be read
        add(_of_relatives(served, slug, gpu, spec, seq_k))
    add(_siblings(served, slug, gpu, spec, seq_k))
    add(_plain_tiles(served, slug, gpu, spec, seq_k))
    add(_defaults(slug, gpu, spec))
    if not rungs:
        raise GeneratedError(f"no kernel serves {spec.name} on {slug}: {skipped[-1]}")
    return Ladder(rungs=tuple(rungs), skipped=tuple(dict.fromkeys(skipped)))


def rows_together(rows: int) -> int:
    """The br that holds this number of rows: a power of two, from 16 to WIDEST_DECODE."""
    return min(WIDEST_DECODE, max(16, 1 << (max(rows, 1) - 1).bit_length()))


def by_rows(selection: Selection, rows: int) -> tuple[int, ...]:
    """Sort key for the kernels of a decode with so many rows of a head of K. Those that hold all of
    them come first, for each program of a narrower one reads the keys again. Of these, entries
    before defaults, and of defaults the narrowest; of none that holds them, the widest. The default
    of tf32 comes before that of ieee, and native widening first.
    """
    config, wanted = selection.choice.config, rows_together(rows)
    place = selection.choice.spec.precision == "ieee", config.br < wanted
    if selection.rung != "default":
        return *place, 0
    return *place, 1, abs(config.br - wanted), config.widening != "native"


def _left_out(choice: Choice, served: Served) -> str | None:
    """Why a choice of a table does not serve, whatever the GPU."""
    if served.plain and choice.config.executed:
        return "FLASHGEN_PLAIN leaves it out"
    if choice.tritons and served.triton() not in choice.tritons:
        versions = ", ".join(choice.tritons)
        return f"it serves under Triton {versions}, and this is {served.triton() or 'none'}"
    return None


def first_kernels(found: Ladder) -> tuple[tuple[AttentionSpec, KernelConfig], ...]:
    """What a ladder launches first: for tensors that can have descriptors, and for others."""
    first = found.rungs[0].choice
    pointers = next((rung.choice for rung in found.rungs if rung.has_twin), first)
    return (first.spec, first.config), (pointers.spec, pointers.config.pointer_twin(pointers.spec))


def _own(served: Served, slug: str, spec: AttentionSpec, seq_k: int) -> Iterator[Selection]:
    """The GPU's own entries, nearest bucket first."""
    bucket = bucket_of(seq_k)
    for choice in _by_bucket(served, slug, spec, seq_k):
        if choice.bucket == bucket:
            reason = f"the entry of {slug} for seq_k in {bucket}"
            yield Selection(choice=choice, rung="exact", slug=slug, reason=reason)
        else:
            reason = f"{slug} has no entry for seq_k in {bucket}; {choice.bucket} is the nearest"
            yield Selection(choice=choice, rung="nearest_bucket", slug=slug, reason=reason)


def _of_relatives(
    served: Served, slug: str, gpu: Gpu, spec: AttentionSpec, seq_k: int
) -> Iterator[Selection]:
    """The entries of its alias, then of GPUs of its architecture, then of its family's. A kernel
    that fits one fits them all: an architecture decides how many registers and how much shared
    memory there are. An executed kernel was compiled for its own architecture.
    """
    for other in relatives(served.archs, slug, gpu):
        arch = served.archs[other]
        for choice in _by_bucket(served, other, spec, seq_k):
            if choice.tritons and arch != gpu.arch:
                continue
            how = "the same product" if product_of(slug) == other else f"{gpu.arch} too"
            if arch != gpu.arch:
                how = f"{arch}, of the same family as {gpu.arch}"
            reason = f"no entry for {spec.name} on {slug}; {other} is {how}"
            yield Selection(choice=choice, rung="relative", slug=other, reason=reason)


def _defaults(slug: str, gpu: Gpu, spec: AttentionSpec) -> Iterator[Selection]:
    """The spec's default kernels."""
    # tf32 is permitted, not required: if no tf32 kernel runs, the ieee one does.
    reason = f"no entry for {spec.name} on {slug} or a GPU like it; the default kernel serves"
    fallback = default_spec(spec)
    # tf32 of a numeric class is required: a decode may fit where its prefill does not.
    others = () if spec.invariant else (replace(fallback, precision="ieee"),)
    for wanted in dict.fromkeys((fallback, *others)):
        for config in default_configs(wanted):
            if not is_default_of(gpu.arch, wanted, config):
                continue
            choice = Choice(spec=wanted, config=config)
            yield Selection(choice=choice, rung="default", slug=None, reason=reason)


def _siblings(
    served: Served, slug: str, gpu: Gpu, spec: AttentionSpec, seq_k: int
) -> Iterator[Selection]:
    """The configs of the entries of the same spec in the other 16-bit type, which takes the same
    registers and bytes.
    """
    sibling = other_half(spec)
    # These are chosen by their times alone, which are not known here.
    if sibling is None or spec.direction in BY_TIME:
        return
    for choice in _nearest_tables(served, slug, gpu, sibling, seq_k):
        reason = (
            f"no entry for {spec.name} on {slug} or a GPU like it; the config of {sibling.name} "
            f"for seq_k in {choice.bucket} serves, untimed"
        )
        mine = Choice(spec=spec, config=choice.config)
        yield Selection(choice=mine, rung="sibling", slug=None, reason=reason)


def _plain_tiles(
    served: Served, slug: str, gpu: Gpu, spec: AttentionSpec, seq_k: int
) -> Iterator[Selection]:
    """The tiles of the entries of plainer specs, nearest bucket first: on this GPU, or, where it
    has no table, on the nearest relative.
    """
    # The gradient of a bias has no plain spec. Others as in _siblings.
    if spec.direction in ("backward_dbias", *BY_TIME):
        return
    configs: dict[KernelConfig, Choice] = {}
    itself = (spec,) if served.plain else ()  # its entry may be left out
    for plain in (*itself, *plainer_specs(spec)):
        for choice in _nearest_tables(served, slug, gpu, plain, seq_k):
            config = choice.config.textbook(spec)
            config = config.kernel if spec.invariant else config
            configs.setdefault(config, choice)
            configs.setdefault(config.pointer_twin(spec), choice)
    for config, choice in configs.items():
        reason = (
            f"no entry for {spec.name} on {slug} or a GPU like it; the tile of {choice.spec.name} "
            f"for seq_k in {choice.bucket} serves, untimed"
        )
        mine = Choice(spec=spec, config=config)
        yield Selection(choice=mine, rung="plain_tile", slug=None, reason=reason)


def _nearest_tables(
    served: Served, slug: str, gpu: Gpu, spec: AttentionSpec, seq_k: int
) -> list[Choice]:
    """_by_bucket of a GPU; where it has no table, of its nearest relative. What stands in place of
    another entry is left out. The config of a kernel in Gluon says nothing of other kernels, so a
    relative's entry of its bucket stands for it.
    """
    others = relatives(served.archs, slug, gpu)
    tables = [slug] if slug in served.archs else others[:1]
    found = (choice for own in tables for choice in _by_bucket(served, own, spec, seq_k))
    plain = (_plain(served, others, choice) for choice in found if not choice.tritons)
    return [choice for choice in plain if choice is not None]


def _plain(served: Served, others: Iterable[str], choice: Choice) -> Choice | None:
    """A choice, or if it is a kernel in Gluon, that of the same spec and bucket of these GPUs which
    is none.
    """
    if not choice.config.executed:
        return choice
    found = (lent for slug in others for lent in served.choices.get(slug, {}).get(choice.spec, ()))
    alike = (lent for lent in found if lent.bucket == choice.bucket and not lent.config.executed)
    return next(alike, None)


def _by_bucket(served: Served, slug: str, spec: AttentionSpec, seq_k: int) -> list[Choice]:
    """A GPU's choices for a spec, nearest bucket first; of two equally near, that of the longer
    lengths.
    """
    here = BUCKETS.index(bucket_of(seq_k))

    def distance(choice: Choice) -> tuple[int, int]:
        assert choice.bucket is not None  # only a default serves every length
        index = BUCKETS.index(choice.bucket)
        return abs(index - here), -index

    return sorted(served.choices.get(slug, {}).get(spec, ()), key=distance)


def relatives(archs: Mapping[str, str], slug: str, gpu: Gpu | Named) -> list[str]:
    """Other GPUs among `archs` whose entries may serve: the alias first, then those of the
    architecture, then those of its family; of these the same matrix rate, then near SM counts.
    """

    def order(other: str) -> tuple[bool, bool, tuple[bool, int], str]:
        apart = unlikeness(TARGETS[other], gpu) if other in TARGETS else (False, 0)
        return product_of(slug) != other, archs[other] != gpu.arch, apart, other

    alike = (gpu.arch, FAMILY.get(gpu.arch))
    related = [s for s, a in archs.items() if s != slug and (a in alike or product_of(slug) == s)]
    return sorted(related, key=order)


def tune_command(spec: AttentionSpec, seq_k: int, target: str | None = None) -> str:
    """The command that would give this spec and length an entry: on the present GPU, or offline."""
    dims = str(spec.head_dim)
    if spec.head_dim_v != spec.head_dim:
        dims += f"x{spec.head_dim_v}"
    dtype = "tf32" if spec.precision == "tf32" else SHORT_DTYPE[spec.dtype]
    mask = "--causal" if spec.causal else "--no-causal"
    where = "--gpu" if target is None else f"--target {target}"
    if spec.direction != "forward":
        where += f" --direction {spec.direction}"
    where += spec.cache_options
    words = "".join(f" --feature {word}" for word in spec.feature_words)
    named = f"--dtype {dtype} --head-dim {dims} {mask} --seq {max(1, seq_k)}"
    return f"flashgen tune {where} {named}{words}"
