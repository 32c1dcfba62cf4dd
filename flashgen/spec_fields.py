"""Fields: those of a spec, its name, and what they say of its scores. Judged by spec_rules.py."""

from __future__ import annotations

from dataclasses import dataclass

from flashgen.spec_words import (
    BIAS_SUFFIX,
    FEATURE_WORDS,
    KV_SUFFIX,
    PREFIX,
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
class SpecFields:
    """The fields of an AttentionSpec, which says what they mean, before anybody has judged them."""

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

    @property
    def name(self) -> str:
        """The spec in one word, as it stands in kernel names: fwd_bf16_d128_causal."""
        dtype = "tf32" if self.precision == "tf32" else SHORT_DTYPE[self.dtype]
        dims = f"d{self.head_dim}"
        if self.head_dim_v != self.head_dim:
            dims += f"v{self.head_dim_v}"
        mask = "" if self.mask == "none" else f"_{self.mask}"
        features = BIAS_SUFFIX[self.bias]
        features += "_alibi" * self.alibi + "_dropout" * self.dropout + "_window" * self.window
        features += "_softcap" * self.softcap + "_sink" * self.sink + "_varlen" * self.varlen
        features += "_blockmask" * self.block_mask + "_paged" * self.paged
        features += "" if self.rotary == "none" else f"_rotary_{self.rotary}"
        features += "_indexed" * self.indexed + "_leftpad" * self.leftpad
        features += "_fp8" * self.fp8
        features += KV_SUFFIX[self.kv_dtype] + "_page_scales" * (self.kv_scales == "page")
        return f"{PREFIX[self.direction]}_{dtype}_{dims}{mask}{features}"

    @property
    def causal(self) -> bool:
        """Whether the mask is causal."""
        return self.mask == "causal"

    @property
    def feature_words(self) -> tuple[str, ...]:
        """The features that are on, as --feature calls them."""
        return tuple(
            word for word, (field, value) in FEATURE_WORDS.items() if getattr(self, field) == value
        )

    @property
    def featured(self) -> bool:
        """Whether any feature is on."""
        return self.scores_featured or self.varlen or self.block_mask

    @property
    def scores_featured(self) -> bool:
        """Whether a feature changes the scores of a query and a key, or the sum of a row."""
        positions = self.bias != "none" or self.alibi or self.dropout or self.window
        return positions or self.softcap or self.sink or self.fp8

    @property
    def masked_by_feature(self) -> bool:
        """Whether a feature asks for the positions of queries or keys."""
        return self.bias != "none" or self.alibi or self.dropout or self.window or self.block_mask

    @property
    def masked(self) -> bool:
        """Whether anything but the lengths comes between a query and a key."""
        return self.causal or self.masked_by_feature
