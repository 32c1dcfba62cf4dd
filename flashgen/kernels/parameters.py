"""The parameters of kernels: one table for each direction, in the order of a kernel's head.

Heads (kernels/head.py), signatures (kernels/signature.py), constants (kernels/constants.py) and
launches (kernels/plan.py) follow from the rows.
"""

from __future__ import annotations

import functools

# fmt: off
# isort: off
from flashgen.kernels.conditions import (
    Condition, ahead, always, ampere, any_dim, blackwell, block_mask, both, by_page, described,
    diagonal, either, fa1, fused, handed_out, hopper, has_parts, indexed, keeps_ds, may_pack,
    may_page, narrow, negated, of_feature, of_segments, on_for, one_length, packed_blocks, paged,
    plain, pointer, rotary, runs_ahead, specialized, stores_ds, tiled, varlen,
)
# isort: on
# fmt: on

from flashgen.kernels.head import Parameter, begun, constant, number, rows
from flashgen.schedules.config import KernelConfig
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.features import FEATURES
from flashgen.spec.vocabulary import Direction

# Groups of rows.

_OF_V = ("v", "o", "do", "dv", "new_v")
_BLOCKS = "Descriptors of (batch, heads, seq, head_dim), their blocks [1, 1, rows, padded dim]"
_PACKED_BLOCKS = f"{_BLOCKS}; of\n    # packed sequences, with one dimension of 1 more."
_ROWS = "(batch, heads, seq_q) float32, contiguous"
_PACKED_ROWS = f"{_ROWS}; or packed (heads, total_q)"
_CONTIGUOUS = "float32, contiguous but for count"


def _tensors(*tensors: str, **types: str) -> tuple[Parameter, ...]:
    """Pointers or descriptors of tensors; types: those of pointers, but for {element}."""
    pointers = (
        Parameter(f"{x}_ptr", types.get(x, "*{element}") + ":16", of=pointer) for x in tensors
    )
    descriptors = (
        Parameter(f"{x}_desc", "desc", of=both(described, which), heading=text * (x == tensors[0]))
        for which, text in ((negated(may_pack), f"{_BLOCKS}."), (may_pack, _PACKED_BLOCKS))
        for x in tensors
    )
    return *pointers, *descriptors


def _strides(*tensors: str, of: Condition = pointer) -> tuple[Parameter, ...]:
    """Strides of (batch, heads, seq, dim), or packed (heads, total, dim). Of a cache in pages, from
    one page to the next in place of a batch.
    """
    of_keys = either(one_length, paged)
    return begun(
        Parameter(f"stride_{x}{d}", "i32{by_v}" if x in _OF_V else "i32{by_k}", of=of, given=given)
        for x in tensors
        for d, given in (("b", of_keys if x in "kv" else one_length), ("h", always), ("s", always))
    )


def _between(tensor: str, type_: str = "*{element}") -> tuple[Parameter, ...]:
    """The pointer and the strides of a packed result, beside its descriptor."""
    name, steps = tensor[:-1] + tensor[-1].upper(), "i32{by_v}" if tensor in _OF_V else "i32{by_k}"
    return begun((
        Parameter(f"{tensor}_ptr", type_ + ":16", of=packed_blocks, given=varlen),
        Parameter(f"stride_{tensor}h", steps, of=packed_blocks, given=varlen),
        Parameter(f"stride_{tensor}s", steps, f"packed {name}: 0 between sequences",
                  of=packed_blocks, given=varlen),
    ))  # fmt: skip


def _lse() -> tuple[Parameter, ...]:
    either = (negated(may_pack), _ROWS), (may_pack, _PACKED_ROWS)
    return tuple(rows("lse", f"LSE: {note}", of) for of, note in either)


def _lse_and_delta() -> tuple[Parameter, ...]:
    lse, *deltas = (
        rows("lse"),
        rows("delta", _ROWS, negated(may_pack)),
        rows("delta", _PACKED_ROWS, may_pack),
    )
    return begun((lse, *deltas))


