"""Default kernels: the conservative config of every spec, so that it runs untuned anywhere.

Every default tile is legal on every known target. The specs that this module lists, those without
features and those of each feature alone, are what `flashgen generate --defaults` writes; there are
too many combinations of features to list.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import get_args

from flashgen.schedules.base import FP8_DEPTH, MMA_SYNC
from flashgen.schedules.config import KernelConfig
from flashgen.schedules.legality import why_illegal
from flashgen.schedules.numeric_class import class_tile
from flashgen.schedules.whole_rows import why_no_rows
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.features import FEATURE_WORDS, KV_WORDS, masks_of
from flashgen.spec.gpu import TARGETS
from flashgen.spec.vocabulary import (
    MAX_HEAD_DIM,
    Direction,
    DType,
    Rotary,
    padded,
    why_no_gradient,
)

DEFAULT_HEAD_DIMS = (16, 32, 64, 128, 256)
"""Those of all listed defaults; without features MAX_HEAD_DIM is listed, too."""
DEFAULT_DIRECTIONS: tuple[Direction, ...] = (
    "forward",
    "backward_delta",
    "backward_dkv",
    "backward_dq",
)
"""Directions of attention() and its backward that run untuned. The fused backward is chosen by its
time alone, so an untimed one would never run."""


def specs_with_default() -> Iterator[AttentionSpec]:
    """The specs of all listed defaults: those without features, of a cache, and of each feature
    alone.
    """
    yield from plain_specs()
    yield from cache_specs()
    for word in FEATURE_WORDS:
        yield from featured_specs((word,))


def plain_specs(
    dims: tuple[int, ...] = (*DEFAULT_HEAD_DIMS, MAX_HEAD_DIM),
) -> Iterator[AttentionSpec]:
    """The specs without features of these head dims; of those of the defaults, which between them
    serve every attention() without features.
    """
    # Of several the delta kernel is one and the same.
    yield from dict.fromkeys(
        spec.for_direction(direction)
        for direction in DEFAULT_DIRECTIONS
        for spec in _forward(dims)
        if direction == "forward" or why_no_gradient(spec.head_dim, spec.element_bytes) is None
    )


def featured_specs(words: Iterable[str]) -> Iterator[AttentionSpec]:
    """The specs of the defaults of features that are on together, by their FEATURE_WORDS; a feature
    that changes no backward kernel has none here. Raises InvalidArgument.
    """
    features = tuple(words)
    found: dict[AttentionSpec, None] = {}
    for plain in _forward():
        if "fp8" in features and unfit_for_fp8(plain):
            continue
        if plain.mask not in masks_of(features):
            continue
        spec = plain.with_features(features)
        of_bias: tuple[Direction, ...] = ("backward_dbias",) if spec.bias == "additive" else ()
        for direction in ("forward",) if spec.fp8 else (*DEFAULT_DIRECTIONS, *of_bias):
            found[spec.for_direction(direction)] = None
    yield from sorted(filter(lambda spec: spec.featured, found), key=lambda spec: spec.sort_key)


def unfit_for_fp8(spec: AttentionSpec) -> bool:
    """Whether no default kernel of fp8 operands has this dtype of O and this head dim."""
    return spec.dtype == "float32" or spec.head_dim < FP8_DEPTH


def cache_specs() -> Iterator[AttentionSpec]:
    """The specs of the defaults over a cache, in pages and not, and of 8 bits: decode, combine,
    append.
    """
    found: dict[AttentionSpec, None] = {}
    for forward in _forward((*DEFAULT_HEAD_DIMS, MAX_HEAD_DIM)):
        decode = replace(forward, direction="decode")
        caches = [decode, replace(decode, paged=True)]
        if forward.dtype != "float32" and forward.head_dim != MAX_HEAD_DIM:
            for kv_dtype, kv_scales in KV_WORDS.values():
                paged = kv_scales == "page"
                caches.append(replace(decode, kv_dtype=kv_dtype, kv_scales=kv_scales, paged=paged))
        for cache in caches:
            append = cache.for_direction("append")
            turns = get_args(Rotary) if cache.kv_dtype == "same" else ("none",)
            found[cache] = found[cache.for_direction("combine")] = None
            found.update({replace(append, rotary=rotary): None for rotary in turns})
    yield from sorted(found, key=lambda spec: spec.sort_key)


def _forward(head_dims: tuple[int, ...] = DEFAULT_HEAD_DIMS) -> Iterator[AttentionSpec]:
    precisions = {"float16": ("ieee",), "bfloat16": ("ieee",), "float32": ("ieee", "tf32")}
    for dtype, of_dtype in precisions.items():
        for precision in of_dtype:
            for head_dim in head_dims:
                for mask in ("none", "causal"):
                    yield AttentionSpec(
                        dtype=dtype,  # type: ignore[arg-type]
                        head_dim=head_dim,
                        head_dim_v=head_dim,
                        mask=mask,
                        precision=precision,  # type: ignore[arg-type]
                    )


_Tile = tuple[int, int, int, int]
_HEAD_DIMS = (16, 32, 64, 128, 256, 512)
_DEFAULT_TILES: dict[str, dict[str, tuple[_Tile, ...]]] = {
    # br, bc, num_warps, num_stages for each of _HEAD_DIMS; the last has no backward of float32, and
    # two parts of V in forward and decode. Compiled with Triton 3.7.1 for sm_80, sm_89, sm_90,
    # sm_100, sm_120 and gfx942, these take at most 64 KiB of shared memory on gfx942, which has no
    # more (MI300X), 66 KiB elsewhere (82 for head dim 512), and do not spill in a main loop; but in
    # float32 at 256 the gradient of a bias does on gfx942, and dQ on gfx950; and at 512 dK and dV
    # of a bias with ALiBi on sm_80. float32 by FMA has the fewest registers.
    "forward": {
        "half": ((64, 64, 4, 2), (64, 64, 4, 2), (64, 64, 4, 2), (64, 32, 4, 2), (32, 32, 8, 2),
                 (32, 32, 8, 2)),
        "tf32": ((64, 64, 4, 2), (64, 64, 4, 2), (64, 32, 4, 2), (32, 32, 4, 2), (16, 16, 4, 1),
                 (16, 16, 4, 1)),
        "ieee": ((64, 64, 4, 2), (64, 64, 4, 2), (32, 16, 4, 2), (16, 16, 4, 2), (16, 16, 4, 1),
                 (16, 16, 4, 1)),
    },
    "backward_delta": {
        "half": ((64, 16, 4, 1), (64, 16, 4, 1), (64, 16, 4, 1), (32, 16, 4, 1), (16, 16, 4, 1),
                 (16, 16, 4, 1)),
        "ieee": ((64, 16, 4, 1), (64, 16, 4, 1), (64, 16, 4, 1), (32, 16, 4, 1), (16, 16, 4, 1)),
    },
    "backward_dkv": {
        "half": ((64, 64, 4, 2), (32, 64, 4, 2), (32, 64, 4, 2), (32, 32, 4, 2), (16, 32, 8, 2),
                 (16, 16, 4, 1)),
        "tf32": ((64, 64, 4, 2), (32, 64, 4, 2), (32, 32, 4, 2), (16, 32, 4, 2), (16, 16, 4, 1)),
        "ieee": ((32, 64, 4, 2), (32, 32, 4, 2), (16, 32, 4, 2), (16, 16, 4, 2), (16, 16, 4, 1)),
    },
    "backward_dq": {
        "half": ((64, 64, 4, 2), (64, 64, 4, 2), (64, 64, 4, 2), (32, 32, 4, 2), (32, 16, 8, 1),
                 (16, 16, 4, 1)),
        "tf32": ((64, 64, 4, 2), (64, 32, 4, 2), (32, 32, 4, 2), (16, 32, 4, 1), (16, 16, 4, 1)),
        "ieee": ((64, 32, 4, 2), (32, 32, 4, 2), (32, 16, 4, 2), (16, 16, 8, 1), (16, 16, 8, 2)),
    },
    "backward_dbias": {
        "half": ((64, 64, 4, 2), (64, 64, 4, 2), (64, 32, 4, 2), (32, 32, 4, 2), (32, 16, 8, 1),
                 (16, 16, 4, 1)),
        "tf32": ((32, 32, 4, 2), (32, 32, 4, 2), (32, 16, 4, 2), (16, 32, 4, 1), (16, 16, 8, 2)),
        "ieee": ((32, 32, 4, 2), (32, 16, 4, 2), (16, 16, 4, 2), (16, 16, 4, 2), (16, 16, 8, 2)),
    },
    "backward_dq_of_ds": {
        "half": ((64, 64, 4, 2), (64, 64, 4, 2), (64, 64, 4, 2), (64, 64, 4, 2), (64, 32, 8, 2),
                 (32, 32, 8, 2)),
        "tf32": ((64, 64, 4, 2), (64, 32, 4, 2), (64, 32, 4, 2), (32, 32, 4, 2), (32, 16, 4, 2)),
        "ieee": ((64, 32, 4, 2), (64, 32, 4, 2), (32, 32, 4, 2), (32, 16, 4, 2), (32, 16, 4, 2)),
    },
    "decode": {
        "half": ((16, 64, 4, 3), (16, 64, 4, 3), (16, 64, 4, 3), (16, 64, 4, 2), (16, 32, 4, 2),
                 (16, 32, 8, 2)),
        "tf32": ((16, 64, 4, 2), (16, 64, 4, 2), (16, 64, 4, 2), (16, 32, 4, 2), (16, 16, 4, 2),
                 (16, 16, 4, 1)),
        "ieee": ((16, 64, 4, 2), (16, 64, 4, 2), (16, 32, 4, 2), (16, 16, 4, 2), (16, 16, 4, 1),
                 (16, 16, 4, 1)),
    },
    "combine": dict.fromkeys(("half", "ieee"), (
        (16, 32, 1, 1), (16, 32, 1, 1), (16, 32, 2, 1), (16, 32, 4, 1), (16, 16, 4, 1),
        (16, 16, 4, 1),
    )),
    "append": dict.fromkeys(("half", "ieee"), (
        (16, 16, 1, 1), (16, 16, 1, 1), (16, 16, 2, 1), (16, 16, 4, 1), (16, 16, 4, 1),
        (16, 16, 4, 1),
    )),
}  # fmt: skip
_DEFAULT_TILES["backward_ds"] = _DEFAULT_TILES["backward_dkv"]
_DEFAULT_TILES["backward_fused"] = {
    # With one stage: dQ passes through shared memory too.
    kind: tuple((br, bc, warps, 1) for br, bc, warps, _ in tiles)
    for kind, tiles in _DEFAULT_TILES["backward_dkv"].items()
}


_IN_WHOLE_ROWS = KernelConfig(
    br=64, bc=16, num_warps=4, num_stages=2, head_dims="padded", whole_rows=True
)
"""Of head dim 256 and of boolean masks, before default_config, where mma.sync multiplies. Compiled
with Triton 3.7.1 for sm_80 and sm_89, no feature makes it spill, and it takes 52 KiB of shared
memory at most. Nor do the tiles of head dim 128 spill in whole rows, but with a boolean mask."""

WIDEST_DECODE = 64
"""Rows that a default of decode takes together at most: beyond, a second program reads the keys
from L2."""


DEFAULT_BLOCKS = 2
"""blocks_per_sm of the defaults of decode. Two blocks of each fit an SM of an A100, an H200, an L4
and an RTX 4090. By estimate these take 3 % longer in the mean than with the best number up to 5,
and with 1 block 10 %."""


def default_config(spec: AttentionSpec) -> KernelConfig:
    """The conservative config of the spec's default kernel: legal on every known target."""
    kind = "half" if spec.element_bytes == 2 else spec.precision
    place = _HEAD_DIMS.index(default_head_dim(spec))
    of_class = spec.invariant and spec.direction != "combine"
    tiles = _DEFAULT_TILES[spec.direction][kind]
    br, bc, warps, stages = class_tile(spec) if of_class else tiles[place]
    if spec.bias != "none" and br * bc == 64 * 64:
        br = 32  # 64 x 64 elements of a mask take the registers of sm_80, and a loop spills
    # The loads of a block table run a stage ahead of the pages that they name.
    stages += spec.paged and spec.direction in ("decode", "forward")
    parts = 2 if place == len(_HEAD_DIMS) - 1 and spec.direction in ("forward", "decode") else 1
    if of_class and parts == 2 and spec.element_bytes == 2:
        parts = 4  # with the total of the segments, 64 rows of a part fit the registers
    filled = spec.direction == "decode" and not spec.invariant
    return KernelConfig(
        br=br,
        bc=bc,
        num_warps=warps,
        num_stages=stages,
        head_dims="padded",
        v_parts=parts,
        blocks_per_sm=DEFAULT_BLOCKS if filled else 1,
    )


