"""The rung of the plain spec's tile: with features, every tile that it may offer fits and does not spill."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from flashgen.compile.compiler import compile_kernel
from flashgen.compile.verdict import judge
from flashgen.errors import InvalidArgument
from flashgen.kernels.render import render
from flashgen.report.kernel_limits import dissect
from flashgen.runtime.launcher import Launcher
from flashgen.runtime.selection import Served, ladder
from flashgen.schedules.config import KernelConfig, kernel_name
from flashgen.schedules.defaults import default_config
from flashgen.schedules.legality import why_illegal
from flashgen.schedules.outcome import Status
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.features import FEATURE_WORDS, masks_of
from flashgen.spec.gpu import TARGETS
from flashgen.spec.problem import BUCKETS, workload
from tests.makers import make_spec
from tests.serving import SHIPPED

SERVED = Served(
    archs=SHIPPED.archs,
    choices={
        slug: {spec: held for spec, held in table.items() if not spec.featured}
        for slug, table in SHIPPED.choices.items()
    },
)
"""The shipped tables without the entries of features, which this rung stands in for."""
H200 = TARGETS["nvidia_h200"]
TOGETHER = (("window", "softcap"), ("window", "sink"), ("window", "softcap", "varlen"))
"""Of Gemma 2, of gpt-oss, and of Gemma 2 packed."""
Pair = tuple[AttentionSpec, KernelConfig]


def featured(plain: AttentionSpec) -> Iterator[AttentionSpec]:
    """The spec with each feature that its direction has, and with some together."""
    for words in (*((word,) for word in FEATURE_WORDS), *TOGETHER):
        if plain.mask not in masks_of(words):
            continue
        try:
            spec = plain.with_features(word for word in FEATURE_WORDS if word in words)
        except InvalidArgument:  # another direction's
            continue
        if (spec := spec.for_direction(plain.direction)).featured:
            yield spec


def tiles(slugs: Iterable[str]) -> dict[tuple[str, Pair], str]:
    """Each kernel of the rung and its architecture, with a GPU; bfloat16 stands for float16, which
    takes the same registers and bytes.
    """
    found: dict[tuple[str, Pair], str] = {}
    for slug in slugs:
        gpu = TARGETS[slug]
        plains = [spec for spec in SHIPPED.choices[slug] if spec.dtype == "bfloat16"]
        for spec in (s for plain in plains if not plain.featured for s in featured(plain)):
            if why_illegal(spec, default_config(spec), gpu) is not None:  # fp8 on sm_80
                continue
            for bucket in BUCKETS:
                for rung in ladder(SERVED, slug, gpu, spec, bucket.low).rungs:
                    if rung.rung == "plain_tile":
                        found[gpu.arch, (spec, rung.choice.config)] = slug
    return found


def assert_fits(spec: AttentionSpec, config: KernelConfig, slug: str) -> None:
    compiled = compile_kernel(render(spec, config), spec, config, TARGETS[slug].arch)
    status, why = judge(compiled, spec, config, TARGETS[slug])
    assert status is Status.OK, (kernel_name(spec, config), slug, why)


GEMMA = make_spec("bfloat16", 256, "causal", window=True, softcap=True)


@pytest.mark.slow("five seconds of compilation")
def test_the_layer_of_gemma_2_takes_the_plain_tile() -> None:
    rungs = ladder(SERVED, H200.slug, H200, GEMMA, 8192).rungs
    assert [rung.rung for rung in rungs] == ["plain_tile", "default"]
    config = rungs[0].choice.config
    assert (config.loads, config.br, config.bc) == ("descriptor", 128, 64)
    # Its pointer twin would spill, so tensors that cannot have descriptors take the next rung.
    launcher = Launcher("generated", rungs)
    assert launcher._aligned.config == config
    assert launcher._unaligned.selection.rung == "default"
    assert_fits(GEMMA, config, H200.slug)


@pytest.mark.slow("compiles and replays three kernels, for 30 s")
def test_the_layer_of_gemma_2_costs_little_more_than_the_plain_one(tmp_path: Path) -> None:
    """By the estimate, which counts the keys of the window; and without it."""
    pytest.importorskip("numba")

    def estimated_us(spec: AttentionSpec, place: int = 0) -> float:
        choice = ladder(SERVED, H200.slug, H200, spec, 8192).rungs[place].choice
        found = dissect(choice.spec, choice.config, workload(spec, 8192), H200, tmp_path)
        assert found.estimate is not None, found.unknown
        return found.estimate.median_us

    plain = estimated_us(make_spec("bfloat16", 256, "causal"))
    assert estimated_us(GEMMA) < 1.5 * plain
    assert estimated_us(GEMMA, 1) > 4 * plain  # the default


def test_both_16_bit_types_take_the_same_tiles() -> None:
    for plain in (make_spec("bfloat16", d, "causal") for d in (64, 128, 256)):
        for spec in featured(plain):
            other = make_spec("float16", plain.head_dim, "causal").with_features(spec.feature_words)
            one, two = (
                [
                    r.choice.config
                    for r in ladder(SERVED, H200.slug, H200, s, 4096).rungs
                    if r.rung == "plain_tile"
                ]
                for s in (spec, other)
            )
            assert one == two


@pytest.mark.slow("compiles 600 kernels; Gemma 2's stands for them")
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("arch", sorted(set(SHIPPED.archs.values())))
def test_every_tile_of_the_rung_fits_and_does_not_spill(arch: str) -> None:
    pairs = tiles(slug for slug, its in SHIPPED.archs.items() if its == arch)
    assert len(pairs) > 20
    for (_, (spec, config)), slug in pairs.items():
        assert_fits(spec, config, slug)
