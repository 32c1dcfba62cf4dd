"""Gradients by dS in memory, in plain Triton: what the check says of both kernels, runs, mutants."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from flashgen.evaluate.check_attention import attention_trial
from flashgen.kernels.ds_runs import DsRun, runs_of
from flashgen.kernels.launch import bind
from flashgen.kernels.launch_ds import ds_sizes, gradients_in_runs
from flashgen.kernels.loader import load_kernel
from flashgen.kernels.plan import Plan
from flashgen.kernels.render import render
from flashgen.reference import gradients
from flashgen.reference.cases import CheckCase
from flashgen.schedules.config import KernelConfig
from flashgen.schedules.legality import why_illegal
from flashgen.spec.attention import AttentionSpec
from flashgen.spec.gpu import TARGETS
from flashgen.spec.problem import Problem
from flashgen.spec.vocabulary import OF_DS
from tests.makers import make_config, make_spec
from tests.proving import mutant_passes, prove

pytestmark = pytest.mark.filterwarnings(
    "ignore::RuntimeWarning"
)  # log2(0) of rows that see nothing

WAYS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "causal": ("float16", "causal", {}),
    "tf32": ("float32", "none", {"precision": "tf32"}),
    "window and dropout": ("bfloat16", "none", {"window": True, "dropout": True}),
    "chunk and packed": ("bfloat16", "causal", {"chunk": True, "varlen": True}),
}


@pytest.mark.parametrize("direction", OF_DS)
@pytest.mark.parametrize("way", WAYS)
def test_the_check_passes(way: str, direction: Any, seed: int) -> None:
    dtype, mask, features = WAYS[way]
    loads: Any = "pointer" if "varlen" in features else "descriptor"
    spec = make_spec(dtype, 40, mask, head_dim_v=24, **features).for_direction(direction)
    prove(spec, make_config(32, 16, loads=loads), seed, step=2)


def plan_of(folder: Path, spec: AttentionSpec, config: KernelConfig) -> Plan:
    rendered = render(spec, config)
    path = folder / f"{rendered.name}.py"
    path.write_text(rendered.source)
    return bind(load_kernel(path, rendered.text_name, rendered.name), spec, config)


@pytest.mark.parametrize(("keys", "runs"), [(200, 2), (128, 4)])
def test_runs_of_heads_and_of_keys_have_the_bits_of_one_run(
    keys: int, runs: int, tmp_path: Path
) -> None:
    spec = make_spec("bfloat16", 32, "causal", direction="backward_ds")
    its = spec.for_direction("backward_dq_of_ds")
    dkv = plan_of(tmp_path, spec, make_config(32, 64))
    dq = plan_of(tmp_path, its, make_config(64, 32))
    problem = Problem(batch=1, heads=4, kv_heads=2, seq_q=150, seq_k=200)
    trial = attention_trial(spec, CheckCase(problem=problem), 0, "cpu")
    of, found = ds_sizes(trial.call), []
    run = DsRun(first_head=0, heads=of.group, keys=keys)
    most = of.run_bytes(run)
    assert len(runs_of(of, most)) == runs
    assert runs_of(of, most // 4) == ()
    for limit in (1 << 40, most):
        memory = torch.full((min(limit, 1 << 20),), 0xFF, dtype=torch.uint8)
        found.append(gradients_in_runs(trial.call, runs_of(of, limit), memory, dkv, dq))
    assert all(map(torch.equal, *found))
    inputs = trial.compare.keywords["inputs"]  # type: ignore[attr-defined]
    assert gradients.judge("backward_fused", found[0], inputs).passed


def test_what_has_no_ds_says_so() -> None:
    spec = make_spec("bfloat16", 64, direction="backward_ds")
    wide = why_illegal(spec, make_config(64, 256), TARGETS["nvidia_h200"])
    assert wide is not None
    assert "whole tiles of 128 rows and keys" in wide
    other = why_illegal(
        spec, make_config(64, 64, schedule="auto", loads="descriptor"), TARGETS["nvidia_h200"]
    )
    assert other == (
        "direction backward_ds has schedules fa2, s_ahead, hopper and blackwell alone: got auto"
    )


DKV = make_spec("bfloat16", 32, "causal").for_direction("backward_ds")
DQ = make_spec("bfloat16", 32, "causal").for_direction("backward_dq_of_ds")
PACKED = replace(DQ, varlen=True)
MUTANTS: dict[str, tuple[AttentionSpec, str, str]] = {
    "dS of another head": (DKV, "(ds_head + member).to(tl.int64)", "ds_head.to(tl.int64)"),
    "P in place of dS": (DKV, "pairs = ds_t.reshape", "pairs = p_t.to(q.dtype).reshape"),
    "the first rows of all": (DKV, "ds_base + row_start // BR * BR", "ds_base"),
    "rows of another eight": (DKV, "(tl.arange(0, BR // 8) * 8)", "(tl.arange(0, BR // 8) * 4)"),
    "keys of another eight": (DKV, "(n // 8 * 16 + n % 8)", "(n // 8 * 8 + n % 8)"),
    "eight keys again": (DKV, "(tl.arange(0, 2) * (8 * stride_dss))", "(tl.arange(0, 2) * stride_dss)"),
    "dQ unscaled": (DQ, "dq *= scale", "dq *= 1.0"),
    "a tile of keys too few": (DQ, "row_start + BR + diagonal + right, key_end)", "row_start + diagonal + right, key_end)"),
    "the head of K is that of Q": (DQ, "kv_head = head // group", "kv_head = head % 2"),
    "heads of one batch": (DQ, "batch_head = first_head + ds_head", "batch_head = ds_head % heads"),
    "keys of no sequence": (PACKED, "in_k = start + keys < seq_k", "in_k = start + keys < seq_k + BC"),
    "dS of one sequence": (PACKED, "ds_head.to(tl.int64) * stride_dsh", "0 * ds_head.to(tl.int64)"),
}  # fmt: skip


@pytest.mark.slow("a kernel each")
@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_caught(name: str) -> None:
    spec, line, broken = MUTANTS[name]
    config = make_config(32, 32)
    assert mutant_passes(spec, config, line, line)
    assert not mutant_passes(spec, config, line, broken)
