"""kernel_options of torch's FlexAttention from a table: one set per dtype, head dims, mask and
interval of key lengths.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from flashgen import __version__
from flashgen.schedules.config import SCHEDULES, KernelConfig
from flashgen.schedules.defaults import default_config, default_spec
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.problem import Bucket
from flashgen.table.entry import Entry
from flashgen.table.table import Table

SPARSE_BLOCK = 128
"""The block size of a BlockMask, which the tiles of FlexAttention divide, unless one is given."""


def document(tables: Iterable[Table]) -> str:
    """The options of each table, as JSON. docs/integrations.md has the fields."""
    found = [
        {
            "gpu": {"slug": table.gpu.slug, "name": table.gpu.name, "arch": table.gpu.arch},
            "options": options_of(table),
        }
        for table in tables
    ]
    return json.dumps({"flashgen": __version__, "tables": found}, indent=1)


def options_of(table: Table) -> list[dict[str, Any]]:
    """What each forward entry without features gives, with the backward of the same spec and
    bucket: of its entries, or of the default kernels. Forward entries none of whose configs
    FlexAttention could run are left out.
    """
    by_key = {entry.key: entry for entry in table.entries}
    found = []
    for (spec, bucket), entry in by_key.items():
        config = next((each for each in _configs(entry) if _possible(each)), None)
        if spec.direction != "forward" or spec.featured or config is None:
            continue
        dkv, dq = (
            _config_of(by_key, spec.for_direction(direction), bucket)
            for direction in ("backward_dkv", "backward_dq")
        )
        found.append(
            {
                "dtype": spec.dtype,
                "head_dim": spec.head_dim,
                "head_dim_v": spec.head_dim_v,
                "mask": spec.mask,
                "seq_k": [bucket.low, bucket.high],
                "source": entry.result.source,
                "kernel_options": _forward(config) | _backward(dkv, dq),
            }
        )
    return found


def _config_of(
    by_key: dict[tuple[AttentionSpec, Bucket], Entry], spec: AttentionSpec, bucket: Bucket
) -> KernelConfig:
    """The tile of a backward: the first of its entry that FlexAttention can have, or the
    default's.
    """
    entry = by_key.get((spec, bucket))
    configs = () if entry is None else _configs(entry)
    fits = (each for each in configs if _possible(each) and _divides(spec, each))
    return next(fits, default_config(default_spec(spec)))


def _configs(entry: Entry) -> tuple[KernelConfig, ...]:
    """The winner and the runners-up of an entry."""
    return entry.config, *(each.config for each in entry.evidence.runners_up)


def _possible(config: KernelConfig) -> bool:
    """Whether FlexAttention's kernels can be this: one loop that all warps run, tiles that divide
    the blocks of a BlockMask, and V in one part.
    """
    divides = SPARSE_BLOCK % config.br == 0 and SPARSE_BLOCK % config.bc == 0
    its = SCHEDULES[config.schedule]
    one_loop = not (its.gluon or its.roles or its.state_in_memory)
    return one_loop and divides and config.v_parts == 1


def _divides(spec: AttentionSpec, config: KernelConfig) -> bool:
    """Whether what a program walks divides what it owns, as FlexAttention's backward needs it: M1
    divides N1, and N2 divides M2.
    """
    if spec.direction == "backward_dkv":
        return config.bc % config.br == 0
    return config.br % config.bc == 0


def _forward(config: KernelConfig) -> dict[str, int | bool]:
    options: dict[str, int | bool] = {
        "fwd_BLOCK_M": config.br,
        "fwd_BLOCK_N": config.bc,
        "fwd_num_warps": config.num_warps,
        "fwd_num_stages": config.num_stages,
    }
    return options | ({"fwd_USE_TMA": True} if config.loads == "descriptor" else {})


def _backward(dkv: KernelConfig, dq: KernelConfig) -> dict[str, int | bool]:
    """FlexAttention computes dK, dV and dQ in one kernel, so that warps and stages are shared:
    those of dK and dV, which are most of the work, and the fewer stages.
    """
    return {
        "bwd_BLOCK_M1": dkv.br,
        "bwd_BLOCK_N1": dkv.bc,
        "bwd_BLOCK_M2": dq.br,
        "bwd_BLOCK_N2": dq.bc,
        "bwd_num_warps": dkv.num_warps,
        "bwd_num_stages": min(dkv.num_stages, dq.num_stages),
    }
