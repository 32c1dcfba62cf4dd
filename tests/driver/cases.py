"""Calls of each direction on small tensors of the device, and the kernels that serve them."""

from __future__ import annotations

import torch
from torch import Tensor

from flashgen.spec.attention import AttentionSpec
from flashgen.spec.config import KernelConfig
from flashgen.spec.gpu import TARGETS
from flashgen.spec.legality import why_illegal

H200 = TARGETS["nvidia_h200"]


def tensors(*shape: int, count: int = 3, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """Tensors of one shape (batch, heads, seq, head_dim)."""
    return [torch.empty(shape, device="cuda", dtype=dtype) for _ in range(count)]


def legal(spec: AttentionSpec, config: KernelConfig) -> bool:
    """Whether a config is legal on an H200."""
    return why_illegal(spec, config, H200) is None
