"""Short names for what tests make most."""

from __future__ import annotations

from typing import Any

from flashgen.schedules.config import KernelConfig
from flashgen.spec.attention import AttentionSpec


def make_spec(
    dtype: str = "bfloat16", head_dim: int = 64, mask: str = "none", **fields: Any
) -> AttentionSpec:
    fields.setdefault("head_dim_v", head_dim)
    return AttentionSpec(dtype=dtype, head_dim=head_dim, mask=mask, **fields)


def make_config(br: int = 64, bc: int = 32, **fields: Any) -> KernelConfig:
    fields = {"num_warps": 4, "num_stages": 2} | fields
    return KernelConfig(br=br, bc=bc, **fields)