def _scales() -> tuple[Parameter, ...]:
    """The scales of an 8-bit cache."""
    ways = (("p", may_page, both(narrow, by_page)), ("h", always, narrow))
    return (
        Parameter("k_scale_ptr", "*fp32:16", "(kv_heads), or (pages, kv_heads)", given=narrow),
        Parameter("v_scale_ptr", "*fp32:16", given=narrow),
        *(number(f"stride_{x}_scale_{d}", "", of, on) for x in "kv" for d, of, on in ways),
    )


# fmt: off
_HEAD_DIMS = begun(
    Parameter(name, "i32:16", of=both(plain, pointer), given=any_dim)
    for name in ("head_dim", "head_dim_v")
)
_FEATURES = tuple(
    Parameter(each.name, each.type, each.note, each.specialized, of_feature(row.field),
              on_for(row.field, row.value, each.unless_causal),
              first=n == 0 and row.field != "bias")  # which stands with the head dims
    for row in FEATURES
    for n, each in enumerate(row.arguments)
)
_HIDES_KEYS = {
    argument.name for row in FEATURES if row.first_keys for argument in row.arguments
}
_DS = begun((
    Parameter("ds_ptr", "*{element}:16", of=pointer, given=stores_ds),
    Parameter("ds_desc", "desc", of=described, given=stores_ds),
    Parameter("stride_dsh", "i32:16", of=pointer, given=stores_ds),
    Parameter("stride_dss", "i32:16", "dS (1, heads, keys, rows) of a run, in whole tiles",
              of=pointer, given=stores_ds),
))
_HEADS = (number("heads"), number("group", "group: query heads per head of K and V"))
_TOTALS = (
    number("total_q", "", may_pack, varlen),
    number("total_k", "rows and keys of all packed sequences, and of none; of pages, of one",
            may_pack, varlen),
)
_GROUPED = number("heads_together", "heads of a run, of order grouped",
                  given=lambda s, c: c.order == "grouped")
_COUNTER = Parameter("counter_ptr", "*i32:16", "(2) tiles handed out, but for the first of each "
                     "program; programs that ended", of=handed_out, first=True)
_HANDED_OUT = (
    number("batch_heads", "heads of all sequences: of K where programs own keys", handed_out),
    _COUNTER,
)
_SCALE = Parameter("scale_log2e", "fp32", "softmax scale * log2(e), positive", first=True)


def _sizes(longest: str) -> tuple[Parameter, ...]:
    """Heads, lengths and the diagonal. longest: the length that packed sequences are given, of the
    longest.
    """
    note = f"at least 1; {longest} of packed sequences: of the longest"
    return (
        *_HEADS,
        *_TOTALS,
        number("seq_q", "", always, always if longest == "seq_q" else one_length),
        number("seq_k", "at least 1", negated(may_pack)),
        number("seq_k", note, may_pack, always if longest == "seq_k" else one_length),
        number("bottom_right", "1: a sequence's last row is on the diagonal of its last key; "
                "0: the first", may_pack, both(varlen, diagonal)),
        number("diagonal", "row i lies at key i + diagonal: a causal mask ends there, others "
                "count from it", always, both(one_length, diagonal)),
    )


_SEQUENCES = begun((
    Parameter("q_begins_ptr", "*i32", "", False, may_pack, varlen),
    Parameter("q_ends_ptr", "*i32", "", False, may_pack, varlen),
    Parameter("k_begins_ptr", "*i32", "", False, may_pack, varlen),
    Parameter("k_ends_ptr", "*i32", "of packed sequences, int32 or int64", False, may_pack, varlen),
    number("sequences", "how many; q_begins and k_begins have one number more", may_pack, varlen),
))
_TABLE = Parameter("table_ptr", "*i32:16", "(batch, pages of a sequence) int32", of=may_page,
                   given=paged, first=True)
