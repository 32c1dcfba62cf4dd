"""The B200's and the RTX 5090's kernels beside those that estimates for sm_89 and sm_90 choose."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from flashgen import paths
from flashgen.compile.bounds import cycles_a_score
from flashgen.compile.compiler import CompileFailed
from flashgen.compile.verdict import judge, residents, shortcomings
from flashgen.estimate.estimate import estimate
from flashgen.estimate.replay import cached_replay
from flashgen.schedules.config import KernelConfig
from flashgen.schedules.legality import why_illegal
from flashgen.schedules.outcome import Status
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.gpu import TARGETS, Gpu
from flashgen.spec.vocabulary import Direction
from flashgen.table.entry import Entry, must_have_run
from flashgen.table.table_file import load
from tests.compiled import cache, compile_one

LENDERS = ("nvidia_h100_80gb_hbm3", "nvidia_l4", "nvidia_geforce_rtx_4090")
DIRECTIONS: tuple[Direction, ...] = (
    "forward",
    "backward_dkv",
    "backward_dq",
    "backward_fused",
    "decode",
)
UNTIMED, ESTIMATED = "nvidia_b200", "nvidia_geforce_rtx_5090"


class Facts(NamedTuple):
    """By which search/decide.by_facts chooses, in its order; less is better."""

    shortcomings: int
    cycles: float
    issue: float
    warps: int
    stages: int


@functools.cache
def facts(spec: AttentionSpec, config: KernelConfig, gpu: Gpu) -> Facts | None:
    """Those of a kernel; None where it may not be chosen on the GPU."""
    try:
        compiled = compile_one(spec, config, gpu.arch)
    except CompileFailed:
        return None
    bound = cycles_a_score(compiled, spec, config, gpu)
    if judge(compiled, spec, config, gpu)[0] is not Status.OK or bound is None:
        return None
    warps = residents(compiled, gpu) * config.block_warps(spec)
    return Facts(shortcomings(compiled, spec, config), *bound, -warps, -config.num_stages)


def worse(own: Facts, other: Facts) -> bool:
    """Whether the other is nowhere worse, and somewhere better."""
    return own != other and all(mine >= its for mine, its in zip(own, other, strict=True))


def beside(slug: str, direction: Direction) -> Iterator[tuple[Entry, KernelConfig]]:
    """A table's plain entries of a direction, each with a config that a lender has in its place."""
    gpu, tables = TARGETS[slug], [load(paths.shipped_table(lender)) for lender in LENDERS]
    for entry in load(paths.shipped_table(slug)).entries:
        if entry.spec.direction != direction:
            continue
        held = [each.find(*entry.key) for each in tables]
        for other in dict.fromkeys(lent.config for lent in held if lent is not None):
            legal = not must_have_run(other) and why_illegal(entry.spec, other, gpu) is None
            if legal and other != entry.config:
                yield entry, other


def estimated_us(entry: Entry, config: KernelConfig, gpu: Gpu) -> float:
    """The estimate of a config in the place of an entry."""
    replayed = cached_replay(compile_one(entry.spec, config, gpu.arch), gpu, cache())
    return estimate(replayed, entry.spec, config, entry.problem, gpu).median_us


@pytest.mark.slow("compiles 40 to 80 kernels, some 2 CPU-seconds each")
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("slug", [UNTIMED, ESTIMATED])
def test_no_kernel_is_worse_by_facts_than_what_another_estimate_chooses(
    slug: str, direction: Direction
) -> None:
    """Where facts chose, by their order. Where an estimate did, a kernel may be worse in all facts
    only if it is faster by estimate: there tiles of 64 rows, and schedule ampere, beat more warps.
    """
    gpu, found = TARGETS[slug], []
    for entry, other in beside(slug, direction):
        own, its = facts(entry.spec, entry.config, gpu), facts(entry.spec, other, gpu)
        assert own is not None, (entry.spec.name, entry.config.label)
        lost = its is not None and (worse(own, its) or (slug == UNTIMED and its < own))
        if lost and slug == ESTIMATED:
            lost = estimated_us(entry, entry.config, gpu) > estimated_us(entry, other, gpu)
        if lost:
            found.append((entry.spec.name, entry.bucket, entry.config.label, other.label))
    assert found == []


def test_a_kernel_is_worse_only_where_nothing_is_better() -> None:
    own = Facts(0, 0.5, 0.25, -8, -3)
    assert worse(own, own._replace(warps=-16))
    assert worse(own._replace(shortcomings=1), own)
    assert not worse(own, own)
    assert not worse(own, own._replace(warps=-16, stages=-2))
