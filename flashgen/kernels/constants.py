"""What a kernel is compiled for: its tl.constexpr parameters, which follow the runtime arguments,
and those of the arguments that are None.

Like arguments, they go by name: numbers() gives every number that a text may take, and a kernel
takes those that its arg_names list.
"""

from __future__ import annotations

from collections.abc import Sequence

from flashgen.kernels.parameters import absent
from flashgen.spec import numeric_class
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.config import (
    TENSOR_ROWS,
    KernelConfig,
    k_pieces,
    rows_of_eight,
    s_places,
    walked_side,
)
from flashgen.spec.vocabulary import padded
from flashgen.spec.whole_rows import k_parts, o_parts

SOFTMAX_SPLIT = {(2, 1): (184, 48), (2, 3): (184, 56), (1, 1): (232, 48)}
"""Registers of a thread of schedule blackwell, of softmax and of the warps that multiply and load,
by row tiles and pieces of Q and K; the warps that rescale O take what is left. Others were seen to
spill in loops over keys (Triton 3.7.1, sm_100)."""
HALVES_SPLIT = (224, 48)
"""The same of its backward: the first of the two warpgroups that compute takes what is left. With
184 the second spills."""
WIDE_SPLIT = (192, 96)
"""The same of dQ of head dim 256: with 48 and 64 the warp that multiplies spills."""
FUSED_SPLIT = (152, 64)
"""The same of its fused backward, where the warps that add dQ to memory take what is left."""


Constant = int | str | bool | None
"""What a text may be compiled for."""


def constants_of(
    spec: AttentionSpec, config: KernelConfig, arg_names: Sequence[str]
) -> dict[str, Constant]:
    """What a kernel with these parameters is compiled for, in their order: its numbers, and None
    for every parameter that it has no use for.
    """
    known: dict[str, Constant] = {**numbers(spec, config)}
    known |= dict.fromkeys(absent(spec, config))
    return {name: known[name] for name in arg_names if name in known}


def numbers(spec: AttentionSpec, config: KernelConfig) -> dict[str, Constant]:
    """Every number that the text of (spec, config) may take as a constant, by name.

    NUM_STAGES is what tl.range takes, STAGES the places of a ring in Gluon. HEAD_DIM and HEAD_DIM_V
    are the true head dims; the _PAD ones are powers of two, that of V of the columns that a program
    has; K_PART and V_PART are the columns of one part of a product.
    """
    found: dict[str, Constant] = {
        "BR": config.br,
        "BC": config.bc,
        "NUM_STAGES": config.num_stages,
        "STAGES": config.num_stages,
        "NUM_WARPS": config.num_warps,
        "HEAD_DIM": spec.head_dim,
        "HEAD_DIM_V": spec.head_dim_v,
        "HEAD_DIM_PAD": padded(spec.head_dim),
        "HEAD_DIM_V_PAD": padded(spec.head_dim_v) // config.v_parts,
        "K_PART": k_parts(spec, config)[0],
        "K_PARTS": len(k_parts(spec, config)),
        "V_PART": o_parts(spec, config)[0],
        "O_PARTS": len(o_parts(spec, config)),
        "V_PARTS": config.v_parts,
        "SPLIT_TILES": config.split_keys // config.bc,
        "SEGMENT": numeric_class.SEGMENT if spec.invariant else None,
        "PERSISTENT": config.persistent,
        "NEXT_S": config.next_s,
        "CAUSAL": spec.causal,
        "ADDS": spec.bias == "additive",
        "INVARIANT": spec.invariant,
        "ORDER": config.order,
        "PRECISION": spec.precision if spec.dtype == "float32" else None,
        "BY_BITS": spec.kv_dtype == "float8_e4m3" and config.widening == "bits",
        "ROWS_OF_EIGHT": rows_of_eight(spec, config),
        "ROTARY": spec.rotary if spec.rotary != "none" else None,
        "NARROW": spec.kv_dtype if spec.kv_dtype != "same" else None,
        **_habits(spec, config),
    }
    if config.schedule == "hopper":
        computes, loads = config.register_split
        found |= {"CONSUMER_REGISTERS": computes, "PRODUCER_REGISTERS": loads}
    if config.schedule == "blackwell" and spec.direction != "forward":
        computes, others = HALVES_SPLIT
        if spec.direction == "backward_fused":
            computes, others = FUSED_SPLIT
        elif walked_side(spec) < TENSOR_ROWS:
            computes, others = WIDE_SPLIT
        found |= {"COMPUTE_REGISTERS": computes, "OTHER_REGISTERS": others}
        found |= {"EXP2_BY_FMA": config.exp2_by_fma, "S_PLACES": s_places(spec)}
    elif config.schedule == "blackwell":
        softmax, others = SOFTMAX_SPLIT[config.row_tiles, k_pieces(spec)]
        found |= {"SOFTMAX_REGISTERS": softmax, "OTHER_REGISTERS": others}
        # Columns of O that are rescaled at a time: with 64 of two tiles of 128, the warp's number
        # is loaded from the stack for every tile of keys, 1 % of the loop.
        found["O_PART"] = 32 if config.row_tiles == 2 and padded(spec.head_dim_v) > 64 else 64
        found |= {"EXP2_BY_FMA": config.exp2_by_fma, "RESCALE_LOG2": config.rescale_log2}
        found["PIECES"] = k_pieces(spec)
    return found


def _habits(spec: AttentionSpec, config: KernelConfig) -> dict[str, Constant]:
    """What schedule s_ahead needs for three stages of 128 keys at head dim 128, for fewer shuffles
    at 256, and to fit into maxnreg, seen in the SASS of sm_90 (Triton 3.7.1, TMA, operands of 16
    bits). Elsewhere the same lines cost instructions, or the overlap of exp2.
    """
    by_wgmma = config.loads == "descriptor" and spec.element_bytes == 2
    few = by_wgmma and config.maxnreg > 0
    wide = by_wgmma and padded(spec.head_dim) == padded(spec.head_dim_v) == 256
    return {
        "FREES_FIRST_K": by_wgmma and padded(spec.head_dim) == 128 and config.bc == 128,
        "FEW_REGISTERS": few,
        # Invariant lanes add a row up in one way everywhere.
        "SUMS_A_LANE": not spec.invariant and (few or wide),
    }
