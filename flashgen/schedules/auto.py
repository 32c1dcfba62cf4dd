"""Schedule auto: fa2 in one loop, which Triton deals out to warps that load and warps that compute.

docs/kernels.md has what Triton can warp-specialize.
"""

from __future__ import annotations

from typing import ClassVar

from flashgen.schedules.base import CommonFields, Schedule
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.gpu import Gpu

NUM_WARPS, BLOCK_WARPS = 4, 12
"""num_warps, and the warps that Triton 3.6 to 3.9 make of them."""
BR = {"sm_90": (64,), "sm_100": (64, 128)}
"""Rows of Q for which Triton deals out the loop, by architecture."""
AUTO_TILES = tuple(
    (br, bc, NUM_WARPS, stages)
    for br, bc, stages in (
        (128, 128, 2), (128, 64, 3), (128, 64, 2), (64, 128, 2), (64, 64, 3), (64, 64, 2),
    )
)  # fmt: skip
"""Compiled with Triton 3.6 to 3.9; none was measured."""


class Auto(Schedule[CommonFields]):
    """The compiler's own warp specialization."""

    name = "auto"
    roles = True
    unestimated = (
        "the estimator does not know which warps of schedule auto wait for which: its compiler "
        "deals them out"
    )
    accumulates_in_tensor_memory = True  # which Triton reads by parts
    tiles: ClassVar = {"forward": AUTO_TILES}

    def why_not(self, spec: AttentionSpec, config: CommonFields) -> str | None:
        if config.num_warps != NUM_WARPS:
            return f"schedule auto has num_warps {NUM_WARPS}: got {config.num_warps}"
        if config.bc < 64:
            return f"schedule auto has tiles of 64 keys and more: got bc={config.bc}"
        return None

    def why_not_on(self, config: CommonFields, gpu: Gpu) -> str | None:
        if config.br in BR.get(gpu.arch, ()):
            return None
        known = " or ".join(f"br {max(br)} at most on {arch}" for arch, br in BR.items())
        return f"schedule auto needs {known}: got br={config.br}, and {gpu.slug} is {gpu.arch}"

    def block_warps(self, spec: AttentionSpec, config: CommonFields) -> int:
        return BLOCK_WARPS


AUTO = Auto()
