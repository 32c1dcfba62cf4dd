"""Kernels in Triton's interpreter. Triton decides at import whether to interpret, so these tests have a process
of their own: TRITON_INTERPRET=1 pytest tests/interpreted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from flashgen import settings
from flashgen.runtime import Dispatcher

torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if settings.interpreting():
        return
    here = Path(__file__).parent
    skip = pytest.mark.skip(reason="needs TRITON_INTERPRET=1 from the start (make test does it)")
    for item in items:
        if here in item.path.parents:
            item.add_marker(skip)


@pytest.fixture
def dispatcher(monkeypatch: pytest.MonkeyPatch) -> Dispatcher:
    from tests.serving import serve

    return serve(monkeypatch)
