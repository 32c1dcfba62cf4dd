"""Caches of 8-bit keys and values against float64 over what they hold; what is written; mutants."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashgen.evaluate.check import cases_of
from flashgen.evaluate.check_cache import DecodeCase, judge, make_call
from flashgen.evaluate.inputs import make_decode
from flashgen.evaluate.sanitize import executed_cases
from flashgen.kernels import interpreter
from flashgen.kernels.launch import bind
from flashgen.kernels.launch_cache import Append, Decode
from flashgen.kernels.loader import load_kernel
from flashgen.kernels.render import render
from flashgen.reference import attention as reference
from flashgen.runtime.eager import attention as eager_attention
from flashgen.runtime.eager import cache as eager_cache
from flashgen.runtime.kv_cache import append
from flashgen.schedules.config import KernelConfig
from flashgen.schedules.defaults import default_config, default_spec
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.problem import Problem
from tests.makers import make_config, make_spec
from tests.mutants import broken
from tests.proving import alternating, mutant_passes, prove, sampled
from tests.serving import serve

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

CACHES: dict[str, dict[str, Any]] = {
    "fp8": {"kv_dtype": "float8_e4m3"},
    "int8": {"kv_dtype": "int8"},
    "fp8 by page": {"kv_dtype": "float8_e4m3", "paged": True, "kv_scales": "page"},
    "int8 by page": {"kv_dtype": "int8", "paged": True, "kv_scales": "page"},
}
EVERY_FEATURE: dict[str, Any] = {
    "window": True, "softcap": True, "alibi": True, "sink": True, "bias": "additive", "leftpad": True,
}  # fmt: skip


@pytest.mark.slow("kernels/test_pairs.py has each on fewer shapes")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", CACHES)
def test_each_alone(name: str, dtype: str, seed: int) -> None:
    prove(
        make_spec(dtype, 16, "causal", direction="decode", **CACHES[name]),
        make_config(16, 16),
        seed,
    )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_native_widening(dtype: str, seed: int) -> None:
    spec = make_spec(dtype, 40, direction="decode", **CACHES["fp8"], head_dim_v=24)
    prove(spec, make_config(16, 16, widening="native"), seed)


@pytest.mark.parametrize(("name", "feature"), alternating(["fp8", "int8 by page"], EVERY_FEATURE))
def test_with_a_feature(name: str, feature: str, seed: int) -> None:
    on = CACHES[name] | {feature: EVERY_FEATURE[feature]}
    case = DecodeCase(lengths=(37, 0, 16), capacity=40, seq_q=3, group=2, splits=3)
    prove(make_spec("float16", 16, direction="decode", **on), make_config(16, 16), seed, [case])


def test_all_at_once_by_the_default_kernel(seed: int) -> None:
    asked = make_spec(
        "bfloat16", 24, "causal", direction="decode", head_dim_v=40,
        **CACHES["fp8 by page"] | EVERY_FEATURE,
    )  # fmt: skip
    prove(default_spec(asked), default_config(asked), seed)
    rows = make_spec("float16", 16, direction="decode", **CACHES["int8"], indexed=True)
    prove(rows, make_config(16, 16), seed)


lengths = st.lists(st.integers(0, 70), min_size=1, max_size=3)


@settings(max_examples=8)
@given(
    lengths=lengths, seq_q=st.integers(1, 4), group=st.integers(1, 4), splits=st.integers(1, 4),
    page_bits=st.integers(0, 6), name=st.sampled_from(list(CACHES)), drawn=st.integers(0, 1 << 30),
)  # fmt: skip
def test_drawn_calls(
    lengths: list[int], seq_q: int, group: int, splits: int, page_bits: int, name: str, drawn: int
) -> None:
    case = DecodeCase(
        lengths=tuple(lengths), capacity=70, seq_q=seq_q, group=group, splits=splits,
        page_size=1 << page_bits, layout="sliced",
    )  # fmt: skip
    spec = make_spec("float16", 16, "causal", direction="decode", **CACHES[name])
    prove(spec, make_config(16, 16), drawn, [case])


@pytest.mark.parametrize(
    "rotary",
    ["none", pytest.param("halves", marks=pytest.mark.slow("make test proves a sample of it"))],
)
@pytest.mark.parametrize("name", CACHES)
def test_append_quantizes(name: str, rotary: Any, seed: int) -> None:
    """Without rotation to the bit."""
    dtype = "float16" if "int8" in name else "bfloat16"
    spec = make_spec(dtype, 40, direction="append", head_dim_v=24, rotary=rotary, **CACHES[name])
    prove(spec, make_config(16, 16, num_stages=1), seed)


def kernel_of(spec: AttentionSpec, config: KernelConfig, folder: Path) -> Any:
    rendered = render(spec, config)
    path = folder / f"{rendered.name}.py"
    path.write_text(rendered.source)
    return load_kernel(path, rendered.text_name, rendered.name)


@pytest.mark.parametrize("kv_dtype", ["float8_e4m3", "int8"])
def test_every_number_is_rounded_as_torch_rounds_it(kv_dtype: Any, tmp_path: Path) -> None:
    """All float16 numbers but infinities: every tie, steps below 2^-6, saturation, and NaN."""
    spec, config = (
        make_spec("float16", 64, direction="append", kv_dtype=kv_dtype),
        make_config(16, 16, num_stages=1),
    )
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.float16)
    every = every.where(~every.isinf(), 0.0).view(1, 1, -1, 64)
    dtype = torch.int8 if kv_dtype == "int8" else torch.float8_e4m3fn
    held = torch.zeros(every.shape, dtype=dtype)
    one = torch.ones(1)
    cache = eager_cache.Cache(
        k=held,
        v=held.clone(),
        lengths=torch.zeros(1, dtype=torch.int32),
        k_scale=one,
        v_scale=one * 3,
    )
    bind(kernel_of(spec, config, tmp_path), spec, config)(Append(k=every, v=every, cache=cache))
    for found, x in ((cache.k, every.float()), (cache.v, every.float() / 3)):
        assert torch.equal(found.view(torch.int8), eager_cache.quantized(x, dtype).view(torch.int8))
    assert float(cache.k.float().nan_to_num().max()) == eager_cache.LARGEST[dtype]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("widening", ["bits", "native"])
def test_every_element_is_read_as_it_is(dtype: str, widening: Any, tmp_path: Path) -> None:
    """Each query sees one key: O is its V, exactly, whatever the element; but NaN, of which the
    arithmetic on bits makes 480 or -480.
    """
    spec = make_spec(dtype, 16, "none", direction="decode", kv_dtype="float8_e4m3")
    config = make_config(16, 16, widening=widening)
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    v = codes.view(torch.float8_e4m3fn).view(16, 1, 1, 16)
    k = torch.zeros(16, 1, 1, 16).to(torch.float8_e4m3fn)
    cache = eager_cache.Cache(
        k=k,
        v=v,
        lengths=torch.ones(16, dtype=torch.int32),
        k_scale=torch.ones(1),
        v_scale=torch.ones(1),
    )
    q = torch.zeros(16, 1, 1, 16, dtype=getattr(torch, dtype))
    call = Decode(q=q, cache=cache, scale=1.0, sms=1, splits=1)
    parts = bind(kernel_of(spec, config, tmp_path), spec, config)(call)
    want = v.float()
    assert want.isnan().sum() == 2
    if widening == "bits":
        want = want.where(~want.isnan(), torch.where(codes >= 128, -480.0, 480.0).view(v.shape))
    torch.testing.assert_close(parts.o.float(), want, rtol=0.0, atol=0.0, equal_nan=True)


def test_the_interpreter_and_float8() -> None:
    """What flashgen/kernels/interpreter.py repairs, and what tells that a newer Triton needs it no more."""
    codes = np.arange(256, dtype=np.uint8)
    values = interpreter.widen_float8(codes)
    assert np.isnan(values[[127, 255]]).all()
    finite = codes[~np.isnan(values)]
    assert (interpreter.round_to_float8(values[finite]) == finite).all()
    ties = np.float32([0.0009765625, 0.0029296875, 1.0625, 1.1875, 500.0, -1e9])
    assert interpreter.widen_float8(interpreter.round_to_float8(ties)).tolist() == [
        0.0, 0.00390625, 1.0, 1.25, 448.0, -448.0,
    ]  # fmt: skip
    assert np.isnan(interpreter.widen_float8(interpreter.round_to_float8(np.float32([np.nan]))))


def of(direction: Any, name: str, **fields: Any) -> AttentionSpec:
    return make_spec("bfloat16", 16, "none", direction=direction, **CACHES[name], **fields)


TILE_SCALE = "tile_scale = tl.maximum(tl.max(v_scales, 0), 1.0e-30)"
MUTANTS = {
    "scale of K forgotten": (of("decode", "int8"), "scale_log2e *= tl.load(k_scale_ptr + kv_head * stride_k_scale_h)", "scale_log2e *= 0.02"),
    "scale of V forgotten": (of("decode", "int8"), "acc = [acc[n] * v_scale", "acc = [acc[n]"),
    "scale of the first head": (of("decode", "fp8"), "k_scale_ptr + kv_head * stride_k_scale_h", "k_scale_ptr"),
    "scale of V of the first head": (of("decode", "fp8"), "v_scale_ptr + kv_head * stride_v_scale_h", "v_scale_ptr"),
    "unit of K forgotten": (of("decode", "fp8"), "scale_log2e *= tl.load(k_scale_ptr + kv_head * stride_k_scale_h) * E4M3_UNIT", "scale_log2e *= tl.load(k_scale_ptr + kv_head * stride_k_scale_h)"),
    "unit of V forgotten": (of("decode", "fp8 by page"), "acc = [acc[n] * E4M3_UNIT", "acc = [acc[n]"),
    "scale of the first page": (of("decode", "int8 by page"), "k_scale_base + pages * stride_k_scale_p", "k_scale_base + 0 * pages"),
    "scale of V of the first page": (of("decode", "int8 by page"), "v_scale_base + pages * stride_v_scale_p", "v_scale_base + 0 * pages"),
    "scale of the first head of a page": (of("decode", "int8 by page"), "k_scale_ptr + kv_head.to(tl.int64) * stride_k_scale_h", "k_scale_ptr"),
    "P without the scales": (of("decode", "int8 by page"), "p *= (v_scales / tile_scale)[None, :]", "p *= 1.0"),
    "O without the scale of the tile": (of("decode", "int8 by page"), "acc[n] + tl.dot(p, v[n]) * tile_scale", "acc[n] + tl.dot(p, v[n])"),
    "row sum of scaled P": (of("decode", "int8 by page"), TILE_SCALE, TILE_SCALE + "; row_sum += tl.sum(p * (v_scales * 40.0 - 1.0)[None, :], 1)"),
    "no sign": (of("decode", "fp8"), "& E4M3_BITS", "& 16256"),
    "exponent by one": (of("decode", "fp8"), "<< 8) >> 1)", "<< 8) >> 2)"),
    "truncated": (of("append", "fp8"), "bits + ALMOST_HALF + ((bits >> 20) & 1)", "bits"),
    "ties away from zero": (of("append", "fp8"), "bits + ALMOST_HALF + ((bits >> 20) & 1)", "bits + 0x80000"),
    "small numbers as others": (of("append", "fp8"), "tl.where(magnitude < LEAST_NORMAL, small, normal)", "normal"),
    "no saturation": (of("append", "fp8"), "magnitude = tl.minimum(tl.abs(x), LARGEST)", "magnitude = tl.abs(x)"),
    "no saturation of int8": (of("append", "int8"), "tl.minimum(tl.maximum(x, -128.0), 127.0)", "x"),
    "int8 truncated": (of("append", "int8"), "((x + ROUNDER) - ROUNDER)", "x"),
    "written without the scale": (of("append", "int8"), "tl.div_rn(x.to(tl.float32), scale)", "x.to(tl.float32) * 50.0"),
    "written by the scale of another page": (of("append", "fp8 by page"), "pages * stride_scale_p", "0 * pages"),
    "written by the scale of another head": (of("append", "fp8 by page"), "v_scale_ptr + slot * stride_v_scale_h", "v_scale_ptr + 0 * slot"),
}  # fmt: skip
OF_TIES = ("ties away from zero", "small numbers as others")
"""Drawn keys seldom are ties, and are large beside 2^-6 of a scale: that test above has all numbers."""


@pytest.mark.parametrize("name", sampled(name for name in MUTANTS if name not in OF_TIES))
def test_mutant_is_caught(name: str) -> None:
    spec, line, broken = MUTANTS[name]
    config = make_config(16, 16, num_stages=2 if spec.direction == "decode" else 1)
    for cases in (cases_of, executed_cases):
        assert not mutant_passes(spec, config, line, broken, cases(spec, config))


@pytest.mark.parametrize("name", OF_TIES)
def test_mutant_of_ties_is_caught(name: str, tmp_path: Path) -> None:
    _, line, new = MUTANTS[name]
    spec, config = (
        make_spec("float16", 64, direction="append", kv_dtype="float8_e4m3"),
        make_config(16, 16, num_stages=1),
    )
    rendered = render(spec, config)
    path = tmp_path / f"{rendered.name}.py"
    path.write_text(broken(rendered.source, line, new))
    x = torch.linspace(0.0, 2.0, 65)[1:].half().view(1, 1, 1, 64)
    x[..., ::2] /= 512
    held = torch.zeros(1, 1, 1, 64).to(torch.float8_e4m3fn)
    cache = eager_cache.Cache(
        k=held,
        v=held.clone(),
        lengths=torch.zeros(1, dtype=torch.int32),
        k_scale=torch.ones(1),
        v_scale=torch.ones(1),
    )
    bind(load_kernel(path, rendered.text_name, rendered.name), spec, config)(
        Append(k=x, v=x, cache=cache)
    )
    wanted = eager_cache.quantized(x.float(), torch.float8_e4m3fn)
    assert not torch.equal(cache.k.view(torch.int8), wanted.view(torch.int8))


@pytest.mark.parametrize("name", CACHES)
def test_append_and_decode_of_the_dispatcher(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys are appended, and attended to with those before; on an H200 by its own widening."""
    spec = make_spec("float16", 16, "causal", direction="decode", **CACHES[name])
    case = DecodeCase(lengths=(0, 250, 511), capacity=512, seq_q=2, kv_heads=2, group=2)
    q, cache = make_call(spec, case, 3, "cpu")
    k, v = (x.transpose(1, 2) if spec.paged else x for x in (cache.k, cache.v))
    beside: dict[str, Any] = {
        "block_table": cache.block_table, "k_scale": cache.k_scale, "v_scale": cache.v_scale,
    }  # fmt: skip
    new = torch.randn(2, 3, 2, 1, 16, generator=torch.Generator().manual_seed(0)).half()
    dispatcher = serve(monkeypatch)
    append(k, v, *new, cache.lengths, **beside)
    cache.lengths.add_(1)
    o, lse = dispatcher.decode(q, k, v, lengths=cache.lengths, **beside, return_lse=True)
    verdict = judge(o, lse, Decode(q=q, cache=cache, scale=0.25, sms=132), spec)
    assert verdict.passed, verdict
    said = dispatcher.explain_decode(q, k, v, lengths=cache.lengths, **beside).selection
    assert said is not None
    assert ("native" in said.choice.kernel) == ("fp8" in name)
    monkeypatch.delenv("FLASHGEN_GPU")
    by_torch = dispatcher.decode(q, k, v, lengths=cache.lengths, **beside)
    torch.testing.assert_close(o, by_torch, rtol=5e-3, atol=5e-3)


