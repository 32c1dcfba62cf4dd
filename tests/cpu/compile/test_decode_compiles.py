"""Kernels that serve a cache compile, fit and do not spill on every architecture; by default configs."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from flashgen.compile.ptx import build_ptx
from flashgen.compile.verdict import judge
from flashgen.kernels.render import render
from flashgen.schedules.config import KernelConfig
from flashgen.schedules.defaults import default_config
from flashgen.schedules.legality import shared_bound_bytes, why_illegal
from flashgen.schedules.outcome import Status
from flashgen.schedules.space import legal_configs, seed_configs
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.gpu import TARGETS
from tests.compiled import Job, compile_all
from tests.makers import make_config, make_spec

ARCHS = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942")
SMALLEST = {
    arch: min((g for g in TARGETS.values() if g.arch == arch), key=lambda g: g.shared_per_block)
    for arch in ARCHS
}


def assert_all_fit(jobs: list[Job]) -> None:
    for (spec, config, arch), compiled in zip(jobs, compile_all(jobs), strict=True):
        gpu = SMALLEST[arch]
        assert why_illegal(spec, config, gpu) is None
        assert judge(compiled, spec, config, gpu) == (Status.OK, ""), (compiled.name, arch)
        assert shared_bound_bytes(spec, config, gpu) <= compiled.shared_bytes


def jobs_of(
    dims: tuple[int, ...], kinds: tuple[tuple[str, str], ...], archs: tuple[str, ...]
) -> list[Job]:
    jobs: list[Job] = []
    for dim, (dtype, precision), paged, arch in product(dims, kinds, (False, True), archs):
        decode = make_spec(
            dtype, dim, "causal", precision=precision, direction="decode", paged=paged
        )
        append = replace(decode.for_direction("append"), rotary="halves" if paged else "none")
        for spec in (decode, decode.for_direction("combine"), append):
            job = spec, default_config(spec), arch
            jobs += [job] * (job not in jobs)
    return jobs


FEATURED: tuple[dict[str, Any], ...] = (
    {"window": True, "softcap": True, "sink": True, "paged": True},
    {"bias": "additive", "alibi": True},
    {"window": True, "bias": "boolean", "leftpad": True, "indexed": True},
)


def featured_jobs(
    dims: tuple[int, ...], archs: tuple[str, ...], dtypes: tuple[str, ...]
) -> list[Job]:
    specs = [
        make_spec(dtype, dim, "causal", direction="decode", **features)
        for dtype, dim, features in product(dtypes, dims, FEATURED)
    ]
    return [(spec, default_config(spec), arch) for spec in specs for arch in archs]


@pytest.mark.slow("make test proves a sample of it")
def test_every_default_with_features_fits() -> None:
    assert_all_fit(featured_jobs((64, 128, 256), ARCHS, ("bfloat16", "float32")))


NARROW: tuple[dict[str, Any], ...] = (
    {"kv_dtype": "float8_e4m3"},
    {"kv_dtype": "int8"},
    {"kv_dtype": "float8_e4m3", "paged": True, "kv_scales": "page"},
    {"kv_dtype": "int8", "paged": True, "kv_scales": "page"},
)


def narrow_jobs(
    dims: tuple[int, ...], archs: tuple[str, ...], dtypes: tuple[str, ...]
) -> list[Job]:
    """The defaults, and where there is one the GPU's own widening; and what appends to them."""
    jobs: list[Job] = []
    for dtype, dim, fields, arch in product(dtypes, dims, NARROW, archs):
        spec = make_spec(dtype, dim, "causal", direction="decode", **fields)
        config = default_config(spec)
        native = replace(config, widening="native") if "8_e4" in spec.kv_dtype else config
        jobs += [
            (spec, c, arch)
            for c in {config, native}
            if why_illegal(spec, c, SMALLEST[arch]) is None
        ]
        append = spec.for_direction("append")
        jobs.append((append, default_config(append), arch))
    return jobs


@pytest.mark.slow("make test proves a sample of it")
def test_every_default_of_narrow_caches_fits() -> None:
    assert_all_fit(narrow_jobs((64, 128, 256), ARCHS, ("float16", "bfloat16")))


@pytest.mark.slow("make test proves a sample of it")
def test_every_default_fits_every_architecture() -> None:
    kinds = (("float16", "ieee"), ("float32", "ieee"), ("float32", "tf32"))
    assert_all_fit(jobs_of((16, 32, 64, 128, 256), kinds, ARCHS))


