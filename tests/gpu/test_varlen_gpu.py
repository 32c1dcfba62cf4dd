"""Packed sequences and block masks on a GPU: right by the oracle; a CUDA graph with other bounds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from flashgen.evaluate.check import check_kernel
from flashgen.evaluate.check_attention import packed_case, packed_cases
from flashgen.inputs.features import Features
from flashgen.inputs.packed import from_bounds
from flashgen.kernels.render import render
from flashgen.reference import attention as reference
from flashgen.runtime.varlen import attention_varlen
from flashgen.schedules.space import seed_configs
from tests.makers import make_spec

RAGGED = [(300, 300), (0, 5), (7, 0), (1, 700), (0, 0), (129, 1000), (1000, 129)]


@pytest.mark.parametrize(
    "features",
    [{}, {"window": True, "alibi": True}, {"softcap": True, "sink": True}, {"dropout": True}],
    ids=str,
)
@pytest.mark.parametrize("direction", ["forward", "backward_dkv", "backward_dq", "backward_fused"])
@pytest.mark.parametrize("mask", ["none", "causal"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_kernels_are_right(
    dtype: str, mask: str, direction: Any, features: dict[str, Any], gpu: Any
) -> None:
    spec = make_spec(dtype, 128, mask, varlen=True, **features).for_direction(direction)
    for config in seed_configs(spec, gpu)[:2]:
        cases = [
            *packed_cases(spec, config),
            packed_case(RAGGED, heads=8, kv_heads=2, index="int64"),
            packed_case(RAGGED, heads=2, kv_heads=2, spare=(3, 70), tail=(300, 2)),
        ]
        found = check_kernel(render(spec, config), spec, config, device="cuda:0", cases=cases)
        assert found.passed, (config.label, found)


@pytest.mark.parametrize("page_size", [1, 16, 256])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_pages_are_right(head_dim: int, page_size: int, gpu: Any) -> None:
    spec = replace(make_spec("bfloat16", head_dim, "causal", varlen=True), paged=True)
    for config in seed_configs(spec, gpu)[:2]:
        case = packed_case(RAGGED, heads=8, kv_heads=2, page_size=page_size)
        found = check_kernel(render(spec, config), spec, config, device="cuda:0", cases=[case])
        assert found.passed, (config.label, found)


def test_a_graph_is_replayed_with_other_bounds() -> None:
    places = 4096
    q, k, v = (torch.randn(places, 8, 128, device="cuda").bfloat16() for _ in range(3))
    cu = torch.tensor([0, 1000, 4096], dtype=torch.int32, device="cuda")
    attention_varlen(q, k, v, cu, cu, places, places, causal=True)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, lse = attention_varlen(q, k, v, cu, cu, places, places, causal=True, return_lse=True)
    for bounds in ([0, 1, 4096], [0, 2048, 4000], [0, 0, 0]):
        cu.copy_(torch.tensor(bounds, dtype=torch.int32))
        graph.replay()
        torch.cuda.synchronize()
        heads_first = [x.transpose(0, 1)[None] for x in (q, k, v)]
        verdict = reference.judge(
            o.transpose(0, 1)[None], lse[None], *heads_first, scale=128**-0.5, diagonal=0,
            features=Features(sequences=from_bounds(cu, cu, places, places)),
        )  # fmt: skip
        assert verdict.passed, (bounds, verdict)


@pytest.mark.parametrize("direction", ["forward", "backward_dkv", "backward_dq", "backward_fused"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_block_masks_are_right(dtype: str, direction: Any, gpu: Any) -> None:
    spec = make_spec(dtype, 128, block_mask=True).for_direction(direction)
    for config in seed_configs(spec, gpu)[:3]:
        found = check_kernel(render(spec, config), spec, config, device="cuda:0")
        assert found.passed, (config.label, found)
