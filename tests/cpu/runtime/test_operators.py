"""The registered operators on CPU tensors, where torch and the gradients' formulas serve."""

from __future__ import annotations

import pytest

from flashgen.runtime import Dispatcher
from tests.operators_contract import OperatorsContract
from tests.serving import serve

pytestmark = pytest.mark.filterwarnings("ignore")


class TestOnACpu(OperatorsContract):
    exact = False

    @pytest.fixture
    def dispatcher(self, monkeypatch: pytest.MonkeyPatch) -> Dispatcher:
        return serve(monkeypatch)