@pytest.mark.slow("seven seconds of compilation")
def test_the_first_seed_of_hopper_fits() -> None:
    jobs: list[Job] = []
    for paged in (False, True):
        spec = make_spec("bfloat16", 128, direction="decode", paged=paged)
        seeds = seed_configs(spec, SMALLEST["sm_90"])
        assert {seed.kernel for seed in seeds} <= set(legal_configs(spec, SMALLEST["sm_90"]))
        jobs.append((spec, seeds[0], "sm_90"))
    assert_all_fit(jobs)


@pytest.mark.parametrize(
    ("spec", "config", "what"),
    [
        (make_spec(direction="decode"), make_config(16, 64, loads="descriptor"), "pointer"),
        (make_spec(direction="decode"), make_config(16, 64, schedule="s_ahead"), "fa2"),
        (make_spec(), make_config(64, 64, split_keys=512), "split_keys needs direction decode"),
        (make_spec(direction="combine"), make_config(32, 32, num_stages=1), "makes no use of br"),
        (make_spec(direction="append"), make_config(16, 32, num_stages=1), "makes no use of bc"),
        (make_spec(direction="combine"), make_config(16, 16, num_stages=1, split_keys=256), "split_keys"),
        (make_spec(head_dim=40, direction="decode"), make_config(16, 16, head_dims="padded"), "powers of two"),
        (make_spec(direction="decode"), make_config(16, 64, widening="native"), "widening native needs"),
        (make_spec(head_dim=256, direction="decode"), make_config(64, 256, num_stages=5), "shared memory"),
    ],
)  # fmt: skip
def test_what_no_kernel_of_a_cache_does(
    spec: AttentionSpec, config: KernelConfig, what: str
) -> None:
    assert what in (why_illegal(spec, config, SMALLEST["sm_90"]) or "")


@pytest.mark.parametrize(("arch", "able"), [("sm_80", False), ("sm_89", True), ("gfx942", False)])
def test_native_widening_needs_the_instruction(arch: str, able: bool) -> None:
    spec = make_spec(direction="decode", kv_dtype="float8_e4m3")
    reason = why_illegal(spec, make_config(16, 64, widening="native"), SMALLEST[arch])
    assert (reason is None) == able
    assert able or "e4m3 instructions of sm_89" in (reason or "")
    ways = {config.widening for config in legal_configs(spec, SMALLEST[arch])}
    assert ways == ({"bits", "native"} if able else {"bits"})
    assert seed_configs(spec, SMALLEST[arch])[0].widening == ("native" if able else "bits")


@pytest.mark.parametrize("arch", ["sm_90", "sm_100", "sm_120"])
def test_a_combine_kernel_that_starts_early_touches_no_memory_before_it_waits(arch: str) -> None:
    decode = make_spec("bfloat16", 128, direction="decode")
    for spec in (decode, decode.for_direction("combine")):
        plain = default_config(spec)
        early = replace(plain, pdl=True)
        assert why_illegal(spec, early, SMALLEST[arch]) is None
        built, without = (build_ptx(render(spec, c), spec, c, arch).ptx for c in (early, plain))
        assert "griddepcontrol" not in without
        if spec.direction == "decode":
            assert built.count("griddepcontrol.launch_dependents;") == 1
        else:
            before, wait, behind = built.partition("griddepcontrol.wait;")
            assert wait
            assert not re.search(r"(ld|st|cp|atom)\S*\.global", before)
            assert "ld.global" in behind
            assert "st.global" in behind


def test_only_decodes_of_gpus_that_can_let_the_combine_kernel_start_early() -> None:
    decode = make_spec("bfloat16", 128, direction="decode")
    early = replace(default_config(decode), pdl=True)
    assert "needs sm_90" in str(why_illegal(decode, early, SMALLEST["sm_89"]))
    assert "needs sm_90" in str(why_illegal(decode, early, SMALLEST["gfx942"]))
    for direction in ("forward", "append"):
        spec = decode.for_direction(direction)
        early = replace(default_config(spec), pdl=True)
        assert "pdl is of decode" in str(why_illegal(spec, early, SMALLEST["sm_90"]))
    for spec in (decode, replace(decode, invariant=True)):
        searched = legal_configs(spec, SMALLEST["sm_90"], on_gpu=True)
        assert 4 <= sum(config.pdl for config in searched) < len(searched) / 2
    assert not any(config.pdl for config in legal_configs(decode, SMALLEST["sm_90"]))
