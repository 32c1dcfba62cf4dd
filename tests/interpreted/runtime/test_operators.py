"""The registered operators with kernels: opcheck, compiling, exporting; the eager road beside them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flashgen.runtime import Dispatcher, custom_ops
from tests.operators_contract import OperatorsContract, assert_same, draw, gradients
from tests.serving import record_directions, serve

OPTIONS: dict[str, Any] = {
    "precision": "tf32",
    "scale": -0.3,
    "causal": "top_left",
    "alibi_slopes": torch.tensor([0.5, 0.1]),
    "bias": torch.rand(20, 30, generator=torch.Generator().manual_seed(3)) > 0.3,
    "dropout_p": 0.5,
    "window": (4, 7),
    "softcap": 0.7,
    "sinks": torch.tensor([0.5, -0.5]),
}

pytestmark = pytest.mark.filterwarnings("ignore")


class TestWithKernels(OperatorsContract):
    layouts = ("bshd", "every_other")  # tests/cpu has the others, without kernels

    @pytest.fixture
    def dispatcher(self, monkeypatch: pytest.MonkeyPatch) -> Dispatcher:
        return serve(monkeypatch)

    @pytest.mark.slow("3 s; tests/cpu has it without kernels")
    def test_packed_sequences_are_one_graph_of_any_lengths(self, dispatcher: Dispatcher) -> None:
        super().test_packed_sequences_are_one_graph_of_any_lengths(dispatcher)

    @pytest.mark.slow("Inductor compiles C++: a minute")
    def test_compiled_by_inductor(self, dispatcher: Dispatcher) -> None:
        super().test_compiled_by_inductor(dispatcher)

    @pytest.mark.parametrize("option", OPTIONS)
    def test_every_option_reaches_the_kernels_through_a_graph(
        self, dispatcher: Dispatcher, option: str
    ) -> None:
        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return dispatcher.attention(q, k, v, **{option: OPTIONS[option]})  # type: ignore[call-overload,no-any-return]

        outcomes = []
        for run in (torch.compile(call, fullgraph=True, backend="eager"), call):
            torch.manual_seed(1)
            outcomes.append(gradients(run, *draw()))
        assert_same(*outcomes)
        plain = gradients(dispatcher.attention, *draw())
        assert not any(torch.equal(a, b) for a, b in zip(outcomes[0], plain, strict=True))

    def test_eager_calls_spare_themselves_the_operators(
        self, dispatcher: Dispatcher, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def called(*_: object) -> None:
            raise AssertionError("an eager call went through torch.library")

        for name in ("attention_forward", "attention_backward"):
            monkeypatch.setattr(custom_ops, name, called)
        q, k, v = draw()
        dispatcher.attention(q, k, v)
        gradients(dispatcher.attention, q, k, v)
        gradients(lambda *x: dispatcher.attention(*x, causal=True, dropout_p=0.5), q, k, v)
        with torch.autocast("cpu", torch.bfloat16):
            dispatcher.attention(q, k, v)
        compiled = torch.compile(dispatcher.attention, backend="eager")
        with pytest.raises(AssertionError, match="went through"):
            compiled(q, k, v)

    def test_kernels_run_within_a_graph(
        self, dispatcher: Dispatcher, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        launched = record_directions(monkeypatch)
        compiled = torch.compile(dispatcher.attention, fullgraph=True, backend="aot_eager")
        gradients(compiled, *draw())
        assert launched == ["forward", "backward_delta", "backward_dkv", "backward_dq"]
