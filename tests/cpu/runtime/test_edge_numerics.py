"""Scores, masks and sinks at the edge of float32 on the CPU; tests/interpreted has the kernels."""

from __future__ import annotations

import pytest
import torch

from tests import edges


@pytest.mark.parametrize("size", [3, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", edges.EDGES)
def test_the_cpu(name: str, dtype: torch.dtype, size: int) -> None:
    edges.check(name, dtype, size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_hidden_key_of_nan(dtype: torch.dtype) -> None:
    edges.check_hidden_key(dtype, 40)
