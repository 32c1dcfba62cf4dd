"""The B200's and the RTX 5090's kernels beside those that estimates for sm_89 and sm_90 choose."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest

from flashgen import paths
from flashgen.compile.bounds import cycles_a_score
from flashgen.compile.compiler import judge, residents, shortcomings
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.config import KernelConfig
from flashgen.spec.gpu import TARGETS, Gpu
from flashgen.spec.legality import why_illegal
from flashgen.spec.outcome import Status
from flashgen.spec.vocabulary import Direction
from flashgen.table.entry import must_have_run
from flashgen.table.table import load
from tests.compiled import compile_one

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


def facts(spec: AttentionSpec, config: KernelConfig, gpu: Gpu) -> Facts | None:
    """Those of a kernel; None where it may not be chosen on the GPU."""
    compiled = compile_one(spec, config, gpu.arch)
    bound = cycles_a_score(compiled, spec, config, gpu)
    if judge(compiled, spec, config, gpu)[0] is not Status.OK or bound is None:
        return None
    warps = residents(compiled, gpu) * config.block_warps(spec)
    return Facts(shortcomings(compiled, spec, config), *bound, -warps, -config.num_stages)


def worse(own: Facts, other: Facts) -> bool:
    """Whether the other is nowhere worse, and somewhere better."""
    return own != other and all(mine >= its for mine, its in zip(own, other, strict=True))


def beside(
    slug: str, direction: Direction
) -> Iterator[tuple[AttentionSpec, KernelConfig, set[KernelConfig]]]:
    """A table's plain kernels of a direction, and the configs that the lenders have in their
    places.
    """
    gpu, tables = TARGETS[slug], [load(paths.shipped_table(lender)) for lender in LENDERS]
    found: dict[tuple[AttentionSpec, KernelConfig], set[KernelConfig]] = {}
    for entry in load(paths.shipped_table(slug)).entries:
        others = {held.config for each in tables if (held := each.find(*entry.key))}
        if entry.spec.direction == direction:
            found.setdefault((entry.spec, entry.config), set()).update(
                other
                for other in others - {entry.config}
                if not must_have_run(other) and why_illegal(entry.spec, other, gpu) is None
            )
    yield from ((*kernel, others) for kernel, others in found.items() if others)


@pytest.mark.slow("compiles 50 to 90 kernels, some 2 CPU-seconds each")
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("slug", [UNTIMED, ESTIMATED])
def test_no_kernel_is_worse_by_facts_than_what_another_estimate_chooses(
    slug: str, direction: Direction
) -> None:
    """Where an estimate chose, a kernel is worse that is so in all facts; where facts did, by their
    order.
    """
    found = []
    for spec, config, others in beside(slug, direction):
        own = facts(spec, config, TARGETS[slug])
        assert own is not None, (spec.name, config.label)
        for other in sorted(others, key=lambda each: each.label):
            its = facts(spec, other, TARGETS[slug])
            if its and (worse(own, its) or (slug == UNTIMED and its < own)):
                found.append((spec.name, config.label, own, other.label, its))
    assert found == []


def test_a_kernel_is_worse_only_where_nothing_is_better() -> None:
    own = Facts(0, 0.5, 0.25, -8, -3)
    assert worse(own, own._replace(warps=-16))
    assert worse(own._replace(shortcomings=1), own)
    assert not worse(own, own)
    assert not worse(own, own._replace(warps=-16, stages=-2))