def default_configs(spec: AttentionSpec) -> tuple[KernelConfig, ...]:
    """The configs of all default kernels of a spec: default_config, and for decode a wider one
    where it is legal on all known targets that the first is, of three stages also with two; of a
    float8 cache both once more, by the instruction that widens its elements where there is one.
    Before it of a wide O one with whole_rows. is_default_of() says which of them are of a GPU.
    """
    first = default_config(spec)
    if spec.invariant:
        return _of_class(spec, first)
    small = first.br < _IN_WHOLE_ROWS.br or spec.bias == "boolean"
    rows = _IN_WHOLE_ROWS if small else replace(first, whole_rows=True)
    if why_no_rows(spec, rows) is None:
        return (rows, first)
    if spec.direction != "decode":
        return (first,)
    wide = replace(first, br=WIDEST_DECODE)
    fits = all(
        why_illegal(spec, wide, gpu) is None or why_illegal(spec, first, gpu) is not None
        for gpu in TARGETS.values()
    )
    found: tuple[KernelConfig, ...] = (first, wide) if fits else (first,)
    if fits and _is_serialized(spec, wide):
        found = (*found, replace(wide, num_stages=2))
    if spec.kv_dtype == "float8_e4m3":
        found += tuple(replace(config, widening="native") for config in found)
    return found


