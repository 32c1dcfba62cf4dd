"""The operators of engines, and what is compiled before an engine serves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from flashgen.inputs.cache import Cache
from flashgen.runtime.adapters import paged
from flashgen.runtime.adapters.paged import (
    PagedBatch,
    PagedLayer,
    Warmup,
    paged_decode,
    prompts_of,
    warm_up,
    warmups,
)
from flashgen.runtime.decode import kv_fields
from tests.launches import Written, dispatcher, served
from tests.serving import make_current

PAGE, DIM, HEADS, KV_HEADS = 16, 32, 4, 2


@pytest.mark.slow("torch.compile and opcheck: 20 s")
def test_torch_compile_keeps_the_operators_whole() -> None:
    table = torch.arange(4, dtype=torch.int32).view(2, 2)
    pool = torch.randn(4, PAGE, KV_HEADS, DIM)
    q, lengths = torch.randn(2, HEADS, DIM), torch.tensor([20, 31], dtype=torch.int32)
    starts = torch.tensor([0, 1, 2], dtype=torch.int32)
    options = True, 0.2, 0, 0.0, None, None
    calls = {
        torch.ops.flashgen.paged_decode: (pool, pool, lengths, table, 1, *options),
        torch.ops.flashgen.paged_prefill: (pool, pool, starts, lengths, table, 1, 32, *options),
    }
    for operator, arguments in calls.items():
        torch.library.opcheck(operator, (torch.empty_like(q), q, *arguments))
        nodes: list[str] = []

        def record(graph: Any, _: Any, nodes: list[str] = nodes) -> Any:
            nodes += [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
            return graph

        def step(q: Tensor, operator: Any = operator, arguments: Any = arguments) -> Tensor:
            out = torch.empty_like(q)
            operator(out, q, *arguments)
            return out + 1

        own = step(q)
        torch.testing.assert_close(torch.compile(step, backend=record, fullgraph=True)(q), own)
        assert sum(str(operator) in node for node in nodes) == 1


def cases(**changes: Any) -> list[tuple[int, int, int, int, bool]]:
    asked = {"group": 4, "head_dim": 128, "capacity": 3000, "queries": 1, "narrow": False} | changes
    return [(x.queries, x.splits, x.sequences, x.max_k, x.fused) for x in warmups(**asked)]


def test_what_an_engine_warms_up() -> None:
    one_and_several = [(1, 1, 1, 0, False), (1, 2, 1, 0, False)]
    prefills = [(0, 0, behind, max_k, False) for max_k in (1, 1024) for behind in (0, 1)]
    assert cases() == cases(capacity=1024) == one_and_several + prefills
    assert cases(narrow=True)[:2] == one_and_several
    assert {n for n, *_ in cases(narrow=True)} == {1, 4, 8, 17}  # prompts are decodes, by rows
    assert {n for n, *_ in cases(queries=6)} == {0, 1, 4, 6}
    assert {x[2:] for x in cases(head_dim=72) if x[0]} == {
        (1, 0, False), (1, 0, True), (2, 0, False), (2, 0, True),
    }  # fmt: skip


def test_a_warm_up_launches_what_its_case_says(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Any, ...]] = []
    for name in ("paged_decode", "paged_prefill"):

        def record(out: Tensor, q: Tensor, *x: Any, n: str = name, **_: Any) -> None:
            seen.append((n, tuple(q.shape), q.stride(0), x))

        monkeypatch.setattr(paged, name, record)
    pools = (torch.zeros(2, PAGE, KV_HEADS, DIM),) * 2
    fused = Warmup(sequences=2, queries=3, splits=2, fused=True)
    for case in (fused, Warmup(sequences=1, max_k=1024)):
        warm_up(
            case, PagedLayer(scale=0.2), (HEADS, KV_HEADS), torch.bfloat16, pools, 4, causal=False
        )
    (name, shape, stride, given), before, (*behind, rest) = seen
    assert (name, shape, stride) == ("paged_decode", (6, HEADS, DIM), (HEADS + 2 * KV_HEADS) * DIM)
    assert (given[3].shape, given[4:6], given[13]) == ((2, 4), (3, False), 2)
    assert before[:2] == ("paged_decode", (1, HEADS, DIM))
    assert behind == ["paged_prefill", (1, HEADS, DIM), HEADS * DIM]
    assert rest[5:8] == (1, 1024, False)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Written]:
    with served(monkeypatch) as made:
        make_current(monkeypatch, dispatcher(monkeypatch))
        yield made


def test_invariance_and_splits_are_those_of_each_call(driver: Written) -> None:
    q = torch.zeros(2, HEADS, 64, dtype=torch.bfloat16)
    pool = torch.zeros(8, PAGE, KV_HEADS, 64, dtype=torch.bfloat16)
    lengths, table = torch.zeros(2, dtype=torch.int32), torch.zeros(2, 64, dtype=torch.int32)

    def launched(**options: Any) -> list[tuple[Any, ...]]:
        before = len(driver.launches)
        paged_decode(
            torch.empty_like(q), q, pool, pool, lengths, table, 1, True, 0.125, 0, 0.0, None, None,
            **options,
        )  # fmt: skip
        return [(function[0], programs) for function, _, programs, _ in driver.launches[before:]]

    kept = [launched() for _ in range(4)]
    assert kept == [kept[0]] * 4
    assert "_inv_" in launched(invariant=True)[0][0]
    assert [len(launched(splits=splits)) for splits in (1, 2)] == [1, 2]
    of_three, of_two = launched(splits=3)[0][1], launched(splits=2)[0][1]
    assert 2 * of_three[0] == 3 * of_two[0]


def test_prompts_are_aligned_as_all_others() -> None:
    lengths, table = torch.arange(6, dtype=torch.int32), torch.zeros(6, 3, dtype=torch.int32)
    found = prompts_of([7, 9, 9, 12], 2, lengths, table)
    assert [(x.begin, x.end, int(x.lengths)) for x in found] == [(0, 2, 2), (2, 5, 4)]
    assert not any(x.data_ptr() % 16 for prompt in found for x in (prompt.lengths, prompt.table))


def test_lengths_of_padding_are_no_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    longest, varlen = [], paged.attention_varlen

    def prefilled(*x: Any, **options: Any) -> Tensor:
        longest.append(x[5:7])
        return varlen(*x, **options)

    monkeypatch.setattr(paged, "attention_varlen", prefilled)
    q, pool = torch.randn(4, HEADS, DIM), torch.randn(4, PAGE, KV_HEADS, DIM)
    whole = {
        "decodes": 1, "queries": 1, "prefills": 1, "max_q": 3, "max_k": 20, "tokens": 4,
        "starts": torch.tensor([0, 3], dtype=torch.int32),
    }  # fmt: skip
    lengths = torch.tensor([20, 9, 7, 7], dtype=torch.int32)
    table = torch.tensor([[0, 1], [2, 3], [0, 0], [0, 0]], dtype=torch.int32)
    found = []
    for rows in (2, 4):
        found.append(torch.empty_like(q))
        batch = PagedBatch(**whole, lengths=lengths[:rows], table=table[:rows])
        PagedLayer(scale=0.2).attend(found[-1], q, pool, pool, batch)
    assert torch.equal(*found)
    assert longest == [(3, 20)] * 2


def test_scales_of_pages_and_of_heads_are_two_specs() -> None:
    pool, lengths = torch.zeros(8, 2, 16, 32, dtype=torch.int8), torch.zeros(2, dtype=torch.int32)
    for shape, kind in (((8, 2), "page"), ((2,), "head")):
        cache = Cache(k=pool, v=pool, lengths=lengths, k_scale=torch.ones(shape))
        assert kv_fields(cache) == {"kv_dtype": "int8", "kv_scales": kind}
