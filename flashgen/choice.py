"""Choice: one row of generated/table.py, all the runtime knows of a kernel it may launch."""

from __future__ import annotations

from dataclasses import dataclass

from flashgen.config import KernelConfig
from flashgen.outcome import Source
from flashgen.problem import Bucket
from flashgen.spec import MAX_BACKWARD_HEAD_DIM, AttentionSpec, Direction

DEFAULT_DIRECTIONS: tuple[Direction, ...] = (
    "forward",
    "backward_delta",
    "backward_dkv",
    "backward_dq",
)
"""Directions whose default kernels are generated. The gradient of a bias needs a feature; the fused
backward is chosen by its time alone, so an untimed one would never run."""


def has_default(spec: AttentionSpec) -> bool:
    """Whether generated/ holds a default kernel for specs of this kind: those without features, up
    to the largest head dim that has gradients.
    """
    widest = max(spec.head_dim, spec.head_dim_v)
    shipped = widest <= MAX_BACKWARD_HEAD_DIM  # beyond, as rare as a feature
    return spec.direction in DEFAULT_DIRECTIONS and not spec.featured and shipped


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A kernel of generated/kernels, what it serves, and what it took when it was compiled.

    bucket None serves every length (a default kernel). shared_bytes and registers are the
    compiler's figures, or None where the kernel was not compiled for one GPU alone. median_us is
    None unless timed.
    """

    spec: AttentionSpec
    bucket: Bucket | None
    config: KernelConfig
    kernel: str
    digest: str
    shared_bytes: int | None
    registers: int | None
    source: Source
    median_us: float | None
