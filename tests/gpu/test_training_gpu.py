"""Training on a GPU: the operators' contract, gradients against float64, dropout in a CUDA graph."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from flashgen import gradients
from flashgen.reference import Case
from flashgen.runtime import Dispatcher
from flashgen.spec import AttentionSpec, Problem
from generated.table import ARCHS, CHOICES, DEFAULTS
from tests.makers import make_spec
from tests.operators_contract import OperatorsContract
from tests.serving import leaves

pytestmark = pytest.mark.gpu


@pytest.fixture
def shipped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Dispatcher:
    """Serves as the GPU that is there."""
    monkeypatch.delenv("FLASHGEN_GPU", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return Dispatcher(package="generated", archs=ARCHS, choices=CHOICES, defaults=DEFAULTS)


@pytest.mark.filterwarnings("ignore")
class TestOnAGpu(OperatorsContract):
    device = "cuda"

    @pytest.fixture
    def dispatcher(self, shipped: Dispatcher) -> Dispatcher:
        return shipped


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("mask", ["none", "causal"])
@pytest.mark.parametrize("features", [{}, {"bias": "additive"}, {"alibi": True}])
def test_gradients_are_right_to_the_floor(
    shipped: Dispatcher, head_dim: int, mask: str, features: dict[str, object]
) -> None:
    spec: AttentionSpec = make_spec("bfloat16", head_dim, mask, **features)
    problem = Problem(batch=2, heads=4, kv_heads=2, seq_q=300, seq_k=420)
    inputs = gradients.make_inputs(spec, Case(problem=problem, layout="bshd"), 1, "cuda")
    x = leaves(inputs.q, inputs.k, inputs.v)
    o, lse = shipped.attention(
        *x,
        causal=spec.causal,
        bias=inputs.features.bias,
        alibi_slopes=inputs.features.slopes,
        return_lse=True,
    )
    torch.autograd.backward((o, lse), (inputs.do, inputs.dlse))
    found = tuple(t.grad for t in x if t.grad is not None)
    assert gradients.judge("backward_fused", found, inputs).passed


def test_each_replay_of_a_graph_drops_other_elements(shipped: Dispatcher) -> None:
    q, k, v = (torch.randn(1, 2, 128, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    for _ in range(2):  # compiles, outside the capture
        shipped.attention(q, k, v, dropout_p=0.5)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = shipped.attention(q, k, v, dropout_p=0.5)
    outputs = []
    for seed in (1, 1, 2):
        torch.cuda.manual_seed(seed)
        for _ in range(2):
            graph.replay()
            outputs.append(o.clone())
    assert torch.equal(outputs[0], outputs[2])
    assert torch.equal(outputs[1], outputs[3])
    assert not torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[4])
