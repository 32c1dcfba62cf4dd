"""Scores, masks and sinks at the edge of float32 in the kernels; tests/cpu has the CPU path."""

from __future__ import annotations

import pytest
import torch

from tests import edges
from tests.proving import alternating
from tests.serving import serve

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.mark.parametrize(
    ("name", "dtype"), alternating(edges.EDGES, [torch.float32, torch.bfloat16]), ids=str
)
def test_a_kernel(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    serve(monkeypatch)
    edges.check(name, dtype, 40)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_hidden_key_of_nan(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    serve(monkeypatch)
    edges.check_hidden_key(dtype, 40)
