"""The specs and configs that are proven: each feature alone, in every direction and both masks; and in
pairs, so that every two features, dtypes, masks, ways to load and head dims that may go together do
so in at least one kernel. docs/features.md is made of these.
"""

from __future__ import annotations

import functools
import itertools
import os
import pickle
from pathlib import Path
from typing import Any

from filelock import FileLock

from flashgen.errors import InvalidArgument
from flashgen.schedules.config import KernelConfig
from flashgen.schedules.legality import why_illegal
from flashgen.schedules.numeric_class import class_tile
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.features import FEATURE_WORDS, FEATURES, KV_WORDS
from flashgen.spec.gpu import TARGETS
from flashgen.spec.vocabulary import Direction
from tests.covering import Row, covering

H200 = TARGETS["nvidia_h200"]
ON_OFF = (False, True)


def _features_of(*directions: Direction) -> dict[str, tuple[Any, ...]]:
    """The fields of a spec that features of these kernels set, each with its values."""
    found: dict[str, tuple[Any, ...]] = {}
    for row in FEATURES:
        if row.directions and not set(row.directions) & set(directions):
            continue
        if row.word or row.directions:
            found[row.field] = (*found.get(row.field, (row.off,)), row.value)
    return found


DIRECTIONS: tuple[Direction, ...] = (
    "forward",
    "backward_dkv",
    "backward_dq",
    "backward_fused",
    "backward_dbias",
)
COMMON: dict[str, tuple[Any, ...]] = {
    "dtype": ("float16", "bfloat16", "float32", "tf32"),
    "dims": ((32, 32), (24, 40)),
    "mask": ("none", "causal"),
}
ATTENTION: dict[str, tuple[Any, ...]] = {
    "direction": DIRECTIONS,
    **COMMON,
    **_features_of(*DIRECTIONS),
    "loads": ("pointer", "descriptor"),
    "order": ("plain", "longest_first", "head_reversal", "grouped"),
    "persistent": ON_OFF,
}
"""Factors of attention() and its backward, which has no keys in pages."""
CACHE: dict[str, tuple[Any, ...]] = {
    "direction": ("decode", "append"),
    **COMMON,
    **_features_of("decode", "append"),
}
"""Factors of the kernels that serve a cache."""
ALONE: tuple[Row, ...] = tuple({row.field: row.value} for row in FEATURE_WORDS.values())
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
    """A small tile for short sequences; the interpreter pays for every tile, and a block mask's
    sequences are long. An invariant kernel has that of its class.
    """
    if row.get("invariant", False):
        br, bc, num_warps, _ = class_tile(spec_of(row))
        return KernelConfig(
            br=br, bc=bc, num_warps=num_warps, num_stages=2, loads=row.get("loads", "pointer"),
            order=row.get("order", "plain"), persistent=row.get("persistent", False),
        )  # fmt: skip
    copies = row["direction"] == "append"  # no product, no loop
    blocks = row.get("block_mask", False)
    return KernelConfig(
        br=64 if blocks else 16,
        bc=64 if blocks else 16 if copies else 32,
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
    checked by tests/interpreted/kernels/test_pairs.py. A run searches for them once: that takes
    seconds, and every worker collects all tests.
    """
    if "TESTS_CACHE" not in os.environ:
        return _found()
    file = Path(os.environ["TESTS_CACHE"]) / "pairs.pickle"
    with FileLock(f"{file}.lock"):
        if not file.exists():
            file.write_bytes(pickle.dumps(_found()))
        found: tuple[Proven, ...] = pickle.loads(file.read_bytes())
    return found


def _found() -> tuple[Proven, ...]:
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
