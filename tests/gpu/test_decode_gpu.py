"""decode() and append() on a GPU: right by the oracle, and replayed by a CUDA graph with other lengths."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from flashgen.evaluate.check import check_kernel
from flashgen.evaluate.check_cache import DecodeCase, judge, make_call
from flashgen.kernels.launch import bind
from flashgen.kernels.launch_cache import Combine, Decode
from flashgen.kernels.loader import load_text
from flashgen.kernels.plan import Plan
from flashgen.kernels.render import render
from flashgen.runtime.eager import cache as eager_cache
from flashgen.schedules.config import KernelConfig
from flashgen.schedules.defaults import default_config
from flashgen.schedules.legality import why_illegal
from flashgen.schedules.space import seed_configs
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.gpu import Gpu
from generated.dispatcher import decode
from tests.makers import make_spec
from tests.nasty_cases import nasty_decode_cases


# One kernel a test: Triton compiles it for up to four kinds of arguments, and 15 processes that
# compile at once take several times as long as one. A test of several kernels met its timeout.
def seed_config(spec: AttentionSpec, gpu: Gpu, number: int) -> KernelConfig:
    """The seed of that number. Skips where there are fewer."""
    seeds = seed_configs(spec, gpu)
    if number >= len(seeds):
        pytest.skip(f"{spec.name} has {len(seeds)} seeds")
    return seeds[number]


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("mask", ["none", "causal"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_kernels_are_right(
    dtype: str, head_dim: int, mask: str, paged: bool, number: int, gpu: Gpu
) -> None:
    spec = make_spec(dtype, head_dim, mask, direction="decode", paged=paged)
    config = seed_config(spec, gpu, number)
    cases = list(nasty_decode_cases(spec, config))
    found = check_kernel(render(spec, config), spec, config, device="cuda:0", cases=cases)
    assert found.passed, (config.label, found)


BESIDE: dict[str, dict[str, Any]] = {
    "window, cap, sink": {"window": True, "softcap": True, "sink": True},
    "bias, slopes": {"bias": "additive", "alibi": True},
    "mask, rows, pads": {"bias": "boolean", "indexed": True, "leftpad": True},
    "fp8": {"kv_dtype": "float8_e4m3"},
    "int8 by page": {"kv_dtype": "int8", "paged": True, "kv_scales": "page"},
    "fp8 by page, window": {
        "kv_dtype": "float8_e4m3", "paged": True, "kv_scales": "page", "window": True,
    },
}  # fmt: skip


@pytest.mark.parametrize("number", range(2))
@pytest.mark.parametrize("head_dim", [128, 512])
@pytest.mark.parametrize("name", BESIDE)
def test_features_and_narrow_caches_are_right(
    name: str, head_dim: int, number: int, gpu: Gpu
) -> None:
    spec = make_spec("bfloat16", head_dim, "causal", direction="decode", **BESIDE[name])
    config = seed_config(spec, gpu, number)
    cases = list(nasty_decode_cases(spec, config))
    found = check_kernel(render(spec, config), spec, config, device="cuda:0", cases=cases)
    assert found.passed, (config.label, found)


@pytest.mark.parametrize("head_dim", [128, 512])
@pytest.mark.parametrize("name", [name for name in BESIDE if "kv_dtype" in BESIDE[name]])
def test_append_to_narrow_caches_is_right(name: str, head_dim: int) -> None:
    spec = make_spec("bfloat16", head_dim, "causal", direction="decode", **BESIDE[name])
    append = spec.for_direction("append")
    config = default_config(append)
    found = check_kernel(render(append, config), append, config, device="cuda:0")
    assert found.passed, (config.label, found)


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256, 512])
@pytest.mark.parametrize("mask", ["none", "causal"])
def test_fp8_operands_and_wide_heads_are_right(
    mask: str, head_dim: int, fp8: bool, number: int, gpu: Gpu
) -> None:
    if fp8 and not (gpu.is_nvidia and gpu.capability >= 89):
        pytest.skip("no products of e4m3 here")
    spec = make_spec("bfloat16", head_dim, mask, fp8=fp8)
    config = seed_config(spec, gpu, number)
    found = check_kernel(render(spec, config), spec, config, device="cuda:0")
    assert found.passed, (config.label, found)


@pytest.mark.parametrize("rotary", ["none", "halves", "interleaved"])
@pytest.mark.parametrize("paged", [False, True])
def test_combine_and_append_are_right(paged: bool, rotary: Any) -> None:
    append = make_spec("bfloat16", 128, direction="append", paged=paged, rotary=rotary)
    for spec in (append, make_spec("bfloat16", 128, direction="combine")):
        config = default_config(spec)
        found = check_kernel(render(spec, config), spec, config, device="cuda:0")
        assert found.passed, (config.label, found)


@pytest.mark.parametrize("batch", [1, 16])
@pytest.mark.parametrize("in_graph", [False, True])
def test_a_combine_kernel_that_starts_early_waits_for_its_parts(
    in_graph: bool, batch: int, gpu: Gpu
) -> None:
    """Each time other values are in the memory of the parts: bits of before would be seen."""
    case = DecodeCase(lengths=(4096,) * batch, capacity=4096, kv_heads=8, group=4, splits=4)
    spec = make_spec("bfloat16", 128, "none", direction="decode")
    merging = spec.for_direction("combine")
    config, of_merging = seed_config(spec, gpu, 0), default_config(merging)
    if why_illegal(spec, replace(config, pdl=True), gpu) is not None:
        pytest.skip("no programmatic dependent launch here")
    q, cache = make_call(spec, case, 1, "cuda:0")
    queries = torch.stack([q * (1 + n / 8) for n in range(8)])
    combine = bind(load_text(render(merging, of_merging)), merging, of_merging)
    found: list[list[torch.Tensor]] = []

    def results(plan: Plan) -> list[torch.Tensor]:
        calls = (
            Decode(q=q, cache=cache, scale=128**-0.5, sms=gpu.sms, splits=4)
            for _ in range(10)
            for q in queries
        )
        return [combine(Combine(parts=plan(call), q=call.q))[0] for call in calls]

    for pdl in (False, True):
        each = replace(config, pdl=pdl)
        plan = bind(load_text(render(spec, each)), spec, each)
        made = results(plan)
        if in_graph:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                made = results(plan)
            graph.replay()
        torch.cuda.synchronize()
        found.append(made)
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("batch", [1, 64])
def test_a_graph_is_replayed_with_other_lengths(batch: int, paged: bool) -> None:
    case = DecodeCase(lengths=(4096,) * batch, capacity=4096, kv_heads=8, group=4)
    spec = make_spec("bfloat16", 128, "none", direction="decode", paged=paged)
    q, cache = make_call(spec, case, 1, "cuda:0")
    k, v = (x.transpose(1, 2) if paged else x for x in (cache.k, cache.v))
    arguments: dict[str, Any] = {"lengths": cache.lengths, "block_table": cache.block_table}
    decode(q, k, v, **arguments)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, lse = decode(q, k, v, **arguments, return_lse=True)
    for lengths in (range(4096, 4096 - batch, -1), range(batch), [777] * batch):
        cache.lengths.copy_(torch.tensor(list(lengths), dtype=torch.int32))
        graph.replay()
        torch.cuda.synchronize()
        verdict = judge(o, lse, Decode(q=q, cache=cache, scale=128**-0.5, sms=1), spec)
        assert verdict.passed, (list(lengths)[:3], verdict)
    expected, _ = eager_cache.cached_attention(q, cache, scale=128**-0.5, causal=False)
    torch.testing.assert_close(o, expected, rtol=2e-2, atol=2e-2)
