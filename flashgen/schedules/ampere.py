"""Schedule ampere (Gluon): fa2 for mma.sync, 16 rows a warp, its layouts written down, of one
stage.
"""

from __future__ import annotations

from dataclasses import replace

from flashgen.schedules.base import MMA_SYNC, Bytes, CommonFields, Loads, Schedule, Tile
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.gpu import Gpu
from flashgen.spec.vocabulary import Direction

NUM_WARPS = (4, 8)
WIDEST = 256
"""The largest head dim: beyond, a warp's rows of O fill its registers."""

AMPERE_TILES = ((128, 64, 8), (64, 64, 4), (128, 128, 8), (128, 32, 8), (64, 32, 4))
"""br, bc, num_warps. Compiled with Triton 3.7.1 for sm_80 and sm_89, each spills little or nothing
at some head dim; none was measured."""


class Ampere(Schedule[CommonFields]):
    """One place for each of Q, K and V, all products in parts."""

    name = "ampere"
    gluon = True
    in_parts = True
    loads: Loads = "pointer"

    def template(self, direction: Direction) -> str:
        """One of its own."""
        return "attention_fwd_ampere.py.jinja"

    def in_class(self, direction: Direction) -> bool:
        """Its forward does."""
        return direction == "forward"

    def tiles(self, direction: Direction) -> tuple[Tile, ...]:
        """Of one stage."""
        return tuple((*tile, 1) for tile in AMPERE_TILES)

    def why_not(self, spec: AttentionSpec, config: CommonFields) -> str | None:
        """Variants that its kernel does not have."""
        if (spec.direction, config.loads) != ("forward", "pointer"):
            return (
                "schedule ampere needs direction forward and pointer loads: "
                f"got {spec.direction} and {config.loads}"
            )
        others = [word for word in spec.feature_words if word != "invariant"]
        if spec.element_bytes != 2 or others:
            return (
                "schedule ampere has operands of 16 bits and no features but invariant: "
                f"got {spec.dtype}{' with ' * bool(others)}{' and '.join(others)}"
            )
        if config.num_warps not in NUM_WARPS or config.br != 16 * config.num_warps:
            return (
                "schedule ampere has 16 rows for each of 4 or 8 warps: "
                f"got br={config.br} and num_warps={config.num_warps}"
            )
        if config.bc not in (32, 64, 128) or config.bc > config.br or config.num_stages != 1:
            return (
                "schedule ampere has tiles of 32 to 128 keys, no more than rows, in one place, so "
                f"that num_stages is 1: got bc={config.bc} and num_stages={config.num_stages}"
            )
        dims = spec.head_dim, spec.head_dim_v
        if any(dim % 64 or dim > WIDEST for dim in dims):
            return (
                f"schedule ampere has head dims 64, 128, 192 and 256: got {dims[0]} and {dims[1]}"
            )
        return None

    def why_not_on(self, config: CommonFields, gpu: Gpu) -> str | None:
        """Other matrix instructions."""
        if gpu.arch in MMA_SYNC:
            return None
        return f"schedule ampere is made for mma.sync: {gpu.slug} is {gpu.arch}"

    def shared_bytes(
        self,
        spec: AttentionSpec,
        config: CommonFields,
        tiles: Bytes,
        *,
        reads_shared: bool,
        gpu: Gpu,
    ) -> int:
        """Q, and one place for each of K and V."""
        of_keys = config.bc * (spec.head_dim + spec.head_dim_v)
        return (config.br * spec.head_dim + of_keys) * spec.element_bytes

    def twin(self, spec: AttentionSpec, config: CommonFields) -> CommonFields:
        """A tile of 64 rows that fits with every head dim, or is that of an invariant spec's
        class.
        """
        bc = config.bc if spec.invariant else min(config.bc, 32)
        rows = spec.invariant and spec.head_dim_v > 64
        return replace(
            config, schedule="fa2", br=64, bc=bc, num_warps=4, num_stages=2, whole_rows=rows
        )


AMPERE = Ampere()