_PAGES = (
    number("stride_table", "", may_page, paged),
    number("page_bits", "log2 of the page size", may_page, paged),
    *(number(f"rows_of_{x}_page", "its stride over that of a row" * (x == "k"),
             both(paged, described)) for x in "kv"),
)
_BLOCK_MASK = (
    Parameter("block_counts_ptr", "*i32:16",
              "(lists, 2) int32: how many whole blocks, how many partial ones", of=block_mask),
    Parameter("blocks_ptr", "*i32:16", "(lists, listed) int32: their numbers", of=block_mask),
    Parameter("block_tiles_ptr", "*i32:16",
              "(lists, listed) int32: which of the tiles says of a partial one", of=block_mask),
    Parameter("tiles_ptr", "*u8:16",
              "(tiles, BLOCK, BLOCK) uint8: queries by keys, 0 where a key may not be seen",
              of=block_mask),
    number("mask_step_b", "from one batch to the next, in units of own_blocks; or 0", block_mask),
    number("mask_step_h", "and from one head to the next", block_mask),
    number("own_blocks", "lists of a head", block_mask),
    number("listed", "", block_mask),
)
_TILE = (
    constant("BR")._replace(first=True), constant("BC"),
    constant("NUM_STAGES", "", plain),
    constant("STAGES", "", specialized),
    constant("NUM_WARPS", "", ampere),
)
_TRUE_DIMS = (
    constant("HEAD_DIM", "", both(plain, pointer)),
    constant("HEAD_DIM_V", "", either(both(plain, pointer), packed_blocks)),
)
_PADDED = (constant("HEAD_DIM_PAD"), constant("HEAD_DIM_V_PAD"))
_IN_PARTS = (
    constant("K_PART", "columns of a part of Q and K", both(has_parts, negated(ampere))),
    constant("K_PARTS", "", has_parts),
    constant("HEAD_DIM_PAD", "", negated(has_parts)),
    constant("V_PART", "columns of a part of V and O", both(has_parts, negated(ampere))),
    constant("O_PARTS", "", has_parts),
    constant("HEAD_DIM_V_PAD", "", negated(has_parts)),
)
_V_PARTS = constant("V_PARTS", "programs that share the columns of V", both(plain, pointer, tiled))
_PRECISION = constant("PRECISION", "of float32 products: ieee, tf32 or None", plain)
_ROWS_OF_EIGHT = constant("ROWS_OF_EIGHT", "", both(plain, pointer, tiled))
_ADDS = constant("ADDS", "bias is added; else masks",
                 both(plain, of_feature("bias")))
_SWITCHES = (
    constant("CAUSAL", "", either(plain, both(either(hopper, blackwell), negated(fused)))),
    _ADDS,
    constant("INVARIANT", "one multiply-add is written so, and tiles lie by position", plain),
    _ROWS_OF_EIGHT,
    _PRECISION,
)
_AHEAD = constant("AHEAD", "dO V^T is issued before P is made of S, so that exp2 runs under it",
                   plain)
_REGISTERS = (
    constant("CONSUMER_REGISTERS", "", hopper), constant("PRODUCER_REGISTERS", "", hopper),
    constant("EXP2_BY_FMA", "of 32 exp2, those that FMA computes", blackwell),
)
_OF_BLACKWELL = tuple(
    constant(x, "", blackwell) for x in ("S_PLACES", "COMPUTE_REGISTERS", "OTHER_REGISTERS")
)

# One table a direction.

