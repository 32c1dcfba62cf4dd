"""What of a spec and a config changes the text of a kernel, and the name of that text.

Numbers are parameters of the text (kernels/constants.py). Where a number decides between two texts,
a field of Structure has the decision: templates branch on it, and name_in_words() names it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from flashgen.spec.attention import AttentionSpec
from flashgen.spec.config import (
    BY_KEYS,
    LOADS_LABEL,
    LONGEST_NAME,
    ORDER_LABEL,
    KernelConfig,
    s_places,
    sums_one,
)
from flashgen.spec.features import Feature, features_on
from flashgen.spec.vocabulary import PREFIX, PRODUCTS
from flashgen.spec.whole_rows import k_parts, o_parts

_OF_TILES = ("forward", "backward_dkv", "backward_dq", "backward_fused")
"""Directions that have several schedules, and loads by descriptor."""
_PARTS = {2: "halves", 3: "thirds", 4: "quarters", 8: "eighths"}


@dataclass(frozen=True, kw_only=True)
class Structure:
    """What numbers decide about a text.

    pads_k, pads_v: the head dims of Q and K, or of V and O, are no powers of two, so that pointers
    are masked. k_parts, o_parts: products in parts, as spec/whole_rows.py says. s_places: of
    schedule blackwell, as spec/config.py says. one_sum: a block of dK and dV sums one.
    """

    pads_k: bool
    pads_v: bool
    k_parts: int
    o_parts: int
    s_places: int
    one_sum: bool


@functools.lru_cache(4096)
def structure_of(spec: AttentionSpec, config: KernelConfig) -> Structure:
    """The decisions that numbers make about the text of a kernel; False where it has none."""
    parts_k, parts_o = k_parts(spec, config), o_parts(spec, config)
    exact, pointer = config.head_dims == "exact", config.loads == "pointer"
    fused = spec.direction == "backward_fused"
    # append has no text without masks
    tests = spec.direction != "append" and not config.specialized
    return Structure(
        pads_k=exact and (pointer or fused) and tests and parts_k[-1] > spec.head_dim,
        pads_v=exact and pointer and tests and parts_o[-1] * config.v_parts > spec.head_dim_v,
        k_parts=len(parts_k),
        o_parts=len(parts_o),
        s_places=s_places(spec) if config.halves else 1,
        one_sum=config.halves and sums_one(spec),
    )


def written_features(spec: AttentionSpec) -> tuple[Feature, ...]:
    """The features that change the text of a kernel. Of gradients, invariant changes how P is made
    of unscaled scores, and of dK and dV where tiles of rows begin; else only how it is compiled.
    """
    scaled = spec.alibi or spec.softcap
    by_position = spec.direction == "backward_dkv" and (spec.causal or spec.hides_first_keys)
    gradient = spec.direction in ("backward_dq", "backward_dkv")
    same = spec.direction == "backward_delta" or (gradient and scaled and not by_position)
    return tuple(row for row in features_on(spec) if not (same and row.field == "invariant"))


@functools.lru_cache(4096)
def name_in_words(spec: AttentionSpec, config: KernelConfig) -> str:
    """The name of a kernel's text, which is its function's and its file's: what the text is, and no
    number. Two kernels have one name where they have one text, and only there.
    """
    found = written_features(spec)
    long, short = ([getattr(row, way) for row in found] for way in ("suffix", "short"))
    for features in (long, short):
        words = [*_head(spec), *_features(spec, features), *_schedule(spec, config)]
        name = "_".join([*words, *_variant(spec, config, structure_of(spec, config))])
        if len(name) <= LONGEST_NAME:
            break
    return name


def _head(spec: AttentionSpec) -> list[str]:
    """The direction, how float32 operands are multiplied, and the mask."""
    words = [PREFIX[spec.direction]]
    words += [spec.precision] * (spec.dtype == "float32" and spec.direction in PRODUCTS)
    return words + ["causal"] * spec.causal


def _features(spec: AttentionSpec, suffixes: list[str]) -> list[str]:
    """The features that are on. Which 8 bits a decode reads changes nothing by itself."""
    reads = spec.direction == "decode"
    return [
        "narrow" if reads and row.field == "kv_dtype" else suffix.removeprefix("_")
        for row, suffix in zip(written_features(spec), suffixes, strict=True)
    ]


def _schedule(spec: AttentionSpec, config: KernelConfig) -> list[str]:
    """Schedule, loads and order, of the directions that have several."""
    if spec.direction not in _OF_TILES:
        return []
    words = [config.schedule, LOADS_LABEL[config.loads]]
    words += [ORDER_LABEL[config.order].removeprefix("_")] * (config.order != "plain")
    return words + ["pers"] * config.persistent


def _variant(spec: AttentionSpec, config: KernelConfig, structure: Structure) -> list[str]:
    """Head dims, parts, and what else numbers decide."""
    words = {
        "anydim": config.head_dims == "padded",
        "pad": structure.pads_k and structure.pads_v,
        "padk": structure.pads_k and not structure.pads_v,
        "padv": structure.pads_v and not structure.pads_k,
        f"k_{_PARTS.get(structure.k_parts)}": structure.k_parts > 1,
        f"o_{_PARTS.get(structure.o_parts)}": structure.o_parts > 1,
        "two_s": spec.direction in BY_KEYS and structure.s_places == 2 and not structure.one_sum,
        "one_sum": structure.one_sum,
    }  # fmt: skip
    return [word for word, holds in words.items() if holds]
