"""Short names for what tests make most."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

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


def hopper(
    br: int = 128, bc: int = 64, stages: int = 2, order: Any = "plain", **way: Any
) -> KernelConfig:
    """A forward of schedule hopper: a consumer of 64 rows or more a warpgroup."""
    way = {"schedule": "hopper", "loads": "descriptor"} | way
    return make_config(br, bc, num_warps=br // 16, num_stages=stages, order=order, **way)


def each(
    names: Iterable[Any], every: int = 0, why: str = "a second a kernel, most of it compilation"
) -> list[Any]:
    """Parameters of a test, of which make test has each `every`-th, from the first on; 0: none."""
    slow = pytest.mark.slow(why)
    return [
        name if every and place % every == 0 else pytest.param(*_several(name), marks=slow)
        for place, name in enumerate(names)
    ]


def _several(name: Any) -> tuple[Any, ...]:
    return name if isinstance(name, tuple) else (name,)
