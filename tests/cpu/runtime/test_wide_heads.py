"""Head dims above 256: which configs there are, where the kernels come from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from flashgen.errors import InvalidArgument
from flashgen.estimate.trip_counts import grid
from flashgen.runtime import autograd
from flashgen.runtime.call import Call
from flashgen.schedules.defaults import default_config, default_spec, specs_with_default
from flashgen.schedules.grid_rules import row_tiles
from flashgen.schedules.legality import why_illegal
from flashgen.schedules.space import legal_configs, seed_configs
from flashgen.spec.gpu import TARGETS
from flashgen.spec.problem import Problem
from flashgen.table.entry import NO_EVIDENCE
from flashgen.table.table_file import dump, parse
from tests.cpu.compile.test_decode_compiles import ARCHS, Job, assert_all_fit
from tests.cpu.runtime.test_decode import DISPATCHER
from tests.makers import make_config, make_spec
from tests.tables import made_entry, made_table

H200 = TARGETS["nvidia_h200"]
WIDE = make_spec("bfloat16", 512, "causal")


@pytest.mark.parametrize("gpu", TARGETS.values(), ids=lambda gpu: gpu.slug)
def test_defaults_are_legal_everywhere(gpu: object) -> None:
    for dtype in ("float16", "float32"):
        for direction in ("forward", "decode", "combine", "append"):
            spec = default_spec(make_spec(dtype, 264, direction=direction, head_dim_v=128))
            assert (spec.head_dim, spec.head_dim_v) == (512, 512)
            assert why_illegal(spec, default_config(spec), gpu) is None  # type: ignore[arg-type]


def test_the_space_has_v_in_parts_where_it_is_wide() -> None:
    configs = legal_configs(WIDE, H200)
    assert {config.v_parts for config in configs} >= {2, 4}
    assert seed_configs(WIDE, H200)[-1].v_parts in (1, 2, 4)
    assert default_config(WIDE).v_parts == 2
    decode = WIDE.for_direction("decode")
    assert {config.v_parts for config in legal_configs(decode, H200)} >= {2, 4}
    narrow = make_spec("bfloat16", 128, "causal")
    assert {config.v_parts for config in legal_configs(narrow, H200)} == {1}


@pytest.mark.parametrize("gpu", ["nvidia_h200", "nvidia_l4"])
@pytest.mark.parametrize("direction", ["backward_dkv", "backward_dq", "backward_fused"])
def test_the_space_of_a_gradient_has_warps_that_share_columns(direction: Any, gpu: str) -> None:
    configs = legal_configs(WIDE.for_direction(direction), TARGETS[gpu])
    assert {4, 8} <= {config.num_warps for config in configs if min(config.br, config.bc) == 16}


@pytest.mark.parametrize(
    ("spec", "config", "what"),
    [
        (WIDE, make_config(32, 32, v_parts=2, loads="descriptor"), "v_parts needs"),
        (WIDE, make_config(32, 32, v_parts=2, schedule="s_ahead"), "v_parts needs"),
        (make_spec(head_dim=64).for_direction("backward_dq"), make_config(32, 32, v_parts=2), "v_parts needs"),
        (make_spec(head_dim=64), make_config(32, 32, v_parts=2), "a part of V has 64 columns at least"),
    ],
)  # fmt: skip
def test_what_has_no_parts(spec: object, config: object, what: str) -> None:
    assert what in (why_illegal(spec, config, H200) or "")  # type: ignore[arg-type]


def test_programs_are_as_many_as_parts() -> None:
    problem = Problem(batch=2, heads=4, kv_heads=2, seq_q=1, seq_k=300)
    one, two = make_config(16, 16), make_config(16, 16, v_parts=2)
    assert row_tiles(two, problem) == 2 * row_tiles(one, problem)
    longer = replace(problem, seq_q=300)
    assert len(grid(WIDE, two, longer, H200, loops=2)) == 2 * len(
        grid(WIDE, one, longer, H200, loops=2)
    )


def test_the_widest_has_listed_defaults() -> None:
    listed = list(specs_with_default())
    assert {WIDE, WIDE.for_direction("decode")} <= set(listed)
    assert {s.direction for s in listed if s.head_dim > 256} == {
        "forward", "decode", "combine", "append", "backward_delta", "backward_dkv", "backward_dq",
    }  # fmt: skip


def test_a_table_keeps_parts() -> None:
    entry = made_entry(spec=WIDE, config=make_config(32, 16, v_parts=4), source="untimed")
    table = made_table(replace(entry, evidence=NO_EVIDENCE))
    assert "_v4 " in dump(table)
    assert parse(dump(table), Path(f"{table.gpu.slug}.yaml")) == table


def test_float32_has_no_backward() -> None:
    wide = make_spec("float32", 512, "causal")
    for direction in ("backward_dkv", "backward_dq", "backward_fused", "backward_delta"):
        assert WIDE.for_direction(direction).head_dim == 512  # type: ignore[arg-type]
        with pytest.raises(
            InvalidArgument, match="above 256 have no backward kernel in float32: got 512"
        ):
            wide.for_direction(direction)  # type: ignore[arg-type]
    q = torch.randn(1, 1, 4, 264, requires_grad=True)
    passes = DISPATCHER.passes.forward, DISPATCHER.passes.backward
    with pytest.raises(InvalidArgument, match="no backward kernel in float32: got 264; detach"):
        autograd.differentiable(passes, Call(causal=True, scale=1.0), q, q, q)
    o = DISPATCHER.attention(q, q, q, causal=True)  # of CPU tensors torch has one
    assert torch.autograd.grad(o.sum(), q)[0].isfinite().all()
    with pytest.raises(InvalidArgument, match="multiple of 8 from 16 to 512"):
        make_spec(head_dim=520)


def jobs_of(dtypes: tuple[str, ...], archs: tuple[str, ...]) -> list[Job]:
    jobs: list[Job] = []
    for dtype in dtypes:
        precision = "tf32" if dtype == "tf32" else "ieee"
        spec = make_spec(
            "float32" if dtype == "tf32" else dtype, 512, "causal", precision=precision
        )
        decode = spec.for_direction("decode")
        paged = replace(decode, paged=True, window=True, sink=True, softcap=True)
        narrow = [] if spec.dtype == "float32" else [replace(decode, kv_dtype="float8_e4m3")]
        packed = replace(spec, varlen=True)
        backward = [
            each.for_direction(direction)
            for each in (spec, packed)
            for direction in ("backward_delta", "backward_dkv", "backward_dq")
            if spec.dtype != "float32"
        ]
        for each in (
            spec,
            packed,
            replace(packed, paged=True),
            *backward,
            decode,
            paged,
            *narrow,
            spec.for_direction("combine"),
            spec.for_direction("append"),
        ):
            if each.precision == "ieee" or each.products:
                jobs += [(each, default_config(each), arch) for arch in archs]
    return jobs


@pytest.mark.slow("make test proves a sample of it")
def test_every_default_fits() -> None:
    """But decode over pages with window, cap and sink, in bfloat16 on gfx942, spills: no such kernel
    ships.
    """
    jobs = jobs_of(("bfloat16", "float32", "tf32"), ARCHS)
    spills = [
        spec.direction == "decode" and spec.featured and (spec.element_bytes, arch) == (2, "gfx942")
        for spec, _, arch in jobs
    ]
    assert sum(spills) == 1
    assert_all_fit([job for job, left_out in zip(jobs, spills, strict=True) if not left_out])
