"""Features: what a call may bring besides q, k and v, such as a bias, a window or packed sequences.

FEATURES lists each one once. Names, command-line words, rules, signatures and cache keys follow
from its rows. inputs/features.py holds the tensors and numbers of one call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, get_args

from flashgen.spec.vocabulary import (
    BACKWARD,
    OF_DS,
    Direction,
    DType,
    KvDType,
    KvScales,
    Mask,
)


class Argument(NamedTuple):
    """An argument that a feature adds to the kernels that have scores.

    type is as kernels/parameters.py has it; note the comment behind its name. A number with
    specialized False never decides what Triton compiles.
    """

    name: str
    type: str
    note: str = ""
    specialized: bool = True
    unless_causal: bool = False


@dataclass(frozen=True, kw_only=True)
class Feature:
    """One feature: a field of AttentionSpec at one of its values.

    field, value   of the spec; off is the value of a spec without it
    word           what --feature calls it; "" for what only a cache has
    suffix, short  in a kernel's name, and where that would be long
    given          whether a call brings it, by its inputs.features.Features
    directions     the kernels that have it, goes says so in words; () for all that have scores
    mask, dtypes   what it needs, if not all do
    without        fields of other features that it excludes, each with the reason
    scores         whether it changes the scores of a query and a key, or the sum of a row
    positions      whether a kernel needs the positions of queries and keys for it
    diagonal       whether it counts from the causal diagonal, masked or not
    first_keys     whether it hides the first keys from a row, so that a kernel begins later
    limit          whether a call brings numbers alone, and no tensor
    per_head       the field of Features of the one small tensor, of a number for each head, that it
                   brings alone
    arguments      of the kernels that have scores, in the order in which templates declare them
    """

    field: str
    value: bool | str = True
    off: bool | str = False
    word: str = ""
    suffix: str
    short: str
    given: Callable[[Any], bool] = lambda _: False
    directions: tuple[Direction, ...] = ()
    goes: str = ""
    mask: Mask | None = None
    dtypes: tuple[DType, ...] = ()
    without: tuple[tuple[str, str], ...] = ()
    scores: bool = False
    positions: bool = False
    diagonal: bool = False
    first_keys: bool = False
    limit: bool = False
    per_head: str = ""
    arguments: tuple[Argument, ...] = ()

    @property
    def in_ds(self) -> bool:
        """Whether it changes the gradient of the scores, but not which tiles of it there are."""
        return self.scores and not self.first_keys

    @property
    def label(self) -> str:
        """What errors call it: the field, and its value if that is a word."""
        return self.field if self.value is True else f"{self.field} {self.value}"


_SIXTEEN_BITS: tuple[DType, ...] = ("float16", "bfloat16")
_IN_BLOCKS: tuple[Direction, ...] = ("forward", *BACKWARD, "backward_dbias")
_ATTENTION = (*_IN_BLOCKS, *OF_DS)
_OF_A_CACHE: tuple[Direction, ...] = ("decode", "append")
_BIAS_STRIDES = (
    *(Argument(name=f"stride_bias_{d}", type="i32:16") for d in "bhq"),
    Argument(name="stride_bias_k", type="i32:1"),
)
_OF_ITS_OWN = "because it says alone which keys a query sees"

FEATURES: tuple[Feature, ...] = (
    Feature(
        field="bias", value="additive", off="none", word="bias", suffix="_bias", short="_bias",
        scores=True, positions=True,
        given=lambda call: call.bias_kind == "additive",
        arguments=(
            Argument(name="bias_ptr", type="*{out}:16"),
            *_BIAS_STRIDES,
        ),
    ),
    Feature(
        field="bias", value="boolean", off="none", word="boolean-mask", suffix="_boolmask",
        short="_bm", scores=True, positions=True,
        given=lambda call: call.bias_kind == "boolean",
        arguments=(
            Argument(name="bias_ptr", type="*u8:16"),
            *_BIAS_STRIDES,
        ),
    ),
    Feature(
        field="alibi", word="alibi", suffix="_alibi", short="_ali",
        scores=True, positions=True, diagonal=True, per_head="slopes",
        given=lambda call: call.slopes is not None,
        arguments=(
            Argument(name="slopes_ptr", type="*fp32:16"),
            Argument(name="stride_slopes_b", type="i32", specialized=False),
            Argument(
                name="stride_slopes_h", type="i32", specialized=False,
                note="ALiBi: (batch, heads) float32",
            ),
        ),
    ),
    Feature(
        field="dropout", word="dropout", suffix="_dropout", short="_drop",
        scores=True, positions=True, directions=_ATTENTION, goes="attention or its gradients",
        given=lambda call: call.dropout_p > 0.0,
        arguments=(
            Argument(name="rng_ptr", type="*i64:16"),
            Argument(name="keep_threshold", type="i32", specialized=False),
            Argument(
                name="keep_scale", type="fp32",
                note="seed and offset, int64; least int32 kept; 1 / share kept",
            ),
        ),
    ),
    Feature(
        field="window", word="window", suffix="_window", short="_win",
        scores=True, positions=True, diagonal=True, first_keys=True, limit=True,
        given=lambda call: call.window is not None,
        arguments=(
            Argument(name="window_left", type="i32", specialized=False),
            Argument(
                name="window_right", type="i32", specialized=False, unless_causal=True,
                note="of key i + diagonal: how many more row i sees",
            ),
        ),
    ),
    Feature(
        field="chunk", word="chunk", suffix="_chunk", short="_chk",
        scores=True, positions=True, diagonal=True, first_keys=True, mask="causal",
        given=lambda call: call.chunk > 0,
        without=(("window", "because a window begins at another key"),),
        arguments=(
            Argument(name="chunk", type="i32", specialized=False),
            Argument(
                name="chunk_start_ptr", type="*i32:16",
                note="row i sees the chunk of key i + diagonal; (batch,) begin of chunk 0",
            ),
        ),
    ),
    Feature(
        field="softcap", word="softcap", suffix="_softcap", short="_cap",
        scores=True, limit=True, given=lambda call: call.softcap > 0.0,
        arguments=(
            Argument(name="cap_log2e", type="fp32"),
            Argument(
                name="inverse_cap", type="fp32", note="cap of the scores * log2(e); 1 / cap_log2e"
            ),
        ),
    ),
    Feature(
        field="sink", word="sink", suffix="_sink", short="_sink", scores=True,
        per_head="sinks", given=lambda call: call.sinks is not None,
        directions=("forward", "decode"),
        goes="direction forward or decode, because a backward kernel reads it from LSE",
        arguments=(Argument(name="sinks_ptr", type="*fp32:16", note="(heads) contiguous"),),
    ),
    Feature(
        field="varlen", word="varlen", suffix="_varlen", short="_var",
        given=lambda call: call.sequences is not None,
        directions=(*_ATTENTION, "decode"),
        goes="attention, its gradients or decode, because kernels without scores have no queries",
        without=(
            ("fp8", "which has factors for each batch entry: use float16 or bfloat16"),
            ("bias", "because a bias is not packed"),
        ),
    ),
    Feature(
        field="block_mask", word="block-mask", suffix="_blockmask", short="_blk",
        positions=True,
        given=lambda call: call.block_mask is not None,
        directions=_IN_BLOCKS,
        goes="attention or its gradients without dS, because a cache has lengths of its own",
        mask="none",
        without=(
            ("window", _OF_ITS_OWN), ("varlen", _OF_ITS_OWN), ("bias", _OF_ITS_OWN),
        ),
    ),
    Feature(
        field="paged", suffix="_paged", short="_pg",
        given=lambda call: call.sequences is not None and call.sequences.paged,
        directions=("forward", *_OF_A_CACHE),
        without=(("dropout", "because a cache is for inference"),),
    ),
    Feature(
        field="rotary", value="halves", off="none", suffix="_rotary_halves", short="_rot",
        directions=("append",),
    ),
    Feature(
        field="rotary", value="interleaved", off="none", suffix="_rotary_interleaved",
        short="_roti", directions=("append",),
    ),
    Feature(
        field="indexed", suffix="_indexed", short="_idx",
        directions=_OF_A_CACHE,
        without=(("paged", "because a block table names the pages"),),
    ),
    Feature(
        field="leftpad", suffix="_leftpad", short="_lpad",
        directions=("decode",),
    ),
    Feature(
        field="fp8", word="fp8", suffix="_fp8", short="_fp8", scores=True,
        given=lambda call: call.fp8 is not None,
        directions=("forward",), goes="direction forward, because it has no gradient",
        dtypes=_SIXTEEN_BITS,
        arguments=(
            *(
                Argument(
                    name=f"{x}_descale_ptr", type="*fp32:16",
                    note="(batch, kv_heads) float32" * (x == "v"),
                )
                for x in "qkv"
            ),
            *(
                Argument(name=f"stride_{x}_descale_{d}", type="i32", specialized=False)
                for x in "qkv"
                for d in "bh"
            ),
        ),
    ),
    Feature(
        field="kv_dtype", value="float8_e4m3", off="same", suffix="_kv_fp8", short="_kvf8",
        directions=_OF_A_CACHE, dtypes=_SIXTEEN_BITS,
    ),
    Feature(
        field="kv_dtype", value="int8", off="same", suffix="_kv_int8", short="_kvi8",
        directions=_OF_A_CACHE, dtypes=_SIXTEEN_BITS,
    ),
    Feature(
        field="kv_scales", value="page", off="head", suffix="_page_scales", short="_pgs",
        directions=_OF_A_CACHE,
    ),
    Feature(
        field="invariant", word="invariant", suffix="_invariant", short="_inv",
        limit=True, given=lambda call: call.invariant,
        directions=(
            "forward", "backward_delta", "backward_dkv", "backward_dq", "decode", "combine",
        ),
        goes="attention, decode, or a gradient that each program computes alone",
        without=(
            ("bias", "whose shape differs between prefill and decode: use window, chunk or ALiBi"),
            ("dropout", "which depends on the position in a batch"),
            ("block_mask", "whose blocks are not the segments of keys"),
            ("fp8", "because decode has no such kernel"),
            ("kv_dtype", "because a prefill reads 16 bits"),
        ),
    ),
)  # fmt: skip
"""Every feature, in the order of fields in AttentionSpec, of suffixes in names and of words."""

OFF: dict[str, bool | str] = {row.field: row.off for row in FEATURES}
"""The fields of a spec that say which features are on, and what says that they are off. Tables
write such a field only where it is on."""
PER_HEAD: dict[str, Feature] = {row.per_head: row for row in FEATURES if row.per_head}
"""The features that bring a number for each head, by its field of Features. Kept calls have those
tensors in this order."""
FEATURE_WORDS: dict[str, Feature] = {row.word: row for row in FEATURES if row.word}
"""The features that --feature turns on, by what it calls them."""
KV_WORDS: dict[str, tuple[KvDType, KvScales]] = {
    "fp8": ("float8_e4m3", "head"),
    "fp8-page": ("float8_e4m3", "page"),
    "int8": ("int8", "head"),
    "int8-page": ("int8", "page"),
}
"""What --kv calls 8-bit caches: kv_dtype and kv_scales."""


def features_on(spec: object) -> tuple[Feature, ...]:
    """The features of a spec, or of anything with its fields."""
    return tuple(row for row in FEATURES if getattr(spec, row.field) == row.value)


def masks_of(words: Iterable[str]) -> tuple[Mask, ...]:
    """The masks that features need, by their words; words of none are passed over."""
    needed = {FEATURE_WORDS[word].mask for word in words if word in FEATURE_WORDS} - {None}
    return tuple(mask for mask in get_args(Mask) if needed <= {mask})
