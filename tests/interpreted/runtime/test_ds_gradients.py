"""Gradients by dS in memory through public calls: which kernels run, their results and their bits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from flashgen import settings
from flashgen.evaluate.check_attention import packed_case
from flashgen.inputs.features import Features
from flashgen.kernels.ds_runs import DsRun, DsSizes
from flashgen.kernels.render import render
from flashgen.kernels.text import text_name
from flashgen.reference import gradients
from flashgen.reference.cases import CheckCase
from flashgen.runtime import Dispatcher, autograd
from flashgen.runtime.choice import Choice, by_spec
from flashgen.runtime.varlen import attention_varlen
from flashgen.schedules.defaults import default_config
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.problem import BUCKETS, Problem
from flashgen.spec.vocabulary import OF_DS, Direction
from tests.makers import make_spec
from tests.serving import leaves, make_current, record_directions

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

SPEC = make_spec("bfloat16", 64, "causal")
FEATURES: dict[str, tuple[dict[str, bool], dict[str, Any]]] = {
    "window": ({"window": True}, {"window": (5, -1)}),
    "chunk, softcap": ({"chunk": True, "softcap": True}, {"chunk": 40, "softcap": 2.0}),
    "ALiBi, sinks": (
        {"alibi": True, "sink": True},
        {
            "slopes": torch.tensor([0.5, 0.1, 0.0, 0.3]),
            "sinks": torch.tensor([1.0, -1.0, 0.0, 3.0]),
        },
    ),
}
"""What a spec has, and Features."""
US: dict[Direction, float] = {
    "forward": 1.0, "backward_delta": 1.0, "backward_dkv": 20.0, "backward_dq": 20.0,
    "backward_ds": 1.0, "backward_dq_of_ds": 1.0,
}  # fmt: skip
PAIR = ["backward_dkv", "backward_dq"]


@pytest.fixture
def dispatcher(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Dispatcher:
    """Of a package whose table has ds faster than the pair."""
    return dispatcher_of(SPEC, monkeypatch, tmp_path)


def dispatcher_of(
    served: AttentionSpec, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> Dispatcher:
    """The same of another spec."""
    (folder / "kernels").mkdir()
    choices = []
    for direction, us in US.items():
        spec = served.for_direction(direction)
        config = default_config(spec)
        file = folder / "kernels" / f"{text_name(spec, config)}.py"
        file.write_text(render(spec, config).source)
        choices.append(
            Choice(
                spec=spec, bucket=BUCKETS[0], config=config, source="estimated", median_us=us
            )
        )  # fmt: skip
    monkeypatch.setenv("FLASHGEN_GPU", "nvidia_h200")
    monkeypatch.syspath_prepend(str(folder.parent))
    found = Dispatcher(
        package=folder.name,
        archs={"nvidia_h200": "sm_90"},
        choices={"nvidia_h200": by_spec(choices)},
    )
    autograd.served[folder.name] = found.passes
    return found


@pytest.mark.parametrize("name", FEATURES)
def test_gradients_with_features_have_the_same_bits_in_any_runs(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fields, of_call = FEATURES[name]
    spec = replace(SPEC, **fields)  # type: ignore[arg-type]  # flags of features
    dispatcher = dispatcher_of(spec, monkeypatch, tmp_path)
    given = CheckCase(problem=Problem(batch=1, heads=4, kv_heads=2, seq_q=453, seq_k=456))
    inputs = gradients.make_inputs(SPEC, given, 3, "cpu")
    inputs = replace(inputs, features=Features(**of_call))
    of = DsSizes.of(inputs.q, inputs.k, inputs.diagonal, inputs.features)
    parts = ((2, 128), (2, 256), (2, 456), (4, 456))
    limits = [of.run_bytes(DsRun(first_head=0, heads=heads, keys=keys)) for heads, keys in parts]
    if of.reach is not None:
        assert of.rows_of_a_key == 384  # fewer than there are
        assert of.ds_bytes(of.whole) < 4 * 512 * 512 * 2
    found: list[tuple[Tensor, ...]] = []
    launched = record_directions(monkeypatch)
    named = {"alibi_slopes" if each == "slopes" else each: x for each, x in of_call.items()}
    for size, runs in zip(limits, (8, 4, 2, 1), strict=True):
        limited(monkeypatch, size)
        x = leaves(inputs.q, inputs.k, inputs.v)
        o, lse = dispatcher.attention(*x, causal=True, return_lse=True, **named)
        launched.clear()
        torch.autograd.backward((o, lse), (inputs.do, inputs.dlse))
        assert launched == ["backward_delta", *(runs * list(OF_DS))], size
        found.append(tuple(t.grad for t in x if t.grad is not None))
        dispatcher.calls.clear()
    for each in found[1:]:
        assert all(map(torch.equal, each, found[0]))
    assert gradients.judge("backward_fused", found[0], inputs).passed


def test_packed_sequences_of_other_lengths_have_runs_of_their_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Kept calls of the same tensors too; a later step has other bounds."""
    spec = replace(SPEC, varlen=True, window=True)
    make_current(monkeypatch, dispatcher_of(spec, monkeypatch, tmp_path))
    limited(monkeypatch, 300_000)
    launched = record_directions(monkeypatch)
    for lengths, runs in (([300, 100], 4), ([200, 200], 2)):
        given = packed_case([(each, each) for each in lengths], heads=2, kv_heads=2)
        inputs = gradients.make_inputs(spec, given, 2, "cpu")
        packed = inputs.features.sequences
        assert packed is not None
        found = []
        for _ in range(4):
            q, k, v, do = (x[0].transpose(0, 1) for x in (inputs.q, inputs.k, inputs.v, inputs.do))
            x = leaves(q, k, v)
            bounds = packed.q_begins, packed.k_begins, packed.max_q, packed.max_k
            o, lse = attention_varlen(*x, *bounds, causal=True, window=(5, 0), return_lse=True)
            launched.clear()
            torch.autograd.backward((o, lse), (do, inputs.dlse[0]))
            assert launched == ["backward_delta", *(runs * list(OF_DS))]
            found.append(tuple(t.grad.transpose(0, 1)[None] for t in x if t.grad is not None))
        assert gradients.judge("backward_fused", found[0], inputs).passed
        for each in found[1:]:
            assert all(map(torch.equal, each, found[0]))


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
