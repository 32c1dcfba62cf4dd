"""torch.compile over the drop-ins of other packages' functions: one graph, and the same result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from flashgen.runtime import flash_attn_3, flash_attn_4, xformers
from tests.xformers_biases import StandIns

CAUSAL = StandIns().LowerTriangularFromBottomRightMask()
CALLS: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "flash_attn_3": lambda q, k, v: flash_attn_3.flash_attn_func(q, k, v, causal=True),
    "flash_attn_4": lambda q, k, v: flash_attn_4.flash_attn_func(q, k, v, causal=True)[0],
    "xformers": lambda q, k, v: xformers.memory_efficient_attention(q, k, v, CAUSAL),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_one_graph(name: str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 12, 4, 16) for _ in range(3))
    found = torch.compile(CALLS[name], fullgraph=True, backend="eager")(q, k, v)
    torch.testing.assert_close(found, CALLS[name](q, k, v))