def is_default_of(arch: str, spec: AttentionSpec, config: KernelConfig) -> bool:
    """Whether a default of a spec is one of GPUs of this architecture."""
    if config.whole_rows:
        return arch in MMA_SYNC
    return arch != "sm_90" or not _is_serialized(spec, config)


def _is_serialized(spec: AttentionSpec, config: KernelConfig) -> bool:
    """Whether ptxas serializes the wgmma of a default of decode (its remark C7510): it does with
    three stages of 64 rows of 16 bits, whose keys are not in pages. Compiled with Triton 3.7.1.
    """
    has = (config.br, config.num_stages) == (WIDEST_DECODE, 3)
    whole = not spec.paged and spec.kv_dtype == "same"
    return has and whole and spec.direction == "decode" and not spec.invariant


def _of_class(spec: AttentionSpec, first: KernelConfig) -> tuple[KernelConfig, ...]:
    """The defaults of an invariant spec. Where mma.sync multiplies, a warp has whole rows in parts
    of O, or alone.
    """
    if spec.direction not in ("forward", "decode") or spec.element_bytes == 4:
        return (first,)
    rows = replace(first, whole_rows=True)
    one_warp = replace(first, br=16, num_warps=1)
    return (*([rows] if why_no_rows(spec, rows) is None else []), first, one_warp)


