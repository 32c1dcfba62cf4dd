"""Default tiles: the config of each spec's default kernels, legal on every known target."""

from __future__ import annotations

from dataclasses import replace

from flashgen.config import FP8_DEPTH, KernelConfig
from flashgen.gpu import TARGETS
from flashgen.legality import why_illegal
from flashgen.spec import AttentionSpec, padded

_Tile = tuple[int, int, int, int]
_HEAD_DIMS = (16, 32, 64, 128, 256, 512)
_DEFAULT_TILES: dict[str, dict[str, tuple[_Tile, ...]]] = {
    # br, bc, num_warps, num_stages for each of _HEAD_DIMS; the last has no backward, and two parts
    # of V in forward and decode. Compiled with Triton 3.7.1 for sm_80, sm_89, sm_90, sm_100, sm_120
    # and gfx942, these take at most 64 KiB of shared memory on gfx942, which has no more (MI300X),
    # 66 KiB elsewhere (82 for head dim 512), and do not spill in a main loop; but on gfx942 the
    # gradient of a bias in float32 at head dim 256 does. float32 by FMA has the fewest registers.
    "forward": {
        "half": ((64, 64, 4, 2), (64, 64, 4, 2), (64, 64, 4, 2), (64, 32, 4, 2), (32, 32, 8, 2),
                 (32, 32, 8, 2)),
        "tf32": ((64, 64, 4, 2), (64, 64, 4, 2), (64, 32, 4, 2), (32, 32, 4, 2), (16, 16, 4, 1),
                 (16, 16, 4, 1)),
        "ieee": ((64, 64, 4, 2), (64, 64, 4, 2), (32, 16, 4, 2), (16, 16, 4, 2), (16, 16, 4, 1),
                 (16, 16, 4, 1)),
    },
    "backward_delta": {
        "half": ((64, 16, 4, 1), (64, 16, 4, 1), (64, 16, 4, 1), (32, 16, 4, 1), (16, 16, 4, 1)),
        "ieee": ((64, 16, 4, 1), (64, 16, 4, 1), (64, 16, 4, 1), (32, 16, 4, 1), (16, 16, 4, 1)),
    },
    "backward_dkv": {
        "half": ((64, 64, 4, 2), (64, 64, 4, 2), (32, 64, 4, 2), (32, 32, 4, 2), (16, 32, 8, 2)),
        "tf32": ((64, 64, 4, 2), (32, 64, 4, 2), (32, 32, 4, 2), (16, 32, 4, 2), (16, 16, 4, 1)),
        "ieee": ((32, 64, 4, 2), (32, 32, 4, 2), (16, 32, 4, 2), (16, 16, 4, 2), (16, 16, 4, 1)),
    },
    "backward_dq": {
        "half": ((64, 64, 4, 2), (64, 64, 4, 2), (64, 64, 4, 2), (32, 32, 4, 2), (32, 16, 8, 1)),
        "tf32": ((64, 64, 4, 2), (64, 32, 4, 2), (32, 32, 4, 2), (16, 32, 4, 1), (16, 16, 4, 1)),
        "ieee": ((64, 32, 4, 2), (32, 32, 4, 2), (32, 16, 4, 2), (16, 16, 8, 1), (16, 16, 8, 2)),
    },
    "backward_dbias": {
        "half": ((64, 64, 4, 2), (64, 64, 4, 2), (64, 32, 4, 2), (32, 32, 4, 2), (32, 16, 8, 1)),
        "tf32": ((32, 32, 4, 2), (32, 32, 4, 2), (32, 16, 4, 2), (16, 32, 4, 1), (16, 16, 8, 2)),
        "ieee": ((32, 32, 4, 2), (32, 32, 4, 2), (16, 16, 4, 2), (16, 16, 4, 2), (16, 16, 8, 2)),
    },
    "decode": {
        "half": ((16, 64, 4, 3), (16, 64, 4, 3), (16, 64, 4, 3), (16, 64, 4, 2), (16, 32, 4, 2),
                 (16, 32, 8, 2)),
        "tf32": ((16, 64, 4, 2), (16, 64, 4, 2), (16, 64, 4, 2), (16, 32, 4, 2), (16, 16, 4, 2),
                 (16, 16, 4, 1)),
        "ieee": ((16, 64, 4, 2), (16, 64, 4, 2), (16, 32, 4, 2), (16, 16, 4, 2), (16, 16, 4, 1),
                 (16, 16, 4, 1)),
    },
    "combine": {
        "half": ((16, 32, 1, 1), (16, 32, 1, 1), (16, 32, 2, 1), (16, 32, 4, 1), (16, 16, 4, 1),
                 (16, 16, 4, 1)),
        "ieee": ((16, 32, 1, 1), (16, 32, 1, 1), (16, 32, 2, 1), (16, 32, 4, 1), (16, 16, 4, 1),
                 (16, 16, 4, 1)),
    },
    "append": {
        "half": ((16, 16, 1, 1), (16, 16, 1, 1), (16, 16, 2, 1), (16, 16, 4, 1), (16, 16, 4, 1),
                 (16, 16, 4, 1)),
        "ieee": ((16, 16, 1, 1), (16, 16, 1, 1), (16, 16, 2, 1), (16, 16, 4, 1), (16, 16, 4, 1),
                 (16, 16, 4, 1)),
    },
}  # fmt: skip
_DEFAULT_TILES["backward_fused"] = {
    # With one stage: dQ passes through shared memory too.
    kind: tuple((br, bc, warps, 1) for br, bc, warps, _ in tiles)
    for kind, tiles in _DEFAULT_TILES["backward_dkv"].items()
}


