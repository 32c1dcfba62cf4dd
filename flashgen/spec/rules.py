"""The rules of a spec: which kinds of attention there are no kernels for, whatever the config.

why_no_spec is all of them, in the order in which they are told; each is a function of one subject.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, get_args

from flashgen.errors import InvalidArgument
from flashgen.spec.vocabulary import (
    DECODING,
    MAX_BACKWARD_HEAD_DIM,
    Bias,
    Direction,
    DType,
    KvDType,
    KvScales,
    Mask,
    Precision,
    Rotary,
    check_head_dim,
    no_gradient,
)

if TYPE_CHECKING:
    from flashgen.spec.attention import AttentionSpec

_VALUES: dict[str, tuple[str, ...]] = {
    "direction": get_args(Direction),
    "dtype": get_args(DType),
    "mask": get_args(Mask),
    "precision": get_args(Precision),
    "bias": get_args(Bias),
    "rotary": get_args(Rotary),
    "kv_dtype": get_args(KvDType),
    "kv_scales": get_args(KvScales),
}
_FLAGS = (
    "dropout", "alibi", "window", "softcap", "sink", "varlen", "block_mask",
    "paged", "indexed", "leftpad", "fp8",
)  # fmt: skip


def why_no_spec(spec: AttentionSpec) -> str | None:
    """Why these fields make no spec, in one sentence that names the field; None where they do."""
    for rule in _RULES:
        if (reason := rule(spec)) is not None:
            return reason
    return None


def _values(spec: AttentionSpec) -> str | None:
    for field, values in _VALUES.items():
        if getattr(spec, field) not in values:
            return f"{field} must be one of {', '.join(values)}: got {getattr(spec, field)!r}"
    return None


def _head_dims(spec: AttentionSpec) -> str | None:
    for field in ("head_dim", "head_dim_v"):
        try:
            check_head_dim(getattr(spec, field), field)
        except InvalidArgument as error:
            return str(error)
    return None


def _precision(spec: AttentionSpec) -> str | None:
    if spec.precision == "tf32" and spec.dtype != "float32":
        return f"precision tf32 goes with dtype float32: got {spec.dtype}"
    return None


def _flags(spec: AttentionSpec) -> str | None:
    for field in _FLAGS:
        if not isinstance(getattr(spec, field), bool):
            return f"{field} must be true or false: got {getattr(spec, field)!r}"
    return None


def _gradients(spec: AttentionSpec) -> str | None:
    """What backward kernels there are, and what they know."""
    widest = max(spec.head_dim, spec.head_dim_v)
    if spec.direction not in ("forward", *DECODING) and widest > MAX_BACKWARD_HEAD_DIM:
        return no_gradient(widest)
    if spec.direction == "backward_dbias" and spec.bias != "additive":
        return f"direction backward_dbias needs bias additive: got {spec.bias}"
    if spec.direction not in ("forward", "decode") and spec.sink:
        return (
            "sink goes with direction forward and decode: "
            "a backward kernel knows a sink by its LSE alone"
        )
    return None


def _fp8(spec: AttentionSpec) -> str | None:
    if spec.fp8 and (spec.direction != "forward" or spec.dtype == "float32"):
        return (
            "fp8 goes with direction forward, for it has no gradient, and with O of dtype "
            f"float16 or bfloat16: got {spec.direction} and {spec.dtype}"
        )
    return None


def _delta(spec: AttentionSpec) -> str | None:
    if spec.direction != "backward_delta":
        return None
    other_dims = spec.head_dim != spec.head_dim_v
    if spec.causal or spec.featured or spec.precision != "ieee" or other_dims:
        return (
            "direction backward_delta reads O and dO alone, so it goes with mask none, "
            "precision ieee, no feature and head_dim that of V: "
            f"got {spec.mask}, {spec.precision}, {spec.head_dim} and {spec.head_dim_v}"
        )
    return None


def _varlen(spec: AttentionSpec) -> str | None:
    if not spec.varlen:
        return None
    if max(spec.head_dim, spec.head_dim_v) > MAX_BACKWARD_HEAD_DIM:
        return (
            f"varlen goes with head dims to {MAX_BACKWARD_HEAD_DIM}: "
            f"got {spec.head_dim} and {spec.head_dim_v}"
        )
    if spec.fp8:
        return (
            "varlen goes without fp8, whose factors are those of a batch: use float16 or bfloat16"
        )
    if spec.bias != "none":
        return f"varlen goes with bias none, for packed sequences share no scores: got {spec.bias}"
    return None


def _block_mask(spec: AttentionSpec) -> str | None:
    if spec.block_mask and (spec.causal or spec.window or spec.varlen or spec.bias != "none"):
        return (
            "block_mask goes with mask none, and without window, varlen and bias: it says "
            f"itself who sees whom: got {spec.name}"
        )
    return None


def _pages(spec: AttentionSpec) -> str | None:
    packed = spec.direction == "forward" and spec.varlen
    if spec.paged and not packed and spec.direction not in ("decode", "append"):
        return (
            "paged goes with direction decode and append, and with forward and varlen: "
            f"got {spec.direction}"
        )
    if spec.paged and spec.dropout:
        return "paged goes without dropout: a cache is for inference"
    return None


def _cache(spec: AttentionSpec) -> str | None:
    """What only kernels of a cache have."""
    if spec.rotary != "none" and spec.direction != "append":
        return f"rotary goes with direction append: got {spec.direction}"
    if spec.leftpad and spec.direction != "decode":
        return f"leftpad goes with direction decode: got {spec.direction}"
    if spec.indexed and (spec.direction not in ("decode", "append") or spec.paged):
        return (
            "indexed goes with direction decode and append of a cache that is not paged, whose "
            f"block table names the pages: got {spec.direction}{', paged' * spec.paged}"
        )
    return None


def _kv(spec: AttentionSpec) -> str | None:
    """Of what elements a cache is."""
    if spec.kv_dtype != "same" and (
        spec.direction not in ("decode", "append") or spec.dtype == "float32"
    ):
        return (
            f"kv_dtype {spec.kv_dtype} goes with direction decode and append, and with dtype "
            f"float16 and bfloat16: got {spec.direction} and {spec.dtype}"
        )
    if spec.kv_scales == "page" and not (spec.paged and spec.kv_dtype != "same"):
        return (
            "kv_scales page goes with paged and an 8-bit kv_dtype: "
            f"got {'' if spec.paged else 'not '}paged, {spec.kv_dtype}"
        )
    return None


def _decoding(spec: AttentionSpec) -> str | None:
    """What kernels of a cache have not."""
    if spec.direction not in DECODING:
        return None
    if spec.varlen or spec.block_mask:
        return (
            f"{'varlen' if spec.varlen else 'block_mask'} goes with attention and its "
            f"gradients: direction {spec.direction} has the lengths of its cache"
        )
    if spec.dropout:
        return f"dropout goes with training: direction {spec.direction} serves a cache, without"
    if spec.direction == "decode":
        return None
    if spec.featured:
        return (
            f"direction {spec.direction} has no scores, so it goes with no feature: "
            f"got {' and '.join(spec.feature_words)}"
        )
    if spec.causal or spec.precision != "ieee":
        return (
            f"direction {spec.direction} has no scores, so it goes with mask none and "
            f"precision ieee: got {spec.mask} and {spec.precision}"
        )
    return None


_RULES = (
    _values, _head_dims, _precision, _flags, _gradients, _fp8, _delta, _varlen, _block_mask,
    _pages, _cache, _kv, _decoding,
)  # fmt: skip