_FORWARD = (
    *_tensors("q", "k", "v", "o", k="*{cached}", v="*{cached}", o="*{out}"),
    *_lse(),
    *_strides("q", "k", "v", "o"),
    *_between("o", "*{out}"),
    _SCALE,
    *_sizes("seq_q"),
    *_HEAD_DIMS,
    *_FEATURES,
    *begun((
        number("batch_heads", "", tiled, lambda s, c: c.takes_heads),
        number("heads_together", "batch * heads; heads of a run: their K and V fit in L2", tiled,
               lambda s, c: c.order == "grouped"),
    )),
    _COUNTER,
    *_SEQUENCES, _TABLE, *_PAGES, *_BLOCK_MASK,
    *(rows(x, of=fa1) for x in ("acc", "sum", "max")),
    *_TILE,
    *_TRUE_DIMS,
    *_IN_PARTS,
    constant("SEGMENT", "of an invariant kernel: keys of a partial sum; else None", of_segments),
    _V_PARTS,
    constant("CAUSAL"),
    _ADDS,
    constant("ORDER", "of tiles of O: plain, longest_first, head_reversal, grouped", tiled),
    constant("INVARIANT", "one multiply-add is written so", ampere),
    constant("TURNS", "consumers multiply in turn", hopper),
    constant("PIECES", "of 64 columns of Q and K, or 1 of all", blackwell),
    *(constant(x, "", ahead) for x in ("FREES_FIRST_K", "FEW_REGISTERS", "SUMS_A_LANE")),
    _ROWS_OF_EIGHT,
    _PRECISION,
    *_REGISTERS,
    constant("RESCALE_LOG2", "", blackwell),
    constant("SOFTMAX_REGISTERS", "", blackwell), constant("OTHER_REGISTERS", "", blackwell),
    constant("O_PART", "columns of O that are rescaled at a time", blackwell),
)
_DKV = (
    *_tensors("q", "k", "v", "do", "dk", "dv"),
    *_lse_and_delta(),
    rows("dq", "(batch, heads, seq_q, head_dim) float32, contiguous: takes dQ / scale",
          plain, fused),
    rows("dq", "float32, as many as (batch, heads, whole tiles, padded dim): gets dQ / scale",
          both(fused, negated(plain))),
    *_strides("q", "k", "v", "do", "dk", "dv"),
    *_between("dk"), *_between("dv"),
    *(each._replace(of=both(each.of, keeps_ds)) for each in _DS),
    number("first_block", "of the run", keeps_ds, stores_ds),
    Parameter("scale", "fp32", "of the softmax, positive"),
    Parameter("scale_log2e", "fp32", "scale * log2(e)"),
    *_sizes("seq_k"),
    *_HEAD_DIMS,
    *_FEATURES, _GROUPED, *_HANDED_OUT, *_SEQUENCES, *_BLOCK_MASK,
    *_TILE,
    constant("HEAD_DIM", "", either(plain, packed_blocks)),
    _TRUE_DIMS[1],
    *_PADDED, *_SWITCHES, _AHEAD,
    constant("NEXT_S", "S of the next tile is issued before dQ of this one leaves", runs_ahead),
    *_REGISTERS, *_OF_BLACKWELL,
)
_DQ = (
    *_tensors("q", "k", "v", "do", "dq"),
    *_lse_and_delta(),
    *_strides("q", "k", "v", "do", "dq"),
    *_between("dq"),
    Parameter("scale", "fp32", "of the softmax, with its sign"),
    Parameter("scale_log2e", "fp32", "its size * log2(e); the sign is in Q"),
    *_sizes("seq_q"),
    *_HEAD_DIMS,
    *_FEATURES, _GROUPED, *_HANDED_OUT, *_SEQUENCES, *_BLOCK_MASK,
    *_TILE,
    constant("HEAD_DIM", "", either(both(plain, pointer), packed_blocks)),
    constant("HEAD_DIM_V", "", both(plain, pointer)),
    *_PADDED,
    constant("ORDER", "of the tiles of dQ: plain, longest_first, grouped"),
    *_SWITCHES, _AHEAD, *_REGISTERS, *_OF_BLACKWELL,
)
_DQ_OF_DS = (
    *_tensors("k", "dq"),
    *_strides("k", "dq"),
    *_DS,
    rows("sum", "(heads of the run, seq_q, padded dim) float32: dQ / scale of the keys before"),
    Parameter("scale", "fp32", "of the softmax, with its sign"),
    number("first_head", "of Q in the run"), number("first_key"),
    number("last_key", "keys of the run: from first_key to before last_key"),
    number("keys_follow", "1: dQ is not whole yet, and goes to sum"),
    *_sizes("seq_q"),
    _HEAD_DIMS[0],
    *(each for each in _FEATURES if each.name in _HIDES_KEYS),
    *_SEQUENCES,
    constant("BR")._replace(first=True), constant("BC"), constant("NUM_STAGES"),
    constant("HEAD_DIM", "", pointer), constant("HEAD_DIM_PAD"),
    constant("ORDER", "of the tiles of dQ: plain or longest_first"),
    constant("CAUSAL"), _ROWS_OF_EIGHT, _PRECISION,
)
_DBIAS = (
    *_tensors("q", "k", "v", "do")[:4],
    Parameter("dbias_ptr", "*{whole}:16", "(batches, heads, rows, keys) of the gradient"),
    *_lse_and_delta(),
    *_strides("q", "k", "v", "do"),
    _SCALE,
    *_sizes("seq_q"),
    *_HEAD_DIMS,
    *_FEATURES,
    number("dbias_rows", "rows of the gradient: seq_q, or BR where the bias has one for all"),
    number("dbias_keys", "seq_k, or BC where the bias has one key for all"),
    number("row_tiles", "tiles of the gradient"), number("key_tiles"),
    number("head_tiles", "heads of the gradient"),
    number("row_steps", "tiles of dS that add to one of the gradient, by dimension"),
    *(number(f"{x}_steps") for x in ("key", "head", "batch")),
    *_TILE, *_TRUE_DIMS, *_PADDED,
    *_SWITCHES,
)
_DELTA = (
    *_tensors("o", "do")[:2],
    rows("dlse", "(batch, heads, seq_q) float32; not read where dlse_rows is 0"),
    rows("delta", _ROWS),
    *_strides("o", "do"),
    *(number(f"stride_dl{dim}") for dim in "bhs"),
    number("heads"), number("seq_q"),
    number("dlse_rows", "seq_q, or 0 where LSE has no gradient"),
    _HEAD_DIMS[1],
    constant("BR"), constant("HEAD_DIM_V"), constant("HEAD_DIM_V_PAD"),
    _ROWS_OF_EIGHT,
)
_CACHE = (
    _TABLE,
    Parameter("rows_ptr", "*i32:16", "(batch) int32, the row of the cache that is each sequence's",
              given=indexed),
)
_DECODE = (
    *_tensors("q", "k", "v", k="*{cached}", v="*{cached}")[:3],
    Parameter("o_ptr", "*{whole}:16", "of q's type where there is one split, else float32"),
    rows("lse", "(splits, batch, heads, seq_q); invariant: (splits, 2, ...), maximum and sum"),
    Parameter("lengths_ptr", "*i32:16", "(batch) int32, keys of each sequence", given=one_length),
    *_SEQUENCES,
    *_CACHE,
    Parameter("leftpad_ptr", "*i32:16", "(batch) int32, the place of each sequence's first key",
              given=lambda s, c: s.leftpad),
    *_scales(),
    *_strides("q", "k", "v", "o"),
    Parameter("stride_part", "i32{by_v}", "of O, from one split to the next"),
    number("stride_lse", "of LSE, likewise"),
    *_PAGES,
    _SCALE,
    *_HEADS,
    *_TOTALS, number("seq_q", "of packed sequences: of the longest, at least 1"),
    number("seq_k", "keys that a sequence has room for", always, one_length), number("splits"),
    *_HEAD_DIMS,
    *_FEATURES,
    *_TILE, *_TRUE_DIMS, *_IN_PARTS, _V_PARTS,
    constant("SEGMENT", "keys of an invariant split; or None"),
    constant("SPLIT_TILES", "tiles that a split has at least"),
    constant("BY_BITS", "float8_e4m3 is widened by arithmetic on bits"),
    constant("PDL", "the combine kernel may start"),
    *_SWITCHES,
)
_COMBINE = (
    rows("part_o", f"(count, batch, heads, seq_q, head_dim_v) {_CONTIGUOUS}"),
    rows("part_lse", "(count, batch, heads, seq_q); invariant: (count, 2, ...), maximum and sum"),
    Parameter("o_ptr", "*{out}:16"),
    rows("lse", _ROWS),
    Parameter("stride_part", "i32{by_v}"),
    number("stride_lse"),
    *_strides("o"),
    number("heads"), number("seq_q"), number("count"),
    _HEAD_DIMS[1],
    constant("BC"), constant("HEAD_DIM_V"), constant("HEAD_DIM_V_PAD"),
    constant("INVARIANT", "parts join one by one, in the order of their keys"),
    constant("PDL", "it starts before the decode kernel ends"),
)
_APPEND = (
    *_tensors("new_k", "new_v")[:2],
    *_tensors("k", "v", k="*{cached}", v="*{cached}")[:2],
    Parameter("q_ptr", "*{element}:16", given=rotary),
    Parameter("o_ptr", "*{out}:16", "q, rotated", given=rotary),
    Parameter("lengths_ptr", "*i32:16", "(batch) int32, keys of each sequence before"),
    *_CACHE,
    *_scales(),
    Parameter("cos_ptr", "*fp32:16", "(positions, rotary_dim / 2)", given=rotary),
    Parameter("sin_ptr", "*fp32:16", given=rotary),
    *_strides("new_k", "new_v", "k", "v"),
    # O is Q, rotated
    *(Parameter(f"stride_{x}{dim}", "i32{by_k}", given=rotary) for x in "qo" for dim in "bhs"),
    *_PAGES,
    number("stride_cos", "", always, rotary), number("stride_sin", "", always, rotary),
    number("heads", "of Q, where it is rotated; else 0"), number("kv_heads"), number("new_keys"),
    number("seq_k", "keys that a sequence has room for"),
    number("pool_pages", "", may_page, paged),
    number("cache_rows", "", always, indexed),
    number("seq_q", "", always, rotary),
    number("rotary_dim", "elements of a head that are rotated", always, rotary),
    number("q_step", "1: query i is at place length + i; 0: all are at place length", always,
            rotary),
    *_HEAD_DIMS,
    constant("BR"),
    constant("HEAD_DIM"), constant("HEAD_DIM_V"),
    *_PADDED,
    constant("ROTARY", "halves or interleaved; or None"),
    constant("NARROW", "what an 8-bit cache holds: int8 or float8_e4m3; or None"),
)
# fmt: on
TABLES: dict[Direction, tuple[Parameter, ...]] = {
    "forward": _FORWARD,
    "backward_delta": _DELTA,
    "backward_dkv": _DKV,
    "backward_fused": _DKV,
    "backward_dq": _DQ,
    "backward_dbias": _DBIAS,
    "backward_ds": _DKV,
    "backward_dq_of_ds": _DQ_OF_DS,
    "decode": _DECODE,
    "combine": _COMBINE,
    "append": _APPEND,
}
"""The parameters of each direction, in the order of a head."""


@functools.lru_cache(4096)
def parameters(spec: AttentionSpec, config: KernelConfig) -> tuple[Parameter, ...]:
    """The parameters of the text of (spec, config), in their order."""
    found: dict[str, Parameter] = {}
    for each in TABLES[spec.direction]:
        if each.of(spec, config):
            found.setdefault(each.name, each)
    return tuple(found.values())


def given(spec: AttentionSpec, config: KernelConfig) -> tuple[Parameter, ...]:
    """The parameters that the kernel of (spec, config) is given a value of."""
    table = TABLES[spec.direction]
    return tuple(each for each in table if each.of(spec, config) and each.given(spec, config))


@functools.lru_cache(4096)
def absent(spec: AttentionSpec, config: KernelConfig) -> frozenset[str]:
    """The arguments that are None to the kernel of (spec, config)."""
    names = (each.name for each in parameters(spec, config) if not each.constant)
    return frozenset(names) - {each.name for each in given(spec, config)}
