"""Training on a GPU: the operators' contract, gradients against float64, memory, and CUDA graphs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flashgen.evaluate import check
from flashgen.evaluate.check_attention import tile_cases
from flashgen.kernels.launch import device_gpu
from flashgen.kernels.render import render
from flashgen.reference import gradients
from flashgen.reference.cases import CheckCase
from flashgen.runtime import Dispatcher
from flashgen.schedules.legality import why_illegal
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.problem import Problem
from flashgen.spec.vocabulary import Direction
from tests.makers import make_config, make_spec
from tests.nasty_cases import nasty_cases
from tests.operators_contract import OperatorsContract
from tests.serving import SHIPPED, leaves

pytestmark = pytest.mark.gpu


@pytest.fixture
def shipped(monkeypatch: pytest.MonkeyPatch) -> Dispatcher:
    """Serves as the GPU that is there."""
    monkeypatch.delenv("FLASHGEN_GPU", raising=False)
    return Dispatcher(package="generated", archs=SHIPPED.archs, choices=SHIPPED.choices)


@pytest.mark.filterwarnings("ignore")
class TestOnAGpu(OperatorsContract):
    device = "cuda"

    @pytest.fixture
    def dispatcher(self, shipped: Dispatcher) -> Dispatcher:
        return shipped


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("mask", ["none", "causal"])
@pytest.mark.parametrize(
    "features",
    [
        {}, {"bias": "additive"}, {"alibi": True}, {"window": True}, {"softcap": True},
        {"sink": True}, {"window": True, "softcap": True, "sink": True, "bias": "additive"},
    ],
)  # fmt: skip
def test_gradients_are_right_to_the_floor(
    shipped: Dispatcher, head_dim: int, mask: str, features: dict[str, object]
) -> None:
    spec: AttentionSpec = make_spec("bfloat16", head_dim, mask, **features)
    problem = Problem(batch=2, heads=4, kv_heads=2, seq_q=300, seq_k=420)
    inputs = gradients.make_inputs(spec, CheckCase(problem=problem, layout="bshd"), 1, "cuda")
    x = leaves(inputs.q, inputs.k, inputs.v)
    o, lse = shipped.attention(
        *x,
        causal=spec.causal,
        bias=inputs.features.bias,
        alibi_slopes=inputs.features.slopes,
        window=inputs.features.window,
        softcap=inputs.features.softcap,
        sinks=inputs.features.sinks,
        return_lse=True,
    )
    torch.autograd.backward((o, lse), (inputs.do, inputs.dlse))
    found = tuple(t.grad for t in x if t.grad is not None)
    assert gradients.judge("backward_fused", found, inputs).passed


@pytest.mark.parametrize("mask", ["none", "causal"])
@pytest.mark.parametrize("direction", ["backward_dkv", "backward_dq", "backward_fused"])
def test_s_ahead_is_right(direction: Direction, mask: str) -> None:
    """By descriptor, where the GPU has a TMA unit, and with the products under way that it is for."""
    spec = make_spec("bfloat16", 64, mask).for_direction(direction)
    owned = (128, 64) if direction == "backward_dq" else (64, 128)
    config = make_config(*owned, num_warps=8, schedule="s_ahead", loads="descriptor")
    if (reason := why_illegal(spec, config, device_gpu())) is not None:
        pytest.skip(reason)
    result = check.check_kernel(render(spec, config), spec, config, device="cuda")
    assert result.passed, result


@pytest.mark.parametrize("mask", ["none", "causal"])
@pytest.mark.parametrize("loads", ["pointer", "descriptor"])
@pytest.mark.parametrize(
    "direction", ["backward_delta", "backward_dkv", "backward_dq", "backward_fused"]
)
def test_every_backward_kernel(direction: Direction, loads: str, mask: str) -> None:
    """The fused one above all: only on a GPU do its programs add to dQ at the same time."""
    spec = make_spec("bfloat16", 64, mask).for_direction(direction)
    delta = direction == "backward_delta"
    config = make_config(64, 16 if delta else 64, num_stages=1 if delta else 2, loads=loads)
    reason = why_illegal(spec, config, device_gpu())
    if reason is not None:
        pytest.skip(reason)
    cases = (*tile_cases(spec, config), *nasty_cases(config.br, config.bc))
    result = check.check_kernel(
        render(spec, config), spec, config, device="cuda", seed=1, cases=cases
    )
    assert result.where == "gpu"
    assert result.passed, result.detail


def draw(seq: int, heads: int = 2, dim: int = 64) -> tuple[Tensor, ...]:
    torch.manual_seed(seq)
    shape = (1, heads, seq, dim)
    return tuple(torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in "qkv")


def test_gradients_are_the_same_bits_each_time(shipped: Dispatcher) -> None:
    def once() -> tuple[Tensor, ...]:
        x = leaves(*draw(2000, heads=8))
        return torch.autograd.grad(shipped.attention(*x, causal=True).square().sum(), x)

    first = once()
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(once(), first, strict=True))


def test_the_peak_of_memory_is_linear_in_the_length(shipped: Dispatcher) -> None:
    def peak(seq: int) -> int:
        x, do = leaves(*draw(seq)), draw(seq)[0]
        for _ in range(2):  # the first one compiles
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            torch.autograd.grad(shipped.attention(*x, causal=True), x, do)
            torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    assert peak(16384) <= 1.05 * 8 * peak(2048)


def test_a_graph_of_forward_and_backward_trains_as_eager_does(shipped: Dispatcher) -> None:
    x, do = leaves(*draw(256)), draw(256)[0]

    def step() -> tuple[Tensor, ...]:
        o = shipped.attention(*x, causal=True, dropout_p=0.3)
        return (o, *torch.autograd.grad(o, x, do))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # compiles, outside the capture
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = step()
    for seed in (3, 4):
        torch.cuda.manual_seed(seed)
        eager = [t.clone() for t in step()]
        torch.cuda.manual_seed(seed)
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(replayed, eager, strict=True))


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