@pytest.mark.parametrize("name", CACHES)
def test_what_is_timed_has_scales(name: str, tmp_path: Path) -> None:
    """The tuner's own inputs, dequantised, are near those that they are made of."""
    problem = Problem(batch=2, heads=4, kv_heads=2, seq_q=1, seq_k=70)
    spec = make_spec("float16", 16, "none", direction="decode", **CACHES[name])
    call = make_decode(spec, problem, 0, "cpu", sms=20)
    plain = make_decode(
        make_spec("float16", 16, "none", direction="decode"), problem, 0, "cpu", sms=20
    )
    for number in range(2):
        for found, x in zip(
            eager_cache.widened(call.cache, number, 70),
            eager_cache.sequence(plain.cache, number, 70),
            strict=True,
        ):
            torch.testing.assert_close(found, x.float(), rtol=0.07, atol=0.05)
    config = make_config(16, 16)
    parts = bind(kernel_of(spec, config, tmp_path), spec, config)(call)
    o = parts.o if parts.whole else reference.merge(parts.o, parts.lse)[0]
    expected, _ = eager_cache.cached_attention(call.q, call.cache, scale=call.scale, causal=False)
    torch.testing.assert_close(o.half(), expected, rtol=5e-3, atol=5e-3)


@pytest.mark.parametrize("size", [1e-9, 1e-30, 3e4])
def test_scales_of_vs_pages_are_beyond_float16(size: float, tmp_path: Path) -> None:
    """P in float16 takes them relative to the largest of a tile: alone 1e-9 would be 0, and 3e4 times 3 infinite."""
    spec = make_spec("float16", 16, "none", direction="decode", **CACHES["int8 by page"])
    case = DecodeCase(lengths=(70,), capacity=80, group=2, page_size=16)
    q, cache = make_call(spec, case, 3, "cpu")
    assert cache.v_scale is not None
    factors = torch.linspace(1.0, 3.0, len(cache.v_scale))[:, None]
    cache = dataclasses.replace(cache, v_scale=size * factors)
    call = Decode(q=q, cache=cache, scale=0.25, sms=1, splits=2)
    config = make_config(16, 32)
    parts = bind(kernel_of(spec, config, tmp_path), spec, config)(call)
    ((_, queries, k, v, own),) = eager_cache.sequences(q, cache)
    exact, _ = eager_attention.attention(
        queries.double(), k.double(), v.double(), scale=0.25, diagonal=None, features=own
    )
    found, _ = reference.merge(parts.o.double(), parts.lse.double())
    off = (found - exact).abs().max() / exact.abs().max()
    assert off < 2e-3, off
