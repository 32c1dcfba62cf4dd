"""The specs and configs that are proven: each feature alone, in every direction and both masks; and in
pairs, so that every two features, dtypes, masks, ways to load and head dims that may go together do
so in at least one kernel. docs/support.md is made of these.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

from flashgen.errors import InvalidArgument
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.config import KernelConfig
from flashgen.spec.gpu import TARGETS
from flashgen.spec.legality import why_illegal
from flashgen.spec.vocabulary import FEATURE_WORDS, KV_WORDS
from tests.covering import Row, covering

H200 = TARGETS["nvidia_h200"]
ON_OFF = (False, True)

ATTENTION: dict[str, tuple[Any, ...]] = {
    "direction": ("forward", "backward_dkv", "backward_dq", "backward_fused", "backward_dbias"),
    "dtype": ("float16", "bfloat16", "float32", "tf32"),
    "dims": ((32, 32), (24, 40)),
    "mask": ("none", "causal"),
    "bias": ("none", "additive", "boolean"),
    "alibi": ON_OFF,
    "dropout": ON_OFF,
    "window": ON_OFF,
    "softcap": ON_OFF,
    "sink": ON_OFF,
    "varlen": ON_OFF,
    "paged": ON_OFF,
    "block_mask": ON_OFF,
    "fp8": ON_OFF,
    "loads": ("pointer", "descriptor"),
    "order": ("plain", "longest_first", "head_reversal", "grouped"),
    "persistent": ON_OFF,
}
"""Factors of attention() and its backward, which has no keys in pages."""
CACHE: dict[str, tuple[Any, ...]] = {
    "direction": ("decode", "append"),
    "dtype": ("float16", "bfloat16", "float32", "tf32"),
    "dims": ((32, 32), (24, 40)),
    "mask": ("none", "causal"),
    "bias": ("none", "additive", "boolean"),
    "alibi": ON_OFF,
    "window": ON_OFF,
    "softcap": ON_OFF,
    "sink": ON_OFF,
    "paged": ON_OFF,
    "rotary": ("none", "halves", "interleaved"),
    "indexed": ON_OFF,
    "leftpad": ON_OFF,
    "kv_dtype": ("same", "float8_e4m3", "int8"),
    "kv_scales": ("head", "page"),
}
"""Factors of the kernels that serve a cache."""
ALONE: tuple[Row, ...] = tuple({field: value} for field, value in FEATURE_WORDS.values())
"""What of a spec each feature of --feature sets."""
PACKED_PAGES: Row = {"varlen": True, "paged": True}
ALONE_IN_A_CACHE: tuple[Row, ...] = (
    {"paged": True},
    {"rotary": "halves"},
    {"rotary": "interleaved"},
    {"indexed": True},
    {"leftpad": True},
    *(
        {"kv_dtype": dtype, "kv_scales": scales, "paged": scales == "page"}
        for dtype, scales in KV_WORDS.values()
    ),
)
Proven = tuple[AttentionSpec, KernelConfig]


def spec_of(row: Row) -> AttentionSpec:
    """The spec that a row describes. Raises InvalidArgument where there is none."""
    of_spec = row.keys() - {"dims", "loads", "order", "persistent"}
    fields = {name: row[name] for name in of_spec}
    if fields["dtype"] == "tf32":
        fields |= {"dtype": "float32", "precision": "tf32"}
    return AttentionSpec(head_dim=row["dims"][0], head_dim_v=row["dims"][1], **fields)


def config_of(row: Row) -> KernelConfig:
    """A small tile: the interpreter pays for every one."""
    copies = row["direction"] == "append"  # no product, no loop
    return KernelConfig(
        br=16,
        bc=16 if copies else 32,
        num_warps=4,
        num_stages=1 if copies else 2,
        loads=row.get("loads", "pointer"),
        order=row.get("order", "plain"),
        persistent=row.get("persistent", False),
    )


def valid(row: Row) -> bool:
    """Whether flashgen has a kernel of the row."""
    try:
        spec = spec_of(row)
    except InvalidArgument:
        return False
    return why_illegal(spec, config_of(row), H200) is None


@functools.cache
def in_pairs() -> tuple[Proven, ...]:
    """The covering arrays: of the forward, of all backward kernels together, of a cache. Each is
    checked by tests/interpreted/kernels/test_pairs.py.
    """
    forward, *backward = ATTENTION["direction"]
    of_gradients = {name: values for name, values in ATTENTION.items() if name != "paged"}
    rows = [
        *covering({**ATTENTION, "direction": (forward,)}, valid),
        *covering({**of_gradients, "direction": tuple(backward)}, valid),
        *(
            row
            for direction in CACHE["direction"]
            for row in covering({**CACHE, "direction": (direction,)}, valid)
        ),
    ]
    return tuple((spec_of(row), config_of(row)) for row in rows)


@functools.cache
def alone() -> tuple[Proven, ...]:
    """Each feature by itself, and no feature, in every direction and mask that have it; the dtypes
    take turns. Checked by the same tests.
    """
    found: dict[Proven, None] = {}
    turns = itertools.cycle(ATTENTION["dtype"][:3])
    for factors, fields in ((ATTENTION, (*ALONE, PACKED_PAGES)), (CACHE, ALONE_IN_A_CACHE)):
        everywhere = ({}, *fields, *(ALONE if factors is CACHE else ()))
        for direction, field, mask in itertools.product(
            factors["direction"], everywhere, factors["mask"]
        ):
            row = {"direction": direction, "dims": (32, 32), "mask": mask, **field}
            if direction == "backward_dbias" and "bias" not in field:
                row["bias"] = "additive"
            if valid({"dtype": "float16", **row}):
                row["dtype"] = next(turns)
                if not valid(row):  # 8 bits beside float32
                    row["dtype"] = "bfloat16"
                found[spec_of(row), config_of(row)] = None
    return tuple(found)
