"""The tests of this folder need a CUDA device; without one all are skipped, for one reason."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from flashgen.kernels.launch import device_gpu
from flashgen.spec.gpu import Gpu

HERE = Path(__file__).parent
REASON = "needs a CUDA device, and torch sees none"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = [item for item in items if HERE in item.path.parents]
    for item in here:
        item.add_marker(pytest.mark.gpu)
        if not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason=REASON))


@pytest.fixture(scope="session")
def gpu() -> Gpu:
    """The first device."""
    return device_gpu(0)
