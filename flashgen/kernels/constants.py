"""What a kernel is compiled for: its tl.constexpr parameters, which follow the runtime arguments,
and those of the arguments that are None.

Like arguments, they go by name: numbers() gives every number that a text may take, and a kernel
takes those that its arg_names list.
"""

from __future__ import annotations

from collections.abc import Sequence

from flashgen.kernels.parameters import absent
from flashgen.schedules import numeric_class
from flashgen.schedules.config import SCHEDULES, KernelConfig, rows_of_eight
from flashgen.schedules.whole_rows import k_parts, o_parts
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.vocabulary import padded

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
    return {
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
        "CAUSAL": spec.causal,
        "ADDS": spec.bias == "additive",
        "INVARIANT": spec.invariant,
        "ORDER": config.order,
        "AHEAD": SCHEDULES[config.schedule].ahead,
        "PRECISION": spec.precision if spec.dtype == "float32" else None,
        "BY_BITS": spec.kv_dtype == "float8_e4m3" and config.widening == "bits",
        "ROWS_OF_EIGHT": rows_of_eight(spec, config),
        "PDL": config.pdl,
        "ROTARY": spec.rotary if spec.rotary != "none" else None,
        "NARROW": spec.kv_dtype if spec.kv_dtype != "same" else None,
        **SCHEDULES[config.schedule].switches(spec, config),
    }
