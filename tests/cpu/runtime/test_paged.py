"""The operators of engines, and what is compiled before an engine serves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flashgen.runtime.adapters.paged import warmups

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
    assert cases() == one_and_several + prefills
    assert cases(narrow=True)[:2] == one_and_several
    assert {n for n, *_ in cases(narrow=True)} == {1, 4, 8, 17}  # prompts are decodes, by rows
    assert {n for n, *_ in cases(queries=6)} == {0, 1, 4, 6}
    assert {x[2:] for x in cases(head_dim=72) if x[0]} == {
        (1, 0, False), (1, 0, True), (2, 0, False), (2, 0, True),
    }  # fmt: skip
