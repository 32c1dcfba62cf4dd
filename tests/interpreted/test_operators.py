"""The registered operators with kernels: opcheck, compiling, exporting; the eager road beside them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from flashgen.runtime import Dispatcher
from tests.operators_contract import OperatorsContract, draw, gradients
from tests.serving import record_directions, serve

pytestmark = pytest.mark.filterwarnings("ignore")


class TestWithKernels(OperatorsContract):
    layouts = ("bhsd", "bshd", "every_other")

    @pytest.fixture
    def dispatcher(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Dispatcher:
        return serve(monkeypatch, tmp_path)

    @pytest.mark.slow
    def test_compiled_by_inductor(self, dispatcher: Dispatcher) -> None:
        super().test_compiled_by_inductor(dispatcher)

    def test_kernels_run_within_a_graph(
        self, dispatcher: Dispatcher, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        launched = record_directions(monkeypatch)
        compiled = torch.compile(dispatcher.attention, fullgraph=True, backend="aot_eager")
        gradients(compiled, *draw())
        assert launched == ["forward", "backward_delta", "backward_dkv", "backward_dq"]
