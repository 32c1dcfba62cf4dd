"""Which specs have a default kernel in generated/, so that they run anywhere with nothing tuned:
those without features, forward, backward and over a cache, and those of each feature alone.

Combinations of features are rendered when they are asked for, or listed (generate.py): there are
too many.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import get_args

from flashgen.config import FP8_DEPTH
from flashgen.spec import (
    FEATURE_WORDS,
    KV_WORDS,
    MAX_HEAD_DIM,
    UNMASKED,
    AttentionSpec,
    Direction,
    Rotary,
)

DEFAULT_HEAD_DIMS = (16, 32, 64, 128, 256)
"""Those of all directions; forward and decode without features have MAX_HEAD_DIM, too."""
DEFAULT_DIRECTIONS: tuple[Direction, ...] = (
    "forward",
    "backward_delta",
    "backward_dkv",
    "backward_dq",
)
"""Directions of attention() and its backward whose defaults are generated. The fused backward is
chosen by its time alone, so an untimed one would never run."""
FeatureSet = tuple[str, ...]
"""Words of spec.FEATURE_WORDS, in that order: features that are on together."""


def has_default(spec: AttentionSpec) -> bool:
    """Whether every generated/ holds the default kernel of this spec."""
    return spec in _shipped()


@functools.cache
def _shipped() -> frozenset[AttentionSpec]:
    return frozenset(shipped_specs())


def shipped_specs() -> Iterator[AttentionSpec]:
    """The specs of all defaults: those without features, of a cache, and of each feature alone."""
    yield from plain_specs()
    yield from cache_specs()
    for word in FEATURE_WORDS:
        yield from featured_specs((word,))


def plain_specs() -> Iterator[AttentionSpec]:
    """The specs of the defaults that between them serve every attention() without features."""
    # Of several the delta kernel is one and the same.
    yield from dict.fromkeys(
        spec.for_direction(direction) for direction in DEFAULT_DIRECTIONS for spec in _forward()
    )
    yield from _forward((MAX_HEAD_DIM,))


def featured_specs(features: FeatureSet) -> Iterator[AttentionSpec]:
    """The specs of the defaults of a feature set; what of it changes no backward kernel has no
    backward here.
    """
    found: dict[AttentionSpec, None] = {}
    for plain in _forward():
        if "fp8" in features and unfit_for_fp8(plain):
            continue
        if plain.causal and set(UNMASKED) & set(features):
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


def in_order(words: Iterable[str]) -> FeatureSet:
    """These features as a set. Raises InvalidArgument for a word that is none."""
    return next(_forward()).with_features(words).feature_words


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
