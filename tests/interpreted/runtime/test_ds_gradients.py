"""Gradients by dS in memory through public calls: which kernels run, their results and their bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from flashgen import settings
from flashgen.kernels.render import render
from flashgen.kernels.text import text_name
from flashgen.reference import gradients
from flashgen.reference.cases import CheckCase
from flashgen.runtime import Dispatcher, autograd
from flashgen.runtime.choice import Choice, by_spec
from flashgen.schedules.defaults import default_config
from flashgen.spec.problem import BUCKETS, Problem
from flashgen.spec.vocabulary import OF_DS, Direction
from tests.makers import make_spec
from tests.serving import leaves, record_directions

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

SPEC = make_spec("bfloat16", 64, "causal")
US: dict[Direction, float] = {
    "forward": 1.0, "backward_delta": 1.0, "backward_dkv": 20.0, "backward_dq": 20.0,
    "backward_ds": 1.0, "backward_dq_of_ds": 1.0,
}  # fmt: skip
PAIR = ["backward_dkv", "backward_dq"]


@pytest.fixture
def dispatcher(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Dispatcher:
    """Of a package whose table has ds faster than the pair."""
    (tmp_path / "kernels").mkdir()
    choices = []
    for direction, us in US.items():
        spec = SPEC.for_direction(direction)
        config = default_config(spec)
        file = tmp_path / "kernels" / f"{text_name(spec, config)}.py"
        file.write_text(render(spec, config).source)
        choices.append(
            Choice(
                spec=spec, bucket=BUCKETS[0], config=config, source="estimated", median_us=us
            )
        )  # fmt: skip
    monkeypatch.setenv("FLASHGEN_GPU", "nvidia_h200")
    monkeypatch.syspath_prepend(str(tmp_path.parent))
    found = Dispatcher(
        package=tmp_path.name,
        archs={"nvidia_h200": "sm_90"},
        choices={"nvidia_h200": by_spec(choices)},
    )
    autograd.served[tmp_path.name] = found.passes
    return found


def limited(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(settings, "workspace_bytes", lambda: size)


def test_gradients_have_the_same_bits_in_any_runs(
    dispatcher: Dispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = CheckCase(problem=Problem(batch=2, heads=2, kv_heads=1, seq_q=70, seq_k=300))
    inputs = gradients.make_inputs(SPEC, given, 3, "cpu")
    found: list[tuple[Tensor, ...]] = []
    launched = record_directions(monkeypatch)
    # Of 128 keys of two heads, of all keys of two and of four; and of the pair.
    for size, runs in ((140_000, 6), (200_000, 2), (400_000, 1), (0, 0)):
        limited(monkeypatch, size)
        x = leaves(inputs.q, inputs.k, inputs.v)
        o, lse = dispatcher.attention(*x, causal=True, return_lse=True)
        launched.clear()
        torch.autograd.backward((o, lse), (inputs.do, inputs.dlse))
        expected = runs * list(OF_DS) if runs else PAIR
        assert launched == ["backward_delta", *expected], size
        found.append(tuple(t.grad for t in x if t.grad is not None))
        dispatcher.calls.clear()
    for each in found[1:-1]:
        assert all(map(torch.equal, each, found[0]))
    assert gradients.judge("backward_fused", found[0], inputs).passed


def test_kept_calls_operators_and_checkpoints_have_the_same_bits(
    dispatcher: Dispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    limited(monkeypatch, 40_000)
    torch.manual_seed(0)
    q, k, v = leaves(*(torch.randn(1, 2, 70, 64, dtype=torch.bfloat16) for _ in range(3)))

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return dispatcher.attention(q, k, v, causal=True).float().square().sum()

    launched = record_directions(monkeypatch)
    by_operators = torch.compile(loss, backend="eager")
    found = [torch.autograd.grad(loss(q, k, v), (q, k, v)) for _ in range(3)]
    found.append(torch.autograd.grad(by_operators(q, k, v), (q, k, v)))
    recomputed = checkpoint(loss, q, k, v, use_reentrant=False)
    found.append(torch.autograd.grad(recomputed, (q, k, v)))
    assert launched.count("backward_ds") == len(found) * 2  # a run a head
    assert not set(launched) & set(PAIR)
    for each in found[1:]:
        assert all(map(torch.equal, each, found[0]))


@pytest.mark.parametrize(
    ("needs", "ran"), [("qkv", list(OF_DS)), ("qv", list(OF_DS)), ("q", PAIR[1:]), ("k", PAIR[:1])]
)
def test_dq_or_dk_and_dv_alone_take_a_kernel_of_the_pair(
    dispatcher: Dispatcher, monkeypatch: pytest.MonkeyPatch, needs: str, ran: list[str]
) -> None:
    x = {name: torch.randn(1, 1, 40, 64, dtype=torch.bfloat16) for name in "qkv"}
    for name in needs:
        x[name].requires_grad_()
    o = dispatcher.attention(*x.values(), causal=True)
    launched = record_directions(monkeypatch)
    o.sum().backward()
    assert launched == ["backward_delta", *ran]
