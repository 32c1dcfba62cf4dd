"""The parameters of kernels: one table for each direction, in the order of a kernel's head.

A row says what a parameter is called, its type, what its comment says, and whether its value may
decide what Triton compiles. Heads (kernels/render.py), signatures (kernels/signature.py) and
launches (kernels/plan.py) follow from the rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import NamedTuple

from flashgen.kernels.text import text_of
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.config import KernelConfig
from flashgen.spec.features import FEATURES
from flashgen.spec.structure import structure_of
from flashgen.spec.vocabulary import Direction

Given = Callable[[AttentionSpec, KernelConfig], bool]
"""Whether a kernel takes a parameter."""


def _always(spec: AttentionSpec, config: KernelConfig) -> bool:
    return True


class Parameter(NamedTuple):
    """A parameter of a kernel.

    type is as Triton writes it, ":16" behind it for a multiple of 16 bytes or elements. {element}
    is that of Q, {cached} that of K and V, {out} that of results, {whole} the same but float32
    where results are parts; {by_k} and {by_v} are ":16" where the head dim of Q and K, or of V, is
    a multiple of 16. "i32:1" is 1 but for odd tensors, "desc" a descriptor, "constexpr" a number of
    the kernel (kernels/constants.py). note is the comment behind the name, heading one on a line
    before it. A number with specialized False never decides what Triton compiles.

    given says which kernels are given a value. To the others it is None, in texts that have it for
    the sake of their other kernels, as `written` says; None: only its own kernels' texts have it.
    """

    name: str
    type: str = "i32"
    note: str = ""
    specialized: bool = True
    given: Given = _always
    written: Given | None = None
    heading: str = ""

    @property
    def constant(self) -> bool:
        """Whether it is a number that the text is compiled for."""
        return self.type == "constexpr"

    @property
    def comment(self) -> str:
        """What stands behind it in a head."""
        return f"  # {self.note}" if self.note else ""


# Conditions.


def _pointer(spec: AttentionSpec, config: KernelConfig) -> bool:
    return config.loads == "pointer"


def _described(spec: AttentionSpec, config: KernelConfig) -> bool:
    return config.loads == "descriptor"


def _varlen(spec: AttentionSpec, config: KernelConfig) -> bool:
    return spec.varlen


def _one_length(spec: AttentionSpec, config: KernelConfig) -> bool:
    return not spec.varlen


def _merged(spec: AttentionSpec, config: KernelConfig) -> bool:
    return text_of(spec, config) is not None


def _paged(spec: AttentionSpec, config: KernelConfig) -> bool:
    return spec.paged


def _any_dim(spec: AttentionSpec, config: KernelConfig) -> bool:
    return config.head_dims == "padded"


def _rotary(spec: AttentionSpec, config: KernelConfig) -> bool:
    return spec.rotary != "none"


def _scheduled(*schedules: str) -> Given:
    return lambda spec, config: config.schedule in schedules


def _both(*conditions: Given) -> Given:
    return lambda spec, config: all(each(spec, config) for each in conditions)


# Groups of rows.

_ROWS = "(batch, heads, seq_q) float32, contiguous"
_PACKED_ROWS = "(heads, total_q) float32, contiguous"
_OF_V = ("v", "o", "do", "dv", "new_v")


def _pointers(*tensors: str, types: str = "*{element}:16") -> tuple[Parameter, ...]:
    """The pointers of tensors."""
    return tuple(Parameter(f"{x}_ptr", types, given=_pointer) for x in tensors)


def _descriptors(*tensors: str) -> tuple[Parameter, ...]:
    """The descriptors of tensors."""
    first, *others = tensors
    heading = "Descriptors of (batch, heads, seq, head_dim), their blocks [1, 1, rows, padded dim]."
    return (
        Parameter(f"{first}_desc", "desc", given=_described, heading=heading),
        *(Parameter(f"{x}_desc", "desc", given=_described) for x in others),
    )


def _strides(*tensors: str, given: Given = _pointer) -> tuple[Parameter, ...]:
    """The strides of tensors of (batch, heads, seq, dim), packed ones of (heads, total, dim)."""
    return tuple(
        Parameter(
            f"stride_{x}{dim}",
            "i32{by_v}" if x in _OF_V else "i32{by_k}",
            given=_both(given, _one_length) if dim == "b" else given,
        )
        for x in tensors
        for dim in "bhs"
    )


def _cache_strides(given: Given) -> tuple[Parameter, ...]:
    """The strides of K and V, which may be in pages."""
    return tuple(
        Parameter(
            f"stride_{x}{dim}",
            "i32{by_k}" if x == "k" else "i32{by_v}",
            given={
                "p": _both(given, _paged),
                "b": lambda s, c: given(s, c) and not s.paged and not s.varlen,
            }.get(dim, given),
        )
        for x in "kv"
        for dim in "pbhs"
    )


def _of_rows(*names: str) -> tuple[Parameter, ...]:
    """Float32 numbers of each row, such as LSE."""
    return tuple(
        Parameter(f"{name}_ptr", "*fp32:16", note, given=given)
        for name in names
        for note, given in ((_ROWS, _one_length), (_PACKED_ROWS, _varlen))
    )


def _sizes(longest: str, least_key: str = "") -> tuple[Parameter, ...]:
    """Heads, lengths and the diagonal. longest: what the longest packed sequence has."""
    return (
        Parameter("heads", specialized=False),
        Parameter("group", note="query heads per head of K and V", specialized=False),
        Parameter(
            "total_q", note="rows of all sequences, and of none", specialized=False, given=_varlen
        ),
        Parameter(
            "total_k",
            note="keys of all sequences, and of none",
            specialized=False,
            given=lambda s, c: s.varlen and not s.paged,
        ),
        Parameter(
            "total_k",
            note="keys that the pages of a sequence hold",
            specialized=False,
            given=lambda s, c: s.varlen and s.paged,
        ),
        Parameter(
            longest, note="of the longest sequence, at least 1", specialized=False, given=_varlen
        ),
        Parameter(
            "bottom_right",
            note="1: the last row of a sequence is on the diagonal of its last key; 0: the first",
            specialized=False,
            given=lambda s, c: s.varlen and s.takes_diagonal,
            written=_varlen,
        ),
        Parameter("seq_q", specialized=False, given=_one_length),
        Parameter("seq_k", note=least_key, specialized=False, given=_one_length),
        Parameter(
            "diagonal",
            note="row i lies at key i + diagonal: a causal mask ends there, others count from it",
            specialized=False,
            given=lambda s, c: not s.varlen and s.takes_diagonal,
            written=_one_length,
        ),
    )


_HEAD_DIMS = (
    Parameter("head_dim", "i32:16", given=_any_dim, written=_pointer),
    Parameter("head_dim_v", "i32:16", given=_any_dim, written=_pointer),
)


def _takes_fp8(spec: AttentionSpec, config: KernelConfig) -> bool:
    """Whether kernels of a text may have fp8, whose products and sums differ."""
    text = text_of(spec, config)
    if text is None or spec.direction != "forward" or config.schedule == "s_ahead":
        return False
    return not (text.varlen or text.invariant or text.o_parts > 1)


def _written(field: str) -> Given:
    """Which texts have the parameters of a feature."""
    if field == "fp8":
        return _takes_fp8
    if field == "dropout":
        return lambda s, c: s.direction != "decode" and _written("")(s, c)
    if field == "sink":
        return lambda s, c: s.direction in ("forward", "decode") and c.schedule != "s_ahead"
    return lambda s, c: s.direction != "forward" or c.schedule != "s_ahead"


def _of_features() -> tuple[Parameter, ...]:
    """What features add to the kernels that have scores."""

    def given(field: str, value: object, unless_causal: bool) -> Given:
        return lambda s, c: getattr(s, field) == value and not (unless_causal and s.causal)

    return tuple(
        Parameter(
            each.name,
            each.type,
            each.note,
            each.specialized,
            given=given(row.field, row.value, each.unless_causal),
            written=_written(row.field),
        )
        for row in FEATURES
        for each in row.arguments
    )


_SEQUENCES = (
    Parameter(
        "q_begins_ptr", "*i32", "(sequences + 1) int32 or int64: where the rows of each begin",
        specialized=False, given=_varlen,
    ),
    Parameter(
        "q_ends_ptr", "*i32", "(sequences): one behind the last row of each", specialized=False,
        given=_varlen,
    ),
    Parameter("k_begins_ptr", "*i32", specialized=False, given=_varlen),
    Parameter("k_ends_ptr", "*i32", specialized=False, given=_varlen),
    Parameter("sequences", specialized=False, given=_varlen),
)  # fmt: skip
_TABLE = Parameter("table_ptr", "*i32:16", "(batch, pages of a sequence) int32", given=_paged)
_PAGES = (
    Parameter("stride_table", specialized=False, given=_paged),
    Parameter("page_bits", note="log2 of the page size", specialized=False, given=_paged),
)


def _block_mask(spec: AttentionSpec, config: KernelConfig) -> bool:
    return spec.block_mask


_BLOCK_MASK = (
    Parameter(
        "block_counts_ptr", "*i32:16",
        "(lists, 2) int32: how many whole blocks, how many partial ones", given=_block_mask,
    ),
    Parameter("blocks_ptr", "*i32:16", "(lists, listed) int32: their numbers", given=_block_mask),
    Parameter(
        "block_tiles_ptr", "*i32:16",
        "(lists, listed) int32: which of the tiles says of a partial one", given=_block_mask,
    ),
    Parameter(
        "tiles_ptr", "*u8:16",
        "(tiles, BLOCK, BLOCK) uint8: queries by keys, 0 where a key may not be seen",
        given=_block_mask,
    ),
    Parameter(
        "mask_step_b",
        note="from one batch to the next, in units of own_blocks; 0 where they are alike",
        specialized=False, given=_block_mask,
    ),
    Parameter(
        "mask_step_h", note="and from one head to the next", specialized=False, given=_block_mask
    ),
    Parameter("own_blocks", note="lists of a head", specialized=False, given=_block_mask),
    Parameter("listed", specialized=False, given=_block_mask),
)  # fmt: skip


_PLAIN = _scheduled("fa1", "fa2", "s_ahead", "auto")


def _number(name: str, note: str = "", given: Given | None = None, heading: str = "") -> Parameter:
    """A constant."""
    if given is None:
        return Parameter(name, "constexpr", note, heading=heading)
    return Parameter(name, "constexpr", note, given=given, heading=heading)


_TILE = (
    _number("BR"),
    _number("BC"),
    _number("NUM_STAGES", given=_PLAIN),
    _number("STAGES", given=_scheduled("hopper", "blackwell")),
    _number("NUM_WARPS", given=_scheduled("ampere")),
)


def _pads_k(spec: AttentionSpec, config: KernelConfig) -> bool:
    return structure_of(spec, config).pads_k


def _pads_v(spec: AttentionSpec, config: KernelConfig) -> bool:
    return structure_of(spec, config).pads_v


def _fused(spec: AttentionSpec, config: KernelConfig) -> bool:
    return spec.direction == "backward_fused"


_PADDED = (_number("HEAD_DIM_PAD"), _number("HEAD_DIM_V_PAD"))
_WIDTHS = (
    Parameter("HEAD_DIM", "constexpr", given=_pads_k, written=_pointer),
    Parameter("HEAD_DIM_V", "constexpr", given=_pads_v, written=_pointer),
    *_PADDED,
)


def _k_in_parts(spec: AttentionSpec, config: KernelConfig) -> bool:
    return structure_of(spec, config).k_parts > 1


def _o_in_parts(spec: AttentionSpec, config: KernelConfig) -> bool:
    return structure_of(spec, config).o_parts > 1


def _not(condition: Given) -> Given:
    return lambda spec, config: not condition(spec, config)


def _in_parts(*, heading: str = "") -> tuple[Parameter, ...]:
    """The columns of Q, K, V and O that a kernel has in one tile."""
    gluon = _scheduled("ampere")
    return (
        _number("K_PART", given=_both(_k_in_parts, _not(gluon)), heading=heading),
        _number("HEAD_DIM_PAD", given=_both(_not(_k_in_parts), _not(gluon))),
        _number("V_PART", given=_both(_o_in_parts, _not(gluon))),
        _number("HEAD_DIM_V_PAD", given=_both(_not(_o_in_parts), _not(gluon))),
    )


def _invariant(spec: AttentionSpec, config: KernelConfig) -> bool:
    return spec.invariant


_HOPPER = (
    _number("CONSUMER_REGISTERS", given=_scheduled("hopper")),
    _number("PRODUCER_REGISTERS", given=_scheduled("hopper")),
)
_BY_FMA = _number("EXP2_BY_FMA", "of 32 exp2, those that FMA computes", _scheduled("blackwell"))


# One table a direction.

_FORWARD = (
    *_pointers("q"),
    *_pointers("k", "v", types="*{cached}:16"),
    *_pointers("o", types="*{out}:16"),
    *_descriptors("q", "k", "v", "o"),
    *_of_rows("lse"),
    *_strides("q"),
    *_cache_strides(_pointer),
    *_strides("o"),
    Parameter("scale_log2e", "fp32", "softmax scale * log2(e), positive"),
    *_sizes("max_seq_q", "at least 1"),
    *_HEAD_DIMS,
    *_of_features(),
    Parameter(
        "batch_heads",
        note="batch * heads",
        specialized=False,
        given=lambda s, c: c.takes_heads,
        written=_PLAIN,
    ),
    Parameter(
        "heads_together",
        note="of a run: their K and V fit in L2",
        specialized=False,
        given=lambda s, c: c.order == "grouped",
        written=_PLAIN,
    ),
    *_SEQUENCES,
    _TABLE,
    *_PAGES,
    *_BLOCK_MASK,
    *(Parameter(f"{x}_ptr", "*fp32:16", given=_scheduled("fa1")) for x in ("acc", "sum", "max")),
    *_TILE,
    Parameter("HEAD_DIM", "constexpr", given=_pads_k, written=_pointer),
    Parameter("HEAD_DIM_V", "constexpr", given=_pads_v, written=_pointer),
    *_in_parts(),
    _number("SEGMENT", "keys after which a partial sum is closed", _invariant),
    Parameter("V_PARTS", "constexpr", given=lambda s, c: c.v_parts > 1, written=_pointer),
    *(
        _number(name, note, lambda s, c: text_of(s, c) is not None)
        for name, note in (
            ("CAUSAL", ""),
            ("ORDER", "of the tiles of O: plain, longest_first, head_reversal or grouped"),
            ("PRECISION", "of products of float32: ieee or tf32; None of narrower types"),
        )
    ),
    *(
        _number(name, given=lambda s, c: text_of(s, c) is not None and c.schedule == "s_ahead")
        for name in ("FREES_FIRST_K", "FEW_REGISTERS", "SUMS_A_LANE")
    ),
    _number("ROWS_OF_EIGHT", given=lambda s, c: text_of(s, c) is not None and _pointer(s, c)),
    *_HOPPER,
    _BY_FMA,
    _number("RESCALE_LOG2", given=_scheduled("blackwell")),
    _number("SOFTMAX_REGISTERS", given=_scheduled("blackwell")),
    _number("OTHER_REGISTERS", given=_scheduled("blackwell")),
    _number("O_PART", "columns of O that are rescaled at a time", _scheduled("blackwell")),
)

_OF_A_GRADIENT = (
    *_of_features(),
    *_SEQUENCES,
    *_BLOCK_MASK,
    *_TILE,
)
_SWITCHES = tuple(
    Parameter(name, "constexpr", note, given=given, written=given)
    for name, note, given in (
        ("CAUSAL", "", _merged),
        ("INVARIANT", "one multiply-add is written so, and tiles lie by position", _merged),
        ("PRECISION", "of products of float32: ieee or tf32; None of narrower types", _merged),
        ("ROWS_OF_EIGHT", "", _both(_merged, _pointer)),
    )
)
_REGISTERS = (
    *_HOPPER,
    _BY_FMA,
    _number("COMPUTE_REGISTERS", given=_scheduled("blackwell")),
    _number("OTHER_REGISTERS", given=_scheduled("blackwell")),
)

_DKV = (
    *_pointers("q", "k", "v", "do", "dk", "dv"),
    *_descriptors("q", "k", "v", "do", "dk", "dv"),
    *_of_rows("lse", "delta"),
    Parameter(
        "dq_ptr",
        "*fp32:16",
        "(batch, heads, seq_q, head_dim) float32, contiguous: takes dQ / scale",
        given=_both(_fused, _PLAIN),
    ),
    Parameter(
        "dq_ptr",
        "*fp32:16",
        "float32, as many as (batch, heads, whole tiles, padded dim): gets dQ / scale",
        given=_both(_fused, _not(_PLAIN)),
    ),
    *_strides("q", "k", "v", "do", "dk", "dv"),
    Parameter("scale", "fp32", "of the softmax, positive"),
    Parameter("scale_log2e", "fp32", "scale * log2(e)"),
    *_sizes("max_seq_k"),
    *_HEAD_DIMS,
    *_OF_A_GRADIENT,
    Parameter(
        "HEAD_DIM",
        "constexpr",
        given=lambda s, c: (
            _PLAIN(s, c) and c.head_dims == "exact" and (_fused(s, c) or _pads_k(s, c))
        ),
        written=lambda s, c: _fused(s, c) or _pointer(s, c),
    ),
    Parameter("HEAD_DIM_V", "constexpr", given=_pads_v, written=_pointer),
    *_PADDED,
    *_SWITCHES,
    *_REGISTERS,
)

_DQ = (
    *_pointers("q", "k", "v", "do", "dq"),
    *_descriptors("q", "k", "v", "do", "dq"),
    *_of_rows("lse", "delta"),
    *_strides("q", "k", "v", "do", "dq"),
    Parameter("scale", "fp32", "of the softmax, with its sign"),
    Parameter("scale_log2e", "fp32", "its size * log2(e); the sign is in Q"),
    *_sizes("max_seq_q"),
    *_HEAD_DIMS,
    *_OF_A_GRADIENT,
    *_WIDTHS,
    _number("ORDER", "of the tiles of dQ: plain or longest_first", _merged),
    *_SWITCHES,
    *_REGISTERS,
)

_DBIAS = (
    *_pointers("q", "k", "v", "do"),
    Parameter(
        "dbias_ptr", "*{whole}:16", "(batches, heads, rows, keys) of the gradient, contiguous"
    ),
    *_of_rows("lse", "delta"),
    *_strides("q", "k", "v", "do"),
    Parameter("scale_log2e", "fp32", "softmax scale * log2(e), positive"),
    *_sizes("max_seq_q"),
    *_HEAD_DIMS,
    *_of_features(),
    *(
        Parameter(name, note=note, specialized=False)
        for name, note in (
            ("dbias_rows", "rows of the gradient: seq_q, or BR where the bias has one for all"),
            ("dbias_keys", "seq_k, or BC where the bias has one key for all"),
            ("row_tiles", "tiles of the gradient"),
            ("key_tiles", ""),
            ("head_tiles", "heads of the gradient"),
            ("row_steps", "tiles of dS that add to one of the gradient, by dimension"),
            ("key_steps", ""),
            ("head_steps", ""),
            ("batch_steps", ""),
        )
    ),
    *_TILE,
    *_WIDTHS,
    *_SWITCHES,
)

_DELTA = (
    *_pointers("o", "do"),
    Parameter(
        "dlse_ptr", "*fp32:16", "(batch, heads, seq_q) float32; not read where dlse_rows is 0"
    ),
    Parameter("delta_ptr", "*fp32:16", _ROWS),
    *_strides("o", "do"),
    *(Parameter(f"stride_dl{dim}", specialized=False) for dim in "bhs"),
    Parameter("heads", specialized=False),
    Parameter("seq_q", specialized=False),
    Parameter("dlse_rows", note="seq_q, or 0 where LSE has no gradient", specialized=False),
    _HEAD_DIMS[1],
    _number("BR"),
    _number("HEAD_DIM_V"),
    _number("HEAD_DIM_V_PAD"),
    _SWITCHES[3],
)


def _indexed(spec: AttentionSpec, config: KernelConfig) -> bool:
    return spec.indexed


def _scales(*, narrow: Given) -> tuple[Parameter, ...]:
    """The scales of an 8-bit cache."""

    def page(spec: AttentionSpec, config: KernelConfig) -> bool:
        return narrow(spec, config) and spec.kv_scales == "page"

    return (
        Parameter(
            "k_scale_ptr",
            "*fp32:16",
            "(kv_heads) float32, or (pages, kv_heads)",
            given=narrow,
            written=_always,
        ),
        Parameter("v_scale_ptr", "*fp32:16", given=narrow, written=_always),
        *(
            Parameter(f"stride_{x}_scale_{dim}", "i32", "", False, given, written)
            for x in "kv"
            for dim, given, written in (("p", page, _paged), ("h", narrow, _always))
        ),
    )


def _narrow(spec: AttentionSpec, config: KernelConfig) -> bool:
    return spec.kv_dtype != "same"


_ROWS_OF_A_CACHE = Parameter(
    "rows_ptr", "*i32:16", "(batch) int32, the row of the cache that is each sequence's",
    given=_indexed, written=_not(_paged),
)  # fmt: skip

_DECODE = (
    *_pointers("q"),
    *_pointers("k", "v", types="*{cached}:16"),
    Parameter("o_ptr", "*{whole}:16", "of q's type where there is one split, else float32"),
    Parameter(
        "lse_ptr",
        "*fp32:16",
        "(splits, batch, heads, seq_q); invariant: (splits, 2, ...), maximum and sum of each",
    ),
    Parameter("lengths_ptr", "*i32:16", "(batch) int32, keys of each sequence"),
    _TABLE,
    _ROWS_OF_A_CACHE,
    Parameter(
        "leftpad_ptr",
        "*i32:16",
        "(batch) int32, the place of each sequence's first key",
        given=lambda s, c: s.leftpad,
        written=_always,
    ),
    *_scales(narrow=_narrow),
    *_strides("q"),
    *_cache_strides(_pointer),
    *_strides("o"),
    Parameter("stride_part", "i32{by_v}", "of O, from one split to the next"),
    Parameter("stride_lse", note="of LSE, likewise", specialized=False),
    *_PAGES,
    Parameter("scale_log2e", "fp32", "softmax scale * log2(e), positive"),
    Parameter("heads", specialized=False),
    Parameter("group", note="query heads per head of K and V", specialized=False),
    Parameter("seq_q", specialized=False),
    Parameter("seq_k", note="keys that a sequence has room for", specialized=False),
    Parameter("splits", specialized=False),
    *_HEAD_DIMS,
    *_of_features(),
    *_TILE,
    *_WIDTHS[:2],
    *_in_parts(),
    Parameter("V_PARTS", "constexpr", given=lambda s, c: c.v_parts > 1, written=_pointer),
    _number("SEGMENT", "keys of an invariant split"),
    _number("SPLIT_TILES", "tiles that a split has at least"),
    _number("BY_BITS", "float8_e4m3 is widened by arithmetic on bits", given=_not(_k_in_parts)),
    *_SWITCHES,
)

_COMBINE = (
    *(
        Parameter(f"part_{x}_ptr", "*fp32:16", note, given=given)
        for x, note, given in (
            ("o", "(count, batch, heads, seq_q, head_dim_v) float32, contiguous but for count",
             lambda s, c: True),
            ("lse", "(count, batch, heads, seq_q) float32, contiguous but for count",
             _not(_invariant)),
            ("lse", "(count, 2, batch, heads, seq_q) float32, contiguous but for count",
             _invariant),
        )
    ),
    Parameter("o_ptr", "*{out}:16"),
    Parameter("lse_ptr", "*fp32:16", _ROWS),
    Parameter("stride_part", "i32{by_v}"),
    Parameter("stride_lse", specialized=False),
    *_strides("o"),
    Parameter("heads", specialized=False),
    Parameter("seq_q", specialized=False),
    Parameter("count", specialized=False),
    _HEAD_DIMS[1],
    _number("BC", given=_not(_invariant)),
    _number("HEAD_DIM_V"),
    _number("HEAD_DIM_V_PAD"),
)  # fmt: skip

_APPEND = (
    *_pointers("new_k", "new_v"),
    *_pointers("k", "v", types="*{cached}:16"),
    Parameter("q_ptr", "*{element}:16", given=_rotary),
    Parameter("o_ptr", "*{out}:16", "q, rotated", given=_rotary),
    Parameter("lengths_ptr", "*i32:16", "(batch) int32, keys of each sequence before"),
    _TABLE,
    _ROWS_OF_A_CACHE,
    *_scales(narrow=_narrow),
    Parameter("cos_ptr", "*fp32:16", "(positions, rotary_dim / 2)", given=_rotary),
    Parameter("sin_ptr", "*fp32:16", given=_rotary),
    *_strides("new_k", "new_v"),
    *_cache_strides(_pointer),
    *_strides("q", given=_rotary),
    *(Parameter(f"stride_o{dim}", "i32{by_k}", given=_rotary) for dim in "bhs"),  # O is Q, rotated
    *_PAGES,
    Parameter("stride_cos", specialized=False, given=_rotary),
    Parameter("stride_sin", specialized=False, given=_rotary),
    Parameter("heads", note="of Q, where it is rotated; else 0", specialized=False),
    Parameter("kv_heads", specialized=False),
    Parameter("new_keys", specialized=False),
    Parameter("seq_k", note="keys that a sequence has room for", specialized=False),
    Parameter("pool_pages", specialized=False, given=_paged),
    Parameter("cache_rows", specialized=False, given=_both(_indexed, _not(_paged))),
    Parameter("seq_q", specialized=False, given=_rotary),
    Parameter(
        "rotary_dim",
        note="elements of a head that are rotated",
        specialized=False,
        given=_rotary,
    ),
    Parameter(
        "q_step",
        note="1: query i is at place length + i; 0: all are at place length",
        specialized=False,
        given=_rotary,
    ),
    *_HEAD_DIMS,
    _number("BR"),
    _number("HEAD_DIM", given=_not(_any_dim)),
    _number("HEAD_DIM_V", given=_not(_any_dim)),
    *_PADDED,
)

TABLES: dict[Direction, tuple[Parameter, ...]] = {
    "forward": _FORWARD,
    "backward_delta": _DELTA,
    "backward_dkv": _DKV,
    "backward_fused": _DKV,
    "backward_dq": _DQ,
    "backward_dbias": _DBIAS,
    "decode": _DECODE,
    "combine": _COMBINE,
    "append": _APPEND,
}
"""The parameters of each direction, in the order of a head."""


@functools.lru_cache(4096)
def parameters(spec: AttentionSpec, config: KernelConfig) -> tuple[Parameter, ...]:
    """The parameters of the text of (spec, config), in their order."""
    merged = text_of(spec, config) is not None
    found: dict[str, Parameter] = {}
    for each in TABLES[spec.direction]:
        condition = each.written if merged and each.written is not None else each.given
        if condition(spec, config):
            found.setdefault(each.name, each)
    return tuple(found.values())


def given(spec: AttentionSpec, config: KernelConfig) -> tuple[Parameter, ...]:
    """The parameters that the kernel of (spec, config) is given a value of."""
    return tuple(each for each in TABLES[spec.direction] if each.given(spec, config))


@functools.lru_cache(4096)
def absent(spec: AttentionSpec, config: KernelConfig) -> frozenset[str]:
    """The arguments that are None to the kernel of (spec, config)."""
    rows = (each.name for each in parameters(spec, config) if not each.constant)
    return frozenset(rows) - {each.name for each in given(spec, config)}


def head(name: str, found: Iterable[Parameter], language: str = "tl") -> str:
    """The decorator of a kernel and its def, whose parameters are these. language: tl, or gl."""
    decorator = "@gluon.jit" if language == "gl" else "@triton.jit"
    rows = tuple(found)
    lines = [f"{decorator}(", "    do_not_specialize=["]
    lines += [f'        "{each.name}",' for each in rows if not each.specialized]
    lines += ["    ]", ")", f"def {name}("]
    for each in rows:
        kind = f": {language}.constexpr" if each.constant else ""
        lines += [f"    # {each.heading}"] * bool(each.heading)
        lines.append(f"    {each.name}{kind},{each.comment}")
    return "\n".join([*lines, "):"])
