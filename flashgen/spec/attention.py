"""AttentionSpec, the kind of attention that decides which kernels are possible, and the names and
limits of its fields.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from flashgen.errors import InvalidArgument
from flashgen.spec.features import FEATURE_WORDS, FEATURES, KV_WORDS, OFF, Argument, features_on
from flashgen.spec.rules import why_no_spec
from flashgen.spec.vocabulary import (
    DTYPE_BYTES,
    PREFIX,
    PRODUCTS,
    SHORT_DTYPE,
    Bias,
    Direction,
    DType,
    KvDType,
    KvScales,
    Mask,
    Precision,
    Rotary,
)


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """One kind of attention: whatever may change the text of a kernel, and no sizes.

    Features are on or off; how wide a window is and the value of a cap are arguments of a launch.

    Args:
        direction: forward, decode, append, combine, or a kernel of the backward.
        dtype: of Q, K, V and O; with fp8 of O alone.
        head_dim: the last dimension of Q and K.
        head_dim_v: the last dimension of V and O.
        mask: none or causal.
        precision: how float32 operands are multiplied; 16-bit ones have one way, "ieee".
        dropout: elements of P are dropped.
        bias: none, additive or boolean.
        alibi: slopes of ALiBi.
        window: a query sees keys near its diagonal.
        chunk: a query sees the keys of its chunk.
        softcap: scores are capped by tanh.
        sink: a row sums a score besides.
        varlen: sequences of several lengths are packed one behind the other (inputs/packed.py).
        block_mask: tiles are those that a block mask lists (inputs/block_mask.py).
        paged: the cache that is read or written lies in pages.
        rotary: append rotates new keys, and queries.
        indexed: a tensor says which row of the cache is whose.
        leftpad: a tensor says where the keys that decode reads begin.
        fp8: Q, K and V of a forward are float8_e4m3.
        kv_dtype: the elements of the cache, if they are others.
        kv_scales: what of an 8-bit cache has a scale.
        invariant: a row has the same bits whatever else is computed (schedules/numeric_class.py).

    Raises:
        InvalidArgument: naming the field.

    Examples:
        >>> from flashgen.spec import AttentionSpec
        >>> AttentionSpec(dtype="bfloat16", head_dim=128, head_dim_v=128, mask="causal").name
        'fwd_bf16_d128_causal'
    """

    direction: Direction = "forward"
    dtype: DType
    head_dim: int
    head_dim_v: int
    mask: Mask
    precision: Precision = "ieee"
    dropout: bool = False
    bias: Bias = "none"
    alibi: bool = False
    window: bool = False
    chunk: bool = False
    softcap: bool = False
    sink: bool = False
    varlen: bool = False
    block_mask: bool = False
    paged: bool = False
    rotary: Rotary = "none"
    indexed: bool = False
    leftpad: bool = False
    fp8: bool = False
    kv_dtype: KvDType = "same"
    kv_scales: KvScales = "head"
    invariant: bool = False

    def __post_init__(self) -> None:
        if (reason := why_no_spec(self)) is not None:
            raise InvalidArgument(reason)

    @property
    def name(self) -> str:
        """The spec in one word, as in kernel names: fwd_bf16_d128_causal."""
        return self.plain_name + "".join(row.suffix for row in features_on(self))

    @property
    def short_names(self) -> tuple[str, str]:
        """The same with its features abbreviated, and its mask too, for names of kernels that would
        be long.
        """
        short = self.plain_name + "".join(row.short for row in features_on(self))
        return short, short.replace("_causal", "_caus")

    @property
    def plain_name(self) -> str:
        """Its name without features."""
        dtype = "tf32" if self.precision == "tf32" else SHORT_DTYPE[self.dtype]
        dims = f"d{self.head_dim}"
        if self.head_dim_v != self.head_dim:
            dims += f"v{self.head_dim_v}"
        mask = "" if self.mask == "none" else f"_{self.mask}"
        return f"{PREFIX[self.direction]}_{dtype}_{dims}{mask}"

    @property
    def causal(self) -> bool:
        """Whether the mask is causal."""
        return self.mask == "causal"

    @property
    def feature_words(self) -> tuple[str, ...]:
        """The features that are on, as --feature calls them."""
        return tuple(row.word for row in features_on(self) if row.word)

    @property
    def featured(self) -> bool:
        """Whether any feature of attention is on."""
        return any(row.word for row in features_on(self))

    @property
    def scores_featured(self) -> bool:
        """Whether a feature changes the scores of a query and a key, or the sum of a row."""
        return any(row.scores for row in features_on(self))

    @property
    def masked_by_feature(self) -> bool:
        """Whether a feature needs the positions of queries or keys."""
        return any(row.positions for row in features_on(self))

    @property
    def masked(self) -> bool:
        """Whether anything but the lengths comes between a query and a key."""
        return self.causal or self.masked_by_feature

    @property
    def hides_first_keys(self) -> bool:
        """Whether a feature hides the first keys from a row, so that a kernel begins later."""
        return any(row.first_keys for row in features_on(self))

    @property
    def feature_arguments(self) -> tuple[Argument, ...]:
        """The arguments that features add to a kernel that has scores, in their order there."""
        return tuple(
            each
            for row in features_on(self)
            for each in row.arguments
            if not (self.causal and each.unless_causal)
        )

    def for_direction(self, direction: Direction) -> AttentionSpec:
        """The spec of another kernel of the same attention, a forward or a backward one.

        Backward kernels have no sink: LSE includes it, and its own gradient is no kernel's. That of
        dQ = dS K has only the features that hide keys: dS has the others.
        """
        if direction in _KEPT:
            fields: dict[str, Any] = {name: getattr(self, name) for name in _KEPT[direction]}
            return AttentionSpec(
                direction=direction,
                dtype=self.dtype,
                head_dim=self.head_dim if direction == "append" else self.head_dim_v,
                head_dim_v=self.head_dim_v,
                mask="none",
                **fields,
            )
        if direction == "backward_dq_of_ds":
            off: dict[str, Any] = {row.field: row.off for row in features_on(self) if row.in_ds}
            return replace(self, direction=direction, head_dim_v=self.head_dim, **off)
        sink = self.sink and direction in ("forward", "decode")
        return replace(self, direction=direction, sink=sink)

    def with_features(self, words: Iterable[str]) -> AttentionSpec:
        """The spec with these features on, by FEATURE_WORDS. Raises InvalidArgument."""
        found = self
        for word in words:
            if word not in FEATURE_WORDS:
                known = ", ".join(FEATURE_WORDS)
                raise InvalidArgument(f"--feature must be one of {known}: got {word!r}")
            row = FEATURE_WORDS[word]
            if getattr(found, row.field) not in (row.off, row.value):
                one, other = (each.word for each in FEATURES if each.field == row.field)
                raise InvalidArgument(f"--feature takes one of {one} and {other}: got both")
            found = replace(found, **{row.field: row.value})  # type: ignore[arg-type]  # a field
        return found

    @property
    def sort_key(self) -> tuple[object, ...]:
        """Order of specs in tables and listings."""
        return (
            list(PREFIX).index(self.direction),
            self.dtype,
            self.precision,
            self.head_dim,
            self.head_dim_v,
            self.mask != "none",
            *(_PLACE[field, getattr(self, field)] for field in OFF),
        )

    @property
    def products(self) -> int:
        """Matrix products of one tile of scores; 0 where there are no scores."""
        return sum(PRODUCTS.get(self.direction, ()))

    @property
    def element_bytes(self) -> int:
        """Bytes of one element of Q, K, V and O."""
        return DTYPE_BYTES[self.dtype]

    @property
    def kv_bytes(self) -> int:
        """Bytes of one element of K and V."""
        return self.operand_bytes if self.kv_dtype == "same" else 1

    @property
    def operand_bytes(self) -> int:
        """Bytes of one element of Q."""
        return 1 if self.fp8 else self.element_bytes

    @property
    def matrix_rate(self) -> float:
        """How fast matrix units multiply its operands, relative to 16-bit ones: tf32 at half the
        rate, fp8 at twice (data sheets of the A100, H100, L4 and B200, white papers of GeForces).
        """
        return 0.5 if self.precision == "tf32" else 2.0 if self.fp8 else 1.0

    @property
    def operand_dtype(self) -> str:
        """The elements of Q, and of K and V unless kv_dtype says another, as torch calls them."""
        return "float8_e4m3fn" if self.fp8 else self.dtype

    @property
    def takes_diagonal(self) -> bool:
        """Whether the diagonal is an argument of the kernel: a causal mask ends there, ALiBi and
        windows count from it.
        """
        return self.causal or any(row.diagonal for row in features_on(self))

    @property
    def cache_options(self) -> str:
        """The command-line options of a cache: " --paged --kv fp8", or ""."""
        kv = (self.kv_dtype, self.kv_scales)
        words = "".join(f" --kv {word}" for word, means in KV_WORDS.items() if means == kv)
        return " --paged" * self.paged + words


_KEPT: dict[str, tuple[str, ...]] = {
    "backward_delta": ("invariant",),
    "combine": ("invariant",),
    "append": ("paged", "indexed", "kv_dtype", "kv_scales"),
}
"""Which features the kernels without scores have of those of the attention that they are for."""

_PLACE: dict[tuple[str, bool | str], int] = {
    **{(row.field, row.off): 0 for row in FEATURES},
    **{(row.field, row.value): number for number, row in enumerate(FEATURES, 1)},
}
"""Where the values of a field stand among each other in a listing."""


_DTYPES = {short: (dtype, "ieee") for dtype, short in SHORT_DTYPE.items()} | {
    "tf32": ("float32", "tf32")
}
_NAME = re.compile(
    rf"(?P<direction>{'|'.join(PREFIX.values())})_(?P<dtype>{'|'.join(_DTYPES)})"
    r"_d(?P<dim>[0-9]{1,4})(v(?P<dim_v>[0-9]{1,4}))?(?P<causal>_causal)?"
    + "".join(f"(?P<{row.field}_{row.value}>{row.suffix})?" for row in FEATURES)
)


@functools.lru_cache(4096)
def spec_of(name: str) -> AttentionSpec:
    """The spec that a name like fwd_bf16_d128_causal names. Raises InvalidArgument."""
    found = _NAME.fullmatch(name)
    if found is None:
        raise InvalidArgument(f"spec must be a name like fwd_bf16_d128_causal: got {name!r}")
    dtype, precision = _DTYPES[found["dtype"]]
    direction = next(word for word, prefix in PREFIX.items() if prefix == found["direction"])
    features = {row.field: row.value for row in FEATURES if found[f"{row.field}_{row.value}"]}
    spec = AttentionSpec(
        direction=direction,  # type: ignore[arg-type]  # of the words in the pattern
        dtype=dtype,  # type: ignore[arg-type]
        precision=precision,  # type: ignore[arg-type]
        head_dim=int(found["dim"]),
        head_dim_v=int(found["dim_v"] or found["dim"]),
        mask="causal" if found["causal"] else "none",
        **features,  # type: ignore[arg-type]
    )
    if spec.name != name:
        raise InvalidArgument(f"spec must be written as its name {spec.name}: got {name!r}")
    return spec
