"""Kernels of packed sequences and of block masks compile and fit on every architecture; those of
packed sequences with the loops of one length, for their bounds are read before them."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import triton

from flashgen.compile.verdict import judge
from flashgen.schedules.defaults import default_config, default_spec
from flashgen.schedules.legality import why_illegal
from flashgen.schedules.outcome import Status
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.gpu import TARGETS
from tests.compiled import compile_one
from tests.makers import make_config, make_spec

ARCHS = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942")
SMALLEST = {
    arch: min((g for g in TARGETS.values() if g.arch == arch), key=lambda g: g.shared_per_block)
    for arch in ARCHS
}


def of_kind(kind: str, **fields: Any) -> AttentionSpec:
    if kind == "block mask":
        return default_spec(make_spec(block_mask=True, **fields))
    spec = default_spec(make_spec(mask="causal", varlen=True, **fields))
    return replace(spec, paged=True) if kind == "paged" else spec.for_direction(kind)  # type: ignore[arg-type]


def assert_fits(spec: AttentionSpec, arch: str) -> None:
    config, gpu = default_config(spec), SMALLEST[arch]
    if why_illegal(spec, config, gpu) is None:
        built = compile_one(spec, config, arch)
        assert judge(built, spec, config, gpu) == (Status.OK, ""), (built.name, arch)


@pytest.mark.slow("make test proves a sample of it")
@pytest.mark.parametrize("arch", ARCHS)
def test_defaults_fit_every_architecture(arch: str) -> None:
    kinds = ("forward", "paged", "backward_dkv", "backward_dq", "backward_fused")
    types = (("bfloat16", "ieee"), ("float32", "tf32"))
    for kind, (dtype, precision), dim in product(kinds, types, (64, 128, 256)):
        if (kind, precision, dim) == ("backward_fused", "tf32", 256):
            continue  # it spills on sm_100 and sm_120; untimed, it never runs
        assert_fits(of_kind(kind, dtype=dtype, head_dim=dim, precision=precision), arch)
    for (dtype, precision), dim, direction in product(types, (64, 128, 256), kinds[2:]):
        masked = of_kind("block mask", dtype=dtype, head_dim=dim, precision=precision)
        # With 4 warps this one spills on sm_89, with 8 on gfx942, and one default serves both.
        known = (precision, dim) == ("tf32", 256) and direction != "backward_dq"
        assert_fits(masked, arch)
        if not known:
            assert_fits(masked.for_direction(direction), arch)  # type: ignore[arg-type]


@pytest.mark.skipif(triton.__version__ != "3.7.1", reason="facts of the pinned Triton, 3.7.1")
@pytest.mark.slow("two kernels of head dim 128")
def test_the_loop_is_that_of_one_length() -> None:
    """Scores of the next tile under the softmax of this one, by pointers too: why they are tried."""
    config = make_config(128, 64, num_warps=8, schedule="s_ahead")
    spec = make_spec("bfloat16", 128, "causal", varlen=True)
    found = compile_one(spec, config, "sm_90")
    assert judge(found, spec, config, SMALLEST["sm_90"]) == (Status.OK, "")
    assert all((loop.exp2_under_matrix or 0) >= 0.85 for loop in found.loops)
    plain = compile_one(replace(spec, varlen=False), config, "sm_90")
    assert found.shared_bytes == plain.shared_bytes
    assert len(found.loops) == len(plain.loops) == 2