def plain_spec(spec: AttentionSpec) -> AttentionSpec:
    """The spec without its features: the same direction, dtype, precision, head dims and mask."""
    kept = ("direction", "dtype", "head_dim", "head_dim_v", "mask", "precision")
    return AttentionSpec(**{name: getattr(spec, name) for name in kept})


TUNED_HEAD_DIMS = (64, 96, 128, 192, 256)
"""Head dims that tables have; others take the tile of the next."""


def other_half(spec: AttentionSpec) -> AttentionSpec | None:
    """The same spec in the other 16-bit type; None for what has none."""
    other: dict[str, DType] = {"float16": "bfloat16", "bfloat16": "float16"}
    if spec.fp8 or spec.dtype not in other:
        return None
    return replace(spec, dtype=other[spec.dtype])


def plainer_specs(spec: AttentionSpec) -> Iterator[AttentionSpec]:
    """Specs whose tiles may serve this one, nearest first: of a decode of several queries that of
    one; without its features, and of tuned head dims from its own on up that are padded alike, each
    in both 16-bit types. Of an invariant spec those of its class come first: another tile may be of
    another class.
    """
    plain = plain_spec(spec)
    widest = max(spec.head_dim, spec.head_dim_v)
    dims = [dim for dim in TUNED_HEAD_DIMS if dim >= widest]
    like = [plain, *(replace(plain, head_dim=dim, head_dim_v=dim) for dim in dims[:1])]
    like += [
        replace(plain, head_dim=dim, head_dim_v=dim)
        for dim in dims[1:]
        if padded(dim) == padded(dims[0])
    ]
    if spec.invariant:
        like = [*(replace(one, invariant=True) for one in like), *like]
    if spec.direction == "decode" and spec.causal and not spec.chunk:
        like = [replace(spec, mask="none"), *like]
    for one in dict.fromkeys(like):
        for near in (one, other_half(one)):
            if near is not None and near != spec:
                yield near


def default_head_dim(spec: AttentionSpec) -> int:
    """The padded head dim whose default kernel serves this spec."""
    least = FP8_DEPTH if spec.fp8 else 0
    return padded(max(spec.head_dim, spec.head_dim_v, least))


def default_spec(spec: AttentionSpec) -> AttentionSpec:
    """The spec of the default kernel that serves `spec`: both head dims the same power of two."""
    head_dim = default_head_dim(spec)
    return replace(spec, head_dim=head_dim, head_dim_v=head_dim)