WIDEST_DECODE = 64
"""Rows that a default of decode takes together at most: beyond, a second program reads the keys
from L2."""


def default_config(spec: AttentionSpec) -> KernelConfig:
    """The conservative config of the spec's default kernel: legal on every known target."""
    kind = "half" if spec.element_bytes == 2 else spec.precision
    place = _HEAD_DIMS.index(default_head_dim(spec))
    br, bc, warps, stages = _DEFAULT_TILES[spec.direction][kind][place]
    if spec.bias != "none" and br * bc == 64 * 64:
        br = 32  # 64 x 64 elements of a mask take the registers of sm_80, and a loop spills
    # The loads of a block table run a stage ahead of the pages that they name.
    stages += spec.paged and spec.direction in ("decode", "forward")
    parts = 2 if place == len(_HEAD_DIMS) - 1 and spec.direction in ("forward", "decode") else 1
    return KernelConfig(
        br=br, bc=bc, num_warps=warps, num_stages=stages, head_dims="padded", v_parts=parts
    )


def default_configs(spec: AttentionSpec) -> tuple[KernelConfig, ...]:
    """The configs of all default kernels of a spec: default_config, and for decode a wider one
    where it is legal on all known targets that the first is; of a float8 cache both once more, by
    the instruction that widens its elements where there is one.
    """
    first = default_config(spec)
    if spec.direction != "decode":
        return (first,)
    wide = replace(first, br=WIDEST_DECODE)
    fits = all(
        why_illegal(spec, wide, gpu) is None or why_illegal(spec, first, gpu) is not None
        for gpu in TARGETS.values()
    )
    found: tuple[KernelConfig, ...] = (first, wide) if fits else (first,)
    if spec.kv_dtype == "float8_e4m3":
        found += tuple(replace(config, widening="native") for config in found)
    return found


def default_head_dim(spec: AttentionSpec) -> int:
    """The padded head dim whose default kernel serves this spec."""
    least = FP8_DEPTH if spec.fp8 else 0
    return padded(max(spec.head_dim, spec.head_dim_v, least))


def default_spec(spec: AttentionSpec) -> AttentionSpec:
    """The spec of the default kernel that serves `spec`: both head dims the same power of two."""
    head_dim = default_head_dim(spec)
    return replace(spec, head_dim=head_dim, head_dim_v=head_dim)
