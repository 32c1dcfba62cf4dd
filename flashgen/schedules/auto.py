"""Schedule auto: fa2 in one loop, which Triton deals out to warps that load and warps that compute.

docs/kernels.md has what Triton can warp-specialize.
"""

from __future__ import annotations

from flashgen.schedules.base import TENSOR_MEMORY, CommonFields, Schedule, Tile, why_no_roles
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.gpu import Gpu
from flashgen.spec.vocabulary import Direction

NUM_WARPS, BLOCK_WARPS = 4, 12
"""num_warps, and the warps that Triton 3.6 to 3.9 make of them."""
BR = {"sm_90": (64,), "sm_100": (64, 128)}
"""Rows of Q for which Triton deals out the loop, by architecture."""
AUTO_TILES = ((128, 128, 2), (128, 64, 3), (128, 64, 2), (64, 128, 2), (64, 64, 3), (64, 64, 2))
"""br, bc, num_stages. Compiled with Triton 3.6 to 3.9; none was measured."""


class Auto(Schedule[CommonFields]):
    """The compiler's own warp specialization."""

    name = "auto"
    roles = True
    unestimated = (
        "the estimator does not know which warps of schedule auto wait for which: its compiler "
        "deals them out"
    )

    def tiles(self, direction: Direction) -> tuple[Tile, ...]:
        """Those that Triton deals out to warps on some architecture."""
        return tuple((br, bc, NUM_WARPS, stages) for br, bc, stages in AUTO_TILES)

    def why_not(self, spec: AttentionSpec, config: CommonFields) -> str | None:
        """What Triton cannot warp-specialize."""
        if (reason := why_no_roles(spec, config)) is not None:
            return reason
        if config.num_warps != NUM_WARPS:
            return f"schedule auto has num_warps {NUM_WARPS}: got {config.num_warps}"
        if config.bc < 64:
            return f"schedule auto has tiles of 64 keys and more: got bc={config.bc}"
        return None

    def why_not_on(self, config: CommonFields, gpu: Gpu) -> str | None:
        """Where Triton deals out no loop, or not of these rows."""
        if config.br in BR.get(gpu.arch, ()):
            return None
        known = " or ".join(f"br {max(br)} at most on {arch}" for arch, br in BR.items())
        return f"schedule auto needs {known}: got br={config.br}, and {gpu.slug} is {gpu.arch}"

    def register_limit(self, config: CommonFields, gpu: Gpu, limit: int) -> int | None:
        """None in tensor memory, which Triton reads by parts."""
        return None if gpu.arch in TENSOR_MEMORY else limit

    def block_warps(self, spec: AttentionSpec, config: CommonFields) -> int:
        """As Triton adds them."""
        return BLOCK_WARPS


AUTO = Auto()
