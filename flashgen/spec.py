"""What is asked: the kind of attention, an AttentionSpec. It decides which kernels are possible.

Its words are those of spec_words.py, which are had here too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from flashgen.errors import InvalidArgument
from flashgen.spec_fields import SpecFields
from flashgen.spec_rules import why_no_spec
from flashgen.spec_words import (
    BACKWARD,
    DECODING,
    DTYPE_BYTES,
    FEATURE_WORDS,
    FEATURES,
    HEAD_DIM_STEP,
    KV_WORDS,
    MAX_BACKWARD_HEAD_DIM,
    MAX_HEAD_DIM,
    MIN_HEAD_DIM,
    PREFIX,
    PRODUCTS,
    SHORT_DTYPE,
    UNMASKED,
    Direction,
    DType,
    Mask,
    Precision,
    Rotary,
    check_head_dim,
    no_gradient,
    padded,
    parse_dtype,
)

__all__ = [
    "BACKWARD",
    "DECODING",
    "DTYPE_BYTES",
    "FEATURES",
    "FEATURE_WORDS",
    "HEAD_DIM_STEP",
    "KV_WORDS",
    "MAX_BACKWARD_HEAD_DIM",
    "MAX_HEAD_DIM",
    "MIN_HEAD_DIM",
    "PRODUCTS",
    "SHORT_DTYPE",
    "UNMASKED",
    "AttentionSpec",
    "DType",
    "Direction",
    "Mask",
    "Precision",
    "Rotary",
    "check_head_dim",
    "no_gradient",
    "padded",
    "parse_dtype",
]


@dataclass(frozen=True, kw_only=True)
class AttentionSpec(SpecFields):
    """One kind of attention: whatever may change the text of a kernel, and no sizes.

    head_dim is the last dimension of Q and K, head_dim_v that of V and O. precision says how
    float32 operands are multiplied (16-bit ones have one way, "ieee"). dropout, bias, alibi,
    window, softcap and sink are the features of features.py, each a kernel of its own; how wide the
    window is and where the cap lies, a kernel is told when it runs. varlen: sequences of several
    lengths are packed one behind the other, as sequences.py says. block_mask: tiles are those that
    a block mask lists, as block_mask.py says. paged: the cache that decode, or
    a forward with varlen, reads, or append writes, lies in pages; rotary: append rotates new keys,
    and queries; indexed: a tensor says which row of the cache is whose; leftpad: another, where the
    keys that decode reads begin; kv_dtype and kv_scales: the elements of the cache, and what of it
    has a scale. fp8: Q, K and V of a forward are float8_e4m3, and dtype is that of O. Raises
    InvalidArgument, naming the field.
    """

    def __post_init__(self) -> None:
        if (reason := why_no_spec(self)) is not None:
            raise InvalidArgument(reason)

    def for_direction(self, direction: Direction) -> AttentionSpec:
        """The spec of another kernel of the same attention, a forward or a backward one.

        Backward kernels have no sink: LSE includes it, and its own gradient is no kernel's.
        """
        if direction == "backward_delta":
            return AttentionSpec(
                direction=direction,
                dtype=self.dtype,
                head_dim=self.head_dim_v,
                head_dim_v=self.head_dim_v,
                mask="none",
            )
        if direction in ("combine", "append"):
            head_dim = self.head_dim_v if direction == "combine" else self.head_dim
            paged = self.paged and direction == "append"
            return AttentionSpec(
                direction=direction,
                dtype=self.dtype,
                head_dim=head_dim,
                head_dim_v=self.head_dim_v,
                mask="none",
                paged=paged,
                indexed=self.indexed and direction == "append",
                kv_dtype=self.kv_dtype if direction == "append" else "same",
                kv_scales=self.kv_scales if direction == "append" else "head",
            )
        sink = self.sink and direction in ("forward", "decode")
        return replace(self, direction=direction, sink=sink)

    def with_features(self, words: Iterable[str]) -> AttentionSpec:
        """The spec with these features on, by FEATURE_WORDS. Raises InvalidArgument."""
        found = self
        for word in words:
            if word not in FEATURE_WORDS:
                known = ", ".join(FEATURE_WORDS)
                raise InvalidArgument(f"--feature must be one of {known}: got {word!r}")
            field, value = FEATURE_WORDS[word]
            if field == "bias" and found.bias not in ("none", value):
                raise InvalidArgument("--feature takes one of bias and boolean-mask: got both")
            found = replace(found, **{field: value})  # type: ignore[arg-type]  # as the table says
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
            self.bias,
            self.alibi,
            self.dropout,
            self.window,
            self.softcap,
            self.sink,
            self.varlen,
            self.block_mask,
            self.paged,
            self.rotary,
            self.indexed,
            self.leftpad,
            self.fp8,
            self.kv_dtype != "same",
            self.kv_dtype,
            self.kv_scales,
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
    def operand_dtype(self) -> str:
        """The elements of Q, and of K and V unless kv_dtype says another, as torch calls them."""
        return "float8_e4m3fn" if self.fp8 else self.dtype

    @property
    def takes_diagonal(self) -> bool:
        """Whether the kernel is told the diagonal: a causal mask ends there, ALiBi and windows
        count from there.
        """
        return self.causal or self.alibi or self.window

    @property
    def counts_keys(self) -> bool:
        """Whether a kernel of packed sequences is told the places of all keys: dropout counts them,
        and a program that owns keys zeroes those of no sequence.
        """
        return self.dropout or self.direction in ("backward_dkv", "backward_fused")

    @property
    def cache_options(self) -> str:
        """What a cache is, as the command line has it: " --paged --kv fp8", or nothing."""
        kv = (self.kv_dtype, self.kv_scales)
        words = "".join(f" --kv {word}" for word, means in KV_WORDS.items() if means == kv)
        return " --paged" * self.paged + words
