"""The rung of the plain spec's tile: with each feature, its kernels are right."""

from __future__ import annotations

import pytest

from flashgen.evaluate.check import check_kernel
from flashgen.kernels.render import render
from flashgen.runtime.selection import ladder
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.features import FEATURE_WORDS, masks_of
from flashgen.spec.gpu import TARGETS
from tests.makers import make_spec
from tests.serving import SHIPPED

H200 = TARGETS["nvidia_h200"]
TOGETHER = ("window", "softcap")
DIRECTIONS = ("forward", "backward_dkv", "backward_dq")


def specs() -> list[AttentionSpec]:
    """Each feature, and some together, of head dim 64 in each direction that has it."""
    found: dict[AttentionSpec, None] = {}
    for words in (*((word,) for word in FEATURE_WORDS), TOGETHER):
        mask = "causal" if "causal" in masks_of(words) else "none"
        spec = make_spec("bfloat16", 64, mask).with_features(words)
        for direction in ("forward",) if spec.fp8 else DIRECTIONS:
            found[spec.for_direction(direction)] = None
    return [spec for spec in found if spec.featured]


def assert_right(spec: AttentionSpec) -> None:
    rungs = [
        rung.choice.config
        for rung in ladder(SHIPPED, H200.slug, H200, spec, 4096).rungs
        if rung.rung == "plain_tile"
    ]
    if not rungs:
        pytest.skip("no tile that is safe with this feature")
    for config in rungs:
        result = check_kernel(render(spec, config), spec, config)
        assert result.passed, (config.label, result)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_gemma_2s_features_are_right() -> None:
    assert_right(make_spec("bfloat16", 64, "causal", window=True, softcap=True))


@pytest.mark.slow("every feature in each direction; Gemma 2's stand for them")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("spec", specs(), ids=lambda spec: spec.name)
def test_every_feature_is_right(spec: AttentionSpec) -> None:
    assert_right(spec)
