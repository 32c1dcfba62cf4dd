"""The rules of a spec: which kinds of attention there are no kernels for, whatever the config.

why_no_spec applies all of them in order; each is a function of one subject.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

from flashgen.errors import InvalidArgument
from flashgen.spec.features import OFF, features_on
from flashgen.spec.vocabulary import (
    DECODING,
    Bias,
    Direction,
    DType,
    KvDType,
    KvScales,
    Mask,
    Precision,
    Rotary,
    check_head_dim,
    why_no_gradient,
)

AnySpec = Any
"""A spec.attention.AttentionSpec, whose module asks these rules when one is made."""

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
_FLAGS = tuple(field for field, off in OFF.items() if off is False)


def why_no_spec(spec: AnySpec) -> str | None:
    """Why these fields make no spec, in one sentence that names the field; None where they do."""
    for rule in _RULES:
        if (reason := rule(spec)) is not None:
            return reason
    return None


def _values(spec: AnySpec) -> str | None:
    for field, values in _VALUES.items():
        if getattr(spec, field) not in values:
            return f"{field} must be one of {', '.join(values)}: got {getattr(spec, field)!r}"
    return None


def _head_dims(spec: AnySpec) -> str | None:
    for field in ("head_dim", "head_dim_v"):
        try:
            check_head_dim(getattr(spec, field), field)
        except InvalidArgument as error:
            return str(error)
    return None


def _precision(spec: AnySpec) -> str | None:
    if spec.precision == "tf32" and spec.dtype != "float32":
        return f"precision tf32 needs dtype float32: got {spec.dtype}"
    return None


def _flags(spec: AnySpec) -> str | None:
    for field in _FLAGS:
        if not isinstance(getattr(spec, field), bool):
            return f"{field} must be true or false: got {getattr(spec, field)!r}"
    return None


def _gradients(spec: AnySpec) -> str | None:
    """What backward kernels there are, and what they know."""
    widest = max(spec.head_dim, spec.head_dim_v)
    if spec.direction not in ("forward", *DECODING) and (
        reason := why_no_gradient(widest, spec.element_bytes)
    ):
        return reason
    if spec.direction == "backward_dbias" and spec.bias != "additive":
        return f"direction backward_dbias needs bias additive: got {spec.bias}"
    return None


def _features(spec: AnySpec) -> str | None:
    """What each feature needs and excludes, as its row says."""
    for row in features_on(spec):
        if row.directions and spec.direction not in row.directions:
            goes = row.goes or f"direction {_listed(row.directions)}"
            return f"{row.label} needs {goes}: got direction {spec.direction}"
        if row.dtypes and spec.dtype not in row.dtypes:
            return f"{row.label} needs dtype {_listed(row.dtypes)}: got {spec.dtype}"
        if row.mask not in (None, spec.mask):
            return f"{row.label} needs mask {row.mask}: got {spec.mask}"
        for field, reason in row.without:
            if getattr(spec, field) != OFF[field]:
                return f"{row.label} excludes {field}, {reason}: got {spec.name}"
    return None


def _listed(words: Sequence[str]) -> str:
    """The words in a sentence: a, b or c."""
    return " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def _delta(spec: AnySpec) -> str | None:
    if spec.direction != "backward_delta":
        return None
    other_dims = spec.head_dim != spec.head_dim_v
    others = set(spec.feature_words) - {"invariant"}
    if spec.causal or others or spec.precision != "ieee" or other_dims:
        return (
            "direction backward_delta reads O and dO alone, so it needs mask none, "
            "precision ieee, no feature and head_dim that of V: "
            f"got {spec.mask}, {spec.precision}, {spec.head_dim} and {spec.head_dim_v}"
        )
    return None


def _dq_of_ds(spec: AnySpec) -> str | None:
    if spec.direction != "backward_dq_of_ds":
        return None
    words = [row.word for row in features_on(spec) if row.in_ds]
    if words or spec.head_dim != spec.head_dim_v:
        return (
            "direction backward_dq_of_ds reads dS and K alone, so it needs head_dim_v that of Q "
            "and no feature that dS has: "
            f"got {spec.head_dim} and {spec.head_dim_v}, {', '.join(words) or 'none'}"
        )
    return None


def _pages(spec: AnySpec) -> str | None:
    if spec.paged and spec.direction == "forward" and not spec.varlen:
        return "paged needs direction decode or append, or forward with varlen: got none"
    return None


def _packed_decode(spec: AnySpec) -> str | None:
    """What a decode of packed sequences is not: it serves forwards of few blocks."""
    if spec.direction != "decode" or not spec.varlen:
        return None
    for row in features_on(spec):
        if row.field in ("indexed", "leftpad", "kv_dtype", "invariant"):
            return (
                f"direction decode with varlen excludes {row.label}, because it serves forwards "
                f"whose keys are split: got {spec.name}"
            )
    return None


def _scales(spec: AnySpec) -> str | None:
    if spec.kv_scales == "page" and not (spec.paged and spec.kv_dtype != "same"):
        return (
            "kv_scales page needs paged and an 8-bit kv_dtype: "
            f"got {'' if spec.paged else 'not '}paged, {spec.kv_dtype}"
        )
    return None


def _scoreless(spec: AnySpec) -> str | None:
    """What the kernels of a cache that have no scores need."""
    if spec.direction not in DECODING or spec.direction == "decode":
        return None
    if set(spec.feature_words) - {"invariant"}:
        return (
            f"direction {spec.direction} has no scores, so it takes no feature: "
            f"got {' and '.join(spec.feature_words)}"
        )
    if spec.causal or spec.precision != "ieee":
        return (
            f"direction {spec.direction} has no scores, so it needs mask none and "
            f"precision ieee: got {spec.mask} and {spec.precision}"
        )
    return None


_RULES = (
    _values, _head_dims, _precision, _flags, _gradients, _features, _delta, _dq_of_ds, _pages,
    _packed_decode, _scales, _scoreless,
)  # fmt: skip
