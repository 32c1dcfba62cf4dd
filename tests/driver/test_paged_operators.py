"""The operators of engines: what they launch, and that a CUDA graph can capture a decode."""

from __future__ import annotations

import pytest
import torch

from flashgen.runtime.adapters.paged import paged_decode, paged_prefill
from tests.driver.cases import tensors
from tests.driver.events import Launch, Recording

PAGES, PAGE, DIM, HEADS, KV_HEADS = 64, 16, 128, 8, 2
OPTIONS = True, 0.1, 0, 0.0, None, None


def pools() -> tuple[torch.Tensor, torch.Tensor]:
    """K and V as vLLM lays them out: (blocks, kv_heads, block_size, 2 * dim)."""
    (cache,) = tensors(PAGES, KV_HEADS, PAGE, 2 * DIM, count=1)
    cache = cache.transpose(1, 2)
    return cache[..., :DIM], cache[..., DIM:]


def batch(sequences: int) -> tuple[torch.Tensor, torch.Tensor]:
    lengths = torch.full((sequences,), 100, dtype=torch.int32, device="cuda")
    return lengths, torch.zeros(sequences, 32, dtype=torch.int32, device="cuda")


@pytest.mark.parametrize("narrow", [False, True], ids=["16 bits", "e4m3"])
@pytest.mark.parametrize("queries", [1, 4], ids=["one token", "speculation"])
def test_a_decode_can_be_captured(recording: Recording, queries: int, narrow: bool) -> None:
    q, out, *_ = tensors(4 * queries, HEADS, DIM)
    k, v = pools()
    scales: tuple[torch.Tensor, ...] = ()
    if narrow:
        k, v = (torch.empty_like(x, dtype=torch.float8_e4m3fn) for x in (k, v))
        scales = tuple(torch.ones((), device="cuda") for _ in range(2))
    lengths, table = batch(4)
    for _ in range(2):
        paged_decode(out, q, k, v, lengths, table, queries, *OPTIONS, *scales)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        paged_decode(out, q, k, v, lengths, table, queries, *OPTIONS, *scales)
    launches = recording.of(Launch)
    assert {each.kernel.split("_")[0] for each in launches} <= {"decode", "combine"}
    assert [each.captured for each in launches[-2:]] == [True, True]
    assert all(each.broken == "" for each in launches)


def test_a_prefill_is_one_launch(recording: Recording) -> None:
    q, out, *_ = tensors(40, HEADS, DIM)
    k, v = pools()
    lengths, table = batch(2)
    starts = torch.tensor([0, 30, 40], dtype=torch.int32, device="cuda")
    paged_prefill(out, q, k, v, starts, lengths, table, 30, 100, *OPTIONS)
    (launch,) = recording.of(Launch)
    assert launch.kernel.startswith("fwd_")
    assert launch.broken == ""
